"""ERNIE-Image: how its transformer maps to the operations.

Image and text are one stream, (S, B, D). All blocks share one modulation, and a block is

    x = x + gate * attention(rms_norm(x) * (1 + scale) + shift)
    x = x + gate_mlp * mlp(rms_norm(x) * (1 + scale_mlp) + shift_mlp)

with an RMS norm of each head's query and key, a rotary embedding of both, and mlp(x) = linear_fc2(gelu(
gate_proj(x)) * up_proj(x)). The two elements of a pair have different angles, (B, S, 1, d), whose cosines and
sines are computed once. The model copies the modulation to each token. Blocks read the first token's, unless
users' code may have changed others. The model's mask has the image and the valid text before the padding.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import operations
from ..attention import modules as attention
from ..core.forward_state import Family, model_spec
from ..core.patch import Call, PatchSpec
from ..core.quantized_rows import QuantizedRows
from ..parts.embeddings import TIMESTEPS
from ..parts.linears import QUERY_KEY_VALUE, fp8_readers, gated_feed_forward, linear
from ..parts.norm_modules import norm_and_modulate
from ..parts.norms import Upcasts
from ..parts.streams import BlockSpec, end, plain_norm, start
from ..quantized.precision import Layers

_ERNIE = "diffusers.models.transformers.transformer_ernie_image"
_READERS = partial(fp8_readers, "self_attention", QUERY_KEY_VALUE)
_FF_READERS = partial(fp8_readers, "mlp", ("gate_proj", "up_proj"))


def _first_norm(call: Call, block: Any, previous_x: Tensor | None, *rows: Tensor) -> Any:
    """Rows are shift, scale and gate of attention, then of the feed-forward."""

    def rows_of() -> tuple[Tensor, ...]:
        if call.state is None or not call.state.has_known_masks:
            return rows
        return tuple([call.shared(("row", i), r, lambda r: r[:1]) for i, r in enumerate(rows)])

    options: Any = {"name": "adaLN_sa_ln", "rows_of": rows_of, "readers": _READERS}
    return plain_norm(call, block, previous_x, **options)


def _block_forward(
    self: Any, call: Call, x: Tensor, rotary_pos_emb: Any, temb: Any, attention_mask: Any = None
) -> Tensor:
    modules, rows = self._modules, tuple(temb)
    if len(rows) != 6 or not call.takes(x, *rows):
        return NotImplemented
    (s,) = start(call, self, (_first_norm,), (x,), rows)
    if call.state is not None:
        call.state.block_mask = attention_mask
    _, _, gate, shift, scale, gate_mlp = s.rows
    options = {"attention_mask": attention_mask, "image_rotary_emb": rotary_pos_emb}
    s.add(modules["self_attention"](_transposed(s.n), **options).transpose(0, 1), gate)
    s.add(modules["mlp"](s.norm("adaLN_mlp_ln", scale, shift, readers=_FF_READERS)), gate_mlp)
    return end(s)


def _transposed(x: Any) -> Any:
    """(S, B, D) to (B, S, D), or the reverse, without a copy. x may be quantized."""
    if type(x) is not QuantizedRows:
        return x.transpose(0, 1)
    values, scale = x.values.transpose(0, 1), x.scale.transpose(0, 1)
    return QuantizedRows(values, scale, x.dtype, x.weights)


def _attention_forward(
    self: Any,
    call: Call,
    hidden_states: Any,
    encoder_hidden_states: Any = None,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    x, freqs, mask = hidden_states, image_rotary_emb, attention_mask
    if kwargs or not call.takes(x):
        return NotImplemented
    # Linear layers copy a block's tokens, unless they are transposed back.
    is_transposed = not (x.values if type(x) is QuantizedRows else x).is_contiguous()
    projected = attention.query_key_value(self, _transposed(x) if is_transposed else x, None)
    if is_transposed:
        projected = [*map(_transposed, projected)]
    tables, dtype = None, x.dtype
    if freqs is not None:
        make = lambda freqs: (freqs.cos().to(dtype), freqs.sin().to(dtype))  # noqa: E731
        tables = call.shared(("tables", dtype), freqs, make)
    operands: Any = (call, self, None, None, tables, _rotated, "part_of_head")
    query, key, value = attention.project_and_rotate(*operands, projected=projected, layout="half")
    options: Any = {"heads": self.heads, "dropout_p": 0.0, "is_causal": False}
    if mask is not None:
        mask = mask[:, None, None] if mask.dim() == 2 else mask
        options.update(attention.key_lengths_of(call, attention_mask, mask, *query.shape[:2]))
    out = attention.attend(call, self, query, key, value, mask, **options)
    return linear(self._modules["to_out"][0], out)


def _rotated(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """x (B, S, H, d) as the processor rotates it."""
    rotated, passed = x.tensor_split([tables[0].shape[-1]], dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    halves = torch.cat((-second, first), dim=-1)
    return torch.cat((rotated * tables[0] + halves * tables[1], passed), dim=-1)


def _final_forward(self: Any, call: Call, x: Tensor, conditioning: Tensor) -> Tensor:
    if not call.takes(x, conditioning):
        return NotImplemented
    scale, shift = linear(self._modules["linear"], conditioning).unsqueeze(0).chunk(2, dim=-1)
    return norm_and_modulate(call, self, "norm", x, scale, shift, Upcasts.NOWHERE)


_SPECS = (
    model_spec(f"{_ERNIE}:ErnieImageTransformer2DModel", "layers"),
    BlockSpec(f"{_ERNIE}:ErnieImageSharedAdaLNBlock", _block_forward),
    attention.AttentionSpec(
        f"{_ERNIE}:ErnieImageAttention",
        _attention_forward,
        "qk_norm_rope",
        processor=f"{_ERNIE}:ErnieImageSingleStreamAttnProcessor",
        processor_parameters="hidden_states attention_mask freqs_cis",
        rotate="",
    ),
    PatchSpec(
        f"{_ERNIE}:ErnieImageFeedForward",
        partial(
            gated_feed_forward,
            gate="gate_proj",
            value="up_proj",
            out="linear_fc2",
            activation=(torch.nn.functional.gelu, operations.geglu, True),
        ),
        "geglu",
        ("torch.nn.functional:gelu",),
    ),
    PatchSpec(f"{_ERNIE}:ErnieImageAdaLNContinuous", _final_forward, "layer_norm_modulate"),
    TIMESTEPS,
)
_EMBEDDERS = ("x_embedder", "text_proj", "time_embedding", "pos_embed", "adaLN_modulation")
_ONCE = (*_EMBEDDERS, "final_linear")
_LAYERS = Layers(("layers",), ("self_attention.to_[qkv]", "self_attention.to_out.0", "mlp.*"))
FAMILIES = (Family("ERNIE-Image", _SPECS, _ONCE, _LAYERS),)
