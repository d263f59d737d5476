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
from collections.abc import Callable, Sequence
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
from benchmarks.harness.options import DEVICE, TINY, names_option
from benchmarks.models.images import AURAFLOW
from benchmarks.models.published import Given, Published, PublishedImage
from benchmarks.models.videos import ALLEGRO

MODES = (models.REGIONAL, f"injected+{models.REGIONAL}")
RUNS = 3
WARM_UP_ROUNDS = 2
CONSECUTIVE = 3  # forwards of a sample
DTYPE = torch.bfloat16


class PackedImage(PublishedImage):
    """Packed latents of one image, and its text's."""

    config = {"num_layers": 2, "num_single_layers": 4}
    timestep = 0.8

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        config, size, device = model.config, given.size, given.device
        return {
            "hidden_states": given.normal(1, size.tokens, config.in_channels),
            "encoder_hidden_states": given.normal(1, given.text_tokens, config.joint_attention_dim),
            "timestep": given.timesteps().to(given.dtype),
            "img_ids": models.positions(device, 1, *size.latent).float(),
            "txt_ids": torch.zeros(given.text_tokens, 3, device=device),
        }


class LongCatImage(PackedImage):
    key, name = "longcat_image", "LongCat-Image, 2 + 4 blocks"
    cls = transformers.LongCatImageTransformer2DModel
    text_tokens = 512


class OvisImage(PackedImage):
    key, name = "ovis_image", "Ovis-Image, 2 + 4 blocks"
    cls = transformers.OvisImageTransformer2DModel
    text_tokens = 256


class Bria(PackedImage):
    key, name = "bria", "Bria, 2 + 4 blocks"
    cls = transformers.BriaTransformer2DModel
    text_tokens = 128


class ErnieImage(PublishedImage):
    key, name = "ernie_image", "ERNIE-Image, 4 blocks"
    cls = transformers.ErnieImageTransformer2DModel
    config = {"num_layers": 4}
    text_tokens = 128

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        config = model.config
        latents = given.normal(1, config.in_channels, *given.size.latent)
        return {
            "hidden_states": latents.repeat(2, 1, 1, 1),
            "timestep": given.timesteps(2).to(given.dtype),
            "text_bth": given.normal(2, given.text_tokens, config.text_in_dim),
            "text_lens": torch.tensor([16, given.text_tokens], device=given.device),
        }


class PixArt(PublishedImage):
    key, name = "pixart", "PixArt-α, 8 blocks"
    cls = transformers.PixArtTransformer2DModel
    config = {"num_layers": 8, "caption_channels": 4096, "interpolation_scale": 2}
    text_tokens = 120
    timestep = 800

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        config, size, device = model.config, given.size, given.device
        sides = torch.tensor([[size.height, size.width]] * 2, device=device, dtype=given.dtype)
        mask = torch.ones(2, given.text_tokens, device=device)
        mask[0, 8:] = 0  # the negative prompt is empty
        latents = given.normal(1, config.in_channels, *size.unpacked)
        return {
            "hidden_states": latents.repeat(2, 1, 1, 1),
            "encoder_hidden_states": given.normal(2, given.text_tokens, config.caption_channels),
            "encoder_attention_mask": mask,
            "timestep": given.timesteps(2),
            "added_cond_kwargs": {
                "resolution": sides,
                "aspect_ratio": sides[:, :1] / sides[:, 1:],
            },
        }


class CogView4(PublishedImage):
    key, name = "cogview4", "CogView4, 4 blocks"
    cls = transformers.CogView4Transformer2DModel
    config = {"num_layers": 4, "attention_head_dim": 128, "num_attention_heads": 32}
    text_tokens = 224
    timestep = 800

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        config, size = model.config, given.size
        sides = torch.tensor([[size.height, size.width]], device=given.device, dtype=given.dtype)
        return {
            "hidden_states": given.normal(1, config.in_channels, *size.unpacked),
            "encoder_hidden_states": given.normal(1, given.text_tokens, config.text_embed_dim),
            "timestep": given.timesteps(),
            "original_size": sides,
            "target_size": sides,
            "crop_coords": torch.zeros_like(sides),
        }


