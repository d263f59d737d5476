"""What quantizing each kind of linear layer to FP8 costs: one forward's distance from the float32 model.

torchao quantizes the layers of one kind per row, the kernels run the model, and its output is compared with
that of the float32 model. Models have random weights, peaked scores, outlier channels (outliers.py) and the
number of blocks that their modules in this folder give; "trained" is the small trained LTX-Video of the
examples. Writes to benchmarks/results/fp8_layers:

    python benchmarks/models/bench_fp8_layers.py
    python benchmarks/models/bench_fp8_layers.py --model ltx --weights peaked --output /tmp/layers.json
    python benchmarks/models/bench_fp8_layers.py --device cpu --tiny --output /tmp/layers.json
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
from tabulate import tabulate
from tqdm import tqdm

from benchmarks import models
from benchmarks.harness import record
from benchmarks.harness.options import DEVICE, TINY, names_option
from benchmarks.models import trained_ltx
from benchmarks.models.flux import FLUX
from benchmarks.models.ltx import LTX_VIDEO
from benchmarks.models.published import Published
from benchmarks.models.qwenimage import QWENIMAGE
from benchmarks.models.wan import WAN

from accuracy import finite_distance

TRAINED = "trained"
MODELS = {TRAINED: None, **{p.key: p for p in (LTX_VIDEO, FLUX, WAN, QWENIMAGE)}}
DTYPE = torch.bfloat16  # of torchao's quantization per row
NONE, BLOCKS = "none", "all in blocks except modulation"
# Ends of the names of the layers in blocks.
IN_BLOCKS = {
    "query, key, value": r"(to_[qkv]|add_[qkv]_proj)",
    "attention output": r"(to_out\.0|to_add_out)",
    "feed-forward, first": r"net\.0\.proj",
    "feed-forward, second": r"net\.2",
    "single blocks, proj_mlp": r"proj_mlp",
    "single blocks, proj_out": r"proj_out",
}
# Parts of the names of the other layers that make modulation.
MODULATE = ("time", "guidance", *models.NOT_QUANTIZED)


def kinds(model: torch.nn.Module) -> dict[str, list[str]]:
    """Names of the layers of each kind that the model has."""
    in_blocks = models.fp8_layers(model)
    linears = [name for name, module in model.named_modules() if _is_quantizable(module)]
    others = [name for name in linears if name not in in_blocks]
    modulation = [name for name in others if any(part in name for part in MODULATE)]
    blocks = list(dict.fromkeys(".".join(name.split(".")[:2]) for name in in_blocks))
    places = {"first": blocks[0], "middle": blocks[len(blocks) // 2], "last": blocks[-1]}
    found: dict[str, list[str]] = {
        NONE: [],
        **{
            kind: [name for name in in_blocks if re.search(rf"\.{end}$", name)]
            for kind, end in IN_BLOCKS.items()
        },
        "modulation": modulation,
        "embedders, last layer": [name for name in others if name not in modulation],
        **{
            f"{place} block": [name for name in in_blocks if name.startswith(f"{block}.")]
            for place, block in places.items()
        },
        BLOCKS: in_blocks,
        "all": linears,
    }
    return {kind: names for kind, names in found.items() if names or kind == NONE}


def _is_quantizable(module: torch.nn.Module) -> bool:
    """Not one that diffusers keeps in float32."""
    return type(module) is torch.nn.Linear and module.weight.dtype == DTYPE


def measure(
    model: torch.nn.Module,
    arguments: Mapping[str, object],
    thousandfold: Collection[str],
    kernel: ModuleType,
) -> list[dict[str, Any]]:
    """The distance of each kind, with the model's weights as they are."""
    exact = models.float32_output(model, arguments, thousandfold)
    rows = []
    for kind, names in tqdm(kinds(model).items(), leave=False):
        instance = models.twin(model)
        models.quantize(instance, names)
        models.inject(kernel, instance, "injected")
        distance = finite_distance(models.output_of(instance(**arguments)), exact)
        parameters = sum(model.get_submodule(name).weight.numel() for name in names)
        row = {"kind": kind, "layers": len(names), "parameters": parameters}
        rows.append({**row, "distance_from_float32": distance})
        del instance
        models.free(exact.device)
    return rows


def measure_published(
    published: Published, weights: str, kernel: ModuleType, device: torch.device, tiny: bool
) -> dict[str, Any]:
    model = published.transformer(device, DTYPE, tiny)
    size = (published.tiny_sizes if tiny else published.sizes)[0]
    arguments = published.inputs(model, size, device, DTYPE)
    with models.weights(model, weights):
        rows = measure(model, arguments, published.thousandfold, kernel)
    name = published.name_of(tiny)
    return {"model": name, "size": str(size), "weights": weights, "kinds": rows}


def measure_trained(kernel: ModuleType, device: torch.device, tiny: bool) -> dict[str, Any]:
    """A forward in the middle of a video of the small trained LTX-Video."""
    steps, height, width, frames = trained_ltx.TRAINED.size
    pipe = trained_ltx.load(device, DTYPE)
    arguments = trained_ltx.middle_forward(pipe, 2 if tiny else steps)
    rows = measure(pipe.transformer, arguments, (), kernel)
    size = f"{frames}x{height}x{width}"
    return {"model": "small trained LTX-Video", "size": size, "weights": TRAINED, "kinds": rows}


def show(entry: dict[str, Any]) -> None:
    keys = ("kind", "layers", "parameters", "distance_from_float32")
    rows = [[row[key] for key in keys] for row in entry["kinds"]]
    click.echo(f"\n{entry['model']}, {entry['size']}, {entry['weights']}")
    click.echo(tabulate(rows, ["FP8 layers", *keys[1:]], floatfmt=".4g"))


@click.command()
@names_option("--model", MODELS)
@click.option(
    "--weights",
    type=click.Choice(list(models.ALL_WEIGHTS)),
    default=models.OUTLIERS,
    show_default=True,
)
@DEVICE
@TINY
@record.output_option("fp8/layers")
@torch.no_grad()
def main(model, weights, device, tiny, output) -> None:
    """Measure what quantizing each kind of layer costs."""
    torch.set_float32_matmul_precision("highest")  # of the float32 model
    kernel, _ = models.load_kernel()
    result: dict[str, Any] = {"environment": record.environment(device), "fp8_layers": []}
    output = record.destination(output, "fp8/layers")
    for published in model:
        if published is None:
            entry = measure_trained(kernel, device, tiny)
        else:
            entry = measure_published(published, weights, kernel, device, tiny)
        result["fp8_layers"].append(entry)
        models.free(device)
        show(entry)
        record.write(output, result)
    record.say_where(output)


if __name__ == "__main__":
    main()
