"""The operations beside their peers: times, rates, errors, and what is aimed at."""

from __future__ import annotations

import functools
import importlib
import statistics
from collections.abc import Callable
from pathlib import Path

import attention_statistics
import pipeline_targets
import targets as targets_

from .common import (
    NOT_MEASURED,
    TABLES,
    aims,
    card,
    footnote,
    is_measured,
    load,
    markdown,
    setup,
    table,
    times,
    unmeasured,
)

LIBRARIES = {"liger": "Liger", "quack": "QuACK"}
ATTENTION_PEERS = {"cudnn": "cuDNN", "flash": "Torch flash", "fa3": "FA3"}
SLOW_INPUTS = ("rising", "jump", "steps", "large range")  # of attention
TUNED_MODE = "max-autotune-no-cudagraphs"
LTX_ROWS = [2, 8064]  # batch and tokens of LTX-Video at 161 frames, the shape shown of an operation
# The shapes of attention that its tables show: LTX-Video, FLUX.1, Wan, other head dims, and LTX-Video's text.
ATTENTION_SHAPES = (
    *targets_.LTX_161,
    *targets_.FLUX,
    *targets_.WAN,
    *targets_.HEAD_DIMS,
    ((2, 8064, 128, 32, 64), "text mask"),
)
# An H100's: that is what the published times among the aims were measured on.
AIMS_CARDS = ("h100", "h200")


def main_workload(entries: list[dict]) -> dict:
    """Of one operation's workloads the first at LTX-Video's 161 frames, otherwise the largest."""
    of_ltx = [entry for entry in entries if entry["shape"][:2] == LTX_ROWS]
    return of_ltx[0] if of_ltx else max(entries, key=lambda entry: entry["bytes"])


def representative(entries: list[dict]) -> list[dict]:
    """Of each operation the main workload of each variant, and the smallest one."""
    shown: list[dict] = []
    for name in dict.fromkeys(entry["operation"] for entry in entries):
        of_name = [entry for entry in entries if entry["operation"] == name]
        variants = dict.fromkeys(entry["variant"] for entry in of_name)
        chosen = [min(of_name, key=lambda entry: entry["bytes"])]
        chosen += [main_workload([e for e in of_name if e["variant"] == v]) for v in variants]
        shown += [entry for entry in of_name if entry in chosen]
    return shown


def operations_of(family: str) -> list[str]:
    """Those that a family's benchmark measures."""
    workloads = importlib.import_module(f"bench_{family}").FAMILY.workloads
    return list(dict.fromkeys(workload.operation for workload in workloads))


def over_peer(entry: dict, measured: dict, peer: str) -> str:
    """Times as fast as a peer, or that it failed; nothing where it has no such operation."""
    if peer in measured["over"]:
        is_tuned = peer == "compiled" and measured["compiled_mode"] == TUNED_MODE
        return times(measured["over"][peer]) + "*" * is_tuned
    return "failed" if any(name.split()[0] == peer for name in entry["failed"]) else ""


def best_library(entry: dict, measured: dict, names: dict[str, str]) -> str:
    """Times as fast as the fastest of the libraries that run this as they are meant to."""
    over = {
        name: value
        for name, value in measured["over"].items()
        if name in names and not targets_.is_broken(measured, name)
    }
    if over:
        best = min(over, key=lambda name: over[name])
        return f"{times(over[best])} {names[best]}"
    broken = [name for name in names if targets_.is_broken(measured, name)]
    return f"{names[broken[0]]} broken†" if broken else ""


def operations(results: Path, family: str, is_whole: bool) -> str:
    """Each operation's time and rate, beside the large copy's rate and the peers' times."""
    if not is_measured(results, family):
        return unmeasured(family)
    result = load(results, family)
    entries = result["workloads"] if is_whole else representative(result["workloads"])
    rows = [
        [
            ", ".join(filter(None, [entry["operation"], entry["variant"]])),
            "×".join(map(str, entry["shape"])) + (" (warm)" if cache == "warm" else ""),
            f"{entry[cache]['microseconds']['ours']['median']:.1f} µs",
            f"{entry[cache]['terabytes_per_second']['ours']:.2f} TB/s",
            f"{entry[cache]['of_large_copy']:.0%}",
            *(over_peer(entry, entry[cache], name) for name in ("eager", "compiled")),
            best_library(entry, entry[cache], LIBRARIES),
        ]
        for entry in entries
        for cache in (("cold", "warm") if is_whole else ("cold",))
        if cache in entry
    ]
    headers = ["operation", "shape", "time", "rate", "of a large copy's rate"]
    headers += ["over eager", "over torch.compile", "over the best library"]
    note = footnote(rows, f"in mode {TUNED_MODE}, the faster one here.")
    note += footnote(
        rows, f"more than {targets_.BROKEN_OVER_EAGER} times slower than eager PyTorch.", "†"
    )
    versions = ", ".join(f"{name} {v.split(':')[0]}" for name, v in result["peers"].items())
    return markdown(rows, headers) + note + setup(result) + f". Libraries: {versions}"


