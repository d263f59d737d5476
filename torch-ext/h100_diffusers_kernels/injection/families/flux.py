"""FLUX.1: how its transformer, and its ControlNet, map to the operations.

A double block computes for image tokens x and text tokens c, each with its own modulation,

    n_x, n_c = layer_norm(x) * (1 + scale) + shift, layer_norm(c) * (1 + scale) + shift
    a_x, a_c = attention over the concat of both, with an RMS norm of each head's query and key, and rotated
    x = x + gate * a_x;  x = x + gate_mlp * ff(layer_norm(x) * (1 + scale_mlp) + shift_mlp);  c likewise

and a single block, for the concat of both,

    n = layer_norm(x) * (1 + scale) + shift;  x = x + gate * proj_out([attention(n), gelu(proj_mlp(n))])
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...operations.conditions import kernels_take
from ..attention.modules import flux_attention_spec
from ..core.forward_state import Family, model_spec
from ..core.patch import Call
from ..parts import joint_blocks
from ..parts.embeddings import TIMESTEPS, axial_positions
from ..parts.linears import LINEAR_GELU
from ..parts.norm_modules import OUTPUT_NORM
from ..quantized.precision import TWO_LISTS

_FLUX = "diffusers.models.transformers.transformer_flux"
_CONTROLNET = "diffusers.models.controlnets.controlnet_flux"


def _double_block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    x, c = hidden_states, encoder_hidden_states
    if not kernels_take(x, c, temb):
        return call.refuse(x, c, temb)
    more = {"image_rotary_emb": image_rotary_emb, **(joint_attention_kwargs or {})}
    return joint_blocks.double_block(
        call, self, joint_blocks.DOUBLE_NORMS, (x, c), (temb,), **more
    )[::-1]


def _single_block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    x, c = hidden_states, encoder_hidden_states
    if not kernels_take(x, c, temb):
        return call.refuse(x, c, temb)
    more = {"image_rotary_emb": image_rotary_emb, **(joint_attention_kwargs or {})}

    def attend(n: Any) -> Tensor:
        return self._modules["attn"](hidden_states=n, **more)

    return joint_blocks.single_block(call, self, joint_blocks.SINGLE_NORMS, (c, x), (temb,), attend)


_LISTS = ("transformer_blocks", "single_transformer_blocks")
_SPECS = (
    model_spec(f"{_FLUX}:FluxTransformer2DModel", *_LISTS),
    model_spec(f"{_CONTROLNET}:FluxControlNetModel", *_LISTS),
    joint_blocks.double_spec(f"{_FLUX}:FluxTransformerBlock", _double_block_forward),
    joint_blocks.single_spec(f"{_FLUX}:FluxSingleTransformerBlock", _single_block_forward),
    flux_attention_spec(f"{_FLUX}:FluxAttention"),
    axial_positions(f"{_FLUX}:FluxPosEmbed"),
    axial_positions("diffusers.models.embeddings:FluxPosEmbed"),
    TIMESTEPS,
    LINEAR_GELU,
)
_ONCE = ("x_embedder", "context_embedder", "time_text_embed", "proj_out")
_LAYERS = TWO_LISTS
FAMILIES = (Family("FLUX.1", _SPECS, _ONCE, _LAYERS, OUTPUT_NORM),)
