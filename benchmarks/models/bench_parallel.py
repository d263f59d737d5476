"""One step, whole pipelines and decoders on 1, 2, 4 and more GPUs, injected, with and without CUDA graphs.

It runs on the GPUs of this machine, a process each:

    torchrun --standalone --nproc-per-node 4 benchmarks/models/bench_parallel.py --only step
    torchrun --standalone --nproc-per-node 4 benchmarks/models/bench_parallel.py --only pipeline
    torchrun --standalone --nproc-per-node 4 benchmarks/models/bench_parallel.py --only decode
    torchrun --standalone --nproc-per-node 4 benchmarks/models/bench_parallel.py --only step --models flux,wan

Ranks share tokens (Ulysses; rings with --rings), the halves of guidance, both, or a decoder's tiles. Where a
mode has fewer GPUs than there are, the others run the same; they wait for a mode of one GPU. All modes take
turns. Ranks meet at a barrier before each sample, and the slowest rank's time counts. The outputs are
compared with those of one GPU. Writes to benchmarks/results/parallel.

With --modelled it needs one GPU, on which the process is rank 0 of several:

    python benchmarks/models/bench_parallel.py --modelled

Collectives move nothing there. An all-to-all returns its input, and a gather returns a buffer that repeats
its first input, since the time of attention depends on the values. The bytes that the rank would send are
counted. The modelled time of a forward is the rank's own time, plus the time of these bytes at
LINK_BYTES_PER_S. In this model nothing overlaps, and collectives have no latency. The kernels that copy are
counted in the profiler's trace. Writes to benchmarks/results/parallel_modelled.

Both use published sizes, steps with fewer blocks, and scores as peaked as in trained models. If N does not
divide the tokens of a size, the next smaller size is measured. A mode that fails is recorded with its error,
and the others go on. Without a GPU:

    python benchmarks/models/bench_parallel.py --modelled --degrees 2 --device cpu --tiny --output out.json
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections import Counter
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
from benchmarks.harness.history import degree_of
from benchmarks.harness.options import DEVICE, DTYPE, TINY, Named
from benchmarks.harness.ranks import Mode, Ranks, degrees_up_to, process_group
from benchmarks.models.modelled_link import LINK_BYTES_PER_S, Link, copies
from benchmarks.models.parallel_workloads import (
    EAGER,
    GRAPHS,
    INJECTED,
    MODELLED_STEPS,
    ONLY_IF_NAMED,
    PARTS,
    WEIGHTS,
    WORKLOADS,
    Prepared,
    Workload,
)

from accuracy import finite_distance

DEGREES = (2, 4, 8)  # of modelled ranks
Prepare = Callable[[Mode], Prepared]


@dataclass
class Run:
    """What one command measures, and where its results go.

    Attributes:
        degrees: numbers of GPUs, beside one.
        blocks: to keep at most in a stack; None for the workload's own number.
        rounds: None for the workload's own number.
        with_rings: whether rings are measured, too.
    """

    kernel: ModuleType
    ranks: Ranks
    degrees: Sequence[int]
    dtype: torch.dtype
    is_tiny: bool
    blocks: int | None
    rounds: int | None
    with_rings: bool
    entries: list[dict[str, Any]]
    save: Callable[[], None]

    @property
    def kinds(self) -> list[str]:
        """How a model is injected."""
        return [INJECTED, GRAPHS] if self.ranks.device.type == "cuda" else [INJECTED]

    def measure(
        self,
        workload: Workload,
        modes: Sequence[Mode],
        degrees: Sequence[int],
        prepare: Prepare,
        entry: dict[str, Any],
    ) -> None:
        """All modes of one workload at one size, as an entry of the result."""
        rounds, ranks = self.rounds or workload.rounds, self.ranks
        described = {"part": workload.part, "name": workload.name, **entry, "rounds": rounds}
        entry = {**described, "degrees": list(degrees), "modes": {}, "failed": {}}
        self.entries.append(entry)
        try:
            counts = rounds, workload.warm_up_rounds, 1 if ranks.is_modelled else workload.in_a_row
            measure(self, modes, prepare, *counts, entry)
        finally:
            self.save()
        if ranks.rank == 0:
            show(entry)


def first_output(prepared: Prepared) -> torch.Tensor:
    output = prepared.forward().clone()
    if not output.isfinite().all():
        raise RuntimeError("the output is not finite")
    return output


def calls(report: Any) -> dict[str, Any]:
    """How the calls of the replaced modules ran: on the kernels, and otherwise by reason."""
    fell_back: Counter[str] = Counter()
    own_attention: Counter[str] = Counter()
    for entry in report.calls:
        fell_back.update(entry.fell_back)
        own_attention.update(entry.own_attention)
    return {
        "on_kernels": sum(entry.on_kernels for entry in report.calls),
        "fell_back": dict(fell_back),
        "own_attention": dict(own_attention),
    }


def prepare_each(
    run: Run, modes: Sequence[Mode], prepare: Prepare, entry: dict[str, Any]
) -> dict[Mode, Prepared]:
    """The modes whose first forward works. What it tells goes to `entry`, as do the others' errors."""
    ranks = run.ranks
    every: dict[Mode, Prepared] = {}
    for mode in modes:
        link = Link() if ranks.is_modelled else None

        def begin(mode: Mode = mode, link: Link | None = link) -> Prepared:
            if mode.degree > 1:
                ranks.mesh(mode)
            if not ranks.runs(mode):
                return Prepared(lambda: None)
            prepared = prepare(mode)
            with link.in_place() if link else contextlib.nullcontext():
                prepared.output = first_output(prepared)
            return prepared

        prepared, error = ranks.attempt(begin)
        if prepared is None:
            entry["failed"][str(mode)] = error
            ranks.echo(f"{mode} failed: {error}")
            continue
        every[mode] = prepared
        measured = entry["modes"][str(mode)] = {k: v for k, v in mode.degrees.items() if v > 1}
        if prepared.report is not None:
            measured["calls"] = calls(prepared.report)
        if link and mode.degree > 1:
            measured |= {"sent_bytes": link.sent_bytes, "collectives": dict(link.calls)}
    return every


