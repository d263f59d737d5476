"""PixArt-α, PixArt-Σ and Latte: how their transformers map to the operations.

A block is

    x = x + gate_msa * attn1(layer_norm(x) * (1 + scale_msa) + shift_msa)
    x = x + attn2(x, text)
    x = x + gate_mlp * ff(layer_norm(x) * (1 + scale_mlp) + shift_mlp)

with a GELU in ff. The last line of a block and the first norm of the next are one pass over memory. In Latte
blocks over an image's tokens and blocks over a token's frames, which have no attn2, take turns.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ..attention import modules as attention
from ..core.forward_state import Family, model_spec
from ..core.patch import Call
from ..parts import linears
from ..parts.blocks import add_feed_forwards
from ..parts.embeddings import TIMESTEPS
from ..parts.streams import BlockSpec, end, start, table_norm
from ..quantized.precision import ONE_LIST

_MODELS = "diffusers.models.transformers."
_PROCESSORS = "diffusers.models.attention_processor"


def _by_row(temb: Tensor) -> Tensor:
    return temb.unflatten(1, (1, 6, -1))


# Rows are shift, scale and gate of self-attention, then of the feed-forward.
_READERS = partial(linears.fp8_readers, "attn1", linears.QUERY_KEY_VALUE)
_FIRST_NORMS = (partial(table_norm, by_row=_by_row, readers=_READERS),)


def run_block(call: Call, block: Any, x: Tensor, temb: Any, own: Any, cross: Any) -> Any:
    """A block of x. ``own``, ``cross``: arguments of self-attention, and of attention to the text."""
    x, modules = x.contiguous(), block._modules
    if temb is None or temb.shape != (x.shape[0], 6 * x.shape[-1]):
        return NotImplemented
    if not call.takes(x, temb):
        return NotImplemented
    (s,) = start(call, block, _FIRST_NORMS, (x,), (temb,))
    s.add(modules["attn1"](s.n, **own), s.rows[2])
    if modules.get("attn2") is not None:
        s.add(modules["attn2"](s.x, **cross))
    add_feed_forwards(block, s)
    return end(s)


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    attention_mask: Any = None,
    encoder_hidden_states: Any = None,
    encoder_attention_mask: Any = None,
    timestep: Any = None,
    cross_attention_kwargs: dict[str, Any] | None = None,
    class_labels: Any = None,
    added_cond_kwargs: Any = None,
) -> Any:
    more, c = cross_attention_kwargs or {}, encoder_hidden_states
    if more.get("gligen") is not None or more.get("scale") is not None:
        return call.decline("it was given a scale or objects of GLIGEN")
    context = c if self.only_cross_attention else None
    own = {"encoder_hidden_states": context, "attention_mask": attention_mask, **more}
    cross = {"encoder_hidden_states": c, "attention_mask": encoder_attention_mask, **more}
    return run_block(call, self, hidden_states, timestep, own, cross)


def _why_not_block(module: Any) -> str | None:
    if module.norm_type != "ada_norm_single":
        return f"its norms are of the type {module.norm_type}"
    if module._chunk_size is not None:
        return "its feed-forward is chunked"
    return None if module.pos_embed is None else "it adds positions"


def _attention_forward(
    self, call: Call, hidden_states, encoder_hidden_states=None, attention_mask=None, **kwargs
) -> Any:
    x, c, packed, spec = hidden_states, encoder_hidden_states, None, call.stand_in.spec
    if kwargs or not attention.is_plain(self, x, "norm_q", "norm_k"):
        return NotImplemented
    if not call.takes(x, c):
        return NotImplemented
    if spec.is_other(self):  # type: ignore[attr-defined]
        packed = attention.packed_projections(self, x, c)
    options = {"prepares_mask": True, "dropout_p": 0.0, "is_causal": False}
    operands = (x, c, None, None, attention_mask, options)
    return attention.run_attention(call, self, *operands, projected=packed)


# Of diffusers' ``Attention``, without its processor's other arguments.
ARGUMENTS = "hidden_states encoder_hidden_states attention_mask"
attention_spec = partial(
    attention.AttentionSpec,
    f"{_PROCESSORS}:Attention",
    parameters=f"self {ARGUMENTS} cross_attention_kwargs",
    dispatches=False,
)
_SPECS = (
    BlockSpec(
        "diffusers.models.attention:BasicTransformerBlock",
        _block_forward,
        condition=_why_not_block,
    ),
    attention_spec(
        forward=_attention_forward,
        operations="linear layers",
        processor=f"{_PROCESSORS}:AttnProcessor2_0",
        processor_parameters=f"{ARGUMENTS} temb args kwargs",
        rotate="",
        other_processor=f"{_PROCESSORS}:FusedAttnProcessor2_0",
    ),
    TIMESTEPS,
    linears.LINEAR_GELU,
)
_PIXART = model_spec(
    f"{_MODELS}pixart_transformer_2d:PixArtTransformer2DModel", "transformer_blocks"
)
_LISTS = ("transformer_blocks", "temporal_transformer_blocks")
_LATTE = model_spec(f"{_MODELS}latte_transformer_3d:LatteTransformer3DModel", *_LISTS)
ONCE = ("pos_embed", "adaln_single", "caption_projection", "norm_out", "proj_out")
FAMILIES = (
    Family("PixArt", (_PIXART, *_SPECS), ONCE, ONE_LIST),
    Family("Latte", (_LATTE, *_SPECS), ONCE, ONE_LIST._replace(blocks=_LISTS)),
)
