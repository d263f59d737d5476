"""Models without a family, injected in part: norms, activations and attentions one by one."""

import collections
import copy
import functools
import logging

import diffusers
import pytest
import torch
import torch.nn.functional as F
from diffusers import FirstBlockCacheConfig
from diffusers.hooks import LayerSkipConfig, apply_layer_skip
from diffusers.models import attention_dispatch, normalization
from diffusers.models.attention_processor import AttnProcessor2_0, IPAdapterAttnProcessor2_0
from diffusers.models.transformers import transformer_minimax_music3
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import parametrize

import ltx_models
from changes import image_embeds, load_ip_adapter
from checks import relative_distance, tensors_of
from injected_pairs import (
    assert_alike,
    assert_as_close_as_eager,
    assert_gradients_agree,
    assert_same_outcome,
    fallen_back,
    injected,
    on_kernels,
    outcome,
    reasons_of,
)
from ltx_models import either_order, kernel_calls, operation_of
from small_models import BY_NAME, MODELS, run, to

pytestmark = [pytest.mark.usefixtures("_one_thread", "_default_backend")]

MUSIC, UNET, AUDIO = (BY_NAME[name] for name in ("minimax_music3", "unet", "stable_audio"))
COGVIEW = BY_NAME["cogview4"]
some_models = pytest.mark.parametrize("small", [MUSIC, UNET], ids=str)
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
# Of modules with more than one.
NORMS_OF_A_CALL = {
    "BasicTransformerBlock": 3,
    "ResnetBlock2D": 2,
}
UNETS = (diffusers.UNet2DConditionModel, diffusers.ControlNetModel)
MID_ATTENTION = "mid_block.attentions.0.transformer_blocks.0.attn1"


def pair(small, kernel, device, change=None, dtype=BFLOAT16, **options):
    """(injected, plain, report, arguments)"""
    plain = small.model(device, dtype)
    return *injected(kernel, plain, change, **options), small.arguments(device, dtype)


def attentions(model, arguments):
    """The number of attention calls on the kernel, in a forward with other operations on kernels."""
    calls = kernel_calls(run, model, arguments)
    assert calls
    return calls.get("attention", 0)


@pytest.mark.drawn(times=0, period=5)
@pytest.mark.parametrize(
    ("small", "dtype"), [*((small, BFLOAT16) for small in MODELS), (MUSIC, torch.float16)], ids=str
)
def test_16_bits(kernel, device, small, dtype):
    """As close to the float32 model as eager, attention on the kernel, and the same bits after ejection."""
    model, plain, report, arguments = pair(small, kernel, device, dtype=dtype)
    before = [tensor.clone() for tensor in tensors_of(arguments)]
    level = "in full" if isinstance(plain, UNETS) else "in part"
    assert report.levels == {"": level} and f"the model: {level}" in str(report)
    calls = kernel_calls(run, model, arguments)
    assert calls.get("attention", 0) == small.attends
    group_norms = [module for module in plain.modules() if type(module) is nn.GroupNorm]
    assert calls.get("group_norm", 0) == len(group_norms)
    counted = {name: n * NORMS_OF_A_CALL.get(name, 1) for name, n in on_kernels(report).items()}
    norms = sum(n for name, n in counted.items() if "Norm" in name or name in NORMS_OF_A_CALL)
    assert norms == sum(n for name, n in calls.items() if "norm" in name)
    assert counted.get("Attention", 0) <= small.attends
    assert_as_close_as_eager(model, plain, lambda dtype, seed: small.arguments(device, dtype, seed))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(torch.equal(*both) for both in zip(tensors_of(arguments), before, strict=True))
    kernel.eject_kernels(model)
    assert torch.equal(run(model, arguments), run(plain, arguments))
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("small", MODELS, ids=str)
def test_float32(kernel, device, small):
    """Attention is the model's own, and the error beside float64 is the plain model's."""
    model, plain, report, arguments = pair(small, kernel, device, dtype=FLOAT32)
    assert attentions(model, arguments) == 0
    exact = run(copy.deepcopy(plain).double(), to(arguments, device, torch.float64))
    error, its_error = (relative_distance(run(m, arguments), exact) for m in (model, plain))
    assert error <= 1.25 * its_error  # of sums in another order
    reason = "attention itself is the model's own: no kernel for float32"
    attended = [entry.name for entry in report.left_alone if entry.reason == reason]
    assert attended or not small.attends
    assert fallen_back(report) == {}


