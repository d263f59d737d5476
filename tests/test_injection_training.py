"""What else is done to a model, around an injection: LoRA, quantization, autocast, training."""

import copy

import pytest
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer

import ltx_models
from ltx_models import (
    calls_of,
    computing,
    either_order,
    inputs,
    kernel_calls,
    prepared,
    reference,
    run,
    snapshot,
    transformer,
)

pytestmark = pytest.mark.usefixtures("_one_thread")


# ------------------------------------------------------------------------------------------------
# LoRA

LINEARS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]


def add_lora(model, name="default", seed=1):
    """Adapters of all linear layers of the blocks, with a visible effect."""
    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=LINEARS)
    model.add_adapter(config, adapter_name=name)


@either_order
def test_lora(kernel, device, is_injected_first):
    """Loaded, scaled, switched off and on, fused, and removed."""
    model, arguments, without = prepared(device)
    before = snapshot(model)
    if is_injected_first:
        kernel.inject_kernels(model)
    add_lora(model)
    report = kernel.inject_kernels(model)
    assert report.already_injected == is_injected_first
    adapters = [m for m in model.modules() if isinstance(m, BaseTunerLayer)]
    assert len(adapters) == 2 * (2 * 4 + 2)
    plain = transformer(device)
    add_lora(plain)
    expected = reference(plain, arguments)
    assert (expected - without).norm() > 0.1 * without.norm()
    assert computing(expected, model, arguments) == calls_of(2)
    for candidate in (model, plain):
        candidate.set_adapters("default", weights=0.5)
    assert computing(reference(plain, arguments), model, arguments) == calls_of(2)
    model.disable_adapters()
    assert computing(without, model, arguments) == calls_of(2)
    model.enable_adapters()
    model.fuse_lora()
    assert computing(reference(plain, arguments), model, arguments, slack=1e-4) == calls_of(2)
    model.unfuse_lora()
    model.unload_lora()
    assert computing(without, model, arguments, slack=1e-4) == calls_of(2)
    kernel.eject_kernels(model)
    assert snapshot(model) == {**before, "": snapshot(model)[""]}


def test_two_adapters_around_the_injection(kernel, device):
    model, arguments, _ = prepared(device)
    plain = transformer(device)
    add_lora(model, "first", seed=1)
    kernel.inject_kernels(model)
    add_lora(model, "second", seed=2)
    for seed, name in enumerate(("first", "second"), start=1):
        add_lora(plain, name, seed)
    for candidate in (model, plain):
        candidate.set_adapters(["first", "second"], weights=[0.7, 0.4])
    assert computing(reference(plain, arguments), model, arguments) == calls_of(2)
    for candidate in (model, plain):
        candidate.delete_adapters("first")
    assert computing(reference(plain, arguments), model, arguments) == calls_of(2)


def test_only_the_adapters_are_trained(kernel, device):
    model, plain = transformer(device), transformer(device)
    arguments = inputs(model)
    for candidate in (model, plain):
        candidate.requires_grad_(False)
        add_lora(candidate)
    kernel.inject_kernels(model)
    gradients, expected = gradients_of(model, arguments), gradients_of(plain, arguments)
    assert expected and all("lora" in name for name in expected)
    assert_gradients_agree(gradients, expected)


# ------------------------------------------------------------------------------------------------
# Quantized linear layers


@either_order
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int8_weights(kernel, device, dtype, is_injected_first):
    """Weights stay as torchao made them, and its linear function multiplies by them."""
    torchao = pytest.importorskip("torchao.quantization")
    model = transformer(device, dtype)
    plain = copy.deepcopy(model)
    arguments = inputs(model)
    exact = reference(plain, arguments)
    if is_injected_first:
        kernel.inject_kernels(model)
    for candidate in (model, plain):
        torchao.quantize_(candidate.transformer_blocks, torchao.Int8WeightOnlyConfig())
    kernel.inject_kernels(model)
    expected = run(plain, arguments)
    assert 1e-4 < (expected.double() - exact).norm() / exact.norm() < 0.1
    out = run(model, arguments)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    assert kernel_calls(run, model, arguments) == calls_of(2)
    linears = [m for m in model.transformer_blocks.modules() if type(m) is torch.nn.Linear]
    assert len(linears) == 2 * (2 * 4 + 2)
    assert all(type(linear.weight).__module__.startswith("torchao") for linear in linears)


