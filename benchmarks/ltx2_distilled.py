"""LTX-2 19B with 4 of 48 blocks as its distilled weights are used: one sample a forward, without guidance."""

from __future__ import annotations

import ltx2
import torch
from diffusers import LTX2VideoTransformer3DModel
from ltx2 import (  # noqa: F401
    PUBLISHED_BLOCKS,
    SIZES,
    SMALL,
    TEXT_TOKENS,
    TINY_SIZES,
    TINY_TRANSFORMER,
    TRANSFORMER,
    VideoSize,
    parse_size,
    transformer,
)

NAME, TINY_NAME = "LTX-2 distilled, 4 blocks", "tiny LTX-2 distilled"
RESULT = "ltx2_distilled"
BATCH = 1


def inputs(
    model: LTX2VideoTransformer3DModel,
    size: VideoSize,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    timestep: float = 800.0,
    text_tokens: int = TEXT_TOKENS,
) -> dict[str, object]:
    """Arguments of a forward as LTX2Pipeline passes them with guidance scales of 1: the prompt's sample."""
    given = ltx2.inputs(model, size, device, dtype, seed, timestep, text_tokens)
    return {
        name: value[1:] if isinstance(value, torch.Tensor) else value
        for name, value in given.items()
    }