def compare(every: Mapping[Mode, Prepared], entry: dict[str, Any]) -> None:
    """The distances of the outputs from those of one GPU, on the rank that has these."""
    of_one_gpu = {mode.kind: every[mode].output for mode in every if mode.degree == 1}
    for mode, prepared in every.items():
        measured = entry["modes"][str(mode)]
        if prepared.output is None:
            continue
        reference = of_one_gpu.get(mode.kind)
        if mode.degree > 1 and reference is not None:
            measured["distance_from_one_gpu"] = finite_distance(prepared.output, reference)
            measured["equal_to_one_gpu"] = torch.equal(prepared.output, reference)
        if EAGER in of_one_gpu:
            distance = finite_distance(prepared.output, of_one_gpu[EAGER])
            measured["distance_from_eager"] = distance


def derive(modes: dict[str, dict[str, Any]]) -> None:
    """The ratios of the modes' times. One GPU is the faster one of all modes on it, except eager."""
    for measured in modes.values():
        if "sent_bytes" in measured:
            link_ms = measured["sent_bytes"] / LINK_BYTES_PER_S * 1e3
            measured["whole_ms"] = measured["ms"]["median"] + link_ms
    one_gpu = {
        name: measured["ms"]["median"]
        for name, measured in modes.items()
        if degree_of(measured) == 1 and name != EAGER
    }
    for measured in modes.values():
        degree = degree_of(measured)
        eager = modes.get(str(Mode(EAGER, ulysses=degree)))
        if eager is not None:
            measured["over_eager"] = eager["ms"]["median"] / measured["ms"]["median"]
        if degree > 1 and one_gpu:
            fastest = measured["one_gpu"] = min(one_gpu, key=one_gpu.__getitem__)
            whole = measured.get("whole_ms", measured["ms"]["median"])
            measured["speedup"] = one_gpu[fastest] / whole
            measured["of_linear"] = measured["speedup"] / degree


