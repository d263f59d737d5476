"""Mochi at its published sizes except for 4 of 48 blocks, with random weights."""

from __future__ import annotations

import dataclasses

import torch
from diffusers import MochiTransformer3DModel

from benchmarks import models
from benchmarks.models.sizes import VideoSize, parse_video_size

TOKEN_FRAMES = 6


class Size(VideoSize):
    """Mochi's autoencoder maps 6 frames to one."""

    @property
    def latent(self) -> tuple[int, int, int]:
        _, rows, columns = super().latent
        return -(-self.frames // TOKEN_FRAMES), rows, columns


def parse_size(text: str) -> Size:
    return Size(**dataclasses.asdict(parse_video_size(text)))


NAME, TINY_NAME = "Mochi, 4 blocks", "tiny Mochi"
BATCH = 2  # with guidance
TEXT_TOKENS, PROMPT_TOKENS = 256, 96  # the rest is padding
SIZES, TINY_SIZES = (Size(85, 480, 848),), (Size(7, 64, 96),)
SMALL = {"size": Size(1, 128, 128), "text_tokens": 64}

# diffusers' default sizes are the published ones.
TRANSFORMER = {"num_layers": 4}
PUBLISHED_BLOCKS = {"transformer_blocks": 48}


def transformer(
    device: torch.device, dtype: torch.dtype, tiny: bool = False, seed: int = 0
) -> MochiTransformer3DModel:
    """With the frequencies of the rotary embedding, which diffusers initializes to 0."""
    model = models.builder(MochiTransformer3DModel, TRANSFORMER)(device, dtype, tiny, seed)
    torch.nn.init.normal_(model.pos_frequencies)
    return model


def inputs(
    model: MochiTransformer3DModel,
    size: VideoSize,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    timestep: float = 800.0,
    text_tokens: int = TEXT_TOKENS,
) -> dict[str, object]:
    """Arguments of a forward as MochiPipeline passes them with guidance: batch 2, the negative prompt first.

    It is empty, so it has no valid token.
    """
    normal, config = models.normal(device, dtype, seed), model.config
    latents = normal(1, config.in_channels, *size.unpacked)
    positions = torch.arange(text_tokens, device=device)
    return {
        "hidden_states": torch.cat([latents, latents]),
        "encoder_hidden_states": normal(2, text_tokens, config.text_embed_dim),
        "timestep": torch.tensor([timestep], device=device).expand(2).to(dtype),
        "encoder_attention_mask": torch.stack([positions < 0, positions < PROMPT_TOKENS]),
        "attention_kwargs": None,
        "return_dict": False,
    }
