"""Convolutions of decoders: frames from before or the first frame again, padding, convolution and bias.

Modes take turns, with the L2 cache flushed before each:

- ours: conv3d, with channels last;
- eager: PyTorch's concatenation, padding and convolution, contiguous;
- channels last: the same with channels last, and with a weight that has them already;
- product alone: cuDNN with channels last, without bias, on an input that is padded already.

Errors are relative L2 distances from float64, of one frame. Writes to benchmarks/results/conv3d:

    python benchmarks/operations/bench_conv3d.py
    python benchmarks/operations/bench_conv3d.py --device cpu --tiny --output /tmp/conv3d.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
from tabulate import tabulate
from torch import Tensor
from torch.nn import functional as F

from benchmarks import models
from benchmarks.harness import clocks, record, timing
from benchmarks.harness.options import DEVICE

from accuracy import finite_distance

LAST = torch.channels_last_3d
# Title, (channels, frames, rows, columns), channels of the result, the border of rows and columns. With
# zeros two frames come from before; with another border the first and last frame are repeated.
SHAPES = (
    ("Wan, Qwen-Image: pixels", (96, 4, 480, 832), 96, "zeros"),
    ("Wan: halves", (192, 4, 240, 416), 192, "zeros"),
    ("Wan: quarters", (384, 2, 120, 208), 384, "zeros"),
    ("Wan: eighths", (384, 1, 60, 104), 384, "zeros"),
    ("Wan: frames", (96, 4, 480, 832), 3, "zeros"),
    ("LTX-Video: last blocks", (128, 121, 176, 304), 128, "replicate"),
    ("LTX-2: blocks", (256, 61, 64, 96), 256, "reflect"),
    ("HunyuanVideo 1.5: halves", (128, 16, 240, 424), 128, "replicate"),
    ("HunyuanVideo 1.5: eighths", (1024, 8, 60, 106), 1024, "replicate"),
)
TINY_SHAPES = (
    ("zeros", (16, 2, 6, 10), 24, "zeros"),
    ("replicate", (16, 3, 6, 10), 8, "replicate"),
)
Modes = dict[str, Callable[[], Tensor]]


def padded(x: Tensor, previous: Tensor | None, border: str) -> Tensor:
    """x with two more frames, and with rows and columns unless the convolution can pad them."""
    if previous is not None:
        return torch.cat([previous, x], 2)
    x = torch.cat([x[:, :, :1], x, x[:, :, -1:]], 2)
    return F.pad(x, (1, 1, 1, 1, 0, 0), mode=border)


def modes_of(
    kernel: ModuleType, shape: tuple, out_channels: int, border: str, device: torch.device
) -> Modes:
    channels, frames, *sides = shape
    draw = models.normal(device, torch.bfloat16, seed=0)
    x = draw(1, channels, frames, *sides)
    weight = draw(out_channels, channels, 3, 3, 3) / (27 * channels) ** 0.5
    bias = draw(out_channels)
    previous = draw(1, channels, 2, *sides) if border == "zeros" else None
    last = x.contiguous(memory_format=LAST)
    weight_last = weight.contiguous(memory_format=LAST)
    previous_last = None if previous is None else previous.contiguous(memory_format=LAST)
    options: dict[str, Any] = {"padding": (0, 0, 1, 1), "previous": previous_last}
    if previous is None:
        options = {"padding": (1, 1, 1, 1), "frame_border": "replicate", "border": border}
    pixels = (0, 1, 1) if previous is not None else 0
    ready = padded(last, previous_last, border).contiguous(memory_format=LAST)
    return {
        "ours": lambda: kernel.conv3d(last, weight, bias, **options),
        "eager": lambda: F.conv3d(padded(x, previous, border), weight, bias, padding=pixels),
        "channels last": lambda: F.conv3d(
            padded(last, previous_last, border), weight_last, bias, padding=pixels
        ),
        "product alone": lambda: F.conv3d(ready, weight_last, padding=pixels),
        "float64": lambda: F.conv3d(
            ready[:, :, :3].double(), weight.double(), bias.double(), padding=pixels
        ),
    }


def measure(kernel: ModuleType, case: tuple, rounds: int, device: torch.device) -> dict[str, Any]:
    title, shape, out_channels, border = case
    modes = modes_of(kernel, shape, out_channels, border, device)
    exact = modes.pop("float64")()
    operations = 2 * 27 * out_channels * torch.tensor(shape).prod().item()
    return {
        "title": title,
        "shape": list(shape),
        "out_channels": out_channels,
        "border": border,
        "operations": operations,
        "microseconds": timing.cold_microseconds(modes, rounds, device),
        "errors": {
            mode: finite_distance(modes[mode]()[:, :, :1], exact) for mode in ("ours", "eager")
        },
    }


def show(result: dict[str, Any]) -> None:
    rows = []
    for entry in result["conv3d"]:
        times = {mode: each["median"] for mode, each in entry["microseconds"].items()}
        ours = times.pop("ours")
        row = [entry["title"], "x".join(map(str, entry["shape"])), entry["out_channels"]]
        row += [entry["border"], ours, entry["operations"] / ours / 1e6]
        row += [time / ours for time in times.values()]
        rows.append([*row, *(1e3 * error for error in entry["errors"].values())])
    headers = ["layer", "C x T x H x W", "N", "border", "us", "TFLOPS", "x eager"]
    headers += ["x channels last", "x product alone", "error 1e-3", "eager's"]
    click.echo(tabulate(rows, headers, floatfmt=".2f"))


@click.command(help="Time convolutions of decoders beside PyTorch's.")
@DEVICE
@click.option("--tiny", is_flag=True, help="Tiny shapes, to try the benchmark.")
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True)
@record.output_option("conv3d")
@torch.no_grad()
def main(device, tiny, rounds, output) -> None:
    kernel, _ = models.load_kernel()
    result: dict[str, Any] = {"environment": record.environment(device), "rounds": rounds}
    with clocks.watch(device) as result["clocks"]:
        result["conv3d"] = [
            measure(kernel, case, rounds, device) for case in (TINY_SHAPES if tiny else SHAPES)
        ]
    show(result)
    clocks.show(result["clocks"])
    output = record.destination(output, "conv3d")
    record.finish(output, result)


if __name__ == "__main__":
    main()
