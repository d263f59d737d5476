"""Z-Image and its ControlNet: inputs of each form, and parts that users change."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F

from families import KERNEL_HEADS, TINY_HEADS, assert_close
from family_z_image import (
    SIGLIP_CHANNELS,
    control_inputs,
    controlnet_of_z_image,
    reference_inputs,
    z_image_inputs,
    z_image_model,
)
from injected_pairs import assert_as_close_as_eager, fallen_back, injected
from ltx_models import kernel_calls
from small_models import run

pytestmark = pytest.mark.usefixtures("_one_thread")

REFERENCES = functools.partial(z_image_model, siglip_feat_dim=SIGLIP_CHANNELS)
TWO_PROMPTS = functools.partial(z_image_inputs, prompts=(40, 6))
CONTROL = {
    name: functools.partial(controlnet_of_z_image, refiner=name)
    for name in ("control_layers", "control_noise_refiner")
}
# Model, inputs, calls of gated_residual_rms_norm_modulate and gated_residual, and of attention.
# A block has one of the former inside and hands the next one over, except to the first of another list.
VARIANTS = {
    "one prompt": (z_image_model, z_image_inputs, 6 + 3, 3, 6),
    "two prompts": (z_image_model, TWO_PROMPTS, 6 + 3, 3, 6),
    "reference images": (REFERENCES, reference_inputs, 8 + 4, 4, 8),
    "a ControlNet": (CONTROL["control_noise_refiner"], control_inputs, 8 + 2, 6, 8),
    "a ControlNet that refines with its layers": (CONTROL["control_layers"], control_inputs, 0, 0, 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(kernel, device, variant, dtype):
    make, make_inputs, joined, ends, attends = VARIANTS[variant]
    heads = TINY_HEADS if dtype == torch.float32 else KERNEL_HEADS
    model, plain, report = injected(kernel, make(device, dtype, **heads))
    assert report.levels == {"": "in full"}
    calls = kernel_calls(run, model, make_inputs(device, dtype, seed=0))
    print(calls)
    assert fallen_back(report) == {}
    if dtype == torch.float32:
        arguments = make_inputs(device, seed=0)
        reference = copy.deepcopy(plain).double()
        assert_close(run(model, arguments), run(plain, arguments))
        return
    inputs = functools.partial(make_inputs, device)
    assert_as_close_as_eager(
        model, plain, lambda dtype, seed: inputs(dtype, seed=seed), samples=4, forward=run, dtype=dtype
    )
