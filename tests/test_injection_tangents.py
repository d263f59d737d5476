"""Forward-mode derivatives of an injected model, beside those of a plain one in float64."""

import copy

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import ltx_models
from injected_pairs import distance
from ltx_models import calls_of, inputs, kernel_calls, run, transformer

pytestmark = pytest.mark.usefixtures("_one_thread")

CONFIGS = {
    "plain": {},
    "affine": {"norm_elementwise_affine": True},
    "exact_gelu": {"activation_fn": "gelu"},
    "heads_of_64": {"heads": 1, "head_dim": 64},
}
every_config = pytest.mark.parametrize("config", CONFIGS)


@pytest.fixture(autouse=True)
def _attention_with_derivatives():
    """Of PyTorch's attentions only the one of single operations has forward-mode derivatives."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.fixture
def models(kernel, device):
    """Makes (injected model, exact plain model, arguments, exact arguments)."""

    def make(config="plain", **options):
        model = transformer(device, **CONFIGS[config])
        exact = copy.deepcopy(model).double()
        kernel.inject_kernels(model)
        arguments = inputs(model, **options)
        return model, exact, arguments, ltx_models.cast(arguments, torch.float64)

    return make


def named_tangents(model):
    """The same for a model in float32 and in float64."""
    generator = torch.Generator().manual_seed(9)
    return {
        name: torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        for name, p in model.named_parameters()
    }


def input_derivative(model, arguments, name):
    def forward(x):
        return model(**{**arguments, name: x}, return_dict=False)[0]

    x = arguments[name]
    tangent = torch.linspace(-1, 1, x.numel(), device=x.device).to(x.dtype).view_as(x)
    return torch.func.jvp(forward, (x,), (tangent,))


def parameter_derivative(model, arguments):
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def forward(parameters):
        return torch.func.functional_call(
            model, parameters, kwargs={**arguments, "return_dict": False}
        )[0]

    return torch.func.jvp(forward, (parameters,), (named_tangents(model),))


def dual_derivative(model, arguments):
    x = arguments["hidden_states"]
    tangent = torch.linspace(-1, 1, x.numel(), device=x.device).to(x.dtype).view_as(x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        out = model(**{**arguments, "hidden_states": dual}, return_dict=False)[0]
        return tuple(forward_ad.unpack_dual(out))


def assert_derivatives_agree(mine, theirs):
    for value, expected in zip(mine, theirs, strict=True):
        assert value is not None and expected.norm() > 0
        assert distance(value, expected) < 1e-4


@every_config
@pytest.mark.parametrize("name", ["hidden_states", "encoder_hidden_states"])
@pytest.mark.parametrize("grad", [torch.no_grad, torch.enable_grad])
def test_derivative_by_an_input(models, config, name, grad):
    model, exact, arguments, exact_arguments = models(config)
    with grad():
        mine = input_derivative(model, arguments, name)
        theirs = input_derivative(exact, exact_arguments, name)
    assert_derivatives_agree(mine, theirs)


@every_config
@pytest.mark.parametrize("grad", [torch.no_grad, torch.enable_grad])
def test_derivative_by_the_parameters(models, config, grad):
    model, exact, arguments, exact_arguments = models(config)
    with grad():
        mine = parameter_derivative(model, arguments)
        theirs = parameter_derivative(exact, exact_arguments)
    assert_derivatives_agree(mine, theirs)


@pytest.mark.parametrize("part", ["scale_shift_table", "norm1.weight", "attn1.norm_k.weight"])
def test_derivative_by_one_parameter(models, part):
    """Of the second block alone: what the first one leaves for it carries a tangent, too."""
    model, exact, arguments, exact_arguments = models("affine")
    name = f"transformer_blocks.1.{part}"
    results = []
    for candidate, given in ((model, arguments), (exact, exact_arguments)):
        parameter = candidate.get_parameter(name).detach()

        def forward(value, candidate=candidate, given=given):
            kwargs = {**given, "return_dict": False}
            return torch.func.functional_call(candidate, {name: value}, kwargs=kwargs)[0]

        with torch.no_grad():
            tangent = torch.ones_like(parameter)
            results.append(torch.func.jvp(forward, (parameter,), (tangent,)))
    assert_derivatives_agree(*results)


@every_config
@pytest.mark.parametrize("grad", [torch.no_grad, torch.enable_grad])
def test_dual_tensors(models, config, grad):
    model, exact, arguments, exact_arguments = models(config)
    with grad():
        mine = dual_derivative(model, arguments)
        theirs = dual_derivative(exact, exact_arguments)
    assert_derivatives_agree(mine, theirs)


@pytest.mark.parametrize("options", [{"per_token": True}, {"mask": None}], ids=str)
def test_dual_tensors_of_other_inputs(models, options):
    model, exact, arguments, exact_arguments = models(**options)
    with torch.no_grad():
        mine, theirs = (
            dual_derivative(model, arguments),
            dual_derivative(exact, exact_arguments),
        )
    assert_derivatives_agree(mine, theirs)


def test_dual_parameters_on_the_modules(models):
    """As forward_ad is used with modules: parameters replaced by dual tensors."""
    model, exact, arguments, exact_arguments = models("affine")
    results = []
    for candidate, given in ((model, arguments), (exact, exact_arguments)):
        tangents = named_tangents(candidate)
        with torch.no_grad(), forward_ad.dual_level():
            for name, parameter in list(candidate.named_parameters()):
                owner, _, attribute = name.rpartition(".")
                module = candidate.get_submodule(owner)
                delattr(module, attribute)
                setattr(module, attribute, forward_ad.make_dual(parameter.detach(), tangents[name]))
            out = candidate(**given, return_dict=False)[0]
            results.append(tuple(forward_ad.unpack_dual(out)))
    assert_derivatives_agree(*results)


def test_derivatives_of_a_gradient(models):
    """Forward over reverse, as for products with a Hessian."""
    model, exact, arguments, exact_arguments = models()
    results = []
    for candidate, given in ((model, arguments), (exact, exact_arguments)):

        def loss(x, candidate=candidate, given=given):
            out = candidate(**{**given, "hidden_states": x}, return_dict=False)[0]
            return out.square().sum()

        x = given["hidden_states"]
        results.append(torch.func.jvp(torch.func.grad(loss), (x,), (torch.ones_like(x),)))
    assert_derivatives_agree(*results)


def test_forwards_after_it_are_on_the_kernels(models):
    model, _, arguments, _ = models()
    dual_derivative(model, arguments)
    assert kernel_calls(run, model, arguments) == calls_of(2)
