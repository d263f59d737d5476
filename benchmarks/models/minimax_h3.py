"""MiniMax-H3 with video and audio, at its published sizes with 3 of 50 blocks, with random weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.minimax_h3 import before_denoise, modular_pipeline

from benchmarks import models
from benchmarks.models import sizes

NAME, TINY_NAME = "MiniMax-H3, 3 blocks", "tiny MiniMax-H3"
BATCH = 1  # guidance takes a separate forward
TEXT_TOKENS = 256  # of the prompt, without padding
TOKEN_PIXELS = 32  # 16 of the autoencoder times 2 of a patch
# The autoencoder encodes frames in chunks, and one shorter chunk at the end.
CHUNK_FRAMES, CHUNK_LATENTS, LAST_FRAMES, LAST_LATENTS = 17, 5, 5, 2


@dataclass(frozen=True)
class VideoSize(sizes.VideoSize):
    """Size of a video in pixels and tokens."""

    @property
    def latent(self) -> tuple[int, int, int]:
        """Frames, rows and columns of tokens."""
        chunks = (self.frames - LAST_FRAMES) // CHUNK_FRAMES
        frames = CHUNK_LATENTS * chunks + LAST_LATENTS
        return frames, self.height // TOKEN_PIXELS, self.width // TOKEN_PIXELS


# The pipeline's default number of frames, on a canvas that gives fewer tokens than the default one.
SIZES, TINY_SIZES = (VideoSize(124, 480, 832),), (VideoSize(22, 64, 96),)
SMALL = {"size": VideoSize(5, 256, 256), "text_tokens": 64}

# diffusers' default sizes are the published ones, with two blocks of the text.
TRANSFORMER = {"num_layers": 3}
PUBLISHED_BLOCKS = {"transformer_blocks": 50}
transformer = models.builder(MiniMaxH3Transformer3DModel, TRANSFORMER)


def parse_size(text: str) -> VideoSize:
    """Parses FRAMESxHEIGHTxWIDTH; ValueError if it is malformed or the model does not support the size."""
    given = sizes.parse_video_size(text)
    size = VideoSize(given.frames, given.height, given.width)
    if size.frames % CHUNK_FRAMES != LAST_FRAMES:
        raise ValueError(f"frames must be a multiple of 17 plus 5, got {text}")
    if size.height % TOKEN_PIXELS or size.width % TOKEN_PIXELS:
        raise ValueError(f"height and width must be multiples of {TOKEN_PIXELS}, got {text}")
    return size


def inputs(
    model: MiniMaxH3Transformer3DModel,
    size: VideoSize,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    timestep: float = 800.0,
    text_tokens: int = TEXT_TOKENS,
) -> dict[str, object]:
    """Arguments of a forward as the modular pipeline passes them for text to video and audio: batch 1, the
    text before the audio before the video."""
    normal, config = models.normal(device, dtype, seed), model.config
    frames, rows, columns = size.latent
    _, patch_height, patch_width = config.patch_size
    audio_latents = modular_pipeline.audio_latent_num_frames(size.frames)
    layout = before_denoise.MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        torch.full((text_tokens,), modular_pipeline.MINIMAX_H3_TEXT_TAG),
        *(frames, rows * patch_height, columns * patch_width, audio_latents, config.patch_size),
        modular_pipeline.MINIMAX_H3_AUDIO_CHANNELS,
        modular_pipeline.MINIMAX_H3_AUDIO_TAG,
        modular_pipeline.MINIMAX_H3_VIDEO_TAG,
    )
    positions, tags, video, audio, text = (tensor.to(device) for tensor in layout[:5])
    return {
        "hidden_states": normal(1, len(video), config.in_channels * patch_height * patch_width),
        "audio_hidden_states": normal(1, len(audio), config.audio_in_channels),
        "encoder_hidden_states": normal(1, text_tokens, config.text_dim),
        "timestep": torch.tensor([timestep / 1000], device=device),
        "timestep_indices": torch.zeros_like(tags),
        "token_tags": tags,
        "position_ids": positions,
        "video_indices": video,
        "audio_indices": audio,
        "text_indices": text,
        "attention_kwargs": None,
        "return_dict": False,
    }
