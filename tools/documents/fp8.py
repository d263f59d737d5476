"""Tables of the FP8 benchmarks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks import models
from benchmarks.harness import history

from . import chosen
from .common import (
    MODE_NAMES,
    card,
    figure,
    load,
    markdown,
    milliseconds,
    number,
    setup,
    size_name,
    span,
    table,
    there,
    times,
)
from .pipelines import FP8, gibibytes, label, run_of, seconds

FP8_MODELS = ("ltx", "flux", "flux2", "qwenimage", "wan")
WEIGHTS = {"peaked": "as trained", "outliers": "with outliers"}
COMPARED = ("eager", "injected", models.TORCHAO, models.INJECTED_FP8)


@table
def fp8_products(results: Path) -> str:
    """linear_fp8 beside torch._scaled_mm and bfloat16, with a cold cache and back to back."""
    result = load(results, "fp8")
    rows = []
    for entry in result["fp8"]["products"]:
        cold, sustained = entry["microseconds"], entry["sustained_microseconds"]
        row = ["×".join(map(str, entry["size"])), f"{cold['ours']['median']:.0f} µs"]
        row.append(f"{entry['operations'] / cold['ours']['median'] / 1e6:.0f}")
        for peer in ("exact", "fast", "bfloat16"):
            over = (each[peer]["median"] / each["ours"]["median"] for each in (cold, sustained))
            row.append(" / ".join(f"{ratio:.2f}" for ratio in over))
        errors = entry["errors"]
        row.append(" / ".join(f"{1e3 * errors[mode]:.2f}" for mode in ("ours", "exact", "fast")))
        rows.append(row)
    headers = ["rows × out × in", card(result), "TFLOP/s", "over exact", "over fast"]
    headers += ["over bfloat16", "errors, 10⁻³"]
    return markdown(rows, headers) + setup(result)


def model_results(results: Path) -> list[dict]:
    return [load(results, f"fp8_models/{name}") for name in FP8_MODELS]


def forwards(results: Path) -> Iterator[tuple[list[str], dict, dict]]:
    """Of each model, size and kind of weights: the first cells of a row, and both entries of the result."""
    for result in model_results(results):
        for size, entry in result["sizes"].items():
            for weights, of_weights in entry["weights"].items():
                row = [f"{result['model']} {size_name(size)}", WEIGHTS[weights]]
                yield row, entry, of_weights


@table
def fp8_models(results: Path) -> str:
    """One forward with the blocks' linear layers quantized by torchao, with each kind of weights."""
    rows = []
    for cells, entry, of_weights in forwards(results):
        ms = {mode: each["ms"]["median"] for mode, each in of_weights["modes"].items()}
        ours = ms[models.INJECTED_FP8]
        row = [*cells, milliseconds(ours)]
        row += [times(ms[mode] / ours if mode in ms else None) for mode in COMPARED[:-1]]
        row.append(full_speed(entry, models.INJECTED_FP8))
        plain, in_fp8 = map(ms.get, (models.GRAPHS, models.GRAPHS_FP8))
        both = plain and in_fp8 and f"{milliseconds(in_fp8)}, {times(plain / in_fp8)}"
        rows.append([*row, both or ""])
    headers = ["model", "weights", "FP8 injected", "over eager", "over injected"]
    headers += ["over torchao eager", "to full speed", "with CUDA graphs"]
    return markdown(rows, headers) + setup(*model_results(results))


@table
def fp8_precisions(results: Path) -> str:
    """One forward with the layers in FP8 that inject_kernels(precision=...) chooses."""
    rows = []
    for cells, entry, of_weights in forwards(results):
        modes = of_weights["modes"]
        for mode in filter(modes.__contains__, models.PRECISION_MODES):
            over = of_weights["speedups"][mode]
            row = [*cells, MODE_NAMES[mode], milliseconds(modes[mode]["ms"]["median"])]
            row += [times(over[other]) for other in ("eager", "injected")]
            row.append(thousandths(modes[mode]["distance_from_float32"]))
            rows.append([*row, full_speed(entry, mode)])
    headers = ["model", "weights", "layers", "time", "over eager", "over injected"]
    headers += ["distance, 10⁻³", "to full speed"]
    return markdown(rows, headers) + setup(*model_results(results))


@table
def fp8_distances(results: Path) -> str:
    """Distances from the float32 model with each kind of weights."""
    rows = []
    for cells, _, of_weights in forwards(results):
        modes = of_weights["modes"]
        if set(COMPARED) <= modes.keys():
            distances = [modes[mode]["distance_from_float32"] for mode in COMPARED]
            eager, _, torchao, ours = distances
            row = [*cells, *map(thousandths, distances)]
            rows.append([*row, times(ours / eager), f"{ours / torchao:.3f}"])
    headers = ["distances, 10⁻³", "weights", "eager", "injected", "FP8 by torchao", "FP8 injected"]
    headers += ["over eager", "over torchao"]
    return markdown(rows, headers) + setup(*model_results(results))


def distances_over_eager(results: Path, mode: str) -> list[float]:
    """The models' distances from float32 in this mode, over eager's."""
    return [
        modes[mode]["distance_from_float32"] / modes["eager"]["distance_from_float32"]
        for modes in (of_weights["modes"] for _, _, of_weights in forwards(results))
        if mode in modes
    ]


