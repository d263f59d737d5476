"""Small AuraFlow models for the tests of all families."""

import torch

import family

CHANNELS, TEXT_CHANNELS = 4, 24
_MODULATIONS = ("norm1.linear", "norm1_context.linear", "norm_out.linear")


def _finish(model):
    """Some norms of query and key get weights, which the published models lack."""
    for name, norm in model.named_modules():
        if name.endswith(("norm_q", "norm_k")):
            norm.weight = torch.nn.Parameter(0.5 + torch.rand(norm.normalized_shape))
            norm.bias = torch.nn.Parameter(torch.randn(norm.normalized_shape) / 2)


@family.model_of(
    "AuraFlowTransformer2DModel", _MODULATIONS, "time_step_proj", gain=1, finish=_finish
)
def auraflow_model(blocks, heads, head_dim):
    return {
        "sample_size": 8,
        "num_mmdit_layers": blocks,
        "num_single_dit_layers": blocks,
        "num_attention_heads": heads,
        "attention_head_dim": head_dim,
        "joint_attention_dim": TEXT_CHANNELS,
        "caption_projection_dim": heads * head_dim,
        "pos_embed_max_size": 1024,
    }


@family.inputs_of
def auraflow_inputs(normal, dtype, batch, tokens, text_length, **options):
    return {
        "hidden_states": normal(batch, CHANNELS, 2 + 2 * tokens, 6).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "timestep": normal(batch).sigmoid(),
        **options,
    }


_BLOCKS = "joint_transformer_blocks"
AURAFLOW = family.Family(
    name="auraflow",
    model=auraflow_model,
    inputs=auraflow_inputs,
    parts={
        **family.block_parts("attn", _BLOCKS),
        "single_block": "single_transformer_blocks.0",
        "single_attention": "single_transformer_blocks.0.attn",
        "norm2": f"{_BLOCKS}.0.norm2",
        "added_norm": f"{_BLOCKS}.0.attn.norm_added_k",
        "inner_norm": f"{_BLOCKS}.1.norm1_context.norm",
        "gated_feed_forward": f"{_BLOCKS}.0.ff_context",
        "up": "single_transformer_blocks.0.ff.linear_1",
        "modulation": f"{_BLOCKS}.0.norm1.linear",
    },
    lora_targets=[
        *family.JOINT_LORA,
        *("linear_1", "linear_2", "out_projection", "norm1.linear"),
    ],
    module="diffusers.models.attention_processor",
    functions=(),
    has_backends=False,
    processor="AuraFlowAttnProcessor2_0",
    block_lists=(_BLOCKS, "single_transformer_blocks"),
    fp8_calls=[18, 9, 3, 0, 0, 0, 0, 6],
)
