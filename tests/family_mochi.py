"""Small Mochi models for the tests of all families."""

import diffusers
import torch

from family import JOINT_LORA, TWO_STREAM_OPTIONS, Family, make_all_matter, seeded

CHANNELS, TEXT_CHANNELS, POOLED_CHANNELS = 4, 24, 16


def mochi_model(device, dtype=torch.float32, *, seed=0, blocks=2, heads=2, head_dim=16, **config):
    """Norm weights differ from 1. Modulations are large. Each head has angles of its own."""
    torch.manual_seed(seed)
    model = diffusers.MochiTransformer3DModel(
        in_channels=CHANNELS,
        num_layers=blocks,
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        pooled_projection_dim=POOLED_CHANNELS,
        text_embed_dim=TEXT_CHANNELS,
        time_embed_dim=16,
        **config,
    )
    modulations = [
        *("norm1.linear", "norm1_context.linear", "norm1_context.linear_1", "norm_out.linear")
    ]
    make_all_matter(model, tuple(modulations), "time_embed.timestep_embedder", gain=1)
    torch.nn.init.normal_(model.pos_frequencies)
    for module in model.modules():
        if type(module).__name__ == "MochiRMSNorm":
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
    return model.to(device, dtype).eval()


def mochi_inputs(
    device, dtype=torch.float32, *, seed=None, batch=2, tokens=1, text_length=5, mask=None
):
    """``mask``: None, "padded" for prompts of different lengths, or "scattered" padding."""
    normal = seeded(seed, device)
    positions = torch.arange(text_length)
    lengths = torch.full((batch,), text_length)
    if mask == "padded":
        lengths = text_length - torch.arange(batch) * 3 % (text_length + 1)
    is_valid = positions < lengths[:, None]
    if mask == "scattered":
        is_valid = (positions + torch.arange(batch)[:, None]) % 3 > 0
    return {
        "hidden_states": normal(batch, CHANNELS, 1 + tokens, 6, 4).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "timestep": 1000 * normal(batch).sigmoid(),
        "encoder_attention_mask": is_valid.to(device),
    }


MOCHI = Family(
    name="mochi",
    model=mochi_model,
    inputs=mochi_inputs,
    inexact=("hidden_states", "encoder_hidden_states"),
    options={
        **TWO_STREAM_OPTIONS,
        "padded text": {"mask": "padded", "batch": 3},
        "scattered padding": {"mask": "scattered", "text_length": 7},
    },
    parts={
        "block": "transformer_blocks.0",
        "next_block": "transformer_blocks.1",
        "attention": "transformer_blocks.0.attn1",
        "norm": "transformer_blocks.1.norm1",
        "modulated_norm": "transformer_blocks.0.norm3",
        "qk_norm": "transformer_blocks.0.attn1.norm_q",
        "added_norm": "transformer_blocks.0.attn1.norm_added_k",
        "linear": "transformer_blocks.0.attn1.add_k_proj",
        "output": "transformer_blocks.0.attn1.to_out.0",
        "feed_forward": "transformer_blocks.0.ff",
        "feed_forward_of_text": "transformer_blocks.0.ff_context",
        "activation": "transformer_blocks.0.ff_context.net.0",
        "up": "transformer_blocks.0.ff.net.0.proj",
        "modulation": "transformer_blocks.0.norm1.linear",
    },
    lora_targets=[*JOINT_LORA, "ff.net.0.proj", "ff.net.2", "norm1.linear"],
    caches=(),
    module="diffusers.models.transformers.transformer_mochi",
    processor="MochiAttnProcessor2_0",
    functions=(),
    has_backends=False,
)
