"""Small Chroma models for the tests of all families."""

import diffusers
import torch

from family import TWO_STREAM_OPTIONS, Family, make_all_matter
from family_flux import BLOCKS, CHANNELS, FLUX, TEXT_CHANNELS, flux2_inputs


def chroma_model(
    device,
    dtype=torch.float32,
    *,
    seed=0,
    blocks=2,
    single_blocks=2,
    heads=2,
    head_dim=16,
    **config,
):
    """Norm weights differ from 1. Modulations are large and depend on the timestep."""
    torch.manual_seed(seed)
    axis = head_dim // 3 // 2 * 2
    model = diffusers.ChromaTransformer2DModel(
        in_channels=CHANNELS,
        num_layers=blocks,
        num_single_layers=single_blocks,
        attention_head_dim=head_dim,
        num_attention_heads=heads,
        joint_attention_dim=TEXT_CHANNELS,
        axes_dims_rope=(head_dim - 2 * axis, axis, axis),
        approximator_num_channels=16,
        approximator_hidden_dim=32,
        approximator_layers=1,
        **config,
    )
    make_all_matter(model, ("distilled_guidance_layer.out_proj",), "distilled_guidance_layer")
    return model.to(device, dtype).eval()


def text_mask(batch, text_length, device):
    """True at tokens of prompts of different lengths, the first of them without padding."""
    lengths = text_length - torch.arange(batch) * 3 % text_length
    return (torch.arange(text_length) < lengths[:, None]).to(device)


def chroma_inputs(
    device,
    dtype=torch.float32,
    *,
    seed=None,
    batch=2,
    tokens=1,
    text_length=5,
    mask=None,
    **options,
):
    """With ``mask`` the text has padding, as the pipeline pads it."""
    arguments = flux2_inputs(
        device, dtype, seed=seed, batch=batch, tokens=tokens, text_length=text_length, axes=3
    )
    del arguments["guidance"]
    arguments["attention_mask"] = None
    if mask is not None:
        of_text = text_mask(batch, text_length, device).to(dtype)
        of_image = torch.ones(arguments["hidden_states"].shape[:2], dtype=torch.bool, device=device)
        arguments["attention_mask"] = torch.cat([of_text, of_image], dim=1)
    return {**arguments, **options}


class _Chroma(Family):
    def cast(self, arguments, dtype):
        """The mask is added to scores, so it has their dtype."""
        mask = arguments["attention_mask"]
        mask = mask if mask is None else mask.to(dtype)
        return {**super().cast(arguments, dtype), "attention_mask": mask}


CHROMA = _Chroma(
    name="chroma",
    model=chroma_model,
    inputs=chroma_inputs,
    inexact=("hidden_states", "encoder_hidden_states"),
    parts={**FLUX.parts, "modulation": "distilled_guidance_layer.out_proj"},
    lora_targets=[target for target in FLUX.lora_targets if target != "norm1.linear"],
    caches=("pyramid", "taylorseer"),
    module="diffusers.models.transformers.transformer_chroma",
    processor="FluxAttnProcessor",
    functions=(),  # they are in the module of FLUX.1
    **{**BLOCKS, "options": {**TWO_STREAM_OPTIONS, "padded text": {"mask": "padded"}}},
)
