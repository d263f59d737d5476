"""FLUX.2-dev at its published sizes with fewer blocks, with random weights.

2 of 8 double and 6 of 48 single blocks.
"""

from __future__ import annotations

import torch
from diffusers import Flux2Transformer2DModel

from benchmarks import models
from benchmarks.models.sizes import ImageSize, parse_image_size

NAME, TINY_NAME = "FLUX.2, 2 + 6 blocks", "tiny FLUX.2"
BATCH = 1  # the published model is distilled: guidance is an input
TEXT_TOKENS = 512
GUIDANCE = 4.0
SIZES, TINY_SIZES = (ImageSize(1024, 1024),), (ImageSize(64, 96),)
SMALL = {"size": ImageSize(128, 128), "text_tokens": 64}
# The model multiplies it by 1000 in its own dtype.
THOUSANDFOLD = ("timestep", "guidance")

# diffusers' default sizes are the published ones.
TRANSFORMER = {"num_layers": 2, "num_single_layers": 6}
PUBLISHED_BLOCKS = {"transformer_blocks": 8, "single_transformer_blocks": 48}
parse_size = parse_image_size
transformer = models.builder(Flux2Transformer2DModel, TRANSFORMER)


def ids(device: torch.device, *lengths: int) -> torch.Tensor:
    """Integer positions along frames, rows, columns and text: (1, product of lengths, 4)."""
    return models.positions(device, *lengths)[None]


def inputs(
    model: Flux2Transformer2DModel,
    size: ImageSize,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    timestep: float = 800.0,
    text_tokens: int = TEXT_TOKENS,
) -> dict[str, object]:
    """Arguments of a forward as Flux2Pipeline passes them: batch 1, packed latents."""
    normal, config = models.normal(device, dtype, seed), model.config
    return {
        "hidden_states": normal(1, size.tokens, config.in_channels),
        "encoder_hidden_states": normal(1, text_tokens, config.joint_attention_dim),
        "timestep": torch.tensor([timestep], device=device).to(dtype) / 1000,
        "guidance": torch.full([1], GUIDANCE, device=device),
        "img_ids": ids(device, 1, *size.latent, 1),
        "txt_ids": ids(device, 1, 1, 1, text_tokens),
        "joint_attention_kwargs": None,
        "return_dict": False,
    }
