"""Helios: how its transformer maps to the operations.

A block is Wan's (see ``families.wan``), over the tokens of the history and of the chunk that is denoised,

    n = layer_norm(x) * (1 + scale) + shift;  x = x + gate * attn1(n)
    x_chunk = x_chunk + attn2(layer_norm(x_chunk, weight, bias), text)
    n = layer_norm(x) * (1 + scale_mlp) + shift_mlp;  x = x + gate_mlp * ffn(n)

with a modulation for each token, because the history has timestep 0. A rotary embedding is one tensor of
cosines and sines for each sample.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention.modules import AttentionSpec
from ..core.forward_state import Family, model_spec
from ..core.patch import Call
from ..parts import linears
from ..parts.blocks import add_feed_forwards
from ..parts.embeddings import TIMESTEPS
from ..parts.norms import Upcasts, known_norm
from ..parts.streams import BlockSpec, end, start
from ..quantized.fp8_linears import computed
from . import wan

_HELIOS = "diffusers.models.transformers.transformer_helios"


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    rotary_emb: Tensor,
    original_context_length: Any = None,
) -> Tensor:
    x, c, length = hidden_states, encoder_hidden_states, original_context_length
    if not call.takes(x, c):
        return NotImplemented
    first = 0  # of the tokens that attend to the text
    if self.guidance_cross_attn:
        if not isinstance(length, int) or not 0 < length <= x.shape[1]:
            return NotImplemented
        first = x.shape[1] - length
    modules = self._modules
    (s,) = start(call, self, wan.BY_TOKEN, (x,), (temb,))
    s.add(modules["attn1"](s.n, None, None, rotary_emb, length), s.rows[2])
    if known_norm(call, self, "norm2", x.shape[2], Upcasts.TO_NEXT_LINEAR) is None:
        n = self.norm2(s.x[:, first:].float()).to(x.dtype)
    else:
        is_contiguous = not first or x.shape[0] == 1  # as products of FP8 rows need
        n = s.norm("norm2", readers=wan.QUERY_READER if is_contiguous else None)
        n = n[:, first:] if first else n
    out = modules["attn2"](n, c, None, None, length)
    s.add(torch.nn.functional.pad(computed(out), (0, 0, first, 0)) if first else out)
    add_feed_forwards(self, s, names=wan.FEED_FORWARD)
    return end(s)


def _attention_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    rotary_emb: Tensor | None = None,
    original_context_length: Any = None,
    **kwargs,
) -> Tensor:
    if kwargs:
        return NotImplemented
    if self.is_amplify_history and not self.is_cross_attention:
        return call.decline("it scales the keys of the history")
    operands = (self, call, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
    return wan.attention_forward(*operands, tables_of=_pair_tables, has_image=False)


def _pair_tables(rope: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (B, S, 2 * d) per element to tables (B, S, 1, d / 2) per pair."""
    cos, sin = rope.unsqueeze(2).chunk(2, dim=-1)
    return wan.pair_tables((cos, sin))


_SPECS = (
    model_spec(f"{_HELIOS}:HeliosTransformer3DModel", "blocks"),
    BlockSpec(f"{_HELIOS}:HeliosTransformerBlock", _block_forward, upcasts=Upcasts.TO_NEXT_LINEAR),
    AttentionSpec(
        f"{_HELIOS}:HeliosAttention",
        _attention_forward,
        "qk_norm_rope",
        rotate="apply_rotary_emb_transposed",
        project="_get_qkv_projections",
    ),
    TIMESTEPS,
    linears.LINEAR_GELU,
)
_ONCE = (
    *("rope", "patch_embedding", "patch_short", "patch_mid", "patch_long"),
    *("condition_embedder", "norm_out", "proj_out"),
)
FAMILIES = (Family("Helios", _SPECS, _ONCE, wan.LAYERS),)
