"""CogVideoX and ConsisID: how their transformers map to the operations.

A block has two streams, video x and text c, with the same norms and linear layers. An adaptive norm has one
LayerNorm for both streams, and one linear layer of the time embedding for the six rows of their modulation,

    n = layer_norm(x) * (1 + scale) + shift;  n_c = layer_norm(c) * (1 + scale_c) + shift_c
    x = x + gate * a_x;  c = c + gate_c * a_c,  with a_c, a_x = attention([n_c, n])

and the feed-forward has the same form. Queries and keys pass a LayerNorm of each head. The rotary embedding
rotates only the video.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..attention import modules as attention
from ..core.checks import KnownClass, is_stock
from ..core.forward_state import Family, model_spec
from ..core.patch import Call
from ..parallel.plans import two_streams
from ..parts import linears, streams
from ..parts.embeddings import TIMESTEPS
from ..parts.norms import apply_norm, norm_notes
from ..parts.streams import ADAPTIVE
from ..quantized.fp8_linears import are_fp8
from ..quantized.precision import ONE_LIST

_MODELS = "diffusers.models.transformers."
_COGVIDEOX = f"{_MODELS}cogvideox_transformer_3d"
_CONSISID = f"{_MODELS}consisid_transformer_3d"
_ATTENTIONS = "diffusers.models.attention_processor"
_QK_NORMS = ("norm_q", "norm_k")
_NORM = KnownClass("diffusers.models.normalization:CogVideoXLayerNormZero")
ADAPTIVE.add(_NORM, 6, (1, 0, 4, 3))


def _norms(
    call: Call, block: Any, name: str, previous_x: Tensor | None, temb: Tensor, readers: Any
) -> tuple[Any, Any]:
    """The adaptive norm ``block.name`` of video and text, each with its gate as its row, as functions of
    ``FirstNorms`` return them. Both are None if the module has to compute them."""
    both = streams.adaptive_norm(call, block, previous_x, temb, name=name, readers=readers)
    if type(both) is not streams.FirstNorm:
        return None, None
    video = both._replace(modulation=both.modulation[:2], rows=both.rows[2:3])
    return video, both._replace(modulation=both.modulation[2:], rows=both.rows[5:])


def _apply(
    call: Call, block: Any, name: str, video: Any, text: Any, temb: Tensor, readers: Any
) -> None:
    """Applies ``_norms`` to both streams."""
    for stream, norm in zip((video, text), _norms(call, block, name, None, temb, readers)):
        if norm is not None:
            stream.apply(norm)
            continue
        video.n, text.n, *gates = block._modules[name](video.x, text.x, temb)
        video.rows, text.rows = ([gate] for gate in gates)
        break


_FIRST_READERS = partial(linears.fp8_readers, "attn1", linears.QUERY_KEY_VALUE)


def _second_readers(block: Any, x: Tensor) -> Any:
    runs_twice = _runs_twice(block._modules["ff"], x)
    return linears.feed_forward_reader("ff", block, x) if runs_twice else None


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    x, c = hidden_states, encoder_hidden_states
    if not call.takes(x, c, temb):
        return NotImplemented
    both: list[Any] = []  # of the next block

    def of_video(call: Call, block: Any, previous_x: Tensor, temb: Tensor) -> Any:
        both[:] = _norms(call, block, "norm1", previous_x, temb, _FIRST_READERS)
        return both[0]

    handed = streams.take_over(call, self, (x, c, temb))
    video = streams.Stream(call, self, x, of_video, (temb,))
    text = streams.Stream(call, self, c, lambda *_: both[1], (temb,))
    if handed is None:
        _apply(call, self, "norm1", video, text, temb, _FIRST_READERS)
    else:
        (video.n, video.rows), (text.n, text.rows) = handed
    more = {"image_rotary_emb": image_rotary_emb, **(attention_kwargs or {})}
    outs = self._modules["attn1"](hidden_states=video.n, encoder_hidden_states=text.n, **more)
    video.add(outs[0], video.rows[0])
    text.add(outs[1], text.rows[0])
    _apply(call, self, "norm2", video, text, temb, _second_readers)
    outs = _feed_forwards(self._modules["ff"], video.n, text.n)
    video.add(outs[0], video.rows[0])
    text.add(outs[1], text.rows[0])
    return streams.end(video, text)


def _runs_twice(module: Any, x: Any) -> bool:
    """Whether the feed-forward runs for each stream, or once for the concat if it has hooks."""
    return is_stock(module, linears.FEED_FORWARD) and streams.may_run_ahead(module, x)


def _feed_forwards(module: Any, n: Any, c_n: Any) -> tuple[Any, Any]:
    """The feed-forward of video and text."""
    if _runs_twice(module, n):
        return linears.feed_forward_branch(module, n), linears.feed_forward_branch(module, c_n)
    both = linears.feed_forward(module, torch.cat([c_n, n], dim=1))
    return both[:, c_n.shape[1] :], both[:, : c_n.shape[1]]


def _attention_forward(
    self, call: Call, hidden_states, encoder_hidden_states=None, attention_mask=None, **kwargs
) -> Any:
    x, c, rope = hidden_states, encoder_hidden_states, kwargs.pop("image_rotary_emb", None)
    if kwargs or c is None or attention_mask is not None:
        return NotImplemented
    if not call.takes(x, c):
        return NotImplemented
    norms = ("", "") if norm_notes(self, _QK_NORMS) else _QK_NORMS  # no names: applied here
    length, modules = c.shape[1], self._modules
    to_q, to_k, to_v = layers = modules["to_q"], modules["to_k"], modules["to_v"]
    if norms is _QK_NORMS and linears.plain_weights(x.dtype, *layers):
        each: list[Any] = [(*linears.linears(n, to_q, to_k), (to_v, n)) for n in (c, x)]
    elif norms is _QK_NORMS and are_fp8(*layers):
        each = [tuple(linears.linears(n, *layers)) for n in (c, x)]
    else:  # hooks and adapters get the concat, as in the model
        joint = linears.linears(streams.concat_streams(call, c, x), *layers)
        if norms is not _QK_NORMS:
            by_head = [y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in joint[:2]]
            pair = [apply_norm(call, self, name, y) for name, y in zip(_QK_NORMS, by_head)]
            joint = [*(y.transpose(1, 2).flatten(2) for y in pair), joint[2]]
        each = [tuple(y[:, :length] for y in joint), tuple(y[:, length:] for y in joint)]
    rotate = partial(call.stand_in.functions[1].function, sequence_dim=1)
    both = [attention.Projections(q, k, v, norms, r) for (q, k, v), r in zip(each, (None, rope))]
    out = attention.attend_to_all(call, self, both, rotate, dropout_p=0.0, is_causal=False)
    out = attention.project_out(self, out)
    return out[:, length:], out[:, :length]


def _plan(model: Any, split: Callable, gather: Callable) -> dict[str, Any]:
    tables = {"image_rotary_emb": [split(0, 2), split(0, 2)]}
    return {"": tables, **two_streams(model, split, gather)}


_CONSISID_BLOCK = "self hidden_states encoder_hidden_states temb image_rotary_emb"
_SPECS = (
    model_spec(f"{_COGVIDEOX}:CogVideoXTransformer3DModel", "transformer_blocks", plan=_plan),
    model_spec(f"{_CONSISID}:ConsisIDTransformer3DModel", "transformer_blocks"),
    streams.BlockSpec(f"{_COGVIDEOX}:CogVideoXBlock", _block_forward),
    streams.BlockSpec(f"{_CONSISID}:ConsisIDBlock", _block_forward, parameters=_CONSISID_BLOCK),
    attention.AttentionSpec(
        f"{_ATTENTIONS}:Attention",
        _attention_forward,
        "qk_norm_rope",
        processor=f"{_ATTENTIONS}:CogVideoXAttnProcessor2_0",
        **attention.ROTATED_ATTENTION,
        dispatches=False,
    ),
    TIMESTEPS,
    linears.LINEAR_GELU,
)
_ONCE = ("patch_embed", "time_embedding", "ofs_embedding", "norm_final", "norm_out", "proj_out")
FAMILIES = (Family("CogVideoX", _SPECS, _ONCE, ONE_LIST),)
