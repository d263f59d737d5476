"""Small LTX-2 models for the tests of all families."""

import diffusers

import family
import family_ltx

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


@family.model_of("LTX2VideoTransformer3DModel")
def ltx2_model(blocks, heads, head_dim):
    return {
        **family.sizes(blocks, heads, head_dim),
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "cross_attention_dim": heads * head_dim,
        "audio_in_channels": AUDIO_CHANNELS,
        "audio_out_channels": AUDIO_CHANNELS,
        "audio_num_attention_heads": heads,
        "audio_attention_head_dim": head_dim,
        "audio_cross_attention_dim": heads * head_dim,
        "caption_channels": CAPTION_CHANNELS,
        "rope_type": "split",
    }


@family.inputs_of
def ltx2_inputs(
    normal,
    dtype,
    batch,
    tokens,
    text_length,
    text_channels=(CAPTION_CHANNELS, CAPTION_CHANNELS),
    per_token=False,
    mask="padded",
    **options,
):
    """``text_channels``: of the text for the video and for the audio."""
    frames, height, width = grid = 2, 2 + tokens, 2
    audio_frames = 3
    if mask is not None:
        mask = family.padded(batch, text_length, 2).long()
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
        "encoder_attention_mask": mask,
        "audio_encoder_attention_mask": mask,
        **dict(zip(("num_frames", "height", "width"), grid, strict=True)),
        "audio_num_frames": audio_frames,
        "video_coords": video.prepare_video_coords(batch, *grid, "cpu"),
        "audio_coords": audio.prepare_audio_coords(batch, audio_frames, "cpu"),
        **options,
    }


LTX2 = family.Family(
    name="ltx2",
    model=ltx2_model,
    inputs=ltx2_inputs,
    inexact=(
        *("hidden_states", "audio_hidden_states"),
        *("encoder_hidden_states", "audio_encoder_hidden_states"),
    ),
    options={**family_ltx.OPTIONS, "isolated modalities": {"isolate_modalities": True}},
    parts={
        **family_ltx.PARTS,
        "audio_to_video": "transformer_blocks.0.audio_to_video_attn",
        "norm3": "transformer_blocks.0.norm3",
        "audio_norm": "transformer_blocks.1.audio_norm1",
        "cross_norm": "transformer_blocks.0.audio_to_video_norm",
    },
    caches=("pyramid", "taylorseer"),
    functions=(
        *("apply_interleaved_rotary_emb", "apply_split_rotary_emb", "dispatch_attention_fn"),
    ),
    processor="LTX2AudioVideoAttnProcessor",
    fp8_calls=[16, 8, 12, 4, 0, 0, 0, 4],
)
