"""One forward of published models replayed from CUDA graphs, compared with eager, compiled and injected.

All modes run under torch.inference_mode, share one set of weights and take turns. Measured per mode: CPU time
(from call to return, on an idle GPU), the time of a forward among others back to back as in a denoising loop,
the GPU time of its kernels, its first calls (the second one captures) and its memory. Sizes are the published
ones and, for every model, one with few tokens, where launches dominate.

The benchmark fails if a replayed forward differs in a bit from a plain one, or if a timed call was not
replayed. Runs may be of some models; the tables show the newest figures of each. Writes to
benchmarks/results/cuda_graphs:

    python benchmarks/models/bench_cuda_graphs.py
    python benchmarks/models/bench_cuda_graphs.py --model ltx --sizes 49x512x768 --rounds 10
    python benchmarks/models/bench_cuda_graphs.py --model flux2,sd3,qwenimage,wan,cosmos,allegro
    python benchmarks/models/bench_cuda_graphs.py --device cpu --tiny --output /tmp/cuda_graphs.json

On a CPU the modes with CUDA graphs are left out. bench_cuda_graphs_memory.py measures the memory of graphs of
many shapes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
import torch._dynamo.utils
from tabulate import tabulate

from benchmarks import models
from benchmarks.harness import clocks, cuda_graphs, kernel_times, record, timing
from benchmarks.harness.options import (
    ALL,
    DEVICE,
    DTYPE,
    MODELS,
    SIZES,
    TINY,
    Models,
    modes_on,
    modes_option,
)
from benchmarks.models.flux import FLUX
from benchmarks.models.ltx import LTX_VIDEO, LTXSize
from benchmarks.models.published import ImageSize, Published
from benchmarks.models.stable_diffusion import SDXL, SDXL_CHANNELS_LAST
from benchmarks.models.wan import WAN_SMALL

DEFAULT_MODES = ("eager", models.REGIONAL, models.REDUCE_OVERHEAD, "injected", models.GRAPHS)
SMALL_MODES = ("eager", "injected", models.GRAPHS)  # nothing is compiled for few tokens
DEFAULT_WEIGHTS = ("peaked", "random")
# Models measured at published sizes. All models are measured at the small size.
PUBLISHED_SIZES = {
    LTX_VIDEO: tuple(LTXSize(frames, 512, 768) for frames in (9, 49, 161)),
    FLUX: (ImageSize(512, 512), ImageSize(1024, 1024)),
    SDXL: SDXL.sizes,
    SDXL_CHANNELS_LAST: SDXL.sizes,
    WAN_SMALL: WAN_SMALL.sizes,
}
FIRST_CALLS = 6
CAPTURES = 3  # models whose capturing call is timed
WARM_UP_ROUNDS = 2
SAMPLE_MS, MOST_CALLS, LEAST_CALLS = 300.0, 20, 2  # of calls back to back

Forward = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Settings:
    """Settings shared by all forwards."""

    kernel: ModuleType | None
    device: torch.device
    dtype: torch.dtype
    weights: Sequence[str]
    rounds: int
    profiled_calls: int
    tiny: bool


@dataclass(frozen=True)
class Subject:
    """A model in one mode: its forward, its injection report, and measurements of its first calls."""

    forward: Forward
    report: Any
    calls_ms: list[float]
    memory: dict[str, int]
    skipped: int  # compiled graphs that torch.compile did not put into CUDA graphs


@contextlib.contextmanager
def memory(device: torch.device) -> Iterator[dict[str, int]]:
    """Yields a dict, filled at the end of the block with the growth of GPU memory in bytes.

    Allocated and reserved memory, at the end and at the peak. Empty on a CPU.
    """
    grown: dict[str, int] = {}
    if device.type != "cuda":
        yield grown
        return

    def bytes_(most: str = "") -> dict[str, int]:
        of = {name: f"{most}memory_{name}" for name in ("allocated", "reserved")}
        return {name: getattr(torch.cuda, key)(device) for name, key in of.items()}

    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = bytes_()
    yield grown
    torch.cuda.synchronize(device)
    grown.update({name: after - before[name] for name, after in bytes_().items()})
    grown.update({f"peak_{name}": most - before[name] for name, most in bytes_("max_").items()})


def graphs_skipped() -> int:
    """Number of compiled graphs so far that were not put into CUDA graphs, although the mode requests it."""
    return torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]


def start(
    mode: str, model: torch.nn.Module, arguments: Mapping[str, object], settings: Settings
) -> Subject:
    """The model in the given mode, with the weights of `model`, after its first calls, one by one."""
    device = settings.device
    skipped = graphs_skipped()
    instance = models.twin(model)
    report = None
    if mode.startswith("injected"):
        report = models.inject(settings.kernel, instance, mode)
    models.compile_as(instance, mode)

    def forward() -> torch.Tensor:
        with torch.inference_mode():
            return models.output_of(instance(**arguments))

    with memory(device) as grown:
        calls_ms = [timing.wall_milliseconds(forward, device) for _ in range(FIRST_CALLS)]
    return Subject(forward, report, calls_ms, grown, graphs_skipped() - skipped)


def capturing(
    model: torch.nn.Module, arguments: Mapping[str, object], settings: Settings, last: Subject
) -> dict[str, dict[str, float]]:
    """Times of the first call, which runs without a graph, and the second, which captures; several models."""
    calls_ms = [last.calls_ms]
    for _ in range(CAPTURES - 1):
        calls_ms.append(start(models.GRAPHS, model, arguments, settings).calls_ms)
        gc.collect()  # frees its graphs before the next model's are captured
    return {
        "first_call_ms": timing.summarize([calls[0] for calls in calls_ms]),
        "capturing_call_ms": timing.summarize([calls[1] for calls in calls_ms]),
    }


def first_calls(
    subjects: Mapping[str, Subject],
    model: torch.nn.Module,
    arguments: Mapping[str, object],
    settings: Settings,
) -> dict[str, dict[str, Any]]:
    """Each mode's first calls and memory. With graphs also the capturing call's time, and its ratio to a
    plain one."""
    entries: dict[str, dict[str, Any]] = {
        mode: {"calls_ms": subject.calls_ms, "memory": subject.memory}
        for mode, subject in subjects.items()
    }
    if models.REDUCE_OVERHEAD in subjects:
        entries[models.REDUCE_OVERHEAD]["graphs_skipped"] = subjects[models.REDUCE_OVERHEAD].skipped
    if models.GRAPHS in subjects:
        entry = entries[models.GRAPHS]
        entry.update(capturing(model, arguments, settings, subjects[models.GRAPHS]))
        if "injected" in subjects:
            plain = statistics.median(subjects["injected"].calls_ms[1:])
            entry["capturing_over_plain"] = entry["capturing_call_ms"]["median"] / plain
    return entries


def gpu_times(forward: Forward, wall_ms: float, calls: int) -> dict[str, Any]:
    """Kernel time, the time with at least one running kernel, and the forward's time over both."""
    kernels = kernel_times.breakdown(kernel_times.trace(forward, calls), calls)
    busy, covered = kernels["total"]["ms"], kernels["covered_ms"]
    return {
        "busy_ms": busy,
        "covered_ms": covered,
        "launches": kernels["total"]["launches"],
        "wall_over_busy": wall_ms / busy,
        "wall_over_covered": wall_ms / covered,
    }


