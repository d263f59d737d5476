"""Context parallelism of diffusers models: one forward over several GPUs, eager and injected.

Two modes. The first one runs on the GPUs of this machine, a process each:

    torchrun --standalone --nproc-per-node 4 benchmarks/models/bench_parallel.py

Compared are the model on one GPU, Ulysses over all GPUs, and for injected models also rings, which diffusers'
default attention backend cannot do. All modes take turns. Ranks meet at a barrier before each sample, and the
slowest rank's time counts. The parallel outputs are compared with those of one GPU. Writes to
benchmarks/results/parallel.

The second one needs one GPU, on which the process is rank 0 of several:

    python benchmarks/models/bench_parallel.py --modelled

Collectives move nothing there. An all-to-all returns its input, and a gather returns a buffer that repeats
its first input, since the time of attention depends on the values. The bytes that the rank would send are
counted. The modelled time of a forward is the rank's own time, plus the time of these bytes at
LINK_BYTES_PER_S. In this model nothing overlaps, and collectives have no latency. The kernels that copy are
counted in the profiler's trace. Writes to benchmarks/results/parallel_modelled.

Both use published sizes, most with fewer blocks, and scores as peaked as in trained models. LTX-Video has no
mask of its text, because its eager forward raises with one under Ulysses (ltx_masked has one). If N does not
divide the tokens of a size, the next smaller size is measured. A mode that fails is recorded with its error,
and the others go on. Without a GPU:

    python benchmarks/models/bench_parallel.py --modelled --degrees 2 --device cpu --tiny --output out.json
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import functools
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from diffusers import ContextParallelConfig
from tabulate import tabulate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import models
from benchmarks.harness import clocks, kernel_times, record, timing
from benchmarks.harness.options import DEVICE, DTYPE, TINY, Named
from benchmarks.models.flux import FLUX
from benchmarks.models.ltx import LTX_VIDEO, LTXSize
from benchmarks.models.published import ImageSize, Published, VideoSize
from benchmarks.models.wan import WAN

from accuracy import finite_distance

WEIGHTS = "peaked"
WARM_UP_ROUNDS = 2
DEGREES = (2, 4, 8)  # of modelled ranks
# What a GPU sends to others over NVLink 4, of nominally 450 GB/s in each direction.
LINK_BYTES_PER_S = 370e9
# Collectives after which the ranks no longer wait for one that is gone.
TIMEOUT = datetime.timedelta(minutes=2)
COPY = re.compile(r"copy|memcpy", re.IGNORECASE)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Workload:
    """A published model, the size at which it is measured, and inputs that are not its pipeline's."""

    published: Published
    size: Any
    changed_inputs: Mapping[str, object] = field(default_factory=dict)


LTX_SIZE = LTXSize(257, 704, 1216)
WORKLOADS = {
    "wan": Workload(WAN, VideoSize(81, 720, 1280)),
    # Eager LTX-Video cannot share its heads with a mask: it has one for each head of the model.
    "ltx": Workload(LTX_VIDEO, LTX_SIZE, {"encoder_attention_mask": None}),
    "flux": Workload(FLUX, ImageSize(2048, 2048)),
    "ltx_masked": Workload(LTX_VIDEO, LTX_SIZE),
}
DEFAULT_WORKLOADS = ("wan", "ltx", "flux")


@dataclass(frozen=True)
class Mode:
    """Eager or injected, and how the ranks share the tokens; on one GPU if both degrees are 1."""

    kind: str
    ring: int = 1
    ulysses: int = 1

    @property
    def degree(self) -> int:
        return self.ring * self.ulysses

    def __str__(self) -> str:
        parts = [f"ring{self.ring}"] * (self.ring > 1) + [f"ulysses{self.ulysses}"] * (
            self.ulysses > 1
        )
        return "+".join([self.kind, *parts])


ONE_GPU = (Mode("eager"), Mode("injected"))


