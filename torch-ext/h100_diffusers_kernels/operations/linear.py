"""Linear layers with low-rank terms, and the terms' first products. They have no derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Optional, Union

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix
from .calls import (
    APPROXIMATIONS,
    PLAIN_TYPES,
    fail,
    layers_of,
    number,
    out_tensors,
    plain_call,
    refuse_type,
    required,
    shown,
)

# Whether there is a GELU, and whether by tanh.
_GELUS: dict[Any, tuple[bool, bool]] = {
    None: (False, False),
    **{approximate: (True, by_tanh) for approximate, by_tanh in APPROXIMATIONS.items()},
}
_NO_OUTS = (None,) * 3

_linears_lora = plain_call("linears_lora")
_linears_lora_out = plain_call("linears_lora", "linears_lora_out")


def _refuse_gelu(approximate: Any) -> NoReturn:
    if not isinstance(approximate, str):
        refuse_type("linears_lora", "approximate", "a string or None", approximate)
    got = shown(approximate)
    fail("linears_lora", f"approximate must be 'none', 'tanh' or None, got {got}")


def linears_lora(
    x: Tensor,
    weights: Sequence[Tensor],
    lows: Optional[Sequence[Optional[Tensor]]] = None,
    ups: Optional[Sequence[Union[Tensor, Sequence[Tensor], None]]] = None,
    biases: Optional[Sequence[Optional[Tensor]]] = None,
    *,
    approximate: Optional[str] = None,
    out: Optional[Sequence[Tensor]] = None,
) -> tuple[Tensor, ...]:
    """One to three linear layers of one input in one launch, each with a low-rank term, and optionally their
    GELU: ``x @ weight.T + low @ up.T + bias``. A LoRA is ``low = x @ down.T`` and ``up``, with its scale in
    either.

    No input may require grad. All tensors have x's dtype.

    Args:
        x: ``(..., K)``, bfloat16 or float16, contiguous and aligned to 16 bytes; K is a multiple of 8.
        weights: of one to three layers, each ``(N, K)`` with its own N, contiguous and aligned to 16 bytes.
        lows: of each layer ``(..., R)`` with its own R, a multiple of 8, or None. Rows are at one distance, a
            multiple of 8 elements, as in columns of a wider contiguous tensor, and aligned to 16 bytes. Or
            None.
        ups: of each layer with a low ``(N, R)``, contiguous and aligned to 16 bytes, or two to four tensors
            whose R are multiples of 8 and add up to low's; otherwise None. Or None.
        biases: of each layer ``(N,)`` or None, or None.
        approximate: None for no activation, otherwise as for ``gelu``.
        out: a tensor ``(..., N)`` for each result, strided in any dimension except the last, for example
            tokens of a longer sequence, or None. They share no memory with each other or an input. Rows that
            are not all aligned to 16 bytes take longer. Each sample is a launch of its own if rows are not at
            one distance.

    Returns:
        A tensor ``(..., N)`` for each weight. Sums are float32 and are rounded once.

    Source: Hu et al., 2021 (LoRA), https://arxiv.org/abs/2106.09685.
    """
    if not (approximate is None or isinstance(approximate, str)) or approximate not in _GELUS:
        _refuse_gelu(approximate)
    gelu = _GELUS[approximate]
    layers, more = layers_of(
        "linears_lora",
        {"weights": weights},
        {"lows": lows, "ups": ups, "biases": biases},
        minimum=1,
    )
    if out is None:
        return tuple(_linears_lora(x, *layers, *gelu, more))
    out = out_tensors("linears_lora", out, "(first, ...)", len(weights))
    return _linears_lora_out(x, *layers, *gelu, *out, *_NO_OUTS[len(out) :], more, written=out)


@torch.library.register_fake(add_op_namespace_prefix("linears_lora"))
def _linears_lora_fake(
    x, weight_0, low_0, up_0, bias_0, weight_1, low_1, up_1, bias_1, weight_2, *_
):
    required(x, weight_0)
    weights = (weight for weight in (weight_0, weight_1, weight_2) if weight is not None)
    return [x.new_empty((*x.shape[:-1], *weight.shape[:1])) for weight in weights]


@torch.library.register_fake(add_op_namespace_prefix("linears_lora_out"))
def _linears_lora_out_fake(x, weight_0, *_):
    required(x, weight_0)


_lora_down = plain_call("lora_down")
MAX_DOWNS = 12


def lora_down(
    x: Tensor,
    downs: Sequence[Tensor],
    scales: Optional[Sequence[float]] = None,
    x_scale: Optional[Tensor] = None,
) -> Tensor:
    """LoRA's first products of one input and the matrices of several adapters and layers, in one launch:
    ``scale * (x * x_scale) @ down.T`` of each matrix, next to each other.

    No input may require grad.

    Args:
        x: ``(..., K)``, contiguous and aligned to 16 bytes: float8_e4m3fn with x_scale, where K is a multiple
            of 16, or of downs' dtype without it, where K is a multiple of 8.
        downs: 1 to 12 tensors ``(R, K)``, each with its own R, all bfloat16 or all float16, contiguous and
            aligned to 16 bytes.
        scales: a factor of each product, or None for 1.
        x_scale: as for ``linear_fp8``, or None.

    Returns:
        A tensor ``(..., C)`` of downs' dtype. The columns of each matrix begin at a multiple of 8, and those
        between are 0 if x is finite: C is the sum of all R, each rounded up to a multiple of 8, and at most
        1024. Sums are float32, and the result is rounded once.

    Source: Hu et al., 2021 (LoRA), https://arxiv.org/abs/2106.09685.
    """
    if not isinstance(downs, (tuple, list)):
        refuse_type("lora_down", "downs", "a tuple or list", downs)
    count = len(downs)
    if not 1 <= count <= MAX_DOWNS:
        fail("lora_down", f"downs must hold 1 to {MAX_DOWNS} tensors, got {count}")
    if not PLAIN_TYPES.issuperset(map(type, downs)):
        for i, down in enumerate(downs):
            if not isinstance(down, Tensor):
                refuse_type("lora_down", f"downs[{i}]", "a tensor", down)
    if scales is None:
        scales = (1.0,) * count
    elif not isinstance(scales, (tuple, list)):
        refuse_type("lora_down", "scales", "a tuple, a list or None", scales)
    elif len(scales) != count:
        fail("lora_down", f"scales must hold {count} numbers, got {len(scales)}")
    elif {*map(type, scales)} != {float}:
        scales = [number("lora_down", f"scales[{i}]", scale) for i, scale in enumerate(scales)]
    if count == 1:
        return _lora_down(x, x_scale, downs[0], scales[0])
    return _lora_down(x, x_scale, downs[0], scales[0], downs[1:], scales[1:])


@torch.library.register_fake(add_op_namespace_prefix("lora_down"))
def _lora_down_fake(x, x_scale, down, scale, more_downs=None, more_scales=None):
    required(x, down)
    columns = sum(-(-each.shape[0] // 8) * 8 for each in (down, *(more_downs or ())))
    return x.new_empty((*x.shape[:-1], columns), dtype=down.dtype)
