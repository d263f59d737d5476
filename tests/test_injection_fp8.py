"""Models whose linear layers torchao has quantized to FP8: what runs on the kernels, and how accurately."""

import collections
import copy
import functools

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import fp8_models
from adapters import add_lora
from checks import relative_distance
from families import FAMILIES, KERNEL_HEADS, every_family
from family_ltx2 import LTX23
from fp8_models import PER_ROW, PER_TENSOR, of_fp8, products, quantize, run_and_count
from injected_pairs import as_float32
from ltx_models import either_order
from small_models import BY_NAME, run

pytestmark = pytest.mark.usefixtures("_one_thread")

BFLOAT16 = torch.bfloat16
NORMS = ("norm_fp8", "gated_residual_norm_modulate_fp8")
PRODUCTS = {"linear_fp8", "linears_fp8", "linear_gelu_fp8", "linear_gelu_fp8_out"}
PRODUCTS |= {"linear_gated_residual_fp8", "products"}
QUANTIZATION = {"quantize_fp8", "quantize_fp8_out", "activation_fp8", "activation_fp8_out", *NORMS}
OPERATIONS = PRODUCTS | QUANTIZATION
LTX, FLUX = FAMILIES["ltx"], FAMILIES["flux"]
some_families = pytest.mark.parametrize(
    "family",
    [FAMILIES[n] for n in ("ltx", "flux", "flux2", "qwenimage", "wan", "sd3") if n in FAMILIES],
    ids=str,
)


def quantize_blocks(family, model, *args, **options):
    return sum(quantize(block, *args, **options) for block in family.blocks(model))


def prepared(family, device, *args, dtype=BFLOAT16, **options):
    """(model with quantized blocks, inputs, the number of quantized layers)"""
    model = family.model(device, dtype, **KERNEL_HEADS).requires_grad_(False)
    count = quantize_blocks(family, model, *args, **options)
    return model, family.inputs(device, dtype), count


def assert_as_close_as_eager(model, plain, make_arguments, forwards=4):
    """The distance of ``model`` from the float32 model with the dequantized weights is at most 1.05 times
    that of a model with the same weights that quantizes by PyTorch. The quotient of one forward of 24
    samples has a standard deviation of 1.6 to 4.7% between seeds, and of two samples one of 5 to 19%."""
    exact, eager = fp8_models.exact(plain), fp8_models.eager(plain)
    squares = torch.zeros(2, dtype=torch.float64)
    for seed in range(forwards):
        arguments = make_arguments(seed=seed)
        expected = run(exact, as_float32(arguments, BFLOAT16)).double()
        for i, candidate in enumerate((model, eager)):
            squares[i] += (run(candidate, arguments) - expected).square().sum().cpu()
    error, eager_error = squares.sqrt().tolist()
    assert eager_error > 0
    assert error <= 1.05 * eager_error, f"{error / eager_error:.3f} of the eager model's"


def in_batches(family, device, **options):
    return functools.partial(family.inputs, device, BFLOAT16, batch=24, **options)


# Families whose small models amplify the difference between two quantizations.
NOISY = (
    "bria_fibo2",
    "flux2",
    "glm_image",
    "hidream",
    "hunyuan_video",
    "krea2",
    "lumina2",
    "z_image",
)


def slack_of(family):
    return 0.1 if family.name in NOISY else 0.06


def assert_count(products, family, count):
    """Each layer is one product, except for those that are computed for each of two streams."""
    assert products > count if family.fp8_twice else products == count


def assert_close(out, expected, slack=0.06):
    assert (out.dtype, out.shape) == (expected.dtype, expected.shape)
    assert torch.isfinite(out).all()
    assert out.numel() == 0 or relative_distance(out, expected) <= slack


@pytest.mark.drawn(times=0, period=3)
@every_family
def test_accuracy(kernel, device, family):
    plain, _, _ = prepared(family, device)
    model = copy.deepcopy(plain)
    kernel.inject_kernels(model)
    assert_as_close_as_eager(model, plain, in_batches(family, device))


