"""One forward of published models: eager, compiled block by block, and injected.

--modes selects more: compiled as a whole, compiled with CUDA graphs (reduce-overhead), injected without
attention, injected with CUDA graphs, injected and compiled by blocks or as a whole, and with the blocks'
linear layers in FP8 (torchao's, a scale per row): eager, compiled block by block, injected, with CUDA graphs;
and injected with each precision of inject_kernels.

Sizes are the published ones (most with fewer blocks), inputs are those of the pipelines. All modes share one
set of weights and take turns, first with random weights, then with query and key norms that give scores as
peaked as in trained models (models.WEIGHTS). --weights outliers adds outlier channels. The weights change in
place, without another compilation or injection. Also recorded: CPU time, GPU time by kernel class, and each
mode's distance from the float32 model; with --peak-memory the memory that each mode needs alone. --whole
adds blocks up to the published number, over the weights of those that there are, and only times them.
Writes to benchmarks/results/models.json, with modes in FP8 to fp8_models.json, where results with a compiled
mode, or with --calls, have names of their own:

    python benchmarks/models/bench_models.py
    python benchmarks/models/bench_models.py --model all
    python benchmarks/models/bench_models.py --model flux,flux2,sd3 --rounds 5 --profiled-calls 1
    python benchmarks/models/bench_models.py --modes eager,injected --sizes 49x512x768
    python benchmarks/models/bench_models.py --modes eager,injected,injected+fp8 --weights peaked,outliers
    python benchmarks/models/bench_models.py --device cpu --tiny --output /tmp/models.json

LOCAL_KERNELS selects another checkout's build; compare_builds.py compares two.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
from tabulate import tabulate

from benchmarks import models
from benchmarks.harness import clocks, cuda_graphs, kernel_times, record, timing
from benchmarks.harness.options import (
    DEVICE,
    DTYPE,
    PAUSE,
    SEVERAL_MODELS,
    SIZES,
    TINY,
    Named,
    measure_each,
    modes_on,
    modes_option,
)
from benchmarks.models.published import Published

from accuracy import finite_distance

WARM_UP_ROUNDS = 2
COMPARED = ("eager", "compiled", models.REGIONAL)  # baselines of speedups
FP8_DEFAULT_MODES = ("eager", "injected", models.INJECTED_FP8)
# Modes whose memory --peak-memory leaves out: without the others they would be compiled once more.
NO_MEMORY = ("compiled", "graphs", models.REDUCE_OVERHEAD)
HOST_ROUNDS = 5  # maximum, because a sample takes as long as one of the time


@dataclass(frozen=True)
class Settings:
    """Settings shared by all sizes."""

    published: Published
    device: torch.device
    dtype: torch.dtype
    modes: list[str]
    rounds: int
    calls: int
    pause_s: float
    profiled_calls: int
    has_distance: bool
    weights: Sequence[str] = tuple(models.WEIGHTS)
    has_memory: bool = False
    is_whole: bool = False


def inject(
    model: torch.nn.Module,
    kernel: ModuleType,
    mode: str,
    forward: Callable[[], object],
    device: torch.device,
) -> dict[str, object]:
    """Inject the kernels; return the time to full speed and the growth of memory."""
    counted = device.type == "cuda"
    timing.synchronize(device)
    before = torch.cuda.memory_allocated(device) if counted else None
    change = functools.partial(models.inject, kernel, model, mode)
    full_speed = timing.time_to_full_speed(change, forward, device)
    after = torch.cuda.memory_allocated(device) if counted else None
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        **full_speed,
        "weights_bytes": weights,
        "allocated_growth_bytes": after - before if counted else None,
    }


def distances(
    model: torch.nn.Module,
    forwards: Mapping[str, Callable[[], Any]],
    arguments: Mapping[str, object],
    settings: Settings,
) -> dict[str, dict[str, Any]]:
    """Each mode's distance from eager, its distance from the float32 model, and the latter over eager's.

    The ratio is None if eager is the float32 model itself.
    """
    outputs = {mode: models.output_of(forward()).clone() for mode, forward in forwards.items()}
    eager = outputs["eager"] if "eager" in outputs else models.output_of(model(**arguments))
    entries = {
        mode: {"distance_from_eager": finite_distance(output, eager)}
        for mode, output in outputs.items()
    }
    if not settings.has_distance:
        return entries
    exact = models.float32_output(model, arguments, settings.published.thousandfold)
    eagers = finite_distance(eager, exact)
    for mode, output in outputs.items():
        distance = finite_distance(output, exact)
        entries[mode]["distance_from_float32"] = distance
        entries[mode]["distance_over_eager"] = distance / eagers if eagers else None
    return entries


def measure_weights(
    model: torch.nn.Module,
    forwards: Mapping[str, Callable[[], object]],
    arguments: Mapping[str, object],
    settings: Settings,
) -> dict[str, object]:
    """All modes at one size with the current weights."""
    device = settings.device
    modes = distances(model, forwards, arguments, settings)
    consecutive = {mode: timing.repeated(f, settings.calls) for mode, f in forwards.items()}
    # A whole model may take many seconds, and `distances` has run it once.
    timing.interleave(consecutive, 0 if settings.is_whole else WARM_UP_ROUNDS, device)
    with clocks.watch(device) as clock:
        samples = timing.interleave(consecutive, settings.rounds, device, pause_s=settings.pause_s)
    rounds = 0 if settings.is_whole else min(HOST_ROUNDS, settings.rounds)
    host = timing.interleave(forwards, rounds, device, timing.host_microseconds)
    for mode, entry in modes.items():
        entry["ms"] = timing.summarize([time_ / settings.calls for time_ in samples[mode]])
        if settings.is_whole:
            continue
        entry["host_ms"] = timing.summarize([time_ / 1e3 for time_ in host[mode]])
        if device.type == "cuda":
            events = kernel_times.trace(forwards[mode], settings.profiled_calls)
            entry["kernels"] = kernel_times.breakdown(events, settings.profiled_calls)
    medians = {mode: entry["ms"]["median"] for mode, entry in modes.items()}
    return {"modes": modes, "speedups": timing.speedups(medians), "clocks": clock}


def measure_size(
    model: torch.nn.Module,
    kernel: ModuleType | None,
    size: Any,
    settings: Settings,
) -> dict[str, object]:
    """All modes at one size, with all weights."""
    device, published = settings.device, settings.published
    arguments = published.inputs(model, size, device, settings.dtype)
    result: dict[str, object] = {
        "tokens": size.tokens,
        "text_tokens": published.text_tokens,
        "batch": published.batch,
        "compiled_in_s": {},
    }

    if not settings.is_whole:
        model(**arguments)  # loads the libraries before the first mode
    forwards, quantized, graphs = {}, [], []
    for mode in settings.modes:
        instance = models.twin_for(model, mode)
        quantized += [instance] if mode in models.FP8_MODES else []
        forward = forwards[mode] = functools.partial(instance, **arguments)
        if mode in models.INJECTIONS and not settings.is_whole:
            if mode not in models.TORCHAO_MODES or device.type == "cuda":  # torchao needs a GPU
                forward()
            injection = inject(instance, kernel, mode, forward, device)
            result[models.INJECTIONS[mode]] = injection
        elif mode.startswith("injected"):
            report = models.inject(kernel, instance, mode)
            if mode in models.GRAPHS_MODES:
                reasons = cuda_graphs.why_not_captured(report, forward)
                if reasons is not None:
                    click.echo(f"{size} {mode}: not measured, as no forward is captured: {reasons}")
                    del forwards[mode]
                    continue
                graphs.append(report)
        if models.compile_as(instance, mode):
            begin = time.perf_counter()
            forward()
            timing.synchronize(device)
            seconds = result["compiled_in_s"][mode] = time.perf_counter() - begin
            click.echo(f"{size} {mode}: compiled in {seconds:.1f} s")

    result["weights"] = {}
    for name in settings.weights:
        with models.weights(model, name):
            for instance in quantized:
                models.quantize_again(instance, model)
            result["weights"][name] = measure_weights(model, forwards, arguments, settings)
    for report in graphs:
        forwards_each = settings.rounds * settings.calls * len(settings.weights)
        cuda_graphs.check_replayed(report, forwards_each)
    return result


def peak_memory(
    kernel: ModuleType | None, size: Any, settings: Settings, tiny: bool
) -> dict[str, int | None]:
    """Bytes that PyTorch allocates at most in a forward, for each mode alone, with its weights."""
    device, published, peaks = settings.device, settings.published, {}
    for mode in settings.modes:
        if any(part in mode for part in NO_MEMORY):
            continue
        model = published.transformer(device, settings.dtype, tiny)
        models.quantize_for(model, mode)
        if mode.startswith("injected"):
            models.inject(kernel, model, mode)
        arguments = published.inputs(model, size, device, settings.dtype)
        model(**arguments)
        models.free(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        model(**arguments)
        timing.synchronize(device)
        counted = device.type == "cuda"
        peaks[mode] = torch.cuda.max_memory_allocated(device) if counted else None
        del model, arguments
        models.free(device)
    return peaks


def show_kernels(title: str, modes: Mapping[str, dict]) -> None:
    """Print each mode's largest kernels outside matrix products and attention."""
    for mode, entry in modes.items():
        rows = [
            [k["ms"], k["launches"], "ours" if k["ours"] else "", k["name"][:110]]
            for k in entry["kernels"]["largest_others"]
        ]
        click.echo(f"\n{title}, {mode}: largest kernels outside matrix products and attention")
        click.echo(tabulate(rows, ["ms", "launches", "", "kernel"], floatfmt=".3f"))


