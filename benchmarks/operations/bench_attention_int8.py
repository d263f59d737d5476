"""Attention in 8 bits over this package's 16-bit attention and FlashAttention-3's FP8, in turns.

The time of attention_int8 includes quantization. FlashAttention-3 gets quantized tensors, with a scale for
each head, and its time does not include their quantization. "steady" calls follow each other for at least
STEADY_S, as in a model, where power limits the clock; "cold" calls begin with an empty L2 cache. Errors are
those of bench_attention.py. Writes to benchmarks/results/attention:

    python benchmarks/operations/bench_attention_int8.py
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks import models
from benchmarks.harness import peers, record, timing
from benchmarks.harness.options import DEVICE
from benchmarks.operations.bench_attention import Sample, flops

from accuracy import finite_distance
from attention_inputs import INPUTS

# (batch, queries, keys, heads, head dim): Wan 14B at 480p and 720p, FLUX
SHAPES = ((1, 32760, 32760, 40, 128), (1, 75600, 75600, 40, 128), (1, 4608, 4608, 24, 128))
TINY_SHAPES = ((1, 24, 40, 2, 128),)
KINDS = ("std 1", "std 3", "std 6", "sink", "trained", "rising", "jump")
STEADY_S = 0.25
INT8, SIXTEEN_BIT, FA3 = "int8", "16-bit", "FA3 FP8"


def fa3_fp8(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """FlashAttention-3 of tensors in E4M3."""
    attention = peers.FlashAttention3()._attention
    tensors, descales = [], {}
    for name, x in zip("qkv", (q, k, v), strict=True):
        scale = x.float().abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        tensors.append((x / scale[:, None, :, None]).to(torch.float8_e4m3fn))
        descales[f"{name}_descale"] = scale
    return functools.partial(attention, *tensors, **descales)


def steady(function: Callable[[], object], device: torch.device) -> float:
    """Microseconds of a call, of several back to back."""
    calls = math.ceil(STEADY_S / max(timing.wall_milliseconds(function, device) * 1e-3, 1e-6))
    return timing.wall_milliseconds(function, device, calls) * 1e3


@click.command(help="Measure attention in 8 bits.")
@DEVICE
@click.option("--tiny", is_flag=True, help="Tiny shapes, to try the benchmark.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@record.output_option("attention/int8")
@torch.no_grad()
def main(device, tiny, rounds, output) -> None:
    kernel, _ = models.load_kernel()
    libraries, notes = peers.load(device, {"fa3": peers.FlashAttention3})
    stopwatch = timing.Stopwatch(device)
    entries, rows = [], []
    for shape in TINY_SHAPES if tiny else SHAPES:
        sample = Sample(shape, device)
        for kind in KINDS[:1] if tiny else KINDS:
            torch.manual_seed(0)
            tensors = INPUTS[kind](shape, device)
            functions = {
                INT8: functools.partial(kernel.attention_int8, *tensors),
                SIXTEEN_BIT: functools.partial(kernel.attention, *tensors),
            }
            if libraries:
                functions[FA3] = fa3_fp8(*tensors)
            exact = sample.exact(*tensors)
            errors = {n: finite_distance(sample.of(f()), exact) for n, f in functions.items()}
            measures = {"cold": stopwatch.cold, "steady": steady}
            times = {
                name: {
                    f: timing.summarize(values)
                    for f, values in timing.interleave(functions, rounds, device, measure).items()
                }
                for name, measure in measures.items()
            }
            speedups = {
                name: timing.speedups({f: t["median"] for f, t in of.items()})[INT8]
                for name, of in times.items()
            }
            entries.append(
                {
                    "shape": shape,
                    "inputs": kind,
                    "flops": flops(shape),
                    "errors": errors,
                    "microseconds": times,
                    "speedups": speedups,
                }
            )
            rows.append(
                ["x".join(map(str, shape[:1] + shape[2:])), kind]
                + [times[name][f]["median"] * 1e-3 for name in measures for f in functions]
                + [over for name in measures for over in speedups[name].values()]
                + list(errors.values())
            )
            click.echo(rows[-1])
    headers = ["", "inputs", *(f"{name} {f} ms" for name in measures for f in functions)]
    headers += [f"{name} over {f}" for name in measures for f in speedups[name]]
    click.echo(tabulate(rows, [*headers, *(f"error {f}" for f in functions)], floatfmt=".4g"))
    result = {
        "environment": record.environment(device),
        "peers": notes,
        "rounds": rounds,
        "flush_bytes": timing.FLUSH_BYTES if device.type == "cuda" else 0,
        "attention_int8": entries,
    }
    output = record.destination(output, "attention/int8")
    record.finish(output, result)


if __name__ == "__main__":
    main()
