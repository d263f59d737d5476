"""Forwards that are replayed from CUDA graphs, and the memory that graphs hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import targets

from .common import (
    MODE_NAMES,
    figure,
    is_measured,
    load,
    markdown,
    setup,
    size_name,
    table,
    times,
    unmeasured,
)

NAME, MEMORY = "cuda_graphs", "cuda_graphs_memory"
MIB = 2**20


def of_input(gathered: dict, kind: str) -> list[dict]:
    return [forward for forward in gathered["graph_forwards"] if forward["input"] == kind]


def label(forward: dict) -> str:
    return f"{forward['model']}, {size_name(forward['size'])}"


def milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} ms"


def median(measured: dict, key: str) -> float | None:
    return measured[key]["median"] if key in measured else None


def mebibytes(memory: dict, key: str) -> str:
    return f"{memory[key] / MIB:.0f} MiB" if key in memory else ""


def where(gathered: dict) -> str:
    processors = sorted({run["processor"] for run in gathered["runs"]})
    return f"{setup(*gathered['runs'])}, on {' and '.join(processors)}"


def over(of_weights: dict, mode: str, others: Sequence[str]) -> list[str]:
    return [times(of_weights["speedups"][mode].get(other)) for other in others]


@table
def cuda_graphs(results: Path) -> str:
    """One forward at a published size in each mode, amid others back to back, and the host's time for it."""
    gathered = targets.gathered_forwards(results)
    if gathered is None:
        return unmeasured(NAME)
    others = ("eager", "compiled-regional", targets.REDUCE_OVERHEAD)
    rows = [
        [
            label(forward),
            weights,
            MODE_NAMES[mode],
            milliseconds(median(measured, "wall_ms")),
            *over(of_weights, mode, others),
            milliseconds(measured.get("busy_ms")),
            *(times(measured.get(key)) for key in ("wall_over_busy", "wall_over_covered")),
            milliseconds(median(measured, "host_ms")),
            times(of_weights["host_over_eager"].get(mode)),
        ]
        for forward in of_input(gathered, "published")
        for weights, of_weights in forward["weights"].items()
        for mode, measured in of_weights["modes"].items()
    ]
    headers = ["one forward", "weights", "mode", "time", "against eager", "block by block"]
    headers += ["reduce-overhead", "its kernels", "time over its kernels'"]
    headers += ["over the time with a kernel", "host time", "of eager's"]
    return markdown(rows, headers) + where(gathered)


@table
def cuda_graphs_small(results: Path) -> str:
    """Forwards of few tokens, where the host decides; one row a model."""
    gathered = targets.gathered_forwards(results)
    if gathered is None:
        return unmeasured(NAME)
    modes = ("eager", "injected", targets.GRAPHS)
    rows = []
    for forward in of_input(gathered, "small"):
        measured = targets.of_weights(forward)["modes"]
        graphs = measured.get(targets.GRAPHS, {})
        rows.append(
            [
                f"{label(forward)}: {forward['batch']}×({forward['tokens']} + {forward['text_tokens']})",
                *(milliseconds(median(measured.get(mode, {}), "wall_ms")) for mode in modes),
                *(milliseconds(median(measured.get(mode, {}), "host_ms")) for mode in modes),
                milliseconds(graphs.get("busy_ms")),
                *(times(graphs.get(key)) for key in ("wall_over_busy", "wall_over_covered")),
            ]
        )
    headers = ["one forward, tokens", "eager", "injected", "with graphs"]
    headers += ["host time: eager", "injected", "with graphs", "its kernels"]
    headers += ["time over its kernels'", "over the time with a kernel"]
    return markdown(rows, headers) + where(gathered)


