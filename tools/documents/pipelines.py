"""Whole pipelines, and forwards replayed from CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks import models

from . import chosen
from .common import (
    MODE_NAMES,
    NOT_MEASURED,
    figure,
    load,
    markdown,
    milliseconds,
    number,
    setup,
    size_name,
    span,
    table,
    there,
    times,
)

# What the README calls the modes' columns.
COLUMNS = {
    "eager": "eager",
    models.REGIONAL: "torch.compile",
    "injected": "injected",
    models.GRAPHS: "with CUDA graphs",
}
GRAPH_COLUMNS = {
    "eager": "eager",
    models.REGIONAL: "torch.compile by blocks",
    models.REDUCE_OVERHEAD: "reduce-overhead",
    "injected": "injected",
    models.GRAPHS: "with CUDA graphs",
}


def label(entry: dict) -> str:
    return f"{entry['title']}, {size_name(entry['size'])}, {entry['steps']} steps"


@table
def summary_pipelines(results: Path) -> str:
    """Seconds for a picture or a video."""
    gathered = there(chosen.gathered_pipelines(results), "pipelines")
    rows = []
    for entry in gathered["pipelines"]:
        cells = [label(entry)]
        for mode in COLUMNS:
            measured = entry["modes"].get(mode)
            cells.append("" if measured is None else f"{measured['seconds']['median']:.2f} s")
        cells += [times(chosen.over(entry, other)) for other in ("eager", models.REGIONAL)]
        rows.append([*cells, times(chosen.ratio(entry, "joules", "eager"))])
    headers = ["pipeline", *COLUMNS.values(), "over eager", "over torch.compile", "energy"]
    return markdown(rows, headers) + setup(*gathered["runs"])


@table
def pipelines(results: Path) -> str:
    """Each mode of each pipeline: time, energy, clock and memory."""
    gathered = there(chosen.gathered_pipelines(results), "pipelines")
    rows = []
    for entry in gathered["pipelines"]:
        rows.append([f"**{label(entry)}**"])
        for mode, measured in entry["modes"].items():
            memory = measured["peak_bytes"] and (measured["peak_bytes"] + measured["held_bytes"])
            rows.append(
                [
                    MODE_NAMES[mode],
                    f"{measured['seconds']['median']:.2f} s",
                    f"{measured['decoder_s']:.3f} s",
                    times(entry["speedups"][mode].get("eager")),
                    number(measured.get("joules"), "J"),
                    number(measured.get("watts"), "W"),
                    number(measured.get("sm_mhz"), "MHz"),
                    number(memory and memory / 2**30, "GiB", 2),
                ]
            )
    headers = ["mode", "time", "decoder", "over eager", "energy", "power", "clock", "peak memory"]
    return markdown(rows, headers) + setup(*gathered["runs"])


def pipelines_over(results: Path, other: str) -> str:
    """Of the injected pipelines of the table, without CUDA graphs."""
    gathered = chosen.gathered_pipelines(results) or {"pipelines": []}
    return span([chosen.over(entry, other) for entry in gathered["pipelines"]])


@figure
def pipelines_over_eager(results: Path) -> str:
    return pipelines_over(results, "eager")


@figure
def pipelines_over_compiled(results: Path) -> str:
    return pipelines_over(results, models.REGIONAL)


@figure
def decoders_over_eager(results: Path) -> str:
    gathered = chosen.gathered_pipelines(results) or {"pipelines": []}
    return span([chosen.ratio(e, "decoder_s", "injected", "eager") for e in gathered["pipelines"]])


@figure
def pipelines_card(results: Path) -> str:
    """The card of the table of pipelines."""
    gathered = chosen.gathered_pipelines(results) or {"runs": []}
    return ", ".join({run["environment"]["device"] for run in gathered["runs"]}) or NOT_MEASURED


# -- CUDA graphs -------------------------------------------------------------------------------


def medians(measured: dict, modes: Sequence[str], key: str) -> list[str]:
    """A figure of each mode, or nothing where it was not measured."""
    return [
        milliseconds(measured[mode][key]["median"], 2) if mode in measured else "" for mode in modes
    ]


@table
def cuda_graphs(results: Path) -> str:
    """Forwards back to back with CUDA graphs beside the other modes, with peaked weights."""
    gathered = there(chosen.gathered_forwards(results), "cuda_graphs")
    rows = [
        [
            f"{forward['model']}, {size_name(forward['size'])}",
            *medians(chosen.of_weights(forward)["modes"], list(GRAPH_COLUMNS), "wall_ms"),
            *(times(chosen.graphs_over(forward, other)) for other in ("eager", "injected")),
        ]
        for forward in gathered["graph_forwards"]
    ]
    headers = ["one forward", *GRAPH_COLUMNS.values(), "over eager", "over injected"]
    processors = sorted({run["processor"] for run in gathered["runs"]})
    return markdown(rows, headers) + f"{setup(*gathered['runs'])}, on {' and '.join(processors)}"


@table
def cuda_graphs_memory(results: Path) -> str:
    """Memory reserved over calls of many shapes, above weights and inputs."""
    result = load(results, "cuda_graphs/memory")

    def mebibytes(value: float) -> str:
        return number(value / 2**20, "MiB")

    rows = [
        [MODE_NAMES[mode], *(mebibytes(result[key][n]) for n in ("peak_first", "peak", "end"))]
        for mode, key in (("injected", "without"), (models.GRAPHS, "with"))
    ]
    headers = ["mode", f"most in the first {result['first_calls']} calls"]
    headers += [f"most in {result['number_of_calls']} calls", "after them"]
    text = (
        f"\n\n{result['model']}, {len(result['shapes'])} shapes, at most {result['limit']} graphs: "
        f"{result['graphs']['captured']} were captured. One of the largest shape takes "
        f"{mebibytes(result['largest_graph'])}; {mebibytes(result['explained'])} are explained by "
        "the limit."
    )
    return markdown(rows, headers) + text + setup(result)


def graphs_over(results: Path, kind: str, other: str) -> str:
    """How many times as fast forwards on this kind of input are with graphs."""
    gathered = chosen.gathered_forwards(results) or {"graph_forwards": []}
    forwards = [forward for forward in gathered["graph_forwards"] if forward["input"] == kind]
    return span([chosen.graphs_over(forward, other) for forward in forwards])


@figure
def graphs_over_eager(results: Path) -> str:
    return graphs_over(results, "published", "eager")


@figure
def graphs_over_injected(results: Path) -> str:
    return graphs_over(results, "published", "injected")


@figure
def small_graphs_over_injected(results: Path) -> str:
    return graphs_over(results, "small", "injected")
