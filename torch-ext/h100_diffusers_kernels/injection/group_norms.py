"""``torch.nn.GroupNorm``: by itself, wherever in a model it stands, and as resnet blocks find theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .. import functional
from ..conditions import group_norm_takes, has_memory_format, is_plain, why_not_taken
from ..differentiation import is_differentiated
from .forward_slot import runs_own_forward
from .injected import Injected, Injection, Parts
from .original import Original, find_class, find_original
from .part import Part
from .snapshot import Glance, Look

_CLASS, _FUNCTION = "torch.nn:GroupNorm", "torch.nn.functional:group_norm"
_FORWARD = f"{_CLASS}.forward"
# What is stood in for where a norm is not called as the module that it is.
ORIGINALS = (_FORWARD, _FUNCTION)


class PlainGroupNorm:
    """A ``torch.nn.GroupNorm`` by what it computes with, without the call of a module."""

    __slots__ = ("bias", "eps", "num_groups", "weight")

    def __init__(
        self, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> None:
        self.num_groups = num_groups
        self.weight = weight
        self.bias = bias
        self.eps = eps

    def __call__(
        self, x: Tensor, channel_bias: Tensor | None = None, activation: str = "none"
    ) -> Tensor:
        return functional.group_norm(
            x, self.num_groups, self.weight, self.bias, self.eps, channel_bias, activation
        )

    def fits(self, x: Tensor) -> bool:
        """Whether x has the channels that the norm takes, and more than one value in a group."""
        if x.dim() < 2 or x.shape[1] % self.num_groups or x.numel() == self.num_groups:
            return False
        channels = x.shape[1:2]
        return (self.weight is None or self.weight.shape == channels) and (
            self.bias is None or self.bias.shape == channels
        )

    def why_not(self, x: Tensor) -> str | None:
        """Why the kernel does not take x, or None."""
        if group_norm_takes(x, self.weight, self.bias):
            return None
        return why_not_taken(x, self.weight, self.bias)


def in_memory_format(x: Tensor) -> Tensor:
    """x, copied if it is in no memory format that the kernel takes, as in PyTorch's own group norm."""
    return x if not is_plain(x) or has_memory_format(x) else x.contiguous()


def group_norm_of(module: Any, injection: Injection, look: Look) -> PlainGroupNorm | str:
    """What a group norm computes with now, or why the kernel does not compute it."""
    if type(module) is not injection.originals[_FORWARD].owner:
        return f"it is a {type(module).__name__} now"  # parametrized, say
    if not injection.originals[_FUNCTION].is_in_use():
        return "group_norm was replaced"
    names = ("num_groups", "weight", "bias", "eps")
    num_groups, weight, bias, eps = (look.see_attribute(module, name) for name in names)
    if not (is_plain(weight) and is_plain(bias)):
        return "it has a sharded or quantized weight"
    if type(num_groups) is not int or num_groups < 1:
        return f"it has {num_groups} groups"
    if not isinstance(eps, float):
        return f"it has an eps of {eps}"
    return PlainGroupNorm(num_groups, weight, bias, eps)


def see_group_norm(
    owner: nn.Module, name: str, injection: Injection, snapshot: Look
) -> PlainGroupNorm | str:
    """The group norm that is now the attribute ``name`` of a module, if its call runs nothing but its
    class's forward, or why it does not."""
    module: Any = snapshot.see_attribute(owner, name)
    if type(module) is not injection.originals[_FORWARD].owner:
        return f"{name}: it is a {type(module).__name__}"
    if not injection.originals[_FORWARD].is_in_use():
        return f"{name}: its class's forward was replaced"
    if not runs_own_forward(module):
        return f"{name}: it has hooks, or another forward than its class's"
    norm = group_norm_of(module, injection, snapshot)
    return f"{name}: {norm}" if isinstance(norm, str) else norm


@dataclass(frozen=True)
class GroupNormModule(Part):
    """The class, without its subclasses."""

    def is_kind_of(self, module: nn.Module) -> bool:
        return type(module) is find_class(self.path)

    def originals(self) -> dict[str, Original]:
        return {path: find_original(path) for path in ORIGINALS}

    def fill(self, parts: Parts, module: nn.Module, injection: Injection, snapshot: Look) -> None:
        norm = group_norm_of(module, injection, snapshot)
        parts.reason = norm if isinstance(norm, str) else None


def _forward(self: nn.Module, injected: Injected, *args: Any, **kwargs: Any) -> Tensor:
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
        return injected.class_forward(self, *args, **kwargs)
    (x,) = args
    norm = group_norm_of(self, injected.injection, Glance())
    if isinstance(norm, str):
        injected.leave(norm)
        return injected.class_forward(self, x)
    if is_differentiated(x, norm.weight, norm.bias):
        return injected.class_forward(self, x)
    if not norm.fits(x):
        return injected.class_forward(self, x)  # which says so
    x = in_memory_format(x)
    reason = norm.why_not(x)
    if reason is not None:
        injected.leave(reason)
        return injected.class_forward(self, x)
    injected.count([])
    return norm(x)


GROUP_NORM = GroupNormModule(_CLASS, "self input", _forward, "group_norm")
