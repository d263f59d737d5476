"""Stable Diffusion XL's UNet at its published size, with random weights.

Injection replaces its modules one by one: norms, attentions and feed-forward activations of its transformers,
and group norms, those of resnet blocks with SiLU and time embedding. Convolutions stay PyTorch's.
"""

from __future__ import annotations

import torch
from diffusers import UNet2DConditionModel

from benchmarks import models
from benchmarks.models.sizes import ImageSize, parse_image_size

NAME, TINY_NAME = "Stable Diffusion XL", "tiny Stable Diffusion XL"
BATCH = 2  # with guidance
TEXT_TOKENS = 77
# The widest attentions have one token per 16x16 pixels, as the sizes assume.
SIZES, TINY_SIZES = (ImageSize(1024, 1024),), (ImageSize(64, 96),)
SMALL = {"size": ImageSize(128, 128)}

TRANSFORMER = {
    "sample_size": 128,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (320, 640, 1280),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),  # numbers of heads, despite the name
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
TINY_TRANSFORMER = {
    **TRANSFORMER,
    "sample_size": 16,
    "block_out_channels": (32, 64, 128),
    "layers_per_block": 1,
    "transformer_layers_per_block": (1, 1, 2),
    "attention_head_dim": (1, 1, 2),
    "cross_attention_dim": 64,
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 80,
}
TIME_IDS = 6  # original size, corner, target size
parse_size = parse_image_size
transformer = models.builder(UNet2DConditionModel, TRANSFORMER, TINY_TRANSFORMER)


def inputs(
    model: UNet2DConditionModel,
    size: ImageSize,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    timestep: float = 800.0,
    text_tokens: int = TEXT_TOKENS,
) -> dict[str, object]:
    """Arguments of a forward as StableDiffusionXLPipeline passes them with guidance: batch 2."""
    normal, config = models.normal(device, dtype, seed), model.config
    latents = normal(1, config.in_channels, *size.unpacked)
    pooled = (
        config.projection_class_embeddings_input_dim - TIME_IDS * config.addition_time_embed_dim
    )
    pixels = [size.height, size.width]
    time_ids = torch.tensor([[*pixels, 0, 0, *pixels]], device=device).to(dtype)
    return {
        "sample": torch.cat([latents, latents]),
        "timestep": torch.tensor(timestep, device=device),
        "encoder_hidden_states": normal(2, text_tokens, config.cross_attention_dim),
        "timestep_cond": None,
        "cross_attention_kwargs": None,
        "added_cond_kwargs": {"text_embeds": normal(2, pooled), "time_ids": time_ids.repeat(2, 1)},
        "return_dict": False,
    }
