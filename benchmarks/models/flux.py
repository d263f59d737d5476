"""FLUX.1 at its published sizes with fewer blocks, with random weights.

5 of 19 double and 10 of 38 single blocks: the ratio of the whole model.
"""

from __future__ import annotations

import torch
from diffusers import FluxTransformer2DModel

from benchmarks import models
from benchmarks.models.sizes import ImageSize, parse_image_size

NAME, TINY_NAME = "FLUX.1, 5 + 10 blocks", "tiny FLUX.1"
BATCH = 1  # the published model is distilled: guidance is an input
TEXT_TOKENS = 512
GUIDANCE = 3.5
SIZES, TINY_SIZES = (ImageSize(1024, 1024),), (ImageSize(64, 96),)
SMALL = {"size": ImageSize(128, 128), "text_tokens": 64}
# The model multiplies it by 1000 in its own dtype.
THOUSANDFOLD = ("timestep", "guidance")

# diffusers' default sizes are the published ones, except guidance_embeds (FLUX.1-dev).
TRANSFORMER = {"num_layers": 5, "num_single_layers": 10, "guidance_embeds": True}
PUBLISHED_BLOCKS = {"transformer_blocks": 19, "single_transformer_blocks": 38}
parse_size = parse_image_size
transformer = models.builder(
    FluxTransformer2DModel,
    TRANSFORMER,
    # Multiples of 16, which FP8 layers need.
    in_channels=16,
    joint_attention_dim=64,
    pooled_projection_dim=32,
)


def prompt(
    model: FluxTransformer2DModel,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    text_tokens: int = TEXT_TOKENS,
) -> dict[str, torch.Tensor]:
    """A made-up prompt, as arguments of the pipeline: (1, text tokens, joint attention dim), and pooled."""
    normal = models.normal(device, dtype, seed)
    return {
        "prompt_embeds": normal(1, text_tokens, model.config.joint_attention_dim),
        "pooled_prompt_embeds": normal(1, model.config.pooled_projection_dim),
    }


def inputs(
    model: FluxTransformer2DModel,
    size: ImageSize,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    timestep: float = 800.0,
    text_tokens: int = TEXT_TOKENS,
) -> dict[str, object]:
    """Arguments of a forward as FluxPipeline passes them: batch 1, packed latents."""
    text = prompt(model, device, dtype, seed, text_tokens)
    latents = models.normal(device, dtype, seed + 1)(1, size.tokens, model.config.in_channels)
    return {
        "hidden_states": latents,
        "encoder_hidden_states": text["prompt_embeds"],
        "pooled_projections": text["pooled_prompt_embeds"],
        "timestep": torch.tensor([timestep], device=device).to(dtype) / 1000,
        "guidance": torch.full([1], GUIDANCE, device=device),
        "img_ids": models.positions(device, 1, *size.latent).to(dtype),
        "txt_ids": torch.zeros(text_tokens, 3, device=device, dtype=dtype),
        "joint_attention_kwargs": {},
        "return_dict": False,
    }
