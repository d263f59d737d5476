"""One forward of LTX-Video 2B or of FLUX.1: eager, compiled, injected, injected but for attention,
injected and compiled, in one run.

The published sizes (of FLUX.1 with fewer blocks), inputs as the pipelines pass them. All modes share one set
of weights and take turns, first with random weights, then with such norms of query and key that the scores
are as peaked as trained models have them (models.WEIGHTS). The norms change in place: nothing is compiled or
injected again. Writes to benchmarks/results/models, of FLUX.1 to flux:

    python benchmarks/bench_models.py
    python benchmarks/bench_models.py --model flux
    python benchmarks/bench_models.py --modes eager,injected --sizes 49x512x768
    python benchmarks/bench_models.py --device cpu --tiny --output /tmp/models.json

LOCAL_KERNELS selects another checkout's build; compare_builds.py compares two.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

import click
import clocks
import flux
import kernel_times
import ltx
import models
import record
import timing
import torch
from distance import relative_distance
from options import DEVICE, DTYPE, MODEL, PAUSE, SIZES, TINY, modes_option
from tabulate import tabulate

WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class Settings:
    """What all sizes have in common."""

    published: ModuleType  # ltx or flux
    device: torch.device
    dtype: torch.dtype
    modes: list[str]
    rounds: int
    calls: int
    pause_s: float
    profiled_calls: int


def inject(
    model: torch.nn.Module, kernel: ModuleType, forward: Callable[[], object], device: torch.device
) -> dict[str, object]:
    """Inject the kernels and report the time to full speed and the memory that it took."""
    counted = device.type == "cuda"
    timing.synchronize(device)
    before = torch.cuda.memory_allocated(device) if counted else None
    full_speed = timing.time_to_full_speed(lambda: kernel.inject_kernels(model), forward, device)
    after = torch.cuda.memory_allocated(device) if counted else None
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        **full_speed,
        "weights_bytes": weights,
        "allocated_growth_bytes": after - before if counted else None,
    }


def measure_weights(
    model: torch.nn.Module,
    forwards: Mapping[str, Callable[[], object]],
    arguments: Mapping[str, object],
    settings: Settings,
) -> dict[str, object]:
    """All modes at one size with the weights as they are."""
    device = settings.device
    reference = model(**arguments)[0]
    modes = {
        mode: {"distance_from_eager": relative_distance(forward()[0], reference)}
        for mode, forward in forwards.items()
    }
    consecutive = {mode: timing.repeated(f, settings.calls) for mode, f in forwards.items()}
    timing.interleave(consecutive, WARM_UP_ROUNDS, device)
    with clocks.watch(device) as clock:
        samples = timing.interleave(consecutive, settings.rounds, device, pause_s=settings.pause_s)
    for mode, entry in modes.items():
        entry["ms"] = timing.summarize([time_ / settings.calls for time_ in samples[mode]])
        if device.type == "cuda":
            events = kernel_times.trace(forwards[mode], settings.profiled_calls)
            entry["kernels"] = kernel_times.breakdown(events, settings.profiled_calls)
    medians = {mode: entry["ms"]["median"] for mode, entry in modes.items()}
    return {"modes": modes, "speedups": timing.speedups(medians), "clocks": clock}


def measure_size(
    model: torch.nn.Module,
    kernel: ModuleType | None,
    size: ltx.VideoSize | flux.ImageSize,
    settings: Settings,
) -> dict[str, object]:
    """All modes at one size, with all weights."""
    device, published = settings.device, settings.published
    arguments = published.inputs(model, size, device, settings.dtype)
    result: dict[str, object] = {
        "tokens": size.tokens,
        "text_tokens": published.TEXT_TOKENS,
        "batch": published.BATCH,
        "compiled_in_s": {},
    }

    model(**arguments)  # makes the libraries load, whatever mode is first
    forwards = {}
    for mode in settings.modes:
        instance = models.twin(model)
        forward = forwards[mode] = functools.partial(instance, **arguments)
        if mode == "injected":
            forward()
            result["injection"] = inject(instance, kernel, forward, device)
        elif mode.startswith("injected"):
            models.inject(kernel, instance, mode)
        if mode.endswith("compiled"):
            models.compile_whole(instance)
            begin = time.perf_counter()
            forward()
            timing.synchronize(device)
            seconds = result["compiled_in_s"][mode] = time.perf_counter() - begin
            click.echo(f"{size} {mode}: compiled in {seconds:.1f} s")

    result["weights"] = {}
    for name in models.WEIGHTS:
        with models.weights(model, name):
            result["weights"][name] = measure_weights(model, forwards, arguments, settings)
    return result


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
        row += [result["speedups"][mode].get(other) for other in ("eager", "compiled")]
        if "kernels" in entry:
            kernels = entry["kernels"]
            row += [kernels["classes"][key]["ms"] for key in kernel_times.CLASSES]
            row += [kernels["idle_ms"], kernels["total"]["launches"]]
        rows.append(row)
    headers = ["mode", "ms", "spread %", "x eager", "x compiled"]
    headers += [*kernel_times.CLASSES.values(), "between kernels", "launches"]
    click.echo(f"\n{title}")
    click.echo(tabulate(rows, headers[: len(rows[0])], floatfmt=".2f"))
    clocks.show(result["clocks"])


def show_size(size: str, result: dict) -> None:
    """Print the times with all weights, and what injection took."""
    for name, of_weights in result["weights"].items():
        show_times(f"{size}, {result['batch']}x{result['tokens']} tokens, {name}", of_weights)
    if "injection" in result:
        injection = result["injection"]
        click.echo(
            f"From inject_kernels to full speed {injection['full_speed_s']:.3f} s, "
            f"inject_kernels itself {injection['change_s']:.3f} s, "
            f"memory growth {injection['allocated_growth_bytes']} bytes"
        )


@click.command()
@MODEL
@SIZES
@modes_option(models.MODES)
@DEVICE
@DTYPE
@TINY
@click.option("--rounds", type=click.IntRange(min=1), default=15, show_default=True)
@click.option(
    "--calls",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Forwards of a timed sample, one after the other.",
)
@PAUSE
@click.option("--profiled-calls", type=click.IntRange(min=1), default=3, show_default=True)
@record.output_option("<models or flux>")
@torch.no_grad()
def main(
    model, sizes, modes, device, dtype, tiny, rounds, calls, pause_s, profiled_calls, output
) -> None:
    """Time one forward of the model in each mode, with its GPU time by kernel class."""
    published = model
    settings = Settings(published, device, dtype, modes, rounds, calls, pause_s, profiled_calls)
    injected = any(mode.startswith("injected") for mode in modes)
    kernel, load_seconds = models.load_kernel() if injected else (None, None)
    model = published.transformer(device, dtype, tiny)
    results = {
        "environment": record.environment(device),
        "model": models.name_of(published, tiny),
        "scores_std": models.WEIGHTS,
        "dtype": record.dtype_name(dtype),
        "rounds": rounds,
        "consecutive_forwards": calls,
        "pause_s": pause_s,
        "get_kernel_s": load_seconds,
        "sizes": {},
    }
    output = record.destination(output, published.RESULT, results["environment"])
    for size in sizes or (published.TINY_SIZES if tiny else published.SIZES):
        torch.compiler.reset()
        results["sizes"][str(size)] = measure_size(model, kernel, size, settings)
        if output is not None:
            record.write(output, results)
        if device.type == "cuda":
            for name, of_weights in results["sizes"][str(size)]["weights"].items():
                show_kernels(f"{size}, {name}", of_weights["modes"])
    for size, result in results["sizes"].items():
        show_size(size, result)
    if output is not None:
        click.echo(f"\nWrote {output}")


if __name__ == "__main__":
    main()
