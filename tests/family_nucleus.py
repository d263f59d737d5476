"""Small Nucleus-Image models for the tests of all families."""

import torch

import family

CHANNELS, TEXT_CHANNELS = 8, 24
EXPERTS = 1  # the model's own code adds results of several in any order on a GPU


def _finish(model):
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)


@family.model_of(
    "NucleusMoEImageTransformer2DModel",
    ("img_mod.1", "norm_out.linear"),
    "time_text_embed",
    finish=_finish,
)
def nucleus_model(blocks, heads, head_dim):
    """Blocks after the first have an expert. It takes all tokens: which ones it chooses is not continuous."""
    return {
        **family.sizes(blocks + 1, heads, head_dim),
        "num_key_value_heads": max(heads // 2, 1),
        "in_channels": CHANNELS,
        "out_channels": 2,
        "joint_attention_dim": TEXT_CHANNELS,
        "axes_dims_rope": family.three_axes(head_dim),
        "mlp_ratio": 6.0,
        "num_experts": EXPERTS,
        "moe_intermediate_dim": 32,
        "capacity_factors": float(EXPERTS),
        "dense_moe_strategy": "leave_first_block_dense",
    }


@family.inputs_of
def nucleus_inputs(normal, dtype, batch, tokens, text_length, mask=None, **options):
    """``mask`` is "padded" (a different number of text tokens per sample), "holes" or None."""
    height, width = 3 + tokens, 3
    if mask is not None:
        mask = family.text_mask(batch, text_length, 1, holes=mask == "holes").bool()
    return {
        "hidden_states": normal(batch, height * width, CHANNELS).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "encoder_hidden_states_mask": mask,
        "timestep": family.powers_of_two(normal, batch, 1 / 8).to(dtype),
        "img_shapes": [(1, height, width)] * batch,
        **options,
    }


NUCLEUS = family.Family(
    name="nucleus",
    model=nucleus_model,
    inputs=nucleus_inputs,
    module="diffusers.models.transformers.transformer_nucleusmoe_image",
    options={
        **family.TWO_STREAM_OPTIONS,
        "padded text": {"mask": "padded"},
        "holes in the text": {"mask": "holes", "text_length": 9},
    },
    parts={
        **family.block_parts("attn"),
        **family.feed_forward_parts("transformer_blocks.0.img_mlp"),
        "norm": "transformer_blocks.1.pre_attn_norm",
        "norm2": "transformer_blocks.0.pre_mlp_norm",
        "added_norm": "transformer_blocks.0.attn.norm_added_k",
        "linear": "transformer_blocks.0.attn.add_k_proj",
        "last_block": "transformer_blocks.2",
        "modulation": "transformer_blocks.0.img_mod",
        "modulation_of_next": "transformer_blocks.1.img_mod.1",
        "rope": "pos_embed",
    },
    lora_targets=[
        *(*family.ATTENTION_LORA, "add_k_proj", "add_v_proj", "img_mlp.net.0.proj"),
        *("img_mlp.net.2", "img_mod.1"),
    ],
    caches=("pyramid", "taylorseer"),
    functions=("_apply_rotary_emb_nucleus", "dispatch_attention_fn"),
    processor="NucleusMoEAttnProcessor2_0",
    fp8_calls=[13, 3, 1, 0, 3, 0, 0, 4],
)
