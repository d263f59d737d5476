"""Methods and functions of diffusers and Torch that are patched, layer skips."""

import functools

import pytest
from diffusers.hooks import HookRegistry, LayerSkipConfig, apply_layer_skip
from diffusers.hooks.layer_skip import AttentionProcessorSkipHook
from diffusers.models import activations
from diffusers.models.transformers import transformer_ltx
from torch import nn
from torch.nn import functional as F

from injected_pairs import BFLOAT16, assert_alike, is_said, pair
from ltx_models import calls_of, either_order, inputs, kernel_calls, run, transformer

pytestmark = pytest.mark.usefixtures("_one_thread")

BLOCKS = 3


def halved(result):
    if isinstance(result, tuple):
        return tuple(halved(item) for item in result)
    return result * 0.5


def halving(original):
    """A function that halves what another gives; as decorators make it, it looks like that one."""
    return functools.wraps(original)(lambda *args, **kwargs: halved(original(*args, **kwargs)))


PATCHES = {  # beside the parts and functions of tests/test_conformance.py
    "gelu_of_activation": (activations.GELU, "gelu"),
    "dropout": (nn.Dropout, "forward"),
    "grid": (transformer_ltx.LTXVideoRotaryPosEmbed, "_prepare_video_coords"),
    "model": (transformer_ltx.LTXVideoTransformer3DModel, "forward"),
    "F.linear": (F, "linear"),
}
# What the injection does not replace: it is called as it is.
NOT_REPLACED = {"dropout", "F.linear"}


@pytest.mark.parametrize("target", PATCHES)
@either_order
def test_patches(kernel, device, monkeypatch, target, is_injected_first):
    owner, name = PATCHES[target]
    model, plain = transformer(device, blocks=BLOCKS), transformer(device, blocks=BLOCKS)
    arguments = inputs(plain)
    unlike = run(plain, arguments)
    if is_injected_first:
        report = kernel.inject_kernels(model)
        run(model, arguments)
    with monkeypatch.context() as patches:
        patches.setattr(owner, name, halving(getattr(owner, name)))
        if not is_injected_first:
            report = kernel.inject_kernels(model)
        assert_alike(model, plain, arguments, unlike=unlike)
    assert target in NOT_REPLACED or is_said(report, kernel, device, blocks=BLOCKS)
    assert_alike(model, plain, arguments)
    if is_injected_first:
        assert kernel_calls(run, model, arguments) == calls_of(BLOCKS)


# ------------------------------------------------------------------------------------------------
# Layer skips


def skip_attention_scores(model):
    """diffusers' own function for it does not know LTX-Video's processor."""
    hook = AttentionProcessorSkipHook(None, skip_attention_scores=True)
    attention = model.transformer_blocks[1].attn1
    HookRegistry.check_if_exists_or_initialize(attention).register_hook(hook, "skip")


def skip_feed_forward(model):
    config = LayerSkipConfig(indices=[1], fqn="transformer_blocks", skip_attention=False)
    apply_layer_skip(model, config)


def skip_block(model):
    apply_layer_skip(model, LayerSkipConfig(indices=[1], fqn="transformer_blocks"))


@pytest.mark.parametrize("skip", [skip_attention_scores, skip_feed_forward, skip_block])
@either_order
def test_layer_skip(kernel, device, skip, is_injected_first):
    """What diffusers' guiders are made of."""
    options = {"blocks": BLOCKS, **BFLOAT16}
    model, plain, _ = pair(kernel, device, skip, is_injected_first=is_injected_first, **options)
    arguments = inputs(plain)
    unlike = run(transformer(device, **options), arguments)
    assert_alike(model, plain, arguments, unlike=unlike)
    skipped = {skip_attention_scores: 1, skip_feed_forward: 0, skip_block: 2}[skip]
    assert kernel_calls(run, model, arguments)["attention"] == 2 * BLOCKS - skipped
