"""LTX-Video, and LTX-2 19B with video and audio with fewer blocks, at their published sizes."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    LTX2VideoTransformer3DModel,
    LTXVideoTransformer3DModel,
    SanaWMLTX2RefinerTransformer3DModel,
)
from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMRefinerKVCache

from benchmarks import models
from benchmarks.models.published import Given, Published, VideoSize


class LTXSize(VideoSize):
    """The autoencoder maps 32x32 pixels and 8 frames to one token, and the first frame is alone."""

    token_pixels, token_frames = 32, 8

    @property
    def latent(self) -> tuple[int, ...]:
        _, rows, columns = super().latent
        return (self.frames - 1) // self.token_frames + 1, rows, columns

    def check(self) -> None:
        if self.frames % 8 != 1 or self.height % 32 or self.width % 32:
            raise ValueError(
                f"frames must be a multiple of 8 plus 1, height and width multiples of 32, got {self}"
            )


class LTXVideo(Published):
    """LTX-Video 0.9.0, 2B."""

    key, name, tiny_name = "ltx", "LTX-Video 2B", "tiny LTX-Video"
    cls = LTXVideoTransformer3DModel
    tiny_config = {
        "in_channels": 16,
        "out_channels": 16,
        "num_attention_heads": 2,
        "attention_head_dim": 64,
        "cross_attention_dim": 128,
        "caption_channels": 64,
        "num_layers": 2,
    }
    batch = 2
    text_tokens = 128
    prompt_tokens, negative_tokens = 90, 20  # the rest is padding
    frame_rate = 25
    sizes = (LTXSize(49, 512, 768), LTXSize(161, 512, 768))
    tiny_sizes = (LTXSize(9, 64, 96), LTXSize(17, 64, 96))
    small = {"size": LTXSize(1, 256, 256)}

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As LTXPipeline passes them with guidance, with boolean masks of the texts."""
        config, size, device = model.config, given.size, given.device
        of_prompt, of_negative = (
            given.normal(1, given.text_tokens, config.caption_channels) for _ in range(2)
        )
        lengths = (self.negative_tokens, self.prompt_tokens)
        latents = models.normal(device, given.dtype, given.seed + 1)(
            1, size.tokens, config.in_channels
        )
        frames, height, width = size.latent
        return {
            "hidden_states": torch.cat([latents, latents]),
            "encoder_hidden_states": torch.cat([of_negative, of_prompt]),
            "timestep": given.timesteps(2),
            "encoder_attention_mask": torch.stack([given.text_mask(count) for count in lengths]),
            "num_frames": frames,
            "height": height,
            "width": width,
            "rope_interpolation_scale": (
                size.token_frames / self.frame_rate,
                size.token_pixels,
                size.token_pixels,
            ),
        }


