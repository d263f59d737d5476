"""Which results the documents show, and the figures of a model's forwards in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks import models
from benchmarks.harness import history, options

FAMILIES = ("norm", "gated_residual", "rope", "activation", "softmax", "group_norm")
# Models that injection replaces in full.
TITLES = {p.key: re.sub(r", [\d +]+ blocks", "", p.name) for p in options.PUBLISHED}
WEIGHTS = "peaked"  # of the models in tables and plots
COMPILED = ("compiled", models.REGIONAL)  # of a whole model, and of its blocks
# A peer this many times slower than eager PyTorch does not run as intended.
BROKEN_OVER_EAGER = 5


def is_broken(measured: Mapping, peer: str) -> bool:
    """Whether a peer is so slow that its time is meaningless. Attention's peers have no eager time."""
    over = measured["over"]
    return {peer, "eager"} <= set(over) and over[peer] > BROKEN_OVER_EAGER * over["eager"]


# -- Models ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forward:
    """An injected forward at one size compared with eager and torch.compile, in milliseconds and ratios.

    Unmeasured values are None. `compiled` is the fastest measured mode of COMPILED.
    """

    size: str
    eager: float | None
    compiled: float | None
    compiled_mode: str | None
    injected: float | None
    over_eager: float | None
    over_compiled: float | None
    rest_over_eager: float | None
    rest_over_compiled: float | None
    distance_over_eager: float | None
    graphs_over_injected: float | None


def faster_compiled(modes: Mapping[str, Mapping]) -> str | None:
    """The forward from the measured modes."""
    measured = [mode for mode in COMPILED if mode in modes]
    return min(measured, key=lambda mode: modes[mode]["ms"]["median"], default=None)


def forwards(result: Mapping | None, weights: str = WEIGHTS) -> list[Forward]:
    """The forwards of all sizes measured with these weights."""
    rows = []
    for size, entry in (result or {"sizes": {}})["sizes"].items():
        modes = entry["weights"].get(weights, {}).get("modes", {})
        compiled = faster_compiled(modes)

        def ms(mode: str | None, modes: Mapping = modes) -> float | None:
            return modes[mode]["ms"]["median"] if mode in modes else None

        def rest(mode: str | None, modes: Mapping = modes) -> float | None:
            kernels = modes.get(mode, {}).get("kernels")
            return kernels["classes"]["other"]["ms"] if kernels else None

        def over(one: float | None, other: float | None) -> float | None:
            return one / other if one is not None and other else None

        injected = ms("injected")
        rows.append(
            Forward(
                size=size,
                eager=ms("eager"),
                compiled=ms(compiled),
                compiled_mode=compiled,
                injected=injected,
                over_eager=over(ms("eager"), injected),
                over_compiled=over(ms(compiled), injected),
                rest_over_eager=over(rest("injected"), rest("eager")),
                rest_over_compiled=over(rest("injected"), rest(compiled)),
                distance_over_eager=modes.get("injected", {}).get("distance_over_eager"),
                graphs_over_injected=over(injected, ms(models.GRAPHS)),
            )
        )
    return rows


def card_and_build(result: Mapping) -> tuple[str, str | None]:
    return result["environment"]["device"], history.commit(result["environment"])


def by_build(results: Path) -> list[dict[str, dict]]:
    """The newest result of each model, by TITLES' names, in groups of one card and one build.

    First those of the build that measured the most models, of several of these the newest; then, of the
    models that it did not measure, those of the next one.
    """
    of_builds: dict[tuple, dict[str, dict]] = {}
    for result in history.kept_together("models", results):
        if result["name"] in TITLES:
            of_builds.setdefault(card_and_build(result), {})[result["name"]] = result

    groups: list[dict[str, dict]] = []
    left = set(TITLES)

    def rank(measured: Mapping[str, Mapping]) -> tuple[int, str]:
        dates = [measured[name]["environment"]["date"] for name in measured.keys() & left]
        return len(dates), max(dates, default="")

    while left and rank(measured := max(of_builds.values(), key=rank, default={}))[0]:
        groups.append({name: measured[name] for name in TITLES if name in measured.keys() & left})
        left -= measured.keys()
    return groups


