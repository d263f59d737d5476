"""Targets of FP8, and the measured figures beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import models
from pipeline_targets import UNMEASURED, over, ratio
from targets import MODEL_WEIGHTS, Target, furthest, label, sized

# Products over torch._scaled_mm with exact accumulation; their error over its (the order of additions
# differs); a product with GELU over the product alone; norms with a quantized result over a copy.
OVER_EXACT, ERROR_OVER_EXACT, GELU_OVER_PRODUCT, NORM_OF_COPY = 1.15, 1.001, 1.08, 0.94


class Aims(NamedTuple):
    """How many times as fast as eager and as injected in bfloat16."""

    title: str
    size: str
    over_eager: float
    over_injected: float


FORWARDS = {
    "ltx": Aims("LTX-Video 2B", "161x512x768", 2.05, 1.28),
    "flux": Aims("FLUX.1", "1024x1024", 2.1, 1.36),
    "flux2": Aims("FLUX.2", "1024x1024", 2.0, 1.50),
    "qwenimage": Aims("Qwen-Image", "1024x1024", 2.0, 1.35),
    "wan": Aims("Wan 2.1 14B", "81x480x832", 1.55, 1.18),
}
BACK_TO_BACK = ("flux", "qwenimage")  # also measured with several forwards back to back
OVER_TORCHAO_COMPILED = {"ltx": 1.20, "flux": 1.20}
PIPELINE_OVER_EAGER = {"flux": 1.95, "ltx": 1.85}
PIPELINE_ENERGY_OVER_INJECTED = {"flux": 0.70}
MEMORY_OVER_EAGER = {"flux": 0.65, "wan": 0.65}
DISTANCE_OVER_TORCHAO = 1.0
FULL_SPEED_S = 2.0


def evaluate(results: Mapping[str, Mapping], pipelines: Mapping | None) -> list[Target]:
    """All rows, from the results by name and the gathered pipelines, of which any may be missing."""
    rows = operations(results["fp8"]) if "fp8" in results else []
    for name, aims in FORWARDS.items():
        rows += _forwards(aims, "FP8", results.get(f"fp8_{name}"))
        if name in BACK_TO_BACK:
            back_to_back = results.get(f"fp8_back_to_back_{name}")
            rows += _forwards(aims, "FP8, back to back,", back_to_back)
    for name, aim in OVER_TORCHAO_COMPILED.items():
        times = _over(FORWARDS[name], results.get(f"fp8_compiled_{name}"), models.TORCHAO_COMPILED)
        rows.append(Target("FP8 over torchao compiled", FORWARDS[name].title, aim, times, "×"))
    for name, aim in MEMORY_OVER_EAGER.items():
        peaks = _size(FORWARDS[name], results.get(f"fp8_{name}")).get("peak_bytes")
        share = peaks[models.INJECTED_FP8] / peaks["eager"] if peaks else None
        what = "FP8: peak memory over eager's"
        rows.append(Target(what, FORWARDS[name].title, aim, share, "×", is_upper_bound=True))
    for what, aim, key, unit in (
        ("FP8: distance from float32 over torchao's", DISTANCE_OVER_TORCHAO, _distance, "×"),
        ("FP8: from the injection to full speed", FULL_SPEED_S, _full_speed, " s"),
    ):
        figures = [figure for name in FORWARDS for figure in key(results.get(f"fp8_{name}"))]
        figures = figures or [("all models", None)]
        rows.append(furthest(what, figures, aim, unit, is_upper_bound=True))
    return rows + _pipelines(pipelines)


def operations(result: Mapping) -> list[Target]:
    """Rows of products, alone and with GELU, and of norms with a quantized result, with a cold cache."""

    def medians(entry: Mapping) -> dict[str, float]:
        return {mode: times["median"] for mode, times in entry["microseconds"].items()}

    products = {f"linear_fp8 {'×'.join(map(str, e['size']))}": e for e in result["fp8"]["products"]}
    speedups = [(name, medians(e)["exact"] / medians(e)["ours"]) for name, e in products.items()]
    errors = [(name, e["errors"]["ours"] / e["errors"]["exact"]) for name, e in products.items()]
    gelu = [
        ("×".join(map(str, entry["size"])), medians(entry)["ours"] / medians(entry)["product"])
        for entry in result["fp8"]["fused"]
        if entry["operation"] == "linear_gelu_fp8"
    ]
    norms = [
        (label({**entry, "variant": ""}), medians(entry)["copy"] / medians(entry)["ours"])
        for entry in result["fp8"]["rows"]
        if "norm" in entry["operation"]
    ]
    bounds = (
        ("FP8 products' error over exact accumulation's", errors, ERROR_OVER_EXACT),
        ("linear_gelu_fp8 over the product alone", gelu, GELU_OVER_PRODUCT),
    )
    return [
        furthest("FP8 products over exact accumulation", speedups, OVER_EXACT, "×"),
        furthest("norms with an FP8 result: of a copy's rate", norms, NORM_OF_COPY, "×"),
        *(furthest(*bound, "×", is_upper_bound=True) for bound in bounds),
    ]


def _forwards(aims: Aims, what: str, result: Mapping | None) -> list[Target]:
    return [
        Target(
            f"{what} over {other}",
            sized(aims.title, aims.size),
            aim,
            _over(aims, result, mode),
            "×",
        )
        for other, mode, aim in (
            ("eager", "eager", aims.over_eager),
            ("injected in bfloat16", "injected", aims.over_injected),
        )
    ]


def _size(aims: Aims, result: Mapping | None) -> Mapping:
    return result["sizes"].get(aims.size, {}) if result else {}


def _over(aims: Aims, result: Mapping | None, other: str) -> float | None:
    of_weights = _size(aims, result).get("weights", {}).get(MODEL_WEIGHTS)
    return of_weights["speedups"][models.INJECTED_FP8].get(other) if of_weights else None


def _distance(result: Mapping | None) -> Iterator[tuple[str, float]]:
    """Of a model's sizes and weights, where both distances were measured."""
    for size, entry in result["sizes"].items() if result else ():
        for weights, of_weights in entry["weights"].items():
            ours, torchaos = (
                of_weights["modes"].get(mode, {}).get("distance_from_float32")
                for mode in (models.INJECTED_FP8, models.TORCHAO)
            )
            if ours and torchaos:
                yield f"{sized(result['model'], size)}, {weights}", ours / torchaos