def measure(
    run: Run,
    modes: Sequence[Mode],
    prepare: Prepare,
    rounds: int,
    warm_up_rounds: int,
    in_a_row: int,
    entry: dict[str, Any],
) -> None:
    """The time of one of ``in_a_row`` forwards, between which nothing waits for the GPU."""
    ranks, device = run.ranks, run.ranks.device
    every = prepare_each(run, modes, prepare, entry)
    if not ranks.is_modelled:
        _, error = ranks.attempt(lambda: compare(every, entry) if ranks.rank == 0 else None)
        if error is not None:
            entry["failed"]["distances"] = error
    run.save()
    if not every:
        return

    def of_several(prepared: Prepared) -> Callable[[], None]:
        def forwards() -> None:
            for _ in range(in_a_row):
                prepared.forward()

        return forwards

    forwards = {str(mode): of_several(prepared) for mode, prepared in every.items()}
    with_graphs = {str(mode): every[mode] for mode in every if mode.kind == GRAPHS}
    clock: dict[str, float] = {}

    def time() -> dict[str, list[float]]:
        timing.interleave(forwards, warm_up_rounds, device, ranks.milliseconds)
        for prepared in every.values():
            prepared.output = None
        for prepared in with_graphs.values():
            prepared.graphs_before = prepared.report and cuda_graphs.counts(prepared.report)
        watched = clocks.watch(device) if ranks.rank == 0 else contextlib.nullcontext({})
        with watched as summary:
            samples = timing.interleave(forwards, rounds, device, ranks.milliseconds)
        clock.update(summary)
        return samples

    def graphs(prepared: Prepared) -> dict[str, Any] | None:
        report = prepared.report  # None in ranks that wait
        calls = rounds * in_a_row
        return report and cuda_graphs.check_replayed(report, calls, prepared.graphs_before)

    link = Link().in_place() if ranks.is_modelled else contextlib.nullcontext()
    with link:
        samples, error = ranks.attempt(time)
        if samples is None:
            entry["failed"]["times"] = error
            entry["modes"] = {}
            return
        for name, of_mode in samples.items():
            entry["modes"][name]["ms"] = timing.summarize([ms / in_a_row for ms in of_mode])
        for name, prepared in with_graphs.items():
            counts, error = ranks.attempt(functools.partial(graphs, prepared))
            if error is not None:
                entry["failed"][name] = error
                del entry["modes"][name]
                continue
            entry["modes"][name]["graphs"] = counts
        entry["clocks"] = clock
        derive(entry["modes"])
        run.save()
        if ranks.is_modelled and device.type == "cuda":
            for name, forward in forwards.items():
                events, error = ranks.attempt(functools.partial(kernel_times.trace, forward, 1))
                if events is None:
                    entry["failed"][f"trace of {name}"] = error
                    continue
                traced = kernel_times.breakdown(events, 1)
                entry["modes"][name] |= {
                    "copies": copies(events, 1),
                    "covered_ms": traced["covered_ms"],
                    "launches": traced["total"]["launches"],
                }


def show(entry: dict[str, Any]) -> None:
    """Print the times of one entry."""
    rows = [
        [
            name,
            measured["ms"]["median"],
            100 * measured["ms"]["spread"],
            *(measured.get(key) for key in ("over_eager", "whole_ms", "speedup", "of_linear")),
            measured["sent_bytes"] / 1e9 if "sent_bytes" in measured else None,
            measured.get("distance_from_one_gpu"),
            measured.get("equal_to_one_gpu"),
            *(measured.get("copies", {}).get(key) for key in ("launches", "ms")),
        ]
        for name, measured in entry["modes"].items()
    ]
    headers = ["mode", "ms", "spread %", "x eager", "whole ms", "x one GPU", "of linear"]
    headers += ["GB sent", "distance from one GPU", "equal bits", "copies", "copies, ms"]
    blocks = " + ".join(map(str, entry.get("blocks", {}).values()))
    details = [f"{entry['part']} of {entry['model']}", entry["size"], entry["precision"]]
    details += [f"{blocks} blocks" if blocks else None]
    details += [f"{entry[key]} {key}" for key in ("tokens", "forwards", "steps") if key in entry]
    click.echo("\n" + ", ".join(filter(None, details)))
    click.echo(tabulate(rows, headers, floatfmt=".3f"))
    clocks.show(entry.get("clocks", {}))
    for name, error in entry["failed"].items():
        click.echo(f"{name} failed: {error}")


