"""FIBO 2: how its transformer maps to the operations.

Its blocks are those of Z-Image. The image's tokens have the modulation of noise, all others that of a clean
image. Some blocks have a cross-attention to the text between the other two branches,

    x = x + tanh(gate_cross) * rms_norm(cross_attention(rms_norm(x)))

A perceiver reads the text into tokens, by x = x + branch(rms_norm(x)) of two attentions and a feed-forward.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..attention import modules as attention
from ..core.forward_state import Family, model_spec
from ..core.patch import Call
from ..parts import streams
from ..parts.linears import QUERY_KEY_VALUE, fp8_readers
from ..parts.norms import RowsByToken
from ..quantized.precision import Layers
from .z_image import feed_forward_spec, rope_tables, rotated

_MODEL = "diffusers.models.transformers.transformer_bria_fibo2"
_READERS = partial(fp8_readers, "attention", QUERY_KEY_VALUE)
_CROSS_READERS = partial(fp8_readers, "cross_attention", ("to_q",))
_FF_READERS = partial(fp8_readers, "feed_forward", ("w1", "w3"))


def _first_norm(call: Call, block, previous_x, embedding, noise_mask, of_noise, of_clean) -> Any:
    """Rows are None, scale and gate of attention, then of the feed-forward. Of gates it is the tanh."""
    layer = block._modules["adaLN_modulation"]
    if previous_x is not None and not streams.may_run_ahead(layer, previous_x):
        return None

    def rows_of() -> streams.Rows:
        if noise_mask is None:
            table, dim = streams.linear_alone(layer, embedding).unsqueeze(1), 2
        else:
            both = [streams.linear_alone(layer, x) for x in (of_noise, of_clean)]
            table, dim = torch.cat(both), 1
        scale, gate, scale_mlp, gate_mlp = table.chunk(4, dim)
        rows: Any = (scale, gate.tanh(), scale_mlp, gate_mlp.tanh())
        if noise_mask is not None:
            counts = len(both[0]), len(both[1])
            index = call.shared(("index", counts), noise_mask, partial(_rows_of_tokens, counts))
            rows = tuple([RowsByToken(row, index) for row in rows])
        return (None, *rows)

    options: Any = {"name": "attention_norm1", "rows_of": rows_of, "readers": _READERS}
    return streams.plain_norm(call, block, previous_x, **options)


def _rows_of_tokens(counts: tuple[int, int], noise_mask: Tensor) -> Tensor:
    """The row of each token, int32 (B, S): of its sample's noise, or after those its sample's clean image."""
    rows = torch.arange(sum(counts), dtype=torch.int32, device=noise_mask.device)
    noise, clean = rows.unsqueeze(1).split(counts)
    return torch.where(noise_mask == 1, noise, clean)


def _for_all_tokens(gate: Tensor, like: Any) -> Any:
    """A gate of one value as a row of the form of another one."""
    if type(like) is RowsByToken:
        return like._replace(table=gate.expand(like.table.shape).contiguous())
    return gate.expand(like.shape).contiguous()


def _read(block: Any, n: Any, text: Tensor | None, mask: Tensor | None) -> Any:
    """The result of a block's cross-attention."""
    return block._modules["cross_attention"](n, encoder_hidden_states=text, attention_mask=mask)


def _block_forward(
    self: Any,
    call: Call,
    x: Tensor,
    attn_mask: Tensor | None,
    freqs_cis: Tensor,
    adaln_input: Tensor | None = None,
    noise_mask: Tensor | None = None,
    adaln_noisy: Tensor | None = None,
    adaln_clean: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
) -> Tensor:
    if not call.takes(x, adaln_input, adaln_noisy, adaln_clean, encoder_hidden_states):
        return NotImplemented
    modules = self._modules
    conditions = (adaln_input, noise_mask, adaln_noisy, adaln_clean)
    (s,) = streams.start(call, self, (_first_norm,), (x,), conditions)
    _, _, gate, scale_mlp, gate_mlp = s.rows
    out = modules["attention"](s.n, attention_mask=attn_mask, freqs_cis=freqs_cis)
    s.add(out, gate, "attention_norm2")
    if self.cross_attention is not None:
        n = s.norm("cross_attn_norm1", readers=_CROSS_READERS)
        out = _read(self, n, encoder_hidden_states, encoder_attention_mask)
        s.add(out, _for_all_tokens(self.cross_attn_gate.tanh(), gate), "cross_attn_norm2")
    n = s.norm("ffn_norm1", scale_mlp, None, readers=_FF_READERS)
    s.add(modules["feed_forward"](n), gate_mlp, "ffn_norm2")
    return streams.end(s)


def _perceiver_forward(
    self, call, latents, encoder_hidden_states, encoder_attention_mask=None, attention_mask=None
) -> Tensor:
    if not call.takes(latents, encoder_hidden_states):
        return NotImplemented
    s, modules, text = streams.Stream(call, self, latents), self._modules, encoder_hidden_states
    s.add(_read(self, s.norm("cross_attn_norm"), text, encoder_attention_mask))
    s.add(modules["self_attention"](s.norm("self_attn_norm"), attention_mask=attention_mask))
    s.add(modules["ffn"](s.norm("ffn_norm")))
    return s.x


def _attention_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    freqs_cis: Tensor | None = None,
) -> Tensor:
    x, c, mask = hidden_states, encoder_hidden_states, attention_mask
    if mask is not None and mask.dim() == 2:
        mask = call.shared(("mask", mask.shape), mask, lambda m: m[:, None, None])
    tables = None if freqs_cis is None else call.shared("tables", freqs_cis, rope_tables)
    options = {"dropout_p": 0.0, "is_causal": False}
    return attention.run_attention(call, self, x, c, tables, rotated, mask, options)


_SPECS = (
    model_spec(f"{_MODEL}:BriaFibo2Transformer2DModel", "noise_refiner", "layers"),
    streams.BlockSpec(f"{_MODEL}:BriaFibo2TransformerBlock", _block_forward),
    streams.BlockSpec(f"{_MODEL}:BriaFibo2PerceiverLayer", _perceiver_forward),
    attention.AttentionSpec(
        f"{_MODEL}:BriaFibo2Attention", _attention_forward, "qk_norm_rope", rotate=""
    ),
    feed_forward_spec(_MODEL),
)
_ONCE = ("x_embedder", "t_embedder", "final_layer")
_LAYERS = Layers(
    ("layers",),
    ("*attention.to_[qkv]", "*attention.to_out.0", "feed_forward.w[123]"),
    fast_blocks=("noise_refiner",),
)
FAMILIES = (Family("FIBO 2", _SPECS, _ONCE, _LAYERS),)
