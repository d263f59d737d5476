"""The plots of benchmarks/plots, from the JSON in benchmarks/results.

The same JSON gives the same files, byte for byte. tools/render_docs.py writes them.
"""

from __future__ import annotations

import functools
import io
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import history
import targets

FAMILIES = {
    "norm": "norms",
    "gated_residual": "gated residuals",
    "rope": "rotary embeddings",
    "activation": "activations",
    "softmax": "softmax",
}
# What is drawn, from the back to the front: name, color, marker, size.
SERIES = {
    "eager": ("eager", "#9aa0a6", "s", 14),
    "compiled": ("torch.compile", "#e8710a", "^", 16),
    "liger": ("Liger", "#188038", "v", 16),
    "quack": ("QuACK", "#a142f4", "D", 12),
    "ours": ("this package", "#1a73e8", "o", 20),
}
MODES = {
    "compiled": ("torch.compile", "#e8710a"),
    "compiled-regional": ("torch.compile, block by block", "#fbbc04"),
    "compiled-reduce-overhead": ("torch.compile, reduce-overhead", "#b06000"),
    "injected": ("injected", "#1a73e8"),
    "injected+graphs": ("injected with CUDA graphs", "#0b8043"),
    "injected-no-attention": ("injected with attention=False", "#8ab4f8"),
    "injected+compiled": ("injected and torch.compile", "#174ea6"),
}
MEGABYTE = 1e6
STYLE = {
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.color": "#e0e0e0",
    "svg.fonttype": "none",
    "svg.hashsalt": "h100-diffusers-kernels",
}


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    metadata = {"Date": None, "Creator": None}
    figure.savefig(buffer, format="svg", metadata=metadata, facecolor="white")
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def bandwidth(results: dict[str, dict]) -> str:
    """Rate against bytes moved, one panel a family, with the large copy's rate as a line."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    panels = figure.subplots(2, 3, sharey=True)
    for axes, (family, title) in zip(panels.flat, FAMILIES.items(), strict=False):
        entries = results[family]["workloads"]
        sizes = [entry["bytes"] / MEGABYTE for entry in entries]
        for name, (label, color, marker, size) in SERIES.items():
            points = [
                (megabytes, entry["cold"]["terabytes_per_second"][name])
                for megabytes, entry in zip(sizes, entries, strict=True)
                if name in entry["cold"]["terabytes_per_second"]
                and not targets.is_broken(entry["cold"], name)
            ]
            if points:
                x, y = zip(*points, strict=True)
                axes.scatter(x, y, s=size, c=color, marker=marker, label=label, alpha=0.85)
        copy = statistics.median(e["cold"]["terabytes_per_second"]["large_copy"] for e in entries)
        axes.axhline(copy, color="#202124", linewidth=0.9, linestyle="--", label="copy of 1 GiB")
        axes.set_title(title)
        axes.set_xscale("log")
        ticks = [t for t in (1, 2, 5, 10, 30, 100, 300, 1000, 3000) if _is_within(t, sizes)]
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("MB that must move")
        axes.set_ylim(bottom=0)
    for row in panels:
        row[0].set_ylabel("TB/s")
    legend = panels.flat[-1]
    legend.axis("off")
    handles = {
        label: handle
        for axes in panels.flat[:-1]
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    legend.legend(handles.values(), handles.keys(), loc="center", frameon=False)
    return _svg(figure)


def _is_within(value: float, values: list[float]) -> bool:
    return min(values) / 2 <= value <= max(values) * 2


def _lowest_speedups(by_weights: dict[str, dict]) -> dict[str, float]:
    """Each mode's speedup over eager with the weights with which it is the lowest."""
    lowest: dict[str, float] = {}
    for entry in by_weights.values():
        for mode, over in entry["speedups"].items():
            if "eager" in over:
                lowest[mode] = min(over["eager"], lowest.get(mode, over["eager"]))
    return lowest


def models(results: dict[str, dict]) -> str:
    """Speedup of a model's forward over eager, a group of bars an input: the lowest of all weights."""
    sizes = results["models"]["sizes"]
    lowest = {size: _lowest_speedups(entry["weights"]) for size, entry in sizes.items()}
    weights = list(dict.fromkeys(name for entry in sizes.values() for name in entry["weights"]))
    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    axes = figure.subplots()
    modes = [mode for mode in MODES if any(mode in speedups for speedups in lowest.values())]
    height = 0.8 / len(modes)
    for index, mode in enumerate(modes):
        label, color = MODES[mode]
        shown = [
            (row + (index - (len(modes) - 1) / 2) * height, speedups[mode])
            for row, speedups in enumerate(lowest.values())
            if mode in speedups
        ]
        bars = axes.barh(
            [row for row, _ in shown],
            [value for _, value in shown],
            height,
            color=color,
            label=label,
        )
        axes.bar_label(bars, fmt="%.2f×", padding=3)
    axes.axvline(1, color="#202124", linewidth=0.9, linestyle="--")
    names = []
    for size, entry in sizes.items():
        frames, rows, columns = size.split("x")
        tokens = f"{entry['batch']}×{entry['tokens']} tokens"
        names.append(f"LTX-Video 2B\n{frames} frames {rows}×{columns}\n{tokens}")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.margins(x=0.12)
    least = " (the least of: " + ", ".join(weights) + " weights)" if len(weights) > 1 else ""
    axes.set_xlabel("one transformer forward: times as fast as eager" + least)
    figure.legend(loc="outside lower center", ncols=len(modes), frameon=False)
    return _svg(figure)


