"""What attention loses if its products are of 8-bit numbers, whatever the kernel.

Queries, keys, probabilities and values are rounded as in SageAttention 2, in float32 arithmetic: queries and
keys without their mean to INT8, a scale for each block of tokens; values to E4M3, a scale for each channel;
probabilities to E4M3. Errors are relative L2 distances from float64, over that of attention with bfloat16
probabilities. Needs no GPU and no kernels:

    python benchmarks/operations/bench_8bit_attention.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks.harness import record

from attention_inputs import INPUTS, TYPICAL

SHAPE = (1, 2048, 2048, 2, 128)  # batch, queries, keys, heads, head_dim
BLOCK = 128  # tokens
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def rounded(x: Tensor, dtype: torch.dtype, dims: tuple[int, ...]) -> Tensor:
    """x in an 8-bit dtype, with one scale over these dimensions."""
    scale = x.abs().amax(dims, keepdim=True).clamp_min(1e-30) / LARGEST[dtype]
    quotient = x / scale
    return (quotient.round() if dtype is torch.int8 else quotient.to(dtype).float()) * scale


def in_blocks(x: Tensor) -> Tensor:
    return rounded(x.unflatten(2, (-1, BLOCK)), torch.int8, (-1, -2)).flatten(2, 3)


def in_e4m3(p: Tensor) -> Tensor:
    """Probabilities over the largest of their row."""
    return rounded(p, torch.float8_e4m3fn, (-1,))


def attention(q: Tensor, k: Tensor, v: Tensor, of_p: Callable[[Tensor], Tensor]) -> Tensor:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    return (of_p(p) @ v / p.sum(-1, keepdim=True)).bfloat16()


def errors(kind: str) -> dict[str, float]:
    """Of bfloat16, and of each step in 8 bits over that."""
    q, k, v = (t.transpose(1, 2).float() for t in INPUTS[kind](SHAPE, torch.device("cpu")))
    scores = q.double() @ k.double().transpose(-1, -2) * SHAPE[-1] ** -0.5
    exact = scores.softmax(-1) @ v.double()
    q8, k8 = in_blocks(q), in_blocks(k - k.mean(2, keepdim=True))
    v8 = rounded(v, torch.float8_e4m3fn, (2,))
    results = {
        "bfloat16": attention(q, k, v, lambda p: p.bfloat16().float()),
        "query and key": attention(q8, k8, v, lambda p: p),
        "probabilities": attention(q, k, v, in_e4m3),
        "values": attention(q, k, v8, lambda p: p),
        "all": attention(q8, k8, v8, in_e4m3),
    }
    distances = {n: float((x.double() - exact).norm() / exact.norm()) for n, x in results.items()}
    floor = distances.pop("bfloat16")
    return {"bfloat16": floor, **{name: error / floor for name, error in distances.items()}}


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="JSON file")
def main(output: Path | None) -> None:
    torch.manual_seed(0)
    results = {kind: errors(kind) for kind in TYPICAL}
    rows = [[kind, *of_kind.values()] for kind, of_kind in results.items()]
    formats = ("", ".2e", *[".1f"] * 4)
    click.echo(tabulate(rows, ["inputs", *results[TYPICAL[0]]], floatfmt=formats))
    environment = record.environment(torch.device("cpu"))
    output = record.destination(output, "attention/8bit")
    if output is not None:
        record.write(
            output, {"environment": environment, "shape": SHAPE, "attention_8bit": results}
        )


if __name__ == "__main__":
    main()
