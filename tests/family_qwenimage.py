"""Small Qwen-Image models for the tests of all families."""

import family

CHANNELS, TEXT_CHANNELS = 8, 24
_MODULATIONS = ("img_mod.1", "txt_mod.1", "norm_out.linear")


@family.model_of("QwenImageTransformer2DModel", _MODULATIONS, "time_text_embed")
def qwenimage_model(blocks, heads, head_dim):
    return {
        **family.sizes(blocks, heads, head_dim),
        "in_channels": CHANNELS,
        "out_channels": 2,
        "joint_attention_dim": TEXT_CHANNELS,
        "axes_dims_rope": family.three_axes(head_dim),
    }


@family.inputs_of
def qwenimage_inputs(normal, dtype, batch, tokens, text_length, mask=None, images=1, **options):
    """``mask`` is "padded" (a different number of text tokens per sample), "holes" or None."""
    height, width = 3 + tokens, 3
    if mask is not None:
        mask = family.text_mask(batch, text_length, 1, holes=mask == "holes")
    return {
        "hidden_states": normal(batch, images * height * width, CHANNELS).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "encoder_hidden_states_mask": mask,
        "timestep": (2.0 ** -(4 * normal(batch).sigmoid()).floor()).to(dtype),
        "img_shapes": [[(1, height, width)] * images] * batch,
        **options,
    }


QWEN_IMAGE = family.Family(
    name="qwenimage",
    model=qwenimage_model,
    inputs=qwenimage_inputs,
    options={
        **family.TWO_STREAM_OPTIONS,
        "padded text": {"mask": "padded"},
        "holes in the text": {"mask": "holes", "text_length": 9},
        "two images": {"images": 2},
    },
    parts={
        **family.JOINT_PARTS,
        **family.feed_forward_parts("transformer_blocks.0.img_mlp"),
        "norm": "transformer_blocks.1.img_norm1",
        "norm2": "transformer_blocks.0.txt_norm2",
        "feed_forward_of_text": "transformer_blocks.0.txt_mlp",
        "activation": "transformer_blocks.0.txt_mlp.net.0",
        "modulation": "transformer_blocks.0.img_mod",
        "modulation_of_next": "transformer_blocks.1.txt_mod.1",
    },
    lora_targets=[*family.JOINT_LORA, "img_mlp.net.0.proj", "img_mlp.net.2", "img_mod.1"],
    caches=("first_block", "pyramid", "taylorseer", "mag", "faster"),
    functions=("apply_rotary_emb_qwen", "dispatch_attention_fn"),
    processor="QwenDoubleStreamAttnProcessor2_0",
    fp8_calls=[8, 8, 0, 4, 0, 0, 0, 8],
)
