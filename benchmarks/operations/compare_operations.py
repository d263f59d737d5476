"""Single operations of two builds, another checkout's and this one's, in one process.

The builds take turns, each call with a cold L2 cache. The other build has two turns, whose difference is the
noise. The grid covers everything that launch configurations depend on: dtype, width, alignment and operands.

    git worktree add ../before <commit> && (cd ../before && python tools/build_variant.py --backend cuda)
    python benchmarks/operations/compare_operations.py ../before --output out.json
    python benchmarks/operations/compare_operations.py ../before --only "^(rms|layer)_norm.*float32"
"""

from __future__ import annotations

import functools
import math
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks.harness import record, timing
from benchmarks.harness.comparison import outputs
from benchmarks.harness.options import DEVICE
from benchmarks.models.compare_builds import CONTROL, load_builds
from benchmarks.operations import bench_rope

from accuracy import finite_distance

DTYPES = ("bfloat16", "float16", "float32")
WARM_UP_ROUNDS = 2
BYTES = 16 << 20  # elements of the first tensor; LONG_ROW_FACTOR times as many for long rows
LONG_ROW, LONG_ROW_FACTOR = 16384, 4
# Widths of models, widths where launch configurations change, and some that 16-byte accesses cannot handle.
MODEL_WIDTHS = (64, 128, 1152, 1536, 1920, 2048, 2432, 3072, 4096, 5120, 6144)
OTHER_WIDTHS = (32, 256, 512, 768, 1024, 2560, 8192, 16384, 32768, 65536)
ODD_WIDTHS = (1, 7, 100, 1000, 1001, 20001)
RARE_WIDTHS = (64, 256, 1024, *MODEL_WIDTHS[3:], 8192, 16384, 65536)
# Operands after the first: W weight, B bias, M scale and shift, G residual and gate.
COMMON = {
    "rms_norm": ("", "W"),
    "layer_norm": ("", "WB"),
    "rms_norm_modulate": ("M",),
    "layer_norm_modulate": ("M",),
    "gated_residual": ("G",),
    "gated_residual_rms_norm_modulate": ("GM",),
    "gated_residual_layer_norm_modulate": ("GM",),
    "softmax": ("",),
}
RARE = {
    "layer_norm": ("W", "B"),
    "rms_norm_modulate": ("MW",),
    "layer_norm_modulate": ("MW", "MWB"),
    "gated_residual_rms_norm_modulate": ("GMW",),
    "gated_residual_layer_norm_modulate": ("GMWB",),
}
# (heads, head dim) of query and key with a norm across heads, and with a norm per head.
ACROSS_HEADS = (
    (8, 64),
    (12, 64),
    (16, 64),
    (12, 128),
    (32, 64),
    (20, 128),
    (24, 128),
    (32, 128),
    (40, 128),
)
PER_HEAD = ((32, 32), (32, 64), (24, 128), (12, 256))
ODD_HEADS = ((3, 20), (16, 36))
ROPES = ("", "coordinates", "float32 tables", "pair tables")


@dataclass(frozen=True)
class Workload:
    operation: str
    dtype: str
    shape: tuple[int, ...]
    variant: str = ""
    is_misaligned: bool = False

    def __str__(self) -> str:
        parts = [self.operation, self.variant, self.dtype, "x".join(map(str, self.shape))]
        return " ".join(filter(None, [*parts, "misaligned" * self.is_misaligned]))


