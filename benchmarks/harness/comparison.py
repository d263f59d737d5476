"""Shared by the operations' benchmarks: compares each operation with its peers in one run.

Peers are the eager PyTorch expression that the operation replaces (reference/eager.py), the same expression
under torch.compile, Liger and QuACK if they have the operation, a device copy of the same bytes and a large
device copy. All take turns in balanced orders. Rates count the necessary bytes: each input of the operation
read once, each output written once. Additional traffic of a peer does not count. Results are compared with
eager's before anything is timed. A wrong result of this package ends the run; a peer's is recorded instead of
its time.

Compilation takes longer than the rest, so several processes do it in advance and leave the code in
Inductor's and Triton's caches. Autotuning is not cached: it happens in the run itself, on an idle GPU.
"""

from __future__ import annotations

import functools
import importlib
import math
import multiprocessing
import os
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from types import ModuleType

import click
import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks import models
from benchmarks.harness import clocks, peers, record, timing
from benchmarks.harness.options import DEVICE

import eager
from accuracy import finite_distance

DTYPE = torch.bfloat16
LARGE_COPY_BYTES = 1 << 30
WARM_BYTES = 17_000_000  # rms_norm's bytes at 2x1024x2048; a third of the L2 cache
TOLERANCE = 0.01  # relative L2 distance from eager, which rounds intermediate results to bfloat16
WARM_UP_ROUNDS = 2
COMPILE_MODES = ("default", "max-autotune-no-cudagraphs")
MAX_COMPILE_PROCESSES = 12
COPIES = ("copy", "large_copy")


@dataclass(frozen=True)
class Workload:
    """An operation at a shape (of its first tensor); `variant` names other distinctions."""

    operation: str
    shape: tuple[int, ...]
    variant: str = ""

    @property
    def size(self) -> str:
        return "x".join(map(str, self.shape))

    def __str__(self) -> str:
        return " ".join(filter(None, [self.operation, self.variant, self.size]))


@dataclass(frozen=True)
class Case:
    """Arguments of a workload. The eager expression has its own name and arguments (`eager_operation`,
    `eager_arguments`) if it takes its inputs in another form; `options` are for both."""

    arguments: tuple
    options: dict[str, object] = field(default_factory=dict)
    eager_operation: str | None = None
    eager_arguments: tuple | None = None


@dataclass(frozen=True)
class Family:
    """The workloads of one benchmark file. `build` makes a workload's case on a device."""

    name: str
    workloads: Sequence[Workload]
    tiny: Sequence[Workload]
    build: Callable[[Workload, ModuleType, torch.device], Case]


@dataclass(frozen=True)
class Settings:
    device: torch.device
    rounds: int
    compile_modes: Sequence[str]
    large_copy_bytes: int


def outputs(result: object) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def tensors(value: object) -> Iterator[Tensor]:
    """All tensors of nested arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)


def moved_bytes(case: Case, results: Sequence[Tensor]) -> int:
    """Total bytes of inputs and outputs."""
    inputs = {id(t): t for t in tensors((case.arguments, {**case.options, "out": None}))}
    return sum(t.numel() * t.element_size() for t in (*inputs.values(), *results))


def clear_out(case: Case) -> None:
    """Overwrites `out` tensors, so that one call's result cannot pass for another's."""
    for tensor in tensors(case.options.get("out")):
        tensor.fill_(math.nan)


def eager_call(workload: Workload, case: Case) -> tuple[Callable, tuple, dict]:
    """The eager expression, its arguments and its options."""
    function = getattr(eager, case.eager_operation or workload.operation)
    arguments = case.arguments if case.eager_arguments is None else case.eager_arguments
    return function, arguments, case.options


def compiled(function: Callable, mode: str) -> Callable:
    """The function under torch.compile, with its own code object.

    Torch stores compiled code per code object, for all shapes and modes together, and stops compiling
    after a few of them.
    """
    own = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return torch.compile(own, mode=mode, fullgraph=True, dynamic=False)


def explain(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def distance(results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return max(finite_distance(a, b) for a, b in zip(results, expected, strict=True))


# --------------------------------------------------------------------------------------------------
# Compilation in advance


def _family(name: str) -> Family:
    return importlib.import_module(f"benchmarks.operations.bench_{name}").FAMILY


@torch.no_grad()
def _compile_one(family: str, workload: Workload, mode: str, device: torch.device) -> None:
    """Fill the caches with a workload's compiled code. Runs in a separate process."""
    import torch._inductor.config as inductor_config

    inductor_config.autotune_local_cache = False  # other processes disturb autotuning
    inductor_config.compile_threads = 1
    torch._dynamo.reset()
    case = _family(family).build(workload, models.load_kernel()[0], device)
    function, arguments, options = eager_call(workload, case)
    compiled(function, mode)(*arguments, **options)
    timing.synchronize(device)
    del case, arguments, options
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the memory is shared with the other processes


