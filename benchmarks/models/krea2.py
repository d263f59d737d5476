"""Krea 2 at its published sizes except for 4 of 28 blocks, with random weights."""

from __future__ import annotations

import torch
from diffusers import Krea2Transformer2DModel

from benchmarks import models
from benchmarks.models.sizes import ImageSize, parse_image_size

NAME, TINY_NAME = "Krea 2, 4 blocks", "tiny Krea 2"
BATCH = 1  # guidance is a forward of its own
TEXT_TOKENS, PROMPT_TOKENS = 512, 96  # padding follows, then the end of the chat template
SUFFIX_TOKENS = 5
SIZES, TINY_SIZES = (ImageSize(1024, 1024),), (ImageSize(64, 96),)
SMALL = {"size": ImageSize(128, 128), "text_tokens": 64}

# diffusers' default sizes are the published ones.
TRANSFORMER = {"num_layers": 4}
PUBLISHED_BLOCKS = {"transformer_blocks": 28}
parse_size = parse_image_size
transformer = models.builder(Krea2Transformer2DModel, TRANSFORMER)


def inputs(
    model: Krea2Transformer2DModel,
    size: ImageSize,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    timestep: float = 800.0,
    text_tokens: int = TEXT_TOKENS,
) -> dict[str, object]:
    """Arguments of a forward as Krea2Pipeline passes them: batch 1, with a mask of the text.

    The embeddings are (1, text tokens, layers of the text encoder, its channels). Padding stands amid them.
    """
    normal, config = models.normal(device, dtype, seed), model.config
    positions = torch.arange(text_tokens, device=device)
    mask = (positions < PROMPT_TOKENS) | (positions >= text_tokens - SUFFIX_TOKENS)
    axes = [torch.arange(length, device=device) for length in (1, *size.latent)]
    text_ids = torch.zeros(text_tokens, 3, device=device)
    return {
        "hidden_states": normal(1, size.tokens, config.in_channels),
        "encoder_hidden_states": normal(
            1, text_tokens, config.num_text_layers, config.text_hidden_dim
        ),
        "timestep": torch.tensor([timestep / 1000], device=device).to(dtype),
        "position_ids": torch.cat([text_ids, torch.cartesian_prod(*axes)]),
        "encoder_attention_mask": mask.unsqueeze(0),
        "attention_kwargs": None,
        "return_dict": False,
    }
