"""A small HiDream-I1 model for the tests of all families."""

import family

CHANNELS, T5_CHANNELS, TEXT_CHANNELS, POOLED = 4, 12, 24, 16


class HiDream(family.Family):
    """Its blocks are wrapped in a module each."""

    def blocks(self, model):
        return [wrapper.block for wrapper in super().blocks(model)]


@family.model_of(
    "HiDreamImageTransformer2DModel", ("adaLN_modulation.1",), ("t_embedder", "p_embedder")
)
def hidream_model(blocks, heads, head_dim):
    return {
        **family.sizes(blocks, heads, head_dim),
        "num_single_layers": 2,
        # Which of several it chooses is not continuous.
        "num_routed_experts": 1,
        "num_activated_experts": 1,
        "patch_size": 2,
        "in_channels": CHANNELS,
        "caption_channels": [T5_CHANNELS, TEXT_CHANNELS],
        "text_emb_dim": POOLED,
        "axes_dims_rope": family.three_axes(head_dim),
        "max_resolution": (32, 32),
        "llama_layers": [*range(blocks + 2)],
    }


@family.inputs_of
def hidream_inputs(normal, dtype, batch, tokens, text_length, height=0):
    """``height``: in place of the width, for an image that is not a square."""
    side = 2 * (1 + tokens)
    return {
        "hidden_states": normal(batch, CHANNELS, height or side, side).to(dtype),
        "timesteps": 1000 * normal(batch).sigmoid(),
        "encoder_hidden_states_t5": normal(batch, text_length, T5_CHANNELS).to(dtype),
        "encoder_hidden_states_llama3": normal(4, batch, text_length, TEXT_CHANNELS).to(dtype),
        "pooled_embeds": normal(batch, POOLED).to(dtype),
    }


_TEXTS = ("encoder_hidden_states_t5", "encoder_hidden_states_llama3")
HIDREAM = HiDream(
    name="hidream",
    module="diffusers.models.transformers.transformer_hidream_image",
    model=hidream_model,
    inputs=hidream_inputs,
    inexact=("hidden_states", *_TEXTS, "pooled_embeds"),
    options={**family.TWO_STREAM_OPTIONS, "not square": {"height": 2}},
    parts={
        **family.block_parts("block.attn1", "double_stream_blocks"),
        "block": "double_stream_blocks.0.block",
        "next_block": "double_stream_blocks.1.block",
        "norm": "double_stream_blocks.1.block.norm1_i",
        "norm2": "double_stream_blocks.0.block.norm3_i",
        "qk_norm": "double_stream_blocks.0.block.attn1.q_rms_norm",
        "output": "double_stream_blocks.0.block.attn1.to_out",
        "feed_forward": "double_stream_blocks.0.block.ff_t",
        "up": "double_stream_blocks.0.block.ff_t.w1",
        "modulation": "double_stream_blocks.0.block.adaLN_modulation.1",
        "rope": "pe_embedder",
    },
    lora_targets=["to_q", "to_k", "to_v", "to_out", "to_q_t", "w1", "w2", "w3"],
    processor="HiDreamAttnProcessor",
    block_lists=("double_stream_blocks", "single_stream_blocks"),
    functions=("apply_rope",),
    has_backends=False,
    keeps_rotations=True,
    fp8_calls=[30, 6, 0, 0, 0, 0, 0, 6],
)
