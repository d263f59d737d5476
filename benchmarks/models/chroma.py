"""Chroma at its published sizes with fewer blocks, with random weights.

5 of 19 double and 10 of 38 single blocks: the ratio of the whole model.
"""

from __future__ import annotations

import torch
from diffusers import ChromaTransformer2DModel

from benchmarks import models
from benchmarks.models.sizes import ImageSize, parse_image_size

NAME, TINY_NAME = "Chroma, 5 + 10 blocks", "tiny Chroma"
BATCH = 1  # guidance is a forward of its own
TEXT_TOKENS, PROMPT_TOKENS = 512, 96  # the rest is padding
SIZES, TINY_SIZES = (ImageSize(1024, 1024),), (ImageSize(64, 96),)
SMALL = {"size": ImageSize(128, 128), "text_tokens": 64}
# The model multiplies it by 1000 in its own dtype.
THOUSANDFOLD = ("timestep",)

# diffusers' default sizes are the published ones.
TRANSFORMER = {"num_layers": 5, "num_single_layers": 10}
PUBLISHED_BLOCKS = {"transformer_blocks": 19, "single_transformer_blocks": 38}
parse_size = parse_image_size
transformer = models.builder(ChromaTransformer2DModel, TRANSFORMER)


def inputs(
    model: ChromaTransformer2DModel,
    size: ImageSize,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    timestep: float = 800.0,
    text_tokens: int = TEXT_TOKENS,
) -> dict[str, object]:
    """Arguments of a forward as ChromaPipeline passes them: batch 1, packed latents, a mask of all tokens."""
    normal, config = models.normal(device, dtype, seed), model.config
    # One token of padding more than the prompt has is valid, too.
    of_text = torch.arange(text_tokens, device=device) <= PROMPT_TOKENS
    mask = torch.cat([of_text, of_text.new_ones(size.tokens)])
    return {
        "hidden_states": normal(1, size.tokens, config.in_channels),
        "encoder_hidden_states": normal(1, text_tokens, config.joint_attention_dim),
        "timestep": torch.tensor([timestep], device=device).to(dtype) / 1000,
        "img_ids": models.positions(device, 1, *size.latent).to(dtype),
        "txt_ids": torch.zeros(text_tokens, 3, device=device, dtype=dtype),
        "attention_mask": mask.unsqueeze(0).to(dtype),
        "joint_attention_kwargs": {},
        "return_dict": False,
    }
