"""Nucleus-Image: how its transformer maps to the operations.

The text has no stream: each block makes keys and values from it. A block is

    x = x + tanh(gate) * attention(layer_norm(x) * (1 + scale))
    x = x + tanh(gate_mlp) * mlp(layer_norm(x) * (1 + scale_mlp))

with clamped gates, an RMS norm of each head's query and key, a complex rotary embedding of both, and several
query heads for each key head. mlp is a feed-forward with SwiGLU, or the sum of one and of experts that are
chosen by the norm before its modulation. The choice and the experts are the model's own code.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import operations
from ...operations.conditions import same_dtype_and_unit_stride
from ..attention import modules as attention
from ..attention.decision import shared_key_bias
from ..core.forward_state import Family, model_spec
from ..core.patch import Call, PatchSpec, Proxy
from ..parts import linears, streams
from ..parts.blocks import IMAGE_READERS
from ..parts.embeddings import TIMESTEPS
from ..parts.norm_modules import OUTPUT_NORM
from ..parts.norms import apply_norm, clip_to_float16
from ..parts.rotary import rope_operand
from ..quantized.precision import ATTENTION_LAYERS, ONE_LIST

_NUCLEUS = "diffusers.models.transformers.transformer_nucleusmoe_image"
_MLP_READERS = partial(linears.feed_forward_reader, "img_mlp")


def _first_norm(call: Call, block: Any, previous_x: Tensor | None, temb: Tensor) -> Any:
    """Rows are None, scale and gate of attention, then of the feed-forward."""
    modulation = streams.linear_modulation(call, block._modules["img_mod"], temb, previous_x)
    if modulation is None:
        return None

    def rows_of() -> streams.Rows:
        scales, gates = modulation.unflatten(1, (2, 2, -1)).unbind(2)
        both = zip(scales.split(1, dim=1), gates.clamp(-2.0, 2.0).tanh().split(1, dim=1))
        return (None, *[row for rows in both for row in rows])

    options: Any = {"name": "pre_attn_norm", "rows_of": rows_of, "readers": IMAGE_READERS}
    return streams.plain_norm(call, block, previous_x, **options)


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    attention_kwargs: dict[str, Any] | None = None,
) -> Tensor:
    x, c, modules, given = hidden_states, None, self._modules, attention_kwargs or {}
    if not call.takes(x, temb):
        return NotImplemented
    (s,) = streams.start(call, self, (_first_norm,), (x,), (temb,))
    if given.get("cached_txt_key") is None:
        c = linears.linear(modules["encoder_proj"], encoder_hidden_states)
    _, _, gate, scale_mlp, gate_mlp = s.rows
    options = {"encoder_hidden_states": c, "image_rotary_emb": image_rotary_emb, **given}
    s.add(modules["attn"](hidden_states=s.n, **options), gate)
    if self.moe_enabled:
        n, unmodulated = s.norm("pre_mlp_norm", scale_mlp, None, None, None)
        s.add(modules["img_mlp"](n, unmodulated, timestep=temb), gate_mlp)
    else:
        n = s.norm("pre_mlp_norm", scale_mlp, None, readers=_MLP_READERS)
        s.add(linears.feed_forward_branch(modules["img_mlp"], n), gate_mlp)
    return clip_to_float16(streams.end(s, hands_over=x.dtype != torch.float16))


def _attention_forward(
    self, call: Call, hidden_states, encoder_hidden_states=None, attention_mask=None, **kwargs
) -> Tensor:
    x, c, mask = hidden_states, encoder_hidden_states, attention_mask
    ropes = kwargs.pop("image_rotary_emb", None) or (None, None)
    of_text: Any = [kwargs.pop(f"cached_txt_{name}", None) for name in ("key", "value")]
    if kwargs or not call.takes(x, c, *of_text):
        return NotImplemented
    head_dim, rotate = self.inner_dim // self.heads, call.stand_in.functions[1].function
    rotate, options = partial(rotate, use_real=False), {"head_dim": head_dim}
    operands = (call, self, x, None, ropes[0], rotate)
    query, key, value = attention.project_and_rotate(*operands, **options)
    if of_text[0] is not None and of_text[1] is not None:
        of_text = [tensor.flatten(2) for tensor in of_text]
    elif c is not None:
        k, v = linears.linears(c, *map(self._modules.get, linears.TEXT_QUERY_KEY_VALUE[1:]))
        operand = rope_operand(ropes[1], k, k.shape[2] // head_dim, True)
        k = apply_norm(call, self, "norm_added_k", k.unflatten(2, (-1, head_dim)))
        if operand is not None and same_dtype_and_unit_stride(k):
            k = operations.rope(k, operand)
        elif ropes[1] is not None:
            k = rotate(k, ropes[1])
        of_text = k.flatten(2), v
    else:
        of_text = []
    if of_text:
        key, value = (torch.cat(pair, dim=1) for pair in zip((key, value), of_text))
    options = {"heads": self.heads, "dropout_p": 0.0, "is_causal": False}
    if mask is not None and mask.shape == key.shape[:2]:
        by_key = call.shared("mask", mask, lambda mask: mask[:, None, None])
        options["key_bias"] = shared_key_bias(call, by_key, key, False)
    out = attention.attend(call, self, query, key, value, mask, **options)
    return attention.project_out(self, out, x)


def _experts_forward(self: Any, call: Call, *args: Any, **kwargs: Any) -> Tensor:
    """The class's own forward, with other calls of its linear layers."""
    module: Any = Proxy(self)
    module.gate = partial(linears.linear, self._modules["gate"])
    module.shared_expert = partial(linears.feed_forward, self._modules["shared_expert"])
    return call.stand_in.own_forward(module, *args, **kwargs)


_ATTENTION = {**attention.ROTATED_ATTENTION, "rotate": "_apply_rotary_emb_nucleus"}
_ATTENTION["processor_parameters"] += " cached_txt_key cached_txt_value"
_WRAPPED = "wrapped: its router and its shared expert"
_SPECS = (
    model_spec(f"{_NUCLEUS}:NucleusMoEImageTransformer2DModel", "transformer_blocks"),
    streams.BlockSpec(f"{_NUCLEUS}:NucleusMoEImageTransformerBlock", _block_forward),
    attention.AttentionSpec(
        "diffusers.models.attention_processor:Attention",
        _attention_forward,
        "qk_norm_rope",
        processor=f"{_NUCLEUS}:NucleusMoEAttnProcessor2_0",
        **_ATTENTION,
    ),
    PatchSpec(f"{_NUCLEUS}:NucleusMoELayer", _experts_forward, _WRAPPED, left_to_compiler=True),
    TIMESTEPS,
    linears.GATED_ACTIVATIONS[1],
)
_ONCE = ("pos_embed", "time_text_embed", "txt_norm", "img_in", "proj_out")
_PARTS, _OF_PART = ("img_mlp.net", "img_mlp.shared_expert.net"), ("0.proj", "2")
_FEED_FORWARDS = [f"{part}.{layer}" for part in _PARTS for layer in _OF_PART]
_LAYERS = ONE_LIST._replace(layers=(*ATTENTION_LAYERS, "encoder_proj", *_FEED_FORWARDS))
FAMILIES = (Family("Nucleus-Image", _SPECS, _ONCE, _LAYERS, OUTPUT_NORM),)
