"""Small Qwen-Image 2.1 models for the tests of all families."""

import torch

import family

CHANNELS, TEXT_CHANNELS = 8, 24


def _finish(model):
    torch.nn.init.uniform_(model.txt_in.text_norm.weight, -0.5, 0.5)


_MODULATIONS = ("modulation.1", "norm_out.linear")


@family.model_of("QwenImage21Transformer2DModel", _MODULATIONS, "time_text_embed", finish=_finish)
def qwenimage21_model(blocks, heads, head_dim):
    return {
        **family.sizes(blocks, heads, head_dim),
        "in_channels": CHANNELS,
        "out_channels": 2,
        "context_in_dim": TEXT_CHANNELS,
        "axes_dims_rope": family.three_axes(head_dim),
    }


@family.inputs_of
def qwenimage21_inputs(
    normal, dtype, batch, tokens, text_length, mask=None, has_condition=False, **options
):
    """With a mask, samples have different numbers of text tokens. With a condition, the text contains an
    image of 4 tokens in each of 2 slots."""
    target = (1, 2 * tokens + 2, 2)
    images = [(1, 4, 2), target] if has_condition else [target]
    slots = [height * width // 4 for _, height, width in images]
    is_image = torch.zeros(text_length + sum(slots), dtype=torch.bool)
    if has_condition:
        is_image[2 : 2 + slots[0]] = True
    is_image[-slots[-1] :] = True
    vlm_length = len(is_image) - slots[-1]
    if mask is not None:
        lengths = vlm_length - torch.arange(batch) * 2 % text_length
        mask = torch.arange(vlm_length) < lengths[:, None]
    return {
        "hidden_states": normal(batch, 4 * sum(slots), CHANNELS).to(dtype),
        "encoder_hidden_states": normal(batch, vlm_length, TEXT_CHANNELS).to(dtype),
        "timestep": family.powers_of_two(normal, batch, 1 / 64).to(dtype),
        "img_shapes": [images] * batch,
        "img_mask": is_image.expand(batch, -1),
        "encoder_hidden_states_mask": mask,
        **options,
    }


QWEN_IMAGE21 = family.Family(
    name="qwenimage21",
    model=qwenimage21_model,
    inputs=qwenimage21_inputs,
    options={
        **family.TWO_STREAM_OPTIONS,
        "padded text": {"mask": "padded", "text_length": 9},
        "condition image": {"has_condition": True},
        "condition image, padded text": {"has_condition": True, "mask": "padded"},
    },
    parts={
        **family.block_parts("attn"),
        "norm": "transformer_blocks.1.img_norm1",
        "norm2": "transformer_blocks.0.img_norm2",
        "gated_feed_forward": "transformer_blocks.0.img_mlp",
        "up": "transformer_blocks.0.img_mlp.proj",
        "rope": "pos_embed",
    },
    lora_targets=[*family.ATTENTION_LORA, "proj", "gate_layer", "img_mlp.out"],
    functions=("apply_rotary_emb_qwen", "dispatch_attention_fn"),
    processor="QwenImage21AttnProcessor",
    condition="modulation",
    fp8_calls=[4, 1, 3, 0, 0, 0, 0, 0],
)
