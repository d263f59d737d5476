"""Small Helios models for the tests of all families."""

import torch

import family
import family_wan
from family_wan import CHANNELS, TEXT_CHANNELS


def _trim_plan(model):
    """diffusers' plan of context parallelism names 40 blocks."""
    names = {name for name, _ in model.named_modules()}
    plan = type(model)._cp_plan.items()
    model._cp_plan = {key: value for key, value in plan if "*" in key or key in names}


@family.model_of(
    "HeliosTransformer3DModel",
    embedding="condition_embedder.time",
    finish=_trim_plan,
)
def helios_model(blocks, heads, head_dim):
    return {
        **family.sizes(blocks, heads, head_dim),
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "text_dim": TEXT_CHANNELS,
        "freq_dim": 16,
        "ffn_dim": 3 * heads * head_dim,
        "rope_dim": family.three_axes(head_dim),
    }


# Frames of each part of the history.
HISTORY = {"short": 1, "mid": 2, "long": 4}


@family.inputs_of
def helios_inputs(normal, dtype, batch, tokens, text_length, has_history=True, **options):
    frames, height, width = 2, 2 + 2 * tokens, 6

    def latents(count):
        return normal(batch, CHANNELS, count, height, width).to(dtype)

    def indices(first, count):
        return torch.arange(first, first + count).expand(batch, count)

    history, first = {}, 0
    for name, count in reversed(HISTORY.items()):
        history[f"latents_history_{name}"] = latents(count)
        # Without indices the model ignores the latents.
        history[f"indices_latents_history_{name}"] = indices(first, count) if has_history else None
        first += count
    return {
        "hidden_states": latents(frames),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "timestep": 1000 * normal(batch).sigmoid(),
        "indices_hidden_states": indices(first, frames),
        **history,
        **options,
    }


HELIOS = family.Family(
    name="helios",
    model=helios_model,
    inputs=helios_inputs,
    inexact=(
        "hidden_states",
        "encoder_hidden_states",
        *[f"latents_history_{name}" for name in HISTORY],
    ),
    options={
        "two samples": {},
        "batch of 1": {"batch": 1},
        "more tokens": {"batch": 3, "tokens": 4, "text_length": 9},
        "no history": {"has_history": False},
    },
    parts=family_wan.WAN.parts,
    lora_targets=family_wan.WAN.lora_targets,
    functions=("apply_rotary_emb_transposed", "dispatch_attention_fn"),
    processor="HeliosAttnProcessor",
    block_lists=("blocks",),
    fp8_calls=[8, 1, 3, 2, 0, 0, 0, 0],
)
