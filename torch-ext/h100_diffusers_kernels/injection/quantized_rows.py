"""Rows that an operation has quantized for the layers that take its result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import functional


class QuantizedRows:
    """The input of FP8 layers, quantized as by ``quantize_fp8``, in place of its tensor.

    A block passes it to an attention or a feed-forward that multiplies it by FP8 weights only. It has what
    their forwards read of the tensor. All other code gets the tensor, by ``as_tensor``.

    Attributes:
        values, scale: the operation's results.
        dtype: the tensor's.
        weights: the ``fp8_linears.Fp8Weight`` of each layer that was found to take it.
    """

    __slots__ = ("dtype", "scale", "values", "weights")

    def __init__(
        self, values: Tensor, scale: Tensor, dtype: torch.dtype, weights: dict[Any, Any]
    ) -> None:
        self.values = values
        self.scale = scale
        self.dtype = dtype
        self.weights = weights

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device


def quantized_rows(x: Any) -> QuantizedRows:
    return (
        x if type(x) is QuantizedRows else QuantizedRows(*functional.quantize_fp8(x), x.dtype, {})
    )


def as_tensor(x: Any) -> Any:
    """x itself, or the tensor that quantized rows stand for."""
    return (x.values.float() * x.scale).to(x.dtype) if type(x) is QuantizedRows else x
