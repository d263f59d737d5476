"""Tables of the FP8 benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import fp8_targets as targets
import history
import models

from .common import (
    MODE_NAMES,
    aims,
    card,
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
from .pipelines import label

FP8_MODELS = ("fp8_ltx", "fp8_flux", "fp8_flux2", "fp8_qwenimage", "fp8_wan")
FP8_BACK_TO_BACK = ("fp8_back_to_back_flux", "fp8_back_to_back_qwenimage")
FP8_PRECISIONS = ("fp8_ltx",)  # the others have too few blocks, or the same layers in both
FP8_COMPILED = ("fp8_compiled_ltx", "fp8_compiled_flux")


@table
def fp8_products(results: Path) -> str:
    """linear_fp8 beside torch._scaled_mm and bfloat16, with a cold cache and back to back."""
    if not is_measured(results, "fp8"):
        return unmeasured("fp8")
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


@table
def fp8_fused(results: Path) -> str:
    """Products with more in them beside the launches that they replace and the products alone."""
    if not is_measured(results, "fp8") or "fused" not in load(results, "fp8")["fp8"]:
        return unmeasured("fp8")
    result = load(results, "fp8")
    rows = []
    for entry in result["fp8"]["fused"]:
        cold, sustained = entry["microseconds"], entry["sustained_microseconds"]
        ours = cold["ours"]["median"]
        row = [f"`{entry['operation']}`", "×".join(map(str, entry["size"])), f"{ours:.0f} µs"]
        for peer in ("launches", "product"):
            over = (each["ours"]["median"] / each[peer]["median"] for each in (cold, sustained))
            row.append(" / ".join(f"{ratio:.2f}" for ratio in over))
        rows.append(row)
    headers = ["operation", "rows × out × in", card(result), "time over launches'"]
    return markdown(rows, [*headers, "over the product's"]) + setup(result)


@table
def fp8_rows(results: Path) -> str:
    """Row operations with a quantized result beside a copy of the same bytes and two passes."""
    if not is_measured(results, "fp8"):
        return unmeasured("fp8")
    result = load(results, "fp8")
    rows = []
    for entry in result["fp8"]["rows"]:
        medians = {mode: each["median"] for mode, each in entry["microseconds"].items()}
        ours, two_passes = medians["ours"], medians.get("two passes")
        row = [f"`{entry['operation']}`", "×".join(map(str, entry["shape"])), f"{ours:.1f} µs"]
        row += [f"{entry['bytes'] / ours / 1e6:.2f}", f"{medians['copy'] / ours:.2f}"]
        rows.append([*row, "" if two_passes is None else times(two_passes / ours)])
    headers = ["operation", "shape", card(result), "TB/s", "of a copy's rate", "over two passes"]
    return markdown(rows, headers) + setup(result)


@table
def fp8_models(results: Path) -> str:
    """One forward with the blocks' linear layers quantized by torchao, with each kind of weights."""
    return _models(results, FP8_MODELS)


@table
def fp8_back_to_back(results: Path) -> str:
    """A forward of several back to back, for models whose single forward the host limits."""
    return _models(results, FP8_BACK_TO_BACK)


def _models(results: Path, names: Sequence[str]) -> str:
    rows, measured = [], _measured(results, names)
    for result in measured:
        for size, entry in result["sizes"].items():
            for weights, of_weights in entry["weights"].items():
                ms = {mode: each["ms"]["median"] for mode, each in of_weights["modes"].items()}
                ours = ms[models.INJECTED_FP8]
                row = [_name(result, size), weights, milliseconds(ours)]
                others = ("eager", "injected", models.TORCHAO)
                row += [times(ms[mode] / ours if mode in ms else None) for mode in others]
                row.append(_full_speed(entry, models.INJECTED_FP8))
                plain, in_fp8 = map(ms.get, models.GRAPHS_MODES)
                both = plain and in_fp8 and f"{milliseconds(in_fp8)}, {times(plain / in_fp8)}"
                rows.append([*row, both or ""])
    headers = ["model", "weights", "FP8 injected", "over eager", "over injected"]
    headers += ["over torchao eager", "to full speed", "with CUDA graphs"]
    return _table(rows, headers, measured, names)


