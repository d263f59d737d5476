"""The GPU kernels of one block in the middle of LTX-Video's forward, on one time axis for each mode.

161 frames 512x768 with guidance, bfloat16, peaked weights. The kernels are cut out of the trace of the whole
forward: its blocks launch the same kernels in the same order, so that names repeat with the blocks. Nothing
is attached to the model. Where a kernel ends a block and begins the next one, as the injected model's
gated residual and norm do, it is the last one of its block. Writes to benchmarks/results/block_timeline:

    python benchmarks/models/bench_block_timeline.py
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch

from benchmarks import models
from benchmarks.harness import kernel_times, record
from benchmarks.harness.options import DEVICE
from benchmarks.models.ltx import LTX_VIDEO

MODES = models.DEFAULT_MODES
SIZE, WEIGHTS = LTX_VIDEO.sizes[-1], "peaked"
WARM_UP_CALLS = 5
LEAST_PERIODS = 3  # for one that is neither the first nor the last


def kind(name: str) -> str:
    """The class of a kernel; this package's attention is attention."""
    named = {"gemm": "matrix_products", "attention": "attention"}
    own = "ours" if kernel_times.PACKAGE in name else "others"
    return named.get(kernel_times.classify(name), own)


def repeated(names: Sequence[str]) -> tuple[int, int, int]:
    """Start, period and number of whole periods of the longest part of the names that repeats itself.

    Of several periods of one part, such as the multiples of a period, the shortest.
    """
    best = (0, 0, 0)  # length, minus the period, start
    for period in range(1, len(names) // 2 + 1):
        start = 0
        for i in range(period, len(names) + 1):
            if i < len(names) and names[i] == names[i - period]:
                continue
            if i - start >= 2 * period:
                best = max(best, (i - start, -period, start))
            start = i - period + 1
    length, period, start = best[0], -best[1], best[2]
    return start, period, length // period if period else 0


def middle_block(events: Iterable[dict]) -> list[dict[str, object]]:
    """The kernels of one block in the middle of a trace of one forward, in the order of their starts.

    Each with its name, its class, and its start and end in microseconds from the first one's start.
    RuntimeError where there are no kernels that repeat LEAST_PERIODS times.
    """
    kernels = sorted((e for e in events if e.get("cat") in kernel_times.ON_GPU), key=_start)
    start, period, count = repeated([kernel["name"] for kernel in kernels])
    if count < LEAST_PERIODS:
        raise RuntimeError(f"of {len(kernels)} kernels none repeat with the model's blocks")
    first = start + count // 2 * period
    block = kernels[first : first + period]
    begin = _start(block[0])
    return [
        {
            "name": kernel_times.short_name(kernel["name"]),
            "class": kind(kernel["name"]),
            "start_us": round(_start(kernel) - begin, 3),
            "end_us": round(_start(kernel) + kernel["dur"] - begin, 3),
        }
        for kernel in block
    ]


def _start(event: dict) -> float:
    return event["ts"]


@click.command()
@DEVICE
@record.output_option("block_timeline")
@torch.no_grad()
def main(device, output) -> None:
    """Profile one forward of LTX-Video in each mode and keep the kernels of one block."""
    if device.type != "cuda":
        raise click.UsageError("a timeline of GPU kernels needs a GPU")
    kernel, _ = models.load_kernel()
    model = LTX_VIDEO.transformer(device, torch.bfloat16)
    arguments = LTX_VIDEO.inputs(model, SIZE, device, torch.bfloat16)
    result = {
        "environment": record.environment(device),
        "model": LTX_VIDEO.name,
        "size": str(SIZE),
        "weights": WEIGHTS,
        "modes": {},
    }
    output = record.destination(output, "block_timeline")
    with models.weights(model, WEIGHTS):
        for mode in MODES:
            instance = models.twin(model)
            if mode == "injected":
                models.inject(kernel, instance, mode)
            models.compile_as(instance, mode)
            forward = functools.partial(instance, **arguments)
            for _ in range(WARM_UP_CALLS):
                forward()
            block = result["modes"][mode] = middle_block(kernel_times.trace(forward, 1))
            click.echo(f"{mode}: {len(block)} kernels in {block[-1]['end_us']:.0f} µs")
    record.finish(output, result)


if __name__ == "__main__":
    main()
