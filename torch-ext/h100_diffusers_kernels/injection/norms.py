"""Norms, plain and modulated, after a residual or not: by the kernels where they know the module.

A norm is named by the module that owns it and its attribute's name. What it computes with is read at each use.
Where the kernels do not know it, its own module is called in the model's expression.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from .. import functional
from ..arguments import is_plain as is_plain_tensor
from ..conditions import go_with, of_one_form
from .checks import KnownClass, is_plain, why_not_plain
from .patch import Call

RMS, LAYER = "rms", "layer"
_LAYER_NORM = "torch.nn.functional:layer_norm"
LAYER_NORM = KnownClass("torch.nn:LayerNorm", _LAYER_NORM)
FP32_LAYER_NORM = KnownClass("diffusers.models.normalization:FP32LayerNorm", _LAYER_NORM)
RMS_NORM = KnownClass("torch.nn:RMSNorm", "torch.nn.functional:rms_norm")
DIFFUSERS_RMS_NORM = KnownClass("diffusers.models.normalization:RMSNorm")
MOCHI_RMS_NORM = KnownClass("diffusers.models.normalization:MochiRMSNorm")
KINDS = (
    (LAYER_NORM, LAYER),
    (FP32_LAYER_NORM, LAYER),
    (RMS_NORM, RMS),
    (DIFFUSERS_RMS_NORM, RMS),
    (MOCHI_RMS_NORM, RMS),
)

Modulation = tuple[Optional[Tensor], Optional[Tensor]]  # scale and shift


class Norm(NamedTuple):
    """What a norm of the last dimension computes with.

    Attributes:
        known: its class.
        kind: RMS or LAYER.
        weight, bias: (D,), or None.
        upcasts: whether the model computes it in float32, with all that follows up to the next linear layer,
            and goes back to the hidden states' dtype there.
    """

    known: KnownClass
    kind: str
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    upcasts: bool

    def takes(self, x: Tensor, *others: Tensor | None) -> bool:
        """Whether the kernels compute it along with the others, where they take ``x``."""
        # Without an upcast, operands of another dtype would give a result of another one.
        alike = go_with if self.upcasts else of_one_form
        return alike(x, self.weight, self.bias, *others)

    @property
    def affine(self) -> tuple[Tensor | None, ...]:
        return (self.weight,) if self.kind == RMS else (self.weight, self.bias)


def read_norm(module: Any, size: int | None = None, upcasts: bool = False) -> Norm | str:
    """What the kernels need of a norm, or why they cannot stand in for the module, as a clause.

    ``size``: of the last dimension of what it is given.
    """
    cls = type(module)
    for known, kind in KINDS:
        if cls is known.cls and is_plain(module, known):
            return norm_operands(module, known, kind, size, upcasts)
    for known, _ in KINDS:
        if cls is known.cls:
            return why_not_plain(module, known)
    return why_not_plain(module, LAYER_NORM)


def norm_operands(
    module: Any, known: KnownClass, kind: str, size: int | None, upcasts: bool
) -> Norm | str:
    """The same of a module whose class is known, whatever is around it."""
    attributes, parameters = module.__dict__, module._parameters
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if not (is_plain_tensor(weight) and is_plain_tensor(bias)):
        return "has a sharded or quantized weight"
    if kind == RMS and bias is not None:
        return "has a bias"
    eps = attributes.get("eps")
    if not isinstance(eps, float):
        return f"has an eps of {eps}"
    shape = attributes.get("normalized_shape")
    if shape is None and weight is not None:
        shape = weight.shape
    if shape is not None and len(shape) != 1:
        return "normalizes over several dimensions"
    if size is not None and shape is not None and shape[0] != size:
        return f"normalizes {shape[0]} elements, and was given {size}"
    if upcasts and known is LAYER_NORM:
        for tensor in (weight, bias):
            if tensor is not None and tensor.dtype != torch.float32:
                return "has a weight that PyTorch does not take beside the float32 it is called with"
    return Norm(known, kind, weight, bias, eps, upcasts)


def _norm_of(call: Call, owner: nn.Module, name: str, x: Tensor, upcasts: bool) -> Norm | None:
    """The norm ``owner.name``; None, noted, where the kernels do not know it."""
    norm = read_norm(owner._modules.get(name), x.shape[-1], upcasts)
    if isinstance(norm, str):
        call.fall_back(f"{name} {norm}")
        return None
    return norm


def normed(call: Call, owner: Any, name: str, x: Tensor) -> Tensor:
    """``owner.name(x)``; x where there is no such norm."""
    if owner._modules.get(name) is None:
        return x
    norm = _norm_of(call, owner, name, x, False)
    if norm is None or not norm.takes(x):
        return getattr(owner, name)(x)
    run: Any = functional.rms_norm if norm.kind == RMS else functional.layer_norm
    return run(x, *norm.affine, norm.eps)


def modulated(
    call: Call, owner: Any, name: str, x: Tensor, *modulations: Modulation, upcasts: bool = False
) -> tuple[Tensor, ...]:
    """``norm(x) * (1 + scale) + shift`` by each of one or two modulations; of one it may be the norm alone,
    by (None, None)."""
    norm = _norm_of(call, owner, name, x, upcasts)
    operands = [t for modulation in modulations for t in modulation]
    if norm is None or not norm.takes(x, *operands):
        n = getattr(owner, name)(x.float() if upcasts else x)
        dtype = x.dtype if upcasts else None
        return tuple(_modulated(n, *modulation, dtype) for modulation in modulations)
    if operands[0] is None:
        run: Any = functional.rms_norm if norm.kind == RMS else functional.layer_norm
        return (run(x, *norm.affine, norm.eps),)
    if len(modulations) == 2:
        return _MODULATE_PAIR[norm.kind](x, *operands, *norm.affine, norm.eps)
    return (_MODULATE[norm.kind](x, *operands, *norm.affine, norm.eps),)


def residual_modulated(
    call: Call,
    owner: Any,
    name: str,
    residual: Tensor,
    x: Tensor,
    gate: Tensor | None,
    *modulations: Modulation,
    upcasts: bool = False,
) -> tuple[Tensor, ...]:
    """``h = residual + gate * x``, and ``norm(h) * (1 + scale) + shift`` by each of one or two modulations."""
    operands = [t for modulation in modulations for t in modulation]
    norm = _norm_of(call, owner, name, residual, upcasts)
    if (
        norm is None
        or x.shape != residual.shape
        or x.dtype != residual.dtype
        or not of_one_form(x)
        or not norm.takes(residual, gate, *operands)
    ):
        h = gated_residual(residual, x, gate, upcasts)
        return (h, *modulated(call, owner, name, h, *modulations, upcasts=upcasts))
    runs = _RESIDUAL_MODULATE if len(modulations) == 1 else _RESIDUAL_MODULATE_PAIR
    return runs[norm.kind](residual, x, gate, *operands, *norm.affine, norm.eps)


def residual_normed(
    call: Call,
    owner: Any,
    name: str,
    residual: Tensor,
    x: Tensor,
    gate: Tensor | None,
    upcasts: bool = False,
) -> tuple[Tensor, Tensor]:
    """``h = residual + gate * x`` and ``norm(h)``."""
    h, n = residual_modulated(
        call, owner, name, residual, x, gate, (None, None), upcasts=upcasts
    )
    return h, n


_MODULATE: dict[str, Any] = {
    RMS: functional.rms_norm_modulate,
    LAYER: functional.layer_norm_modulate,
}
_MODULATE_PAIR: dict[str, Any] = {
    RMS: functional.rms_norm_modulate_pair,
    LAYER: functional.layer_norm_modulate_pair,
}
_RESIDUAL_MODULATE: dict[str, Any] = {
    RMS: functional.gated_residual_rms_norm_modulate,
    LAYER: functional.gated_residual_layer_norm_modulate,
}
_RESIDUAL_MODULATE_PAIR: dict[str, Any] = {
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
    residual: Tensor, x: Tensor, gate: Tensor | None, upcasts: bool = False
) -> Tensor:
    """``residual + gate * x``, also where a layer gives another dtype than the one it was given.

    ``upcasts``: whether the model's own code computes it in float32, and goes back to residual's dtype.
    """
    alike = go_with if upcasts else of_one_form
    if x.shape == residual.shape and of_one_form(residual, x) and alike(x, gate):
        return functional.gated_residual(residual, x, gate)
    if upcasts:
        x = x.float() if gate is None else x.float() * gate
        return (residual.float() + x).type_as(residual)
    return residual + (x if gate is None else x * gate)


def clipped(x: Tensor) -> Tensor:
    """As diffusers keeps some results in float16 within the dtype's range."""
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x
