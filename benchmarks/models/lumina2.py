"""Lumina Image 2.0 at its published sizes except for 8 of 26 layers, with random weights."""

from __future__ import annotations

import torch
from diffusers import Lumina2Transformer2DModel

from benchmarks import models
from benchmarks.models.sizes import ImageSize, parse_image_size

NAME, TINY_NAME = "Lumina 2, 8 blocks", "tiny Lumina 2"
BATCH = 1  # guidance is a forward of its own
TEXT_TOKENS, PROMPT_TOKENS = 256, 128  # with the system prompt; the rest is padding
SIZES, TINY_SIZES = (ImageSize(1024, 1024),), (ImageSize(64, 96),)
SMALL = {"size": ImageSize(128, 128), "text_tokens": 64}

# diffusers' default sizes are the published ones, except the text encoder's channels. There are two refiners
# each of the image and of the text.
TRANSFORMER = {"num_layers": 8, "cap_feat_dim": 2304}
PUBLISHED_BLOCKS = {"layers": 26}
parse_size = parse_image_size
transformer = models.builder(Lumina2Transformer2DModel, TRANSFORMER)


def inputs(
    model: Lumina2Transformer2DModel,
    size: ImageSize,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    timestep: float = 800.0,
    text_tokens: int = TEXT_TOKENS,
) -> dict[str, object]:
    """Arguments of a forward as Lumina2Pipeline passes them: batch 1, with a mask of the text."""
    normal, config = models.normal(device, dtype, seed), model.config
    mask = torch.arange(text_tokens, device=device) < PROMPT_TOKENS
    return {
        "hidden_states": normal(1, config.in_channels, *size.unpacked),
        "timestep": 1 - torch.tensor([timestep], device=device) / 1000,
        "encoder_hidden_states": normal(1, text_tokens, config.cap_feat_dim),
        "encoder_attention_mask": mask.long().unsqueeze(0),
        "attention_kwargs": None,
        "return_dict": False,
    }
