"""Stable Diffusion XL's UNet in torch.channels_last.

Convolutions then need no copies to cuDNN's layout. The weights stay in the user's memory format.
"""

from __future__ import annotations

import torch
from diffusers import UNet2DConditionModel

from benchmarks.models import sdxl
from benchmarks.models.sdxl import (  # noqa: F401
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


def transformer(
    device: torch.device, dtype: torch.dtype, tiny: bool = False, seed: int = 0
) -> UNet2DConditionModel:
    """Stable Diffusion XL's UNet, its random weights made on the device."""
    return sdxl.transformer(device, dtype, tiny, seed).to(memory_format=torch.channels_last)
