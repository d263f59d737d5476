"""What the tables share: how results are found, and how figures are written."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import click
from tabulate import tabulate

from benchmarks.harness import history

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MODE_NAMES = {
    "eager": "eager",
    "eager+fa3": "eager with FlashAttention-3",
    "compiled": "torch.compile",
    "compiled-regional": "torch.compile, block by block",
    "compiled-regional+fa3": "the same with FlashAttention-3",
    "compiled-regional+decoder": "torch.compile, blocks and decoder",
    "compiled-reduce-overhead": "torch.compile, reduce-overhead",
    "injected": "injected",
    "injected+compiled-regional": "injected, then torch.compile, block by block",
    "injected+graphs": "injected with CUDA graphs",
    "injected+int8": '`attention="int8"`',
    "eager+fp8": "FP8 by torchao",
    "injected+fp8": "FP8 by torchao, injected",
    "injected+fp8+int8": 'FP8 by torchao, injected, `attention="int8"`',
    "injected+precision-fp8": '`precision="fp8"`',
    "injected+precision-fp8-fast": '`precision="fp8-fast"`',
    "injected+graphs+precision-fp8": '`precision="fp8"` with CUDA graphs',
    "injected+graphs+precision-fp8-fast": '`precision="fp8-fast"` with CUDA graphs',
}
NOT_MEASURED = "not measured"
MOST_COMMANDS = 2  # that stand under a table in full

# Renders one table, or one figure, from the results folder.
TABLES: dict[str, Callable[[Path], str]] = {}
FIGURES: dict[str, Callable[[Path], str]] = {}


def table(function: Callable[[Path], str]) -> Callable[[Path], str]:
    TABLES[function.__name__] = function
    return function


def figure(function: Callable[[Path], str]) -> Callable[[Path], str]:
    FIGURES[function.__name__] = function
    return function


def load(results: Path, name: str) -> dict:
    return there(history.shown(name, results), name)


def there(result: dict | None, name: str) -> dict:
    if result is None:
        raise click.ClickException(f"there is no result of {name}")
    return result


def card(result: dict) -> str:
    return history.card(result["environment"]).upper()


def markdown(rows: list[list[str]], headers: list[str]) -> str:
    align = ["left"] + ["right"] * (len(headers) - 1)
    return tabulate(rows, headers, tablefmt="github", colalign=align, disable_numparse=True)


@functools.cache
def _scripts() -> dict[str, str]:
    """The benchmarks by file name, with their paths in the checkout."""
    return {p.name: str(p.relative_to(BENCHMARKS.parent)) for p in BENCHMARKS.rglob("*.py")}


def command(environment: dict) -> str:
    """The command of a result, with the script's path of today."""
    return re.sub(
        r"benchmarks/(?:\w+/)*(\w+\.py)",
        lambda match: _scripts().get(match[1], match[0]),
        environment["command"],
    )


def setup(*results: dict) -> str:
    """Card, versions, builds, days and commands of the figures of a table."""
    of_place: dict[str, list[dict]] = {}
    for result in results:
        environment = result["environment"]
        versions = [f"{name} {environment[name]}" for name in ("torch", "diffusers", "kernels")]
        of_place.setdefault(", ".join([environment["device"], *versions]), []).append(environment)
    lines = []
    for place, environments in of_place.items():
        builds = dict.fromkeys(filter(None, map(history.commit, environments)))
        days = sorted({environment["date"].split()[0] for environment in environments})
        commands = list(dict.fromkeys(map(command, environments)))
        if len(commands) > MOST_COMMANDS:
            commands = list(dict.fromkeys(" ".join(line.split()[:2]) for line in commands))
        parts = [place]
        parts += [f"build{'s' * (len(builds) > 1)} {', '.join(builds)}"] if builds else []
        parts += [" to ".join(dict.fromkeys((days[0], days[-1])))]
        parts += [", ".join(f"`{line}`" for line in commands)]
        lines.append("; ".join(parts))
    return "\n\n" + ".\n".join(lines) if lines else ""


def footnote(rows: list[list[str]], text: str, mark: str = "*") -> str:
    """What the mark means, if a cell ends with one."""
    is_marked = any(cell.endswith(mark) for row in rows for cell in row)
    shown = "\\*" if mark == "*" else mark
    return f"\n\n{shown} {text}" if is_marked else ""


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×"


def milliseconds(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f} ms"


def number(value: float | None, unit: str, digits: int = 0) -> str:
    return "" if value is None else f"{value:.{digits}f} {unit}"


def span(values: Sequence[float | None], digits: int = 2) -> str:
    """The least and the most of what was measured, or one of them where they are the same."""
    known = [value for value in values if value is not None]
    if not known:
        return NOT_MEASURED
    return " to ".join(dict.fromkeys(f"{value:.{digits}f}" for value in (min(known), max(known))))


def size_name(key: str) -> str:
    """The size of an image or of a video in words: 1024x1024, 161x512x768 or 161x512x768:50."""
    size, _, steps = key.partition(":")
    *frames, height, width = size.split("x")
    of_video = f"{frames[0]} frames " if frames else ""
    return f"{of_video}{height}×{width}" + (f", {steps} steps" if steps else "")
