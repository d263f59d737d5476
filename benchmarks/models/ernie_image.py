"""ERNIE-Image at its published width with fewer blocks."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ErnieImageTransformer2DModel

from benchmarks.models.published import Given, PublishedImage


class ErnieImage(PublishedImage):
    key, name, tiny_name = "ernie_image", "ERNIE-Image, 4 blocks", "tiny ERNIE-Image"
    cls = ErnieImageTransformer2DModel
    config = {
        "num_layers": 4,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "ffn_hidden_size": 12288,
        "text_in_dim": 3072,
    }
    published_blocks = {"layers": 36}
    batch = 2
    text_tokens, prompt_tokens = 128, 16  # the latter of the negative prompt

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As ErnieImagePipeline passes them with guidance."""
        config = model.config
        latents = given.normal(1, config.in_channels, *given.size.latent)
        return {
            "hidden_states": latents.repeat(2, 1, 1, 1),
            "timestep": given.timesteps(2).to(given.dtype),
            "text_bth": given.normal(2, given.text_tokens, config.text_in_dim),
            "text_lens": torch.tensor([self.prompt_tokens, given.text_tokens], device=given.device),
        }


ERNIE_IMAGE = ErnieImage()
