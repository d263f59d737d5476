"""Norms, plain and modulated, with or without a residual before them, on the kernels if they know the module.

A norm is given as its owner and attribute name. Its parameters are read at each use. If the kernels do not
know the module, the model's expression runs and calls the module.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from ... import operations
from ...operations.conditions import (
    PLAIN_TYPES,
    an,
    is_differentiated,
    is_plain_tensor,
    modulators_compatible,
    same_dtype_and_unit_stride,
)
from ..core.checks import KnownClass, KnownClasses, class_name, is_stock, why_not_stock
from ..core.patch import Call
from ..core.quantized_rows import QuantizedRows
from ..quantized.fp8_linears import Fp8Product

RMS, LAYER = "rms", "layer"
_DIFFUSERS = "diffusers.models.normalization:"
LAYER_NORM = KnownClass("torch.nn:LayerNorm", "torch.nn.functional:layer_norm")
_RMS_NORM = KnownClass("torch.nn:RMSNorm", "torch.nn.functional:rms_norm")
_PYTORCH_EPS = torch.finfo(torch.float32).eps  # its sums are float32
# Its weight counts from 1.
_KREA2 = KnownClass(
    "diffusers.models.transformers.transformer_krea2:Krea2RMSNorm", "torch.nn.functional:rms_norm"
)
# It contains another norm, and computes in float32.
_MODULATED = KnownClass("diffusers.models.transformers.transformer_mochi:MochiModulatedRMSNorm")
NORM_KINDS = KnownClasses(
    (LAYER_NORM, LAYER),
    (KnownClass(f"{_DIFFUSERS}FP32LayerNorm", "torch.nn.functional:layer_norm"), LAYER),
    (_RMS_NORM, RMS),
    (KnownClass(f"{_DIFFUSERS}RMSNorm"), RMS),
    (KnownClass(f"{_DIFFUSERS}MochiRMSNorm"), RMS),
    (_KREA2, RMS),
    (_MODULATED, RMS),
)


def _operations(beginning: str, ending: str = "") -> dict[tuple[str, int], Any]:
    """The operations named so, such as ``rms_norm_modulate``, for each kind of norm and number of scales and
    shifts."""
    forms = {0: "norm", 2: "norm_modulate", 4: "norm_modulate_pair"}
    keys = [(kind, count) for kind in (RMS, LAYER) for count in forms]
    names = {key: f"{beginning}{key[0]}_{forms[key[1]]}{ending}" for key in keys}
    return {k: getattr(operations, name) for k, name in names.items() if hasattr(operations, name)}


NORM_OPERATIONS, _FP8_OPERATIONS = _operations(""), _operations("", "_fp8")
_RESIDUAL_OPERATIONS = _operations("gated_residual_")
_FP8_RESIDUAL_OPERATIONS = _operations("gated_residual_", "_fp8")

# Parameters of a norm over the last dimension: RMS or LAYER, the weight or the weight and bias, each (D,) or
# None, and epsilon.
Norm = tuple[str, tuple[Optional[Tensor], ...], float]
_TENSORS = frozenset((Tensor, type(None)))
_PARAMETERS = frozenset((*PLAIN_TYPES, type(None)))
_NO_INDEX: dict[str, Any] = {}
# A scale, shift or gate: a tensor; a table's row (D,) and an embedding, for their sum; rows that tokens
# choose; or None.
Modulator = Any


class Upcasts(IntEnum):
    """Where a model's own code computes in float32. If anywhere, norms and modulators may be float32."""

    NOWHERE = 0
    # Norms are called with the hidden states as they are.
    IN_NORMS = 1
    # From a norm, which is called in float32, to the next linear layer, and in residual sums.
    TO_NEXT_LINEAR = 2


class RowsByToken(NamedTuple):
    """A modulator of which each token takes the row ``indices[token]``.

    Attributes:
        table: (N, D).
        indices: int32, (S,) or (B, S), the same object for all modulators of an operation.
    """

    table: Tensor
    indices: Tensor


_ROWS = frozenset((tuple, RowsByToken))