def parallel_modes(degree: int) -> list[Mode]:
    """The modes of this number of GPUs."""
    modes = [Mode("eager", ulysses=degree), Mode("injected", ulysses=degree)]
    if degree > 2 and degree % 2 == 0:
        modes.append(Mode("injected", ring=2, ulysses=degree // 2))
    return [*modes, Mode("injected", ring=degree)]


def divisible(size: Any, degree: int) -> Any:
    """The size, or the next smaller one whose tokens `degree` divides: with fewer frames, or rows."""
    while size.tokens % degree:
        if hasattr(size, "frames"):
            size = dataclasses.replace(size, frames=size.frames - 8)
        else:
            size = dataclasses.replace(size, height=size.height - 16)
    if size.tokens <= 0:
        raise ValueError(f"no smaller size has tokens that {degree} divides")
    return size


# ----------------------------------------------------------------------------------------------
# Modelled collectives


def group_size(group: Any) -> int:
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)
    return group.size()


class Link:
    """Collectives that move nothing, and count what this rank would send."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.sent_bytes = 0
        self._gathered: dict[tuple, collections.deque[torch.Tensor]] = {}

    def _count(self, name: str, sent_bytes: int) -> None:
        self.calls[name] += 1
        self.sent_bytes += sent_bytes

    def all_to_all_single(
        self,
        x: torch.Tensor,
        output_split_sizes: Sequence[int] | None,
        input_split_sizes: Sequence[int] | None,
        group: Any,
        tag: str = "",
    ) -> torch.Tensor:
        """As of funcol. The parts that the rank receives are those that it sends, so shapes must agree."""
        sizes = output_split_sizes, input_split_sizes
        if any(split is not None and len(set(split)) > 1 for split in sizes):
            raise NotImplementedError("all-to-alls of unequal parts are not modelled")
        ranks, moved = group_size(group), x.numel() * x.element_size()
        self._count("all_to_all_single", moved * (ranks - 1) // ranks)
        return x

    def all_gather_tensor(
        self, x: torch.Tensor, gather_dim: int, group: Any, tag: str = ""
    ) -> torch.Tensor:
        """As of funcol. Calls of one shape share two buffers in turn, keys and values, each filled once."""
        ranks = group_size(group)
        self._count("all_gather_tensor", x.numel() * x.element_size() * (ranks - 1))
        key = (*x.shape, x.dtype, x.device, gather_dim, ranks)
        buffers = self._gathered.setdefault(key, collections.deque(maxlen=2))
        if len(buffers) < 2:
            buffers.append(torch.cat([x] * ranks, dim=gather_dim))
        else:
            buffers.rotate()
        return buffers[-1]

    all_gather_single = all_gather_tensor  # its name in later versions of Torch

    def all_gather(
        self, tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None
    ) -> None:
        """As of torch.distributed, which diffusers' attention gathers masks with."""
        self._count("all_gather", tensor.numel() * tensor.element_size() * (len(tensor_list) - 1))
        for one in tensor_list:
            one.copy_(tensor)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Has these collectives be called. The others raise: their results would be anything."""

        def refuse(name: str) -> Callable:
            def collective(*args: object, **kwargs: object) -> None:
                raise NotImplementedError(f"{name} is not modelled")

            return collective

        modelled = {
            funcol: ("all_to_all_single", "all_gather_tensor", "all_gather_single"),
            dist: ("all_gather",),
        }
        others = {
            funcol: ("all_reduce", "permute_tensor", "reduce_scatter_tensor", "broadcast"),
            dist: (
                *("all_reduce", "all_to_all", "all_to_all_single", "all_gather_into_tensor"),
                *("broadcast", "reduce_scatter_tensor", "send", "recv", "batch_isend_irecv"),
            ),
        }
        with contextlib.ExitStack() as stack:
            for module, names in modelled.items():
                for name in filter(functools.partial(hasattr, module), names):
                    stack.enter_context(mock.patch.object(module, name, getattr(self, name)))
            for module, names in others.items():
                for name in names:
                    stack.enter_context(mock.patch.object(module, name, refuse(name)))
            yield


def copies(events: Iterable[dict], calls: int) -> dict[str, float]:
    """Launches and time of the kernels that only copy, per call, from a profiler's trace."""
    copying = [
        event["dur"] / 1e3
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy")
        and kernel_times.classify(event["name"]) == "other"
        and COPY.search(event["name"])
    ]
    return {"launches": len(copying) / calls, "ms": sum(copying) / calls}


# ----------------------------------------------------------------------------------------------
# Ranks


@dataclass
class Ranks:
    """The processes that measure, or the one that is rank 0 of modelled ones."""

    device: torch.device
    rank: int = 0
    is_modelled: bool = False
    meshes: dict[tuple[int, int], DeviceMesh] = field(default_factory=dict)

    def echo(self, text: str) -> None:
        if self.rank == 0:
            click.echo(text)

    def mesh(self, mode: Mode) -> DeviceMesh:
        """As `enable_parallelism` makes it, once for all models."""
        shape = mode.ring, mode.ulysses
        if shape not in self.meshes:
            self.meshes[shape] = init_device_mesh(
                self.device.type, shape, mesh_dim_names=("ring", "ulysses")
            )
        return self.meshes[shape]

    def runs(self, mode: Mode) -> bool:
        """Whether this rank takes part. The others wait for rank 0 while it runs alone."""
        return mode.degree > 1 or self.rank == 0

    def attempt(self, function: Callable[[], Result]) -> tuple[Result | None, str | None]:
        """The function's result, or the error of the first rank that has one. All ranks call it."""
        result, error = None, None
        try:
            result = function()
        except Exception as exception:
            error = f"{type(exception).__name__}: {exception}"
            click.echo(f"Rank {self.rank}: {traceback.format_exc()}", err=True)
        if not self.is_modelled:
            errors: list[str | None] = [None] * dist.get_world_size()
            dist.all_gather_object(errors, error)
            error = next(filter(None, errors), None)
        return (result, None) if error is None else (None, error)

    def milliseconds(self, function: Callable[[], object], device: torch.device) -> float:
        """The slowest rank's time, from a barrier on."""
        if self.is_modelled:
            return timing.milliseconds(function, device)
        timing.synchronize(device)
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
        own = torch.tensor(timing.milliseconds(function, device), device=device)
        dist.all_reduce(own, dist.ReduceOp.MAX)
        return own.item()


@contextlib.contextmanager
def process_group(device: torch.device, is_modelled: bool, degrees: Sequence[int]):
    """Yields the ranks. Those of a modelled group are not there."""
    one_device = mock.patch.object(torch.accelerator, "device_count", lambda: 1)
    # diffusers divides by the number of accelerators.
    with one_device if device.type == "cpu" else contextlib.nullcontext():
        if is_modelled:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=max(degrees))
            try:
                yield Ranks(device, is_modelled=True)
            finally:
                dist.destroy_process_group()
            return
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
        yield Ranks(device, dist.get_rank())
        dist.destroy_process_group()


