"""HiDream-I1: how its transformer maps to the operations.

A block of the image, or of image and text, is, of each stream with a modulation of its own,

    x = x + gate * attention(layer_norm(x) * (1 + scale) + shift)
    x = x + gate_mlp * mlp(layer_norm(x) * (1 + scale_mlp) + shift_mlp)

Attention is joint, the image first, with an RMS norm of queries and keys across heads and a rotary embedding.
mlp is a feed-forward with SwiGLU, the image's the sum of one and of experts, which a router chooses for each
token. The model gives each block other text, so no block computes the next one's norms.
"""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..attention import modules as attention
from ..core.forward_state import Family, model_spec
from ..core.patch import Call, PatchSpec
from ..core.quantized_rows import QuantizedRows
from ..parts.embeddings import TIMESTEPS
from ..parts.linears import fp8_readers, gated_feed_forward, linear_per_sample, linears
from ..parts.rotary import rotated_across_heads
from ..parts.streams import BlockSpec, Rows, end, linear_modulation, plain_norm, start
from ..quantized.precision import Layers

_HIDREAM = "diffusers.models.transformers.transformer_hidream_image"
# The suffixes of the image's and the text's norms and feed-forwards, and of their layers in attention.
_SUFFIXES, _OF_ATTENTION = ("_i", "_t"), ("", "_t")
_LAYERS = [tuple(f"to_{name}{suffix}" for name in "qkv") for suffix in _OF_ATTENTION]
# Rows of each stream: shift, scale and gate of attention, then of the feed-forward.
_FIRST_NORMS = [
    partial(
        plain_norm,
        name=f"norm1{suffix}",
        rows_of=itemgetter(slice(6 * i, 6 * i + 6)),
        readers=partial(fp8_readers, "attn1", _LAYERS[i]),
    )
    for i, suffix in enumerate(_SUFFIXES)
]
_FEED_FORWARD = partial(gated_feed_forward, gate="w1", value="w3", out="w2")
_SILU = "torch.nn.functional:silu"


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    hidden_states_masks: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    temb: Tensor | None = None,
    image_rotary_emb: Tensor | None = None,
) -> Any:
    modules, is_double = self._modules, "norm1_t" in self._modules
    tokens: Any = (hidden_states, encoder_hidden_states)[: 1 + is_double]
    if temb is None or not call.takes(*tokens, temb):
        return NotImplemented
    made: Any = linear_modulation(call, modules["adaLN_modulation"], temb, None)
    rows: Rows = made.unsqueeze(1).chunk(6 * len(tokens), dim=-1)
    streams = start(call, self, _FIRST_NORMS[: len(tokens)], tokens, (rows,))
    image, *text = [s.n for s in streams]
    outs = modules["attn1"](image, hidden_states_masks, *text, image_rotary_emb=image_rotary_emb)
    for s, out in zip(streams, outs if is_double else (outs,)):
        s.add(out, s.rows[2])
    for s, suffix in zip(streams, _SUFFIXES):
        shift, scale, gate = s.rows[3:6]
        s.add(modules[f"ff{suffix}"](s.norm(f"norm3{suffix}", scale, shift)), gate)
    return end(*streams, hands_over=False)


