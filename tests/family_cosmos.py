"""Small Cosmos models for the tests of all families."""

import torch
from diffusers import CosmosTransformer3DModel

from family import Family, make_all_matter, seeded

CHANNELS = 4
TEXT_CHANNELS = 24


def cosmos_model(device, dtype=torch.float32, *, seed=0, blocks=2, heads=2, head_dim=16, **config):
    """Norm weights differ from 1, and modulations are large."""
    torch.manual_seed(seed)
    model = CosmosTransformer3DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=blocks,
        attention_head_dim=head_dim,
        num_attention_heads=heads,
        mlp_ratio=2,
        text_embed_dim=TEXT_CHANNELS,
        adaln_lora_dim=8,
        max_size=(4, 64, 64),
        concat_padding_mask=False,  # which needs torchvision
        extra_pos_embed_type=config.pop("extra_pos_embed_type", None),
        **config,
    )
    make_all_matter(model, ("linear_1", "linear_2"), "time_embed")
    if model.learnable_pos_embed is not None:
        for parameter in model.learnable_pos_embed.parameters():
            torch.nn.init.normal_(parameter)
    return model.to(device, dtype).eval()


def cosmos_inputs(
    device,
    dtype=torch.float32,
    *,
    seed=None,
    batch=2,
    tokens=1,
    text_length=5,
    per_frame=False,
    **options,
):
    """``per_frame``: each frame has its own time step."""
    normal = seeded(seed, device)
    frames, height, width = 2, 2 + 2 * tokens, 6
    shape = (batch, 1, frames, 1, 1) if per_frame else (batch,)
    return {
        "hidden_states": normal(batch, CHANNELS, frames, height, width).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "timestep": normal(*shape).sigmoid(),
        "fps": 30,
        **options,
    }


COSMOS = Family(
    name="cosmos",
    model=cosmos_model,
    inputs=cosmos_inputs,
    inexact=("hidden_states", "encoder_hidden_states"),
    options={
        "two samples": {},
        "batch of 1": {"batch": 1},
        "more tokens": {"batch": 3, "tokens": 4, "text_length": 9},
        "a time step for each frame": {"per_frame": True},
        "an image": {"fps": None},
    },
    parts={
        "block": "transformer_blocks.0",
        "next_block": "transformer_blocks.1",
        "attention": "transformer_blocks.0.attn1",
        "cross_attention": "transformer_blocks.0.attn2",
        "norm": "transformer_blocks.1.norm1",
        "norm2": "transformer_blocks.0.norm2",
        "inner_norm": "transformer_blocks.1.norm1.norm",
        "qk_norm": "transformer_blocks.0.attn1.norm_q",
        "linear": "transformer_blocks.0.attn1.to_k",
        "output": "transformer_blocks.0.attn2.to_out.0",
        "feed_forward": "transformer_blocks.0.ff",
        "activation": "transformer_blocks.0.ff.net.0",
        "up": "transformer_blocks.0.ff.net.0.proj",
        "modulation": "transformer_blocks.1.norm1.linear_1",
        "output_norm": "norm_out",
        "rope": "rope",
    },
    lora_targets=["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "linear_2"],
    caches=(),
    module="diffusers.models.transformers.transformer_cosmos",
    functions=("dispatch_attention_fn",),
    processor="CosmosAttnProcessor2_0",
    condition="embedded_timestep",
)
