"""LTX-Video at its published sizes, with random weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)

from benchmarks import models

NAME, TINY_NAME = "LTX-Video 2B", "tiny LTX-Video"
BATCH = 2  # with guidance
TEXT_TOKENS = 128
FRAME_RATE = 25
SPATIAL_COMPRESSION, TEMPORAL_COMPRESSION = 32, 8

# diffusers' default sizes of both models are the published ones (LTX-Video 0.9.0, 2B).
TINY_TRANSFORMER = {
    "in_channels": 16,
    "out_channels": 16,
    "num_attention_heads": 2,
    "attention_head_dim": 64,
    "cross_attention_dim": 128,
    "caption_channels": 64,
    "num_layers": 2,
}
TINY_VAE = {
    "latent_channels": 16,
    "block_out_channels": (16, 16, 32, 32),
    "decoder_block_out_channels": (16, 16, 32, 32),
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1, 1),
}
# The published pipeline's scheduler.
SCHEDULER = {
    "use_dynamic_shifting": True,
    "base_shift": 0.95,
    "max_shift": 2.05,
    "base_image_seq_len": 1024,
    "max_image_seq_len": 4096,
    "shift_terminal": 0.1,
}


@dataclass(frozen=True)
class VideoSize:
    """Size of a video in pixels, and of its latent."""

    frames: int
    height: int
    width: int

    @property
    def latent(self) -> tuple[int, int, int]:
        return (
            (self.frames - 1) // TEMPORAL_COMPRESSION + 1,
            self.height // SPATIAL_COMPRESSION,
            self.width // SPATIAL_COMPRESSION,
        )

    @property
    def tokens(self) -> int:
        return math.prod(self.latent)

    def __str__(self) -> str:
        return f"{self.frames}x{self.height}x{self.width}"


# Few tokens, for bench_host_forward.py.
SMALL = {"size": VideoSize(1, 256, 256)}
SIZES = (VideoSize(49, 512, 768), VideoSize(161, 512, 768))
TINY_SIZES = (VideoSize(9, 64, 96), VideoSize(17, 64, 96))


def parse_size(text: str) -> VideoSize:
    """Parses FRAMESxHEIGHTxWIDTH; ValueError if it is malformed or the model does not support the size."""
    try:
        size = VideoSize(*(int(number) for number in text.split("x")))
    except (TypeError, ValueError):
        raise ValueError(f"a size is FRAMESxHEIGHTxWIDTH, got {text!r}") from None
    if size.frames % 8 != 1 or size.height % 32 or size.width % 32:
        raise ValueError(
            f"frames must be a multiple of 8 plus 1, height and width multiples of 32, got {text}"
        )
    return size


transformer = models.builder(LTXVideoTransformer3DModel, {}, TINY_TRANSFORMER)
vae = models.builder(AutoencoderKLLTXVideo, {}, TINY_VAE)


def pipeline(transformer: LTXVideoTransformer3DModel, vae: AutoencoderKLLTXVideo) -> LTXPipeline:
    """The pipeline without text encoder: it takes prompt embeddings."""
    pipe = LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=vae,
        text_encoder=None,
        tokenizer=None,
        transformer=transformer,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def prompt(
    model: LTXVideoTransformer3DModel, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Made-up prompt and negative prompt, as arguments of the pipeline.

    Embeddings (1, 128, caption channels) and boolean masks (1, 128) with padding: 90 and 20 tokens.
    """
    generator = torch.Generator(device).manual_seed(seed)
    arguments = {}
    for name, tokens in (("prompt", 90), ("negative_prompt", 20)):
        arguments[f"{name}_embeds"] = torch.randn(
            1,
            TEXT_TOKENS,
            model.config.caption_channels,
            generator=generator,
            device=device,
        ).to(dtype)
        arguments[f"{name}_attention_mask"] = (
            torch.arange(TEXT_TOKENS, device=device)[None] < tokens
        )
    return arguments


def inputs(
    model: LTXVideoTransformer3DModel,
    size: VideoSize,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    timestep: float = 800.0,
) -> dict[str, object]:
    """Arguments of a forward as LTXPipeline passes them with guidance: batch 2, negative first."""
    text = prompt(model, device, dtype, seed)
    generator = torch.Generator(device).manual_seed(seed + 1)
    latents = torch.randn(
        1, size.tokens, model.config.in_channels, generator=generator, device=device
    )
    frames, height, width = size.latent
    return {
        "hidden_states": torch.cat([latents, latents]).to(dtype),
        "encoder_hidden_states": torch.cat([text["negative_prompt_embeds"], text["prompt_embeds"]]),
        "timestep": torch.tensor(timestep, device=device).expand(2),
        "encoder_attention_mask": torch.cat(
            [text["negative_prompt_attention_mask"], text["prompt_attention_mask"]]
        ),
        "num_frames": frames,
        "height": height,
        "width": width,
        "rope_interpolation_scale": (
            TEMPORAL_COMPRESSION / FRAME_RATE,
            SPATIAL_COMPRESSION,
            SPATIAL_COMPRESSION,
        ),
        "return_dict": False,
    }
