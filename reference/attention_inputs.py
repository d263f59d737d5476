"""Inputs of attention, from random ones to those of trained models.

On N(0, 1) inputs each query attends to thousands of keys about equally. Trained models' scores are
peaked: a few keys have most of a row's weight, tokens resemble each other, one key is a sink that
many rows attend to. Scores are given in nats, after the scale of 1 / sqrt(head_dim).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

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
    unit = functools.partial(torch.nn.functional.normalize, dim=-1)
    centers = unit(torch.randn(heads, CLUSTERS, head_dim, device=device))
    cluster = torch.randint(CLUSTERS, (batch, max(queries, keys), 1), device=device)
    head = torch.arange(heads, device=device)

    def tokens(noise: Tensor) -> Tensor:
        center = centers[head, cluster[:, : noise.shape[1]]]
        return unit(cosine**0.5 * center + (1 - cosine) ** 0.5 * unit(noise))

    root = (weight * head_dim) ** 0.5
    return in_16_bits(tokens(q) * root, tokens(k) * root, v)


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
