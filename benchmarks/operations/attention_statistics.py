"""Statistics of attention scores, and how often the CUDA kernels rescale a row.

Scores are in nats, after the scale of 1 / sqrt(head_dim): (..., queries, keys). Each statistic has one value
per row.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

import torch
from torch import Tensor

# Of kernel_src/cuda, for all head dims: attention_tiles.cuh, attention_lazy_softmax.cuh.
TILE_KEYS = 128
WARP_ROWS = 16
LARGEST_HALF = 65504.0
TOO_LARGE = 2.0**120


def scores_of(query: Tensor, key: Tensor) -> Tensor:
    """(B, H, Sq, Sk) from query and key (B, S, H, d)."""
    query, key = (t.transpose(1, 2) for t in (query, key))
    return query @ key.mT / query.shape[-1] ** 0.5


def row_statistics(scores: Tensor) -> dict[str, Tensor]:
    """Standard deviation, largest less mean, and softmax weight of the largest key."""
    largest = scores.amax(-1)
    return {
        "std": scores.std(-1, correction=0),
        "above_mean": largest - scores.mean(-1),
        "largest_share": (largest - scores.logsumexp(-1)).exp(),
    }


def online_rescales(scores: Tensor) -> Tensor:
    """Rescales by OnlineSoftmax, the kernel for fewer than 1024 queries: at each rise of the maximum."""
    maxima = torch.stack([tile.amax(-1) for tile in scores.split(TILE_KEYS, dim=-1)], dim=-1)
    before = maxima.cummax(-1).values[..., :-1]
    return (maxima[..., 1:] > before).sum(-1)


def reference_exponent(keys: int) -> int:
    """`lazy_reference_exponent` of attention_lazy_softmax.cuh."""
    return min(math.ceil(math.log2(keys) + 12.5 - 25), 8)


def lazy_rescales(scores: Tensor) -> Tensor:
    """Rescales by LazySoftmax, the kernel for bfloat16, 1024 queries or more and no mask.

    The first tile sets a row's reference so that its largest probability is 2^reference_exponent. The 16
    rows of a warp are rescaled when the sum of a thread's 32 probabilities of a row exceeds float16. A row
    whose reference stays is not counted.
    """
    *batch, queries, keys = scores.shape
    exponent = reference_exponent(keys)
    # To base 2, in whole warps and tiles: (warps, 16, keys). The kernel fills missing queries with zeros.
    rows = torch.nn.functional.pad(scores.double() / math.log(2), (0, 0, 0, -queries % WARP_ROWS))
    rows = torch.nn.functional.pad(rows, (0, -keys % TILE_KEYS), value=-math.inf)
    rows = rows.reshape(-1, WARP_ROWS, rows.shape[-1])

    def to_threads(tile: Tensor, reference: Tensor) -> Tensor:
        """(warps, 16, 4): sums of the probabilities. A thread has two of each 8 neighboring keys."""
        probabilities = (tile - reference[..., None]).exp2()
        return probabilities.unflatten(-1, (-1, 4, 2)).sum((-3, -1))

    reference, sums = torch.zeros(2, *rows.shape[:2], dtype=rows.dtype, device=rows.device)
    sums = sums[..., None].repeat(1, 1, 4)
    count = torch.zeros_like(reference, dtype=torch.int64)
    has_recomputed = torch.zeros(len(rows), 1, dtype=torch.bool, device=rows.device)
    follows_maximum = has_recomputed.clone()
    for index, tile in enumerate(rows.split(TILE_KEYS, dim=-1)):
        to_maximum = tile.amax(-1) - exponent
        if index == 0:
            reference = to_maximum
            sums = to_threads(tile, reference)
            continue
        risen = torch.where(follows_maximum, reference.maximum(to_maximum), reference)
        sums = sums * (reference - risen).exp2()[..., None]
        part = to_threads(tile, risen)
        is_beyond = (part > LARGEST_HALF).any(-1).any(-1, keepdim=True)
        total = (sums + part).sum(-1)
        recomputes = is_beyond & ~follows_maximum & (total >= TOO_LARGE).any(-1, keepdim=True)
        powers = (total.log2().floor() - exponent).clamp(min=0)
        by_powers = torch.where(is_beyond & ~recomputes, risen + powers, risen)
        raised = torch.where(recomputes, risen.maximum(to_maximum), by_powers)
        sums = sums * (risen - raised).exp2()[..., None] + to_threads(tile, raised)
        follows_maximum = follows_maximum | (recomputes & has_recomputed)
        has_recomputed = has_recomputed | recomputes
        count += raised > reference
        reference = raised
    return count.reshape(*batch, -1)[..., :queries]


Place = tuple[int, int]  # layer, head


def means_over_steps(result: Mapping, attention: str) -> dict[Place, dict[str, float]]:
    """Each head's statistics in a result of bench_trained_attention.py; attention: "self" or "cross"."""
    steps: dict[Place, list[Mapping]] = {}
    for entry in result["attention_heads"]:
        if entry["attention"] == attention:
            steps.setdefault((entry["layer"], entry["head"]), []).append(entry)
    names = ("std", "above_mean", "largest_share", "online_rescales", "lazy_rescales")
    return {
        head: {name: statistics.mean(entry[name] for entry in entries) for name in names}
        for head, entries in sorted(steps.items())
    }
