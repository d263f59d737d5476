"""Autoencoders: upsampling and causal attention with fewer passes over memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...operations.conditions import DTYPES_16_BIT, kernels_run_on, tracks_derivatives
from ..core.patch import Call, ExactSpec, Proxy
from .blocks import HUNYUAN, HUNYUAN15, LTX, LTX2, QWEN, QWEN21, WAN

# --------------------------------------------------------------------------------------------------
# Upsampling


def _upsample_forward(self: Any, call: Call, x: Tensor) -> Any:
    is_known = self.mode in ("nearest", "nearest-exact") and self.scale_factor == (2.0, 2.0)
    if not is_known or x.dim() != 4 or not _keeps_channels_last(x):
        return NotImplemented
    # As the convolution after it: so only the small image is copied.
    x = x.contiguous(memory_format=torch.channels_last)[:, :, None]
    return _repeated(x, (1, 2, 2)).squeeze(2)


def _causal_upsampler_forward(self: Any, call: Call, hidden_states: Tensor) -> Any:
    """The first frame is not doubled in time."""
    x, factors = hidden_states, tuple(map(int, self.upsample_factor))
    if factors != tuple(self.upsample_factor) or not _keeps_channels_last(x):
        return NotImplemented
    x = x.contiguous(memory_format=torch.channels_last_3d)
    if x.shape[2] > 1:
        frames = (x[:, :, :1], (1, *factors[1:])), (x[:, :, 1:], factors)
        return self.conv(torch.cat([_repeated(*each) for each in frames], 2))
    return self.conv(_repeated(x, (1, *factors[1:])))


def _repeated(x: Tensor, factors: tuple[int, ...]) -> Tensor:
    """Each frame, row and column of x (B, C, T, H, W) several times in turn, with channels last."""
    rows, (f1, f2, f3) = _rows(x), factors
    b, t, h, w, c = rows.shape
    wide = rows[:, :, None, :, None, :, None].expand(b, t, f1, h, f2, w, f3, c)
    return wide.reshape(b, t * f1, h * f2, w * f3, c).view(x.dtype).movedim(-1, 1)


def _keeps_channels_last(x: Tensor) -> bool:
    return x.dtype in DTYPES_16_BIT and kernels_run_on(x) and not tracks_derivatives()


def _rows(x: Tensor, factor: int = 1) -> Tensor:
    """x (B, C, ...) as (B, ..., C), with 16 bytes an element if C is a multiple of 8 times the factor, which
    PyTorch copies several times faster."""
    rows = x.movedim(1, -1)
    can_be_wider = rows.stride(-1) == 1 and not any(
        n % 8 for n in (rows.storage_offset(), rows.shape[-1] // factor, *rows.stride()[:-1])
    )
    return rows.view(torch.complex128) if can_be_wider else rows


def _spread(x: Tensor, factors: tuple[int, ...], is_outer: bool) -> Tensor:
    """Moves channels to frames, rows and columns: (B, C F, T, H, W) to (B, C, T f1, H f2, W f3), with
    channels last. The factors, of product F, are the outer or the inner dimensions of the channels."""
    f1, f2, f3 = factors
    rows = _rows(x, f1 * f2 * f3) if is_outer else x.movedim(1, -1)
    b, t, h, w, channels = rows.shape
    c = channels // (f1 * f2 * f3)
    if is_outer:
        split = rows.reshape(b, t, h, w, f1, f2, f3, c).permute(0, 1, 4, 2, 5, 3, 6, 7)
    else:
        split = rows.reshape(b, t, h, w, c, f1, f2, f3).permute(0, 1, 5, 2, 6, 3, 7, 4)
    return split.reshape(b, t * f1, h * f2, w * f3, c).view(x.dtype).movedim(-1, 1)


def _ltx_upsampler_forward(self: Any, call: Call, hidden_states: Tensor, **options: Any) -> Any:
    x = hidden_states
    if not _keeps_channels_last(x):
        return NotImplemented
    factors = tuple(self.stride)
    out = _spread(self.conv(x, **options), factors, False)[:, :, factors[0] - 1 :]
    if self.residual:
        residual = _spread(x, factors, False)[:, :, factors[0] - 1 :]
        for part in out.split(residual.shape[1], 1):
            part += residual
    return out


def _ltx2_upsampler_forward(
    self: Any, call: Call, hidden_states: Tensor, causal: bool = True
) -> Any:
    return _ltx_upsampler_forward(self, call, hidden_states, causal=causal)


def _ltx1_upsampler_forward(self: Any, call: Call, hidden_states: Tensor) -> Any:
    return _ltx_upsampler_forward(self, call, hidden_states)


def _hunyuan_upsampler_forward(self: Any, call: Call, x: Tensor) -> Any:
    """A shortcut repeats the channels of x. In time the first frame is not doubled: of its channels only the
    first half, or half as many repetitions, are used."""
    if not _keeps_channels_last(x):
        return NotImplemented
    h = self.conv(x)
    if not self.add_temporal_upsample:
        return _add_repeated(_spread(h, (1, 2, 2), True), _spread(x, (1, 2, 2), True))
    first, next_ = _spread(h[:, :, :1], (1, 2, 2), True), _spread(h[:, :, 1:], (2, 2, 2), True)
    first = first[:, : first.shape[1] // 2]
    b, c, t, height, width = next_.shape
    out = h.new_empty(b, t + 1, height, width, c).movedim(-1, 1)
    out[:, :, :1], out[:, :, 1:] = first, next_
    _add_repeated(out[:, :, :1], _spread(x[:, :, :1], (1, 2, 2), True))
    _add_repeated(out[:, :, 1:], _spread(x[:, :, 1:], (2, 2, 2), True))
    return out


def _add_repeated(out: Tensor, x: Tensor) -> Tensor:
    """Adds x, each of its channels several times in turn, to out."""
    by_channel = out.unflatten(1, (x.shape[1], -1))
    by_channel += x[:, :, None]
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

_NEAREST = "nearest neighbors with channels last"
_INTERPOLATE = "torch.nn:Upsample.forward", "torch.nn.functional:interpolate"
_LAST = "upsampling with channels last"
_MASK = (f"{HUNYUAN15}AttnBlock.prepare_causal_attention_mask",)
# The beginnings of classes' names, the rest, the forward, what it does and the functions that it replaces.
_CLASSES: tuple[tuple, ...] = (
    ((WAN, QWEN, QWEN21), "Upsample", _upsample_forward, _NEAREST, _INTERPOLATE),
    ((HUNYUAN,), "UpsampleCausal3D", _causal_upsampler_forward, _LAST, _INTERPOLATE[1:]),
    ((HUNYUAN15,), "Upsample", _hunyuan_upsampler_forward, _LAST, ()),
    ((LTX,), "Upsampler3d", _ltx1_upsampler_forward, _LAST, ()),
    ((LTX2,), "Upsampler3d", _ltx2_upsampler_forward, _LAST, ()),
    ((HUNYUAN15,), "AttnBlock", _causal_attention_forward, "a causal mask made by frame", _MASK),
)
DECODER_LAYERS = tuple(
    ExactSpec(f"{beginning}{rest}", forward, operation, functions, left_to_compiler=True)
    for beginnings, rest, forward, operation, functions in _CLASSES
    for beginning in beginnings
)
