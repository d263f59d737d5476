"""Qwen-Image 2.1 at its published sizes with 6 of 32 blocks, with random weights."""

from __future__ import annotations

import torch
from diffusers import QwenImage21Transformer2DModel
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

from benchmarks import models
from benchmarks.models.sizes import ImageSize, parse_image_size

NAME, TINY_NAME = "Qwen-Image 2.1, 6 blocks", "tiny Qwen-Image 2.1"
BATCH = 1  # guidance takes a separate forward
TEXT_TOKENS = 128  # of the prompt, without padding and mask
SLOT_TOKENS = 4  # of the image in a slot of the text encoder's sequence
SIZES, TINY_SIZES = (ImageSize(1024, 1024),), (ImageSize(64, 96),)
SMALL = {"size": ImageSize(128, 128), "text_tokens": 64}

# diffusers' default sizes are the published ones.
TRANSFORMER = {"num_layers": 6}
PUBLISHED_BLOCKS = {"transformer_blocks": 32}
parse_size = parse_image_size
transformer = models.builder(QwenImage21Transformer2DModel, TRANSFORMER)


def inputs(
    model: QwenImage21Transformer2DModel,
    size: ImageSize,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    timestep: float = 800.0,
    text_tokens: int = TEXT_TOKENS,
) -> dict[str, object]:
    """Arguments of a forward as QwenImage21Pipeline passes them after the first step: batch 1, no mask, keys
    and values of the text in a cache."""
    normal, config = models.normal(device, dtype, seed), model.config
    blocks = len(model.transformer_blocks)
    shape = (1, text_tokens, config.num_attention_heads, config.attention_head_dim)
    cache = QwenImage21KVCache(blocks)
    for block in range(blocks):
        cache.get_layer(block).store(normal(*shape), normal(*shape))
    is_image = torch.ones(1, text_tokens + size.tokens // SLOT_TOKENS, dtype=torch.bool)
    is_image[:, :text_tokens] = False
    return {
        "hidden_states": normal(1, size.tokens, config.in_channels),
        "encoder_hidden_states": normal(1, text_tokens, config.context_in_dim),
        "encoder_hidden_states_mask": None,
        "timestep": torch.tensor([timestep], device=device).to(dtype) / 1000,
        "img_shapes": [[(1, *size.latent)]],
        "img_mask": is_image.to(device),
        "attention_kwargs": None,
        "kv_cache": cache,
        "kv_cache_mode": "cached",
        "return_dict": False,
    }
