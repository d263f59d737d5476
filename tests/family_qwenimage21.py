"""Small Qwen-Image 2.1 models for the tests of all families."""

import diffusers
import torch

from family import Family, make_all_matter, powers_of_two, seeded

CHANNELS = 8
TEXT_CHANNELS = 24


def qwenimage21_model(
    device, dtype=torch.float32, *, seed=0, blocks=2, heads=2, head_dim=16, **config
):
    """Norm weights differ from 1. Modulations are large and differ between timesteps."""
    torch.manual_seed(seed)
    axis = head_dim // 3 // 2 * 2
    model = diffusers.QwenImage21Transformer2DModel(
        in_channels=CHANNELS,
        out_channels=2,
        num_layers=blocks,
        attention_head_dim=head_dim,
        num_attention_heads=heads,
        context_in_dim=TEXT_CHANNELS,
        axes_dims_rope=(head_dim - 2 * axis, axis, axis),
        **config,
    )
    make_all_matter(model, ("modulation.1", "norm_out.linear"), "time_text_embed")
    torch.nn.init.uniform_(model.txt_in.text_norm.weight, -0.5, 0.5)
    return model.to(device, dtype).eval()


def qwenimage21_inputs(
    device,
    dtype=torch.float32,
    *,
    seed=None,
    batch=2,
    tokens=1,
    text_length=5,
    mask=None,
    has_condition=False,
    **options,
):
    """With a mask, samples have different numbers of text tokens. With a condition, the text contains an
    image of 4 tokens in each of 2 slots."""
    normal = seeded(seed, device)
    target = (1, 2 * tokens + 2, 2)
    images = [(1, 4, 2), target] if has_condition else [target]
    slots = [height * width // 4 for _, height, width in images]
    is_image = torch.zeros(text_length + sum(slots), dtype=torch.bool)
    if has_condition:
        is_image[2 : 2 + slots[0]] = True
    is_image[-slots[-1] :] = True
    vlm_length = len(is_image) - slots[-1]
    encoder_hidden_states_mask = None
    if mask is not None:
        lengths = vlm_length - torch.arange(batch) * 2 % text_length
        encoder_hidden_states_mask = (torch.arange(vlm_length) < lengths[:, None]).to(device)
    return {
        "hidden_states": normal(batch, 4 * sum(slots), CHANNELS).to(dtype),
        "encoder_hidden_states": normal(batch, vlm_length, TEXT_CHANNELS).to(dtype),
        "timestep": powers_of_two(normal, batch, 1 / 64).to(dtype),
        "img_shapes": [images] * batch,
        "img_mask": is_image.expand(batch, -1).to(device),
        "encoder_hidden_states_mask": encoder_hidden_states_mask,
        **options,
    }


QWEN_IMAGE21 = Family(
    name="qwenimage21",
    model=qwenimage21_model,
    inputs=qwenimage21_inputs,
    inexact=("hidden_states", "encoder_hidden_states"),
    options={
        "two samples": {},
        "batch of 1": {"batch": 1},
        "more tokens": {"batch": 3, "tokens": 5, "text_length": 9},
        "one token of text": {"text_length": 1},
        "padded text": {"mask": "padded", "text_length": 9},
        "condition image": {"has_condition": True},
        "condition image, padded text": {"has_condition": True, "mask": "padded"},
    },
    parts={
        "block": "transformer_blocks.0",
        "next_block": "transformer_blocks.1",
        "attention": "transformer_blocks.0.attn",
        "norm": "transformer_blocks.1.img_norm1",
        "norm2": "transformer_blocks.0.img_norm2",
        "qk_norm": "transformer_blocks.0.attn.norm_q",
        "linear": "transformer_blocks.0.attn.to_k",
        "output": "transformer_blocks.0.attn.to_out.0",
        "gated_feed_forward": "transformer_blocks.0.img_mlp",
        "up": "transformer_blocks.0.img_mlp.proj",
        "rope": "pos_embed",
    },
    lora_targets=["to_q", "to_k", "to_v", "to_out.0", "proj", "gate_layer", "img_mlp.out"],
    caches=(),
    module="diffusers.models.transformers.transformer_qwenimage21",
    functions=("apply_rotary_emb_qwen", "dispatch_attention_fn"),
    processor="QwenImage21AttnProcessor",
    condition="modulation",
)
