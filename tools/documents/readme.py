"""README's own tables, and the figures within its sentences."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

import models
import targets

import accuracy

from .common import (
    ELSEWHERE,
    FIGURES,
    SIZE_NAMES,
    elsewhere,
    figure,
    is_measured,
    load,
    load_workloads,
    markdown,
    setup,
    table,
    times,
)
from .operations import ATTENTION_PEERS

LIBRARIES = {"liger": "Liger", "quack": "QuACK"}
# The models' results, and what their figures' names begin with.
MODEL_RESULTS = {"models": "ltx", "flux": "flux"}
NOT_MEASURED = "not measured"
LTX_ROWS = [2, 8064]  # batch and tokens of LTX-Video at 161 frames, the shape that README shows


@table
def summary_models(results: Path) -> str:
    """The injected forward of each model beside the eager and the compiled one."""
    rows, loaded = [], []
    for name in MODEL_RESULTS:
        if not is_measured(results, name):
            continue
        result = load(results, name)
        loaded.append(result)
        for size, entry in result["sizes"].items():
            for weights, of_weights in entry["weights"].items():
                modes, over = of_weights["modes"], of_weights["speedups"]["injected"]
                compiled = targets.faster_compiled(modes)
                rows.append(
                    [
                        f"{result['model']}, {SIZE_NAMES[name](size)}",
                        weights,
                        *(
                            f"{modes[mode]['ms']['median']:.1f} ms" if mode in modes else ""
                            for mode in ("eager", compiled, "injected")
                        ),
                        times(over.get("eager")),
                        times(over.get(compiled)),
                    ]
                )
    headers = ["one forward", "weights", "eager", "torch.compile", "injected"]
    headers += ["against eager", "against torch.compile"]
    return markdown(rows, headers) + setup(*loaded)


def main_workload(entries: list[dict]) -> dict:
    """Of one operation's workloads the first at LTX-Video's 161 frames, or else the largest."""
    of_ltx = [entry for entry in entries if entry["shape"][:2] == LTX_ROWS]
    return of_ltx[0] if of_ltx else max(entries, key=lambda entry: entry["bytes"])


def operations_of(family: str) -> list[str]:
    """Those that a family's benchmark measures."""
    workloads = importlib.import_module(f"bench_{family}").FAMILY.workloads
    return list(dict.fromkeys(workload.operation for workload in workloads))


def best_library(measured: dict, names: dict[str, str]) -> str:
    """Times as fast as the fastest of the libraries that run this as they are meant to."""
    over = {
        name: value
        for name, value in measured["over"].items()
        if name in names and not targets.is_broken(measured, name)
    }
    if not over:
        return ""
    best = min(over, key=lambda name: over[name])
    return f"{times(over[best])} {names[best]}"


