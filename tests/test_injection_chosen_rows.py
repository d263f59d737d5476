"""Qwen-Image 2.1 and MiniMax-H3, whose tokens choose their modulation: operators of a forward, caches of keys
and values, other processors."""

import copy

import diffusers
import pytest
import torch

from changes import Wrap
from checks import relative_distance
from family import KERNEL_HEADS, TINY_HEADS, assert_close, prepared, run
from ltx_models import kernel_calls

pytest.importorskip("diffusers.models.transformers.transformer_qwenimage21")

from diffusers.models.transformers import transformer_qwenimage21

from family_minimax_h3 import MINIMAX_H3
from family_qwenimage21 import QWEN_IMAGE21

# Of two blocks: the end of the first and the start of the second are one operation. MiniMax-H3 has two blocks
# of text, too, which do not rotate; in the others query and key are normalized and then rotated.
OPERATORS = {
    QWEN_IMAGE21.name: {
        "layer_norm_modulate": 2,  # of the first block and the output
        "gated_residual_layer_norm_modulate": 3,
        "gated_residual": 1,
        "qk_norm_rope": 2,
        "swiglu": 2,
    },
    MINIMAX_H3.name: {
        "rms_norm": 1,
        "rms_norm_modulate": 2,
        "gated_residual_rms_norm_modulate": 6,
        "gated_residual": 2,
        "qk_norm_rope": 4,
        "qk_norm_rope_out": 2,
        "swiglu": 4,
    },
}


@pytest.mark.parametrize("family", [QWEN_IMAGE21, MINIMAX_H3], ids=str)
def test_operators_of_a_forward(kernel, device, family):
    model, _, arguments = prepared(family, device, torch.bfloat16, config=KERNEL_HEADS, batch=1)
    report = kernel.inject_kernels(model)
    # Of Qwen-Image 2.1, text is one causal segment.
    attentions = (
        {"attention": 4} if family is MINIMAX_H3 else {"attention": 2, "attention_blocks": 2}
    )
    assert kernel_calls(run, model, arguments) == {**OPERATORS[family.name], **attentions}
    assert not any(entry.fell_back or entry.own_attention for entry in report.calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"mask": "padded"}], ids=["no mask", "padded text"])
def test_cache_of_keys_and_values(kernel, device, dtype, options):
    """The first step fills it, a later one reads it, each as without the kernels."""
    config = KERNEL_HEADS if dtype == torch.bfloat16 else TINY_HEADS
    options = {**options, "has_condition": True}
    model, plain, arguments = prepared(QWEN_IMAGE21, device, dtype, config=config, **options)
    kernel.inject_kernels(model)
    exact = copy.deepcopy(plain).double()
    caches = [transformer_qwenimage21.QwenImage21KVCache(2) for _ in range(3)]
    wide = QWEN_IMAGE21.cast(arguments, torch.float64)
    for mode, timestep in (("extract", 1.0), ("cached", 0.25)):
        outs = []
        for one, given, cache in zip(
            (model, plain, exact), (arguments, arguments, wide), caches, strict=True
        ):
            step = torch.full_like(arguments["timestep"], timestep)
            step = {**given, "kv_cache": cache, "kv_cache_mode": mode, "timestep": step}
            outs.append(run(one, step).double())
        ours, eager, expected = outs
        if dtype == torch.float32:
            assert_close(ours.float(), expected)
        else:
            error, its_error = ((out - expected).norm() for out in (ours, eager))
            assert error <= 1.05 * its_error
    for ours, theirs in zip(*(cache.layer_caches for cache in caches[:2]), strict=True):
        for one, other in zip(ours.get(), theirs.get(), strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype


def test_without_a_timestep_of_the_condition(kernel, device):
    """All tokens have the modulation of their sample."""
    config = {**TINY_HEADS, "causal_condition": False}
    model, plain, arguments = prepared(QWEN_IMAGE21, device, config=config, has_condition=True)
    kernel.inject_kernels(model)
    assert_close(run(model, arguments), QWEN_IMAGE21.reference(plain, arguments))


@pytest.mark.parametrize("mask", [None, "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flex_attention(kernel, device, dtype, mask):
    """Its mask runs on the kernel. With padding in the text, and in float32, FlexAttention computes it."""
    config = KERNEL_HEADS if dtype == torch.bfloat16 else TINY_HEADS
    options = {"config": config, "mask": mask, "has_condition": True}
    model, plain, arguments = prepared(QWEN_IMAGE21, device, dtype, **options)
    report = kernel.inject_kernels(model)
    for one in (model, plain):
        for block in one.transformer_blocks:
            block.attn.set_processor(transformer_qwenimage21.QwenImage21FlexAttnProcessor())
    expected = run(plain, arguments).double()
    distance = relative_distance(run(model, arguments).double(), expected)
    assert distance < (1e-5 if dtype == torch.float32 else 0.02)
    reasons = "".join(reason for entry in report.calls for reason in entry.fell_back)
    if dtype == torch.bfloat16 and mask is not None:
        assert "does not give each query one interval of keys" in reasons
    else:
        assert not reasons
    if dtype == torch.bfloat16 and mask is None:
        assert kernel_calls(run, model, arguments)["attention_blocks"] == 2


def test_a_replaced_modulation_runs(kernel, device):
    model, plain, arguments = prepared(MINIMAX_H3, device)
    kernel.inject_kernels(model)
    for one in (model, plain):
        one.transformer_blocks[1].adaln_proj = Wrap(one.transformer_blocks[1].adaln_proj)
        one.transformer_blocks[0].norm2 = torch.nn.Identity()
    assert_close(run(model, arguments), MINIMAX_H3.reference(plain, arguments))


def test_fused_projections(kernel, device):
    model, plain, arguments = prepared(MINIMAX_H3, device)
    kernel.inject_kernels(model)
    model.fuse_qkv_projections()
    assert model.transformer_blocks[0].attn.fused_projections
    assert_close(run(model, arguments), MINIMAX_H3.reference(plain, arguments))


@pytest.mark.parametrize("rope_freq_dim", [1, 2], ids=["part", "no part"])
def test_rotation_of_a_part_of_each_head(kernel, device, rope_freq_dim):
    """6 or 12 of 12 elements."""
    torch.manual_seed(0)
    model = MINIMAX_H3.model(device, heads=2, head_dim=16, blocks=1)
    settings = {**model.config, "attention_head_dim": 12, "rope_freq_dim": rope_freq_dim}
    model = diffusers.MiniMaxH3Transformer3DModel.from_config(settings).to(device).eval()
    plain, arguments = copy.deepcopy(model), MINIMAX_H3.inputs(device)
    kernel.inject_kernels(model)
    assert kernel_calls(run, model, arguments).get("qk_norm_rope_out", 0) == (
        1 if rope_freq_dim == 1 else 0
    )
    assert_close(run(model, arguments), MINIMAX_H3.reference(plain, arguments))
