"""Whole calls of few steps, from the prompt to the frames."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

from benchmarks import models
from benchmarks.harness import history

from . import chosen
from .common import (
    MODE_NAMES,
    NOT_MEASURED,
    card,
    figure,
    markdown,
    number,
    setup,
    size_name,
    table,
    times,
)
from .pipelines import FP8, gibibytes, range_of, seconds

COMPILED = models.REGIONAL_AND_DECODER
OURS = ("injected", models.GRAPHS)
PARTS = {"text": "text_s", "denoise": "denoise_s", "decode": "decoder_s", "rest": "rest_s"}


def gathered(results: Path) -> dict:
    """The newest entry of each pipeline, pictures before videos, and their runs."""
    found = history.gathered("few_steps", "pipelines", lambda entry: entry["name"], results)
    if found is None:
        return {"pipelines": [], "runs": []}
    found["pipelines"].sort(key=lambda entry: (entry["size"].count("x"), entry["title"]))
    return found


def label(entry: dict) -> str:
    return f"{entry['title']}, {size_name(entry['size'])}, {entry['steps']} steps"


def faster(entry: dict) -> str | None:
    """The faster of the injected modes in the model's own dtype."""
    measured = {mode: seconds(entry, mode) or 0.0 for mode in OURS if mode in entry["modes"]}
    return min(measured, key=lambda mode: measured[mode], default=None)


def all_over(results: Path, other: str) -> list[float]:
    """The faster injected mode over another mode, of all pipelines."""
    entries = gathered(results)["pipelines"]
    over = [chosen.over(entry, other, faster(entry) or "") for entry in entries]
    return [ratio for ratio in over if ratio is not None]


@table
def few_steps(results: Path) -> str:
    """Each mode of each pipeline: the parts of a call, and memory. Without a result there is no table."""
    notes: list[str] = []

    def cells(entry: dict, mode: str, measured: dict) -> list[str]:
        if why_not := measured.get("decoder_not_compiled"):
            notes.append(f"{entry['title']}: {why_not}")
        return [
            *(f"{measured[part]:.3f} s" for part in PARTS.values()),
            f"{seconds(entry, mode):.2f} s",
            ratios(entry, mode),
            gibibytes(measured),
        ]

    headers = ["mode", *PARTS, "whole", "over eager, over compiled", "memory"]
    rendered = of_modes(results, headers, cells, notes)
    return rendered and f"{in_short(results)}\n\n{rendered}"


@table
def few_steps_calls(results: Path) -> str:
    """The first calls, the memory of decoding, and how far from eager the frames are."""

    def cells(entry: dict, mode: str, measured: dict) -> list[str]:
        return [
            number(measured["first_call_s"], "s", 1),
            number(measured["second_call_s"], "s", 1),
            f"{range_of(measured):.1%}",
            gibibytes(measured, "decoder_bytes"),
            number(measured.get("psnr_to_eager_db"), "dB", 1),
        ]

    headers = ["mode", "first call", "second call", "range", "decoding", "PSNR to eager"]
    return of_modes(results, headers, cells, [])


def of_modes(
    results: Path,
    headers: list[str],
    cells: Callable[[dict, str, dict], list[str]],
    notes: list[str],
) -> str:
    """A table with these cells of each mode of each pipeline. `notes` are read after the cells are made."""
    found = gathered(results)
    if not found["pipelines"]:
        return ""
    rows = []
    for entry in found["pipelines"]:
        rows.append([f"**{label(entry)}**"])
        for mode, measured in entry["modes"].items():
            mark = "\\*" if "decoder_not_compiled" in measured else ""
            rows.append([MODE_NAMES[mode] + mark, *cells(entry, mode, measured)])
        rows += [[f"{MODE_NAMES[mode]}: out of memory"] for mode in entry["does_not_fit"]]
    note = f"\n\n\\* The decoder is not compiled. {'; '.join(notes)}" if notes else ""
    return markdown(rows, headers) + note + setup(*found["runs"])


def ratios(entry: dict, mode: str | None) -> str:
    over = [chosen.over(entry, other, mode or "") for other in ("eager", COMPILED)]
    return ", ".join(filter(None, map(times, over)))


@table
def summary_few_steps(results: Path) -> str:
    """Whole calls in seconds. Without a result there is no table."""
    found = gathered(results)
    if not found["pipelines"]:
        return ""
    rows = []
    for entry in found["pipelines"]:
        modes = ("eager", COMPILED, *OURS, FP8)
        mode = faster(entry)
        parts = [entry["modes"][mode][part] for part in PARTS.values()] if mode else []
        rows.append(
            [
                label(entry),
                *(number(seconds(entry, mode), "s", 2) for mode in modes),
                ratios(entry, mode),
                " + ".join(f"{part:.2f}" for part in parts),
            ]
        )
    headers = ["whole call", "eager", "compiled", "injected", "CUDA graphs", "in FP8"]
    headers += ["over eager, over compiled", "text + denoise + decode + rest"]
    text = (
        f"Whole calls of few steps on one {card(found['runs'][-1])}, from the prompt to the frames, with "
        "text encoder and decoder, in bfloat16 with random weights. Compiled: the model's blocks and the "
        f"decoder. {in_short(results)} [All modes](docs/benchmarks/few_steps.md)."
    )
    return f"{text}\n\n{markdown(rows, headers)}{setup(*found['runs'])}"


def in_short(results: Path) -> str:
    least, mean = few_steps_least_over_compiled(results), few_steps_mean_over_compiled(results)
    return (
        "Ratios are those of the faster of injected and CUDA graphs: at least "
        f"{least} times as fast as compiled, {mean} times in the geometric mean."
    )


@figure
def few_steps_least_over_compiled(results: Path) -> str:
    ratios = all_over(results, COMPILED)
    return f"{min(ratios):.2f}" if ratios else NOT_MEASURED


@figure
def few_steps_mean_over_compiled(results: Path) -> str:
    """The geometric mean."""
    ratios = all_over(results, COMPILED)
    return f"{statistics.geometric_mean(ratios):.2f}" if ratios else NOT_MEASURED
