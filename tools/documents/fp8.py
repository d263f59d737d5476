"""Tables of the FP8 benchmarks."""

from __future__ import annotations

from pathlib import Path

import models

from .common import (
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

FP8_MODELS = ("fp8_ltx", "fp8_flux")


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
    """One forward with the blocks' linear layers quantized by torchao, peaked scores."""
    measured = [load(results, name) for name in FP8_MODELS if is_measured(results, name)]
    if not measured:
        return unmeasured(FP8_MODELS[0])
    rows = []
    for result in measured:
        name = result["model"]
        for size, entry in result["sizes"].items():
            modes = entry["weights"]["peaked"]["modes"]
            ms = {mode: each["ms"]["median"] for mode, each in modes.items()}
            ours = ms[models.INJECTED_FP8]
            distance = (
                modes[models.INJECTED_FP8]["distance_from_float32"]
                / modes[models.TORCHAO]["distance_from_float32"]
            )
            row = [f"{name} {size_name(size)}", card(result), milliseconds(ours)]
            row += [times(ms[mode] / ours) for mode in ("eager", "injected", models.TORCHAO)]
            row += [f"{distance:.3f}", f"{entry['injection_fp8']['full_speed_s']:.2f} s"]
            rows.append(row)
    headers = ["model", "card", "FP8 injected", "over eager", "over injected", "over torchao eager"]
    headers += ["distance over torchao's", "to full speed"]
    return markdown(rows, headers) + setup(*measured)