def compile_ahead(
    family: Family, workloads: Sequence[Workload], settings: Settings, processes: int
) -> None:
    """Fill the caches in several processes. The run itself repeats failed compilations and records them."""
    tasks = [(workload, mode) for workload in workloads for mode in settings.compile_modes]
    processes = min(processes, len(tasks))
    if processes == 0:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        futures = {
            pool.submit(_compile_one, family.name, workload, mode, settings.device): (
                f"{workload}, {mode}"
            )
            for workload, mode in tasks
        }
        for future in as_completed(futures):
            try:
                future.result()
            except BrokenProcessPool:
                click.echo("A compilation process died; the rest is compiled during the run.")
                return
            except Exception as error:
                click.echo(f"Not compiled in advance: {futures[future]}: {explain(error)}")


# --------------------------------------------------------------------------------------------------
# One workload


def peer_calls(
    workload: Workload, case: Case, libraries: dict[str, object], settings: Settings
) -> dict[str, Callable[[], peers.Call | None]]:
    """For each peer except eager, a function that prepares its call, and raises if the peer fails."""

    def compile_(mode: str) -> peers.Call:
        function, arguments, options = eager_call(workload, case)
        return peers.Call(
            functools.partial(compiled(function, mode), *arguments, **options), outputs
        )

    calls = {
        f"compiled {mode}": functools.partial(compile_, mode) for mode in settings.compile_modes
    }
    for name, library in libraries.items():
        if hasattr(library, workload.operation):
            method = getattr(library, workload.operation)
            calls[name] = functools.partial(method, *case.arguments, **case.options)
    return calls