@every_family
@either_order
def test_calls(kernel, device, family, is_injected_first):
    """What quantizes: passes of their own, norms, activations (in products, or in passes of their own), and
    the attention's result beside an activation. Residuals are added in the last products."""
    model = family.model(device, BFLOAT16, **KERNEL_HEADS).requires_grad_(False)
    if is_injected_first:
        kernel.inject_kernels(model)
    count = quantize_blocks(family, model)
    if not is_injected_first:
        kernel.inject_kernels(model)
    calls = of_fp8(model, family.inputs(device, BFLOAT16))
    assert calls.keys() <= OPERATIONS
    names = ("quantize_fp8", *NORMS, "linear_gelu_fp8", "activation_fp8")
    names += ("quantize_fp8_out", "linear_gelu_fp8_out", "linear_gated_residual_fp8")
    assert [calls[name] for name in names] == family.fp8_calls
    assert calls["products"] == count + family.fp8_twice


def with_image(arguments):
    text = arguments["encoder_hidden_states"]
    return {**arguments, "encoder_hidden_states": (text, text.new_ones(len(text), 7, 20))}


# Configurations with other attentions or modulations: the family, the configuration, a change of the inputs,
# whether layers of gates are quantized, and the calls of ``quantize_fp8`` and of the norms.
VARIANTS = {
    "a replaced frame": (
        *("hunyuan_video", {"image_condition_type": "token_replace"}, dict, True),
        *(14, 6, 4),
    ),
    "LTX-2.3": ("ltx2", LTX23, dict, True, 16, 8, 12),
    "LTX-2.3 with gates in 16 bits": ("ltx2", LTX23, dict, False, 32, 0, 4),
    "an image as context": (
        *("cosmos", {"img_context_dim_in": 20, "img_context_dim_out": 128}, with_image, True),
        *(12, 6, 0),
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(kernel, device, variant):
    name, config, change, has_fp8_gates, *expected = VARIANTS[variant]
    family = FAMILIES[name]
    options = {"text_channels": (128, 128)} if config is LTX23 else {}
    plain = family.model(device, BFLOAT16, **KERNEL_HEADS, **config).requires_grad_(False)
    quantize_blocks(family, plain)
    for path, layer in plain.named_modules():
        if path.endswith("to_gate_logits") and not has_fp8_gates:
            layer.weight = nn.Parameter(layer.weight.dequantize(), requires_grad=False)
    model = copy.deepcopy(plain)
    report = kernel.inject_kernels(model)

    inputs = in_batches(family, device, **options)

    def make_arguments(seed=0):
        return change(inputs(seed=seed))

    calls = of_fp8(model, make_arguments())
    assert [calls[name] for name in ("quantize_fp8", *NORMS)] == expected
    assert calls.keys() <= OPERATIONS and fallbacks(report) == []
    assert_as_close_as_eager(model, plain, make_arguments)


@some_families
def test_per_tensor(kernel, device, family):
    """Weights with one scale. torchao would also give the input one scale."""
    plain, _, count = prepared(family, device, PER_TENSOR)
    model = copy.deepcopy(plain)
    kernel.inject_kernels(model)
    assert of_fp8(model, family.inputs(device, BFLOAT16))["products"] == count
    assert_as_close_as_eager(model, plain, in_batches(family, device))


# Diffusers' own FP8 layers, as it loads FLUX checkpoints that are stored in FP8.
of_checkpoints = pytest.mark.parametrize(
    "family", [FAMILIES[n] for n in ("flux", "flux2", "flux3") if n in FAMILIES], ids=str
)


@of_checkpoints
def test_checkpoint(kernel, device, family, tmp_path):
    """The same operations and results as with the same values in torchao's layers."""
    pytest.importorskip("diffusers.quantizers.bfl")
    plain = family.model(device, BFLOAT16, **KERNEL_HEADS).requires_grad_(False)
    model = fp8_models.loaded_in_fp8(family, plain, tmp_path)
    expected = fp8_models.in_torchaos_format(model)
    arguments = family.inputs(device, BFLOAT16)
    before = run(model, arguments)
    calls = []
    for injected in (model, expected):
        kernel.inject_kernels(injected)
        calls.append(of_fp8(injected, arguments))
    assert calls[0] == calls[1]
    assert calls[0]["products"] == sum(map(fp8_models.is_quantizable, plain.modules())) - sum(
        map(fp8_models.is_quantizable, model.modules())
    )
    assert torch.equal(run(model, arguments), run(expected, arguments))
    kernel.eject_kernels(model)
    assert torch.equal(run(model, arguments), before)


@pytest.mark.parametrize("changed", ["nothing", "hook", "scale", "features"])
def test_layer_of_checkpoint(kernel, device, changed):
    linears = pytest.importorskip("diffusers.quantizers.bfl.utils")
    features = 72 if changed == "features" else 64
    layer = linears.BFLFP8RLinear(128, features, True, BFLOAT16, device).requires_grad_(False)
    values, scale = linears.quantize_fp8r(torch.randn(features, 128, device=device))
    layer.weight, layer.weight_scale = nn.Parameter(values, False), scale
    layer.bias = nn.Parameter(torch.randn(features, device=device).to(BFLOAT16), False)
    model = nn.Sequential(nn.Identity(), layer)
    model[0].norm = nn.RMSNorm(8)  # a model without anything to replace is refused
    kernel.inject_kernels(model)
    x = torch.randn(5, 128, device=device).to(BFLOAT16)
    if changed == "hook":
        layer.register_forward_hook(lambda module, args, output: 2 * output)
    elif changed == "scale":
        model(x)
        layer.weight_scale = 2 * layer.weight_scale
    calls = of_fp8(model, (x,))
    # Diffusers computes a number of features that is no multiple of 16 in 16 bits.
    assert calls["linear_fp8"] == (changed != "features")
    given = x.float() if changed == "features" else fp8_models.quantized_by_row(x)
    expected = given @ linears.dequantize_fp8r(layer.weight, layer.weight_scale).T + layer.bias
    assert_close(model(x), (expected * (2 if changed == "hook" else 1)).to(BFLOAT16), 4e-3)


@pytest.mark.parametrize("name", ["stable_audio", "minimax_music3", "unet"])
@either_order
def test_in_part(kernel, device, name, is_injected_first):
    """Modules call layers there, which have stand-ins if they were quantized before."""
    small = BY_NAME[name]
    plain = small.model(device, BFLOAT16).requires_grad_(False)
    model = copy.deepcopy(plain)
    if is_injected_first:
        kernel.inject_kernels(model)
    count = quantize_blocks_in_part(plain)
    assert quantize_blocks_in_part(model) == count > 0
    report = kernel.inject_kernels(model)
    assert report.levels == {"": "in full" if name == "unet" else "in part"}
    calls = of_fp8(model, small.arguments(device, BFLOAT16))
    if is_injected_first:  # those that replaced modules compute
        assert (calls["products"] > 0) == (name != "minimax_music3")
    else:
        assert calls["products"] >= count and "_scaled_mm" not in calls
    arguments = functools.partial(small.arguments, device, BFLOAT16)
    assert_as_close_as_eager(model, plain, arguments, forwards=24)


def quantize_blocks_in_part(model):
    blocks = next(child for child in model.children() if isinstance(child, nn.ModuleList))
    return quantize(blocks)


@pytest.mark.parametrize("bias", ["none", "bfloat16", "float32"])
@pytest.mark.parametrize("granularity", [PER_ROW, PER_TENSOR])
@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float16])
def test_layer(kernel, device, bias, granularity, dtype):
    layer = nn.Linear(64, 24, bias=bias != "none", device=device, dtype=dtype)
    quantize(layer, granularity)
    if bias == "float32":
        layer.bias.data = layer.bias.data.float()
    layer.requires_grad_(False)
    kernel.inject_kernels(layer)
    eager = fp8_models.eager(nn.Sequential(layer))
    whole = torch.randn(2, 7, 3, 64, device=device, dtype=dtype)
    for x in (whole, whole[0, 0], whole[0, 0, 0], whole[:, 2:5], whole[:, :0], whole.mT.mT):
        out = layer(x)
        assert out.dtype == dtype and out.shape == (*x.shape[:-1], 24)
        assert_close(out, eager(x), slack=0.004)
    strided = torch.randn(64, 5, device=device, dtype=dtype).T
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("H100_DIFFUSERS_KERNELS_STRICT", "1")
        with pytest.raises(RuntimeError, match="last dimension has gaps"):
            layer(strided)


