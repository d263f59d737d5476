"""FLUX.1, FLUX.2, FLUX.3 and Chroma at their published sizes with fewer blocks.

FLUX.1 and Chroma have blocks in the ratio of the whole model.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    ChromaTransformer2DModel,
    Flux2Transformer2DModel,
    Flux3Transformer2DModel,
    FluxTransformer2DModel,
)

from benchmarks import models
from benchmarks.models.published import Given, PublishedImage


class Flux(PublishedImage):
    """FLUX.1-dev. It is distilled: guidance is an input."""

    key, name, tiny_name = "flux", "FLUX.1, 5 + 10 blocks", "tiny FLUX.1"
    cls = FluxTransformer2DModel
    config = {"num_layers": 5, "num_single_layers": 10, "guidance_embeds": True}
    # Multiples of 16, which FP8 layers need.
    tiny_changes = {"in_channels": 16, "joint_attention_dim": 64, "pooled_projection_dim": 32}
    published_blocks = {"transformer_blocks": 19, "single_transformer_blocks": 38}
    text_tokens = 512
    guidance = 3.5
    thousandfold = ("timestep", "guidance")

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As FluxPipeline passes them: packed latents."""
        config, size, device, dtype = model.config, given.size, given.device, given.dtype
        latents = models.normal(device, dtype, given.seed + 1)
        return {
            "hidden_states": latents(1, size.tokens, config.in_channels),
            "encoder_hidden_states": given.normal(1, given.text_tokens, config.joint_attention_dim),
            "pooled_projections": given.normal(1, config.pooled_projection_dim),
            "timestep": given.timesteps().to(dtype) / 1000,
            "guidance": torch.full([1], self.guidance, device=device),
            "img_ids": models.positions(device, 1, *size.latent).to(dtype),
            "txt_ids": torch.zeros(given.text_tokens, 3, device=device, dtype=dtype),
            "joint_attention_kwargs": {},
        }


class Flux2(PublishedImage):
    """FLUX.2-dev. It is distilled: guidance is an input."""

    key, name, tiny_name = "flux2", "FLUX.2, 2 + 6 blocks", "tiny FLUX.2"
    cls = Flux2Transformer2DModel
    config = {"num_layers": 2, "num_single_layers": 6}
    published_blocks = {"transformer_blocks": 8, "single_transformer_blocks": 48}
    text_tokens = 512
    guidance = 4.0
    thousandfold = ("timestep", "guidance")

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As Flux2Pipeline passes them: packed latents; positions along frames, rows, columns and text."""
        config, size, device = model.config, given.size, given.device
        return {
            "hidden_states": given.normal(1, size.tokens, config.in_channels),
            "encoder_hidden_states": given.normal(1, given.text_tokens, config.joint_attention_dim),
            "timestep": given.timesteps().to(given.dtype) / 1000,
            "guidance": torch.full([1], self.guidance, device=device),
            "img_ids": models.positions(device, 1, *size.latent, 1)[None],
            "txt_ids": models.positions(device, 1, 1, 1, given.text_tokens)[None],
            "joint_attention_kwargs": None,
        }


class Flux3(PublishedImage):
    """FLUX.3. Guidance is a forward of its own."""

    key, name, tiny_name = "flux3", "FLUX.3, 2 + 6 blocks", "tiny FLUX.3"
    cls = Flux3Transformer2DModel
    config = {"num_layers": 2, "num_single_layers": 6}
    published_blocks = {
        "mode_blocks.image": 5,
        "txt_mode_blocks": 5,
        "single_transformer_blocks": 28,
    }
    text_tokens = 160  # padded to a multiple of 80 without a mask
    small = {**PublishedImage.small, "text_tokens": 80}
    image_rope_scale = 0.5
    thousandfold = ("timestep",)

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As the blocks of diffusers' modular pipeline pass them: float32 positions along frames, rows,
        columns and text."""
        config, size, device = model.config, given.size, given.device
        scales = torch.tensor(
            [1.0, self.image_rope_scale, self.image_rope_scale, 1.0], device=device
        )
        return {
            "hidden_states": given.normal(1, size.tokens, config.in_channels),
            "encoder_hidden_states": given.normal(1, given.text_tokens, config.joint_attention_dim),
            "timestep": torch.tensor([given.timestep / 1000], device=device).to(given.dtype),
            "img_ids": models.positions(device, 1, *size.latent, 1).float() * scales,
            "txt_ids": models.positions(device, 1, 1, 1, given.text_tokens).float(),
        }


class Chroma(PublishedImage):
    """Chroma. Guidance is a forward of its own."""

    key, name, tiny_name = "chroma", "Chroma, 5 + 10 blocks", "tiny Chroma"
    cls = ChromaTransformer2DModel
    config = {"num_layers": 5, "num_single_layers": 10}
    published_blocks = {"transformer_blocks": 19, "single_transformer_blocks": 38}
    text_tokens, prompt_tokens = 512, 96  # the rest is padding
    thousandfold = ("timestep",)

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As ChromaPipeline passes them: packed latents, a mask of all tokens."""
        config, size, device, dtype = model.config, given.size, given.device, given.dtype
        # One token of padding more than the prompt has is valid, too.
        of_text = given.text_mask(self.prompt_tokens + 1)
        mask = torch.cat([of_text, of_text.new_ones(size.tokens)])
        return {
            "hidden_states": given.normal(1, size.tokens, config.in_channels),
            "encoder_hidden_states": given.normal(1, given.text_tokens, config.joint_attention_dim),
            "timestep": given.timesteps().to(dtype) / 1000,
            "img_ids": models.positions(device, 1, *size.latent).to(dtype),
            "txt_ids": torch.zeros(given.text_tokens, 3, device=device, dtype=dtype),
            "attention_mask": mask.unsqueeze(0).to(dtype),
            "joint_attention_kwargs": {},
        }


FLUX, FLUX2, FLUX3, CHROMA = Flux(), Flux2(), Flux3(), Chroma()
