"""MiniMax-H3: how its transformer maps to the operations.

Text, video and audio are one stream. Each block computes a table of modulations from the time steps, and
each token chooses its row by its time step and modality:

    x = x + gate * attention(rms_norm(x) * (1 + scale) + shift)
    x = x + gate_mlp * ff(rms_norm(x) * (1 + scale_mlp) + shift_mlp)

with an RMS norm of each head's query and key, a rotary embedding of the first elements of each head, and a
feed-forward with SwiGLU. Blocks of the text have no modulation or rotation.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention import modules as attention
from ..core.adapters import read_adapters
from ..core.checks import KnownClass, is_stock
from ..core.forward_state import Family, model_spec
from ..core.patch import Call, PatchSpec
from ..parts import linears, streams
from ..parts.blocks import IMAGE_READERS, add_feed_forwards
from ..parts.embeddings import TIMESTEPS
from ..parts.norms import RowsByToken, chosen_norm_modulate
from ..quantized.fp8_linears import are_fp8
from ..quantized.precision import ONE_LIST, PRECISIONS

_MINIMAX = "diffusers.models.transformers.transformer_minimax_h3"
_MODULATION = KnownClass(f"{_MINIMAX}:MiniMaxH3AdaLayerNormModulation")


def _chosen(call: Call, tables: streams.Rows, indices: Tensor) -> streams.Rows:
    """Rows of tables, each (N, D), by each token's index (S,)."""
    index = call.shared("index", indices, lambda indices: indices.to(torch.int32))
    return tuple([RowsByToken(table, index) for table in tables])


def _first_norm(call: Call, block, previous_x, temb: Tensor, indices: Tensor) -> Any:
    """Rows are shift, scale and gate of attention, then of the feed-forward."""
    module = block._modules["adaln_proj"]
    if previous_x is not None and not streams.may_run_ahead(module, previous_x):
        return None

    def rows_of() -> streams.Rows:
        layer: Any = module._modules.get("linear") if is_stock(module, _MODULATION) else None
        found = None if layer is None else read_adapters(layer)
        base = None if found is None else found[0][0]
        if base is None or not (linears.plain_weight(base) or are_fp8(base)):
            return _chosen(call, module(temb), indices)
        dtype = base._parameters["weight"].dtype
        embedding = call.shared(f"silu {dtype}", temb, lambda temb: F.silu(temb).to(dtype))
        tables = linears.linear(layer, embedding).view(-1, 6 * module.hidden_size)
        return _chosen(call, tables.chunk(6, dim=-1), indices)

    options: Any = {"name": "norm1", "rows_of": rows_of, "readers": IMAGE_READERS}
    return streams.plain_norm(call, block, previous_x, **options)


PLAIN_FIRST_NORMS = (partial(streams.plain_norm, name="norm1", readers=IMAGE_READERS),)


def _block_forward(
    self: Any, call: Call, hidden_states, temb, adaln_indices, rotary_emb, attention_mask=None
) -> Tensor:
    x = hidden_states
    if not call.takes(x):
        return NotImplemented
    (s,) = streams.start(call, self, (_first_norm,), (x,), (temb, adaln_indices))
    s.add(self._modules["attn"](s.n, rotary_emb, attention_mask), s.rows[2])
    add_feed_forwards(self, s)
    return streams.end(s)


def _text_block_forward(self: Any, call: Call, hidden_states: Tensor) -> Tensor:
    x, modules = hidden_states, self._modules
    if not call.takes(x):
        return NotImplemented
    (s,) = streams.start(call, self, PLAIN_FIRST_NORMS, (x,), ())
    s.add(modules["attn"](s.n))
    n = s.norm("norm2", readers=partial(linears.feed_forward_reader, "ff"))
    s.add(linears.feed_forward_branch(modules["ff"], n))
    return streams.end(s)


def attention_forward(
    self, call: Call, hidden_states, rotary_emb=None, attention_mask=None, *, norms_in_float32=False
) -> Tensor:
    x, fused = hidden_states, None
    if self.fused_projections and call.takes(x):
        fused = linears.linear(self._modules["to_qkv"], x).chunk(3, dim=-1)
    operands = (x, None, rotary_emb, _rotated(call), attention_mask)
    options: Any = {"layout": "half", "norms_in_float32": norms_in_float32, "projected": fused}
    of_attend = {"dropout_p": 0.0, "is_causal": False}
    return attention.run_attention(call, self, *operands, of_attend, form="part_of_head", **options)


def _rotated(call: Call) -> Any:
    rotate = call.stand_in.functions[1].function

    def rotated(x: Tensor, tables: Any) -> Tensor:
        if tables[0].dim() == 2:
            return rotate(x, *tables)
        # A table for each sample: its tokens as those of one sample.
        each = (t.expand(x.shape[0], -1, -1, -1).flatten(0, 2) for t in tables)
        return rotate(x.flatten(0, 1)[None], *each).view_as(x)

    return rotated


def _output_norm_forward(self: Any, call: Call, hidden_states, temb, timestep_indices) -> Tensor:
    x, layer = hidden_states, self._modules["linear"]
    if not call.takes(x):
        return NotImplemented
    dtype = sys.modules[_MINIMAX].get_parameter_dtype(layer)
    tables = linears.linear(layer, F.silu(temb).to(dtype)).chunk(2, dim=-1)
    shift, scale = _chosen(call, tables, timestep_indices)
    return chosen_norm_modulate(call, self, "norm", x, scale, shift)


attention_spec = partial(
    attention.AttentionSpec, operations="qk_norm_rope", rotate=f"{_MINIMAX}:_apply_rotary_emb"
)
_LISTS = ("token_refiner.refiner_blocks", "transformer_blocks")
_SILU = ("torch.nn.functional:silu",)
_SPECS = (
    model_spec(f"{_MINIMAX}:MiniMaxH3Transformer3DModel", *_LISTS),
    streams.BlockSpec(f"{_MINIMAX}:MiniMaxH3TransformerBlock", _block_forward, functions=_SILU),
    streams.BlockSpec(f"{_MINIMAX}:MiniMaxH3TokenRefinerBlock", _text_block_forward),
    attention_spec(f"{_MINIMAX}:MiniMaxH3Attention", attention_forward),
    PatchSpec(f"{_MINIMAX}:MiniMaxH3AdaLayerNormOut", _output_norm_forward, "rms_norm_modulate"),
    TIMESTEPS,
    linears.GATED_ACTIVATIONS[1],
)
_EMBEDDERS = ("proj_in", "audio_proj_in", "context_embedder", "time_embedder", "rope")
_ONCE = (*_EMBEDDERS, "proj_out", "audio_proj_out")
FAMILIES = (Family("MiniMax-H3", _SPECS, _ONCE, ONE_LIST, int8_tiers=PRECISIONS),)
