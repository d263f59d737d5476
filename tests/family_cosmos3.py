"""Small Cosmos 3 models for the tests of all families."""

import inspect

import diffusers
import torch

import family

CHANNELS, SOUND_CHANNELS = 4, 6


def _finish(model):
    if hasattr(model, "audio_modality_embed"):
        torch.nn.init.normal_(model.audio_modality_embed)


@family.model_of(
    "Cosmos3OmniTransformer",
    (),
    "time_embedder",
    finish=_finish,
)
def cosmos3_model(blocks, heads, head_dim):
    return {
        "hidden_size": 48,
        "head_dim": head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": max(heads // 2, 1),
        "num_hidden_layers": blocks,
        "intermediate_size": 64,
        "latent_channel": CHANNELS,
        "patch_latent_dim": 4 * CHANNELS,
        "vocab_size": 32,
        "rope_axes_dim": (head_dim // 2 - 2 * (head_dim // 6), head_dim // 6, head_dim // 6),
        "sound_gen": True,
        "sound_dim": SOUND_CHANNELS,
    }


@family.inputs_of
def cosmos3_inputs(normal, dtype, batch, tokens, text_length, sound=False, **options):
    """One sequence: text, then ``batch`` videos of two frames, of which the first is without noise. Then
    sound, if there is any."""
    shape, sounds = (2, 1 + tokens, 2), 3 * sound
    frame = shape[1] * shape[2]
    videos = batch * 2 * frame
    positions = torch.arange(text_length + videos + sounds)
    text, video, rest = positions.split([text_length, videos, sounds])
    noisy = video.view(batch, 2, frame)[:, 1].flatten()
    given = {
        "input_ids": text % 32,
        "text_indexes": text,
        "position_ids": torch.stack([positions, positions // 2 % 3, positions % 2]),
        "und_len": text_length,
        "sequence_length": len(positions),
        "vision_tokens": [
            normal(1, CHANNELS, 2, 2 * shape[1], 2 * shape[2]).to(dtype) for _ in range(batch)
        ],
        "vision_token_shapes": [shape] * batch,
        "vision_sequence_indexes": video,
        "vision_mse_loss_indexes": noisy,
        "vision_timesteps": family.powers_of_two(normal, 1, 64).expand(len(noisy)),
        "vision_noisy_frame_indexes": [torch.tensor([1])] * batch,
        **options,
    }
    if not sound:
        return given
    return {
        **given,
        "sound_tokens": [normal(SOUND_CHANNELS, sounds).to(dtype)],
        "sound_token_shapes": [(sounds, 1, 1)],
        "sound_sequence_indexes": rest,
        "sound_mse_loss_indexes": rest,
        "sound_timesteps": family.powers_of_two(normal, 1, 64).expand(sounds),
        "sound_noisy_frame_indexes": [torch.arange(sounds)],
    }


class _Cosmos3(family.Family):
    def cast(self, arguments, dtype):
        sound = {"sound_tokens"} & arguments.keys()
        return {
            **super().cast(arguments, dtype),
            **{name: [tensor.to(dtype) for tensor in arguments[name]] for name in sound},
        }


COSMOS3 = _Cosmos3(
    name="cosmos3",
    model=cosmos3_model,
    inputs=cosmos3_inputs,
    inexact=("vision_tokens",),
    options={
        "two samples": {},
        "batch of 1": {"batch": 1},
        "more tokens": {"batch": 3, "tokens": 4, "text_length": 9},
        "one token of text": {"text_length": 1},
        "sound": {"sound": True},
    },
    parts={
        "block": "layers.0",
        "next_block": "layers.1",
        "attention": "layers.0.self_attn",
        "norm": "layers.1.input_layernorm",
        "norm2": "layers.0.post_attention_layernorm_moe_gen",
        "qk_norm": "layers.0.self_attn.norm_q",
        "added_norm": "layers.0.self_attn.norm_added_k",
        "linear": "layers.0.self_attn.add_k_proj",
        "output": "layers.0.self_attn.to_out",
        "gated_feed_forward": "layers.0.mlp_moe_gen",
        "up": "layers.0.mlp_moe_gen.up_proj",
        "output_norm": "norm_moe_gen",
        "rope": "rotary_emb",
    },
    lora_targets=[
        *("to_q", "to_k", "to_v", "to_out", "add_q_proj", "add_k_proj", "add_v_proj"),
        *("to_add_out", "gate_proj", "up_proj", "down_proj"),
    ],
    processor="Cosmos3AttnProcessor",
    block_lists=("layers",),
    condition="rotary_emb",
    functions=("_rotate_half", "dispatch_attention_fn"),
    main="vision_tokens",
    fp8_calls=[8, 6, 2, 0, 0, 0, 0, 4],
)
# Axes of small heads cannot be chosen in older versions of diffusers.
if (
    "rope_axes_dim"
    not in inspect.signature(getattr(diffusers, "Cosmos3OmniTransformer", object)).parameters
):
    del COSMOS3
