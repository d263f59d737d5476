"""RMS norm over channels, of images and videos."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor
from torch.nn.functional import silu  # here, because users may replace it

from .._ops import add_op_namespace_prefix
from .calls import choice, kernel_call, number
from .group_norm import ACTIVATIONS, at_each_position, group_norm_fake
from .norm import modulated


def _formula(x, weight, bias, scale, shift, eps, has_silu):
    weight, bias, scale, shift = (at_each_position(t, x) for t in (weight, bias, scale, shift))
    # Over dimension 1, so that the gradients keep the memory format of x.
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    n = h * torch.rsqrt(h.square().mean(1, keepdim=True) + eps)
    n = n if weight is None else n * weight
    n = modulated(n if bias is None else n + bias, scale, shift)
    return (silu(n) if has_silu else n).to(x.dtype)


_channel_rms_norm = kernel_call("channel_rms_norm", _formula)


def channel_rms_norm(
    x: Tensor,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-6,
    scale: Optional[Tensor] = None,
    shift: Optional[Tensor] = None,
    activation: str = "none",
) -> Tensor:
    """RMS norm over the channels of each position, modulation and activation, as in decoders of video:
    ``n = x / sqrt(mean(x², dim=1) + eps) * weight + bias``, then ``n * (1 + scale) + shift``.

    Args:
        x: ``(B, C, ...)``, T, with one to three spatial dimensions or more. Either pixels have stride 1, as
            in a contiguous tensor, or channels do, as with ``torch.channels_last_3d``. There may be gaps
            between channels, between samples and between one spatial dimension and the next, as in a slice
            of frames. The result is dense, in the same memory format.
        weight, bias: ``(C,)``, T or float32, or None, independently of each other.
        eps: added to the mean square.
        scale, shift: ``(B, C)``, T or float32, or None for 0, independently of each other.
        activation: ``"none"``, or ``"silu"`` for ``n * sigmoid(n)``.

    Source: Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467, over channels as in the decoders of
    Wan (``WanRMS_norm`` of diffusers) and LTX-Video, https://arxiv.org/abs/2501.00103.
    """
    eps = number("channel_rms_norm", "eps", eps)
    has_silu = choice("channel_rms_norm", "activation", activation, ACTIVATIONS)
    return _channel_rms_norm(x, weight, bias, scale, shift, eps, has_silu)


@torch.library.register_fake(add_op_namespace_prefix("channel_rms_norm"))
def _channel_rms_norm_fake(x, *_):
    return group_norm_fake(x)
