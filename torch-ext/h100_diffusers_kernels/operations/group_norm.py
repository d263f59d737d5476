"""Group norm of images and videos."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor
from torch.nn.functional import silu  # here, because users may replace it

from .._ops import add_op_namespace_prefix
from .calls import MAX_INTEGER, choice, count, kernel_call, number, promoted

ACTIVATIONS = {"none": False, "silu": True}


def at_each_position(tensor: Optional[Tensor], x: Tensor) -> Optional[Tensor]:
    """``(C,)`` or ``(B, C)``, to broadcast against ``x`` (B, C, ...)."""
    return None if tensor is None else tensor.reshape(*tensor.shape, *[1] * (x.dim() - 2))


def _formula(x, num_groups, weight, bias, eps, channel_bias, has_silu):
    dtype = x.dtype
    x, weight, bias, channel_bias = promoted(x, weight, bias, channel_bias)
    x = x if channel_bias is None else x + at_each_position(channel_bias, x)
    if torch._C._are_functorch_transforms_active():
        x = x.contiguous()  # vmap has no other memory format
    n = torch.group_norm(x, num_groups, weight, bias, eps)
    return (silu(n) if has_silu else n).to(dtype)


_group_norm = kernel_call("group_norm", _formula)


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-5,
    channel_bias: Optional[Tensor] = None,
    activation: str = "none",
) -> Tensor:
    """Group norm of ``x + channel_bias``, as ``torch.nn.functional.group_norm``, then an activation.

    Args:
        x: ``(B, C, ...)``, T, with any number of spatial dimensions and no gaps between them. Either pixels
            are dense, as in a contiguous tensor, or channels are, as with ``torch.channels_last``. The
            result has the same memory format.
        num_groups: number of groups of channels, each with its own mean and (biased) variance.
        weight, bias: ``(C,)``, T or float32, or None, independently of each other.
        eps: added to the variance.
        channel_bias: ``(B, C)``, T or float32, or None. It is added to all pixels before the norm, for
            example a convolution's bias, a projected time embedding, or their sum.
        activation: ``"none"``, or ``"silu"`` for ``n * sigmoid(n)``.

    Source: Wu and He, 2018, https://arxiv.org/abs/1803.08494.
    """
    if type(num_groups) is not int or not 0 < num_groups <= MAX_INTEGER:
        num_groups = count("group_norm", "num_groups", num_groups)
    eps = number("group_norm", "eps", eps)
    has_silu = choice("group_norm", "activation", activation, ACTIVATIONS)
    return _group_norm(x, num_groups, weight, bias, eps, channel_bias, has_silu)


@torch.library.register_fake(add_op_namespace_prefix("group_norm"))
def group_norm_fake(x, *_):
    # Like the kernel's result: channels last if x has dense channels and its pixels are not dense.
    if x.dim() > 2 and not x.is_contiguous() and x.stride(1) == 1:
        batch, channels, *spatial = x.shape
        return x.new_empty(batch, *spatial, channels).movedim(-1, 1)
    return x.new_empty(x.shape)
