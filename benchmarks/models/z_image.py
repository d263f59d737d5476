"""Z-Image-Turbo 6B at its published sizes except for 8 of 30 layers, with random weights."""

from __future__ import annotations

import torch
from diffusers import ZImageTransformer2DModel

from benchmarks import models
from benchmarks.models.sizes import ImageSize, parse_image_size

NAME, TINY_NAME = "Z-Image, 8 blocks", "tiny Z-Image"
BATCH = 1  # the published model is distilled
TEXT_TOKENS = 96  # of the prompt: the pipeline passes no padding
SIZES, TINY_SIZES = (ImageSize(1024, 1024),), (ImageSize(64, 128),)
SMALL = {"size": ImageSize(128, 128), "text_tokens": 64}

# diffusers' default sizes are the published ones, with two refiners each of the image and of the text.
TRANSFORMER = {"n_layers": 8}
PUBLISHED_BLOCKS = {"layers": 30}
parse_size = parse_image_size
transformer = models.builder(ZImageTransformer2DModel, TRANSFORMER)


def inputs(
    model: ZImageTransformer2DModel,
    size: ImageSize,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    timestep: float = 800.0,
    text_tokens: int = TEXT_TOKENS,
) -> dict[str, object]:
    """Arguments of a forward as ZImagePipeline passes them: lists of one image and one prompt."""
    normal, config = models.normal(device, dtype, seed), model.config
    return {
        "x": [normal(config.in_channels, 1, *size.unpacked)],
        "t": (1000 - torch.tensor([timestep], device=device)) / 1000,
        "cap_feats": [normal(text_tokens, config.cap_feat_dim)],
        "joint_attention_kwargs": None,
        "return_dict": False,
    }
