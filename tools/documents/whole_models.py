"""Forwards and pipelines of whole models, and the host's time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import history
import targets

from .common import (
    ELSEWHERE,
    MODE_NAMES,
    elsewhere,
    image_name,
    is_measured,
    load,
    markdown,
    setup,
    size_name,
    table,
    times,
    unmeasured,
    video_name,
)


def forwards(result: dict, label: Callable[[str, dict], str]) -> str:
    """One forward in each mode and with all weights, its size called what `label` makes of it."""
    rows = [
        [
            label(size, entry),
            weights,
            MODE_NAMES[mode],
            f"{measured['ms']['median']:.1f} ms",
            times(of_weights["speedups"][mode].get("eager")),
            times(of_weights["speedups"][mode].get(targets.faster_compiled(of_weights["modes"]))),
        ]
        for size, entry in result["sizes"].items()
        for weights, of_weights in entry["weights"].items()
        for mode, measured in of_weights["modes"].items()
    ]
    headers = ["input", "weights", "mode", "forward", "against eager", "against torch.compile"]
    return markdown(rows, headers) + setup(result)


def ms_of_classes(kernels: dict, *classes: str) -> float:
    """Older results count convolutions as something else."""
    return sum(kernels["classes"][name]["ms"] for name in classes if name in kernels["classes"])


@table
def models(results: Path) -> str:
    """One forward of LTX-Video's transformer in each mode."""

    def label(size: str, entry: dict) -> str:
        return f"{video_name(size)}, {entry['batch']}×{entry['tokens']} tokens"

    return forwards(load(results, "models"), label)


@table
def flux(results: Path) -> str:
    """One forward of FLUX.1's transformer in each mode."""
    if not is_measured(results, "flux"):
        return unmeasured("flux")

    def label(size: str, entry: dict) -> str:
        return f"{image_name(size)}, {entry['tokens']} + {entry['text_tokens']} tokens"

    return forwards(load(results, "flux"), label)


def milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} ms"


def compiled_cell(forward: targets.Forward) -> str:
    """The time, and what was compiled."""
    what = {"compiled": "whole", "compiled-regional": "blocks", None: ""}[forward.compiled_mode]
    return " ".join(filter(None, [milliseconds(forward.compiled), what]))


@table
def all_models(results: Path) -> str:
    """One injected forward of each model beside eager and torch.compile, with peaked weights."""
    rows, loaded = [], []
    for name, title in targets.TITLES.items():
        if not is_measured(results, name):
            rows.append([title, *[""] * 3, "not measured", *[""] * 4])
            continue
        result = load(results, name)
        loaded.append(result)
        rows += [
            [
                f"{result['model']}, {size_name(forward.size)}",
                milliseconds(forward.eager),
                compiled_cell(forward),
                milliseconds(forward.injected),
                *(times(value) for value in (forward.over_eager, forward.over_compiled)),
                *(times(value) for value in (forward.rest_over_eager, forward.rest_over_compiled)),
                times(forward.distance_over_eager),
            ]
            for forward in targets.forwards(result)
        ]
    headers = ["one forward", "eager", "torch.compile", "injected", "over eager"]
    headers += ["over torch.compile", "rest over eager's", "rest over torch.compile's"]
    headers += ["distance over eager's"]
    return markdown(rows, headers) + (setup(*loaded) if loaded else "")


@table
def breakdown(results: Path) -> str:
    """The forward's GPU time by kernel class."""
    result = load(results, "models")
    rows = []
    for size, entry in result["sizes"].items():
        for weights, of_weights in entry["weights"].items():
            for mode, measured in of_weights["modes"].items():
                kernels = measured["kernels"]
                rows.append(
                    [video_name(size), weights, MODE_NAMES[mode]]
                    + [
                        f"{ms_of_classes(kernels, *keys):.1f} ms"
                        for keys in (("gemm",), ("attention",), ("other", "convolution"))
                    ]
                    + [f"{kernels['idle_ms']:.1f} ms", f"{kernels['total']['launches']:.0f}"]
                )
    classes = ["matrix products", "attention", "everything else", "between kernels"]
    headers = ["input", "weights", "mode", *classes, "launches"]
    return markdown(rows, headers) + setup(result)


