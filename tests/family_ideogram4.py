"""Small Ideogram 4 models for the tests of all families."""

import torch

import family

CHANNELS, TEXT_CHANNELS = 8, 24
_TEXT, _IMAGE = 3, 2  # what a token is


@family.model_of(
    "Ideogram4Transformer2DModel", ("adaln_modulation",), ("t_embedding", "adaln_proj")
)
def ideogram4_model(blocks, heads, head_dim):
    return {
        **family.sizes(blocks, heads, head_dim),
        "in_channels": CHANNELS,
        "intermediate_size": 48,
        "adaln_dim": 16,
        "llm_features_dim": TEXT_CHANNELS,
        "rope_theta": 10000,
        "mrope_section": (head_dim // 2 - 2 * (head_dim // 6), head_dim // 6, head_dim // 6),
    }


@family.inputs_of
def ideogram4_inputs(normal, dtype, batch, tokens, text_length, mask=None, **options):
    """With ``mask`` a different number of text tokens per sample, after padding of its own segment."""
    height, width = 3 + tokens, 3
    image, axes = height * width, [torch.arange(length) for length in (1, height, width)]
    is_valid = torch.ones(batch, text_length + image, dtype=torch.bool)
    if mask is not None:
        is_valid[:, :text_length] = family.padded(batch, text_length).flip(1)
    of_text = torch.arange(text_length)[:, None].expand(-1, 3)
    positions = torch.cat([of_text, torch.cartesian_prod(*axes) + 65536])
    kinds = torch.tensor([_TEXT] * text_length + [_IMAGE] * image)
    return {
        "hidden_states": normal(batch, text_length + image, CHANNELS).to(dtype),
        "timestep": normal(batch).sigmoid().to(torch.bfloat16).to(dtype),
        "encoder_hidden_states": normal(batch, text_length + image, TEXT_CHANNELS).to(dtype),
        "position_ids": positions.expand(batch, -1, -1),
        "segment_ids": torch.where(is_valid, 1, -1),
        "indicator": torch.where(is_valid, kinds, 0),
        **options,
    }


IDEOGRAM4 = family.Family(
    name="ideogram4",
    model=ideogram4_model,
    inputs=ideogram4_inputs,
    inexact=("hidden_states", "encoder_hidden_states", "timestep"),
    options={**family.TWO_STREAM_OPTIONS, "padded text": {"mask": "padded", "text_length": 9}},
    parts={
        **family.block_parts("attention", "layers"),
        "norm": "layers.1.attention_norm1",
        "norm2": "layers.0.ffn_norm1",
        "inner_norm": "layers.0.attention_norm2",
        "gated_feed_forward": "layers.0.feed_forward",
        "up": "layers.0.feed_forward.w1",
        "modulation": "layers.0.adaln_modulation",
        "rope": "rotary_emb",
    },
    lora_targets=[*family.ATTENTION_LORA, "w1", "w2", "w3"],
    processor="Ideogram4AttnProcessor",
    block_lists=("layers",),
    condition="adaln_input",
    functions=("_rotate_half", "dispatch_attention_fn"),
    fp8_calls=[6, 1, 3, 0, 0, 0, 0, 0],
)
