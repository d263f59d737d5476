"""The error of attention in 8 bits, and what each choice in attention_int8's rounding does for it.

Emulated in float32. Left out are the accumulators of FP8 tensor cores and the lag of the number that a row's
probabilities are relative to, which add at most 5%. Errors are relative L2 distances from float64, over that
of attention with bfloat16 probabilities on the same operands. Operands are exact in bfloat16, or rounded by
FP8 linear layers. In that case the float64 reference has the operands without the layers' rounding. Needs no
GPU and no kernels:

    python benchmarks/operations/bench_8bit_attention.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks.harness import record

from attention_inputs import INPUTS, TYPICAL, Inputs
from int8_attention import rotated

HEAD_DIM = 128
SHAPE = (1, 256, 2048, 8, HEAD_DIM)  # batch, queries, keys, heads, head_dim
HIDDEN_SIZE = 1024  # of the FP8 layers
INT8, E4M3 = torch.int8, torch.float8_e4m3fn
LARGEST = {INT8: 127.0, E4M3: 448.0}
LARGEST_P = 16.0  # of a row, before rounding to E4M3


class Scores(NamedTuple):
    """How query and key are rounded. A query has its own scale in INT8, and that of its head in E4M3."""

    dtype: torch.dtype = INT8
    groups: tuple[int, ...] = (-1, 16, 4, 2)  # sizes that the keys are split into
    shared: tuple[int, ...] = (3, 5, 6)  # what shares a scale, of (batch, heads, *groups, head_dim)
    subtracts_mean: bool = True
    rotates: bool = True


KERNEL = Scores()
# As in FlashAttention-3.
PER_HEAD = Scores(E4M3, (-1,), (2, 3), subtracts_mean=False, rotates=False)
CHOICES = {
    "query and key": KERNEL,
    "a scale per key": KERNEL._replace(groups=(-1,), shared=(3,)),
    "per 128 keys": KERNEL._replace(groups=(-1, 128), shared=(3, 4)),
    "mean kept": KERNEL._replace(subtracts_mean=False),
    "not rotated": KERNEL._replace(rotates=False),
    "neither": KERNEL._replace(subtracts_mean=False, rotates=False),
    "E4M3 per head": PER_HEAD,
}


def rounded(x: Tensor, dtype: torch.dtype, dims: tuple[int, ...]) -> Tensor:
    """x in an 8-bit dtype, with one scale over these dimensions."""
    scale = x.abs().amax(dims, keepdim=True).clamp_min(1e-30) / LARGEST[dtype]
    quotient = x / scale
    return (quotient.round() if dtype is INT8 else quotient.to(dtype).float()) * scale


def scores_of(q: Tensor, k: Tensor, how: Scores | None = None) -> Tensor:
    """In nats; without rounding if `how` is None."""
    if how is not None:
        k = k - k.mean(2, keepdim=True) if how.subtracts_mean else k
        q, k = (rotated(q), rotated(k)) if how.rotates else (q, k)
        q = rounded(q, how.dtype, (3,) if how.dtype is INT8 else how.shared)
        groups = rounded(k.unflatten(2, how.groups), how.dtype, how.shared)
        k = groups.flatten(2, groups.ndim - 2)
    return q @ k.transpose(-1, -2) * HEAD_DIM**-0.5


def attend(scores: Tensor, v: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Attention with probabilities in a dtype."""
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    return p.to(dtype).float() @ v / p.sum(-1, keepdim=True)


def attend_in_e4m3(scores: Tensor, v: Tensor, value_dims: tuple[int, ...] = (2,)) -> Tensor:
    """Attention with E4M3 probabilities and values; these have one scale over some dimensions."""
    p = ((scores - scores.amax(-1, keepdim=True)).exp() * LARGEST_P).to(E4M3).float()
    return p @ rounded(v, E4M3, value_dims) / p.sum(-1, keepdim=True)


def outliers(heads: int, factors: tuple[float, float], channels: int) -> Tensor:
    """Factors of all channels (heads, head_dim), 1 except in a few of each head."""
    result = torch.ones(heads, HEAD_DIM)
    for head in result:
        head[torch.randperm(HEAD_DIM)[:channels]] = torch.empty(channels).uniform_(*factors)
    return result


ROTARY = "key mean, rotary"  # a mean that the rotary embedding turns
OUTLIERS = ("key outliers", "query and key outliers", "opposite outliers", "value outliers")


