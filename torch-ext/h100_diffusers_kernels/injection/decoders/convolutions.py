"""Convolutions of autoencoders on the kernel, which pads them and reads frames from before.

Results have channels last, whatever the input's format, so that activations keep it from the first
convolution to the last. Encoders and decoders return PyTorch's format (``blocks.py``). A class's own code
runs in float32, and for padding that the kernel does not know.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import operations
from ...operations.conditions import (
    DTYPES_16_BIT,
    is_differentiated,
    is_plain_tensor,
    kernels_run_on,
)
from ...operations.conv3d import BORDERS
from ..core.checks import KnownClass, is_stock
from ..core.patch import Call, ExactSpec
from .blocks import COGVIDEOX, COSMOS, HUNYUAN, HUNYUAN15, LTX, LTX2, QWEN, QWEN21, REFINER, WAN

_CONV3D = KnownClass("torch.nn:Conv3d", "torch.nn.functional:conv3d")
_SAFE_CONV3D = KnownClass(f"{COGVIDEOX}SafeConv3d", "torch.nn:Conv3d.forward")


def _convolve(
    layer: Any,
    x: Tensor,
    frames: tuple[int, int],
    pixels: tuple[int, int],
    previous: Tensor | None = None,
    **borders: str,
) -> Any:
    """``conv3d`` of x (B, C, T, H, W), or NotImplemented.

    ``frames``: the padding before and behind. ``pixels``: that of rows and columns. ``previous``: frames
    before x.
    """
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    given, taps = (x, weight, bias, previous), (1, *layer.kernel_size)[-3:]
    if (
        x.dtype not in DTYPES_16_BIT
        or x.dim() != 5
        or not kernels_run_on(x)
        or x.shape[1] % 8
        or {*layer.stride, *layer.dilation, layer.groups} != {1}
        or {*taps} not in ({1, 3}, {3})  # PyTorch multiplies matrices if it is a single pixel
        or any(p >= k for p, k in zip((*frames, *pixels), (*taps[:1] * 2, *taps[1:])))
        or weight is None
        or weight.shape[1] != x.shape[1]
        or not all(each is None or is_plain_tensor(each) for each in given)
        or any(each is not None and each.dtype is not x.dtype for each in given)
        or any(each is not None and each.device != x.device for each in given)
        or is_differentiated(*given)
        or x.numel() == 0
    ):
        return NotImplemented
    if weight.dim() == 4:
        weight = weight[:, :, None]
    x, previous = _channels_last(x), None if previous is None else _channels_last(previous)
    padding = (*frames, *pixels)
    return operations.conv3d(
        x, weight.contiguous(), bias, padding=padding, previous=previous, **borders
    )


def _channels_last(x: Tensor) -> Tensor:
    """x, or a copy with channels last if its channels are not dense. Frames may have gaps."""
    sizes, strides = (x.shape[0], *x.shape[2:]), (x.stride(0), *x.stride()[2:])
    is_taken = all(n == 1 or (s > 0 and s % 8 == 0) for n, s in zip(sizes, strides))
    if is_taken and x.stride(1) == 1 and x.data_ptr() % 16 == 0:
        return x
    return x.contiguous(memory_format=torch.channels_last_3d)


# --------------------------------------------------------------------------------------------------
# Classes


def _cached_forward(self: Any, call: Call, x: Tensor, cache_x: Tensor | None = None) -> Any:
    left, _, top, _, front, _ = self._padding
    if cache_x is not None and front > 0:
        cache_x = cache_x.to(x.device)
        front -= cache_x.shape[2]
        if front < 0:
            cache_x, front = cache_x[:, :, -front:], 0
    else:
        cache_x = None
    return _convolve(self, x, (front, 0), (top, left), cache_x)


def _single_frame_forward(self: Any, call: Call, x: Tensor, cache_x: Tensor | None = None) -> Any:
    left, _, top, _ = self._padding
    if cache_x is not None or x.dim() != 5 or x.shape[2] != 1:
        return NotImplemented
    return _convolve(self, x, (0, 0), (top, left))


def _ltx_forward(self: Any, call: Call, hidden_states: Tensor) -> Any:
    return _repeated_frames(self, hidden_states, self.is_causal)


def _ltx2_forward(self: Any, call: Call, hidden_states: Tensor, causal: bool = True) -> Any:
    return _repeated_frames(self, hidden_states, causal)


def _repeated_frames(self: Any, x: Tensor, is_causal: bool) -> Any:
    conv, taps = self._modules["conv"], self.kernel_size[0]
    if not is_stock(conv, _CONV3D) or conv.padding_mode not in BORDERS:
        return NotImplemented
    frames = (taps - 1, 0) if is_causal else ((taps - 1) // 2,) * 2
    options: Any = {"frame_border": "replicate", "border": conv.padding_mode}
    return _convolve(conv, x, frames, conv.padding[1:], **options)


def _padded_forward(self: Any, call: Call, hidden_states: Tensor) -> Any:
    conv = self._modules["conv"]
    left, _, top, _, front, _ = padding = self.time_causal_padding
    if not any(padding):
        call.is_counted = False
        return conv(hidden_states)  # PyTorch copies it to pad it by nothing
    border = {"replicate": "replicate", "constant": "zeros"}.get(self.pad_mode)
    if border is None or not is_stock(conv, _CONV3D) or any(conv.padding):
        return NotImplemented
    options: Any = {"frame_border": border, "border": border}
    return _convolve(conv, hidden_states, (front, 0), (top, left), **options)


def _cogvideox_forward(
    self: Any, call: Call, inputs: Tensor, conv_cache: Tensor | None = None
) -> Any:
    """The class's result, and the last frames that it read, for the next call."""
    conv, front, x = self._modules["conv"], self.time_pad, inputs
    if not is_stock(conv, _SAFE_CONV3D) or conv.padding_mode != "zeros":
        return NotImplemented
    if {*conv.kernel_size} == {1} and x.dtype in DTYPES_16_BIT and kernels_run_on(x):
        # It makes scales and shifts of a norm, whose other operand has channels last.
        call.is_counted = False
        x = x.contiguous(memory_format=torch.channels_last_3d)
        return call.stand_in.own_forward(self, x, conv_cache)
    if self.pad_mode == "replicate":
        is_known, previous, cache = not any(conv.padding), None, None
        options = {"frame_border": "replicate", "border": "replicate"}
    else:
        is_known = conv.padding == (0, self.height_pad, self.width_pad) and front > 0
        previous, options = conv_cache, {"frame_border": "replicate"}
        before = x[:, :, :1].expand(-1, -1, front, -1, -1) if previous is None else previous
        read = x if x.shape[2] >= front else torch.cat([before, x], 2)
        cache = read[:, :, -front:]
    count = 0 if previous is None else previous.shape[2]
    if not is_known or count not in (0, front):
        return NotImplemented
    frames, pixels = (front - count, 0), (self.height_pad, self.width_pad)
    out = _convolve(conv, x, frames, pixels, previous, **options)
    return out if out is NotImplemented else (out, None if cache is None else cache.clone())