def measure_weights(
    subjects: Mapping[str, Subject], plain: Forward | None, settings: Settings
) -> dict[str, Any]:
    """All modes with the current weights. `plain` is the expected output of replays, bit for bit."""
    device = settings.device
    if plain is not None:
        cuda_graphs.check_bits(subjects[models.GRAPHS].forward(), plain())
    forwards = {mode: subject.forward for mode, subject in subjects.items()}
    slowest = max(statistics.median(subject.calls_ms[2:]) for subject in subjects.values())
    calls = round(min(max(SAMPLE_MS / slowest, LEAST_CALLS), MOST_CALLS))
    back_to_back = functools.partial(timing.wall_milliseconds, calls=calls)
    timing.interleave(forwards, WARM_UP_ROUNDS, device)
    graphs = subjects[models.GRAPHS].report if models.GRAPHS in subjects else None
    before = cuda_graphs.counts(graphs) if graphs else None
    with clocks.watch(device) as clock:
        wall = timing.interleave(forwards, settings.rounds, device, back_to_back)
    host = timing.interleave(forwards, settings.rounds, device, timing.host_microseconds)
    timed = settings.rounds * (calls + 1)
    counts = cuda_graphs.check_replayed(graphs, timed, before) if graphs else None
    entries: dict[str, dict[str, Any]] = {}
    for mode, forward in forwards.items():
        entry = entries[mode] = {
            "wall_ms": timing.summarize(wall[mode]),
            "host_ms": timing.summarize([time_ / 1e3 for time_ in host[mode]]),
        }
        if device.type == "cuda":
            wall_ms = entry["wall_ms"]["median"]
            # As many calls as were timed, so that the GPU has the same sustained clocks.
            traced = calls if mode == models.GRAPHS else settings.profiled_calls
            entry.update(gpu_times(forward, wall_ms, traced))
    if counts is not None:
        entries[models.GRAPHS]["graphs"] = counts
    medians = {mode: entry["wall_ms"]["median"] for mode, entry in entries.items()}
    hosts = {mode: entry["host_ms"]["median"] for mode, entry in entries.items()}
    return {
        "calls": calls,
        "modes": entries,
        "speedups": timing.speedups(medians),
        "host_over_eager": {
            mode: host / hosts["eager"] for mode, host in hosts.items() if "eager" in hosts
        },
        "clocks": clock,
    }