def channel_inputs(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Inputs]:
    """With means and outlier channels, in standard deviations.

    Keys as in SageAttention (arXiv 2410.02367) and KIVI (2402.02750), values as in outliers.py. With opposite
    outliers, queries are small in the channels in which keys are large.
    """
    heads = k.shape[2]
    of_query, of_key = (outliers(heads, (10, 30), 4) for _ in range(2))
    mean = torch.randn(heads, HEAD_DIM)
    key_mean = (q, k + mean * outliers(heads, (8, 15), 6), v)
    return {
        "key mean": key_mean,
        ROTARY: key_mean,
        "key outliers": (q, k * of_key, v),
        "query and key outliers": (q * of_query, k * of_key, v),
        "opposite outliers": (q / of_key, k * of_key, v),
        "value outliers": (q, k, (v + 2 * mean) * outliers(heads, (20, 100), 1)),
    }


def operands(kind: str) -> list[Tensor]:
    """Query, key and value (batch, heads, tokens, head_dim) in float32, before a rotary embedding."""
    inputs = INPUTS[kind if kind in TYPICAL else "std 3"](SHAPE, torch.device("cpu"))
    q, k, v = (t.float() for t in inputs)
    if kind not in TYPICAL:
        q, k, v = channel_inputs(q, k, v)[kind]
        q *= 3 / scores_of(q.transpose(1, 2), k.transpose(1, 2)).std(-1).mean()  # std 3 again
    return [t.bfloat16().float().transpose(1, 2) for t in (q, k, v)]


def from_fp8_layer(exact: Tensor) -> Tensor:
    """What an FP8 layer with scales per row makes of the input that gives `exact`. Its bias is the mean."""
    bias = exact.mean(2, keepdim=True)
    std = (exact - bias).square().mean(2, keepdim=True).sqrt().clamp_min(1e-3)
    weight = torch.randn(exact.shape[1], HEAD_DIM, HIDDEN_SIZE) * HIDDEN_SIZE**-0.5
    x = torch.randn(*exact.shape[:3], HIDDEN_SIZE)
    x += ((exact - bias) / std - x @ weight.mT) @ torch.linalg.pinv(weight).mT
    x, weight = (rounded(t, E4M3, (-1,)) for t in (x, weight * std[0].mT))
    return (x @ weight.mT + bias).bfloat16().float()


def rotary(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[2])[:, None] * 1e4 ** -torch.arange(0, 1, 2 / HEAD_DIM)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.exp(1j * angles)
    return torch.view_as_real(turned).flatten(-2).bfloat16().float()


def relative_error(result: Tensor, exact: Tensor) -> float:
    """Root mean square over the channels, because the layer that reads them makes up for outliers."""
    squares = (result.bfloat16() - exact).square().sum(2) / exact.square().sum(2)
    return float(squares.mean().sqrt())


def errors(kind: str, has_fp8_layers: bool) -> dict[str, float]:
    """Of bfloat16 attention, and of each choice over that."""
    torch.manual_seed(0)
    exact = operands(kind)
    q, k, v = map(from_fp8_layer, exact) if has_fp8_layers else exact
    if kind == ROTARY:
        q, k, exact[0], exact[1] = map(rotary, (q, k, *exact[:2]))
    results = {name: attend(scores_of(q, k, how), v) for name, how in CHOICES.items()}
    results["probabilities and values"] = attend_in_e4m3(scores_of(q, k), v)
    results["all"] = attend_in_e4m3(scores_of(q, k, KERNEL), v)
    results["all E4M3 per head"] = attend_in_e4m3(scores_of(q, k, PER_HEAD), v, (2, 3))
    query, key, value = (t.double() for t in exact)
    expected = scores_of(query, key).softmax(-1) @ value
    floor = relative_error(attend(scores_of(q, k), v, torch.bfloat16), expected)
    ratios = {name: relative_error(x, expected) / floor for name, x in results.items()}
    return {"bfloat16": floor, **ratios}


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="JSON file")
def main(output: Path | None) -> None:
    results: dict[str, dict[str, float]] = {}
    kinds = (*TYPICAL, "key mean", ROTARY, *OUTLIERS)
    for suffix in ("", ", FP8 layers"):
        found = {kind + suffix: errors(kind, bool(suffix)) for kind in kinds}
        rows = [[kind, *of_kind.values()] for kind, of_kind in found.items()]
        formats = ("", ".1e", *[".2f" if suffix else ".1f"] * len(rows[0]))
        click.echo(tabulate(rows, ["inputs", *found[kinds[0] + suffix]], floatfmt=formats) + "\n")
        results |= found
    output = record.destination(output, "attention/8bit")
    if output is not None:
        result = {"environment": record.environment(torch.device("cpu")), "shape": SHAPE}
        record.write(output, {**result, "attention_8bit": results})


if __name__ == "__main__":
    main()
