"""Models that no family knows, injected in part: norms, activations and attentions, each by itself."""

import collections
import copy
import gc
import logging
import threading
import weakref

import accelerate
import diffusers
import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import remove_hook_from_submodules
from diffusers import FirstBlockCacheConfig, UNet2DConditionModel
from diffusers.hooks import LayerSkipConfig, apply_layer_skip
from diffusers.hooks.layer_skip import AttentionScoreSkipFunctionMode
from diffusers.models import attention_dispatch, normalization
from diffusers.models.attention_processor import (
    AttnProcessor,
    AttnProcessor2_0,
    IPAdapterAttnProcessor2_0,
)
from diffusers.models.transformers import transformer_cosmos
from peft import LoraConfig
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import parametrize

import ltx_models
from checks import tensors_of
from injected_pairs import distance
from ltx_models import either_order, kernel_calls
from small_models import BY_NAME, MODELS, run, tensors, to

pytestmark = [pytest.mark.usefixtures("_one_thread", "_default_backend")]

every_model = pytest.mark.parametrize("small", MODELS, ids=str)
COSMOS, UNET, COGVIEW, HUNYUAN = (
    BY_NAME[name] for name in ("cosmos", "unet", "cogview4", "hunyuan_video")
)
some_models = pytest.mark.parametrize("small", [COSMOS, UNET, COGVIEW, HUNYUAN], ids=str)
BFLOAT16 = torch.bfloat16
# Of modules with more than one.
NORMS_OF_A_CALL = {
    "BasicTransformerBlock": 3,
    "ResnetBlock2D": 2,
    "CogVideoXLayerNormZero": 2,
    "EasyAnimateLayerNormZero": 2,
    "CogView4AdaLayerNormZero": 2,
    "CogView3PlusAdaLayerNormZeroTextImage": 2,
}


@pytest.fixture
def _default_backend(monkeypatch):
    """diffusers' choice for all models, which model.set_attention_backend changes too."""
    registry = attention_dispatch._AttentionBackendRegistry
    monkeypatch.setattr(registry, "_active_backend", registry._active_backend)


def in_float32(small, arguments):
    return {
        name: value if name in small.exact else to(value, "cpu", torch.float32)
        for name, value in arguments.items()
    }


def assert_as_close_as_eager(small, model, plain, limit=1.05, samples=12):
    """The distance from the float32 model is at most 1.05 times that of the eager model, ``plain``."""
    exact = copy.deepcopy(plain).float().cpu()
    squares = torch.zeros(2, dtype=torch.float64)
    for seed in range(samples):
        arguments = small.arguments(model.device, model.dtype, seed)
        expected = run(exact, in_float32(small, arguments)).double()
        for i, candidate in enumerate((model, plain)):
            squares[i] += (run(candidate, arguments).cpu().double() - expected).square().sum()
    error, eager_error = squares.sqrt().tolist()
    assert eager_error > 0
    assert error <= limit * eager_error, f"{error / eager_error:.3f} of the eager model's"


def assert_alike(small, model, plain, slack=None):
    """Both compute the same, up to what their dtype's roundings leave."""
    arguments = small.arguments(model.device, model.dtype)
    slack = slack or (1e-5 if model.dtype == torch.float32 else 0.04)
    assert distance(run(model, arguments), run(plain, arguments)) < slack


def pair(small, device, dtype=BFLOAT16, **changes):
    model = small.model(device, dtype, **changes)
    return model, copy.deepcopy(model), small.arguments(device, dtype)


def on_kernels(report):
    """How many calls of each class ran on the kernels."""
    counts = collections.Counter()
    for calls in report.calls:
        counts[calls.module] += calls.on_kernels
    return counts


def fallen_back(report):
    return {calls.name: calls.fell_back for calls in report.calls if calls.fell_back}


# --------------------------------------------------------------------------------------------------
# What is computed


@every_model
def test_16_bits(kernel, device, small):
    """As close to the float32 model as eager, attention on the kernel, and the same bits after ejection."""
    model, plain, arguments = pair(small, device)
    keys = list(model.state_dict())
    expected = run(plain, arguments)
    report = kernel.inject_kernels(model)
    assert report.levels == {"": "in part"} and "the model: in part" in str(report)
    calls = kernel_calls(run, model, arguments)
    assert calls.get("attention", 0) == small.attends
    counted = {name: n * NORMS_OF_A_CALL.get(name, 1) for name, n in on_kernels(report).items()}
    norms = sum(n for name, n in counted.items() if "Norm" in name or name in NORMS_OF_A_CALL)
    assert norms == sum(n for name, n in calls.items() if "norm" in name)
    assert counted.get("Attention", 0) <= small.attends
    assert_as_close_as_eager(small, model, plain)
    assert list(model.state_dict()) == keys
    kernel.eject_kernels(model)
    assert torch.equal(run(model, arguments), expected)
    assert kernel_calls(run, model, arguments) == {}
    assert not any("forward" in vars(module) for module in model.modules())


@every_model
def test_float32(kernel, device, small):
    """Attention is the model's own, and everything is computed as accurately as it can be."""
    model, plain, arguments = pair(small, device, torch.float32)
    report = kernel.inject_kernels(model)
    calls = kernel_calls(run, model, arguments)
    assert calls and "attention" not in calls
    assert_alike(small, model, plain, 3e-6)
    reasons = {reason for calls in report.calls for reason in calls.fell_back}
    assert reasons <= {"attention itself: no kernel for float32"}


