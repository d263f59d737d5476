"""Small MiniMax-H3 models for the tests of all families."""

import diffusers
import torch

from family import Family, in_dtype, make_all_matter, seeded

CHANNELS, AUDIO_CHANNELS, TEXT_CHANNELS = 2, 6, 24
_FLOAT32 = ("proj_in.", "audio_proj_in.", "time_embedder", "proj_out.", "audio_proj_out.")


def minimax_h3_model(
    device, dtype=torch.float32, *, seed=0, blocks=2, heads=2, head_dim=16, **config
):
    """Norm weights differ from 1. Modulations are large and differ between timesteps and modalities. A
    published model's embedding of time and its first and last layers are float32."""
    torch.manual_seed(seed)
    model = diffusers.MiniMaxH3Transformer3DModel(
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        hidden_size=48,
        num_layers=blocks,
        num_refiner_layers=blocks,
        ffn_dim=40,
        in_channels=CHANNELS,
        audio_in_channels=AUDIO_CHANNELS,
        text_dim=TEXT_CHANNELS,
        freq_dim=16,
        time_embed_hidden_dim=48,
        time_embed_dim=32,
        rope_freq_dim=head_dim // 8,
        **config,
    )
    make_all_matter(model, ("adaln_proj.linear", "norm_out.linear"), "time_embedder")
    return in_dtype(model, device, dtype, lambda name: name.startswith(_FLOAT32))


def minimax_h3_inputs(
    device, dtype=torch.float32, *, seed=None, batch=2, tokens=1, text_length=5, **options
):
    """Text, a frame without noise, audio and video, packed in this order."""
    normal = seeded(seed, device)
    frame, audio, video = 4, 3, 4 * tokens + 2
    lengths = torch.tensor([text_length, frame, audio, video])
    positions = torch.arange(int(lengths.sum()))
    text, image, sound, rest = positions.split(lengths.tolist())

    def by_part(*values):
        return torch.tensor(values).repeat_interleave(lengths).to(device)

    grid = torch.stack([positions, positions // 2 % 3, positions % 2], dim=1)
    return {
        "hidden_states": normal(batch, frame + video, 4 * CHANNELS).to(dtype),
        "audio_hidden_states": normal(batch, audio, AUDIO_CHANNELS).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "timestep": torch.tensor([0.25, 1.0], device=device),
        "timestep_indices": by_part(0, 1, 0, 0),
        "token_tags": by_part(1, 0, 2, 0),
        "position_ids": grid.to(device),
        "video_indices": torch.cat([image, rest]).to(device),
        "audio_indices": sound.to(device),
        "text_indices": text.to(device),
        **options,
    }


MINIMAX_H3 = Family(
    name="minimax_h3",
    model=minimax_h3_model,
    inputs=minimax_h3_inputs,
    inexact=("hidden_states", "audio_hidden_states", "encoder_hidden_states"),
    options={
        "two samples": {},
        "batch of 1": {"batch": 1},
        "more tokens": {"batch": 3, "tokens": 5, "text_length": 9},
        "one token of text": {"text_length": 1},
    },
    parts={
        "block": "transformer_blocks.0",
        "next_block": "transformer_blocks.1",
        "text_block": "token_refiner.refiner_blocks.0",
        "attention": "transformer_blocks.0.attn",
        "norm": "transformer_blocks.1.norm1",
        "norm2": "transformer_blocks.0.norm2",
        "qk_norm": "transformer_blocks.0.attn.norm_q",
        "linear": "transformer_blocks.0.attn.to_k",
        "output": "transformer_blocks.0.attn.to_out.0",
        "feed_forward": "transformer_blocks.0.ff",
        "activation": "transformer_blocks.0.ff.net.0",
        "up": "transformer_blocks.0.ff.net.0.proj",
        "modulation": "transformer_blocks.0.adaln_proj.linear",
        "rope": "rope",
    },
    lora_targets=["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"],
    caches=(),
    module="diffusers.models.transformers.transformer_minimax_h3",
    functions=("_apply_rotary_emb", "dispatch_attention_fn"),
    processor="MiniMaxH3AttnProcessor",
    block_lists=("token_refiner.refiner_blocks", "transformer_blocks"),
)
