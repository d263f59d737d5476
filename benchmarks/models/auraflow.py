"""AuraFlow v0.3 at its published sizes with fewer blocks, with random weights.

1 of 4 joint and 8 of 32 single blocks: the ratio of the whole model.
"""

from __future__ import annotations

import torch
from diffusers import AuraFlowTransformer2DModel

from benchmarks import models
from benchmarks.models.sizes import ImageSize, parse_image_size

NAME, TINY_NAME = "AuraFlow, 1 + 8 blocks", "tiny AuraFlow"
BATCH = 2  # with guidance
TEXT_TOKENS = 256
SIZES, TINY_SIZES = (ImageSize(1024, 1024),), (ImageSize(64, 96),)
SMALL = {"size": ImageSize(128, 128), "text_tokens": 64}

TRANSFORMER = {"num_mmdit_layers": 1, "num_single_dit_layers": 8, "pos_embed_max_size": 9216}
PUBLISHED_BLOCKS = {"joint_transformer_blocks": 4, "single_transformer_blocks": 32}
parse_size = parse_image_size
transformer = models.builder(AuraFlowTransformer2DModel, TRANSFORMER, pos_embed_max_size=256)


def inputs(
    model: AuraFlowTransformer2DModel,
    size: ImageSize,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    timestep: float = 0.8,
    text_tokens: int = TEXT_TOKENS,
) -> dict[str, object]:
    """Arguments of a forward as AuraFlowPipeline passes them with guidance: batch 2."""
    normal, config = models.normal(device, dtype, seed), model.config
    latents = normal(1, config.in_channels, *size.unpacked)
    return {
        "hidden_states": torch.cat([latents, latents]),
        "encoder_hidden_states": normal(2, text_tokens, config.joint_attention_dim),
        "timestep": torch.tensor([timestep], device=device).to(dtype).expand(2),
        "attention_kwargs": None,
        "return_dict": False,
    }
