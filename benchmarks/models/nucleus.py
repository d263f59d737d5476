"""Nucleus-Image at its published widths with fewer blocks."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import NucleusMoEImageTransformer2DModel

from benchmarks.models.published import Given, PublishedImage


class NucleusImage(PublishedImage):
    """The first block has one feed-forward, the others have experts, one after the other: Inductor does not
    compile the model's grouped products. Guidance takes a separate forward."""

    key, name, tiny_name = "nucleus_image", "Nucleus-Image, 6 blocks", "tiny Nucleus-Image"
    cls = NucleusMoEImageTransformer2DModel
    config = {
        "num_layers": 6,
        "num_key_value_heads": 4,
        "joint_attention_dim": 4096,
        "dense_moe_strategy": "leave_first_block_dense",
        "num_experts": 64,
        "capacity_factors": 2.0,
    }
    published_blocks = {"transformer_blocks": 32}
    text_tokens = 256  # of the prompt, without padding
    timestep = 0.8

    def transformer(
        self, device: torch.device, dtype: torch.dtype, tiny: bool = False, seed: int = 0
    ) -> NucleusMoEImageTransformer2DModel:
        """With the weights of experts, which diffusers leaves without values."""
        model = super().transformer(device, dtype, tiny, seed)
        for name, weight in model.named_parameters():
            if name.endswith(("gate_up_proj", "down_proj")):
                torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        return model

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As NucleusMoEImagePipeline passes them, with a mask of the text."""
        config, size, text_tokens = model.config, given.size, given.text_tokens
        return {
            "hidden_states": given.normal(1, size.tokens, config.in_channels),
            "timestep": given.timesteps().to(given.dtype),
            "encoder_hidden_states": given.normal(1, text_tokens, config.joint_attention_dim),
            "encoder_hidden_states_mask": given.text_mask(text_tokens).unsqueeze(0),
            "img_shapes": [(1, *size.latent)],
            "attention_kwargs": None,
        }


NUCLEUS_IMAGE = NucleusImage()
