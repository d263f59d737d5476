"""Ovis-Image: how its transformer maps to the operations.

Its blocks are copies of FLUX.1's, with gated feed-forwards: that of a single block computes

    m = proj_mlp(n);  x = x + gate * proj_out([attention(n), m_1 * silu(m_2)])
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ..attention.modules import flux_attention_spec
from ..core.forward_state import Family, model_spec
from ..parts.blocks import double_spec, single_forward
from ..parts.embeddings import TIMESTEPS, axial_positions
from ..parts.linears import GATED_ACTIVATIONS, linear_and_swiglu
from ..parts.norm_modules import OUTPUT_NORM
from ..parts.streams import BlockSpec
from ..quantized.precision import TWO_LISTS

_MODEL = "diffusers.models.transformers.transformer_ovis_image:OvisImage"
_SPECS = (
    model_spec(f"{_MODEL}Transformer2DModel", *TWO_LISTS.blocks),
    double_spec(f"{_MODEL}TransformerBlock"),
    BlockSpec(
        f"{_MODEL}SingleTransformerBlock",
        partial(single_forward, options={"mlp_of": linear_and_swiglu}),
    ),
    flux_attention_spec(f"{_MODEL}Attention"),
    axial_positions(f"{_MODEL}PosEmbed"),
    TIMESTEPS,
    *(replace(spec, left_to_compiler=False) for spec in GATED_ACTIVATIONS[1:]),
)
_ONCE = (
    *("x_embedder", "context_embedder_norm", "context_embedder", "timestep_embedder"),
    "proj_out",
)
FAMILIES = (Family("Ovis-Image", _SPECS, _ONCE, TWO_LISTS, OUTPUT_NORM),)
