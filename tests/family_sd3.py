"""Small Stable Diffusion 3.5 models for the tests of all families."""

import family

CHANNELS, TEXT_CHANNELS, POOLED_CHANNELS = 4, 24, 12
_MODULATIONS = ("norm1.linear", "norm1_context.linear", "norm_out.linear")


@family.model_of("SD3Transformer2DModel", _MODULATIONS, "time_text_embed", blocks=3)
def sd3_model(blocks, heads, head_dim):
    """The first block attends twice to the image, the last one drops the text."""
    return {
        **family.sizes(blocks, heads, head_dim),
        "sample_size": 16,
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "joint_attention_dim": TEXT_CHANNELS,
        "caption_projection_dim": heads * head_dim,
        "pooled_projection_dim": POOLED_CHANNELS,
        "pos_embed_max_size": 24,
        "dual_attention_layers": (0,),
        "qk_norm": "rms_norm",
    }


@family.inputs_of
def sd3_inputs(normal, dtype, batch, tokens, text_length, **options):
    return {
        "hidden_states": normal(batch, CHANNELS, 6 + 2 * tokens, 6).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "pooled_projections": normal(batch, POOLED_CHANNELS).to(dtype),
        "timestep": 1000 * normal(batch).sigmoid(),
        **options,
    }


SD3 = family.Family(
    name="sd3",
    model=sd3_model,
    inputs=sd3_inputs,
    inexact=("hidden_states", "encoder_hidden_states", "pooled_projections"),
    parts={
        **family.JOINT_PARTS,
        **family.JOINT_FEED_FORWARD_PARTS,
        "last_block": "transformer_blocks.2",
        "second_attention": "transformer_blocks.0.attn2",
        "inner_norm": "transformer_blocks.1.norm1_context.norm",
        "dual_norm": "transformer_blocks.0.norm1",
        "last_norm": "transformer_blocks.2.norm1_context",
        "output": "transformer_blocks.0.attn2.to_out.0",
    },
    lora_targets=[*family.JOINT_LORA, *family.FEED_FORWARD_LORA, "norm1.linear"],
    module="diffusers.models.attention_processor",
    functions=(),
    has_backends=False,
    one_block={"blocks": 1, "dual_attention_layers": ()},
    processor="JointAttnProcessor2_0",
    fp8_calls=[12, 12, 0, 5, 0, 0, 0, 11],
)
