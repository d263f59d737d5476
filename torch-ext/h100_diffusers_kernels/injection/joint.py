"""Two streams of tokens, such as text and image, side by side for a joint attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional
from ..arguments import heads_of
from ..conditions import may_write, of_one_form
from ..differentiation import is_differentiated
from .attention import Norms, as_dtype, attend, norm_and_rotate, operand_of
from .blocks import OpeningsOf
from .injected import Injected, Parts
from .linears import Projection
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
_NOT_TAKEN = object()
PROJECTIONS = (*_OF_IMAGE, *_OF_TEXT, "to_add_out")


class Stream(NamedTuple):
    """Tokens of one kind: query, key and value, each (B, S, H, d), or in calls that are trusted
    (B, S, H * d); the norms of query and key, and the rotary embedding of both in the model's form, or None.
    The value may be yet to be computed."""

    query: Tensor
    key: Tensor
    value: Tensor | Projection
    norms: Norms
    rope: Any

    def value_tensor(self) -> Tensor:
        return self.value() if isinstance(self.value, Projection) else self.value

    def by_head(self, head_dim: int) -> Stream:
        """The same with tensors (B, S, H, d)."""
        query, key, value = _by_head((self.query, self.key, self.value_tensor()), head_dim)
        return self._replace(query=query, key=key, value=value)


def project(
    module: Any,
    parts: Parts,
    image: Tensor,
    text: Tensor | None,
    image_rope: Any = None,
    text_rope: Any = None,
) -> list[Stream]:
    """The stream of the image, and then of the text if there is any, by an attention's linear layers."""
    head_dim = parts.head_dim
    tensors: list[Any]
    if parts.project is not None and (module.fused_projections or not parts.projects):
        packed = parts.project(module, image, text)[: 3 if text is None else 6]
        tensors = [x.unflatten(-1, (-1, head_dim)) for x in packed]
    else:
        of_heads = None if parts.is_trusted else head_dim
        tensors = [Projection(getattr(parts, name), image, of_heads) for name in _OF_IMAGE]
        if text is not None:
            tensors += [Projection(getattr(parts, name), text, of_heads) for name in _OF_TEXT]
        tensors = [p if i % 3 == 2 else p() for i, p in enumerate(tensors)]
    query, key, value, *of_text = tensors
    streams = [Stream(query, key, value, Norms(parts.norm_q, parts.norm_k), image_rope)]
    if of_text:
        query, key, value = of_text
        norms = Norms(parts.norm_added_q, parts.norm_added_k)
        streams.append(Stream(query, key, value, norms, text_rope))
    return streams


