"""Forwards of whole models, on one GPU and on several, their errors, training, and the CPU time of calls."""

from __future__ import annotations

import functools
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import tomllib

from benchmarks import models
from benchmarks.harness import history
from benchmarks.harness.history import degree_of

import accuracy

from . import chosen
from .common import (
    FIGURES,
    MODE_NAMES,
    NOT_MEASURED,
    figure,
    load,
    markdown,
    milliseconds,
    setup,
    size_name,
    span,
    table,
    there,
    times,
)

VIDEO_MODES = {
    **MODE_NAMES,
    "eager-again": "eager, again",
    "eager-efficient": "eager, memory-efficient attention",
    "eager-math": "eager, unfused attention",
    "eager-float32": "eager in float32",
}


def tables_of_models(
    results: Path, headers: list[str], cells: Callable[[chosen.Forward], list[str]]
) -> str:
    """A row a forward of all models; the cells after the name are `cells`' of it. A table has one card and
    build."""
    return "\n\n".join(
        markdown(
            [
                [f"{result['model']}, {size_name(forward.size)}", *cells(forward)]
                for result in group.values()
                for forward in chosen.forwards(result)
            ],
            ["model and input", *headers],
        )
        + setup(*group.values())
        for group in chosen.by_build(results)
    )


@table
def summary_models(results: Path) -> str:
    """The injected forward of each model beside the eager and the compiled one."""

    def cells(forward: chosen.Forward) -> list[str]:
        times_ms = (forward.eager, forward.compiled, forward.injected)
        ratios = [forward.over_eager, forward.over_compiled]
        return [*map(milliseconds, times_ms), *map(times, ratios)]

    headers = ["eager", "torch.compile", "injected", "over eager", "over torch.compile"]
    return tables_of_models(results, headers, cells)


@table
def models_in_detail(results: Path) -> str:
    """The GPU's other time, the distance from float32, and CUDA graphs, of each model."""

    def cells(forward: chosen.Forward) -> list[str]:
        ratios = [forward.rest_over_eager, forward.rest_over_compiled]
        ratios += [forward.distance_over_eager, forward.graphs_over_injected]
        return [times(ratio) for ratio in ratios]

    headers = ["other GPU time: of eager's", "of torch.compile's"]
    headers += ["distance from float32: of eager's", "CUDA graphs over injected"]
    return tables_of_models(results, headers, cells)


@table
def in_part(results: Path) -> str:
    """Models replaced in part: each injected mode over torch.compile, and all runs of the best one."""
    measured = history.gathered("in_part", "in_part", lambda entry: entry["model"], results)
    measured = there(measured, "in_part")
    modes = ("injected", models.GRAPHS, "injected+compiled")
    rows = [
        [
            entry["model"],
            *(times(entry["speedup"].get(mode)) for mode in modes),
            ", ".join(map(times, entry["speedups"].get(entry["best"], ()))),
        ]
        for entry in measured["in_part"]
    ]
    headers = ["model", "injected", "with CUDA graphs", "injected and compiled", "best, each run"]
    return markdown(rows, headers) + setup(*measured["runs"])


# HunyuanVideo 1.5's default attention has a dense mask.
def families_over(results: Path, other: str) -> str:
    """Of the table of all models."""
    measured = chosen.of_all_builds(results)
    shown = [
        forward
        for name, result in measured.items()
        if name != "hunyuan_video15"
        for forward in chosen.forwards(result)
    ]
    return span([getattr(forward, f"over_{other}") for forward in shown])


for other in ("eager", "compiled"):
    FIGURES[f"families_over_{other}"] = functools.partial(families_over, other=other)


@figure
def models_count(_: Path) -> str:
    """Model classes of diffusers that run in full, without ControlNets."""
    table = Path(__file__).parents[2] / "docs" / "support.toml"
    in_full = tomllib.loads(table.read_text(encoding="utf-8"))["levels"]["in full"]
    return str(sum("ControlNet" not in name for name in in_full))


