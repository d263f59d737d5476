"""What the tables have in common: how results are found, and figures written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
import history
import targets
from tabulate import tabulate

MODE_NAMES = {
    "eager": "eager",
    "compiled": "torch.compile",
    "compiled-regional": "torch.compile, block by block",
    "compiled-reduce-overhead": "torch.compile, reduce-overhead",
    "injected": "injected",
    "injected-no-attention": "injected with attention=False",
    "injected+graphs": "injected with CUDA graphs",
    "injected+compiled": "injected and torch.compile",
}


# What writes a result, where it is not benchmarks/bench_<name>.py.
SCRIPTS = {
    "ceilings": "ceilings/run.py",
    **{name: f"bench_models.py --model {name}" for name in targets.TITLES if name != "models"},
    "profile": "profile_kernels.py",
}


ELSEWHERE = "‡"  # the mark of what was measured on another card than the rest of a table

# Renders one table, or one figure, from the results folder.
TABLES: dict[str, Callable[[Path], str]] = {}
FIGURES: dict[str, Callable[[Path], str]] = {}


def table(function: Callable[[Path], str]) -> Callable[[Path], str]:
    TABLES[function.__name__] = function
    return function


def figure(function: Callable[[Path], str]) -> Callable[[Path], str]:
    FIGURES[function.__name__] = function
    return function


def script(name: str) -> str:
    """What writes the results of that name."""
    return SCRIPTS.get(name, f"bench_{name}.py")


def load(results: Path, name: str) -> dict:
    result = history.shown(name, results)
    if result is None:
        raise click.ClickException(
            f"{results / name} is empty: benchmarks/{script(name)} fills it."
        )
    return result


def load_workloads(results: Path, name: str) -> tuple[list[tuple[dict, str]], list[dict]]:
    """Workloads, each with a mark, and the results that they are of.

    Those of the result that is shown have none. What that one does not measure is of the newest of another
    card, marked ELSEWHERE.
    """
    shown = load(results, name)
    workloads = [(entry, "") for entry in shown["workloads"]]
    known = {workload_key(entry) for entry, _ in workloads}
    device = shown["environment"]["device"]
    for result in reversed(history.kept(name, results)):
        if result["environment"]["device"] != device:
            more = [e for e in result["workloads"] if workload_key(e) not in known]
            workloads += [(entry, ELSEWHERE) for entry in more]
            return workloads, [shown, result] if more else [shown]
    return workloads, [shown]


def workload_key(entry: dict) -> tuple:
    return (entry["operation"], entry["variant"], *entry["shape"])


def elsewhere(rows: list[list[str]], loaded: list[dict]) -> str:
    """What ELSEWHERE means, if a row is marked so."""
    devices = sorted({result["environment"]["device"] for result in loaded[1:]})
    return footnote(rows, f"on an {' or '.join(devices)}, whose memory is faster.", ELSEWHERE)


def is_measured(results: Path, name: str) -> bool:
    return history.shown(name, results) is not None


def markdown(rows: list[list[str]], headers: list[str]) -> str:
    align = ["left"] + ["right"] * (len(headers) - 1)
    return tabulate(rows, headers, tablefmt="github", colalign=align, disable_numparse=True)


def setup(*results: dict) -> str:
    """Where, with what and by which commands the figures of a table were measured."""
    runs: dict[str, list[str]] = {}
    for environment in (result["environment"] for result in results):
        parts = [environment["device"]]
        parts += [f"{name} {environment[name]}" for name in ("torch", "diffusers", "kernels")]
        run = f"{environment['date']}: `{environment['command']}`"
        runs.setdefault(", ".join(parts), []).append(run)
    return "\n\n" + "; ".join(f"{where}, {', '.join(run)}" for where, run in runs.items())


def footnote(rows: list[list[str]], text: str, mark: str = "*") -> str:
    """What the mark means, if a cell ends with one."""
    is_marked = any(cell.endswith(mark) for row in rows for cell in row)
    shown = "\\*" if mark == "*" else mark
    return f"\n\n{shown} {text}" if is_marked else ""


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×"


def video_name(key: str) -> str:
    """161x512x768 or 161x512x768:50 in words."""
    size, _, steps = key.partition(":")
    frames, height, width = size.split("x")
    return f"{frames} frames {height}×{width}" + (f", {steps} steps" if steps else "")


def image_name(key: str) -> str:
    return key.replace("x", "×")


SIZE_NAMES: dict[str, Callable[[str], str]] = {"models": video_name, "flux": image_name}


def size_name(key: str) -> str:
    """Of an image, or of a video."""
    return image_name(key) if key.count("x") == 1 else video_name(key)


def unmeasured(name: str) -> str:
    return f"Not measured yet: `python benchmarks/{script(name)}` does."
