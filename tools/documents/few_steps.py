"""Whole calls of few steps, from the prompt to the frames."""

from __future__ import annotations

import statistics
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
    span,
    table,
    times,
)
from .pipelines import FP8, gibibytes, seconds

COMPILED = f"{models.REGIONAL}+decoder"
OURS = ("injected", models.GRAPHS)
PARTS = {"text": "text_s", "denoise": "denoise_s", "decode": "decoder_s", "rest": "rest_s"}


def gathered(results: Path) -> dict:
    """The newest entry of each pipeline, and their runs."""
    found = history.gathered("few_steps", "pipelines", lambda entry: entry["name"], results)
    return found or {"pipelines": [], "runs": []}


def label(entry: dict) -> str:
    return f"{entry['title']}, {size_name(entry['size'])}, {entry['steps']} steps"


def faster(entry: dict) -> str | None:
    """The faster of the injected modes in the model's own dtype."""
    measured = [mode for mode in OURS if mode in entry["modes"]]
    return min(measured, key=lambda mode: seconds(entry, mode), default=None)


def over(entry: dict, other: str) -> float | None:
    """The faster injected mode over another mode."""
    return chosen.over(entry, other, faster(entry) or "")


def all_over(results: Path, other: str) -> list[float]:
    ratios = [over(entry, other) for entry in gathered(results)["pipelines"]]
    return [ratio for ratio in ratios if ratio is not None]


@table
def few_steps(results: Path) -> str:
    """Each mode of each pipeline: the parts of a call, and memory."""
    found = gathered(results)
    if not found["pipelines"]:
        return f"The pipelines are {NOT_MEASURED} yet."
    rows, not_compiled = [], []
    for entry in found["pipelines"]:
        rows.append([f"**{label(entry)}**"])
        for mode, measured in entry["modes"].items():
            why_not = measured.get("decoder_not_compiled")
            not_compiled += [f"{entry['title']}: {why_not}"] if why_not else []
            memory = [gibibytes(measured), _decoding(measured)]
            ratios = [times(chosen.over(entry, other, mode)) for other in ("eager", COMPILED)]
            first = [measured[name] for name in ("first_call_s", "second_call_s")]
            rows.append(
                [
                    MODE_NAMES[mode] + "\\*" * bool(why_not),
                    *(f"{measured[part]:.3f} s" for part in PARTS.values()),
                    f"{seconds(entry, mode):.2f} s",
                    *ratios,
                    " / ".join(filter(None, memory)),
                    " / ".join(number(value, "s", 1) for value in first),
                ]
            )
        rows += [[f"{MODE_NAMES[mode]}: no memory"] for mode in entry["does_not_fit"]]
    headers = ["mode", *PARTS, "whole", "over eager", "over compiled", "memory / decoding"]
    notes = f"\n\n\\* The decoder is not compiled. {'; '.join(not_compiled)}" if not_compiled else ""
    return markdown(rows, [*headers, "first / second call"]) + notes + setup(*found["runs"])


def _decoding(measured: dict) -> str:
    memory = measured.get("decoder_bytes")
    return number(memory / 2**30 if memory else None, "GiB", 1)


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
        ratios = [times(over(entry, other)) for other in ("eager", COMPILED)]
        rows.append(
            [
                label(entry),
                *(number(seconds(entry, mode), "s", 2) for mode in modes),
                ", ".join(filter(None, ratios)),
                " + ".join(f"{part:.2f}" for part in parts),
            ]
        )
    headers = ["whole call", "eager", "compiled", "injected", "CUDA graphs", "in FP8"]
    headers += ["over eager, over compiled", "text + denoise + decode + rest"]
    text = (
        f"Whole calls of few steps on one {card(found['runs'][-1])}, from the prompt to the frames, with the text "
        "encoder and the decoder. Compiled: blocks and decoder. The ratios and the parts are those of the faster of "
        "injected and CUDA graphs. [All modes](docs/benchmarks/few_steps.md)."
    )
    return f"{text}\n\n{markdown(rows, headers)}{setup(*found['runs'])}"


@figure
def few_steps_over_eager(results: Path) -> str:
    return span(all_over(results, "eager"))


@figure
def few_steps_over_compiled(results: Path) -> str:
    return span(all_over(results, COMPILED))


@figure
def few_steps_least_over_compiled(results: Path) -> str:
    ratios = all_over(results, COMPILED)
    return f"{min(ratios):.2f}" if ratios else NOT_MEASURED


@figure
def few_steps_mean_over_compiled(results: Path) -> str:
    """The geometric mean."""
    ratios = all_over(results, COMPILED)
    return f"{statistics.geometric_mean(ratios):.2f}" if ratios else NOT_MEASURED