@pytest.mark.parametrize("small", MODELS, ids=str)
def test_autocast(kernel, device, small):
    """The same bits as the model's own code, also if norms give float32, as under autocast on GPUs."""
    plain = small.model(device, FLOAT32).requires_grad_(False)
    model = copy.deepcopy(plain)
    kernel.inject_kernels(model)
    for module in (*model.modules(), *plain.modules()):
        if isinstance(module, nn.LayerNorm):
            module.register_forward_hook(lambda module, args, out: out.float())
    arguments = small.arguments(device, FLOAT32)
    with torch.autocast(device, BFLOAT16):
        out, expected = run(model, arguments), run(plain, arguments)
    assert relative_distance(out, expected) <= (0 if device == "cpu" else 1e-4)


def test_the_report_names_what_is_left_alone(kernel, device):
    report = kernel.inject_kernels(BY_NAME["unet_44"].model(device, BFLOAT16))
    reason = (
        "attention itself is the model's own: its heads have 44 elements; the kernel takes multiples of 8 "
        "up to 128"
    )
    assert reasons_of(report)[MID_ATTENTION] == reason
    model, _, report, arguments = pair(UNET, kernel, device, attention=False)
    reason = "attention itself is the model's own: requested by attention=False"
    assert reasons_of(report)[MID_ATTENTION] == reason
    assert attentions(model, arguments) == 0
    with pytest.raises(ValueError, match="call eject_kernels first"):
        kernel.inject_kernels(model)
    assert kernel.inject_kernels(model, attention=False).already_injected


NORMS = {
    "LayerNorm": lambda: nn.LayerNorm(24),
    "LayerNorm without bias": lambda: nn.LayerNorm(24, bias=False),
    "LayerNorm without weight": lambda: nn.LayerNorm(24, elementwise_affine=False),
    "torch RMSNorm": lambda: nn.RMSNorm(24, eps=1e-5),
    "torch RMSNorm without eps": lambda: nn.RMSNorm(24),
    "FP32LayerNorm": lambda: normalization.FP32LayerNorm(24),
    "RMSNorm": lambda: normalization.RMSNorm(24, 1e-5),
    "MochiRMSNorm": lambda: normalization.MochiRMSNorm(24, 1e-5),
}


def module_pair(kernel, device, *modules, dtype=BFLOAT16):
    """(injected, plain, report) of a user's module with such submodules."""
    torch.manual_seed(0)
    plain = nn.Sequential(*modules).to(device, dtype)
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    return injected(kernel, plain)


