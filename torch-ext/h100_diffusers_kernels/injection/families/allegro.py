"""Allegro: how its transformer maps to the operations.

Its block is PixArt's (``families.pixart``), with a rotary embedding of query and key in attn1: a token's
frame, row and column rotate one third of each head, in one launch each.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from ... import operations
from ...operations.conditions import is_differentiated, may_write
from ..attention import modules as attention
from ..core.forward_state import Family, model_spec
from ..core.patch import Call
from ..parallel.exchange import mask_of_rank, rank_and_size
from ..parallel.plans import two_streams
from ..parts import linears
from ..parts.embeddings import TIMESTEPS
from ..parts.rotary import part_of_tables, rope_operand
from ..parts.streams import BlockSpec
from ..quantized.precision import ONE_LIST
from .pixart import ARGUMENTS, ONCE, attention_spec, run_block

_ALLEGRO = "diffusers.models.transformers.transformer_allegro"


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Any = None,
    temb: Any = None,
    attention_mask: Any = None,
    encoder_attention_mask: Any = None,
    image_rotary_emb: Any = None,
) -> Any:
    c, rope = encoder_hidden_states, image_rotary_emb
    if hidden_states.dim() != 3 or hidden_states.shape[1] == 1:
        return NotImplemented  # the class drops the dimension of one token
    own = {"encoder_hidden_states": None, "attention_mask": attention_mask}
    cross = {"encoder_hidden_states": c, "attention_mask": encoder_attention_mask}
    own, cross = {**own, "image_rotary_emb": rope}, {**cross, "image_rotary_emb": None}
    return run_block(call, self, hidden_states, temb, own, cross)


def _attention_forward(
    self, call: Call, hidden_states, encoder_hidden_states=None, attention_mask=None, **kwargs
) -> Any:
    x, c, mask = hidden_states, encoder_hidden_states, attention_mask
    rope = kwargs.pop("image_rotary_emb", None)
    if kwargs or not attention.is_plain(self, x) or not call.takes(x, c):
        return NotImplemented
    # Each rank has all of the text.
    config = attention.context_parallel_of(call, self) if c is None else None
    query, key, value = attention.query_key_value(self, x, c, config=config)
    if rope is not None and not self.is_cross_attention:
        query, key = _rotated(call, query, key, rope, self.heads, config)
    if mask is not None and config is not None:
        mask = mask_of_rank(config, mask, x.shape[1])
    options: Any = {"prepares_mask": True, "dropout_p": 0.0, "is_causal": False}
    options.update(heads=self.heads, config=config)
    out = attention.attend(call, self, query, key, value, mask, **options)
    return attention.project_out(self, out, x)


def _rotated(
    call: Call, query: Tensor, key: Tensor, rope: Any, heads: int, config: Any
) -> tuple[Tensor, ...]:
    """Query and key (B, S, H * d) as the processor rotates them."""
    name, make = ("tables", query.shape[1]), partial(_tables, length=query.shape[1], config=config)
    tables = call.shared(name, rope, make)
    both = query, key
    parts = [y.unflatten(2, (heads, -1)).chunk(3, dim=-1) for y in both]
    operands = []
    for table, part in zip(tables, parts[0]):
        rotated = query[..., : heads * part.shape[3]]
        operands.append(rope_operand(table, rotated, heads, True))
    if (
        None in operands
        or query.shape != key.shape
        or not may_write()
        or is_differentiated(query, key)
    ):
        rotated_parts = [map(_rotated_part, each, tables) for each in parts]
        return tuple([torch.cat([*each], dim=-1).flatten(2) for each in rotated_parts])
    outs = [y.new_empty(y.shape) for y in both]
    places = [y.unflatten(2, (heads, -1)).chunk(3, dim=-1) for y in outs]
    for operand, q, k, *out in zip(operands, *parts, *places):
        options: Any = {"norm": "none", "layout": "half", "out": tuple(out)}
        operations.qk_norm_rope(q, k, rope=operand, heads=heads, **options)
    return tuple(outs)


def _rotated_part(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    (cos, sin), (first, second) = tables, x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


def _tables(rope: Any, length: int, config: Any) -> list[Any]:
    """Cosines and sines of each third of a head, (1 or B, S, 1, d / 3); with context parallelism those of
    this rank's tokens."""
    results = []
    for axis, positions in zip(*rope):
        pair: Any = tuple([embedding(positions, table) for table in axis])
        if config is not None and positions.shape[1] != length:
            pair = part_of_tables(pair, *rank_and_size(config))
        results.append(tuple([table.unsqueeze(2) for table in pair]))
    return results


_SPECS = (
    model_spec(
        f"{_ALLEGRO}:AllegroTransformer3DModel",
        "transformer_blocks",
        plan=partial(two_streams, names=("hidden_states",)),
    ),
    BlockSpec(f"{_ALLEGRO}:AllegroTransformerBlock", _block_forward),
    attention_spec(
        forward=_attention_forward,
        operations="qk_norm_rope",
        processor="diffusers.models.attention_processor:AllegroAttnProcessor2_0",
        processor_parameters=f"{ARGUMENTS} temb image_rotary_emb",
        rotate="diffusers.models.embeddings:apply_rotary_emb_allegro",
    ),
    TIMESTEPS,
    linears.LINEAR_GELU,
)
FAMILIES = (Family("Allegro", _SPECS, ONCE, ONE_LIST),)
