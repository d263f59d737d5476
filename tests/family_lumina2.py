"""Small Lumina 2 models for the tests of all families."""

import torch

import family

CHANNELS, TEXT_CHANNELS = 4, 24
_MODULATIONS = ("norm1.linear", "norm_out.linear_1")
_EMBEDDING = "time_caption_embed.timestep_embedder"


@family.model_of("Lumina2Transformer2DModel", _MODULATIONS, _EMBEDDING, gain=1)
def lumina2_model(blocks, heads, head_dim):
    """Two query heads for each key head."""
    return {
        "sample_size": 8,
        "in_channels": CHANNELS,
        "hidden_size": heads * head_dim,
        "num_layers": blocks,
        "num_refiner_layers": blocks,
        "num_attention_heads": heads,
        "num_kv_heads": heads // 2,
        "multiple_of": 16,
        "axes_dim_rope": family.three_axes(head_dim),
        "axes_lens": (512, 512, 64),
        "cap_feat_dim": TEXT_CHANNELS,
    }


@family.inputs_of
def lumina2_inputs(normal, dtype, batch, tokens, text_length, mask=None):
    """With ``mask`` prompts have different lengths, the longest one ``text_length``."""
    mask = family.padded_prompts(batch, text_length) if mask else torch.ones(batch, text_length)
    return {
        "hidden_states": normal(batch, CHANNELS, 6 + 2 * tokens, 6).to(dtype),
        "timestep": normal(batch).sigmoid(),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "encoder_attention_mask": mask.long(),
    }


LUMINA2 = family.Family(
    name="lumina2",
    model=lumina2_model,
    inputs=lumina2_inputs,
    options={**family.TWO_STREAM_OPTIONS, "padded text": {"mask": "padded"}},
    parts={
        **family.block_parts("attn", "layers"),
        "text_block": "context_refiner.0",
        "inner_norm": "layers.1.norm1.norm",
        "norm2": "layers.0.ffn_norm1",
        "gated_feed_forward": "layers.0.feed_forward",
        "up": "layers.0.feed_forward.linear_1",
        "modulation": "layers.0.norm1.linear",
    },
    lora_targets=[*family.ATTENTION_LORA, *(f"feed_forward.linear_{i}" for i in (1, 2, 3))],
    processor="Lumina2AttnProcessor2_0",
    block_lists=("context_refiner", "noise_refiner", "layers"),
    functions=("apply_rotary_emb",),
    has_backends=False,
    fp8_calls=[16, 3, 9, 0, 0, 0, 0, 0],
)
