"""Kandinsky 5, and the super-resolution of Kandinsky 6: how their transformers map to the operations.

A block computes in float32 between its linear layers, with hidden states in the model's dtype,

    n = layer_norm(x) * (1 + scale) + shift;  x = x + gate * self_attention(n)
    n = layer_norm(x) * (1 + scale) + shift;  x = x + gate * cross_attention(n, text)
    n = layer_norm(x) * (1 + scale) + shift;  x = x + gate * feed_forward(n)

with an RMS norm of each head's query and key, a rotary embedding of both in self-attention, and a GELU.
Blocks of the text and of super-resolution have no second line.

With NABLA self-attention compares the means of 64 queries and of 64 keys, and each block of queries attends
to the blocks of keys with most of its weight. Kandinsky 5 rounds rotated queries and keys to bfloat16 in each
dtype, so self-attention in float16 and float32 runs its own code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...operations.key_blocks import KeyBlocks
from ..attention import modules as attention
from ..attention.decision import dispatch_of, shared_key_bias
from ..core.checks import KnownClass, KnownClasses, is_stock
from ..core.forward_state import Family, model_spec
from ..core.patch import Call
from ..core.quantized_rows import QuantizedRows
from ..parallel.exchange import mask_of_rank, rank_and_size
from ..parallel.plans import warn_before_injection
from ..parts import linears, streams
from ..parts.embeddings import TIMESTEPS
from ..parts.norms import Upcasts
from ..parts.rotary import rotated_in_float32, tables_of_matrices
from ..quantized.precision import Layers

MODELS = "diffusers.models.transformers.transformer_kandinsky"
_FIVE, _SR = f"{MODELS}:Kandinsky5", f"{MODELS}6_sr:Kandinsky6SR"
MODULATIONS = KnownClasses(*((KnownClass(f"{path}Modulation"),) for path in (_FIVE, _SR)))
_FEED_FORWARD = KnownClass(f"{_FIVE}FeedForward")
linears.FEED_FORWARDS.add(_FEED_FORWARD, ("in_layer", "activation", "out_layer"))
QUERY_KEY_VALUE = ("to_query", "to_key", "to_value")
_TOKENS = 64  # of a block of NABLA


def _key(call: Call, name: str, x: Any, *others: Any) -> Any:
    """A name for ``call.shared`` of one of several x. Compiled code would have a graph for each."""
    return name if call.state is None else (name, id(x), *others)


def modulation(call: Call, module: Any, temb: Tensor) -> Tensor:
    """All rows, (B, 1, N * D), in float32, in which the blocks compute with them."""
    entry, modules = MODULATIONS.by_class.get(type(module)), module._modules
    layer, known = modules.get("out_layer"), entry and is_stock(module, entry[0])
    if known and is_stock(modules.get("activation"), linears.SILU):
        weight = linears.below_adapters(layer)._parameters.get("weight")
        if weight is not None and weight.dtype.is_floating_point:
            cast = lambda temb: temb.to(weight.dtype)  # noqa: E731
            x = call.shared(_key(call, "temb", temb, weight.dtype), temb, cast)
            made: Any = streams.linear_of_silu(call, layer, x, None, _key(call, "silu", x))
            return made.float().unsqueeze(1)
    return module(temb).float().unsqueeze(1)


def first_norm(
    call: Call,
    block: Any,
    previous_x: Tensor | None,
    *tembs: Tensor,
    attention: str = "self_attention",
    modulated_by: str = "visual_modulation",
    count: int = 6,
    stream: tuple[str, int] | None = None,
) -> Any:
    """Rows are shift, scale and gate of each branch, ``count`` in all. ``stream``: the part of the block that
    has one of several streams, and the number of its time embedding."""
    owner, temb = block, tembs[0]
    if stream is not None:
        owner, temb = block._modules[stream[0]], tembs[stream[1]]
    module = owner._modules[modulated_by]
    if previous_x is not None and not streams.may_run_ahead(module, previous_x):
        return None
    options: Any = {"name": f"{attention}_norm"}
    options["readers"] = partial(linears.fp8_readers, attention, QUERY_KEY_VALUE)
    options["rows_of"] = lambda temb: modulation(call, module, temb).chunk(count, 2)
    return streams.plain_norm(call, owner, previous_x, temb, **options)


def add_feed_forward(s: streams.Stream, owner: Any) -> None:
    shift, scale, gate = s.rows[-3:]
    readers = partial(linears.feed_forward_reader, "feed_forward")
    n = s.norm("feed_forward_norm", scale, shift, readers=readers, owner=owner)
    s.add(linears.feed_forward_branch(owner._modules["feed_forward"], n), gate)


_QUERY_READER = partial(linears.fp8_readers, "cross_attention", QUERY_KEY_VALUE[:1])


def run_block(
    call: Call, block: Any, x: Tensor, temb: Tensor, first: Any, attend: Any, text: Any = None
) -> Tensor:
    """``attend(n)``: its self-attention. ``text``: of its cross-attention, if it has one."""
    if not call.takes(x, text):
        return NotImplemented
    (s,) = streams.start(call, block, (first,), (x,), (temb,))
    s.add(attend(s.n), s.rows[2])
    if text is not None:
        shift, scale, gate = s.rows[3:6]
        n = s.norm("cross_attention_norm", scale, shift, readers=_QUERY_READER)
        s.add(block._modules["cross_attention"](n, encoder_hidden_states=text), gate)
    add_feed_forward(s, block)
    return streams.end(s)


_FIRST = partial(first_norm, count=9)
FIRST_OF_TEXT = partial(first_norm, modulated_by="text_modulation")


def _text_block_forward(self: Any, call: Call, x: Tensor, time_embed: Tensor, rope: Any) -> Tensor:
    attend = partial(self._modules["self_attention"], rotary_emb=rope)
    return run_block(call, self, x, time_embed, FIRST_OF_TEXT, attend)


def _block_forward(
    self: Any, call: Call, visual_embed, text_embed, time_embed, rope, sparse_params
) -> Tensor:
    options = {"rotary_emb": rope, "sparse_params": sparse_params}
    attend = partial(self._modules["self_attention"], **options)
    return run_block(call, self, visual_embed, time_embed, _FIRST, attend, text_embed)


def _sr_block_forward(self, call: Call, hidden_states, temb, rotary_emb, sparse_params) -> Tensor:
    def attend(n: Any) -> Any:
        return self._modules["self_attention"](n, rotary_emb, sparse_params)

    return run_block(call, self, hidden_states, temb, first_norm, attend)


# --------------------------------------------------------------------------------------------------
# Attention


def _attention_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Any = None,
    sparse_params: Any = None,
    rotary_emb: Any = None,
    **kwargs,
) -> Tensor:
    x, nabla = hidden_states, None
    if kwargs:
        return NotImplemented
    if rotary_emb is not None and x.dtype != torch.bfloat16:
        return call.decline("its rotation rounds to bfloat16")
    if sparse_params is not None:
        nabla = sparse_params["sta_mask"], sparse_params["P"]
    return attend(self, call, x, encoder_hidden_states, rotary_emb, nabla=nabla, **_IN_FLOAT32)


def _sr_attention_forward(
    self: Any, call: Call, hidden_states: Tensor, rotary_emb: Any, sparse_params: Any
) -> Tensor:
    nabla = sparse_params["sta_mask"], sparse_params["threshold"]
    return attend(self, call, hidden_states, None, rotary_emb, nabla=nabla, **_IN_FLOAT32)


_IN_FLOAT32: dict[str, Any] = {"norms_in_float32": True}


def attend(
    module: Any,
    call: Call,
    x: Any,
    c: Any,
    rope: Any,
    mask: Any = None,
    *,
    key_rope: Any = None,
    nabla: Any = None,
    **options: Any,
) -> Any:
    """``nabla``: the blocks that are attended to in any case, and the threshold."""
    if not call.takes(x, c) or (nabla is not None and x.shape[1] % _TOKENS):
        return NotImplemented
    config = attention.context_parallel_of(call, module)
    source = x if c is None else c
    options["key_rope"] = _tables(call, key_rope, source, config)
    options.update(layers=QUERY_KEY_VALUE, names=("query_norm", "key_norm"), config=config)
    rotation = _tables(call, rope, x, config), rotated_in_float32
    query, key, value = attention.project_and_rotate(call, module, x, c, *rotation, **options)
    if nabla is not None:
        out = _attend_by_blocks(call, module, query, key, value, *nabla)
    else:
        options = {"heads": module.num_heads, "config": config}
        if mask is not None and config is not None:
            mask = mask_of_rank(config, mask, source.shape[1])
        if mask is not None and mask.shape == source.shape[:2]:  # not all backends take such a mask
            of_keys = call.shared("mask", mask, lambda mask: mask[:, None, None])
            options["key_bias"] = shared_key_bias(call, of_keys, key, False)
        out = attention.attend(call, module, query, key, value, mask, **options)
    layer, is_branch = module._modules["out_layer"], type(x) is QuantizedRows
    return linears.linear_per_sample(layer, out, is_branch)


def _attend_by_blocks(
    call: Call, module: Any, query: Tensor, key: Tensor, value: Tensor, near: Tensor, threshold: Any
) -> Tensor:
    heads, processor = module.num_heads, module.processor
    blocks_of = partial(_blocks, query, key, heads, near, threshold)
    options: Any = {"heads": heads, "of_flex": True}
    out = attention.attend_by_blocks(call, module, query, key, value, blocks_of, **options)
    if out is not None:
        return out
    query, key, value = (x.unflatten(2, (heads, -1)) for x in (query, key, value))
    pair, backend = (query, key), "flex"
    if hasattr(type(processor), "_attention_backend"):  # Kandinsky 5's
        backend = processor._attention_backend
    else:
        pair = query.transpose(1, 2), key.transpose(1, 2)
    mask = call.stand_in.functions[-1].function(*pair, near, thr=threshold)
    options = {"attn_mask": mask, "backend": backend}
    options["parallel_config"] = processor._parallel_config
    out = dispatch_of(call.stand_in.spec)(query, key, value, **options)
    return out.flatten(2, 3).type_as(query)


def _blocks(query: Tensor, key: Tensor, heads: int, near: Tensor, threshold: float) -> KeyBlocks:
    """The lists of NABLA, as the model's own code with one sort in place of three."""
    q, k = (x.unflatten(1, (-1, _TOKENS)).mean(2) for x in (query, key))
    q, k = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k))
    weights, order = torch.softmax((q @ k.mT) / math.sqrt(q.shape[-1]), dim=-1).sort(-1)
    is_chosen = weights.cumsum_(-1) >= 1 - threshold
    is_chosen = torch.empty_like(is_chosen).scatter_(-1, order, is_chosen) | near
    place = is_chosen.cumsum(-1, dtype=torch.int32)
    counts, count = place[..., -1].contiguous(), place.shape[-1]
    # Blocks that are not chosen write to an additional place.
    place = torch.where(is_chosen, place - 1, count).long()
    number = torch.arange(count, dtype=torch.int32, device=query.device).expand(place.shape)
    lists = number.new_zeros((*place.shape[:-1], count + 1)).scatter_(-1, place, number)
    lists, size = lists[..., :count].contiguous(), (_TOKENS, _TOKENS)
    return KeyBlocks(full_kv_num_blocks=counts, full_kv_indices=lists, block_size=size)


