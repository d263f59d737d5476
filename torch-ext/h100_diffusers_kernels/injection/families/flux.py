"""FLUX.1: how its transformer, and its ControlNet, map to the operations.

A double block computes for image tokens x and text tokens c, each with its own modulation,

    n_x, n_c = layer_norm(x) * (1 + scale) + shift, layer_norm(c) * (1 + scale) + shift
    a_x, a_c = attention over the concat of both, with an RMS norm of each head's query and key, and rotated
    x = x + gate * a_x;  x = x + gate_mlp * ff(layer_norm(x) * (1 + scale_mlp) + shift_mlp);  c likewise

and a single block, for the concat of both,

    n = layer_norm(x) * (1 + scale) + shift;  x = x + gate * proj_out([attention(n), gelu(proj_mlp(n))])
"""

from __future__ import annotations

from ..attention.modules import flux_attention_spec
from ..core.forward_state import Family, model_spec
from ..parts.blocks import double_spec, single_spec
from ..parts.embeddings import TIMESTEPS, axial_positions
from ..parts.linears import LINEAR_GELU
from ..parts.norm_modules import OUTPUT_NORM
from ..quantized.precision import TWO_LISTS

_FLUX = "diffusers.models.transformers.transformer_flux"
_CONTROLNET = "diffusers.models.controlnets.controlnet_flux"
_SPECS = (
    model_spec(f"{_FLUX}:FluxTransformer2DModel", *TWO_LISTS.blocks),
    model_spec(f"{_CONTROLNET}:FluxControlNetModel", *TWO_LISTS.blocks),
    double_spec(f"{_FLUX}:FluxTransformerBlock"),
    single_spec(f"{_FLUX}:FluxSingleTransformerBlock"),
    flux_attention_spec(f"{_FLUX}:FluxAttention"),
    axial_positions(f"{_FLUX}:FluxPosEmbed"),
    axial_positions("diffusers.models.embeddings:FluxPosEmbed"),
    TIMESTEPS,
    LINEAR_GELU,
)
_ONCE = ("x_embedder", "context_embedder", "time_text_embed", "proj_out")
FAMILIES = (Family("FLUX.1", _SPECS, _ONCE, TWO_LISTS, OUTPUT_NORM),)
