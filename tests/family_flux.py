"""Small FLUX.1 models for the tests that hold for every family."""

import torch
from diffusers import FluxTransformer2DModel

from family import Family, make_all_matter, powers_of_two, seeded

FLUX_CHANNELS = 8
FLUX_TEXT_CHANNELS = 24
FLUX_POOLED_CHANNELS = 12


def flux_model(
    device,
    dtype=torch.float32,
    *,
    seed=0,
    blocks=2,
    single_blocks=2,
    heads=2,
    head_dim=16,
    **config,
):
    """Norm weights are not 1, and the modulations differ from token stream to stream and are not small."""
    torch.manual_seed(seed)
    # Each of the three axes has an even number of a head's elements.
    axis = head_dim // 3 // 2 * 2
    model = FluxTransformer2DModel(
        in_channels=FLUX_CHANNELS,
        num_layers=blocks,
        num_single_layers=single_blocks,
        attention_head_dim=head_dim,
        num_attention_heads=heads,
        joint_attention_dim=FLUX_TEXT_CHANNELS,
        pooled_projection_dim=FLUX_POOLED_CHANNELS,
        guidance_embeds=config.pop("guidance_embeds", True),
        axes_dims_rope=(head_dim - 2 * axis, axis, axis),
        **config,
    )
    make_all_matter(
        model,
        ("norm.linear", "norm1.linear", "norm1_context.linear", "norm_out.linear"),
        "time_text_embed",
    )
    return model.to(device, dtype).eval()


def flux_inputs(
    device,
    dtype=torch.float32,
    *,
    seed=None,
    batch=2,
    tokens=1,
    text_length=5,
    has_guidance=True,
    **options,
):
    normal = seeded(seed, device)
    height, width = 3 + tokens, 3
    img_ids = torch.zeros(height, width, 3)
    img_ids[..., 1] = torch.arange(height)[:, None]
    img_ids[..., 2] = torch.arange(width)
    return {
        "hidden_states": normal(batch, height * width, FLUX_CHANNELS).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, FLUX_TEXT_CHANNELS).to(dtype),
        "pooled_projections": normal(batch, FLUX_POOLED_CHANNELS).to(dtype),
        "timestep": powers_of_two(normal, batch, 1 / 8).to(dtype),
        "guidance": powers_of_two(normal, batch, 1 / 2) if has_guidance else None,
        "img_ids": img_ids.flatten(0, 1).to(device),
        "txt_ids": torch.zeros(text_length, 3, device=device),
        **options,
    }


FLUX = Family(
    name="flux",
    model=flux_model,
    inputs=flux_inputs,
    inexact=("hidden_states", "encoder_hidden_states", "pooled_projections"),
    options={
        "two samples": {},
        "batch of 1": {"batch": 1},
        "more tokens": {"batch": 3, "tokens": 5, "text_length": 9},
        "one token of text": {"text_length": 1},
    },
    parts={
        "block": "transformer_blocks.0",
        "next_block": "transformer_blocks.1",
        "single_block": "single_transformer_blocks.0",
        "last_block": "single_transformer_blocks.1",
        "attention": "transformer_blocks.0.attn",
        "single_attention": "single_transformer_blocks.0.attn",
        "norm": "transformer_blocks.1.norm1",
        "inner_norm": "transformer_blocks.1.norm1.norm",
        "norm2": "transformer_blocks.0.norm2",
        "single_norm": "single_transformer_blocks.1.norm",
        "qk_norm": "transformer_blocks.0.attn.norm_q",
        "added_norm": "transformer_blocks.0.attn.norm_added_k",
        "linear": "transformer_blocks.0.attn.add_k_proj",
        "output": "single_transformer_blocks.0.proj_out",
        "feed_forward": "transformer_blocks.0.ff",
        "feed_forward_of_text": "transformer_blocks.0.ff_context",
        "activation": "transformer_blocks.0.ff_context.net.0",
        "up": "single_transformer_blocks.0.proj_mlp",
        "gelu": "single_transformer_blocks.0.act_mlp",
        "rope": "pos_embed",
        "modulation": "transformer_blocks.0.norm1.linear",
    },
    lora_targets=[
        *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj"),
        *("to_add_out", "ff.net.0.proj", "ff.net.2", "proj_mlp", "proj_out", "norm1.linear"),
    ],
    caches=("first_block", "pyramid", "taylorseer", "mag", "faster"),
    module="diffusers.models.transformers.transformer_flux",
    processor="FluxAttnProcessor",
    block_lists=("transformer_blocks", "single_transformer_blocks"),
    one_block={"blocks": 1, "single_blocks": 1},
)
