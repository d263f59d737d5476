"""The plots of benchmarks/plots, from the JSON in benchmarks/results.

The same JSON gives the same files, byte for byte. tools/render_docs.py writes them. They have no background,
and colors that can be seen on white and on GitHub's dark pages.
"""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from documents import chosen
from documents.common import card, size_name

# Found where documents/__init__.py looks.
from benchmarks.operations import attention_statistics  # isort: skip
from benchmarks.harness import history  # isort: skip

INK = "#797979"  # of text, axes and grid: as far from white as from GitHub's #0d1117
FAMILIES = {
    "norm": "norms",
    "gated_residual": "gated residuals",
    "rope": "rotary embeddings",
    "activation": "activations",
    "softmax": "softmax",
}
# One meaning a color in all plots. This package is blue; FlashAttention-3 and other attention are purple.
BLUE, CYAN, ORANGE, BROWN = "#1a73e8", "#1b9aaa", "#e8710a", "#a0522d"
PURPLE, PINK, GREEN, OLIVE = "#a142f4", "#d1548c", "#188038", "#7a9a01"
GRAY, DARK, RED = "#8b949e", "#6e7781", "#c9184a"
# What is drawn, from the back to the front: name, color, marker, size.
SERIES = {
    "eager": ("eager", GRAY, "s", 14),
    "compiled": ("torch.compile", ORANGE, "^", 16),
    "liger": ("Liger", RED, "v", 16),
    "quack": ("QuACK", PINK, "D", 12),
    "ours": ("this package", BLUE, "o", 20),
}
MODES = {
    "eager+fa3": ("eager with FlashAttention-3", PURPLE),
    "compiled": ("torch.compile", ORANGE),
    "compiled-regional": ("torch.compile, block by block", ORANGE),
    "compiled-reduce-overhead": ("torch.compile, reduce-overhead", BROWN),
    "compiled-regional+fa3": ("torch.compile with FlashAttention-3", "#c77dff"),
    "injected": ("injected", BLUE),
    "injected+graphs": ("injected with CUDA graphs", CYAN),
    "injected+precision-fp8": ("injected, in FP8", OLIVE),
}
TIMELINES = {
    "eager": "eager",
    "compiled-regional": "torch.compile",
    "injected": "injected",
}
KERNEL_CLASSES = {
    "matrix_products": ("matrix products", DARK),
    "attention": ("attention", PURPLE),
    "ours": ("this package's row kernels", BLUE),
    "others": ("other kernels", "#d4a72c"),
}
ATTENTIONS = {"self": (PURPLE, "o", -0.1), "cross": (GREEN, "^", 0.1)}  # beside each other
MEGABYTE = 1e6
WIDTH = 25 / 3  # inches: 800 pixels
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "font.size": 9,
    "grid.color": INK,
    "grid.linewidth": 0.2,
    "legend.frameon": False,
    "savefig.transparent": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "h100-diffusers-kernels",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"
    # matplotlib names clip paths by a hash of coordinates, whose last bits differ between processors.
    for number, name in enumerate(dict.fromkeys(re.findall(r'<clipPath id="(\w+)"', text))):
        text = text.replace(name, f"clip{number}")
    return text


def bandwidth(results: Path) -> Figure | None:
    """Rate against bytes moved, one panel a family, with the large copy's rate as a line."""
    loaded = {family: history.shown(f"operations/{family}", results) for family in FAMILIES}
    if not all(loaded.values()):
        return None
    figure = Figure(figsize=(11, 6), layout="constrained")
    panels = figure.subplots(2, 3, sharey=True)
    for axes, (family, title) in zip(panels.flat, FAMILIES.items(), strict=False):
        result = loaded[family]
        assert result is not None
        entries = result["workloads"]
        sizes = [entry["bytes"] / MEGABYTE for entry in entries]
        for name, (label, color, marker, size) in SERIES.items():
            points = [
                (megabytes, entry["cold"]["terabytes_per_second"][name])
                for megabytes, entry in zip(sizes, entries, strict=True)
                if name in entry["cold"]["terabytes_per_second"]
                and not chosen.is_broken(entry["cold"], name)
            ]
            if points:
                x, y = zip(*points, strict=True)
                axes.scatter(x, y, s=size, c=color, marker=marker, label=label)
        copy = statistics.median(e["cold"]["terabytes_per_second"]["large_copy"] for e in entries)
        axes.axhline(copy, color=INK, linewidth=0.9, linestyle="--", label="copy of 1 GiB")
        axes.set_title(f"{title}, {card(result)}")
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
    legend.legend(handles.values(), handles.keys(), loc="center")
    return figure


def _is_within(value: float, values: list[float]) -> bool:
    return min(values) / 2 <= value <= max(values) * 2


