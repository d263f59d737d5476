"""LTX-Video: how its transformer maps to the operations.

A block is

    x = x + gate_msa * attn1(rms_norm(x) * (1 + scale_msa) + shift_msa)
    x = x + attn2(x, text)
    x = x + gate_mlp * ff(rms_norm(x) * (1 + scale_mlp) + shift_mlp)

with an RMS norm of query and key over all heads, a rotary embedding of both in attn1, and a GELU in ff.
The last line of a block and the first norm of the next are one pass over memory. The rotary embedding returns
each token's coordinates instead of cosine and sine tables of the hidden states' size.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...operations import CoordinateRope
from ...operations.conditions import kernels_run_on, tracks_derivatives, why_not_taken
from ..attention import modules as attention
from ..core.cache import cached
from ..core.forward_state import Family, model_spec
from ..core.patch import Call, PatchSpec, is_wrapped
from ..parts import linears
from ..parts.blocks import add_feed_forwards
from ..parts.embeddings import TIMESTEPS
from ..parts.rotary import CoordinateTables
from ..parts.streams import BlockSpec, end, start, table_norm
from ..quantized.precision import ONE_LIST

_LTX = "diffusers.models.transformers.transformer_ltx"
# Rows are shift, scale and gate of self-attention, then of the feed-forward.
_READERS = partial(linears.fp8_readers, "attn1", linears.QUERY_KEY_VALUE)
_FIRST_NORMS = (partial(table_norm, readers=_READERS),)


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    encoder_attention_mask: Tensor | None = None,
) -> Tensor:
    x, c, modules = hidden_states, encoder_hidden_states, self._modules
    if not call.takes(x, temb):
        return NotImplemented
    (s,) = start(call, self, _FIRST_NORMS, (x,), (temb,))
    options = {"encoder_hidden_states": None, "image_rotary_emb": image_rotary_emb}
    s.add(modules["attn1"](hidden_states=s.n, **options), s.rows[2])
    options = {"image_rotary_emb": None, "attention_mask": encoder_attention_mask}
    s.add(modules["attn2"](s.x, encoder_hidden_states=c, **options))
    add_feed_forwards(self, s)
    return end(s)


def _attention_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
    **kwargs,
) -> Tensor:
    if kwargs:
        return NotImplemented
    rotate = call.stand_in.functions[1].function
    operands = (hidden_states, encoder_hidden_states, image_rotary_emb, rotate, attention_mask)
    options: Any = {"prepares_mask": True, "dropout_p": 0.0, "is_causal": False}
    return attention.run_attention(call, self, *operands, options, form="across_heads")


def _rope_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    num_frames: int | None = None,
    height: int | None = None,
    width: int | None = None,
    rope_interpolation_scale: Any = None,
    video_coords: Tensor | None = None,
) -> Any:
    """The coordinates instead of the tables.

    The class's own forward computes tables for other code than the blocks: hooks (context parallelism shards
    the tables), and autograd, for which each block would have to save its own.
    """
    if not kernels_run_on(hidden_states):
        return call.decline(why_not_taken(hidden_states))
    is_double = video_coords is not None and video_coords.dtype == torch.float64
    if is_double or tracks_derivatives() or is_wrapped(self):
        return NotImplemented
    grid = (num_frames, height, width, rope_interpolation_scale)
    make = partial(_coordinates, self, hidden_states, grid, video_coords)
    if video_coords is None:
        bases = (self.base_num_frames, self.base_height, self.base_width, self.patch_size)
        key = (*grid, *bases, self.patch_size_t, self.theta, self.dim)
        make = partial(cached, call, hidden_states, key, make)
    return CoordinateTables(make(), hidden_states.size(0), self.dim)


def _coordinates(
    self: Any, hidden_states: Tensor, grid: tuple, video_coords: Tensor | None
) -> CoordinateRope:
    """The model's own operations in its own order, so that each angle has the same bits."""
    *shape, scale = grid
    device = hidden_states.device
    if video_coords is None:
        # One grid for the whole batch, unless the scale differs between samples.
        scales = () if scale is None else scale
        differs = any(isinstance(s, Tensor) and s.numel() != 1 for s in scales)
        options = {"rope_interpolation_scale": scale, "device": device}
        batch = hidden_states.size(0) if differs else 1
        points = self._prepare_video_coords(batch, *shape, **options)
    else:
        bases = (self.base_num_frames, self.base_height, self.base_width)
        points = torch.stack([video_coords[:, i] / base for i, base in enumerate(bases)], dim=-1)
    exponents = (math.log(1.0, self.theta), math.log(self.theta, self.theta), self.dim // 6)
    frequencies = self.theta ** torch.linspace(*exponents, device=device, dtype=torch.float32)
    frequencies = frequencies * math.pi / 2.0
    return CoordinateRope((points * 2 - 1).float().contiguous(), frequencies)


_COORDINATES = "coordinates in place of tables"
_ROPE = f"{_LTX}:LTXVideoRotaryPosEmbed"
_SPECS = (
    model_spec(f"{_LTX}:LTXVideoTransformer3DModel", "transformer_blocks"),
    PatchSpec(_ROPE, _rope_forward, _COORDINATES, (f"{_ROPE}._prepare_video_coords",)),
    BlockSpec(f"{_LTX}:LTXVideoTransformerBlock", _block_forward),
    attention.AttentionSpec(
        f"{_LTX}:LTXAttention",
        _attention_forward,
        "qk_norm_rope, rms_norm",
        processor=f"{_LTX}:LTXVideoAttnProcessor",
    ),
    TIMESTEPS,
    linears.LINEAR_GELU,
)
_ONCE = ("proj_in", "time_embed", "caption_projection", "norm_out", "proj_out")
# FP8 layers as in Lightricks' checkpoint of LTX-2.
FAMILIES = (Family("LTX-Video", _SPECS, _ONCE, ONE_LIST._replace(ends=2)),)
