"""The operations: one documented function each.

``T`` is bfloat16, float16 or float32. Arithmetic is float32, rounded once, at the output; attention also
rounds its softmax probabilities to 16 bits. Leading dimensions are rows. Inputs may be strided in every
dimension except the last and are not copied.

Results are new contiguous tensors. Some operations take ``out``, a tensor of the result's shape and dtype,
strided in any dimension except the last; they write and return it. ``out`` must not share memory with an
input unless the operation allows it.

If an input requires grad, forward runs the kernel and backward differentiates the formula (``formulas.py``).
Forward-mode derivatives and transforms of ``torch.func`` run the formula. In these cases ``out`` and
in-place writes are refused. The FP8 operations have no derivatives.

A wrong argument raises ValueError, or TypeError if its type is wrong, in one sentence, before any launch or
write. Failure to allocate a result raises torch.OutOfMemoryError.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor

from . import formulas
from ._ops import add_op_namespace_prefix, ops
from .operators import (
    MAX_INTEGER,
    choice,
    count,
    fail,
    kernel_call,
    number,
    plain_call,
    refuse_type,
    required,
    scale_number,
    shown,
)

_LAYOUTS = {"interleaved": formulas.INTERLEAVED, "half": formulas.HALF}
_NORM_SCOPES = {
    "across_heads": formulas.ACROSS_HEADS,
    "per_head": formulas.PER_HEAD,
    "layer_per_head": formulas.LAYER_PER_HEAD,
    "none": formulas.NO_NORM,
}
_APPROXIMATIONS = {"none": False, "tanh": True}
_HALVES = {"second": False, "first": True}
_ACTIVATIONS = {"none": False, "silu": True}
_FP8_BLOCK_SIZE = 128
_OUT_GIVEN = ("out", "None", "a tensor")  # to refuse out where an input may be differentiated


# --------------------------------------------------------------------------------------------------
# Norm, modulation, residual and gate

_rms_norm, _layer_norm, _rms_norm_modulate, _layer_norm_modulate = (
    kernel_call(operation, "norm", formulas.norm)
    for operation in ("rms_norm", "layer_norm", "rms_norm_modulate", "layer_norm_modulate")
)
_gated_residual_rms_norm_modulate, _gated_residual_layer_norm_modulate = (
    kernel_call(operation, "gated_residual_norm_modulate", formulas.gated_residual_norm_modulate)
    for operation in ("gated_residual_rms_norm_modulate", "gated_residual_layer_norm_modulate")
)
_layer_norm_modulate_pair, _gated_residual, _gated_residual_layer_norm_modulate_pair = (
    kernel_call(operation, operation, getattr(formulas, operation))
    for operation in (
        "layer_norm_modulate_pair",
        "gated_residual",
        "gated_residual_layer_norm_modulate_pair",
    )
)


# A scale, shift or gate: a tensor, or a table's row (D,) and an embedding, which stand for their sum.
Modulator = Union[Tensor, tuple[Tensor, Tensor]]


def _split(operation: str, **modulators: Optional[Modulator]) -> list:
    """The embeddings of some modulators, then their rows. Each may be None."""
    embeddings, rows = [], []
    for name, modulator in modulators.items():
        row, embedding = None, modulator
        if type(modulator) is tuple:
            if len(modulator) != 2 or not all(isinstance(part, Tensor) for part in modulator):
                refuse_type(operation, name, "a tensor or a pair of tensors", modulator)
            row, embedding = modulator
        embeddings.append(embedding)
        rows.append(row)
    return embeddings + rows


def _branch(operation: str, addend: Any, x_weight: Any, x_eps: Any, tanh_gate: Any) -> tuple:
    """The operator's arguments for the parts of a branch."""
    if x_eps is not None:
        x_eps = number(operation, "x_eps", x_eps, "a number or None")
    elif x_weight is not None:
        fail(operation, f"x_weight must be None if x_eps is None, got a {shown(x_weight)}")
    if type(tanh_gate) is not bool:
        refuse_type(operation, "tanh_gate", "True or False", tanh_gate)
    return addend, x_weight, x_eps, tanh_gate


def rms_norm(x: Tensor, weight: Optional[Tensor] = None, eps: float = 1e-6) -> Tensor:
    """Root mean square norm over the last dimension: ``x / sqrt(mean(x²) + eps) * weight``.

    Args:
        x: ``(..., D)``, T.
        weight: ``(D,)``, T or float32, or None.
        eps: added to the mean square.

    Source: Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467.
    """
    eps = number("rms_norm", "eps", eps)
    return _rms_norm(x, False, weight, None, None, None, eps)


def layer_norm(
    x: Tensor, weight: Optional[Tensor] = None, bias: Optional[Tensor] = None, eps: float = 1e-5
) -> Tensor:
    """Layer norm over the last dimension, as ``torch.nn.functional.layer_norm``.

    Args:
        x: ``(..., D)``, T.
        weight, bias: ``(D,)``, T or float32, or None, independently of each other.
        eps: added to the (biased) variance.

    Source: Ba et al., 2016, https://arxiv.org/abs/1607.06450.
    """
    eps = number("layer_norm", "eps", eps)
    return _layer_norm(x, True, weight, bias, None, None, eps)


def rms_norm_modulate(
    x: Tensor,
    scale: Modulator,
    shift: Optional[Modulator] = None,
    weight: Optional[Tensor] = None,
    eps: float = 1e-6,
    *,
    index: Optional[Tensor] = None,
) -> Tensor:
    """Adaptive RMS norm: ``rms_norm(x, weight, eps) * (1 + scale) + shift``.

    Args:
        x: ``(..., D)``, T.
        scale: T or float32, broadcasts against ``x`` in all dimensions except the last, such as ``(D,)``,
            ``(B, 1, D)`` or ``(B, S, D)``. A pair ``(row, embedding)`` stands for ``row + embedding``, with a
            row ``(D,)`` of a table. Their sum is float32 and takes no memory.
        shift: likewise, or None for 0.
        weight: ``(D,)``, T or float32, or None.
        index: int32, broadcasts against ``x`` without its last dimension, such as ``(S,)`` or ``(B, S)``, or
            None. If it is given, ``scale`` and ``shift`` (or their embeddings) are tables ``(N, D)``, and
            each token takes their row ``index[token]``, clamped to the table.

    Source: Peebles and Xie, 2022 (adaLN), https://arxiv.org/abs/2212.09748, with an RMS norm as in
    LTX-Video, https://arxiv.org/abs/2501.00103.
    """
    if scale is None:
        refuse_type("rms_norm_modulate", "scale", "a tensor", scale)
    eps = number("rms_norm_modulate", "eps", eps)
    if type(scale) is tuple or type(shift) is tuple or index is not None:
        scale, shift, *rows = _split("rms_norm_modulate", scale=scale, shift=shift)
        return _rms_norm_modulate(x, False, weight, None, scale, shift, eps, *rows, index)
    return _rms_norm_modulate(x, False, weight, None, scale, shift, eps)


def layer_norm_modulate(
    x: Tensor,
    scale: Modulator,
    shift: Optional[Modulator] = None,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-6,
    *,
    index: Optional[Tensor] = None,
) -> Tensor:
    """Adaptive layer norm: ``layer_norm(x, weight, bias, eps) * (1 + scale) + shift``.

    Args:
        x: ``(..., D)``, T.
        scale: T or float32, broadcasts against ``x`` in all dimensions except the last, or a pair
            ``(row, embedding)`` as in ``rms_norm_modulate``.
        shift: likewise, or None for 0.
        weight, bias: ``(D,)``, T or float32, or None.
        index: as in ``rms_norm_modulate``.

    Source: Peebles and Xie, 2022 (adaLN), https://arxiv.org/abs/2212.09748.
    """
    if scale is None:
        refuse_type("layer_norm_modulate", "scale", "a tensor", scale)
    eps = number("layer_norm_modulate", "eps", eps)
    if type(scale) is tuple or type(shift) is tuple or index is not None:
        scale, shift, *rows = _split("layer_norm_modulate", scale=scale, shift=shift)
        return _layer_norm_modulate(x, True, weight, bias, scale, shift, eps, *rows, index)
    return _layer_norm_modulate(x, True, weight, bias, scale, shift, eps)