def show_times(title: str, result: dict) -> None:
    """Print the modes' times, split by kernel class."""
    rows = []
    for mode, entry in result["modes"].items():
        median = entry["ms"]["median"]
        row = [mode, median, 100 * entry["ms"]["spread"]]
        row += [result["speedups"][mode].get(other) for other in COMPARED]
        row += [entry.get("host_ms", {}).get("median"), entry.get("distance_over_eager")]
        if "kernels" in entry:
            kernels = entry["kernels"]
            row += [kernels["classes"][key]["ms"] for key in kernel_times.CLASSES]
            row += [kernels["idle_ms"], kernels["total"]["launches"]]
        rows.append(row)
    headers = ["mode", "ms", "spread %", *(f"x {other}" for other in COMPARED)]
    headers += ["host ms", "distance over eager's"]
    headers += [*kernel_times.CLASSES.values(), "between kernels", "launches"]
    click.echo(f"\n{title}")
    click.echo(tabulate(rows, headers[: len(rows[0])], floatfmt=".2f"))
    clocks.show(result["clocks"])


def show_size(size: str, result: dict) -> None:
    """Print the times with all weights, and the cost of injection."""
    for name, of_weights in result["weights"].items():
        show_times(f"{size}, {result['batch']}x{result['tokens']} tokens, {name}", of_weights)
    if "injection" in result:
        injection = result["injection"]
        click.echo(
            f"From inject_kernels to full speed {injection['full_speed_s']:.3f} s, "
            f"inject_kernels itself {injection['change_s']:.3f} s, "
            f"memory growth {injection['allocated_growth_bytes']} bytes"
        )
    peaks = {mode: peak for mode, peak in result.get("peak_bytes", {}).items() if peak is not None}
    if peaks:
        rows = [[mode, peak / 2**30] for mode, peak in peaks.items()]
        click.echo(tabulate(rows, ["mode", "peak GiB"], floatfmt=".2f"))


