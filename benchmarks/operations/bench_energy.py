"""Time, power and energy of single operations in a loop, at the shapes of FLUX.1 and LTX-Video.

A denoising loop runs at the card's power limit, where its time follows its energy. Here each operation runs
alone for some seconds, on several sets of inputs in turns, which do not all fit in the L2 cache. At the power
limit a lower clock also saves energy, so the table has both. Writes to benchmarks/results/energy:

    python benchmarks/operations/bench_energy.py
    python benchmarks/operations/bench_energy.py --device cpu --tiny --output /tmp/energy.json
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
import torch.nn.functional as F
from tabulate import tabulate

from benchmarks import models
from benchmarks.harness import clocks, peers, record, timing
from benchmarks.harness.comparison import Family, Workload, eager_call, normal
from benchmarks.harness.options import DEVICE, TINY
from benchmarks.operations import bench_gated_residual, bench_rope

from attention_inputs import INPUTS

SCORES = "std 3"  # as in trained models
SETS = 4  # of inputs
CALIBRATION_CALLS = 20
# Model; tokens and hidden sizes of its matrix products; attention; its row kernels.
SHAPES = (
    (
        "FLUX.1",
        ((4608, 3072, 3072), (4608, 3072, 12288), (4608, 15360, 3072)),
        (1, 4608, 4608, 24, 128),
        (
            (
                bench_gated_residual.FAMILY,
                Workload("gated_residual_layer_norm_modulate", (1, 4608, 3072)),
            ),
            (
                bench_rope.FAMILY,
                Workload("qk_norm_rope", bench_rope.FLUX_SHAPE, bench_rope.PER_HEAD),
            ),
        ),
    ),
    (
        "LTX-Video",
        ((16128, 2048, 2048), (16128, 2048, 8192), (16128, 8192, 2048)),
        (2, 8064, 8064, 32, 64),
        (
            (
                bench_gated_residual.FAMILY,
                Workload("gated_residual_rms_norm_modulate", (2, 8064, 2048)),
            ),
            (
                bench_rope.FAMILY,
                Workload("qk_norm_rope", (2, 8064, 2048), bench_rope.COORDINATES),
            ),
        ),
    ),
)
TINY_SHAPES = (
    (
        "tiny",
        ((64, 128, 128),),
        (1, 64, 64, 2, 64),
        ((bench_rope.FAMILY, Workload("qk_norm_rope", (2, 6, 128), bench_rope.COORDINATES)),),
    ),
)

# By whom, and a call on each set of inputs.
Calls = Iterator[tuple[str, Sequence[Callable[[], object]]]]


def products(shape: tuple[int, int, int], kernel: ModuleType, device: torch.device) -> Calls:
    rows, inner, outer = shape
    sets = [
        (normal(device, rows, inner), normal(device, outer, inner, std=inner**-0.5))
        for _ in range(SETS)
    ]
    yield "cuBLAS", [functools.partial(F.linear, *each) for each in sets]
    in_fp8 = [(*kernel.quantize_fp8(x), *kernel.quantize_fp8(weight)) for x, weight in sets]
    yield "this package, FP8", [functools.partial(kernel.linear_fp8, *each) for each in in_fp8]


def attentions(shape: Sequence[int], kernel: ModuleType, device: torch.device) -> Calls:
    sets = [INPUTS[SCORES](shape, device) for _ in range(SETS)]
    yield "this package", [functools.partial(kernel.attention, *each) for each in sets]
    libraries, _ = peers.load(device, peers.ATTENTION_LIBRARIES)
    for name in ("fa3", "cudnn"):
        if name in libraries:
            yield name, [libraries[name].attention(*each).run for each in sets]


def rows(family: Family, workload: Workload, kernel: ModuleType, device: torch.device) -> Calls:
    cases = [family.build(workload, kernel, device) for _ in range(SETS)]
    function = getattr(kernel, workload.operation)
    yield (
        "this package",
        [functools.partial(function, *case.arguments, **case.options) for case in cases],
    )
    eager = [eager_call(workload, case) for case in cases]
    yield "eager", [functools.partial(call, *args, **options) for call, args, options in eager]


def operations(
    kernel: ModuleType, device: torch.device, tiny: bool
) -> Iterator[tuple[str, str, str, Calls]]:
    """Model, class of kernels, shape and calls of each operation."""
    for model, of_products, of_attention, of_rows in TINY_SHAPES if tiny else SHAPES:
        for shape in of_products:
            yield (
                model,
                "matrix product",
                "x".join(map(str, shape)),
                products(shape, kernel, device),
            )
        name = "x".join(map(str, of_attention))
        yield model, f"attention, {SCORES}", name, attentions(of_attention, kernel, device)
        for family, workload in of_rows:
            what = " ".join(filter(None, [workload.operation, workload.variant]))
            yield model, what, workload.size, rows(family, workload, kernel, device)


def loop(
    calls: Sequence[Callable[[], object]], seconds: float, device: torch.device
) -> dict[str, Any]:
    """Runs the calls in turns for about `seconds`: their number, microseconds each, clock, power, energy."""
    calibrated = functools.partial(_repeat, calls, CALIBRATION_CALLS)
    calibrated()
    each = timing.milliseconds(calibrated, device) / CALIBRATION_CALLS / 1e3
    count = max(CALIBRATION_CALLS, round(seconds / each))
    timing.synchronize(device)
    with clocks.watch(device) as clock:
        begin = time.perf_counter()
        _repeat(calls, count)
        timing.synchronize(device)
        took = time.perf_counter() - begin
    entry: dict[str, Any] = {"calls": count, "microseconds": took / count * 1e6, **clock}
    if "joules" in clock:
        entry["millijoules"] = clock["joules"] / count * 1e3
    return entry


def _repeat(calls: Sequence[Callable[[], object]], count: int) -> None:
    for call in itertools.islice(itertools.cycle(calls), count):
        call()


@click.command()
@DEVICE
@TINY
@click.option("--seconds", type=click.FloatRange(min=0.01), default=2.0, show_default=True)
@record.output_option("energy")
@torch.no_grad()
def main(device, tiny, seconds, output) -> None:
    """Measure the energy of each operation in a loop of its own."""
    kernel, _ = models.load_kernel()
    result: dict[str, Any] = {"environment": record.environment(device), "loops": []}
    output = record.destination(output, "energy", ("seconds",))
    for model, what, shape, calls in operations(kernel, device, tiny):
        for by, of_sets in calls:
            entry = {"model": model, "operation": what, "shape": shape, "by": by}
            result["loops"].append(entry | loop(of_sets, seconds, device))
            record.write(output, result)
    keys = ("model", "operation", "shape", "by", "microseconds", "millijoules", "watts", "sm_mhz")
    table = [[entry.get(key) for key in keys] for entry in result["loops"]]
    click.echo(tabulate(table, [*keys[:4], "us", "mJ", "W", "MHz"], floatfmt=".1f"))
    record.say_where(output)


if __name__ == "__main__":
    main()