@table
def fp8_precisions(results: Path) -> str:
    """One forward with the layers in FP8 that inject_kernels(precision=...) chooses."""
    rows, measured = [], _measured(results, FP8_PRECISIONS)
    for result in measured:
        for size, entry in result["sizes"].items():
            for weights, of_weights in entry["weights"].items():
                modes = of_weights["modes"]
                for mode in filter(modes.__contains__, models.PRECISION_MODES):
                    over = of_weights["speedups"][mode]
                    row = [_name(result, size), weights, MODE_NAMES[mode]]
                    row += [milliseconds(modes[mode]["ms"]["median"])]
                    row += [times(over[other]) for other in ("eager", "injected")]
                    distance = modes[mode].get("distance_from_float32")
                    row.append("" if distance is None else _thousandths(distance))
                    rows.append([*row, _full_speed(entry, mode)])
    headers = ["model", "weights", "layers", "time", "over eager", "over injected"]
    return _table(rows, [*headers, "distance, 10⁻³", "to full speed"], measured, FP8_PRECISIONS)


@table
def fp8_compiled(results: Path) -> str:
    """Beside torchao's layers compiled block by block, which takes minutes."""
    rows, measured = [], _measured(results, FP8_COMPILED)
    for result in measured:
        for size, entry in result["sizes"].items():
            modes = entry["weights"]["peaked"]["modes"]
            ms = [modes[m]["ms"]["median"] for m in (models.TORCHAO_COMPILED, models.INJECTED_FP8)]
            seconds = entry["compiled_in_s"][models.TORCHAO_COMPILED]
            row = [_name(result, size), *map(milliseconds, ms), times(ms[0] / ms[1])]
            row += [f"{seconds:.0f} s", _full_speed(entry, models.INJECTED_FP8)]
            rows.append(row)
    headers = ["model", "torchao compiled", "FP8 injected", "over compiled", "compilation"]
    return _table(rows, [*headers, "injection to full speed"], measured, FP8_COMPILED)


@table
def fp8_distances(results: Path) -> str:
    """Distances from the float32 model with each kind of weights."""
    rows, measured = [], _measured(results)
    columns = ("eager", "injected", models.TORCHAO, models.INJECTED_FP8)
    for result in measured:
        for size, entry in result["sizes"].items():
            for weights, of_weights in entry["weights"].items():
                modes = of_weights["modes"]
                if not set(columns) <= modes.keys():
                    continue
                distance = {mode: modes[mode]["distance_from_float32"] for mode in columns}
                ours = distance[models.INJECTED_FP8]
                row = [_name(result, size), weights, *(_thousandths(distance[m]) for m in columns)]
                row += [times(ours / distance["eager"]), f"{ours / distance[models.TORCHAO]:.3f}"]
                rows.append(row)
    headers = ["distances, 10⁻³", "weights", "eager", "injected", "FP8 by torchao", "FP8 injected"]
    headers += ["over eager", "over torchao"]
    return _table(rows, headers, measured)


@table
def fp8_memory(results: Path) -> str:
    """Peak memory of a forward in a process with one mode."""
    modes = ("eager", "injected", models.TORCHAO, models.INJECTED_FP8)
    rows, measured = [], []
    for result in _measured(results):
        sizes = {size: e["peak_bytes"] for size, e in result["sizes"].items() if "peak_bytes" in e}
        measured += [result] * bool(sizes)
        for size, peaks in sizes.items():
            given = map(peaks.get, modes)
            gib = ["" if peak is None else f"{peak / 2**30:.2f} GiB" for peak in given]
            ratio = peaks[models.INJECTED_FP8] / peaks["eager"]
            rows.append([_name(result, size), *gib, f"{ratio:.2f}"])
    headers = ["model", *(MODE_NAMES[mode] for mode in modes), "FP8 injected over eager"]
    return _table(rows, headers, measured)


