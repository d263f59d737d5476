"""EasyAnimate: how its transformer maps to the operations.

A block has two streams, video x and text c. An adaptive norm has one LayerNorm for both, and one linear layer
of the time embedding for the six rows of their modulation,

    n = layer_norm(x) * (1 + scale) + shift;  n_c = layer_norm(c) * (1 + scale_c) + shift_c
    x = x + gate * a_x;  c = c + gate_c * a_c,  with a_c, a_x = attention([n_c, n])
    x = x + gate_mlp * norm3(ff(n));  c likewise, with a second adaptive norm

where ``norm3`` is optional. Each stream has linear layers of its own. In the blocks after the first
``mmdit_layers``, the text has those of the video, and no output projection of attention. Queries and keys
pass a LayerNorm of each head. The rotary embedding rotates only the video.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ..attention import modules as attention
from ..core.checks import KnownClass
from ..core.forward_state import Family, model_spec
from ..core.patch import Call
from ..parallel.plans import two_streams
from ..parts import linears, streams
from ..parts.blocks import NormOfBoth, attend_to_both
from ..parts.embeddings import TIMESTEPS, tables_of_sizes
from ..quantized.precision import ONE_LIST

_LIBRARY = "diffusers.models.transformers.transformer_easyanimate"
_CLASS = f"{_LIBRARY}:EasyAnimate"
streams.ADAPTIVE.add(KnownClass(f"{_CLASS}LayerNormZero"), 6, (1, 0, 4, 3))


def _text_readers(block: Any, x: Tensor) -> Any:
    has_own = block._modules["attn1"]._modules.get("add_q_proj") is not None
    layers = linears.TEXT_QUERY_KEY_VALUE if has_own else linears.QUERY_KEY_VALUE
    return linears.fp8_readers("attn1", layers, block, x)


def _feed_forward_of_text(block: Any) -> str:
    return "ff" if block._modules.get("txt_ff") is None else "txt_ff"


def _second_text_readers(block: Any, x: Tensor) -> Any:
    return linears.feed_forward_reader(_feed_forward_of_text(block), block, x)


_ROWS = slice(3), slice(3, None)
_RESULTS = slice(0, None, 2), slice(1, None, 2)  # of video and text in turns
_READERS = partial(linears.fp8_readers, "attn1", linears.QUERY_KEY_VALUE)
_SECOND_READERS = partial(linears.feed_forward_reader, "ff")
_NORM1 = NormOfBoth("norm1", _ROWS, _RESULTS, (_READERS, _text_readers))
_NORM2 = NormOfBoth("norm2", _ROWS, _RESULTS, (_SECOND_READERS, _second_text_readers))


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
) -> tuple[Tensor, Tensor]:
    # The first block gets the transposed result of a convolution.
    x, c = hidden_states.contiguous(), encoder_hidden_states
    if not call.takes(x, c, temb):
        return NotImplemented
    both = attend_to_both(call, self, _NORM1, (x, c), temb, image_rotary_emb=image_rotary_emb)
    _NORM2.apply(call, self, both, temb)
    modules = self._modules
    last_norm = "" if modules.get("norm3") is None else "norm3"
    for stream, name in zip(both, ("ff", _feed_forward_of_text(self))):
        out = linears.feed_forward_branch(modules[name], stream.n)
        stream.add(out, stream.rows[2], last_norm)
    return streams.end(*both)


def _attention_forward(
    self, call: Call, hidden_states, encoder_hidden_states=None, attention_mask=None, **kwargs
) -> Any:
    x, c, rope = hidden_states, encoder_hidden_states, kwargs.pop("image_rotary_emb", None)
    if kwargs or c is None or attention_mask is not None or self.is_cross_attention:
        return NotImplemented
    if not call.takes(x, c):
        return NotImplemented
    rotate = partial(call.stand_in.functions[1].function, sequence_dim=1)
    options: dict[str, Any] = {"dropout_p": 0.0, "is_causal": False}
    if self._modules.get("add_q_proj") is not None:
        operands = (call, self, x, c, (rope, None), rotate)
        return attention.run_joint_attention(*operands, is_text_first=True, **options)
    both = attention.project_both(call, self, x, c, rope)
    out = attention.attend_to_all(call, self, both, rotate, **options)
    length = c.shape[1]
    return attention.project_out(self, out[:, length:], x), out[:, :length]


def _plan(model: Any, split: Callable, gather: Callable) -> dict[str, Any]:
    tables = {i: split(0, 2, split_output=True) for i in range(2)}
    return {"rope_embedding": tables, **two_streams(model, split, gather)}


_POSITIONS = ("rope_dim", "patch_size")
_SPECS = (
    model_spec(f"{_CLASS}Transformer3DModel", "transformer_blocks", plan=_plan),
    streams.BlockSpec(f"{_CLASS}TransformerBlock", _block_forward),
    attention.AttentionSpec(
        "diffusers.models.attention_processor:Attention",
        _attention_forward,
        "qk_norm_rope",
        processor=f"{_CLASS}AttnProcessor2_0",
        **attention.ROTATED_ATTENTION,
        dispatches=False,
    ),
    tables_of_sizes(f"{_CLASS}RotaryPosEmbed", *_POSITIONS),
    TIMESTEPS,
    linears.LINEAR_GELU,
)
_ONCE = (
    "time_embedding",
    "proj",
    "text_proj",
    "text_proj_t5",
    "norm_final",
    "norm_out",
    "proj_out",
)
FAMILIES = (Family("EasyAnimate", _SPECS, _ONCE, ONE_LIST),)