def measure_model(
    kernel: ModuleType | None,
    sizes: list[Any],
    settings: Settings,
    tiny: bool,
    head: dict[str, Any],
    path: record.Destination | None,
) -> None:
    """Measure all sizes of one model, and write each to `path`; `head` has the result's first entries."""
    published, device = settings.published, settings.device
    sizes = sizes or (published.tiny_sizes if tiny else published.sizes)
    # Before there are other weights.
    peaks = {}
    if settings.has_memory:
        peaks = {size: {"peak_bytes": peak_memory(kernel, size, settings, tiny)} for size in sizes}
    model = published.transformer(device, settings.dtype, tiny)
    name = published.complete(model) if settings.is_whole else published.name_of(tiny)
    result = {**head, "model": name, "sizes": {}}
    for size in sizes:
        torch.compiler.reset()
        measured = measure_size(model, kernel, size, settings)
        result["sizes"][str(size)] = {**measured, **peaks.get(size, {})}
        record.write(path, result)
        if device.type == "cuda" and not settings.is_whole:
            for name, of_weights in result["sizes"][str(size)]["weights"].items():
                show_kernels(f"{published.key}, {size}, {name}", of_weights["modes"])
    click.echo(f"\n{result['model']}")
    for size, entry in result["sizes"].items():
        show_size(size, entry)
    record.say_where(path)