@figure
def full_speed_after(results: Path) -> str:
    """Seconds from the injection on, the most of all models."""
    kept = history.kept_together("models", results)
    sizes = [size for result in kept for size in result["sizes"].values()]
    seconds = [size["injection"]["full_speed_s"] for size in sizes if "injection" in size]
    return f"{max(seconds):.2f}" if seconds else NOT_MEASURED


@figure
def peaked_scores_std(_: Path) -> str:
    """The standard deviation of self-attention's scores with these weights, in nats."""
    return f"{models.WEIGHTS['peaked']:.0f}"


# -- CPU time ----------------------------------------------------------------------------------


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
    gathered = there(chosen.gathered_hosts(results), "host/forward")
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


# -- Errors ------------------------------------------------------------------------------------


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


@figure
def accuracy_contract(results: Path) -> str:
    """What the tests hold the errors over eager's to."""
    return f"{accuracy.ACCURACY_CONTRACT}"


@figure
def operations_error(results: Path) -> str:
    """The largest error of an operation over eager's."""
    return f"{max(e['ratio'] for e in load(results, 'accuracy')['operations']):.3f}"


def distances_over_eager(results: Path) -> dict[str, list[float]]:
    """The injected models' distances from float32 over eager's, by model."""
    of_models = {
        name: [forward.distance_over_eager for forward in chosen.forwards(result)]
        for name, result in chosen.of_all_builds(results).items()
    }
    known = {name: list(filter(None, values)) for name, values in of_models.items()}
    return {name: values for name, values in known.items() if values}


@figure
def models_distance(results: Path) -> str:
    return span([value for values in distances_over_eager(results).values() for value in values])


@figure
def models_distance_count(results: Path) -> str:
    return f"{len(distances_over_eager(results))} models"


def decibels(psnr: dict | None, missing: str) -> str:
    return missing if psnr is None else f"{psnr['median']:.1f}, {psnr['min']:.1f} dB"


def videos(results: Path, name: str) -> str:
    """Each mode: shares of right figures, PSNR and SSIM against eager, PSNR against eager in float32."""
    result = load(results, name)
    rows = []
    for mode, entry in result["videos"].items():
        equal = "" if mode == "eager" else "equal"
        rows.append(
            [
                VIDEO_MODES[mode],
                *(f"{share:.1%}" for share in entry["right"].values()),
                decibels(entry["psnr_db"], equal),
                equal if entry["ssim"] is None else f"{entry['ssim']['median']:.4f}",
                decibels(entry["psnr_to_float32_db"], ""),
            ]
        )
    headers = ["mode", "color", "motion", "shape", "PSNR: median, lowest", "SSIM, median"]
    headers.append("PSNR to float32: median, lowest")
    size = "x".join(map(str, (*result["size"][3:], *result["size"][1:3])))
    what = f"{result['captions']} captions, {size_name(size)}, {result['size'][0]} steps"
    return markdown(rows, headers) + f"\n\n{what}, {result['dtype']}." + setup(result)


@table
def quality(results: Path) -> str:
    return videos(results, "quality")


@table
def int8_quality(results: Path) -> str:
    return videos(results, "quality/int8")


@table
def fp8_quality(results: Path) -> str:
    return videos(results, "quality/fp8")


def detected(results: Path, mode: str) -> str:
    """The share of all properties of figures that the detector finds, of color, motion and shape alike."""
    right = load(results, "quality/fp8")["videos"][mode]["right"]
    return f"{statistics.fmean(right.values()):.1%}"


DETECTED = {
    "eager": "eager",
    "backend": "eager-efficient",
    "injected": "injected",
    "fp8": models.INJECTED_FP8,
}
for name, mode in DETECTED.items():
    FIGURES[f"detected_{name}"] = functools.partial(detected, mode=mode)


@figure
def quality_captions(results: Path) -> str:
    return str(load(results, "quality/fp8")["captions"])


# -- Training ----------------------------------------------------------------------------------


@table
def training(results: Path) -> str:
    """A training step of LTX-Video's blocks, eager and injected."""
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