@figure
def fp8_distance(results: Path) -> str:
    """All layers of the blocks in FP8, except those that modulate."""
    return span(distances_over_eager(results, models.INJECTED_FP8), 1)


@figure
def fp8_models_count(results: Path) -> str:
    return f"{len(model_results(results))} models"


@figure
def fp8_precision_distance(results: Path) -> str:
    """The layers that `precision="fp8"` chooses."""
    return span(distances_over_eager(results, FP8), 1)


@table
def fp8_memory(results: Path) -> str:
    """Peak memory of a forward in a process with one mode."""
    rows, measured = [], []
    for result in model_results(results):
        sizes = {size: e["peak_bytes"] for size, e in result["sizes"].items() if "peak_bytes" in e}
        measured += [result] * bool(sizes)
        for size, peaks in sizes.items():
            given = map(peaks.get, COMPARED)
            gib = ["" if peak is None else f"{peak / 2**30:.2f} GiB" for peak in given]
            ratio = peaks[models.INJECTED_FP8] / peaks["eager"]
            rows.append([f"{result['model']} {size_name(size)}", *gib, f"{ratio:.2f}"])
    headers = ["model", *(MODE_NAMES[mode] for mode in COMPARED), "FP8 injected over eager"]
    return markdown(rows, headers) + setup(*measured)


@table
def fp8_pipelines(results: Path) -> str:
    """Whole pipelines with `precision="fp8"`: time, energy, memory, time of the injection with two steps."""
    run = run_of(results, FP8)
    return of_pipelines(run["pipelines"], FP8) + setup(*run["runs"])


@table
def int8_pipelines(results: Path) -> str:
    """Whole pipelines with `precision="fp8-fast"`, which has attention in 8 bits."""
    run = there(history.gathered("pipelines/int8", "pipelines", label, results), "pipelines/int8")
    return of_pipelines(run["pipelines"], models.PRECISION_FAST) + setup(*run["runs"])


def of_pipelines(entries: Iterable[dict], mode: str) -> str:
    rows = []
    for entry in entries:
        measured = entry["modes"]
        row = [label(entry)]
        row += [number(seconds(entry, name), "s", 2) for name in ("eager", "injected", mode)]
        over = [chosen.over(entry, name, mode) for name in ("eager", "injected")]
        row.append(", ".join(times(ratio) for ratio in over if ratio is not None))
        row.append(times(chosen.ratio(entry, "joules", "injected", mode)))
        row.append(" / ".join(gibibytes(measured[name]) for name in ("injected", mode)))
        rows.append([*row, f"{measured[mode]['first_steps_s']:.1f} s"])
    headers = ["pipeline", "eager", "injected", "in 8 bits", "over eager, over injected"]
    headers += ["energy over injected's", "memory injected / in 8 bits", "injection and two steps"]
    return markdown(rows, headers)


@table
def int8_forward(results: Path) -> str:
    """One forward of a whole video model, with attention in 8 bits and without."""
    result, rows = load(results, "fp8_models/wan_whole"), []
    for size, entry in result["sizes"].items():
        (of_weights,) = entry["weights"].values()
        for mode, measured in of_weights["modes"].items():
            over = (of_weights["speedups"][mode].get(other) for other in ("eager", "injected"))
            time = f"{measured['ms']['median'] / 1e3:.2f} s"
            rows.append([f"{result['model']} {size_name(size)}", MODE_NAMES[mode], time])
            rows[-1] += [times(ratio) if ratio else "" for ratio in over]
    headers = ["model", "options", "time", "over eager", "over injected"]
    return markdown(rows, headers) + setup(result)


@table
def attention_int8(results: Path) -> str:
    """attention_int8 beside attention in 16 bits and FlashAttention-3's in FP8."""
    result = load(results, "attention/int8")
    rows = []
    for entry in result["attention_int8"]:
        row = ["×".join(map(str, entry["shape"])), entry["inputs"]]
        steady = entry["microseconds"]["steady"]["int8"]["median"]
        row.append(milliseconds(steady / 1e3) if steady > 1e3 else f"{steady:.0f} µs")
        row.append(f"{entry['flops'] / steady / 1e6:.0f}")
        for other in ("16-bit", "FA3 FP8"):
            over = (entry["speedups"][measure].get(other) for measure in ("steady", "cold"))
            row.append(" / ".join(map(times, over)))
        errors = entry["errors"]
        row.append(" / ".join(thousandths(errors[n]) for n in ("int8", "16-bit", "FA3 FP8")))
        rows.append(row)
    headers = ["(B, Sq, Sk, H, d)", "inputs", card(result), "TFLOP/s", "over 16 bits", "over FA3"]
    headers += ["errors, 10⁻³"]
    return markdown(rows, headers) + setup(result)


def full_speed(entry: dict, mode: str) -> str:
    """The time from the injection of this mode to full speed."""
    return f"{entry[models.INJECTIONS[mode]]['full_speed_s']:.2f} s"


def thousandths(distance: float) -> str:
    return f"{1e3 * distance:.1f}"