def read_norm(
    module: Any,
    size: int | None = None,
    upcasts: Upcasts = Upcasts.NOWHERE,
    is_called: bool = False,
) -> Norm | str:
    """The parameters of a norm, or why the kernels cannot replace the module, as a clause.

    ``size``: the input's last dimension. ``is_called``: whether this is a call of the module itself, so that
    its hooks have run.
    """
    entry = NORM_KINDS.by_class.get(type(module))
    if entry is None:
        return f"is {an(class_name(module))}"
    known, kind = entry
    if not is_called and not is_stock(module, known):
        return why_not_stock(module, known)
    if known is _MODULATED:
        return read_norm(module._modules.get("norm"), size)
    attributes, parameters = module.__dict__, module._parameters
    # Sharding replaces parameters with plain tensors.
    weight = (parameters if "weight" in parameters else attributes).get("weight")
    bias = (parameters if "bias" in parameters else attributes).get("bias")
    are_plain = type(weight) in _PARAMETERS and type(bias) in _PARAMETERS
    if not (are_plain or (is_plain_tensor(weight) and is_plain_tensor(bias))):
        return "has a sharded or quantized weight"
    if kind == RMS and bias is not None:
        return "has a bias"
    if known is _KREA2:
        weight = weight + 1.0
    eps = attributes.get("eps", attributes.get("variance_epsilon"))  # the latter in transformers
    if eps is None and known is _RMS_NORM:
        eps = _PYTORCH_EPS
    if not isinstance(eps, float):
        return f"has an eps of {eps}"
    shape = attributes.get("normalized_shape")
    if shape is None and weight is not None:
        shape = weight.shape
    if shape is not None and len(shape) != 1:
        return "normalizes over several dimensions"
    if size is not None and shape is not None and shape[0] != size:
        return f"normalizes {shape[0]} elements, but was given {size}"
    if upcasts is Upcasts.TO_NEXT_LINEAR and known is LAYER_NORM:
        for tensor in (weight, bias):
            if tensor is not None and tensor.dtype != torch.float32:
                return "has a weight dtype that PyTorch does not accept with a float32 input"
    return kind, (weight,) if kind == RMS else (weight, bias), eps


def norm_notes(
    module: nn.Module, names: Sequence[str], upcasts: Upcasts = Upcasts.NOWHERE
) -> list[str]:
    """Why the kernels cannot replace some of a module's norms with these names."""
    norms = [(name, module._modules.get(name)) for name in names]
    found = [(name, read_norm(norm, upcasts=upcasts)) for name, norm in norms if norm is not None]
    return [f"{name} {reason}" for name, reason in found if isinstance(reason, str)]


def known_norm(call: Call, owner: Any, name: str, size: int, upcasts: Any) -> Norm | None:
    """``read_norm`` of ``owner.name``; None, counted as a fallback, if the kernels cannot replace it."""
    norm = read_norm(owner._modules.get(name), size, upcasts)
    if not isinstance(norm, str):
        return norm
    call.fall_back(f"{name} {norm}")
    return None


def apply_norm(call: Call, owner: Any, name: str, x: Tensor, in_float32: bool = False) -> Tensor:
    """``owner.name(x)``; x if there is no such norm. ``in_float32``: whether the model calls the module in
    float32 and rounds its result."""
    module = owner._modules.get(name)
    if module is None:
        return x
    norm = read_norm(module, x.shape[-1])
    if isinstance(norm, str):
        call.fall_back(f"{name} {norm}")
    elif same_dtype_and_unit_stride(x, *norm[1]):
        kind, affine, eps = norm
        return NORM_OPERATIONS[kind, 0](x, *affine, eps)
    return module(x.float()).to(x.dtype) if in_float32 else module(x)