# ----------------------------------------------------------------------------------------------
# One model


@dataclass
class Prepared:
    """A mode that can be timed, with its first output."""

    forward: Callable[[], Any]
    output: torch.Tensor | None = None
    report: Any = None


def instance(
    model: torch.nn.Module,
    kernel: ModuleType,
    mode: Mode,
    arguments: Mapping[str, object],
    ranks: Ranks,
) -> Prepared:
    """A twin of the model in this mode."""
    twin, report = models.twin(model), None
    if mode.kind == "injected":
        report = models.inject(kernel, twin, mode.kind)
    if mode.degree > 1:
        twin.enable_parallelism(
            config=ContextParallelConfig(
                ring_degree=mode.ring, ulysses_degree=mode.ulysses, mesh=ranks.mesh(mode)
            )
        )
    return Prepared(functools.partial(twin, **arguments), report=report)


def first_output(prepared: Prepared) -> torch.Tensor:
    output = models.output_of(prepared.forward()).clone()
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


def prepare(
    model: torch.nn.Module,
    kernel: ModuleType,
    modes: Sequence[Mode],
    arguments: Mapping[str, object],
    ranks: Ranks,
    entry: dict[str, Any],
) -> dict[Mode, Prepared]:
    """The modes whose first forward works. What it tells goes to `entry`, as do the others' errors."""
    every: dict[Mode, Prepared] = {}
    for mode in modes:
        link = Link() if ranks.is_modelled else None

        def begin(mode: Mode = mode, link: Link | None = link) -> Prepared:
            if not ranks.runs(mode):
                return Prepared(lambda: None)
            prepared = instance(model, kernel, mode, arguments, ranks)
            with link.in_place() if link else contextlib.nullcontext():
                prepared.output = first_output(prepared)
            return prepared

        prepared, error = ranks.attempt(begin)
        if prepared is None:
            entry["failed"][str(mode)] = error
            ranks.echo(f"{mode} failed: {error}")
            continue
        every[mode] = prepared
        measured = entry["modes"][str(mode)] = {"ring": mode.ring, "ulysses": mode.ulysses}
        if prepared.report is not None:
            measured["calls"] = calls(prepared.report)
        if link and mode.degree > 1:
            measured |= {"sent_bytes": link.sent_bytes, "collectives": dict(link.calls)}
    return every