def _full_speed(result: Mapping | None) -> Iterator[tuple[str, float]]:
    """Of models that torchao has quantized, and of those that the injection quantizes."""
    how = {mode: f', precision="{name}"' for mode, name in models.PRECISION_MODES.items()}
    for size, entry in result["sizes"].items() if result else ():
        for mode in (models.INJECTED_FP8, *models.PRECISION_MODES):
            if (injection := entry.get(models.INJECTIONS[mode])) is not None:
                of = sized(result["model"], size) + how.get(mode, "")
                yield of, injection["full_speed_s"]


def _pipelines(found: Mapping | None) -> list[Target]:
    entries = {entry["name"]: entry for entry in found["pipelines"]} if found else {}
    rows = []
    for name, aim in PIPELINE_OVER_EAGER.items():
        times = over(entries.get(name, UNMEASURED), "eager", models.INJECTED_FP8)
        rows.append(
            Target("FP8, whole pipeline, over eager", FORWARDS[name].title, aim, times, "×")
        )
    for name, aim in PIPELINE_ENERGY_OVER_INJECTED.items():
        what, title = "FP8, whole pipeline: energy over injected in bfloat16", FORWARDS[name].title
        joules = ratio(entries.get(name, UNMEASURED), "joules", "injected", models.INJECTED_FP8)
        rows.append(Target(what, title, aim, joules, "×", is_upper_bound=True))
    return rows
