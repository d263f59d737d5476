"""Float64 emulation of attention_int8, written from the description of its rounding.

The query, key and value are rounded and their product is exact. The rounding of the probabilities is not
emulated, because it depends on the number that a kernel rounds them relative to. `Emulated` bounds its error.
Nothing here calls the kernel package.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

TILE = COLUMNS = 128
# The error of a probability, relative to it, and to the largest of its row. A kernel may interpolate between
# the powers of 2, which adds 0.35 of a step of E4M3 to the half step of rounding. It may choose to round
# relative to 2^-3 of the row's largest probability, and drop numbers below 2^-7.
RELATIVE, ABSOLUTE = 0.85 / 8, 2.0**-10


class Emulated(NamedTuple):
    """Results, and bounds of the errors that the rounding of the probabilities adds to them."""

    out: Tensor  # (B, Sq, H, d)
    lse: Tensor  # (B, Sq, H)
    out_bound: Tensor
    lse_bound: Tensor
    magnitude: Tensor  # averages of the values' magnitudes, like out
    # (B, Sq, H): the error that float32 may add to a score. Its error of a key's mean may move two elements
    # of a key by a step of INT8.
    score_error: Tensor


def quantized(x: Tensor, largest: Tensor, largest_code: float) -> tuple[Tensor, Tensor]:
    """Values over their scale, and the scale; both 0 if the scale would be subnormal in float32."""
    scale = largest / largest_code
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, scale)
    scale = torch.where(largest.isfinite(), scale, math.nan)
    return torch.where(scale == 0, 0.0, x / scale), scale


def in_int8(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Rounded, with a scale for all values along these dimensions."""
    codes, scale = quantized(x, x.abs().amax(dims, keepdim=True), 127.0)
    return codes.round() * scale


def in_e4m3(x: Tensor, dim: int) -> Tensor:
    codes, scale = quantized(x, x.abs().amax(dim, keepdim=True), 448.0)
    return codes.float().to(torch.float8_e4m3fn).double() * scale


def rotated(x: Tensor) -> Tensor:
    """Rows times an orthogonal Hadamard matrix, in COLUMNS columns."""
    matrix = x.new_ones(1, 1)
    while len(matrix) < COLUMNS:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return x @ matrix[: x.shape[-1]] / math.sqrt(COLUMNS)


def rounded_keys(k: Tensor) -> Tensor:
    """Rotated keys (tokens, COLUMNS): tiles of 16 rows of 8 tokens, a scale for each pair of columns."""
    tokens = len(k)
    padding = k.new_zeros(-tokens % TILE, COLUMNS)
    tiles = torch.cat([k, padding]).view(-1, TILE // 8, 4, 2, COLUMNS)
    return in_int8(tiles, (1, 3, 4)).view(-1, COLUMNS)[:tokens]


def emulate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    key_lengths: Tensor | None = None,
    subtracts_mean: bool = True,
    corrects_lse: bool = True,
) -> Emulated:
    """Of tensors by head, without gate and addend."""
    dtype = k.dtype
    q, k, v = (t.double() for t in (q, k, v))
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    batch, queries, heads, head_dim = q.shape
    keys, key_heads = k.shape[1:3]
    of_lse = q.new_zeros(batch, queries, heads)
    out, bound, magnitude = (torch.zeros_like(q) for _ in range(3))
    results = Emulated(out, of_lse - math.inf, bound, of_lse, magnitude, of_lse.clone())
    for b in range(batch):
        count = keys if key_lengths is None else min(max(int(key_lengths[b]), 0), keys)
        for h in range(heads) if count > 0 else ():
            key, value = (t[b, :count, h // (heads // key_heads)] for t in (k, v))
            mean = key.mean(0) if subtracts_mean else key.new_zeros(head_dim)
            mean = mean.to(dtype).double()
            query, rotated_key = rotated(q[b, :, h]), rotated(key - mean)
            scores = scale * in_int8(query, (1,)) @ rounded_keys(rotated_key).T
            lse = scores.logsumexp(1, keepdim=True)
            p = (scores - lse).exp()
            value = in_e4m3(value, 0)
            out = p @ value
            error = torch.maximum(RELATIVE * p, ABSOLUTE * p.amax(1, keepdim=True))
            total = error.sum(1, keepdim=True)
            # The sum of the rounded probabilities, at least.
            rest = (1 - total).clamp(min=0.05)
            results.out[b, :, h] = out
            results.magnitude[b, :, h] = p @ value.abs()
            results.out_bound[b, :, h] = (error @ value.abs() + total * out.abs()) / rest
            of_mean = scale * q[b, :, h] @ mean
            results.lse[b, :, h] = lse[:, 0] + of_mean * corrects_lse
            results.lse_bound[b, :, h] = -rest.log()[:, 0]
            step = rotated_key.abs().amax() / 127
            moved = 2 * step * scale * query.abs().amax(1)
            largest = scores.abs().amax(1) + scale * q[b, :, h].abs() @ mean.abs()
            results.score_error[b, :, h] = moved + 2**-20 * largest + 1e-5
    return results
