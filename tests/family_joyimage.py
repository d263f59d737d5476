"""Small JoyImage-Edit models for the tests of all families."""

import torch

import family

CHANNELS, TEXT_CHANNELS = 4, 24


def _finish(model):
    """The tables are not zero."""
    for name, parameter in model.named_parameters():
        if name.endswith("modulate_table"):
            torch.nn.init.normal_(parameter, std=0.5)


def _config(blocks, heads, head_dim):
    return {
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_layers": blocks,
        "in_channels": CHANNELS,
        "text_dim": TEXT_CHANNELS,
        "rope_dim_list": [*family.three_axes(head_dim)],
    }


joyimage_model, joyimage_plus_model = (
    family.model_of(
        f"JoyImageEdit{name}Transformer3DModel",
        ("time_proj",),
        "condition_embedder.time_embedder",
        finish=_finish,
    )(_config)
    for name in ("", "Plus")
)


@family.inputs_of
def joyimage_inputs(normal, dtype, batch, tokens, text_length, **options):
    """The latents of an image and of its edit."""
    return {
        "hidden_states": normal(batch, 2, CHANNELS, 1, 2 + 2 * tokens, 4).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "timestep": 100 * normal(batch).sigmoid(),
        **options,
    }


@family.inputs_of
def joyimage_plus_inputs(normal, dtype, batch, tokens, text_length, mask=None, sizes=1, **options):
    """Patches of the edit and of an image, which has one of several ``sizes``. With ``mask`` a different
    number of text tokens per sample."""
    shapes = [[(1, 1 + tokens, 2), (1, 1, 3 - i % sizes)] for i in range(batch)]
    if mask is not None:
        mask = family.padded(batch, text_length).to(dtype)
    return {
        "hidden_states": normal(batch, 5 + 2 * tokens, CHANNELS, 1, 2, 2).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "encoder_hidden_states_mask": mask,
        "timestep": 100 * normal(batch).sigmoid(),
        "shape_list": shapes,
        **options,
    }


def _family(name, model, inputs, module, rotate, **more):
    parts = {
        **family.block_parts("attn", "double_blocks"),
        **family.feed_forward_parts("double_blocks.0.img_mlp"),
        "norm": "double_blocks.1.img_norm1",
        "norm2": "double_blocks.0.txt_norm2",
        "qk_norm": "double_blocks.0.attn.img_attn_q_norm",
        "added_norm": "double_blocks.0.attn.txt_attn_k_norm",
        "linear": "double_blocks.0.attn.txt_attn_qkv",
        "output": "double_blocks.0.attn.img_attn_proj",
        "feed_forward_of_text": "double_blocks.0.txt_mlp",
        "modulation": "double_blocks.0.img_mod",
        "modulation_of_next": "double_blocks.1.txt_mod",
    }
    layers = [f"{stream}_attn_{layer}" for stream in ("img", "txt") for layer in ("qkv", "proj")]
    return family.Family(
        name=name,
        model=model,
        inputs=inputs,
        parts=parts,
        module=f"diffusers.models.transformers.transformer_joyimage{module}",
        lora_targets=[*layers, "net.0.proj", "net.2"],
        block_lists=("double_blocks",),
        functions=(rotate, "dispatch_attention_fn"),
        fp8_calls=[4, 8, 0, 4, 0, 0, 0, 8],
        **more,
    )


JOYIMAGE = _family(
    "joyimage",
    joyimage_model,
    joyimage_inputs,
    "",
    "_apply_rotary_emb",
    processor="JoyImageAttnProcessor",
)
JOYIMAGE_PLUS = _family(
    "joyimage_plus",
    joyimage_plus_model,
    joyimage_plus_inputs,
    "_edit_plus",
    "_apply_rotary_emb_batched",
    processor="JoyImageEditPlusAttnProcessor",
    options={
        **family.TWO_STREAM_OPTIONS,
        "images of two sizes": {"sizes": 2},
        "padded text and image": {"mask": "padded", "text_length": 9, "sizes": 2},
    },
)
