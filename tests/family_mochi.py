"""Small Mochi models for the tests of all families."""

import torch

import family

CHANNELS, TEXT_CHANNELS, POOLED_CHANNELS = 4, 24, 16
_MODULATIONS = ("norm1.linear", "norm1_context.linear", "norm1_context.linear_1", "norm_out.linear")


def _finish(model):
    """Each head has angles of its own."""
    torch.nn.init.normal_(model.pos_frequencies)
    for module in model.modules():
        if type(module).__name__ == "MochiRMSNorm":
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)


_EMBEDDING = "time_embed.timestep_embedder"


@family.model_of("MochiTransformer3DModel", _MODULATIONS, _EMBEDDING, gain=1, finish=_finish)
def mochi_model(*of_blocks):
    return {
        **family.sizes(*of_blocks),
        "in_channels": CHANNELS,
        "pooled_projection_dim": POOLED_CHANNELS,
        "text_embed_dim": TEXT_CHANNELS,
        "time_embed_dim": 16,
    }


@family.inputs_of
def mochi_inputs(normal, dtype, batch, tokens, text_length, mask=None):
    """``mask``: None, "padded" for prompts of different lengths, or "scattered" padding."""
    positions = torch.arange(text_length)
    lengths = torch.full((batch,), text_length)
    if mask == "padded":
        lengths = text_length - torch.arange(batch) * 3 % (text_length + 1)
    is_valid = positions < lengths[:, None]
    if mask == "scattered":
        is_valid = (positions + torch.arange(batch)[:, None]) % 3 > 0
    return {
        "hidden_states": normal(batch, CHANNELS, 1 + tokens, 6, 4).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "timestep": 1000 * normal(batch).sigmoid(),
        "encoder_attention_mask": is_valid,
    }


MOCHI = family.Family(
    name="mochi",
    model=mochi_model,
    inputs=mochi_inputs,
    options={
        **family.TWO_STREAM_OPTIONS,
        "padded text": {"mask": "padded", "batch": 3},
        "scattered padding": {"mask": "scattered", "text_length": 7},
    },
    parts={
        **family.JOINT_FEED_FORWARD_PARTS,
        **family.block_parts("attn1"),
        "modulated_norm": "transformer_blocks.0.norm3",
        "added_norm": "transformer_blocks.0.attn1.norm_added_k",
        "linear": "transformer_blocks.0.attn1.add_k_proj",
    },
    lora_targets=[*family.JOINT_LORA, *family.FEED_FORWARD_LORA, "norm1.linear"],
    processor="MochiAttnProcessor2_0",
    functions=(),
    has_backends=False,
    fp8_calls=[12, 1, 4, 0, 0, 0, 0, 0],
)
