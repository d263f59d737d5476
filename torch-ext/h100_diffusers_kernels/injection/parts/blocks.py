"""Blocks, and halves of blocks, that several families share.

FLUX.1's blocks are of image and text. A double block has a stream each, joint attention and separate
feed-forwards. A single block has one stream of both, and its feed-forward reads the same norm as its
attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.patch import Call
from ..parallel.exchange import Meanwhile
from .linears import (
    QUERY_KEY_VALUE,
    TEXT_QUERY_KEY_VALUE,
    feed_forward_branch,
    feed_forward_reader,
    fp8_readers,
    linear_and_gelu,
    linear_of_concat,
)
from .norms import clip_to_float16, read_norm
from .streams import (
    BlockSpec,
    FirstNorm,
    FirstNorms,
    Readers,
    Stream,
    adaptive_norm,
    end,
    start,
    take_over,
)

# What reads the first norms of image and text, and that of a single block.
IMAGE_READERS = partial(fp8_readers, "attn", QUERY_KEY_VALUE)
TEXT_READERS = partial(fp8_readers, "attn", TEXT_QUERY_KEY_VALUE)
SINGLE_READERS = partial(fp8_readers, "attn", QUERY_KEY_VALUE, others=("proj_mlp",))
DOUBLE_NORMS = (
    partial(adaptive_norm, name="norm1", readers=IMAGE_READERS),
    partial(adaptive_norm, name="norm1_context", readers=TEXT_READERS),
)
SINGLE_NORMS = (partial(adaptive_norm, name="norm", readers=SINGLE_READERS),)
# The second norm and the feed-forward of each stream.
FEED_FORWARDS = (("norm2", "ff"), ("norm2_context", "ff_context"))


def add_feed_forwards(block: Any, *streams: Stream, names: Any = FEED_FORWARDS) -> None:
    """Adds to each stream the feed-forward of its second norm, whose rows are the last three."""
    for stream, (norm, ff) in zip(streams, names):
        shift, scale, gate = stream.rows[3:6]
        n = stream.norm(norm, scale, shift, readers=partial(feed_forward_reader, ff))
        stream.add(feed_forward_branch(block._modules[ff], n), gate)


def add_between_norms(
    stream: Stream,
    out: Any,
    norms: Sequence[str],
    feed_forward: Callable,
    readers: Any,
) -> None:
    """Adds ``norm(out)`` of an attention and ``norm(feed_forward(norm(x)))``, by the norms with these names.

    The rows of a modulated stream end with the gate of attention, and scale and gate of the feed-forward. A
    gate's tanh is applied.
    """
    gate, scale, gate_mlp = stream.rows[-3:] or (None, None, None)
    is_modulated = gate is not None
    stream.add(out, gate, norms[0], tanh_gate=is_modulated)
    n = stream.norm(norms[1], *((scale, None) if is_modulated else ()), readers=readers)
    stream.add(feed_forward(n), gate_mlp, norms[2], tanh_gate=is_modulated)


def double_block(
    call: Call,
    block: Any,
    first_norms: FirstNorms,
    tokens: tuple[Tensor, Tensor],
    conditions: tuple[Any, ...],
    names: Any = FEED_FORWARDS,
    hands_over: bool = True,
    clips: bool = True,
    **attention_arguments: Any,
) -> tuple[Tensor, Tensor]:
    """Image and text after a double block. With an IP-Adapter the attention has a third result, which is
    added to the image. ``clips``: whether the model clips the text to float16's range."""
    image, text = streams = start(call, block, first_norms, tokens, conditions)
    outs = block._modules["attn"](
        hidden_states=image.n, encoder_hidden_states=text.n, **attention_arguments
    )
    for stream, out in zip(streams, outs):
        stream.add(out, stream.rows[2])
    add_feed_forwards(block, *streams, names=names)
    is_exact = not clips or tokens[0].dtype != torch.float16
    x, c = end(*streams, hands_over=hands_over and is_exact and len(outs) == 2)
    for out in outs[2:]:
        x = x + out
    return x, clip_to_float16(c) if clips else c


def single_block(
    call: Call,
    block: Any,
    first_norms: FirstNorms,
    tokens: tuple[Tensor, ...],
    conditions: tuple[Any, ...],
    attend: Any,
    mlp_of: Any = linear_and_gelu,
    hands_over: bool = True,
    clips: bool = True,
) -> Any:
    """The tokens after a single block. ``attend(n)`` calls its attention. ``mlp_of`` computes the
    feed-forward's part of the input of ``proj_out``. ``clips``: whether the model clips them to float16's
    range."""
    (stream,) = start(call, block, first_norms, tokens, conditions)
    modules = block._modules
    proj_out = modules["proj_out"]
    feed_forward = (modules["proj_mlp"], modules["act_mlp"], stream.n, proj_out)
    with Meanwhile(call, partial(mlp_of, *feed_forward)) as mlp:
        attended = attend(stream.n)
    out = linear_of_concat(call, proj_out, attended, mlp.result)
    stream.add(out, stream.rows[2])
    length = tokens[0].shape[1]

    def as_returned(results: Sequence[Tensor]) -> Sequence[Tensor]:
        x = clip_to_float16(results[0]) if clips else results[0]
        # Views that may be written to, unlike those of `split`.
        return (x,) if len(tokens) == 1 else (x[:, :length], x[:, length:])

    is_exact = not clips or tokens[0].dtype != torch.float16
    return end(stream, hands_over=hands_over and is_exact, as_returned=as_returned)


