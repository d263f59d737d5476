"""What the tables share: how results are found, and how figures are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click
import history
import models
import targets
from tabulate import tabulate

MODE_NAMES = {
    "eager": "eager",
    "compiled": "torch.compile",
    "compiled-regional": "torch.compile, block by block",
    "compiled-regional+fa3": "the same with FlashAttention-3",
    "compiled-reduce-overhead": "torch.compile, reduce-overhead",
    "injected": "injected",
    "injected-no-attention": "injected with attention=False",
    "injected+graphs": "injected with CUDA graphs",
    "injected+compiled": "injected and torch.compile",
    "eager+fp8": "FP8 by torchao",
    "compiled-regional+fp8": "FP8 by torchao, torch.compile, block by block",
    "injected+fp8": "FP8 by torchao, injected",
    "injected+graphs+fp8": "FP8 by torchao, injected with CUDA graphs",
    "injected+precision-fp8": '`precision="fp8"`',
    "injected+precision-fp8-fast": '`precision="fp8-fast"`',
}
NOT_MEASURED = "not measured"
MOST_COMMANDS = 2  # that stand under a table in full

FP8_MODES = "eager,injected,injected+graphs,eager+fp8,injected+fp8,injected+graphs+fp8"

# The script that writes a result, if it is not benchmarks/bench_<name>.py.
SCRIPTS = {
    "ceilings": "ceilings/run.py",
    **{name: f"bench_models.py --model {name}" for name in targets.TITLES if name != "models"},
    "profile": "profile_kernels.py",
    **{
        f"fp8_{name}": f"bench_models.py --model {name} --modes {FP8_MODES} "
        "--weights peaked,outliers --peak-memory"
        for name in ("flux", "flux2", "qwenimage", "wan")
    },
    "fp8_ltx": "bench_models.py --model ltx "
    f"--modes {FP8_MODES},{','.join(models.PRECISION_MODES)} --weights peaked,outliers --peak-memory",
    **{
        f"fp8_back_to_back_{name}": f"bench_models.py --model {name} --modes {FP8_MODES} "
        "--weights peaked --no-distance --calls 4"
        for name in ("flux", "qwenimage")
    },
    **{
        f"fp8_compiled_{name}": f"bench_models.py --model {name} --sizes {size} "
        "--modes eager,injected,compiled-regional+fp8,injected+fp8 --weights peaked --no-distance"
        for name, size in (("ltx", "161x512x768"), ("flux", "1024x1024"))
    },
    "fp8_quality": "bench_quality.py "
    "--modes eager,eager-efficient,eager-float32,injected,eager+fp8,injected+fp8",
    "fp8_pipelines": "bench_pipelines.py --pipelines flux,ltx "
    f"--modes eager,injected,injected+fp8,{','.join(models.PRECISION_MODES)}",
}

# Renders one table, or one figure, from the results folder.
TABLES: dict[str, Callable[[Path], str]] = {}
FIGURES: dict[str, Callable[[Path], str]] = {}


def table(function: Callable[[Path], str]) -> Callable[[Path], str]:
    TABLES[function.__name__] = function
    return function


def figure(function: Callable[[Path], str]) -> Callable[[Path], str]:
    FIGURES[function.__name__] = function
    return function


def load(results: Path, name: str, cards: Sequence[str] = ()) -> dict:
    result = history.shown(name, results, cards=cards)
    if result is None:
        script = SCRIPTS.get(name, f"bench_{name}.py")
        raise click.ClickException(f"{results / name} is empty: benchmarks/{script} fills it.")
    return result


def is_measured(results: Path, name: str) -> bool:
    return history.shown(name, results) is not None


def unmeasured(name: str) -> str:
    script = SCRIPTS.get(name, f"bench_{name}.py")
    return f"Not measured yet: `python benchmarks/{script}` does."


def card(result: dict) -> str:
    return history.card(result["environment"]).upper()


def markdown(rows: list[list[str]], headers: list[str]) -> str:
    align = ["left"] + ["right"] * (len(headers) - 1)
    return tabulate(rows, headers, tablefmt="github", colalign=align, disable_numparse=True)


def aims(evaluated: Sequence[targets.Target]) -> str:
    rows = [
        [
            target.what,
            target.of,
            f"at {'most' if target.is_upper_bound else 'least'} {target.aim:.2f}{target.unit}",
            "" if target.measured is None else f"{target.measured:.2f}{target.unit}",
            target.verdict,
        ]
        for target in evaluated
    ]
    return markdown(rows, ["what", "of", "aim", "measured", ""])


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
        commands = list(dict.fromkeys(environment["command"] for environment in environments))
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