def all_models(results: dict[str, dict]) -> str:
    """Speedup of each model's forward over eager, torch.compile's and the injected one's."""
    shown = [
        (f"{results[name]['model']}\n{forward.size.replace('x', '×')}", forward)
        for name in targets.TITLES
        if name in results
        for forward in targets.forwards(results[name])
        if forward.over_eager is not None
    ]
    figure = Figure(figsize=(7.5, 1.2 + 0.5 * len(shown)), layout="constrained")
    axes = figure.subplots()
    height = 0.4
    series = {
        "compiled": lambda forward: forward.compiled and forward.eager / forward.compiled,
        "injected": lambda forward: forward.over_eager,
    }
    for index, (mode, value) in enumerate(series.items()):
        label, color = MODES[mode]
        points = [
            (row + (index - 0.5) * height, speedup)
            for row, (_, forward) in enumerate(shown)
            if (speedup := value(forward)) is not None
        ]
        if points:
            places, speedups = zip(*points, strict=True)
            bars = axes.barh(places, speedups, height, color=color, label=label)
            axes.bar_label(bars, fmt="%.2f×", padding=3)
    axes.axvline(1, color="#202124", linewidth=0.9, linestyle="--")
    axes.set_yticks(range(len(shown)), [name for name, _ in shown])
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.margins(x=0.12)
    axes.set_xlabel(
        f"one transformer forward, {targets.MODEL_WEIGHTS} weights: times as fast as eager"
    )
    figure.legend(loc="outside lower center", ncols=len(series), frameon=False)
    return _svg(figure)


def cuda_graphs(results: dict[str, dict]) -> str:
    """Speedup over eager of forwards back to back, a group of bars a forward of a published size."""
    forwards = [f for f in results["cuda_graphs"]["graph_forwards"] if f["input"] == "published"]
    shown = [(f, targets.of_weights(f)["speedups"]) for f in forwards]
    modes = [mode for mode in MODES if any("eager" in of.get(mode, {}) for _, of in shown)]
    figure = Figure(figsize=(7.5, 1.2 + 0.8 * len(shown)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / max(1, len(modes))
    for index, mode in enumerate(modes):
        name, color = MODES[mode]
        points = [
            (row + (index - (len(modes) - 1) / 2) * height, of[mode]["eager"])
            for row, (_, of) in enumerate(shown)
            if "eager" in of.get(mode, {})
        ]
        places, speedups = zip(*points, strict=True)
        bars = axes.barh(places, speedups, height, color=color, label=name)
        axes.bar_label(bars, fmt="%.2f×", padding=3)
    axes.axvline(1, color="#202124", linewidth=0.9, linestyle="--")
    names = [f"{f['model']}\n{f['size'].replace('x', '×')}" for f in forwards]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.margins(x=0.12)
    axes.set_xlabel(
        f"forwards back to back, {targets.MODEL_WEIGHTS} weights: times as fast as eager"
    )
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return _svg(figure)


# Each plot, the results that it needs, and those that it draws where they are there.
PLOTS: dict[str, tuple[Callable[[dict[str, dict]], str], tuple[str, ...], tuple[str, ...]]] = {
    "bandwidth": (bandwidth, tuple(FAMILIES), ()),
    "models": (models, ("models",), ()),
    "all_models": (all_models, ("models",), tuple(targets.TITLES)),
    "cuda_graphs": (cuda_graphs, ("cuda_graphs",), ()),
}


def render(results: Path) -> dict[str, str]:
    """File name -> SVG, of the plots whose results are all there."""
    plots = {}
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
        for name, (draw, needed, wanted) in PLOTS.items():
            loaded = {
                need: targets.GATHERED.get(need, functools.partial(history.shown, need))(results)
                for need in (*needed, *wanted)
            }
            measured = {need: result for need, result in loaded.items() if result is not None}
            if measured.keys() >= set(needed):
                plots[f"{name}.svg"] = draw(measured)
    return plots
