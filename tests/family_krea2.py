"""Small Krea 2 models for the tests of all families."""

import diffusers
import torch
from torch import nn

from family import TWO_STREAM_OPTIONS, Family, in_dtype, make_all_matter, powers_of_two, seeded

CHANNELS = 8
TEXT_LAYERS = 3
TEXT_CHANNELS = 32


def krea2_model(device, dtype=torch.float32, *, seed=0, blocks=2, heads=2, head_dim=16, **config):
    """Norm weights differ from 0. Modulations are large. The norms of a published model are float32."""
    torch.manual_seed(seed)
    axis = head_dim // 3 // 2 * 2
    model = diffusers.Krea2Transformer2DModel(
        in_channels=CHANNELS,
        num_layers=blocks,
        attention_head_dim=head_dim,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        intermediate_size=48,
        timestep_embed_dim=16,
        text_hidden_dim=TEXT_CHANNELS,
        num_text_layers=TEXT_LAYERS,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=24,
        num_layerwise_text_blocks=blocks,
        num_refiner_text_blocks=blocks,
        axes_dims_rope=(head_dim - 2 * axis, axis, axis),
        **config,
    )
    make_all_matter(model, ("time_mod_proj",), "time_embed")
    for module in model.modules():
        if type(module).__name__ == "Krea2RMSNorm":
            nn.init.uniform_(module.weight, -0.5, 0.5)
    return in_dtype(model, device, dtype, lambda name: "norm" in name)


def krea2_inputs(
    device,
    dtype=torch.float32,
    *,
    seed=None,
    batch=2,
    tokens=1,
    text_length=5,
    mask=None,
    **options,
):
    """With ``mask`` the text has padding before its last token, as the pipeline pads it."""
    normal = seeded(seed, device)
    height, width = 3 + tokens, 3
    encoder_attention_mask = None
    if mask is not None:
        lengths = torch.arange(batch) * 3 % text_length + 1
        encoder_attention_mask = torch.arange(text_length) < lengths[:, None]
        encoder_attention_mask[:, -1] = True
        encoder_attention_mask = encoder_attention_mask.to(device)
    axes = [torch.arange(length) for length in (1, height, width)]
    positions = torch.cat([torch.zeros(text_length, 3), torch.cartesian_prod(*axes)])
    return {
        "hidden_states": normal(batch, height * width, CHANNELS).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_LAYERS, TEXT_CHANNELS).to(dtype),
        "timestep": powers_of_two(normal, batch, 1 / 64).to(dtype),
        "position_ids": positions.to(device),
        "encoder_attention_mask": encoder_attention_mask,
        **options,
    }


KREA2 = Family(
    name="krea2",
    model=krea2_model,
    inputs=krea2_inputs,
    inexact=("hidden_states", "encoder_hidden_states"),
    options={**TWO_STREAM_OPTIONS, "padded text": {"mask": "padded", "text_length": 9}},
    parts={
        "block": "transformer_blocks.0",
        "next_block": "transformer_blocks.1",
        "text_block": "text_fusion.layerwise_blocks.0",
        "attention": "transformer_blocks.0.attn",
        "norm": "transformer_blocks.1.norm1",
        "norm2": "transformer_blocks.0.norm2",
        "qk_norm": "transformer_blocks.0.attn.norm_q",
        "linear": "transformer_blocks.0.attn.to_k",
        "output": "transformer_blocks.0.attn.to_out.0",
        "gated_feed_forward": "transformer_blocks.0.ff",
        "up": "transformer_blocks.0.ff.up",
        "rope": "rotary_emb",
    },
    lora_targets=["to_q", "to_k", "to_v", "to_gate", "to_out.0", "ff.gate", "ff.up", "ff.down"],
    caches=(),
    module="diffusers.models.transformers.transformer_krea2",
    processor="Krea2AttnProcessor",
    block_lists=(
        "text_fusion.layerwise_blocks",
        "text_fusion.refiner_blocks",
        "transformer_blocks",
    ),
)