def training_over_eager(results: Path, part: str) -> str:
    """The time of a step over eager's."""
    modes = load(results, "training")["blocks"]["modes"]
    injected, eager = (modes[mode][part] for mode in ("injected", "eager"))
    if isinstance(injected, dict):
        injected, eager = injected["median"], eager["median"]
    return f"{injected / eager:.2f}"


FIGURES["training_wall"] = functools.partial(training_over_eager, part="forward and backward")
FIGURES["training_gpu"] = functools.partial(
    training_over_eager, part="forward and backward, GPU time"
)


# ------------------------------------------------------------------------------------------------
# Several GPUs: steps, whole pipelines and decoders, and the forwards of one modelled rank.


GPUS, MODELLED = "parallel", "parallel/modelled"
PRECISIONS = {None: "", "fp8": ", FP8"}
TILINGS = {"injected": "none", "tiled": "four", "default-tiles": "diffusers'"}


def part_of(entry: dict) -> str:
    """A step, a pipeline or a decode."""
    return entry.get("part", "step")


def gathered(results: Path, name: str) -> dict | None:
    """The newest entries of each model, size and number of GPUs."""

    def key(entry: dict) -> tuple:
        of_inputs = tuple(entry.get("changed_inputs", ())), entry.get("steps")
        model = part_of(entry), entry["model"], entry["size"], entry.get("precision")
        return *model, *of_inputs, tuple(entry["degrees"])

    return history.gathered(name, "parallel", key, results)


def label_of(entry: dict) -> str:
    """The model, how many of its blocks were measured, and the input."""
    kept, published = (
        " + ".join(map(str, entry.get(key, {}).values())) for key in ("blocks", "published_blocks")
    )
    blocks = "" if kept == published else f", {kept} of {published} blocks"
    steps = f":{entry['steps']}" if "steps" in entry else ""
    precision = PRECISIONS[entry.get("precision")]
    return f"{entry['model']}{precision}{blocks}, {size_name(entry['size'] + steps)}"


def split_of(mode: str) -> str:
    """A mode without its kind: "" on one GPU, otherwise as in "ring2+ulysses2"."""
    return mode.partition("+")[2]


def split_name(split: str) -> str:
    parts = re.findall(r"([a-z]+)(\d+)", split)
    named = [f"{'Ulysses' if name == 'ulysses' else name} {degree}" for name, degree in parts]
    return " × ".join(named) or "one GPU"


Kinds = dict[str, dict]


def timed(entry: dict) -> dict[str, dict]:
    """The modes that have times. A run that was cut short has others."""
    return {mode: measured for mode, measured in entry["modes"].items() if "ms" in measured}


def by_split(entry: dict) -> dict[str, Kinds]:
    """The measured kinds of each way to share the work."""
    splits: dict[str, Kinds] = {}
    for mode, measured in timed(entry).items():
        splits.setdefault(split_of(mode), {})[mode.partition("+")[0]] = measured
    return splits


def speedup(measured: dict | None) -> str:
    """Over one GPU, and its share of the number of GPUs."""
    if not measured or "speedup" not in measured:
        return ""
    return f"{measured['speedup']:.2f}× ({measured['of_linear']:.0%})"


def distance(measured: dict) -> str:
    value = measured.get("distance_from_one_gpu")
    return "" if value is None else f"{value:.5f}"


def median(measured: dict | None) -> float | None:
    return measured["ms"]["median"] if measured else None


def fastest(kinds: Kinds) -> dict | None:
    """The fastest of the injected kinds."""
    injected = [measured for kind, measured in kinds.items() if kind != "eager"]
    return min(injected, key=lambda measured: measured["ms"]["median"], default=None)


def entries_of(measured: dict, part: str) -> list[dict]:
    return [entry for entry in measured["parallel"] if part_of(entry) == part]


