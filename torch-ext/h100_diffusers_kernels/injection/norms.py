"""Norms, plain and modulated, after a residual or not: by the kernels where they know the module."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor, nn

from .. import functional
from ..arguments import PLAIN_TYPES
from ..conditions import go_with, is_plain, of_one_form
from .forward_slot import runs_own_forward
from .injected import Injection
from .original import class_name, find_class
from .snapshot import Look

RMS, LAYER = "rms", "layer"
_LAYER_NORM = "torch.nn:LayerNorm"
# What each class computes, the functions that its forward calls, and the attributes that it reads.
_CLASSES = {
    "diffusers.models.normalization:RMSNorm": (RMS, (), ("weight", "bias", "eps")),
    "torch.nn:RMSNorm": (
        RMS,
        ("torch.nn.functional:rms_norm",),
        ("weight", "eps", "normalized_shape"),
    ),
    _LAYER_NORM: (
        LAYER,
        ("torch.nn.functional:layer_norm",),
        ("weight", "bias", "eps", "normalized_shape"),
    ),
    "diffusers.models.normalization:FP32LayerNorm": (
        LAYER,
        ("torch.nn.functional:layer_norm",),
        ("weight", "bias", "eps", "normalized_shape"),
    ),
}
# What the kernels stand in for.
ORIGINALS = tuple(
    dict.fromkeys(
        path
        for name, (_, functions, _) in _CLASSES.items()
        for path in (f"{name}.forward", *functions)
    )
)


Modulation = tuple[Optional[Tensor], Optional[Tensor]]  # scale and shift


class Norm:
    """A norm of the last dimension.

    Attributes:
        module: what computes it where the kernels do not; None where there is no norm.
        widens: whether the model's own code has it computed in float32, with all that follows up to the
            next linear layer, and goes back to the hidden states' dtype there.
        kind: RMS or LAYER; None where the kernels do not know it, for ``reason``.
    """

    def __init__(self, module: Any, widens: bool = False) -> None:
        self.module = module
        self.widens = widens
        self.kind: Any = None
        self.reason: str | None = None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.eps: float = 0.0
        self.size: int | None = None  # of the normalized dimension, where the module says it

    def takes(self, x: Tensor, *others: Tensor | None, size: int | None = None) -> bool:
        """Whether the kernels compute the norm of ``x`` along with the others, where they take ``x``; of
        ``size`` elements, by default of its last dimension."""
        # Where nothing is widened, operands of another dtype would give results of another one.
        of_form = go_with if self.widens else of_one_form
        return (
            self.kind is not None
            and (self.size is None or self.size == (x.shape[-1] if size is None else size))
            and of_form(x, self.weight, self.bias, *others)
        )

    def __call__(self, x: Tensor) -> Tensor:
        if self.module is None:
            return x
        if not self.takes(x):
            return self.module(x.float()).type_as(x) if self.widens else self.module(x)
        if self.kind == RMS:
            return functional.rms_norm(x, self.weight, self.eps)
        return functional.layer_norm(x, self.weight, self.bias, self.eps)

    def modulated(self, x: Tensor, *modulations: Modulation) -> tuple[Tensor, ...]:
        """``norm(x) * (1 + scale) + shift`` by each of one or two modulations; of one it may be the norm
        alone, by (None, None)."""
        (scale, shift), *others = modulations
        operands = [t for modulation in modulations for t in modulation]
        if not self.takes(x, *operands):
            n = self.module(x.float() if self.widens else x)
            return tuple(
                _modulated(n, *modulation, dtype=x.dtype if self.widens else None)
                for modulation in modulations
            )
        affine = (self.weight,) if self.kind == RMS else (self.weight, self.bias)
        if scale is None:
            return (self(x),)
        if others:
            run = _MODULATE_PAIR[self.kind]
            return run(x, *operands, *affine, self.eps)
        return (_MODULATE[self.kind](x, scale, shift, *affine, self.eps),)

    def residual_modulated(
        self, residual: Tensor, x: Tensor, gate: Tensor | None, *modulations: Modulation
    ) -> tuple[Tensor, ...]:
        """``h = residual + gate * x``, and ``norm(h) * (1 + scale) + shift`` by each of one or two
        modulations."""
        operands = [t for modulation in modulations for t in modulation]
        if not self._takes_sum(residual, x, gate, operands):
            h = gated_residual(residual, x, gate, self.widens)
            return (h, *self.modulated(h, *modulations))
        affine = (self.weight,) if self.kind == RMS else (self.weight, self.bias)
        run = (_RESIDUAL_MODULATE if len(modulations) == 1 else _RESIDUAL_MODULATE_PAIR)[self.kind]
        return run(residual, x, gate, *operands, *affine, self.eps)

    def _takes_sum(
        self, residual: Tensor, x: Tensor, gate: Tensor | None, operands: list[Tensor | None]
    ) -> bool:
        """Whether the kernels compute the norm of ``residual + gate * x`` with these scales and shifts."""
        return (
            x.shape == residual.shape
            and x.dtype == residual.dtype
            and of_one_form(x)
            and self.takes(residual, gate, *operands)
        )

    def residual_normed(
        self, residual: Tensor, x: Tensor, gate: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """``h = residual + gate * x`` and ``norm(h)``."""
        h, n = self.residual_modulated(residual, x, gate, (None, None))
        return h, n

    def trusted(self, snapshot: Look) -> Norm | None:
        """The same for calls that are trusted; see ``trust.py``."""
        if self.module is None:
            return self
        if self.kind is None:
            return None
        norm = _TrustedNorm(self.module, self.widens)
        vars(norm).update(vars(self))
        return norm


class _TrustedNorm(Norm):
    """A norm of what linear layers and kernels made.

    Its parameters may have been moved or cast since they were looked at, and rows are of the dtype of what
    they are a sum of.
    """

    def takes(self, x: Tensor, *others: Tensor | None, size: int | None = None) -> bool:
        dtype = x.dtype
        for tensor in (self.weight, self.bias, *others):
            if tensor is not None and (
                (tensor.dtype != dtype and not (self.widens and tensor.dtype == torch.float32))
                or tensor.stride(-1) != 1
                or (type(tensor) not in PLAIN_TYPES and not is_plain(tensor))
            ):
                return False
        return self.size is None or self.size == (x.shape[-1] if size is None else size)

    def _takes_sum(
        self, residual: Tensor, x: Tensor, gate: Tensor | None, operands: list[Tensor | None]
    ) -> bool:
        if len(operands) == 2:  # the rows of one modulation are of one tensor
            scale = operands[0]
            if self.takes(residual, gate if scale is None else scale):
                return True
        return super()._takes_sum(residual, x, gate, operands)


_MODULATE = {RMS: functional.rms_norm_modulate, LAYER: functional.layer_norm_modulate}
_MODULATE_PAIR = {
    RMS: functional.rms_norm_modulate_pair,
    LAYER: functional.layer_norm_modulate_pair,
}
_RESIDUAL_MODULATE = {
    RMS: functional.gated_residual_rms_norm_modulate,
    LAYER: functional.gated_residual_layer_norm_modulate,
}
_RESIDUAL_MODULATE_PAIR = {
    RMS: functional.gated_residual_rms_norm_modulate_pair,
    LAYER: functional.gated_residual_layer_norm_modulate_pair,
}


def _modulated(
    n: Tensor, scale: Tensor | None, shift: Tensor | None, dtype: torch.dtype | None
) -> Tensor:
    if scale is not None:
        n = n * (1 + scale)
    if shift is not None:
        n = n + shift
    return n if dtype is None else n.to(dtype)


def gated_residual(
    residual: Tensor, x: Tensor, gate: Tensor | None, widens: bool = False
) -> Tensor:
    """``residual + gate * x``, also where a layer gives another dtype than the one it was given.

    ``widens``: whether the model's own code computes it in float32, and goes back to residual's dtype.
    """
    if (
        x.shape == residual.shape
        and of_one_form(residual, x)
        and (go_with if widens else of_one_form)(x, gate)
    ):
        return functional.gated_residual(residual, x, gate)
    if widens:
        x = x.float() if gate is None else x.float() * gate
        return (residual.float() + x).type_as(residual)
    return residual + (x if gate is None else x * gate)


def clipped(x: Tensor) -> Tensor:
    """As diffusers keeps some results in float16 within the dtype's range."""
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


