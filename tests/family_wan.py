"""Small Wan models for the tests of all families."""

import family

CHANNELS, TEXT_CHANNELS = 4, 24


@family.model_of("WanTransformer3DModel", embedding="condition_embedder.time")
def wan_model(blocks, heads, head_dim):
    return {
        **family.sizes(blocks, heads, head_dim),
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "text_dim": TEXT_CHANNELS,
        "freq_dim": 16,
        "ffn_dim": 3 * heads * head_dim,
        "rope_max_seq_len": 32,
        "cross_attn_norm": True,
    }


@family.inputs_of
def wan_inputs(normal, dtype, batch, tokens, text_length, per_token=False, **options):
    frames, height, width = 2, 2 + 2 * tokens, 6
    count = frames * (height // 2) * (width // 2)
    timestep = 1000 * (normal(batch, count) if per_token else normal(batch)).sigmoid()
    return {
        "hidden_states": normal(batch, CHANNELS, frames, height, width).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "timestep": timestep,
        **options,
    }


WAN = family.Family(
    name="wan",
    model=wan_model,
    inputs=wan_inputs,
    options={
        "two samples": {},
        "batch of 1": {"batch": 1},
        "more tokens": {"batch": 3, "tokens": 4, "text_length": 9},
        "a timestep for each token": {"per_token": True},
    },
    parts={
        **family.block_parts("attn1", "blocks"),
        **family.feed_forward_parts("blocks.0.ffn"),
        "cross_attention": "blocks.0.attn2",
        "norm2": "blocks.0.norm2",
        "norm3": "blocks.0.norm3",
        "rope": "rope",
        "modulation": "condition_embedder.time_proj",
    },
    lora_targets=[*family.ATTENTION_LORA, "ffn.net.0.proj", "ffn.net.2"],
    caches=("first_block", "pyramid", "taylorseer", "mag", "faster"),
    functions=("dispatch_attention_fn",),
    processor="WanAttnProcessor",
    block_lists=("blocks",),
    fp8_calls=[6, 6, 0, 2, 0, 0, 0, 6],
)
