"""The GPU's own limits, the kernels' counters, and the test suite's runs."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import history
import targets

from .common import footnote, load, markdown, setup, table

# What may set apart two measures of one ceiling: the size, and how it is read or launched.
CEILING_SIZE = re.compile(r", (\d+) ([KMG])iB$")
CEILING_MANNER = re.compile(r" \d+ B x \d+| of \w+ blocks?( a multiprocessor)?")
TIME_UNITS = ("us", "ns")


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
        mark = "*" if ratio is not None and ratio > targets.HIGHEST_CEILING_RATIO else ""
        rows.append(
            [
                measure["program"].replace("_", " "),
                measure["name"],
                quantity(measure["measured"], unit),
                quantity(measure["theoretical"], unit),
                "" if ratio is None else f"{ratio:.0%}{mark}",
            ]
        )
    note = footnote(rows, "above the limit, which cannot be: the program measured something else.")
    headers = ["program", "measure", "measured", "theoretical", "ratio"]
    return markdown(rows, headers) + note + setup(result)


def kernel_labels(kernels: list[dict]) -> list[str]:
    """Each kernel's workload; where that has several kernels, the function too."""
    launches = Counter(kernel["workload"] for kernel in kernels)
    labels = []
    for kernel in kernels:
        label = re.sub(r"(?<=\d)x(?=\d)", "×", kernel["workload"])
        if launches[kernel["workload"]] > 1:
            label += ", " + re.findall(r"\w+(?=[<(])", kernel["kernel"])[0]
        labels.append(label)
    return labels


@table
def profile(results: Path) -> str:
    """Counters of each kernel, and which aims it misses."""
    result = load(results, "profile")
    rows = [
        [
            label,
            *(f"{kernel[f'{name}_percent']:.1f}%" for name in ("dram", "occupancy", "l2_hit")),
            str(kernel["registers"]),
            f"{kernel['local_bytes']} B",
            f"{kernel['largest_stall']} {kernel['stalls'][kernel['largest_stall']]:.1f}",
            "; ".join(kernel["misses"]).replace("<=", "≤") or "none",
        ]
        for label, kernel in zip(kernel_labels(result["kernels"]), result["kernels"], strict=True)
    ]
    headers = ["kernel of", "DRAM throughput", "occupancy", "L2 hits", "registers"]
    headers += ["spills", "largest stall", "missed aims"]
    aims = result["targets"]
    note = (
        f"\n\nAims: DRAM throughput above {aims['dram_percent']:.0f}% of its peak, achieved "
        f"occupancy above {aims['occupancy_percent']:.0f}%, no spills; of attention the last alone."
    )
    return markdown(rows, headers) + note + setup(result)


def kind_of_suite(result: dict) -> str:
    """What a run of the test suite left out: by pytest's options, then files."""
    given = result["pytest_arguments"]
    left_out = [f'all but `{a} "{b}"`' for a, b in pairwise(given) if a in ("-m", "-k", "--draw")]
    left_out += [f"`{Path(name).name}`" for name in result["left_out"]]
    return ", ".join(left_out) or "nothing"


@table
def suite(results: Path) -> str:
    """The test suite's last run on each card."""
    of_card = {history.card(r["environment"]): r for r in history.kept("suite", results)}
    if not of_card:
        return "Not recorded yet: `tools/gpu_check.sh build test` does."
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
    headers = ["GPU", "torch", "build", "date", "passed", "skipped", "failed", "left out"]
    return markdown(rows, headers)
