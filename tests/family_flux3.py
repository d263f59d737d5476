"""Small FLUX.3 models for the tests of all families."""

import family
from family_flux import BLOCKS, CHANNELS, SINGLE_PARTS, TEXT_CHANNELS, of_two_kinds, positions


@family.model_of(
    "Flux3Transformer2DModel",
    ("image.linear", "image_cond.linear", "txt.linear", "norm_out.linear"),
    "timestep_embedder",
    keeps=lambda name: ".norm_" in name,
)
def flux3_model(blocks, heads, head_dim):
    return {
        **of_two_kinds(blocks, heads, head_dim),
        "cond_in_channels": CHANNELS,
        "timestep_channels": 16,
        "axes_dims_rope": (head_dim // 4,) * 4,
    }


@family.inputs_of
def flux3_inputs(normal, dtype, batch, tokens, text_length, images=0, **options):
    """``images`` is the number of reference images."""
    ids, txt_ids = positions(tokens, text_length, images=1 + images)
    count = ids.shape[1]
    references = {}
    if images:
        references = {
            "image_cond_hidden_states": normal(batch, images * count, CHANNELS).to(dtype),
            "image_cond_ids": ids[1:].flatten(0, 1),
        }
    return {
        "hidden_states": normal(batch, count, CHANNELS).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "timestep": family.powers_of_two(normal, batch, 1 / 8).to(dtype),
        "img_ids": ids[0],
        "txt_ids": txt_ids,
        **references,
        **options,
    }


FLUX3 = family.Family(
    name="flux3",
    model=flux3_model,
    inputs=flux3_inputs,
    parts={
        "block": "mode_blocks.image.0",
        "next_block": "mode_blocks.image.1",
        "attention": "mode_blocks.image.0.attn",
        "qk_norm": "mode_blocks.image.0.attn.norm_q",
        "linear": "mode_blocks.image.0.attn.to_k",
        **SINGLE_PARTS,
        "norm": "txt_mode_blocks.1.norm",
        "output": "single_transformer_blocks.0.attn.to_out.0",
        "gated_feed_forward": "mode_blocks.image.0.ff",
        "activation": "single_transformer_blocks.0.ff.act_fn",
        "up": "single_transformer_blocks.0.ff.linear_in",
        "modulation": "single_stream_modulations.image",
        "output_norm": "norm_out",
        "rope": "pos_embed",
    },
    lora_targets=[*family.ATTENTION_LORA, "ff.linear_in", "ff.linear_out"],
    processor="Flux3AttnProcessor",
    one_block=BLOCKS["one_block"],
    block_lists=("txt_mode_blocks", "mode_blocks.image", "single_transformer_blocks"),
    condition="temb_mod",
)
