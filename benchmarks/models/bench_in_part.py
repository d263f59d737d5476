"""Models that injection speeds up in part: injected in three ways, over torch.compile.

- compiled: block by block, UNets as a whole. Graph breaks are allowed.
- injected, injected with CUDA graphs, and injected and compiled in the same way.

All modes share one set of weights, with scores as peaked as in trained models, and take turns. A speedup is
the median of RUNS runs, all of which are recorded. Models have published widths and a few of their blocks.
A mode that fails, or captures no forward, is left out with its reason. Writes to benchmarks/results/in_part,
where a run may have some of the models:

    python benchmarks/models/bench_in_part.py
    python benchmarks/models/bench_in_part.py --models sana,prx --modes compiled,injected
    python benchmarks/models/bench_in_part.py --device cpu --tiny --output /tmp/in_part.json

Compilation takes most of the time, of UNets minutes. Several processes may fill Inductor's cache before;
what they tuned while they shared the GPU is deleted:

    export TORCHINDUCTOR_COMPILE_THREADS=2 SCRIPT=benchmarks/models/bench_in_part.py
    python $SCRIPT --list |
    xargs -P 8 -I {} timeout 300 python $SCRIPT --models {} --rounds 1 --output /tmp/in_part/{}.json
    find /tmp/torchinductor_* -name "*.best_config" -delete
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
from tabulate import tabulate

from benchmarks import models
from benchmarks.harness import cuda_graphs, options, record, timing
from benchmarks.harness.options import DEVICE, TINY, modes_on, modes_option, names_option
from benchmarks.models.ideogram4 import IDEOGRAM4
from benchmarks.models.images import AURAFLOW
from benchmarks.models.in_part_images import IMAGES
from benchmarks.models.in_part_sequences import SEQUENCES
from benchmarks.models.in_part_unets import UNETS
from benchmarks.models.ltx import SANA_WM_REFINER
from benchmarks.models.pixart import HUNYUAN_DIT
from benchmarks.models.published import Published
from benchmarks.models.wan_relatives import WAN_ANIMATE2

COMPILED, INJECTED_COMPILED = "compiled", "injected+compiled"
MODES = (COMPILED, "injected", models.GRAPHS, INJECTED_COMPILED)
RUNS = 3
WARM_UP_ROUNDS = 2
CONSECUTIVE = 3  # forwards of a sample
DTYPE = torch.bfloat16
_BY_FAMILIES = (AURAFLOW, HUNYUAN_DIT, IDEOGRAM4, SANA_WM_REFINER, WAN_ANIMATE2)
MODELS = {entry.key: entry for entry in (*_BY_FAMILIES, *IMAGES, *SEQUENCES, *UNETS)}


def model_and_arguments(
    entry: Published, device: torch.device, is_tiny: bool
) -> tuple[torch.nn.Module, dict[str, Any]]:
    model = entry.transformer(device, DTYPE, is_tiny)
    size, *_ = entry.tiny_sizes if is_tiny else entry.sizes
    return model, entry.inputs(model, size, device, DTYPE)


def compile_blocks_or_whole(model: torch.nn.Module) -> None:
    """Block by block. UNets have few equal blocks, and most of their time outside of those."""
    is_unet = type(model).__module__.startswith("diffusers.models.unets.")
    if not is_unet and (model._repeated_blocks or models.block_lists(model)):
        models.compile_blocks(model, fullgraph=False)
    else:
        models.compile_whole(model, fullgraph=False)


def forward_of(
    mode: str,
    twin: torch.nn.Module,
    arguments: Mapping[str, Any],
    kernel: ModuleType,
) -> tuple[Callable[[], object], Any]:
    """The forward after its first call, and the report of an injection with CUDA graphs.

    RuntimeError if no forward is captured.
    """
    report = models.inject(kernel, twin, mode) if mode.startswith("injected") else None
    if mode.endswith("compiled"):
        compile_blocks_or_whole(twin)
    forward = functools.partial(twin, **arguments)
    if mode != models.GRAPHS:
        forward()
        return forward, None
    reasons = cuda_graphs.why_not_captured(report, forward)
    if reasons is not None:
        raise RuntimeError(f"no forward is captured: {reasons}")
    return forward, report


def measure(
    entry: Published,
    kernel: ModuleType,
    device: torch.device,
    is_tiny: bool,
    rounds: int,
    modes: Sequence[str] = MODES,
) -> dict[str, Any]:
    """Each run's times and speedups of one model, and the injected mode that is the fastest."""
    model, arguments = model_and_arguments(entry, device, is_tiny)
    forwards, graphs, left_out = {}, None, {}
    for mode in modes:
        try:
            forwards[mode], report = forward_of(mode, models.twin(model), arguments, kernel)
        except Exception as error:  # the other modes are still measured
            left_out[mode] = f"{type(error).__name__}: {error}"
            click.echo(f"{entry.key}, {mode}:\n{traceback.format_exc()}", err=True)
            continue
        graphs = graphs or report
    if COMPILED in left_out or not forwards:
        raise RuntimeError(f"not measured: {left_out}")
    repeated = {mode: timing.repeated(call, CONSECUTIVE) for mode, call in forwards.items()}
    with models.weights(model, "peaked"):
        timing.interleave(repeated, WARM_UP_ROUNDS, device)
        runs = [timing.interleave(repeated, rounds, device) for _ in range(RUNS)]
    if graphs is not None:
        cuda_graphs.check_replayed(graphs, RUNS * rounds * CONSECUTIVE)
    medians = [
        {mode: statistics.median(samples) / CONSECUTIVE for mode, samples in run.items()}
        for run in runs
    ]
    injected = [mode for mode in forwards if mode != COMPILED] if COMPILED in forwards else []
    speedups = {mode: [run[COMPILED] / run[mode] for run in medians] for mode in injected}
    speedup = {mode: statistics.median(each) for mode, each in speedups.items()}
    return {
        "model": entry.name,
        "class": entry.cls.__name__,
        "ms": medians,
        "speedups": speedups,
        "speedup": speedup,
        "best": max(speedup, key=speedup.__getitem__, default=None),
        "left_out": left_out,
    }


