"""The operations beside their peers: times, rates, errors, and what is aimed at."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import history
import targets as targets_

from .common import (
    TABLES,
    elsewhere,
    footnote,
    is_measured,
    load,
    load_workloads,
    markdown,
    setup,
    table,
    times,
    unmeasured,
)

PEERS = ("eager", "compiled", "liger", "quack")
ATTENTION_PEERS = {"cudnn": "cuDNN", "flash": "Torch flash", "fa3": "FA3"}
SLOW_INPUTS = ("rising", "jump", "large range")  # of attention
TUNED_MODE = "max-autotune-no-cudagraphs"

BROKEN = (
    f"more than {targets_.BROKEN_OVER_EAGER} times slower than eager PyTorch: the library does not run there "
    "as it is meant to, and is not compared."
)


def over_peer(entry: dict, measured: dict, peer: str) -> str:
    """Times as fast as a peer, or that it failed or is broken; nothing where it has no such operation."""
    if targets_.is_broken(measured, peer):
        return "broken†"
    if peer in measured["over"]:
        is_tuned = peer == "compiled" and measured["compiled_mode"] == TUNED_MODE
        return times(measured["over"][peer]) + "*" * is_tuned
    return "failed" if any(name.split()[0] == peer for name in entry["failed"]) else ""


def operations(results: Path, family: str) -> str:
    """Each operation's time and rate, beside the large copy's rate and the peers' times."""
    if family in targets_.MEASURED_LATER and not is_measured(results, family):
        return unmeasured(family)
    workloads, loaded = load_workloads(results, family)
    rows = []
    for entry, mark in workloads:
        for cache in ("cold", "warm"):
            if cache not in entry:
                continue
            measured = entry[cache]
            rows.append(
                [
                    ", ".join(filter(None, [entry["operation"], entry["variant"]])) + mark,
                    "×".join(map(str, entry["shape"])) + (" (warm)" if cache == "warm" else ""),
                    f"{measured['microseconds']['ours']['median']:.1f} µs",
                    f"{measured['terabytes_per_second']['ours']:.2f} TB/s",
                    f"{measured['of_large_copy']:.0%}",
                    *(over_peer(entry, measured, name) for name in PEERS),
                ]
            )
    headers = ["operation", "shape", "time", "rate", "of a large copy's", "against eager"]
    headers += ["torch.compile", "Liger", "QuACK"]
    note = footnote(rows, f"in mode {TUNED_MODE}, the faster one here.")
    note += footnote(rows, BROKEN, "†")
    note += elsewhere(rows, loaded)
    versions = "; ".join(f"{name} {what}" for name, what in loaded[0]["peers"].items())
    return markdown(rows, headers) + note + setup(*loaded) + f". {versions}"


for name in targets_.FAMILIES:
    TABLES[name] = functools.partial(operations, family=name)


def attention_cell(entry: dict, kind: str, peer: str, value: float | None, digits: int) -> str:
    """A ratio, or why there is none."""
    if value is not None:
        return f"{value:.{digits}f}" + "×" * (digits == 2)
    if peer in entry["inputs"][kind]["failed"]:
        return "failed"
    return "takes no mask" if peer in entry["declined"] else "not there"


def attention_label(entry: dict) -> str:
    size = "×".join(map(str, entry["shape"]))
    return ", ".join(filter(None, [size, entry["variant"]]))


def worst_inputs(entry: dict, ratios: Callable[[dict], dict], choose: Callable) -> str | None:
    """The kind of typical inputs with the worst ratio over FA3, or where it is not there over cuDNN.

    None where fewer than two were compared.
    """
    typical = {kind: ratios(of_kind) for kind, of_kind in entry["inputs"].items()}
    for kind in targets_.EXTREMES:
        typical.pop(kind, None)
    for peer in ("fa3", "cudnn"):
        known = {kind: over[peer] for kind, over in typical.items() if peer in over}
        if len(known) > 1:
            return choose(known, key=known.get)
    return None


def shown_inputs(entry: dict, worst: str | None, extremes: tuple[str, ...]) -> dict[str, str]:
    """Kinds of inputs that a table shows of a shape, and how each is called there."""
    shown = dict.fromkeys([targets_.NORMAL, *filter(None, [worst]), *extremes])
    return {
        kind: f"{kind}, the worst" if kind == worst else kind
        for kind in shown
        if kind in entry["inputs"]
    }


