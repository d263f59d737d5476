"""Ideogram 4: how its transformer maps to the operations.

Padding, text and image are one stream. A block normalizes the input and the output of attention and
feed-forward,

    x = x + tanh(gate) * rms_norm(attention(rms_norm(x) * (1 + scale)))
    x = x + tanh(gate_mlp) * rms_norm(ff(rms_norm(x) * (1 + scale_mlp)))

with an RMS norm of each head's query and key, a rotary embedding of both whose pairs are a head's halves, and
ff = w2(silu(w1(x)) * w3(x)). Tokens attend to those of their own segment, by a mask (B, 1, S, S). The
published heads of 256 elements leave attention itself to the model's own code.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.functional import silu

from ..attention.modules import AttentionSpec, attend, project_and_rotate
from ..core.forward_state import Family, model_spec
from ..core.patch import Call, PatchSpec
from ..parts import streams
from ..parts.blocks import add_between_norms
from ..parts.linears import QUERY_KEY_VALUE, fp8_readers, gated_feed_forward, linear
from ..parts.norm_modules import norm_and_modulate
from ..parts.norms import Upcasts
from ..quantized.precision import Layers

_IDEOGRAM = "diffusers.models.transformers.transformer_ideogram4"
_READERS = partial(fp8_readers, "attention", QUERY_KEY_VALUE)
_FF_READERS = partial(fp8_readers, "feed_forward", ("w1", "w3"))
_NORMS = ("attention_norm2", "ffn_norm1", "ffn_norm2")


def _first_norm(call: Call, block: Any, previous_x: Tensor | None, adaln_input: Tensor) -> Any:
    """Rows are None, scale and gate of attention, then of the feed-forward."""
    layer = block._modules["adaln_modulation"]
    if previous_x is not None and not streams.may_run_ahead(layer, previous_x):
        return None

    def rows_of(adaln_input: Tensor) -> streams.Rows:
        return (None, *linear(layer, adaln_input).chunk(4, dim=-1))

    options: Any = {"name": "attention_norm1", "rows_of": rows_of, "readers": _READERS}
    return streams.plain_norm(call, block, previous_x, adaln_input, **options)


def _block_forward(
    self: Any, call: Call, hidden_states, attention_mask, image_rotary_emb, adaln_input
) -> Tensor:
    x, modules = hidden_states, self._modules
    if not call.takes(x, adaln_input):
        return NotImplemented
    (s,) = streams.start(call, self, (_first_norm,), (x,), (adaln_input,))
    options = {"attention_mask": attention_mask, "image_rotary_emb": image_rotary_emb}
    out = modules["attention"](s.n, **options)
    add_between_norms(s, out, _NORMS, modules["feed_forward"], _FF_READERS)
    return streams.end(s)


def _attention_forward(
    self: Any, call: Call, hidden_states, attention_mask=None, image_rotary_emb=None, **kwargs
) -> Tensor:
    x, rope = hidden_states, image_rotary_emb
    if kwargs or not _are_tables(rope, x.dtype) or not call.takes(x):
        return NotImplemented
    half = call.stand_in.functions[1].function
    tables = call.shared("tables", rope, lambda rope: [table.unsqueeze(2) for table in rope])

    def rotated(x: Tensor, tables: Any) -> Tensor:
        return x * tables[0] + half(x) * tables[1]

    options: Any = {"head_dim": self.head_dim, "layout": "half"}
    query, key, value = project_and_rotate(call, self, x, None, tables, rotated, **options)
    out = attend(call, self, query, key, value, attention_mask, heads=self.num_heads)
    return linear(self._modules["to_out"][0], out)  # the processor leaves the dropout out


def _are_tables(rope: Any, dtype: Any) -> bool:
    """Whether the model's own code would take the embedding (cos, sin) of this dtype, each (B, S, d)."""
    is_pair = isinstance(rope, (tuple, list)) and len(rope) == 2
    return is_pair and all(
        isinstance(t, Tensor) and t.dim() == 3 and t.dtype == dtype for t in rope
    )


def _final_forward(self: Any, call: Call, hidden_states: Tensor, conditioning: Tensor) -> Tensor:
    x, modules = hidden_states, self._modules
    if not call.takes(x, conditioning):
        return NotImplemented
    scale = linear(modules["adaln_modulation"], silu(conditioning))
    n = norm_and_modulate(call, self, "norm_final", x, scale, None, Upcasts.NOWHERE)
    return linear(modules["linear"], n)


_SILU = ("torch.nn.functional:silu",)
_SPECS = (
    model_spec(f"{_IDEOGRAM}:Ideogram4Transformer2DModel", "layers"),
    streams.BlockSpec(f"{_IDEOGRAM}:Ideogram4TransformerBlock", _block_forward),
    AttentionSpec(
        f"{_IDEOGRAM}:Ideogram4Attention", _attention_forward, "qk_norm_rope", rotate="_rotate_half"
    ),
    PatchSpec(
        f"{_IDEOGRAM}:Ideogram4MLP",
        partial(gated_feed_forward, gate="w1", value="w3", out="w2"),
        "swiglu",
        _SILU,
    ),
    PatchSpec(f"{_IDEOGRAM}:Ideogram4FinalLayer", _final_forward, "layer_norm_modulate", _SILU),
)
_EMBEDDERS = ("input_proj", "llm_cond_norm", "llm_cond_proj", "t_embedding", "adaln_proj")
_ONCE = (*_EMBEDDERS, "embed_image_indicator", "rotary_emb")
_LAYERS = Layers(("layers",), ("attention.to_[qkv]", "attention.to_out.0", "feed_forward.w[123]"))
FAMILIES = (Family("Ideogram 4", _SPECS, _ONCE, _LAYERS),)
