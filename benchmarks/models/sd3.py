"""Stable Diffusion 3.5 Large at its published sizes with 8 of 38 blocks, with random weights."""

from __future__ import annotations

import torch
from diffusers import SD3Transformer2DModel

from benchmarks import models
from benchmarks.models.sizes import ImageSize, parse_image_size

NAME, TINY_NAME = "Stable Diffusion 3.5 Large, 8 blocks", "tiny Stable Diffusion 3.5"
BATCH = 2  # with guidance
TEXT_TOKENS = 333  # 77 of CLIP and 256 of T5
SIZES, TINY_SIZES = (ImageSize(1024, 1024),), (ImageSize(64, 96),)
SMALL = {"size": ImageSize(128, 128), "text_tokens": 64}

TRANSFORMER = {
    "num_layers": 8,
    "num_attention_heads": 38,
    "attention_head_dim": 64,
    "caption_projection_dim": 2432,
    "pos_embed_max_size": 192,
    "qk_norm": "rms_norm",
}
PUBLISHED_BLOCKS = {"transformer_blocks": 38}
parse_size = parse_image_size
transformer = models.builder(SD3Transformer2DModel, TRANSFORMER)


def inputs(
    model: SD3Transformer2DModel,
    size: ImageSize,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    timestep: float = 800.0,
    text_tokens: int = TEXT_TOKENS,
) -> dict[str, object]:
    """Arguments of a forward as StableDiffusion3Pipeline passes them with guidance: batch 2."""
    normal, config = models.normal(device, dtype, seed), model.config
    latents = normal(1, config.in_channels, *size.unpacked)
    return {
        "hidden_states": torch.cat([latents, latents]),
        "encoder_hidden_states": normal(2, text_tokens, config.joint_attention_dim),
        "pooled_projections": normal(2, config.pooled_projection_dim),
        "timestep": torch.tensor(timestep, device=device).expand(2),
        "joint_attention_kwargs": None,
        "return_dict": False,
    }