for name in targets_.FAMILIES:
    TABLES[name] = functools.partial(operations, family=name, is_whole=False)
    TABLES[f"all_{name}"] = functools.partial(operations, family=name, is_whole=True)


@table
def summary_operations(results: Path) -> str:
    """Each operation beside PyTorch and the best library, at one shape; attention on its worst inputs."""
    rows: list[list[str]] = []
    loaded = []
    for family in targets_.FAMILIES:
        result: dict = {"workloads": []}
        if is_measured(results, family):
            result = load(results, family)
            loaded.append(result)
        for name in operations_of(family):
            entries = [e for e in result["workloads"] if e["operation"] == name]
            if not entries:
                rows.append([f"`{name}`", "", "", NOT_MEASURED])
                continue
            entry = main_workload(entries)
            measured = entry["cold"]
            rows.append(
                [
                    f"`{name}`",
                    "×".join(map(str, entry["shape"])),
                    card(result),
                    f"{measured['microseconds']['ours']['median']:.1f} µs",
                    f"{measured['terabytes_per_second']['ours']:.2f} TB/s",
                    *(times(measured["over"].get(peer)) for peer in ("eager", "compiled")),
                    best_library(entry, measured, LIBRARIES),
                ]
            )
    if is_measured(results, "attention"):
        result = load(results, "attention")
        loaded.append(result)
        entry = main_workload([e for e in result["workloads"] if not e["variant"]])
        speeds = {
            kind: of_kind["cold"]["over"].get("fa3") or of_kind["cold"]["over"]["cudnn"]
            for kind, of_kind in entry["inputs"].items()
        }
        typical = [kind for kind in speeds if kind not in targets_.EXTREMES]
        for note, kinds in (("the worst typical", typical), ("the worst", list(speeds))):
            kind = min(kinds, key=lambda name: speeds[name])
            measured = entry["inputs"][kind]["cold"]
            rows.append(
                [
                    f"`attention`, {kind}, {note}",
                    "×".join(map(str, entry["shape"])),
                    card(result),
                    f"{measured['microseconds']['ours']['median']:.1f} µs",
                    f"{measured['teraflops_per_second']['ours']:.0f} TFLOP/s",
                    times(measured["over"].get("cudnn")),
                    "",
                    best_library(entry, measured, {"fa3": ATTENTION_PEERS["fa3"]}),
                ]
            )
    headers = ["operation", "shape", "card", "time", "rate"]
    headers += ["over PyTorch", "over torch.compile", "over the best library"]
    return markdown(rows, headers) + setup(*loaded)


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


def attention_workloads(result: dict, is_whole: bool) -> list[dict]:
    """All workloads, or those that the tables show."""
    return [
        entry
        for entry in result["workloads"]
        if is_whole or (tuple(entry["shape"]), entry["variant"]) in ATTENTION_SHAPES
    ]


def shown_inputs(entry: dict, worst: str | None, others: tuple[str, ...]) -> dict[str, str]:
    """Kinds of inputs that a table shows of a shape, and how each is called there."""
    shown = dict.fromkeys([targets_.NORMAL, *filter(None, [worst]), *others])
    return {
        kind: f"{kind}, the worst" if kind == worst else kind
        for kind in shown
        if kind in entry["inputs"]
    }


def attention(results: Path, is_whole: bool) -> str:
    """Attention's rate, beside its peers' times and the tensor cores' ceiling."""
    if not is_measured(results, "attention"):
        return unmeasured("attention")
    result = load(results, "attention")
    rows = []
    for entry in attention_workloads(result, is_whole):
        worst = worst_inputs(entry, lambda of_kind: of_kind["cold"]["over"], min)
        kinds = tuple(entry["inputs"]) if is_whole else SLOW_INPUTS
        for kind, title in shown_inputs(entry, worst, kinds).items():
            measured = entry["inputs"][kind]["cold"]
            rows.append(
                [
                    attention_label(entry),
                    title,
                    f"{measured['microseconds']['ours']['median']:.1f} µs",
                    f"{measured['teraflops_per_second']['ours']:.0f} TFLOP/s",
                    *(
                        attention_cell(entry, kind, peer, measured["over"].get(peer), 2)
                        for peer in ATTENTION_PEERS
                    ),
                    f"{measured['of_bounds']['wgmma']:.0%}"
                    if "wgmma" in measured["of_bounds"]
                    else "",
                ]
            )
    headers = ["(B, Sq, Sk, H, d)", "inputs", "time", "rate"]
    headers += [f"over {name}" for name in ATTENTION_PEERS.values()]
    headers += ["of wgmma's ceiling"]
    versions = "; ".join(
        f"{ATTENTION_PEERS[name]} {what}" for name, what in result["peers"].items()
    )
    ceilings = result["ceilings"]
    if "left_out" in ceilings:
        note = f"no ceilings: {ceilings['left_out']}"
    else:
        note = f"ceilings of {ceilings['date']}"
    return markdown(rows, headers) + setup(result) + f". {versions}; {note}"