def _cosmos_forward(self: Any, call: Call, hidden_states: Tensor) -> Any:
    border = {"constant": "zeros"}.get(self.pad_mode, self.pad_mode)
    left, _, top, _ = self.spatial_pad
    if border not in BORDERS or any(self.padding):
        return NotImplemented
    options: Any = {"frame_border": "replicate", "border": border}
    return _convolve(self, hidden_states, (self.temporal_pad, 0), (top, left), **options)


def _image_forward(self: Any, call: Call, input: Tensor) -> Any:
    x = input
    if x.dim() != 4 or self.padding_mode not in BORDERS or type(self.padding) is str:
        return NotImplemented
    out = _convolve(self, x[:, :, None], (0, 0), self.padding, border=self.padding_mode)
    return out if out is NotImplemented else out.squeeze(2)


# --------------------------------------------------------------------------------------------------
# Tables

_CONV = "conv3d"
_PAD = ("torch.nn.functional:pad",)
_CALLS = ("torch.nn.functional:conv3d",)
_OF_IMAGES = ("torch.nn.functional:conv2d", "torch.nn:Conv2d._conv_forward")
# The beginnings of classes' names, the forward and the functions that it replaces.
_CLASSES: tuple[tuple, ...] = (
    ((WAN, QWEN), _cached_forward, (*_PAD, "torch.nn:Conv3d.forward", *_CALLS)),
    ((QWEN21,), _single_frame_forward, (*_PAD, "torch.nn:Conv2d.forward", *_OF_IMAGES)),
    ((HUNYUAN, HUNYUAN15, REFINER), _padded_forward, _PAD),
    ((LTX,), _ltx_forward, ()),
    ((LTX2,), _ltx2_forward, ()),
    ((COGVIDEOX,), _cogvideox_forward, (*_PAD, *_CALLS)),
    ((COSMOS,), _cosmos_forward, (*_PAD, "torch.nn:Conv3d.forward", *_CALLS)),
)
CONVOLUTIONS = tuple(
    ExactSpec(f"{beginning}CausalConv3d", forward, _CONV, functions, left_to_compiler=True)
    for beginnings, forward, functions in _CLASSES
    for beginning in beginnings
)
# In models with such encoders or decoders: elsewhere the layers around it expect PyTorch's format.
IMAGE_CONVOLUTION = ExactSpec("torch.nn:Conv2d", _image_forward, _CONV, _OF_IMAGES, True)