@pytest.mark.parametrize("name", ["cosmos", "unet", "mochi"])
def test_float16(kernel, device, name):
    small = BY_NAME[name]
    model, plain, arguments = pair(small, device, torch.float16)
    kernel.inject_kernels(model)
    assert kernel_calls(run, model, arguments)["attention"] == small.attends
    assert_as_close_as_eager(small, model, plain)


def test_the_report_names_what_is_left_alone(kernel, device):
    report = kernel.inject_kernels(BY_NAME["unet_40"].model(device, BFLOAT16))
    reasons = {entry.name: entry.reason for entry in report.left_alone}
    name = "mid_block.attentions.0.transformer_blocks.0.attn1"
    assert reasons[name] == "its heads have 40 elements, and the kernel's 64 and 128"
    model = UNET.model(device, BFLOAT16)
    report = kernel.inject_kernels(model, attention=False)
    assert {entry.reason for entry in report.left_alone} == {
        "attention itself is the model's own: asked for by attention=False"
    }
    assert "attention" not in kernel_calls(run, model, UNET.arguments(device, BFLOAT16))
    with pytest.raises(ValueError, match="call eject_kernels first"):
        kernel.inject_kernels(model)
    assert kernel.inject_kernels(model, attention=False).already_injected


def test_norms_inside_of_adaptive_norms_are_one_module_with_them(kernel, device):
    model = COSMOS.model(device)
    names = {entry.name for entry in kernel.inject_kernels(model).replaced}
    assert "transformer_blocks.0.norm1" in names and "transformer_blocks.0.norm1.norm" not in names


# --------------------------------------------------------------------------------------------------
# Norms and activations by themselves

NORMS = {
    "LayerNorm": lambda: nn.LayerNorm(24),
    "LayerNorm without bias": lambda: nn.LayerNorm(24, bias=False),
    "LayerNorm without weight": lambda: nn.LayerNorm(24, elementwise_affine=False),
    "torch RMSNorm": lambda: nn.RMSNorm(24, eps=1e-5),
    "FP32LayerNorm": lambda: normalization.FP32LayerNorm(24),
    "RMSNorm": lambda: normalization.RMSNorm(24, 1e-5),
    "MochiRMSNorm": lambda: normalization.MochiRMSNorm(24, 1e-5),
}


def module_pair(kernel, device, make, dtype=BFLOAT16):
    """(injected, plain, report) of a module of the user's own that holds one."""
    torch.manual_seed(0)
    plain = nn.Sequential(make()).to(device, dtype)
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    model = copy.deepcopy(plain)
    return model, plain, kernel.inject_kernels(model)


@pytest.mark.parametrize("x_dtype", [BFLOAT16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_each_norm_gives_its_own_dtype(kernel, device, name, dtype, x_dtype):
    model, plain, report = module_pair(kernel, device, NORMS[name], dtype)
    x = torch.randn(3, 5, 24, device=device).to(x_dtype)
    try:
        with torch.no_grad():
            expected = plain(x)
    except RuntimeError as error:
        with pytest.raises(RuntimeError) as raised, torch.no_grad():
            model(x)
        assert str(raised.value) == str(error)
        return
    with torch.no_grad():
        out = model(x)
    assert out.dtype == expected.dtype and out.shape == expected.shape
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
    (calls,) = report.calls
    assert calls.on_kernels + sum(calls.fell_back.values()) == 1
    is_mixed = dtype != x_dtype and bool(list(plain.parameters()))
    keeps_dtype = name in ("torch RMSNorm", "FP32LayerNorm", "MochiRMSNorm")
    assert calls.on_kernels == int(not is_mixed or (keeps_dtype and dtype == torch.float32))


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_a_transposed_input(kernel, device, name):
    """Of a picture's rows, as patches come out of a convolution."""
    model, plain, _ = module_pair(kernel, device, NORMS[name])
    x = torch.randn(2, 24, 7, device=device, dtype=BFLOAT16).transpose(1, 2)
    with torch.no_grad():
        assert sum(kernel_calls(model, x).values()) == 1
        torch.testing.assert_close(model(x), plain(x), rtol=0.02, atol=0.02)


def test_wrong_sizes_are_refused_as_by_the_class(kernel, device):
    for make in NORMS.values():
        model, plain, _ = module_pair(kernel, device, make, torch.float32)
        x = torch.randn(2, 23, device=device)
        outcomes = []
        for candidate in (model, plain):
            try:
                outcomes.append(candidate(x))
            except RuntimeError as error:
                outcomes.append(str(error))
        if isinstance(outcomes[1], str):
            assert outcomes[0] == outcomes[1]
        else:
            torch.testing.assert_close(*outcomes)
        with pytest.raises(TypeError):
            model[0](x, x)


def test_what_the_norms_do_not_cover(kernel, device):
    cases = {
        "it normalizes over several dimensions": nn.LayerNorm((3, 4)),
        "it has an eps of None": nn.RMSNorm(4),
        "it has a bias": normalization.RMSNorm(4, 1e-5, bias=True),
    }
    for reason, norm in cases.items():
        model = nn.Sequential(norm, nn.LayerNorm(4)).to(device)
        plain = copy.deepcopy(model)
        report = kernel.inject_kernels(model)
        assert [(entry.name, entry.reason) for entry in report.left_alone] == [("0", reason)]
        x = torch.randn(2, 3, 4, device=device)
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x))
        assert fallen_back(report) == {}


def test_subclasses_are_left_alone(kernel, device):
    class Doubled(nn.LayerNorm):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(Doubled(4), nn.LayerNorm(4)).to(device)
    assert [entry.name for entry in kernel.inject_kernels(model).replaced] == ["1"]
    parametrized = nn.Sequential(nn.LayerNorm(4)).to(device)
    kernel.inject_kernels(parametrized)
    parametrize.register_parametrization(parametrized[0], "weight", nn.Softplus())
    x = torch.randn(2, 4, device=device)
    expected = F.layer_norm(x, (4,), F.softplus(torch.ones(4, device=device)))
    with torch.no_grad():
        torch.testing.assert_close(parametrized(x), expected)