TABLES["attention"] = functools.partial(attention, is_whole=False)
TABLES["all_attention"] = functools.partial(attention, is_whole=True)


@table
def attention_inputs(results: Path) -> str:
    """Attention's time beside FA3's on each kind of inputs, and how far its rate varies."""
    if not is_measured(results, "attention"):
        return unmeasured("attention")
    result = load(results, "attention")
    entries = [
        entry
        for entry in result["workloads"]
        if "fa3" not in entry["declined"]
        and (tuple(entry["shape"]), entry["variant"]) not in targets_.HEAD_DIMS  # two kinds only
    ]
    kinds = dict.fromkeys(kind for entry in entries for kind in entry["inputs"])

    def cell(entry: dict, kind: str) -> str:
        if kind not in entry["inputs"]:
            return ""
        over = entry["inputs"][kind]["cold"]["over"].get("fa3")
        return attention_cell(entry, kind, "fa3", over, 2)

    rows = [[kind, *(cell(entry, kind) for entry in entries)] for kind in kinds]
    spans = (entry["slowest_over_fastest"] for entry in entries)
    rows.append(["slowest over fastest", *("" if s is None else f"{s:.2f}" for s in spans)])
    headers = ["over FA3", *(attention_label(entry) for entry in entries)]
    return markdown(rows, headers) + setup(result)


@table
def trained_attention(results: Path) -> str:
    """How peaked the scores of a trained model are: of each layer's heads the least, median and most."""
    if not is_measured(results, "trained_attention"):
        return unmeasured("trained_attention")
    result = load(results, "trained_attention")
    names = {"std": 2, "above_mean": 1, "largest_share": 3}  # digits
    rescales = {"online_rescales": 2, "lazy_rescales": 3}
    rows = []
    for kind in ("self", "cross"):
        heads = attention_statistics.means_over_steps(result, kind)
        for layer in dict.fromkeys(layer for layer, _ in heads):
            row = [f"{kind}-attention {layer + 1}"]
            for name, digits in (names | (rescales if kind == "self" else {})).items():
                values = [means[name] for (of, _), means in heads.items() if of == layer]
                shown = (min(values), statistics.median(values), max(values))
                row.append(" / ".join(f"{value:.{digits}f}" for value in shown))
            rows.append(row + [""] * (1 + len(names | rescales) - len(row)))
    headers = ["layer", "standard deviation", "largest less mean", "weight of the largest"]
    headers += ["rescales below 1024 queries", "rescales otherwise"]
    return markdown(rows, headers) + setup(result)


@table
def attention_accuracy(results: Path) -> str:
    """Attention's error, and over the peers'."""
    if not is_measured(results, "attention"):
        return unmeasured("attention")
    result = load(results, "attention")
    rows = []
    for entry in attention_workloads(result, is_whole=False):
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
    names = ("attention", "group_norm", "in_part")
    later = [name for name in names if is_measured(results, name)]
    first = [name for name in targets_.FAMILIES if name not in targets_.MEASURED_LATER]
    loaded = {name: load(results, name, AIMS_CARDS) for name in (*first, "host")}
    loaded |= {name: load(results, name) for name in later}
    loaded |= targets_.of_one_build(results)
    gathered = {
        name: of_runs
        for name, gather in targets_.GATHERED.items()
        if (of_runs := gather(results)) is not None
    }
    pipelines = pipeline_targets.gathered(results)
    parts = [*gathered.values(), *([pipelines] if pipelines else [])]
    runs = [*loaded.values(), *(run for of_runs in parts for run in of_runs["runs"])]
    evaluated = targets_.evaluate({**loaded, **gathered}) + pipeline_targets.evaluate(pipelines)
    return aims(evaluated) + setup(*runs)


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
