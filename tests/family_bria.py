"""Small Bria 3.2 and FIBO models for the tests of all families: FLUX.1's without pooled text and guidance."""

import dataclasses

import torch

import family
from family_flux import FLUX, flux2_inputs, of_two_kinds

STATES = 12  # features of the text encoder


def bria_model(blocks, heads, head_dim):
    return {
        **of_two_kinds(blocks, heads, head_dim),
        "axes_dims_rope": family.three_axes(head_dim),
    }


def fibo_model(blocks, heads, head_dim):
    return {**bria_model(blocks, heads, head_dim), "text_encoder_dim": STATES}


_MODULATIONS = ("norm.linear", "norm1.linear", "norm1_context.linear", "norm_out.linear")


def bria_inputs(*args, **options):
    inputs = flux2_inputs(*args, axes=3, **options)
    del inputs["guidance"]
    return {**inputs, "timestep": 1000 * inputs["timestep"]}


def fibo_inputs(device, dtype=torch.float32, *, seed=None, mask=None, **options):
    """With ``mask`` the text has padding, as the pipeline pads it."""
    inputs = bria_inputs(device, dtype, seed=seed, **options)
    batch, length, _ = inputs["encoder_hidden_states"].shape
    normal = family.seeded(None if seed is None else seed + 1, device)
    states = [normal(batch, length, STATES).to(dtype) for _ in range(4)]
    if mask is not None:
        valid = family.padded_prompts(batch, length)
        valid = torch.nn.functional.pad(valid, (0, inputs["hidden_states"].shape[1]), value=True)
        inputs["joint_attention_kwargs"] = {"attention_mask": valid[:, None, None].to(device)}
    return {**inputs, "text_encoder_layers": states}


BRIA = dataclasses.replace(
    FLUX,
    name="bria",
    module="",
    model=family.model_of("BriaTransformer2DModel", _MODULATIONS, "time_embed")(bria_model),
    inputs=bria_inputs,
    inexact=("hidden_states", "encoder_hidden_states"),
    processor="BriaAttnProcessor",
    caches=("pyramid", "taylorseer", "faster"),
)

FIBO = dataclasses.replace(
    BRIA,
    name="bria_fibo",
    module="",
    model=family.model_of("BriaFiboTransformer2DModel", _MODULATIONS, "time_embed")(fibo_model),
    inputs=fibo_inputs,
    inexact=(*BRIA.inexact, "text_encoder_layers"),
    options={**family.TWO_STREAM_OPTIONS, "padded text": {"mask": "padded"}},
    processor="BriaFiboAttnProcessor",
    caches=(),
    one_block={"blocks": 1, "single_blocks": 3},  # as many states of the text
)