def of_all_builds(results: Path) -> dict[str, dict]:
    """The results of all groups of `by_build`."""
    return {name: result for group in by_build(results) for name, result in group.items()}


def gathered_hosts(results: Path) -> dict | None:
    """The newest CPU times of each model under each condition, and their runs."""

    def key(entry: dict) -> tuple:
        model = re.sub(r", [\d +]+ blocks", "", entry["model"])  # older results have fewer blocks
        options = (entry.get("condition", "as published"), entry.get("weights", "random"))
        return (model, *options, entry["context"], entry["mode"])

    return history.gathered("host/forward", "forwards", key, results)


# -- Pipelines ---------------------------------------------------------------------------------


def pipelines_run(results: Path, mode: str = models.REGIONAL) -> dict | None:
    """The pipelines in this mode of the card and build that measured the most of them, and their runs.

    Of several builds those of the newest run. A build's runs may have measured some pipelines each.
    """
    of_builds: dict[tuple, dict[str, tuple[dict, dict]]] = {}
    for run in history.kept("pipelines", results):
        measured = {e["name"]: (e, run) for e in run["pipelines"] if mode in e["modes"]}
        build = card_and_build(run)
        of_builds[build] = {**of_builds.pop(build, {}), **measured}  # in the order of newest runs
    most = max(reversed(of_builds.values()), key=len, default={})
    runs = {id(run): run for _, run in most.values()}
    entries = [entry for entry, _ in most.values()]
    return {"pipelines": entries, "runs": list(runs.values())} if most else None


def over(entry: Mapping, other: str, mode: str = "injected") -> float | None:
    return entry["speedups"].get(mode, {}).get(other)


def ratio(entry: Mapping, key: str, other: str, mode: str = "injected") -> float | None:
    """A mode's figure over another mode's, if both were measured."""
    mine, theirs = (entry["modes"].get(name, {}).get(key) for name in (mode, other))
    return mine / theirs if mine and theirs else None


# -- CUDA graphs -------------------------------------------------------------------------------


def gathered_forwards(results: Path) -> dict | None:
    """The newest figures of each forward with CUDA graphs, and their runs.

    Runs may have only some modes. Then it returns the newest of each set of modes that no other run's set
    contains.
    """
    gathered = history.gathered(
        "cuda_graphs",
        "graph_forwards",
        lambda f: (f["name"], f["size"], frozenset(modes_of(f))),
        results,
    )
    if gathered is not None:
        forwards = [f for f in gathered["graph_forwards"] if f["name"] in TITLES]
        order = list(TITLES)
        chosen = sorted(
            (f for f in forwards if not any(has_more_modes(other, f) for other in forwards)),
            key=lambda f: (order.index(f["name"]), f["tokens"], -len(modes_of(f))),
        )
        gathered["graph_forwards"] = chosen
        gathered["runs"] = [
            run
            for run in gathered["runs"]
            if any(forward in run["graph_forwards"] for forward in chosen)
        ]
    return gathered


def modes_of(forward: Mapping) -> set[str]:
    """All measured modes of a forward with CUDA graphs."""
    return {mode for weights in forward["weights"].values() for mode in weights["modes"]}


def has_more_modes(other: Mapping, forward: Mapping) -> bool:
    is_same = (other["name"], other["size"]) == (forward["name"], forward["size"])
    return is_same and modes_of(other) > modes_of(forward)


def of_weights(forward: Mapping) -> Mapping:
    """The measurements of a forward with CUDA graphs with WEIGHTS, or with its only ones."""
    by_weights = forward["weights"]
    return by_weights.get(WEIGHTS) or next(iter(by_weights.values()))


def graphs_over(forward: Mapping, other: str) -> float | None:
    """Speedup with CUDA graphs over another mode, back to back."""
    return of_weights(forward)["speedups"].get(models.GRAPHS, {}).get(other)