def rendered(
    results: Path,
    name: str,
    part: str,
    headers: list[str],
    rows: Callable[[dict], Iterable[list[str]]],
) -> str:
    """A table of the entries of a part for each number of GPUs of a machine, with rows of each entry."""
    measured = there(gathered(results, name), name)
    of_gpus: dict[int, list[dict]] = {}
    for entry in entries_of(measured, part):
        # Modelled ranks were one GPU each time.
        of_gpus.setdefault(0 if name == MODELLED else max(entry["degrees"]), []).append(entry)
    tables = []
    for _, entries in sorted(of_gpus.items()):
        runs = [run for run in measured["runs"] if any(e in run["parallel"] for e in entries)]
        lines = [[label_of(entry), *row] for entry in entries for row in rows(entry)]
        tables.append(markdown(lines, headers) + setup(*runs))
    return "\n\n".join(tables)


@table
def parallel(results: Path) -> str:
    """A step on the GPUs of one machine: one forward, or those of guidance."""

    def rows(entry: dict) -> Iterator[list[str]]:
        for split, kinds in by_split(entry).items():
            best = fastest(kinds) or {}
            yield [
                split_name(split),
                *(milliseconds(median(kinds.get(k))) for k in ("eager", "injected", "graphs")),
                times(best.get("speedup")),
                f"{best['of_linear']:.0%}" if "of_linear" in best else "",
                distance(best),
            ]

    headers = ["model and input", "GPUs", "eager", "injected", "with CUDA graphs", "over one GPU"]
    headers += ["of linear", "distance from one GPU"]
    return rendered(results, GPUS, "step", headers, rows)


@table
def parallel_pipelines(results: Path) -> str:
    """Whole pipelines on the GPUs of one machine."""

    def rows(entry: dict) -> Iterator[list[str]]:
        for mode, measured in timed(entry).items():
            seconds = f"{measured['ms']['median'] / 1e3:.2f} s"
            yield [split_name(split_of(mode)), seconds, speedup(measured)]

    headers = ["pipeline", "GPUs", "time", "over one GPU"]
    return rendered(results, GPUS, "pipeline", headers, rows)


@table
def parallel_decoders(results: Path) -> str:
    """Decoders whose tiles the GPUs of one machine share."""

    def rows(entry: dict) -> Iterator[list[str]]:
        for mode, measured in timed(entry).items():
            kind, _, split = mode.partition("+")
            equal = measured.get("equal_to_one_gpu")
            yield [
                TILINGS[kind],
                str(degree_of(measured)),
                milliseconds(median(measured)),
                speedup(measured),
                "" if equal is None else "yes" if equal else f"no: {distance(measured)}",
            ]

    headers = ["decoder", "tiles", "GPUs", "time", "over one GPU", "equal bits"]
    return rendered(results, GPUS, "decode", headers, rows)


@table
def parallel_modelled(results: Path) -> str:
    """One rank's compute time, and with the time of the bytes that it would send."""

    def rows(entry: dict) -> Iterator[list[str]]:
        for split, kinds in by_split(entry).items():
            eager, injected = (kinds.get(kind) for kind in ("eager", "injected"))
            sent = (injected or {}).get("sent_bytes")
            yield [
                split_name(split),
                *map(milliseconds, map(median, (eager, injected))),
                times((injected or {}).get("over_eager")),
                "" if sent is None else f"{sent / 1e9:.2f} GB",
                milliseconds((injected or {}).get("whole_ms")),
                speedup(injected),
            ]

    headers = ["model and input", "GPUs", "compute time: eager", "injected", "over eager"]
    headers += ["sent, injected", "modelled time, injected", "over one GPU"]
    return rendered(results, MODELLED, "step", headers, rows)


@figure
def parallel_over_one_gpu(results: Path) -> str:
    """How many times as fast a picture of FLUX.1 is on two and on four GPUs as on one."""
    measured = gathered(results, GPUS) or {"parallel": []}
    entries = [e for e in entries_of(measured, "pipeline") if e["name"] == "flux"]
    speedups = {
        degree_of(mode): mode["speedup"]
        for e in entries
        for mode in timed(e).values()
        if "speedup" in mode
    }
    return " and ".join(f"{speedups[degree]:.2f}" for degree in (2, 4) if degree in speedups)
