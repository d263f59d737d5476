"""Two streams of tokens, such as text and image, side by side for a joint attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional
from ..conditions import of_one_form
from ..differentiation import is_differentiated
from .attention import Norms, attend, norm_and_rotate
from .blocks import OpeningsOf
from .injected import Injected, Parts
from .model_forward import forward_in_progress
from .modulation import Opened
from .rotary import as_operand, split_tables


def joined(injected: Injected, first: Tensor, second: Tensor) -> Tensor:
    """Both (B, S1 or S2, D) as one (B, S1 + S2, D).

    Without a copy where they are neighbours in one buffer, as a block leaves them that splits what it has
    joined, and where no unknown code could find its tensors changed through the other one.
    """
    forward = forward_in_progress(injected)
    if forward is not None and forward.is_quiet() and _are_neighbours(first, second):
        return _as_one(first, second)
    return torch.cat([first, second], dim=1)


def begin_joined(
    injected: Injected,
    block: nn.Module,
    parts: Parts,
    openings_of: OpeningsOf,
    first: Tensor,
    second: Tensor,
    *conditions: Tensor,
) -> tuple[Tensor, Opened]:
    """Both joined, and what a block of one stream begins with of that; see ``blocks.begin``."""
    forward = forward_in_progress(injected)
    handed = None if forward is None else forward.take_over(block, (first, second, *conditions))
    if handed is not None:
        return _as_one(first, second), handed[0]
    x = joined(injected, first, second)
    (opening,) = openings_of(injected, block, parts, *conditions)
    return x, opening(x)


def _as_one(first: Tensor, second: Tensor) -> Tensor:
    shape = (first.shape[0], first.shape[1] + second.shape[1], first.shape[2])
    return first.as_strided(shape, first.stride())


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


# The linear layers of an attention over two streams: of the image, of the text, and of the text's results.
_OF_IMAGE, _OF_TEXT = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")
PROJECTIONS = (*_OF_IMAGE, *_OF_TEXT, "to_add_out")


def project(module: Any, parts: Parts, image: Tensor, text: Tensor | None) -> list[Tensor]:
    """Query, key and value of the image, and then of the text if there is any, each (B, S, H, d)."""
    if parts.project is not None and (module.fused_projections or not parts.projects):
        tensors = parts.project(module, image, text)[: 3 if text is None else 6]
    else:
        tensors = [getattr(parts, name)(image) for name in _OF_IMAGE]
        if text is not None:
            tensors += [getattr(parts, name)(text) for name in _OF_TEXT]
    return [x.unflatten(-1, (-1, parts.head_dim)) for x in tensors]


class Stream(NamedTuple):
    """Tokens of one kind: query, key and value, each (B, S, H, d), the norms of query and key, and the
    rotary embedding of both in the model's form, or None."""

    query: Tensor
    key: Tensor
    value: Tensor
    norms: Norms
    rope: Any


def joint_streams(
    parts: Parts, streams: Sequence[Stream], rotate: Callable[[Tensor, Any], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of all streams, one after the other, for attention.

    Norms are of each head. The kernel writes each stream to its place; where it does not take one, the
    streams are computed apart and concatenated.
    """
    if len(streams) == 1:
        query, key, value, norms, rope = streams[0]
        return *norm_and_rotate(parts, norms, query, key, rope, rotate, "per_head"), value
    operands = [_operand(parts, stream) for stream in streams]
    if None in operands or not _is_of_one_kind(streams):
        normed = [
            (*norm_and_rotate(parts, s.norms, s.query, s.key, s.rope, rotate, "per_head"), s.value)
            for s in streams
        ]
        query, key, value = (torch.cat(tensors, dim=1) for tensors in zip(*normed))
        return query, key, value
    query, key, value, *_ = streams[0]
    length = sum(stream.query.shape[1] for stream in streams)
    joint = tuple(x.new_empty(x.shape[0], length, *x.shape[2:]) for x in (query, key, value))
    begin = 0
    for stream, (operand,) in zip(streams, operands):
        end = begin + stream.query.shape[1]
        functional.qk_norm_rope(
            stream.query,
            stream.key,
            rope=operand,
            heads=query.shape[2],
            v=stream.value,
            out=tuple(x[:, begin:end] for x in joint),
            **stream.norms.options("per_head"),
        )
        begin = end
    return joint


def _operand(parts: Parts, stream: Stream) -> tuple[Any] | None:
    """The rotation that the kernel takes, or None for none, in a tuple; None if it does not take it."""
    query, key, _, norms, rope = stream
    if not norms.of_one_launch(query, key):
        return None
    if rope is None:
        return (None,)
    operand = as_operand(rope, query, query.shape[2]) if parts.rotates else None
    return None if operand is None else (operand,)


def _is_of_one_kind(streams: Sequence[Stream]) -> bool:
    """Whether buffers for all of them can be written, each in its place."""
    if torch.compiler.is_compiling():
        return False  # a concatenation is what the compiler knows how to fuse
    tensors = [x for stream in streams for x in stream[:3]]
    weights = [norm.weight for stream in streams for norm in stream.norms]
    first = tensors[0]
    return (
        all(
            x.dtype == first.dtype
            and x.device == first.device
            and x.shape[0] == first.shape[0]
            and x.shape[2:] == first.shape[2:]
            for x in tensors
        )
        and all(len({x.shape[1] for x in stream[:3]}) == 1 for stream in streams)
        and of_one_form(*tensors)
        and not is_differentiated(*tensors, *weights)
    )


def attend_jointly(
    injected: Injected,
    parts: Parts,
    streams: Sequence[Stream],
    rotate: Callable[[Tensor, Any], Tensor],
    mask: Tensor | None = None,
    *,
    rope_of_all: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Attention over two streams, each (B, S1 or S2, H * d), contiguous.

    ``rope_of_all``: the rotation of all tokens where that of each stream is not known. ``options`` are those
    of ``attend``.
    """
    query, key, value = joint_streams(parts, streams, rotate)
    if rope_of_all is not None:
        query, key = rotate(query, rope_of_all), rotate(key, rope_of_all)
    out = attend(injected, parts, query, key, value, mask, **options)
    first, second = split(out.flatten(2, 3).to(query.dtype), streams[0].query.shape[1])
    return first.contiguous(), second.contiguous()


def attend_with_tables(
    module: Any,
    injected: Injected,
    parts: Parts,
    image: Tensor,
    text: Tensor,
    rope: Any,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention over an image and the text before it, of which ``rope`` has the tables: the image's results
    and the text's, each (B, S, H * d), contiguous."""
    query, key, value, *of_text = project(module, parts, image, text)
    ropes = split_tables(rope, text.shape[1], image.shape[1])
    text_rope, image_rope = ropes or (None, None)
    streams = (
        Stream(*of_text, Norms(parts.norm_added_q, parts.norm_added_k), text_rope),
        Stream(query, key, value, Norms(parts.norm_q, parts.norm_k), image_rope),
    )
    text_out, image_out = attend_jointly(
        injected,
        parts,
        streams,
        partial(parts.rotate, sequence_dim=1),
        mask,
        rope_of_all=None if ropes else rope,
    )
    return image_out, text_out
