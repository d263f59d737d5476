"""Models that injection speeds up in part: compiled block by block, with the kernels and without.

Of such a model attention runs on the kernels, and Inductor compiles the rest. Both modes share one set of
weights, with scores as peaked as in trained models, and take turns. The speedup is the median of RUNS runs;
all of them are recorded. Models have a few of their blocks. Widths are diffusers' defaults, and of PixArt and
CogView4 the published ones. Writes to benchmarks/results/in_part:

    python benchmarks/models/bench_in_part.py
    python benchmarks/models/bench_in_part.py --models pixart,prx --output /tmp/in_part.json
    python benchmarks/models/bench_in_part.py --device cpu --tiny --output /tmp/in_part.json
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
from diffusers.models import transformers
from tabulate import tabulate

from benchmarks import models
from benchmarks.harness import record, timing
from benchmarks.harness.options import DEVICE, TINY, Named
from benchmarks.models import allegro, auraflow
from benchmarks.models.sizes import ImageSize

MODES = (models.REGIONAL, f"injected+{models.REGIONAL}")
RUNS = 3
WARM_UP_ROUNDS = 2
CONSECUTIVE = 3  # forwards of a sample
DTYPE = torch.bfloat16

Draw = Callable[..., torch.Tensor]
Inputs = Callable[[Any, ImageSize, Draw, torch.device], dict[str, object]]


@dataclass(frozen=True)
class Model:
    """A model and the arguments of a forward, as its pipeline passes them.

    Attributes:
        inputs: ``inputs(config, size, draw, device)``; ``draw`` makes normal tensors of a shape.
    """

    title: str
    class_name: str
    config: dict[str, object]
    inputs: Inputs

    def build(self, device: torch.device, is_tiny: bool) -> torch.nn.Module:
        config = models.small_config(self.class_name) if is_tiny else self.config
        return models.build(getattr(transformers, self.class_name), config, device, DTYPE, seed=0)

    def arguments(self, model: Any, device: torch.device, is_tiny: bool) -> dict[str, object]:
        size = ImageSize(64, 96) if is_tiny else ImageSize(1024, 1024)
        draw = models.normal(device, DTYPE, seed=0)
        return {**self.inputs(model.config, size, draw, device), "return_dict": False}


@dataclass(frozen=True)
class Published:
    """A model that the benchmark of models has, too."""

    module: ModuleType

    @property
    def title(self) -> str:
        return self.module.NAME

    def build(self, device: torch.device, is_tiny: bool) -> torch.nn.Module:
        return self.module.transformer(device, DTYPE, is_tiny)

    def arguments(self, model: Any, device: torch.device, is_tiny: bool) -> dict[str, object]:
        size, *_ = self.module.TINY_SIZES if is_tiny else self.module.SIZES
        return self.module.inputs(model, size, device, DTYPE)


def _step(device: torch.device, count: int = 1, timestep: float = 0.8) -> torch.Tensor:
    return torch.full((count,), timestep, device=device, dtype=DTYPE)


def _latents(config: Any, size: ImageSize, draw: Draw) -> torch.Tensor:
    """Latents of guidance: (2, C, H, W), twice the same."""
    return draw(1, config.in_channels, *size.unpacked).repeat(2, 1, 1, 1)


def _joint_inputs(
    config: Any, size: ImageSize, draw: Draw, device: torch.device, text_tokens: int
) -> dict[str, object]:
    """Packed latents of one image, and its text's: batch 1."""
    return {
        "hidden_states": draw(1, size.tokens, config.in_channels),
        "encoder_hidden_states": draw(1, text_tokens, config.joint_attention_dim),
        "timestep": _step(device),
        "img_ids": models.positions(device, 1, *size.latent).float(),
        "txt_ids": torch.zeros(text_tokens, 3, device=device),
    }


def _pixart_inputs(
    config: Any, size: ImageSize, draw: Draw, device: torch.device
) -> dict[str, object]:
    sides = torch.tensor([[size.height, size.width]] * 2, device=device, dtype=DTYPE)
    mask = torch.ones(2, 120, device=device)
    mask[0, 8:] = 0  # the negative prompt is empty
    return {
        "hidden_states": _latents(config, size, draw),
        "encoder_hidden_states": draw(2, 120, config.caption_channels),
        "encoder_attention_mask": mask,
        "timestep": torch.full((2,), 800, device=device),
        "added_cond_kwargs": {
            "resolution": sides,
            "aspect_ratio": sides[:, :1] / sides[:, 1:],
        },
    }


def _cogview4_inputs(
    config: Any, size: ImageSize, draw: Draw, device: torch.device
) -> dict[str, object]:
    sides = torch.tensor([[size.height, size.width]], device=device, dtype=DTYPE)
    return {
        "hidden_states": draw(1, config.in_channels, *size.unpacked),
        "encoder_hidden_states": draw(1, 224, config.text_embed_dim),
        "timestep": torch.full((1,), 800, device=device),
        "original_size": sides,
        "target_size": sides,
        "crop_coords": torch.zeros_like(sides),
    }


def _ernie_inputs(
    config: Any, size: ImageSize, draw: Draw, device: torch.device
) -> dict[str, object]:
    return {
        "hidden_states": draw(1, config.in_channels, *size.latent).repeat(2, 1, 1, 1),
        "timestep": _step(device, 2, 800.0),
        "text_bth": draw(2, 128, config.text_in_dim),
        "text_lens": torch.tensor([16, 128], device=device),
    }


