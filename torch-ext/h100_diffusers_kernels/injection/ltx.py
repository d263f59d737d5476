"""LTX-Video: how its transformer maps to the operations.

A block is

    x = x + gate_msa * attn1(rms_norm(x) * (1 + scale_msa) + shift_msa)
    x = x + attn2(x, text)
    x = x + gate_mlp * ff(rms_norm(x) * (1 + scale_mlp) + shift_mlp)

with an RMS norm of query and key over all heads, a rotary embedding of both in attn1, and a GELU in ff.
The last line of a block and the first norm of the next are one pass over memory. The rotary embedding
hands on each token's coordinates in place of cosine and sine tables of the hidden states' size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..conditions import kernels_run_on, of_one_form, tracks_derivatives
from ..functional import CoordinateRope
from .activations import GELU
from .attention import Attention, Norms, attend, norm_and_rotate
from .blocks import Block, End, begin, finish, table_rows
from .embeddings import TIMESTEPS
from .forward_slot import is_wrapped
from .injected import Injected, Parts
from .kept import Kept
from .model_forward import Model
from .modulation import Opening
from .norms import gated_residual
from .part import Family
from .rotary import CoordinateTables, Rotary

_LTX = "diffusers.models.transformers.transformer_ltx"


def _openings(
    injected: Injected, block: nn.Module, parts: Parts, temb: Tensor
) -> tuple[Opening, ...]:
    """Rows are shift, scale and gate of self-attention, then of the feed-forward, each (B, 1 or S, D)."""

    def rows() -> tuple[Tensor, ...]:
        return table_rows(injected, block, "scale_shift_table", temb)

    return (Opening(parts.norm1, rows, tuple(block._parameters.values())),)


def _block_forward(
    self: Any,
    injected: Injected,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    encoder_attention_mask: Tensor | None = None,
) -> Tensor:
    parts = injected.parts(self, hidden_states, temb)
    if parts is None:
        arguments = (hidden_states, encoder_hidden_states, temb, image_rotary_emb)
        return injected.class_forward(self, *arguments, encoder_attention_mask)
    (opened,) = begin(injected, self, parts, _openings, (hidden_states,), (temb,))
    (normalized,), (_, _, gate_msa, shift_mlp, scale_mlp, gate_mlp) = opened
    attention_out = (parts.attn1 or self.attn1)(
        hidden_states=normalized, encoder_hidden_states=None, image_rotary_emb=image_rotary_emb
    )
    hidden_states = gated_residual(hidden_states, attention_out, gate_msa)
    attention_out = (parts.attn2 or self.attn2)(
        hidden_states,
        encoder_hidden_states=encoder_hidden_states,
        image_rotary_emb=None,
        attention_mask=encoder_attention_mask,
    )
    hidden_states, normalized = parts.norm2.residual_modulated(
        hidden_states, attention_out, None, (scale_mlp, shift_mlp)
    )
    end = End(hidden_states, parts.ff(normalized), gate_mlp)
    (hidden_states,) = finish(injected, self, _openings, (end,), (temb,))
    return hidden_states


def _attention_forward(
    self: Any,
    injected: Injected,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
    **kwargs,
) -> Tensor:
    parts = None if kwargs else injected.parts(self, hidden_states)
    if parts is None:
        arguments = (hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        return injected.class_forward(self, *arguments, **kwargs)
    context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
    if parts.is_trusted and context is not hidden_states and not of_one_form(context):
        parts = injected.checked
    heads = self.heads
    query, key, value = parts.to_q(hidden_states), parts.to_k(context), parts.to_v(context)
    norms, form = Norms(parts.norm_q, parts.norm_k), "across_heads"
    query, key = norm_and_rotate(
        injected, parts, norms, query, key, image_rotary_emb, parts.rotate, form, heads
    )

    def expand_mask(mask: Tensor) -> Tensor:
        mask = self.prepare_attention_mask(mask, key.shape[1], key.shape[0])
        return mask.view(key.shape[0], heads, -1, mask.shape[-1])

    options: dict[str, Any] = {"heads": heads, "dropout_p": 0.0, "is_causal": False}
    out = attend(injected, parts, query, key, value, attention_mask, expand_mask, **options)
    return parts.project_out(out)


def _rope_forward(
    self: Any,
    injected: Injected,
    hidden_states: Tensor,
    num_frames: int | None = None,
    height: int | None = None,
    width: int | None = None,
    rope_interpolation_scale: Any = None,
    video_coords: Tensor | None = None,
) -> Any:
    """Up to the point where it needs the memory of a table.

    It makes the tables where others than the blocks work with them: hooks (context parallelism shards
    the tables by one), and autograd, for which each block would have to keep tables of its own.
    """
    grid = (num_frames, height, width, rope_interpolation_scale)
    if (
        tracks_derivatives()
        or injected.parts(self, hidden_states, takes=kernels_run_on) is None
        or is_wrapped(self)
        or (video_coords is not None and video_coords.dtype == torch.float64)
    ):
        return injected.class_forward(self, hidden_states, *grid, video_coords)
    if video_coords is None:
        bases = (self.base_num_frames, self.base_height, self.base_width, self.patch_size)
        key = (*grid, *bases, self.patch_size_t, self.theta, self.dim)
        rope = Kept.of(
            injected, hidden_states, key, lambda: _coordinates(self, hidden_states, grid, None)
        )
    else:
        rope = _coordinates(self, hidden_states, grid, video_coords)
    return CoordinateTables(rope, hidden_states.size(0), self.dim)


def _coordinates(
    self: Any, hidden_states: Tensor, grid: tuple, video_coords: Tensor | None
) -> CoordinateRope:
    """The model's own operations in its own order, so that each angle has the same bits."""
    *shape, scale = grid
    device = hidden_states.device
    if video_coords is None:
        # One grid serves the whole batch, unless the scale differs between samples.
        differs = any(
            isinstance(s, Tensor) and s.numel() != 1 for s in (() if scale is None else scale)
        )
        batch = hidden_states.size(0) if differs else 1
        points = self._prepare_video_coords(
            batch, *shape, rope_interpolation_scale=scale, device=device
        )
    else:
        bases = (self.base_num_frames, self.base_height, self.base_width)
        points = torch.stack([video_coords[:, i] / base for i, base in enumerate(bases)], dim=-1)
    exponents = (math.log(1.0, self.theta), math.log(self.theta, self.theta), self.dim // 6)
    frequencies = self.theta ** torch.linspace(*exponents, device=device, dtype=torch.float32)
    frequencies = frequencies * math.pi / 2.0
    return CoordinateRope((points * 2 - 1).float().contiguous(), frequencies)


_ATTENTION = "hidden_states encoder_hidden_states attention_mask image_rotary_emb"
_PARTS = (
    Model(f"{_LTX}:LTXVideoTransformer3DModel", blocks=("transformer_blocks",)),
    Rotary(
        f"{_LTX}:LTXVideoRotaryPosEmbed",
        "self hidden_states num_frames height width rope_interpolation_scale video_coords",
        _rope_forward,
        "coordinates in place of tables",
        method="_prepare_video_coords",
    ),
    Block(
        f"{_LTX}:LTXVideoTransformerBlock",
        "self hidden_states encoder_hidden_states temb image_rotary_emb encoder_attention_mask",
        _block_forward,
        "rms_norm_modulate, gated_residual, gated_residual_rms_norm_modulate",
        norms=("norm1", "norm2"),
        feed_forwards=("ff",),
        inner=("attn1", "attn2", "ff.net.0"),
    ),
    Attention(
        f"{_LTX}:LTXAttention",
        f"self {_ATTENTION} kwargs",
        _attention_forward,
        "qk_norm_rope, rms_norm",
        processor=f"{_LTX}:LTXVideoAttnProcessor",
        processor_parameters=f"self attn {_ATTENTION}",
        projections=("to_q", "to_k", "to_v"),
    ),
    TIMESTEPS,
    GELU,
)
_PRODUCTS = "matrix products, called as they are"
_LEFT_ALONE = {
    **dict.fromkeys(("proj_in", "time_embed", "caption_projection", "proj_out"), _PRODUCTS),
    "norm_out": "its modulation is part of the model's forward",
}
FAMILIES = (Family("LTX-Video", _PARTS, _LEFT_ALONE),)
