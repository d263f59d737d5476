"""FP8: quantization and linear layers. These operations have no derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional, Union

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix
from .calls import (
    APPROXIMATIONS,
    SEQUENCE_TYPES,
    choice,
    dtype_name,
    fail,
    first_up,
    layers_of,
    out_tensors,
    plain_call,
    refuse_type,
    required,
    shown,
)

_BLOCK_SIZE = 128

_quantize_fp8 = plain_call("quantize_fp8")
_quantize_fp8_out = plain_call("quantize_fp8", "quantize_fp8_out")


def is_blocked(operation: str, block_size: Any) -> bool:
    """The operator's value for ``block_size``."""
    if block_size is None:
        return False
    if type(block_size) is not int:
        refuse_type(operation, "block_size", "an integer or None", block_size)
    if block_size != _BLOCK_SIZE:
        fail(operation, f"block_size must be {_BLOCK_SIZE} or None, got {shown(block_size)}")
    return True


def quantize_fp8(
    x: Tensor, *, block_size: Optional[int] = None, out: Optional[tuple[Tensor, Tensor]] = None
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
    blocked = is_blocked("quantize_fp8", block_size)
    if out is None:
        return _quantize_fp8(x, blocked)
    out = out_tensors("quantize_fp8", out, "(values, scale)", 2)
    return _quantize_fp8_out(x, blocked, *out, written=out)


@torch.library.register_fake(add_op_namespace_prefix("quantize_fp8"))
def quantize_fp8_fake(x, blocked):
    # A tensor without dimensions raises when the kernel is called.
    per_row = -(-x.shape[-1] // _BLOCK_SIZE) if blocked and x.dim() > 0 else 1
    values = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return values, x.new_empty((*x.shape[:-1], per_row), dtype=torch.float32)


@torch.library.register_fake(add_op_namespace_prefix("quantize_fp8_out"))
def _quantize_fp8_out_fake(x, *_):
    required(x)


_linear_fp8 = plain_call("linear_fp8")
_linears_fp8 = plain_call("linears_fp8")
_linear_gelu_fp8 = plain_call("linear_gelu_fp8")
_linear_gelu_fp8_out = plain_call("linear_gelu_fp8", "linear_gelu_fp8_out")
_linear_gated_residual_fp8 = plain_call("linear_gated_residual_fp8")


def _is_float16(operation: str, dtype: Any) -> bool:
    if not isinstance(dtype, torch.dtype):
        refuse_type(operation, "dtype", "a torch.dtype", dtype)
    if dtype is not torch.bfloat16 and dtype is not torch.float16:
        fail(operation, f"dtype must be bfloat16 or float16, got {dtype_name(dtype)}")
    return dtype is torch.float16


def linear_fp8(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Optional[Tensor] = None,
    *,
    low: Optional[Tensor] = None,
    up: Union[Tensor, Sequence[Tensor], None] = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Linear layer of FP8 tensors: ``(x * x_scale) @ (weight * weight_scale).T + low @ up.T + bias``.

    No input may require grad.

    Args:
        x: ``(..., K)``, float8_e4m3fn, contiguous and aligned to 16 bytes; K is a multiple of 16.
        x_scale: ``(..., 1)``, or ``(..., ceil(K / 128))`` with a scale for each block of 128 elements of a
            row; float32, contiguous.
        weight: ``(N, K)``, float8_e4m3fn, contiguous and aligned to 16 bytes.
        weight_scale: ``(N, 1)``, or one element: ``()``, ``(1,)`` or ``(1, 1)``; float32, contiguous.
        bias: ``(N,)``, float32 or of the result's dtype, or None.
        low: ``(..., R)``, of the result's dtype, or None. R is a multiple of 8. Rows are at one distance, a
            multiple of 8 elements, as in columns of a wider contiguous tensor, and aligned to 16 bytes.
        up: ``(N, R)``, of low's dtype, contiguous and aligned to 16 bytes, or one to four such tensors, whose
            R are multiples of 8 and add up to low's. Given with low: a LoRA is ``low = x @ down.T`` and
            ``up``, with its scale in either.
        dtype: of the result, bfloat16 or float16.

    Returns:
        A tensor ``(..., N)``. Sums of 256 products, or of the 128 of a block of x, of which a GPU keeps about
        14 bits, are added in float32, and the result is rounded once.

    Source: Hu et al., 2021 (LoRA), https://arxiv.org/abs/2106.09685.
    """
    is_float16 = _is_float16("linear_fp8", dtype)
    more = None
    if type(up) in SEQUENCE_TYPES:
        up, more = first_up("linear_fp8", "up", up)
    return _linear_fp8(x, x_scale, weight, weight_scale, bias, low, up, is_float16, more)


def linears_fp8(
    x: Tensor,
    x_scale: Tensor,
    weights: Sequence[Tensor],
    weight_scales: Sequence[Tensor],
    biases: Optional[Sequence[Optional[Tensor]]] = None,
    *,
    lows: Optional[Sequence[Optional[Tensor]]] = None,
    ups: Optional[Sequence[Union[Tensor, Sequence[Tensor], None]]] = None,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, ...]:
    """Two or three linear layers of one FP8 input in one launch, such as query, key and value.

    Args:
        x, x_scale, dtype: as for ``linear_fp8``.
        weights, weight_scales: of two or three layers, each as for ``linear_fp8`` with its own N.
        biases: of each layer, as for ``linear_fp8``, or None.
        lows, ups: the low and up of each layer, as for ``linear_fp8`` with its own R, or None.

    Returns:
        A tensor ``(..., N)`` for each weight, with the values of ``linear_fp8``.
    """
    is_float16 = _is_float16("linears_fp8", dtype)
    layers, more = layers_of(
        "linears_fp8",
        {"weights": weights, "weight_scales": weight_scales},
        {"biases": biases, "lows": lows, "ups": ups},
        minimum=2,
    )
    return tuple(_linears_fp8(x, x_scale, *layers, is_float16, more))


def linear_gelu_fp8(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Optional[Tensor] = None,
    *,
    low: Optional[Tensor] = None,
    up: Union[Tensor, Sequence[Tensor], None] = None,
    approximate: str = "none",
    out: Optional[tuple[Tensor, Tensor]] = None,
) -> tuple[Tensor, Tensor]:
    """GELU of ``linear_fp8``, quantized as by ``quantize_fp8`` with ``block_size=128``, from the unrounded
    value. The result can be the x of another ``linear_fp8``.

    Args:
        x, x_scale, weight, weight_scale: as for ``linear_fp8``.
        bias: ``(N,)``, float32, float16 or bfloat16, or None.
        low, up: as for ``linear_fp8``, float16 or bfloat16.
        approximate: as for ``gelu``.
        out: as for ``quantize_fp8``. Values whose rows are not all aligned to 16 bytes take longer.

    Returns:
        ``(values, scale)``: float8_e4m3fn ``(..., N)`` and float32 ``(..., ceil(N / 128))``.
    """
    tanh = choice("linear_gelu_fp8", "approximate", approximate, APPROXIMATIONS)
    more = None
    if type(up) in SEQUENCE_TYPES:
        up, more = first_up("linear_gelu_fp8", "up", up)
    arguments = x, x_scale, weight, weight_scale, bias, low, up, tanh
    if out is None:
        return _linear_gelu_fp8(*arguments, more)
    out = out_tensors("linear_gelu_fp8", out, "(values, scale)", 2)
    return _linear_gelu_fp8_out(*arguments, *out, more, written=out)


def linear_gated_residual_fp8(
    residual: Tensor,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Optional[Tensor] = None,
    *,
    low: Optional[Tensor] = None,
    up: Union[Tensor, Sequence[Tensor], None] = None,
    gate: Optional[Tensor] = None,
) -> Tensor:
    """``residual + gate * linear_fp8(x, ...)``, from the unrounded product.

    Args:
        residual: ``(..., N)``, bfloat16 or float16, strided in any dimension except the last. The result has
            its shape and dtype.
        x, x_scale, weight, weight_scale: as for ``linear_fp8``.
        bias: ``(N,)``, float32, float16 or bfloat16, or None.
        low, up: as for ``linear_fp8``, of the residual's dtype.
        gate: broadcasts against the residual, such as ``(N,)``, ``(B, 1, N)`` or ``(B, S, N)``; float32 or of
            the residual's dtype, or None for 1. With ``(B, 1, N)`` each sample is a launch of its own.
    """
    more = None
    if type(up) in SEQUENCE_TYPES:
        up, more = first_up("linear_gated_residual_fp8", "up", up)
    return _linear_gated_residual_fp8(
        residual, x, x_scale, weight, weight_scale, bias, low, up, gate, more
    )


@torch.library.register_fake(add_op_namespace_prefix("linear_fp8"))
def _linear_fp8_fake(x, x_scale, weight, weight_scale, bias, low, up, is_float16, *_):
    required(x_scale, weight, weight_scale)
    dtype = torch.float16 if is_float16 else torch.bfloat16
    return x.new_empty((*x.shape[:-1], *weight.shape[:1]), dtype=dtype)


@torch.library.register_fake(add_op_namespace_prefix("linears_fp8"))
def _linears_fp8_fake(x, x_scale, *arguments):
    layers, is_float16 = [arguments[i : i + 5] for i in (0, 5, 10)], arguments[15]
    given = [layer for i, layer in enumerate(layers) if i < 2 or layer[0] is not None]
    return [_linear_fp8_fake(x, x_scale, *layer, is_float16) for layer in given]


@torch.library.register_fake(add_op_namespace_prefix("linear_gelu_fp8"))
def _linear_gelu_fp8_fake(x, x_scale, weight, weight_scale, bias, low, up, *_):
    product = _linear_fp8_fake(x, x_scale, weight, weight_scale, bias, low, up, False)
    return quantize_fp8_fake(product, True)


@torch.library.register_fake(add_op_namespace_prefix("linear_gelu_fp8_out"))
def _linear_gelu_fp8_out_fake(x, x_scale, weight, weight_scale, *_):
    required(x, x_scale, weight, weight_scale)


@torch.library.register_fake(add_op_namespace_prefix("linear_gated_residual_fp8"))
def _linear_gated_residual_fp8_fake(residual, x, x_scale, weight, weight_scale, *_):
    required(x, x_scale, weight, weight_scale)
    return residual.new_empty(residual.shape)