def _prx_inputs(
    config: Any, size: ImageSize, draw: Draw, device: torch.device
) -> dict[str, object]:
    mask = torch.ones(2, 256, device=device, dtype=torch.bool)
    mask[0, 16:] = False
    return {
        "hidden_states": _latents(config, size, draw),
        "encoder_hidden_states": draw(2, 256, config.context_in_dim),
        "attention_mask": mask,
        "timestep": _step(device, 2),
    }


def _kandinsky5_inputs(
    config: Any, size: ImageSize, draw: Draw, device: torch.device
) -> dict[str, object]:
    frames, (height, width) = 5, size.unpacked
    spaces = (frames, height // 2, width // 2)
    return {
        "hidden_states": draw(1, frames, height, width, config.in_visual_dim),
        "encoder_hidden_states": draw(1, 256, config.in_text_dim),
        "pooled_projections": draw(1, config.in_text_dim2),
        "timestep": _step(device, timestep=800.0),
        "visual_rope_pos": [torch.arange(count, device=device) for count in spaces],
        "text_rope_pos": torch.arange(256, device=device),
    }


_JOINT = {"num_layers": 2, "num_single_layers": 4}
MODELS: dict[str, Model | Published] = {
    "auraflow": Published(auraflow),
    "allegro": Published(allegro),
    "longcat_image": Model(
        "LongCat-Image, 2 + 4 blocks",
        "LongCatImageTransformer2DModel",
        _JOINT,
        functools.partial(_joint_inputs, text_tokens=512),
    ),
    "ovis_image": Model(
        "Ovis-Image, 2 + 4 blocks",
        "OvisImageTransformer2DModel",
        _JOINT,
        functools.partial(_joint_inputs, text_tokens=256),
    ),
    "bria": Model(
        "Bria, 2 + 4 blocks",
        "BriaTransformer2DModel",
        _JOINT,
        functools.partial(_joint_inputs, text_tokens=128),
    ),
    "ernie_image": Model(
        "ERNIE-Image, 4 blocks",
        "ErnieImageTransformer2DModel",
        {"num_layers": 4},
        _ernie_inputs,
    ),
    "pixart": Model(
        "PixArt-α, 8 blocks",
        "PixArtTransformer2DModel",
        {"num_layers": 8, "caption_channels": 4096, "interpolation_scale": 2},
        _pixart_inputs,
    ),
    "cogview4": Model(
        "CogView4, 4 blocks",
        "CogView4Transformer2DModel",
        {"num_layers": 4, "attention_head_dim": 128, "num_attention_heads": 32},
        _cogview4_inputs,
    ),
    "prx": Model(
        "PRX, 8 blocks",
        "PRXTransformer2DModel",
        {"depth": 8},
        _prx_inputs,
    ),
    "kandinsky5": Model(
        "Kandinsky 5, 4 blocks",
        "Kandinsky5Transformer3DModel",
        {"num_visual_blocks": 4},
        _kandinsky5_inputs,
    ),
}


def measure(
    entry: Model | Published,
    kernel: ModuleType,
    device: torch.device,
    is_tiny: bool,
    rounds: int,
) -> dict[str, Any]:
    """Each run's times and speedup of one model."""
    model = entry.build(device, is_tiny)
    arguments = entry.arguments(model, device, is_tiny)
    twins = {mode: models.twin(model) for mode in MODES}
    for mode, twin in twins.items():
        if mode.startswith("injected"):
            models.inject(kernel, twin, mode)
        models.compile_as(twin, mode)
    forwards = {
        mode: timing.repeated(functools.partial(twin, **arguments), CONSECUTIVE)
        for mode, twin in twins.items()
    }
    with models.weights(model, "peaked"):
        timing.interleave(forwards, WARM_UP_ROUNDS, device)
        runs = [timing.interleave(forwards, rounds, device) for _ in range(RUNS)]
    medians = [
        {mode: statistics.median(samples) / CONSECUTIVE for mode, samples in run.items()}
        for run in runs
    ]
    speedups = [median[MODES[0]] / median[MODES[1]] for median in medians]
    return {
        "model": entry.title,
        "ms": medians,
        "speedups": speedups,
        "speedup": statistics.median(speedups),
    }


@click.command()
@DEVICE
@TINY
@click.option(
    "--models",
    "entries",
    type=Named("models", MODELS),
    default=",".join(MODELS),
    show_default=True,
)
@click.option("--rounds", type=click.IntRange(min=1), default=6, show_default=True)
@record.output_option("in_part")
@torch.no_grad()
def main(device, tiny, entries, rounds, output) -> None:
    """Measure the models one after the other."""
    kernel, _ = models.load_kernel()
    result: dict[str, Any] = {
        "environment": record.environment(device),
        "dtype": record.dtype_name(DTYPE),
        "rounds": rounds,
        "in_part": [],
    }
    output = record.destination(output, "in_part")
    for entry in entries:
        result["in_part"].append(measure(entry, kernel, device, tiny, rounds))
        models.free(device)
        if output is not None:
            record.write(output, result)
    table = [[m["model"], m["speedup"], *m["speedups"]] for m in result["in_part"]]
    click.echo(tabulate(table, ["model", "median", *["run"] * RUNS], floatfmt=".3f"))
    if output is not None:
        click.echo(f"\nWrote {output}")


if __name__ == "__main__":
    main()
