"""The operations beside their peers: times, rates and errors; the GPU's own limits; the suite's runs."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from benchmarks.harness import history

from attention_inputs import EXTREMES, NORMAL

from .chosen import BROKEN_OVER_EAGER, FAMILIES, is_broken
from .common import (
    MODE_NAMES,
    card,
    figure,
    footnote,
    load,
    markdown,
    setup,
    span,
    table,
    there,
    times,
)

LIBRARIES = {"liger": "Liger", "quack": "QuACK"}
ATTENTION_PEERS = {"cudnn": "cuDNN", "flash": "Torch flash", "fa3": "FA3"}
SLOW_INPUTS = ("rising", "jump", "steps", "large range")  # of attention
TUNED_MODE = "max-autotune-no-cudagraphs"
LTX_ROWS = [2, 8064]  # batch and tokens of LTX-Video at 161 frames, the shape shown of an operation
# The shapes of attention that its tables show: LTX-Video, FLUX.1, Wan, other head dims, and LTX-Video's text.
HEAD_DIMS = tuple(((2, 4096, 4096, 16, head_dim), "") for head_dim in (72, 80, 96, 112))
ATTENTION_SHAPES = (
    ((2, 8064, 8064, 32, 64), ""),
    ((1, 4608, 4608, 24, 128), ""),
    ((1, 32760, 32760, 12, 128), ""),
    *HEAD_DIMS,
    ((2, 8064, 128, 32, 64), "text mask"),
)
# What may set apart two measures of one ceiling: the size, and how it is read or launched.
CEILING_SIZE = re.compile(r", (\d+) ([KMG])iB$")
CEILING_MANNER = re.compile(r" \d+ B x \d+| of \w+ blocks?( a multiprocessor)?")
TIME_UNITS = ("us", "ns")


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
        if name in names and not is_broken(measured, name)
    }
    if over:
        best = min(over, key=lambda name: over[name])
        return f"{times(over[best])} {names[best]}"
    broken = [name for name in names if is_broken(measured, name)]
    return f"{names[broken[0]]} broken†" if broken else ""


@table
def operations(results: Path) -> str:
    """Each operation's time and rate, beside the large copy's rate and the peers' times."""
    loaded = [load(results, f"operations/{family}") for family in FAMILIES]
    rows = [
        [
            ", ".join(filter(None, [entry["operation"], entry["variant"]])),
            "×".join(map(str, entry["shape"])),
            f"{entry['cold']['microseconds']['ours']['median']:.1f} µs",
            f"{entry['cold']['terabytes_per_second']['ours']:.2f} TB/s",
            f"{entry['cold']['of_large_copy']:.0%}",
            *(over_peer(entry, entry["cold"], name) for name in ("eager", "compiled")),
            best_library(entry, entry["cold"], LIBRARIES),
        ]
        for result in loaded
        for entry in representative(result["workloads"])
    ]
    headers = ["operation", "shape", "time", "rate", "of a large copy's rate"]
    headers += ["over eager", "over torch.compile", "over the best library"]
    note = footnote(rows, f"in mode {TUNED_MODE}, the faster one here.")
    broken = f"more than {BROKEN_OVER_EAGER} times slower than eager PyTorch."
    note += footnote(rows, broken, "†")
    peers = {
        f"{name} {version.split(':')[0]}": None
        for result in loaded
        for name, version in result["peers"].items()
    }
    return markdown(rows, headers) + note + setup(*loaded) + f". Libraries: {', '.join(peers)}"


@table
def summary_operations(results: Path) -> str:
    """Each operation beside PyTorch and the best library, at one shape; attention on its worst inputs."""
    rows: list[list[str]] = []
    loaded = [load(results, f"operations/{family}") for family in FAMILIES]
    loaded.append(load(results, "attention"))
    for result in loaded[:-1]:
        for name in dict.fromkeys(entry["operation"] for entry in result["workloads"]):
            entry = main_workload([e for e in result["workloads"] if e["operation"] == name])
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
    result = loaded[-1]
    entry = main_workload([e for e in result["workloads"] if not e["variant"]])
    speeds = {
        kind: of_kind["cold"]["over"].get("fa3") or of_kind["cold"]["over"]["cudnn"]
        for kind, of_kind in entry["inputs"].items()
    }
    typical = [kind for kind in speeds if kind not in EXTREMES]
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
    for kind in EXTREMES:
        typical.pop(kind, None)
    for peer in ("fa3", "cudnn"):
        known = {kind: over[peer] for kind, over in typical.items() if peer in over}
        if len(known) > 1:
            return choose(known, key=known.get)
    return None


