"""Z-Image and its ControlNet: inputs of each form, and replaced gating."""

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
from injected_pairs import assert_as_close_as_eager, fallen_back, injected, on_kernels, reasons_of
from ltx_models import kernel_calls
from small_models import run

pytestmark = pytest.mark.usefixtures("_one_thread")

REFERENCES = functools.partial(z_image_model, siglip_feat_dim=SIGLIP_CHANNELS)
TWO_PROMPTS = functools.partial(z_image_inputs, prompts=(40, 6))
CONTROLNET = functools.partial(controlnet_of_z_image, refiner="control_noise_refiner")
REFINED_BY_LAYERS = functools.partial(controlnet_of_z_image, refiner="control_layers")
# Model, inputs, and the number of blocks, and of those that the next one takes over from. The ControlNet adds
# to the result of its first block of noise: after it no block hands over.
VARIANTS = {
    "two prompts": (z_image_model, TWO_PROMPTS, 6, 3),
    "reference images": (REFERENCES, reference_inputs, 8, 4),
    "a ControlNet": (CONTROLNET, control_inputs, 8, 1),
    "a ControlNet that refines with its layers": (REFINED_BY_LAYERS, control_inputs, 8, 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(kernel, device, variant, dtype):
    make, make_inputs, blocks, handed = VARIANTS[variant]
    heads = TINY_HEADS if dtype == torch.float32 else KERNEL_HEADS
    model, plain, report = injected(kernel, make(device, dtype, **heads))
    inputs = functools.partial(make_inputs, device)
    calls = kernel_calls(run, model, inputs(dtype, seed=0))
    assert report.levels == {"": "in full"} and fallen_back(report) == {}
    assert calls["swiglu"] == calls["qk_norm_rope"] == blocks
    assert calls["gated_residual_rms_norm_modulate"] == blocks + handed
    assert calls["gated_residual"] == blocks - handed
    assert calls.get("attention", 0) == (blocks if dtype == torch.bfloat16 else 0)
    if dtype == torch.float32:
        assert_close(run(model, inputs(seed=0)), run(plain, inputs(seed=0)))
    else:
        assert_as_close_as_eager(
            model, plain, lambda dtype, seed: inputs(dtype, seed=seed), samples=4, forward=run
        )


def test_a_mask_with_holes(kernel, device):
    """Not from the model: no number of keys stands for it."""
    model, plain, report = injected(kernel, z_image_model(device, torch.bfloat16, **KERNEL_HEADS))
    mask = torch.arange(12, device=device) % torch.tensor([[3], [5]], device=device) > 0
    x = torch.randn(2, 12, 128, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        expected, out = (m.layers[0].attention(x, attention_mask=mask) for m in (plain, model))
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
    assert on_kernels(report)["Attention"] == 1 and fallen_back(report) == {}


def gating_by_gelu(part, x1, x3):
    return F.gelu(x1) * x3


def replace_gating(model):
    part = model.layers[0].feed_forward
    part._forward_silu_gating = functools.partial(gating_by_gelu, part)


@pytest.mark.parametrize("is_injected_first", [True, False])
def test_gating_of_an_instance(kernel, device, is_injected_first):
    """That feed-forward runs its own code."""
    plain = z_image_model(device, **TINY_HEADS)
    arguments = TWO_PROMPTS(device, seed=0)
    unchanged = run(plain, arguments)
    how = {"is_injected_first": is_injected_first}
    model, plain, report = injected(kernel, plain, replace_gating, **how)
    expected = run(plain, arguments)
    assert not torch.equal(expected, unchanged)
    assert_close(run(model, arguments), expected)
    told = fallen_back(report) if is_injected_first else reasons_of(report)
    assert "_forward_silu_gating was replaced" in told["layers.0.feed_forward"]


def test_gating_of_the_class(kernel, device, monkeypatch):
    """Replaced after the injection, for all of its feed-forwards."""
    model, plain, _ = injected(kernel, z_image_model(device, **TINY_HEADS))
    arguments = TWO_PROMPTS(device, seed=0)
    unchanged = run(plain, arguments)
    cls = type(plain.layers[0].feed_forward)
    monkeypatch.setattr(cls, "_forward_silu_gating", gating_by_gelu)
    expected = run(plain, arguments)
    assert not torch.equal(expected, unchanged)
    assert_close(run(model, arguments), expected)
