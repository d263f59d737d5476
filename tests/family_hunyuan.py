"""Small HunyuanVideo 1.0 and 1.5 models for the tests of all families, and models with their blocks."""

import diffusers
import torch

from family import JOINT_LORA, JOINT_PARTS, Family, make_all_matter, powers_of_two, seeded

CHANNELS = 4
TEXT_CHANNELS = 24
GLYPH_CHANNELS = 20
IMAGE_CHANNELS = 16
POOLED_CHANNELS = 12
MODULATIONS = ("norm.linear", "norm1.linear", "norm1_context.linear", "norm_out.linear")


def _model(
    cls, embeddings, device, dtype, *, seed=0, blocks=2, heads=2, head_dim=16, axes=3, **config
):
    """Norm weights differ from 1. Modulations are large and differ between token streams."""
    torch.manual_seed(seed)
    axis = head_dim // axes // 2 * 2
    model = getattr(diffusers, cls)(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=blocks,
        num_refiner_layers=1,
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        text_embed_dim=TEXT_CHANNELS,
        rope_axes_dim=(head_dim - (axes - 1) * axis, *[axis] * (axes - 1)),
        **config,
    )
    make_all_matter(model, MODULATIONS, embeddings)
    return model.to(device, dtype).eval()


def hunyuan_video_model(device, dtype=torch.float32, *, single_blocks=2, **config):
    return _model(
        config.pop("cls", "HunyuanVideoTransformer3DModel"),
        "time_text_embed",
        device,
        dtype,
        num_single_layers=single_blocks,
        pooled_projection_dim=POOLED_CHANNELS,
        **config,
    )


def hunyuan_video15_model(device, dtype=torch.float32, **config):
    return _model(
        "HunyuanVideo15Transformer3DModel",
        "time_embed",
        device,
        dtype,
        text_embed_2_dim=GLYPH_CHANNELS,
        image_embed_dim=IMAGE_CHANNELS,
        **config,
    )


def hunyuan_image_model(device, dtype=torch.float32, *, single_blocks=2, **config):
    return _model(
        "HunyuanImageTransformer2DModel",
        "time_guidance_embed",
        device,
        dtype,
        num_single_layers=single_blocks,
        axes=2,
        **config,
    )


