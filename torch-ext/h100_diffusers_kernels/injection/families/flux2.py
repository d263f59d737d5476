"""FLUX.2: how its transformer maps to the operations.

Its blocks are those of FLUX.1 with three differences: all blocks of a kind share one modulation, which the
model computes; a feed-forward is silu(first half) * second half; and in a single block one matrix product
gives query, key, value and the feed-forward's input, and one takes the concat of its results,

    n = layer_norm(x) * (1 + scale) + shift;  q, k, v, m = to_qkv_mlp_proj(n)
    x = x + gate * to_out([attention(q, k, v), silu(m_1) * m_2])
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import operations
from ...operations.conditions import is_differentiated, kernels_take, may_write
from ..attention import modules as attention
from ..core.checks import KnownClass, is_stock
from ..core.forward_state import Family, model_spec
from ..core.patch import Call
from ..core.quantized_rows import FP8_BLOCK, QuantizedRows
from ..parts import linears, streams
from ..parts.blocks import IMAGE_READERS, TEXT_READERS, double_block
from ..parts.embeddings import TIMESTEPS, axial_positions
from ..parts.norm_modules import OUTPUT_NORM
from ..parts.norms import clip_to_float16
from ..quantized.fp8_linears import computed
from ..quantized.precision import ATTENTION_LAYERS, TWO_LISTS

_FLUX2 = "diffusers.models.transformers.transformer_flux2"
linears.FEED_FORWARDS.add(KnownClass(f"{_FLUX2}:Flux2FeedForward"), linears.SWIGLU_NAMES)
_SWIGLU = linears.swiglu_spec(f"{_FLUX2}:Flux2SwiGLU")


def _first_norm(call: Call, block, previous_x, *modulations, name, readers, i=0, count=6) -> Any:
    """Rows are shift, scale and gate of attention, then of the feed-forward if there are six, of the i-th
    modulation, (B, N * D) or (B, 1 or S, N * D)."""

    def split(m: Tensor) -> streams.Rows:
        return (m.unsqueeze(1) if m.dim() == 2 else m).chunk(count, dim=-1)

    rows_of = partial(call.shared, f"{name} rows", modulations[i], split)
    return streams.plain_norm(call, block, previous_x, name=name, rows_of=rows_of, readers=readers)


_DOUBLE = (
    partial(_first_norm, name="norm1", readers=IMAGE_READERS),
    partial(_first_norm, name="norm1_context", readers=TEXT_READERS, i=1),
)
_READERS = partial(linears.fp8_readers, "attn", ("to_qkv_mlp_proj",))
_SINGLE = (partial(_first_norm, name="norm", readers=_READERS, count=3),)


def _double_block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb_mod_img: Tensor,
    temb_mod_txt: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    x, c, conditions = hidden_states, encoder_hidden_states, (temb_mod_img, temb_mod_txt)
    if not call.takes(x, c, *conditions):
        return NotImplemented
    more = {"image_rotary_emb": image_rotary_emb, **(joint_attention_kwargs or {})}
    return double_block(call, self, _DOUBLE, (x, c), conditions, **more)[::-1]


def _single_block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None,
    temb_mod: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
    split_hidden_states: bool = False,
    text_seq_len: int | None = None,
) -> Any:
    x, c = hidden_states, encoder_hidden_states
    if not call.takes(x, c, temb_mod):
        return NotImplemented
    if c is not None:
        text_seq_len = c.shape[1]
        x = torch.cat([c, x], dim=1)
    (s,) = streams.start(call, self, _SINGLE, (x,), (temb_mod,))
    more = {"image_rotary_emb": image_rotary_emb, **(joint_attention_kwargs or {})}
    s.add(self._modules["attn"](hidden_states=s.n, **more), s.rows[2])
    x = clip_to_float16(streams.end(s, hands_over=x.dtype != torch.float16))
    return (x[:, :text_seq_len], x[:, text_seq_len:]) if split_hidden_states else x


def _parallel_attention_forward(
    self: Any, call: Call, hidden_states, attention_mask=None, image_rotary_emb=None, **kwargs
) -> Tensor:
    if kwargs:
        return NotImplemented
    if not call.takes(hidden_states):
        return NotImplemented
    packed = linears.linear(self._modules["to_qkv_mlp_proj"], hidden_states)
    # In proportion, because tensor parallelism leaves each rank a part of both.
    size, mlp_size = 3 * self.inner_dim, self.mlp_hidden_dim * self.mlp_mult_factor
    size = packed.shape[-1] * size // (size + mlp_size)
    qkv, mlp = packed.split_with_sizes([size, packed.shape[-1] - size], dim=-1)
    query, key, value = qkv.chunk(3, dim=-1)
    heads = int(query.shape[2]) // self.head_dim  # torch.jit.trace has tensors as sizes
    rotate = partial(call.stand_in.functions[1].function, sequence_dim=1)
    operands = (query, key, image_rotary_emb, rotate, "per_head", heads)
    config = attention.context_parallel_of(call, self)
    query, key = attention.norm_and_rotate(call, self, *operands, config=config)
    attend = partial(attention.attend, call, self, query, key, value, attention_mask, heads=heads)
    activation, to_out = self._modules["mlp_act_fn"], self._modules["to_out"]
    is_branch = type(hidden_states) is QuantizedRows
    if not (
        may_write()
        and is_stock(activation, _SWIGLU.known)
        and is_stock(activation._modules.get("gate_fn"), linears.SILU)
        and mlp.shape[-1] % 2 == 0
        and kernels_take(mlp, query)
        and not is_differentiated(mlp, query)
    ):
        both = torch.cat([attend(), activation(mlp)], dim=-1)
        return linears.linear_per_sample(to_out, both, is_branch)
    # Both results are written into one buffer.
    size, mlp_size = heads * self.head_dim, mlp.shape[2] // 2
    columns = linears.fp8_columns(to_out, mlp, mlp_size)
    if columns is not None:
        out = attend()
        operations.swiglu_fp8(mlp, activated="first", block_size=FP8_BLOCK, out=columns.last())
        product = linears.linear_of_concat(call, to_out, out, columns)
        return product if is_branch else computed(product)
    both = mlp.new_empty(*mlp.shape[:2], size + mlp_size)
    place = both[..., :size]
    out = attend(out=place)
    if out is not place:
        place.copy_(out)
    operations.swiglu(mlp, activated="first", out=both[..., size:])
    return linears.linear_per_sample(to_out, both, is_branch)


_SPECS = (
    model_spec(f"{_FLUX2}:Flux2Transformer2DModel", *TWO_LISTS.blocks),
    streams.BlockSpec(f"{_FLUX2}:Flux2TransformerBlock", _double_block_forward),
    streams.BlockSpec(f"{_FLUX2}:Flux2SingleTransformerBlock", _single_block_forward),
    attention.flux_attention_spec(f"{_FLUX2}:Flux2Attention"),
    attention.AttentionSpec(
        f"{_FLUX2}:Flux2ParallelSelfAttention", _parallel_attention_forward, "qk_norm_rope, swiglu"
    ),
    axial_positions(f"{_FLUX2}:Flux2PosEmbed"),
    TIMESTEPS,
    _SWIGLU,
)
_ONCE = (
    *("time_guidance_embed", "double_stream_modulation_img", "double_stream_modulation_txt"),
    *("single_stream_modulation", "x_embedder", "context_embedder", "proj_out"),
)
_LAYERS = TWO_LISTS._replace(
    layers=(*ATTENTION_LAYERS, "attn.to_qkv_mlp_proj", "attn.to_out", "*ff*.linear_*")
)
FAMILIES = (Family("FLUX.2", _SPECS, _ONCE, _LAYERS, OUTPUT_NORM),)