@table
def cuda_graphs_first_calls(results: Path) -> str:
    """What capturing takes, in time and in memory."""
    gathered = targets.gathered_forwards(results)
    if gathered is None:
        return unmeasured(NAME)
    rows = []
    for forward in gathered["graph_forwards"]:
        if targets.GRAPHS not in forward["first_calls"]:
            continue
        graphs = forward["first_calls"][targets.GRAPHS]
        plain = forward["first_calls"].get("injected", {"memory": {}})
        rows.append(
            [
                label(forward),
                *(
                    milliseconds(median(graphs, key))
                    for key in ("first_call_ms", "capturing_call_ms")
                ),
                times(graphs.get("capturing_over_plain")),
                *(
                    mebibytes(of["memory"], key)
                    for key in ("allocated", "reserved", "peak_reserved")
                    for of in (plain, graphs)
                ),
            ]
        )
    headers = ["one forward", "first call", "capturing call", "over a plain one"]
    for name in ("allocated", "reserved", "most reserved"):
        headers += [f"{name}: injected", "with graphs"]
    return markdown(rows, headers) + where(gathered)


@table
def cuda_graphs_memory(results: Path) -> str:
    """Memory reserved over calls of many shapes, above weights and inputs."""
    if not is_measured(results, MEMORY):
        return unmeasured(MEMORY)
    result = load(results, MEMORY)
    rows = [
        [
            MODE_NAMES[mode],
            *(mebibytes(result[key], name) for name in ("peak_first", "peak", "end")),
        ]
        for mode, key in (("injected", "without"), (targets.GRAPHS, "with"))
    ]
    headers = ["mode", f"most in the first {result['first_calls']} calls"]
    headers += [f"most in {result['number_of_calls']} calls", "after them"]
    text = (
        f"\n\n{result['model']}, {len(result['shapes'])} shapes, at most {result['limit']} graphs: "
        f"{result['graphs']['captured']} were captured. One of the largest shape takes "
        f"{mebibytes(result, 'largest_graph')}; {mebibytes(result, 'explained')} are explained by the limit."
    )
    return markdown(rows, headers) + text + setup(result)


@table
def summary_graphs(results: Path) -> str:
    """The forwards of published sizes with CUDA graphs beside the other modes, with peaked weights."""
    gathered = targets.gathered_forwards(results)
    if gathered is None:
        return unmeasured(NAME)
    modes = ("eager", "compiled-regional", targets.REDUCE_OVERHEAD, "injected", targets.GRAPHS)
    rows = []
    for forward in of_input(gathered, "published"):
        measured = targets.of_weights(forward)["modes"]
        ratios = [targets.over_mode(forward, other) for other in ("eager", targets.REDUCE_OVERHEAD)]
        rows.append(
            [
                label(forward),
                *(milliseconds(median(measured.get(mode, {}), "wall_ms")) for mode in modes),
                *(times(ratio) for ratio in ratios),
            ]
        )
    headers = ["one forward", "eager", "torch.compile by blocks", "reduce-overhead", "injected"]
    headers += ["with CUDA graphs", "against eager", "against reduce-overhead"]
    return markdown(rows, headers) + where(gathered)


def span(results: Path, values: Sequence[float | None]) -> str:
    """The least and the most of the figures that there are."""
    known = [value for value in values if value is not None]
    if not known:
        raise click.ClickException(
            f"{results / NAME} has no such figure: benchmarks/bench_{NAME}.py measures it."
        )
    return " to ".join(dict.fromkeys(f"{value:.2f}" for value in (min(known), max(known))))


@figure
def graphs_over_eager(results: Path) -> str:
    """How many times as fast as eager forwards of published sizes are with graphs."""
    gathered = targets.gathered_forwards(results) or {"graph_forwards": []}
    published = of_input(gathered, "published")
    return span(results, [targets.over_mode(forward, "eager") for forward in published])


@figure
def graphs_wall_over_busy(results: Path) -> str:
    """The time of a forward with graphs over that of its kernels, of all models and sizes."""
    gathered = targets.gathered_forwards(results) or {"graph_forwards": []}
    modes = [targets.of_weights(forward)["modes"] for forward in gathered["graph_forwards"]]
    return span(results, [of.get(targets.GRAPHS, {}).get("wall_over_busy") for of in modes])
