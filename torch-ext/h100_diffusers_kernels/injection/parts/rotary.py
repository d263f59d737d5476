"""Rotary embeddings: conversion from the models' forms to the kernel's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from ...operations import CoordinateRope
from ...operations.conditions import is_differentiated, is_plain_tensor, same_dtype_and_unit_stride


class CoordinateTables(Sequence):
    """The pair (cos, sin) that a model passes to its blocks, computed lazily.

    Each is float32 (batch, S, dim), or with ``heads`` (batch, heads, S, dim / heads / 2), a value for each
    pair. Code that reads the pair may change it, so it is used from then on.

    Attributes:
        rope: the coordinates, or None once the pair has been computed.
        heads: the number of heads that the pair is split between, or None.
    """

    def __init__(
        self, rope: CoordinateRope, batch: int, dim: int, heads: int | None = None
    ) -> None:
        self.rope: CoordinateRope | None = rope
        self._batch = batch
        self._dim = dim
        self.heads = heads
        self._tables: Any = None

    def tables(self) -> tuple[Tensor, Tensor]:
        if self.rope is not None:
            cos, sin = self.rope.tables(self._dim)
            # A write to an expanded table would change all samples.
            if cos.shape[0] != self._batch:
                cos, sin = (t.expand(self._batch, -1, -1).contiguous() for t in (cos, sin))
            if self.heads is not None:
                pairs = (t[..., ::2].unflatten(2, (self.heads, -1)) for t in (cos, sin))
                cos, sin = (t.transpose(1, 2) for t in pairs)
            self._tables, self.rope = (cos, sin), None
        return self._tables

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """The pair moved or cast, as ``Tensor.to``. accelerate moves a block's arguments so."""
        if self.rope is not None:
            moved = CoordinateRope(*[tensor.to(*args, **kwargs) for tensor in self.rope])
            if moved.coordinates is self.rope.coordinates:
                return self
            if moved.coordinates.dtype == torch.float32:
                return self.with_rope(moved)
        return tuple(table.to(*args, **kwargs) for table in self.tables())

    def with_rope(self, rope: CoordinateRope) -> CoordinateTables:
        return CoordinateTables(rope, self._batch, self._dim, self.heads)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: Any) -> Any:
        return self.tables()[index]

    def __reduce__(self) -> tuple:
        """Copies and pickles the pair."""
        return tuple, (self.tables(),)


# For code that maps over the tensors of a block's arguments.
register_pytree_node(
    CoordinateTables, lambda pair: (list(pair), None), lambda values, _: tuple(values)
)


def part_of_tables(tables: Sequence[Tensor], index: int, count: int) -> Any:
    """The ``index``-th of ``count`` parts of tables (..., S, d), which may be ``CoordinateTables``."""
    if type(tables) is CoordinateTables and tables.rope is not None:
        rope = tables.rope
        coordinates = rope.coordinates.tensor_split(count, dim=1)[index]
        return tables.with_rope(rope._replace(coordinates=coordinates))
    return tuple(table.tensor_split(count, dim=-2)[index] for table in tables)


def rope_operand(rope: Any, x: Tensor, heads: int, per_head: bool) -> Any:
    """The ``rope`` argument of ``qk_norm_rope`` for ``x`` (B, S, H * d); None if it does not take this one.

    ``rope`` is a ``CoordinateTables``, or (cos, sin), each (1 or B, S, 1 or H, d / 2). With ``per_head`` each
    may also be (S, d) or (1 or B, S, 1 or H, d), or ``rope`` a complex table (S, d / 2). Without, each may be
    (1 or B, S, H * d).
    """
    if type(rope) is CoordinateTables:
        if rope.rope is not None and rope.heads in (None, heads):
            is_here = rope.rope.coordinates.device == x.device
            return rope.rope if is_here else rope.to(x.device).rope
        rope = rope.tables()
    batch, length, size = x.shape
    head_dim = size // heads
    if isinstance(rope, Tensor):
        is_taken = (
            per_head
            and rope.dtype == torch.complex64
            and rope.shape == (length, head_dim // 2)
            and rope.device == x.device
            and rope.stride(1) == 1
            and is_plain_tensor(rope)
            # torch.compile cannot trace this check.
            and (torch.compiler.is_compiling() or not (rope.is_conj() or rope.is_neg()))
            and not is_differentiated(rope)
        )
        return rope if is_taken else None
    if not isinstance(rope, (tuple, list)) or len(rope) != 2:
        return None
    cos, sin = rope
    if not (isinstance(cos, Tensor) and isinstance(sin, Tensor)):
        return None
    shape = cos.shape
    if len(shape) == 4:
        is_shaped = shape[0] in (1, batch) and shape[1] == length and shape[2] in (1, heads)
        is_shaped = is_shaped and shape[3] in (head_dim // 2, head_dim if per_head else -1)
    elif per_head:
        is_shaped = shape == (length, head_dim)
    else:
        is_shaped = shape[1:] == (length, size) and shape[0] in (1, batch)
    if (
        is_shaped
        and shape == sin.shape
        and cos.dtype in (torch.float32, x.dtype)
        and cos.device == sin.device == x.device
        and same_dtype_and_unit_stride(cos, sin)
    ):
        return cos, sin
    return None


def tables_of_matrices(rope: Tensor) -> tuple[Tensor, Tensor]:
    """Tables (cos, sin), float32 (..., d), of matrices (..., d / 2, 2, 2), which a user may have changed, for
    the pairs (2i, 2i + 1): factors of each element and of the other one of its pair."""
    rope = rope.float()
    sin = torch.stack((-rope[..., 0, 1], rope[..., 1, 0]), dim=-1)
    return rope.diagonal(dim1=-2, dim2=-1).flatten(-2).contiguous(), sin.flatten(-2)


def rotated_in_float32(x: Tensor, tables: Sequence[Tensor]) -> Tensor:
    """x (B, S, H, d), whose pairs are (2i, 2i + 1), rotated by tables (cos, sin) of one value an element, as
    some models' own code rotates it."""
    cos, sin = tables
    first, second = x.float().unflatten(3, (-1, 2)).unbind(-1)
    others = torch.stack((-second, first), dim=-1).flatten(3)
    return (x.float() * cos + others * sin).to(x.dtype)


def rotated_across_heads(x: Tensor, tables: Sequence[Tensor]) -> Tensor:
    """x (B, S, H * d), whose pairs are (2i, 2i + 1), rotated by tables (cos, sin) of one value a pair, as
    some models' own code rotates it."""
    cos, sin = tables
    pairs = x.unflatten(2, (-1, cos.shape[-1], 2))
    first, second = pairs.unbind(-1)
    turned = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return turned.to(x.dtype).flatten(2)


def split_tables(rope: Any, first: int, second: int) -> tuple | None:
    """The tables (cos, sin) of two streams, split from those of all tokens; None for any other rope."""
    if not isinstance(rope, (tuple, list)) or len(rope) != 2:
        return None
    cos, sin = rope
    if not (isinstance(cos, Tensor) and isinstance(sin, Tensor)):
        return None
    if cos.shape != sin.shape or cos.dim() != 2 or cos.shape[0] != first + second:
        return None
    return (cos[:first], sin[:first]), (cos[first:], sin[first:])
