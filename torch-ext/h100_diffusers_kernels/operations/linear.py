"""Linear layers with low-rank terms. They have no derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix
from .calls import (
    APPROXIMATIONS,
    fail,
    layers_of,
    out_tensors,
    plain_call,
    refuse_type,
    required,
    shown,
)

_linears_lora = plain_call("linears_lora")
_linears_lora_out = plain_call("linears_lora", "linears_lora_out")


def _gelu(approximate: Any) -> tuple[bool, bool]:
    """The operator's values: whether there is a GELU, and whether by tanh."""
    if approximate is None:
        return False, False
    if not isinstance(approximate, str):
        refuse_type("linears_lora", "approximate", "a string or None", approximate)
    if approximate not in APPROXIMATIONS:
        got = shown(approximate)
        fail("linears_lora", f"approximate must be 'none', 'tanh' or None, got {got}")
    return True, APPROXIMATIONS[approximate]


def linears_lora(
    x: Tensor,
    weights: Sequence[Tensor],
    lows: Sequence[Optional[Tensor]],
    ups: Sequence[Optional[Tensor]],
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
            multiple of 8 elements, as in columns of a wider contiguous tensor, and aligned to 16 bytes.
        ups: of each layer with a low ``(N, R)``, contiguous and aligned to 16 bytes; otherwise None.
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
    operation = "linears_lora"
    has_gelu, tanh = _gelu(approximate)
    given = {"weights": weights, "lows": lows, "ups": ups}
    for name in ("lows", "ups"):
        if not isinstance(given[name], (tuple, list)):
            refuse_type(operation, name, "a tuple or list", given[name])
    layers = layers_of(
        operation, {"weights": weights}, {"lows": lows, "ups": ups, "biases": biases}, minimum=1
    )
    arguments = [tensor for layer in layers for tensor in layer]
    missing = [None] * (12 - len(arguments))
    if out is None:
        return tuple(_linears_lora(x, *arguments, *missing, has_gelu, tanh))
    out = out_tensors(operation, out, "(first, ...)", len(layers))
    return _linears_lora_out(
        x, *arguments, *missing, has_gelu, tanh, *out, *[None] * (3 - len(out)), written=out
    )


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
