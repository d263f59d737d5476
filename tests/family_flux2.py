"""Small FLUX.2 models for the tests that hold for every family."""

import torch
from diffusers import Flux2Transformer2DModel

from family import Family, make_all_matter, powers_of_two, seeded

CHANNELS = 8
TEXT_CHANNELS = 24


def flux2_model(
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
    axis = head_dim // 4
    model = Flux2Transformer2DModel(
        in_channels=CHANNELS,
        num_layers=blocks,
        num_single_layers=single_blocks,
        attention_head_dim=head_dim,
        num_attention_heads=heads,
        joint_attention_dim=TEXT_CHANNELS,
        timestep_guidance_channels=16,
        axes_dims_rope=(axis, axis, axis, axis),
        **config,
    )
    make_all_matter(
        model,
        (
            *("modulation_img.linear", "modulation_txt.linear", "norm_out.linear"),
            "single_stream_modulation.linear",
        ),
        "time_guidance_embed",
    )
    return model.to(device, dtype).eval()


def flux2_inputs(
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
    img_ids = torch.zeros(height, width, 4)
    img_ids[..., 1] = torch.arange(height)[:, None]
    img_ids[..., 2] = torch.arange(width)
    txt_ids = torch.zeros(text_length, 4)
    txt_ids[:, 3] = torch.arange(text_length)
    return {
        "hidden_states": normal(batch, height * width, CHANNELS).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "timestep": powers_of_two(normal, batch, 1 / 8).to(dtype),
        "guidance": powers_of_two(normal, batch, 1 / 2) if has_guidance else None,
        "img_ids": img_ids.flatten(0, 1).to(device),
        "txt_ids": txt_ids.to(device),
        **options,
    }


FLUX2 = Family(
    name="flux2",
    model=flux2_model,
    inputs=flux2_inputs,
    inexact=("hidden_states", "encoder_hidden_states"),
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
        "norm2": "transformer_blocks.0.norm2",
        "single_norm": "single_transformer_blocks.1.norm",
        "qk_norm": "transformer_blocks.0.attn.norm_q",
        "added_norm": "transformer_blocks.0.attn.norm_added_k",
        "linear": "transformer_blocks.0.attn.add_k_proj",
        "output": "single_transformer_blocks.0.attn.to_out",
        "gated_feed_forward": "transformer_blocks.0.ff",
        "activation": "transformer_blocks.0.ff_context.act_fn",
        "single_activation": "single_transformer_blocks.0.attn.mlp_act_fn",
        "up": "single_transformer_blocks.0.attn.to_qkv_mlp_proj",
        "rope": "pos_embed",
        "modulation": "double_stream_modulation_img",
    },
    lora_targets=[
        *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj"),
        *("to_add_out", "ff.linear_in", "ff.linear_out", "to_qkv_mlp_proj"),
    ],
    caches=("pyramid", "taylorseer", "mag"),
    module="diffusers.models.transformers.transformer_flux2",
    processor="Flux2AttnProcessor",
    block_lists=("transformer_blocks", "single_transformer_blocks"),
    condition="temb_mod_img",
    one_block={"blocks": 1, "single_blocks": 1},
)