def compare(every: Mapping[Mode, Prepared], entry: dict[str, Any]) -> None:
    """The distances of the outputs from those of one GPU, on the rank that has these."""
    eager, injected = (every[mode].output if mode in every else None for mode in ONE_GPU)
    references = {"eager": eager, "injected": injected}
    for mode, prepared in every.items():
        measured = entry["modes"][str(mode)]
        if prepared.output is None:
            continue
        if mode.degree > 1 and references[mode.kind] is not None:
            distance = finite_distance(prepared.output, references[mode.kind])
            measured["distance_from_one_gpu"] = distance
        if eager is not None:
            measured["distance_from_eager"] = finite_distance(prepared.output, eager)


def derive(modes: dict[str, dict[str, Any]]) -> None:
    """The ratios of the modes' times."""
    for measured in modes.values():
        if "sent_bytes" in measured:
            link_ms = measured["sent_bytes"] / LINK_BYTES_PER_S * 1e3
            measured["whole_ms"] = measured["ms"]["median"] + link_ms
    for measured in modes.values():
        degree = measured["ring"] * measured["ulysses"]
        eager = modes.get(str(Mode("eager", ulysses=degree)))
        if eager is not None:
            measured["over_eager"] = eager["ms"]["median"] / measured["ms"]["median"]
        if degree > 1 and "injected" in modes:
            whole = measured.get("whole_ms", measured["ms"]["median"])
            measured["speedup"] = modes["injected"]["ms"]["median"] / whole
            measured["of_linear"] = measured["speedup"] / degree


def measure(
    model: torch.nn.Module,
    kernel: ModuleType,
    modes: Sequence[Mode],
    arguments: Mapping[str, object],
    ranks: Ranks,
    rounds: int,
    entry: dict[str, Any],
    save: Callable[[], None],
) -> None:
    """All modes of one model at one size."""
    device = ranks.device
    every = prepare(model, kernel, modes, arguments, ranks, entry)
    if not ranks.is_modelled:
        _, error = ranks.attempt(lambda: compare(every, entry) if ranks.rank == 0 else None)
        if error is not None:
            entry["failed"]["distances"] = error
    save()
    for prepared in every.values():
        prepared.output = None
    forwards = {str(mode): prepared.forward for mode, prepared in every.items()}
    clock: dict[str, float] = {}

    def time() -> dict[str, list[float]]:
        timing.interleave(forwards, WARM_UP_ROUNDS, device, ranks.milliseconds)
        watched = clocks.watch(device) if ranks.rank == 0 else contextlib.nullcontext({})
        with watched as summary:
            samples = timing.interleave(forwards, rounds, device, ranks.milliseconds)
        clock.update(summary)
        return samples

    link = Link().in_place() if ranks.is_modelled else contextlib.nullcontext()
    with link:
        samples, error = ranks.attempt(time)
        if samples is None:
            entry["failed"]["times"] = error
            entry["modes"] = {}
            return
        for name, of_mode in samples.items():
            entry["modes"][name]["ms"] = timing.summarize(of_mode)
        entry["clocks"] = clock
        derive(entry["modes"])
        save()
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


def shorten(model: torch.nn.Module, blocks: int | None) -> dict[str, int]:
    """Leave out blocks beyond `blocks` of each stack; the numbers of those that stay."""
    counts = {}
    for name, stack in list(model.named_children()):
        if isinstance(stack, torch.nn.ModuleList):
            kept = stack[:blocks]
            model.set_submodule(name, kept)
            counts[name] = len(kept)
    return counts