@table
def injection(results: Path) -> str:
    """What injecting the kernels takes."""
    result = load(results, "models")
    rows = [
        [
            video_name(size),
            f"{took['change_s'] * 1e3:.0f} ms",
            f"{took['full_speed_s']:.2f} s",
            f"{took['allocated_growth_bytes'] / took['weights_bytes']:.2%}",
        ]
        for size, took in ((size, entry["injection"]) for size, entry in result["sizes"].items())
    ]
    headers = ["input", "inject_kernels", "full speed after", "memory growth"]
    return markdown(rows, headers) + setup(result)


@table
def pipeline(results: Path) -> str:
    """The whole pipeline but the text encoder."""
    loaded = [load(results, "pipeline")]
    if not targets.has_graphs(loaded[0]):
        with_graphs = history.shown("pipeline", results, targets.has_graphs)
        loaded += [with_graphs] if with_graphs else []
    rows = [
        [
            video_name(video) + mark,
            MODE_NAMES[mode],
            f"{measured['seconds']['median']:.2f} s",
            times(entry["speedups"][mode].get("eager")),
        ]
        for result, mark in zip(loaded, ("", ELSEWHERE), strict=False)
        for video, entry in result["videos"].items()
        for mode, measured in entry["modes"].items()
    ]
    note = elsewhere(rows, loaded)
    return markdown(rows, ["video", "mode", "time", "against eager"]) + note + setup(*loaded)


@table
def host(results: Path) -> str:
    """The host's time for a call."""
    result = load(results, "host")
    rows = [
        [
            call["operation"].replace("torch ", "torch.nn.functional."),
            f"{call['microseconds']['median']:.1f} µs",
            times(call["over_yardstick"]),
        ]
        for call in result["calls"]
    ]
    headers = ["call", "host time", "of torch.nn.functional.rms_norm's"]
    return markdown(rows, headers) + setup(result) + f", on {result['processor']}"


@table
def host_forward(results: Path) -> str:
    """The host's time for a whole forward."""
    gathered = targets.gathered_hosts(results)
    if gathered is None:
        return unmeasured("host_forward")
    rows = []
    for entry in gathered["forwards"]:
        kernels = entry.get("kernels")
        rows.append(
            [
                f"{entry['model']}: {entry['batch']}×({entry['tokens']} + {entry['text_tokens']}) tokens",
                entry.get("condition", "as published"),
                entry.get("weights", "random"),
                f"torch.{entry['context']}",
                MODE_NAMES[entry["mode"]],
                f"{entry['ms']['median']:.2f} ms",
                times(entry.get("over_eager")),
                f"{kernels['ms']:.2f} ms" if kernels else "",
                f"{kernels['launches']:.0f}" if kernels else "",
            ]
        )
    headers = ["model", "condition", "weights", "under", "mode"]
    headers += ["host time", "of eager's", "GPU's time", "launches"]
    processors = sorted({run["processor"] for run in gathered["runs"]})
    return markdown(rows, headers) + setup(*gathered["runs"]) + f", on {', '.join(processors)}"


@table
def accuracy_models(results: Path) -> str:
    """The injected and the eager model's distance from the float32 model."""
    result = load(results, "accuracy")
    rows = [
        [
            f"{video_name(entry['size'])}, {entry['dtype']}",
            f"{entry['kernel']:.5f}",
            f"{entry['eager']:.5f}",
            f"{entry['ratio']:.3f}",
        ]
        for entry in result["models"]
    ]
    return markdown(rows, ["distance from float32", "injected", "eager", "ratio"]) + setup(result)