@pytest.mark.parametrize("x_dtype", [BFLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_each_norm_gives_its_own_dtype(kernel, device, name, dtype, x_dtype):
    """Computes it, or refuses it like its class, and refuses other sizes."""
    model, plain, report = module_pair(kernel, device, NORMS[name](), dtype=dtype)
    x = torch.randn(3, 5, 24, device=device).to(x_dtype)
    expected = assert_same_outcome(model, plain, x, slack=0.02)
    (calls,) = report.calls
    if not isinstance(expected, str):
        assert calls.on_kernels + sum(calls.fell_back.values()) == 1
        is_mixed = dtype != x_dtype and bool(list(plain.parameters()))
        keeps_dtype = name.startswith(("torch RMSNorm", "FP32LayerNorm", "MochiRMSNorm"))
        assert calls.on_kernels == int(not is_mixed or keeps_dtype)
    if dtype == x_dtype:
        # Of a picture's rows, as patches come out of a convolution.
        columns = torch.randn(2, 24, 7, device=device, dtype=dtype).transpose(1, 2)
        assert sum(kernel_calls(outcome, model, columns).values()) == 1
        assert_same_outcome(model, plain, columns, slack=0.02)
    assert_same_outcome(model, plain, x[..., :23], slack=0.02)
    assert_same_outcome(model, plain, 3e-4 * x, slack=0.02)  # eps matters
    assert outcome(model[0], x, x).startswith("TypeError")


class Doubled(nn.LayerNorm):
    def forward(self, x):
        return 2 * super().forward(x)


_linear = diffusers.models.activations.LinearActivation
LEFT_ALONE = {  # with the reason that the report gives, if it does
    "several dimensions": (nn.LayerNorm((3, 4)), "it normalizes over several dimensions"),
    "an eps of 1": (nn.RMSNorm(4, eps=1), "it has an eps of 1"),
    "a bias": (normalization.RMSNorm(4, 1e-5, bias=True), "it has a bias"),
    "a subclass": (Doubled(4), None),
    "mish": (_linear(4, 4, activation="mish"), None),
    "relu": (_linear(4, 4, activation="relu"), None),
    "silu": (_linear(4, 4, activation="silu"), None),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_modules_that_are_left_alone(kernel, device, case):
    module, reason = LEFT_ALONE[case]
    model, plain, report = module_pair(
        kernel, device, copy.deepcopy(module), nn.LayerNorm(4), dtype=FLOAT32
    )
    assert [entry.name for entry in report.replaced] == ["1"]
    assert reasons_of(report) == ({} if reason is None else {"0": reason})
    assert_same_outcome(model, plain, torch.randn(2, 3, 4, device=device), slack=1e-5)
    assert fallen_back(report) == {}


def test_modules_that_change(kernel, device):
    """A norm is parametrized, a SwiGLU gets another activation."""
    model, plain, report = module_pair(kernel, device, nn.LayerNorm(4), dtype=FLOAT32)
    for candidate in (model, plain):
        parametrize.register_parametrization(candidate[0], "weight", nn.Softplus())
    assert_same_outcome(model, plain, torch.randn(2, 4, device=device), slack=1e-5)
    model, plain, report = module_pair(kernel, device, ACTIVATIONS["swiglu"]())
    for candidate in (model, plain):
        candidate[0].activation = nn.Tanh()
    assert_same_outcome(model, plain, torch.randn(3, 16, device=device, dtype=BFLOAT16), slack=0)
    reason = "its activation is a torch.nn.modules.activation.Tanh"
    assert fallen_back(report) == {"0": {reason: 1}}


ACTIVATIONS = {
    "geglu": lambda: diffusers.models.activations.GEGLU(16, 24),
    "swiglu": lambda: diffusers.models.activations.SwiGLU(16, 24),
    "gelu": lambda: diffusers.models.activations.GELU(16, 24),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_each_activation(kernel, device, name):
    model, plain, report = module_pair(kernel, device, ACTIVATIONS[name]())
    x = torch.randn(50, 20, 16, device=device, dtype=BFLOAT16)
    with torch.no_grad():
        assert kernel_calls(model, x) == {name: 1}
        exact = copy.deepcopy(plain).float()(x.float())
        assert relative_distance(model(x), exact) <= 1.05 * relative_distance(plain(x), exact)
    assert [calls.on_kernels for calls in report.calls] == [2]


def test_modules_of_no_library(kernel, device):
    modules = nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.RMSNorm(8, eps=1e-6)
    model, plain, report = module_pair(kernel, device, *modules, dtype=FLOAT32)
    x = torch.randn(3, 8, device=device)
    assert [entry.name for entry in report.replaced] == ["1", "3"]
    assert report.levels == {"": "in part"}
    assert kernel_calls(outcome, model, x) == {"layer_norm": 1, "rms_norm": 1}
    assert_same_outcome(model, plain, x, slack=1e-5)
    kernel.eject_kernels(model)
    assert_same_outcome(model, plain, x, slack=0)
    compiled = torch.compile(model, backend="eager")
    names = [entry.name for entry in kernel.inject_kernels(compiled).replaced]
    assert names == ["_orig_mod.1", "_orig_mod.3"]
    assert kernel.inject_kernels(compiled).already_injected


def scores_of(*shape):
    return torch.randn(shape, dtype=BFLOAT16)


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
    "heads of 40": {"size": 40},
    "causal": {"is_causal": True},
}
OTHER_CALLS = {
    "scores of heads": {"attn_mask": scores_of(2, 4, 1, 11)},
    "scores of queries": {"attn_mask": scores_of(2, 1, 9, 11)},
    "scores of queries and keys": {"attn_mask": scores_of(9, 11)},
    "zero scale": {"scale": 0.0},
    "backend": {"backend": "_native_math"},
    "own backend": {"backend": "native"},
    "float32": {"dtype": torch.float32},
    "heads of 36": {"size": 36},
    "grouped without saying so": {"kv": 1},
}


def on_device(mask, device):
    """A mask with its strides, which show its broadcast dimensions."""
    is_expanded = 0 in mask.stride()
    return mask[:, :1, :1].to(device).expand(mask.shape) if is_expanded else mask.to(device)


def attention_calls(kernel, device, options, is_direct):
    """(called operators, the stand-in's result, the original function's result)."""
    kernel.injection.core.checks.look_up_libraries()  # as an injection does
    defaults = {"kv": 4, "dtype": BFLOAT16, "size": 64}
    count, dtype, size = ({**defaults, **options}[name] for name in defaults)
    options = {name: value for name, value in options.items() if name not in defaults}
    if "attn_mask" in options:
        options["attn_mask"] = on_device(options["attn_mask"], device)
    shapes = (2, 9, 4, size), (2, 11, count, size), (2, 11, count, size)
    given = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    name, own = "dispatch_attention_fn", attention_dispatch.dispatch_attention_fn
    if is_direct:
        given = [x.transpose(1, 2) for x in given]
        options.pop("attention_kwargs", None)
        name, own = "scaled_dot_product_attention", F.scaled_dot_product_attention
    replacement = getattr(kernel.injection.attention.processors, name)
    ours = functools.partial(replacement, False, **options)
    calls = kernel_calls(outcome, ours, *given)
    return calls, outcome(ours, *given), outcome(functools.partial(own, **options), *given)


@pytest.mark.parametrize("is_direct", [False, True], ids=["dispatch", "sdpa"])
@pytest.mark.parametrize("case", [*CALLS, *OTHER_CALLS])
def test_attention_calls(kernel, device, case, is_direct):
    """The kernel or the original function handles every argument."""
    options = {**CALLS, **OTHER_CALLS}[case]
    if is_direct and ("backend" in options or case == "booleans of two dimensions"):
        pytest.skip("PyTorch's function knows no such argument")
    calls, out, expected = attention_calls(kernel, device, options, is_direct)
    operator = "attention_blocks" if case == "causal" else "attention"
    assert calls == ({operator: 1} if case in CALLS else {})
    if isinstance(expected, str):
        assert out == expected
    else:
        slack = 0.03 if case in CALLS else 0
        torch.testing.assert_close(out, expected, rtol=slack, atol=slack, equal_nan=True)


def test_a_sample_without_keys_gives_zeros(kernel, device):
    """Compared with zeros, because PyTorch's result differs between devices."""
    mask = torch.tensor([[True] * 11, [False] * 11])[:, None, None]
    calls, out, _ = attention_calls(kernel, device, {"attn_mask": mask}, True)
    assert calls == {"attention": 1}
    assert out[0].any() and not out[1].any()


def test_dropout_is_passed_on(kernel, device):
    """Dropped elements differ between devices, so the test only checks that there is dropout."""
    torch.manual_seed(0)
    calls, out, _ = attention_calls(kernel, device, {"dropout_p": 0.5}, True)
    torch.manual_seed(0)  # the same tensors
    _, whole, _ = attention_calls(kernel, device, {}, True)
    assert calls == {}
    assert not torch.allclose(out.float(), whole.float(), atol=0.1)


@pytest.mark.parametrize("what", ["skip_attention", "skip_attention_scores", "skip_ff"])
def test_layer_skip(kernel, device, what):
    """It looks up processors by their exact class."""
    skips = {"skip_attention": False, "skip_attention_scores": False, "skip_ff": False, what: True}

    def skip(model):
        apply_layer_skip(model, LayerSkipConfig(indices=[1], fqn="transformer_blocks", **skips))

    model, plain, _, arguments = pair(COGVIEW, kernel, device, skip)
    assert "layer_norm_modulate" in kernel_calls(run, model, arguments)
    untouched = run(COGVIEW.model(device, BFLOAT16), arguments)
    assert_alike(model, plain, arguments, unlike=untouched, changed=0.05)


@either_order
def test_ip_adapter(kernel, device, is_injected_first):
    """It creates processors by the classes of the existing ones, and replaces all of them."""
    plain = UNET.model(device, BFLOAT16)
    model, arguments = copy.deepcopy(plain), UNET.arguments(device, BFLOAT16)
    arguments |= to(image_embeds(), device, BFLOAT16)
    if is_injected_first:
        kernel.inject_kernels(model)
    for candidate in (model, plain):
        load_ip_adapter(candidate)
        candidate.to(device, BFLOAT16)
    kernel.inject_kernels(model)
    classes = collections.Counter(type(p) for p in model.attn_processors.values())
    assert classes == {AttnProcessor2_0: 4, IPAdapterAttnProcessor2_0: 4}
    # Each of the four cross-attentions attends to the text, and to the image.
    assert kernel_calls(run, model, arguments)["attention"] == 12
    assert relative_distance(run(model, arguments), run(plain, arguments)) < 0.03
    kernel.eject_kernels(model)
    assert torch.equal(run(model, arguments), run(plain, arguments))


def test_processors_stay_diffusers_own(kernel, device):
    model, plain, _, arguments = pair(UNET, kernel, device)
    run(model, arguments)
    before = dict(model.attn_processors)
    assert {type(processor) for processor in before.values()} == {AttnProcessor2_0}
    for candidate in (model, plain):
        candidate.set_default_attn_processor()
    # The default processor computes attention inline, so nothing of it is replaced.
    assert attentions(model, arguments) == 0
    assert_alike(model, plain, arguments)
    model.set_attn_processor({name: type(p)() for name, p in before.items()})
    assert attentions(model, arguments) == UNET.attends


def test_a_mask_that_a_module_repeats_for_its_heads(kernel, device):
    """It is recognized by its origin: another mask of its shape may differ between heads."""
    attention = UNET.model(device, BFLOAT16).get_submodule(MID_ATTENTION)
    module = kernel.injection.attention.processors._Attention(attention)
    mask = torch.zeros(2, 1, 6, device=device)
    made = module.prepare_attention_mask(mask, 6, 2).view(2, 2, 1, 6)
    assert module.has_repeated(made) and not module.has_repeated(made + 1)


def test_fused_projections(kernel, device):
    model, plain, _, arguments = pair(
        UNET, kernel, device, lambda model: model.fuse_qkv_projections()
    )
    assert attentions(model, arguments) == UNET.attends
    assert_alike(model, plain, arguments)
    model.unfuse_qkv_projections()
    assert attentions(model, arguments) == UNET.attends


UNET_OPERATIONS = {
    *("group_norm", "layer_norm", "gated_residual_layer_norm_modulate", "gated_residual"),
    *("attention", "geglu"),
}
FUNCTIONS = {  # of a library, and the operations that are then left to the model
    "layer_norm": (UNET, F, {"layer_norm", "gated_residual_layer_norm_modulate"}),
    "gelu": (UNET, F, {"geglu"}),
    "scaled_dot_product_attention": (UNET, F, {"attention"}),
    "dispatch_attention_fn": (MUSIC, transformer_minimax_music3, {"attention"}),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_that_are_replaced(kernel, device, monkeypatch, function):
    small, owner, missing = FUNCTIONS[function]
    model, plain, report, arguments = pair(small, kernel, device)
    untouched, calls = run(plain, arguments), kernel_calls(run, model, arguments)
    assert small is not UNET or calls.keys() == UNET_OPERATIONS
    own = getattr(owner, function)
    with monkeypatch.context() as patch:
        patch.setattr(owner, function, lambda *args, **kwargs: -own(*args, **kwargs))
        assert_alike(model, plain, arguments, unlike=untouched, changed=0.03)
        assert kernel_calls(run, model, arguments).keys() == calls.keys() - missing
    reasons = {reason for found in fallen_back(report).values() for reason in found}
    is_said = any(reason.endswith(f"{function} was replaced") for reason in reasons)
    assert is_said or missing == {"attention"}
    assert kernel_calls(run, model, arguments) == calls


def operations(counter):
    """The package's operators in all compiled graphs."""
    nodes = [node for graph in counter.graphs for node in graph.graph.nodes]
    return [name for node in nodes if (name := operation_of(node.target, node.args)) is not None]


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("small", [MUSIC, pytest.param(UNET, marks=pytest.mark.slow)], ids=str)
def test_compiled(kernel, device, small):
    """One graph, compiled once, with attention in it; the rest is left to Inductor."""
    model, plain, _, _ = pair(small, kernel, device)
    counter = CompileCounterWithBackend("eager")
    model.compile(fullgraph=True, backend=counter)
    for seed in range(2):
        assert_alike(model, plain, small.arguments(device, BFLOAT16, seed), times=1)
    assert counter.frame_count == 1
    assert operations(counter).count("attention") == small.attends
    assert not any("norm" in name for name in operations(counter))


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_blocks(kernel, device):
    """Modules of a class are compiled once."""
    model, plain, _, arguments = pair(AUDIO, kernel, device)
    counters = [CompileCounterWithBackend("eager") for _ in range(2)]
    for candidate, counter in zip((model, plain), counters, strict=True):
        candidate._repeated_blocks = ["StableAudioDiTBlock"]  # diffusers names none
        candidate.compile_repeated_blocks(fullgraph=True, backend=counter)
    assert_alike(model, plain, arguments)
    assert counters[0].frame_count == counters[1].frame_count
    assert operations(counters[0]).count("attention") >= 1


def test_first_block_cache(kernel, device):
    model, plain, _, arguments = pair(COGVIEW, kernel, device)
    results = []
    for candidate in (model, plain):
        candidate.enable_cache(FirstBlockCacheConfig(threshold=0.2))
        with candidate.cache_context("test"):
            results.append([run(candidate, arguments) for _ in range(3)])
    for out, expected in zip(*results, strict=True):
        assert relative_distance(out, expected) < 0.05


@pytest.mark.parametrize("small", [MUSIC, UNET], ids=str)
def test_vmap(kernel, device, small):
    model, plain, _, arguments = pair(small, kernel, device)
    (key,) = {"sample", "hidden_states"} & arguments.keys()
    samples = torch.stack([arguments[key], arguments[key].flip(0)])

    def mapped(model):
        forward = lambda x: model(**{**arguments, key: x}, return_dict=False)[0]  # noqa: E731
        with torch.no_grad():
            return torch.vmap(forward)(samples)

    try:
        mapped(plain)
    except RuntimeError:
        pytest.skip("PyTorch's own attention has no rule for it on this device")
    assert kernel_calls(mapped, model) == {}
    for mine, x in zip(mapped(model), samples, strict=True):
        assert relative_distance(mine.flatten(), run(plain, {**arguments, key: x})) < 0.03


@pytest.mark.parametrize(
    ("small", "checkpointing"), [(MUSIC, False), (MUSIC, True), (UNET, False)], ids=str
)
def test_gradients(kernel, device, small, checkpointing):
    """Nothing is counted as a fallback."""

    def prepare(model):
        model.train()
        if checkpointing:
            model.enable_gradient_checkpointing()

    model, plain, report, arguments = pair(small, kernel, device, prepare, dtype=FLOAT32)
    assert_gradients_agree(model, plain, arguments)
    assert fallen_back(report) == {}


def test_strict(kernel, device, monkeypatch):
    model, _, _, arguments = pair(MUSIC, kernel, device)
    monkeypatch.setenv("H100_DIFFUSERS_KERNELS_STRICT", "1")
    with torch.autocast(device, BFLOAT16), pytest.raises(RuntimeError, match="autocast is on"):
        run(model, arguments)


def test_pipeline(kernel, device, caplog):
    """Its denoisers and autoencoders, each to its level."""

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
        "unet": "in full",
        "controlnet": "in full",
        "adapter": "not at all",
        "vae": "in part",
        "text_encoder": "not at all",
    }
    assert "unet: in full" in caplog.text
    left = {entry.name: entry.reason for entry in report.left_alone}
    assert left["text_encoder"].endswith("nor a text encoder of transformers")
    assert left["adapter"] == "it has no module that there is a kernel for"
    replaced = {entry.name.partition(".")[0] for entry in report.replaced}
    assert replaced == {"transformer", "unet", "controlnet", "vae"}
    assert kernel.inject_kernels(pipe).already_injected
    kernel.eject_kernels(pipe)
    assert kernel_calls(run, pipe.components["unet"], UNET.arguments(device, BFLOAT16)) == {}