@table
def fp8_layers(results: Path) -> str:
    """Distance from the float32 model with one kind of layers in FP8, by model."""
    if not is_measured(results, "fp8_layers"):
        return unmeasured("fp8_layers")
    result = load(results, "fp8_layers")
    entries = result["fp8_layers"]
    columns = [
        {row["kind"]: _thousandths(row["distance_from_float32"]) for row in entry["kinds"]}
        for entry in entries
    ]
    kinds = dict.fromkeys(row["kind"] for entry in entries for row in entry["kinds"])
    rows = [[kind, *(column.get(kind, "") for column in columns)] for kind in kinds]
    headers = ["distances, 10⁻³; FP8 layers"]
    headers += [f"{entry['model']} {size_name(entry['size'])}" for entry in entries]
    return markdown(rows, headers) + setup(result)


@table
def fp8_pipelines(results: Path) -> str:
    """Whole pipelines: time, energy, and the time of the injection with the first steps."""
    found = gathered_pipelines(results)
    if found is None:
        return unmeasured("fp8_pipelines")
    rows = []
    for entry in found["pipelines"]:
        for fp8 in {models.INJECTED_FP8: "", **models.PRECISION_MODES}:
            if fp8 not in entry["modes"]:
                continue
            modes = [entry["modes"][mode] for mode in ("eager", "injected", fp8)]
            seconds, joules = ([_of(mode, key) for mode in modes] for key in ("seconds", "joules"))
            of_precision = [MODE_NAMES[fp8]] if fp8 in models.PRECISION_MODES else []
            row = [", ".join([label(entry), *of_precision])]
            row += [f"{value:.2f} s" for value in seconds]
            row += [times(value / seconds[-1]) for value in seconds[:-1]]
            row.append(times(joules[-1] / joules[1]))
            rows.append([*row, f"{modes[-1]['first_steps_s']:.1f} s"])
    headers = ["pipeline", "eager", "injected", "FP8 injected", "over eager", "over injected"]
    headers += ["energy over injected's", "injection and two steps"]
    return markdown(rows, headers) + setup(*found["runs"])


@table
def fp8_aims(results: Path) -> str:
    """What FP8 should reach, and whether it does."""
    names = ("fp8", *FP8_MODELS, *FP8_BACK_TO_BACK, *FP8_COMPILED)
    loaded = {name: load(results, name) for name in names if is_measured(results, name)}
    pipelines = gathered_pipelines(results)
    if not loaded and pipelines is None:
        return unmeasured("fp8")
    runs = [*loaded.values(), *(pipelines["runs"] if pipelines else ())]
    return aims(targets.evaluate(loaded, pipelines)) + setup(*runs)


def gathered_pipelines(results: Path) -> dict | None:
    """The newest figures of each whole pipeline."""
    return history.gathered("fp8_pipelines", "pipelines", lambda entry: entry["name"], results)


def _full_speed(entry: dict, mode: str) -> str:
    """The time from the injection of this mode to full speed."""
    return f"{entry[models.INJECTIONS[mode]]['full_speed_s']:.2f} s"


def _of(mode: dict, key: str) -> float:
    return mode[key]["median"] if isinstance(mode[key], dict) else mode[key]


def _measured(results: Path, names: Sequence[str] = FP8_MODELS) -> list[dict]:
    return [load(results, name) for name in names if is_measured(results, name)]


def _name(result: dict, size: str) -> str:
    return f"{result['model']} {size_name(size)}"


def _thousandths(distance: float) -> str:
    return f"{1e3 * distance:.1f}"


def _table(
    rows: list[list[str]],
    headers: list[str],
    measured: list[dict],
    names: Sequence[str] = FP8_MODELS,
) -> str:
    """Without columns that were not measured. ``names``: of the results."""
    if not rows:
        return unmeasured(names[0])
    full = [column for column in zip(headers, *rows, strict=True) if any(column[1:])]
    headers, *rows = (list(row) for row in zip(*full, strict=True))
    return markdown(rows, headers) + setup(*measured)