class PRX(PublishedImage):
    key, name = "prx", "PRX, 8 blocks"
    cls = transformers.PRXTransformer2DModel
    config = {"depth": 8}
    text_tokens = 256
    timestep = 0.8

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        config, text_tokens = model.config, given.text_tokens
        latents = given.normal(1, config.in_channels, *given.size.unpacked)
        return {
            "hidden_states": latents.repeat(2, 1, 1, 1),
            "encoder_hidden_states": given.normal(2, text_tokens, config.context_in_dim),
            "attention_mask": torch.stack([given.text_mask(16), given.text_mask(text_tokens)]),
            "timestep": given.timesteps(2).to(given.dtype),
        }


class Kandinsky5(PublishedImage):
    """A video of few frames."""

    key, name = "kandinsky5", "Kandinsky 5, 4 blocks"
    cls = transformers.Kandinsky5Transformer3DModel
    config = {"num_visual_blocks": 4}
    text_tokens = 256

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        config, device = model.config, given.device
        frames, (height, width) = 5, given.size.unpacked
        spaces = (frames, height // 2, width // 2)
        return {
            "hidden_states": given.normal(1, frames, height, width, config.in_visual_dim),
            "encoder_hidden_states": given.normal(1, given.text_tokens, config.in_text_dim),
            "pooled_projections": given.normal(1, config.in_text_dim2),
            "timestep": given.timesteps().to(given.dtype),
            "visual_rope_pos": [torch.arange(count, device=device) for count in spaces],
            "text_rope_pos": torch.arange(given.text_tokens, device=device),
        }


_UNKNOWN = (LongCatImage, OvisImage, Bria, ErnieImage, PixArt, CogView4, PRX, Kandinsky5)
MODELS = {entry.key: entry for entry in (AURAFLOW, ALLEGRO, *(cls() for cls in _UNKNOWN))}


def model_and_arguments(
    entry: Published, device: torch.device, is_tiny: bool
) -> tuple[torch.nn.Module, dict[str, Any]]:
    model = entry.transformer(device, DTYPE, is_tiny)
    size, *_ = entry.tiny_sizes if is_tiny else entry.sizes
    return model, entry.inputs(model, size, device, DTYPE)


def measure(
    entry: Published,
    kernel: ModuleType,
    device: torch.device,
    is_tiny: bool,
    rounds: int,
) -> dict[str, Any]:
    """Each run's times and speedup of one model."""
    model, arguments = model_and_arguments(entry, device, is_tiny)
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
        "model": entry.name,
        "ms": medians,
        "speedups": speedups,
        "speedup": statistics.median(speedups),
    }


def measure_each(
    name: str,
    measure: Callable[..., dict[str, Any]],
    entries: Sequence[Published],
    device: torch.device,
    is_tiny: bool,
    rounds: int,
    output: Path | None,
) -> list[dict[str, Any]]:
    """The models one after the other. The result is written after each."""
    kernel, _ = models.load_kernel()
    measured: list[dict[str, Any]] = []
    result = {
        "environment": record.environment(device),
        "dtype": record.dtype_name(DTYPE),
        "rounds": rounds,
        name: measured,
    }
    where = record.destination(output, name)
    for entry in entries:
        measured.append(measure(entry, kernel, device, is_tiny, rounds))
        models.free(device)
        record.write(where, result)
    record.say_where(where)
    return measured


@click.command()
@DEVICE
@TINY
@names_option("--models", MODELS, "entries")
@click.option("--rounds", type=click.IntRange(min=1), default=6, show_default=True)
@record.output_option("in_part")
@torch.no_grad()
def main(device, tiny, entries, rounds, output) -> None:
    """Measure the models one after the other."""
    measured = measure_each("in_part", measure, entries, device, tiny, rounds, output)
    table = [[m["model"], m["speedup"], *m["speedups"]] for m in measured]
    click.echo(tabulate(table, ["model", "median", *["run"] * RUNS], floatfmt=".3f"))


if __name__ == "__main__":
    main()
