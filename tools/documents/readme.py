"""The table of all models, and the figures within sentences."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import models
import targets

import accuracy

from .common import (
    FIGURES,
    NOT_MEASURED,
    figure,
    load,
    markdown,
    milliseconds,
    setup,
    size_name,
    span,
    table,
    times,
)
from .fp8 import gathered_pipelines


def rows_of_models(
    results: Path, cells: Callable[[dict, targets.Forward], list[str]]
) -> list[list[str]]:
    """A row a forward of all models, those in full first; the cells after the name are `cells`' of it.

    All are of one card and build. A model that this build did not measure has a row that says so.
    """
    measured = targets.of_one_build(results)
    rows: list[list[str]] = []
    for title, names in (
        ("**Replaced in full**", targets.IN_FULL),
        ("**Replaced in part**", targets.WITHOUT_FAMILY),
    ):
        rows.append([title])
        for name in names:
            if name not in measured:
                rows.append([targets.TITLES[name], NOT_MEASURED])
                continue
            result = measured[name]
            rows += [
                [f"{result['model']}, {size_name(forward.size)}", *cells(result, forward)]
                for forward in targets.forwards(result)
            ]
    return rows


@table
def summary_models(results: Path) -> str:
    """The injected forward of each model beside the eager and the compiled one, with peaked weights."""

    def cells(_: dict, forward: targets.Forward) -> list[str]:
        times_ms = (forward.eager, forward.compiled, forward.injected)
        ratios = (forward.over_eager, forward.over_compiled)
        return [*map(milliseconds, times_ms), *map(times, ratios)]

    headers = ["model and input", "eager", "torch.compile", "injected"]
    headers += ["over eager", "over torch.compile"]
    measured = targets.of_one_build(results).values()
    return markdown(rows_of_models(results, cells), headers) + setup(*measured)


def forwards_of(results: Path, names: tuple[str, ...]) -> list[targets.Forward]:
    """Those of the table of all models."""
    measured = targets.of_one_build(results)
    return [f for name in names if name in measured for f in targets.forwards(measured[name])]


def injected_over(results: Path, names: tuple[str, ...], other: str) -> str:
    return span([getattr(forward, f"over_{other}") for forward in forwards_of(results, names)])


for label, names in {
    "families": targets.IN_FULL,
    "in_part": tuple(targets.WITHOUT_FAMILY),
    "ltx": ("models",),
}.items():
    for other in ("eager", "compiled"):
        FIGURES[f"{label}_over_{other}"] = functools.partial(
            injected_over, names=names, other=other
        )


@figure
def models_card(results: Path) -> str:
    """The card of the table of all models."""
    devices = {r["environment"]["device"] for r in targets.of_one_build(results).values()}
    return ", ".join(devices) or NOT_MEASURED


@figure
def full_speed_after(results: Path) -> str:
    """Seconds from the injection on, the most of all models."""
    sizes = [s for r in targets.of_one_build(results).values() for s in r["sizes"].values()]
    seconds = [s["injection"]["full_speed_s"] for s in sizes if "injection" in s]
    return f"{max(seconds):.2f}" if seconds else NOT_MEASURED


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


@figure
def fp8_flux_pipeline(results: Path) -> str:
    """Seconds of FLUX.1-dev's pipeline: eager, injected, injected in FP8."""
    found = gathered_pipelines(results)
    if found is None:
        return NOT_MEASURED
    modes = next(entry["modes"] for entry in found["pipelines"] if entry["name"] == "flux")
    names = ("eager", "injected", models.INJECTED_FP8)
    eager, injected, fp8 = (f"{modes[name]['seconds']['median']:.2f}" for name in names)
    return f"{eager}, {injected} and {fp8}"


def standard_deviation(results: Path, weights: str) -> str:
    """Of the scores of self-attention with these weights, in nats."""
    return f"{load(results, 'models')['scores_std'][weights]:.0f}"


for weights in models.WEIGHTS:
    FIGURES[f"{weights}_scores_std"] = functools.partial(standard_deviation, weights=weights)
