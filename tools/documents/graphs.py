"""Forwards that are replayed from CUDA graphs, and the memory that graphs hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import targets

from .common import (
    MODE_NAMES,
    figure,
    is_measured,
    load,
    markdown,
    milliseconds,
    setup,
    size_name,
    span,
    table,
    times,
    unmeasured,
)

NAME, MEMORY = "cuda_graphs", "cuda_graphs_memory"
MIB = 2**20


def label(forward: dict) -> str:
    return f"{forward['model']}, {size_name(forward['size'])}"


def medians(measured: dict, modes: Sequence[str], key: str) -> list[str]:
    """A figure of each mode, or nothing where it was not measured."""
    return [
        milliseconds(measured[mode][key]["median"], 2) if mode in measured else "" for mode in modes
    ]


def mebibytes(memory: dict, key: str) -> str:
    return f"{memory[key] / MIB:.0f} MiB" if key in memory else ""


def where(gathered: dict) -> str:
    processors = sorted({run["processor"] for run in gathered["runs"]})
    return f"{setup(*gathered['runs'])}, on {' and '.join(processors)}"


def forwards_in_modes(results: Path, kind: str, modes: Sequence[str]) -> str:
    """Forwards on this kind of input, back to back, with peaked weights."""
    gathered = targets.gathered_forwards(results)
    if gathered is None:
        return unmeasured(NAME)
    rows = [
        [
            label(forward),
            *medians(targets.of_weights(forward)["modes"], modes, "wall_ms"),
            *(times(targets.over_mode(forward, other)) for other in ("eager", "injected")),
        ]
        for forward in gathered["graph_forwards"]
        if forward["input"] == kind
    ]
    names = {**MODE_NAMES, "compiled-regional": "torch.compile by blocks"}
    names |= {targets.REDUCE_OVERHEAD: "reduce-overhead", targets.GRAPHS: "with CUDA graphs"}
    headers = ["one forward", *(names[mode] for mode in modes), "over eager", "over injected"]
    return markdown(rows, headers) + where(gathered)


@table
def cuda_graphs(results: Path) -> str:
    """Forwards of published sizes with CUDA graphs beside the other modes."""
    modes = ("eager", "compiled-regional", targets.REDUCE_OVERHEAD, "injected", targets.GRAPHS)
    return forwards_in_modes(results, "published", modes)


@table
def cuda_graphs_small(results: Path) -> str:
    """Forwards of few tokens, which the host limits without graphs."""
    return forwards_in_modes(results, "small", ("eager", "injected", targets.GRAPHS))


@table
def cuda_graphs_host(results: Path) -> str:
    """The host's time of each forward, and a replayed forward's time beside its kernels'."""
    gathered = targets.gathered_forwards(results)
    if gathered is None:
        return unmeasured(NAME)
    rows = []
    for forward in gathered["graph_forwards"]:
        measured = targets.of_weights(forward)["modes"]
        graphs = measured.get(targets.GRAPHS, {})
        rows.append(
            [
                label(forward),
                *medians(measured, ("eager", "injected", targets.GRAPHS), "host_ms"),
                *medians(measured, (targets.GRAPHS,), "wall_ms"),
                milliseconds(graphs.get("busy_ms"), 2),
                times(graphs.get("wall_over_busy")),
            ]
        )
    headers = ["one forward", "host time: eager", "injected", "with CUDA graphs"]
    headers += ["time with CUDA graphs", "its kernels' time", "ratio of the two"]
    return markdown(rows, headers) + where(gathered)


@table
def cuda_graphs_first_calls(results: Path) -> str:
    """The time and the memory that capturing takes."""
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
                    milliseconds(graphs[key]["median"] if key in graphs else None, 2)
                    for key in ("first_call_ms", "capturing_call_ms")
                ),
                times(graphs.get("capturing_over_plain")),
                *(mebibytes(of["memory"], "reserved") for of in (plain, graphs)),
            ]
        )
    headers = ["one forward", "first call", "capturing call", "over a plain one"]
    headers += ["memory: injected", "with CUDA graphs"]
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


def forwards(results: Path, kind: str) -> list[dict]:
    gathered = targets.gathered_forwards(results) or {"graph_forwards": []}
    return [forward for forward in gathered["graph_forwards"] if forward["input"] == kind]


@figure
def graphs_over_eager(results: Path) -> str:
    """How many times as fast as eager forwards of published sizes are with graphs: injection and graphs."""
    return span([targets.over_mode(f, "eager") for f in forwards(results, "published")])


@figure
def graphs_over_injected(results: Path) -> str:
    """How many times as fast forwards of published sizes are with graphs as injected without them."""
    return span([targets.over_mode(f, "injected") for f in forwards(results, "published")])


@figure
def small_graphs_over_injected(results: Path) -> str:
    """The same of forwards of few tokens."""
    return span([targets.over_mode(f, "injected") for f in forwards(results, "small")])
