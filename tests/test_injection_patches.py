"""Classes and functions of diffusers and Torch that are patched, hooks on all modules, layer skips.

Function modes: test_injection_foreign_code.py.
"""

import functools

import pytest
from diffusers.hooks import HookRegistry, LayerSkipConfig, apply_layer_skip
from diffusers.hooks.layer_skip import AttentionProcessorSkipHook
from diffusers.models import activations, attention, normalization
from diffusers.models.transformers import transformer_ltx
from torch import nn
from torch.nn import functional as F

from injected_pairs import BFLOAT16, assert_alike, is_said, pair
from ltx_models import calls_of, either_order, inputs, kernel_calls, run, transformer

pytestmark = pytest.mark.usefixtures("_one_thread")

BLOCKS = 3
MODULE = nn.modules.module
every_model = pytest.mark.parametrize("options", [{}, BFLOAT16], ids=["float32", "bfloat16"])


def calls_of_kernels(options):
    return calls_of(BLOCKS, **({"attention": 2} if options else {}))


def halved(result):
    if isinstance(result, tuple):
        return tuple(halved(item) for item in result)
    return result * 0.5


def halving(original):
    """A function that halves what another gives; as decorators make it, it looks like that one."""
    return functools.wraps(original)(lambda *args, **kwargs: halved(original(*args, **kwargs)))


PATCHES = {
    "diffusers_norm": (normalization.RMSNorm, "forward"),
    "torch_norm": (nn.RMSNorm, "forward"),
    "attention": (transformer_ltx.LTXAttention, "forward"),
    "processor": (transformer_ltx.LTXVideoAttnProcessor, "__call__"),
    "block": (transformer_ltx.LTXVideoTransformerBlock, "forward"),
    "activation": (activations.GELU, "forward"),
    "gelu_of_activation": (activations.GELU, "gelu"),
    "feed_forward": (attention.FeedForward, "forward"),
    "linear": (nn.Linear, "forward"),
    "dropout": (nn.Dropout, "forward"),
    "rope": (transformer_ltx.LTXVideoRotaryPosEmbed, "forward"),
    "grid": (transformer_ltx.LTXVideoRotaryPosEmbed, "_prepare_video_coords"),
    "model": (transformer_ltx.LTXVideoTransformer3DModel, "forward"),
    "apply_rotary_emb": (transformer_ltx, "apply_rotary_emb"),
    "dispatch_attention_fn": (transformer_ltx, "dispatch_attention_fn"),
    "F.rms_norm": (F, "rms_norm"),
    "F.gelu": (F, "gelu"),
    "F.linear": (F, "linear"),
    "F.scaled_dot_product_attention": (F, "scaled_dot_product_attention"),
}
# What the injection does not replace: it is called as it is.
NOT_REPLACED = {"feed_forward", "linear", "dropout", "F.linear"}
# Attention of a float32 model is the model's own, and so is what it calls.
OF_ATTENTION = {"dispatch_attention_fn", "F.scaled_dot_product_attention"}


@pytest.mark.parametrize("target", PATCHES)
@every_model
@either_order
def test_patches(kernel, device, monkeypatch, target, options, is_injected_first):
    owner, name = PATCHES[target]
    plain = transformer(device, blocks=BLOCKS, **options)
    model = transformer(device, blocks=BLOCKS, **options)
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
    if target not in NOT_REPLACED and not (target in OF_ATTENTION and not options):
        assert is_said(report, kernel, device, blocks=BLOCKS, **options)
    assert_alike(model, plain, arguments)
    if is_injected_first:
        assert kernel_calls(run, model, arguments) == calls_of_kernels(options)


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


# ------------------------------------------------------------------------------------------------
# Hooks on all modules


class Handles(list):
    def remove(self):
        for handle in self:
            handle.remove()


def on_each(model, hook):
    return Handles(module.register_forward_hook(hook) for module in model.modules())


REGISTER = {
    "forward": lambda model, hook: MODULE.register_module_forward_hook(hook),
    "pre": lambda model, hook: MODULE.register_module_forward_pre_hook(hook),
    "each": on_each,
}


def names_called(model, arguments, register):
    """The name of each module that such a hook sees, in order."""
    names = {id(module): name for name, module in model.named_modules()}
    seen = []
    handle = register(model, lambda module, *args: seen.append(names[id(module)]))
    try:
        run(model, arguments)
    finally:
        handle.remove()
    return seen


@pytest.mark.parametrize("kind", REGISTER)
@every_model
def test_global_hooks_see_each_call(kernel, device, kind, options):
    model, plain, _ = pair(kernel, device, blocks=BLOCKS, **options)
    arguments = inputs(plain)
    expected = names_called(plain, arguments, REGISTER[kind])
    assert {"transformer_blocks.0.norm1", "transformer_blocks.2.attn2.norm_k"} < set(expected)
    assert names_called(model, arguments, REGISTER[kind]) == expected
    assert kernel_calls(run, model, arguments) == calls_of_kernels(options)


@pytest.mark.parametrize("cls", [normalization.RMSNorm, transformer_ltx.LTXAttention])
def test_global_hooks_change_what_modules_give(kernel, device, cls):
    model, plain, _ = pair(kernel, device, blocks=BLOCKS)
    arguments = inputs(plain)
    unlike = run(plain, arguments)
    handle = MODULE.register_module_forward_hook(
        lambda module, args, output: output * 0.5 if type(module) is cls else None
    )
    try:
        assert_alike(model, plain, arguments, unlike=unlike)
    finally:
        handle.remove()
    assert_alike(model, plain, arguments)