ACTIVATIONS = {
    "geglu": lambda: diffusers.models.activations.GEGLU(16, 24),
    "swiglu": lambda: diffusers.models.activations.SwiGLU(16, 24),
    "gelu": lambda: diffusers.models.activations.GELU(16, 24),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_each_activation(kernel, device, name):
    model, plain, report = module_pair(kernel, device, ACTIVATIONS[name])
    x = torch.randn(50, 20, 16, device=device, dtype=BFLOAT16)
    with torch.no_grad():
        assert kernel_calls(model, x) == {name: 1}
        exact = copy.deepcopy(plain).float()(x.float())
        assert distance(model(x), exact) <= 1.05 * distance(plain(x), exact)
    assert [calls.on_kernels for calls in report.calls] == [2]


def test_an_activation_of_another_class(kernel, device):
    make = diffusers.models.activations.LinearActivation
    for activation in ("mish", "relu", "silu"):
        model = nn.Sequential(make(4, 4, activation=activation), nn.LayerNorm(4)).to(device)
        assert [entry.name for entry in kernel.inject_kernels(model).replaced] == ["1"]
    model, plain, report = module_pair(kernel, device, ACTIVATIONS["swiglu"])
    for candidate in (model, plain):
        candidate[0].activation = nn.Tanh()
    x = torch.randn(3, 16, device=device, dtype=BFLOAT16)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    assert fallen_back(report) == {"0": {"its activation is a torch.nn.modules.activation.Tanh": 1}}


# --------------------------------------------------------------------------------------------------
# Attention by itself


def heads(batch=2, tokens=9, count=4, size=64, dtype=BFLOAT16, device="cpu"):
    return torch.randn(batch, tokens, count, size, dtype=dtype, device=device)


def scores_of(*shape):
    return torch.randn(shape, dtype=torch.float32)


CALLS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "defaults spelled out": {"dropout_p": 0.0, "is_causal": False, "attention_kwargs": {}},
    "booleans of keys": {
        "attn_mask": (torch.arange(11) < torch.tensor([[11], [4]]))[:, None, None]
    },
    "booleans of two dimensions": {"attn_mask": torch.arange(11) < torch.tensor([[11], [4]])},
    "scores of keys": {"attn_mask": scores_of(2, 1, 1, 11)},
    "scores of one sample": {"attn_mask": scores_of(1, 1, 1, 11)},
    "scores of keys, expanded": {"attn_mask": scores_of(2, 1, 1, 11).expand(2, 4, 9, 11)},
    "scores of three dimensions": {"attn_mask": scores_of(1, 1, 11)},
    "grouped": {"kv": 2, "enable_gqa": True},
}
OTHER_CALLS = {
    "scores of heads": {"attn_mask": scores_of(2, 4, 1, 11)},
    "scores of queries": {"attn_mask": scores_of(2, 1, 9, 11)},
    "scores of queries and keys": {"attn_mask": scores_of(9, 11)},
    "causal": {"is_causal": True},
    "zero scale": {"scale": 0.0},
    "backend": {"backend": "_native_math"},
    "own backend": {"backend": "native"},
    "float32": {"dtype": torch.float32},
    "heads of 32": {"size": 32},
    "grouped without saying so": {"kv": 1},
}


def attention_calls(kernel, device, options, is_direct):
    """(operators called, what the stand-in gives, what the function that it stands in for gives)."""
    processors = kernel.injection.attention_processors
    options = dict(options)
    count = options.pop("kv", 4)
    form = {
        "dtype": options.pop("dtype", BFLOAT16),
        "size": options.pop("size", 64),
        "device": device,
    }
    tensors_ = [
        heads(**form),
        heads(tokens=11, count=count, **form),
        heads(tokens=11, count=count, **form),
    ]
    if isinstance(options.get("attn_mask"), torch.Tensor):
        strides = options["attn_mask"].stride()
        mask = options["attn_mask"].to(device)
        is_scores = mask.is_floating_point()
        options["attn_mask"] = mask.to(form["dtype"]) if is_scores and 0 not in strides else mask
        if is_scores and 0 in strides:
            options["attn_mask"] = mask[:, :1, :1].to(form["dtype"]).expand(mask.shape)
    if is_direct:
        tensors_ = [x.transpose(1, 2) for x in tensors_]
        options.pop("attention_kwargs", None)
        ours, own = processors.scaled_dot_product_attention, F.scaled_dot_product_attention
    else:
        ours, own = processors.dispatch_attention_fn, attention_dispatch.dispatch_attention_fn
    outcomes = []
    calls = {}
    for function in (ours, own):
        try:
            with torch.no_grad():
                if function is ours:
                    calls = kernel_calls(lambda: ours(*tensors_, **options))
                outcomes.append(function(*tensors_, **options))
        except (RuntimeError, ValueError) as error:
            outcomes.append(str(error))
    return calls, *outcomes