# ------------------------------------------------------------------------------------------------
# GELU as the epilogue of its matrix product


def activation(model):
    return model.transformer_blocks[0].ff.net[0]


def quantize(model):
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(activation(model), torchao.Int8WeightOnlyConfig())


def subclass_linear(model):
    activation(model).proj.__class__ = type("MyLinear", (torch.nn.Linear,), {})


def parametrize_linear(model):
    torch.nn.utils.parametrizations.weight_norm(activation(model).proj)


def remove_bias(model):
    activation(model).proj.bias = None


def wrap_forward(model):
    forward = activation(model).proj.forward
    activation(model).proj.forward = lambda x: forward(x)


# What makes of a plain linear layer one that has to be called.
CHANGES = {
    "lora": add_lora,
    "int8": quantize,
    "subclass": subclass_linear,
    "parametrization": parametrize_linear,
    "no_bias": remove_bias,
    "hook": lambda model: activation(model).proj.register_forward_hook(lambda *args: None),
    "forward": wrap_forward,
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", [None, *CHANGES])
@either_order
def test_only_plain_linear_layers_have_an_epilogue(
    kernel, device, dtype, change, is_injected_first
):
    """And on CUDA alone, where it is the tanh approximation; on CPU it would be the exact GELU."""
    model = transformer(device, dtype, blocks=1)
    if is_injected_first:
        kernel.inject_kernels(model)
    if change is not None:
        CHANGES[change](model)
    kernel.inject_kernels(model)
    with ltx_models.KernelCalls() as calls:
        run(model, inputs(model))
    assert calls.counts["gelu"] == 1
    assert calls.epilogues == (1 if device == "cuda" and change is None else 0)


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_accuracy_of_the_activation(kernel, device, dtype, approximate):
    """Its error against float64 is at most 1.05 times the eager one's."""
    name = "gelu-approximate" if approximate == "tanh" else "gelu"
    model = transformer(device, dtype, blocks=1, head_dim=64, activation_fn=name)
    module = activation(model)
    exact = copy.deepcopy(module).double()
    x = torch.randn(2, 512, 256, device=device, dtype=dtype) * 2
    with torch.no_grad():
        expected, eager = exact(x.double()), module(x)
        kernel.inject_kernels(model)
        with ltx_models.KernelCalls() as calls:
            out = module(x)
    assert calls.counts["gelu"] == 1
    uses_epilogue = device == "cuda" and approximate == "tanh" and dtype != torch.float32
    assert calls.epilogues == uses_epilogue
    error, eager_error = ((y.double() - expected).norm() for y in (out, eager))
    assert 0 < error <= 1.05 * eager_error, f"{error / eager_error:.3f} of the eager error"


def test_gradients_need_no_epilogue(kernel, device):
    model = transformer(device, torch.bfloat16, blocks=1)
    kernel.inject_kernels(model)
    arguments = inputs(model)
    with ltx_models.KernelCalls() as calls:
        model(**arguments, return_dict=False)[0].sum().backward()
    assert calls.epilogues == 0
    assert activation(model).proj.weight.grad.abs().max() > 0


# ------------------------------------------------------------------------------------------------
# What the kernels do not take


def test_autocast_runs_the_models_own_code(kernel, device):
    model = transformer(device)
    plain = copy.deepcopy(model)
    arguments = inputs(model)
    kernel.inject_kernels(model)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert kernel_calls(run, model, arguments) == {}
        out, expected = run(model, arguments), run(plain, arguments)
    assert (expected - run(plain, arguments)).abs().max() > 1e-3
    assert torch.equal(out, expected)
    assert kernel_calls(run, model, arguments) == calls_of(2)


@pytest.mark.parametrize("options", [{}, {"grid": (1, 2, 3)}, {"mask": None}], ids=str)
def test_float64_runs_the_models_own_code(kernel, device, options):
    model = transformer(device, torch.float64)
    arguments = inputs(model, **options)
    expected = run(model, arguments)
    kernel.inject_kernels(model)
    assert kernel_calls(run, model, arguments) == {}
    assert torch.equal(run(model, arguments), expected)


def test_another_device_than_the_builds_runs_the_models_own_code(kernel):
    """On meta, shapes alone; the report does not depend on the device."""
    model = transformer("meta")
    kernel.inject_kernels(model)
    arguments = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in inputs(transformer("cpu")).items()
    }
    assert kernel_calls(run, model, arguments) == {}
    assert run(model, arguments).shape == arguments["hidden_states"].shape


