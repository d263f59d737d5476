"""diffusers' ``GELU``, the linear layer with an activation that opens its feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional
from ..conditions import kernels_take, of_one_form
from ..differentiation import is_differentiated
from .forward_slot import runs_own_forward
from .injected import Injected, Injection, Parts
from .linears import ORIGINALS as LINEAR_ORIGINALS
from .linears import PlainLinear, see_linear
from .original import Original, find_original
from .part import Part
from .snapshot import Look
from .trust import trusted_parts

# In float32 the epilogue's approximation of tanh would show.
_EPILOGUE_DTYPES = (torch.bfloat16, torch.float16)
_GELU = "torch.nn.functional:gelu"
_GELU_MODULE = "torch.nn:GELU.forward"
_GELU_METHOD = "diffusers.models.activations:GELU.gelu"
# What the kernels stand in for.
ORIGINALS = (_GELU, _GELU_MODULE, _GELU_METHOD, *LINEAR_ORIGINALS)


class LinearGelu:
    """A linear layer, then GELU.

    Attributes:
        approximate: GELU's form; None where something else may follow the linear layer.
        linear: the linear layer.
    """

    def __init__(self, linear: Callable[[Tensor], Tensor]) -> None:
        self.approximate: str | None = None
        self.linear = linear

    def __call__(self, activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """``activation(linear(x))``."""
        if self.approximate == "tanh" and self._has_epilogue(x):
            return self._in_epilogue(x)
        x = self.linear(x)
        if self.approximate is not None and of_one_form(x):
            return functional.gelu(x, self.approximate)
        return activation(x)

    def _in_epilogue(self, x: Tensor) -> Tensor:
        # On CUDA the epilogue is the tanh approximation. (On CPU the function's GELU is exact.)
        linear: Any = self.linear
        weight, bias = linear.weight, linear.bias
        rows = x.reshape(-1, x.shape[-1])
        out = torch._addmm_activation(bias, rows, weight.t(), use_gelu=True)
        return out.view(*x.shape[:-1], out.shape[-1])

    def _has_epilogue(self, x: Tensor) -> bool:
        linear: Any = self.linear
        return (
            x.is_cuda
            and x.dtype in _EPILOGUE_DTYPES
            and type(linear) is PlainLinear
            and linear.bias is not None
            and kernels_take(x, linear.weight, linear.bias)
            and x.numel() > 0
            and not is_differentiated(x, linear.weight, linear.bias)
            and not torch._C._are_functorch_transforms_active()  # it has no rule for torch.vmap
        )

    def trusted(self, snapshot: Look) -> LinearGelu | None:
        """The same for calls that are trusted; see ``trust.py``."""
        if self.approximate is None or type(self.linear) is not PlainLinear:
            return None
        result = _TrustedLinearGelu(self.linear)
        result.approximate = self.approximate
        return result


class _TrustedLinearGelu(LinearGelu):
    def __call__(self, activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.approximate == "tanh" and self._has_epilogue(x):
            return self._in_epilogue(x)
        return functional.gelu(self.linear(x), self.approximate)

    def _has_epilogue(self, x: Tensor) -> bool:
        linear: Any = self.linear
        return (
            x.is_cuda
            and linear.bias is not None
            and x.dtype in _EPILOGUE_DTYPES
            and x.numel() > 0
            and linear.weight.stride(-1) == 1
        )


def see_linear_gelu(
    owner: nn.Module, linear: str, activation: str, injection: Injection, snapshot: Look
) -> LinearGelu:
    """A linear layer and a ``torch.nn.GELU`` after it, as they are now among a module's attributes."""
    result = LinearGelu(see_linear(owner, linear, injection, snapshot))
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

    def fill(self, parts: Parts, module: nn.Module, injection: Injection, snapshot: Look) -> None:
        originals = injection.originals
        if snapshot.see(module.__dict__, "gelu") is not None or not (
            originals[_GELU].is_in_use() and originals[_GELU_METHOD].is_in_use()
        ):
            parts.reason = "GELU was replaced"
            return
        parts.linear_gelu = LinearGelu(see_linear(module, "proj", injection, snapshot))
        parts.linear_gelu.approximate = snapshot.see_attribute(module, "approximate")

    def trust(self, parts: Parts, module: nn.Module, snapshot: Look) -> Parts | None:
        return trusted_parts(parts, ("linear_gelu",), snapshot)


def _forward(self: nn.Module, injected: Injected, hidden_states: Tensor) -> Tensor:
    parts = injected.parts(self, hidden_states)
    if parts is None:
        return injected.class_forward(self, hidden_states)
    return parts.linear_gelu(self.gelu, hidden_states)


GELU = _Gelu(
    "diffusers.models.activations:GELU",
    "self hidden_states",
    _forward,
    "GELU as its matrix product's epilogue, else gelu",
)