def text_mask(batch, length, holes=False):
    """A different number of valid tokens per sample, first or after some padding."""
    mask = torch.arange(length) < (torch.arange(batch) * 3 % length + (length + 1) // 2)[:, None]
    if holes:
        mask = mask.flip(1)
        mask[:, 0] = True
    return mask.long()


def _common(device, dtype, seed, batch, tokens, text_length, holes, options):
    normal = seeded(seed, device)
    size = (batch, CHANNELS, 2, 2 + 2 * tokens, 6)
    arguments = {
        "hidden_states": normal(*size).to(dtype),
        "timestep": powers_of_two(normal, batch, 64).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "encoder_attention_mask": text_mask(batch, text_length, holes).to(device),
        **options,
    }
    return normal, arguments


def hunyuan_video_inputs(
    device,
    dtype=torch.float32,
    *,
    seed=None,
    batch=2,
    tokens=1,
    text_length=5,
    holes=False,
    **options,
):
    normal, arguments = _common(device, dtype, seed, batch, tokens, text_length, holes, options)
    return {
        **arguments,
        "pooled_projections": normal(batch, POOLED_CHANNELS).to(dtype),
        "guidance": powers_of_two(normal, batch, 512).to(dtype),
    }


def hunyuan_video15_inputs(
    device,
    dtype=torch.float32,
    *,
    seed=None,
    batch=2,
    tokens=1,
    text_length=5,
    image=False,
    holes=False,
    **options,
):
    """``image``: whether there is an image to begin with."""
    normal, arguments = _common(device, dtype, seed, batch, tokens, text_length, holes, options)
    arguments["hidden_states"] = arguments["hidden_states"][..., ::2, ::2].contiguous()
    return {
        **arguments,
        "encoder_hidden_states_2": normal(batch, 4, GLYPH_CHANNELS).to(dtype),
        "encoder_attention_mask_2": text_mask(batch, 4).flip(0).to(device),
        "image_embeds": normal(batch, 3, IMAGE_CHANNELS).to(dtype) * image,
    }


def framepack_model(device):
    return hunyuan_video_model(
        device,
        cls="HunyuanVideoFramepackTransformer3DModel",
        has_image_proj=True,
        image_proj_dim=IMAGE_CHANNELS,
        has_clean_x_embedder=True,
    )


def framepack_inputs(device):
    """With one clean frame, two frames of history at half the resolution and four at a quarter."""
    arguments, normal = hunyuan_video_inputs(device), seeded(3, device)
    arguments["image_embeds"] = normal(2, 3, IMAGE_CHANNELS)
    arguments["indices_latents"] = torch.tensor([7, 8])
    size = arguments["hidden_states"].shape[3:]
    for name, first, count in (("clean", 0, 1), ("history_2x", 1, 2), ("history_4x", 3, 4)):
        arguments[f"latents_{name}"] = normal(2, CHANNELS, count, *size)
        arguments[f"indices_latents_{name}"] = torch.arange(first, first + count)
    return arguments


def hunyuan_image_inputs(device, dtype=torch.float32, *, seed=None, batch=2, **options):
    normal = seeded(seed, device)
    return {
        "hidden_states": normal(batch, CHANNELS, 3, 4).to(dtype),
        "timestep": powers_of_two(normal, batch, 64).to(dtype),
        "encoder_hidden_states": normal(batch, 5, TEXT_CHANNELS).to(dtype),
        "encoder_attention_mask": text_mask(batch, 5, holes=True).to(device),
        **options,
    }


PARTS = {
    **JOINT_PARTS,
    "rope": "rope",
    "norm": "transformer_blocks.1.norm1",
    "inner_norm": "transformer_blocks.1.norm1.norm",
    "norm2": "transformer_blocks.0.norm2",
    "output": "transformer_blocks.0.attn.to_out.0",
    "feed_forward": "transformer_blocks.0.ff",
    "feed_forward_of_text": "transformer_blocks.0.ff_context",
    "activation": "transformer_blocks.0.ff_context.net.0",
    "up": "transformer_blocks.0.ff.net.0.proj",
    "modulation": "transformer_blocks.0.norm1.linear",
}
OPTIONS = {
    "two samples": {},
    "batch of 1": {"batch": 1},
    "more tokens": {"batch": 3, "tokens": 5, "text_length": 9},
    "one token of text": {"text_length": 1},
    "padding first": {"holes": True},
}
_MODULE = "diffusers.models.transformers.transformer_hunyuan_video"

HUNYUAN_VIDEO = Family(
    name="hunyuan_video",
    model=hunyuan_video_model,
    inputs=hunyuan_video_inputs,
    inexact=("hidden_states", "encoder_hidden_states", "pooled_projections", "guidance"),
    options=OPTIONS,
    parts={
        **PARTS,
        "single_block": "single_transformer_blocks.0",
        "last_block": "single_transformer_blocks.1",
        "single_attention": "single_transformer_blocks.0.attn",
        "single_norm": "single_transformer_blocks.1.norm",
        "output": "single_transformer_blocks.0.proj_out",
        "up": "single_transformer_blocks.0.proj_mlp",
        "gelu": "single_transformer_blocks.0.act_mlp",
    },
    lora_targets=[*JOINT_LORA, "ff.net.0.proj", "ff.net.2", "proj_mlp", "proj_out", "norm1.linear"],
    caches=("first_block", "pyramid", "taylorseer", "mag"),
    module=_MODULE,
    processor="HunyuanVideoAttnProcessor2_0",
    functions=("dispatch_attention_fn",),
    block_lists=("transformer_blocks", "single_transformer_blocks"),
    one_block={"blocks": 1, "single_blocks": 1},
)
HUNYUAN_VIDEO15 = Family(
    name="hunyuan_video15",
    model=hunyuan_video15_model,
    inputs=hunyuan_video15_inputs,
    inexact=(
        *("hidden_states", "encoder_hidden_states", "encoder_hidden_states_2", "image_embeds"),
        "timestep",
    ),
    options={**OPTIONS, "an image": {"image": True}},
    parts=PARTS,
    lora_targets=[*JOINT_LORA, "ff.net.0.proj", "ff.net.2", "norm1.linear"],
    caches=("pyramid", "taylorseer"),
    module=f"{_MODULE}15",
    processor="HunyuanVideo15AttnProcessor2_0",
    functions=("dispatch_attention_fn",),
)
