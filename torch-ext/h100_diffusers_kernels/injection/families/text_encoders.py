"""Text encoders of transformers, in part: RMS norms, gated feed-forwards, and what surrounds attention.

Attention itself is the model's own: it is causal, or has a bias for each query, key and head. So is
``torch.nn.LayerNorm``, which is one launch already.

- T5 and UMT5 add a bias to the scores that depends on the key's position minus the query's. It is computed
  once for each difference, and contiguous: with other strides PyTorch would not fuse attention.
- Decoder-only models normalize and rotate query and key in one operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ... import operations
from ...operations.conditions import kernels_take, tracks_derivatives, why_not_taken
from ..core.cache import cached
from ..core.checks import KnownClass, KnownClasses, class_name, is_stock
from ..core.forward_state import Family
from ..core.patch import Call, ExactSpec, PatchSpec, Proxy
from ..parts.linears import SILU, linear, run_dropout, swiglu_of_two
from ..parts.norm_modules import NormSpec, compute_norm, norm_forward
from ..parts.norms import NORM_KINDS, RMS, Upcasts, read_norm

FAMILIES: tuple[Family, ...] = ()
_MODELS = "transformers.models."

# --------------------------------------------------------------------------------------------------
# Norms


def _norm_spec(path: str, parameters: str) -> NormSpec:
    spec = NormSpec(path, norm_forward, "rms_norm", (), True, parameters)
    NORM_KINDS.add(spec.known, RMS)
    return spec


def _gemma_norm_forward(self: Any, call: Call, x: Tensor) -> Tensor:
    """Gemma's norm computes in float32, with a weight that counts from 1: a modulation without a shift."""
    norm = (RMS, (None,), self.eps)
    out = compute_norm(norm, x, Upcasts.IN_NORMS, self._parameters["weight"], None)
    return out if isinstance(out, Tensor) else call.decline(out)


# --------------------------------------------------------------------------------------------------
# Feed-forwards

_ACTIVATIONS = "transformers.activations:"
_tanh_geglu = partial(operations.geglu, approximate="tanh")
# The operation of a product with each activation.
_GATED = KnownClasses(
    (KnownClass(f"{_ACTIVATIONS}NewGELUActivation"), _tanh_geglu),
    (KnownClass(f"{_ACTIVATIONS}GELUTanh"), _tanh_geglu),
    (KnownClass(f"{_ACTIVATIONS}SiLUActivation", "torch.nn.functional:silu"), operations.swiglu),
    (SILU, operations.swiglu),
)


def _gated(call: Call, x: Tensor, activation: Any, activated: Any, other: Any) -> Any:
    """``activation(activated(x)) * other(x)``, or NotImplemented."""
    known, operation = _GATED.by_class.get(type(activation), (None, None))
    if known is None or not is_stock(activation, known):
        return call.decline(f"its activation is {class_name(activation)}, or was replaced")
    if not call.takes(x):
        return NotImplemented
    return swiglu_of_two(call, x, activated, other, activation, operation)


def _feed_forward(self: Any, call: Call, x: Tensor) -> Tensor:
    modules = self._modules
    y = _gated(call, x, modules["act_fn"], modules["gate_proj"], modules["up_proj"])
    return y if y is NotImplemented else linear(modules["down_proj"], y)


def _t5_feed_forward(self: Any, call: Call, hidden_states: Tensor) -> Tensor:
    modules = self._modules
    y = _gated(call, hidden_states, modules["act"], modules["wi_0"], modules["wi_1"])
    if y is NotImplemented:
        return y
    y, out = run_dropout(modules["dropout"], y), modules["wo"]
    weight = out.weight  # float32 in some models of half precision
    is_cast = isinstance(weight, Tensor) and weight.dtype not in (y.dtype, torch.int8)
    return linear(out, y.to(weight.dtype) if is_cast else y)


# --------------------------------------------------------------------------------------------------
# Attention with relative positions


@dataclass(frozen=True, eq=False)
class _BiasedAttention(ExactSpec):
    """T5's attention that computes the bias: each of UMT5, and the first of T5, which passes it on."""

    def matches(self, module: nn.Module) -> bool:
        return super().matches(module) and bool(module.has_relative_attention_bias)


def _biased_attention(self: Any, call: Call, *args: Any, **kwargs: Any) -> Any:
    if tracks_derivatives():
        return call.decline(None)
    module: Any = Proxy(self)
    module.compute_bias = partial(_compute_bias, self, call)
    return call.stand_in.own_forward(module, *args, **kwargs)


