"""Hunyuan-DiT: how its transformer, and its ControlNet, map to the operations.

A block is

    x = linear(layer_norm([x, skip]))                          in the second half of the blocks
    x = x + attn1(layer_norm(x) + shift)
    x = x + attn2(layer_norm(x), text)
    x = x + ff(layer_norm(x))

with norms in float32, a layer norm of each head's query and key, a rotary embedding of the query, in attn1
also of the key, and a GELU in ff. The last line of a block in the first half and the next block's first norm
are one pass over memory.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..attention import modules as attention
from ..core.checks import KnownClass
from ..core.forward_state import Family, model_spec
from ..core.patch import Call
from ..parts import linears, streams
from ..parts.embeddings import TIMESTEPS
from ..parts.norm_modules import OUTPUT_NORM
from ..parts.rotary import identity_tables
from ..quantized.fp8_linears import fp8_weights_for
from ..quantized.precision import ATTENTION_LAYERS, FEED_FORWARD_LAYERS, Layers

_MODEL = "diffusers.models.transformers.hunyuan_transformer_2d"
_CONTROLNET = "diffusers.models.controlnets.controlnet_hunyuan"
_PROCESSORS = "diffusers.models.attention_processor"
streams.ADAPTIVE.add(KnownClass(f"{_MODEL}:AdaLayerNormShift"), 1, (None, 0))
_READERS = partial(linears.fp8_readers, "attn1", linears.QUERY_KEY_VALUE)
_QUERY_READER = partial(linears.fp8_readers, "attn2", ("to_q",))
_FF_READER = partial(linears.feed_forward_reader, "ff")


def _skip_reader(block: Any, x: Tensor) -> Any:
    return fp8_weights_for(x, block.skip_linear)


def _first_norm(call: Call, block: Any, previous_x: Tensor | None, temb: Tensor) -> Any:
    if previous_x is not None and block.skip_linear is not None:
        return None
    options: Any = {"name": "norm1", "takes_emb": False, "readers": _READERS}
    norm = streams.adaptive_norm(call, block, previous_x, temb, **options)
    if type(norm) is not streams.FirstNorm:
        return norm
    scale = call.shared("no scale", temb, lambda temb: torch.zeros_like(temb[:, None]))
    return norm._replace(modulation=(scale, norm.modulation[1]))


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Any = None,
    temb: Any = None,
    image_rotary_emb: Any = None,
    skip: Any = None,
) -> Any:
    x, modules = hidden_states.contiguous(), self._modules
    if temb is None or (skip is None) != (self.skip_linear is None):
        return NotImplemented
    if not call.takes(x, temb, skip):
        return NotImplemented
    if skip is not None:
        both = streams.Stream(call, self, torch.cat([x, skip], dim=-1))
        x = linears.linear(self.skip_linear, both.norm("skip_norm", readers=_skip_reader))
    (s,) = streams.start(call, self, (_first_norm,), (x,), (temb,))
    rope = {"image_rotary_emb": image_rotary_emb}
    s.add(modules["attn1"](s.n, **rope))
    n = s.norm("norm2", readers=_QUERY_READER)
    s.add(modules["attn2"](n, encoder_hidden_states=encoder_hidden_states, **rope))
    s.add(linears.feed_forward_branch(modules["ff"], s.norm("norm3", readers=_FF_READER)))
    return streams.end(s)


def _attention_forward(
    self, call: Call, hidden_states, encoder_hidden_states=None, attention_mask=None, **kwargs
) -> Any:
    x, c, rope = hidden_states, encoder_hidden_states, kwargs.pop("image_rotary_emb", None)
    if kwargs or not attention.is_plain(self, x, "norm_q", "norm_k"):
        return NotImplemented
    if not call.takes(x, c):
        return NotImplemented
    spec: Any = call.stand_in.spec
    options: dict[str, Any] = {}
    if spec.is_other(self):
        options["projected"] = attention.packed_projections(self, x, c)
    if rope is not None and self.is_cross_attention:
        length = x.shape[1] if c is None else c.shape[1]
        make = partial(identity_tables, length=length)
        options["key_rope"] = call.shared(("no rotation", length), rope, make)
    rotate = partial(call.stand_in.functions[1].function, sequence_dim=1)
    of_attend = {"prepares_mask": True, "dropout_p": 0.0, "is_causal": False}
    operands = (x, c, rope, rotate, attention_mask, of_attend)
    return attention.run_attention(call, self, *operands, **options)


_ARGUMENTS = "hidden_states encoder_hidden_states attention_mask"
_SPECS = (
    model_spec(f"{_MODEL}:HunyuanDiT2DModel", "blocks"),
    model_spec(f"{_CONTROLNET}:HunyuanDiT2DControlNetModel", "blocks"),
    streams.BlockSpec(f"{_MODEL}:HunyuanDiTBlock", _block_forward),
    attention.AttentionSpec(
        f"{_PROCESSORS}:Attention",
        _attention_forward,
        "qk_norm_rope",
        processor=f"{_PROCESSORS}:HunyuanAttnProcessor2_0",
        processor_parameters=f"{_ARGUMENTS} temb image_rotary_emb",
        other_processor=f"{_PROCESSORS}:FusedHunyuanAttnProcessor2_0",
        parameters=f"self {_ARGUMENTS} cross_attention_kwargs",
        rotate="diffusers.models.embeddings:apply_rotary_emb",
        dispatches=False,
    ),
    TIMESTEPS,
    linears.LINEAR_GELU,
)
_ONCE = ("text_embedder", "pos_embed", "time_extra_emb", "input_block", "proj_out")
_LAYERS = Layers(("blocks",), (*ATTENTION_LAYERS, *FEED_FORWARD_LAYERS, "skip_linear"))
FAMILIES = (Family("Hunyuan-DiT", _SPECS, _ONCE, _LAYERS, OUTPUT_NORM),)
