"""Blocks and attention of HunyuanVideo 1.0 and 1.5, FramePack and HunyuanImage.

Attention is joint, with the image before the text. Only the image is rotated, and the text is padded. All
keys of the image are valid. The video models put the valid text first, so their mask is a number of keys for
each sample. HunyuanImage may pass any mask of the text; it becomes a bias.

Version 1.5 also masks the queries of the padding, with a mask (B, 1, S, S) that each block makes anew. A
query without keys gets zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...conditions import kernels_take
from ..attention.modules import (
    ROTATED_ATTENTION,
    AttentionSpec,
    attend_jointly,
    attend_to_all,
    concat_streams,
    context_parallel_of,
    inputs_taken,
    key_lengths_of,
    project,
    project_out,
    project_text_out,
)
from ..core.patch import Call
from ..parallel.exchange import mask_of_rank
from ..parts.linears import linear_and_gelu, linear_of_concat
from ..parts.streams import (
    FEED_FORWARDS,
    PrologueMakers,
    ResidualBranch,
    begin,
    begin_joint,
    feed_forwards,
    finish,
)


def _attend(block: Any, call: Call, x: Any, c: Any, mask: Any, rope: Any) -> tuple[Tensor, Tensor]:
    if call.state is not None:
        call.state.block_mask = mask
    streams = {"hidden_states": x, "encoder_hidden_states": c}
    return block._modules["attn"](**streams, attention_mask=mask, image_rotary_emb=rope)


def double_block(
    block: Any,
    call: Call,
    makers: PrologueMakers,
    x: Tensor,
    c: Tensor,
    conditions: tuple[Any, ...],
    mask: Any,
    rope: Any,
) -> tuple[Tensor, Tensor]:
    """A block of image x and text c. ``makers`` and ``conditions``, first the embeddings, as in ``begin``."""
    if not kernels_take(x, c, *conditions[:2]):
        return call.refuse(x, c, *conditions[:2])
    normalized, rows = zip(*begin(call, block, makers, (x, c), conditions))
    outs = _attend(block, call, normalized[0][0], normalized[1][0], mask, rope)
    branches = feed_forwards(call, block, FEED_FORWARDS, (x, c), outs, rows)
    return finish(call, block, makers, branches, conditions)  # type: ignore[return-value]


def single_block(
    block: Any,
    call: Call,
    makers: PrologueMakers,
    x: Tensor,
    c: Tensor,
    conditions: tuple[Any, ...],
    mask: Any,
    rope: Any,
) -> tuple[Tensor, Tensor]:
    """A block of the concat of both. Query, key, value and feed-forward take the same norm."""
    if not kernels_take(x, c, *conditions[:2]):
        return call.refuse(x, c, *conditions[:2])
    length, modules = x.shape[1], block._modules
    proj_out = modules["proj_out"]
    x, ((n,), (_, _, gate)) = begin_joint(call, block, makers[0], x, c, conditions)
    mlp_out = linear_and_gelu(modules["proj_mlp"], modules["act_mlp"], n, proj_out)
    outs = _attend(block, call, n[:, :length], n[:, length:], mask, rope)
    out = linear_of_concat(call, proj_out, concat_streams(call, *outs), mlp_out)

    def as_returned(results: Any) -> tuple[Tensor, Tensor]:
        return results[0][:, :length], results[0][:, length:]

    arguments = (call, block, makers, (ResidualBranch(x, out, gate),), conditions)
    return finish(*arguments, as_returned=as_returned)  # type: ignore[return-value]


def _attention_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
    *,
    is_prefix: bool = True,
    masks_text: bool = False,
    **kwargs,
) -> Any:
    """``is_prefix``: whether the model puts valid keys before the padding. ``masks_text``: whether the mask
    is (B, T) of the text, not (B, 1, 1, S) of all keys."""
    x, c, rope, modules = hidden_states, encoder_hidden_states, image_rotary_emb, self._modules
    if kwargs or c is None or not (rope is None or _is_pair_of_tables(rope)):
        return NotImplemented
    if not inputs_taken(x, c):
        return call.refuse(x, c)
    rotate = partial(call.stand_in.functions[1].function, sequence_dim=1)
    length, mask = x.shape[1], attention_mask
    options: dict[str, Any] = {}
    if mask is not None:
        if masks_text:
            if mask.shape[0] != x.shape[0]:
                return NotImplemented  # the model's own code raises
            mask = call.shared(("mask", length), mask, partial(_mask_of_all, count=length))
        config = context_parallel_of(call, self)
        if config is not None:
            mask = mask_of_rank(config, mask, length, c.shape[1])
        elif is_prefix:
            shape = x.shape[0], length + c.shape[1]
            options = key_lengths_of(call, attention_mask, mask, *shape)
    if modules.get("add_q_proj") is not None:
        streams = project(call, self, x, c, rope, None)
        out, c_out = attend_jointly(call, self, streams, rotate, mask, **options)
        if masks_text and mask is not None:
            of_padding = call.shared("padding", mask, lambda m: ~m[:, 0, 0, length:, None])
            c_out = c_out.masked_fill(of_padding, 0)
        return project_out(self, out, x), project_text_out(self, c_out, c)
    if rope is not None:
        extend = partial(_extended, count=c.shape[1])
        rope = call.shared(("tables", c.shape[1]), rope, extend)
    streams = project(call, self, concat_streams(call, x, c), None, rope, None)
    out = attend_to_all(call, self, streams, rotate, mask, **options)
    return project_out(self, out[:, :length]), out[:, length:]


def _is_pair_of_tables(rope: Any) -> bool:
    is_pair = isinstance(rope, (tuple, list)) and len(rope) == 2
    return is_pair and all(isinstance(table, Tensor) and table.dim() == 2 for table in rope)


def _extended(rope: Any, count: int) -> tuple[Tensor, Tensor]:
    """Tables (S, d) of the image with rows for tokens of text, which they do not rotate."""
    cos, sin = rope
    shape = (count, cos.shape[1])
    return torch.cat([cos, cos.new_ones(shape)]), torch.cat([sin, sin.new_zeros(shape)])


def _mask_of_all(mask: Tensor, count: int) -> Tensor:
    """The mask (B, 1, 1, S) of ``count`` keys of the image, which are valid, and of the text."""
    return torch.nn.functional.pad(mask, (count, 0), value=True).bool()[:, None, None]


@dataclass(frozen=True, eq=False)
class _JointAttention(AttentionSpec):
    """Attention of the blocks. Those of the text's refiner, of the same class, attend to the text alone."""

    def matches(self, module: Any) -> bool:
        matches = super().matches(module)
        return matches and bool(module.pre_only or module.added_kv_proj_dim is not None)


def joint_attention(processor: str, **how: Any) -> AttentionSpec:
    """``how``: see ``_attention_forward``."""
    return _JointAttention(
        "diffusers.models.attention_processor:Attention",
        partial(_attention_forward, **how),
        "qk_norm_rope",
        processor=processor,
        splits_masks=False,
        **ROTATED_ATTENTION,
    )
