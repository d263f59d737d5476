"""The refiner of SANA-WM: how its transformer maps to the operations.

Its modules are LTX-2's (see ``families.ltx2``), of which it runs those of the video. A block is

    x = x + gate * attn1(rms_norm(x) * (1 + scale) + shift)
    x = x + attn2(rms_norm(x), text)
    x = x + gate_mlp * ff(rms_norm(x) * (1 + scale_mlp) + shift_mlp)

It refines a video in chunks. In attn1 a chunk attends to keys and values of a cache, and then to its own:
those of the first frames, which are rotated at each call, and of the chunks before, which have been rotated.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..attention import modules as attention
from ..core.forward_state import Family, model_spec
from ..core.patch import Call, PatchSpec
from ..parts import linears
from ..parts.blocks import add_feed_forwards
from ..parts.embeddings import TIMESTEPS
from ..parts.streams import BlockSpec, end, start
from . import ltx2

_REFINER = "diffusers.models.transformers.transformer_sana_wm_refiner"
_QUERY_READERS = partial(ltx2.query_readers, "attn2")
_FEED_FORWARD = (("norm3", "ff"),)
_INJECTS = ("inject", "inject_and_capture_post_rope")


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    video_rotary_emb: Any,
    encoder_attention_mask: Tensor | None = None,
    sink_rotary_emb: Any = None,
    kv_cache: Any = None,
    kv_cache_mode: str | None = None,
) -> Tensor:
    x, c, modules = hidden_states, encoder_hidden_states, self._modules
    if not call.takes(x, c, temb) or self.scale_shift_table.shape[0] != 6:
        return NotImplemented
    (s,) = start(call, self, ltx2.FIRST_NORMS[:1], (x,), (temb,))
    cache = {"sink_rotary_emb": sink_rotary_emb, "kv_cache": kv_cache}
    cache["kv_cache_mode"] = kv_cache_mode
    s.add(modules["attn1"](s.n, query_rotary_emb=video_rotary_emb, **cache), s.rows[2])
    n = s.norm("norm2", readers=_QUERY_READERS)
    options = {"query_rotary_emb": None, "attention_mask": encoder_attention_mask}
    s.add(modules["attn2"](n, encoder_hidden_states=c, **options))
    add_feed_forwards(self, s, names=_FEED_FORWARD)
    return end(s)


def _attention_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    query_rotary_emb: Any = None,
    key_rotary_emb: Any = None,
    *,
    sink_rotary_emb: Any = None,
    kv_cache: Any = None,
    kv_cache_mode: str | None = None,
    **kwargs,
) -> Tensor:
    x, spec = hidden_states, call.stand_in.spec
    if not spec.is_other(self):  # type: ignore[attr-defined]
        if kv_cache is not None or kv_cache_mode is not None or sink_rotary_emb is not None:
            return NotImplemented
        operands = (encoder_hidden_states, attention_mask, query_rotary_emb, key_rotary_emb)
        return ltx2.attention_forward(self, call, x, *operands, **kwargs)
    is_split, heads = self.rope_type == "split", self.heads
    sink = kv_cache.get_sink() if kv_cache_mode in _INJECTS else None
    if (
        kwargs
        or query_rotary_emb is None
        or (sink is not None and sink_rotary_emb is None)
        or attention.context_parallel_of(call, self) is not None
        or not call.takes(x)
    ):
        return NotImplemented
    gate = None
    if self._modules.get("to_gate_logits") is not None:
        gate = 2.0 * torch.sigmoid(linears.linear(self._modules["to_gate_logits"], x))
    rotation = call.stand_in.functions[2 if is_split else 1].function, "across_heads"
    layout: Any = {"layout": "half" if is_split else "interleaved"}
    captures_before = kv_cache_mode == "capture_pre_rope"
    rope = None if captures_before else query_rotary_emb
    query, key, value = attention.project_and_rotate(call, self, x, None, rope, *rotation, **layout)
    rotate: Any = partial(attention.norm_and_rotate, call, self, names=("", ""), **layout)
    if captures_before:
        kv_cache.store_captured_pre_rope(key.detach().clone(), value.detach().clone())
        query, key = rotate(query, key, query_rotary_emb, *rotation, heads)
    elif kv_cache_mode == _INJECTS[1]:
        kv_cache.store_captured_post_rope(key.detach().clone(), value.detach().clone())
    if kv_cache_mode in _INJECTS:
        before = []
        if sink is not None:
            # The operation rotates two tensors.
            sink_key = sink[0].to(key.dtype)
            sink_key, _ = rotate(sink_key, sink_key, sink_rotary_emb, *rotation, heads)
            before.append((sink_key, sink[1]))
        before += [pair for pair in (kv_cache.get_history(),) if pair is not None]
        pairs = zip(*before, (key, value))
        key, value = (torch.cat([part.to(x.dtype) for part in parts], dim=1) for parts in pairs)
    options: dict[str, Any] = {"heads": heads, "dropout_p": 0.0, "is_causal": False, "gate": gate}
    out = attention.attend(call, self, query, key, value, None, **options)
    return attention.project_out(self, out)


_SPECS = (
    model_spec(f"{_REFINER}:SanaWMLTX2RefinerTransformer3DModel", "transformer_blocks"),
    PatchSpec(
        f"{_REFINER}:SanaWMLTX2AudioVideoRotaryPosEmbed", ltx2.rope_forward, ltx2.COORDINATES
    ),
    BlockSpec(f"{_REFINER}:SanaWMLTX2RefinerTransformerBlock", _block_forward),
    attention.AttentionSpec(
        f"{_REFINER}:SanaWMLTX2Attention",
        _attention_forward,
        "qk_norm_rope",
        parameters="self hidden_states encoder_hidden_states attention_mask query_rotary_emb"
        " key_rotary_emb kwargs",
        processor=f"{_REFINER}:SanaWMLTX2AudioVideoAttnProcessor",
        rotate="apply_interleaved_rotary_emb apply_split_rotary_emb",
        other_processor=f"{_REFINER}:SanaWMLTX2RefinerAttnProcessor",
        other_parameters="hidden_states encoder_hidden_states attention_mask query_rotary_emb"
        " key_rotary_emb sink_rotary_emb kv_cache kv_cache_mode",
    ),
    TIMESTEPS,
    linears.LINEAR_GELU,
)
FAMILIES = (Family("SANA-WM's refiner", _SPECS, ltx2.ONCE, ltx2.LAYERS),)
