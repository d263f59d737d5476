"""Whole pipelines, and forwards replayed from CUDA graphs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
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

FP8 = models.PRECISION_FP8
COMPILED = (models.REGIONAL, models.FA3)
GRAPH_COLUMNS = {
    "eager": "eager",
    models.REGIONAL: "torch.compile by blocks",
    models.REDUCE_OVERHEAD: "reduce-overhead",
    "injected": "injected",
    models.GRAPHS: "with CUDA graphs",
}


def label(entry: dict) -> str:
    of_published = f" of {entry['published_steps']}" * (entry["steps"] < entry["published_steps"])
    return f"{entry['title']}, {size_name(entry['size'])}, {entry['steps']}{of_published} steps"


def seconds(entry: dict, mode: str) -> float | None:
    return entry["modes"][mode]["seconds"]["median"] if mode in entry["modes"] else None


def best_compiled(entry: dict, modes: Sequence[str] = COMPILED) -> float | None:
    """Times as fast as the faster of what was compiled in these modes."""
    measured = [chosen.over(entry, mode) for mode in modes]
    return min((over for over in measured if over), default=None)


def run_of(results: Path, mode: str = models.REGIONAL) -> dict:
    return there(chosen.pipelines_run(results, mode), "pipelines")


def gibibytes(measured: dict | None, key: str = "memory_bytes") -> str:
    memory = measured and measured.get(key)
    return number(memory / 2**30 if memory else None, "GiB", 1)


@table
def summary_pipelines(results: Path) -> str:
    """Seconds for a picture or a video. With FlashAttention-3 eager has a row of its own."""
    run = run_of(results)
    rows = []
    for entry in run["pipelines"]:
        if entry["name"].endswith("_lora"):
            continue  # lora.py has a table of adapters
        if models.EAGER_FA3 in entry["modes"]:
            with_fa3 = f"{entry['title']}, with FA3 in eager"
            rows.append(summary_row(label(entry), entry, "eager", models.REGIONAL, None))
            rows.append(summary_row(with_fa3, entry, models.EAGER_FA3, None, models.FA3))
        else:
            rows.append(summary_row(label(entry), entry, "eager", *COMPILED))
    headers = ["pipeline", "eager", "compiled", "compiled, FA3", "injected", "in FP8"]
    headers += ["over eager, over compiled", "memory / in FP8"]
    return markdown(rows, headers) + setup(*run["runs"])


def summary_row(title: str, entry: dict, eager: str, *compiled: str | None) -> list[str]:
    """The injected pipeline beside these modes; None for an empty cell."""
    injected, fp8 = entry["modes"]["injected"], entry["modes"].get(FP8)
    modes = (eager, *compiled, "injected", FP8)
    times_s = [number(seconds(entry, mode) if mode else None, "s", 2) for mode in modes]
    if entry["steps"] < entry["published_steps"]:
        loop = injected["seconds"]["median"] - injected["decoder_s"]
        times_s[-2] += f", {loop / entry['steps']:.2f} a step"
    over = chosen.over(entry, eager), best_compiled(entry, list(filter(None, compiled)))
    memory = filter(None, map(gibibytes, (injected, fp8)))
    return [title, *times_s, ", ".join(map(times, over)), " / ".join(memory)]


@table
def pipelines(results: Path) -> str:
    """Each mode of each pipeline: time, energy, clock and memory."""
    run = run_of(results)
    rows = []
    for entry in run["pipelines"]:
        rows.append([f"**{label(entry)}**"])
        for mode, measured in entry["modes"].items():
            card = [number(measured.get("watts"), "W"), number(measured.get("sm_mhz"), "MHz")]
            if measured.get("power_cap") is not None:
                card.append(f"{measured['power_cap']:.0%}")
            rows.append(
                [
                    MODE_NAMES[mode],
                    f"{seconds(entry, mode):.2f} s",
                    f"{range_of(measured):.1%}",
                    f"{measured['decoder_s']:.3f} s",
                    times(entry["speedups"][mode].get("eager")),
                    number(measured.get("joules"), "J"),
                    ", ".join(card),
                    gibibytes(measured),
                ]
            )
    headers = ["mode", "time", "range", "decoder", "over eager", "energy"]
    headers += ["power, clock, at power limit", "memory"]
    return markdown(rows, headers) + setup(*run["runs"])


def range_of(measured: dict) -> float:
    """From the shortest to the longest call, over the median."""
    seconds = measured["seconds"]
    return (seconds["max"] - seconds["min"]) / seconds["median"]


def entries(results: Path) -> list[dict]:
    return (chosen.pipelines_run(results) or {"pipelines": []})["pipelines"]


def waits_for_host(measured: dict) -> bool:
    """Whether the card was seldom at its power limit. The host then sets the time."""
    return (measured.get("power_cap") or 0) < 0.5


def usual(results: Path) -> list[dict]:
    """The pipelines that the GPU times, without a dense mask in the default attention or an adapter."""
    return [
        entry
        for entry in entries(results)
        if models.EAGER_FA3 not in entry["modes"]
        and not entry["name"].endswith("_lora")
        and not waits_for_host(entry["modes"]["injected"])
    ]


@figure
def pipelines_named(results: Path) -> str:
    """Of the pipelines whose ranges are stated."""
    suffixes = re.compile(r"(-dev|-Turbo| \d+B| Large| with .*|,.*)$")
    names = list(dict.fromkeys(suffixes.sub("", entry["title"]) for entry in usual(results)))
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


@figure
def pipelines_over_eager(results: Path) -> str:
    return span([chosen.over(entry, "eager") for entry in usual(results)])


@figure
def pipelines_over_compiled(results: Path) -> str:
    """Over the faster of torch.compile with and without FlashAttention-3."""
    return span([best_compiled(entry) for entry in usual(results)])


@figure
def fp8_over_eager(results: Path) -> str:
    return span([chosen.over(entry, "eager", FP8) for entry in usual(results)])


def hunyuan_over(results: Path, *baselines: str) -> str:
    """HunyuanVideo 1.5 over each of these modes."""
    entry = next((e for e in entries(results) if e["name"] == "hunyuan_video15"), None)
    over = [chosen.over(entry, baseline) if entry else None for baseline in baselines]
    return " and ".join(NOT_MEASURED if value is None else f"{value:.2f}" for value in over)


@figure
def hunyuan_over_eager(results: Path) -> str:
    """With the default attention, whose mask is dense, and with FlashAttention-3."""
    return hunyuan_over(results, "eager", models.EAGER_FA3)


@figure
def hunyuan_over_compiled(results: Path) -> str:
    return hunyuan_over(results, *COMPILED)


@figure
def pipelines_rounds(results: Path) -> str:
    return span([entry["rounds"] for entry in entries(results)], 0)


def largest_range(entries: Iterable[dict]) -> str:
    """Of the calls of a mode, in percent of their median."""
    measured = [mode for entry in entries for mode in entry["modes"].values()]
    return f"{math.ceil(100 * max(map(range_of, measured)))}%" if measured else NOT_MEASURED


@figure
def sdxl_range(results: Path) -> str:
    return largest_range(entry for entry in entries(results) if entry["name"] == "sdxl")


@figure
def injected_range(results: Path) -> str:
    """Of the injected calls of the pipelines whose ranges are stated."""
    return largest_range({"modes": {"": entry["modes"]["injected"]}} for entry in usual(results))


@figure
def pipelines_range(results: Path) -> str:
    return largest_range(usual(results))


@figure
def pipelines_card(results: Path) -> str:
    """The card of the table of pipelines."""
    run = chosen.pipelines_run(results)
    return run["runs"][0]["environment"]["device"] if run else NOT_MEASURED


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
