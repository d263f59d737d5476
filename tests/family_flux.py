"""Small FLUX.1 and FLUX.2 models for the tests of all families."""

import torch
from diffusers import Flux2Transformer2DModel, FluxTransformer2DModel

from family import (
    JOINT_LORA,
    JOINT_PARTS,
    TWO_STREAM_OPTIONS,
    Family,
    make_all_matter,
    powers_of_two,
    seeded,
)

CHANNELS = 8
TEXT_CHANNELS = 24
POOLED_CHANNELS = 12


def _model(
    cls,
    modulations,
    embedding,
    device,
    dtype=torch.float32,
    *,
    seed=0,
    blocks=2,
    single_blocks=2,
    heads=2,
    head_dim,
    **config,
):
    """Norm weights differ from 1. Modulations are large and differ between token streams."""
    torch.manual_seed(seed)
    model = cls(
        in_channels=CHANNELS,
        joint_attention_dim=TEXT_CHANNELS,
        num_layers=blocks,
        num_single_layers=single_blocks,
        attention_head_dim=head_dim,
        num_attention_heads=heads,
        **config,
    )
    make_all_matter(model, modulations, embedding)
    return model.to(device, dtype).eval()


def flux_model(*device_and_dtype, head_dim=16, **options):
    # Each of the three axes gets an even number of a head's elements.
    axis = head_dim // 3 // 2 * 2
    return _model(
        FluxTransformer2DModel,
        ("norm.linear", "norm1.linear", "norm1_context.linear", "norm_out.linear"),
        "time_text_embed",
        *device_and_dtype,
        head_dim=head_dim,
        pooled_projection_dim=POOLED_CHANNELS,
        guidance_embeds=True,
        axes_dims_rope=(head_dim - 2 * axis, axis, axis),
        **options,
    )


def flux2_model(*device_and_dtype, head_dim=16, **options):
    return _model(
        Flux2Transformer2DModel,
        (
            *("modulation_img.linear", "modulation_txt.linear", "norm_out.linear"),
            "single_stream_modulation.linear",
        ),
        "time_guidance_embed",
        *device_and_dtype,
        head_dim=head_dim,
        timestep_guidance_channels=16,
        axes_dims_rope=(head_dim // 4,) * 4,
        **options,
    )


def flux2_inputs(
    device, dtype=torch.float32, *, seed=None, batch=2, tokens=1, text_length=5, axes=4, **options
):
    normal = seeded(seed, device)
    height, width = 3 + tokens, 3
    img_ids = torch.zeros(height, width, axes)
    img_ids[..., 1] = torch.arange(height)[:, None]
    img_ids[..., 2] = torch.arange(width)
    txt_ids = torch.zeros(text_length, axes)
    if axes == 4:
        txt_ids[:, 3] = torch.arange(text_length)
    return {
        "hidden_states": normal(batch, height * width, CHANNELS).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "timestep": powers_of_two(normal, batch, 1 / 8).to(dtype),
        "guidance": powers_of_two(normal, batch, 1 / 2),
        "img_ids": img_ids.flatten(0, 1).to(device),
        "txt_ids": txt_ids.to(device),
        **options,
    }


def flux_inputs(device, dtype=torch.float32, *, seed=None, batch=2, **options):
    pooled = seeded(None if seed is None else seed + 1, device)(batch, POOLED_CHANNELS).to(dtype)
    inputs = flux2_inputs(device, dtype, seed=seed, batch=batch, axes=3, **options)
    return {**inputs, "pooled_projections": pooled}


# Paths in both models.
PARTS = {
    **JOINT_PARTS,
    "single_block": "single_transformer_blocks.0",
    "last_block": "single_transformer_blocks.1",
    "single_attention": "single_transformer_blocks.0.attn",
    "norm": "transformer_blocks.1.norm1",
    "norm2": "transformer_blocks.0.norm2",
    "single_norm": "single_transformer_blocks.1.norm",
}
BLOCKS = {
    "block_lists": ("transformer_blocks", "single_transformer_blocks"),
    "one_block": {"blocks": 1, "single_blocks": 1},
    "options": TWO_STREAM_OPTIONS,
}

FLUX = Family(
    name="flux",
    model=flux_model,
    inputs=flux_inputs,
    inexact=("hidden_states", "encoder_hidden_states", "pooled_projections"),
    parts={
        **PARTS,
        "inner_norm": "transformer_blocks.1.norm1.norm",
        "output": "single_transformer_blocks.0.proj_out",
        "feed_forward": "transformer_blocks.0.ff",
        "feed_forward_of_text": "transformer_blocks.0.ff_context",
        "activation": "transformer_blocks.0.ff_context.net.0",
        "up": "single_transformer_blocks.0.proj_mlp",
        "gelu": "single_transformer_blocks.0.act_mlp",
        "modulation": "transformer_blocks.0.norm1.linear",
    },
    lora_targets=[*JOINT_LORA, "ff.net.0.proj", "ff.net.2", "proj_mlp", "proj_out", "norm1.linear"],
    caches=("first_block", "pyramid", "taylorseer", "mag", "faster"),
    module="diffusers.models.transformers.transformer_flux",
    processor="FluxAttnProcessor",
    **BLOCKS,
)

FLUX2 = Family(
    name="flux2",
    model=flux2_model,
    inputs=flux2_inputs,
    inexact=("hidden_states", "encoder_hidden_states"),
    parts={
        **PARTS,
        "output": "single_transformer_blocks.0.attn.to_out",
        "gated_feed_forward": "transformer_blocks.0.ff",
        "activation": "transformer_blocks.0.ff_context.act_fn",
        "single_activation": "single_transformer_blocks.0.attn.mlp_act_fn",
        "up": "single_transformer_blocks.0.attn.to_qkv_mlp_proj",
        "modulation": "double_stream_modulation_img",
    },
    lora_targets=[*JOINT_LORA, "ff.linear_in", "ff.linear_out", "to_qkv_mlp_proj"],
    caches=("pyramid", "taylorseer", "mag"),
    module="diffusers.models.transformers.transformer_flux2",
    processor="Flux2AttnProcessor",
    condition="temb_mod_img",
    **BLOCKS,
)
