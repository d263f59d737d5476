"""Norms, plain and modulated, after a residual or not: by the kernels where they know the module.

A norm is named by the module that owns it and its attribute's name. What it computes with is read at each
use. Where the kernels do not know it, its own module is called in the model's expression.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from .. import functional
from ..arguments import PLAIN_TYPES
from ..arguments import is_plain as is_plain_tensor
from ..conditions import modulators_compatible, same_dtype_and_unit_stride
from .checks import KnownClass, class_name, is_plain, why_not_plain
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


# What a norm of the last dimension computes with: RMS or LAYER, its parameters (weight, or weight and bias),
# each (D,) or None, and epsilon.
Norm = tuple[str, tuple[Optional[Tensor], ...], float]


def read_norm(
    module: Any, size: int | None = None, upcasts: bool = False, is_called: bool = False
) -> Norm | str:
    """What the kernels need of a norm, or why they cannot stand in for the module, as a clause.

    ``size``: of the last dimension of what it is given. ``upcasts``: whether the model computes the norm in
    float32, with all that follows up to the next linear layer, and goes back to the hidden states' dtype.
    ``is_called``: whether the module itself is being called, so that nothing around it is passed by.
    """
    cls = type(module)
    for known, kind in KINDS:  # noqa: B007
        if cls is known.cls:
            break
    else:
        return f"is a {class_name(module)}"
    if not is_called and not is_plain(module, known):
        return why_not_plain(module, known)
    attributes, parameters = module.__dict__, module._parameters
    # Sharding puts plain tensors in the place of parameters.
    weight = parameters.get("weight", attributes.get("weight"))
    bias = parameters.get("bias", attributes.get("bias"))
    for tensor in (weight, bias):
        if tensor is not None and type(tensor) not in PLAIN_TYPES and not is_plain_tensor(tensor):
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
                return (
                    "has a weight that PyTorch does not take beside the float32 it is called with"
                )
    return kind, (weight,) if kind == RMS else (weight, bias), eps


def normed(call: Call, owner: Any, name: str, x: Tensor) -> Tensor:
    """``owner.name(x)``; x where there is no such norm."""
    module = owner._modules.get(name)
    if module is None:
        return x
    norm = read_norm(module, x.shape[-1])
    if isinstance(norm, str):
        call.fall_back(f"{name} {norm}")
    elif same_dtype_and_unit_stride(x, *norm[1]):
        kind, affine, eps = norm
        return _NORM[kind](x, *affine, eps)
    return module(x)


def modulated_by(
    norm: Norm | None,
    owner: Any,
    name: str,
    x: Tensor,
    modulations: tuple[Modulation, ...],
    upcasts: bool,
) -> tuple[Tensor, ...]:
    """``norm(x) * (1 + scale) + shift`` by each of one or two modulations; of one it may be the norm alone,
    by (None, None). By the module ``owner.name`` where the norm is None."""
    operands = modulations[0] if len(modulations) == 1 else (*modulations[0], *modulations[1])
    # Without an upcast, operands of another dtype would give a result of another one.
    alike = modulators_compatible if upcasts else same_dtype_and_unit_stride
    if norm is None or not alike(x, *norm[1], *operands):
        n = getattr(owner, name)(x.float() if upcasts else x)
        dtype = x.dtype if upcasts else None
        return tuple(_modulated(n, *modulation, dtype) for modulation in modulations)
    kind, affine, eps = norm
    if operands[0] is None:
        return (_NORM[kind](x, *affine, eps),)
    if len(modulations) == 2:
        return _MODULATE_PAIR[kind](x, *operands, *affine, eps)
    return (_MODULATE[kind](x, *operands, *affine, eps),)


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
    """``h = residual + gate * x``, and ``norm(h) * (1 + scale) + shift`` by one or two modulations."""
    norm: Any = read_norm(owner._modules.get(name), residual.shape[-1], upcasts)
    if isinstance(norm, str):
        call.fall_back(f"{name} {norm}")
        norm = None
    return residual_modulated_by(norm, owner, name, residual, x, gate, modulations, upcasts)


def residual_modulated_by(
    norm: Norm | None,
    owner: Any,
    name: str,
    residual: Tensor,
    x: Tensor,
    gate: Tensor | None,
    modulations: tuple[Modulation, ...],
    upcasts: bool,
) -> tuple[Tensor, ...]:
    """The same by a norm that has been read; by the module ``owner.name`` where it is None."""
    operands = modulations[0] if len(modulations) == 1 else (*modulations[0], *modulations[1])
    is_taken = norm is not None and x.shape == residual.shape
    if norm is not None and is_taken:
        affine = norm[1]
        is_taken = (
            same_dtype_and_unit_stride(residual, x)
            and modulators_compatible(residual, gate, *affine, *operands)
            if upcasts
            else same_dtype_and_unit_stride(residual, x, gate, *affine, *operands)
        )
    if norm is None or not is_taken:
        h = gated_residual(residual, x, gate, upcasts)
        return (h, *modulated_by(norm, owner, name, h, modulations, upcasts))
    kind, affine, eps = norm
    runs = _RESIDUAL_MODULATE if len(modulations) == 1 else _RESIDUAL_MODULATE_PAIR
    return runs[kind](residual, x, gate, *operands, *affine, eps)


def residual_normed(
    call: Call,
    owner: Any,
    name: str,
    residual: Tensor,
    x: Tensor,
    gate: Tensor | None,
    upcasts: bool = False,
) -> tuple[Tensor, ...]:
    """``h = residual + gate * x`` and ``norm(h)``."""
    modulation = (None, None)
    return residual_modulated(call, owner, name, residual, x, gate, modulation, upcasts=upcasts)


_NORM: dict[str, Any] = {RMS: functional.rms_norm, LAYER: functional.layer_norm}
_MODULATE: dict[str, Any] = {
    RMS: functional.rms_norm_modulate,
    LAYER: functional.layer_norm_modulate,
}
_MODULATE_PAIR: dict[str, Any] = {
    LAYER: functional.layer_norm_modulate_pair,
}
_RESIDUAL_MODULATE: dict[str, Any] = {
    RMS: functional.gated_residual_rms_norm_modulate,
    LAYER: functional.gated_residual_layer_norm_modulate,
}
_RESIDUAL_MODULATE_PAIR: dict[str, Any] = {
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
    alike = modulators_compatible if upcasts else same_dtype_and_unit_stride
    if x.shape == residual.shape and same_dtype_and_unit_stride(residual, x) and alike(x, gate):
        return functional.gated_residual(residual, x, gate)
    if upcasts:
        x = x.float() if gate is None else x.float() * gate
        return (residual.float() + x).type_as(residual)
    return residual + (x if gate is None else x * gate)


def clipped(x: Tensor) -> Tensor:
    """As diffusers keeps some results in float16 within the dtype's range."""
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x