def see_norm(
    owner: nn.Module, name: str, injection: Injection, snapshot: Look, widens: bool = False
) -> Norm:
    """The norm that is now the attribute ``name`` of a module."""
    module = snapshot.see_attribute(owner, name)
    norm = Norm(module, widens)
    norm.reason = _fill(norm, module, injection, snapshot)
    if norm.reason is not None:
        norm.kind = None
        norm.reason = f"{name} {norm.reason}"
    return norm


def _goes_with_float32(norm: Norm) -> bool:
    affine = (norm.weight, norm.bias)
    return all(tensor is None or tensor.dtype == torch.float32 for tensor in affine)


def _fill(norm: Norm, module: Any, injection: Injection, snapshot: Look) -> str | None:
    """Reads what the kernels need, or says why they cannot stand in for the module."""
    path = next((path for path in _CLASSES if type(module) is find_class(path)), None)
    if path is None:
        return f"is a {class_name(module)}"
    norm.kind, functions, attributes = _CLASSES[path]
    for original in (f"{path}.forward", *functions):
        if not injection.originals[original].is_in_use():
            return f"is a {class_name(module)}, and {original.partition(':')[2]} was replaced"
    if not runs_own_forward(module):
        return "has hooks or another forward than its class's"
    read = {name: snapshot.see_attribute(module, name) for name in attributes}
    norm.weight, norm.bias, norm.eps = read["weight"], read.get("bias"), read["eps"]
    if not (is_plain(norm.weight) and is_plain(norm.bias)):
        return "has a sharded or quantized weight"
    if norm.kind == RMS and norm.bias is not None:
        return "has a bias"
    if norm.widens and path == _LAYER_NORM and not _goes_with_float32(norm):
        return "has a weight that PyTorch does not take beside the float32 it is called with"
    if not isinstance(norm.eps, float):
        return f"has an eps of {norm.eps}"
    normalized_shape = read.get("normalized_shape")
    if normalized_shape is not None:
        if len(normalized_shape) != 1:
            return "normalizes over several dimensions"
        (norm.size,) = normalized_shape
    return None
