"""Qwen-Image 2.1: how its transformer maps to the operations.

Text, condition images and the target image are one stream. All blocks share one modulation, and a block is

    x = x + tanh(gate) * attention(layer_norm(x) * (1 + scale))
    x = x + tanh(gate_mlp) * mlp(layer_norm(x) * (1 + scale_mlp))

with an RMS norm of each head's query and key, a complex rotary embedding of both, and mlp(x) = out(silu(
gate_layer(x)) * proj(x)). Tokens of the target choose the modulation of their sample's timestep, others that
of timestep 0. Attention is causal from one segment to the next, and inside of text: each query attends to the
keys up to its own, or up to the end of its image. Then the tokens before the target are the same in each
step, and later steps read their keys and values from a cache.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...operations.key_blocks import KeyBlocks, causal_bounds, is_block_mask
from ..attention.decision import shared_key_bias
from ..attention.modules import (
    AttentionSpec,
    attend,
    attend_by_blocks,
    attend_by_mask,
    project_and_rotate,
    project_out,
)
from ..core.forward_state import Family, model_spec
from ..core.patch import Call, PatchSpec
from ..parts import norms
from ..parts.blocks import IMAGE_READERS
from ..parts.linears import fp8_readers, gated_feed_forward, linear, why_not_silu
from ..parts.streams import BlockSpec, end, plain_norm, start
from ..quantized.precision import ATTENTION_LAYERS, ONE_LIST

_QWEN = "diffusers.models.transformers.transformer_qwenimage21"
_BLOCK_CLASS = f"{_QWEN}:QwenImage21TransformerBlock"
_MODULATE = f"{_BLOCK_CLASS}._modulate"
_SELECT_ROWS = f"{_QWEN}:_select_modulation_rows"


def _by_token(call: Call, table: Tensor, mask: Tensor | None) -> norms.Modulator:
    """The rows of a table (B, D), or (B + 1, D) with a last row for tokens outside of the mask (S,)."""
    if mask is None:
        return table.unsqueeze(1)
    last = table.shape[0] - 1

    def make(mask: Tensor) -> Tensor:
        samples = torch.arange(last, dtype=torch.int32, device=mask.device)
        return torch.where(mask, samples[:, None], last)

    return norms.RowsByToken(table, call.shared(("index", last), mask, make))


def _modulator_tables(modulation: Tensor) -> tuple[Tensor, ...]:
    scale, gate, scale_mlp, gate_mlp = modulation.chunk(4, dim=-1)
    return scale, gate.tanh(), scale_mlp, gate_mlp.tanh()


def _first_norm(call: Call, block, previous_x, modulation, mask) -> Any:
    """Rows are None, scale and gate of attention, then of the feed-forward."""

    def rows_of() -> tuple:
        tables = call.shared("tables", modulation, _modulator_tables)
        return (None, *[_by_token(call, table, mask) for table in tables])

    options: Any = {"name": "img_norm1", "rows_of": rows_of, "readers": IMAGE_READERS}
    return plain_norm(call, block, previous_x, **options)


_FF_READERS = partial(fp8_readers, "img_mlp", ("gate_layer", "proj"))


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    modulation: Tensor,
    rotary_emb: Tensor | None = None,
    attention_mask: Any = None,
    target_token_mask: Tensor | None = None,
    layer_cache: Any = None,
    kv_cache_mode: str | None = None,
    cache_write_slice: slice | None = None,
    segments: Any = None,
    key_valid: Tensor | None = None,
) -> Tensor:
    x, modules = hidden_states, self._modules
    if not call.takes(x, modulation):
        return NotImplemented
    (s,) = start(call, self, (_first_norm,), (x,), (modulation, target_token_mask))
    _, _, gate, scale_mlp, gate_mlp = s.rows
    masks = {"attention_mask": attention_mask, "segments": segments, "key_valid": key_valid}
    cache = {"kv_cache_mode": kv_cache_mode, "cache_write_slice": cache_write_slice}
    options = {"rotary_emb": rotary_emb, "layer_cache": layer_cache, **masks, **cache}
    s.add(modules["attn"](hidden_states=s.n, **options), gate)
    s.add(modules["img_mlp"](s.norm("img_norm2", scale_mlp, None, readers=_FF_READERS)), gate_mlp)
    return norms.clip_to_float16(end(s, hands_over=x.dtype != torch.float16))


def _attention_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    attention_mask: Any = None,
    rotary_emb: Tensor | None = None,
    layer_cache: Any = None,
    kv_cache_mode: str | None = None,
    cache_write_slice: slice | None = None,
    segments: Any = None,
    key_valid: Tensor | None = None,
) -> Tensor:
    x = hidden_states
    if not call.takes(x):
        return NotImplemented
    rotate = partial(call.stand_in.functions[1].function, use_real=False)
    head_dim = self.inner_dim // self.heads
    options: dict[str, Any] = {"head_dim": head_dim, "keeps_dtype": True}
    query, key, value = project_and_rotate(call, self, x, None, rotary_emb, rotate, **options)
    heads = query.shape[2] // head_dim
    if layer_cache is not None and kv_cache_mode == "extract" and cache_write_slice is not None:
        kept = (t.unflatten(2, (heads, head_dim))[:, cache_write_slice] for t in (key, value))
        layer_cache.store(*[tensor.clone() for tensor in kept])
    elif layer_cache is not None and kv_cache_mode == "cached":
        prefixes = [tensor.flatten(2) for tensor in layer_cache.get()]
        key, value = (torch.cat(pair, dim=1) for pair in zip(prefixes, (key, value)))
    operands = call, self, query, key, value
    spec: Any = call.stand_in.spec
    if spec.is_other(self) and is_block_mask(attention_mask):
        # The mask is for lengths that are padded to its blocks.
        padding = attention_mask.seq_lengths[0] - query.shape[1]
        out = attend_by_mask(*operands, attention_mask, heads, padding)
    elif segments is None:
        out = attend(*operands, attention_mask, heads=heads, dropout_p=0.0)
    else:
        out = _attend_by_segments(*operands, segments, key_valid, head_dim)
    return project_out(self, out)


def _attend_by_segments(
    call: Call,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: list[tuple[int, int, bool]],
    key_valid: Tensor | None,
    head_dim: int,
) -> Tensor:
    # Without a chosen backend, as the processor.
    options: dict[str, Any] = {"heads": query.shape[2] // head_dim, "dropout_p": 0.0}
    options["backend"] = None

    def mask_until(last: int) -> Any:
        if key_valid is None:
            return None
        return call.shared(("valid", last), key_valid, lambda valid: valid[:, None, None, :last])

    outs = []
    target = segments[-1][1] if segments else 0, query.shape[1], False
    for first, last, is_text in (*segments, target):
        operands = query[:, first:last], key[:, :last], value[:, :last], mask_until(last)
        if is_text:
            outs.append(_attend_in_text(call, module, *operands, segments, first, head_dim))
        else:
            outs.append(attend(call, module, *operands, **options))
    return torch.cat(outs, dim=1)


def _attend_in_text(
    call: Call, module: Any, query, key, value, mask, segments: Any, start: int, head_dim: int
) -> Tensor:
    """Attention of a segment of text, from ``start`` on, to the keys up to each query."""
    length, last = query.shape[1], key.shape[1]

    def blocks_of() -> KeyBlocks:
        def make(_: Any) -> Tensor:
            return causal_bounds(length, query.device, start)

        return KeyBlocks(key_bounds=call.shared(("bounds", start), segments, make))

    bias = None if mask is None else shared_key_bias(call, mask, key, False)
    if mask is None or bias is not None:
        options = {"heads": query.shape[2] // head_dim, "key_bias": bias}
        found = attend_by_blocks(call, module, query, key, value, blocks_of, **options)
        if found is not None:
            return found
    is_seen = torch.ones(length, last, dtype=torch.bool, device=query.device).tril(start)
    out = sys.modules[_QWEN].dispatch_attention_fn(
        *[x.unflatten(2, (-1, head_dim)) for x in (query, key, value)],
        attn_mask=is_seen[None, None] if mask is None else is_seen & mask,
        dropout_p=0.0,
        backend=None,
        parallel_config=module.processor._parallel_config,
    )
    return out.flatten(2, 3).type_as(query)


def _feed_forward_forward(self: Any, call: Call, hidden_states: Tensor) -> Tensor:
    names = {"gate": "gate_layer", "value": "proj", "out": "out"}
    return gated_feed_forward(self, call, hidden_states, **names)


def _output_norm_forward(
    self: Any, call: Call, hidden_states, conditioning_embedding, target_token_mask=None
) -> Tensor:
    x, modules = hidden_states, self._modules
    if not call.takes(x):
        return NotImplemented
    embedding = torch.nn.functional.silu(conditioning_embedding).to(x.dtype)
    scale = _by_token(call, linear(modules["linear"], embedding), target_token_mask)
    return norms.chosen_norm_modulate(call, self, "norm", x, scale, None)


def _why_not(module: Any, name: str) -> str | None:
    return why_not_silu(module._modules.get(name))


_SPECS = (
    model_spec(f"{_QWEN}:QwenImage21Transformer2DModel", "transformer_blocks"),
    BlockSpec(_BLOCK_CLASS, _block_forward, functions=(_MODULATE, _SELECT_ROWS)),
    AttentionSpec(
        f"{_QWEN}:QwenImage21Attention",
        _attention_forward,
        "qk_norm_rope",
        parameters="self hidden_states kwargs",
        processor_parameters="hidden_states attention_mask rotary_emb layer_cache kv_cache_mode"
        " cache_write_slice segments key_valid",
        rotate="apply_rotary_emb_qwen",
        project="_qwenimage21_prepare_qkv",
        other_processor=f"{_QWEN}:QwenImage21FlexAttnProcessor",
    ),
    PatchSpec(
        f"{_QWEN}:QwenImage21SwiGLUFeedForward",
        _feed_forward_forward,
        "swiglu",
        ("torch.nn.functional:silu",),
        condition=partial(_why_not, name="activation_fn"),
    ),
    PatchSpec(
        f"{_QWEN}:QwenImage21AdaLayerNormContinuous",
        _output_norm_forward,
        "layer_norm_modulate",
        (_SELECT_ROWS,),
        condition=partial(_why_not, name="silu"),
    ),
)
_ONCE = ("pos_embed", "time_text_embed", "txt_in", "img_in", "modulation", "proj_out")
_LAYERS = ONE_LIST._replace(layers=(*ATTENTION_LAYERS, "img_mlp.*"), ends=2)
FAMILIES = (Family("Qwen-Image 2.1", _SPECS, _ONCE, _LAYERS),)
