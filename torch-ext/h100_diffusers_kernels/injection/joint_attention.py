"""Attention over two streams of tokens, such as text and image, side by side."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import functional
from ..conditions import may_write, same_dtype_and_unit_stride
from ..differentiation import is_differentiated
from .attention import NOT_TAKEN, attend, norm_and_rotate, norm_options
from .linears import linear, linears, may_be_written, write_linear
from .patch import Call
from .rotary import as_operand, split_tables

# The linear layers and norms of an attention over two streams, of the image and of the text.
_IMAGE = ("to_q", "to_k", "to_v"), ("norm_q", "norm_k")
_TEXT = ("add_q_proj", "add_k_proj", "add_v_proj"), ("norm_added_q", "norm_added_k")


class Stream(NamedTuple):
    """Tokens of one kind: query, key and value, each (B, S, H * d); the names of query's and key's norms; and
    the rotary embedding of both in the model's form, or None. The value may be yet to be computed: then
    ``value`` is what it is computed from, and the layer that does."""

    query: Tensor
    key: Tensor
    value: Any
    norms: tuple[str, str]
    rope: Any

    def value_tensor(self) -> Tensor:
        return linear(*self.value) if isinstance(self.value, tuple) else self.value


def project(
    call: Call, module: Any, image: Tensor, text: Tensor | None, image_rope: Any, text_rope: Any
) -> list[Stream]:
    """The stream of the image, and then of the text if there is any, by an attention's linear layers."""
    sources = [(image, image_rope, *_IMAGE)]
    if text is not None:
        sources.append((text, text_rope, *_TEXT))
    spec: Any = call.stand_in.spec
    if spec.project and module.fused_projections:
        packed = call.stand_in.functions[-1].function(module, image, text)
        return [
            Stream(packed[3 * i], packed[3 * i + 1], packed[3 * i + 2], norms, rope)
            for i, (_, rope, _, norms) in enumerate(sources)
        ]
    modules = module._modules
    streams = []
    for x, rope, (q, k, v), norms in sources:
        if text is None:
            query, key, value = linears(x, modules[q], modules[k], modules[v])
            return [Stream(query, key, value, norms, rope)]
        query, key = linears(x, modules[q], modules[k])
        streams.append(Stream(query, key, (modules[v], x), norms, rope))
    return streams


