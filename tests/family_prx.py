"""A small PRX model for the tests of all families."""

import family

CHANNELS, TEXT_CHANNELS = 4, 24


@family.model_of("PRXTransformer2DModel", ("modulation.lin", "adaLN_modulation.1"), "time_in")
def prx_model(blocks, heads, head_dim):
    return {
        "in_channels": CHANNELS,
        "context_in_dim": TEXT_CHANNELS,
        "hidden_size": heads * head_dim,
        "num_heads": heads,
        "depth": blocks,
        "axes_dim": [head_dim // 2, head_dim // 2],
    }


@family.inputs_of
def prx_inputs(normal, dtype, batch, tokens, text_length, mask=None, **options):
    """With ``mask`` a different number of text tokens per sample."""
    if mask is not None:
        options["attention_mask"] = family.padded(batch, text_length)
    return {
        "hidden_states": normal(batch, CHANNELS, 2 * (2 + tokens), 6).to(dtype),
        "timestep": normal(batch).sigmoid(),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        **options,
    }


PRX = family.Family(
    name="prx",
    model=prx_model,
    inputs=prx_inputs,
    options={**family.TWO_STREAM_OPTIONS, "padded text": {"mask": "padded", "text_length": 9}},
    parts={
        **family.block_parts("attention", "blocks"),
        "norm": "blocks.1.img_pre_norm",
        "norm2": "blocks.0.post_attention_layernorm",
        "added_norm": "blocks.0.attention.norm_added_k",
        "linear": "blocks.0.attention.img_qkv_proj",
        "up": "blocks.0.gate_proj",
        "activation": "blocks.0.mlp_act",
        "modulation": "blocks.0.modulation.lin",
        "rope": "pe_embedder",
    },
    lora_targets=["img_qkv_proj", "txt_kv_proj", "to_out.0", "gate_proj", "up_proj", "down_proj"],
    processor="PRXAttnProcessor2_0",
    block_lists=("blocks",),
    functions=("apply_rope", "dispatch_attention_fn"),
    fp8_calls=[8, 3, 1, 0, 0, 0, 0, 2],
)
