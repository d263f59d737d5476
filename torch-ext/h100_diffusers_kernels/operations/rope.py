"""Rotary embedding."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix
from .calls import choice, kernel_call, refuse_type, required

LAYOUTS = {"interleaved": 0, "half": 1}
INTERLEAVED = LAYOUTS["interleaved"]


def by_head(x: Tensor, head_dim: int) -> Tensor:
    """``x`` as (B, S, H, d)."""
    x = x.reshape(x.shape[0], x.shape[1], -1)
    return x.unflatten(2, (x.shape[2] // head_dim if head_dim else 0, head_dim))


def rotated(n: Tensor, cos: Tensor, sin: Optional[Tensor], layout: int) -> Tensor:
    """``n`` (B, S, H, d), rotated in float32 by an operator's tables."""
    if sin is None:
        # Operators that write take a complex table as a real view (..., 2).
        cos, sin = (cos.real, cos.imag) if cos.is_complex() else cos.unbind(-1)
    _, _, heads, head_dim = n.shape

    def of_heads(table: Tensor) -> Tensor:
        """(1 or B, S, 1 or H, d or d/2)"""
        table = table[None] if table.dim() == 2 else table
        if table.dim() == 4:
            return table
        is_of_head = table.shape[-1] in (head_dim, head_dim // 2)
        return table.unsqueeze(2) if is_of_head else table.unflatten(2, (heads, head_dim))

    def halves(x: Tensor) -> tuple:
        return x.unflatten(3, (-1, 2)).unbind(-1) if layout == INTERLEAVED else x.chunk(2, dim=3)

    cos, sin = of_heads(cos).float(), of_heads(sin).float()
    is_per_pair = cos.shape[3] != head_dim
    (cos_a, cos_b), (sin_a, sin_b) = ((t, t) if is_per_pair else halves(t) for t in (cos, sin))
    a, b = halves(n.float())
    a, b = torch.addcmul(a * cos_a, b, sin_a, value=-1), torch.addcmul(b * cos_b, a, sin_b)
    return torch.stack([a, b], -1).flatten(3) if layout == INTERLEAVED else torch.cat([a, b], 3)


def _rope_formula(x, cos, sin, layout):
    head_dim = x.shape[3] if x.dim() == 4 else cos.shape[-1] * (2 if sin is None else 1)
    return rotated(by_head(x, head_dim), cos, sin, layout).reshape(x.shape).to(x.dtype)


def _rope_3d_formula(x, *tables_and_layout):
    *tables, layout = tables_and_layout

    def of_tokens(frame: Tensor, height: Tensor, width: Tensor) -> Tensor:
        """(1, S, 1, d/2) from a table (positions, pairs) of each axis."""
        grid = frame.shape[0], height.shape[0], width.shape[0]
        tables = (t.expand(*grid, -1) for t in (frame[:, None, None], height[:, None], width))
        return torch.cat(list(tables), dim=-1).flatten(0, 2)[None, :, None]

    return rotated(x, of_tokens(*tables[::2]), of_tokens(*tables[1::2]), layout).to(x.dtype)


_rope = kernel_call("rope", _rope_formula)
_rope_3d = kernel_call("rope_3d", _rope_3d_formula)


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
    return _rope(x, cos, sin, choice("rope", "layout", layout, LAYOUTS))


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
        layout: as in ``rope``.

    Source: Su et al., 2021, https://arxiv.org/abs/2104.09864, on the three axes of a video as in
    Wan, 2025, https://arxiv.org/abs/2503.20314.
    """
    for name, tables in (("frame", frame), ("height", height), ("width", width)):
        if not isinstance(tables, tuple) or len(tables) != 2:
            refuse_type("rope_3d", name, "a pair (cos, sin) of tensors", tables)
    return _rope_3d(x, *frame, *height, *width, choice("rope_3d", "layout", layout, LAYOUTS))


@torch.library.register_fake(add_op_namespace_prefix("rope"))
def _rope_fake(x, cos, *_):
    required(cos)
    return x.new_empty(x.shape)


@torch.library.register_fake(add_op_namespace_prefix("rope_3d"))
def _rope_3d_fake(x, *tables_and_layout):
    required(*tables_and_layout[:-1])
    return x.new_empty(x.shape)
