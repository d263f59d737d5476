"""Small Qwen-Image models for the tests of all families."""

import torch
from diffusers import QwenImageTransformer2DModel

from family import JOINT_LORA, JOINT_PARTS, TWO_STREAM_OPTIONS, Family, make_all_matter, seeded

CHANNELS = 8
TEXT_CHANNELS = 24


def qwenimage_model(
    device, dtype=torch.float32, *, seed=0, blocks=2, heads=2, head_dim=16, **config
):
    """Norm weights differ from 1. Modulations are large and differ between token streams."""
    torch.manual_seed(seed)
    axis = head_dim // 3 // 2 * 2
    model = QwenImageTransformer2DModel(
        in_channels=CHANNELS,
        out_channels=2,
        num_layers=blocks,
        attention_head_dim=head_dim,
        num_attention_heads=heads,
        joint_attention_dim=TEXT_CHANNELS,
        axes_dims_rope=(head_dim - 2 * axis, axis, axis),
        **config,
    )
    make_all_matter(model, ("img_mod.1", "txt_mod.1", "norm_out.linear"), "time_text_embed")
    return model.to(device, dtype).eval()


def qwenimage_inputs(
    device,
    dtype=torch.float32,
    *,
    seed=None,
    batch=2,
    tokens=1,
    text_length=5,
    mask=None,
    images=1,
    **options,
):
    """``mask`` is "padded" (a different number of text tokens per sample), "holes" or None."""
    normal = seeded(seed, device)
    height, width = 3 + tokens, 3
    encoder_hidden_states_mask = None
    if mask is not None:
        lengths = torch.arange(batch) * 3 % text_length + 1
        encoder_hidden_states_mask = torch.arange(text_length) < lengths[:, None]
        if mask == "holes":
            encoder_hidden_states_mask = encoder_hidden_states_mask.flip(1)
            encoder_hidden_states_mask[:, 0] = True
        encoder_hidden_states_mask = encoder_hidden_states_mask.to(device).long()
    return {
        "hidden_states": normal(batch, images * height * width, CHANNELS).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "encoder_hidden_states_mask": encoder_hidden_states_mask,
        "timestep": (2.0 ** -(4 * normal(batch).sigmoid()).floor()).to(dtype),
        "img_shapes": [[(1, height, width)] * images] * batch,
        **options,
    }


QWEN_IMAGE = Family(
    name="qwenimage",
    model=qwenimage_model,
    inputs=qwenimage_inputs,
    inexact=("hidden_states", "encoder_hidden_states"),
    options={
        **TWO_STREAM_OPTIONS,
        "padded text": {"mask": "padded"},
        "holes in the text": {"mask": "holes", "text_length": 9},
        "two images": {"images": 2},
    },
    parts={
        **JOINT_PARTS,
        "norm": "transformer_blocks.1.img_norm1",
        "norm2": "transformer_blocks.0.txt_norm2",
        "output": "transformer_blocks.0.attn.to_out.0",
        "feed_forward": "transformer_blocks.0.img_mlp",
        "feed_forward_of_text": "transformer_blocks.0.txt_mlp",
        "activation": "transformer_blocks.0.txt_mlp.net.0",
        "up": "transformer_blocks.0.img_mlp.net.0.proj",
        "modulation": "transformer_blocks.0.img_mod",
        "modulation_of_next": "transformer_blocks.1.txt_mod.1",
    },
    lora_targets=[*JOINT_LORA, "img_mlp.net.0.proj", "img_mlp.net.2", "img_mod.1"],
    caches=("first_block", "pyramid", "taylorseer", "mag", "faster"),
    module="diffusers.models.transformers.transformer_qwenimage",
    functions=("apply_rotary_emb_qwen", "dispatch_attention_fn"),
    processor="QwenDoubleStreamAttnProcessor2_0",
)
