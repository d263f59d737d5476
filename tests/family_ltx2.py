"""Small LTX-2 models for the tests of all families."""

import diffusers
import torch

from family import Family, make_all_matter, seeded

CHANNELS, AUDIO_CHANNELS = 8, 4
CAPTION_CHANNELS = 24
# What LTX-2.3 has besides.
LTX23 = {
    "gated_attn": True,
    "cross_attn_mod": True,
    "audio_gated_attn": True,
    "audio_cross_attn_mod": True,
    "use_prompt_embeddings": False,
    "perturbed_attn": True,
}


def ltx2_model(device, dtype=torch.float32, *, seed=0, blocks=2, heads=2, head_dim=16, **config):
    """Norm weights differ from 1, and modulations are large."""
    torch.manual_seed(seed)
    hidden = heads * head_dim
    model = diffusers.LTX2VideoTransformer3DModel(
        **{
            "in_channels": CHANNELS,
            "out_channels": CHANNELS,
            "num_attention_heads": heads,
            "attention_head_dim": head_dim,
            "cross_attention_dim": hidden,
            "audio_in_channels": AUDIO_CHANNELS,
            "audio_out_channels": AUDIO_CHANNELS,
            "audio_num_attention_heads": heads,
            "audio_attention_head_dim": head_dim,
            "audio_cross_attention_dim": hidden,
            "num_layers": blocks,
            "caption_channels": CAPTION_CHANNELS,
            "rope_type": "split",
            **config,
        }
    )
    make_all_matter(model, (), ())
    return model.to(device, dtype).eval()


def ltx2_inputs(
    device,
    dtype=torch.float32,
    *,
    seed=None,
    batch=2,
    tokens=1,
    text_length=5,
    text_channels=(CAPTION_CHANNELS, CAPTION_CHANNELS),
    per_token=False,
    mask="padded",
    **options,
):
    """``text_channels``: of the text for the video and for the audio."""
    normal = seeded(seed, device)
    frames, height, width = grid = 2, 2 + tokens, 2
    audio_frames = 3
    encoder_attention_mask = None
    if mask is not None:
        lengths = torch.arange(batch) * 3 % text_length + 2
        encoder_attention_mask = (torch.arange(text_length) < lengths[:, None]).to(device).long()
    positions = diffusers.models.transformers.transformer_ltx2.LTX2AudioVideoRotaryPosEmbed
    video, audio = positions(12), positions(12, modality="audio", scale_factors=(4,))
    count = frames * height * width
    timestep = 1000 * (normal(batch, count) if per_token else normal(batch)).sigmoid()
    text, audio_text = (normal(batch, text_length, size).to(dtype) for size in text_channels)
    return {
        "hidden_states": normal(batch, count, CHANNELS).to(dtype),
        "audio_hidden_states": normal(batch, audio_frames, AUDIO_CHANNELS).to(dtype),
        "encoder_hidden_states": text,
        "audio_encoder_hidden_states": audio_text,
        "timestep": timestep,
        "audio_timestep": 1000 * normal(batch).sigmoid(),
        "sigma": 1000 * normal(batch).sigmoid(),
        "encoder_attention_mask": encoder_attention_mask,
        "audio_encoder_attention_mask": encoder_attention_mask,
        **dict(zip(("num_frames", "height", "width"), grid, strict=True)),
        "audio_num_frames": audio_frames,
        "video_coords": video.prepare_video_coords(batch, *grid, device),
        "audio_coords": audio.prepare_audio_coords(batch, audio_frames, device),
        **options,
    }


LTX2 = Family(
    name="ltx2",
    model=ltx2_model,
    inputs=ltx2_inputs,
    inexact=(
        *("hidden_states", "audio_hidden_states"),
        *("encoder_hidden_states", "audio_encoder_hidden_states"),
    ),
    options={
        "padded text": {},
        "no mask": {"mask": None},
        "batch of 1": {"batch": 1},
        "more tokens": {"batch": 3, "tokens": 5, "text_length": 9},
        "a timestep for each token": {"per_token": True},
        "isolated modalities": {"isolate_modalities": True},
    },
    parts={
        "block": "transformer_blocks.0",
        "next_block": "transformer_blocks.1",
        "attention": "transformer_blocks.0.attn1",
        "cross_attention": "transformer_blocks.0.attn2",
        "audio_to_video": "transformer_blocks.0.audio_to_video_attn",
        "norm": "transformer_blocks.1.norm1",
        "norm2": "transformer_blocks.0.norm2",
        "norm3": "transformer_blocks.0.norm3",
        "audio_norm": "transformer_blocks.1.audio_norm1",
        "cross_norm": "transformer_blocks.0.audio_to_video_norm",
        "qk_norm": "transformer_blocks.0.attn1.norm_q",
        "linear": "transformer_blocks.0.attn1.to_k",
        "output": "transformer_blocks.0.attn1.to_out.0",
        "feed_forward": "transformer_blocks.0.ff",
        "activation": "transformer_blocks.0.ff.net.0",
        "up": "transformer_blocks.0.ff.net.0.proj",
        "rope": "rope",
        "modulation": "time_embed",
    },
    lora_targets=["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"],
    caches=("pyramid", "taylorseer"),
    module="diffusers.models.transformers.transformer_ltx2",
    functions=(
        *("apply_interleaved_rotary_emb", "apply_split_rotary_emb", "dispatch_attention_fn"),
    ),
    processor="LTX2AudioVideoAttnProcessor",
)