@table
def summary_operations(results: Path) -> str:
    """Each operation beside PyTorch and the best library, at one shape; attention on its worst inputs."""
    rows: list[list[str]] = []
    loaded, others = [], []
    for family in targets.FAMILIES:
        workloads: list[tuple[dict, str]] = []
        of_others: list[dict] = []
        if family not in targets.MEASURED_LATER or is_measured(results, family):
            workloads, (shown, *of_others) = load_workloads(results, family)
            loaded.append(shown)
            if shown["environment"]["device"] != loaded[0]["environment"]["device"]:
                workloads = [(entry, ELSEWHERE) for entry, _ in workloads]
                of_others = [shown]
        by_operation: dict[str, list[tuple[dict, str]]] = {}
        for entry, mark in workloads:
            by_operation.setdefault(entry["operation"], []).append((entry, mark))
        for name in operations_of(family):
            if name not in by_operation:
                rows.append([f"`{name}`", "", NOT_MEASURED, *[""] * 4])
                continue
            mark = by_operation[name][0][1]
            entry = main_workload([e for e, of_entry in by_operation[name] if of_entry == mark])
            measured = entry["cold"]
            others += of_others if mark else []
            rows.append(
                [
                    f"`{name}`{mark}",
                    "×".join(map(str, entry["shape"])),
                    f"{measured['microseconds']['ours']['median']:.1f} µs",
                    f"{measured['terabytes_per_second']['ours']:.2f} TB/s",
                    times(measured["over"].get("eager")),
                    times(measured["over"].get("compiled")),
                    best_library(measured, LIBRARIES),
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
        typical = [kind for kind in speeds if kind not in targets.EXTREMES]
        for note, kinds in (("the worst typical", typical), ("the worst", list(speeds))):
            kind = min(kinds, key=lambda name: speeds[name])
            measured = entry["inputs"][kind]["cold"]
            rows.append(
                [
                    f"`attention`, {kind}, {note}",
                    "×".join(map(str, entry["shape"])),
                    f"{measured['microseconds']['ours']['median']:.1f} µs",
                    f"{measured['teraflops_per_second']['ours']:.0f} TFLOP/s",
                    times(measured["over"].get("cudnn")),
                    "",
                    best_library(measured, {"fa3": ATTENTION_PEERS["fa3"]}),
                ]
            )
    headers = ["operation", "shape", "time", "rate"]
    headers += ["against PyTorch", "torch.compile", "the best library"]
    return markdown(rows, headers) + elsewhere(rows, [loaded[0], *others]) + briefly(*loaded)


def briefly(*results: dict) -> str:
    """Where and with what the figures of a table were measured."""
    environments = [result["environment"] for result in results]
    where = {f"{e['device']}, torch {e['torch']}" for e in environments}
    dates = sorted(environment["date"].split()[0] for environment in environments)
    days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return f"\n\n{'; '.join(sorted(where))}, {days}."


def span(values: list[float], digits: int = 2) -> str:
    """The least and the most, or one where they are the same."""
    return " to ".join(dict.fromkeys(f"{v:.{digits}f}" for v in (min(values), max(values))))


def injected_over(results: Path, name: str, other: str) -> str:
    sizes = load(results, name)["sizes"].values()
    of_weights = [weights for entry in sizes for weights in entry["weights"].values()]
    return span(
        [
            weights["speedups"]["injected"][
                targets.faster_compiled(weights["modes"]) if other == "compiled" else other
            ]
            for weights in of_weights
        ]
    )


for name, label in MODEL_RESULTS.items():
    for other in ("eager", "compiled"):
        FIGURES[f"{label}_over_{other}"] = functools.partial(injected_over, name=name, other=other)


@figure
def pipeline_over_eager(results: Path) -> str:
    videos = load(results, "pipeline")["videos"].values()
    return span([entry["speedups"]["injected"]["eager"] for entry in videos])


@figure
def full_speed_after(results: Path) -> str:
    """Seconds, the most of all sizes."""
    sizes = load(results, "models")["sizes"].values()
    return f"{max(entry['injection']['full_speed_s'] for entry in sizes):.2f}"


def host_share(results: Path, model: str) -> str:
    """The host's time of the injected forward, of eager's; as published."""
    gathered = targets.gathered_hosts(results) or load(results, "host_forward")
    return span(targets.host_shares(gathered, model))


FIGURES["ltx_host_share"] = functools.partial(host_share, model="LTX-Video")
FIGURES["flux_host_share"] = functools.partial(host_share, model="FLUX.1")


@figure
def accuracy_contract(results: Path) -> str:
    """What the tests hold the errors over eager's to."""
    return f"{accuracy.ACCURACY_CONTRACT}"


@figure
def operations_error(results: Path) -> str:
    """The largest error of an operation over eager's."""
    return f"{max(e['ratio'] for e in load(results, 'accuracy')['operations']):.3f}"


@figure
def model_error(results: Path) -> str:
    return f"{max(entry['ratio'] for entry in load(results, 'accuracy')['models']):.3f}"


@figure
def attention_worst(results: Path) -> str:
    """The lowest speed of attention over FlashAttention-3's, on all inputs and shapes."""
    entries = load(results, "attention")["workloads"]
    over = [of["cold"]["over"].get("fa3") for e in entries for of in e["inputs"].values()]
    return f"{min(value for value in over if value is not None):.2f}"


def standard_deviation(results: Path, weights: str) -> str:
    """Of the scores of self-attention with these weights, in nats."""
    return f"{load(results, 'models')['scores_std'][weights]:.0f}"


for weights in models.WEIGHTS:
    FIGURES[f"{weights}_scores_std"] = functools.partial(standard_deviation, weights=weights)
