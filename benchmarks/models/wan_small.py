"""Wan 2.1 1.3B at its published sizes with 6 of 30 blocks, with random weights."""

from __future__ import annotations

from diffusers import WanTransformer3DModel

from benchmarks import models
from benchmarks.models.wan import (  # noqa: F401
    BATCH,
    SIZES,
    SMALL,
    TEXT_TOKENS,
    TINY_SIZES,
    inputs,
    parse_size,
)

NAME, TINY_NAME = "Wan 2.1 1.3B, 6 blocks", "tiny Wan 2.1 1.3B"
TRANSFORMER = {"num_layers": 6, "num_attention_heads": 12, "ffn_dim": 8960}
PUBLISHED_BLOCKS = {"blocks": 30}
transformer = models.builder(WanTransformer3DModel, TRANSFORMER)
