"""Configurations and arguments of LTX-2 and LTX-2.3, and both streams' results."""

import pytest
import torch

from families import FAMILIES, KERNEL_HEADS, TINY_HEADS, assert_close, prepared
from family_ltx2 import LTX23
from injected_pairs import assert_as_close_as_eager, fallen_back
from ltx_models import kernel_calls

LTX2 = FAMILIES.get("ltx2")
pytestmark = [
    pytest.mark.usefixtures("_one_thread"),
    pytest.mark.skipif(LTX2 is None, reason="this diffusers version has no LTX-2"),
]
FEWER_HEADS = {"audio_num_attention_heads": 1, "rope_type": "interleaved"}
# Self-attention of one sample is skipped in the first block.
PERTURBED = {
    "spatio_temporal_guidance_blocks": [0],
    "perturbation_mask": torch.tensor([0.0, 1.0]),
}
VARIANTS = {  # configuration and arguments
    "interleaved": ({"rope_type": "interleaved"}, {}),
    "fewer heads for audio": (FEWER_HEADS, {}),
    "2.3": (LTX23, {}),
    "2.3 with cross time steps": (LTX23, {"use_cross_timestep": True}),
    "2.3 with isolated modalities": (LTX23, {"isolate_modalities": True}),
    "2.3 with a perturbed sample": (LTX23, PERTURBED),
    "2.3 with all samples perturbed": (LTX23, {"spatio_temporal_guidance_blocks": [1]}),
    "a fixed modulation of the text": ({**LTX23, "use_prompt_adaln_single": False}, {}),
    "2.3's video alone": ({**LTX23, "audio_gated_attn": False, "audio_cross_attn_mod": False}, {}),
    "no biases in feed-forwards": ({"ff_bias": False, "audio_ff_bias": False}, {}),
    "no coordinates": ({}, {"video_coords": None, "audio_coords": None}),
    "a mask for each query": ({}, {"video_self_attention_mask": torch.eye(12).expand(2, 12, 12)}),
}


@torch.no_grad()
def both(model, arguments):
    """The video's and the audio's result in one tensor (B, S * C)."""
    return torch.cat([out.flatten(1) for out in model(**arguments, return_dict=False)], dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(kernel, device, variant, dtype):
    config, options = VARIANTS[variant]
    heads = TINY_HEADS if dtype == torch.float32 else KERNEL_HEADS
    hidden = heads["heads"] * heads["head_dim"]
    sizes = {"audio_cross_attention_dim": heads["head_dim"]} if config is FEWER_HEADS else {}
    if "gated_attn" in config:  # its text is not projected
        options = {"text_channels": (hidden, hidden), **options}

    def make(dtype, seed):
        arguments = LTX2.inputs(device, dtype, seed=seed, **options)
        for name in ("perturbation_mask", "video_self_attention_mask"):
            if name in arguments:
                arguments[name] = arguments[name].to(device, dtype)
        return arguments

    model, plain, _ = prepared(LTX2, device, dtype, config={**heads, **sizes, **config})
    report = kernel.inject_kernels(model)
    calls = kernel_calls(both, model, make(dtype, 0))
    # In two blocks of two streams: the norms of each after the first. The first block joins the second.
    norms = 2 if "isolate_modalities" in options else 3
    assert calls["gated_residual_rms_norm_modulate"] == 2 * 2 * norms + 2
    assert "attention" in calls or dtype == torch.float32
    reasons = {reason for found in fallen_back(report).values() for reason in found}
    own = {"attention itself is the model's own: its mask differs between queries or heads"}
    is_masked = "video_self_attention_mask" in options and dtype != torch.float32
    assert reasons == (own if is_masked else set())
    if dtype == torch.float32:
        assert_close(both(model, make(dtype, 0)), both(plain, make(dtype, 0)), 1e-5)
        return
    assert_as_close_as_eager(model, plain, make, samples=4, forward=both, dtype=dtype)
