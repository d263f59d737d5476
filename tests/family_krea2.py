"""Small Krea 2 models for the tests of all families."""

import torch

import family

_TEXT_BLOCKS = ("text_fusion.layerwise_blocks", "text_fusion.refiner_blocks")
CHANNELS, TEXT_CHANNELS, TEXT_LAYERS = 8, 32, 3


def _finish(model):
    """Norm weights differ from 0."""
    for module in model.modules():
        if type(module).__name__ == "Krea2RMSNorm":
            torch.nn.init.uniform_(module.weight, -0.5, 0.5)


@family.model_of(
    "Krea2Transformer2DModel",
    ("time_mod_proj",),
    "time_embed",
    finish=_finish,
)
def krea2_model(blocks, heads, head_dim):
    return {
        **family.sizes(blocks, heads, head_dim),
        "in_channels": CHANNELS,
        "num_key_value_heads": heads // 2,
        "intermediate_size": 48,
        "timestep_embed_dim": 16,
        "text_hidden_dim": TEXT_CHANNELS,
        "num_text_layers": TEXT_LAYERS,
        "text_num_attention_heads": 2,
        "text_num_key_value_heads": 2,
        "text_intermediate_size": 24,
        "num_layerwise_text_blocks": blocks,
        "num_refiner_text_blocks": blocks,
        "axes_dims_rope": family.three_axes(head_dim),
    }


@family.inputs_of
def krea2_inputs(normal, dtype, batch, tokens, text_length, mask=None, **options):
    """With ``mask`` the text has padding before its last token, as the pipeline pads it."""
    height, width = 3 + tokens, 3
    if mask is not None:
        mask = family.padded(batch, text_length)
        mask[:, -1] = True
    axes = [torch.arange(length) for length in (1, height, width)]
    return {
        "hidden_states": normal(batch, height * width, CHANNELS).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_LAYERS, TEXT_CHANNELS).to(dtype),
        "timestep": family.powers_of_two(normal, batch, 1 / 64).to(dtype),
        "position_ids": torch.cat([torch.zeros(text_length, 3), torch.cartesian_prod(*axes)]),
        "encoder_attention_mask": mask,
        **options,
    }


KREA2 = family.Family(
    name="krea2",
    model=krea2_model,
    inputs=krea2_inputs,
    options={**family.TWO_STREAM_OPTIONS, "padded text": {"mask": "padded", "text_length": 9}},
    parts={
        **family.block_parts("attn"),
        "norm2": "transformer_blocks.0.norm2",
        "text_block": "text_fusion.layerwise_blocks.0",
        "gated_feed_forward": "transformer_blocks.0.ff",
        "up": "transformer_blocks.0.ff.up",
        "rope": "rotary_emb",
    },
    lora_targets=[*family.ATTENTION_LORA[:3], "to_gate", "to_out.0", "ff.gate", "ff.up", "ff.down"],
    processor="Krea2AttnProcessor",
    block_lists=(*_TEXT_BLOCKS, "transformer_blocks"),
    fp8_calls=[8, 3, 9, 0, 0, 0, 0, 0],
)