def _compute_bias(
    module: Any,
    call: Call,
    query_length: int,
    key_length: int,
    device: Any = None,
    past_seen_tokens: Any = 0,
) -> Tensor:
    """The bias (1, H, S, S), from its values for one query and all differences of positions."""
    own, length = type(module).compute_bias, query_length
    if key_length != length or type(past_seen_tokens) is not int or past_seen_tokens != 0:
        return own(module, length, key_length, device, past_seen_tokens)

    def bucket(position: Tensor, **options: Any) -> Tensor:
        make = partial(module._relative_position_bucket, position, **options)
        return cached(call, position, (length, *options.values()), lambda: (make(),))[0]

    one_query: Any = Proxy(module)
    one_query._relative_position_bucket = bucket
    values = own(one_query, 1, 2 * length - 1, device, length - 1)
    # A window of the values for each query; the last query has the first window.
    return values[:, :, 0].contiguous().unfold(2, length, 1).flip(2).contiguous()


# --------------------------------------------------------------------------------------------------
# Attention with rotary embeddings


def _rotary_attention(self: Any, call: Call, *args: Any, **kwargs: Any) -> Any:
    """The class's own forward, with another function for rotary embeddings, which also normalizes."""
    if tracks_derivatives():
        return call.decline(None)
    module: Any = self
    norms = (self._modules.get("q_norm"), self._modules.get("k_norm"))
    read = [read_norm(norm) for norm in norms]
    if any(isinstance(norm, str) for norm in read) or read[0][2] != read[1][2]:
        read = []
    else:
        module = Proxy(self)
        module.q_norm = module.k_norm = _unchanged
    own = call.stand_in.own_forward
    others = {"apply_rotary_pos_emb": partial(_normalize_and_rotate, call, norms, read)}
    # Made at each call, because users may replace what its module's names mean.
    copied: Any = FunctionType(
        own.__code__, {**own.__globals__, **others}, own.__name__, own.__defaults__, own.__closure__
    )
    copied.__kwdefaults__ = own.__kwdefaults__
    return copied(module, *args, **kwargs)


def _unchanged(x: Tensor) -> Tensor:
    return x


def _normalize_and_rotate(
    call: Call,
    norms: Any,
    read: Any,
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """transformers' ``apply_rotary_pos_emb`` of query and key (B, H, S, d), after their norms, if these have
    been read."""
    query_weight, key_weight = [norm[1][0] for norm in read] or (None, None)
    tensors = (query, key, cos, sin, query_weight, key_weight)
    shape = (query.shape[0], query.shape[2], query.shape[3])
    reason = None
    if not kernels_take(*tensors):
        reason = why_not_taken(*tensors)
    elif args or kwargs or cos.shape[1:] != shape[1:] or cos.shape[0] not in (1, shape[0]):
        reason = "the kernel does not support its rotary embedding"
    if reason is not None:
        call.fall_back(reason)
        if read:
            query, key = norms[0](query), norms[1](key)
        return call.stand_in.functions[0].function(query, key, cos, sin, *args, **kwargs)
    query, key = operations.qk_norm_rope(
        query.transpose(1, 2),
        key.transpose(1, 2),
        query_weight,
        key_weight,
        (cos, sin),
        heads=query.shape[1],
        norm="per_head" if read else "none",
        layout="half",
        eps=read[0][2] if read else 0.0,
    )
    return query.transpose(1, 2), key.transpose(1, 2)


# --------------------------------------------------------------------------------------------------
# Classes


def _t5(name: str) -> tuple[PatchSpec, ...]:
    path = f"{_MODELS}{name.lower()}.modeling_{name.lower()}:{name}"
    functions = (f"{path}Attention.compute_bias", f"{path}Attention._relative_position_bucket")
    operations_ = "its relative positions, once for each difference"
    return (
        _norm_spec(f"{path}LayerNorm", "self hidden_states"),
        ExactSpec(f"{path}DenseGatedActDense", _t5_feed_forward, "geglu or swiglu", (), True),
        _BiasedAttention(f"{path}Attention", _biased_attention, operations_, functions, True),
    )


def _decoder_only(file: str, name: str, feed_forward: str | None = None) -> tuple[PatchSpec, ...]:
    path = f"{_MODELS}{file}.modeling_{file}:"
    norm = f"{path}{name}RMSNorm"
    rotary = (f"{path}apply_rotary_pos_emb",)
    is_gemma = name.startswith("Gemma")
    return (
        ExactSpec(norm, _gemma_norm_forward, "rms_norm_modulate", (), True)
        if is_gemma
        else _norm_spec(norm, "self hidden_states"),
        ExactSpec(
            f"{path}{feed_forward or name + 'MLP'}", _feed_forward, "swiglu or geglu", (), True
        ),
        ExactSpec(f"{path}{name}Attention", _rotary_attention, "qk_norm_rope", rotary, True),
    )


TEXT_ENCODERS = (
    *_t5("T5"),
    *_t5("UMT5"),
    *_decoder_only("gemma2", "Gemma2"),
    *_decoder_only("gemma3", "Gemma3"),
    *_decoder_only("llama", "Llama"),
    *_decoder_only("mistral", "Mistral"),
    *_decoder_only("qwen2_5_vl", "Qwen2_5_VL", "Qwen2MLP"),
    *_decoder_only("qwen3", "Qwen3"),
    *_decoder_only("qwen3_vl", "Qwen3VLText"),
)
