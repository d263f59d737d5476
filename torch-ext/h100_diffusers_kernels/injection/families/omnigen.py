"""OmniGen: how its transformer maps to the operations.

Text, images of the text, the time step and the image are one stream, in the blocks of a language model,

    x = x + attention(rms_norm(x))
    x = x + mlp(rms_norm(x))

with a rotary embedding of query and key whose pairs are a head's halves, and mlp(x) = down_proj(silu(first
half of gate_up_proj(x)) * second half). Attention is causal except inside of images: its mask is a bias with
the dtype's lowest value, and each query attends to an interval of keys.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import operations
from ...operations.conditions import kernels_take
from ..attention.modules import ROTATED_ATTENTION, AttentionSpec, attend, project_and_rotate
from ..core.forward_state import Family, model_spec
from ..core.patch import Call, PatchSpec
from ..parts.embeddings import TIMESTEPS
from ..parts.linears import QUERY_KEY_VALUE, fp8_readers, linear, why_not_silu
from ..parts.streams import BlockSpec, end, plain_norm, start
from ..quantized.precision import Layers

_OMNIGEN = "diffusers.models.transformers.transformer_omnigen"
_READERS = partial(fp8_readers, "self_attn", QUERY_KEY_VALUE)
_FF_READERS = partial(fp8_readers, "mlp", ("gate_up_proj",))
_FIRST_NORMS = (partial(plain_norm, name="input_layernorm", readers=_READERS),)


def _block_forward(
    self: Any, call: Call, hidden_states: Tensor, attention_mask: Any, image_rotary_emb: Any
) -> Tensor:
    x, modules = hidden_states, self._modules
    if not call.takes(x):
        return NotImplemented
    (s,) = start(call, self, _FIRST_NORMS, (x,), ())
    both = {"hidden_states": s.n, "encoder_hidden_states": s.n}
    options = {"attention_mask": attention_mask, "image_rotary_emb": image_rotary_emb}
    s.add(modules["self_attn"](**both, **options))
    s.add(modules["mlp"](s.norm("post_attention_layernorm", readers=_FF_READERS)))
    return end(s)


def _attention_forward(
    self: Any, call: Call, hidden_states, encoder_hidden_states=None, attention_mask=None, **kwargs
) -> Tensor:
    x, context, rope = hidden_states, encoder_hidden_states, kwargs.pop("image_rotary_emb", None)
    if (
        kwargs
        or context is None
        or self.inner_kv_dim != self.inner_dim
        or not call.takes(x, context)
    ):
        return NotImplemented
    function = call.stand_in.functions[1].function
    rotate = partial(function, use_real_unbind_dim=-2, sequence_dim=1)
    operands = (call, self, x, None if context is x else context, rope, rotate)
    query, key, value = project_and_rotate(*operands, layout="half")
    out = attend(call, self, query, key, value, attention_mask, heads=self.heads)
    return linear(self._modules["to_out"][0], out)  # the processor leaves the dropout out


def _feed_forward_forward(self: Any, call: Call, hidden_states: Tensor) -> Tensor:
    x, modules = hidden_states, self._modules
    if not call.takes(x):
        return NotImplemented
    both = linear(modules["gate_up_proj"], x)
    if kernels_take(both):
        return linear(modules["down_proj"], operations.swiglu(both, activated="first"))
    gate, up = both.chunk(2, dim=-1)
    return linear(modules["down_proj"], up * torch.nn.functional.silu(gate))


def _why_not_feed_forward(module: Any) -> str | None:
    return why_not_silu(module._modules.get("activation_fn"))


_SPECS = (
    model_spec(f"{_OMNIGEN}:OmniGenTransformer2DModel", "layers"),
    BlockSpec(f"{_OMNIGEN}:OmniGenBlock", _block_forward),
    AttentionSpec(
        "diffusers.models.attention_processor:Attention",
        _attention_forward,
        "qk_norm_rope",
        processor=f"{_OMNIGEN}:OmniGenAttnProcessor2_0",
        **ROTATED_ATTENTION,
        dispatches=False,
    ),
    PatchSpec(
        f"{_OMNIGEN}:OmniGenFeedForward",
        _feed_forward_forward,
        "swiglu",
        condition=_why_not_feed_forward,
    ),
    TIMESTEPS,
)
_EMBEDDERS = ("patch_embedding", "time_token", "t_embedder", "embed_tokens", "rope")
_ONCE = (*_EMBEDDERS, "norm", "norm_out", "proj_out")
_LAYERS = Layers(("layers",), ("self_attn.to_[qkv]", "self_attn.to_out.0", "mlp.*_proj"))
FAMILIES = (Family("OmniGen", _SPECS, _ONCE, _LAYERS),)