def measure_workload(
    workload: Workload,
    kernel: ModuleType,
    degrees: Sequence[int],
    ranks: Ranks,
    dtype: torch.dtype,
    is_tiny: bool,
    blocks: int | None,
    rounds: int,
    entries: list[dict[str, Any]],
    save: Callable[[], None],
) -> None:
    """One model, at the size that the degrees divide; degrees of different sizes have an entry each."""
    published, device = workload.published, ranks.device
    asked = published.tiny_sizes[0] if is_tiny else workload.size
    of_size: dict[Any, list[int]] = {}
    for degree in degrees:
        of_size.setdefault(divisible(asked, degree), []).append(degree)
    model = published.transformer(device, dtype, is_tiny)
    kept = shorten(model, None)
    whole = {**kept, **({} if is_tiny else published.published_blocks)}
    kept = shorten(model, blocks)
    for size, of_degrees in of_size.items():
        entry: dict[str, Any] = {
            "model": published.name_of(is_tiny).partition(", ")[0],
            "size": str(size),
            "asked_size": str(asked),
            "tokens": size.tokens,
            "text_tokens": published.text_tokens,
            "batch": published.batch,
            "blocks": kept,
            "published_blocks": whole,
            "changed_inputs": dict(workload.changed_inputs),
            "degrees": of_degrees,
            "modes": {},
            "failed": {},
        }
        entries.append(entry)
        modes = [*ONE_GPU, *(mode for degree in of_degrees for mode in parallel_modes(degree))]
        arguments = published.inputs(model, size, device, dtype) | workload.changed_inputs
        try:
            with models.weights(model, WEIGHTS):
                measure(model, kernel, modes, arguments, ranks, rounds, entry, save)
        finally:
            save()
        if ranks.rank == 0:
            show(entry)


def show(entry: dict[str, Any]) -> None:
    """Print the times of one model."""
    rows = [
        [
            name,
            measured["ms"]["median"],
            100 * measured["ms"]["spread"],
            *(measured.get(key) for key in ("over_eager", "whole_ms", "speedup", "of_linear")),
            measured["sent_bytes"] / 1e9 if "sent_bytes" in measured else None,
            measured.get("distance_from_one_gpu"),
            *(measured.get("copies", {}).get(key) for key in ("launches", "ms")),
        ]
        for name, measured in entry["modes"].items()
    ]
    headers = ["mode", "ms", "spread %", "x eager", "whole ms", "x one GPU", "of linear"]
    headers += ["GB sent", "distance from one GPU", "copies", "copies, ms"]
    blocks = " + ".join(map(str, entry["blocks"].values()))
    click.echo(f"\n{entry['model']}, {blocks} blocks, {entry['size']}, {entry['tokens']} tokens")
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


@click.command()
@click.option(
    "--modelled", is_flag=True, help="One process on one GPU, as rank 0 of several modelled ones."
)
@click.option(
    "--models",
    "workloads",
    type=Named("models", WORKLOADS),
    default=",".join(DEFAULT_WORKLOADS),
    show_default=True,
    help=f"Comma-separated, of {', '.join(WORKLOADS)}.",
)
@click.option(
    "--degrees",
    type=Degrees(),
    default=",".join(map(str, DEGREES)),
    show_default=True,
    help="Comma-separated numbers of ranks to model.",
)
@click.option(
    "--blocks", type=click.IntRange(min=1), help="Number of blocks to keep at most, of each kind."
)
@click.option("--rounds", type=click.IntRange(min=1), default=6, show_default=True)
@DEVICE
@DTYPE
@TINY
@record.output_option("parallel")
@torch.no_grad()
def main(modelled, workloads, degrees, blocks, rounds, device, dtype, tiny, output) -> None:
    """Measure the models one after the other."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if modelled == (processes > 1):
        raise click.UsageError(
            "start it by torchrun with several processes, or with --modelled and one process"
        )
    degrees = degrees if modelled else [processes]
    with process_group(device, modelled, degrees) as ranks:
        kernel, load_seconds = models.load_kernel()
        environment = record.environment(ranks.device)
        result: dict[str, Any] = {
            "environment": environment,
            "scores_std": {WEIGHTS: models.ALL_WEIGHTS[WEIGHTS]},
            "dtype": record.dtype_name(dtype),
            "rounds": rounds,
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
            path = record.destination(output, name, ("modelled",))

        def save() -> None:
            record.write(path, result)

        for workload in workloads:
            model = workload.published.key
            run = functools.partial(
                measure_workload,
                *(workload, kernel, degrees, ranks, dtype, tiny, blocks, rounds),
                *(result["parallel"], save),
            )
            _, error = ranks.attempt(run)
            if error is not None:
                result.setdefault("failed", {})[model] = error
            save()
            models.free(ranks.device)
        if path is not None:
            ranks.echo(f"\nWrote {path}")


if __name__ == "__main__":
    main()
