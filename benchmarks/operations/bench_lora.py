"""LoRA: linear layers with an adapter beside the layers alone, in 16 bits and in FP8.

Layers that read the same input are a group: query, key and value of FLUX.1, LTX-Video and Wan 14B, and the
layers of their feed-forwards. Modes are

- none: the layers without an adapter, GELU in cuBLAS' epilogue;
- ours: one lora_down for the group, and linears_lora;
- addmm: PyTorch's product with the concatenated matrices, then those into the results;
- peft: peft's expression for each layer;
- fp8 none, fp8 ours: FP8 products without an adapter, and lora_down with the terms in the products.

All take turns, back to back, because power limits a GPU. Errors are relative L2 distances from float64, of
the first 256 rows. Writes to benchmarks/results/lora:

    python benchmarks/operations/bench_lora.py
    python benchmarks/operations/bench_lora.py --device cpu --tiny --output /tmp/lora.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
from bench_fp8 import ERROR_ROWS, activations, sustained
from tabulate import tabulate
from torch import Tensor
from torch.nn import functional as F

from benchmarks import models
from benchmarks.harness import clocks, record, timing
from benchmarks.harness.options import DEVICE

from accuracy import finite_distance

# Title, rows, features of the results, features of the input, whether GELU follows.
GROUPS = (
    ("FLUX.1 query, key, value", 4608, (3072,) * 3, 3072, False),
    ("FLUX.1 feed-forward in", 4608, (12288,), 3072, True),
    ("FLUX.1 feed-forward out", 4096, (3072,), 12288, False),
    ("FLUX.1 text query, key, value", 512, (3072,) * 3, 3072, False),
    ("LTX-Video query, key, value", 8064, (2048,) * 3, 2048, False),
    ("LTX-Video feed-forward out", 8064, (2048,), 8192, False),
    ("Wan 14B query, key, value", 32760, (5120,) * 3, 5120, False),
    ("Wan 14B feed-forward in", 32760, (13824,), 5120, True),
    ("Wan 14B feed-forward out", 32760, (5120,), 13824, False),
)
TINY_GROUPS = (
    ("query, key, value", 33, (64,) * 3, 48, False),
    ("feed-forward", 40, (144,), 32, True),
)
RANKS = (16, 64)


@dataclass
class Layer:
    weight: Tensor
    bias: Tensor
    down: Tensor
    up: Tensor
    fp8: tuple[Tensor, Tensor]


def layers_of(
    kernel: ModuleType, sizes: tuple[int, ...], features: int, rank: int, device: torch.device
) -> list[Layer]:
    def normal(*shape: int, scale: float = 0.02) -> Tensor:
        return (torch.randn(shape, device=device) * scale).bfloat16()

    layers = []
    for size in sizes:
        weight = normal(size, features)
        operands = (weight, normal(size), normal(rank, features), normal(size, rank))
        layers.append(Layer(*operands, kernel.quantize_fp8(weight)))
    return layers


def modes_of(
    kernel: ModuleType, x: Tensor, layers: list[Layer], has_gelu: bool, scale: float = 0.8
) -> dict[str, Callable[[], Any]]:
    ranks = [layer.up.shape[1] for layer in layers]
    x8 = kernel.quantize_fp8(x)
    weights, ups = [layer.weight for layer in layers], [layer.up for layer in layers]
    biases = [layer.bias for layer in layers]
    downs, factors = [layer.down for layer in layers], [scale] * len(layers)
    unused = x.new_empty(1)
    approximate = "tanh" if has_gelu else None

    def lows() -> list[Tensor]:
        return list(kernel.lora_down(x, downs, factors).split(ranks, dim=1))

    def addmm_lows() -> list[Tensor]:
        down = downs[0] if len(downs) == 1 else torch.cat(downs)
        product = torch.addmm(unused, x, down.t(), beta=0, alpha=scale)
        return list(product.split(ranks, dim=1))

    def activated(result: Tensor) -> Tensor:
        return kernel.gelu(result, "tanh") if has_gelu else result

    def none() -> list[Tensor]:
        if has_gelu and x.is_cuda:
            return [torch._addmm_activation(biases[0], x, weights[0].t(), use_gelu=True)]
        return [activated(F.linear(x, *each)) for each in zip(weights, biases, strict=True)]

    def ours() -> tuple[Tensor, ...]:
        return kernel.linears_lora(x, weights, lows(), ups, biases, approximate=approximate)

    def addmm() -> list[Tensor]:
        results = []
        for layer, low in zip(layers, addmm_lows(), strict=True):
            result = F.linear(x, layer.weight, layer.bias)
            results.append(activated(result.addmm_(low, layer.up.t())))
        return results

    def peft() -> list[Tensor]:
        return [
            activated(
                F.linear(x, layer.weight, layer.bias)
                + F.linear(F.linear(x, layer.down), layer.up) * scale
            )
            for layer in layers
        ]

    def fp8(has_lora: bool) -> Any:
        each: list[dict[str, Tensor]] = [{} for _ in layers]
        if has_lora:
            products = kernel.lora_down(x8[0], downs, factors, x8[1]).split(ranks, dim=1)
            each = [{"low": low, "up": up} for low, up in zip(products, ups, strict=True)]
        if len(layers) == 1:
            operands = (*x8, *layers[0].fp8, biases[0])
            if has_gelu:
                return kernel.linear_gelu_fp8(*operands, **each[0], approximate="tanh")
            return kernel.linear_fp8(*operands, **each[0])
        options = {f"{name}s": [e[name] for e in each] for name in ("low", "up") if has_lora}
        values, scales = zip(*(layer.fp8 for layer in layers), strict=True)
        return kernel.linears_fp8(*x8, values, scales, biases, **options)

    return {
        "none": none,
        "ours": ours,
        "addmm": addmm,
        "peft": peft,
        "fp8 none": lambda: fp8(False),
        "fp8 ours": lambda: fp8(True),
    }


def error_of(results: Any, exact: list[Tensor]) -> float:
    pairs = zip(results, exact, strict=True)
    return max(finite_distance(result[:ERROR_ROWS], wide) for result, wide in pairs)


def measure(
    kernel: ModuleType, group: tuple, rank: int, rounds: int, device: torch.device
) -> dict[str, Any]:
    title, rows, sizes, features, has_gelu = group
    x = activations(device, rows, features)
    layers = layers_of(kernel, sizes, features, rank, device)
    modes = modes_of(kernel, x, layers, has_gelu)
    wide, exact = x[:ERROR_ROWS].double(), []
    for layer in layers:
        low = wide @ layer.down.double().t()
        total = wide @ layer.weight.double().t() + 0.8 * low @ layer.up.double().t() + layer.bias
        exact.append(F.gelu(total, approximate="tanh") if has_gelu else total)
    cold = timing.cold_microseconds(modes, rounds, device)
    return {
        "group": title,
        "rows": rows,
        "sizes": list(sizes),
        "features": features,
        "rank": rank,
        "microseconds": cold,
        "sustained_microseconds": sustained(modes, cold, device),
        "errors": {mode: error_of(modes[mode](), exact) for mode in ("ours", "addmm", "peft")},
    }


def show(result: Mapping) -> None:
    rows = []
    for entry in result["lora"]:
        times = {k: v["median"] for k, v in entry["sustained_microseconds"].items()}
        row = [entry["group"], entry["rank"], times["none"]]
        row += [times[mode] / times["none"] for mode in ("ours", "addmm", "peft")]
        row += [times["fp8 none"], times["fp8 ours"] / times["fp8 none"]]
        rows.append([*row, *(1e3 * error for error in entry["errors"].values())])
    headers = ["group", "rank", "none us", "x ours", "x addmm", "x peft", "fp8 us", "x fp8 ours"]
    headers += ["error 1e-3", "addmm's", "peft's"]
    click.echo(tabulate(rows, headers, floatfmt=".3f"))


@click.command(help="Time linear layers with LoRA beside the layers alone.")
@DEVICE
@click.option("--tiny", is_flag=True, help="Tiny shapes, to try the benchmark.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@record.output_option("lora")
@torch.no_grad()
def main(device, tiny, rounds, output) -> None:
    kernel, _ = models.load_kernel()
    torch.manual_seed(0)
    result: dict[str, Any] = {"environment": record.environment(device), "rounds": rounds}
    with clocks.watch(device) as result["clocks"]:
        result["lora"] = [
            measure(kernel, group, rank, rounds, device)
            for group in (TINY_GROUPS if tiny else GROUPS)
            for rank in RANKS
        ]
    show(result)
    clocks.show(result["clocks"])
    output = record.destination(output, "lora")
    record.finish(output, result)


if __name__ == "__main__":
    main()
