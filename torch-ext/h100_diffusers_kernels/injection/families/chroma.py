"""Chroma: how its transformer maps to the operations.

Its blocks are those of FLUX.1 with two differences. All of their modulation comes from one network before
them, and each block is given its rows. The padding of the text has a mask.

The mask m of all tokens, text first, is 1 or, at the text's padding, 0. A block adds m_i * m_j to the score
of query i and key j. A query with m_i = 1 gets the bias m_j of key j; one with m_i = 0 gets no bias. The
padding is not masked out, so its results are used. Attention runs with the key bias m for all queries, and
once more without it for the text's queries, of which the padding's are taken. An image's tokens all have
m = 1, as diffusers' pipelines make it. A mask of booleans does mask the padding out, and nothing uses its
results.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...operations.conditions import is_differentiated
from ..attention import modules as attention
from ..core.checks import KnownClass
from ..core.forward_state import Family, model_spec
from ..core.patch import Call
from ..parts import blocks
from ..parts.embeddings import TIMESTEPS, axial_positions
from ..parts.linears import LINEAR_GELU
from ..parts.streams import ADAPTIVE, BlockSpec, adaptive_norm
from ..quantized.precision import TWO_LISTS

_CHROMA = "diffusers.models.transformers.transformer_chroma"
_FLUX = "diffusers.models.transformers.transformer_flux"

ADAPTIVE.add(KnownClass(f"{_CHROMA}:ChromaAdaLayerNormZeroPruned"), 6, (1, 0))
ADAPTIVE.add(KnownClass(f"{_CHROMA}:ChromaAdaLayerNormZeroSinglePruned"), 3, (1, 0))


def _first_norm(call: Call, block, previous_x, temb, *, first, last, **options) -> Any:
    """``adaptive_norm`` with the rows of ``temb`` (B, N, D) from ``first`` to before ``last``."""
    if previous_x is not None:
        return None  # the model has not selected the next block's rows yet
    options["modulation_of"] = lambda call, module, previous_x, rows: rows.flatten(1, 2)
    return adaptive_norm(call, block, None, temb[:, first:last], **options)


_DOUBLE = (
    partial(_first_norm, name="norm1", first=0, last=6, readers=blocks.IMAGE_READERS),
    partial(_first_norm, name="norm1_context", first=6, last=12, readers=blocks.TEXT_READERS),
)
_SINGLE = (partial(_first_norm, name="norm", first=0, last=3, readers=blocks.SINGLE_READERS),)


def _double_block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    attention_mask: Tensor | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    x, c = hidden_states, encoder_hidden_states
    if not call.takes(x, c, temb):
        return NotImplemented
    if call.state is not None:
        call.state.text_length = c.shape[1]
    more = {"image_rotary_emb": image_rotary_emb, **(joint_attention_kwargs or {})}
    more["attention_mask"] = _product(call, attention_mask)
    return blocks.double_block(call, self, _DOUBLE, (x, c), (temb,), **more)[::-1]


def _single_block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    attention_mask: Tensor | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> Tensor:
    x = hidden_states
    if not call.takes(x, temb):
        return NotImplemented
    more = {"image_rotary_emb": image_rotary_emb, **(joint_attention_kwargs or {})}

    def attend(n: Any) -> Tensor:
        mask = _product(call, attention_mask)
        return self._modules["attn"](hidden_states=n, attention_mask=mask, **more)

    return blocks.single_block(call, self, _SINGLE, (x,), (temb,), attend, hands_over=False)


def _product(call: Call, mask: Tensor | None) -> Tensor | None:
    """The mask (B, 1, S, S) that an attention is given, from that of the tokens (B, S). Blocks share it."""
    if mask is None:
        return None
    product: Tensor = call.shared("product", mask, lambda m: m[:, None, None] * m[:, None, :, None])
    if call.state is not None:
        call.state.block_mask = product
    return product


def _equivalents(call: Call, x: Tensor, mask: Tensor) -> dict[str, Any]:
    """Equivalents of such a product for ``attend``. Any other mask comes from users' code."""
    state = call.state
    is_product = state is not None and mask is state.block_mask and mask.shape[0] == x.shape[0]
    is_taken = mask.dtype in (x.dtype, torch.bool) and not is_differentiated(mask)
    if not (is_product and is_taken) or state.text_length is None:
        return {}

    def read(mask: Tensor) -> dict[str, Any]:
        key_bias = mask[:, 0].diagonal(dim1=1, dim2=2).contiguous()  # the mask of the tokens
        if mask.dtype == torch.bool:
            return {"key_bias": key_bias.float().log_()}  # 0 for True, -inf for False
        is_padding = (key_bias[:, : state.text_length] == 0).unsqueeze(2)
        return {"key_bias": key_bias, "is_unbiased": is_padding}

    return call.shared("equivalents", mask, read)


_attention_forward = partial(attention.forward_with_tables, equivalents_of=_equivalents)
_SPECS = (
    model_spec(f"{_CHROMA}:ChromaTransformer2DModel", *TWO_LISTS.blocks),
    BlockSpec(f"{_CHROMA}:ChromaTransformerBlock", _double_block_forward),
    BlockSpec(f"{_CHROMA}:ChromaSingleTransformerBlock", _single_block_forward),
    attention.flux_attention_spec(f"{_FLUX}:FluxAttention", forward=_attention_forward),
    axial_positions(f"{_FLUX}:FluxPosEmbed"),
    TIMESTEPS,
    LINEAR_GELU,
)
_EMBEDDERS = ("x_embedder", "context_embedder", "time_text_embed", "distilled_guidance_layer")
_ONCE = (*_EMBEDDERS, "norm_out", "proj_out")
FAMILIES = (Family("Chroma", _SPECS, _ONCE, TWO_LISTS),)