@some_families
def test_ejection(kernel, device, family):
    model, arguments, _ = prepared(family, device)
    before = {name: value.__dict__.copy() for name, value in model.state_dict().items()}
    expected = run(model, arguments)
    kernel.inject_kernels(model)
    after = model.state_dict()
    assert list(after) == list(before)
    for name, attributes in before.items():
        for attribute in ("qdata", "scale"):
            if attribute in attributes:
                found, own = getattr(after[name], attribute), attributes[attribute]
                assert found.data_ptr() == own.data_ptr()
    assert_close(run(model, arguments), expected, slack=0.15)  # torchao's, which rounds differently
    kernel.eject_kernels(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(run(model, arguments), expected)


# --------------------------------------------------------------------------------------------------
# What stays torchao's, or the user's


def test_other_formats(kernel, device):
    """Their layers get no stand-in, and run torchao's code. A weight of one block has one scale, as one with
    a scale for all."""
    quantization = pytest.importorskip("torchao.quantization")
    weight = torch.randn(128, 128, dtype=BFLOAT16, device=device)
    blocks = quantization.PerBlock([128, 128]), quantization.PerBlock([1, 128])
    for change in (
        {"is_dynamic": False},
        {"float8_dtype": torch.float8_e5m2},
        {"hp_value_lb": 1.0},
        {"hp_value_ub": 100.0},
        {"granularity": blocks[0], "granularity_of_input": blocks[1]},
    ):
        layer = nn.Linear(128, 128, device=device, dtype=BFLOAT16)
        layer.weight = fp8_models.quantized(weight, **change)
        assert (layer.weight.scale.shape == (1, 1)) == ("granularity" in change)
        with pytest.raises(ValueError, match="pipe_or_model must be or hold"):
            kernel.inject_kernels(layer)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torchao quantizes models on a GPU")
@pytest.mark.parametrize("granularity", [PER_ROW, PER_TENSOR])
def test_quantized_by_torchao(kernel, device, granularity):
    quantization = pytest.importorskip("torchao.quantization")
    model = LTX.model(device, BFLOAT16, **KERNEL_HEADS).requires_grad_(False)
    config = quantization.Float8DynamicActivationFloat8WeightConfig(
        granularity=getattr(quantization, granularity)()
    )
    quantization.quantize_(model.transformer_blocks, config)
    arguments = LTX.inputs(device, BFLOAT16)
    expected = run(fp8_models.eager(model), arguments)
    kernel.inject_kernels(model)
    assert of_fp8(model, arguments).keys() <= OPERATIONS
    assert_close(run(model, arguments), expected, slack=0.15)


@some_families
def test_weights_alone(kernel, device, family):
    model, arguments, _ = prepared(family, device, is_dynamic=False)
    expected = run(model, arguments)
    report = kernel.inject_kernels(model)
    assert of_fp8(model, arguments) == {}
    assert all(entry.module != "Linear" for entry in report.replaced)
    assert_close(run(model, arguments), expected, slack=0.02)


@either_order
def test_hooks(kernel, device, is_injected_first):
    """A hook on a quantized layer runs at each call, around the stand-in."""
    model, arguments, count = prepared(LTX, device)
    plain = fp8_models.eager(model)
    if is_injected_first:
        kernel.inject_kernels(model)
    seen = []

    def change(module, args, out):
        seen.append(module)
        return out * 1.5

    for each in (model, plain):
        LTX.part(each, "linear").register_forward_hook(change)
    kernel.inject_kernels(model)
    assert of_fp8(model, arguments)["products"] == count
    assert seen == [LTX.part(model, "linear")]
    assert_close(run(model, arguments), run(plain, arguments))


def watched(module):
    """The tensors, and other objects with a shape, that later calls of a module are given."""
    seen = []

    def look(module, args, kwargs):
        seen.extend(x for x in (*args, *kwargs.values()) if hasattr(x, "shape"))

    module.register_forward_pre_hook(look, with_kwargs=True)
    return seen


PARTS = ("attention", "single_attention", "cross_attention", "audio_to_video")
PARTS += ("feed_forward", "gated_feed_forward", "activation")


@pytest.mark.parametrize(
    ("family", "part"),
    [(family, part) for family in FAMILIES.values() for part in PARTS if part in family.parts],
    ids=str,
)
def test_hooks_see_tensors(kernel, device, family, part):
    """Norms quantize their results for attentions and feed-forwards without hooks only."""
    model, arguments, _ = prepared(family, device)
    expected = run(fp8_models.eager(model), arguments)
    kernel.inject_kernels(model)
    blocks, _, path = family.parts[part].partition(".0.")
    kind = type(model.get_submodule(f"{blocks}.0"))
    parts = [dict(x.named_modules()).get(path) for x in family.blocks(model) if type(x) is kind]
    seen = [watched(part) for part in parts if part is not None]
    assert_close(run(model, arguments), expected, slack_of(family))
    for tensors in seen:
        assert tensors and all(type(x) is torch.Tensor for x in tensors)
        assert tensors[0].dtype is BFLOAT16


@every_family
def test_own_forward_gets_tensors(kernel, device, family, monkeypatch):
    """An attention that falls back after the norm has quantized its input."""
    model, arguments, count = prepared(family, device)
    expected = run(fp8_models.eager(model), arguments)
    report = kernel.inject_kernels(model)
    processor = type(family.part(model, "attention").processor)
    own = processor.__call__
    seen = []

    @functools.wraps(own)
    def call(self, attn, hidden_states, *args, **kwargs):
        seen.append(hidden_states)
        return own(self, attn, hidden_states, *args, **kwargs)

    monkeypatch.setattr(processor, "__call__", call)
    assert_close(run(model, arguments), expected, slack_of(family))
    assert seen and all(type(x) is torch.Tensor and x.dtype is BFLOAT16 for x in seen)
    assert any("__call__ was replaced" in reason for reason in fallbacks(report))
    assert_count(of_fp8(model, arguments)["products"], family, count)


def fallbacks(report):
    return [reason for entry in report.calls for reason in entry.fell_back]


class Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def test_subclass(kernel, device):
    model, arguments, count = prepared(LTX, device)
    LTX.part(model, "linear").__class__ = Doubled
    report = kernel.inject_kernels(model)
    assert sum(entry.module == "Linear" for entry in report.replaced) == count - 1
    calls = of_fp8(model, arguments)
    assert (calls["products"], calls["_scaled_mm"]) == (count - 1, 1)


def test_weight_replaced(kernel, device):
    """The layer's class's forward computes with it."""
    model, arguments, count = prepared(LTX, device)
    report = kernel.inject_kernels(model)
    layer = LTX.part(model, "linear")
    weight = layer.weight.dequantize()
    layer.weight = nn.Parameter(weight, requires_grad=False)
    assert of_fp8(model, arguments)["products"] == count - 1
    x = torch.randn(3, layer.in_features, device=device, dtype=BFLOAT16)
    assert torch.equal(layer(x), nn.functional.linear(x, weight, layer.bias))
    assert not any(entry.fell_back for entry in report.calls)


def test_autocast(kernel, device):
    model, arguments, _ = prepared(LTX, device)
    kernel.inject_kernels(model)
    with torch.autocast(torch.device(device).type, BFLOAT16):
        assert "products" not in of_fp8(model, arguments)


def test_training(kernel, device):
    """No derivative is lost: torchao computes layers whose input requires grad."""
    layer = nn.Linear(64, 32, device=device, dtype=BFLOAT16)
    quantize(layer)
    kernel.inject_kernels(layer.requires_grad_(False))
    x = torch.randn(5, 64, device=device, dtype=BFLOAT16, requires_grad=True)
    own = type(layer).forward
    assert torch.equal(layer(x), own(layer, x))
    layer.bias.requires_grad_(True)
    assert layer(x.detach()).requires_grad


def test_attention_that_requires_grad(kernel, device):
    """The attention's result requires grad, the quantized activation beside it does not."""
    model, arguments, _ = prepared(FLUX, device)
    expected = run(fp8_models.eager(model), arguments)
    kernel.inject_kernels(model)
    model.single_transformer_blocks[0].attn.norm_q.weight.requires_grad_(True)
    with torch.enable_grad():
        out = model(**arguments, return_dict=False)[0]
    assert out.requires_grad
    assert_close(out.detach().flatten(), expected.flatten())


def test_longer_rows(kernel, device):
    """Inputs that no kernel reads once for one scale have a scale for each 128 elements."""
    layer = nn.Linear(18448, 32, device=device, dtype=BFLOAT16).requires_grad_(False)
    quantize(layer)
    exact = fp8_models.dequantized(layer.weight)
    report = kernel.inject_kernels(layer)
    x = torch.randn(5, 18448, device=device, dtype=BFLOAT16)
    assert_close(layer(x).float(), x.float() @ exact.T + layer.bias.float(), slack=0.04)
    assert report.calls[0].on_kernels == 1


# --------------------------------------------------------------------------------------------------
# Together with other libraries


@pytest.mark.drawn(times=0, period=5)
@every_family
@either_order
def test_lora(kernel, device, family, is_injected_first):
    model, arguments, count = prepared(family, device)
    eager = fp8_models.eager
    without = run(eager(model), arguments)
    if is_injected_first:
        kernel.inject_kernels(model)
    for seed, name in enumerate(("one", "two")):
        add_lora(family, model, name, seed, rank=4)
    kernel.inject_kernels(model)

    def check(expected, slack):
        out, calls = run_and_count(model, arguments)
        assert "_scaled_mm" not in calls
        assert_count(calls["products"], family, count)
        assert_close(out, expected, slack)
        return out, sum(calls[name] for name in NORMS)

    slack, weight = slack_of(family), 0.4
    model.set_adapters(["one"], [weight])
    one, with_adapters = check(run(eager(model), arguments), slack)
    assert (one - without).float().norm() > (slack - 0.01) * without.float().norm()
    model.set_adapters(["one", "two"], [0.2, 0.5])
    assert not torch.equal(check(run(eager(model), arguments), slack)[0], one)
    model.disable_adapters()
    rest, at_rest = check(without, slack - 0.01)
    assert at_rest == with_adapters
    model.enable_adapters()
    model.set_adapters(["one"], [weight])
    assert torch.equal(run(model, arguments), one)
    model.delete_adapters(["two"])
    assert torch.equal(run(model, arguments), one)
    model.unload_lora()
    assert torch.equal(run(model, arguments), rest)


@pytest.mark.usefixtures("_fresh_compiler")
@either_order
@pytest.mark.parametrize("family", [LTX, FLUX], ids=str)
def test_compiled(kernel, device, family, is_injected_first):
    model = family.model(device, BFLOAT16, **KERNEL_HEADS, **family.one_block)
    model.requires_grad_(False)
    arguments = family.inputs(device, BFLOAT16)
    if is_injected_first:
        kernel.inject_kernels(model)
    count = quantize_blocks(family, model)
    kernel.inject_kernels(model)
    expected = run(model, arguments)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for _ in range(2):
        assert_close(run(compiled, arguments), expected)
    assert counter.frame_count == 1
    targets = targets_of(counter)
    assert targets["products"] == count
    assert targets["quantize_fp8"] < count


def targets_of(counter):
    """The number of calls in compiled graphs by name, and of "products" as in ``of_fp8``."""
    counts = collections.Counter()
    for node in (node for graph in counter.graphs for node in graph.graph.nodes):
        if node.op == "call_function":
            name = str(getattr(node.target, "__name__", node.target)).partition(".")[0]
            counts[name] += 1
            counts["products"] += products(name, node.args)
    return counts


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_in_part(kernel, device):
    """Except for those of attentions, layers are torchao's: the compiler fuses its quantization."""
    small = BY_NAME["svd"]
    model = small.model(device, BFLOAT16).requires_grad_(False)
    count = quantize_blocks_in_part(model)
    kernel.inject_kernels(model)
    arguments = small.arguments(device, BFLOAT16)
    expected = run(model, arguments)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    assert_close(run(compiled, arguments), expected, slack=0.15)
    # Two self-attentions, query and output of two attentions to a text of 24 channels.
    assert targets_of(counter)["products"] == 2 * 4 + 2 * 2 < count
