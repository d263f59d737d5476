"""Stable Diffusion XL's UNet put into torch.channels_last, as its users may do.

Its convolutions need no copies in cuDNN's own layout then; its weights are where the user has put them.
"""

from __future__ import annotations

import sdxl
import torch
from diffusers import UNet2DConditionModel
from sdxl import (  # noqa: F401
    BATCH,
    SIZES,
    SMALL,
    TEXT_TOKENS,
    TINY_SIZES,
    TINY_TRANSFORMER,
    TRANSFORMER,
    inputs,
    parse_size,
)

NAME, TINY_NAME = (f"{name}, channels last" for name in (sdxl.NAME, sdxl.TINY_NAME))
RESULT = "sdxl_channels_last"


def transformer(
    device: torch.device, dtype: torch.dtype, tiny: bool = False, seed: int = 0
) -> UNet2DConditionModel:
    """Stable Diffusion XL's UNet, its random weights made on the device."""
    return sdxl.transformer(device, dtype, tiny, seed).to(memory_format=torch.channels_last)
