"""Autoencoders of videos: upsampling, causal convolutions and causal attention with fewer passes over memory.

Results are the class's up to the order of summation in a convolution.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...operations.conditions import kernels_run_on, tracks_derivatives, why_not_taken
from ..core.patch import Call, ExactSpec, Proxy
from ..parts.norm_modules import PYTORCH_KEEPS_FORMAT
from .blocks import HUNYUAN, HUNYUAN15, QWEN, QWEN21, REFINER, WAN

_SHORT_DTYPES = (torch.bfloat16, torch.float16)


# --------------------------------------------------------------------------------------------------
# Upsampling


def _upsample_forward(self: Any, call: Call, x: Tensor) -> Any:
    if self.mode not in ("nearest", "nearest-exact") or x.dtype not in _SHORT_DTYPES:
        return NotImplemented
    return call.stand_in.functions[0].function(self, x)


# --------------------------------------------------------------------------------------------------
# Convolution


def _causal_conv_forward(self: Any, call: Call, x: Tensor, cache_x: Tensor | None = None) -> Any:
    """No padded copy: the convolution pads rows and columns.

    A single frame, as of an image, is convolved without the zero frames before it and their weights.
    """
    if not kernels_run_on(x):
        return call.decline(why_not_taken(x))
    left, _, top, _, front, _ = self._padding
    if cache_x is not None and front > 0:
        x = torch.cat([cache_x.to(x.device), x], dim=2)
        front -= cache_x.shape[2]
    weight = self.weight
    if front > 0 and front + x.shape[2] == weight.shape[2]:
        weight = weight[:, :, front:]
    elif front != 0:
        x = nn.functional.pad(x, (0, 0, 0, 0, front, 0))
    padding = (0, top, left)
    return nn.functional.conv3d(
        x, weight, self.bias, self.stride, padding, self.dilation, self.groups
    )


def _padded_conv_forward(self: Any, call: Call, hidden_states: Tensor) -> Any:
    x = hidden_states
    is_last = PYTORCH_KEEPS_FORMAT and x.is_contiguous(memory_format=torch.channels_last_3d)
    if self.pad_mode != "replicate" or tracks_derivatives() or (is_last and not x.is_contiguous()):
        return NotImplemented
    if not kernels_run_on(x):
        return call.decline(why_not_taken(x))
    return self.conv(_pad_by_copies(x, self.time_causal_padding))


def _pad_by_copies(x: Tensor, padding: tuple[int, ...]) -> Tensor:
    """``pad(x, padding, mode="replicate")`` of (B, C, T, H, W).

    PyTorch's kernel takes several times as long as a copy.
    """
    if not any(padding):
        return x
    sides = tuple(zip((4, 3, 2), padding[::2], padding[1::2]))
    shape = list(x.shape)
    for dim, before, after in sides:
        shape[dim] += before + after
    out = inner = x.new_empty(shape)
    for dim, before, _ in sides:
        inner = inner.narrow(dim, before, x.shape[dim])
    inner.copy_(x)
    for dim, before, after in sides:
        end = before + x.shape[dim]
        out.narrow(dim, 0, before).copy_(out.narrow(dim, before, 1))
        out.narrow(dim, end, after).copy_(out.narrow(dim, end - 1, 1))
    return out


# --------------------------------------------------------------------------------------------------
# Attention


def _causal_attention_forward(self: Any, call: Call, x: Tensor) -> Tensor:
    proxy: Any = Proxy(self)
    proxy.prepare_causal_attention_mask = _causal_mask
    return call.stand_in.own_forward(proxy, x)


def _causal_mask(
    frames: int, pixels: int, dtype: torch.dtype, device: Any, batch_size: int | None = None
) -> Tensor:
    """0 for keys up to the query's frame, -inf for later ones. The class fills each query's row by itself."""
    tokens = frames * pixels
    mask = torch.full((tokens, tokens), -torch.inf, dtype=dtype, device=device)
    for end in range(pixels, tokens + 1, pixels):
        mask[end - pixels : end, :end] = 0
    return mask if batch_size is None else mask.expand(batch_size, -1, -1)


# --------------------------------------------------------------------------------------------------
# Tables

_NEAREST = "nearest neighbors without a float32 copy"
_INTERPOLATE = "torch.nn:Upsample.forward", "torch.nn.functional:interpolate"
_UNPADDED, _PADDED = "convolution without a padded copy", "padding by copies"
_PAD = ("torch.nn.functional:pad",)
_CONVOLVE = *_PAD, "torch.nn:Conv3d.forward", "torch.nn.functional:conv3d"
_MASK = (f"{HUNYUAN15}AttnBlock.prepare_causal_attention_mask",)
# The beginnings of classes' names, the rest, the forward, what it does and the functions that it replaces.
_CLASSES: tuple[tuple, ...] = (
    ((WAN, QWEN, QWEN21), "Upsample", _upsample_forward, _NEAREST, _INTERPOLATE),
    ((WAN, QWEN), "CausalConv3d", _causal_conv_forward, _UNPADDED, _CONVOLVE),
    ((HUNYUAN, HUNYUAN15, REFINER), "CausalConv3d", _padded_conv_forward, _PADDED, _PAD),
    ((HUNYUAN15,), "AttnBlock", _causal_attention_forward, "a causal mask made by frame", _MASK),
)
DECODER_LAYERS = tuple(
    ExactSpec(f"{beginning}{rest}", forward, operation, functions, left_to_compiler=True)
    for beginnings, rest, forward, operation, functions in _CLASSES
    for beginning in beginnings
)