@pytest.mark.parametrize("is_direct", [False, True], ids=["dispatch", "sdpa"])
@pytest.mark.parametrize("case", [*CALLS, *OTHER_CALLS])
def test_attention_calls(kernel, device, case, is_direct):
    """Every argument is honoured, by the kernel or by the function that it stands in for."""
    options = {**CALLS, **OTHER_CALLS}[case]
    if is_direct and ("backend" in options or case == "booleans of two dimensions"):
        pytest.skip("PyTorch's function knows no such argument")
    calls, out, expected = attention_calls(kernel, device, options, is_direct)
    assert calls == ({"attention": 1} if case in CALLS else {})
    if isinstance(expected, str):
        assert out == expected
    elif case in CALLS:
        torch.testing.assert_close(out, expected, rtol=0.03, atol=0.03)
    else:
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def test_a_sample_without_keys_gives_zeros(kernel, device):
    """What PyTorch gives for it is not the same on every device."""
    mask = torch.tensor([[True] * 11, [False] * 11])[:, None, None]
    calls, out, _ = attention_calls(kernel, device, {"attn_mask": mask}, True)
    assert calls == {"attention": 1}
    assert out[0].any() and not out[1].any()


def test_dropout_is_passed_on(kernel, device):
    """What PyTorch's kernels leave out of it differs from device to device, that they do does not."""
    torch.manual_seed(0)
    calls, out, _ = attention_calls(kernel, device, {"dropout_p": 0.5}, True)
    torch.manual_seed(0)  # the same tensors
    _, whole, expected = attention_calls(kernel, device, {}, True)
    assert calls == {}
    torch.testing.assert_close(whole, expected, rtol=0.03, atol=0.03)
    assert not torch.allclose(out.float(), whole.float(), atol=0.1)


# --------------------------------------------------------------------------------------------------
# Attention in models


@pytest.mark.parametrize(
    "small, name",
    # Cosmos' processors know no backend of their own: that of all models is changed.
    [(COSMOS, "_native_math"), (HUNYUAN, "_native_math"), (HUNYUAN, "native")],
    ids=str,
)
@either_order
def test_attention_backend_of_the_model(kernel, device, small, name, is_injected_first):
    model, plain, arguments = pair(small, device)
    if is_injected_first:
        kernel.inject_kernels(model)
        assert "attention" in kernel_calls(run, model, arguments)
    model.set_attention_backend(name)
    plain.set_attention_backend(name)
    report = kernel.inject_kernels(model)
    calls = kernel_calls(run, model, arguments)
    assert calls and "attention" not in calls
    counts = on_kernels(report)
    run(model, arguments)
    assert on_kernels(report)["Attention"] == counts["Attention"]
    assert_alike(small, model, plain)
    model.reset_attention_backend()
    registry = attention_dispatch._AttentionBackendRegistry
    registry.set_active_backend(attention_dispatch.AttentionBackendName.NATIVE)
    assert "attention" in kernel_calls(run, model, arguments)


def test_attention_backend_by_context_manager(kernel, device):
    model, plain, arguments = pair(COSMOS, device)
    kernel.inject_kernels(model)
    with attention_dispatch.attention_backend("_native_math"):
        assert "attention" not in kernel_calls(run, model, arguments)
        assert_alike(COSMOS, model, plain)
    assert "attention" in kernel_calls(run, model, arguments)


@pytest.mark.parametrize("small", [COSMOS, UNET], ids=str)
def test_scores_are_skipped_by_a_function_mode(kernel, device, small):
    model, plain, arguments = pair(small, device)
    kernel.inject_kernels(model)
    full = run(model, arguments)
    with AttentionScoreSkipFunctionMode():
        assert "attention" not in kernel_calls(run, model, arguments)
        assert_alike(small, model, plain)
        assert not torch.equal(run(model, arguments), full)


@pytest.mark.parametrize("what", ["skip_attention", "skip_attention_scores", "skip_ff"])
@either_order
def test_layer_skip(kernel, device, what, is_injected_first):
    """Which looks processors up by their exact class."""
    model, plain, arguments = pair(COGVIEW, device)
    untouched = run(plain, arguments)
    skips = {"skip_attention": False, "skip_attention_scores": False, "skip_ff": False, what: True}
    if is_injected_first:
        kernel.inject_kernels(model)
    for candidate in (model, plain):
        config = LayerSkipConfig(indices=[1], fqn="transformer_blocks", **skips)
        apply_layer_skip(candidate, config)
    kernel.inject_kernels(model)
    assert "layer_norm_modulate" in kernel_calls(run, model, arguments)
    assert_alike(COGVIEW, model, plain)
    assert distance(run(plain, arguments), untouched) > 0.05


def ip_adapter(unet, tokens=4, size=16):
    """Weights of an IP-Adapter for each cross-attention, and of the projection of an image's embedding."""
    torch.manual_seed(3)
    weights, key = {}, 1
    for name in unet.attn_processors:
        if name.endswith("attn1.processor"):
            continue
        hidden = unet.get_submodule(name.removesuffix(".processor")).to_q.out_features
        for part in ("k", "v"):
            weights[f"{key}.to_{part}_ip.weight"] = torch.randn(hidden, 24) * 0.2
        key += 2
    projection = {
        "proj.weight": torch.randn(tokens * 24, size),
        "proj.bias": torch.randn(tokens * 24),
        "norm.weight": torch.rand(24) + 0.5,
        "norm.bias": torch.randn(24),
    }
    return {"image_proj": projection, "ip_adapter": weights}


@either_order
def test_ip_adapter(kernel, device, is_injected_first):
    """It makes processors by the classes of those that it finds, and replaces all of them."""
    model, plain, arguments = pair(UNET, device)
    arguments["added_cond_kwargs"] = {
        "image_embeds": [torch.randn(2, 1, 16, device=device, dtype=BFLOAT16)]
    }
    if is_injected_first:
        kernel.inject_kernels(model)
    state_dict = ip_adapter(plain)
    for candidate in (model, plain):
        candidate._load_ip_adapter_weights([copy.deepcopy(state_dict)], low_cpu_mem_usage=False)
        candidate.to(device, BFLOAT16)
    kernel.inject_kernels(model)
    classes = collections.Counter(type(p) for p in model.attn_processors.values())
    assert classes == {AttnProcessor2_0: 4, IPAdapterAttnProcessor2_0: 4}
    # Each of the four cross-attentions attends to the text, and to the image.
    assert kernel_calls(run, model, arguments)["attention"] == 12
    assert distance(run(model, arguments), run(plain, arguments)) < 0.03
    kernel.eject_kernels(model)
    assert torch.equal(run(model, arguments), run(plain, arguments))