def layer_norm_modulate_pair(
    x: Tensor,
    scale: Optional[Tensor],
    shift: Optional[Tensor],
    second_scale: Optional[Tensor],
    second_shift: Optional[Tensor],
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Two modulations of one layer norm ``n = layer_norm(x, weight, bias, eps)``, with ``x`` read once:
    ``n * (1 + scale) + shift`` and ``n * (1 + second_scale) + second_shift``.

    Args:
        x: ``(..., D)``, T.
        scale, shift, second_scale, second_shift: T or float32, broadcast against ``x`` in all dimensions
            except the last, or None for 0.
        weight, bias: ``(D,)``, T or float32, or None.

    Returns:
        Both results, each ``(..., D)``, T.

    Source: Peebles and Xie, 2022 (adaLN), https://arxiv.org/abs/2212.09748, with one norm for two
    attentions as in Stable Diffusion 3.5 (``SD35AdaLayerNormZeroX`` of diffusers).
    """
    eps = number("layer_norm_modulate_pair", "eps", eps)
    return _layer_norm_modulate_pair(x, scale, shift, second_scale, second_shift, weight, bias, eps)


def gated_residual(
    residual: Tensor,
    x: Tensor,
    gate: Optional[Modulator] = None,
    *,
    addend: Optional[Tensor] = None,
    x_weight: Optional[Tensor] = None,
    x_eps: Optional[float] = None,
    tanh_gate: bool = False,
    index: Optional[Tensor] = None,
) -> Tensor:
    """``residual + gate * x``, or ``residual + x`` without a gate.

    Args:
        residual, x: ``(..., D)``, T, of the same shape.
        gate: T or float32, broadcasts against ``x`` in all dimensions except the last, or None. A pair
            ``(row, embedding)`` stands for ``row + embedding``, with a row ``(D,)`` of a table.
        addend: of ``x``'s shape, T: ``x + addend`` takes ``x``'s place.
        x_eps: if it is a number, ``rms_norm(x, x_weight, x_eps)`` takes ``x``'s place.
        x_weight: ``(D,)``, T or float32, or None.
        tanh_gate: whether ``tanh(gate)`` takes the gate's place.
        index: int32, broadcasts against ``x`` without its last dimension, such as ``(S,)`` or ``(B, S)``, or
            None. If it is given, ``gate`` (or its embedding) is a table ``(N, D)``, and each token takes its
            row ``index[token]``, clamped to the table.
    """
    if (
        addend is None
        and x_weight is x_eps is None
        and tanh_gate is False
        and index is None
        and type(gate) is not tuple
    ):
        return _gated_residual(residual, x, gate)
    gate, gate_row = _split("gated_residual", gate=gate)
    branch = _branch("gated_residual", addend, x_weight, x_eps, tanh_gate)
    return _gated_residual(residual, x, gate, gate_row, *branch, index)


def gated_residual_rms_norm_modulate(
    residual: Tensor,
    x: Tensor,
    gate: Optional[Modulator] = None,
    scale: Optional[Modulator] = None,
    shift: Optional[Modulator] = None,
    weight: Optional[Tensor] = None,
    eps: float = 1e-6,
    *,
    addend: Optional[Tensor] = None,
    x_weight: Optional[Tensor] = None,
    x_eps: Optional[float] = None,
    tanh_gate: bool = False,
    index: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    """The new residual ``h = residual + gate * x`` and ``rms_norm_modulate(h, scale, shift, weight)``.

    The norm reads the unrounded ``h``.

    Args:
        residual, x: ``(..., D)``, T, of the same shape.
        gate: T or float32, broadcasts against ``x`` in all dimensions except the last, or None for 1.
        scale, shift: likewise, or None for 0. Without both, the second result is ``rms_norm(h, weight)``.
        weight: ``(D,)``, T or float32, or None.
        addend, x_weight, x_eps, tanh_gate: as in ``gated_residual``. Gate, scale and shift may also be pairs.
        index: as in ``gated_residual``, for the tables of gate, scale and shift.

    Returns:
        ``(h, modulated)``, each ``(..., D)``, T.
    """
    eps = number("gated_residual_rms_norm_modulate", "eps", eps)
    arguments = (residual, x, False, gate, scale, shift, weight, None, eps)
    if (
        addend is None
        and x_weight is x_eps is None
        and tanh_gate is False
        and index is None
        and tuple not in (type(gate), type(scale), type(shift))
    ):
        return _gated_residual_rms_norm_modulate(*arguments)
    branch = _branch("gated_residual_rms_norm_modulate", addend, x_weight, x_eps, tanh_gate)
    scale, shift, gate, *rows = _split(
        "gated_residual_rms_norm_modulate", scale=scale, shift=shift, gate=gate
    )
    arguments = (residual, x, False, gate, scale, shift, weight, None, eps)
    return _gated_residual_rms_norm_modulate(*arguments, *rows, *branch, index)


def gated_residual_layer_norm_modulate(
    residual: Tensor,
    x: Tensor,
    gate: Optional[Modulator] = None,
    scale: Optional[Modulator] = None,
    shift: Optional[Modulator] = None,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-6,
    *,
    addend: Optional[Tensor] = None,
    x_weight: Optional[Tensor] = None,
    x_eps: Optional[float] = None,
    tanh_gate: bool = False,
    index: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    """The new residual ``h = residual + gate * x`` and ``layer_norm_modulate(h, scale, shift, ...)``.

    The norm reads the unrounded ``h``.

    Args:
        residual, x: ``(..., D)``, T, of the same shape.
        gate: T or float32, broadcasts against ``x`` in all dimensions except the last, or None for 1.
        scale, shift: likewise, or None for 0. Without both, the second result is
            ``layer_norm(h, weight, bias)``.
        weight, bias: ``(D,)``, T or float32, or None.
        addend, x_weight, x_eps, tanh_gate: as in ``gated_residual``. Gate, scale and shift may also be pairs.
        index: as in ``gated_residual``, for the tables of gate, scale and shift.

    Returns:
        ``(h, modulated)``, each ``(..., D)``, T.
    """
    eps = number("gated_residual_layer_norm_modulate", "eps", eps)
    arguments = (residual, x, True, gate, scale, shift, weight, bias, eps)
    if (
        addend is None
        and x_weight is x_eps is None
        and tanh_gate is False
        and index is None
        and tuple not in (type(gate), type(scale), type(shift))
    ):
        return _gated_residual_layer_norm_modulate(*arguments)
    branch = _branch("gated_residual_layer_norm_modulate", addend, x_weight, x_eps, tanh_gate)
    scale, shift, gate, *rows = _split(
        "gated_residual_layer_norm_modulate", scale=scale, shift=shift, gate=gate
    )
    arguments = (residual, x, True, gate, scale, shift, weight, bias, eps)
    return _gated_residual_layer_norm_modulate(*arguments, *rows, *branch, index)


def gated_residual_layer_norm_modulate_pair(
    residual: Tensor,
    x: Tensor,
    gate: Optional[Tensor],
    scale: Optional[Tensor],
    shift: Optional[Tensor],
    second_scale: Optional[Tensor],
    second_shift: Optional[Tensor],
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """The new residual ``h = residual + gate * x`` and two modulations of its layer norm, as
    ``layer_norm_modulate_pair(h, ...)``.

    The norm reads the unrounded ``h``.

    Args:
        residual, x: ``(..., D)``, T, of the same shape.
        gate: T or float32, broadcasts against ``x`` in all dimensions except the last, or None for 1.
        scale, shift, second_scale, second_shift: likewise, or None for 0.
        weight, bias: ``(D,)``, T or float32, or None.

    Returns:
        ``(h, modulated, second_modulated)``, each ``(..., D)``, T.
    """
    eps = number("gated_residual_layer_norm_modulate_pair", "eps", eps)
    return _gated_residual_layer_norm_modulate_pair(
        residual, x, gate, scale, shift, second_scale, second_shift, weight, bias, eps
    )


# With a quantized result

_rms_norm_fp8, _layer_norm_fp8, _rms_norm_modulate_fp8, _layer_norm_modulate_fp8 = (
    plain_call(operation, "norm_fp8")
    for operation in (
        "rms_norm_fp8",
        "layer_norm_fp8",
        "rms_norm_modulate_fp8",
        "layer_norm_modulate_fp8",
    )
)
_gated_residual_rms_norm_modulate_fp8, _gated_residual_layer_norm_modulate_fp8 = (
    plain_call(operation, "gated_residual_norm_modulate_fp8")
    for operation in (
        "gated_residual_rms_norm_modulate_fp8",
        "gated_residual_layer_norm_modulate_fp8",
    )
)


def _norm_options(operation: str, eps: Any, scale: Any, shift: Any, index: Any) -> tuple:
    """The operator's arguments from ``scale`` on."""
    if scale is None:
        refuse_type(operation, "scale", "a tensor", scale)
    scale, shift, *rows = _split(operation, scale=scale, shift=shift)
    return scale, shift, number(operation, "eps", eps), *rows, index


def rms_norm_fp8(
    x: Tensor, weight: Optional[Tensor] = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """As ``rms_norm``, with the result quantized as by ``quantize_fp8``, from the unrounded value.

    Returns:
        ``(values, scale)``: float8_e4m3fn ``(..., D)`` and float32 ``(..., 1)``.
    """
    eps = number("rms_norm_fp8", "eps", eps)
    return _rms_norm_fp8(x, False, weight, None, None, None, eps)


def layer_norm_fp8(
    x: Tensor, weight: Optional[Tensor] = None, bias: Optional[Tensor] = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """As ``layer_norm``, with the result quantized as by ``quantize_fp8``, from the unrounded value.

    Returns:
        ``(values, scale)``, as from ``rms_norm_fp8``.
    """
    eps = number("layer_norm_fp8", "eps", eps)
    return _layer_norm_fp8(x, True, weight, bias, None, None, eps)


def rms_norm_modulate_fp8(
    x: Tensor,
    scale: Modulator,
    shift: Optional[Modulator] = None,
    weight: Optional[Tensor] = None,
    eps: float = 1e-6,
    *,
    index: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    """As ``rms_norm_modulate``, with the result quantized as by ``quantize_fp8``, from the unrounded value.

    Returns:
        ``(values, scale)``, as from ``rms_norm_fp8``.
    """
    options = _norm_options("rms_norm_modulate_fp8", eps, scale, shift, index)
    return _rms_norm_modulate_fp8(x, False, weight, None, *options)


def layer_norm_modulate_fp8(
    x: Tensor,
    scale: Modulator,
    shift: Optional[Modulator] = None,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-6,
    *,
    index: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    """As ``layer_norm_modulate``, with the result quantized as by ``quantize_fp8``, from the unrounded value.

    Returns:
        ``(values, scale)``, as from ``rms_norm_fp8``.
    """
    options = _norm_options("layer_norm_modulate_fp8", eps, scale, shift, index)
    return _layer_norm_modulate_fp8(x, True, weight, bias, *options)


def gated_residual_rms_norm_modulate_fp8(
    residual: Tensor,
    x: Tensor,
    gate: Optional[Modulator] = None,
    scale: Optional[Modulator] = None,
    shift: Optional[Modulator] = None,
    weight: Optional[Tensor] = None,
    eps: float = 1e-6,
    *,
    addend: Optional[Tensor] = None,
    x_weight: Optional[Tensor] = None,
    x_eps: Optional[float] = None,
    tanh_gate: bool = False,
    index: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``gated_residual_rms_norm_modulate``, with the modulated norm quantized as by ``quantize_fp8``, from
    the unrounded value.

    Returns:
        ``(h, values, scale)``: the new residual ``(..., D)``, T, float8_e4m3fn ``(..., D)`` and float32
        ``(..., 1)``.
    """
    operation = "gated_residual_rms_norm_modulate_fp8"
    eps = number(operation, "eps", eps)
    branch = _branch(operation, addend, x_weight, x_eps, tanh_gate)
    scale, shift, gate, *rows = _split(operation, scale=scale, shift=shift, gate=gate)
    arguments = (residual, x, False, gate, scale, shift, weight, None, eps)
    return _gated_residual_rms_norm_modulate_fp8(*arguments, *rows, *branch, index)


def gated_residual_layer_norm_modulate_fp8(
    residual: Tensor,
    x: Tensor,
    gate: Optional[Modulator] = None,
    scale: Optional[Modulator] = None,
    shift: Optional[Modulator] = None,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-6,
    *,
    addend: Optional[Tensor] = None,
    x_weight: Optional[Tensor] = None,
    x_eps: Optional[float] = None,
    tanh_gate: bool = False,
    index: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``gated_residual_layer_norm_modulate``, with the modulated norm quantized as by ``quantize_fp8``,
    from the unrounded value.

    Returns:
        ``(h, values, scale)``, as from ``gated_residual_rms_norm_modulate_fp8``.
    """
    operation = "gated_residual_layer_norm_modulate_fp8"
    eps = number(operation, "eps", eps)
    branch = _branch(operation, addend, x_weight, x_eps, tanh_gate)
    scale, shift, gate, *rows = _split(operation, scale=scale, shift=shift, gate=gate)
    arguments = (residual, x, True, gate, scale, shift, weight, bias, eps)
    return _gated_residual_layer_norm_modulate_fp8(*arguments, *rows, *branch, index)


@torch.library.register_fake(add_op_namespace_prefix("norm"))
def _norm_fake(x, *_):
    return x.new_empty(x.shape)


@torch.library.register_fake(add_op_namespace_prefix("layer_norm_modulate_pair"))
def _layer_norm_modulate_pair_fake(x, *_):
    return x.new_empty(x.shape), x.new_empty(x.shape)


@torch.library.register_fake(add_op_namespace_prefix("gated_residual"))
def _gated_residual_fake(residual, x, *_):
    required(x)
    return residual.new_empty(residual.shape)


@torch.library.register_fake(add_op_namespace_prefix("gated_residual_norm_modulate"))
def _gated_residual_norm_modulate_fake(residual, x, *_):
    required(x)
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape)


@torch.library.register_fake(add_op_namespace_prefix("gated_residual_layer_norm_modulate_pair"))
def _gated_residual_layer_norm_modulate_pair_fake(residual, x, *_):
    required(x)
    return tuple(residual.new_empty(residual.shape) for _ in range(3))


@torch.library.register_fake(add_op_namespace_prefix("norm_fp8"))
def _norm_fp8_fake(x, *_):
    values = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return values, x.new_empty([*x.shape[:-1], 1], dtype=torch.float32)


@torch.library.register_fake(add_op_namespace_prefix("gated_residual_norm_modulate_fp8"))
def _gated_residual_norm_modulate_fp8_fake(residual, x, *_):
    required(x)
    return residual.new_empty(residual.shape), *_norm_fp8_fake(residual)


# --------------------------------------------------------------------------------------------------
# Group norm

_group_norm = kernel_call("group_norm", "group_norm", formulas.group_norm)


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-5,
    channel_bias: Optional[Tensor] = None,
    activation: str = "none",
) -> Tensor:
    """Group norm of ``x + channel_bias``, as ``torch.nn.functional.group_norm``, then an activation.

    Args:
        x: ``(B, C, ...)``, T, with any number of spatial dimensions and no gaps between them. Either pixels
            are dense, as in a contiguous tensor, or channels are, as with ``torch.channels_last``. The
            result has the same memory format.
        num_groups: number of groups of channels, each with its own mean and (biased) variance.
        weight, bias: ``(C,)``, T or float32, or None, independently of each other.
        eps: added to the variance.
        channel_bias: ``(B, C)``, T or float32, or None. It is added to all pixels before the norm, for
            example a convolution's bias, a projected time embedding, or their sum.
        activation: ``"none"``, or ``"silu"`` for ``n * sigmoid(n)``.

    Source: Wu and He, 2018, https://arxiv.org/abs/1803.08494.
    """
    if type(num_groups) is not int or not 0 < num_groups <= MAX_INTEGER:
        num_groups = count("group_norm", "num_groups", num_groups)
    eps = number("group_norm", "eps", eps)
    silu = choice("group_norm", "activation", activation, _ACTIVATIONS)
    return _group_norm(x, num_groups, weight, bias, eps, channel_bias, silu)


@torch.library.register_fake(add_op_namespace_prefix("group_norm"))
def _group_norm_fake(x, *_):
    # Like the kernel's result: channels last if x has dense channels and its pixels are not dense.
    if x.dim() > 2 and not x.is_contiguous() and x.stride(1) == 1:
        batch, channels, *spatial = x.shape
        return x.new_empty(batch, *spatial, channels).movedim(-1, 1)
    return x.new_empty(x.shape)


_channel_rms_norm = kernel_call("channel_rms_norm", "channel_rms_norm", formulas.channel_rms_norm)


def channel_rms_norm(
    x: Tensor,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-6,
    scale: Optional[Tensor] = None,
    shift: Optional[Tensor] = None,
    activation: str = "none",
) -> Tensor:
    """RMS norm over the channels of each position, modulation and activation, as in decoders of video:
    ``n = x / sqrt(mean(x², dim=1) + eps) * weight + bias``, then ``n * (1 + scale) + shift``.

    Args:
        x: ``(B, C, ...)``, T, with one to three spatial dimensions or more. Either pixels have stride 1, as
            in a contiguous tensor, or channels do, as with ``torch.channels_last_3d``. There may be gaps
            between channels, between samples and between one spatial dimension and the next, as in a slice
            of frames. The result is dense, in the same memory format.
        weight, bias: ``(C,)``, T or float32, or None, independently of each other.
        eps: added to the mean square.
        scale, shift: ``(B, C)``, T or float32, or None for 0, independently of each other.
        activation: ``"none"``, or ``"silu"`` for ``n * sigmoid(n)``.

    Source: Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467, over channels as in the decoders of
    Wan (``WanRMS_norm`` of diffusers) and LTX-Video, https://arxiv.org/abs/2501.00103.
    """
    eps = number("channel_rms_norm", "eps", eps)
    silu = choice("channel_rms_norm", "activation", activation, _ACTIVATIONS)
    return _channel_rms_norm(x, weight, bias, scale, shift, eps, silu)


@torch.library.register_fake(add_op_namespace_prefix("channel_rms_norm"))
def _channel_rms_norm_fake(x, *_):
    return _group_norm_fake(x)


# --------------------------------------------------------------------------------------------------
# Query and key: norm and rotary embedding


class CoordinateRope(NamedTuple):
    """A rotary embedding computed from each token's coordinates, without tables of size S·D.

    A token has ``heads * d / 2`` pairs (head-major). The first ``pad = heads * d / 2 - axes * F`` are not
    rotated. The angle of pair ``pad + i`` is ``frequencies[i // axes] * coordinates[b, s, i % axes]``,
    rounded to float32.

    Attributes:
        coordinates: ``(1 or B, S, axes)``, float32.
        frequencies: ``(F,)``, float32, shared by the axes.

    Source: the rotary embedding of LTX-Video, https://arxiv.org/abs/2501.00103, where ``coordinates``
    is the (frame, height, width) grid times 2 minus 1.
    """

    coordinates: Tensor
    frequencies: Tensor

    def tables(self, dim: int) -> tuple[Tensor, Tensor]:
        """``(cos, sin)``, each ``(1 or B, S, dim)``, float32, for a row of ``dim = heads * d`` elements
        in the interleaved layout: every angle twice, the unrotated pairs first.

        Raises TypeError or ValueError unless ``dim`` is an even integer of at least ``2 * axes * F``.
        """
        pairs = self.coordinates.shape[-1] * self.frequencies.shape[0]
        if isinstance(dim, bool) or not isinstance(dim, (numbers.Integral, torch.SymInt)):
            refuse_type("CoordinateRope.tables", "dim", "an integer", dim)
        if dim % 2 or dim < 2 * pairs:
            fail("CoordinateRope.tables", f"dim must be even and at least {2 * pairs}, got {dim}")
        angles = formulas.coordinate_angles(self.coordinates, self.frequencies, dim // 2)
        angles = angles.repeat_interleave(2, dim=-1)
        return angles.cos(), angles.sin()


_ROPE = "None, a pair (cos, sin) of tensors, a complex tensor or a CoordinateRope"


def _rotation(name: str, rope: Any, writes: bool) -> tuple:
    """The operators' arguments for a rotation: ``(first, second, is_coordinates)``."""
    if rope is None:
        return None, None, False
    if isinstance(rope, Tensor) and rope.is_complex():
        if writes and torch.compiler.is_compiling() and rope.dtype == torch.complex64:
            # Inductor refuses an operator that writes if an argument is complex.
            return torch.view_as_real(rope.resolve_conj()), None, False
        return rope, None, False
    if isinstance(rope, (tuple, list)) and len(rope) == 2:
        first, second = rope
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            return first, second, isinstance(rope, CoordinateRope)
    refuse_type("qk_norm_rope", name, _ROPE, rope)


def _qk_norm_two_ropes_kernel(q, k, *arguments):
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    ops.qk_norm_rope_out.default(q, k, *arguments, q_out, k_out, None, False)
    return q_out, k_out


_qk_norm_rope = kernel_call("qk_norm_rope", "qk_norm_rope", formulas.qk_norm_rope)
_qk_norm_two_ropes = kernel_call(
    "qk_norm_rope", "qk_norm_rope_out", formulas.qk_norm_two_ropes, _qk_norm_two_ropes_kernel
)
_qk_norm_rope_out = plain_call("qk_norm_rope", "qk_norm_rope_out")


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Optional[Tensor] = None,
    k_weight: Optional[Tensor] = None,
    rope: Any = None,
    *,
    heads: int,
    norm: str = "across_heads",
    layout: str = "interleaved",
    eps: float = 1e-6,
    inplace: bool = False,
    k_rope: Any = None,
    v: Optional[Tensor] = None,
    out: Optional[tuple] = None,
    q_bias: Optional[Tensor] = None,
    k_bias: Optional[Tensor] = None,
) -> tuple[Any, ...]:
    """Query and key, normalized and rotated.

    ``n = x / sqrt(mean(x²) + eps) * weight``, or LayerNorm of each head, then each pair ``(a, b)`` of ``n``
    becomes ``(a * cos_a - b * sin_a, b * cos_b + a * sin_b)``.

    Args:
        q: ``(B, S, heads * d)`` or ``(B, S, heads, d)``, T; strided in any dimension except the last.
        k: likewise, with the same B and d. Its number of heads may differ. Its S may differ if ``rope`` is
            None or ``k_rope`` is given.
        q_weight, k_weight: norm weights, float32 or T, or None; ``(heads * d,)`` across heads, ``(d,)``
            per head.
        rope: one of

            - None: no rotation;
            - ``(cos, sin)``, float32 or T, one value per element: each ``(S, d)``, ``(S, heads * d)``,
              ``(1 or B, S, d)``, ``(1 or B, S, heads * d)`` or ``(1 or B, S, 1 or heads, d)``;
            - ``(cos, sin)``, float32 or T, one value per pair: each ``(S, d/2)``, ``(1 or B, S, d/2)`` or
              ``(1 or B, S, 1 or heads, d/2)``;
            - ``cos + i sin``, complex64, one value per pair, in the same shapes;
            - a :class:`CoordinateRope`.
        heads: number of heads of ``q``.
        norm: ``"across_heads"`` (RMS, mean over all heads of a token), ``"per_head"`` (RMS),
            ``"layer_per_head"`` (LayerNorm) or ``"none"``.
        layout: the elements of a pair in a head: ``"interleaved"``, (2i, 2i+1), or ``"half"``,
            (i, i + d/2).
        inplace: write the results to ``q`` and ``k``.
        k_rope: the key's rotation, for the key's S and number of heads, in the forms of ``rope``; None to
            use ``rope``.
        v: values ``(B, S, any * d)`` or ``(B, S, any, d)``, T, with the key's S, copied to ``v_out``.
        out: ``(q_out, k_out)`` or, with ``v``, ``(q_out, k_out, v_out)``, with the shapes of q, k and v, T,
            strided in any dimension except the last, for example slices of a joint buffer. They must not
            overlap each other or an input, but each may be its own input. An output may also have the shape
            ``(B, S, C, H / C, d)``, for H heads in C chunks, for example a view of the buffer
            ``(C, S, B, H / C, d)`` that an all-to-all sends.
        q_bias, k_bias: biases of ``"layer_per_head"``, ``(d,)``, float32 or T, or None.

    ``inplace`` and ``out`` are refused if an input requires grad or carries a tangent.

    Returns:
        ``(q, k)`` in the given shapes, or ``out`` as a tuple.

    Source: Su et al., 2021, https://arxiv.org/abs/2104.09864; query-key norm: Henry et al., 2020,
    https://arxiv.org/abs/2010.04245, with an RMS norm.
    """
    if type(heads) is not int or not 0 < heads <= MAX_INTEGER:
        heads = count("qk_norm_rope", "heads", heads)
    eps = number("qk_norm_rope", "eps", eps)
    try:
        options = heads, _NORM_SCOPES[norm], _LAYOUTS[layout], eps
    except (KeyError, TypeError):
        choice("qk_norm_rope", "norm", norm, _NORM_SCOPES)
        choice("qk_norm_rope", "layout", layout, _LAYOUTS)
        raise
    if inplace is False and k_rope is v is out is None:
        rotation = _rotation("rope", rope, False)
        return _qk_norm_rope(q, k, q_weight, k_weight, q_bias, k_bias, *rotation, *options)
    if not isinstance(inplace, bool):
        refuse_type("qk_norm_rope", "inplace", "True or False", inplace)
    writes = inplace or out is not None
    rotation = _rotation("rope", rope, writes)
    k_rotation = _rotation("k_rope", k_rope, writes)
    arguments = q_weight, k_weight, q_bias, k_bias, *rotation, *k_rotation, *options
    if v is not None and out is None:
        fail("qk_norm_rope", "out must be given along with v, got None")
    if not writes:
        return _qk_norm_two_ropes(q, k, v, *arguments)
    if out is None:
        outputs, refused = (q, k), ("inplace", "False", "True")
    else:
        outputs, refused = _outputs(inplace, v, out), ("out", "None", shown(out))
    q_out, k_out, v_out = (*outputs, None)[:3]
    arguments = q, k, v, *arguments, q_out, k_out, v_out, inplace
    _qk_norm_rope_out(*arguments, written=outputs, refused=refused)
    return outputs


def _outputs(inplace: bool, v: Optional[Tensor], out: Any) -> tuple:
    if not isinstance(out, (tuple, list)) or not all(isinstance(x, Tensor) for x in out):
        accepted = "a tuple (q_out, k_out) or (q_out, k_out, v_out) of tensors or None"
        refuse_type("qk_norm_rope", "out", accepted, out)
    if inplace:
        fail("qk_norm_rope", "inplace must be False along with out, got True")
    size, given = (2, "without") if v is None else (3, "with")
    if len(out) != size:
        fail("qk_norm_rope", f"out must hold {size} tensors {given} v, got {len(out)}")
    return tuple(out)


@torch.library.register_fake(add_op_namespace_prefix("qk_norm_rope"))
def _qk_norm_rope_fake(q, k, *_):
    return q.new_empty(q.shape), k.new_empty(k.shape)


@torch.library.register_fake(add_op_namespace_prefix("qk_norm_rope_out"))
def _qk_norm_rope_out_fake(q, k, *_):
    required(q, k)


# --------------------------------------------------------------------------------------------------
# Rotary embedding alone

_rope = kernel_call("rope", "rope", formulas.rope)
_rope_3d = kernel_call("rope_3d", "rope_3d", formulas.rope_3d)


def rope(
    x: Tensor, cos: Tensor, sin: Optional[Tensor] = None, layout: str = "interleaved"
) -> Tensor:
    """Rotary embedding: each pair ``(a, b)`` of a head becomes
    ``(a * cos_a - b * sin_a, b * cos_b + a * sin_b)``.

    Args:
        x: ``(B, S, H, d)``, or ``(B, S, H * d)`` with the tables' last dimension as ``d``, T.
        cos, sin: one of

            - one value per element, float32 or T: each ``(S, d)``, ``(1 or B, S, d)`` or
              ``(1 or B, S, 1 or H, d)``; for a 4-D ``x`` also ``(S, H * d)`` or ``(1 or B, S, H * d)``;
            - one value per pair, float32 or T, for a 4-D ``x``: each ``(S, d/2)``, ``(1 or B, S, d/2)`` or
              ``(1 or B, S, 1 or H, d/2)``; view a 3-D ``x`` as ``(B, S, H, d)`` first, because the tables'
              last dimension would be read as ``d``;
            - ``cos + i sin``, complex64, one value per pair, in the same shapes, and None for ``sin``; for
              a 3-D ``x`` its last dimension is ``d/2``.
        layout: the elements of a pair in a head: ``"interleaved"``, (2i, 2i+1), or ``"half"``,
            (i, i + d/2).

    Source: Su et al., 2021, https://arxiv.org/abs/2104.09864.
    """
    return _rope(x, cos, sin, choice("rope", "layout", layout, _LAYOUTS))


def rope_3d(
    x: Tensor,
    frame: tuple[Tensor, Tensor],
    height: tuple[Tensor, Tensor],
    width: tuple[Tensor, Tensor],
    layout: str = "interleaved",
) -> Tensor:
    """Rotary embedding of the tokens of a (frame, height, width) grid, from one table per axis.

    The pairs of a head are divided among the axes: frame angles rotate the first pairs, height angles the
    next and width angles the last. A pair ``(a, b)`` becomes ``(a * cos - b * sin, b * cos + a * sin)``.

    Args:
        x: ``(B, S, H, d)``, T, with ``S = frames * heights * widths`` in row-major order.
        frame, height, width: each ``(cos, sin)``, both ``(positions, pairs)``, one value per pair of
            elements. The pairs of the axes add up to ``d / 2``, and an axis may have none. Float32 or T,
            all of the same dtype.
        layout: the elements of a pair in a head: ``"interleaved"``, (2i, 2i+1), or ``"half"``,
            (i, i + d/2).

    Source: Su et al., 2021, https://arxiv.org/abs/2104.09864, on the three axes of a video as in
    Wan, 2025, https://arxiv.org/abs/2503.20314.
    """
    for name, tables in (("frame", frame), ("height", height), ("width", width)):
        if not isinstance(tables, tuple) or len(tables) != 2:
            refuse_type("rope_3d", name, "a pair (cos, sin) of tensors", tables)
    return _rope_3d(x, *frame, *height, *width, choice("rope_3d", "layout", layout, _LAYOUTS))


@torch.library.register_fake(add_op_namespace_prefix("rope"))
def _rope_fake(x, cos, *_):
    required(cos)
    return x.new_empty(x.shape)


@torch.library.register_fake(add_op_namespace_prefix("rope_3d"))
def _rope_3d_fake(x, *tables_and_layout):
    required(*tables_and_layout[:-1])
    return x.new_empty(x.shape)


# --------------------------------------------------------------------------------------------------
# Activations

_gelu, _silu, _geglu, _swiglu = (
    kernel_call(operation, "activation", formulas.activation)
    for operation in ("gelu", "silu", "geglu", "swiglu")
)
_gelu_out, _silu_out, _geglu_out, _swiglu_out = (
    plain_call(operation, "activation_out") for operation in ("gelu", "silu", "geglu", "swiglu")
)


def gelu(
    x: Tensor,
    approximate: str = "none",
    bias: Optional[Tensor] = None,
    *,
    out: Optional[Tensor] = None,
) -> Tensor:
    """Gaussian error linear unit of ``x + bias``, as ``torch.nn.functional.gelu``.

    Args:
        x: ``(..., D)``, T.
        approximate: ``"none"``, ``x * Φ(x)``, or ``"tanh"``,
            ``x / 2 * (1 + tanh(sqrt(2 / π) * (x + 0.044715 x³)))``.
        bias: ``(D,)``, T, or None.
        out: ``(..., D)``, T, or None; may be ``x`` itself.

    Source: Hendrycks and Gimpel, 2016, https://arxiv.org/abs/1606.08415.
    """
    tanh = choice("gelu", "approximate", approximate, _APPROXIMATIONS)
    if out is None:
        return _gelu(x, bias, False, False, tanh, False)
    _gelu_out(x, bias, False, False, tanh, False, out, written=(out,), refused=_OUT_GIVEN)
    return out


def silu(x: Tensor, bias: Optional[Tensor] = None, *, out: Optional[Tensor] = None) -> Tensor:
    """Sigmoid linear unit, ``x * sigmoid(x)``, of ``x + bias``, as ``torch.nn.functional.silu``.

    Args:
        x: ``(..., D)``, T.
        bias: ``(D,)``, T, or None.
        out: ``(..., D)``, T, or None; may be ``x`` itself.

    Source: Elfwing et al., 2017, https://arxiv.org/abs/1702.03118.
    """
    if out is None:
        return _silu(x, bias, True, False, False, False)
    _silu_out(x, bias, True, False, False, False, out, written=(out,), refused=_OUT_GIVEN)
    return out


def geglu(
    x: Tensor,
    approximate: str = "none",
    bias: Optional[Tensor] = None,
    *,
    activated: str = "second",
    out: Optional[Tensor] = None,
) -> Tensor:
    """GELU-gated linear unit of ``x + bias``: one half times ``gelu`` of the other.

    Args:
        x: ``(..., 2 * D)``, T.
        approximate: the GELU's approximation, ``"none"`` or ``"tanh"``.
        bias: ``(2 * D,)``, T, or None.
        activated: the half that goes through the GELU, ``"second"`` as in diffusers' GEGLU, or ``"first"``.
        out: ``(..., D)``, T, or None.

    Returns:
        ``(..., D)``, T.

    Source: Shazeer, 2020, https://arxiv.org/abs/2002.05202.
    """
    tanh = choice("geglu", "approximate", approximate, _APPROXIMATIONS)
    first = choice("geglu", "activated", activated, _HALVES)
    if out is None:
        return _geglu(x, bias, False, True, tanh, first)
    _geglu_out(x, bias, False, True, tanh, first, out, written=(out,), refused=_OUT_GIVEN)
    return out


def swiglu(
    x: Tensor,
    bias: Optional[Tensor] = None,
    *,
    activated: str = "second",
    out: Optional[Tensor] = None,
) -> Tensor:
    """SiLU-gated linear unit of ``x + bias``: one half times ``silu`` of the other.

    Args:
        x: ``(..., 2 * D)``, T.
        bias: ``(2 * D,)``, T, or None.
        activated: the half that goes through the SiLU, ``"second"`` as in diffusers' SwiGLU, or ``"first"``
            as in FLUX.2.
        out: ``(..., D)``, T, or None.

    Returns:
        ``(..., D)``, T.

    Source: Shazeer, 2020, https://arxiv.org/abs/2002.05202.
    """
    first = choice("swiglu", "activated", activated, _HALVES)
    if out is None:
        return _swiglu(x, bias, True, True, False, first)
    _swiglu_out(x, bias, True, True, False, first, out, written=(out,), refused=_OUT_GIVEN)
    return out


_gelu_fp8, _geglu_fp8, _swiglu_fp8 = (
    plain_call(operation, "activation_fp8") for operation in ("gelu_fp8", "geglu_fp8", "swiglu_fp8")
)
_swiglu_fp8_out = plain_call("swiglu_fp8", "activation_fp8_out")


def gelu_fp8(
    x: Tensor, approximate: str = "none", bias: Optional[Tensor] = None
) -> tuple[Tensor, Tensor]:
    """As ``gelu``, with the result quantized as by ``quantize_fp8``, from the unrounded value.

    Returns:
        ``(values, scale)``: float8_e4m3fn ``(..., D)`` and float32 ``(..., 1)``.
    """
    tanh = choice("gelu_fp8", "approximate", approximate, _APPROXIMATIONS)
    return _gelu_fp8(x, bias, False, False, tanh, False, False)


def geglu_fp8(
    x: Tensor,
    approximate: str = "none",
    bias: Optional[Tensor] = None,
    *,
    activated: str = "second",
) -> tuple[Tensor, Tensor]:
    """As ``geglu``, with the result quantized as by ``quantize_fp8``, from the unrounded value.

    Returns:
        ``(values, scale)``, as from ``gelu_fp8``.
    """
    tanh = choice("geglu_fp8", "approximate", approximate, _APPROXIMATIONS)
    first = choice("geglu_fp8", "activated", activated, _HALVES)
    return _geglu_fp8(x, bias, False, True, tanh, first, False)


def swiglu_fp8(
    x: Tensor,
    bias: Optional[Tensor] = None,
    *,
    activated: str = "second",
    block_size: Optional[int] = None,
    out: Optional[tuple[Tensor, Tensor]] = None,
) -> tuple[Tensor, Tensor]:
    """As ``swiglu``, with the result quantized as by ``quantize_fp8``, from the unrounded value.

    Args:
        x, bias, activated: as for ``swiglu``.
        block_size: None for one scale per row, or 128 for one per block, as for ``quantize_fp8``.
        out: ``(values, scale)`` of the results' shapes and dtypes, or None. Each is strided in any dimension
            except the last, for example columns of a wider tensor, and shares no memory with the other or an
            input. Values whose rows are not all aligned to 8 bytes take longer.

    Returns:
        ``(values, scale)``: float8_e4m3fn ``(..., D)`` and float32 ``(..., 1)`` or ``(..., ceil(D / 128))``.
    """
    first = choice("swiglu_fp8", "activated", activated, _HALVES)
    arguments = x, bias, True, True, False, first, _is_blocked("swiglu_fp8", block_size)
    if out is None:
        return _swiglu_fp8(*arguments)
    out = _fp8_out("swiglu_fp8", out)
    _swiglu_fp8_out(*arguments, *out, written=out)
    return out


@torch.library.register_fake(add_op_namespace_prefix("activation"))
def _activation_fake(x, bias, is_silu, is_gated, *_):
    halves = [x.shape[-1] // 2] if is_gated and x.dim() else x.shape[-1:]
    return x.new_empty([*x.shape[:-1], *halves])


@torch.library.register_fake(add_op_namespace_prefix("activation_fp8"))
def _activation_fp8_fake(x, *options):
    return _quantize_fp8_fake(_activation_fake(x, *options), options[-1])


@torch.library.register_fake(add_op_namespace_prefix("activation_out"))
@torch.library.register_fake(add_op_namespace_prefix("activation_fp8_out"))
def _activation_out_fake(x, *_):
    required(x)


# --------------------------------------------------------------------------------------------------
# Softmax and attention

_softmax = kernel_call("softmax", "softmax", formulas.softmax)
_attention = kernel_call("attention", "attention", formulas.attention)
_attention_lse = kernel_call("attention", "attention_lse", formulas.attention_lse)
_attention_out = plain_call("attention", "attention_out")


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension, ``exp(x - max(x)) / sum(exp(x - max(x)))``.

    Args:
        x: ``(..., D)``, T.

    Source: Milakov and Gimelshein, 2018 (online softmax), https://arxiv.org/abs/1805.02867.
    """
    return _softmax(x)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: Optional[float] = None,
    key_bias: Optional[Tensor] = None,
    key_lengths: Optional[Tensor] = None,
    heads: Optional[int] = None,
    gate: Optional[Tensor] = None,
    addend: Optional[Tensor] = None,
    out: Optional[Tensor] = None,
    return_lse: bool = False,
) -> Any:
    """Attention, not causal: ``softmax(scale * q kᵀ + key_bias) v * gate + addend`` of each batch entry and
    head.

    Args:
        q: ``(B, Sq, H, d)``, bfloat16 or float16; d is a multiple of 8 up to 128; strided in any dimension
            except the last, such as a view of a packed projection.
        k, v: ``(B, Sk, Hk, d)``, likewise, of q's dtype. H is a multiple of Hk, and query head ``h``
            attends to key head ``h // (H // Hk)`` (grouped-query attention).
        scale: positive and finite; None for ``1 / sqrt(d)``.
        key_bias: ``(B, Sk)``, float32 or of q's dtype, or None; added to the scores of every head and
            query. -inf masks a key. A query whose keys are all masked gives zeros.
        key_lengths: ``(B,)``, int32, contiguous, or None. Keys from ``key_lengths[b]`` on are skipped;
            their contents, even NaN, have no effect. Lengths are read on the device and clamped to
            ``0 ... Sk``. A batch entry without keys gives zeros.
        heads: H, if q is ``(B, Sq, H * d)`` and k and v are ``(B, Sk, Hk * d)``, as linear layers return
            them; otherwise None.
        gate: ``(B, Sq, H)``, float32 or of q's dtype, or None; strided. A factor of each query and head.
        addend: of q's shape and dtype, or None; strided like q. Added before the result is rounded, such as
            the attention of the same queries to other keys.
        out: of q's shape and dtype, or None. On CUDA an ``out`` whose heads are not all aligned to 16 bytes
            needs temporary memory of its size.
        return_lse: also return ``lse``, the logarithm of the sum of the exponentials of each query's scores,
            ``log(sum(exp(scale * q kᵀ + key_bias)))``. A query without keys has -inf. ``gate`` and ``addend``
            have no effect on it. It needs ``out`` None.

    Returns:
        A tensor of q's shape, contiguous, or ``out``. With ``return_lse`` ``(out, lse)``, where ``lse`` is
        ``(B, Sq, H)``, float32, contiguous.

    With ``lse``, results for parts of the keys can be merged, for example those of several GPUs: the weight
    of a part is ``exp(lse - total)``, where ``total`` is the logsumexp of the ``lse`` of all parts. With
    ``return_lse`` the backward needs memory for all scores in float32.

    On CUDA the softmax probabilities are rounded to 16 bits for the tensor cores. bfloat16 inputs with at
    least 1024 queries, at least 257 keys and no bias use float16, which has eight times the precision of
    bfloat16. This needs temporary memory of v's size, for v in float16. Queries that exceed float16's range
    are recomputed in bfloat16.

    Source: Vaswani et al., 2017, https://arxiv.org/abs/1706.03762; in one pass over the keys as in
    Dao et al., 2022, https://arxiv.org/abs/2205.14135.
    """
    if scale is not None:
        scale = scale_number("attention", "scale", scale)
    if heads is not None and (type(heads) is not int or not 0 < heads <= MAX_INTEGER):
        heads = count("attention", "heads", heads, "an integer or None")
    if return_lse is not False:
        if return_lse is not True:
            refuse_type("attention", "return_lse", "True or False", return_lse)
        if out is not None:
            fail("attention", f"out must be None with return_lse, got {shown(out)}")
        return _attention_lse(q, k, v, scale, key_bias, key_lengths, heads, gate, addend)
    if out is None:
        return _attention(q, k, v, scale, key_bias, key_lengths, heads, gate, addend)
    arguments = q, k, v, scale, key_bias, key_lengths, heads, gate, addend, out
    _attention_out(*arguments, written=(out,), refused=_OUT_GIVEN)
    return out


@torch.library.register_fake(add_op_namespace_prefix("softmax"))
def _softmax_fake(x):
    return x.new_empty(x.shape)


@torch.library.register_fake(add_op_namespace_prefix("attention"))
def _attention_fake(q, k, v, *_):
    required(k, v)
    return q.new_empty(q.shape)


@torch.library.register_fake(add_op_namespace_prefix("attention_lse"))
def _attention_lse_fake(q, k, v, _scale, _bias, _lengths, heads, *_):
    required(k, v)
    count = q.shape[2] if heads is None else heads
    return q.new_empty(q.shape), q.new_empty((*q.shape[:2], count), dtype=torch.float32)


@torch.library.register_fake(add_op_namespace_prefix("attention_out"))
def _attention_out_fake(q, k, v, *_):
    required(q, k, v)


# --------------------------------------------------------------------------------------------------
# FP8

_quantize_fp8, _linear_fp8, _linears_fp8, _linear_gelu_fp8, _linear_gated_residual_fp8 = (
    plain_call(name, name)
    for name in (
        "quantize_fp8",
        "linear_fp8",
        "linears_fp8",
        "linear_gelu_fp8",
        "linear_gated_residual_fp8",
    )
)
_quantize_fp8_out, _linear_gelu_fp8_out = (
    plain_call(name, f"{name}_out") for name in ("quantize_fp8", "linear_gelu_fp8")
)


def quantize_fp8(
    x: Tensor,
    *,
    block_size: Optional[int] = None,
    out: Optional[tuple[Tensor, Tensor]] = None,
) -> tuple[Tensor, Tensor]:
    """Quantization to FP8 with a scale for each row or block: ``scale = max(|x|) / 448`` and ``x / scale``.

    Args:
        x: ``(..., D)``, T. It must not require grad.
        block_size: None for one scale per row, or 128 for one per block of 128 elements of a row. The last
            block of a row may be shorter.
        out: ``(values, scale)`` of the results' shapes and dtypes, or None. Each is strided in any dimension
            except the last, for example columns of a wider tensor, and shares no memory with the other or x.

    Returns:
        ``x / scale``, ``(..., D)``, float8_e4m3fn, rounded to nearest even; and the scale, float32,
        ``(..., 1)`` or ``(..., ceil(D / 128))``. Both are 0 where the scale would be below float32's smallest
        normal number, and NaN where a NaN or an infinity shares the scale.

    Source: Micikevicius et al., 2022 (FP8), https://arxiv.org/abs/2209.05433; blocks of 128 as in
    DeepSeek-AI, 2024 (DeepSeek-V3), https://arxiv.org/abs/2412.19437.
    """
    is_blocked = _is_blocked("quantize_fp8", block_size)
    if out is None:
        return _quantize_fp8(x, is_blocked)
    out = _fp8_out("quantize_fp8", out)
    _quantize_fp8_out(x, is_blocked, *out, written=out)
    return out


def linear_fp8(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Optional[Tensor] = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Linear layer of FP8 tensors: ``(x * x_scale) @ (weight * weight_scale).T + bias``.

    No input may require grad.

    Args:
        x: ``(..., K)``, float8_e4m3fn, contiguous and aligned to 16 bytes; K is a multiple of 16.
        x_scale: ``(..., 1)``, or ``(..., ceil(K / 128))`` with a scale for each block of 128 elements of a
            row; float32, contiguous.
        weight: ``(N, K)``, float8_e4m3fn, contiguous and aligned to 16 bytes.
        weight_scale: ``(N, 1)``, or one element: ``()``, ``(1,)`` or ``(1, 1)``; float32, contiguous.
        bias: ``(N,)``, float32 or of the result's dtype, or None.
        dtype: of the result, bfloat16 or float16.

    Returns:
        A tensor ``(..., N)``. Sums of 128 products, of which a GPU keeps about 14 bits, are added in float32,
        and the result is rounded once.
    """
    is_float16 = _is_float16("linear_fp8", dtype)
    return _linear_fp8(x, x_scale, weight, weight_scale, bias, is_float16)


def linears_fp8(
    x: Tensor,
    x_scale: Tensor,
    weights: Sequence[Tensor],
    weight_scales: Sequence[Tensor],
    biases: Optional[Sequence[Optional[Tensor]]] = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, ...]:
    """Two or three linear layers of one FP8 input in one launch, such as query, key and value.

    Args:
        x, x_scale: as for ``linear_fp8``.
        weights: two or three weights ``(N, K)``, as for ``linear_fp8``. Each has its own N.
        weight_scales: the scale of each weight, as for ``linear_fp8``.
        biases: the bias of each weight, as for ``linear_fp8``, or None.
        dtype: of the results, bfloat16 or float16.

    Returns:
        A tensor ``(..., N)`` for each weight, with the values of ``linear_fp8``.
    """
    is_float16 = _is_float16("linears_fp8", dtype)
    given: dict[str, Any] = {"weights": weights, "weight_scales": weight_scales}
    if biases is not None:
        given["biases"] = biases
    for name, tensors in given.items():
        if not isinstance(tensors, (tuple, list)):
            accepted = "a tuple or list" if name != "biases" else "a tuple, a list or None"
            refuse_type("linears_fp8", name, accepted, tensors)
    if len(weights) not in (2, 3):
        fail("linears_fp8", f"weights must hold 2 or 3 tensors, got {len(weights)}")
    for name, tensors in given.items():
        if len(tensors) != len(weights):
            fail("linears_fp8", f"{name} must hold {len(weights)} tensors, got {len(tensors)}")
        if name != "biases" and len(tensors) == 3 and not isinstance(tensors[2], Tensor):
            refuse_type("linears_fp8", f"{name}[2]", "a tensor", tensors[2])
    layers = zip(weights, weight_scales, biases or [None] * len(weights))
    arguments = [tensor for layer in layers for tensor in layer]
    missing = [None] * (9 - len(arguments))
    return tuple(_linears_fp8(x, x_scale, *arguments, *missing, is_float16))


def linear_gelu_fp8(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Optional[Tensor] = None,
    *,
    approximate: str = "none",
    out: Optional[tuple[Tensor, Tensor]] = None,
) -> tuple[Tensor, Tensor]:
    """GELU of ``linear_fp8``, quantized as by ``quantize_fp8`` with ``block_size=128``, from the unrounded
    value. The result can be the x of another ``linear_fp8``.

    Args:
        x, x_scale, weight, weight_scale: as for ``linear_fp8``.
        bias: ``(N,)``, float32, float16 or bfloat16, or None.
        approximate: the GELU's approximation, ``"none"`` or ``"tanh"``.
        out: ``(values, scale)`` of the results' shapes and dtypes, or None. Each is strided in any dimension
            except the last, for example columns of a wider tensor, and shares no memory with the other or an
            input. Values whose rows are not all aligned to 16 bytes take longer.

    Returns:
        ``(values, scale)``: float8_e4m3fn ``(..., N)`` and float32 ``(..., ceil(N / 128))``.
    """
    tanh = choice("linear_gelu_fp8", "approximate", approximate, _APPROXIMATIONS)
    arguments = x, x_scale, weight, weight_scale, bias, tanh
    if out is None:
        return _linear_gelu_fp8(*arguments)
    out = _fp8_out("linear_gelu_fp8", out)
    _linear_gelu_fp8_out(*arguments, *out, written=out)
    return out


def linear_gated_residual_fp8(
    residual: Tensor,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Optional[Tensor] = None,
    *,
    gate: Optional[Tensor] = None,
) -> Tensor:
    """``residual + gate * linear_fp8(x, ...)``, from the unrounded product.

    Args:
        residual: ``(..., N)``, bfloat16 or float16, strided in any dimension except the last.
        x, x_scale, weight, weight_scale: as for ``linear_fp8``.
        bias: ``(N,)``, float32, float16 or bfloat16, or None.
        gate: broadcasts against the residual, such as ``(N,)``, ``(B, 1, N)`` or ``(B, S, N)``; float32 or of
            the residual's dtype, or None for 1. With ``(B, 1, N)`` each sample is a launch of its own.

    Returns:
        A tensor of the residual's shape and dtype.
    """
    arguments = residual, x, x_scale, weight, weight_scale, bias
    return _linear_gated_residual_fp8(*arguments, gate)


def _is_float16(operation: str, dtype: Any) -> bool:
    if not isinstance(dtype, torch.dtype):
        refuse_type(operation, "dtype", "a torch.dtype", dtype)
    if dtype is not torch.bfloat16 and dtype is not torch.float16:
        given = str(dtype).replace("torch.", "")
        fail(operation, f"dtype must be bfloat16 or float16, got {given}")
    return dtype is torch.float16


def _is_blocked(operation: str, block_size: Any) -> bool:
    if block_size is None:
        return False
    if type(block_size) is not int:
        refuse_type(operation, "block_size", "an integer or None", block_size)
    if block_size != _FP8_BLOCK_SIZE:
        accepted = f"{_FP8_BLOCK_SIZE} or None"
        fail(operation, f"block_size must be {accepted}, got {shown(block_size)}")
    return True


def _fp8_out(operation: str, out: Any) -> tuple:
    if not isinstance(out, (tuple, list)) or not all(isinstance(x, Tensor) for x in out):
        refuse_type(operation, "out", "a tuple (values, scale) of tensors or None", out)
    if len(out) != 2:
        fail(operation, f"out must hold 2 tensors, got {len(out)}")
    return tuple(out)


@torch.library.register_fake(add_op_namespace_prefix("quantize_fp8"))
def _quantize_fp8_fake(x, is_blocked):
    # A tensor without dimensions raises when the kernel is called.
    per_row = -(-x.shape[-1] // _FP8_BLOCK_SIZE) if is_blocked and x.dim() > 0 else 1
    out = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return out, x.new_empty((*x.shape[:-1], per_row), dtype=torch.float32)


@torch.library.register_fake(add_op_namespace_prefix("quantize_fp8_out"))
def _quantize_fp8_out_fake(x, *_):
    required(x)


@torch.library.register_fake(add_op_namespace_prefix("linear_fp8"))
def _linear_fp8_fake(x, x_scale, weight, weight_scale, bias, is_float16):
    required(x_scale, weight, weight_scale)
    dtype = torch.float16 if is_float16 else torch.bfloat16
    return x.new_empty((*x.shape[:-1], *weight.shape[:1]), dtype=dtype)


@torch.library.register_fake(add_op_namespace_prefix("linears_fp8"))
def _linears_fp8_fake(x, x_scale, *arguments):
    *layers, is_float16 = arguments
    given = [layers[i : i + 3] for i in (0, 3, 6) if i < 6 or layers[i] is not None]
    return [_linear_fp8_fake(x, x_scale, *layer, is_float16) for layer in given]


@torch.library.register_fake(add_op_namespace_prefix("linear_gated_residual_fp8"))
def _linear_gated_residual_fp8_fake(residual, x, x_scale, weight, weight_scale, *_):
    required(x, x_scale, weight, weight_scale)
    return residual.new_empty(residual.shape)


@torch.library.register_fake(add_op_namespace_prefix("linear_gelu_fp8"))
def _linear_gelu_fp8_fake(x, x_scale, weight, weight_scale, *_):
    required(x_scale, weight, weight_scale)
    # A weight without dimensions raises when the kernel is called.
    columns = weight.shape[0] if weight.dim() > 0 else 0
    values = x.new_empty((*x.shape[:-1], columns), dtype=torch.float8_e4m3fn)
    scales = (*x.shape[:-1], -(-columns // _FP8_BLOCK_SIZE))
    return values, x.new_empty(scales, dtype=torch.float32)


@torch.library.register_fake(add_op_namespace_prefix("linear_gelu_fp8_out"))
def _linear_gelu_fp8_out_fake(x, x_scale, weight, weight_scale, *_):
    required(x, x_scale, weight, weight_scale)
