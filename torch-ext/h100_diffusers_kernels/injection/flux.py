"""FLUX.1: how its transformer, and its ControlNet, map to the operations.

A double block does for image tokens x and text tokens c, each with a modulation of its own,

    n_x, n_c = layer_norm(x) * (1 + scale) + shift, layer_norm(c) * (1 + scale) + shift
    a_x, a_c = attention of both, joined, with an RMS norm of each head's query and key, and rotated
    x = x + gate * a_x;  x = x + gate_mlp * ff(layer_norm(x) * (1 + scale_mlp) + shift_mlp);  c likewise

and a single block, of both joined,

    n = layer_norm(x) * (1 + scale) + shift;  x = x + gate * proj_out([attention(n), gelu(proj_mlp(n))])
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .activations import GELU
from .attention import Attention
from .blocks import Block, End, begin, feed_forward_end, finish
from .embeddings import TIMESTEPS, axial_positions
from .injected import Injected, Parts
from .joint import (
    PROJECTIONS,
    attend_to_all,
    attend_with_tables,
    begin_joined,
    project,
    split,
)
from .linears import of_slices, product_of_two
from .model_forward import Model
from .norm_modules import OUTPUT_NORM
from .norms import clipped
from .part import Family

_FLUX = "diffusers.models.transformers.transformer_flux"
_CONTROLNET = "diffusers.models.controlnets.controlnet_flux"
# What an IP-Adapter gives to all attentions, for those that have it.
_OF_IP_ADAPTERS = {"ip_hidden_states", "ip_adapter_masks"}


def _double_openings(injected: Injected, block: nn.Module, parts: Parts, temb: Tensor) -> tuple:
    """Of image and text; rows are shift, scale and gate of attention, then of the feed-forward."""
    norms = (parts.norm1, parts.norm1_context)
    return tuple(norm.opening(injected, temb) for norm in norms)


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
    opened, c_opened = begin(injected, self, parts, _double_openings, (x, c), (temb,))
    # With an IP-Adapter the third result is to be added to the image's.
    attention_out, c_attention_out, *adapted = (parts.attn or self.attn)(
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
    is_plain = not adapted and x.dtype != torch.float16
    x, c = finish(injected, self, _double_openings, ends, (temb,), hands_over=is_plain)
    for out in adapted:
        x = x + out
    return clipped(c), x


def _single_openings(injected: Injected, block: nn.Module, parts: Parts, temb: Tensor) -> tuple:
    """Rows are shift, scale and gate."""
    return (parts.norm.opening(injected, temb),)


def _single_block_forward(
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
    text_length = c.shape[1]
    x, opened = begin_joined(injected, self, parts, _single_openings, c, x, temb)
    (normalized,), (_, _, gate) = opened
    mlp_out = parts.proj_mlp(self.act_mlp, normalized)
    attention_out = (parts.attn or self.attn)(
        hidden_states=normalized,
        image_rotary_emb=image_rotary_emb,
        **(joint_attention_kwargs or {}),
    )
    end = End(x, product_of_two(parts.proj_out, attention_out, mlp_out, parts.is_trusted), gate)
    text, image = finish(
        injected,
        self,
        _single_openings,
        (end,),
        (temb,),
        hands_over=x.dtype != torch.float16,
        as_given=lambda results: split(clipped(results[0]), text_length),
    )
    return text, image


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
    is_joint = c is not None
    is_known = kwargs.keys() <= _OF_IP_ADAPTERS
    parts = injected.parts(self, x, c) if is_known else None
    if parts is None or is_joint != (self.added_kv_proj_dim is not None):
        return injected.class_forward(self, x, c, attention_mask, image_rotary_emb, **kwargs)
    if c is None:
        streams = project(self, parts, x, None, image_rotary_emb)
        rotate = partial(parts.rotate, sequence_dim=1)
        return attend_to_all(injected, parts, streams, rotate, attention_mask)
    out, c_out = attend_with_tables(self, injected, parts, x, c, image_rotary_emb, attention_mask)
    return of_slices(parts.project_out, out), of_slices(parts.to_add_out, c_out)


_BLOCK = "self hidden_states encoder_hidden_states temb image_rotary_emb joint_attention_kwargs"
_ATTENTION = "hidden_states encoder_hidden_states attention_mask image_rotary_emb"
_LISTS = ("transformer_blocks", "single_transformer_blocks")
_PARTS = (
    Model(f"{_FLUX}:FluxTransformer2DModel", blocks=_LISTS),
    Model(f"{_CONTROLNET}:FluxControlNetModel", blocks=_LISTS),
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
        "layer_norm_modulate, gated_residual_layer_norm_modulate, gated_residual, "
        "GELU as its matrix product's epilogue, else gelu",
        adaptive_norms=("norm",),
        gelus={"proj_mlp": "act_mlp"},
        linears=("proj_out",),
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
        projections=PROJECTIONS,
        project="_get_qkv_projections",
    ),
    axial_positions(f"{_FLUX}:FluxPosEmbed"),
    axial_positions("diffusers.models.embeddings:FluxPosEmbed"),
    TIMESTEPS,
    GELU,
)
_ONCE = ("x_embedder", "context_embedder", "time_text_embed", "proj_out")
_LEFT_ALONE = dict.fromkeys(_ONCE, "computed once a forward, by the model's own code")
FAMILIES = (Family("FLUX.1", _PARTS, _LEFT_ALONE, OUTPUT_NORM),)
