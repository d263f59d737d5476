"""Inputs of attention, from random ones to those of trained models.

On N(0, 1) inputs each query attends to thousands of keys about equally. Trained models' scores are
peaked: a few keys have most of a row's weight, tokens resemble each other, one key is a sink that
many rows attend to. The kind "trained" has the scores of a trained model, as measured. Scores are given in
nats, after the scale of 1 / sqrt(head_dim).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

DTYPE = torch.bfloat16
CLUSTERS = 64
RISE = 20.0  # nats from one key tile to the next; float16 overflows at exp(11.1)
RISE_KEYS = 128
JUMP = 100.0  # nats; float32 overflows at exp(88.7)
CONSTANT = 0.7

Shape = Sequence[int]  # (batch, queries, keys, heads, head_dim)
Inputs = tuple[Tensor, Tensor, Tensor]


def sizes(shape: Shape) -> list[tuple[int, int, int, int]]:
    """Shapes of query, key and value: (batch, tokens, heads, head_dim)."""
    batch, queries, keys, heads, head_dim = shape
    return [(batch, tokens, heads, head_dim) for tokens in (queries, keys, keys)]


def normal(shape: Shape, device: torch.device) -> list[Tensor]:
    """Query, key and value from N(0, 1), in float32."""
    return [torch.randn(size, device=device) for size in sizes(shape)]


def unit(t: Tensor) -> Tensor:
    return torch.nn.functional.normalize(t, dim=-1)


def around(center: Tensor, noise: Tensor, cosine: float) -> Tensor:
    """Unit vectors in random directions, with about this cosine between two with the same unit center."""
    return unit(cosine**0.5 * center + (1 - cosine) ** 0.5 * unit(noise))


def in_16_bits(*tensors: Tensor) -> Inputs:
    return tuple(t.to(DTYPE) for t in tensors)


def random_scores(shape: Shape, device: torch.device, std: float) -> Inputs:
    """Normally distributed scores with a standard deviation in nats."""
    q, k, v = normal(shape, device)
    return in_16_bits(q * std, k, v)


def clustered_tokens(shape: Shape, device: torch.device, cosine: float, weight: float) -> Inputs:
    """Tokens in clusters. Query and key have unit RMS per head, times norm weights.

    cosine: cosine similarity of two tokens in a cluster. Between clusters it is about 0.
    weight: the product of query's and key's norm weights. Equal tokens would have a score of
    weight * sqrt(head_dim) nats.
    """
    q, k, v = normal(shape, device)
    batch, queries, keys, heads, head_dim = shape
    centers = unit(torch.randn(heads, CLUSTERS, head_dim, device=device))
    cluster = torch.randint(CLUSTERS, (batch, max(queries, keys), 1), device=device)
    head = torch.arange(heads, device=device)

    def tokens(noise: Tensor) -> Tensor:
        center = centers[head, cluster[:, : noise.shape[1]]]
        return around(center, noise, cosine)

    root = (weight * head_dim) ** 0.5
    return in_16_bits(tokens(q) * root, tokens(k) * root, v)


class Head(NamedTuple):
    """One head of a trained model: what was measured of it, and how it is drawn. In nats, for 448 keys."""

    # Means over rows: standard deviation of the scores, the largest one less their mean, and its weight.
    std: float
    above_mean: float
    largest_share: float
    # Tokens come in this number of runs of equal length. Scores are normal, and higher within a run.
    spread: float  # standard deviation
    rise: float
    runs: int
    variation: float  # between rows: the standard deviation of the logarithm of the query's norm


# Constants of fit_attention_inputs.py.
# 49x256x256, weights dd0803e2aa364047, measured 2026-11-26.
TRAINED = (
    Head(0.525, 1.53, 0.0104, 0.432, 0.432, 3, 0.5),
    Head(0.571, 1.94, 0.0184, 0.315, 1.1, 12, 0.75),
    Head(3.03, 10.3, 0.443, 2.63, 7.89, 224, 0.5),
    Head(2.51, 7.81, 0.232, 2.05, 4.1, 16, 0.5),
    Head(0.851, 1.88, 0.0109, 0.517, 1.55, 3, 0),
    Head(3.02, 8.08, 0.171, 1.58, 3.17, 3, 0.87),
    Head(3, 8.98, 0.221, 2.37, 4.74, 6, 0.25),
    Head(2.24, 6.14, 0.0909, 1.41, 4.23, 6, 0.37),
    Head(0.861, 2.17, 0.0153, 0.638, 1.28, 3, 0.25),
    Head(2.26, 6.24, 0.108, 1.77, 3.53, 4, 0),
    Head(3.01, 7.58, 0.127, 1.32, 3.95, 4, 0.87),
    Head(2.7, 9.48, 0.33, 1.95, 5.84, 112, 0.75),
    Head(1.29, 2.78, 0.0189, 0.585, 2.34, 4, 0.5),
    Head(3.4, 11.3, 0.421, 2.76, 7.59, 224, 0.63),
    Head(3.24, 10.5, 0.392, 3.03, 6.07, 24, 0),
    Head(1.95, 6.47, 0.156, 1.59, 3.98, 16, 0.38),
    Head(0.529, 1.36, 0.00817, 0.392, 0.785, 3, 0.25),
    Head(3.99, 12.9, 0.387, 3.12, 6.24, 12, 0.5),
    Head(3.02, 9.76, 0.248, 2.37, 7.1, 12, 0),
    Head(3.36, 11, 0.378, 3.07, 6.15, 16, 0),
    Head(1.13, 2.69, 0.022, 0.597, 1.64, 3, 0.63),
    Head(4.28, 12.7, 0.378, 3.55, 3.55, 4, 0.5),
    Head(4.39, 13.7, 0.483, 3.9, 7.8, 12, 0),
    Head(3.53, 12.9, 0.582, 3.41, 10.2, 112, 0),
)
# End of these constants.


def trained(shape: Shape, device: torch.device, drawn: Sequence[Head] | None = None) -> Inputs:
    """Scores as in the self-attention of the small LTX-Video (examples/small_ltx), one head after the other.

    A token resembles its neighbors, as in a video. Statistics are those of TRAINED for 448 keys and a head
    dim of 64. With more keys the runs are longer. At 8064 keys the standard deviation is 0.8 to 1.2 times
    that, the largest score up to 4 nats higher, and its weight 0.07 to 0.64 times that. In smaller heads the
    rise is limited to spread * sqrt(head_dim).
    """
    drawn = drawn or TRAINED
    q, k, v = normal(shape, device)
    *_, heads, head_dim = shape
    for index in range(heads):
        head = drawn[index % len(drawn)]
        cosine = min(head.rise / (head.spread * head_dim**0.5), 1.0)
        centers = unit(torch.randn(head.runs, head_dim, device=device))
        for t in (q, k):
            run = torch.arange(t.shape[1], device=device) * head.runs // t.shape[1]
            noise = t[:, :, index]
            t[:, :, index] = around(centers[run], noise, cosine) * (head.spread * head_dim) ** 0.5
        q[:, :, index] *= (
            torch.randn(q.shape[:2], device=device)[..., None] * head.variation
        ).exp()
    return in_16_bits(q, k, v)


def attention_sink(shape: Shape, device: torch.device) -> Inputs:
    """Normal scores of 1 nat, and one key in the middle with about half of each row's weight."""
    *_, keys, _, head_dim = shape
    q, k, v = normal(shape, device)
    q[..., 0] = 1.0
    k[..., 0] = 0.0
    of_others = math.log(keys) + (head_dim - 1) / head_dim / 2  # the logarithm of their sum
    k[:, keys // 2] = 0.0
    k[:, keys // 2, :, 0] = of_others * head_dim**0.5
    return in_16_bits(q, k, v)


def rising_scores(shape: Shape, device: torch.device, rise: float) -> Inputs:
    """Normal scores of 1 nat, raised by about ``rise`` nats every RISE_KEYS keys, for all queries.

    Two columns hold the rise as multiples of a step.
    """
    *_, keys, _, head_dim = shape
    q, k, v = normal(shape, device)
    step = math.ceil(rise * head_dim**0.5 / 32) * 32
    tile = torch.arange(keys, device=device) // RISE_KEYS
    q[..., :2] = 1.0
    k[..., 0] = (tile // 16 * 16 * step)[:, None]
    k[..., 1] = (tile % 16 * step)[:, None]
    return in_16_bits(q, k, v)


def jumping_scores(shape: Shape, device: torch.device) -> Inputs:
    """Normal scores of 1 nat, raised by JUMP nats from the middle of the keys on."""
    *_, keys, _, head_dim = shape
    q, k, v = normal(shape, device)
    q[..., 0] = 1.0
    k[..., 0] = 0.0
    k[:, keys // 2 :, :, 0] = JUMP * head_dim**0.5
    return in_16_bits(q, k, v)


def constant(shape: Shape, device: torch.device) -> Inputs:
    """Each key has the same weight."""
    return in_16_bits(*(torch.full(size, CONSTANT, device=device) for size in sizes(shape)))


# Value is N(0, 1) in all kinds except the last.
INPUTS: dict[str, Callable[[Shape, torch.device], Inputs]] = {
    **{f"std {std}": functools.partial(random_scores, std=std) for std in (1, 3, 6)},
    **{
        f"clusters {cosine}, {weight}": functools.partial(
            clustered_tokens, cosine=cosine, weight=weight
        )
        for cosine in (0.5, 0.8)
        for weight in (1, 2, 4)
    },
    "trained": trained,
    "sink": attention_sink,
    "rising": functools.partial(rising_scores, rise=RISE),
    "jump": jumping_scores,
    "steps": functools.partial(rising_scores, rise=JUMP),
    "large range": functools.partial(random_scores, std=30),
    "constant": constant,
}
NORMAL = "std 1"
EXTREMES = ("rising", "jump", "steps", "large range", "constant")  # which no model has
TYPICAL = tuple(kind for kind in INPUTS if kind not in EXTREMES)