def attention_workloads(result: dict) -> list[dict]:
    """Those that the tables show."""
    return [
        entry
        for entry in result["workloads"]
        if (tuple(entry["shape"]), entry["variant"]) in ATTENTION_SHAPES
    ]


def shown_inputs(entry: dict, worst: str | None, others: tuple[str, ...]) -> dict[str, str]:
    """Kinds of inputs that a table shows of a shape, and how each is called there."""
    shown = dict.fromkeys([NORMAL, *filter(None, [worst]), *others])
    return {
        kind: f"{kind}, the worst" if kind == worst else kind
        for kind in shown
        if kind in entry["inputs"]
    }


@table
def attention(results: Path) -> str:
    """Attention's rate, beside its peers' times and the tensor cores' ceiling."""
    result = load(results, "attention")
    rows = []
    for entry in attention_workloads(result):
        worst = worst_inputs(entry, lambda of_kind: of_kind["cold"]["over"], min)
        for kind, title in shown_inputs(entry, worst, SLOW_INPUTS).items():
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


@table
def attention_inputs(results: Path) -> str:
    """Attention's time beside FA3's on each kind of inputs, and how far its rate varies."""
    result = load(results, "attention")
    entries = [
        entry
        for entry in result["workloads"]
        if "fa3" not in entry["declined"]
        and (tuple(entry["shape"]), entry["variant"]) not in HEAD_DIMS  # two kinds only
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
def attention_accuracy(results: Path) -> str:
    """Attention's error, and over the peers'."""
    result = load(results, "attention")
    rows = []
    for entry in attention_workloads(result):
        worst = worst_inputs(entry, lambda of_kind: of_kind["error_over"], max)
        for kind, title in shown_inputs(entry, worst, EXTREMES).items():
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
def attention_blocks(results: Path) -> str:
    """Attention by blocks, beside FlexAttention and attention to all keys."""
    result = load(results, "attention_blocks")
    rows = []
    for entry in result["attention_blocks"]:
        rates = entry["teraflops_per_second"]
        rows.append(
            [
                "×".join(map(str, entry["shape"])),
                entry["mask"],
                f"{entry['share']:.1%}",
                f"{entry['microseconds']['ours']['median'] / 1e3:.2f} ms",
                f"{rates['ours']:.0f}",
                f"{rates['all keys']:.0f}",
                times(entry["over_flex"]),
                f"{entry['errors']['ours']:.1e}",
            ]
        )
    headers = ["(B, Sq, Sk, H, d)", "mask", "of all keys", "time", "TFLOP/s", "TFLOP/s, all keys"]
    headers += ["over FlexAttention", "error"]
    return markdown(rows, headers) + setup(result)


@table
def attention_blocks_inputs(results: Path) -> str:
    """Attention by blocks on other kinds of inputs."""
    result = load(results, "attention_blocks")
    entries = result["attention_blocks"]
    rates = f"rate_over_{result['inputs']}"
    kinds = list(entries[0][rates])
    rows = [
        [
            "×".join(map(str, entry["shape"][2:])),
            entry["mask"],
            *(times(entry[rates][kind]) for kind in kinds),
        ]
        for entry in entries
    ]
    return markdown(rows, ["(Sk, H, d)", "mask", *kinds]) + setup(result)


@table
def block_masks(results: Path) -> str:
    """Models whose attention has a mask by blocks."""
    gathered = history.gathered("block_masks", "block_masks", lambda m: m["model"], results)
    result = there(gathered, "block_masks")
    rows = []
    for model in result["block_masks"]:
        share = "" if model["share"] is None else f"{model['share']:.0%}"
        for ours, of_peers in model["speedups"].items():
            for peer, runs in of_peers.items():
                median = times(statistics.median(runs))
                names = MODE_NAMES[ours], MODE_NAMES[peer]
                rows.append([model["model"], share, *names, median, ", ".join(map(times, runs))])
    headers = ["model", "of all blocks", "", "over", "median", "runs"]
    return markdown(rows, headers) + setup(*result["runs"])


def typical_over_fa3(results: Path, has_usual_heads: bool) -> str:
    """Self-attention on typical inputs, with heads of 64 and 128 elements or with others."""
    return span(
        [
            measured["cold"]["over"]["fa3"]
            for entry in load(results, "attention")["workloads"]
            if entry["shape"][1] == entry["shape"][2]
            and (entry["shape"][-1] in (64, 128)) == has_usual_heads
            for kind, measured in entry["inputs"].items()
            if kind not in EXTREMES and "fa3" in measured["cold"]["over"]
        ]
    )


@figure
def attention_card(results: Path) -> str:
    return card(load(results, "attention"))


@figure
def attention_typical(results: Path) -> str:
    return typical_over_fa3(results, has_usual_heads=True)


@figure
def attention_other_heads(results: Path) -> str:
    return typical_over_fa3(results, has_usual_heads=False)


@figure
def attention_worst(results: Path) -> str:
    """The lowest speed of attention over FlashAttention-3's, on all inputs and shapes."""
    entries = load(results, "attention")["workloads"]
    over = [of["cold"]["over"].get("fa3") for e in entries for of in e["inputs"].values()]
    return f"{min(value for value in over if value is not None):.2f}"


@figure
def attention_error(results: Path) -> str:
    """The largest error of attention over that of a backend of PyTorch, on all inputs and shapes."""
    entries = load(results, "attention")["workloads"]
    over = [of["error_over"] for entry in entries for of in entry["inputs"].values()]
    return f"{max(each[peer] for each in over for peer in ('cudnn', 'flash') if peer in each):.3f}"


# -- Limits of the GPU -------------------------------------------------------------------------


def ceiling_group(measure: dict) -> tuple[str, str]:
    """What the measures of one ceiling have in common."""
    name = CEILING_SIZE.sub("", measure["name"])
    return measure["program"], CEILING_MANNER.sub("", name)


def ceiling_rank(measure: dict) -> tuple[int, float]:
    """Higher for a larger size, then for a higher rate or a shorter time."""
    size = CEILING_SIZE.search(measure["name"])
    kibibytes = int(size[1]) << 10 * "KMG".index(size[2]) if size else 0
    sign = -1 if measure["unit"] in TIME_UNITS else 1
    return kibibytes, sign * measure["measured"]


def quantity(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    digits = 2 if value < 100 else 0
    return f"{value:.{digits}f} {unit.replace('us', 'µs')}"


@table
def ceilings(results: Path) -> str:
    """The GPU's own limits: of a ceiling's measures the largest size, and of those the best.

    Figures a clock are the same measures in another unit, and stay in the JSON.
    """
    result = load(results, "ceilings")
    shown: dict[tuple[str, str], dict] = {}
    for measure in result["measures"]:
        if "clock" not in measure["unit"]:
            group = ceiling_group(measure)
            shown[group] = max(shown.get(group, measure), measure, key=ceiling_rank)
    rows = []
    for measure in shown.values():
        unit, ratio = measure["unit"], measure["ratio"]
        rows.append(
            [
                measure["program"].replace("_", " "),
                measure["name"],
                quantity(measure["measured"], unit),
                quantity(measure["theoretical"], unit),
                "" if ratio is None else f"{ratio:.0%}",
            ]
        )
    headers = ["program", "measure", "measured", "theoretical", "ratio"]
    return markdown(rows, headers) + setup(result)


# ------------------------------------------------------------------------------------------------
# The test suite's runs on GPUs.


def kind_of_suite(result: dict) -> str:
    """Which tests a run had: by pytest's options, and how many files it left out."""
    given = result["pytest_arguments"]
    options = [f"`{a} '{b}'`" for a, b in pairwise(given) if a in ("-m", "-k", "--draw")]
    files = len(result["left_out"])
    options += [f"without {files} files that need no GPU"] if files else []
    return ", ".join(options) or "all"


@table
def suite(results: Path) -> str:
    """The test suite's last run on each card with each version of Torch."""
    kept = sorted(history.load(history.path("suite", results)), key=history.date)
    of_card = {(history.card(r["environment"]), r["environment"]["torch"]): r for r in kept}
    rows = [
        [
            result["environment"]["device"],
            result["environment"]["torch"],
            result["build"],
            result["environment"]["date"],
            *(str(result["counts"][key]) for key in ("passed", "skipped", "failed")),
            kind_of_suite(result),
        ]
        for result in of_card.values()
    ]
    headers = ["GPU", "torch", "build", "date", "passed", "skipped", "failed", "tests"]
    return markdown(rows, headers)


@figure
def tested_torch(results: Path) -> str:
    """The versions of Torch with which the suite ran on a GPU."""
    kept = [r["environment"] for r in history.load(history.path("suite", results))]
    return ", ".join(sorted({f"{e['torch']} (CUDA {e['cuda']})" for e in kept}))
