"""Bria 3.2 and FIBO: how their transformers map to the operations. Their blocks are copies of FLUX.1's.

FIBO replaces a half of the text's features before each block, so blocks pass nothing on. Its single blocks
are given the concat of text and image, and its attention a mask of keys.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from ..attention.modules import ROTATED_ATTENTION, flux_attention_spec
from ..core.forward_state import Family, forward_with_state, model_spec
from ..core.patch import Call
from ..parts.blocks import SINGLE_NORMS, double_forward, single_block, single_forward
from ..parts.embeddings import axial_positions
from ..parts.linears import LINEAR_GELU
from ..parts.norm_modules import OUTPUT_NORM
from ..parts.streams import BlockSpec
from ..quantized.precision import TWO_LISTS

_BRIA = "diffusers.models.transformers.transformer_bria:Bria"
_FIBO = "diffusers.models.transformers.transformer_bria_fibo:BriaFibo"


def _bria_forward(self: Any, call: Call, *args: Any, **kwargs: Any) -> Any:
    # These are added to the result of a single block in place, after it may have passed on its norm.
    samples = args[10] if len(args) > 10 else kwargs.get("controlnet_single_block_samples")
    if samples is not None:
        return call.stand_in.own_forward(self, *args, **kwargs)
    return forward_with_state(self, call, *args, **kwargs)


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    attention_kwargs: dict[str, Any] | None = None,
    *,
    of_flux: Any,
) -> Any:
    x, c = hidden_states, encoder_hidden_states
    return of_flux(self, call, x, c, temb, image_rotary_emb, attention_kwargs)


def _single_block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> Tensor:
    if not call.takes(hidden_states, temb):
        return NotImplemented
    more = {"image_rotary_emb": image_rotary_emb, **(joint_attention_kwargs or {})}

    def attend(n: Any) -> Tensor:
        return self._modules["attn"](hidden_states=n, **more)

    arguments = (call, self, SINGLE_NORMS, (hidden_states,), (temb,), attend)
    return single_block(*arguments, hands_over=False)


_BRIA_SPECS = (
    replace(model_spec(f"{_BRIA}Transformer2DModel", *TWO_LISTS.blocks), forward=_bria_forward),
    BlockSpec(f"{_BRIA}TransformerBlock", partial(_block_forward, of_flux=double_forward)),
    BlockSpec(f"{_BRIA}SingleTransformerBlock", partial(_block_forward, of_flux=single_forward)),
    flux_attention_spec(f"{_BRIA}Attention"),
    axial_positions(f"{_BRIA}EmbedND"),
    LINEAR_GELU,
)
_FIBO_SPECS = (
    model_spec(f"{_FIBO}Transformer2DModel", *TWO_LISTS.blocks),
    BlockSpec(f"{_FIBO}TransformerBlock", partial(double_forward, options={"hands_over": False})),
    BlockSpec(f"{_FIBO}SingleTransformerBlock", _single_block_forward),
    flux_attention_spec(f"{_FIBO}Attention"),
    flux_attention_spec(
        "diffusers.models.attention_processor:Attention",
        processor=f"{_BRIA}AttnProcessor",
        **{**ROTATED_ATTENTION, "rotate": "apply_rotary_emb"},
    ),
    axial_positions(f"{_FIBO}EmbedND"),
    LINEAR_GELU,
)
_ONCE = ("x_embedder", "context_embedder", "time_embed", "guidance_embed", "proj_out")
FAMILIES = (
    Family("Bria", _BRIA_SPECS, _ONCE, TWO_LISTS, OUTPUT_NORM),
    Family("FIBO", _FIBO_SPECS, (*_ONCE, "caption_projection"), TWO_LISTS, OUTPUT_NORM),
)