def _tables(call: Call, rope: Any, x: Any, config: Any) -> Any:
    """Matrices (..., S, 1, d / 2, 2, 2) as tables (1 or B, S, 1, d); with context parallelism those of this
    rank's tokens."""
    if rope is None:
        return None
    index, count = 0, 1
    if config is not None and rope.shape[-5] != x.shape[1]:
        index, count = rank_and_size(config)

    def make(rope: Tensor) -> tuple[Tensor, Tensor]:
        rope = rope.tensor_split(count, dim=-5)[index]
        return tables_of_matrices(rope[None] if rope.dim() == 5 else rope)

    return call.shared(_key(call, "tables", rope, count), rope, make)


# --------------------------------------------------------------------------------------------------
# Families

LIST = "visual_transformer_blocks"


def plan(
    model: Any, split: Callable, gather: Callable, names: tuple[str, ...] = ("visual_embed",)
) -> dict[str, Any]:
    """The streams with these names and the text enter their first block. The last one gathers its results."""
    if getattr(model.config, "attention_type", None) == "nabla":
        raise ValueError(
            "context_parallel_plan: Kandinsky 5 with attention_type 'nabla' compares queries and keys of all "
            "tokens, which ranks cannot split"
        )
    warn_before_injection(model)
    texts = [name for name in model._modules if name.endswith("text_transformer_blocks")]
    result: dict[str, Any] = {f"{text}.0": {"x": split(1, 3)} for text in texts}
    result[f"{LIST}.0"] = {name: split(1, 3) for name in names}
    last = len(model.get_submodule(LIST)) - 1
    result[f"{LIST}.{last}"] = [gather(gather_dim=1, expected_dims=3) for _ in names]
    return result