@table
def attention(results: Path) -> str:
    """Attention's rate beside its peers' times, the ceilings, and a copy of its bytes."""
    if not is_measured(results, "attention"):
        return unmeasured("attention")
    result = load(results, "attention")
    rows = []
    for entry in result["workloads"]:
        worst = worst_inputs(entry, lambda of_kind: of_kind["cold"]["over"], min)
        for kind, title in shown_inputs(entry, worst, SLOW_INPUTS).items():
            measured = entry["inputs"][kind]["cold"]
            ours, copy = (measured["microseconds"][name]["median"] for name in ("ours", "copy"))
            rows.append(
                [
                    attention_label(entry),
                    title,
                    f"{ours:.1f} µs",
                    f"{measured['teraflops_per_second']['ours']:.0f} TFLOP/s",
                    *(
                        attention_cell(entry, kind, peer, measured["over"].get(peer), 2)
                        for peer in ATTENTION_PEERS
                    ),
                    *(
                        f"{measured['of_bounds'][bound]:.0%} of {allowed:.0f}"
                        if (allowed := measured["bounds_teraflops_per_second"].get(bound))
                        else ""
                        for bound in ("wgmma", "exp2")
                    ),
                    f"{measured['terabytes_per_second']['ours']:.2f} TB/s",
                    f"{copy:.1f} µs",
                ]
            )
    headers = ["(B, Sq, Sk, H, d)", "inputs", "time", "rate"]
    headers += [f"against {name}" for name in ATTENTION_PEERS.values()]
    headers += ["of wgmma's ceiling", "of exp2's", "bytes moved", "a copy of them"]
    versions = "; ".join(
        f"{ATTENTION_PEERS[name]} {what}" for name, what in result["peers"].items()
    )
    ceilings = result["ceilings"]
    if "left_out" in ceilings:
        note = f"no ceilings: {ceilings['left_out']}"
    else:
        note = f"ceilings of {ceilings['date']}: `{ceilings['command']}`"
    return markdown(rows, headers) + setup(result) + f". {versions}; {note}"


@table
def attention_inputs(results: Path) -> str:
    """Attention's time beside FA3's and cuDNN's on each kind of inputs, and how far its rate varies."""
    if not is_measured(results, "attention"):
        return unmeasured("attention")
    result = load(results, "attention")
    entries = result["workloads"]
    kinds = dict.fromkeys(kind for entry in entries for kind in entry["inputs"])

    def cell(entry: dict, kind: str) -> str:
        if kind not in entry["inputs"]:
            return ""
        over = entry["inputs"][kind]["cold"]["over"]
        return " / ".join(
            attention_cell(entry, kind, peer, over.get(peer), 2) for peer in ("fa3", "cudnn")
        )

    rows = [[kind, *(cell(entry, kind) for entry in entries)] for kind in kinds]
    spans = (entry["slowest_over_fastest"] for entry in entries)
    rows.append(["slowest over fastest", *("" if s is None else f"{s:.2f}" for s in spans)])
    headers = ["against FA3 / cuDNN", *(attention_label(entry) for entry in entries)]
    return markdown(rows, headers) + setup(result)


@table
def attention_accuracy(results: Path) -> str:
    """Attention's error, and over the peers'."""
    if not is_measured(results, "attention"):
        return unmeasured("attention")
    result = load(results, "attention")
    rows = []
    for entry in result["workloads"]:
        worst = worst_inputs(entry, lambda of_kind: of_kind["error_over"], max)
        for kind, title in shown_inputs(entry, worst, targets_.EXTREMES).items():
            measured = entry["inputs"][kind]
            rows.append(
                [
                    attention_label(entry),
                    title,
                    f"{measured['errors']['ours']:.2e}",
                    *(
                        attention_cell(entry, kind, peer, measured["error_over"].get(peer), 3)
                        for peer in ATTENTION_PEERS
                    ),
                ]
            )
    headers = ["(B, Sq, Sk, H, d)", "inputs", "error"]
    headers += [f"over {name}'s" for name in ATTENTION_PEERS.values()]
    return markdown(rows, headers) + setup(result)


@table
def targets(results: Path) -> str:
    """What the operations should reach, and whether they do."""
    later = [name for name in targets_.MEASURED_LATER if is_measured(results, name)]
    first = [name for name in targets_.FAMILIES if name not in targets_.MEASURED_LATER]
    loaded = {name: load(results, name) for name in (*first, "host", *later)}
    pipeline = history.shown("pipeline", results, targets_.has_graphs)
    loaded |= {"pipeline": pipeline} if pipeline else {}
    gathered = {
        name: of_runs
        for name, gather in targets_.GATHERED.items()
        if (of_runs := gather(results)) is not None
    }
    runs = [*loaded.values(), *(run for of_runs in gathered.values() for run in of_runs["runs"])]
    rows = [
        [
            target.what,
            target.of,
            f"at {'most' if target.is_upper_bound else 'least'} {target.aim:.2f}{target.unit}",
            "" if target.measured is None else f"{target.measured:.2f}{target.unit}",
            target.verdict,
        ]
        for target in targets_.evaluate({**loaded, **gathered})
    ]
    return markdown(rows, ["what", "of", "aim", "measured", ""]) + setup(*runs)


@table
def accuracy_operations(results: Path) -> str:
    """Each operation's error over eager's; of several outputs the worst."""
    result = load(results, "accuracy")
    dtypes = list(dict.fromkeys(entry["dtype"] for entry in result["operations"]))
    worst: dict[str, dict[str, float]] = {}
    for entry in result["operations"]:
        row = worst.setdefault(entry["operation"], {})
        row[entry["dtype"]] = max(entry["ratio"], row.get(entry["dtype"], 0.0))
    rows = [
        [name, *(f"{row[dtype]:.3f}" if dtype in row else "" for dtype in dtypes)]
        for name, row in worst.items()
    ]
    return markdown(rows, ["error over eager's", *dtypes]) + setup(result)
