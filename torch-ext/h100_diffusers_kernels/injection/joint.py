"""Two streams of tokens, such as text and image, side by side for a joint attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .attention import norm_and_rotate
from .injected import Injected, Parts
from .model_forward import forward_in_progress
from .rotary import split_tables


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


def joint_streams(
    parts: Parts,
    image: Sequence[Tensor],
    text: Sequence[Tensor],
    rope: Any,
    rotate: Callable[[Tensor, Any], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, each (B, S, H, d), for attention: those of the image, or of text and image.

    Each stream has norms of each head of its own, and both are rotated by ``rope``, the text first.
    ``text`` is empty where there is none.
    """
    query, key, value = image
    norms = (parts.norm_q, parts.norm_k)
    if not text:
        return *norm_and_rotate(parts, norms, query, key, rope, rotate, "per_head"), value
    text_rope, image_rope = split_tables(rope, text[0].shape[1], query.shape[1]) or (None, None)
    query, key = norm_and_rotate(parts, norms, query, key, image_rope, rotate, "per_head")
    norms = (parts.norm_added_q, parts.norm_added_k)
    of_text = norm_and_rotate(parts, norms, text[0], text[1], text_rope, rotate, "per_head")
    pairs = zip((*of_text, text[2]), (query, key, value))
    query, key, value = (torch.cat(pair, dim=1) for pair in pairs)
    if rope is not None and image_rope is None:
        query, key = rotate(query, rope), rotate(key, rope)
    return query, key, value
