"""Cosmos: how the transformers of Predict1, Predict2 and Transfer2.5, and a ControlNet, map to operations.

A block has three branches,

    n = layer_norm(x) * (1 + scale) + shift;  x = x + gate * attn1(n)
    n = layer_norm(x) * (1 + scale) + shift;  x = x + gate * attn2(n, text)
    n = layer_norm(x) * (1 + scale) + shift;  x = x + gate * ff(n)

with an RMS norm of each head's query and key, and a rotary embedding of both in attn1. Each norm has its own
modulation, linear_2(linear_1(silu(t))) plus rows that all norms share; t has a row for each sample or token.
Predict1 adds position embeddings before each block, Transfer2.5 a ControlNet's results after some. attn2 of
Transfer2.5 also attends to an image, with linear layers and norms of its own, and adds both results.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ..attention import modules as attention
from ..core.checks import KnownClass
from ..core.forward_state import Family, model_spec
from ..core.patch import Call
from ..parts import linears, streams
from ..parts.embeddings import COSMOS_POSITIONS, TIMESTEPS
from ..parts.norm_modules import COSMOS_OUTPUT_NORM
from ..parts.streams import ADAPTIVE
from ..quantized.precision import ATTENTION_LAYERS, FEED_FORWARD_LAYERS, PRECISIONS, Layers

_COSMOS = "diffusers.models.transformers.transformer_cosmos"
_CONTROLNET = "diffusers.models.controlnets.controlnet_cosmos"
ADAPTIVE.add(KnownClass(f"{_COSMOS}:CosmosAdaLayerNormZero"), 3, (1, 0))


def _modulation(
    call: Call, module: Any, previous_x: Tensor | None, t: Tensor, shared: Tensor | None
) -> Tensor | None:
    """``linear_2(linear_1(silu(t))) + shared``, with the sum in one launch if all samples share a row."""
    layer = module._modules["linear_2"]
    hidden = streams.linear_of_silu(call, module._modules["linear_1"], t, previous_x)
    if hidden is None or (previous_x is not None and not streams.may_run_ahead(layer, previous_x)):
        return None
    plain = linears.plain_weight(layer)
    if (
        plain is not None
        and plain[1] is None
        and shared is not None
        and (shared.dim(), shared.shape[0], shared.dtype) == (2, 1, hidden.dtype)
    ):
        return F.linear(hidden, plain[0], shared[0])
    out = linears.linear(layer, hidden)
    return out if shared is None else out + shared


# Rows are shift, scale and gate.
_norm = partial(streams.adaptive_norm, takes_emb=False, modulation_of=_modulation)


def _query_reader(block: Any, x: Tensor) -> Any:
    layers = ("to_q", "q_img") if "q_img" in block._modules["attn2"]._modules else ("to_q",)
    return linears.fp8_readers("attn2", layers, block, x)


_READERS = partial(linears.fp8_readers, "attn1", linears.QUERY_KEY_VALUE)
_FIRST = partial(_norm, name="norm1", readers=_READERS)
_SECOND = partial(_norm, name="norm2", readers=_query_reader)
_THIRD = partial(_norm, name="norm3", readers=partial(linears.feed_forward_reader, "ff"))


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Any,
    embedded_timestep: Tensor,
    temb: Tensor | None = None,
    image_rotary_emb: Any = None,
    extra_pos_emb: Tensor | None = None,
    attention_mask: Any = None,
    controlnet_residual: Tensor | None = None,
    latents: Any = None,
    block_idx: int | None = None,
) -> Any:
    x, conditions, modules = hidden_states.contiguous(), (embedded_timestep, temb), self._modules
    if not call.takes(x, *conditions, extra_pos_emb, controlnet_residual):
        return NotImplemented
    if self.before_proj is not None:
        x = linears.linear(self.before_proj, x) + latents
    (s,) = streams.start(call, self, (_FIRST,), (x,), conditions, addend=extra_pos_emb)
    s.add(modules["attn1"](s.n, image_rotary_emb=image_rotary_emb), s.rows[2])
    s.apply(_SECOND(call, self, None, *conditions))
    options = {"encoder_hidden_states": encoder_hidden_states, "attention_mask": attention_mask}
    s.add(modules["attn2"](s.n, **options), s.rows[2])
    s.apply(_THIRD(call, self, None, *conditions))
    s.add(linears.feed_forward_branch(modules["ff"], s.n), s.rows[2])
    if controlnet_residual is not None:
        s.add(controlnet_residual)
    x = streams.end(s, hands_over=extra_pos_emb is None)
    return x if self.after_proj is None else (x, linears.linear(self.after_proj, x))


def _attention_forward(
    self, call: Call, hidden_states, encoder_hidden_states=None, attention_mask=None, **kwargs
) -> Tensor:
    x, c, mask, image, image_mask = hidden_states, encoder_hidden_states, attention_mask, None, None
    rope = kwargs.pop("image_rotary_emb", None)
    if kwargs or isinstance(c, tuple) != ("q_img" in self._modules):
        return NotImplemented
    if isinstance(c, tuple):
        (c, image), (mask, image_mask) = c, mask or (None, None)
    if not call.takes(x, c, image):
        return NotImplemented
    rotate = partial(call.stand_in.functions[1].function, use_real_unbind_dim=-2, sequence_dim=1)
    options: dict[str, Any] = {"heads": self.heads, "dropout_p": 0.0, "is_causal": False}
    operands = (call, self, x, c, rope, rotate)
    query, key, value = attention.project_and_rotate(*operands, layout="half")
    out = attention.attend(call, self, query, key, value, mask, **options)
    if image is not None:
        image = image.reshape(x.shape[0], -1, image.shape[2])  # as the model does with heads
        operands = (call, self, x, image, None, rotate)
        query, key, value = attention.project_and_rotate(*operands, **_OF_IMAGE)
        out = attention.attend(call, self, query, key, value, image_mask, addend=out, **options)
    return attention.project_out(self, out, x)


# The layers and norms of attention to an image.
_OF_IMAGE: Any = {"layers": ("q_img", "k_img", "v_img"), "names": ("q_img_norm", "k_img_norm")}


def _attention(path: str, processor: str) -> attention.AttentionSpec:
    options = {"processor": f"{_COSMOS}:{processor}", **attention.ROTATED_ATTENTION}
    return attention.AttentionSpec(path, _attention_forward, "qk_norm_rope", **options)


_SPECS = (
    model_spec(f"{_COSMOS}:CosmosTransformer3DModel", "transformer_blocks"),
    model_spec(f"{_CONTROLNET}:CosmosControlNetModel", "control_blocks"),
    streams.BlockSpec(f"{_COSMOS}:CosmosTransformerBlock", _block_forward),
    _attention(f"{_COSMOS}:CosmosAttention", "CosmosAttnProcessor2_5"),
    _attention("diffusers.models.attention_processor:Attention", "CosmosAttnProcessor2_0"),
    COSMOS_POSITIONS,
    TIMESTEPS,
    linears.LINEAR_GELU,
)
_ONCE = (
    *("patch_embed", "patch_embed_base", "learnable_pos_embed", "time_embed", "crossattn_proj"),
    *("img_context_proj", "proj_out"),
)
_LAYERS = Layers(
    ("transformer_blocks", "control_blocks"),
    (*ATTENTION_LAYERS, *FEED_FORWARD_LAYERS, "*attn*.[qkv]_img"),
)
FAMILIES = (Family("Cosmos", _SPECS, _ONCE, _LAYERS, COSMOS_OUTPUT_NORM, int8_tiers=PRECISIONS),)