def joint_streams(
    injected: Injected,
    parts: Parts,
    streams: Sequence[Stream],
    rotate: Callable[[Tensor, Any], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of all streams, one after the other, for attention: (B, S, H, d), or (B, S, H * d)
    as in the streams.

    Norms are of each head. The kernel writes each stream to its place; where it does not take one, the
    streams are computed apart and concatenated.
    """
    may_join = parts.is_trusted or (len(streams) > 1 and may_write())
    operands = (
        [_operand(injected, parts, stream) for stream in streams] if may_join else [_NOT_TAKEN]
    )
    is_direct = all(operand is not _NOT_TAKEN for operand in operands)
    if is_direct and len(streams) > 1:
        streams = [
            stream
            if isinstance(stream.value, Projection)
            and stream.value.fits(stream.query, parts.is_trusted)
            else stream._replace(value=stream.value_tensor())
            for stream in streams
        ]
        is_direct = (_fit if parts.is_trusted else _is_of_one_kind)(streams)
    if not is_direct:
        if parts.is_trusted:
            streams = [stream.by_head(parts.head_dim) for stream in streams]
        normed = [
            norm_and_rotate(injected, parts, s.norms, s.query, s.key, s.rope, rotate, "per_head")
            for s in streams
        ]
        each = [(*pair, stream.value_tensor()) for pair, stream in zip(normed, streams)]
        if len(each) == 1:
            return each[0]
        query, key, value = (torch.cat(tensors, dim=1) for tensors in zip(*each))
        return query, key, value
    heads = heads_of(streams[0].query, parts.head_dim)
    if len(streams) == 1:
        ((query, key, _, norms, rope),) = streams
        if norms.q.module is not None or rope is not None:
            options = norms.options("per_head")
            query, key = functional.qk_norm_rope(
                query, key, rope=operands[0], heads=heads, **options
            )
        return query, key, streams[0].value_tensor()
    batch, _, *of_token = streams[0].query.shape
    lengths = [stream.query.shape[1] for stream in streams]
    shape = (batch, sum(lengths), *of_token)
    query, key, value = (streams[0].query.new_empty(shape) for _ in range(3))
    places = zip(*(x.split_with_sizes(lengths, 1) for x in (query, key, value)))
    for stream, operand, (q_out, k_out, v_out) in zip(streams, operands, places):
        v: Any = stream.value
        out: tuple = (q_out, k_out)
        if isinstance(v, Projection):
            v.write(v_out)
            v = None
        else:
            out = (q_out, k_out, v_out)
        options = stream.norms.options("per_head")
        functional.qk_norm_rope(
            stream.query, stream.key, rope=operand, heads=heads, v=v, out=out, **options
        )
    return query, key, value


def _operand(injected: Injected, parts: Parts, stream: Stream) -> Any:
    """The rotation that the kernel takes, None for none, or _NOT_TAKEN."""
    query, key, _, norms, rope = stream
    if not norms.of_one_launch(query, key, parts.head_dim):
        return _NOT_TAKEN
    if rope is None:
        return None
    if parts.is_trusted:
        heads = heads_of(query, parts.head_dim)
        operand = operand_of(injected, parts, rope, query, key, heads, are_alike=True)
    else:
        operand = as_operand(rope, query, query.shape[2]) if parts.rotates else None
    return _NOT_TAKEN if operand is None else operand


def _fit(streams: Sequence[Stream]) -> bool:
    """Whether streams of a call that is trusted fit into one buffer."""
    first = streams[0].query.shape
    shapes = [stream.query.shape for stream in streams[1:]]
    return all(shape[0] == first[0] and shape[2:] == first[2:] for shape in shapes)


def _is_of_one_kind(streams: Sequence[Stream]) -> bool:
    """Whether buffers for all of them can be written, each in its place."""
    tensors = [x for stream in streams for x in stream[:3] if isinstance(x, Tensor)]
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
        and all(
            len({x.shape[1] for x in stream[:3] if isinstance(x, Tensor)}) == 1
            for stream in streams
        )
        and of_one_form(*tensors)
        and not is_differentiated(*tensors, *weights)
    )


def attend_to_all(
    injected: Injected,
    parts: Parts,
    streams: Sequence[Stream],
    rotate: Callable[[Tensor, Any], Tensor],
    mask: Tensor | None = None,
    *,
    rope_of_all: Any = None,
    **options: Any,
) -> Tensor:
    """Attention over all tokens of some streams: their results, (B, S, H * d), one stream after the other.

    ``rope_of_all``: the rotation of all tokens where that of each stream is not known. ``options`` are those
    of ``attend``.
    """
    query, key, value = joint_streams(injected, parts, streams, rotate)
    if rope_of_all is not None:
        query, key, value = _by_head((query, key, value), parts.head_dim)
        query, key = rotate(query, rope_of_all), rotate(key, rope_of_all)
    if query.dim() == 3:
        heads = heads_of(query, parts.head_dim)
        return attend(injected, parts, query, key, value, mask, heads=heads, **options)
    out = attend(injected, parts, query, key, value, mask, **options)
    return as_dtype(out.flatten(2, 3), query.dtype)


def attend_jointly(
    injected: Injected, parts: Parts, streams: Sequence[Stream], *arguments: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """``attend_to_all`` of two streams: the results of each, (B, S1 or S2, H * d)."""
    out = attend_to_all(injected, parts, streams, *arguments, **options)
    first, second = out.split_with_sizes([stream.query.shape[1] for stream in streams], 1)
    return first, second


def _by_head(tensors: Sequence[Tensor], head_dim: int) -> list[Tensor]:
    return [x if x.dim() == 4 else x.unflatten(2, (-1, head_dim)) for x in tensors]


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
    and the text's, each (B, S, H * d)."""
    if parts.is_trusted:
        # One pair for all blocks.
        lengths = (text.shape[1], image.shape[1])
        forward = injected.injection.local.forward
        ropes = forward.shared(rope, lengths, partial(split_tables, rope, *lengths))
    else:
        ropes = split_tables(rope, text.shape[1], image.shape[1])
    text_rope, image_rope = ropes or (None, None)
    streams = project(module, parts, image, text, image_rope, text_rope)
    text_out, image_out = attend_jointly(
        injected,
        parts,
        streams[::-1],
        partial(parts.rotate, sequence_dim=1),
        mask,
        rope_of_all=None if ropes else rope,
    )
    return image_out, text_out
