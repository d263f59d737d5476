"""HunyuanVideo and HunyuanVideo 1.5 at their published sizes with fewer blocks."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel, HunyuanVideoTransformer3DModel

from benchmarks.models.published import Given, PublishedVideo, VideoSize


class HunyuanVideo(PublishedVideo):
    """It is distilled: guidance is an input."""

    key, name, tiny_name = "hunyuan_video", "HunyuanVideo, 2 + 4 blocks", "tiny HunyuanVideo"
    cls = HunyuanVideoTransformer3DModel
    config = {"num_layers": 2, "num_single_layers": 4}
    published_blocks = {"transformer_blocks": 20, "single_transformer_blocks": 40}
    text_tokens, prompt_tokens = 256, 96  # the rest is padding
    guidance = 6.0
    sizes = (VideoSize(61, 544, 960),)

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As HunyuanVideoPipeline passes them, with a mask of the text."""
        config, device, dtype = model.config, given.device, given.dtype
        return {
            "hidden_states": given.normal(1, config.in_channels, *given.size.unpacked),
            "timestep": given.timesteps().to(dtype),
            "encoder_hidden_states": given.normal(1, given.text_tokens, config.text_embed_dim),
            "encoder_attention_mask": given.text_mask(self.prompt_tokens).to(dtype).unsqueeze(0),
            "pooled_projections": given.normal(1, config.pooled_projection_dim),
            "guidance": torch.tensor([self.guidance], device=device, dtype=dtype) * 1000.0,
            "attention_kwargs": None,
        }


class HunyuanVideo15(PublishedVideo):
    """Guidance is a forward of its own."""

    key = "hunyuan_video15"
    name, tiny_name = "HunyuanVideo 1.5, 4 blocks", "tiny HunyuanVideo 1.5"
    cls = HunyuanVideo15Transformer3DModel
    config = {"num_layers": 4, "task_type": "t2v"}
    # The channels are the latent's, those of the first frame and its mask.
    tiny_changes = {"task_type": "t2v", "in_channels": 9}
    published_blocks = {"transformer_blocks": 54}
    text_tokens, prompt_tokens = 1000, 96  # the rest is padding
    # Padding: the prompt quotes no text, and there is no image.
    glyph_tokens, image_tokens = 256, 729
    sizes = (VideoSize(61, 480, 848),)

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As HunyuanVideo15Pipeline passes them, with masks of the texts.

        The latents are followed by those of no first frame and by a channel of their mask, which are 0.
        """
        config, size, dtype = model.config, given.size, given.dtype
        latents = given.normal(1, config.out_channels, *size.latent)
        conditions = latents.new_zeros(1, config.in_channels - config.out_channels, *size.latent)
        return {
            "hidden_states": torch.cat([latents, conditions], dim=1),
            "image_embeds": latents.new_zeros(1, self.image_tokens, config.image_embed_dim),
            "timestep": given.timesteps().to(dtype),
            "encoder_hidden_states": given.normal(1, given.text_tokens, config.text_embed_dim),
            "encoder_attention_mask": given.text_mask(self.prompt_tokens).to(dtype).unsqueeze(0),
            "encoder_hidden_states_2": latents.new_zeros(
                1, self.glyph_tokens, config.text_embed_2_dim
            ),
            "encoder_attention_mask_2": latents.new_zeros(1, self.glyph_tokens),
            "attention_kwargs": None,
        }


HUNYUAN_VIDEO, HUNYUAN_VIDEO15 = HunyuanVideo(), HunyuanVideo15()
