"""PixArt-α and Latte, and Hunyuan-DiT v1.2 with all of its blocks, at their published sizes."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import HunyuanDiT2DModel, LatteTransformer3DModel, PixArtTransformer2DModel
from diffusers.models.embeddings import get_2d_rotary_pos_embed
from diffusers.pipelines.hunyuandit.pipeline_hunyuandit import get_resize_crop_region_for_grid

from benchmarks.models.published import Given, PublishedImage, PublishedVideo, VideoSize


class PixArt(PublishedImage):
    key, name, tiny_name = "pixart", "PixArt-α, 8 blocks", "tiny PixArt-α"
    cls = PixArtTransformer2DModel
    config = {"num_layers": 8, "caption_channels": 4096, "interpolation_scale": 2}
    published_blocks = {"transformer_blocks": 28}
    batch = 2
    text_tokens = 120
    prompt_tokens, negative_tokens = 40, 1  # the rest is padding; the negative prompt is empty
    timestep = 800

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As PixArtAlphaPipeline passes them with guidance, with a mask of the texts."""
        config, size, device = model.config, given.size, given.device
        lengths = (self.negative_tokens, self.prompt_tokens)
        sides = torch.tensor([[size.height, size.width]] * 2, device=device, dtype=given.dtype)
        return {
            "hidden_states": given.guided_latents(config.in_channels, *size.unpacked),
            "encoder_hidden_states": given.normal(2, given.text_tokens, config.caption_channels),
            "encoder_attention_mask": torch.stack(
                [given.text_mask(count).long() for count in lengths]
            ),
            "timestep": given.timesteps(2),
            "added_cond_kwargs": {
                "resolution": sides,
                "aspect_ratio": sides[:, :1] / sides[:, 1:],
            },
        }


class LatteSize(VideoSize):
    """Its autoencoder is one of images."""

    token_frames = 1


class Latte(PublishedVideo):
    """16 frames. Blocks over an image's tokens and over the frames take turns."""

    key, name, tiny_name = "latte", "Latte, 8 + 8 blocks", "tiny Latte"
    cls = LatteTransformer3DModel
    config = {
        "in_channels": 4,
        "out_channels": 8,
        "attention_head_dim": 72,
        "num_layers": 8,
        "cross_attention_dim": 1152,
        "attention_bias": True,
        "patch_size": 2,
        "activation_fn": "gelu-approximate",
        "num_embeds_ada_norm": 1000,
        "norm_type": "ada_norm_single",
        "norm_elementwise_affine": False,
        "norm_eps": 1e-6,
        "caption_channels": 4096,
    }
    tiny_changes = {"video_length": 5}
    published_blocks = {"transformer_blocks": 28, "temporal_transformer_blocks": 28}
    batch = 2
    text_tokens = 120
    sizes, tiny_sizes = (LatteSize(16, 512, 512),), (LatteSize(5, 64, 96),)
    small = {"size": LatteSize(5, 128, 128), "text_tokens": 64}
    timestep = 800

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As LattePipeline passes them with guidance: no mask of the text."""
        config = model.config
        return {
            "hidden_states": given.guided_latents(config.in_channels, *given.size.unpacked),
            "encoder_hidden_states": given.normal(2, given.text_tokens, config.caption_channels),
            "timestep": given.timesteps(2),
            "enable_temporal_attentions": True,
        }


class HunyuanDiT(PublishedImage):
    key, name, tiny_name = "hunyuan_dit", "Hunyuan-DiT v1.2", "tiny Hunyuan-DiT"
    cls = HunyuanDiT2DModel
    config = {
        "in_channels": 4,
        "patch_size": 2,
        "sample_size": 128,
        "hidden_size": 1408,
        "num_layers": 40,
        "mlp_ratio": 4.3637,
        "use_style_cond_and_image_meta_size": False,
    }
    batch = 2
    text_tokens = 256  # of T5, with padding, as those of BERT
    prompt_tokens, negative_tokens = 64, 16

    def rotation(self, config: Any, given: Given) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, (tokens, head dimension), float32."""
        grid, base = given.size.latent, 512 // given.size.token_pixels
        crop = get_resize_crop_region_for_grid(grid, base)
        dim = config.attention_head_dim
        return get_2d_rotary_pos_embed(dim, crop, grid, device=given.device, output_type="pt")

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As HunyuanDiTPipeline passes them with guidance, with masks of the texts."""
        config, size, device, dtype = model.config, given.size, given.device, given.dtype
        lengths = torch.tensor([[self.negative_tokens], [self.prompt_tokens]], device=device)
        masks = [
            (torch.arange(count, device=device) < lengths).long()
            for count in (config.text_len, config.text_len_t5)
        ]
        sides = [1024, 1024, size.height, size.width, 0, 0]
        return {
            "hidden_states": given.guided_latents(config.in_channels, *size.unpacked),
            "timestep": given.timesteps(2).to(dtype),
            "encoder_hidden_states": given.normal(2, config.text_len, config.cross_attention_dim),
            "text_embedding_mask": masks[0],
            "encoder_hidden_states_t5": given.normal(
                2, config.text_len_t5, config.cross_attention_dim_t5
            ),
            "text_embedding_mask_t5": masks[1],
            "image_meta_size": torch.tensor([sides, sides], device=device, dtype=dtype),
            "style": torch.zeros(2, device=device, dtype=torch.long),
            "image_rotary_emb": self.rotation(config, given),
        }


PIXART, LATTE, HUNYUAN_DIT = PixArt(), Latte(), HunyuanDiT()
