"""HunyuanVideo at its published sizes with 2 of 20 double and 4 of 40 single blocks; random weights."""

from __future__ import annotations

import torch
from diffusers import HunyuanVideoTransformer3DModel

from benchmarks import models
from benchmarks.models.sizes import VideoSize, parse_video_size

NAME, TINY_NAME = "HunyuanVideo, 2 + 4 blocks", "tiny HunyuanVideo"
BATCH = 1  # the published model is distilled: guidance is an input
TEXT_TOKENS, PROMPT_TOKENS = 256, 96  # the rest is padding
GUIDANCE = 6.0
SIZES, TINY_SIZES = (VideoSize(61, 544, 960),), (VideoSize(5, 64, 96),)
SMALL = {"size": VideoSize(1, 128, 128), "text_tokens": 64}

# diffusers' default sizes are the published ones.
TRANSFORMER = {"num_layers": 2, "num_single_layers": 4}
PUBLISHED_BLOCKS = {"transformer_blocks": 20, "single_transformer_blocks": 40}
parse_size = parse_video_size
transformer = models.builder(HunyuanVideoTransformer3DModel, TRANSFORMER)


def inputs(
    model: HunyuanVideoTransformer3DModel,
    size: VideoSize,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    timestep: float = 800.0,
    text_tokens: int = TEXT_TOKENS,
) -> dict[str, object]:
    """Arguments of a forward as HunyuanVideoPipeline passes them: batch 1, with a mask of the text."""
    normal, config = models.normal(device, dtype, seed), model.config
    mask = (torch.arange(text_tokens, device=device) < PROMPT_TOKENS).to(dtype)
    return {
        "hidden_states": normal(1, config.in_channels, *size.unpacked),
        "timestep": torch.tensor([timestep], device=device).to(dtype),
        "encoder_hidden_states": normal(1, text_tokens, config.text_embed_dim),
        "encoder_attention_mask": mask.unsqueeze(0),
        "pooled_projections": normal(1, config.pooled_projection_dim),
        "guidance": torch.tensor([GUIDANCE], device=device, dtype=dtype) * 1000.0,
        "attention_kwargs": None,
        "return_dict": False,
    }
