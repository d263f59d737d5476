"""LongCat-Image: how its transformer maps to the operations. Its blocks are copies of FLUX.1's."""

from __future__ import annotations

from ..attention.modules import flux_attention_spec
from ..core.forward_state import Family, model_spec
from ..parts.blocks import double_spec, single_spec
from ..parts.embeddings import TIMESTEPS, axial_positions
from ..parts.linears import LINEAR_GELU
from ..parts.norm_modules import OUTPUT_NORM
from ..quantized.precision import TWO_LISTS

_MODEL = "diffusers.models.transformers.transformer_longcat_image:LongCatImage"
_SPECS = (
    model_spec(f"{_MODEL}Transformer2DModel", *TWO_LISTS.blocks),
    double_spec(f"{_MODEL}TransformerBlock"),
    single_spec(f"{_MODEL}SingleTransformerBlock"),
    flux_attention_spec(f"{_MODEL}Attention"),
    axial_positions(f"{_MODEL}PosEmbed"),
    TIMESTEPS,
    LINEAR_GELU,
)
_ONCE = ("x_embedder", "context_embedder", "time_embed", "proj_out")
FAMILIES = (Family("LongCat-Image", _SPECS, _ONCE, TWO_LISTS, OUTPUT_NORM),)
