"""Small CogVideoX models for the tests of all families."""

from diffusers.models.embeddings import get_3d_rotary_pos_embed

import family

CHANNELS, TEXT_CHANNELS = 4, 24
HEAD_DIM = 64
_MODULATIONS = ("norm1.linear", "norm2.linear", "norm_out.linear")


@family.model_of("CogVideoXTransformer3DModel", _MODULATIONS, "time_embedding")
def cogvideox_model(blocks, heads, head_dim):
    """The head size is that of the inputs' rotary embedding."""
    return {
        **family.sizes(blocks, heads, HEAD_DIM),
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "time_embed_dim": 16,
        "text_embed_dim": TEXT_CHANNELS,
        "use_rotary_positional_embeddings": True,
    }


def consisid_model(device):
    """ConsisID without its face modules."""
    return cogvideox_model(device, cls="ConsisIDTransformer3DModel")


@family.inputs_of
def cogvideox_inputs(normal, dtype, batch, tokens, text_length, rotates=True, **options):
    frames, *grid = 2, 1 + tokens, 2
    rope = get_3d_rotary_pos_embed(HEAD_DIM, ((0, 0), grid), grid, frames) if rotates else None
    return {
        "hidden_states": normal(batch, frames, CHANNELS, 2 * grid[0], 2 * grid[1]).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "timestep": 1000 * normal(batch).sigmoid(),
        "image_rotary_emb": rope,
        **options,
    }


COGVIDEOX = family.Family(
    name="cogvideox",
    model=cogvideox_model,
    inputs=cogvideox_inputs,
    options={**family.TWO_STREAM_OPTIONS, "no rotation": {"rotates": False}},
    parts={
        **family.block_parts("attn1"),
        **family.feed_forward_parts(),
        "norm2": "transformer_blocks.0.norm2",
        "inner_norm": "transformer_blocks.1.norm1.norm",
        "modulation": "transformer_blocks.0.norm1.linear",
    },
    lora_targets=[*family.ATTENTION_LORA, *family.FEED_FORWARD_LORA, "norm1.linear"],
    module="diffusers.models.attention_processor",
    functions=(),
    has_backends=False,
    processor="CogVideoXAttnProcessor2_0",
    fp8_calls=[6, 4, 4, 4, 0, 0, 0, 4],
    fp8_twice=10,
)
