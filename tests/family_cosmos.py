"""Small Cosmos models for the tests of all families."""

import torch

import family

CHANNELS, TEXT_CHANNELS = 4, 24


def _finish(model):
    if model.learnable_pos_embed is not None:
        for parameter in model.learnable_pos_embed.parameters():
            torch.nn.init.normal_(parameter)


@family.model_of("CosmosTransformer3DModel", ("linear_1", "linear_2"), "time_embed", finish=_finish)
def cosmos_model(*of_blocks):
    return {
        **family.sizes(*of_blocks),
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "mlp_ratio": 2,
        "text_embed_dim": TEXT_CHANNELS,
        "adaln_lora_dim": 8,
        "max_size": (4, 64, 64),
        "concat_padding_mask": False,  # which needs torchvision
        "extra_pos_embed_type": None,
    }


@family.inputs_of
def cosmos_inputs(normal, dtype, batch, tokens, text_length, per_frame=False, **options):
    """``per_frame``: each frame has its own time step."""
    frames = 2
    shape = (batch, 1, frames, 1, 1) if per_frame else (batch,)
    return {
        "hidden_states": normal(batch, CHANNELS, frames, 2 + 2 * tokens, 6).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "timestep": normal(*shape).sigmoid(),
        "fps": 30,
        **options,
    }


COSMOS = family.Family(
    name="cosmos",
    model=cosmos_model,
    inputs=cosmos_inputs,
    options={
        "two samples": {},
        "batch of 1": {"batch": 1},
        "more tokens": {"batch": 3, "tokens": 4, "text_length": 9},
        "a time step for each frame": {"per_frame": True},
        "an image": {"fps": None},
    },
    parts={
        **family.block_parts("attn1"),
        **family.feed_forward_parts(),
        "norm2": "transformer_blocks.0.norm2",
        "cross_attention": "transformer_blocks.0.attn2",
        "inner_norm": "transformer_blocks.1.norm1.norm",
        "output": "transformer_blocks.0.attn2.to_out.0",
        "modulation": "transformer_blocks.1.norm1.linear_1",
        "output_norm": "norm_out",
        "rope": "rope",
    },
    lora_targets=[*family.ATTENTION_LORA, *family.FEED_FORWARD_LORA, "linear_2"],
    functions=("dispatch_attention_fn",),
    processor="CosmosAttnProcessor2_0",
    condition="embedded_timestep",
    fp8_calls=[10, 6, 0, 2, 0, 0, 0, 6],
)