def _bars(rows: Sequence[tuple[str, dict[str, float]]], modes: Sequence[str], what: str) -> Figure:
    """Horizontal bars, a group a row: speedups over eager by mode. A row without any is a heading."""
    height = 0.8 / max(1, len(modes))
    figure = Figure(
        figsize=(WIDTH, 0.9 + 0.15 * len(rows) * max(2, len(modes))), layout="constrained"
    )
    axes = figure.subplots()
    for index, mode in enumerate(modes):
        label, color = MODES[mode]
        points = [
            (row + (index - (len(modes) - 1) / 2) * height, speedups[mode])
            for row, (_, speedups) in enumerate(rows)
            if mode in speedups
        ]
        if points:
            places, values = zip(*points, strict=True)
            bars = axes.barh(places, values, height, color=color, label=label)
            axes.bar_label(bars, fmt="%.2f×", padding=3, fontsize=8)
    axes.axvline(1, color=INK, linewidth=0.9, linestyle="--")
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    for text, (_, speedups) in zip(axes.get_yticklabels(), rows, strict=True):
        text.set_fontweight("normal" if speedups else "bold")
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(False)  # each bar has its figure
    axes.margins(x=0.1)
    axes.set_xlabel(f"times as fast as eager: {what}")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def models(results: Path) -> Figure | None:
    """Speedup over eager of torch.compile and of the injected model: the table of all models."""
    measured = chosen.of_all_builds(results)
    if not measured:
        return None
    rows: list[tuple[str, dict[str, float]]] = []
    for name, title in chosen.TITLES.items():
        for forward in chosen.forwards(measured.get(name)):
            if forward.eager and forward.over_eager:
                speedups = {"injected": forward.over_eager}
                if forward.compiled:
                    speedups["compiled"] = forward.eager / forward.compiled
                rows.append((f"{title}, {size_name(forward.size)}", speedups))
    device = next(iter(measured.values()))["environment"]["device"]
    return _bars(rows, ("compiled", "injected"), f"one forward on an {device}")


def pipelines(results: Path) -> Figure | None:
    """Speedup over eager of whole pipelines, in bfloat16 and in FP8."""
    run = chosen.pipelines_run(results)
    if run is None:
        return None
    rows = [
        (
            f"{entry['title']}, {size_name(entry['size'])}",
            {mode: over["eager"] for mode, over in entry["speedups"].items() if "eager" in over},
        )
        for entry in run["pipelines"]
    ]
    modes = [mode for mode in MODES if any(mode in speedups for _, speedups in rows)]
    return _bars(rows, modes, f"whole pipelines on an {run['runs'][0]['environment']['device']}")


def cuda_graphs(results: Path) -> Figure | None:
    """Speedup over eager of forwards back to back, a group of bars a forward of a published size."""
    gathered = chosen.gathered_forwards(results)
    if gathered is None:
        return None
    forwards = [f for f in gathered["graph_forwards"] if f["input"] == "published"]
    rows = [
        (
            f"{chosen.TITLES[forward['name']]}, {size_name(forward['size'])}",
            {
                mode: over["eager"]
                for mode, over in chosen.of_weights(forward)["speedups"].items()
                if mode in MODES and "eager" in over
            },
        )
        for forward in forwards
    ]
    modes = [mode for mode in MODES if any(mode in speedups for _, speedups in rows)]
    device = gathered["runs"][0]["environment"]["device"]
    return _bars(rows, modes, f"forwards back to back on an {device}")


def block(results: Path) -> Figure | None:
    """The kernels of one block on the GPU, to scale, one line a mode."""
    result = history.shown("block_timeline", results)
    if result is None:
        return None
    modes = [mode for mode in TIMELINES if mode in result["modes"]]
    figure = Figure(figsize=(WIDTH, 0.9 + 0.42 * len(modes)), layout="constrained")
    axes = figure.subplots()
    for name, (label, color) in KERNEL_CLASSES.items():
        for row, mode in enumerate(modes):
            spans = [
                (kernel["start_us"], kernel["end_us"] - kernel["start_us"])
                for kernel in result["modes"][mode]
                if kernel["class"] == name
            ]
            axes.broken_barh(
                spans,
                (row - 0.32, 0.64),
                color=color,
                linewidth=0,
                label=label if row == 0 else None,
            )
    for row, mode in enumerate(modes):
        end = max(kernel["end_us"] for kernel in result["modes"][mode])
        axes.annotate(f"{end:.0f} µs", (end, row), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(modes)), [TIMELINES[mode] for mode in modes])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(modes) - 0.5, -0.5)
    axes.grid(False)  # a line would cross the figures
    axes.set_xlim(left=0)
    axes.margins(x=0.08)
    where = f"{result['model']}, {size_name(result['size'])}, {card(result)}"
    axes.set_xlabel(f"µs on the GPU, one block of {where}")
    figure.legend(loc="outside lower center", ncols=len(KERNEL_CLASSES))
    return figure


def trained_attention(results: Path) -> Figure | None:
    """A trained model's attention scores: a panel a statistic, a point a head."""
    result = history.shown("attention/trained", results)
    if result is None:
        return None
    panels = {
        "std": "standard deviation, nats",
        "above_mean": "largest less mean, nats",
        "largest_share": "weight of the largest key",
    }
    figure = Figure(figsize=(WIDTH, 2.6), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for kind, (color, marker, shift) in ATTENTIONS.items():
            heads = attention_statistics.means_over_steps(result, kind)
            layers = [layer + 1 + shift for layer, _ in heads]
            values = [means[name] for means in heads.values()]
            axes.scatter(layers, values, s=16, c=color, marker=marker, label=f"{kind}-attention")
        axes.set_title(title)
        axes.set_xticks(sorted({layer + 1 for layer, _ in heads}))
        axes.set_xlabel("layer")
        axes.set_ylim(bottom=0)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


# None where its results are not there.
PLOTS: dict[str, Callable[[Path], Figure | None]] = {
    "bandwidth": bandwidth,
    "pipelines": pipelines,
    "models": models,
    "cuda_graphs": cuda_graphs,
    "block": block,
    "trained_attention": trained_attention,
}


def render(results: Path) -> dict[str, str]:
    """File name -> SVG, of the plots whose results are all there."""
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
        figures = {name: draw(results) for name, draw in PLOTS.items()}
        return {f"{name}.svg": _svg(figure) for name, figure in figures.items() if figure}
