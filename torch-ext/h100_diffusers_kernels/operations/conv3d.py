"""Convolutions of videos and images with channels last. They have no derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix
from .calls import choice, plain_call, refuse_type, required

BORDERS = {"zeros": 0, "replicate": 1, "reflect": 2}
_FRAME_BORDERS = {"zeros": False, "replicate": True}

_conv3d = plain_call("conv3d")


def conv3d(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    *,
    padding: Sequence[int] = (0, 0, 0, 0),
    previous: Optional[Tensor] = None,
    frame_border: str = "zeros",
    border: str = "zeros",
) -> Tensor:
    """Convolution of a video whose channels are stored last, in steps of 1, with its padding: as
    ``torch.nn.functional.conv3d(pad(torch.cat([previous, x], 2)), weight, bias)``.

    No input may require grad. All tensors have x's dtype.

    Args:
        x: ``(B, C, T, H, W)``, bfloat16 or float16, with channels of stride 1, as with
            ``torch.channels_last_3d``; C and all other strides are multiples of 8. Aligned to 16 bytes.
        weight: ``(N, C, t, h, w)``, contiguous and aligned to 16 bytes. t, h and w are 1 or 3.
        bias: ``(N,)`` or None.
        padding: the number of frames before the first and behind the last one, and of rows and columns at
            both sides. Each is less than the weight's size.
        previous: ``(B, C, P, H, W)``, frames before x, with strides as x's, or None.
        frame_border: ``"zeros"``, or ``"replicate"`` for the first and last frame.
        border: ``"zeros"``, or ``"replicate"`` for the first and last rows and columns, or ``"reflect"`` for
            those inside of them.

    Returns:
        ``(B, N, ...)``, with channels last. Sums are float32, and the result is rounded once.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.Conv3d.html.
    """
    if not isinstance(padding, (tuple, list)) or not all(type(size) is int for size in padding):
        refuse_type("conv3d", "padding", "a tuple of 4 integers", padding)
    if len(padding) != 4:
        raise ValueError(f"conv3d: padding must hold 4 integers, got {len(padding)}")
    replicates = choice("conv3d", "frame_border", frame_border, _FRAME_BORDERS)
    kind = choice("conv3d", "border", border, BORDERS)
    return _conv3d(x, weight, bias, previous, *padding, replicates, kind)


@torch.library.register_fake(add_op_namespace_prefix("conv3d"))
def _conv3d_fake(x: Any, weight, bias, previous, front, back, rows, columns, *_):
    required(x, weight)
    batch, _, frames, height, width = x.shape
    frames += front + back + (0 if previous is None else previous.shape[2])
    sizes = zip((frames, height + 2 * rows, width + 2 * columns), weight.shape[2:])
    spatial = [size - taps + 1 for size, taps in sizes]
    return x.new_empty(batch, *spatial, weight.shape[0]).movedim(-1, 1)