def _attention_forward(
    self: Any,
    call: Call,
    norm_hidden_states: Any,
    hidden_states_masks: Tensor | None = None,
    norm_encoder_hidden_states: Any = None,
    image_rotary_emb: Any = None,
) -> Any:
    tokens = (norm_hidden_states, norm_encoder_hidden_states)[: 2 - self.single]
    rope, modules, length = image_rotary_emb, self._modules, norm_hidden_states.shape[1]
    rotated_dim = 0 if rope is None else 2 * rope.shape[-3]
    if not call.takes(*tokens) or rotated_dim != self.inner_dim // self.heads:
        return NotImplemented
    # Of rotations (B, S, 1, d / 2, 2, 2), or multiples of them, (cos, sin), each (B, S, 1, d / 2).
    columns = rope.float()[..., 0].split([x.shape[1] for x in tokens], dim=1)
    tables = [[*map(Tensor.contiguous, each.unbind(-1))] for each in columns]
    each: list[Any] = []
    for x, names, suffix, table in zip(tokens, _LAYERS, _OF_ATTENTION, tables):
        q, k, v = linears(x, *map(modules.get, names))
        norms = (f"q_rms_norm{suffix}", f"k_rms_norm{suffix}")
        options: Any = {"form": "across_heads", "heads": self.heads, "names": norms}
        q, k = attention.norm_and_rotate(call, self, q, k, table, rotated_across_heads, **options)
        if hidden_states_masks is not None and not suffix:
            k = k * hidden_states_masks.unsqueeze(-1)
        each.append((q, k, v))
    q, k, v = each[0] if self.single else [torch.cat(pair, dim=1) for pair in zip(*each)]
    options = {"heads": self.heads, "dropout_p": 0.0, "is_causal": False}
    out = attention.attend(call, self, q, k, v, None, **options)
    parts = zip(("to_out", "to_out_t"), (out[:, :length], out[:, length:]), tokens)
    outs = [linear_per_sample(modules[n], o, type(x) is QuantizedRows) for n, o, x in parts]
    return outs[0] if self.single else tuple(outs)


def _experts_forward(self: Any, call: Call, x: Tensor) -> Tensor:
    """Unlike the class's own code with one sum of all results, and with one index for each row."""
    if self.training or torch.is_grad_enabled() or not call.takes(x):
        return NotImplemented
    experts, (indices, weights, _) = self.experts, self.gate(x)
    order = indices.flatten().argsort(stable=True)
    counts = torch.nn.functional.one_hot(indices.flatten(), len(experts)).sum(0).tolist()
    rows = x.flatten(0, -2)[order // self.num_activated_experts]
    results = torch.empty_like(rows)
    for expert, given, places in zip(experts, rows.split(counts), order.split(counts)):
        if len(given):
            results[places] = expert(given)
    results = results.view(*weights.shape, -1).mul_(weights.unsqueeze(-1)).sum(dim=1)
    return results.view_as(x) + self.shared_experts(x)


_WRAPPED = "wrapped: its experts' results are one sum"
_SPECS = (
    model_spec(f"{_HIDREAM}:HiDreamImageTransformer2DModel"),
    BlockSpec(f"{_HIDREAM}:HiDreamImageTransformerBlock", _block_forward),
    BlockSpec(f"{_HIDREAM}:HiDreamImageSingleTransformerBlock", _block_forward),
    attention.AttentionSpec(
        f"{_HIDREAM}:HiDreamAttention",
        _attention_forward,
        "qk_norm_rope",
        processor=f"{_HIDREAM}:HiDreamAttnProcessor",
        processor_parameters="hidden_states hidden_states_masks encoder_hidden_states"
        " image_rotary_emb args kwargs",
        rotate="apply_rope",
        dispatches=False,
    ),
    PatchSpec(
        f"{_HIDREAM}:MOEFeedForwardSwiGLU", _experts_forward, _WRAPPED, left_to_compiler=True
    ),
    PatchSpec(f"{_HIDREAM}:HiDreamImageFeedForwardSwiGLU", _FEED_FORWARD, "swiglu", (_SILU,)),
    TIMESTEPS,
)
_EMBEDDERS = ("x_embedder", "t_embedder", "p_embedder", "pe_embedder", "caption_projection")
_PARTS = ("i", "t", "i.shared_experts", "i.experts.*")
_LISTS = ("double_stream_blocks", "single_stream_blocks")
_QUANTIZED = Layers(_LISTS, ("block.attn1.to_*", *(f"block.ff_{part}.w[123]" for part in _PARTS)))
FAMILIES = (Family("HiDream", _SPECS, (*_EMBEDDERS, "final_layer"), _QUANTIZED),)
