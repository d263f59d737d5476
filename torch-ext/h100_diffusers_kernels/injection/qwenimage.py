"""Qwen-Image: how its transformer, and its ControlNet, map to the operations.

Its blocks are the double blocks of FLUX.1, but for the modulation, of which each stream has a linear layer;
the rotary embedding, a complex table of each stream; and the text's mask. In image editing the modulation
may be one of two rows, chosen for each token of the image.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .activations import GELU
from .attention import Attention
from .blocks import Block, begin, feed_forward_end, finish
from .embeddings import TIMESTEPS
from .injected import Injected, Parts
from .joint import PROJECTIONS, attend_jointly, project
from .linears import of_slices
from .model_forward import Model
from .modulation import Opening, once
from .norm_modules import OUTPUT_NORM
from .norms import clipped
from .part import Family

_QWEN = "diffusers.models.transformers.transformer_qwenimage"
_CONTROLNET = "diffusers.models.controlnets.controlnet_qwenimage"


def _openings(
    injected: Injected, block: nn.Module, parts: Parts, temb: Tensor, index: Tensor | None
) -> tuple:
    """Of image and text; rows are shift, scale and gate of attention, then of the feed-forward."""

    def image_rows() -> tuple:
        rows = parts.img_mod(injected, temb).unsqueeze(1).chunk(6, dim=-1)
        return rows if index is None else tuple(_chosen(row, index) for row in rows)

    def text_rows() -> tuple:
        # The second half is for tokens of the image alone.
        of_text = temb if not block.zero_cond_t else once(injected, "first", temb, _first)
        return parts.txt_mod(injected, of_text).unsqueeze(1).chunk(6, dim=-1)

    return (
        Opening(parts.img_norm1, image_rows, parts.img_mod.source),
        Opening(parts.txt_norm1, text_rows, parts.txt_mod.source),
    )


def _first(temb: Tensor) -> Tensor:
    return temb.chunk(2, dim=0)[0]


def _chosen(rows: Tensor, index: Tensor) -> Tensor:
    """Of rows (2 * B, 1, D), for each token by its index (B, S) of 0 or 1: (B, S, D)."""
    first, second = rows.chunk(2, dim=0)
    return torch.where(index.unsqueeze(-1) == 0, first, second)


def _block_forward(
    self: Any,
    injected: Injected,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    encoder_hidden_states_mask: Tensor | None,
    temb: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
    modulate_index: Any = None,
) -> tuple[Tensor, Tensor]:
    x, c, mask = hidden_states, encoder_hidden_states, encoder_hidden_states_mask
    parts = injected.parts(self, x, c, temb)
    if parts is None:
        more = (image_rotary_emb, joint_attention_kwargs, modulate_index)
        return injected.class_forward(self, x, c, mask, temb, *more)
    conditions = (temb, modulate_index)
    opened, c_opened = begin(injected, self, parts, _openings, (x, c), conditions)
    attention_out, c_attention_out = (parts.attn or self.attn)(
        hidden_states=opened.normalized[0],
        encoder_hidden_states=c_opened.normalized[0],
        encoder_hidden_states_mask=mask,
        image_rotary_emb=image_rotary_emb,
        **(joint_attention_kwargs or {}),
    )
    text = (parts.txt_norm2, parts.txt_mlp)
    ends = (
        feed_forward_end(parts.img_norm2, parts.img_mlp, x, attention_out, opened.rows),
        feed_forward_end(*text, c, c_attention_out, c_opened.rows),
    )
    is_unclipped = x.dtype != torch.float16
    x, c = finish(injected, self, _openings, ends, conditions, hands_over=is_unclipped)
    return clipped(c), clipped(x)


def _attention_forward(
    self: Any,
    injected: Injected,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    encoder_hidden_states_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
    **kwargs,
) -> Any:
    x, c, mask = hidden_states, encoder_hidden_states, encoder_hidden_states_mask
    is_known = not kwargs and c is not None and attention_mask is None
    parts = injected.parts(self, x, c) if is_known else None
    if parts is None:
        more = {
            "encoder_hidden_states_mask": mask,
            "image_rotary_emb": image_rotary_emb,
            **kwargs,
        }
        return injected.class_forward(self, x, c, attention_mask, **more)
    ropes = (None, None) if image_rotary_emb is None else image_rotary_emb
    streams = project(self, parts, x, c, *ropes)
    joint_mask = bias = None
    if mask is not None:
        make = partial(_masks, image_length=x.shape[1], dtype=streams[0].query.dtype)
        joint_mask, bias = once(injected, "mask", mask, make)
    c_out, out = attend_jointly(
        injected,
        parts,
        streams[::-1],
        partial(parts.rotate, use_real=False),
        joint_mask,
        key_bias=bias,
        dropout_p=0.0,
        is_causal=False,
    )
    return of_slices(parts.project_out, out), of_slices(parts.to_add_out, c_out)


def _masks(mask: Tensor, image_length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of the text's mask (B, T), bool: that of all keys (B, 1, 1, T + S), and a bias (B, T + S) that says
    the same."""
    joint = torch.cat([mask, mask.new_ones(mask.shape[0], image_length)], dim=1)
    bias = torch.zeros(joint.shape, dtype=dtype, device=mask.device)
    return joint[:, None, None], bias.masked_fill_(~joint, -torch.inf)


_BLOCK = "self hidden_states encoder_hidden_states encoder_hidden_states_mask temb image_rotary_emb"
_PROCESSOR = "hidden_states encoder_hidden_states encoder_hidden_states_mask attention_mask"
_PARTS = (
    Model(f"{_QWEN}:QwenImageTransformer2DModel", blocks=("transformer_blocks",)),
    Model(f"{_CONTROLNET}:QwenImageControlNetModel", blocks=("transformer_blocks",)),
    Block(
        f"{_QWEN}:QwenImageTransformerBlock",
        f"{_BLOCK} joint_attention_kwargs modulate_index",
        _block_forward,
        "layer_norm_modulate, gated_residual_layer_norm_modulate, gated_residual",
        norms=("img_norm1", "img_norm2", "txt_norm1", "txt_norm2"),
        modulations=("img_mod", "txt_mod"),
        feed_forwards=("img_mlp", "txt_mlp"),
        methods=("_modulate",),
        inner=("attn", "img_mlp.net.0", "txt_mlp.net.0"),
    ),
    Attention(
        "diffusers.models.attention_processor:Attention",
        "self hidden_states encoder_hidden_states attention_mask cross_attention_kwargs",
        _attention_forward,
        "qk_norm_rope",
        processor=f"{_QWEN}:QwenDoubleStreamAttnProcessor2_0",
        processor_parameters=f"self attn {_PROCESSOR} image_rotary_emb",
        norms=("norm_q", "norm_k", "norm_added_q", "norm_added_k"),
        projections=PROJECTIONS,
        rotate="apply_rotary_emb_qwen",
    ),
    TIMESTEPS,
    GELU,
)
_ONCE = ("pos_embed", "time_text_embed", "txt_norm", "img_in", "txt_in", "proj_out")
_LEFT_ALONE = dict.fromkeys(_ONCE, "computed once a forward, by the model's own code")
FAMILIES = (Family("Qwen-Image", _PARTS, _LEFT_ALONE, OUTPUT_NORM),)
