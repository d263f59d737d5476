"""Small models of Z-Image and its ControlNet. Their inputs and results are lists of tensors."""

import diffusers
import torch

import family
from small_models import to

CHANNELS, TEXT_CHANNELS, SIGLIP_CHANNELS = 4, 24, 20


_MODULATIONS = ("adaLN_modulation.0", "adaLN_modulation.1")


def _finish(model):
    """Sets what is zero, or not initialized, as these tokens are in diffusers 0.36."""
    for name, parameter in model.named_parameters():
        if "pad_token" in name or not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)


@family.model_of("ZImageTransformer2DModel", _MODULATIONS, "t_embedder", gain=1, finish=_finish)
def z_image_model(blocks, heads, head_dim):
    return {
        "in_channels": CHANNELS,
        "dim": heads * head_dim,
        "n_layers": blocks,
        "n_refiner_layers": blocks,
        "n_heads": heads,
        "n_kv_heads": heads,
        "cap_feat_dim": TEXT_CHANNELS,
        "axes_dims": [*family.three_axes(head_dim)],
        "axes_lens": [160, 96, 16],
    }


@family.inputs_of
def z_image_inputs(normal, dtype, batch, tokens, text_length, prompts=None):
    """``prompts``: the number of tokens of each. The model pads it to a multiple of 32."""
    prompts = (text_length,) * batch if prompts is None else prompts
    return {
        "x": [normal(CHANNELS, 1, 8 * tokens, 8).to(dtype) for _ in prompts],
        "t": normal(len(prompts)).sigmoid(),
        "cap_feats": [normal(length, TEXT_CHANNELS).to(dtype) for length in prompts],
    }


def reference_inputs(device, dtype=torch.float32, *, seed=None, **_):
    """Two samples, each with a reference image, its features, and the image to denoise."""
    normal = family.seeded(seed, device)
    arguments = {
        "x": [[normal(CHANNELS, 1, 8, 8), normal(CHANNELS, 1, height, 8)] for height in (8, 24)],
        "t": normal(2).sigmoid(),
        "cap_feats": [[normal(9, TEXT_CHANNELS) for _ in range(3)] for _ in range(2)],
        "siglip_feats": [[normal(3, 4, SIGLIP_CHANNELS), None] for _ in range(2)],
        "image_noise_mask": [[0, 1], [0, 1]],
    }
    return to(arguments, device, dtype)


def controlnet_of_z_image(device, dtype=torch.float32, *, heads=2, head_dim=16, refiner, **_):
    """``refiner``: the model's argument add_control_noise_refiner."""
    transformer = z_image_model(device, heads=heads, head_dim=head_dim)
    model = diffusers.ZImageControlNetModel(
        control_layers_places=[0, 1],
        control_refiner_layers_places=[0, 1],
        control_in_dim=CHANNELS,
        add_control_noise_refiner=refiner,
        dim=heads * head_dim,
        n_refiner_layers=2,
        n_heads=heads,
        n_kv_heads=heads,
    )
    model.from_transformer(model, transformer)
    family.make_all_matter(model, _MODULATIONS, "t_embedder", gain=1)
    _finish(model)
    return model.to(device, dtype).eval()


def control_inputs(device, dtype=torch.float32, *, seed=None, prompts=(40, 6), **_):
    arguments = z_image_inputs(device, dtype, seed=seed, prompts=prompts)
    normal = family.seeded(seed, device)
    control = [normal(CHANNELS, 1, 8, 8) for _ in prompts]
    return {**arguments, "control_context": to(control, device, dtype)}


Z_IMAGE = family.Family(
    name="z_image",
    model=z_image_model,
    inputs=z_image_inputs,
    inexact=("x", "cap_feats"),
    options={**family.TWO_STREAM_OPTIONS, "prompts of two lengths": {"prompts": (40, 6)}},
    parts={
        **family.block_parts("attention", "layers"),
        "norm": "layers.1.attention_norm1",
        "norm2": "layers.0.ffn_norm1",
        "text_block": "context_refiner.0",
        "inner_norm": "layers.0.attention_norm2",
        "gated_feed_forward": "layers.0.feed_forward",
        "up": "layers.0.feed_forward.w1",
        "modulation": "layers.0.adaLN_modulation.0",
    },
    lora_targets=[*family.ATTENTION_LORA, "w1", "w2", "w3"],
    processor="ZSingleStreamAttnProcessor",
    block_lists=("noise_refiner", "context_refiner", "layers"),
    condition="adaln_input",
    functions=("dispatch_attention_fn",),
    main="x",
    fp8_calls=[10, 3, 9, 0, 0, 0, 0, 0],
)
