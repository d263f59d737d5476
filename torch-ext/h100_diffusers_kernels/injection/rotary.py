"""A rotary embedding given by coordinates, on its way from the model to its attentions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import is_plain
from ..conditions import kernels_take
from ..differentiation import is_differentiated
from ..functional import CoordinateRope
from .injected import Injection, Parts
from .original import Original, find_original
from .part import Part
from .snapshot import Look


@dataclass(frozen=True)
class Rotary(Part):
    """A module that makes a model's rotary embedding.

    Attributes:
        method: its method that makes the coordinates.
    """

    method: str = ""

    def originals(self) -> dict[str, Original]:
        path = f"{self.path}.{self.method}"
        return {path: find_original(path)}

    def fill(self, parts: Parts, module: nn.Module, injection: Injection, snapshot: Look) -> None:
        if not self.has_own_method(module, self.method, injection, snapshot):
            parts.reason = f"{self.method} was replaced"


class CoordinateTables(Sequence):
    """The pair (cos, sin) that a model hands to its blocks, made only where somebody reads it.

    Each is (batch, S, dim), float32. Who reads it may also change it: from then on it is the pair.

    Attributes:
        rope: the coordinates, or None once the pair has been made.
    """

    def __init__(self, rope: CoordinateRope, batch: int, dim: int) -> None:
        self.rope: CoordinateRope | None = rope
        self._batch = batch
        self._dim = dim
        self._tables: tuple[Tensor, Tensor] | None = None

    def tables(self) -> tuple[Tensor, Tensor]:
        if self._tables is None:
            rope: Any = self.rope
            cos, sin = rope.tables(self._dim)
            # Written to, an expanded table would be written for all samples.
            if cos.shape[0] != self._batch:
                cos, sin = (t.expand(self._batch, -1, -1).contiguous() for t in (cos, sin))
            self._tables, self.rope = (cos, sin), None
        return self._tables

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: Any) -> Any:
        return self.tables()[index]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tables())

    def __reduce__(self) -> tuple:
        """Copied and saved as the pair."""
        return tuple, (self.tables(),)


def as_operand(rope: Any, x: Tensor, heads: int) -> Any:
    """What ``qk_norm_rope`` takes as the rotary embedding of ``x`` (B, S, H * d) or (B, S, H, d); None if
    it does not.

    ``rope`` is a ``CoordinateTables``; a complex table (S, d / 2), for x (B, S, H, d); or (cos, sin), each
    (S, d), of one head, for x (B, S, H, d); (1 or B, S, H * d) for x (B, S, H * d); or (1 or B, S, 1, d / 2).
    """
    if isinstance(rope, CoordinateTables):
        if rope.rope is not None:
            return rope.rope if rope.rope.coordinates.device == x.device else None
        rope = rope.tables()
    pairs = x.shape[2:].numel() // heads // 2
    if isinstance(rope, Tensor):
        is_taken = (
            rope.dtype == torch.complex64
            and rope.shape == (x.shape[1], pairs)
            and x.dim() == 4
            and rope.device == x.device
            and rope.stride(1) == 1
            and is_plain(rope)
            # What torch.compile traces cannot be asked for it.
            and (torch.compiler.is_compiling() or not (rope.is_conj() or rope.is_neg()))
            and not is_differentiated(rope)
        )
        return rope if is_taken else None
    if not isinstance(rope, (tuple, list)) or len(rope) != 2:
        return None
    cos, sin = rope
    if not (isinstance(cos, Tensor) and isinstance(sin, Tensor)):
        return None
    shape, batches = cos.shape, (1, x.shape[0])
    if len(shape) == 4:
        is_shaped = shape[0] in batches and shape[1:] == (x.shape[1], 1, pairs)
    elif x.dim() == 4:
        is_shaped = shape == (x.shape[1], x.shape[3])
    else:
        is_shaped = shape[1:] == x.shape[1:] and shape[0] in batches
    if (
        is_shaped
        and shape == sin.shape
        and cos.dtype in (torch.float32, x.dtype)
        and cos.device == x.device
        and kernels_take(cos, sin)
    ):
        return cos, sin
    return None


def split_tables(rope: Any, first: int, second: int) -> tuple | None:
    """The tables (cos, sin) of two streams of tokens from those of both; None of any other rope."""
    if not isinstance(rope, (tuple, list)) or len(rope) != 2:
        return None
    if any(not isinstance(t, Tensor) or t.dim() != 2 or len(t) != first + second for t in rope):
        return None
    return tuple(t[:first] for t in rope), tuple(t[first:] for t in rope)
