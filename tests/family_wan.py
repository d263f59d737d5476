"""Small Wan models for the tests of all families."""

import torch
from diffusers import WanTransformer3DModel

from family import Family, in_dtype, make_all_matter, seeded

CHANNELS = 4
TEXT_CHANNELS = 24


def wan_model(device, dtype=torch.float32, *, seed=0, blocks=2, heads=2, head_dim=16, **config):
    """Norm weights differ from 1, and the modulation is large. The published model's float32 parameters are
    float32."""
    torch.manual_seed(seed)
    model = WanTransformer3DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=blocks,
        attention_head_dim=head_dim,
        num_attention_heads=heads,
        text_dim=TEXT_CHANNELS,
        freq_dim=16,
        ffn_dim=3 * heads * head_dim,
        rope_max_seq_len=32,
        cross_attn_norm=True,
        **config,
    )
    make_all_matter(model, (), "condition_embedder.time")
    return in_dtype(model, device, dtype, _is_kept)


def _is_kept(name):
    kept = WanTransformer3DModel._keep_in_fp32_modules
    return any(part in name.split(".") for part in kept)


def wan_inputs(
    device,
    dtype=torch.float32,
    *,
    seed=None,
    batch=2,
    tokens=1,
    text_length=5,
    per_token=False,
    **options,
):
    normal = seeded(seed, device)
    frames, height, width = 2, 2 + 2 * tokens, 6
    count = frames * (height // 2) * (width // 2)
    timestep = 1000 * (normal(batch, count) if per_token else normal(batch)).sigmoid()
    return {
        "hidden_states": normal(batch, CHANNELS, frames, height, width).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "timestep": timestep,
        **options,
    }


WAN = Family(
    name="wan",
    model=wan_model,
    inputs=wan_inputs,
    inexact=("hidden_states", "encoder_hidden_states"),
    options={
        "two samples": {},
        "batch of 1": {"batch": 1},
        "more tokens": {"batch": 3, "tokens": 4, "text_length": 9},
        "a timestep for each token": {"per_token": True},
    },
    parts={
        "block": "blocks.0",
        "next_block": "blocks.1",
        "attention": "blocks.0.attn1",
        "cross_attention": "blocks.0.attn2",
        "norm": "blocks.1.norm1",
        "norm2": "blocks.0.norm2",
        "norm3": "blocks.0.norm3",
        "qk_norm": "blocks.0.attn1.norm_q",
        "linear": "blocks.0.attn1.to_k",
        "output": "blocks.0.attn1.to_out.0",
        "feed_forward": "blocks.0.ffn",
        "activation": "blocks.0.ffn.net.0",
        "up": "blocks.0.ffn.net.0.proj",
        "rope": "rope",
        "modulation": "condition_embedder.time_proj",
    },
    lora_targets=["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"],
    caches=("first_block", "pyramid", "taylorseer", "mag", "faster"),
    module="diffusers.models.transformers.transformer_wan",
    functions=("dispatch_attention_fn",),
    processor="WanAttnProcessor",
    block_lists=("blocks",),
)
