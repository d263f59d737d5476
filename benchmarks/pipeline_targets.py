"""Targets of whole pipelines, and the measured figures beside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import history
import models
from targets import Target, furthest


class Aims(NamedTuple):
    """How many times as fast as eager and as torch.compile."""

    title: str
    over_eager: float | None = None
    over_compiled: float | None = None
    mode: str = "injected"


PIPELINES = {
    "flux": Aims("FLUX.1-dev", 1.45, 1.12),
    "flux2": Aims("FLUX.2-dev"),
    "flux3": Aims("FLUX.3", 1.55, 1.14),
    "qwenimage": Aims("Qwen-Image", 1.45, 1.12),
    "sd3": Aims("Stable Diffusion 3.5 Large", 1.65, 1.15),
    "z_image": Aims("Z-Image-Turbo", 1.70, 1.13),
    "sdxl": Aims("Stable Diffusion XL, channels last", 2.0, 1.5, models.GRAPHS),
    "wan": Aims("Wan 2.1 14B", 1.30, 1.14),
    "ltx": Aims("LTX-Video 2B", 1.55, 1.14),
    "ltx2": Aims("LTX-2", 1.55, 1.12),
    "hunyuan_video15": Aims("HunyuanVideo 1.5", 3.0, 2.3),
}
DECODER_OVER_EAGER = {"flux": 1.15, "ltx": 1.10, "wan": 1.25}
OVER_FA3 = dict.fromkeys(("flux", "wan", "ltx"), 1.08)
ENERGY_OVER_EAGER, ENERGY_OVER_COMPILED = 0.85, 1.00  # of pipelines at the power limit
MEMORY_OVER_EAGER = 1.01
# Share of the samples in which the power limit lowered the clock.
AT_POWER_LIMIT = 0.9
UNMEASURED: dict[str, dict] = {"modes": {}, "speedups": {}}


def gathered(results: Path) -> dict | None:
    """The newest result of each pipeline on the shown card, in the order of PIPELINES."""
    found = history.gathered("pipelines", "pipelines", lambda entry: entry["name"], results)
    if found is not None:
        order = list(PIPELINES)
        found["pipelines"].sort(key=lambda entry: order.index(entry["name"]))
    return found


def over(entry: Mapping, other: str, mode: str = "injected") -> float | None:
    return entry["speedups"].get(mode, {}).get(other)


def ratio(entry: Mapping, key: str, other: str, mode: str = "injected") -> float | None:
    """A mode's figure over another mode's, if both were measured."""
    mine, theirs = (entry["modes"].get(name, {}).get(key) for name in (mode, other))
    return mine / theirs if mine and theirs else None


def is_at_power_limit(entry: Mapping) -> bool:
    return (entry["modes"]["eager"].get("power_cap") or 0) >= AT_POWER_LIMIT


def evaluate(found: Mapping | None) -> list[Target]:
    """Rows of each pipeline's speed, then of all pipelines' energy and memory at their worst."""
    measured = {entry["name"]: entry for entry in (found or {"pipelines": []})["pipelines"]}
    rows = []
    for name, aims in PIPELINES.items():
        comparisons = [
            ("over eager", "eager", aims.over_eager),
            ("over torch.compile", models.REGIONAL, aims.over_compiled),
            ("over torch.compile with FA3", models.FA3, OVER_FA3.get(name)),
        ]
        rows += [
            Target(
                f"pipeline, {aims.mode}, {what}",
                aims.title,
                aim,
                over(measured.get(name, UNMEASURED), other, aims.mode),
                "×",
            )
            for what, other, aim in comparisons
            if aim is not None
        ]
    rows += [
        Target(
            "pipeline, the decoder over eager",
            PIPELINES[name].title,
            aim,
            ratio(measured.get(name, UNMEASURED), "decoder_s", "injected", "eager"),
            "×",
        )
        for name, aim in DECODER_OVER_EAGER.items()
    ]
    limited = [entry for entry in measured.values() if is_at_power_limit(entry)]
    for what, entries, key, other, aim in (
        ("energy over eager's, at the power limit", limited, "joules", "eager", ENERGY_OVER_EAGER),
        (
            "energy over torch.compile's, at the power limit",
            limited,
            "joules",
            models.REGIONAL,
            ENERGY_OVER_COMPILED,
        ),
        (
            "peak memory over eager's",
            list(measured.values()),
            "peak_bytes",
            "eager",
            MEMORY_OVER_EAGER,
        ),
    ):
        figures = [(entry["title"], ratio(entry, key, other)) for entry in entries]
        figures = figures or [("all pipelines", None)]
        rows.append(furthest(f"pipeline, {what}", figures, aim, "×", is_upper_bound=True))
    return rows
