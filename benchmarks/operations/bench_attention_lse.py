"""Attention with ``return_lse`` over attention without, on the same inputs, in turns.

The shapes are a rank's of a ring, whose keys are all ranks', and few keys. The time without is that of the
kernel of each shape. Writes to benchmarks/results/attention_lse::

    python benchmarks/operations/bench_attention_lse.py
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
from tabulate import tabulate

from benchmarks import models
from benchmarks.harness import record, timing
from benchmarks.harness.options import DEVICE

PEAK = 4  # standard deviation of the scores, as peaked as in trained models
# (batch, queries, keys, heads, head dim)
SHAPES = (
    (1, 16384, 16384, 24, 128),
    (1, 16384, 32768, 24, 128),
    (1, 16384, 16384, 32, 64),
    (1, 4096, 4096, 24, 128),
    (1, 4096, 256, 32, 64),
)
TINY_SHAPES = ((1, 16, 24, 2, 64),)


@click.command(help="Measure attention with and without return_lse.")
@DEVICE
@click.option("--tiny", is_flag=True, help="Tiny shapes, to try the benchmark.")
@click.option("--rounds", type=click.IntRange(min=1), default=25, show_default=True)
@record.output_option("attention/lse")
@torch.no_grad()
def main(device, tiny, rounds, output) -> None:
    kernel, _ = models.load_kernel()
    entries = []
    for shape in TINY_SHAPES if tiny else SHAPES:
        batch, queries, keys, heads, head_dim = shape
        sizes = [(batch, length, heads, head_dim) for length in (queries, keys, keys)]
        q, k, v = (torch.randn(size, device=device).to(torch.bfloat16) for size in sizes)
        plain = functools.partial(kernel.attention, q * PEAK, k, v)
        functions = {"without": plain, "with": functools.partial(plain, return_lse=True)}
        times = timing.cold_microseconds(functions, rounds, device)
        ratio = times["without"]["median"] / times["with"]["median"]
        entries.append({"shape": shape, "microseconds": times, "without_over_with": ratio})
    result = {
        "environment": record.environment(device),
        "scores_std": PEAK,
        "rounds": rounds,
        "flush_bytes": timing.FLUSH_BYTES if device.type == "cuda" else 0,
        "attention_lse": entries,
    }
    rows = [
        ["x".join(map(str, e["shape"])), *(t["median"] for t in e["microseconds"].values())]
        for e in entries
    ]
    click.echo(tabulate(rows, ["", "us without", "us with"], floatfmt=".3f"))
    output = record.destination(output, "attention/lse")
    record.finish(output, result)


if __name__ == "__main__":
    main()