class LTX2WithGuidance(Published):
    """LTX-2 19B."""

    key, name, tiny_name = "ltx2", "LTX-2, 4 blocks", "tiny LTX-2"
    cls = LTX2VideoTransformer3DModel
    config = {"num_layers": 4, "rope_type": "split"}
    # The pipeline has latents of this size.
    tiny_changes = {"audio_in_channels": 128, "audio_out_channels": 128}
    published_blocks = {"transformer_blocks": 48}
    batch = 2
    # None is masked: the pipeline's connectors put registers in the place of padding.
    text_tokens = 1024
    frame_rate = 24.0
    audio_rate = 25.0  # latent frames of the audio a second
    sizes, tiny_sizes = (LTXSize(121, 512, 768),), (LTXSize(9, 64, 96),)
    small = {"size": LTXSize(1, 256, 256), "text_tokens": 64}

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As LTX2Pipeline passes them."""
        config, size, device, batch = model.config, given.size, given.device, self.batch
        audio_frames = round(size.frames / self.frame_rate * self.audio_rate)
        latents = given.normal(1, size.tokens, config.in_channels)
        audio_latents = given.normal(1, audio_frames, config.audio_in_channels)
        text = (batch, given.text_tokens, config.caption_channels)
        mask = torch.ones(batch, given.text_tokens, device=device, dtype=torch.int64)
        timesteps = given.timesteps(batch)
        frames, height, width = size.latent
        video_coords = model.rope.prepare_video_coords(1, *size.latent, device, fps=self.frame_rate)
        audio_coords = model.audio_rope.prepare_audio_coords(1, audio_frames, device)
        return {
            "hidden_states": latents.repeat(batch, 1, 1),
            "audio_hidden_states": audio_latents.repeat(batch, 1, 1),
            "encoder_hidden_states": given.normal(*text),
            "audio_encoder_hidden_states": given.normal(*text),
            "timestep": timesteps,
            "sigma": timesteps,
            "encoder_attention_mask": mask,
            "audio_encoder_attention_mask": mask,
            "num_frames": frames,
            "height": height,
            "width": width,
            "fps": self.frame_rate,
            "audio_num_frames": audio_frames,
            "video_coords": video_coords.repeat(batch, 1, 1, 1),
            "audio_coords": audio_coords.repeat(batch, 1, 1, 1),
            "isolate_modalities": False,
            "spatio_temporal_guidance_blocks": None,
            "perturbation_mask": None,
            "use_cross_timestep": True,
            "attention_kwargs": None,
        }


class LTX2WithoutGuidance(LTX2WithGuidance):
    """LTX-2 as its distilled weights are used: one sample a forward, without guidance."""

    key = "ltx2_distilled"
    name, tiny_name = "LTX-2 distilled, 4 blocks", "tiny LTX-2 distilled"
    batch = 1


class SanaWMRefiner(Published):
    """The refiner of SANA-WM: three frames of latents after as many as it attends to."""

    key, name = "sana_wm_refiner", "SANA-WM's refiner, 4 blocks"
    tiny_name = "tiny refiner of SANA-WM"
    cls = SanaWMLTX2RefinerTransformer3DModel
    config = {"num_layers": 4, "rope_type": "split"}
    published_blocks = {"transformer_blocks": 48}
    text_tokens = 1024
    frame_rate = 16.0
    sink_frames, history_frames = 1, 10
    sizes, tiny_sizes = (LTXSize(17, 704, 1280),), (LTXSize(9, 64, 96),)
    small = {"size": LTXSize(1, 256, 256), "text_tokens": 64}

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As SanaWMLTX2RefinerPipeline passes them."""
        config, size, device = model.config, given.size, given.device
        frames, height, width = size.latent
        features = config.num_attention_heads * config.attention_head_dim

        def rotation(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
            positions = list(range(first, first + count))
            return model.build_rotary_emb_for_absolute_positions(
                1, positions, height, width, device, self.frame_rate
            )

        cache = SanaWMRefinerKVCache(len(model.transformer_blocks))
        cache.sink_pe = rotation(0, self.sink_frames)
        for layer in cache.layer_caches:
            for store, count in (
                (layer.store_sink, self.sink_frames),
                (layer.store_history, self.history_frames),
            ):
                shape = (1, count * height * width, features)
                store(given.normal(*shape), given.normal(*shape))
        return {
            "hidden_states": given.normal(1, size.tokens, config.in_channels),
            "encoder_hidden_states": given.normal(1, given.text_tokens, config.caption_channels),
            "timestep": given.timesteps(size.tokens)[None],
            "video_rotary_emb": rotation(self.sink_frames + self.history_frames, frames),
            "encoder_attention_mask": torch.ones(
                1, given.text_tokens, device=device, dtype=torch.int64
            ),
            "kv_cache": cache,
            "kv_cache_mode": "inject",
        }


LTX_VIDEO, LTX2, LTX2_DISTILLED = LTXVideo(), LTX2WithGuidance(), LTX2WithoutGuidance()
SANA_WM_REFINER = SanaWMRefiner()