def copy_of(moved: int, device: torch.device) -> Callable[[], object]:
    """A device copy that reads half of the bytes and writes the other half."""
    source = torch.zeros(moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def rates(samples: dict[str, list[float]], moved: int, large_copy_bytes: int) -> dict[str, object]:
    """Times, rates and ratios of the functions that took turns."""
    times = {name: timing.summarize(values) for name, values in samples.items()}
    medians = {name: summary["median"] for name, summary in times.items()}
    result: dict[str, object] = {"microseconds": times}
    modes = [name for name in medians if name.startswith("compiled ")]
    if modes:
        best = min(modes, key=medians.get)
        result["compiled_mode"] = best.removeprefix("compiled ")
        medians["compiled"] = medians[best]
    result["terabytes_per_second"] = {
        name: (large_copy_bytes if name == "large_copy" else moved) / median * 1e-6
        for name, median in medians.items()
        if name not in modes
    }
    compared = [n for n in medians if n not in ("ours", *COPIES, *modes)]
    result["over"] = {name: medians[name] / medians["ours"] for name in compared}
    best_peer = min(compared, key=medians.get)
    result["best_peer"], result["over_best_peer"] = best_peer, result["over"][best_peer]
    rate = result["terabytes_per_second"]
    result["of_copy"], result["of_large_copy"] = (rate["ours"] / rate[name] for name in COPIES)
    return result


def measure(
    workload: Workload,
    case: Case,
    kernel: ModuleType,
    libraries: dict[str, object],
    stopwatch: timing.Stopwatch,
    large_copy: Callable[[], object],
    settings: Settings,
) -> dict[str, object]:
    """Compare the results, then the times, of all implementations of a workload."""
    device = settings.device
    function, arguments, options = eager_call(workload, case)
    functions: dict[str, Callable[[], object]] = {
        "ours": functools.partial(
            getattr(kernel, workload.operation), *case.arguments, **case.options
        ),
        "eager": functools.partial(function, *arguments, **options),
    }
    expected = [t.clone() for t in outputs(functions["eager"]())]
    clear_out(case)
    results = outputs(functions["ours"]())
    moved = moved_bytes(case, results)
    found = distance(results, expected)
    if not found <= TOLERANCE:
        raise click.ClickException(f"{workload}: the result is {found:.3g} from eager's")
    del results

    torch._dynamo.reset()
    failed = {}
    for name, prepare in peer_calls(workload, case, libraries, settings).items():
        try:
            call = prepare()
            if call is None:
                continue
            clear_out(case)
            found_by_peer = distance(call.outputs(call.run()), expected)
            if not found_by_peer <= TOLERANCE:
                raise ArithmeticError(f"the result is {found_by_peer:.3g} from eager's")
            stopwatch.cold(call.run, device)
            functions[name] = call.run
        except Exception as error:  # third-party code may raise anything
            failed[name] = explain(error)
            click.echo(f"{workload}: {name} failed: {failed[name]}")
    del expected
    functions["copy"] = copy_of(moved, device)
    functions["large_copy"] = large_copy

    result: dict[str, object] = {
        "operation": workload.operation,
        "variant": workload.variant,
        "shape": list(workload.shape),
        "bytes": moved,
        "distance_from_eager": found,
        "failed": failed,
    }
    measures = {"cold": stopwatch.cold}
    if moved <= WARM_BYTES:
        measures["warm"] = stopwatch.warm
    for name, measure_ in measures.items():
        timing.interleave(functions, WARM_UP_ROUNDS, device, measure_)
        samples = timing.interleave(functions, settings.rounds, device, measure_)
        result[name] = rates(samples, moved, settings.large_copy_bytes)
    return result


def show(entries: Sequence[dict]) -> None:
    """Print a table of the figures."""
    rows = []
    for entry in entries:
        size = "x".join(map(str, entry["shape"]))
        for cache in ("cold", "warm"):
            if cache in entry:
                got = entry[cache]
                ours = got["microseconds"]["ours"]
                rows.append(
                    [
                        " ".join(filter(None, [entry["operation"], entry["variant"]])),
                        f"{size} {'warm' if cache == 'warm' else ''}",
                        ours["median"],
                        100 * ours["spread"],
                        got["terabytes_per_second"]["ours"],
                        100 * got["of_large_copy"],
                        100 * got["of_copy"],
                        *(
                            got["over"].get(name)
                            for name in ("eager", "compiled", "liger", "quack")
                        ),
                    ]
                )
    headers = ["", "shape", "us", "spread %", "TB/s", "% of large copy", "% of copy"]
    headers += ["x eager", "x compiled", "x Liger", "x QuACK"]
    click.echo(tabulate(rows, headers, floatfmt=".2f"))


# --------------------------------------------------------------------------------------------------
# The command


class Names(click.ParamType):
    """Comma-separated names."""

    name = "names"

    def convert(self, value, param, ctx) -> list[str]:
        return value if isinstance(value, list) else value.split(",")


def select(
    workloads: Sequence[Workload], operations: Sequence[str] | None, shapes: Sequence[str] | None
) -> list[Workload]:
    """The workloads of the given operations and shapes. Raises for an unknown one."""
    for kind, asked, known in (
        ("operation", operations, {w.operation: None for w in workloads}),
        ("shape", shapes, {w.size: None for w in workloads}),
    ):
        for name in asked or ():
            if name not in known:
                raise click.UsageError(f"unknown {kind} {name!r}: there are {', '.join(known)}")
    return [
        w
        for w in workloads
        if (not operations or w.operation in operations) and (not shapes or w.size in shapes)
    ]


def default_processes(device: torch.device) -> int:
    return min(MAX_COMPILE_PROCESSES, os.cpu_count() or 1) if device.type == "cuda" else 0


def command(family: Family, help_: str) -> click.Command:
    """The benchmark's command line."""

    @click.command(help=help_)
    @DEVICE
    @click.option("--tiny", is_flag=True, help="Tiny shapes, to try the benchmark.")
    @click.option("--operations", type=Names(), help="Comma-separated. Default: all.")
    @click.option("--shapes", type=Names(), help="Comma-separated: 2x1024x2048,... Default: all.")
    @click.option("--rounds", type=click.IntRange(min=1), default=25, show_default=True)
    @click.option("--compile/--no-compile", "is_compiled", default=True, show_default=True)
    @click.option(
        "--compile-modes",
        type=Names(),
        default=",".join(COMPILE_MODES),
        show_default=True,
        help="Modes of torch.compile; the faster one counts.",
    )
    @click.option(
        "--compile-processes",
        type=click.IntRange(min=0),
        help="Compilation processes. Default: one per core for a GPU, at most "
        f"{MAX_COMPILE_PROCESSES}, and none for a CPU.",
    )
    @record.output_option(family.name)
    @torch.no_grad()
    def main(
        device,
        tiny,
        operations,
        shapes,
        rounds,
        is_compiled,
        compile_modes,
        compile_processes,
        output,
    ) -> None:
        workloads = select(family.tiny if tiny else family.workloads, operations, shapes)
        modes = compile_modes if is_compiled else ()
        large_copy_bytes = LARGE_COPY_BYTES >> 12 if tiny else LARGE_COPY_BYTES
        settings = Settings(device, rounds, modes, large_copy_bytes)
        if compile_processes is None:
            compile_processes = default_processes(device)
        compile_ahead(family, workloads, settings, compile_processes)

        kernel, _ = models.load_kernel()
        libraries, notes = peers.load(device)
        for name, note in notes.items():
            click.echo(f"{name}: {note}")
        stopwatch = timing.Stopwatch(device)
        large_copy = copy_of(large_copy_bytes, device)
        result = {
            "environment": record.environment(device),
            "peers": notes,
            "compile_modes": list(modes),
            "dtype": record.dtype_name(DTYPE),
            "rounds": rounds,
            "flush_bytes": timing.FLUSH_BYTES if device.type == "cuda" else 0,
            "large_copy_bytes": large_copy_bytes,
        }
        entries = result["workloads"] = []
        with clocks.watch(device) as result["clocks"]:
            for workload in workloads:
                torch.manual_seed(0)
                case = family.build(workload, kernel, device)
                entries.append(
                    measure(workload, case, kernel, libraries, stopwatch, large_copy, settings)
                )
        show(entries)
        clocks.show(result["clocks"])
        output = record.destination(output, f"operations/{family.name}")
        record.finish(output, result)

    return main


# --------------------------------------------------------------------------------------------------
# Inputs


def normal(
    device: torch.device, *shape: int, std: float = 1.0, mean: float = 0.0, dtype=DTYPE
) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype) * std + mean


def modulation(
    device: torch.device, shape: Sequence[int], count: int, dtype=DTYPE
) -> tuple[Tensor, ...]:
    """Scale, shift, gate: views of the (..., 6, D) table that a block computes per batch entry."""
    rows = [*shape[:-2], 1] if len(shape) > 2 else [1]
    return normal(device, *rows, 6, shape[-1], std=0.5, dtype=dtype).unbind(-2)[:count]
