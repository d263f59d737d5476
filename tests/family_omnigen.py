"""Small OmniGen models for the tests of all families."""

import torch

import family

CHANNELS, VOCABULARY = 4, 32


@family.model_of("OmniGenTransformer2DModel", ("norm_out.linear",), ("time_token", "t_embedder"))
def omnigen_model(blocks, heads, head_dim):
    factors = [1.0 + i / head_dim for i in range(head_dim // 2)]
    return {
        "in_channels": CHANNELS,
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": 48,
        "num_layers": blocks,
        "pad_token_id": 0,
        "vocab_size": VOCABULARY,
        "rope_scaling": {"short_factor": factors, "long_factor": factors},
        "pos_embed_max_size": 32,
        "time_step_dim": 16,
    }


@family.inputs_of
def omnigen_inputs(normal, dtype, batch, tokens, text_length, mask=None, image=False, **options):
    """With ``mask`` a different number of text tokens per sample, after padding. With ``image`` the last
    four tokens of the text are an image."""
    height, width = 6 + 2 * tokens, 6
    first = text_length + 1
    length = first + height * width // 4
    counts = (
        family.padded(batch, text_length).sum(1) if mask else torch.tensor([text_length] * batch)
    )
    seen = torch.ones(batch, length, length)
    seen[:, :first] = seen[:, :first].tril()
    if image:
        seen[:, text_length - 4 : text_length, text_length - 4 : text_length] = 1
    positions = []
    for sample, padding in zip(seen, (text_length - counts).tolist(), strict=True):
        sample[:, :padding] = 0
        sample[:padding] = 1
        positions.append((torch.arange(length) - padding).clamp(0))
    place = [[text_length - 4, text_length]]
    return {
        "hidden_states": normal(batch, CHANNELS, height, width).to(dtype),
        "timestep": normal(batch).sigmoid(),
        "input_ids": torch.arange(batch * text_length).view(batch, -1) % VOCABULARY,
        "input_img_latents": [normal(1, CHANNELS, 4, 4).to(dtype) for _ in range(batch * image)],
        "input_image_sizes": dict.fromkeys(range(batch * image), place),
        "attention_mask": seen.to(dtype),
        "position_ids": torch.stack(positions),
        **options,
    }


OMNIGEN = family.Family(
    name="omnigen",
    model=omnigen_model,
    inputs=omnigen_inputs,
    inexact=("hidden_states", "input_img_latents", "attention_mask"),
    options={
        **family.TWO_STREAM_OPTIONS,
        "padded text": {"mask": "padded", "text_length": 9},
        "an image in the text": {"image": True},
    },
    parts={
        **family.block_parts("self_attn", "layers"),
        "norm": "layers.1.input_layernorm",
        "norm2": "layers.0.post_attention_layernorm",
        "qk_norm": "layers.0.input_layernorm",
        "gated_feed_forward": "layers.0.mlp",
        "up": "layers.0.mlp.gate_up_proj",
        "rope": "rope",
    },
    lora_targets=[*family.ATTENTION_LORA, "gate_up_proj", "down_proj"],
    processor="OmniGenAttnProcessor2_0",
    block_lists=("layers",),
    condition="hidden_states",
    functions=(),
    has_backends=False,
    fp8_calls=[4, 1, 3, 0, 0, 0, 0, 0],
)
