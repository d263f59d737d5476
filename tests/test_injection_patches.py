"""Classes and functions of diffusers and Torch that are patched, function modes, global hooks."""

import functools
from collections import Counter

import pytest
import torch
from diffusers.hooks import HookRegistry, LayerSkipConfig, apply_layer_skip
from diffusers.hooks.layer_skip import (
    AttentionProcessorSkipHook,
    AttentionScoreSkipFunctionMode,
)
from diffusers.models import activations, attention, normalization
from diffusers.models.transformers import transformer_ltx
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from injected_pairs import BFLOAT16, assert_alike, distance, is_said, pair
from ltx_models import calls_of, either_order, inputs, kernel_calls, run, transformer

pytestmark = pytest.mark.usefixtures("_one_thread")

BLOCKS = 3


def halved(result):
    if isinstance(result, tuple):
        return tuple(halved(item) for item in result)
    return result * 0.5


def halving(original, *, is_wrapper=True):
    """A function that halves what another gives; as decorators make it, it looks like that one."""

    def patch(*args, **kwargs):
        return halved(original(*args, **kwargs))

    return functools.wraps(original)(patch) if is_wrapper else patch


CLASSES = {
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
}
FUNCTIONS = {
    "apply_rotary_emb": (transformer_ltx, "apply_rotary_emb"),
    "dispatch_attention_fn": (transformer_ltx, "dispatch_attention_fn"),
    "rms_norm": (F, "rms_norm"),
    "gelu": (F, "gelu"),
    "linear": (F, "linear"),
    "scaled_dot_product_attention": (F, "scaled_dot_product_attention"),
}
# What the injection does not replace: it is called as it is.
NOT_REPLACED = {"feed_forward", "linear", "dropout"}

every_model = pytest.mark.parametrize("options", [{}, BFLOAT16], ids=["float32", "bfloat16"])
every_kind_of_patch = pytest.mark.parametrize(
    "is_wrapper", [True, False], ids=["wrapper", "function"]
)


def assert_patched_alike(kernel, device, monkeypatch, target, options, order, is_wrapper):
    owner, name = target
    options = {"blocks": BLOCKS, **options}
    model, plain = transformer(device, **options), transformer(device, **options)
    arguments = inputs(plain)
    unlike = run(plain, arguments)
    if order:
        report = kernel.inject_kernels(model)
        assert_alike(model, plain, arguments)
    with monkeypatch.context() as patches:
        patches.setattr(owner, name, halving(getattr(owner, name), is_wrapper=is_wrapper))
        if not order:
            report = kernel.inject_kernels(model)
        assert_alike(model, plain, arguments, unlike=unlike)
    # What was patched is as it was again.
    assert_alike(model, plain, arguments)
    return report, options, model, arguments


@pytest.mark.parametrize("target", CLASSES)
@every_model
@either_order
def test_methods_of_classes(kernel, device, monkeypatch, target, options, is_injected_first):
    report, options, model, arguments = assert_patched_alike(
        kernel, device, monkeypatch, CLASSES[target], options, is_injected_first, True
    )
    if target not in NOT_REPLACED:
        assert is_said(report, kernel, device, **options)
    if is_injected_first:
        attention_calls = {"attention": 2} if options.get("dtype") else {}
        assert kernel_calls(run, model, arguments) == calls_of(BLOCKS, **attention_calls)


@pytest.mark.parametrize("target", FUNCTIONS)
@every_model
@every_kind_of_patch
@either_order
def test_functions(kernel, device, monkeypatch, target, options, is_wrapper, is_injected_first):
    report, options, model, arguments = assert_patched_alike(
        kernel, device, monkeypatch, FUNCTIONS[target], options, is_injected_first, is_wrapper
    )
    runs_kernel = target != "linear" and not (
        # Attention of a float32 model is the model's own, and so is what it calls.
        "attention" in target and not options.get("dtype")
    )
    if runs_kernel:
        assert is_said(report, kernel, device, **options)
    if is_injected_first:
        attention_calls = {"attention": 2} if options.get("dtype") else {}
        assert kernel_calls(run, model, arguments) == calls_of(BLOCKS, **attention_calls)


@pytest.mark.parametrize("target", ["diffusers_norm", "torch_norm", "activation"])
def test_a_patch_that_only_looks_is_called(kernel, device, monkeypatch, target):
    """As tools do that measure or record."""
    owner, name = CLASSES[target]
    original, counts = getattr(owner, name), Counter()
    model, plain, _ = pair(kernel, device, blocks=BLOCKS)

    def look(self, *args, **kwargs):
        counts[owner] += 1
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, look)
    arguments = inputs(plain)
    run(plain, arguments)
    expected = counts.pop(owner)
    run(model, arguments)
    assert counts[owner] == expected > 0


