"""Small FLUX.3 models for the tests of all families."""

import diffusers
import torch

from family import TWO_STREAM_OPTIONS, Family, in_dtype, make_all_matter, powers_of_two, seeded

CHANNELS = 8
TEXT_CHANNELS = 24


def flux3_model(
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
    """Norm weights differ from 1. Modulations are large and differ between token streams. The query and key
    norms of a published model are float32."""
    torch.manual_seed(seed)
    model = diffusers.Flux3Transformer2DModel(
        in_channels=CHANNELS,
        cond_in_channels=CHANNELS,
        joint_attention_dim=TEXT_CHANNELS,
        num_layers=blocks,
        num_single_layers=single_blocks,
        attention_head_dim=head_dim,
        num_attention_heads=heads,
        timestep_channels=16,
        axes_dims_rope=(head_dim // 4,) * 4,
        **config,
    )
    modulations = tuple(f"{mode}.linear" for mode in ("image", "image_cond", "txt"))
    make_all_matter(model, (*modulations, "norm_out.linear"), "timestep_embedder")
    return in_dtype(model, device, dtype, lambda name: ".norm_" in name)


def flux3_inputs(
    device, dtype=torch.float32, *, seed=None, batch=2, tokens=1, text_length=5, images=0, **options
):
    """``images`` is the number of reference images."""
    normal = seeded(seed, device)
    height, width = 3 + tokens, 3
    ids = torch.zeros(1 + images, height, width, 4)
    ids[..., 0] = 10 * torch.arange(1 + images)[:, None, None]
    ids[..., 1] = torch.arange(height)[:, None]
    ids[..., 2] = torch.arange(width)
    ids = ids.flatten(1, 2).to(device)
    txt_ids = torch.zeros(text_length, 4)
    txt_ids[:, 3] = torch.arange(text_length)
    references = {}
    if images:
        references = {
            "image_cond_hidden_states": normal(batch, images * height * width, CHANNELS).to(dtype),
            "image_cond_ids": ids[1:].flatten(0, 1),
        }
    return {
        "hidden_states": normal(batch, height * width, CHANNELS).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "timestep": powers_of_two(normal, batch, 1 / 8).to(dtype),
        "img_ids": ids[0],
        "txt_ids": txt_ids.to(device),
        **references,
        **options,
    }


FLUX3 = Family(
    name="flux3",
    model=flux3_model,
    inputs=flux3_inputs,
    inexact=("hidden_states", "encoder_hidden_states"),
    options=TWO_STREAM_OPTIONS,
    parts={
        "block": "mode_blocks.image.0",
        "next_block": "mode_blocks.image.1",
        "single_block": "single_transformer_blocks.0",
        "last_block": "single_transformer_blocks.1",
        "attention": "mode_blocks.image.0.attn",
        "single_attention": "single_transformer_blocks.0.attn",
        "norm": "txt_mode_blocks.1.norm",
        "single_norm": "single_transformer_blocks.1.norm",
        "qk_norm": "mode_blocks.image.0.attn.norm_q",
        "linear": "mode_blocks.image.0.attn.to_k",
        "output": "single_transformer_blocks.0.attn.to_out.0",
        "gated_feed_forward": "mode_blocks.image.0.ff",
        "activation": "single_transformer_blocks.0.ff.act_fn",
        "up": "single_transformer_blocks.0.ff.linear_in",
        "modulation": "single_stream_modulations.image",
        "output_norm": "norm_out",
        "rope": "pos_embed",
    },
    lora_targets=["to_q", "to_k", "to_v", "to_out.0", "ff.linear_in", "ff.linear_out"],
    caches=(),
    module="diffusers.models.transformers.transformer_flux3",
    processor="Flux3AttnProcessor",
    block_lists=("txt_mode_blocks", "mode_blocks.image", "single_transformer_blocks"),
    condition="temb_mod",
    one_block={"blocks": 1, "single_blocks": 1},
)
