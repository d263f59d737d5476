"""Records of benchmarks as JSON: machine, versions, command and figures."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import click
import torch
from click.core import ParameterSource

from benchmarks.harness import history


def processor_name() -> str:
    """The CPU's model name, from /proc/cpuinfo, because `platform` may return only the ISA."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def driver_version() -> str:
    import pynvml

    pynvml.nvmlInit()
    try:
        return pynvml.nvmlSystemGetDriverVersion()
    finally:
        pynvml.nvmlShutdown()


def environment(device: torch.device) -> dict[str, object]:
    """Card, versions and the exact command of this process. Call it after loading the kernels."""
    from kernels import get_loaded_kernels

    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        hardware = {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "driver": driver_version(),
            "cuda": torch.version.cuda,
        }
    else:
        hardware = {"device": processor_name(), "threads": torch.get_num_threads()}
    return {
        **hardware,
        **{name: importlib.metadata.version(name) for name in ("torch", "diffusers", "kernels")},
        "python": platform.python_version(),
        "kernel_ids": [loaded.metadata.id for loaded in get_loaded_kernels()],
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "command": shlex.join(["python", *_without_output(sys.argv)]),
    }


def _without_output(arguments: Sequence[str]) -> Iterator[str]:
    """A command without the path of its result, which is specific to a machine."""
    following = iter(arguments)
    for argument in following:
        if argument == "--output":
            next(following, None)
        elif not argument.startswith("--output="):
            yield argument


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def output_option(name: str, takes_folder: bool = False) -> Callable:
    """The option --output of the benchmark with this name; a folder if there are several results."""
    of_several = " Of several models a folder, for a file each." if takes_folder else ""
    return click.option(
        "--output",
        type=click.Path(dir_okay=takes_folder, path_type=Path),
        help=f"JSON file, if not {history.path(name).name} in benchmarks/results, where only the result "
        f"of the whole benchmark goes.{of_several}",
    )


# Options that do not change what is measured.
NEUTRAL_OPTIONS = {
    *("device", "model", "output", "rounds", "ceilings_path"),
    *("compile_processes", "profiled_calls", "under_ncu"),
}
Destination = Path | str  # a file, or the name of a stored benchmark


def destination(
    output: Path | None, name: str, neutral: Collection[str] = ()
) -> Destination | None:
    """Where the running command's result goes: --output, otherwise the name, for the stored results.

    Only complete benchmarks are stored. With options other than NEUTRAL_OPTIONS and `neutral` it prints a
    note and returns None.
    """
    if output is not None:
        return output
    context = click.get_current_context()
    given = [
        parameter
        for parameter in context.command.params
        if context.get_parameter_source(parameter.name) not in (ParameterSource.DEFAULT, None)
    ]
    if others := [p.opts[0] for p in given if p.name not in NEUTRAL_OPTIONS.union(neutral)]:
        options = ", ".join(sorted(others))
        click.echo(f"Incomplete benchmark, with {options}: it is only written with --output.")
        return None
    return name


def write(where: Destination | None, result: dict[str, object]) -> None:
    """Nowhere if the destination is None."""
    if where is None:
        return
    if isinstance(where, str):
        history.store(where, result)
        return
    where.parent.mkdir(parents=True, exist_ok=True)
    where.write_text(history.compact(result) + "\n", encoding="utf-8")


def say_where(where: Destination | None) -> None:
    if where is not None:
        click.echo(f"Wrote {where}")


def finish(where: Destination | None, result: dict[str, object]) -> None:
    """Writes the result, and says where."""
    write(where, result)
    say_where(where)
