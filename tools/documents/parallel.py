"""Context parallelism: forwards on several GPUs, and those of one modelled rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.harness import history

from .common import (
    figure,
    markdown,
    milliseconds,
    setup,
    size_name,
    span,
    table,
    there,
    times,
)

GPUS, MODELLED = "parallel", "parallel/modelled"
Cells = Callable[[dict, dict | None, dict | None], list[str]]


def gathered(results: Path, name: str) -> dict | None:
    """The newest entries of each model, size and number of GPUs."""

    def key(entry: dict) -> tuple:
        changed = tuple(entry["changed_inputs"])
        return entry["model"], entry["size"], changed, tuple(entry["degrees"])

    return history.gathered(name, "parallel", key, results)


def label(entry: dict) -> str:
    """The model, how many of its blocks were measured, and the input."""
    kept, published = (
        " + ".join(map(str, entry[key].values())) for key in ("blocks", "published_blocks")
    )
    blocks = "" if kept == published else f", {kept} of {published} blocks"
    return f"{entry['model']}{blocks}, {size_name(entry['size'])}"


def split_of(mode: str) -> str:
    """A mode without eager or injected: "" on one GPU, otherwise as in "ring2+ulysses2"."""
    return mode.partition("+")[2]


def split_name(split: str) -> str:
    parts = re.findall(r"([a-z]+)(\d+)", split)
    return " × ".join(f"{name.replace('u', 'U', 1)} {degree}" for name, degree in parts)


def pairs(entry: dict) -> Iterator[tuple[str, dict | None, dict | None]]:
    """Each way to split the tokens, with the eager and the injected mode; None where one was not measured."""
    # A run that was cut short has modes without times.
    timed = {mode: measured for mode, measured in entry["modes"].items() if "ms" in measured}
    for split in dict.fromkeys(map(split_of, timed)):
        eager, injected = ("+".join(filter(None, (kind, split))) for kind in ("eager", "injected"))
        yield split, timed.get(eager), timed.get(injected)


def rows_of(entries: list[dict], cells: Cells) -> list[list[str]]:
    return [
        [label(entry), split_name(split) or "one GPU", *cells(entry, eager, injected)]
        for entry in entries
        for split, eager, injected in pairs(entry)
    ]


def own_times(eager: dict | None, injected: dict | None) -> list[str]:
    """Both times, and the injected one over the eager one of as many GPUs."""
    return [
        *(milliseconds(mode["ms"]["median"] if mode else None) for mode in (eager, injected)),
        times(injected.get("over_eager") if injected else None),
    ]


def speedup(injected: dict | None) -> str:
    """Over the injected model on one GPU, and its share of the number of GPUs."""
    if not injected or "speedup" not in injected:
        return ""
    return f"{injected['speedup']:.2f}× ({injected['of_linear']:.0%})"


def rendered(results: Path, name: str, headers: list[str], cells: Cells) -> str:
    measured = there(gathered(results, name), name)
    rows = rows_of(measured["parallel"], cells)
    return markdown(rows, ["model and input", "GPUs", *headers]) + setup(*measured["runs"])


@table
def parallel(results: Path) -> str:
    """Forwards on the GPUs of one machine."""

    def cells(entry: dict, eager: dict | None, injected: dict | None) -> list[str]:
        distances = [
            f"{mode['distance_from_one_gpu']:.5f}"
            if mode and "distance_from_one_gpu" in mode
            else ""
            for mode in (eager, injected)
        ]
        return [*own_times(eager, injected), speedup(injected), *distances]

    headers = ["eager", "injected", "over eager", "over one GPU"]
    headers += ["distance from one GPU: eager", "injected"]
    return rendered(results, GPUS, headers, cells)


@table
def parallel_modelled(results: Path) -> str:
    """One rank's own time, and with the time of the bytes that it would send."""

    def cells(entry: dict, eager: dict | None, injected: dict | None) -> list[str]:
        sent = (injected or {}).get("sent_bytes")
        return [
            *own_times(eager, injected),
            "" if sent is None else f"{sent / 1e9:.2f} GB",
            milliseconds((injected or {}).get("whole_ms")),
            speedup(injected),
        ]

    headers = ["own time: eager", "injected", "over eager", "sent, injected"]
    headers += ["modelled time, injected", "over one GPU"]
    return rendered(results, MODELLED, headers, cells)


@figure
def parallel_over_one_gpu(results: Path) -> str:
    """How many times as fast the injected models are on four GPUs, by Ulysses, as on one."""
    measured = gathered(results, GPUS) or {"parallel": []}
    modes = [entry["modes"].get("injected+ulysses4", {}) for entry in measured["parallel"]]
    return span([mode["speedup"] for mode in modes if "speedup" in mode])