def test_processors_stay_diffusers_own(kernel, device):
    model, plain, arguments = pair(UNET, device)
    before = dict(model.attn_processors)
    kernel.inject_kernels(model)
    run(model, arguments)
    assert all(model.attn_processors[name] is processor for name, processor in before.items())
    assert {type(processor) for processor in before.values()} == {AttnProcessor2_0}
    model.set_default_attn_processor()
    plain.set_default_attn_processor()
    # The default one computes attention without a function for it: nothing of the package's is in it.
    assert "attention" not in kernel_calls(run, model, arguments)
    assert_alike(UNET, model, plain)
    model.set_attn_processor({name: type(p)() for name, p in before.items()})
    assert kernel_calls(run, model, arguments)["attention"] == UNET.attends


class OwnProcessor(AttnProcessor2_0):
    def __call__(self, *args, **kwargs):
        return 0.5 * super().__call__(*args, **kwargs)


class OtherProcessor:
    def __call__(self, attn, hidden_states, **_):
        return attn.to_out[0](attn.to_q(hidden_states))


@pytest.mark.parametrize("cls", [OwnProcessor, OtherProcessor, AttnProcessor])
@either_order
def test_a_processor_of_the_users_own(kernel, device, cls, is_injected_first):
    model, plain, arguments = pair(UNET, device)
    if is_injected_first:
        kernel.inject_kernels(model)
    for candidate in (model, plain):
        candidate.mid_block.attentions[0].transformer_blocks[0].attn1.set_processor(cls())
    report = kernel.inject_kernels(model)
    assert kernel_calls(run, model, arguments)["attention"] == UNET.attends - 1
    assert_alike(UNET, model, plain)
    name = "mid_block.attentions.0.transformer_blocks.0.attn1"
    said = {**fallen_back(report), **{e.name: e.reason for e in report.left_alone}}
    assert "whose attention is its own" in str(said[name])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_that_a_module_repeats_for_its_heads(kernel, device, mode):
    """It is known by who made it."""
    small = BY_NAME["pixart"]
    model, plain, arguments = pair(small, device)
    kernel.inject_kernels(model)
    with mode():
        assert kernel_calls(lambda: model(**arguments))["attention"] == 4
    assert distance(run(model, arguments), run(plain, arguments)) < 0.03
    attn = model.transformer_blocks[0].attn2
    module = kernel.injection.attention_processors._Attention(attn, None)
    mask = torch.zeros(2, 1, 6, device=device)
    made = module.prepare_attention_mask(mask, 6, 2).view(2, 2, 1, 6)
    assert module.has_repeated(made) and not module.has_repeated(made + 1)


def test_fused_projections(kernel, device):
    model, plain, arguments = pair(UNET, device)
    kernel.inject_kernels(model)
    for candidate in (model, plain):
        candidate.fuse_qkv_projections()
    assert kernel_calls(run, model, arguments)["attention"] == UNET.attends
    assert_alike(UNET, model, plain)
    model.unfuse_qkv_projections()
    assert kernel_calls(run, model, arguments)["attention"] == UNET.attends


@pytest.mark.parametrize("where", ["dispatch_attention_fn", "logger", "torch"])
def test_names_of_a_processors_module_that_are_replaced(kernel, device, monkeypatch, where):
    """What somebody has put there is what runs, and the rest stays on the kernels."""
    model, plain, arguments = pair(COSMOS, device)
    kernel.inject_kernels(model)
    run(model, arguments)
    if where != "dispatch_attention_fn":
        stand_in = _Namespace(vars(transformer_cosmos).get(where, torch))
        monkeypatch.setattr(transformer_cosmos, where, stand_in, raising=False)
        assert kernel_calls(run, model, arguments)["attention"] == COSMOS.attends
        assert where == "logger" or stand_in.used > 0
        return
    own = transformer_cosmos.dispatch_attention_fn

    def halved(*args, **kwargs):
        return 0.5 * own(*args, **kwargs)

    monkeypatch.setattr(transformer_cosmos, "dispatch_attention_fn", halved)
    assert "attention" not in kernel_calls(run, model, arguments)
    assert_alike(COSMOS, model, plain)
    monkeypatch.undo()
    assert kernel_calls(run, model, arguments)["attention"] == COSMOS.attends


class _Namespace:
    def __init__(self, module):
        self._module, self.used = module, 0

    def __getattr__(self, name):
        self.used += 1
        return getattr(self._module, name)


UNET_OPERATIONS = {
    *("group_norm", "layer_norm", "gated_residual_layer_norm_modulate", "gated_residual"),
    *("attention", "geglu"),
}