def row_workloads(dtype: str, size: int) -> Iterator[Workload]:
    def workload(operation, operands, width, is_misaligned=False):
        total = size * LONG_ROW_FACTOR if width >= LONG_ROW else size
        rows = max(1, total // (width * getattr(torch, dtype).itemsize))
        return Workload(operation, dtype, (rows, width), operands, is_misaligned)

    for table, widths in ((COMMON, MODEL_WIDTHS + OTHER_WIDTHS), (RARE, RARE_WIDTHS)):
        for operation, variants in table.items():
            for operands in variants:
                yield from (workload(operation, operands, width) for width in widths)
                yield from (workload(operation, operands, width) for width in ODD_WIDTHS)
                yield from (workload(operation, operands, w, True) for w in (128, 2048, 16384))


def rope_workloads(dtype: str, size: int) -> Iterator[Workload]:
    def workload(operation, heads, head_dim, variant, is_misaligned=False):
        tokens = max(1, size // (heads * head_dim * getattr(torch, dtype).itemsize))
        return Workload(operation, dtype, (1, tokens, heads, head_dim), variant, is_misaligned)

    for norm, shapes in (("across_heads", ACROSS_HEADS), ("per_head", PER_HEAD)):
        for rope in ROPES:
            for layout in bench_rope.LAYOUTS if rope else bench_rope.LAYOUTS[:1]:
                variant = ", ".join(filter(None, [norm, rope, layout]))
                for heads, head_dim in (*shapes, *ODD_HEADS):
                    yield workload("qk_norm_rope", heads, head_dim, variant)
                yield workload("qk_norm_rope", *shapes[1], variant, True)
    for rope in ROPES[2:]:
        for layout in bench_rope.LAYOUTS:
            for heads, head_dim in (*PER_HEAD, *ODD_HEADS):
                yield workload("rope", heads, head_dim, f"{rope}, {layout}")
            yield workload("rope", 24, 128, f"{rope}, {layout}", True)


def random(
    device: torch.device, dtype: torch.dtype, *shape: int, is_misaligned: bool = False
) -> Tensor:
    """Values of N(0, 1) in memory aligned to 16 bytes, or one element after such an address."""
    values = torch.randn(math.prod(shape) + is_misaligned, dtype=dtype, device=device)
    return values[int(is_misaligned) :].view(shape)


def row_arguments(workload: Workload, device: torch.device) -> tuple[tuple, dict]:
    dtype, (rows, width) = getattr(torch, workload.dtype), workload.shape
    tensor = functools.partial(random, device, dtype, is_misaligned=workload.is_misaligned)
    operands = workload.variant
    options = {}
    if "W" in operands:
        options["weight"] = tensor(width)
    if "B" in operands:
        options["bias"] = tensor(width)
    gated = (tensor(rows, width),) if "G" in operands else ()
    gate = (tensor(1, width),) if "G" in operands else ()
    modulation = (tensor(1, width), tensor(1, width)) if "M" in operands else ()
    return (*gated, tensor(rows, width), *gate, *modulation), options


def rope_arguments(
    workload: Workload, kernel: ModuleType, device: torch.device
) -> tuple[tuple, dict]:
    dtype, (_, tokens, heads, head_dim) = getattr(torch, workload.dtype), workload.shape
    tensor = functools.partial(random, device, dtype, is_misaligned=workload.is_misaligned)
    words = workload.variant.split(", ")
    layout = words[-1] if words[-1] in bench_rope.LAYOUTS else bench_rope.LAYOUTS[0]
    angles = bench_rope.angles(device, tokens, head_dim // 2)
    rope = None
    if "float32 tables" in words:
        rope = bench_rope.tables(angles, layout)
    elif "pair tables" in words:
        rope = (angles.cos().to(dtype), angles.sin().to(dtype))
    elif "coordinates" in words:
        coordinates = torch.rand(1, tokens, 3, device=device)
        frequencies = 10.0 ** torch.linspace(0, 4, heads * head_dim // 6, device=device)
        rope = kernel.CoordinateRope(coordinates, frequencies)
    x = tensor(*workload.shape)
    if workload.operation == "rope":
        return (x, *rope), {"layout": layout}
    weight = head_dim if words[0] == "per_head" else heads * head_dim
    options = {"heads": heads, "norm": words[0], "layout": layout}
    return (x, tensor(*workload.shape), tensor(weight), tensor(weight), rope), options


def calls(
    workload: Workload, kernels: dict[str, ModuleType], device: torch.device
) -> dict[str, Callable[[], object]]:
    """A call of each build on the same tensors."""
    functions = {}
    for name, kernel in kernels.items():
        torch.manual_seed(0)
        if workload.operation in ("qk_norm_rope", "rope"):
            arguments, options = rope_arguments(workload, kernel, device)
        else:
            arguments, options = row_arguments(workload, device)
        operation = getattr(kernel, workload.operation)
        functions[name] = functools.partial(operation, *arguments, **options)
    return functions


def measure(
    workload: Workload,
    kernels: dict[str, ModuleType],
    stopwatch: timing.Stopwatch,
    rounds: int,
    device: torch.device,
) -> dict[str, object]:
    functions = calls(workload, kernels, device)
    results = (outputs(functions[name]()) for name in ("after", "before"))
    distances = [
        0.0 if torch.equal(after, before) else finite_distance(after, before)
        for after, before in zip(*results, strict=True)
    ]
    timing.interleave(functions, WARM_UP_ROUNDS, device, stopwatch.cold)
    samples = timing.interleave(functions, rounds, device, stopwatch.cold)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return {
        "workload": str(workload),
        "operation": workload.operation,
        "dtype": workload.dtype,
        "shape": list(workload.shape),
        "variant": workload.variant,
        "is_misaligned": workload.is_misaligned,
        "distance": max(distances),
        "microseconds": medians,
        "ratio": medians["after"] / medians["before"],
        "noise": medians[CONTROL] / medians["before"],
    }


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def show(entries: list[dict], threshold: float) -> None:
    groups = defaultdict(list)
    for entry in entries:
        groups[entry["operation"], entry["dtype"]].append(entry)
    rows = []
    for (operation, dtype), group in sorted(groups.items()):
        ratios, noise = ([entry[key] for entry in group] for key in ("ratio", "noise"))
        figures = (geometric_mean(ratios), min(ratios), max(ratios), min(noise), max(noise))
        rows.append([operation, dtype, len(group), *figures])
    headers = ["operation", "dtype", "workloads", "ratio", "least", "most", "noise, least", "most"]
    click.echo(tabulate(rows, headers, floatfmt=".3f"))
    apart = [entry for entry in entries if abs(entry["ratio"] - 1) > threshold]
    apart.sort(key=lambda entry: -entry["ratio"])
    click.echo(f"\n{len(apart)} of {len(entries)} workloads differ by more than {threshold:.0%}")
    rows = [
        [
            e["workload"],
            e["microseconds"]["before"],
            e["microseconds"]["after"],
            e["ratio"],
            e["noise"],
        ]
        for e in apart
    ]
    headers = ["workload", "before, µs", "after, µs", "ratio", "noise"]
    click.echo(tabulate(rows, headers, floatfmt=("", ".1f", ".1f", ".3f", ".3f")))


@click.command()
@click.argument("before", type=click.Path(exists=True, file_okay=False, path_type=Path))
@DEVICE
@click.option("--only", default="", help="Regular expression for the workloads' names.")
@click.option("--rounds", type=click.IntRange(min=1), default=15, show_default=True)
@click.option("--bytes", "size", type=click.IntRange(min=1), default=BYTES, show_default=True)
@click.option("--threshold", type=click.FloatRange(min=0), default=0.03, show_default=True)
@click.option("--list", "only_list", is_flag=True, help="Show the workloads' names and exit.")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="JSON file to write."
)
@torch.no_grad()
def main(before, device, only, rounds, size, threshold, only_list, output) -> None:
    """Time single operations of the build of the checkout BEFORE and of this checkout's build."""
    try:
        pattern = re.compile(only)
    except re.error as error:
        raise click.UsageError(f"--only is not a regular expression: {error}") from None
    workloads = [
        workload
        for dtype in DTYPES
        for table in (row_workloads, rope_workloads)
        for workload in table(dtype, size)
        if pattern.search(str(workload))
    ]
    if not workloads:
        raise click.UsageError(f"--only {only} matches no workload: see --list")
    if only_list:
        return click.echo("\n".join(map(str, workloads)))
    kernels = load_builds(before)
    stopwatch = timing.Stopwatch(device)
    environment = record.environment(device)
    entries = []
    with click.progressbar(workloads, label="Measuring") as bar:
        for workload in bar:
            entries.append(measure(workload, kernels, stopwatch, rounds, device))
    show(entries, threshold)
    record.finish(output, {"environment": environment, "workloads": entries})


if __name__ == "__main__":
    main()