class Degrees(click.ParamType):
    """Comma-separated numbers of ranks, beginning at 2."""

    name = "degrees"

    def convert(self, value, param, ctx) -> list[int]:
        if isinstance(value, list):
            return value
        try:
            degrees = [int(number) for number in value.split(",")]
        except ValueError:
            degrees = []
        if not degrees or min(degrees) < 2:
            self.fail(f"must be numbers of ranks, at least 2, got {value!r}", param, ctx)
        return degrees


def chosen(parts: Sequence[str], names: Sequence[str] | None, is_modelled: bool) -> list[Workload]:
    """The workloads of these parts and names; by default those of a complete benchmark."""
    known = [workload for workload in WORKLOADS if workload.part in parts]
    if is_modelled:
        known = [workload for workload in known if workload.part == "step"]
        names = MODELLED_STEPS if names is None else names
    if names is None:
        return [workload for workload in known if workload.name not in ONLY_IF_NAMED]
    return [workload for name in names for workload in known if workload.name == name]


MODEL_NAMES = Named("models", {workload.name: workload.name for workload in WORKLOADS})


@click.command()
@click.option(
    "--modelled", is_flag=True, help="One process on one GPU, as rank 0 of several modelled ones."
)
@click.option(
    "--only",
    "parts",
    type=Named("parts", {part: part for part in PARTS}),
    default=",".join(PARTS),
    show_default=True,
    help="Comma-separated.",
)
@click.option(
    "--models",
    "names",
    type=MODEL_NAMES,
    help=f"Comma-separated, of {', '.join(MODEL_NAMES.known)}; by default all, without "
    f"{', '.join(ONLY_IF_NAMED)}. Of modelled ranks {', '.join(MODELLED_STEPS)}.",
)
@click.option(
    "--degrees",
    type=Degrees(),
    default=",".join(map(str, DEGREES)),
    show_default=True,
    help="Comma-separated numbers of ranks to model.",
)
@click.option(
    "--blocks",
    type=click.IntRange(min=1),
    help="Number of blocks to keep at most in a step, of each kind.",
)
@click.option(
    "--rounds", type=click.IntRange(min=1), help="By default 3 of pipelines, otherwise 5."
)
@click.option("--rings", is_flag=True, help="Also rings, which gather keys and values.")
@DEVICE
@DTYPE
@TINY
@record.output_option("parallel")
@torch.no_grad()
def main(
    modelled, parts, names, degrees, blocks, rounds, rings, device, dtype, tiny, output
) -> None:
    """Measure the workloads one after the other."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if modelled == (processes > 1):
        raise click.UsageError(
            "start it by torchrun with several processes, or with --modelled and one process"
        )
    degrees = degrees if modelled else degrees_up_to(processes)
    with process_group(device, modelled, degrees) as ranks:
        kernel, load_seconds = models.load_kernel()
        environment = record.environment(ranks.device)
        result: dict[str, Any] = {
            "environment": environment,
            "scores_std": {WEIGHTS: models.ALL_WEIGHTS[WEIGHTS]},
            "dtype": record.dtype_name(dtype),
            "get_kernel_s": load_seconds,
            "parallel": [],
        }
        name = "parallel"
        if modelled:
            name, result["link_bytes_per_s"] = "parallel/modelled", LINK_BYTES_PER_S
        else:
            result["gpus"] = processes
            launcher = f"torchrun --standalone --nproc-per-node {processes} "
            environment["command"] = launcher + environment["command"].partition(" ")[2]
        path: record.Destination | None = None
        if ranks.rank == 0:
            path = record.destination(output, name, ("modelled", "parts", "names", "rings"))

        def save() -> None:
            record.write(path, result)

        run = Run(
            *(kernel, ranks, degrees, dtype, tiny, blocks, rounds, modelled or rings),
            *(result["parallel"], save),
        )
        for workload in chosen(parts, names, modelled):
            _, error = ranks.attempt(functools.partial(workload.measure, run))
            if error is not None:
                result.setdefault("failed", {})[f"{workload.part} {workload.name}"] = error
            save()
            models.free(ranks.device)
        if path is not None:
            ranks.echo(f"\nWrote {path}")


if __name__ == "__main__":
    main()
