"""Small HunyuanVideo 1.0 and 1.5 models for the tests of all families, and models with their blocks."""

import torch

import family
from family import powers_of_two, text_mask
from family_flux import BLOCKS, FLUX, SINGLE_FEED_FORWARD_PARTS, SINGLE_PARTS

CHANNELS, TEXT_CHANNELS, POOLED_CHANNELS = 4, 24, 12
GLYPH_CHANNELS, IMAGE_CHANNELS = 20, 16
MODULATIONS = ("norm.linear", "norm1.linear", "norm1_context.linear", "norm_out.linear")


def _config(blocks, heads, head_dim):
    """The arguments of all models here."""
    return {
        **family.sizes(blocks, heads, head_dim),
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "num_refiner_layers": 1,
        "text_embed_dim": TEXT_CHANNELS,
        "rope_axes_dim": family.three_axes(head_dim),
    }


@family.model_of("HunyuanVideoTransformer3DModel", MODULATIONS, "time_text_embed")
def hunyuan_video_model(*of_blocks):
    own = {"num_single_layers": 2, "pooled_projection_dim": POOLED_CHANNELS}
    return {**_config(*of_blocks), **own}


@family.model_of("HunyuanVideo15Transformer3DModel", MODULATIONS, "time_embed")
def hunyuan_video15_model(*of_blocks):
    own = {"text_embed_2_dim": GLYPH_CHANNELS, "image_embed_dim": IMAGE_CHANNELS}
    return {**_config(*of_blocks), **own}


@family.model_of("HunyuanImageTransformer2DModel", MODULATIONS, "time_guidance_embed")
def hunyuan_image_model(blocks, heads, head_dim):
    own = {"num_single_layers": 2, "rope_axes_dim": (head_dim // 2,) * 2}
    return {**_config(blocks, heads, head_dim), **own}


def _common(normal, dtype, size, text_length, holes):
    batch = size[0]
    return {
        "hidden_states": normal(*size).to(dtype),
        "timestep": powers_of_two(normal, batch, 64).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "encoder_attention_mask": text_mask(batch, text_length, (text_length + 1) // 2, holes),
    }


@family.inputs_of
def hunyuan_video_inputs(normal, dtype, batch, tokens, text_length, holes=False, **options):
    size = (batch, CHANNELS, 2, 2 + 2 * tokens, 6)
    return {
        **_common(normal, dtype, size, text_length, holes),
        **options,
        "pooled_projections": normal(batch, POOLED_CHANNELS).to(dtype),
        "guidance": powers_of_two(normal, batch, 512).to(dtype),
    }


@family.inputs_of
def hunyuan_video15_inputs(
    normal, dtype, batch, tokens, text_length, image=False, holes=False, **options
):
    """``image``: whether there is an image to begin with."""
    size = (batch, CHANNELS, 2, 2 + 2 * tokens, 6)
    arguments = _common(normal, dtype, size, text_length, holes)
    arguments["hidden_states"] = arguments["hidden_states"][..., ::2, ::2].contiguous()
    return {
        **arguments,
        **options,
        "encoder_hidden_states_2": normal(batch, 4, GLYPH_CHANNELS).to(dtype),
        "encoder_attention_mask_2": text_mask(batch, 4, 2).flip(0),
        "image_embeds": normal(batch, 3, IMAGE_CHANNELS).to(dtype) * image,
    }


def framepack_model(device):
    return hunyuan_video_model(
        device,
        cls="HunyuanVideoFramepackTransformer3DModel",
        has_image_proj=True,
        image_proj_dim=IMAGE_CHANNELS,
        has_clean_x_embedder=True,
    )


def framepack_inputs(device):
    """With one clean frame, two frames of history at half the resolution and four at a quarter."""
    arguments, normal = hunyuan_video_inputs(device), family.seeded(3, device)
    arguments["image_embeds"] = normal(2, 3, IMAGE_CHANNELS)
    arguments["indices_latents"] = torch.tensor([7, 8])
    size = arguments["hidden_states"].shape[3:]
    for name, first, count in (("clean", 0, 1), ("history_2x", 1, 2), ("history_4x", 3, 4)):
        arguments[f"latents_{name}"] = normal(2, CHANNELS, count, *size)
        arguments[f"indices_latents_{name}"] = torch.arange(first, first + count)
    return arguments


@family.inputs_of
def hunyuan_image_inputs(normal, dtype, batch, tokens, text_length, **options):
    return {**_common(normal, dtype, (batch, CHANNELS, 3, 4), text_length, True), **options}


PARTS = {
    **family.JOINT_PARTS,
    **family.JOINT_FEED_FORWARD_PARTS,
    "rope": "rope",
    "inner_norm": "transformer_blocks.1.norm1.norm",
}
OPTIONS = {**family.TWO_STREAM_OPTIONS, "padding first": {"holes": True}}

HUNYUAN_VIDEO = family.Family(
    name="hunyuan_video",
    model=hunyuan_video_model,
    inputs=hunyuan_video_inputs,
    inexact=("hidden_states", "encoder_hidden_states", "pooled_projections", "guidance"),
    options=OPTIONS,
    parts={
        **PARTS,
        **SINGLE_PARTS,
        **SINGLE_FEED_FORWARD_PARTS,
    },
    lora_targets=FLUX.lora_targets,
    caches=("first_block", "pyramid", "taylorseer", "mag"),
    processor="HunyuanVideoAttnProcessor2_0",
    functions=("dispatch_attention_fn",),
    **BLOCKS,
    fp8_calls=[10, 10, 0, 4, 0, 2, 2, 10],
)
HUNYUAN_VIDEO15 = family.Family(
    name="hunyuan_video15",
    model=hunyuan_video15_model,
    inputs=hunyuan_video15_inputs,
    inexact=(
        *("hidden_states", "encoder_hidden_states", "encoder_hidden_states_2", "image_embeds"),
        "timestep",
    ),
    options={**OPTIONS, "an image": {"image": True}},
    parts=PARTS,
    lora_targets=[*family.JOINT_LORA, *family.FEED_FORWARD_LORA, "norm1.linear"],
    caches=("pyramid", "taylorseer"),
    processor="HunyuanVideo15AttnProcessor2_0",
    functions=("dispatch_attention_fn",),
    fp8_calls=[8, 8, 0, 4, 0, 0, 0, 8],
)
