"""FLUX.3 at its published sizes except for the number of blocks, with random weights.

2 of 5 blocks of each mode and 6 of 28 single blocks.
"""

from __future__ import annotations

import torch
from diffusers import Flux3Transformer2DModel

from benchmarks import models
from benchmarks.models.sizes import ImageSize, parse_image_size

NAME, TINY_NAME = "FLUX.3, 2 + 6 blocks", "tiny FLUX.3"
BATCH = 1  # guidance is a forward of its own
TEXT_TOKENS = 160  # padded to a multiple of 80 without a mask
IMAGE_ROPE_SCALE = 0.5
SIZES, TINY_SIZES = (ImageSize(1024, 1024),), (ImageSize(64, 96),)
SMALL = {"size": ImageSize(128, 128), "text_tokens": 80}
# The model multiplies it by 1000 in its own dtype.
THOUSANDFOLD = ("timestep",)

# diffusers' default sizes are the published ones.
TRANSFORMER = {"num_layers": 2, "num_single_layers": 6}
PUBLISHED_BLOCKS = {
    "mode_blocks.image": 5,
    "txt_mode_blocks": 5,
    "single_transformer_blocks": 28,
}
parse_size = parse_image_size
transformer = models.builder(Flux3Transformer2DModel, TRANSFORMER)


def ids(device: torch.device, *lengths: int) -> torch.Tensor:
    """Positions along frames, rows, columns and text: (product of lengths, 4), float32."""
    return models.positions(device, *lengths).float()


def inputs(
    model: Flux3Transformer2DModel,
    size: ImageSize,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    timestep: float = 800.0,
    text_tokens: int = TEXT_TOKENS,
) -> dict[str, object]:
    """Arguments of a forward as the blocks of diffusers' modular pipeline pass them: batch 1."""
    normal, config = models.normal(device, dtype, seed), model.config
    scales = torch.tensor([1.0, IMAGE_ROPE_SCALE, IMAGE_ROPE_SCALE, 1.0], device=device)
    return {
        "hidden_states": normal(1, size.tokens, config.in_channels),
        "encoder_hidden_states": normal(1, text_tokens, config.joint_attention_dim),
        "timestep": torch.tensor([timestep / 1000], device=device).to(dtype),
        "img_ids": ids(device, 1, *size.latent, 1) * scales,
        "txt_ids": ids(device, 1, 1, 1, text_tokens),
        "return_dict": False,
    }