def test_cpu_model_with_a_cuda_build(kernel):
    if not torch.cuda.is_available():
        pytest.skip("the build for the CPU has kernels for it")
    model, arguments, expected = prepared("cpu")
    kernel.inject_kernels(model)
    assert computing(expected, model, arguments) == {}
    assert computing(expected, model.cuda(), on_cuda(arguments)) == calls_of(2)


def on_cuda(arguments):
    return {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


def test_fused_projections(kernel, device):
    """They add weights that LTX-Video's attention does not use, with kernels or without."""
    model, arguments, expected = prepared(device)
    kernel.inject_kernels(model)
    for block in model.transformer_blocks:
        block.attn1.fuse_projections()
    assert hasattr(model.transformer_blocks[0].attn1, "to_qkv")
    assert computing(expected, model, arguments) == calls_of(2)
    model.unfuse_qkv_projections()
    assert computing(expected, model, arguments) == calls_of(2)


# ------------------------------------------------------------------------------------------------
# Gradients


def gradients_of(model, arguments):
    """Of each parameter, for a loss in which every element of the output counts differently."""
    model.zero_grad()
    out = model(**arguments, return_dict=False)[0]
    weights = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype)
    (out.flatten() * weights).sum().backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients_agree(gradients, expected):
    assert gradients.keys() == expected.keys()
    for name, value in expected.items():
        assert value.abs().max() > 0, name
        error = (gradients[name] - value).norm() / value.norm()
        assert error < 1e-4, f"{name}: {error:.3g}"


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("per_token", [False, True], ids=["per_sample", "per_token"])
def test_gradients(kernel, device, checkpointing, per_token):
    model = transformer(device, norm_elementwise_affine=True).train()
    exact = copy.deepcopy(model).double()
    arguments = inputs(model, per_token=per_token)
    kernel.inject_kernels(model)
    if checkpointing:
        model.enable_gradient_checkpointing()
    expected = gradients_of(exact, ltx_models.cast(arguments, torch.float64))
    assert len(expected) == len(list(model.parameters()))
    assert_gradients_agree(gradients_of(model, arguments), expected)


def test_gradient_of_the_input(kernel, device):
    model, arguments, expected_out = prepared(device)
    exact = copy.deepcopy(model).double()
    kernel.inject_kernels(model)
    gradients = []
    for candidate, dtype in ((model, torch.float32), (exact, torch.float64)):
        candidate.requires_grad_(False)
        mine = ltx_models.cast(arguments, dtype)
        x = mine["hidden_states"].clone().requires_grad_()
        out = candidate(**{**mine, "hidden_states": x}, return_dict=False)[0]
        torch.testing.assert_close(out.detach().double(), expected_out, rtol=1e-5, atol=1e-5)
        out.square().sum().backward()
        gradients.append(x.grad.double())
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_inference_with_gradients_enabled(kernel, device):
    """Nothing requires a gradient: the kernels run, with the model's own rotary tables."""
    model, arguments, expected = prepared(device)
    model.requires_grad_(False)
    kernel.inject_kernels(model)
    outputs = []
    calls = kernel_calls(lambda: outputs.append(model(**arguments, return_dict=False)[0]))
    assert calls == calls_of(2, joined=0, qk_norm_coordinate_rope=0, qk_norm_rope=1)
    torch.testing.assert_close(outputs[0].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients(kernel, device, mode):
    model, arguments, expected = prepared(device)
    kernel.inject_kernels(model)
    with mode():
        out = model(**arguments, return_dict=False)[0]
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