def _operands(
    modulators: Sequence[Modulator],
) -> tuple[Sequence[Modulator], dict[str, Any], Sequence[Optional[Tensor]]]:
    """The modulators with the tables of ``RowsByToken``, the operations' argument ``index``, all tensors."""
    index: dict[str, Any] = {}
    if RowsByToken in map(type, modulators):
        indices = next(m.indices for m in modulators if type(m) is RowsByToken)
        if all(m is None or (type(m) is RowsByToken and m.indices is indices) for m in modulators):
            modulators, index = (
                [None if m is None else m.table for m in modulators],
                {"index": indices},
            )
        else:
            modulators = [modulator_sum(m) for m in modulators]
    if tuple not in map(type, modulators):
        return modulators, index, modulators
    flat = [part for m in modulators for part in (m if type(m) is tuple else (m,))]
    return modulators, index, flat


def _for_samples_of(x: Tensor, *others: Any) -> Tensor:
    """x of one sample for each sample of the others, modulators or tensors. The operations broadcast only
    modulators."""
    for other in others:
        if other is None:
            continue
        if type(other) in _ROWS:
            other = other[1]  # the embedding of a sum, or the indices
        shape = other.shape
        if shape[0] != 1 and len(shape) > 1:
            return x.expand(shape[0], *x.shape[1:])
    return x


def modulator_sum(modulator: Modulator) -> Any:
    if type(modulator) is RowsByToken:
        return modulator.table[modulator.indices]
    return modulator[0] + modulator[1] if type(modulator) is tuple else modulator


def scale_and_shift(n: Tensor, scale: Modulator, shift: Modulator) -> Tensor:
    """``n * (1 + scale) + shift``"""
    n = n if scale is None else n * (1 + modulator_sum(scale))
    return n if shift is None else n + modulator_sum(shift)


def norm_modulate(
    norm: Norm | None,
    owner: Any,
    name: str,
    x: Tensor,
    modulation: Sequence[Modulator],
    upcasts: Upcasts,
    weights: dict[Any, Any] | None = None,
) -> tuple[Any, ...]:
    """``norm(x) * (1 + scale) + shift`` for each scale and shift in the modulation, or just the norm if it is
    empty. If the norm is None, the module ``owner.name`` computes it. ``weights``: the FP8 weights of the
    layers that take the results, if these may be ``QuantizedRows``."""
    # Without an upcast, operands of another dtype would change the result's.
    alike = modulators_compatible if upcasts else same_dtype_and_unit_stride
    if x.shape[0] == 1:
        x = _for_samples_of(x, *modulation[:1])
    tables, index, operands = modulation, _NO_INDEX, modulation
    if not _TENSORS.issuperset(map(type, modulation)):
        tables, index, operands = _operands(modulation)
    if norm is None or not alike(x, *norm[1], *operands):
        n = getattr(owner, name)(x.float() if upcasts is Upcasts.TO_NEXT_LINEAR else x)
        pairs = zip(modulation[::2], modulation[1::2])
        results: list[Any] = [scale_and_shift(n, *pair) for pair in pairs] or [n]
        if upcasts is Upcasts.TO_NEXT_LINEAR:
            results = [result.to(x.dtype) for result in results]
        return tuple(results)
    kind, affine, eps = norm
    if weights and not is_differentiated(x, *affine, *operands):
        operation, results = _FP8_OPERATIONS[kind, 2 if modulation else 0], []
        for pair in zip(tables[::2], tables[1::2]) if modulation else [()]:
            values, scale = operation(x, *pair, *affine, eps, **index)
            results.append(QuantizedRows(values, scale, x.dtype, weights))
        return tuple(results)
    operation = NORM_OPERATIONS.get((kind, len(modulation)))
    if operation is None:  # of several modulations
        pairs = zip(tables[::2], tables[1::2])
        return tuple([NORM_OPERATIONS[kind, 2](x, *pair, *affine, eps, **index) for pair in pairs])
    out = operation(x, *tables, *affine, eps, **index)
    return (out,) if len(modulation) < 4 else out


def chosen_norm_modulate(
    call: Call, owner: Any, name: str, x: Tensor, scale: Modulator, shift: Modulator
) -> Tensor:
    """``norm(x) * (1 + scale) + shift`` by the norm ``owner.name``; the modulators may be ``RowsByToken``."""
    norm = known_norm(call, owner, name, x.shape[-1], Upcasts.NOWHERE)
    return norm_modulate(norm, owner, name, x, (scale, shift), Upcasts.NOWHERE)[0]


