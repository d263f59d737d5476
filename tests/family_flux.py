"""Small FLUX.1, FLUX.2, FLUX.3 and Chroma models for the tests of all families."""

import torch

import family

CHANNELS, TEXT_CHANNELS, POOLED_CHANNELS = 8, 24, 12


def of_two_kinds(blocks, heads, head_dim):
    """The arguments of all models here."""
    return {
        **family.sizes(blocks, heads, head_dim),
        "num_single_layers": 2,
        "in_channels": CHANNELS,
        "joint_attention_dim": TEXT_CHANNELS,
    }


@family.model_of(
    "FluxTransformer2DModel",
    ("norm.linear", "norm1.linear", "norm1_context.linear", "norm_out.linear"),
    "time_text_embed",
)
def flux_model(blocks, heads, head_dim):
    return {
        **of_two_kinds(blocks, heads, head_dim),
        "pooled_projection_dim": POOLED_CHANNELS,
        "guidance_embeds": True,
        "axes_dims_rope": family.three_axes(head_dim),
    }


@family.model_of(
    "Flux2Transformer2DModel",
    (
        *("modulation_img.linear", "modulation_txt.linear", "norm_out.linear"),
        "single_stream_modulation.linear",
    ),
    "time_guidance_embed",
)
def flux2_model(blocks, heads, head_dim):
    return {
        **of_two_kinds(blocks, heads, head_dim),
        "timestep_guidance_channels": 16,
        "axes_dims_rope": (head_dim // 4,) * 4,
    }


def positions(tokens, text_length, axes=4, images=1):
    """Coordinates of the tokens of images, [images, tokens, axes], and of a text."""
    height, width = 3 + tokens, 3
    img_ids = torch.zeros(images, height, width, axes)
    img_ids[..., 0] = 10 * torch.arange(images)[:, None, None]
    img_ids[..., 1] = torch.arange(height)[:, None]
    img_ids[..., 2] = torch.arange(width)
    txt_ids = torch.zeros(text_length, axes)
    if axes == 4:
        txt_ids[:, 3] = torch.arange(text_length)
    return img_ids.flatten(1, 2), txt_ids


@family.inputs_of
def flux2_inputs(normal, dtype, batch, tokens, text_length, axes=4, **options):
    img_ids, txt_ids = positions(tokens, text_length, axes)
    return {
        "hidden_states": normal(batch, img_ids.shape[1], CHANNELS).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "timestep": family.powers_of_two(normal, batch, 1 / 8).to(dtype),
        "guidance": family.powers_of_two(normal, batch, 1 / 2),
        "img_ids": img_ids[0],
        "txt_ids": txt_ids,
        **options,
    }


def flux_inputs(device, dtype=torch.float32, *, seed=None, batch=2, **options):
    normal = family.seeded(None if seed is None else seed + 1, device)
    pooled = normal(batch, POOLED_CHANNELS).to(dtype)
    inputs = flux2_inputs(device, dtype, seed=seed, batch=batch, axes=3, **options)
    return {**inputs, "pooled_projections": pooled}


SINGLE_PARTS = {
    "single_block": "single_transformer_blocks.0",
    "last_block": "single_transformer_blocks.1",
    "single_attention": "single_transformer_blocks.0.attn",
    "single_norm": "single_transformer_blocks.1.norm",
}
SINGLE_FEED_FORWARD_PARTS = {
    "output": "single_transformer_blocks.0.proj_out",
    "up": "single_transformer_blocks.0.proj_mlp",
    "gelu": "single_transformer_blocks.0.act_mlp",
}
BLOCKS = {
    "block_lists": ("transformer_blocks", "single_transformer_blocks"),
    "one_block": {"blocks": 1, "single_blocks": 1},
}

FLUX = family.Family(
    name="flux",
    model=flux_model,
    inputs=flux_inputs,
    inexact=("hidden_states", "encoder_hidden_states", "pooled_projections"),
    parts={
        **family.JOINT_PARTS,
        **SINGLE_PARTS,
        **family.JOINT_FEED_FORWARD_PARTS,
        "inner_norm": "transformer_blocks.1.norm1.norm",
        **SINGLE_FEED_FORWARD_PARTS,
    },
    lora_targets=[
        *(*family.JOINT_LORA, *family.FEED_FORWARD_LORA, "proj_mlp", "proj_out", "norm1.linear")
    ],
    caches=("first_block", "pyramid", "taylorseer", "mag", "faster"),
    processor="FluxAttnProcessor",
    **BLOCKS,
    fp8_calls=[10, 10, 0, 4, 0, 2, 2, 10],
)

FLUX2 = family.Family(
    name="flux2",
    model=flux2_model,
    inputs=flux2_inputs,
    parts={
        **family.JOINT_PARTS,
        **SINGLE_PARTS,
        "output": "single_transformer_blocks.0.attn.to_out",
        "gated_feed_forward": "transformer_blocks.0.ff",
        "activation": "transformer_blocks.0.ff_context.act_fn",
        "single_activation": "single_transformer_blocks.0.attn.mlp_act_fn",
        "up": "single_transformer_blocks.0.attn.to_qkv_mlp_proj",
        "modulation": "double_stream_modulation_img",
    },
    lora_targets=[*family.JOINT_LORA, "ff.linear_in", "ff.linear_out", "to_qkv_mlp_proj"],
    caches=("pyramid", "taylorseer", "mag"),
    processor="Flux2AttnProcessor",
    condition="temb_mod_img",
    **BLOCKS,
    fp8_calls=[4, 10, 0, 0, 4, 2, 0, 10],
)


_GUIDANCE = "distilled_guidance_layer"


@family.model_of("ChromaTransformer2DModel", (f"{_GUIDANCE}.out_proj",), _GUIDANCE)
def chroma_model(blocks, heads, head_dim):
    return {
        **of_two_kinds(blocks, heads, head_dim),
        "axes_dims_rope": family.three_axes(head_dim),
        "approximator_num_channels": 16,
        "approximator_hidden_dim": 32,
        "approximator_layers": 1,
    }


def chroma_inputs(device, dtype=torch.float32, *, mask=None, attention_mask=None, **options):
    """With ``mask`` the text has padding, as the pipeline pads it."""
    arguments = flux2_inputs(device, dtype, axes=3, **options)
    del arguments["guidance"]
    if mask is not None:
        batch, image, _ = arguments["hidden_states"].shape
        of_text = family.padded_prompts(batch, len(arguments["txt_ids"])).to(dtype)
        attention_mask = torch.cat([of_text, torch.ones(batch, image)], dim=1).to(device, dtype)
    return {**arguments, "attention_mask": attention_mask}


class _Chroma(family.Family):
    def cast(self, arguments, dtype):
        """The mask is added to scores, so it has their dtype."""
        mask = arguments["attention_mask"]
        mask = mask if mask is None else mask.to(dtype)
        return {**super().cast(arguments, dtype), "attention_mask": mask}


CHROMA = _Chroma(
    name="chroma",
    model=chroma_model,
    inputs=chroma_inputs,
    options={**family.TWO_STREAM_OPTIONS, "padded text": {"mask": "padded"}},
    parts={**FLUX.parts, "modulation": f"{_GUIDANCE}.out_proj"},
    lora_targets=[target for target in FLUX.lora_targets if target != "norm1.linear"],
    caches=("pyramid", "taylorseer"),
    processor="FluxAttnProcessor",
    functions=(),  # they are in the module of FLUX.1
    **BLOCKS,
    fp8_calls=[4, 10, 0, 4, 0, 2, 2, 10],
)


@family.model_of(
    "Flux3Transformer2DModel",
    ("image.linear", "image_cond.linear", "txt.linear", "norm_out.linear"),
    "timestep_embedder",
)
def flux3_model(blocks, heads, head_dim):
    return {
        **of_two_kinds(blocks, heads, head_dim),
        "cond_in_channels": CHANNELS,
        "timestep_channels": 16,
        "axes_dims_rope": (head_dim // 4,) * 4,
    }


@family.inputs_of
def flux3_inputs(normal, dtype, batch, tokens, text_length, images=0, **options):
    """``images`` is the number of reference images."""
    ids, txt_ids = positions(tokens, text_length, images=1 + images)
    count = ids.shape[1]
    references = {}
    if images:
        references = {
            "image_cond_hidden_states": normal(batch, images * count, CHANNELS).to(dtype),
            "image_cond_ids": ids[1:].flatten(0, 1),
        }
    return {
        "hidden_states": normal(batch, count, CHANNELS).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "timestep": family.powers_of_two(normal, batch, 1 / 8).to(dtype),
        "img_ids": ids[0],
        "txt_ids": txt_ids,
        **references,
        **options,
    }


FLUX3 = family.Family(
    name="flux3",
    model=flux3_model,
    inputs=flux3_inputs,
    parts={
        **family.block_parts("attn", "mode_blocks.image"),
        **SINGLE_PARTS,
        "norm": "txt_mode_blocks.1.norm",
        "output": "single_transformer_blocks.0.attn.to_out.0",
        "gated_feed_forward": "mode_blocks.image.0.ff",
        "activation": "single_transformer_blocks.0.ff.act_fn",
        "up": "single_transformer_blocks.0.ff.linear_in",
        "modulation": "single_stream_modulations.image",
        "output_norm": "norm_out",
        "rope": "pos_embed",
    },
    lora_targets=[*family.ATTENTION_LORA, "ff.linear_in", "ff.linear_out"],
    processor="Flux3AttnProcessor",
    one_block=BLOCKS["one_block"],
    block_lists=("txt_mode_blocks", "mode_blocks.image", "single_transformer_blocks"),
    condition="temb_mod",
    fp8_calls=[6, 4, 4, 0, 6, 0, 0, 0],
)
