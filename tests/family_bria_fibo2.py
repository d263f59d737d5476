"""A small FIBO 2 model for the tests of all families. Its second block reads the text."""

import torch

import family

CHANNELS, TEXT_CHANNELS = 4, 24


def _finish(model):
    """Sets what is zero."""
    for name, parameter in model.named_parameters():
        if name.endswith("cross_attn_gate"):
            torch.nn.init.constant_(parameter, 0.7)


@family.model_of(
    "BriaFibo2Transformer2DModel",
    ("adaLN_modulation.0", "adaLN_modulation.1"),
    "t_embedder",
    gain=1,
    finish=_finish,
)
def fibo2_model(blocks, heads, head_dim):
    return {
        "in_channels": CHANNELS,
        "dim": heads * head_dim,
        "n_layers": blocks,
        "n_refiner_layers": blocks,
        "n_heads": heads,
        "cap_feat_dim": TEXT_CHANNELS,
        "injection_layer_ids": (1,),
        "perceiver_num_layers": 2,
        "min_num_gist_tokens": 2,
        "max_num_gist_tokens": 4,
        "gist_step": 1,
        "gist_min_text_len": 2,
        "gist_max_text_len": 6,
        "axes_dims": family.three_axes(head_dim),
        "axes_lens": (64, 96, 16),
    }


@family.inputs_of
def fibo2_inputs(normal, dtype, batch, tokens, text_length, mask=None, images=0):
    """With ``mask`` prompts of different lengths have different numbers of tokens from the perceiver."""
    return {
        "hidden_states": normal(batch, CHANNELS, 8 * tokens, 8).to(dtype),
        "timestep": family.powers_of_two(normal, batch, 1 / 16),
        "encoder_hidden_states": normal(batch, 2, text_length, TEXT_CHANNELS).to(dtype),
        "encoder_attention_mask": family.padded_prompts(batch, text_length) if mask else None,
        "context_latents": [normal(batch, CHANNELS, 4, 6).to(dtype) for _ in range(images)],
    }


FIBO2 = family.Family(
    name="bria_fibo2",
    model=fibo2_model,
    inputs=fibo2_inputs,
    inexact=("hidden_states", "encoder_hidden_states", "context_latents"),
    options={
        **family.TWO_STREAM_OPTIONS,
        "prompts of two lengths": {"mask": "padded"},
        "a reference image": {"images": 1},
    },
    parts={
        **family.block_parts("attention", "layers"),
        "norm": "layers.1.attention_norm1",
        "norm2": "layers.0.ffn_norm1",
        "text_block": "perceiver.layers.1",
        "inner_norm": "layers.0.attention_norm2",
        "gated_feed_forward": "layers.0.feed_forward",
        "up": "layers.0.feed_forward.w1",
        "modulation": "layers.0.adaLN_modulation.0",
    },
    lora_targets=[*family.ATTENTION_LORA, "w1", "w2", "w3"],
    processor="BriaFibo2AttnProcessor",
    block_lists=("noise_refiner", "layers"),
    condition="adaln_noisy",
    functions=("dispatch_attention_fn",),
    fp8_calls=[15, 2, 7, 0, 0, 0, 0, 0],
    fp8_twice=2,  # modulations of noise and of a clean image
)
