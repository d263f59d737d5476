"""diffusers' ``GELU``, the linear layer with an activation that opens its feed-forward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .. import functional
from ..conditions import is_plain, kernels_take, of_one_form
from ..differentiation import is_differentiated
from .forward_slot import runs_own_forward
from .injected import Injected, Injection, Parts
from .original import Original, find_original
from .part import Part
from .snapshot import Snapshot

# In float32 the epilogue's approximation of tanh would show.
_EPILOGUE_DTYPES = (torch.bfloat16, torch.float16)
_GELU = "torch.nn.functional:gelu"
_GELU_MODULE = "torch.nn:GELU.forward"
_GELU_METHOD = "diffusers.models.activations:GELU.gelu"
_LINEAR = ("torch.nn.functional:linear", "torch.nn:Linear.forward")
# What the kernels stand in for.
ORIGINALS = (_GELU, _GELU_MODULE, _GELU_METHOD, *_LINEAR)


class LinearGelu:
    """A linear layer, then GELU.

    Attributes:
        approximate: GELU's form; None where something else may follow the linear layer.
        weight, bias: of a linear layer that is nothing but these, else None.
    """

    def __init__(self) -> None:
        self.approximate: str | None = None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def __call__(self, linear: nn.Module, activation: Callable, x: Tensor) -> Tensor:
        """``activation(linear(x))``."""
        if self.weight is not None and self.approximate == "tanh" and self._takes(x):
            # On CUDA the epilogue is the tanh approximation. (On CPU the function's GELU is exact.)
            rows = x.reshape(-1, x.shape[-1])
            out = torch._addmm_activation(self.bias, rows, self.weight.t(), use_gelu=True)
            return out.view(*x.shape[:-1], out.shape[-1])
        x = linear(x)
        if self.approximate is not None and of_one_form(x):
            return functional.gelu(x, self.approximate)
        return activation(x)

    def _takes(self, x: Tensor) -> bool:
        return (
            x.device.type == "cuda"
            and x.dtype in _EPILOGUE_DTYPES
            and kernels_take(x, self.weight, self.bias)
            and x.numel() > 0
            and not is_differentiated(x, self.weight, self.bias)
        )


def _see_linear(
    result: LinearGelu, owner: nn.Module, name: str, injection: Injection, snapshot: Snapshot
) -> None:
    """LoRA and quantization put another layer or another kind of weight there, offloading a hook."""
    module = snapshot.see_attribute(owner, name)
    if type(module) is not nn.Linear or not runs_own_forward(module):
        return
    weight = snapshot.see_attribute(module, "weight")
    bias = snapshot.see_attribute(module, "bias")
    if (
        bias is not None
        and is_plain(weight)
        and is_plain(bias)
        and all(injection.originals[path].is_in_use() for path in _LINEAR)
    ):
        result.weight, result.bias = weight, bias


def see_linear_gelu(
    owner: nn.Module, linear: str, activation: str, injection: Injection, snapshot: Snapshot
) -> LinearGelu:
    """A linear layer and a ``torch.nn.GELU`` after it, as they are now among a module's attributes."""
    result = LinearGelu()
    _see_linear(result, owner, linear, injection, snapshot)
    module = snapshot.see_attribute(owner, activation)
    if (
        type(module) is nn.GELU
        and runs_own_forward(module)
        and injection.originals[_GELU].is_in_use()
        and injection.originals[_GELU_MODULE].is_in_use()
    ):
        result.approximate = snapshot.see_attribute(module, "approximate")
    return result


class _Gelu(Part):
    def originals(self) -> dict[str, Original]:
        return {path: find_original(path) for path in ORIGINALS}

    def fill(
        self, parts: Parts, module: nn.Module, injection: Injection, snapshot: Snapshot
    ) -> None:
        originals = injection.originals
        if snapshot.see(module.__dict__, "gelu") is not None or not (
            originals[_GELU].is_in_use() and originals[_GELU_METHOD].is_in_use()
        ):
            parts.reason = "GELU was replaced"
            return
        parts.linear_gelu = LinearGelu()
        parts.linear_gelu.approximate = snapshot.see_attribute(module, "approximate")
        _see_linear(parts.linear_gelu, module, "proj", injection, snapshot)


def _forward(self: nn.Module, injected: Injected, hidden_states: Tensor) -> Tensor:
    parts = injected.parts(self, hidden_states)
    if parts is None:
        return injected.class_forward(self, hidden_states)
    return parts.linear_gelu(self.proj, self.gelu, hidden_states)


GELU = _Gelu(
    "diffusers.models.activations:GELU",
    "self hidden_states",
    _forward,
    "GELU as its matrix product's epilogue, else gelu",
)
