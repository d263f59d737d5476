"""Whole pipelines, and the energy of single operations."""

from __future__ import annotations

from pathlib import Path

import models
import pipeline_targets as targets

from .common import (
    MODE_NAMES,
    NOT_MEASURED,
    figure,
    is_measured,
    load,
    markdown,
    setup,
    size_name,
    span,
    table,
    times,
    unmeasured,
)

# What the README calls the modes' columns.
COLUMNS = {
    "eager": "eager",
    models.REGIONAL: "torch.compile",
    "injected": "injected",
    models.GRAPHS: "with CUDA graphs",
}
PROVIDERS = {"fa3": "FlashAttention-3", "cudnn": "cuDNN"}


def seconds(entry: dict, mode: str) -> float | None:
    return entry["modes"][mode]["seconds"]["median"] if mode in entry["modes"] else None


def label(entry: dict) -> str:
    return f"{entry['title']}, {size_name(entry['size'])}, {entry['steps']} steps"


@table
def summary_pipelines(results: Path) -> str:
    """Seconds for a picture or a video, in the order of the targets."""
    gathered = targets.gathered(results)
    if gathered is None:
        return unmeasured("pipelines")
    measured = {entry["name"]: entry for entry in gathered["pipelines"]}
    rows = []
    for name, aims in targets.PIPELINES.items():
        entry = measured.get(name)
        if entry is None:
            rows.append([aims.title, NOT_MEASURED])
            continue
        cells = [label(entry)]
        for mode in COLUMNS:
            value = seconds(entry, mode)
            cells.append("" if value is None else f"{value:.2f} s")
        cells += [times(targets.over(entry, other)) for other in ("eager", models.REGIONAL)]
        rows.append([*cells, times(targets.ratio(entry, "joules", "eager"))])
    headers = ["pipeline", *COLUMNS.values(), "over eager", "over torch.compile", "energy"]
    return markdown(rows, headers) + setup(*gathered["runs"])


@table
def pipelines(results: Path) -> str:
    """Each mode of each pipeline: time, energy, clock and memory."""
    gathered = targets.gathered(results)
    if gathered is None:
        return unmeasured("pipelines")
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
                    _number(measured.get("joules"), "J"),
                    _number(measured.get("watts"), "W"),
                    _number(measured.get("sm_mhz"), "MHz"),
                    _number(memory and memory / 2**30, "GiB", 2),
                ]
            )
    headers = ["mode", "time", "decoder", "over eager", "energy", "power", "clock", "peak memory"]
    return markdown(rows, headers) + setup(*gathered["runs"])


def _number(value: float | None, unit: str, digits: int = 0) -> str:
    return "" if value is None else f"{value:.{digits}f} {unit}"


@table
def energy(results: Path) -> str:
    """Time and energy of single operations, each in a loop of its own."""
    if not is_measured(results, "energy"):
        return unmeasured("energy")
    result = load(results, "energy")
    rows = [
        [
            f"{entry['model']}: {entry['operation']}",
            entry["shape"].replace("x", "×"),
            PROVIDERS.get(entry["by"], entry["by"]),
            f"{entry['microseconds']:.0f} µs",
            _number(entry.get("millijoules"), "mJ", 1),
            _number(entry.get("watts"), "W"),
            _number(entry.get("sm_mhz"), "MHz"),
        ]
        for entry in result["loops"]
    ]
    headers = ["operation", "shape", "by", "time", "energy", "power", "clock"]
    return markdown(rows, headers) + setup(result)


def pipelines_over(results: Path, other: str) -> str:
    """Of the injected pipelines of the table, without CUDA graphs."""
    gathered = targets.gathered(results) or {"pipelines": []}
    return span([targets.over(entry, other) for entry in gathered["pipelines"]])


@figure
def pipelines_over_eager(results: Path) -> str:
    return pipelines_over(results, "eager")


@figure
def pipelines_over_compiled(results: Path) -> str:
    return pipelines_over(results, models.REGIONAL)


@figure
def decoders_over_eager(results: Path) -> str:
    gathered = targets.gathered(results) or {"pipelines": []}
    how = ("decoder_s", "injected", "eager")
    return span([targets.ratio(entry, *how) for entry in gathered["pipelines"]])


@figure
def pipelines_card(results: Path) -> str:
    """The card of the table of pipelines."""
    gathered = targets.gathered(results) or {"runs": []}
    return ", ".join({run["environment"]["device"] for run in gathered["runs"]}) or NOT_MEASURED