def _joined(
    call: Call, module: Any, streams: list[Stream], heads: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Query, key and value of all streams, one after the other, by the kernel, which writes each stream to
    its place; None where it does not take one. Values that are computed here are put into ``streams``."""
    first = streams[0].query
    how = []
    for stream in streams:
        query, key = stream.query, stream.key
        if query.shape != key.shape or query.shape[::2] != first.shape[::2]:
            return None
        operand = None
        if stream.rope is not None:
            if same_dtype_and_unit_stride(query, key):
                operand = as_operand(stream.rope, query, heads, True)
            if operand is None:
                return None
        size = query.shape[2] // heads
        options = norm_options(call, module, stream.norms, query, key, size, "per_head")
        if options is NOT_TAKEN:
            return None
        how.append((operand, options))
    if len(streams) == 1:
        query, key, (operand, options) = streams[0].query, streams[0].key, how[0]
        if operand is not None or options["norm"] != "none":
            query, key = functional.qk_norm_rope(query, key, rope=operand, heads=heads, **options)
        return query, key, streams[0].value
    for i, stream in enumerate(streams):
        value = stream.value
        if not (
            isinstance(value, tuple)
            and may_be_written(*value)
            and value[0]._parameters["weight"].shape[0] == first.shape[2]
        ):
            value = stream.value_tensor()
            streams[i] = Stream(stream.query, stream.key, value, stream.norms, stream.rope)
            if value.shape != stream.query.shape or not same_dtype_and_unit_stride(
                stream.query, value
            ):
                return None
    for stream, (_, options) in zip(streams, how):
        made = stream.value if isinstance(stream.value, Tensor) else None
        weights = options.get("q_weight"), options.get("k_weight")
        if is_differentiated(stream.query, stream.key, made, *weights):
            return None
    if not same_dtype_and_unit_stride(first, streams[1].query):
        return None
    lengths = (first.shape[1], streams[1].query.shape[1])
    query, key, value = torch.empty(
        (3, first.shape[0], sum(lengths), first.shape[2]), dtype=first.dtype, device=first.device
    ).unbind(0)
    places = (
        query.split_with_sizes(lengths, 1),
        key.split_with_sizes(lengths, 1),
        value.split_with_sizes(lengths, 1),
    )
    for stream, (operand, options), q_out, k_out, v_out in zip(streams, how, *places):
        v: Any = stream.value
        out: tuple[Tensor, ...] = (q_out, k_out, v_out)
        if isinstance(v, tuple):
            write_linear(v[0], v[1], v_out)
            v, out = None, (q_out, k_out)
        functional.qk_norm_rope(
            stream.query, stream.key, rope=operand, heads=heads, v=v, out=out, **options
        )
    return query, key, value


def attend_to_all(
    call: Call,
    module: Any,
    streams: list[Stream],
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
    head_dim = module.__dict__.get("head_dim") or module.inner_dim // module.heads
    heads = streams[0].query.shape[2] // head_dim
    joint: Any = None
    if call.state is not None or len(streams) == 1 or may_write():
        joint = _joined(call, module, streams, heads)
    if joint is None:
        each = [
            norm_and_rotate(
                call, module, s.norms, s.query, s.key, s.rope, rotate, "per_head", heads
            )
            + (s.value_tensor(),)
            for s in streams
        ]
        joint = each[0] if len(each) == 1 else tuple(torch.cat(x, dim=1) for x in zip(*each))
    query, key, value = joint
    if rope_of_all is not None:
        query, key = (
            rotate(x.unflatten(2, (heads, -1)), rope_of_all).flatten(2) for x in (query, key)
        )
    return attend(call, module, query, key, value, mask, heads=heads, **options)


def attend_jointly(
    call: Call, module: Any, streams: list[Stream], *arguments: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """``attend_to_all`` of two streams: the results of each, (B, S1 or S2, H * d)."""
    lengths = (streams[0].query.shape[1], streams[1].query.shape[1])
    out = attend_to_all(call, module, streams, *arguments, **options)
    first, second = out.split_with_sizes(lengths, 1)
    return first, second


def attend_with_tables(
    call: Call, module: Any, image: Tensor, text: Tensor, rope: Any, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention over an image and the text before it, of which ``rope`` has the tables: the image's results
    and the text's, each (B, S, H * d)."""
    lengths = (text.shape[1], image.shape[1])
    ropes = None
    if rope is not None:
        split = partial(split_tables, first=lengths[0], second=lengths[1])
        ropes = call.shared(f"tables {lengths}", rope, split)
    text_rope, image_rope = ropes or (None, None)
    streams = project(call, module, image, text, image_rope, text_rope)
    text_out, image_out = attend_jointly(
        call,
        module,
        streams[::-1],
        partial(call.stand_in.functions[1].function, sequence_dim=1),
        mask,
        rope_of_all=None if ropes else rope,
    )
    return image_out, text_out


# --------------------------------------------------------------------------------------------------
# Tokens of two streams as one


def joined(call: Call, first: Tensor, second: Tensor) -> Tensor:
    """Both (B, S1 or S2, D) as one (B, S1 + S2, D).

    Without a copy where they are neighbours in one buffer, as a block leaves them that splits what it has
    joined.
    """
    if call.state is not None and _are_neighbours(first, second):
        return concat_view(first, second)
    return torch.cat([first, second], dim=1)


def concat_view(first: Tensor, second: Tensor) -> Tensor:
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
