"""Small Kandinsky 6 models for the tests of all families."""

import torch

import family

CHANNELS, AUDIO_CHANNELS, TEXT_CHANNELS, POOLED_CHANNELS = 4, 6, 24, 12
BLOCKS = "visual_transformer_blocks.0"
PART = f"{BLOCKS}.video_dec_block"


@family.model_of(
    "Kandinsky6Transformer3DModel",
    ("_modulation.out_layer", ".modulation.out_layer"),
    ("video_time", "audio_time", "video_pooled", "audio_pooled"),
)
def kandinsky6_model(blocks, heads, head_dim):
    return {
        "num_visual_blocks": blocks,
        "num_text_blocks": blocks,
        "model_dim": heads * head_dim,
        "ff_dim": 3 * heads * head_dim,
        "axes_dims": family.three_axes(head_dim),
        "time_dim": 16,
        "in_visual_dim": CHANNELS,
        "out_visual_dim": CHANNELS,
        "in_audio_dim": AUDIO_CHANNELS,
        "out_audio_dim": AUDIO_CHANNELS,
        "in_text_dim": TEXT_CHANNELS,
        "in_text_dim2": POOLED_CHANNELS,
        "visual_cond": False,
        "ca_rope": True,
        "cross_gates": True,
        "fix_modulation": True,
        "visual_token_type_num_embeddings": 2,
    }


@family.inputs_of
def kandinsky6_inputs(
    normal, dtype, batch, tokens, text_length, has_audio=True, mask=None, has_types=False
):
    frames, audio = 2, normal(batch, 2 + 2 * tokens, AUDIO_CHANNELS).to(dtype)
    if mask is not None:
        mask = family.text_mask(batch, text_length, 2, holes=mask == "holes").bool()
    types = torch.arange(frames).expand(batch, frames) if has_types else None
    return {
        "hidden_states": normal(batch, frames, 2 + 2 * tokens, 6, CHANNELS).to(dtype),
        **({"audio_hidden_states": audio} if has_audio else {}),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "pooled_projections": normal(batch, POOLED_CHANNELS).to(dtype),
        "timestep": 1000 * normal(batch).sigmoid(),
        "encoder_attention_mask": mask,
        "visual_token_type_ids": types,
    }


KANDINSKY6 = family.Family(
    name="kandinsky6",
    model=kandinsky6_model,
    inputs=kandinsky6_inputs,
    inexact=(
        *("hidden_states", "audio_hidden_states", "encoder_hidden_states"),
        "pooled_projections",
    ),
    options={
        "two samples": {},
        "batch of 1": {"batch": 1},
        "more tokens": {"batch": 3, "tokens": 4, "text_length": 9},
        "padded text": {"mask": "padded"},
        "a mask with holes": {"mask": "holes"},
        "no audio": {"has_audio": False},
        "a reference frame": {"has_types": True},
    },
    parts={
        "block": BLOCKS,
        "next_block": "visual_transformer_blocks.1",
        "attention": f"{PART}.self_attention",
        "norm": "visual_transformer_blocks.1.video_dec_block.self_attention_norm",
        "norm2": f"{PART}.cross_attention_norm",
        "norm3": f"{BLOCKS}.va_normalization",
        "qk_norm": f"{PART}.self_attention.query_norm",
        "linear": f"{PART}.self_attention.to_key",
        "output": f"{BLOCKS}.audio_dec_block.cross_attention.out_layer",
        "cross_attention": f"{BLOCKS}.av_cross_attention",
        **family.feed_forward_parts(f"{PART}.feed_forward"),
        "rope": "visual_rope_embeddings",
        "modulation": f"{PART}.visual_modulation.out_layer",
    },
    lora_targets=[
        *("to_query", "to_key", "to_value"),
        *(f"{part}_attention.out_layer" for part in ("self", "cross", "va_cross", "av_cross")),
        *("feed_forward.net.0.proj", "feed_forward.net.2"),
    ],
    block_lists=(
        *("video_text_transformer_blocks", "audio_text_transformer_blocks"),
        "visual_transformer_blocks",
    ),
    functions=("apply_rotary", "dispatch_attention_fn"),
    processor="Kandinsky6AttnProcessor",
    condition="time_embed",
    fp8_calls=[32, 24, 0, 8, 0, 0, 0, 24],
)
