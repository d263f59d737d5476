"""Qwen-Image, Qwen-Image 2.1 and Krea 2 at their published sizes with fewer blocks.

Guidance takes a separate forward.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    Krea2Transformer2DModel,
    QwenImage21Transformer2DModel,
    QwenImageTransformer2DModel,
)
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

from benchmarks import models
from benchmarks.models.published import Given, PublishedImage


class QwenImage(PublishedImage):
    key, name, tiny_name = "qwenimage", "Qwen-Image, 6 blocks", "tiny Qwen-Image"
    cls = QwenImageTransformer2DModel
    config = {"num_layers": 6}
    # Multiples of 16, which FP8 layers need.
    tiny_changes = {"in_channels": 16, "out_channels": 4, "joint_attention_dim": 64}
    published_blocks = {"transformer_blocks": 60}
    text_tokens = 128  # of the prompt, without padding and mask

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As QwenImagePipeline passes them: packed latents, no mask."""
        config, size = model.config, given.size
        return {
            "hidden_states": given.normal(1, size.tokens, config.in_channels),
            "encoder_hidden_states": given.normal(1, given.text_tokens, config.joint_attention_dim),
            "encoder_hidden_states_mask": None,
            "timestep": given.timesteps().to(given.dtype) / 1000,
            "guidance": None,
            "img_shapes": [[(1, *size.latent)]],
            "attention_kwargs": {},
        }


class QwenImage21(PublishedImage):
    key, name, tiny_name = "qwenimage21", "Qwen-Image 2.1, 6 blocks", "tiny Qwen-Image 2.1"
    cls = QwenImage21Transformer2DModel
    config = {"num_layers": 6}
    published_blocks = {"transformer_blocks": 32}
    text_tokens = 128  # of the prompt, without padding and mask
    slot_tokens = 4  # of the image in a slot of the text encoder's sequence

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As QwenImage21Pipeline passes them after the first step: no mask, keys and values of the text in a
        cache."""
        config, size, text_tokens = model.config, given.size, given.text_tokens
        blocks = len(model.transformer_blocks)
        shape = (1, text_tokens, config.num_attention_heads, config.attention_head_dim)
        cache = QwenImage21KVCache(blocks)
        for block in range(blocks):
            cache.get_layer(block).store(given.normal(*shape), given.normal(*shape))
        is_image = torch.ones(1, text_tokens + size.tokens // self.slot_tokens, dtype=torch.bool)
        is_image[:, :text_tokens] = False
        return {
            "hidden_states": given.normal(1, size.tokens, config.in_channels),
            "encoder_hidden_states": given.normal(1, text_tokens, config.context_in_dim),
            "encoder_hidden_states_mask": None,
            "timestep": given.timesteps().to(given.dtype) / 1000,
            "img_shapes": [[(1, *size.latent)]],
            "img_mask": is_image.to(given.device),
            "attention_kwargs": None,
            "kv_cache": cache,
            "kv_cache_mode": "cached",
        }


class Krea2(PublishedImage):
    key, name, tiny_name = "krea2", "Krea 2, 4 blocks", "tiny Krea 2"
    cls = Krea2Transformer2DModel
    config = {"num_layers": 4}
    published_blocks = {"transformer_blocks": 28}
    text_tokens, prompt_tokens = 512, 96  # padding follows, then the end of the chat template
    suffix_tokens = 5

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As Krea2Pipeline passes them, with a mask of the text.

        The embeddings are (1, text tokens, layers of the text encoder, its channels). Padding stands amid
        them.
        """
        config, size, device = model.config, given.size, given.device
        mask = given.text_mask(self.prompt_tokens) | ~given.text_mask(
            given.text_tokens - self.suffix_tokens
        )
        text_ids = torch.zeros(given.text_tokens, 3, device=device)
        return {
            "hidden_states": given.normal(1, size.tokens, config.in_channels),
            "encoder_hidden_states": given.normal(
                1, given.text_tokens, config.num_text_layers, config.text_hidden_dim
            ),
            "timestep": torch.tensor([given.timestep / 1000], device=device).to(given.dtype),
            "position_ids": torch.cat([text_ids, models.positions(device, 1, *size.latent)]),
            "encoder_attention_mask": mask.unsqueeze(0),
            "attention_kwargs": None,
        }


QWENIMAGE, QWENIMAGE21, KREA2 = QwenImage(), QwenImage21(), Krea2()
