"""Qwen-Image at its published sizes with 6 of 60 blocks, with random weights."""

from __future__ import annotations

import torch
from diffusers import QwenImageTransformer2DModel

from benchmarks import models
from benchmarks.models.sizes import ImageSize, parse_image_size

NAME, TINY_NAME = "Qwen-Image, 6 blocks", "tiny Qwen-Image"
BATCH = 1  # guidance takes a separate forward
TEXT_TOKENS = 128  # of the prompt, without padding and mask
SIZES, TINY_SIZES = (ImageSize(1024, 1024),), (ImageSize(64, 96),)
SMALL = {"size": ImageSize(128, 128), "text_tokens": 64}

# diffusers' default sizes are the published ones.
TRANSFORMER = {"num_layers": 6}
PUBLISHED_BLOCKS = {"transformer_blocks": 60}
parse_size = parse_image_size
transformer = models.builder(
    QwenImageTransformer2DModel,
    TRANSFORMER,
    # Multiples of 16, which FP8 layers need.
    in_channels=16,
    out_channels=4,
    joint_attention_dim=64,
)


def inputs(
    model: QwenImageTransformer2DModel,
    size: ImageSize,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    timestep: float = 800.0,
    text_tokens: int = TEXT_TOKENS,
) -> dict[str, object]:
    """Arguments of a forward as QwenImagePipeline passes them: batch 1, packed latents, no mask."""
    normal, config = models.normal(device, dtype, seed), model.config
    return {
        "hidden_states": normal(1, size.tokens, config.in_channels),
        "encoder_hidden_states": normal(1, text_tokens, config.joint_attention_dim),
        "encoder_hidden_states_mask": None,
        "timestep": torch.tensor([timestep], device=device).to(dtype) / 1000,
        "guidance": None,
        "img_shapes": [[(1, *size.latent)]],
        "attention_kwargs": {},
        "return_dict": False,
    }
