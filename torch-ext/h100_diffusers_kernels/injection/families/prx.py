"""PRX: how its transformer maps to the operations.

A block of the image's tokens x is

    x = x + gate * attention(layer_norm(x) * (1 + scale) + shift, text)
    x = x + gate_mlp * mlp(layer_norm(x) * (1 + scale_mlp) + shift_mlp)

with mlp(n) = down_proj(gelu(gate_proj(n)) * up_proj(n)). The image attends to the text and to itself. Queries
and keys have an RMS norm of each head, and the image's a rotary embedding, a matrix for each pair.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import operations
from ..attention import modules as attention
from ..core.checks import KnownClass, is_stock
from ..core.forward_state import Family, model_spec
from ..core.patch import Call
from ..parts.linears import GELU, fp8_readers, linear, swiglu_of_two
from ..parts.norms import apply_norm
from ..parts.rotary import rotated_in_float32, tables_of_matrices
from ..parts.streams import BlockSpec, end, linear_of_silu, may_run_ahead, plain_norm, start
from ..quantized.fp8_linears import fp8_weights_for
from ..quantized.precision import Layers

_PRX = "diffusers.models.transformers.transformer_prx"
_MODULATION = KnownClass(f"{_PRX}:Modulation", "torch.nn.functional:silu")
_READERS = partial(fp8_readers, "attention", ("img_qkv_proj",))


def _first_norm(call: Call, block: Any, previous_x: Tensor | None, temb: Tensor) -> Any:
    """Rows are shift, scale and gate of attention, then of the feed-forward."""
    module = block._modules["modulation"]
    is_known = is_stock(module, _MODULATION)
    if previous_x is not None and not (is_known and may_run_ahead(module, previous_x)):
        return None

    def rows_of(temb: Tensor) -> Any:
        if not is_known:
            return [row for rows in module(temb) for row in rows]
        table: Any = linear_of_silu(call, module._modules["lin"], temb, None)
        return table.unsqueeze(1).chunk(6, dim=-1)

    options: Any = {"name": "img_pre_norm", "rows_of": rows_of, "readers": _READERS}
    return plain_norm(call, block, previous_x, temb, **options)


def _ff_readers(block: Any, x: Tensor) -> Any:
    return fp8_weights_for(x, block._modules["gate_proj"], block._modules["up_proj"])


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    x, c, modules = hidden_states, encoder_hidden_states, self._modules
    if not call.takes(x, c, temb):
        return NotImplemented
    (s,) = start(call, self, (_first_norm,), (x,), (temb,))
    _, _, gate, shift, scale, gate_mlp = s.rows
    options = {"attention_mask": attention_mask, "image_rotary_emb": image_rotary_emb}
    s.add(modules["attention"](hidden_states=s.n, encoder_hidden_states=c, **options), gate)
    n = s.norm("post_attention_layernorm", scale, shift, readers=_ff_readers)
    s.add(linear(modules["down_proj"], _gated(call, modules, n)), gate_mlp)
    return end(s)


def _gated(call: Call, modules: Any, n: Any) -> Tensor:
    gelu, layers = modules["mlp_act"], (modules["gate_proj"], modules["up_proj"])
    if not is_stock(gelu, GELU):
        return gelu(linear(layers[0], n)) * linear(layers[1], n)
    operation = partial(operations.geglu, approximate=gelu.approximate)
    return swiglu_of_two(call, n, *layers, gelu, operation)


def _attention_forward(
    self: Any,
    call: Call,
    hidden_states: Any,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    x, c, rope, modules = hidden_states, encoder_hidden_states, image_rotary_emb, self._modules
    mask = attention_mask
    if c is None or rope is None or not call.takes(x, c):
        return NotImplemented
    if mask is not None and mask.shape != c.shape[:2]:
        return NotImplemented  # the model's own code raises
    image = linear(modules["img_qkv_proj"], x).chunk(3, dim=-1)
    make = lambda rope: tables_of_matrices(rope.transpose(1, 2))  # noqa: E731
    tables = call.shared("tables", rope, make)
    operands: Any = (call, self, None, None, tables, rotated_in_float32)
    query, key, value = attention.project_and_rotate(*operands, projected=image)
    text_key, text_value = linear(modules["txt_kv_proj"], c).chunk(2, dim=-1)
    text_key = apply_norm(call, self, "norm_added_k", text_key.unflatten(2, (self.heads, -1)))
    key = torch.cat((text_key.flatten(2), key), dim=1)
    value = torch.cat((text_value, value), dim=1)
    if mask is not None:
        place = query.device, torch.bool
        pad = partial(torch.nn.functional.pad, pad=(0, query.shape[1]), value=True)
        mask = call.shared("mask", mask, lambda mask: pad(mask.to(*place))[:, None, None])
    out = attention.attend(call, self, query, key, value, mask, heads=self.heads)
    return attention.project_out(self, out, x)


_SPECS = (
    model_spec(f"{_PRX}:PRXTransformer2DModel", "blocks"),
    BlockSpec(f"{_PRX}:PRXBlock", _block_forward),
    attention.AttentionSpec(
        f"{_PRX}:PRXAttention",
        _attention_forward,
        "qk_norm_rope",
        processor=f"{_PRX}:PRXAttnProcessor2_0",
        processor_parameters="hidden_states encoder_hidden_states attention_mask"
        " image_rotary_emb kwargs",
        rotate="apply_rope",
    ),
)
_ONCE = ("pe_embedder", "img_in", "time_in", "txt_in", "resolution_embedder", "final_layer")
_LAYERS = Layers(
    ("blocks",),
    ("attention.*_proj", "attention.to_out.0", "gate_proj", "up_proj", "down_proj"),
)
FAMILIES = (Family("PRX", _SPECS, _ONCE, _LAYERS),)
