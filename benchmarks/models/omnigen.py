"""OmniGen v1 at its published width with fewer blocks."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import OmniGenTransformer2DModel

from benchmarks.models.published import Given, PublishedImage

_FACTORS = {"short_factor": [1.0] * 48, "long_factor": [1.0] * 48}


class OmniGen(PublishedImage):
    key, name, tiny_name = "omnigen", "OmniGen, 8 blocks", "tiny OmniGen"
    cls = OmniGenTransformer2DModel
    config = {"num_layers": 8, "rope_scaling": _FACTORS}
    published_blocks = {"layers": 32}
    batch = 2
    text_tokens, prompt_tokens = 128, 48  # of the negative prompt and, after padding, of the prompt
    timestep = 0.2

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As OmniGenPipeline passes them with guidance: attention is causal up to the image."""
        config, device = model.config, given.device
        latents = given.normal(1, config.in_channels, *given.size.unpacked)
        first = given.text_tokens + 1  # after the token of the time step
        length = first + given.size.tokens
        paddings = (max(given.text_tokens - self.prompt_tokens, 0), 0)
        mask = torch.ones(2, length, length, device=device)
        mask[:, :first] = mask[:, :first].tril()
        for sample, padding in zip(mask, paddings, strict=True):
            sample[:, :padding] = 0
            sample[:padding] = 1
        counts = torch.arange(length, device=device)
        tokens = torch.arange(given.text_tokens, device=device) % config.vocab_size
        return {
            "hidden_states": latents.repeat(2, 1, 1, 1),
            "timestep": given.timesteps(2),
            "input_ids": tokens.repeat(2, 1),
            "input_img_latents": [],
            "input_image_sizes": {},
            "attention_mask": mask,
            "position_ids": torch.stack([(counts - padding).clamp(0) for padding in paddings]),
        }


OMNIGEN = OmniGen()
