"""Small PixArt, Latte and Allegro models for the tests of all families."""

import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

import family

CHANNELS, TEXT_CHANNELS = 4, 24
HEAD_DIM = 96
_MODULATIONS = ("adaln_single.linear",)


def _captioned(blocks, heads, head_dim):
    """Norms with weights, which the published models lack."""
    return {
        **family.sizes(blocks, heads, head_dim),
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "cross_attention_dim": heads * head_dim,
        "caption_channels": TEXT_CHANNELS,
        "norm_elementwise_affine": True,
    }


@family.model_of("PixArtTransformer2DModel", _MODULATIONS, "adaln_single.emb")
def pixart_model(*of_blocks):
    return {**_captioned(*of_blocks), "sample_size": 8, "use_additional_conditions": False}


@family.model_of("LatteTransformer3DModel", _MODULATIONS, "adaln_single.emb")
def latte_model(*of_blocks):
    return {
        **_captioned(*of_blocks),
        "sample_size": 8,
        "patch_size": 2,
        "activation_fn": "gelu-approximate",
        "num_embeds_ada_norm": 1000,
        "norm_type": "ada_norm_single",
        "video_length": 2,
        "attention_bias": True,
    }


@family.model_of("AllegroTransformer3DModel", _MODULATIONS, "adaln_single.emb")
def allegro_model(blocks, heads, head_dim):
    """The head size is that of the inputs' rotary embedding."""
    return _captioned(blocks, heads, HEAD_DIM)


def _mask(batch, text_length, mask):
    if mask is None:
        return {}
    tokens = family.padded(batch, text_length)
    return {
        "encoder_attention_mask": tokens.long() if mask == "padded" else torch.ones(tokens.shape)
    }


@family.inputs_of
def pixart_inputs(normal, dtype, batch, tokens, text_length, mask="padded", **options):
    return {
        "hidden_states": normal(batch, CHANNELS, 2 + 2 * tokens, 6).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "timestep": 1000 * normal(batch).sigmoid(),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        **_mask(batch, text_length, mask),
        **options,
    }


@family.inputs_of
def latte_inputs(normal, dtype, batch, tokens, text_length, **options):
    return {
        "hidden_states": normal(batch, CHANNELS, 2, 2 + 2 * tokens, 6).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "timestep": 1000 * normal(batch).sigmoid(),
        **options,
    }


@family.inputs_of
def allegro_inputs(
    normal, dtype, batch, tokens, text_length, mask="padded", rotates=True, **options
):
    frames, rows, columns = 2, 1 + tokens, 2
    grid = {"grid_size": (rows, columns), "crops_coords": ((0, 0), (rows, columns))}
    *tables, t, h, w = get_3d_rotary_pos_embed_allegro(
        HEAD_DIM, temporal_size=frames, interpolation_scale=(2.2, 2.0, 2.0), **grid
    )
    positions = torch.cartesian_prod(*map(torch.arange, (frames, rows, columns))).T
    return {
        "hidden_states": normal(batch, CHANNELS, frames, 2 * rows, 2 * columns).to(dtype),
        "encoder_hidden_states": normal(batch, 1, text_length, TEXT_CHANNELS).to(dtype),
        "timestep": 1000 * normal(batch).sigmoid(),
        "image_rotary_emb": (tuple(tables), tuple(positions[:, None])) if rotates else None,
        **_mask(batch, text_length, mask),
        **options,
    }


OPTIONS = {
    "padded text": {},
    "full mask": {"mask": "full"},
    "no mask": {"mask": None},
    "batch of 1": {"batch": 1},
    "more tokens": {"batch": 3, "tokens": 5, "text_length": 9},
}
COMMON = {
    "module": "diffusers.models.attention_processor",
    "functions": (),
    "has_backends": False,
    "processor": "AttnProcessor2_0",
    "parts": {
        **family.block_parts("attn1"),
        **family.feed_forward_parts(),
        "norm2": "transformer_blocks.0.norm2",
        "qk_norm": "transformer_blocks.0.norm1",
        "cross_attention": "transformer_blocks.0.attn2",
        "modulation": "adaln_single.linear",
    },
}

PIXART = family.Family(
    name="pixart",
    model=pixart_model,
    inputs=pixart_inputs,
    options=OPTIONS,
    condition="timestep",
    fp8_calls=[8, 2, 2, 2, 0, 0, 0, 4],
    **COMMON,
)
LATTE = family.Family(
    name="latte",
    model=latte_model,
    inputs=latte_inputs,
    options={
        "two samples": {},
        "batch of 1": {"batch": 1},
        "more tokens": {"batch": 3, "tokens": 5, "text_length": 9},
        "images alone": {"enable_temporal_attentions": False},
    },
    condition="timestep",
    block_lists=("transformer_blocks", "temporal_transformer_blocks"),
    fp8_calls=[10, 7, 2, 4, 0, 0, 0, 8],
    **COMMON,
)
ALLEGRO = family.Family(
    name="allegro",
    model=allegro_model,
    inputs=allegro_inputs,
    options={**OPTIONS, "no rotation": {"rotates": False}},
    fp8_calls=[8, 2, 2, 2, 0, 0, 0, 4],
    **{**COMMON, "processor": "AllegroAttnProcessor2_0"},
)
