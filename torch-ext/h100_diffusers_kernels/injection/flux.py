"""FLUX.1: how its transformer maps to the operations.

A double block does for image tokens x and text tokens c, each with a modulation of its own,

    n_x, n_c = layer_norm(x) * (1 + scale) + shift, layer_norm(c) * (1 + scale) + shift
    a_x, a_c = attention of both, joined, with an RMS norm of each head's query and key, and rotated
    x = x + gate * a_x;  x = x + gate_mlp * ff(layer_norm(x) * (1 + scale_mlp) + shift_mlp);  c likewise

and a single block, of both joined,

    n = layer_norm(x) * (1 + scale) + shift;  x = x + gate * proj_out([attention(n), gelu(proj_mlp(n))])
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .activations import GELU
from .attention import Attention, attend
from .blocks import Block
from .injected import Injected
from .joint import joined, joint_streams, split
from .model_forward import Model
from .norms import clipped, gated_residual

_FLUX = "diffusers.models.transformers.transformer_flux"


def _double_block_forward(
    self: Any,
    injected: Injected,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    x, c = hidden_states, encoder_hidden_states
    parts = injected.parts(self, x, c, temb)
    if parts is None:
        return injected.class_forward(self, x, c, temb, image_rotary_emb, joint_attention_kwargs)
    normalized, gate, shift_mlp, scale_mlp, gate_mlp = parts.norm1(x, temb)
    c_normalized, c_gate, c_shift_mlp, c_scale_mlp, c_gate_mlp = parts.norm1_context(c, temb)
    more = {"image_rotary_emb": image_rotary_emb, **(joint_attention_kwargs or {})}
    # With an IP-Adapter the third result is to be added to the image's.
    attention_out, c_attention_out, *adapted = self.attn(
        hidden_states=normalized, encoder_hidden_states=c_normalized, **more
    )
    x, normalized = parts.norm2.residual_modulated(x, attention_out, gate, scale_mlp, shift_mlp)
    x = gated_residual(x, parts.ff(normalized), gate_mlp)
    for out in adapted:
        x = x + out
    c, c_normalized = parts.norm2_context.residual_modulated(
        c, c_attention_out, c_gate, c_scale_mlp, c_shift_mlp
    )
    c = gated_residual(c, parts.ff_context(c_normalized), c_gate_mlp)
    return clipped(c), x


def _single_block_forward(
    self: Any,
    injected: Injected,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    parts = injected.parts(self, hidden_states, encoder_hidden_states, temb)
    if parts is None:
        arguments = (hidden_states, encoder_hidden_states, temb, image_rotary_emb)
        return injected.class_forward(self, *arguments, joint_attention_kwargs)
    x = joined(injected, encoder_hidden_states, hidden_states)
    normalized, gate = parts.norm(x, temb)
    mlp_out = parts.proj_mlp(self.act_mlp, normalized)
    more = {"image_rotary_emb": image_rotary_emb, **(joint_attention_kwargs or {})}
    attention_out = self.attn(hidden_states=normalized, **more)
    out = self.proj_out(torch.cat([attention_out, mlp_out], dim=2))
    return split(clipped(gated_residual(x, out, gate)), encoder_hidden_states.shape[1])


def _attention_forward(
    self: Any,
    injected: Injected,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
    **kwargs,
) -> Tensor | tuple[Tensor, Tensor]:
    is_joint = encoder_hidden_states is not None
    parts = None if kwargs else injected.parts(self, hidden_states, encoder_hidden_states)
    if parts is None or is_joint != (self.added_kv_proj_dim is not None):
        arguments = (hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        return injected.class_forward(self, *arguments, **kwargs)
    project = vars(sys.modules[_FLUX])["_get_qkv_projections"]
    streams = project(self, hidden_states, encoder_hidden_states)[: 6 if is_joint else 3]
    streams = [x.unflatten(-1, (-1, self.head_dim)) for x in streams]
    rotate = partial(parts.rotate, sequence_dim=1)
    query, key, value = joint_streams(parts, streams[:3], streams[3:], image_rotary_emb, rotate)
    out = attend(injected, parts, query, key, value, attention_mask).flatten(2, 3).to(query.dtype)
    if encoder_hidden_states is None:
        return out
    c_out, out = split(out, encoder_hidden_states.shape[1])
    return parts.project_out(out.contiguous()), self.to_add_out(c_out.contiguous())


_BLOCK = "self hidden_states encoder_hidden_states temb image_rotary_emb joint_attention_kwargs"
_ATTENTION = "hidden_states encoder_hidden_states attention_mask image_rotary_emb"
_LISTS = ("transformer_blocks", "single_transformer_blocks")
PARTS = (
    Model(f"{_FLUX}:FluxTransformer2DModel", blocks=_LISTS),
    Block(
        f"{_FLUX}:FluxTransformerBlock",
        _BLOCK,
        _double_block_forward,
        "layer_norm_modulate, gated_residual_layer_norm_modulate, gated_residual",
        norms=("norm2", "norm2_context"),
        adaptive_norms=("norm1", "norm1_context"),
        feed_forwards=("ff", "ff_context"),
        inner=("attn", "ff.net.0", "ff_context.net.0"),
    ),
    Block(
        f"{_FLUX}:FluxSingleTransformerBlock",
        _BLOCK,
        _single_block_forward,
        "layer_norm_modulate, gated_residual, GELU as its matrix product's epilogue, else gelu",
        adaptive_norms=("norm",),
        gelus={"proj_mlp": "act_mlp"},
        inner=("attn",),
    ),
    Attention(
        f"{_FLUX}:FluxAttention",
        f"self {_ATTENTION} kwargs",
        _attention_forward,
        "qk_norm_rope",
        processor=f"{_FLUX}:FluxAttnProcessor",
        processor_parameters=f"self attn {_ATTENTION}",
        norms=("norm_q", "norm_k", "norm_added_q", "norm_added_k"),
    ),
    GELU,
)
_ONCE = ("x_embedder", "context_embedder", "time_text_embed", "pos_embed", "norm_out", "proj_out")
LEFT_ALONE = dict.fromkeys(_ONCE, "computed once a forward, by the model's own code")
