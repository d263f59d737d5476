"""Kandinsky 5, Kandinsky 6 and its super-resolution, at their published sizes with fewer blocks.

Of Kandinsky 6 diffusers' defaults are the published widths.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from diffusers.models import transformers
from diffusers.pipelines.kandinsky5.pipeline_kandinsky import Kandinsky5T2VPipeline

from benchmarks.models.published import Given, PublishedVideo, VideoSize

LITE = {
    "in_visual_dim": 16,
    "out_visual_dim": 16,
    "model_dim": 1792,
    "ff_dim": 7168,
    "num_visual_blocks": 4,
    "visual_cond": True,
}
PRO = {
    **LITE,
    "time_dim": 1024,
    "model_dim": 4096,
    "ff_dim": 16384,
    "axes_dims": (32, 48, 48),
    "num_visual_blocks": 2,
}


class Kandinsky5(PublishedVideo):
    """Lite for 5 seconds. Guidance takes a separate forward."""

    key, name, tiny_name = "kandinsky5", "Kandinsky 5 Lite, 4 blocks", "tiny Kandinsky 5"
    cls = transformers.Kandinsky5Transformer3DModel
    config = LITE
    tiny_changes = {"in_text_dim": 64}  # a multiple of 16, which FP8 layers need
    published_blocks = {"visual_transformer_blocks": 32}
    text_tokens = 256  # of the prompt, without padding
    sizes = (VideoSize(121, 512, 768),)

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As Kandinsky5T2VPipeline passes them."""
        config, device, size = model.config, given.device, given.size
        channels = config.in_visual_dim * 2 + 1 if config.visual_cond else config.in_visual_dim
        is_small = 480 <= size.height <= 854 and 480 <= size.width <= 854
        arguments = {
            "hidden_states": given.normal(1, *size.unpacked, channels),
            "encoder_hidden_states": given.normal(1, given.text_tokens, config.in_text_dim),
            "pooled_projections": given.normal(1, config.in_text_dim2),
            "timestep": given.timesteps().to(given.dtype),
            "visual_rope_pos": [torch.arange(count, device=device) for count in size.latent],
            "text_rope_pos": torch.arange(given.text_tokens, device=device),
            "scale_factor": (1, 2, 2) if is_small else (1, 3.16, 3.16),
            "sparse_params": None,
        }
        if config.attention_type == "nabla":
            frames, rows, columns = size.latent
            windows = (config.attention_wT, config.attention_wH, config.attention_wW)
            near = Kandinsky5T2VPipeline.fast_sta_nabla(
                *(frames, rows // 8, columns // 8), *windows, device=device
            )
            arguments["sparse_params"] = {
                "sta_mask": near[None, None],
                "to_fractal": True,
                "P": config.attention_P,
            }
        return arguments


class Kandinsky5Pro(Kandinsky5):
    key, name, tiny_name = "kandinsky5_pro", "Kandinsky 5 Pro, 2 blocks", "tiny Kandinsky 5 Pro"
    config = PRO
    published_blocks = {"visual_transformer_blocks": 60, "text_transformer_blocks": 4}


class Kandinsky6(PublishedVideo):
    """Video and audio. Guidance takes a separate forward."""

    key, name, tiny_name = "kandinsky6", "Kandinsky 6 Pro, 2 blocks", "tiny Kandinsky 6"
    cls = transformers.Kandinsky6Transformer3DModel
    config = {
        "num_visual_blocks": 2,
        "num_text_blocks": 1,
        "text_token_padding": True,
        "ca_rope": True,
        "cross_gates": True,
        "fix_modulation": True,
        "visual_token_type_num_embeddings": 2,
    }
    tiny_changes = {"in_text_dim": 64}
    published_blocks = {
        "video_text_transformer_blocks": 4,
        "audio_text_transformer_blocks": 4,
        "visual_transformer_blocks": 60,
    }
    text_tokens = 256  # of the prompt, without padding
    sizes = (VideoSize(121, 480, 864),)
    audio_rate = 44100 / 1024  # latents per second
    frame_rate = 24

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As Kandinsky6TI2VAPipeline passes them without an image."""
        config, size = model.config, given.size
        channels = config.in_visual_dim * 2 + 1 if config.visual_cond else config.in_visual_dim
        seconds = (4 * (size.latent[0] - 1) + 1) / self.frame_rate
        audio = given.normal(1, math.ceil(seconds * self.audio_rate), config.in_audio_dim)
        return {
            "hidden_states": given.normal(1, *size.unpacked, channels),
            "audio_hidden_states": audio,
            "encoder_hidden_states": given.normal(1, given.text_tokens, config.in_text_dim),
            "pooled_projections": given.normal(1, config.in_text_dim2),
            "timestep": given.timesteps(),
            "visual_rope_pos": None,
            "encoder_attention_mask": None,
            "visual_token_type_ids": None,
        }


class SuperResolutionSize(VideoSize):
    """A tile. Its autoencoder maps 16x16 pixels to one latent, which is a token."""

    @property
    def unpacked(self) -> tuple[int, ...]:
        return self.latent


class Kandinsky6SR(PublishedVideo):
    """Super-resolution of a tile. Its attention has lists of key blocks (NABLA)."""

    key, name, tiny_name = "kandinsky6_sr", "Kandinsky 6 SR, 4 blocks", "tiny Kandinsky 6 SR"
    cls = transformers.Kandinsky6SRTransformer3DModel
    config = {"num_visual_blocks": 4, "nabla_threshold": 0.15}  # see bench_block_masks
    published_blocks = {"visual_transformer_blocks": 32}
    text_tokens = 0
    sizes = (SuperResolutionSize(121, 512, 768),)
    tiny_sizes = (SuperResolutionSize(5, 128, 256),)

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As Kandinsky6SRPipeline passes them."""
        channels = model.config.in_visual_dim * 2 + 1
        return {
            "hidden_states": given.normal(1, *given.size.unpacked, channels),
            "timestep": given.timesteps(),
        }


KANDINSKY5, KANDINSKY5_PRO, KANDINSKY6 = Kandinsky5(), Kandinsky5Pro(), Kandinsky6()
KANDINSKY6_SR = Kandinsky6SR()
