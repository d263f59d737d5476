"""Kandinsky 6: how its transformer maps to the operations.

A block has a video and an audio stream, each of which is as in ``kandinsky`` with, before the feed-forward,

    n = layer_norm(x) * (1 + scale) + shift;  x = x + gate * cross_attention(n, n_text of the other stream)

where n_text is what the other one's cross-attention to the text reads. Without audio it has one stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ..core.checks import KnownClass
from ..core.forward_state import Family, model_spec
from ..core.patch import Call
from ..parts import linears, streams
from ..parts.embeddings import TIMESTEPS
from ..quantized.precision import Layers
from . import kandinsky

_SIX = f"{kandinsky.MODELS}6:Kandinsky6"
kandinsky.MODULATIONS.add(KnownClass(f"{_SIX}Modulation"))
_QUERY, _KEY_VALUE = kandinsky.QUERY_KEY_VALUE[:1], kandinsky.QUERY_KEY_VALUE[1:]
_STREAMS = ("video_dec_block", "audio_dec_block")
# Attention of video to audio, and of audio to video.
_TO_OTHER = ("va_cross_attention", "av_cross_attention")
_FIRST_NORMS = tuple(
    partial(kandinsky.first_norm, count=9, stream=(name, i)) for i, name in enumerate(_STREAMS)
)
_FIRST_OF_TEXT = partial(kandinsky.FIRST_OF_TEXT, attention="attn")


def _text_block_forward(self, call: Call, x, time_embed, rope, attn_mask=None) -> Tensor:
    attend = partial(self._modules["attn"], rotary_emb=rope, attn_mask=attn_mask)
    return kandinsky.run_block(call, self, x, time_embed, _FIRST_OF_TEXT, attend)


def _block_forward(
    self: Any,
    call: Call,
    vis: Any,
    aud: Any,
    text_v: Tensor,
    text_a: Tensor,
    time_embed: tuple[Tensor, Tensor],
    vis_rope: Any,
    aud_rope: Any,
    attn_mask: Any = None,
) -> tuple[Any, Any]:
    if vis is None or not call.takes(vis, aud, text_v, text_a):
        return NotImplemented
    tokens = (vis,) if aud is None else (vis, aud)
    first, parts = _FIRST_NORMS[: len(tokens)], [self._modules[name] for name in _STREAMS]
    each = streams.start(call, self, first, tokens, tuple(time_embed))
    ropes, texts, read = (vis_rope, aud_rope), (text_v, text_a), []
    for i, (s, part) in enumerate(zip(each, parts)):
        modules = part._modules
        s.add(modules["self_attention"](s.n, rotary_emb=ropes[i]), s.rows[2])
        shift, scale, gate = s.rows[3:6]
        readers = partial(_text_readers, self, None if aud is None else _TO_OTHER[1 - i])
        n = s.norm("cross_attention_norm", scale, shift, readers=readers, owner=part)
        options = {"encoder_hidden_states": texts[i], "attn_mask": attn_mask}
        s.add(modules["cross_attention"](n, **options), gate)
        read.append(n)
    if aud is not None:
        _attend_to_other(self, call, each, read, time_embed, ropes)
    for s, part in zip(each, parts):
        kandinsky.add_feed_forward(s, part)
    results = streams.end(*each)
    return (results, None) if aud is None else tuple(results)


def _text_readers(block: Any, other: str | None, part: Any, x: Tensor) -> Any:
    """``streams.Readers`` of cross-attention to the text, and of key and value of the ``other`` stream's."""
    found = linears.fp8_readers("cross_attention", _QUERY, part, x)
    if found is None or other is None:
        return found
    of_other = linears.fp8_readers(other, _KEY_VALUE, block, x)
    return None if of_other is None else {**found, **of_other}


def _attend_to_other(
    block: Any, call: Call, each: Sequence[streams.Stream], read: Any, time_embed: Any, ropes: Any
) -> None:
    """Adds attention of each stream to what the other one ``read``."""
    modules = block._modules
    tembs = time_embed if block.fix_modulation else time_embed[::-1]
    rows, outs = [], []
    for s, name, temb in zip(each, ("va_modulation", "av_modulation"), tembs):
        made, size = kandinsky.modulation(call, modules[name], temb), s.rows[0].shape[2]
        rows.append(made.split([size, size, made.shape[2] - 2 * size], 2))
    for i, (s, name) in enumerate(zip(each, _TO_OTHER)):
        norm, readers = f"{name[:2]}_normalization", partial(linears.fp8_readers, name, _QUERY)
        n = s.norm(norm, rows[i][1], rows[i][0], readers=readers)
        rope_q, rope_kv = (ropes[i], ropes[1 - i]) if block.ca_rope else (None, None)
        options = {"encoder_hidden_states": read[1 - i], "rope_q": rope_q, "rope_kv": rope_kv}
        outs.append(modules[name](n, **options))
    for s, out, (_, _, gate) in zip(each, outs, rows[::-1] if block.cross_gates else rows):
        s.add(out, gate)


def _attention_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Any = None,
    attn_mask: Any = None,
    rotary_emb: Any = None,
    rope_q: Any = None,
    rope_kv: Any = None,
) -> Tensor:
    rope = rotary_emb if rope_q is None else rope_q
    if rope is None and rope_kv is not None:
        return NotImplemented
    operands = hidden_states, encoder_hidden_states, rope, attn_mask
    return kandinsky.attend(self, call, *operands, key_rope=rope_kv)


_TEXTS = ("video_text_transformer_blocks", "audio_text_transformer_blocks")
_LISTS = (*_TEXTS, kandinsky.LIST)
_PLAN = partial(kandinsky.plan, names=("vis", "aud"))
_OF_PROCESSOR = "hidden_states encoder_hidden_states rotary_emb rotary_emb_kv attn_mask"
_SPECS = (
    model_spec(f"{_SIX}Transformer3DModel", *_LISTS, plan=_PLAN),
    kandinsky.block_spec(f"{_SIX}TransformerEncoderBlock", _text_block_forward),
    kandinsky.block_spec(f"{_SIX}FusedTransformerDecoderBlock", _block_forward),
    kandinsky.attention_spec(
        f"{_SIX}Attention", _attention_forward, processor_parameters=_OF_PROCESSOR
    ),
    TIMESTEPS,
    linears.LINEAR_GELU,
)
_ONCE = (
    *(f"{stream}{name}" for stream in ("", "video_", "audio_") for name in kandinsky.ONCE),
    *("audio_embeddings", "visual_token_type_embeddings", "audio_rope_embeddings"),
)
_OF_STREAM = (*kandinsky.ATTENTION_LAYERS, *kandinsky.FEED_FORWARD_LAYERS)
_LAYERS = Layers(
    (kandinsky.LIST,),
    (*kandinsky.ATTENTION_LAYERS, *(f"*_dec_block.{layer}" for layer in _OF_STREAM)),
)
FAMILIES = (Family("Kandinsky 6", _SPECS, _ONCE, _LAYERS),)