# ------------------------------------------------------------------------------------------------
# Function modes


class HalvedAttention(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            self.count += 1
            return result * 0.5
        return result


@pytest.mark.parametrize("mode", [HalvedAttention, AttentionScoreSkipFunctionMode])
@every_model
def test_function_modes_over_attention(kernel, device, mode, options):
    model, plain, _ = pair(kernel, device, blocks=BLOCKS, **options)
    arguments = inputs(plain)
    unlike = run(plain, arguments)

    def forward(model, arguments):
        with mode() as entered:
            result = run(model, arguments)
        if mode is HalvedAttention:
            assert entered.count == 2 * BLOCKS
        return result

    assert_alike(model, plain, arguments, forward=forward)
    assert not torch.equal(forward(plain, arguments), unlike)
    assert distance(forward(model, arguments), unlike) > 1e-3
    assert "attention" not in kernel_calls(forward, model, arguments)
    attention_calls = {"attention": 2} if options else {}
    assert kernel_calls(run, model, arguments) == calls_of(BLOCKS, **attention_calls)


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


@every_model
@pytest.mark.parametrize("skip", [skip_attention_scores, skip_feed_forward, skip_block])
@either_order
def test_layer_skip(kernel, device, options, skip, is_injected_first):
    """What diffusers' guiders are made of."""
    options = {"blocks": BLOCKS, **options}
    model, plain, _ = pair(kernel, device, skip, is_injected_first=is_injected_first, **options)
    arguments = inputs(plain)
    unlike = run(transformer(device, **options), arguments)
    assert_alike(model, plain, arguments, unlike=unlike)
    if "dtype" in options:
        skipped = {skip_attention_scores: 1, skip_feed_forward: 0, skip_block: 2}[skip]
        assert kernel_calls(run, model, arguments)["attention"] == 2 * BLOCKS - skipped


def test_the_default_device_is_no_such_mode(kernel, device):
    """It is a function mode, too, which changes nothing for tensors that are made elsewhere."""
    model, plain, _ = pair(kernel, device, **BFLOAT16)
    arguments = inputs(plain)
    with torch.device(device):
        assert kernel_calls(run, model, arguments) == calls_of(2, attention=2)
        assert_alike(model, plain, arguments)


# ------------------------------------------------------------------------------------------------
# Hooks on all modules


def names_called(model, arguments, register):
    """The name of each module that such a hook sees, in order."""
    names = {id(module): name for name, module in model.named_modules()}
    seen = []
    handle = register(lambda module, *args: seen.append(names[id(module)]))
    try:
        run(model, arguments)
    finally:
        handle.remove()
    return seen


REGISTER = [
    nn.modules.module.register_module_forward_hook,
    nn.modules.module.register_module_forward_pre_hook,
]


@pytest.mark.parametrize("register", REGISTER)
@every_model
@either_order
def test_global_hooks_see_each_call(kernel, device, register, options, is_injected_first):
    model = transformer(device, blocks=BLOCKS, **options)
    plain = transformer(device, blocks=BLOCKS, **options)
    arguments = inputs(plain)
    if is_injected_first:
        kernel.inject_kernels(model)
    expected = names_called(plain, arguments, register)
    if not is_injected_first:
        handle = register(lambda module, *args: None)
        kernel.inject_kernels(model)
        handle.remove()
    assert {"transformer_blocks.0.norm1", "transformer_blocks.2.attn2.norm_k"} < set(expected)
    assert names_called(model, arguments, register) == expected
    attention_calls = {"attention": 2} if options else {}
    assert kernel_calls(run, model, arguments) == calls_of(BLOCKS, **attention_calls)


@every_model
def test_hooks_on_each_module_see_each_call(kernel, device, options):
    model, plain, _ = pair(kernel, device, blocks=BLOCKS, **options)
    arguments = inputs(plain)

    class Handles(list):
        def remove(self):
            for handle in self:
                handle.remove()

    def on_each(candidate):
        return lambda hook: Handles(m.register_forward_hook(hook) for m in candidate.modules())

    expected = names_called(plain, arguments, on_each(plain))
    assert names_called(model, arguments, on_each(model)) == expected


@pytest.mark.parametrize(
    "cls", [normalization.RMSNorm, nn.RMSNorm, activations.GELU, transformer_ltx.LTXAttention]
)
@every_model
def test_global_hooks_change_what_modules_give(kernel, device, cls, options):
    model, plain, _ = pair(kernel, device, blocks=BLOCKS, **options)
    arguments = inputs(plain)
    unlike = run(plain, arguments)
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output * 0.5 if type(module) is cls else None
    )
    try:
        assert not torch.equal(run(plain, arguments), unlike)
        assert_alike(model, plain, arguments)
    finally:
        handle.remove()
    assert_alike(model, plain, arguments)
