"""A small Ovis-Image model for the tests of all families: FLUX.1's without pooled text and guidance."""

import dataclasses

import family
from family_flux import CHANNELS, FLUX, SINGLE_PARTS, flux2_inputs, of_two_kinds


@family.model_of(
    "OvisImageTransformer2DModel",
    ("norm.linear", "norm1.linear", "norm1_context.linear", "norm_out.linear"),
    "timestep_embedder",
)
def ovis_image_model(blocks, heads, head_dim):
    return {
        **of_two_kinds(blocks, heads, head_dim),
        "out_channels": CHANNELS,
        "axes_dims_rope": family.three_axes(head_dim),
    }


def ovis_image_inputs(*args, **options):
    inputs = flux2_inputs(*args, axes=3, **options)
    del inputs["guidance"]
    return inputs


OVIS_IMAGE = dataclasses.replace(
    FLUX,
    name="ovis_image",
    module="",
    model=ovis_image_model,
    inputs=ovis_image_inputs,
    inexact=("hidden_states", "encoder_hidden_states"),
    processor="OvisImageAttnProcessor",
    fp8_calls=[10, 10, 0, 0, 4, 2, 0, 10],
    parts={
        **family.JOINT_PARTS,
        **SINGLE_PARTS,
        **family.JOINT_FEED_FORWARD_PARTS,
        "inner_norm": "transformer_blocks.1.norm1.norm",
        "output": "single_transformer_blocks.0.proj_out",
        "up": "single_transformer_blocks.0.proj_mlp",
        "single_activation": "single_transformer_blocks.0.act_mlp",
    },
    caches=("pyramid", "taylorseer", "faster"),
)
