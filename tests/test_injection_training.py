"""Changed linear layers, training and derivatives of injected LTX-Video models."""

import copy

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import ltx_models
from checks import relative_distance
from injected_pairs import pair
from ltx_models import (
    KernelCalls,
    calls_of,
    computing,
    inputs,
    kernel_calls,
    prepared,
    run,
    transformer,
)

pytestmark = pytest.mark.usefixtures("_one_thread")


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_accuracy_of_the_activation(kernel, device, dtype, approximate):
    """Its error against float64 is at most 1.05 times the eager one's. The tanh approximation is its matmul's
    epilogue on CUDA."""
    name = "gelu-approximate" if approximate == "tanh" else "gelu"
    options = {"blocks": 1, "head_dim": 64, "activation_fn": name}
    model, plain, _ = pair(kernel, device, dtype=dtype, **options)
    x = torch.randn(2, 512, 256, device=device, dtype=dtype) * 2
    with torch.no_grad(), KernelCalls() as calls:
        out = model.transformer_blocks[0].ff.net[0](x)
    with torch.no_grad():
        activation = plain.transformer_blocks[0].ff.net[0]
        eager = activation(x)
        expected = activation.double()(x.double())
    assert calls.counts["gelu"] == 1
    uses_epilogue = device == "cuda" and approximate == "tanh" and dtype != torch.float32
    assert calls.epilogues == uses_epilogue
    assert 0 < relative_distance(out, expected) <= 1.05 * relative_distance(eager, expected)


def test_another_device_than_the_builds_runs_the_models_own_code(kernel):
    """On meta, which has only shapes; the report does not depend on the device."""
    model = transformer("meta")
    report = kernel.inject_kernels(model)
    assert report.num_replaced == kernel.inject_kernels(transformer("cpu")).num_replaced
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
    arguments = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    assert computing(expected, model.cuda(), arguments) == calls_of(2)


# ------------------------------------------------------------------------------------------------
# Forward-mode derivatives, compared with a plain model's in float64


def tangent_of(x):
    return torch.linspace(-1, 1, x.numel(), device=x.device).to(x.dtype).view_as(x)


def output(model, arguments, **changes):
    return model(**{**arguments, **changes}, return_dict=False)[0]


def by_parameters(*names):
    def derivative(model, arguments):
        chosen = {name: p.detach() for name, p in model.named_parameters() if name in names}
        tangents = {name: tangent_of(p) for name, p in chosen.items()}

        def forward(chosen):
            kwargs = {**arguments, "return_dict": False}
            return torch.func.functional_call(model, chosen, kwargs=kwargs)[0]

        return torch.func.jvp(forward, (chosen,), (tangents,))

    return derivative


def by_dual_tensors(model, arguments):
    x = arguments["hidden_states"]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent_of(x))
        return tuple(forward_ad.unpack_dual(output(model, arguments, hidden_states=dual)))


def by_dual_parameters(model, arguments):
    """As forward_ad is used with modules: parameters replaced by dual tensors."""
    model = copy.deepcopy(model)
    with torch.no_grad(), forward_ad.dual_level():
        for name, parameter in list(model.named_parameters()):
            owner, _, attribute = name.rpartition(".")
            module, dual = model.get_submodule(owner), parameter.detach()
            delattr(module, attribute)
            setattr(module, attribute, forward_ad.make_dual(dual, tangent_of(dual)))
        return tuple(forward_ad.unpack_dual(output(model, arguments)))


def of_a_gradient(model, arguments):
    """Forward over reverse, as for products with a Hessian."""
    x = arguments["hidden_states"]
    loss = lambda x: output(model, arguments, hidden_states=x).square().sum()  # noqa: E731
    return torch.func.jvp(torch.func.grad(loss), (x,), (tangent_of(x),))


SECOND_BLOCK = "transformer_blocks.1"
AFFINE = {"norm_elementwise_affine": True}
DERIVATIVES = [
    # Values passed from the first to the second block also carry a tangent.
    (by_parameters(f"{SECOND_BLOCK}.scale_shift_table"), AFFINE, {}),
    (by_parameters(f"{SECOND_BLOCK}.norm1.weight"), AFFINE, {}),
    (by_parameters(f"{SECOND_BLOCK}.attn1.norm_k.weight"), AFFINE, {}),
    (by_dual_tensors, AFFINE, {"per_token": True}),
    (by_dual_parameters, AFFINE, {}),
    (of_a_gradient, {}, {}),
]


@pytest.mark.parametrize("grad", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize(("derivative", "config", "options"), DERIVATIVES)
def test_tangents(kernel, device, derivative, config, options, grad):
    """The right ones, and after them the kernels run again."""
    model, plain, _ = pair(kernel, device, **config)
    arguments = inputs(model, **options)
    exact = plain.double(), ltx_models.cast(arguments, torch.float64)
    # Only PyTorch's math attention has forward-mode derivatives.
    with sdpa_kernel(SDPBackend.MATH), grad():
        results = [derivative(*given) for given in ((model, arguments), exact)]
    for value, expected in zip(*results, strict=True):
        assert value is not None and expected.norm() > 0
        assert relative_distance(value, expected) < 1e-4
    assert kernel_calls(run, model, arguments) == calls_of(2)