@pytest.mark.parametrize("function", ["layer_norm", "gelu", "scaled_dot_product_attention"])
def test_functions_of_pytorch_that_are_replaced(kernel, device, monkeypatch, function):
    model, plain, arguments = pair(UNET, device)
    report = kernel.inject_kernels(model)
    own = getattr(F, function)

    def halved(*args, **kwargs):
        return 0.5 * own(*args, **kwargs)

    untouched = run(plain, arguments)
    monkeypatch.setattr(F, function, halved)
    assert_alike(UNET, model, plain)
    assert distance(run(plain, arguments), untouched) > 0.03
    calls = kernel_calls(run, model, arguments)
    missing = {
        "layer_norm": {"layer_norm", "gated_residual_layer_norm_modulate"},
        "gelu": {"geglu"},
        "scaled_dot_product_attention": {"attention"},
    }[function]
    assert calls.keys() == UNET_OPERATIONS - missing
    if missing != {"attention"}:
        reasons = {reason for calls in fallen_back(report).values() for reason in calls}
        assert any(reason.endswith(f"{function} was replaced") for reason in reasons)


def test_patched_classes(kernel, device, monkeypatch):
    model, plain, arguments = pair(COSMOS, device)
    kernel.inject_kernels(model)
    for cls in (normalization.RMSNorm, transformer_cosmos.CosmosAdaLayerNormZero, nn.LayerNorm):
        own = cls.forward

        def counted(self, *args, _own=own, **kwargs):
            counted.calls += 1
            return _own(self, *args, **kwargs)

        counted.calls = 0
        with monkeypatch.context() as patch:
            patch.setattr(cls, "forward", counted)
            run(plain, arguments)
            expected, counted.calls = counted.calls, 0
            assert expected > 0
            assert_alike(COSMOS, model, plain)
            counted.calls = 0
            run(model, arguments)
            assert counted.calls == expected


# --------------------------------------------------------------------------------------------------
# torch.compile


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("name", ["cosmos", "unet"])
def test_compiled(kernel, device, name):
    """In one graph, compiled once, which holds attention; Inductor is left the rest."""
    small = BY_NAME[name]
    model, plain, _ = pair(small, device)
    kernel.inject_kernels(model)
    counter = CompileCounterWithBackend("eager")
    model.compile(fullgraph=True, backend=counter)
    for seed in range(2):
        arguments = small.arguments(device, BFLOAT16, seed)
        assert distance(run(model, arguments), run(plain, arguments)) < 0.03
    assert counter.frame_count == 1
    targets = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert sum("attention" in target and "h100" in target for target in targets) == small.attends
    assert not any("norm" in target and "h100" in target for target in targets)


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_blocks(kernel, device):
    """Those of a class are compiled once."""
    model, plain, arguments = pair(HUNYUAN, device, num_layers=3, num_single_layers=2)
    kernel.inject_kernels(model)
    counter = CompileCounterWithBackend("eager")
    model.compile_repeated_blocks(fullgraph=True, backend=counter)
    expected = run(plain, arguments)
    assert distance(run(model, arguments), expected) < 0.03
    plain_counter = CompileCounterWithBackend("eager")
    plain.compile_repeated_blocks(fullgraph=True, backend=plain_counter)
    assert torch.equal(run(plain, arguments), expected)
    assert counter.frame_count == plain_counter.frame_count
    targets = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert sum("attention" in target and "h100" in target for target in targets) >= 2


# --------------------------------------------------------------------------------------------------
# Hooks, adapters, offloading, training


def scale_output(module, args, output):
    return [0.5 * x for x in output] if isinstance(output, (tuple, list)) else 0.5 * output


@pytest.mark.parametrize(
    "path",
    [
        "transformer_blocks.0.norm1",
        "transformer_blocks.0.norm1.norm",
        "transformer_blocks.0.norm1.linear_1",
        "transformer_blocks.0.attn1",
        "transformer_blocks.0.attn1.to_k",
        "transformer_blocks.0.attn1.norm_q",
        "transformer_blocks.0.ff.net.0",
    ],
)
@either_order
def test_hooks_that_change_what_is_computed(kernel, device, path, is_injected_first):
    model, plain, arguments = pair(COSMOS, device)
    untouched = run(plain, arguments)
    if is_injected_first:
        kernel.inject_kernels(model)
    handles = [c.get_submodule(path).register_forward_hook(scale_output) for c in (model, plain)]
    kernel.inject_kernels(model)
    assert_alike(COSMOS, model, plain)
    assert not torch.equal(run(plain, arguments), untouched)
    for handle in handles:
        handle.remove()
    assert distance(run(model, arguments), untouched) < 0.03


def test_global_hooks_see_the_same_modules(kernel, device):
    seen = []
    for small in (COSMOS, UNET):
        model, plain, arguments = pair(small, device, torch.float32)
        kernel.inject_kernels(model)
        for candidate in (model, plain):
            names = {module: name for name, module in candidate.named_modules()}
            calls = []
            handle = nn.modules.module.register_module_forward_hook(
                lambda module, args, output, calls=calls, names=names: calls.append(
                    names.get(module)
                )
            )
            try:
                run(candidate, arguments)
            finally:
                handle.remove()
            seen.append(calls)
        # GELU is one module with the linear layer in it, and the same in the families.
        mine, plains = (
            [name for name in calls if not name or not name.endswith("ff.net.0.proj")]
            for calls in seen[-2:]
        )
        assert mine == plains


@some_models
def test_offloading(kernel, device, small):
    """Each layer's weights come for its call alone."""
    model, plain, arguments = pair(small, device)
    kernel.inject_kernels(model)
    accelerate.cpu_offload(model, execution_device=torch.device(device), offload_buffers=False)
    assert "attention" in kernel_calls(run, model, arguments)
    assert distance(run(model, arguments), run(plain, arguments)) < 0.03
    remove_hook_from_submodules(model)
    kernel.eject_kernels(model)