block_spec = partial(streams.BlockSpec, upcasts=Upcasts.TO_NEXT_LINEAR)
# Of all ranks' tokens the model's own code has the masks, and rotations.
attention_spec = partial(
    attention.AttentionSpec, operations="qk_norm_rope", rotate="apply_rotary", splits_masks=False
)
ONCE = (
    *("time_embeddings", "text_embeddings", "pooled_text_embeddings", "visual_embeddings"),
    *("text_rope_embeddings", "visual_rope_embeddings", "out_layer"),
)
ATTENTION_LAYERS = ("*attention.to_*", "*attention.out_layer")
FEED_FORWARD_LAYERS = ("feed_forward.net.0.proj", "feed_forward.net.2")
FAMILIES = (
    Family(
        "Kandinsky 5",
        (
            model_spec(f"{_FIVE}Transformer3DModel", "text_transformer_blocks", LIST, plan=plan),
            block_spec(f"{_FIVE}TransformerEncoderBlock", _text_block_forward),
            block_spec(f"{_FIVE}TransformerDecoderBlock", _block_forward),
            attention_spec(
                f"{_FIVE}Attention",
                _attention_forward,
                processor_parameters="hidden_states encoder_hidden_states rotary_emb sparse_params",
                rotate="",
                functions=(f"{MODELS}:nablaT_v2",),
            ),
        ),
        ONCE,
        Layers((LIST,), (*ATTENTION_LAYERS, "feed_forward.*_layer")),
    ),
    Family(
        "Kandinsky 6 SR",
        (
            model_spec(f"{_SR}Transformer3DModel", LIST),
            block_spec(f"{_SR}TransformerBlock", _sr_block_forward),
            attention_spec(
                f"{_SR}Attention",
                _sr_attention_forward,
                functions=(f"{MODELS}6_sr:nabla_block_mask",),
            ),
            TIMESTEPS,
            linears.LINEAR_GELU,
        ),
        ONCE,
        Layers((LIST,), (*ATTENTION_LAYERS, *FEED_FORWARD_LAYERS)),
    ),
)
