"""GPU memory of CUDA graphs of many shapes, more than the cache holds.

An injected LTX-Video with few blocks is called 2,000 times with 45 shapes, in runs of 2 to 6 calls per shape,
so that graphs are constantly captured, replayed and evicted. The benchmark fails if the memory reserved at
the end exceeds what the same calls reserve without graphs, plus the limit on graphs times the memory of the
largest graph. Writes to benchmarks/results/cuda_graphs_memory, on a GPU:

    python benchmarks/models/bench_cuda_graphs_memory.py
    python benchmarks/models/bench_cuda_graphs_memory.py --calls 500 --limit 4 --output /tmp/memory.json
"""

from __future__ import annotations

import gc
import itertools
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
from tabulate import tabulate

from benchmarks import models
from benchmarks.harness import cuda_graphs, record
from benchmarks.harness.options import DEVICE, DTYPE, modes_on
from benchmarks.models.ltx import LTX_VIDEO, LTXSize

BLOCKS = 4
SHAPES = tuple(
    LTXSize(*numbers)
    for numbers in itertools.product((1, 17, 33, 49, 65), (256, 384, 512), (256, 512, 768))
)
RUN_LENGTHS = (2, 6)  # calls of a shape in a row: the second one captures
FIRST = 200  # calls after which the peak is taken
SAMPLED = 20  # calls between two samples
MIB = 2**20

Forward = Callable[[LTXSize], object]


def sequence(calls: int, shapes: Sequence[LTXSize] = SHAPES) -> list[LTXSize]:
    """The shapes of that many calls: random permutations of all shapes, one after the other."""
    draw, drawn = random.Random(0), []
    while len(drawn) < calls:
        for shape in draw.sample(shapes, len(shapes)):
            drawn += [shape] * draw.randint(*RUN_LENGTHS)
    return drawn[:calls]


def reserved(device: torch.device) -> int:
    """Bytes, without memory cached by the allocator."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def follow(
    forward: Forward, shapes: Sequence[LTXSize], measure: Callable[[], Mapping[str, int]]
) -> list[dict[str, int]]:
    """Runs the calls, and samples memory every SAMPLED calls and after the last."""
    samples = []
    for call, shape in enumerate(shapes, 1):
        forward(shape)
        if call % SAMPLED == 0 or call == len(shapes):
            samples.append({"calls": call, **measure()})
    return samples


def summarize(samples: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Reserved memory in bytes: the peak over the first calls, the peak over all, and the end."""
    return {
        "peak_first": max(s["peak_reserved"] for s in samples if s["calls"] <= FIRST),
        "peak": max(sample["peak_reserved"] for sample in samples),
        "end": samples[-1]["reserved"],
    }


def explained(without: Mapping[str, int], graph: int, limit: int) -> int:
    """The limit on memory reserved at the end: the peak without graphs, plus `limit` largest graphs."""
    return without["peak"] + limit * graph


def measure(
    kernel: ModuleType, device: torch.device, dtype: torch.dtype, calls: int, limit: int
) -> dict[str, Any]:
    """The same calls without and with graphs, and the memory of one graph of the largest shape."""
    config = {"num_layers": BLOCKS}
    model = models.build(LTX_VIDEO.cls, config, device, dtype, 0)
    arguments = {shape: LTX_VIDEO.inputs(model, shape, device, dtype) for shape in SHAPES}
    shapes = sequence(calls)

    def injected(**options: object) -> tuple[Forward, Any]:
        instance = models.twin(model)
        report = kernel.inject_kernels(instance, **options)

        def forward(shape: LTXSize) -> None:
            with torch.inference_mode():
                instance(**arguments[shape])

        return forward, report

    def run(drawn: Sequence[LTXSize], **options: object) -> tuple[list[dict[str, int]], Any]:
        """Memory over the calls, in bytes above that of the weights and inputs."""
        forward, report = injected(**options)
        before = reserved(device)
        torch.cuda.reset_peak_memory_stats(device)

        def grown() -> dict[str, int]:
            torch.cuda.synchronize(device)
            return {
                "reserved": torch.cuda.memory_reserved(device) - before,
                "peak_reserved": torch.cuda.max_memory_reserved(device) - before,
                "allocated": torch.cuda.memory_allocated(device) - before,
            }

        return follow(forward, drawn, grown), report

    largest = max(SHAPES, key=lambda shape: shape.tokens)
    run(sequence(len(SHAPES)))  # excludes one-time allocations of libraries
    (*_, plain), _ = run([largest] * 4)
    (*_, captured), report = run([largest] * 4, cuda_graphs=True)
    cuda_graphs.check_replayed(report, 1)
    without, _ = run(shapes)
    with_graphs, report = run(shapes, cuda_graphs=True, max_cuda_graphs=limit)
    graph = max(0, captured["reserved"] - plain["reserved"])
    return {
        "largest_graph": graph,
        "graphs": cuda_graphs.check_replayed(report, 1),
        "without": {**summarize(without), "samples": without},
        "with": {**summarize(with_graphs), "samples": with_graphs},
        "explained": explained(summarize(without), graph, limit),
    }


def check(result: Mapping[str, Any], limit: int) -> None:
    """Raises ClickException if graphs hold more than the limit explains, or if none was evicted."""
    if result["graphs"]["captured"] <= limit:
        raise click.ClickException("no graph was evicted: use more calls or a lower limit")
    held, explained_ = result["with"]["end"], result["explained"]
    if held > explained_:
        raise click.ClickException(
            f"{held / MIB:.0f} MiB are reserved at the end, but only {explained_ / MIB:.0f} are explained"
        )


def show(result: Mapping[str, Any]) -> None:
    rows = [
        [mode, *(result[key][name] / MIB for name in ("peak_first", "peak", "end"))]
        for mode, key in (("injected", "without"), (models.GRAPHS, "with"))
    ]
    headers = ["MiB reserved", f"peak of {FIRST} calls", "peak of all", "end"]
    click.echo(tabulate(rows, headers, floatfmt=".0f"))
    click.echo(
        f"The largest graph takes {result['largest_graph'] / MIB:.0f} MiB, "
        f"{result['explained'] / MIB:.0f} MiB are explained; {result['graphs']}"
    )


@click.command()
@click.option("--calls", type=click.IntRange(min=FIRST), default=2000, show_default=True)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Maximum number of cached graphs.",
)
@DEVICE
@DTYPE
@record.output_option("cuda_graphs/memory")
@torch.no_grad()
def main(calls, limit, device, dtype, output) -> None:
    """Measure the memory of CUDA graphs over calls of many shapes."""
    modes_on(device, [models.GRAPHS])
    kernel, _ = models.load_kernel()
    result = {
        "environment": record.environment(device),
        "model": f"LTX-Video 2B, {BLOCKS} blocks",
        "dtype": record.dtype_name(dtype),
        "number_of_calls": calls,
        "first_calls": FIRST,
        "shapes": [str(shape) for shape in SHAPES],
        "limit": limit,
        **measure(kernel, device, dtype, calls, limit),
    }
    show(result)
    output = record.destination(output, "cuda_graphs/memory")
    record.finish(output, result)
    check(result, limit)


if __name__ == "__main__":
    main()