@some_models
def test_lora(kernel, device, small):
    model, plain, arguments = pair(small, device)
    kernel.inject_kernels(model)
    untouched = run(plain, arguments)
    for candidate in (model, plain):
        torch.manual_seed(1)
        targets = ["to_q", "to_v", "net.0.proj"]
        config = LoraConfig(r=4, lora_alpha=32, init_lora_weights=False, target_modules=targets)
        candidate.add_adapter(config)
    assert "attention" in kernel_calls(run, model, arguments)
    assert_alike(small, model, plain)
    assert distance(run(plain, arguments), untouched) > 0.05


@pytest.mark.parametrize("small", [HUNYUAN, COGVIEW], ids=str)
@either_order
def test_first_block_cache(kernel, device, small, is_injected_first):
    model, plain, arguments = pair(small, device)
    if is_injected_first:
        kernel.inject_kernels(model)
    results = []
    for candidate in (model, plain):
        candidate.enable_cache(FirstBlockCacheConfig(threshold=0.2))
        if candidate is model:
            kernel.inject_kernels(model)
        with candidate.cache_context("test"):
            results.append([run(candidate, arguments) for _ in range(3)])
    for out, expected in zip(*results, strict=True):
        assert distance(out, expected) < 0.05


@pytest.mark.parametrize("name", ["pixart", "cogvideox", "unet"])
def test_vmap(kernel, device, name):
    small = BY_NAME[name]
    model, plain, arguments = pair(small, device)
    kernel.inject_kernels(model)
    (key,) = {"sample", "hidden_states"} & arguments.keys()
    samples = torch.stack([arguments[key], arguments[key].flip(0)])

    def forward(x):
        return model(**{**arguments, key: x}, return_dict=False)[0]

    with torch.no_grad():
        try:
            torch.vmap(lambda x: plain(**{**arguments, key: x}, return_dict=False)[0])(samples)
        except RuntimeError:
            pytest.skip("PyTorch's own attention has no rule for it on this device")
        out = torch.vmap(forward)(samples)
    for mine, x in zip(out, samples, strict=True):
        assert distance(mine.flatten(), run(plain, {**arguments, key: x})) < 0.03


