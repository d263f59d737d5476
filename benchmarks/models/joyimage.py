"""JoyImage-Edit and JoyImage-Edit-Plus at their published width with fewer blocks, with one image to edit.

The text has the tokens of that image.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import JoyImageEditPlusTransformer3DModel, JoyImageEditTransformer3DModel

from benchmarks.models.published import PATCH, Given, PublishedImage

_CONFIG = {"num_layers": 4, "hidden_size": 4096, "num_attention_heads": 32, "theta": 10000}


class JoyImageEdit(PublishedImage):
    """Guidance takes a separate forward."""

    key, name, tiny_name = "joyimage", "JoyImage-Edit, 4 blocks", "tiny JoyImage-Edit"
    cls = JoyImageEditTransformer3DModel
    config = _CONFIG
    published_blocks = {"double_blocks": 40}
    text_tokens = 1152

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As JoyImageEditPipeline passes them: the latents of the image and of its edit."""
        config = model.config
        return {
            "hidden_states": given.normal(1, 2, config.in_channels, 1, *given.size.unpacked),
            "timestep": given.timesteps(),
            "encoder_hidden_states": given.normal(1, given.text_tokens, config.text_dim),
        }


class JoyImageEditPlus(PublishedImage):
    key, name, tiny_name = (
        "joyimage_plus",
        "JoyImage-Edit-Plus, 4 blocks",
        "tiny JoyImage-Edit-Plus",
    )
    cls = JoyImageEditPlusTransformer3DModel
    config = _CONFIG
    published_blocks = {"double_blocks": 40}
    batch = 2
    text_tokens, prompt_tokens = 1152, 1040  # the latter of the negative prompt

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As JoyImageEditPlusPipeline passes them with guidance: patches of the edit and of the image."""
        config, size = model.config, given.size
        patches = given.normal(1, 2 * size.tokens, config.in_channels, 1, PATCH, PATCH)
        masks = [given.text_mask(self.prompt_tokens), given.text_mask(given.text_tokens)]
        return {
            "hidden_states": patches.repeat(2, 1, 1, 1, 1, 1),
            "timestep": given.timesteps(2),
            "encoder_hidden_states": given.normal(2, given.text_tokens, config.text_dim),
            "encoder_hidden_states_mask": torch.stack(masks).long(),
            "shape_list": [[(1, *size.latent)] * 2] * 2,
        }


JOYIMAGE, JOYIMAGE_PLUS = JoyImageEdit(), JoyImageEditPlus()
