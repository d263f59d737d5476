"""LTX-2.5's diffusion decoder: how its blocks map to the operations.

    x = x + context_proj(context)                               only in blocks of the diffusion
    x = x + attention(rms_norm(x) * (1 + scale) + shift)
    x = x + mlp(rms_norm(x) * (1 + scale_mlp) + shift_mlp)

on a grid of tokens (B, T, H, W, C). Attention is to each token's neighbors and stays the model's own, after
norm and rotation of query and key. The MLP is a SwiGLU, of some tokens at a time.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import operations
from ...operations.conditions import same_dtype_and_unit_stride
from ..attention.modules import norm_and_rotate, query_key_value
from ..core.cache import cached
from ..core.checks import KnownClass, is_stock, why_not_stock
from ..core.forward_state import Family, model_spec
from ..core.patch import Call, PatchSpec, Proxy
from ..parts import linears, streams
from ..quantized.precision import Layers

_FILE = "diffusers.models.autoencoders.ltx2_diffusion_decoder"
_BEGINNING = f"{_FILE}:LTX2VideoVae"
_ROPE_CLASS = f"{_BEGINNING}RotaryPosEmbed3D"
_ROPE = KnownClass(_ROPE_CLASS, f"{_ROPE_CLASS}._inv_freqs", f"{_ROPE_CLASS}._rotate_axis")


def _block_forward(self: Any, call: Call, hidden_states: Tensor, block_mask: Any = None) -> Tensor:
    if not call.takes(hidden_states):
        return NotImplemented
    (s,) = streams.start(call, self, (_first_norm,), (hidden_states,), ())
    s.add(self._modules["attn"](s.n, block_mask))
    s.add(self._modules["mlp"](s.norm("norm2")))
    return streams.end(s)


def _diffusion_block_forward(
    self: Any, call: Call, hidden_states, latent_context, modulation, block_mask=None
) -> Tensor:
    x, modules = hidden_states, self._modules
    if not call.takes(x, latent_context):
        return NotImplemented
    context = linears.linear(modules["context_proj"], latent_context)
    (s,) = streams.start(call, self, (_modulated_norm,), (x,), (modulation,), addend=context)
    s.add(modules["attn"](s.n, block_mask))
    shift, scale = s.rows[2:]
    s.add(modules["mlp"](s.norm("norm2", scale, shift)))
    return streams.end(s, hands_over=False)  # the next block adds its context first


_first_norm = partial(streams.plain_norm, name="norm1")


def _modulated_norm(call: Call, block: Any, previous_x: Any, modulation: Any) -> Any:
    """Rows are shift and scale of attention, then of the MLP."""

    def rows_of(_: Any) -> streams.Rows:
        table = block.scale_shift_table.unbind(0)
        return tuple([(table[i], modulation[i]) for i in (1, 0, 4, 3)])

    return streams.plain_norm(call, block, previous_x, modulation, name="norm1", rows_of=rows_of)


# --------------------------------------------------------------------------------------------------
# Attention


def _attention_forward(self: Any, call: Call, hidden_states: Tensor, block_mask: Any = None) -> Any:
    """The class's own forward, with query, key and value computed here."""
    if type(self.processor).__module__ != _FILE or not call.takes(hidden_states):
        return NotImplemented
    proxy: Any = Proxy(self)
    proxy.project_qkv = partial(_project, self, call)
    return call.stand_in.own_forward(proxy, hidden_states, block_mask)


def _project(self: Any, call: Call, x: Tensor) -> tuple[Tensor, ...]:
    """Query, key and value, each (B, T, H, W, heads, d). The query's tables contain its scale."""
    rope: Any = self._modules["rope"]
    grid, heads = x.shape[1:4], self.heads
    query, key, value = query_key_value(self, x, None)
    tokens = query.flatten(1, 3), key.flatten(1, 3)
    q, k = norm_and_rotate(call, self, *tokens, None, rope, "per_head", heads)
    q, k, v = (each.view(*x.shape[:4], heads, -1) for each in (q, k, value))
    is_known = is_stock(rope, _ROPE)
    if not is_known or not same_dtype_and_unit_stride(q, k):
        call.fall_back(None if is_known else f"rope {why_not_stock(rope, _ROPE)}")
        return rope(q * self.scale), rope(k), v
    ends = (*grid, *rope.rope_dim_split, rope.base, self.scale)
    tables = cached(call, q, ends, lambda: _tables(rope, grid, self.scale, q.device))
    pairs: Any = tuple(zip(tables[::2], tables[1::2]))
    q = operations.rope_3d(q.flatten(1, 3), *pairs[:3])
    k = operations.rope_3d(k.flatten(1, 3), *pairs[3:])
    return q.view(v.shape), k.view(v.shape), v


def _tables(rope: Any, grid: Any, scale: float, device: Any) -> tuple[Tensor, ...]:
    """Cosine and sine of each axis, times the query's scale, and those of the key."""
    tables: list[Tensor] = []
    for length, dim in zip(grid, rope.rope_dim_split):
        positions = torch.arange(length, dtype=torch.float32, device=device)
        angles = positions[:, None] * rope._inv_freqs(dim, device)[None, :]
        tables += angles.cos(), angles.sin()
    return (*[table * scale for table in tables], *tables)


# --------------------------------------------------------------------------------------------------
# MLP


def _mlp_forward(self: Any, call: Call, hidden_states: Tensor) -> Tensor:
    """Of as many tokens at a time as in the class, whose memory that limits."""
    x, modules = hidden_states, self._modules
    if not call.takes(x):
        return NotImplemented
    up, gate, down = (modules[name] for name in ("w_up", "w_gate", "w_down"))
    size, flat = sys.modules[_FILE]._SWIGLU_TILE_SIZE, x.flatten(1, -2)
    if flat.shape[1] <= size:
        return linears.linear(down, linears.swiglu_of_two(call, x, gate, up))
    out = torch.empty_like(flat)
    for start in range(0, flat.shape[1], size):
        y = linears.swiglu_of_two(call, flat[:, start : start + size], gate, up)
        place = out[:, start : start + size]
        if linears.can_write_linear(down, y):
            linears.write_linear(down, y, place)
        else:
            place.copy_(linears.linear(down, y))
    return out.view(x.shape)


_BLOCKS = (*(f"det_stages.{i}" for i in range(4)), "diff_blocks")
_ATTENTION = f"{_BEGINNING}NeighborhoodAttention"
_SILU = ("torch.nn.functional:silu",)
_SPECS = (
    model_spec(f"{_FILE}:LTX2VideoDiffusionDecoder3d", *_BLOCKS),
    streams.BlockSpec(f"{_BEGINNING}NABlock", _block_forward),
    streams.BlockSpec(f"{_BEGINNING}DiffusionNABlock", _diffusion_block_forward),
    PatchSpec(
        _ATTENTION,
        _attention_forward,
        "qk_norm_rope, rope_3d",
        functions=((f"{_ATTENTION}.project_qkv", "self hidden_states"),),
        left_to_compiler=True,
    ),
    PatchSpec(f"{_BEGINNING}SwiGLU", _mlp_forward, "swiglu", _SILU, left_to_compiler=True),
)
_ONCE = (
    "conv_in",
    "conv_in_x_t",
    "conv_out",
    "norm_out",
    "t_embedder",
    "shared_adaln",
    "upsamples",
)
# Its FP8 was not tried.
FAMILIES = (Family("LTX-2.5's decoder", _SPECS, _ONCE, Layers((), ())),)
