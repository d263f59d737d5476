"""CogView3+, CogView4, GLM-Image and EasyAnimate 5.1 at their published sizes with fewer blocks."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models import transformers
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache

from benchmarks.models.published import Given, PublishedImage, PublishedVideo, VideoSize


def sides(given: Given, count: int) -> dict[str, torch.Tensor]:
    """Conditions of an image that is not cropped, for each sample, as CogView's pipelines pass them."""
    size = torch.tensor([[given.size.height, given.size.width]], dtype=given.dtype)
    size = size.to(given.device).repeat(count, 1)
    return {"target_size": size, "crop_coords": torch.zeros_like(size)}


class CogView3(PublishedImage):
    """CogView3+ 3B."""

    key, name, tiny_name = "cogview3", "CogView3+, 8 blocks", "tiny CogView3+"
    cls = transformers.CogView3PlusTransformer2DModel
    config = {"num_layers": 8}
    published_blocks = {"transformer_blocks": 30}
    batch = 2
    text_tokens = 224  # padded without a mask
    tiny_changes = {"pos_embed_max_size": 64}
    timestep = 800

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As CogView3PlusPipeline passes them with guidance."""
        config, of_size = model.config, sides(given, 2)
        return {
            "hidden_states": given.guided_latents(config.in_channels, *given.size.unpacked),
            "encoder_hidden_states": given.normal(2, given.text_tokens, config.text_embed_dim),
            "timestep": given.timesteps(2),
            "original_size": of_size["target_size"],
            **of_size,
        }


class CogView4(PublishedImage):
    """CogView4 6B. Guidance takes a separate forward."""

    key, name, tiny_name = "cogview4", "CogView4, 4 blocks", "tiny CogView4"
    cls = transformers.CogView4Transformer2DModel
    config = {"num_layers": 4, "attention_head_dim": 128, "num_attention_heads": 32}
    published_blocks = {"transformer_blocks": 28}
    text_tokens = 224  # padded to a multiple of 16, without a mask

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As CogView4Pipeline passes them."""
        config, of_size = model.config, sides(given, 1)
        return {
            "hidden_states": given.normal(1, config.in_channels, *given.size.unpacked),
            "encoder_hidden_states": given.normal(1, given.text_tokens, config.text_embed_dim),
            "timestep": given.timesteps(),
            "original_size": of_size["target_size"],
            **of_size,
            "attention_kwargs": None,
        }


class GlmImage(PublishedImage):
    """Guidance takes a separate forward."""

    key, name, tiny_name = "glm_image", "GLM-Image, 4 blocks", "tiny GLM-Image"
    cls = transformers.GlmImageTransformer2DModel
    config = {"num_layers": 4, "attention_head_dim": 128, "num_attention_heads": 32}
    published_blocks = {"transformer_blocks": 30}
    text_tokens = 64  # of the words to write, byte by byte

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As GlmImagePipeline passes them without images: the caches of keys and values are empty."""
        config, tokens = model.config, given.size.tokens
        prior = torch.arange(tokens, device=given.device) % config.prior_vq_quantizer_codebook_size
        return {
            "hidden_states": given.normal(1, config.in_channels, *given.size.unpacked),
            "encoder_hidden_states": given.normal(1, given.text_tokens, config.text_embed_dim),
            "prior_token_id": prior.unsqueeze(0),
            "prior_token_drop": torch.zeros(1, tokens, dtype=torch.bool, device=given.device),
            "timestep": given.timesteps() - 1,
            **sides(given, 1),
            "attention_kwargs": None,
            "kv_caches": GlmImageKVCache(len(model.transformer_blocks)),
        }


class EasyAnimate(PublishedVideo):
    """EasyAnimate 5.1, 12B."""

    key, name, tiny_name = "easyanimate", "EasyAnimate 5.1, 4 blocks", "tiny EasyAnimate"
    cls = transformers.EasyAnimateTransformer3DModel
    config = {
        "num_layers": 4,
        "in_channels": 16,
        "out_channels": 16,
        "patch_size": 2,
        "add_norm_text_encoder": True,
    }
    published_blocks = {"transformer_blocks": 48}
    batch = 2
    text_tokens = 256  # padded without a mask
    sizes = (VideoSize(49, 512, 512),)
    timestep = 800

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As EasyAnimatePipeline passes them with guidance."""
        config = model.config
        return {
            "hidden_states": given.guided_latents(config.in_channels, *given.size.unpacked),
            "encoder_hidden_states": given.normal(2, given.text_tokens, config.text_embed_dim),
            "timestep": given.timesteps(2).to(given.dtype),
        }


COGVIEW3, COGVIEW4, GLM_IMAGE = CogView3(), CogView4(), GlmImage()
EASYANIMATE = EasyAnimate()
