"""Motif-Video at its published widths with fewer blocks, and fewer frames."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import MotifVideoTransformer3DModel

from benchmarks.models.published import Given, PublishedVideo, VideoSize


class MotifVideo(PublishedVideo):
    """The last single block is one of the decoder, which attends to the tokens of both. Guidance takes a
    separate forward."""

    key, name, tiny_name = "motif_video", "Motif-Video, 2 + 4 blocks", "tiny Motif-Video"
    cls = MotifVideoTransformer3DModel
    config = {
        "num_attention_heads": 12,
        "num_layers": 2,
        "num_single_layers": 4,
        "num_decoder_layers": 1,
        "text_embed_dim": 2560,
        "enable_text_cross_attention_dual": True,
        "enable_text_cross_attention_single": True,
    }
    # The channels are the latent's, those of the first frame and its mask.
    tiny_changes = {"in_channels": 9}
    published_blocks = {"transformer_blocks": 12, "single_transformer_blocks": 24}
    text_tokens, prompt_tokens = 512, 96  # the rest is padding
    sizes = (VideoSize(29, 736, 1280),)

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As MotifVideoPipeline passes them, with a mask of the text.

        The latents are followed by those of no first frame and by a channel of their mask, which are 0.
        """
        config, size = model.config, given.size
        latents = given.normal(1, config.out_channels, *size.unpacked)
        conditions = latents.new_zeros(1, config.in_channels - config.out_channels, *size.unpacked)
        return {
            "hidden_states": torch.cat([latents, conditions], dim=1),
            "timestep": given.timesteps(),
            "encoder_hidden_states": given.normal(1, given.text_tokens, config.text_embed_dim),
            "encoder_attention_mask": given.text_mask(self.prompt_tokens).long().unsqueeze(0),
            "attention_kwargs": None,
        }


MOTIF_VIDEO = MotifVideo()