def residual_norm(
    call: Call,
    norm: Norm | None,
    owner: Any,
    name: str,
    residual: Tensor,
    x: Any,
    gate: Modulator,
    modulation: Sequence[Modulator],
    upcasts: Upcasts,
    weights: dict[Any, Any] | None,
    branch: dict[str, Any],
    rounds_to: torch.dtype | None = None,
) -> tuple[Any, ...]:
    """``h = gated_residual(residual, x, gate, ...)``, and its norm as in ``norm_modulate``.

    ``x`` may be an ``Fp8Product``. ``branch``: see ``gated_residual``. ``rounds_to``: the dtype to which the
    caller rounds the norm, if h may have another. The norm may have it already.
    """
    parts: dict[str, Any] = {}
    if residual.shape[0] == 1:
        residual = _for_samples_of(residual, x, gate, *modulation[:1])
    if type(x) is not Tensor:
        x, is_sum = _finished(residual, x, gate, upcasts, branch)
        if is_sum:
            return (x, *norm_modulate(norm, owner, name, x, modulation, upcasts, weights))
    if branch:
        x, parts = _read_branch(call, residual, x, upcasts, **branch)
    if norm is not None and x.shape == residual.shape:
        kind, affine, eps = norm
        modulators: Any = (gate, *modulation)
        if _TENSORS.issuperset(map(type, modulators)):  # ``_operands``, inlined
            gate_table, tables, index = gate, modulation, _NO_INDEX
        else:
            (gate_table, *tables), index, modulators = _operands(modulators)
        operands = tables or (None, None)
        # One pass for all modulations, or for the first.
        is_joint = not weights and (kind, len(operands)) in _RESIDUAL_OPERATIONS
        count = len(operands) if is_joint else 2
        if (
            (
                same_dtype_and_unit_stride(residual, x)
                or (
                    x.dtype is rounds_to
                    and kind == RMS
                    and not (modulation or weights)
                    and _adds_to_float32(residual, x, gate, parts)
                )
            )
            and modulators_compatible(x, *affine, *modulators)
            if upcasts
            else same_dtype_and_unit_stride(residual, x, *affine, *modulators)
        ):
            operation, first = _RESIDUAL_OPERATIONS[kind, count], operands[:count]
            if weights and not is_differentiated(
                residual, x, *affine, *modulators, *parts.values()
            ):
                operation = _FP8_RESIDUAL_OPERATIONS[kind, 2]
                h, values, scale = operation(
                    residual, x, gate_table, *first, *affine, eps, **parts, **index
                )
                results: list[Any] = [QuantizedRows(values, scale, h.dtype, weights)]
            else:
                h, *results = operation(
                    residual, x, gate_table, *first, *affine, eps, **parts, **index
                )
            if count < len(operands):
                others = modulation[count:]
                results += norm_modulate(norm, owner, name, h, others, upcasts, weights)
            return (h, *results)
    h = _residual(residual, x, gate, upcasts, parts)
    return (h, *norm_modulate(norm, owner, name, h, modulation, upcasts, weights))


def gated_residual(
    residual: Tensor,
    x: Any,
    gate: Modulator,
    upcasts: Upcasts = Upcasts.NOWHERE,
    call: Call | None = None,
    **branch: Any,
) -> Tensor:
    """``residual + gate * x``, even if a layer returned another dtype than its input's. x may be an
    ``Fp8Product``.

    ``branch``:

    - ``addend``: ``x + addend`` takes x's place;
    - ``x_norm``: the norm ``owner.name`` of x, given as (owner, name), takes x's place;
    - ``tanh_gate``: whether ``tanh(gate)`` takes the gate's place.
    """
    parts: dict[str, Any] = {}
    if residual.shape[0] == 1:
        residual = _for_samples_of(residual, x, gate)
    if type(x) is not Tensor:
        x, is_sum = _finished(residual, x, gate, upcasts, branch)
        if is_sum:
            return x
    if branch:
        x, parts = _read_branch(call, residual, x, upcasts, **branch)
    return _residual(residual, x, gate, upcasts, parts)


