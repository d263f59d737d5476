"""Small CogView3+, CogView4 and GLM-Image models for the tests of all families."""

import dataclasses

import torch

import family

CHANNELS, TEXT_CHANNELS, CODES = 4, 24, 16
_MODULATIONS = ("norm1.linear", "norm_out.linear")


def _finish(model):
    """Norms of query and key with weights, which published models lack, in the first block."""
    attention = model.transformer_blocks[0].attn1
    for name in ("norm_q", "norm_k"):
        norm = getattr(attention, name)
        weighted = torch.nn.LayerNorm(norm.normalized_shape, norm.eps)
        torch.nn.init.uniform_(weighted.weight, 0.5, 1.5)
        torch.nn.init.normal_(weighted.bias, std=0.5)
        setattr(attention, name, weighted)


def _config(blocks, heads, head_dim):
    return {
        **family.sizes(blocks, heads, head_dim),
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "text_embed_dim": TEXT_CHANNELS,
        "time_embed_dim": 16,
        "condition_dim": 4,
    }


_options = {"embedding": "time_condition_embed", "finish": _finish}


@family.model_of("CogView3PlusTransformer2DModel", _MODULATIONS, **_options)
def cogview3_model(*of_blocks):
    return {**_config(*of_blocks), "pos_embed_max_size": 64}


@family.model_of("CogView4Transformer2DModel", _MODULATIONS, **_options)
def cogview4_model(*of_blocks):
    return {**_config(*of_blocks), "rope_axes_dim": (32, 32)}


@family.model_of("GlmImageTransformer2DModel", _MODULATIONS, **_options)
def glm_image_model(*of_blocks):
    return {**_config(*of_blocks), "prior_vq_quantizer_codebook_size": CODES}


def _sizes(batch):
    return {
        "target_size": torch.tensor([[20.0, 20 + 10 * i] for i in range(batch)]),
        "crop_coords": torch.tensor([[0.0, i] for i in range(batch)]),
    }


def _inputs(normal, dtype, batch, tokens, text_length, **options):
    rows, columns = 1 + tokens, 2
    return {
        "hidden_states": normal(batch, CHANNELS, 2 * rows, 2 * columns).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "timestep": 1000 * normal(batch).sigmoid(),
        **_sizes(batch),
        **options,
    }


@family.inputs_of
def cogview_inputs(normal, dtype, batch, tokens, text_length, mask=None, **options):
    """``mask``: "padded" for prompts of different lengths."""
    given = _inputs(normal, dtype, batch, tokens, text_length, **options)
    given["original_size"] = given["target_size"].flip(1)
    if mask is not None:
        given["attention_mask"] = family.padded_prompts(batch, text_length)
    return given


@family.inputs_of
def glm_image_inputs(normal, dtype, batch, tokens, text_length, mask=None, **options):
    given = _inputs(normal, dtype, batch, tokens, text_length, **options)
    count = 2 * (1 + tokens)
    given["prior_token_id"] = torch.arange(batch * count).view(batch, count) % CODES
    given["prior_token_drop"] = (torch.arange(batch) % 2 == 1)[:, None].expand(batch, count)
    if mask is not None:
        given["attention_mask"] = family.padded_prompts(batch, text_length)
    return given


_MASKED = {**family.TWO_STREAM_OPTIONS, "padded text": {"mask": "padded", "batch": 3}}
COGVIEW4 = family.Family(
    name="cogview4",
    model=cogview4_model,
    inputs=cogview_inputs,
    options=_MASKED,
    parts={
        **family.block_parts("attn1"),
        **family.feed_forward_parts(),
        "norm2": "transformer_blocks.0.norm2_context",
        "inner_norm": "transformer_blocks.1.norm1.norm_context",
        "modulation": "transformer_blocks.0.norm1.linear",
        "rope": "rope",
    },
    lora_targets=[*family.ATTENTION_LORA, *family.FEED_FORWARD_LORA, "norm1.linear"],
    functions=(),
    has_backends=False,
    processor="CogView4AttnProcessor",
    caches=("first_block", "pyramid", "mag", "faster"),
    fp8_calls=[4, 4, 4, 4, 0, 0, 0, 4],
    fp8_twice=10,
)
GLM_IMAGE = dataclasses.replace(
    COGVIEW4,
    name="glm_image",
    model=glm_image_model,
    inputs=glm_image_inputs,
    module="",
    processor="GlmImageAttnProcessor",
    functions=("dispatch_attention_fn",),
    has_backends=True,
    caches=("pyramid", "faster"),
)
COGVIEW3 = dataclasses.replace(
    COGVIEW4,
    name="cogview3",
    model=cogview3_model,
    inputs=cogview_inputs,
    options=family.TWO_STREAM_OPTIONS,
    parts={
        k: path.replace("norm_context", "norm_c") if k == "inner_norm" else path
        for k, path in COGVIEW4.parts.items()
        if k != "rope"
    },
    module="diffusers.models.attention_processor",
    processor="CogVideoXAttnProcessor2_0",
    condition="emb",
    caches=(),
)
