"""Small CogVideoX models for the tests of all families."""

import torch
from diffusers import CogVideoXTransformer3DModel, ConsisIDTransformer3DModel
from diffusers.models.embeddings import get_3d_rotary_pos_embed

from family import TWO_STREAM_OPTIONS, Family, make_all_matter, seeded

CHANNELS = 4
TEXT_CHANNELS = 24
FRAMES, WIDTH = 2, 4
HEAD_DIM = 64


def consisid_model(device):
    """ConsisID without its face modules."""
    return cogvideox_model(device, cls=ConsisIDTransformer3DModel)


def cogvideox_model(
    device,
    dtype=torch.float32,
    *,
    seed=0,
    blocks=2,
    heads=2,
    cls=CogVideoXTransformer3DModel,
    **config,
):
    """Norms differ from the identity. Modulations are large and differ between token streams. The head size
    is that of the inputs' rotary embedding."""
    config.pop("head_dim", None)
    torch.manual_seed(seed)
    model = cls(
        num_attention_heads=heads,
        attention_head_dim=HEAD_DIM,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=blocks,
        time_embed_dim=16,
        text_embed_dim=TEXT_CHANNELS,
        use_rotary_positional_embeddings=config.pop("use_rotary_positional_embeddings", True),
        **config,
    )
    make_all_matter(model, ("norm1.linear", "norm2.linear", "norm_out.linear"), "time_embedding")
    return model.to(device, dtype).eval()


def cogvideox_inputs(
    device,
    dtype=torch.float32,
    *,
    seed=None,
    batch=2,
    tokens=1,
    text_length=5,
    rotates=True,
    **options,
):
    normal = seeded(seed, device)
    height = 2 * (1 + tokens)
    rope = None
    if rotates:
        grid = height // 2, WIDTH // 2
        tables = get_3d_rotary_pos_embed(HEAD_DIM, ((0, 0), grid), grid, FRAMES)
        rope = tuple(table.to(device) for table in tables)
    return {
        "hidden_states": normal(batch, FRAMES, CHANNELS, height, WIDTH).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "timestep": 1000 * normal(batch).sigmoid(),
        "image_rotary_emb": rope,
        **options,
    }


COGVIDEOX = Family(
    name="cogvideox",
    model=cogvideox_model,
    inputs=cogvideox_inputs,
    inexact=("hidden_states", "encoder_hidden_states"),
    options={**TWO_STREAM_OPTIONS, "no rotation": {"rotates": False}},
    parts={
        "block": "transformer_blocks.0",
        "next_block": "transformer_blocks.1",
        "attention": "transformer_blocks.0.attn1",
        "norm": "transformer_blocks.1.norm1",
        "inner_norm": "transformer_blocks.1.norm1.norm",
        "norm2": "transformer_blocks.0.norm2",
        "qk_norm": "transformer_blocks.0.attn1.norm_q",
        "linear": "transformer_blocks.0.attn1.to_k",
        "output": "transformer_blocks.0.attn1.to_out.0",
        "feed_forward": "transformer_blocks.0.ff",
        "activation": "transformer_blocks.0.ff.net.0",
        "up": "transformer_blocks.0.ff.net.0.proj",
        "modulation": "transformer_blocks.0.norm1.linear",
    },
    lora_targets=["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "norm1.linear"],
    caches=(),
    module="diffusers.models.attention_processor",
    functions=(),
    has_backends=False,
    processor="CogVideoXAttnProcessor2_0",
)
