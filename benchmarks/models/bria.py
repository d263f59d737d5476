"""Bria 3.2, FIBO and FIBO 2 at their published sizes with fewer blocks."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    BriaFibo2Transformer2DModel,
    BriaFiboTransformer2DModel,
    BriaTransformer2DModel,
)

from benchmarks import models
from benchmarks.models.published import Given, PublishedImage


class Bria(PublishedImage):
    """Bria 3.2. Guidance is a sample of its own."""

    key, name, tiny_name = "bria", "Bria, 3 + 10 blocks", "tiny Bria"
    cls = BriaTransformer2DModel
    config = {
        "num_layers": 3,
        "num_single_layers": 10,
        "in_channels": 16,
        "attention_head_dim": 96,
        "axes_dims_rope": (0, 48, 48),
    }
    tiny_changes = {"in_channels": 16, "joint_attention_dim": 64}
    published_blocks = {"transformer_blocks": 8, "single_transformer_blocks": 28}
    batch = 2
    text_tokens = 128  # padded with zeros, without a mask

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As BriaPipeline passes them with guidance: packed latents."""
        config, size, device = model.config, given.size, given.device
        latents = given.normal(1, size.tokens, config.in_channels)
        return {
            "hidden_states": latents.repeat(2, 1, 1),
            "encoder_hidden_states": given.normal(2, given.text_tokens, config.joint_attention_dim),
            "timestep": given.timesteps(2),
            "img_ids": models.positions(device, 1, *size.latent).to(given.dtype),
            "txt_ids": torch.zeros(given.text_tokens, 3, device=device),
            "attention_kwargs": None,
        }


class Fibo(Bria):
    """FIBO 8B. Guidance is a sample of its own, without a negative prompt by default."""

    key, name, tiny_name = "bria_fibo", "FIBO, 3 + 10 blocks", "tiny FIBO"
    cls = BriaFiboTransformer2DModel
    config = {"num_layers": 3, "num_single_layers": 10, "in_channels": 48}
    tiny_changes = {"in_channels": 16, "joint_attention_dim": 64, "text_encoder_dim": 32}
    # A projection of the text for each block.
    published_blocks = {
        "transformer_blocks": 8,
        "single_transformer_blocks": 38,
        "caption_projection": 46,
    }
    text_tokens, negative_tokens = 1024, 1  # of a prompt in JSON

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As BriaFiboPipeline passes them with guidance: latents without patches, states of the text's
        encoder for each block, and a mask of keys."""
        config, tokens, device = model.config, given.text_tokens, given.device
        arguments = super().arguments(model, given)
        del arguments["attention_kwargs"]
        mask = torch.ones(2, 1, 1, tokens + given.size.tokens, dtype=torch.bool, device=device)
        mask[0, ..., self.negative_tokens : tokens] = False
        layers = [given.normal(2, tokens, config.text_encoder_dim) for _ in range(4)]
        return {
            **arguments,
            "timestep": given.timesteps(2).to(given.dtype),
            "text_encoder_layers": [
                layers[i % len(layers)] for i in range(len(model.caption_projection))
            ],
            "joint_attention_kwargs": {"attention_mask": mask},
        }


class Fibo2(PublishedImage):
    """FIBO 2. Guidance is a forward of its own. There are two refiners of the image."""

    key, name, tiny_name = "bria_fibo2", "FIBO 2, 9 blocks", "tiny FIBO 2"
    cls = BriaFibo2Transformer2DModel
    config = {"n_layers": 9}  # the seventh of each eight reads the text
    published_blocks = {"layers": 44}
    text_tokens = 1024  # of a prompt in JSON
    timestep = 0.8

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As BriaFibo2Pipeline passes them for one prompt."""
        config = model.config
        bundles = 1 + len(config.injection_layer_ids)
        return {
            "hidden_states": given.normal(1, config.in_channels, *given.size.unpacked),
            "timestep": given.timesteps(),
            "encoder_hidden_states": given.normal(
                1, bundles, given.text_tokens, config.cap_feat_dim
            ),
            "encoder_attention_mask": None,
            "context_latents": None,
        }


BRIA, FIBO, FIBO2 = Bria(), Fibo(), Fibo2()
