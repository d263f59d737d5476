"""A small LongCat-Image model for the tests of all families: FLUX.1's without pooled text and guidance."""

import dataclasses

import family
from family_flux import FLUX, flux2_inputs, of_two_kinds


@family.model_of(
    "LongCatImageTransformer2DModel",
    ("norm.linear", "norm1.linear", "norm1_context.linear", "norm_out.linear"),
    "time_embed",
)
def longcat_image_model(blocks, heads, head_dim):
    return {
        **of_two_kinds(blocks, heads, head_dim),
        "axes_dims_rope": family.three_axes(head_dim),
    }


def longcat_image_inputs(*args, **options):
    return {**flux2_inputs(*args, axes=3, **options), "guidance": None}


LONGCAT_IMAGE = dataclasses.replace(
    FLUX,
    name="longcat_image",
    module="",
    model=longcat_image_model,
    inputs=longcat_image_inputs,
    inexact=("hidden_states", "encoder_hidden_states"),
    processor="LongCatImageAttnProcessor",
    caches=("pyramid", "taylorseer", "faster"),
)