def measure_forward(
    model: torch.nn.Module,
    arguments: Mapping[str, object],
    modes: Sequence[str],
    weights: Sequence[str],
    settings: Settings,
) -> dict[str, Any]:
    """All modes of one forward with all weights."""
    model(**arguments)  # loads the libraries before the first mode
    subjects = {}
    for mode in modes:
        subjects[mode] = start(mode, model, arguments, settings)
        click.echo(f"  {mode}: first call {subjects[mode].calls_ms[0] / 1e3:.2f} s")
    plain = None
    if models.GRAPHS in modes:
        plain = subjects.get("injected") or start("injected", model, arguments, settings)
        plain = plain.forward
    result = {"first_calls": first_calls(subjects, model, arguments, settings), "weights": {}}
    for name in weights:
        with models.weights(model, name):
            result["weights"][name] = measure_weights(subjects, plain, settings)
    return result


def measure_model(
    published: Published, sizes: Sequence[Any] | None, modes: Sequence[str], settings: Settings
) -> Iterator[dict[str, Any]]:
    """One entry per forward: the published sizes, then the small one, or the given sizes only."""
    device, dtype = settings.device, settings.dtype
    model = published.transformer(device, dtype, settings.tiny)
    small = {} if sizes else published.small
    if not sizes:
        sizes = published.tiny_sizes if settings.tiny else PUBLISHED_SIZES.get(published, ())
    kinds = [("published", {"size": size}) for size in sizes] + [("small", small)] * bool(small)
    for kind, given in kinds:
        size = given["size"]
        click.echo(f"{published.key} {size}")
        arguments = published.inputs(model, device=device, dtype=dtype, **given)
        is_small = kind == "small"
        chosen = [mode for mode in modes if mode in SMALL_MODES] if is_small else modes
        if not chosen:
            continue
        weights = settings.weights[:1] if is_small else settings.weights
        yield {
            "name": published.key,
            "model": published.name_of(settings.tiny),
            "input": kind,
            "size": str(size),
            "batch": published.batch,
            "tokens": size.tokens,
            "text_tokens": given.get("text_tokens", published.text_tokens),
            **measure_forward(model, arguments, chosen, weights, settings),
        }
        models.free(device)


