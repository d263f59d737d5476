"""Small EasyAnimate models for the tests of all families."""

import family

CHANNELS, TEXT_CHANNELS = 4, 24
_MODULATIONS = ("norm1.linear", "norm2.linear", "norm_out.linear")


@family.model_of("EasyAnimateTransformer3DModel", _MODULATIONS, "time_embedding")
def easyanimate_model(blocks, heads, head_dim):
    """In the second block the text has no layers of its own. Positions need multiples of 16 elements."""
    return {
        **family.sizes(blocks, heads, -(-head_dim // 16) * 16),
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "patch_size": 2,
        "mmdit_layers": 1,
        "time_embed_dim": 16,
        "text_embed_dim": TEXT_CHANNELS,
        "add_norm_text_encoder": True,
    }


@family.inputs_of
def easyanimate_inputs(normal, dtype, batch, tokens, text_length, **options):
    return {
        "hidden_states": normal(batch, CHANNELS, 2, 2 + 2 * tokens, 4).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "timestep": 1000 * normal(batch).sigmoid(),
        **options,
    }


EASYANIMATE = family.Family(
    name="easyanimate",
    model=easyanimate_model,
    inputs=easyanimate_inputs,
    parts={
        **family.block_parts("attn1"),
        **family.feed_forward_parts(),
        "feed_forward_of_text": "transformer_blocks.0.txt_ff",
        "norm2": "transformer_blocks.0.norm2",
        "added_norm": "transformer_blocks.0.attn1.norm_added_k",
        "inner_norm": "transformer_blocks.1.norm1.norm",
        "modulation": "transformer_blocks.0.norm1.linear",
        "rope": "rope_embedding",
    },
    lora_targets=[*family.JOINT_LORA, *family.FEED_FORWARD_LORA, "norm1.linear"],
    processor="EasyAnimateAttnProcessor2_0",
    functions=(),
    has_backends=False,
    fp8_calls=[7, 7, 1, 4, 0, 0, 0, 7],
    fp8_twice=5,
)
