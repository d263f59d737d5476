"""Small ERNIE-Image models for the tests of all families."""

import torch

import family

CHANNELS, TEXT_CHANNELS = 8, 24


def _finish(model):
    """The output layer is not zero."""
    torch.nn.init.normal_(model.final_linear.weight, std=model.hidden_size**-0.5)


@family.model_of(
    "ErnieImageTransformer2DModel",
    ("adaLN_modulation.1", "final_norm.linear"),
    "time_embedding",
    finish=_finish,
)
def ernie_image_model(blocks, heads, head_dim):
    return {
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_layers": blocks,
        "ffn_hidden_size": 48,
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "text_in_dim": TEXT_CHANNELS,
        "rope_axes_dim": family.three_axes(head_dim),
    }


@family.inputs_of
def ernie_image_inputs(normal, dtype, batch, tokens, text_length, mask=None, **options):
    """With ``mask`` a different number of text tokens per sample."""
    lengths = torch.full((batch,), text_length)
    if mask is not None:
        lengths = family.padded(batch, text_length).sum(1)
    return {
        "hidden_states": normal(batch, CHANNELS, 3 + tokens, 3).to(dtype),
        "timestep": 100 * normal(batch).sigmoid(),
        "text_bth": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "text_lens": lengths,
        **options,
    }


ERNIE_IMAGE = family.Family(
    name="ernie_image",
    model=ernie_image_model,
    inputs=ernie_image_inputs,
    inexact=("hidden_states", "text_bth"),
    options={**family.TWO_STREAM_OPTIONS, "padded text": {"mask": "padded", "text_length": 9}},
    parts={
        **family.block_parts("self_attention", "layers"),
        "norm": "layers.1.adaLN_sa_ln",
        "norm2": "layers.0.adaLN_mlp_ln",
        "gated_feed_forward": "layers.0.mlp",
        "up": "layers.0.mlp.gate_proj",
        "rope": "pos_embed",
    },
    lora_targets=[*family.ATTENTION_LORA, "gate_proj", "up_proj", "linear_fc2"],
    processor="ErnieImageSingleStreamAttnProcessor",
    block_lists=("layers",),
    functions=("dispatch_attention_fn",),
    fp8_calls=[4, 1, 3, 0, 0, 0, 0, 0],
)
