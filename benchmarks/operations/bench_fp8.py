"""FP8: matrix products beside torch._scaled_mm, fused ones beside several launches, row operations with a
quantized result beside a copy.

Products are those of LTX-Video, FLUX.1 and Wan 14B, with a bias and a bfloat16 result. x is as after a norm:
standard deviation 1, except for one channel of 128 with 20 to 100. Their peers are bfloat16's product and
torch._scaled_mm per row, with fast and with exact accumulation. Fused products have two peers: the same
operations in several launches, and the product alone. Row operations have two: the operation without a
quantized result, followed by quantize_fp8, and a device copy of the same bytes.

All take turns, with a cold L2 cache; products also back to back, where power limits a GPU. Errors are
relative L2 distances from float64, of the first 256 rows. Writes to benchmarks/results/fp8:

    python benchmarks/operations/bench_fp8.py
    python benchmarks/operations/bench_fp8.py --device cpu --tiny --output /tmp/fp8.json
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks import models
from benchmarks.harness import clocks, record, timing
from benchmarks.harness.options import DEVICE

from accuracy import finite_distance

# Rows, features of the result, features of x.
PRODUCTS = (
    *((16128, 2048, 2048), (16128, 6144, 2048), (16128, 8192, 2048), (16128, 2048, 8192)),
    *((4608, 9216, 3072), (4608, 12288, 3072), (4608, 3072, 12288)),
    *((32760, 5120, 5120), (32760, 13824, 5120)),
)
TINY_PRODUCTS = ((48, 64, 128), (33, 32, 144))
# Operation, rows, features of the result (of each of three results of linears_fp8), features of x.
FUSED = (
    *(("linear_gelu_fp8", size) for size in ((16128, 8192, 2048), (4608, 12288, 3072))),
    *(("linears_fp8", size) for size in ((16128, 2048, 2048), (4608, 3072, 3072))),
    *(
        ("linear_gated_residual_fp8", size)
        for size in ((16128, 2048, 2048), (16128, 2048, 8192), (4608, 3072, 15360))
    ),
)
TINY_FUSED = tuple((name, size) for name in dict(FUSED) for size in TINY_PRODUCTS)
# Operation and shape of its first tensor.
ROWS = (
    *(("quantize_fp8", shape) for shape in ((2, 8064, 2048), (4608, 3072), (32760, 5120))),
    ("rms_norm_modulate_fp8", (2, 8064, 2048)),
    ("layer_norm_modulate_fp8", (4608, 3072)),
    ("layer_norm_modulate_fp8", (32760, 5120)),
    ("gated_residual_rms_norm_modulate_fp8", (2, 8064, 2048)),
    ("gated_residual_layer_norm_modulate_fp8", (4608, 3072)),
    ("gelu_fp8", (2, 8064, 8192)),
    ("gelu_fp8", (4608, 12288)),
    ("gelu_fp8", (32760, 13824)),
    ("swiglu_fp8", (4608, 2 * 18432)),  # FLUX.2
)
TINY_ROWS = tuple((name, (2, 5, 64)) for name, _ in ROWS)
CHANNELS_PER_OUTLIER, OUTLIERS = 128, (20.0, 100.0)
SUSTAINED_MS, SUSTAINED_ROUNDS = 100.0, 3
ERROR_ROWS = 256


def activations(device: torch.device, *shape: int) -> Tensor:
    channels = shape[-1]
    scale = torch.ones(channels, device=device)
    outliers = torch.randperm(channels, device=device)[: max(channels // CHANNELS_PER_OUTLIER, 1)]
    scale[outliers] = torch.empty(len(outliers), device=device).uniform_(*OUTLIERS)
    return (torch.randn(shape, device=device) * scale).bfloat16()


def product_modes(
    kernel: ModuleType, size: tuple[int, int, int], device: torch.device
) -> tuple[dict[str, Callable[[], Tensor]], Tensor]:
    """The modes, and the float64 result of the first rows."""
    rows, out_features, in_features = size
    x = activations(device, rows, in_features)
    weight = (torch.randn(out_features, in_features, device=device) * 0.02).bfloat16()
    bias = torch.randn(out_features, device=device).bfloat16()
    x8, x_scale = kernel.quantize_fp8(x)
    weight8, weight_scale = kernel.quantize_fp8(weight)

    def scaled_mm(is_fast: bool) -> Callable[[], Tensor]:
        options = {"out_dtype": torch.bfloat16, "bias": bias, "use_fast_accum": is_fast}
        operands = (x8, weight8.t(), x_scale, weight_scale.t())
        return lambda: torch._scaled_mm(*operands, **options)

    wide = x8[:ERROR_ROWS].double() * x_scale[:ERROR_ROWS].double()
    exact = wide @ (weight8.double() * weight_scale.double()).t() + bias.double()
    return {
        "ours": lambda: kernel.linear_fp8(x8, x_scale, weight8, weight_scale, bias),
        "exact": scaled_mm(False),
        "fast": scaled_mm(True),
        "bfloat16": lambda: torch.nn.functional.linear(x, weight, bias),
    }, exact


def fused_modes(
    kernel: ModuleType, name: str, size: tuple[int, int, int], device: torch.device
) -> dict[str, Callable[[], object]]:
    rows, out_features, in_features = size
    x = kernel.quantize_fp8(activations(device, rows, in_features))

    def layer(features: int) -> tuple[Tensor, Tensor, Tensor]:
        weight = (torch.randn(features, in_features, device=device) * 0.02).bfloat16()
        return *kernel.quantize_fp8(weight), torch.randn(features, device=device).bfloat16()

    if name == "linear_gelu_fp8":
        one = layer(out_features)
        return {
            "ours": lambda: kernel.linear_gelu_fp8(*x, *one, approximate="tanh"),
            "launches": lambda: kernel.gelu_fp8(kernel.linear_fp8(*x, *one), "tanh"),
            "product": lambda: kernel.linear_fp8(*x, *one),
        }
    if name == "linear_gated_residual_fp8":
        one = layer(out_features)
        residual, gate = (activations(device, count, out_features) for count in (rows, 1))
        return {
            "ours": lambda: kernel.linear_gated_residual_fp8(residual, *x, *one, gate=gate),
            "launches": lambda: kernel.gated_residual(residual, kernel.linear_fp8(*x, *one), gate),
            "product": lambda: kernel.linear_fp8(*x, *one),
        }
    three, one = [layer(out_features) for _ in range(3)], layer(3 * out_features)
    weights, scales, biases = zip(*three, strict=True)
    return {
        "ours": lambda: kernel.linears_fp8(*x, weights, scales, biases),
        "launches": lambda: [kernel.linear_fp8(*x, *each) for each in three],
        "product": lambda: kernel.linear_fp8(*x, *one),
    }


def row_modes(
    kernel: ModuleType, name: str, shape: tuple[int, ...], device: torch.device
) -> tuple[dict[str, Callable[[], object]], int]:
    """The modes, and the bytes that the operation moves."""
    x = activations(device, *shape)

    def vectors(count: int) -> list[Tensor]:
        size = (shape[0], 1, shape[-1]) if len(shape) == 3 else (1, shape[-1])
        return [torch.randn(size, device=device).bfloat16() * 0.5 for _ in range(count)]

    arguments = [x]
    if name.startswith("gated"):
        arguments = [activations(device, *shape), x, *vectors(3)]
    elif "modulate" in name:
        arguments += vectors(2)
    elif name.startswith("gelu"):
        arguments += ["tanh"]
    quantized = getattr(kernel, name)
    modes: dict[str, Callable[[], object]] = {"ours": lambda: quantized(*arguments)}
    if name != "quantize_fp8":
        plain = getattr(kernel, name.removesuffix("_fp8"))

        def two_passes() -> object:
            results = plain(*arguments)
            return kernel.quantize_fp8(results if isinstance(results, Tensor) else results[-1])

        modes["two passes"] = two_passes
    tensors = [t for t in (*arguments, *quantized(*arguments)) if isinstance(t, Tensor)]
    moved = sum(t.numel() * t.element_size() for t in tensors)
    source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    modes["copy"] = lambda: target.copy_(source)
    return modes, moved


def sustained(
    modes: Mapping[str, Callable[[], object]], times: Mapping[str, dict], device: torch.device
) -> dict[str, dict[str, float]]:
    """Microseconds of each mode within calls back to back, after as many calls."""
    slowest = max(entry["median"] for entry in times.values()) / 1e3
    calls = max(math.ceil(SUSTAINED_MS / slowest), 1) if device.type == "cuda" else 1

    def measure(function: Callable[[], object], device: torch.device) -> float:
        timing.repeated(function, calls)()
        return timing.milliseconds(timing.repeated(function, calls), device) * 1e3 / calls

    samples = timing.interleave(modes, SUSTAINED_ROUNDS, device, measure)
    return {mode: timing.summarize(each) for mode, each in samples.items()}


def measure_product(
    kernel: ModuleType, size: tuple[int, int, int], rounds: int, device: torch.device
) -> dict[str, object]:
    modes, exact = product_modes(kernel, size, device)
    errors = {
        mode: finite_distance(call()[:ERROR_ROWS], exact)
        for mode, call in modes.items()
        if mode != "bfloat16"  # of other operands
    }
    cold = timing.cold_microseconds(modes, rounds, device)
    return {
        "size": list(size),
        "operations": 2 * math.prod(size),
        "microseconds": cold,
        "sustained_microseconds": sustained(modes, cold, device),
        "errors": errors,
    }


def measure_fused(
    kernel: ModuleType, name: str, size: tuple[int, int, int], rounds: int, device: torch.device
) -> dict[str, object]:
    modes = fused_modes(kernel, name, size, device)
    cold = timing.cold_microseconds(modes, rounds, device)
    return {
        "operation": name,
        "size": list(size),
        "operations": 2 * math.prod(size) * (3 if name == "linears_fp8" else 1),
        "microseconds": cold,
        "sustained_microseconds": sustained(modes, cold, device),
    }


def measure_rows(
    kernel: ModuleType, name: str, shape: tuple[int, ...], rounds: int, device: torch.device
) -> dict[str, object]:
    modes, moved = row_modes(kernel, name, shape, device)
    entry = {"operation": name, "shape": list(shape), "bytes": moved}
    return {**entry, "microseconds": timing.cold_microseconds(modes, rounds, device)}


def show(result: Mapping) -> None:
    rows = []
    for entry in result["fp8"]["products"]:
        cold, long = entry["microseconds"], entry["sustained_microseconds"]
        row = ["x".join(map(str, entry["size"]))]
        for times in (cold, long):
            ours = times["ours"]["median"]
            row += [ours, entry["operations"] / ours / 1e6]
            row += [times[mode]["median"] / ours for mode in ("exact", "fast", "bfloat16")]
        rows.append([*row, *entry["errors"].values()])
    headers = ["us", "TFLOP/s", "x exact", "x fast", "x bfloat16"]
    headers = ["", *headers, *(f"sustained {name}" for name in headers)]
    headers += ["error", "exact's", "fast's"]
    click.echo(tabulate(rows, headers, floatfmt=[*["", *[".3f"] * 10], *[".2e"] * 3]))
    rows = []
    for entry in result["fp8"]["fused"]:
        row = [f"{entry['operation']} {'x'.join(map(str, entry['size']))}"]
        for times in (entry["microseconds"], entry["sustained_microseconds"]):
            ours = times["ours"]["median"]
            row += [ours, entry["operations"] / ours / 1e6]
            row += [times[mode]["median"] / ours for mode in ("launches", "product")]
        rows.append(row)
    headers = ["us", "TFLOP/s", "x launches", "x product"]
    headers = ["", *headers, *(f"sustained {name}" for name in headers)]
    click.echo(tabulate(rows, headers, floatfmt=".3f"))
    rows = []
    for entry in result["fp8"]["rows"]:
        times = {mode: each["median"] for mode, each in entry["microseconds"].items()}
        ours = times["ours"]
        row = [f"{entry['operation']} {'x'.join(map(str, entry['shape']))}", ours]
        row += [entry["bytes"] / ours / 1e6, times["copy"] / ours]
        rows.append([*row, times.get("two passes", math.nan) / ours])
    headers = ["", "us", "TB/s", "x copy", "x two passes"]
    click.echo(tabulate(rows, headers, floatfmt=".3f"))


@click.command(
    help="Time FP8 products and row operations with a quantized result, and their peers."
)
@DEVICE
@click.option("--tiny", is_flag=True, help="Tiny shapes, to try the benchmark.")
@click.option("--rounds", type=click.IntRange(min=1), default=15, show_default=True)
@record.output_option("fp8")
@torch.no_grad()
def main(device, tiny, rounds, output) -> None:
    kernel, _ = models.load_kernel()
    torch.manual_seed(0)
    result = {"environment": record.environment(device), "rounds": rounds}
    with clocks.watch(device) as result["clocks"]:
        result["fp8"] = {
            "products": [
                measure_product(kernel, size, rounds, device)
                for size in (TINY_PRODUCTS if tiny else PRODUCTS)
            ],
            "fused": [
                measure_fused(kernel, name, size, rounds, device)
                for name, size in (TINY_FUSED if tiny else FUSED)
            ],
            "rows": [
                measure_rows(kernel, name, shape, rounds, device)
                for name, shape in (TINY_ROWS if tiny else ROWS)
            ],
        }
    show(result)
    clocks.show(result["clocks"])
    output = record.destination(output, "fp8")
    record.finish(output, result)


if __name__ == "__main__":
    main()
