"""Ideogram 4 at its published width with fewer blocks.

Guidance is another model, of the same size, that gets the image alone.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import Ideogram4Transformer2DModel

from benchmarks.models.published import Given, PublishedImage

_TEXT, _IMAGE = 3, 2  # what a token is
_FIRST_POSITION = 65536  # of the image


class Ideogram4(PublishedImage):
    key, name, tiny_name = "ideogram4", "Ideogram 4, 6 blocks", "tiny Ideogram 4"
    cls = Ideogram4Transformer2DModel
    config = {"num_layers": 6}
    published_blocks = {"layers": 34}
    text_tokens, prompt_tokens = 2048, 128  # after padding
    timestep = 0.2

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As Ideogram4Pipeline passes them: one sequence of padding, text and image."""
        config, (height, width) = model.config, given.size.latent
        padding = max(given.text_tokens - self.prompt_tokens, 0)
        text, image = given.text_tokens - padding, height * width
        lengths = torch.tensor([padding, text, image], device=given.device)
        features = given.normal(1, sum(lengths.tolist()), config.llm_features_dim)
        features[:, :padding], features[:, padding + text :] = 0, 0
        latents = given.normal(1, len(features[0]), config.in_channels)
        latents[:, : padding + text] = 0
        axes = [torch.arange(n, device=given.device) for n in (1, height, width)]
        of_text = torch.arange(text, device=given.device)[:, None].expand(-1, 3)
        of_image = torch.cartesian_prod(*axes) + _FIRST_POSITION
        positions = torch.cat([of_text.new_zeros(padding, 3), of_text, of_image])

        def of_tokens(*values: int) -> torch.Tensor:
            return torch.tensor([values], device=given.device).repeat_interleave(lengths, dim=1)

        return {
            "hidden_states": latents,
            "timestep": given.timesteps().to(given.dtype),
            "encoder_hidden_states": features,
            "position_ids": positions[None],
            "segment_ids": of_tokens(-1, 1, 1),
            "indicator": of_tokens(0, _TEXT, _IMAGE),
            "attention_kwargs": None,
        }


IDEOGRAM4 = Ideogram4()
