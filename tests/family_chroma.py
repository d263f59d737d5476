"""Small Chroma models for the tests of all families."""

import torch

import family
from family_flux import BLOCKS, FLUX, flux2_inputs, of_two_kinds

_GUIDANCE = "distilled_guidance_layer"


@family.model_of("ChromaTransformer2DModel", (f"{_GUIDANCE}.out_proj",), _GUIDANCE)
def chroma_model(blocks, heads, head_dim):
    return {
        **of_two_kinds(blocks, heads, head_dim),
        "axes_dims_rope": family.three_axes(head_dim),
        "approximator_num_channels": 16,
        "approximator_hidden_dim": 32,
        "approximator_layers": 1,
    }


def chroma_inputs(device, dtype=torch.float32, *, mask=None, attention_mask=None, **options):
    """With ``mask`` the text has padding, as the pipeline pads it."""
    arguments = flux2_inputs(device, dtype, axes=3, **options)
    del arguments["guidance"]
    if mask is not None:
        batch, image, _ = arguments["hidden_states"].shape
        of_text = family.padded_prompts(batch, len(arguments["txt_ids"])).to(dtype)
        attention_mask = torch.cat([of_text, torch.ones(batch, image)], dim=1).to(device, dtype)
    return {**arguments, "attention_mask": attention_mask}


class _Chroma(family.Family):
    def cast(self, arguments, dtype):
        """The mask is added to scores, so it has their dtype."""
        mask = arguments["attention_mask"]
        mask = mask if mask is None else mask.to(dtype)
        return {**super().cast(arguments, dtype), "attention_mask": mask}


CHROMA = _Chroma(
    name="chroma",
    model=chroma_model,
    inputs=chroma_inputs,
    options={**family.TWO_STREAM_OPTIONS, "padded text": {"mask": "padded"}},
    parts={**FLUX.parts, "modulation": f"{_GUIDANCE}.out_proj"},
    lora_targets=[target for target in FLUX.lora_targets if target != "norm1.linear"],
    caches=("pyramid", "taylorseer"),
    processor="FluxAttnProcessor",
    functions=(),  # they are in the module of FLUX.1
    **BLOCKS,
)
