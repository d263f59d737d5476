"""Rows that an operation has quantized for the layers that take its result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import operations

FP8_BLOCK = 128  # elements of a row that have a scale of their own, unless the row has one
_LONGEST_ROW = 18432  # that a kernel reads once for one scale


class QuantizedRows:
    """The input of FP8 layers, quantized as by ``quantize_fp8``, in place of its tensor.

    A block passes it to an attention or a feed-forward that multiplies it by FP8 weights only. It has what
    their forwards read of the tensor. All other code gets the tensor, by ``as_tensor``.

    Attributes:
        values, scale: the operation's results.
        dtype: the tensor's.
        weights: the ``fp8_linears.Fp8Weight`` of each layer that was found to take it.
        shape: the tensor's.
        lows: the first products of these weights' adapters, once one was needed, by their terms.
    """

    __slots__ = ("dtype", "lows", "scale", "shape", "values", "weights")

    def __init__(
        self, values: Tensor, scale: Tensor, dtype: torch.dtype, weights: dict[Any, Any]
    ) -> None:
        self.values, self.scale, self.dtype, self.weights = values, scale, dtype, weights
        self.shape = values.shape
        self.lows: dict[int, Any] | None = None

    def __getitem__(self, index: Any) -> QuantizedRows:
        """Some of the rows."""
        return QuantizedRows(self.values[index], self.scale[index], self.dtype, self.weights)

    def contiguous(self) -> QuantizedRows:
        values, scale = self.values.contiguous(), self.scale.contiguous()
        return QuantizedRows(values, scale, self.dtype, self.weights)

    @property
    def device(self) -> torch.device:
        return self.values.device


def quantized_rows(x: Any) -> QuantizedRows:
    """x itself, or its quantized rows."""
    if type(x) is QuantizedRows:
        return x
    block_size = None if x.shape[-1] <= _LONGEST_ROW else FP8_BLOCK
    return QuantizedRows(*operations.quantize_fp8(x, block_size=block_size), x.dtype, {})


def as_tensor(x: Any) -> Any:
    """x itself, or the tensor that quantized rows stand for."""
    if type(x) is not QuantizedRows:
        return x
    values, scale = x.values.float(), x.scale
    if scale.shape[-1] > 1:
        scale = scale.repeat_interleave(FP8_BLOCK, -1)[..., : values.shape[-1]]
    return (values * scale).to(x.dtype)
