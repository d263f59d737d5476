"""Small AnyFlow models for the tests of all families."""

import family
import family_wan
from family_wan import CHANNELS, TEXT_CHANNELS


@family.model_of(
    "AnyFlowTransformer3DModel",
    embedding=("condition_embedder.time", "condition_embedder.delta"),
)
def anyflow_model(blocks, heads, head_dim):
    return {
        **family.sizes(blocks, heads, head_dim),
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "text_dim": TEXT_CHANNELS,
        "freq_dim": 16,
        "ffn_dim": 3 * heads * head_dim,
        "rope_max_seq_len": 32,
    }


@family.inputs_of
def anyflow_inputs(normal, dtype, batch, tokens, text_length, **options):
    frames, height, width = 2, 2 + 2 * tokens, 6
    return {
        "hidden_states": normal(batch, frames, CHANNELS, height, width).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "timestep": 1000 * normal(batch, frames).sigmoid(),
        "r_timestep": 1000 * normal(batch, frames).sigmoid(),
        **options,
    }


ANYFLOW = family.Family(
    name="anyflow",
    model=anyflow_model,
    inputs=anyflow_inputs,
    options={
        "two samples": {},
        "batch of 1": {"batch": 1},
        "more tokens": {"batch": 3, "tokens": 4, "text_length": 9},
    },
    parts=family_wan.WAN.parts,
    lora_targets=family_wan.WAN.lora_targets,
    processor="AnyFlowAttnProcessor",
    block_lists=("blocks",),
    fp8_calls=[6, 3, 3, 2, 0, 0, 0, 2],
)
