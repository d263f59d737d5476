"""Wan 2.1 14B at its published sizes with 3 of 40 blocks, with random weights.

wan_small.py is the 1.3B model.
"""

from __future__ import annotations

import torch
from diffusers import WanTransformer3DModel

from benchmarks import models
from benchmarks.models.sizes import VideoSize, parse_video_size

NAME, TINY_NAME = "Wan 2.1 14B, 3 blocks", "tiny Wan 2.1"
BATCH = 1  # guidance takes a separate forward
TEXT_TOKENS = 512
SIZES, TINY_SIZES = (VideoSize(81, 480, 832),), (VideoSize(5, 64, 96),)
SMALL = {"size": VideoSize(1, 128, 128), "text_tokens": 64}

# diffusers' default sizes are the published ones.
TRANSFORMER = {"num_layers": 3}
PUBLISHED_BLOCKS = {"blocks": 40}
parse_size = parse_video_size
transformer = models.builder(
    WanTransformer3DModel,
    TRANSFORMER,
    text_dim=64,  # a multiple of 16, which FP8 layers need
)


def inputs(
    model: WanTransformer3DModel,
    size: VideoSize,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    timestep: int = 800,
    text_tokens: int = TEXT_TOKENS,
) -> dict[str, object]:
    """Arguments of a forward as WanPipeline passes them: batch 1, and no mask of the text."""
    normal, config = models.normal(device, dtype, seed), model.config
    return {
        "hidden_states": normal(1, config.in_channels, *size.unpacked),
        "encoder_hidden_states": normal(1, text_tokens, config.text_dim),
        "timestep": torch.tensor([timestep], device=device),
        "attention_kwargs": None,
        "return_dict": False,
    }
