"""diffusers' ``ResnetBlock2D``: each of its norms with the SiLU after it is one pass, and the second one adds
the first convolution's bias and the time embedding, too. All else of it is called as in the class.

The norms have stand-ins of their own, for where the block's own code runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..conditions import kernels_take, tracks_derivatives
from ..differentiation import is_differentiated
from .forward_slot import runs_own_forward
from .group_norms import ORIGINALS as GROUP_NORM_ORIGINALS
from .group_norms import in_memory_format, see_group_norm
from .injected import Injected, Injection, Parts
from .linears import (
    CONV_ORIGINALS,
    SILU_ORIGINALS,
    PlainConv2d,
    is_one,
    is_plain_silu,
    see_conv2d,
    see_dropout,
    see_linear,
)
from .linears import ORIGINALS as LINEAR_ORIGINALS
from .original import Original, find_class, find_original
from .part import Part
from .snapshot import Look

_ORIGINALS = (*GROUP_NORM_ORIGINALS, *SILU_ORIGINALS, *CONV_ORIGINALS, *LINEAR_ORIGINALS)


@dataclass(frozen=True)
class ResnetBlock(Part):
    """The class, without its subclasses."""

    def is_kind_of(self, module: nn.Module) -> bool:
        return type(module) is find_class(self.path)

    def originals(self) -> dict[str, Original]:
        return {path: find_original(path) for path in _ORIGINALS}

    def fill(self, parts: Parts, module: nn.Module, injection: Injection, snapshot: Look) -> None:
        way = snapshot.see_attribute(module, "time_embedding_norm")
        if type(module) is not injection.originals[self.path].owner:
            parts.reason = f"it is a {type(module).__name__} now"  # parametrized, say
            return
        parts.time_emb_proj = see_linear(module, "time_emb_proj", injection, snapshot)
        parts.adds_time = way == "default"
        if way == "scale_shift" or not (parts.adds_time or parts.time_emb_proj is None):
            parts.reason = f"its time embedding goes another way: {way}"
            return
        parts.reason = _why_other_activation(module, injection, snapshot)
        for name in ("norm1", "norm2"):
            norm = see_group_norm(module, name, injection, snapshot)
            setattr(parts, name, norm)
            if parts.reason is None and isinstance(norm, str):
                parts.reason = norm
        for name in ("conv1", "conv2", "conv_shortcut"):
            setattr(parts, name, see_conv2d(module, name, injection, snapshot))
        parts.dropout = see_dropout(module, "dropout", injection, snapshot)


def _why_other_activation(module: nn.Module, injection: Injection, snapshot: Look) -> str | None:
    activation: Any = snapshot.see_attribute(module, "nonlinearity")
    if type(activation) is not nn.SiLU:
        return f"its activation is a {type(activation).__name__}"
    if snapshot.see_attribute(activation, "inplace"):
        return "its activation writes in place"
    if not runs_own_forward(activation):
        return "its activation has hooks, or another forward than its class's"
    return None if is_plain_silu(activation, injection) else "its activation was replaced"


def _forward(
    self: Any, injected: Injected, input_tensor: Tensor, temb: Any, *args: Any, **kwargs: Any
) -> Tensor:
    parts = injected.decide(self)
    reason = parts.reason
    if reason is None and (args or kwargs):
        reason = "it was given more than an input and a time embedding"
    if reason is None and temb is not None and parts.adds_time and parts.time_emb_proj is None:
        reason = "it has no projection for the time embedding that it was given"
    if reason is not None:
        injected.leave(reason)
        return injected.class_forward(self, input_tensor, temb, *args, **kwargs)
    if tracks_derivatives() and is_differentiated(input_tensor, temb, *self.parameters()):
        return injected.class_forward(self, input_tensor, temb)
    if not parts.norm1.fits(input_tensor):
        return injected.class_forward(self, input_tensor, temb)  # which says so
    x = in_memory_format(input_tensor)
    reason = parts.norm1.why_not(x)
    if reason is None and x.dim() != 4:
        reason = f"it was given a tensor of {x.dim()} dimensions"
    if reason is not None:
        injected.leave(reason)
        return injected.class_forward(self, input_tensor, temb)
    injected.count([])
    x = parts.norm1(x, activation="silu")
    if self.upsample is not None:
        if x.shape[0] >= 64:  # as in the class, for PyTorch's sake
            input_tensor, x = input_tensor.contiguous(), x.contiguous()
        input_tensor, x = self.upsample(input_tensor), self.upsample(x)
    elif self.downsample is not None:
        input_tensor, x = self.downsample(input_tensor), self.downsample(x)
    x, bias = _without_bias(parts.conv1, x)
    time = None
    if parts.time_emb_proj is not None:
        time = temb if self.skip_time_act else torch.nn.functional.silu(temb)
        time = parts.time_emb_proj(time)
    x = parts.conv2(parts.dropout(_second_norm(self, injected, parts.norm2, x, bias, time)))
    if parts.conv_shortcut is not None:
        input_tensor = input_tensor.contiguous() if self.training else input_tensor
        input_tensor = parts.conv_shortcut(input_tensor)
    x = input_tensor + x
    factor = self.output_scale_factor
    return x if is_one(factor) else x / factor


def _without_bias(conv: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """A convolution of x, and the bias that is yet to be added to it, if there is one."""
    if isinstance(conv, PlainConv2d) and conv.bias is not None:
        bias = conv.bias
        if bias.dtype == x.dtype and bias.device == x.device:
            return conv.without_bias(x), bias
    return conv(x), None


def _second_norm(
    self: Any, injected: Injected, norm: Any, x: Tensor, bias: Tensor | None, time: Tensor | None
) -> Tensor:
    """SiLU of the norm of x, a bias (C,) and a time embedding (B, C)."""
    x = in_memory_format(x)
    reason = norm.why_not(x)
    if reason is None and not (x.dim() == 4 and norm.fits(x)):
        reason = "its first convolution gives what its second norm does not take"
    if reason is None and time is not None and not _goes_to_channels(time, x):
        reason = "its time embedding has another form than the kernel knows"
    if reason is None:
        return norm(x, _channel_bias(x, bias, time), activation="silu")
    injected.fall_back(reason)
    x = x if bias is None else x + bias[:, None, None]
    x = x if time is None else x + time[:, :, None, None]
    return self.nonlinearity(self.norm2(x))


def _goes_to_channels(time: Tensor, x: Tensor) -> bool:
    return (
        kernels_take(time)
        and time.dim() == 2
        and time.shape[0] in (1, x.shape[0])
        and time.shape[1] == x.shape[1]
        and time.dtype == x.dtype
        and time.device == x.device
    )


def _channel_bias(x: Tensor, bias: Tensor | None, time: Tensor | None) -> Tensor | None:
    """The sum of both, (B, C), in float32: it stands in for sums of all pixels, each with a rounding of its
    own, and one that all pixels share would show more."""
    total = time if bias is None else bias if time is None else time.float() + bias
    return total if total is None else total.expand(x.shape[:2])


RESNET_BLOCK = ResnetBlock(
    "diffusers.models.resnet:ResnetBlock2D",
    "self input_tensor temb args kwargs",
    _forward,
    "group_norm with the time embedding and SiLU",
)
