"""Small MiniMax-H3 models for the tests of all families."""

import torch

import family

CHANNELS, AUDIO_CHANNELS, TEXT_CHANNELS = 2, 6, 24


@family.model_of(
    "MiniMaxH3Transformer3DModel",
    ("adaln_proj.linear", "norm_out.linear"),
    "time_embedder",
)
def minimax_h3_model(blocks, heads, head_dim):
    return {
        **family.sizes(blocks, heads, head_dim),
        "hidden_size": 48,
        "num_refiner_layers": blocks,
        "ffn_dim": 40,
        "in_channels": CHANNELS,
        "audio_in_channels": AUDIO_CHANNELS,
        "text_dim": TEXT_CHANNELS,
        "freq_dim": 16,
        "time_embed_hidden_dim": 48,
        "time_embed_dim": 32,
        "rope_freq_dim": head_dim // 8,
    }


@family.inputs_of
def minimax_h3_inputs(normal, dtype, batch, tokens, text_length, **options):
    """Text, a frame without noise, audio and video, packed in this order."""
    frame, audio, video = 4, 3, 4 * tokens + 2
    lengths = torch.tensor([text_length, frame, audio, video])
    positions = torch.arange(int(lengths.sum()))
    text, image, sound, rest = positions.split(lengths.tolist())
    return {
        "hidden_states": normal(batch, frame + video, 4 * CHANNELS).to(dtype),
        "audio_hidden_states": normal(batch, audio, AUDIO_CHANNELS).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "timestep": torch.tensor([0.25, 1.0]),
        "timestep_indices": torch.tensor([0, 1, 0, 0]).repeat_interleave(lengths),
        "token_tags": torch.tensor([1, 0, 2, 0]).repeat_interleave(lengths),
        "position_ids": torch.stack([positions, positions // 2 % 3, positions % 2], dim=1),
        "video_indices": torch.cat([image, rest]),
        "audio_indices": sound,
        "text_indices": text,
        **options,
    }


MINIMAX_H3 = family.Family(
    name="minimax_h3",
    model=minimax_h3_model,
    inputs=minimax_h3_inputs,
    inexact=("hidden_states", "audio_hidden_states", "encoder_hidden_states"),
    parts={
        **family.block_parts("attn"),
        **family.feed_forward_parts(),
        "norm2": "transformer_blocks.0.norm2",
        "text_block": "token_refiner.refiner_blocks.0",
        "modulation": "transformer_blocks.0.adaln_proj.linear",
        "rope": "rope",
    },
    functions=("_apply_rotary_emb", "dispatch_attention_fn"),
    processor="MiniMaxH3AttnProcessor",
    block_lists=("token_refiner.refiner_blocks", "transformer_blocks"),
    fp8_calls=[10, 4, 4, 0, 0, 0, 0, 2],
)
