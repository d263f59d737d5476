"""Small Hunyuan-DiT models for the tests of all families."""

import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed

import family

CHANNELS, TEXT_CHANNELS, T5_CHANNELS = 4, 24, 16
TEXT_LENGTH, T5_LENGTH = 6, 5
HEAD_DIM = 64


@family.model_of(
    "HunyuanDiT2DModel", ("norm1.linear", "norm_out.linear"), "time_extra_emb", blocks=4
)
def hunyuan_dit_model(blocks, heads, head_dim):
    """The head size is that of the inputs' rotary embedding. The last block gets the first one's result."""
    return {
        **family.sizes(blocks, heads, HEAD_DIM),
        "in_channels": CHANNELS,
        "patch_size": 2,
        "sample_size": 8,
        "hidden_size": heads * HEAD_DIM,
        "cross_attention_dim": TEXT_CHANNELS,
        "cross_attention_dim_t5": T5_CHANNELS,
        "pooled_projection_dim": 16,
        "text_len": TEXT_LENGTH,
        "text_len_t5": T5_LENGTH,
    }


@family.inputs_of
def hunyuan_dit_inputs(
    normal, dtype, batch, tokens, text_length, rotates=True, masked=True, **options
):
    """The texts have the lengths of the model's padding."""
    grid = 1 + tokens, 3
    rope = get_2d_rotary_pos_embed(HEAD_DIM, ((0, 0), grid), grid, output_type="pt")
    masks = [
        family.padded(batch, length) if masked else torch.ones(batch, length)
        for length in (TEXT_LENGTH, T5_LENGTH)
    ]
    return {
        "hidden_states": normal(batch, CHANNELS, 2 * grid[0], 2 * grid[1]).to(dtype),
        "timestep": (1000 * normal(batch).sigmoid()).round().to(dtype),
        "encoder_hidden_states": normal(batch, TEXT_LENGTH, TEXT_CHANNELS).to(dtype),
        "text_embedding_mask": masks[0].long(),
        "encoder_hidden_states_t5": normal(batch, T5_LENGTH, T5_CHANNELS).to(dtype),
        "text_embedding_mask_t5": masks[1].long(),
        "image_meta_size": torch.tensor([[8.0, 8, 8, 8, 0, 0]] * batch),
        "style": torch.zeros(batch, dtype=torch.long),
        "image_rotary_emb": rope if rotates else None,
        **options,
    }


HUNYUAN_DIT = family.Family(
    name="hunyuan_dit",
    model=hunyuan_dit_model,
    inputs=hunyuan_dit_inputs,
    inexact=("hidden_states", "timestep", "encoder_hidden_states", "encoder_hidden_states_t5"),
    options={
        "padded texts": {},
        "full masks": {"masked": False},
        "batch of 1": {"batch": 1},
        "more tokens": {"batch": 3, "tokens": 5},
        "no rotation": {"rotates": False},
    },
    parts={
        **family.block_parts("attn1", "blocks"),
        **family.feed_forward_parts("blocks.0.ff"),
        "last_block": "blocks.3",
        "norm2": "blocks.0.norm2",
        "inner_norm": "blocks.1.norm1.norm",
        "cross_attention": "blocks.0.attn2",
        "modulation": "blocks.0.norm1.linear",
        "output_norm": "norm_out",
    },
    lora_targets=[
        *family.ATTENTION_LORA,
        *family.FEED_FORWARD_LORA,
        *("norm1.linear", "skip_linear"),
    ],
    module="diffusers.models.attention_processor",
    functions=(),
    has_backends=False,
    processor="HunyuanAttnProcessor2_0",
    block_lists=("blocks",),
    fp8_calls=[12, 13, 0, 4, 0, 0, 0, 12],
)