def measure_each(
    name: str,
    measure: Callable[..., dict[str, Any]],
    entries: Sequence[Published],
    device: torch.device,
    is_tiny: bool,
    rounds: int,
    output: Path | None,
    show: Callable[[list[dict[str, Any]]], None],
) -> None:
    """The models one after the other. The result is written after each, and shown in the end."""
    kernel, _ = models.load_kernel()
    measured: list[dict[str, Any]] = []
    result = {
        "environment": record.environment(device),
        "dtype": record.dtype_name(DTYPE),
        "rounds": rounds,
        name: measured,
    }
    where = record.destination(output, name, ("entries",))

    def measure_one(entry: Published) -> None:
        measured.append(measure(entry, kernel, device, is_tiny, rounds))
        record.write(where, result)

    try:
        options.measure_each({e.key: functools.partial(measure_one, e) for e in entries}, device)
    finally:
        show(measured)
        record.say_where(where)


def show(measured: Sequence[dict[str, Any]]) -> None:
    injected = MODES[1:]
    rows = [
        [
            m["model"],
            statistics.median(run.get(COMPILED, math.nan) for run in m["ms"]),
            *(m["speedup"].get(mode) for mode in injected),
            m["best"],
            *m["speedups"].get(m["best"], ()),
        ]
        for m in measured
    ]
    headers = ["model", "compiled ms", *injected, "best", *["run"] * RUNS]
    click.echo(tabulate(rows, headers, floatfmt=".3f"))


def list_models(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        click.echo("\n".join(MODELS))
        ctx.exit()


@click.command()
@DEVICE
@TINY
@names_option("--models", MODELS, "entries")
@modes_option(MODES, MODES)
@click.option("--rounds", type=click.IntRange(min=1), default=6, show_default=True)
@click.option("--list", is_flag=True, is_eager=True, expose_value=False, callback=list_models)
@record.output_option("in_part")
@torch.no_grad()
def main(device, tiny, entries, modes, rounds, output) -> None:
    """Measure the models one after the other."""
    of_modes = functools.partial(measure, modes=modes_on(device, modes))
    measure_each("in_part", of_modes, entries, device, tiny, rounds, output, show)


if __name__ == "__main__":
    main()
