"""FLUX.3: how its transformer maps to the operations.

A block has one norm, and its attention and feed-forward read the same input,

    n = layer_norm(x) * (1 + scale) + shift;  x = x + gate * (attention(n) + ff(n))

Mode blocks do so for each kind of tokens alone: image, reference images and text. Single blocks concatenate n
of text and n of all images, and each has its own modulation. The query and key norms are float32, up to the
rotary embedding's result. Where the model expands a time embedding to all tokens, one row is computed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ..attention import modules as attention
from ..core.checks import KnownClass
from ..core.forward_state import Family, model_spec
from ..core.patch import Call, PatchSpec, is_wrapped
from ..parts import linears
from ..parts.blocks import IMAGE_READERS
from ..parts.embeddings import TIMESTEPS, axial_positions
from ..parts.norm_modules import norm_and_modulate
from ..parts.norms import Upcasts
from ..parts.streams import BlockSpec, concat_streams, end, plain_norm, start
from ..quantized.fp8_linears import computed
from ..quantized.precision import ATTENTION_LAYERS, Layers

_FLUX3 = "diffusers.models.transformers.transformer_flux3"
linears.FEED_FORWARDS.add(KnownClass(f"{_FLUX3}:Flux3FeedForward"), linears.SWIGLU_NAMES)
_SWIGLU = linears.swiglu_spec(f"{_FLUX3}:Flux3SwiGLU")


def _readers(block: Any, x: Tensor) -> Any:
    """Attention and feed-forward."""
    weights: Any = IMAGE_READERS(block, x)
    others = weights and linears.feed_forward_reader("ff", block, x)
    return others and {**weights, **others}


def _first_norm(call: Call, block, previous_x, *modulations: Tensor, i: int) -> Any:
    """Rows are shift, scale and gate of the i-th modulation, each (B, S, D)."""
    rows_of = partial(call.shared, f"rows {i}", modulations[i], lambda m: m.chunk(3, dim=-1))
    return plain_norm(call, block, previous_x, name="norm", rows_of=rows_of, readers=_readers)


_IMAGE = (partial(_first_norm, i=0),)
_BOTH = (*_IMAGE, partial(_first_norm, i=1))


def _mode_block_forward(self: Any, call: Call, hidden_states, temb_mod, image_rotary_emb) -> Tensor:
    x = hidden_states
    if not call.takes(x, temb_mod):
        return NotImplemented
    (s,) = start(call, self, _IMAGE, (x,), (temb_mod,))
    attention_out, out = _attention_and_feed_forward(self, s.n, image_rotary_emb)
    s.add(attention_out, s.rows[2], addend=out)
    return end(s)


def _single_block_forward(
    self, call, hidden_states, encoder_hidden_states, temb_mod, temb_mod_context, image_rotary_emb
) -> tuple[Tensor, Tensor]:
    x, c, conditions = hidden_states, encoder_hidden_states, (temb_mod, temb_mod_context)
    if not call.takes(x, c, *conditions):
        return NotImplemented
    image, text = start(call, self, _BOTH, (x, c), conditions)
    n, length = concat_streams(call, text.n, image.n), c.shape[1]
    attention_out, out = _attention_and_feed_forward(self, n, image_rotary_emb)
    image.add(attention_out[:, length:], image.rows[2], addend=out[:, length:])
    text.add(attention_out[:, :length], text.rows[2], addend=out[:, :length])
    return end(image, text)[::-1]


def _attention_and_feed_forward(block: Any, n: Any, rope: Any) -> tuple[Tensor, Tensor]:
    modules = block._modules
    attention_out = computed(modules["attn"](hidden_states=n, image_rotary_emb=rope))
    return attention_out, linears.feed_forward(modules["ff"], n)


def _attention_forward(
    self: Any, call: Call, hidden_states, attention_mask=None, image_rotary_emb=None
) -> Tensor:
    rotate = partial(call.stand_in.functions[1].function, sequence_dim=1)
    operands = (hidden_states, None, image_rotary_emb, rotate, attention_mask)
    options: Any = {"upcasts": Upcasts.TO_NEXT_LINEAR}
    if self.fused_projections and call.takes(hidden_states):
        options["projected"] = call.stand_in.functions[-1].function(self, hidden_states)
    return attention.run_attention(call, self, *operands, {}, **options)


def _one_row(temb: Tensor) -> Tensor:
    """(B, S, D) to (B, 1, D) if all tokens share a row of memory."""
    return temb[:, :1] if temb.dim() == 3 and temb.stride(1) == 0 else temb


def _modulation_forward(self: Any, call: Call, temb: Tensor) -> Tensor:
    row, state = _one_row(temb), call.state
    if row is not temb and (is_wrapped(self) or state is None or state.has_hooks()):
        row = temb  # hooks may write to the result, and writes to an expanded tensor raise
    out = linears.linear(self._modules["linear"], row)
    return out if row is temb else out.expand(-1, temb.shape[1], -1)


def _output_norm_forward(self: Any, call: Call, hidden_states: Tensor, temb: Tensor) -> Tensor:
    modules = self._modules
    row = linears.linear(modules["linear"], modules["act_fn"](_one_row(temb)))
    scale, shift = row.chunk(2, dim=-1)
    return norm_and_modulate(call, self, "norm", hidden_states, scale, shift, Upcasts.NOWHERE)


_LISTS = ("txt_mode_blocks", "mode_blocks.image", "mode_blocks.image_cond")
_ONE_ROW = "one row for all tokens"
_SPECS = (
    model_spec(f"{_FLUX3}:Flux3Transformer2DModel", *_LISTS, "single_transformer_blocks"),
    BlockSpec(f"{_FLUX3}:Flux3ModeTransformerBlock", _mode_block_forward),
    BlockSpec(f"{_FLUX3}:Flux3SingleTransformerBlock", _single_block_forward),
    attention.flux_attention_spec(f"{_FLUX3}:Flux3Attention", forward=_attention_forward),
    _SWIGLU,
    PatchSpec(f"{_FLUX3}:Flux3Modulation", _modulation_forward, _ONE_ROW),
    PatchSpec(f"{_FLUX3}:Flux3AdaLayerNorm", _output_norm_forward, "layer_norm_modulate"),
    axial_positions(f"{_FLUX3}:Flux3PosEmbed"),
    TIMESTEPS,
)
_EMBEDDERS = ("timestep_embedder", "target_timestep_embedder", "x_embedders", "context_embedder")
_ONCE = (*_EMBEDDERS, "proj_out")
_LAYERS = Layers(
    ("txt_mode_blocks", "mode_blocks.*", "single_transformer_blocks"),
    (*ATTENTION_LAYERS, "*ff*.linear_*"),
)
FAMILIES = (Family("FLUX.3", _SPECS, _ONCE, _LAYERS),)
