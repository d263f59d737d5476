"""Forwards of whole models, training, and the host's time."""

from __future__ import annotations

from pathlib import Path

import targets

from .common import (
    MODE_NAMES,
    is_measured,
    load,
    markdown,
    milliseconds,
    setup,
    size_name,
    table,
    times,
    unmeasured,
)
from .readme import rows_of_models

CLASSES = {
    "matrix products": ("gemm",),
    "attention": ("attention",),
    "everything else": ("other", "convolution"),
}


@table
def models_in_detail(results: Path) -> str:
    """Random weights, the GPU's other time, the distance from float32, and CUDA graphs, of each model."""

    def cells(result: dict, forward: targets.Forward) -> list[str]:
        of_random = {f.size: f for f in targets.forwards(result, "random")}[forward.size]
        ratios = [of_random.over_eager, of_random.over_compiled]
        ratios += [forward.rest_over_eager, forward.rest_over_compiled]
        ratios += [forward.distance_over_eager, forward.graphs_over_injected]
        return [times(ratio) for ratio in ratios]

    headers = ["model and input", "random weights: over eager", "over torch.compile"]
    headers += ["other GPU time: of eager's", "of torch.compile's"]
    headers += ["distance from float32: of eager's", "CUDA graphs over injected"]
    measured = targets.of_one_build(results).values()
    return markdown(rows_of_models(results, cells), headers) + setup(*measured)


@table
def in_part(results: Path) -> str:
    """Models replaced in part, compiled: with the kernels over without."""
    if not is_measured(results, "in_part"):
        return unmeasured("in_part")
    result = load(results, "in_part")
    rows = [
        [entry["model"], times(entry["speedup"]), ", ".join(map(times, entry["speedups"]))]
        for entry in result["in_part"]
    ]
    headers = ["model", "over torch.compile", "each run"]
    return markdown(rows, headers) + setup(result)


@table
def breakdown(results: Path) -> str:
    """The GPU time of LTX-Video's forward by kernel class."""
    result = load(results, "models")
    rows = []
    for size, entry in result["sizes"].items():
        for mode, measured in entry["weights"][targets.MODEL_WEIGHTS]["modes"].items():
            kernels = measured["kernels"]
            # Older results count convolutions as something else.
            rows.append(
                [size_name(size), MODE_NAMES[mode]]
                + [
                    milliseconds(sum(kernels["classes"].get(key, {"ms": 0})["ms"] for key in keys))
                    for keys in CLASSES.values()
                ]
                + [milliseconds(kernels["idle_ms"]), f"{kernels['total']['launches']:.0f}"]
            )
    headers = ["input", "mode", *CLASSES, "between kernels", "launches"]
    return markdown(rows, headers) + setup(result)


@table
def injection(results: Path) -> str:
    """The time and the memory that injecting the kernels takes, by model."""
    measured = targets.of_one_build(results)
    rows = []
    for result in measured.values():
        for size, entry in result["sizes"].items():
            took = entry["injection"]
            rows.append(
                [
                    f"{result['model']}, {size_name(size)}",
                    f"{took['change_s'] * 1e3:.0f} ms",
                    f"{took['full_speed_s']:.2f} s",
                    f"{took['allocated_growth_bytes'] / took['weights_bytes']:.2%}",
                ]
            )
    headers = ["model and input", "inject_kernels", "full speed after", "memory growth"]
    return markdown(rows, headers) + setup(*measured.values())


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
    """The host's time for a whole forward, eager and injected, under torch.inference_mode."""
    gathered = targets.gathered_hosts(results)
    if gathered is None:
        return unmeasured("host_forward")
    pairs: dict[tuple[str, str], dict[str, dict]] = {}
    for entry in gathered["forwards"]:
        if entry["context"] == "inference_mode":
            key = (entry["model"], entry.get("condition", "as published"))
            pairs.setdefault(key, {})[entry["mode"]] = entry
    rows = []
    for (model, condition), modes in pairs.items():
        injected = modes["injected"]
        kernels = injected.get("kernels")
        rows.append(
            [
                model,
                condition,
                milliseconds(modes["eager"]["ms"]["median"], 2) if "eager" in modes else "",
                milliseconds(injected["ms"]["median"], 2),
                times(injected.get("over_eager")),
                milliseconds(kernels and kernels["ms"], 2),
                f"{kernels['launches']:.0f}" if kernels else "",
            ]
        )
    headers = ["model", "condition", "host time: eager", "injected", "of eager's"]
    headers += ["GPU time, injected", "launches, injected"]
    processors = sorted({run["processor"] for run in gathered["runs"]})
    return markdown(rows, headers) + setup(*gathered["runs"]) + f", on {', '.join(processors)}"


@table
def accuracy_models(results: Path) -> str:
    """The injected and the eager model's distance from the float32 model."""
    result = load(results, "accuracy")
    rows = [
        [
            f"{size_name(entry['size'])}, {entry['dtype']}",
            f"{entry['kernel']:.5f}",
            f"{entry['eager']:.5f}",
            f"{entry['ratio']:.3f}",
        ]
        for entry in result["models"]
    ]
    return markdown(rows, ["distance from float32", "injected", "eager", "ratio"]) + setup(result)


@table
def training(results: Path) -> str:
    """A training step of LTX-Video's blocks, eager and injected."""
    if not is_measured(results, "training"):
        return unmeasured("training")
    result = load(results, "training")
    blocks = result["blocks"]
    eager, injected = (blocks["modes"][mode] for mode in ("eager", "injected"))
    rows = []
    for part in ("forward", "forward and backward"):
        one, other = (mode[part]["median"] for mode in (eager, injected))
        rows.append([part, *(milliseconds(value) for value in (one, other)), times(one / other)])
        one, other = (mode[f"{part}, GPU time"] for mode in (eager, injected))
        what = f"{part}, GPU time"
        rows.append([what, *(milliseconds(value) for value in (one, other)), times(one / other)])
    memory = [mode["peak_bytes"] / 2**20 for mode in (eager, injected)]
    rows.append(
        ["peak memory", *(f"{value:.0f} MiB" for value in memory), times(memory[0] / memory[1])]
    )
    errors = [mode["gradient_error"] for mode in (eager, injected)]
    rows.append(
        ["gradients' error", *(f"{value:.5f}" for value in errors), times(errors[0] / errors[1])]
    )
    headers = [
        f"{blocks['model']}, {size_name(blocks['size'])}",
        *("eager", "injected", "eager over injected"),
    ]
    return markdown(rows, headers) + setup(result)


@table
def training_gradients(results: Path) -> str:
    """The error of all gradients of small models, over eager training's."""
    if not is_measured(results, "training"):
        return unmeasured("training")
    result = load(results, "training")
    rows = [
        [
            entry["model"],
            f"{entry['error_over_eager']:.4f}",
            f"{entry['standard_error']:.4f}",
            str(entry["samples"]),
        ]
        for entry in result["gradients"]
    ]
    headers = ["model", "error of eager's", "standard error", "samples"]
    return markdown(rows, headers) + setup(result)


@table
def training_lora(results: Path) -> str:
    """How far the loss of LoRA training is from eager's at most, beside what other data and float32 do."""
    if not is_measured(results, "training"):
        return unmeasured("training")
    result = load(results, "training")
    kinds = list(result["lora"][0]["largest_deviation_from_eager"])
    rows = [
        [
            entry["model"],
            *(f"{entry['largest_deviation_from_eager'][kind]:.5f}" for kind in kinds),
        ]
        for entry in result["lora"]
    ]
    return markdown(rows, ["largest deviation from eager's loss", *kinds]) + setup(result)