# --------------------------------------------------------------------------------------------------
# One module with the norms of two streams


class NormOfBoth(NamedTuple):
    """An adaptive norm that a block calls with both streams and the time embedding.

    Attributes:
        name: of the module in the block.
        rows: each stream's rows of the modulation: shift, scale, gate, and others.
        results: each stream's results of the module: the norm, gate, and others.
        readers: of each stream; see ``streams.Readers``.
        norms: the name of each stream's norm in the module.
        modulation_of: see ``adaptive_norm``.
    """

    name: str
    rows: tuple[slice, slice]
    results: tuple[slice, slice]
    readers: tuple[Readers, Readers]
    norms: tuple[str, str] = ("norm", "norm")
    modulation_of: Callable[..., Any] | None = None

    def start(self, call: Call, block: Any, tokens: tuple[Tensor, Tensor], temb: Tensor) -> Any:
        """``streams.start`` of both streams."""
        handed = take_over(call, block, (*tokens, temb))
        of_next: list[Any] = []

        def read(call: Call, block: Any, previous_x: Tensor, temb: Tensor, index: int) -> Any:
            if index == 0:
                of_next[:] = self._read(call, block, previous_x, temb)
            return of_next[index]

        both = []
        for index, x in enumerate(tokens):
            both.append(Stream(call, block, x, partial(read, index=index), (temb,)))
        if handed is None:
            self.apply(call, block, both, temb)
        else:
            for stream, (n, rows) in zip(both, handed):
                stream.n, stream.rows = n, rows
        return both

    def apply(self, call: Call, block: Any, both: Sequence[Stream], temb: Tensor) -> None:
        """Sets ``n`` and ``rows`` of both streams."""
        norms = self._read(call, block, None, temb)
        if norms[0] is not None:
            for stream, norm in zip(both, norms):
                stream.apply(norm)
            return
        made = block._modules[self.name](*[stream.x for stream in both], temb)
        for stream, places in zip(both, self.results):
            stream.n, *rows = made[places]
            rows = [row.unsqueeze(1) if row.dim() == 2 else row for row in rows]
            stream.rows = (None, None, *rows)  # replaced by the norm's result

    def _read(self, call: Call, block: Any, previous_x: Tensor | None, temb: Tensor) -> list[Any]:
        """The norms as functions of ``FirstNorms`` return them. Both are None if the module has to compute
        them."""
        options: Any = {"name": self.name, "modulation_of": self.modulation_of}
        both = adaptive_norm(call, block, previous_x, temb, **options)
        if type(both) is not FirstNorm:
            return [None, None]
        norms: list[Any] = [both.norm, both.norm]
        if self.norms[0] != self.norms[1]:
            norms[1] = read_norm(both.owner._modules.get(self.norms[1]))
        pairs = both.modulation[:2], both.modulation[2:]
        each = []
        for norm, name, pair, places, readers in zip(
            norms, self.norms, pairs, self.rows, self.readers
        ):
            rows = both.rows[places]
            each.append(FirstNorm(norm, both.owner, name, pair, rows, readers, block))
        return each


def attend_to_both(
    call: Call, block: Any, norm: NormOfBoth, tokens: Any, temb: Tensor, **arguments: Any
) -> Any:
    """Both streams of a block, with the result of its attention ``attn1`` added."""
    first, second = both = norm.start(call, block, tokens, temb)
    attn = block._modules["attn1"]
    outs = attn(hidden_states=first.n, encoder_hidden_states=second.n, **arguments)
    for stream, out in zip(both, outs):
        stream.add(out, stream.rows[2])
    return both


# --------------------------------------------------------------------------------------------------
# FLUX.1's blocks, of which other models have copies


def _flux_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
    *,
    is_double: bool,
    options: dict[str, Any] = {},  # noqa: B006 (only read)
) -> tuple[Tensor, Tensor]:
    """``options``: of ``double_block`` or ``single_block``."""
    x, c = hidden_states, encoder_hidden_states
    if not call.takes(x, c, temb):
        return NotImplemented
    more = {"image_rotary_emb": image_rotary_emb, **(joint_attention_kwargs or {})}
    if is_double:
        return double_block(call, self, DOUBLE_NORMS, (x, c), (temb,), **options, **more)[::-1]

    def attend(n: Any) -> Tensor:
        return self._modules["attn"](hidden_states=n, **more)

    return single_block(call, self, SINGLE_NORMS, (c, x), (temb,), attend, **options)


double_forward = partial(_flux_forward, is_double=True)
single_forward = partial(_flux_forward, is_double=False)
double_spec = partial(BlockSpec, forward=double_forward)
single_spec = partial(BlockSpec, forward=single_forward)