def destination(
    output: Path | None,
    published: Published,
    several: bool,
    modes: list[str],
    calls: int,
    is_whole: bool,
) -> record.Destination | None:
    """Where a model's result goes. Modes beyond the default ones do not prevent its storage."""
    name, default, neutral = "models/{}", models.DEFAULT_MODES, ("modes", "has_memory")
    if not set(models.FP8_MODES).isdisjoint(modes):
        name, default = "fp8_models/{}", FP8_DEFAULT_MODES
        neutral += ("weights", "has_distance")
        if models.TORCHAO_COMPILED in modes:
            name, neutral = "fp8_models/{}_compiled", (*neutral, "sizes")
        elif calls > 1:
            name, neutral = "fp8_models/{}_back_to_back", (*neutral, "calls")
        elif is_whole:
            name, default = "fp8_models/{}_whole", ("eager", "injected", models.PRECISION_FAST)
            neutral += ("is_whole", "sizes", "rounds")
    name = name.format(published.key)
    if output is not None and several:
        return output / f"{name}.json"
    return record.destination(output, name, neutral if set(default) <= set(modes) else ())


@click.command()
@SEVERAL_MODELS
@SIZES
@modes_option(models.DEFAULT_MODES)
@DEVICE
@DTYPE
@TINY
@click.option("--rounds", type=click.IntRange(min=1), default=15, show_default=True)
@click.option(
    "--calls",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of forwards back to back per timed sample.",
)
@PAUSE
@click.option("--profiled-calls", type=click.IntRange(min=1), default=3, show_default=True)
@click.option(
    "--distance/--no-distance",
    "has_distance",
    default=True,
    help="Whether to also run the model in float32, which needs additional memory of twice its size.",
)
@click.option(
    "--weights",
    type=Named("weights", {name: name for name in models.ALL_WEIGHTS}),
    default=",".join(models.WEIGHTS),
    show_default=True,
    help=f"Comma-separated, of {', '.join(models.ALL_WEIGHTS)}.",
)
@click.option(
    "--peak-memory",
    "has_memory",
    is_flag=True,
    help="Also measure each mode's memory, with a model of its own. Compiled modes are left out.",
)
@click.option("--whole", "is_whole", is_flag=True, help="All blocks, over the weights of some.")
@record.output_option("models", takes_folder=True)
@torch.no_grad()
def main(
    model,
    sizes,
    modes,
    device,
    dtype,
    tiny,
    rounds,
    calls,
    pause_s,
    profiled_calls,
    has_distance,
    weights,
    has_memory,
    is_whole,
    output,
) -> None:
    """Time one forward of each model in each mode, with its GPU time by kernel class."""
    torch.set_float32_matmul_precision("highest")  # of the float32 model
    modes = modes_on(device, modes)
    injected = any(mode.startswith("injected") for mode in modes)
    kernel, load_seconds = models.load_kernel() if injected else (None, None)

    def measure(published: Published) -> None:
        settings = Settings(
            *(published, device, dtype, modes, rounds, calls, pause_s, profiled_calls),
            *(has_distance, weights, has_memory, is_whole),
        )
        head = {
            "environment": record.environment(device),
            "model": None,
            "scores_std": {name: models.ALL_WEIGHTS[name] for name in weights},
            "dtype": record.dtype_name(dtype),
            "rounds": rounds,
            "consecutive_forwards": calls,
            "pause_s": pause_s,
            "get_kernel_s": load_seconds,
        }
        path = destination(output, published, len(model) > 1, modes, calls, is_whole)
        measure_model(kernel, sizes, settings, tiny, head, path)

    measure_each({p.key: functools.partial(measure, p) for p in model}, device)


if __name__ == "__main__":
    main()
