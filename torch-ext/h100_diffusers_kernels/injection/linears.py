"""Linear layers: called as the modules they are, but for those that are nothing but a weight and a bias."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..conditions import is_plain
from .forward_slot import runs_own_forward
from .injected import Injection
from .snapshot import Snapshot

# What a layer's weight is used in the place of.
ORIGINALS = ("torch.nn.functional:linear", "torch.nn:Linear.forward")


class PlainLinear:
    """A ``torch.nn.Linear`` by its weight and bias, without the call of a module."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


def see_linear(
    owner: nn.Module, name: str, injection: Injection, snapshot: Snapshot
) -> Callable[[Tensor], Tensor]:
    """The linear layer that is now the attribute ``name`` of a module: a ``PlainLinear``, or the layer.

    LoRA and quantization put another layer or another kind of weight there, offloading a hook.
    """
    module = snapshot.see_attribute(owner, name)
    if type(module) is not nn.Linear or not runs_own_forward(module):
        return module
    weight = snapshot.see_attribute(module, "weight")
    bias = snapshot.see_attribute(module, "bias")
    is_known = all(injection.originals[path].is_in_use() for path in ORIGINALS)
    if not (is_known and is_plain(weight) and is_plain(bias)):
        return module
    return PlainLinear(weight, bias)