def show(entry: Mapping[str, Any]) -> None:
    """Print one forward's times."""
    for weights, of_weights in entry["weights"].items():
        rows = []
        for mode, measured in of_weights["modes"].items():
            over = of_weights["speedups"][mode]
            rows.append(
                [mode, measured["wall_ms"]["median"], 100 * measured["wall_ms"]["spread"]]
                + [over.get(other) for other in ("eager", models.REGIONAL, models.REDUCE_OVERHEAD)]
                + [measured["host_ms"]["median"], of_weights["host_over_eager"].get(mode)]
                + [measured.get(key) for key in ("busy_ms", "wall_over_busy", "wall_over_covered")]
            )
        headers = ["mode", "wall ms", "spread %", "x eager", "x regional", "x reduce-overhead"]
        headers += ["host ms", "over eager's", "busy ms", "wall over busy", "over covered"]
        click.echo(f"\n{entry['model']}, {entry['input']}, {entry['size']}, {weights}")
        click.echo(tabulate(rows, headers, floatfmt=".2f"))
        clocks.show(of_weights["clocks"])
    for mode, measured in entry["first_calls"].items():
        sizes = ", ".join(f"{k} {v / 2**20:.0f} MiB" for k, v in measured["memory"].items())
        times = ", ".join(f"{time_:.1f}" for time_ in measured["calls_ms"])
        click.echo(f"{mode}: first calls {times} ms; memory {sizes or 'not counted'}")
        if measured.get("graphs_skipped"):
            click.echo(f"{mode} RAN WITHOUT CUDA GRAPHS: torch.compile left them out")


def is_whole(published: Sequence[Published], sizes: Sequence[Any] | None) -> bool:
    """Whether all given sizes are sizes of the model."""
    return not sizes or set(sizes) <= set(PUBLISHED_SIZES.get(published[0], ()))


@click.command()
@click.option(
    "--model",
    type=Models(),
    default=ALL,
    show_default=True,
    is_eager=True,  # --sizes are this model's
    help=f"Comma-separated: {', '.join(MODELS)}; or {ALL}.",
)
@SIZES
@modes_option(DEFAULT_MODES, [mode for mode in models.MODES if mode not in models.FP8_MODES])
@click.option(
    "--weights",
    type=click.Choice(list(models.WEIGHTS)),
    multiple=True,
    default=DEFAULT_WEIGHTS,
    show_default=True,
    help="May be given twice; small forwards use the first.",
)
@DEVICE
@DTYPE
@TINY
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--profiled-calls", type=click.IntRange(min=1), default=2, show_default=True)
@record.output_option("cuda_graphs")
@torch.no_grad()
def main(model, sizes, modes, weights, device, dtype, tiny, rounds, profiled_calls, output) -> None:
    """Time forwards that are replayed from CUDA graphs, compared with other modes."""
    modes = modes_on(device, modes)
    injected = any(mode.startswith("injected") for mode in modes)
    kernel, _ = models.load_kernel() if injected else (None, None)
    settings = Settings(kernel, device, dtype, weights, rounds, profiled_calls, tiny)
    result = {
        "environment": record.environment(device),
        "processor": record.processor_name(),
        "dtype": record.dtype_name(dtype),
        "rounds": rounds,
        "scores_std": models.WEIGHTS,
        "graph_forwards": [],
    }
    neutral = ("sizes",) if is_whole(model, sizes) else ()
    output = record.destination(output, "cuda_graphs", neutral)
    failed = []
    for published in model:
        try:
            for entry in measure_model(published, sizes, modes, settings):
                result["graph_forwards"].append(entry)
                show(entry)
                record.write(output, result)
        except Exception:
            if len(model) == 1:
                raise
            failed.append(published.key)  # the other models are still measured
            click.echo(traceback.format_exc(), err=True)
        models.free(device)
    record.say_where(output)
    if failed:
        raise click.ClickException(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
