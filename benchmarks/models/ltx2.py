"""LTX-2 19B with video and audio, at its published sizes except for 4 of 48 blocks; random weights."""

from __future__ import annotations

import torch
from diffusers import LTX2VideoTransformer3DModel

from benchmarks import models
from benchmarks.models import ltx
from benchmarks.models.ltx import VideoSize

NAME, TINY_NAME = "LTX-2, 4 blocks", "tiny LTX-2"
BATCH = 2  # with guidance
# None is masked: the pipeline's connectors put registers in the place of padding.
TEXT_TOKENS = 1024
FRAME_RATE = 24.0
AUDIO_RATE = 25.0  # latent frames of the audio a second
SIZES, TINY_SIZES = (VideoSize(121, 512, 768),), (VideoSize(9, 64, 96),)
SMALL = {"size": VideoSize(1, 256, 256), "text_tokens": 64}

# diffusers' other defaults are as published.
TRANSFORMER = {"num_layers": 4, "rope_type": "split"}
PUBLISHED_BLOCKS = {"transformer_blocks": 48}
parse_size = ltx.parse_size
transformer = models.builder(
    LTX2VideoTransformer3DModel,
    TRANSFORMER,
    # The pipeline has latents of this size.
    audio_in_channels=128,
    audio_out_channels=128,
)


def inputs(
    model: LTX2VideoTransformer3DModel,
    size: VideoSize,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    timestep: float = 800.0,
    text_tokens: int = TEXT_TOKENS,
    batch: int = BATCH,
) -> dict[str, object]:
    """Arguments of a forward as LTX2Pipeline passes them; with guidance a batch of 2, negative first."""
    normal, config = models.normal(device, dtype, seed), model.config
    audio_frames = round(size.frames / FRAME_RATE * AUDIO_RATE)
    latents = normal(1, size.tokens, config.in_channels)
    audio_latents = normal(1, audio_frames, config.audio_in_channels)
    mask = torch.ones(batch, text_tokens, device=device, dtype=torch.int64)
    timesteps = torch.tensor(timestep, device=device).expand(batch)
    frames, height, width = size.latent
    video_coords = model.rope.prepare_video_coords(1, *size.latent, device, fps=FRAME_RATE)
    audio_coords = model.audio_rope.prepare_audio_coords(1, audio_frames, device)
    return {
        "hidden_states": latents.repeat(batch, 1, 1),
        "audio_hidden_states": audio_latents.repeat(batch, 1, 1),
        "encoder_hidden_states": normal(batch, text_tokens, config.caption_channels),
        "audio_encoder_hidden_states": normal(batch, text_tokens, config.caption_channels),
        "timestep": timesteps,
        "sigma": timesteps,
        "encoder_attention_mask": mask,
        "audio_encoder_attention_mask": mask,
        "num_frames": frames,
        "height": height,
        "width": width,
        "fps": FRAME_RATE,
        "audio_num_frames": audio_frames,
        "video_coords": video_coords.repeat(batch, 1, 1, 1),
        "audio_coords": audio_coords.repeat(batch, 1, 1, 1),
        "isolate_modalities": False,
        "spatio_temporal_guidance_blocks": None,
        "perturbation_mask": None,
        "use_cross_timestep": True,
        "attention_kwargs": None,
        "return_dict": False,
    }
