"""Decoders, and convolutions on the kernel."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness import history

from .common import (
    MODE_NAMES,
    NOT_MEASURED,
    figure,
    markdown,
    milliseconds,
    number,
    setup,
    span,
    table,
    times,
)
from .pipelines import gibibytes


def gathered(results: Path) -> dict | None:
    """The newest entry of each decoder, and their runs."""
    return history.gathered("decoders", "decoders", lambda entry: entry["name"], results)


@figure
def decoders_over_eager(results: Path) -> str:
    found = gathered(results)
    entries = found["decoders"] if found else []
    over = [entry["speedups"]["injected"].get("eager") for entry in entries]
    return span(over) if over else NOT_MEASURED


@table
def decoders(results: Path) -> str:
    """Each mode of each decoder. Without a result there is no table."""
    found = gathered(results)
    if not found:
        return ""
    rows = []
    for entry in found["decoders"]:
        rows.append([f"**{entry['title']}, {entry['frames']}**"])
        for mode, measured in entry["modes"].items():
            over = entry["speedups"][mode]
            ratios = (over.get(other) for other in ("eager", "compiled"))
            rows.append(
                [
                    MODE_NAMES[mode],
                    milliseconds(1e3 * measured["seconds"]["median"]),
                    f"{measured['seconds']['spread']:.1%}",
                    ", ".join(filter(None, map(times, ratios))),
                    number(measured["first_s"], "s", 2),
                    number(measured["second_s"], "s", 2),
                    gibibytes(measured, "call_bytes"),
                    f"{1e3 * measured['error']:.2f}",
                ]
            )
    headers = ["decoder", "time", "spread", "over eager, over compiled", "first call with set-up"]
    headers += ["second call", "memory", "error × 10³"]
    return markdown(rows, headers) + setup(*found["runs"])


@table
def conv3d(results: Path) -> str:
    """Convolutions beside PyTorch's. Without a result there is no table."""
    found = history.shown("conv3d", results)
    if found is None:
        return ""
    rows = []
    for entry in found["conv3d"]:
        measured = {mode: each["median"] for mode, each in entry["microseconds"].items()}
        ours = measured.pop("ours")
        rows.append(
            [
                f"{entry['title']}, {entry['border']}",
                "×".join(map(str, entry["shape"])) + f", {entry['out_channels']}",
                f"{ours:.0f} µs",
                f"{entry['operations'] / ours / 1e6:.0f} TFLOPS",
                *(times(time / ours) for time in measured.values()),
                f"{entry['errors']['ours'] / entry['errors']['eager']:.2f}×",
            ]
        )
    headers = ["layer, border", "C×T×H×W, N", "time", "rate", "over eager"]
    headers += ["over channels last", "over the product alone", "error over eager's"]
    return markdown(rows, headers) + setup(found)
