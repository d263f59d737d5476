"""One forward of published models replayed from CUDA graphs, beside eager, compiled and injected without.

All under torch.inference_mode, over one set of weights, in turns. Of each mode: the host's time (from the
call to its return, on an idle GPU), the time of a forward amid others back to back as a denoising loop
calls it, the GPU's time for its kernels, its first calls, of which the second one captures, and the memory
that it took. At the published sizes, and of every model at few tokens, where the host decides. A forward
that is replayed must have the bits of one that is not, and every timed call must have been replayed: else
it fails. Each run is of all models, or of some; the tables show the newest figures of each. Writes to
benchmarks/results/cuda_graphs:

    python benchmarks/bench_cuda_graphs.py
    python benchmarks/bench_cuda_graphs.py --model ltx --sizes 49x512x768 --rounds 10
    python benchmarks/bench_cuda_graphs.py --model flux2,sd3,qwenimage,wan,cosmos,auraflow,allegro
    python benchmarks/bench_cuda_graphs.py --device cpu --tiny --output /tmp/cuda_graphs.json

On a CPU, which has no CUDA graphs, the modes that need them are left out. bench_cuda_graphs_memory.py is of
what graphs of many shapes hold.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import click
import clocks
import cuda_graphs
import flux
import kernel_times
import ltx
import models
import record
import sdxl
import sdxl_channels_last
import timing
import torch
import torch._dynamo.utils
import wan_small
from options import ALL, DEVICE, DTYPE, MODELS, SIZES, TINY, Models, modes_on, modes_option
from tabulate import tabulate

DEFAULT_MODES = ("eager", models.REGIONAL, models.REDUCE_OVERHEAD, "injected", models.GRAPHS)
SMALL_MODES = ("eager", "injected", models.GRAPHS)  # nothing is compiled for few tokens
DEFAULT_WEIGHTS = ("peaked", "random")
# Of these models forwards of published sizes are measured, of all the small one.
PUBLISHED_SIZES = {
    ltx: tuple(ltx.VideoSize(frames, 512, 768) for frames in (9, 49, 161)),
    flux: (flux.ImageSize(512, 512), flux.ImageSize(1024, 1024)),
    sdxl: sdxl.SIZES,
    sdxl_channels_last: sdxl.SIZES,
    wan_small: wan_small.SIZES,
}
FIRST_CALLS = 6
CAPTURES = 3  # models of which the capturing call is timed
WARM_UP_ROUNDS = 2
SAMPLE_MS, MOST_CALLS, LEAST_CALLS = 300.0, 20, 2  # of calls back to back

Forward = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Settings:
    """What all forwards have in common."""

    kernel: ModuleType | None
    device: torch.device
    dtype: torch.dtype
    weights: Sequence[str]
    rounds: int
    profiled_calls: int
    tiny: bool


@dataclass(frozen=True)
class Subject:
    """A model in one mode: its forward, the report of its injection, and how its first calls went."""

    forward: Forward
    report: Any
    calls_ms: list[float]
    memory: dict[str, int]
    skipped: int  # compiled graphs that torch.compile did not put into CUDA graphs


@contextlib.contextmanager
def memory(device: torch.device) -> Iterator[dict[str, int]]:
    """Yields a dict that holds, once the block has ended, by how many bytes the GPU's memory has grown.

    Allocated and reserved, at the end and at the most within. It stays empty on a CPU.
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
    """How many compiled graphs were not put into CUDA graphs so far, though the mode asks for it."""
    return torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]


def start(
    mode: str, model: torch.nn.Module, arguments: Mapping[str, object], settings: Settings
) -> Subject:
    """The model in the given mode, over the weights of `model`, after its first calls, one by one."""
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
    """The first call, which runs as it is, and the second one, which captures; of several models."""
    calls_ms = [last.calls_ms]
    for _ in range(CAPTURES - 1):
        calls_ms.append(start(models.GRAPHS, model, arguments, settings).calls_ms)
        gc.collect()  # its graphs are not to be beside the next one's
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
    """Each mode's first calls and memory; of graphs what the capturing call takes, also over a plain one."""
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
    """The time of the kernels and that in which there is one, and the forward's own time over them."""
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
    """All modes with the weights as they are; `plain` is what the bits of a replayed forward must be."""
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
            # As many as were timed: at the clocks that the GPU keeps up under load.
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
    """All modes of one forward, with all weights."""
    model(**arguments)  # makes the libraries load, whatever mode is first
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
    published: ModuleType, sizes: Sequence[Any] | None, modes: Sequence[str], settings: Settings
) -> Iterator[dict[str, Any]]:
    """One entry a forward: those of the published sizes, then the small one, but where sizes are given."""
    device, dtype = settings.device, settings.dtype
    model = published.transformer(device, dtype, settings.tiny)
    small = {} if sizes else published.SMALL
    if not sizes:
        sizes = published.TINY_SIZES if settings.tiny else PUBLISHED_SIZES.get(published, ())
    kinds = [("published", {"size": size}) for size in sizes] + [("small", small)] * bool(small)
    for kind, given in kinds:
        size = given["size"]
        click.echo(f"{published.__name__} {size}")
        arguments = published.inputs(model, device=device, dtype=dtype, **given)
        is_small = kind == "small"
        chosen = [mode for mode in modes if mode in SMALL_MODES] if is_small else modes
        if not chosen:
            continue
        weights = settings.weights[:1] if is_small else settings.weights
        yield {
            "name": published.RESULT,
            "model": models.name_of(published, settings.tiny),
            "input": kind,
            "size": str(size),
            "batch": published.BATCH,
            "tokens": size.tokens,
            "text_tokens": given.get("text_tokens", published.TEXT_TOKENS),
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


def is_whole(published: Sequence[ModuleType], sizes: Sequence[Any] | None) -> bool:
    """Whether all sizes that are given are among the model's own."""
    return not sizes or set(sizes) <= set(PUBLISHED_SIZES.get(published[0], ()))


@click.command()
@click.option(
    "--model",
    type=Models(),
    default=ALL,
    show_default=True,
    is_eager=True,  # --sizes are this model's
    help=f"Comma-separated, of {', '.join(MODELS)}; or {ALL}.",
)
@SIZES
@modes_option(DEFAULT_MODES)
@click.option(
    "--weights",
    type=click.Choice(list(models.WEIGHTS)),
    multiple=True,
    default=DEFAULT_WEIGHTS,
    show_default=True,
    help="May be given twice; small forwards have the first of them.",
)
@DEVICE
@DTYPE
@TINY
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--profiled-calls", type=click.IntRange(min=1), default=2, show_default=True)
@record.output_option("cuda_graphs")
@torch.no_grad()
def main(model, sizes, modes, weights, device, dtype, tiny, rounds, profiled_calls, output) -> None:
    """Time forwards that are replayed from CUDA graphs, beside others."""
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
    output = record.destination(output, "cuda_graphs", result["environment"], neutral)
    failed = []
    for published in model:
        try:
            for entry in measure_model(published, sizes, modes, settings):
                result["graph_forwards"].append(entry)
                show(entry)
                if output is not None:
                    record.write(output, result)
        except Exception:
            if len(model) == 1:
                raise
            failed.append(published.__name__)  # the others are measured all the same
            click.echo(traceback.format_exc(), err=True)
        models.free(device)
    if output is not None:
        click.echo(f"\nWrote {output}")
    if failed:
        raise click.ClickException(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
