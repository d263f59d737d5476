"""Stable Diffusion 3.5 Large with fewer blocks and Stable Diffusion XL at their published sizes."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import SD3Transformer2DModel, UNet2DConditionModel

from benchmarks.models.published import Given, ImageSize, PublishedImage


class StableDiffusion3(PublishedImage):
    key = "sd3"
    name, tiny_name = "Stable Diffusion 3.5 Large, 8 blocks", "tiny Stable Diffusion 3.5"
    cls = SD3Transformer2DModel
    config = {
        "num_layers": 8,
        "num_attention_heads": 38,
        "attention_head_dim": 64,
        "caption_projection_dim": 2432,
        "pos_embed_max_size": 192,
        "qk_norm": "rms_norm",
    }
    published_blocks = {"transformer_blocks": 38}
    batch = 2
    text_tokens = 333  # 77 of CLIP and 256 of T5

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As StableDiffusion3Pipeline passes them with guidance."""
        config = model.config
        return {
            "hidden_states": given.guided_latents(config.in_channels, *given.size.unpacked),
            "encoder_hidden_states": given.normal(2, given.text_tokens, config.joint_attention_dim),
            "pooled_projections": given.normal(2, config.pooled_projection_dim),
            "timestep": given.timesteps(2),
            "joint_attention_kwargs": None,
        }


class StableDiffusionXL(PublishedImage):
    """Its UNet. The widest attentions have one token per 16x16 pixels, as the sizes assume.

    Injection replaces its modules one by one: norms, attentions and feed-forward activations of its
    transformers, and group norms, those of resnet blocks with SiLU and time embedding. Convolutions stay
    PyTorch's.
    """

    key, name, tiny_name = "sdxl", "Stable Diffusion XL", "tiny Stable Diffusion XL"
    cls = UNet2DConditionModel
    config = {
        "sample_size": 128,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": (320, 640, 1280),
        "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": (5, 10, 20),  # numbers of heads, despite the name
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    }
    tiny_config = {
        **config,
        "sample_size": 16,
        "block_out_channels": (32, 64, 128),
        "layers_per_block": 1,
        "transformer_layers_per_block": (1, 1, 2),
        "attention_head_dim": (1, 1, 2),
        "cross_attention_dim": 64,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 80,
    }
    batch = 2
    text_tokens = 77
    small = {"size": ImageSize(128, 128)}
    time_ids = 6  # original size, corner, target size

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As StableDiffusionXLPipeline passes them with guidance."""
        config, size = model.config, given.size
        width = config.projection_class_embeddings_input_dim
        pooled = width - self.time_ids * config.addition_time_embed_dim
        pixels = [size.height, size.width]
        time_ids = torch.tensor([[*pixels, 0, 0, *pixels]], device=given.device).to(given.dtype)
        return {
            "sample": given.guided_latents(config.in_channels, *size.unpacked),
            "timestep": torch.tensor(given.timestep, device=given.device),
            "encoder_hidden_states": given.normal(2, given.text_tokens, config.cross_attention_dim),
            "timestep_cond": None,
            "cross_attention_kwargs": None,
            "added_cond_kwargs": {
                "text_embeds": given.normal(2, pooled),
                "time_ids": time_ids.repeat(2, 1),
            },
        }


class ChannelsLast(StableDiffusionXL):
    """In torch.channels_last. Convolutions then need no copies to cuDNN's layout.

    The weights stay in the user's memory format.
    """

    key = "sdxl_channels_last"
    name, tiny_name = (
        f"{StableDiffusionXL.name}, channels last",
        f"{StableDiffusionXL.tiny_name}, channels last",
    )

    def transformer(
        self, device: torch.device, dtype: torch.dtype, tiny: bool = False, seed: int = 0
    ) -> UNet2DConditionModel:
        model = super().transformer(device, dtype, tiny, seed)
        return model.to(memory_format=torch.channels_last)


SD3, SDXL, SDXL_CHANNELS_LAST = StableDiffusion3(), StableDiffusionXL(), ChannelsLast()
