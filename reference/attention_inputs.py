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
# 49x256x256, weights 1fc453c5f16c93b1, measured 2026-11-26.
TRAINED = (
    Head(0.525, 1.62, 0.0102, 0.437, 0.874, 8, 0.25),
    Head(2.29, 6, 0.0918, 1.75, 3.5, 3, 0),
    Head(0.529, 2, 0.0197, 0.424, 1.27, 48, 0.5),
    Head(3.15, 9.1, 0.243, 2.22, 2.22, 3, 0.75),
    Head(1.04, 2.08, 0.0116, 0.415, 1.66, 3, 0.63),
    Head(2.96, 9.25, 0.335, 2.71, 5.43, 24, 0.25),
    Head(3.04, 8.18, 0.176, 1.6, 3.2, 3, 0.87),
    Head(2.94, 9.96, 0.428, 2.55, 7.65, 224, 0.5),
    Head(0.752, 1.99, 0.0134, 0.587, 1.17, 4, 0),
    Head(1.93, 6.18, 0.12, 1.52, 4.55, 12, 0),
    Head(2.21, 7.06, 0.173, 1.97, 3.93, 12, 0),
    Head(2.42, 8.57, 0.342, 2.05, 6.16, 112, 0.5),
    Head(1.14, 2.71, 0.0208, 0.698, 2.09, 4, 0.25),
    Head(3.04, 10.1, 0.427, 2.79, 7.67, 224, 0.38),
    Head(3.47, 11.2, 0.427, 3.25, 6.5, 24, 0),
    Head(1.5, 4.37, 0.0585, 1.39, 1.39, 3, 0),
    Head(0.803, 1.98, 0.0126, 0.472, 1.42, 4, 0.37),
    Head(3.64, 11.6, 0.458, 3.46, 6.93, 32, 0),
    Head(1.75, 5.41, 0.0988, 1.46, 2.92, 8, 0.25),
    Head(3.64, 11.1, 0.399, 3.24, 6.47, 12, 0),
    Head(1.18, 2.93, 0.0256, 0.902, 1.8, 3, 0),
    Head(2.94, 9.22, 0.223, 2, 4.51, 8, 0.63),
    Head(4.19, 12.7, 0.487, 4, 7.99, 112, 0.25),
    Head(3.15, 10, 0.45, 2.89, 7.94, 224, 0.38),
)
# End of these constants.


def trained(shape: Shape, device: torch.device, drawn: Sequence[Head] | None = None) -> Inputs:
    """Scores as in the self-attention of the small LTX-Video (examples/small_ltx), one head after the other.

    A token resembles its neighbors, as in a video. Statistics are those of TRAINED for 448 keys and a head
    dim of 64. With more keys the runs are longer. At 8064 keys the standard deviation is 0.9 to 1.1 times
    that, the largest score up to 4 nats higher, and its weight 0.07 to 0.68 times that. In smaller heads the
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
