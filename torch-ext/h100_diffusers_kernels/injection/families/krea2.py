"""Krea 2: how its transformer and the blocks that fuse its text map to the operations.

A block is

    x = x + gate * attn(rms_norm(x) * (1 + scale) + shift)
    x = x + gate_mlp * ff(rms_norm(x) * (1 + scale_mlp) + shift_mlp)

with a modulation that is a table plus a time embedding, an RMS norm of each head's query and key, a rotary
embedding of both, several query heads for each key head, and ff(x) = down(silu(gate(x)) * up(x)). Attention's
result is multiplied by sigmoid(to_gate(n)). Only the norms compute in float32. Text blocks have no modulation
or rotation.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention.modules import AttentionSpec, attend, project_and_rotate
from ..core.forward_state import Family, model_spec
from ..core.patch import Call, PatchSpec
from ..parts import linears
from ..parts.embeddings import axial_positions
from ..parts.norm_modules import norm_and_modulate
from ..parts.norms import Upcasts
from ..parts.streams import BlockSpec, end, plain_norm, start, table_norm
from ..quantized.precision import ATTENTION_LAYERS, ONE_LIST

_KREA2 = "diffusers.models.transformers.transformer_krea2"
_READERS = partial(linears.fp8_readers, "attn", (*linears.QUERY_KEY_VALUE, "to_gate"))
_FF_READERS = partial(linears.fp8_readers, "ff", ("gate", "up"))
# Rows are shift, scale and gate of attention, then scale, shift and gate of the feed-forward.
_FIRST_NORMS = (partial(table_norm, scale_first=True, readers=_READERS),)
_FIRST_NORMS_OF_TEXT = (partial(plain_norm, name="norm1", readers=_READERS),)


def _block_forward(
    self: Any, call: Call, hidden_states, temb, image_rotary_emb, attention_mask=None
) -> Tensor:
    x, modules = hidden_states, self._modules
    if not call.takes(x, temb):
        return NotImplemented
    (s,) = start(call, self, _FIRST_NORMS, (x,), (temb,))
    _, _, gate, scale, shift, gate_mlp = s.rows
    options = {"attention_mask": attention_mask, "image_rotary_emb": image_rotary_emb}
    s.add(modules["attn"](s.n, **options), gate)
    s.add(modules["ff"](s.norm("norm2", scale, shift, readers=_FF_READERS)), gate_mlp)
    return end(s)


def _text_block_forward(self: Any, call: Call, hidden_states, attention_mask=None) -> Tensor:
    x, modules = hidden_states, self._modules
    if not call.takes(x):
        return NotImplemented
    (s,) = start(call, self, _FIRST_NORMS_OF_TEXT, (x,), ())
    s.add(modules["attn"](s.n, attention_mask=attention_mask))
    s.add(modules["ff"](s.norm("norm2", readers=_FF_READERS)))
    return end(s)


def _attention_forward(
    self: Any, call: Call, hidden_states, attention_mask=None, image_rotary_emb=None, **kwargs
) -> Tensor:
    x, to_gate, to_out = hidden_states, self._modules["to_gate"], self._modules["to_out"]
    if kwargs:
        return NotImplemented
    if not call.takes(x):
        return NotImplemented
    rotate = partial(call.stand_in.functions[1].function, sequence_dim=1)
    options: Any = {"head_dim": self.head_dim, "upcasts": Upcasts.IN_NORMS}
    operands = (call, self, x, None, image_rotary_emb, rotate)
    query, key, value = project_and_rotate(*operands, **options)
    run = partial(attend, call, self, query, key, value, attention_mask, heads=self.num_heads)
    weights = linears.weights_of_products(call, x, to_gate)
    if weights is None or query.dtype is not x.dtype:
        return linears.linear(to_out[0], run() * torch.sigmoid(linears.linear(to_gate, x)))
    size = query.shape[2]
    both = x.new_empty(*x.shape[:2], 2 * size)
    place, gate = both[..., :size], both[..., size:]
    torch.mm(x.view(-1, x.shape[2]), weights[0].t(), out=gate.view(-1, size))
    out = run(out=place)
    if out is not place:
        place.copy_(out)
    # First half * sigmoid(second half), in one pass. The processor leaves the dropout out.
    return linears.linear(to_out[0], F.glu(both))


def _feed_forward_forward(self: Any, call: Call, hidden_states: Tensor) -> Tensor:
    names = {"gate": "gate", "value": "up", "out": "down"}
    return linears.gated_feed_forward(self, call, hidden_states, **names)


def _final_forward(self: Any, call: Call, hidden_states: Tensor, temb: Tensor) -> Tensor:
    x = hidden_states
    if not call.takes(x, temb):
        return NotImplemented
    scale, shift = (temb + self.scale_shift_table).chunk(2, dim=1)
    n = norm_and_modulate(call, self, "norm", x, scale, shift, Upcasts.IN_NORMS)
    return linears.linear(self._modules["linear"], n)


_TEXT_LISTS = ("text_fusion.layerwise_blocks", "text_fusion.refiner_blocks")
_block = partial(BlockSpec, upcasts=Upcasts.IN_NORMS)
_SPECS = (
    model_spec(f"{_KREA2}:Krea2Transformer2DModel", *_TEXT_LISTS, "transformer_blocks"),
    _block(f"{_KREA2}:Krea2TransformerBlock", _block_forward),
    _block(f"{_KREA2}:Krea2TextFusionBlock", _text_block_forward),
    AttentionSpec(f"{_KREA2}:Krea2Attention", _attention_forward, "qk_norm_rope"),
    PatchSpec(
        f"{_KREA2}:Krea2SwiGLU", _feed_forward_forward, "swiglu", ("torch.nn.functional:silu",)
    ),
    PatchSpec(f"{_KREA2}:Krea2FinalLayer", _final_forward, "rms_norm_modulate"),
    axial_positions(f"{_KREA2}:Krea2RotaryPosEmbed"),
)
_ONCE = ("img_in", "time_embed", "time_mod_proj", "txt_in")
_LAYERS = ONE_LIST._replace(layers=(*ATTENTION_LAYERS, "attn.to_gate", "ff.*"))
FAMILIES = (Family("Krea 2", _SPECS, _ONCE, _LAYERS),)
