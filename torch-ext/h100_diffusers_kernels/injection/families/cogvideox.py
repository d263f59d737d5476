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
from ..parts.blocks import NormOfBoth, attend_to_both
from ..parts.embeddings import TIMESTEPS
from ..parts.streams import ADAPTIVE
from ..quantized.precision import ONE_LIST

_MODELS = "diffusers.models.transformers."
_COGVIDEOX = f"{_MODELS}cogvideox_transformer_3d"
_CONSISID = f"{_MODELS}consisid_transformer_3d"
_ATTENTIONS = "diffusers.models.attention_processor"
_NORM = KnownClass("diffusers.models.normalization:CogVideoXLayerNormZero")
ADAPTIVE.add(_NORM, 6, (1, 0, 4, 3))
_ROWS = slice(3), slice(3, None)
_RESULTS = slice(0, None, 2), slice(1, None, 2)  # of video and text in turns
_FIRST_READERS = partial(linears.fp8_readers, "attn1", linears.QUERY_KEY_VALUE)


def second_readers(block: Any, x: Tensor) -> Any:
    """Of the norms before ``feed_forwards``."""
    runs_twice = _runs_twice(block._modules["ff"], x)
    return linears.feed_forward_reader("ff", block, x) if runs_twice else None


_NORM1 = NormOfBoth("norm1", _ROWS, _RESULTS, (_FIRST_READERS,) * 2)
_NORM2 = NormOfBoth("norm2", _ROWS, _RESULTS, (second_readers,) * 2)


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
    more = {"image_rotary_emb": image_rotary_emb, **(attention_kwargs or {})}
    video, text = both = attend_to_both(call, self, _NORM1, (x, c), temb, **more)
    _NORM2.apply(call, self, both, temb)
    for stream, out in zip(both, feed_forwards(self._modules["ff"], video.n, text.n)):
        stream.add(out, stream.rows[2])
    return streams.end(*both)


def _runs_twice(module: Any, x: Any) -> bool:
    """Whether the feed-forward runs for each stream, or once for the concat if it has hooks."""
    return is_stock(module, linears.FEED_FORWARD) and streams.may_run_ahead(module, x)


def feed_forwards(module: Any, n: Any, c_n: Any) -> tuple[Any, Any]:
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
    rotate = partial(call.stand_in.functions[1].function, sequence_dim=1)
    operands = (call, self, x, c, rope, rotate)
    return attention.run_attention_of_both(*operands, dropout_p=0.0, is_causal=False)


def _plan(model: Any, split: Callable, gather: Callable) -> dict[str, Any]:
    tables = {"image_rotary_emb": [split(0, 2), split(0, 2)]}
    return {"": tables, **two_streams(model, split, gather)}


ATTENTION = attention.AttentionSpec(
    f"{_ATTENTIONS}:Attention",
    _attention_forward,
    "qk_norm_rope",
    processor=f"{_ATTENTIONS}:CogVideoXAttnProcessor2_0",
    **attention.ROTATED_ATTENTION,
    dispatches=False,
)
_CONSISID_BLOCK = "self hidden_states encoder_hidden_states temb image_rotary_emb"
_SPECS = (
    model_spec(f"{_COGVIDEOX}:CogVideoXTransformer3DModel", "transformer_blocks", plan=_plan),
    model_spec(f"{_CONSISID}:ConsisIDTransformer3DModel", "transformer_blocks"),
    streams.BlockSpec(f"{_COGVIDEOX}:CogVideoXBlock", _block_forward),
    streams.BlockSpec(f"{_CONSISID}:ConsisIDBlock", _block_forward, parameters=_CONSISID_BLOCK),
    ATTENTION,
    TIMESTEPS,
    linears.LINEAR_GELU,
)
_ONCE = ("patch_embed", "time_embedding", "ofs_embedding", "norm_final", "norm_out", "proj_out")
FAMILIES = (Family("CogVideoX", _SPECS, _ONCE, ONE_LIST),)
