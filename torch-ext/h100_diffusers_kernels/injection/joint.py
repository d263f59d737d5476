"""Two streams of tokens, such as text and image, side by side for a joint attention."""

from __future__ import annotations

import torch
from torch import Tensor

from .injected import Injected
from .model_forward import forward_in_progress


def joined(injected: Injected, first: Tensor, second: Tensor) -> Tensor:
    """Both (B, S1 or S2, D) as one (B, S1 + S2, D).

    Without a copy where they are neighbours in one buffer, as a block leaves them that splits what it has
    joined, and where no unknown code could find its tensors changed through the other one.
    """
    forward = forward_in_progress(injected)
    if forward is not None and forward.is_quiet() and _are_neighbours(first, second):
        shape = (first.shape[0], first.shape[1] + second.shape[1], first.shape[2])
        return first.as_strided(shape, first.stride())
    return torch.cat([first, second], dim=1)


def _are_neighbours(first: Tensor, second: Tensor) -> bool:
    return (
        type(first) is type(second) is Tensor
        and first.dtype == second.dtype
        and first.device == second.device
        and not first.is_meta
        and first.shape[0] == second.shape[0]
        and first.shape[2] == second.shape[2]
        and first.stride() == second.stride()
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and second.storage_offset() == first.storage_offset() + first.shape[1] * first.stride(1)
    )


def split(x: Tensor, first_length: int) -> tuple[Tensor, Tensor]:
    """The two parts of joined tokens, as views."""
    return x[:, :first_length], x[:, first_length:]
