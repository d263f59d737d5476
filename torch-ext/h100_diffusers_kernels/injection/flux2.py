"""FLUX.2: how its transformer maps to the operations.

Its blocks are those of FLUX.1 with three differences: the model makes one modulation for all blocks of a
kind; a feed-forward is silu(first half) * second half; and in a single block one matrix product makes query,
key, value and the feed-forward's input, and one takes its results side by side,

    n = layer_norm(x) * (1 + scale) + shift;  q, k, v, m = to_qkv_mlp_proj(n)
    x = x + gate * to_out([attention(q, k, v), silu(m_1) * m_2])
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .attention import Attention, Norms, attend, norm_and_rotate
from .blocks import Block, End, begin, feed_forward_end, finish
from .embeddings import TIMESTEPS, axial_positions
from .gates import SWIGLU
from .injected import Injected, Parts
from .joint import PROJECTIONS, attend_with_tables
from .linears import of_slices
from .model_forward import Model
from .modulation import Opening, once
from .norm_modules import OUTPUT_NORM
from .norms import clipped
from .part import Family

_FLUX2 = "diffusers.models.transformers.transformer_flux2"


def _rows(name: str, count: int, injected: Injected, modulation: Tensor) -> tuple:
    """The rows of a modulation (B, N * D) or (B, 1 or S, N * D), each (B, 1 or S, D)."""

    def make(modulation: Tensor) -> tuple:
        by_token = modulation.unsqueeze(1) if modulation.dim() == 2 else modulation
        return by_token.chunk(count, dim=-1)

    return once(injected, name, modulation, make)


def _double_openings(
    injected: Injected, block: nn.Module, parts: Parts, image: Tensor, text: Tensor
) -> tuple:
    """Of image and text; rows are shift, scale and gate of attention, then of the feed-forward."""
    rows = partial(_rows, "image", 6, injected, image)
    text_rows = partial(_rows, "text", 6, injected, text)
    return Opening(parts.norm1, rows), Opening(parts.norm1_context, text_rows)


def _double_block_forward(
    self: Any,
    injected: Injected,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb_mod_img: Tensor,
    temb_mod_txt: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    x, c, conditions = hidden_states, encoder_hidden_states, (temb_mod_img, temb_mod_txt)
    parts = injected.parts(self, x, c, *conditions)
    if parts is None:
        more = (image_rotary_emb, joint_attention_kwargs)
        return injected.class_forward(self, x, c, *conditions, *more)
    opened, c_opened = begin(injected, self, parts, _double_openings, (x, c), conditions)
    attention_out, c_attention_out = (parts.attn or self.attn)(
        hidden_states=opened.normalized[0],
        encoder_hidden_states=c_opened.normalized[0],
        image_rotary_emb=image_rotary_emb,
        **(joint_attention_kwargs or {}),
    )
    text = (parts.norm2_context, parts.ff_context)
    ends = (
        feed_forward_end(parts.norm2, parts.ff, x, attention_out, opened.rows),
        feed_forward_end(*text, c, c_attention_out, c_opened.rows),
    )
    is_unclipped = c.dtype != torch.float16
    x, c = finish(injected, self, _double_openings, ends, conditions, hands_over=is_unclipped)
    return clipped(c), x


def _single_openings(
    injected: Injected, block: nn.Module, parts: Parts, modulation: Tensor
) -> tuple:
    """Rows are shift, scale and gate."""
    return (Opening(parts.norm, partial(_rows, "single", 3, injected, modulation)),)


def _single_block_forward(
    self: Any,
    injected: Injected,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None,
    temb_mod: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
    split_hidden_states: bool = False,
    text_seq_len: int | None = None,
) -> Any:
    x, c = hidden_states, encoder_hidden_states
    parts = injected.parts(self, x, c, temb_mod)
    if parts is None:
        more = (joint_attention_kwargs, split_hidden_states, text_seq_len)
        return injected.class_forward(self, x, c, temb_mod, image_rotary_emb, *more)
    if c is not None:
        text_seq_len = c.shape[1]
        x = torch.cat([c, x], dim=1)
    (opened,) = begin(injected, self, parts, _single_openings, (x,), (temb_mod,))
    (normalized,), (_, _, gate) = opened
    attention_out = (parts.attn or self.attn)(
        hidden_states=normalized,
        image_rotary_emb=image_rotary_emb,
        **(joint_attention_kwargs or {}),
    )
    (x,) = finish(
        injected,
        self,
        _single_openings,
        (End(x, attention_out, gate),),
        (temb_mod,),
        hands_over=x.dtype != torch.float16,
    )
    x = clipped(x)
    return (x[:, :text_seq_len], x[:, text_seq_len:]) if split_hidden_states else x


def _attention_forward(
    self: Any,
    injected: Injected,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
    **kwargs,
) -> Tensor | tuple[Tensor, Tensor]:
    x, c = hidden_states, encoder_hidden_states
    parts = None if kwargs else injected.parts(self, x, c)
    if parts is None or c is None or self.added_kv_proj_dim is None:
        return injected.class_forward(self, x, c, attention_mask, image_rotary_emb, **kwargs)
    out, c_out = attend_with_tables(self, injected, parts, x, c, image_rotary_emb, attention_mask)
    c_out = of_slices(parts.to_add_out, c_out)
    return of_slices(parts.project_out, out), c_out


def _parallel_attention_forward(
    self: Any,
    injected: Injected,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
    **kwargs,
) -> Tensor:
    parts = None if kwargs else injected.parts(self, hidden_states)
    if parts is None:
        arguments = (hidden_states, attention_mask, image_rotary_emb)
        return injected.class_forward(self, *arguments, **kwargs)
    packed = parts.to_qkv_mlp_proj(hidden_states)
    # In proportion, as tensor parallelism leaves a rank a part of each.
    size, mlp_size = 3 * self.inner_dim, self.mlp_hidden_dim * self.mlp_mult_factor
    size = packed.shape[-1] * size // (size + mlp_size)
    qkv, mlp = packed.split([size, packed.shape[-1] - size], dim=-1)
    query, key, value = (t.unflatten(-1, (-1, parts.head_dim)) for t in qkv.chunk(3, dim=-1))
    norms, rotate = Norms(parts.norm_q, parts.norm_k), partial(parts.rotate, sequence_dim=1)
    query, key = norm_and_rotate(
        injected, parts, norms, query, key, image_rotary_emb, rotate, "per_head"
    )

    def attention(out: Tensor | None) -> Tensor:
        return attend(injected, parts, query, key, value, attention_mask, out=out)

    return parts.project_out(parts.mlp_act_fn.beside(attention, query, mlp))


_BLOCK = "self hidden_states encoder_hidden_states"
_MORE = "image_rotary_emb joint_attention_kwargs"
_ATTENTION = "hidden_states encoder_hidden_states attention_mask image_rotary_emb"
_PARALLEL = "hidden_states attention_mask image_rotary_emb"
_PARTS = (
    Model(
        f"{_FLUX2}:Flux2Transformer2DModel",
        blocks=("transformer_blocks", "single_transformer_blocks"),
    ),
    Block(
        f"{_FLUX2}:Flux2TransformerBlock",
        f"{_BLOCK} temb_mod_img temb_mod_txt {_MORE}",
        _double_block_forward,
        "layer_norm_modulate, gated_residual_layer_norm_modulate, gated_residual",
        norms=("norm1", "norm1_context", "norm2", "norm2_context"),
        feed_forwards=("ff", "ff_context"),
        inner=("attn", "ff.act_fn", "ff_context.act_fn"),
    ),
    Block(
        f"{_FLUX2}:Flux2SingleTransformerBlock",
        f"{_BLOCK} temb_mod {_MORE} split_hidden_states text_seq_len",
        _single_block_forward,
        "layer_norm_modulate, gated_residual_layer_norm_modulate, gated_residual",
        norms=("norm",),
        inner=("attn",),
    ),
    Attention(
        f"{_FLUX2}:Flux2Attention",
        f"self {_ATTENTION} kwargs",
        _attention_forward,
        "qk_norm_rope",
        processor=f"{_FLUX2}:Flux2AttnProcessor",
        processor_parameters=f"self attn {_ATTENTION}",
        norms=("norm_q", "norm_k", "norm_added_q", "norm_added_k"),
        projections=PROJECTIONS,
        project="_get_qkv_projections",
    ),
    Attention(
        f"{_FLUX2}:Flux2ParallelSelfAttention",
        f"self {_PARALLEL} kwargs",
        _parallel_attention_forward,
        "qk_norm_rope, swiglu",
        processor=f"{_FLUX2}:Flux2ParallelSelfAttnProcessor",
        processor_parameters=f"self attn {_PARALLEL}",
        projections=("to_qkv_mlp_proj",),
        gates=("mlp_act_fn",),
    ),
    axial_positions(f"{_FLUX2}:Flux2PosEmbed"),
    TIMESTEPS,
    SWIGLU,
)
_ONCE = (
    *("time_guidance_embed", "double_stream_modulation_img"),
    *("double_stream_modulation_txt", "single_stream_modulation", "x_embedder", "context_embedder"),
    "proj_out",
)
_LEFT_ALONE = dict.fromkeys(_ONCE, "computed once a forward, by the model's own code")
FAMILIES = (Family("FLUX.2", _PARTS, _LEFT_ALONE, OUTPUT_NORM),)