@some_models
def test_gradients(kernel, device, small):
    """The derivatives are PyTorch's own, and nothing is counted as a fall-back."""
    model, plain, arguments = pair(small, device, torch.float32)
    report = kernel.inject_kernels(model)
    gradients = []
    for candidate in (model, plain):
        candidate.train()
        for tensor in tensors(candidate(**arguments, return_dict=False)):
            tensor.square().sum().backward()
        gradients.append({n: p.grad for n, p in candidate.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and gradients[0]
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(
            gradients[0][name], gradient, rtol=1e-4, atol=1e-4 * gradient.abs().max().item()
        )
    assert fallen_back(report) == {}


def test_gradient_checkpointing(kernel, device):
    model, plain, arguments = pair(COSMOS, device, torch.float32)
    kernel.inject_kernels(model)
    gradients = []
    for candidate in (model, plain):
        candidate.train()
        candidate.enable_gradient_checkpointing()
        candidate(**arguments, return_dict=False)[0].square().sum().backward()
        gradients.append(candidate.transformer_blocks[0].attn1.to_q.weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@some_models
def test_autocast_runs_the_models_own_code(kernel, device, small):
    model, plain, arguments = pair(small, device, torch.float32)
    report = kernel.inject_kernels(model)
    with torch.autocast(device, dtype=BFLOAT16):
        assert kernel_calls(run, model, arguments) == {}
        # Kernels of PyTorch's are chosen by strides, too.
        assert distance(run(model, arguments), run(plain, arguments)) < 0.01
    reasons = {reason for calls in report.calls for reason in calls.fell_back}
    assert "autocast is on" in reasons


def test_strict(kernel, device, monkeypatch):
    model = HUNYUAN.model(device, BFLOAT16)
    kernel.inject_kernels(model)
    monkeypatch.setenv("H100_DIFFUSERS_KERNELS_STRICT", "1")
    with pytest.raises(RuntimeError, match="its mask differs between queries or heads"):
        run(model, HUNYUAN.arguments(device, BFLOAT16))


# --------------------------------------------------------------------------------------------------
# Copies, saving, threads


@some_models
def test_copies(kernel, device, small):
    model, plain, arguments = pair(small, device)
    report = kernel.inject_kernels(model)
    duplicate = copy.deepcopy(model)
    expected = run(model, arguments)
    counts = on_kernels(report)
    assert torch.equal(run(duplicate, arguments), expected)
    assert on_kernels(report) == counts
    again = kernel.inject_kernels(duplicate)
    assert again.already_injected and again.levels == {"": "in part"}
    kernel.eject_kernels(model)
    assert torch.equal(run(duplicate, arguments), expected)
    kernel.eject_kernels(duplicate)
    assert torch.equal(run(duplicate, arguments), run(plain, arguments))


def test_saved_and_loaded(kernel, device, tmp_path):
    model, plain, arguments = pair(UNET, device)
    kernel.inject_kernels(model)
    model.save_pretrained(tmp_path)
    loaded = UNet2DConditionModel.from_pretrained(tmp_path, torch_dtype=BFLOAT16).to(device)
    assert kernel_calls(run, loaded, arguments) == {}
    assert torch.equal(run(loaded, arguments), run(plain, arguments))
    model.load_state_dict(plain.state_dict())
    with pytest.raises(TypeError, match="cannot be pickled"):
        torch.save(model, tmp_path / "model.pt")


def test_memory_is_given_back_without_the_collector(kernel, device):
    model, _, arguments = pair(COSMOS, device)
    kernel.inject_kernels(model)
    run(model, arguments)
    references = [weakref.ref(module) for module in model.transformer_blocks[0].modules()]
    gc.collect()
    gc.disable()
    try:
        del model
        alive = [reference() for reference in references if reference() is not None]
    finally:
        gc.enable()
    assert not alive


def test_threads(kernel, device):
    """Two models at once, of which one has chosen another backend, count and compute by themselves."""
    arguments = HUNYUAN.arguments(device, BFLOAT16)
    models = [HUNYUAN.model(device, BFLOAT16, seed) for seed in range(2)]
    models[1].set_attention_backend("_native_math")
    attention_dispatch._AttentionBackendRegistry.set_active_backend(
        attention_dispatch.AttentionBackendName.NATIVE
    )
    reports = [kernel.inject_kernels(model) for model in models]
    expected = [run(model, arguments) for model in models]
    results = {}

    def work(i):
        with torch.inference_mode():
            results[i] = [run(models[i], arguments) for _ in range(4)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        assert len(results[i]) == 4
        assert all(distance(result, expected[i]) < 0.03 for result in results[i])
    assert [on_kernels(report)["Attention"] for report in reports] == [5 * HUNYUAN.attends, 0]


# --------------------------------------------------------------------------------------------------
# What is injected


def test_pipeline(kernel, device, caplog):
    """Its denoisers, each to its level, and nothing else of it."""

    class Pipeline:
        components = {
            "transformer": ltx_models.transformer(device),
            "unet": UNET.model(device, BFLOAT16),
            "controlnet": BY_NAME["controlnet"].model(device, BFLOAT16),
            "adapter": diffusers.T2IAdapter(channels=[8], num_res_blocks=1),
            "vae": ltx_models.pipeline(device).vae,
            "text_encoder": nn.Sequential(nn.LayerNorm(4)),
            "scheduler": object(),
        }

    pipe = Pipeline()
    with caplog.at_level(logging.INFO):
        report = kernel.inject_kernels(pipe)
    assert report.levels == {
        "transformer": "in full",
        "unet": "in part",
        "controlnet": "in part",
        "adapter": "not at all",
        "vae": "not at all",
        "text_encoder": "not at all",
    }
    assert "unet: in part" in caplog.text
    left = {entry.name: entry.reason for entry in report.left_alone}
    assert left["vae"] == left["text_encoder"] == "it is no denoising model of diffusers"
    assert left["adapter"] == "it has no module that there is a kernel for"
    replaced = {entry.name.partition(".")[0] for entry in report.replaced}
    assert replaced == {"transformer", "unet", "controlnet"}
    assert kernel.inject_kernels(pipe).already_injected
    kernel.eject_kernels(pipe)
    assert kernel_calls(run, pipe.components["unet"], UNET.arguments(device, BFLOAT16)) == {}


def test_an_autoencoder_by_itself(kernel, device):
    """Given by itself it is what the user wants."""
    vae = diffusers.AutoencoderKL(block_out_channels=(32,), norm_num_groups=8).to(device)
    report = kernel.inject_kernels(vae)
    assert report.levels == {"": "in part"}
    assert {entry.module for entry in report.replaced} == {"ResnetBlock2D", "GroupNorm"}
    assert {entry.module for entry in report.left_alone} == {"Attention"}


def test_modules_of_no_library(kernel, device):
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.RMSNorm(8, eps=1e-6))
    model = model.to(device)
    plain, x = copy.deepcopy(model), torch.randn(3, 8, device=device)
    report = kernel.inject_kernels(model)
    assert [entry.name for entry in report.replaced] == ["1", "3"]
    assert report.levels == {"": "in part"}
    with torch.no_grad():
        assert kernel_calls(model, x) == {"layer_norm": 1, "rms_norm": 1}
        torch.testing.assert_close(model(x), plain(x))
    kernel.eject_kernels(model)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


def test_a_compiled_module_of_no_library(kernel, device):
    model = torch.compile(nn.Sequential(nn.LayerNorm(8)).to(device), backend="eager")
    assert [entry.name for entry in kernel.inject_kernels(model).replaced] == ["_orig_mod.0"]
    assert kernel.inject_kernels(model).already_injected
    kernel.eject_kernels(model)
    assert not kernel.inject_kernels(model).already_injected


@pytest.mark.parametrize("make", [lambda: nn.Linear(2, 2), lambda: nn.Sequential()])
def test_nothing_to_inject(kernel, make):
    with pytest.raises(
        ValueError, match="inject_kernels: pipe_or_model must be or hold a .* got a"
    ):
        kernel.inject_kernels(make())


def test_a_pipeline_with_nothing_to_inject(kernel, device):
    pipe = ltx_models.pipeline(device)
    pipe.transformer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="got a LTXPipeline without one"):
        kernel.inject_kernels(pipe)


def test_all_or_nothing(kernel, device, monkeypatch):
    model, plain, arguments = pair(UNET, device)
    put_in, count = kernel.injection.inject.put_in, 0

    def fails(stand_in):
        nonlocal count
        count += 1
        if count == 9:
            raise MemoryError("none left")
        put_in(stand_in)

    monkeypatch.setattr(kernel.injection.inject, "put_in", fails)
    with pytest.raises(MemoryError, match="none left"):
        kernel.inject_kernels(model)
    assert kernel_calls(run, model, arguments) == {}
    assert torch.equal(run(model, arguments), run(plain, arguments))
    assert not any("forward" in vars(module) for module in model.modules())


def test_every_tensor_of_the_inputs_is_untouched(kernel, device):
    model, _, arguments = pair(HUNYUAN, device)
    kernel.inject_kernels(model)
    before = [tensor.clone() for tensor in tensors_of(arguments)]
    run(model, arguments)
    assert all(torch.equal(*both) for both in zip(tensors_of(arguments), before, strict=True))