def _finished(
    residual: Tensor, x: Any, gate: Modulator, upcasts: Upcasts, branch: dict[str, Any]
) -> tuple[Tensor, bool]:
    """``gated_residual`` in the epilogue of an ``Fp8Product`` and True, or the product or tensor and False.

    A row-wise parallel layer returns the result of an all-reduce still under way. The wait is here, where it
    is needed, so that the layers before run meanwhile.
    """
    if type(x) is not Fp8Product:
        collectives: Any = sys.modules.get("torch.distributed._functional_collectives")
        is_waiting = type(x) is getattr(collectives, "AsyncCollectiveTensor", None)
        return (x.trigger_wait() if is_waiting and not is_differentiated(x) else x), False
    alike = modulators_compatible if upcasts else same_dtype_and_unit_stride
    if (
        branch
        or type(gate) in (tuple, RowsByToken)
        or x.x.dtype is not residual.dtype
        or (*x.x.shape[:-1], x.weight.values.shape[0]) != residual.shape
        or not alike(residual, gate)
        or is_differentiated(residual, gate)
    ):
        return x.result(), False
    return x.added_to(residual, gate), True


def _residual(
    residual: Tensor, x: Tensor, gate: Modulator, upcasts: Upcasts, parts: dict[str, Any]
) -> Tensor:
    table, index = gate, _NO_INDEX
    operands: Any = (gate,)
    if type(gate) not in _TENSORS:
        (table,), index, operands = _operands(operands)
    if x.shape == residual.shape and (
        (same_dtype_and_unit_stride(residual, x) or _adds_to_float32(residual, x, gate, parts))
        and modulators_compatible(x, *operands)
        if upcasts
        else same_dtype_and_unit_stride(residual, x, *operands)
    ):
        return operations.gated_residual(residual, x, table, **parts, **index)
    if "addend" in parts:
        x = x + parts["addend"]
    if "x_eps" in parts:
        x = operations.rms_norm(x, parts["x_weight"], parts["x_eps"])
    gate = modulator_sum(gate)
    if "tanh_gate" in parts:
        gate = gate.tanh()
    if upcasts is Upcasts.TO_NEXT_LINEAR:
        of_sum = residual.float()
        sum_ = of_sum + x if gate is None else torch.addcmul(of_sum, x, gate)
        return sum_.type_as(residual)
    return residual + (x if gate is None else x * gate)


def _adds_to_float32(residual: Tensor, x: Tensor, gate: Modulator, parts: dict[str, Any]) -> bool:
    """Whether the operations add a 16-bit branch to this float32 residual."""
    return (
        residual.dtype is torch.float32
        and x.dtype is not torch.float32
        and not parts
        and type(gate) not in _ROWS
        and same_dtype_and_unit_stride(residual)
        and same_dtype_and_unit_stride(x)
    )


def _read_branch(
    call: Any,
    residual: Tensor,
    x: Tensor,
    upcasts: Upcasts,
    x_norm: tuple[Any, str] | None = None,
    tanh_gate: bool = False,
    addend: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """x, and the operations' arguments for the parts of a branch that are not in x yet."""
    parts: dict[str, Any] = {"tanh_gate": True} if tanh_gate else {}
    is_alike = x.shape == residual.shape and same_dtype_and_unit_stride(residual, x, addend)
    if addend is not None:
        if is_alike and addend.shape == x.shape:
            parts["addend"] = addend
        else:
            x = x + addend
    if x_norm is not None:
        owner, name = x_norm
        norm = known_norm(call, owner, name, x.shape[-1], Upcasts.NOWHERE)
        if norm is not None and norm[0] == RMS and is_alike:
            (weight,) = norm[1]
            alike = modulators_compatible if upcasts else same_dtype_and_unit_stride
            if alike(x, weight):
                return x, {**parts, "x_weight": weight, "x_eps": norm[2]}
        x = getattr(owner, name)(x + parts.pop("addend") if "addend" in parts else x)
    return x, parts


def clip_to_float16(x: Tensor) -> Tensor:
    """x clipped to float16's range, as diffusers does for some results."""
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x
