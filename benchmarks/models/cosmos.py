"""Cosmos-Predict2 2B Text2Image at its published sizes, all 28 blocks, with random weights.

It has no padding mask channel, which needs torchvision in diffusers.
"""

from __future__ import annotations

import torch
from diffusers import CosmosTransformer3DModel

from benchmarks import models
from benchmarks.models.sizes import ImageSize, parse_image_size

NAME, TINY_NAME = "Cosmos-Predict2 2B", "tiny Cosmos-Predict2"
BATCH = 1  # guidance takes a separate forward
TEXT_TOKENS = 512
SIZES, TINY_SIZES = (ImageSize(768, 1360),), (ImageSize(64, 96),)
SMALL = {"size": ImageSize(128, 128), "text_tokens": 64}

TRANSFORMER = {
    "num_attention_heads": 16,
    "rope_scale": (1.0, 4.0, 4.0),
    "extra_pos_embed_type": None,
    "concat_padding_mask": False,
}
parse_size = parse_image_size
transformer = models.builder(CosmosTransformer3DModel, TRANSFORMER, adaln_lora_dim=32)


def inputs(
    model: CosmosTransformer3DModel,
    size: ImageSize,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    timestep: float = 0.8,
    text_tokens: int = TEXT_TOKENS,
) -> dict[str, object]:
    """Arguments of a forward as Cosmos2TextToImagePipeline passes them: batch 1, one frame."""
    normal, config = models.normal(device, dtype, seed), model.config
    return {
        "hidden_states": normal(1, config.in_channels, 1, *size.unpacked),
        "encoder_hidden_states": normal(1, text_tokens, config.text_embed_dim),
        "timestep": torch.tensor([timestep], device=device).to(dtype),
        "padding_mask": torch.zeros(1, 1, size.height, size.width, device=device, dtype=dtype),
        "return_dict": False,
    }
