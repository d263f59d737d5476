"""Small LTX-Video models for the tests of all families."""

import torch

import ltx_models
from family import Family


def ltx_model(device, dtype=torch.float32, *, seed=0, blocks=2, heads=2, head_dim=16, **config):
    return ltx_models.transformer(
        device, dtype, blocks=blocks, heads=heads, head_dim=head_dim, seed=seed, **config
    )


def ltx_inputs(device, dtype=torch.float32, *, tokens=1, text_length=5, **options):
    grid = (2, 2 + tokens, 2)
    return ltx_models.make_inputs(device, dtype, grid=grid, text_length=text_length, **options)


LTX = Family(
    name="ltx",
    model=ltx_model,
    inputs=ltx_inputs,
    inexact=("hidden_states", "encoder_hidden_states"),
    options={
        "padded text": {},
        "full mask": {"mask": "full"},
        "no mask": {"mask": None},
        "batch of 1": {"batch": 1},
        "more tokens": {"batch": 3, "tokens": 5, "text_length": 9},
        "a timestep for each token": {"per_token": True},
    },
    parts={
        "block": "transformer_blocks.0",
        "next_block": "transformer_blocks.1",
        "attention": "transformer_blocks.0.attn1",
        "cross_attention": "transformer_blocks.0.attn2",
        "norm": "transformer_blocks.1.norm1",
        "norm2": "transformer_blocks.0.norm2",
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
    caches=("first_block", "pyramid", "taylorseer", "mag", "faster"),
    module="diffusers.models.transformers.transformer_ltx",
    processor="LTXVideoAttnProcessor",
)
