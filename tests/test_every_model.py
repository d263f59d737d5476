"""Every class of diffusers' transformers, UNets and ControlNets: injected, compared, ejected, compiled.

The levels are those of docs/support.toml, and the configurations those of every_model.py.
"""

import copy
import inspect
import math

import diffusers
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

import render_support
from checks import have_same_bits, relative_distance
from every_model import CLASSES, FAMILY_OF, MODELS, WITHOUT
from injected_pairs import as_float32, on_kernels

pytestmark = pytest.mark.usefixtures("_one_thread", "_quiet")

LEVEL = render_support.load().level
BFLOAT16 = torch.bfloat16
every_class = pytest.mark.parametrize("name", MODELS)
# A ratio of errors of a few hundred elements has noise of up to 20%. Samples are added until it is in bounds,
# so that only a ratio that is really too large fails.
SAMPLES, MOST_SAMPLES = 3, 64
# float32 has 16 bits of mantissa more than bfloat16, and orders of summation differ.
OF_BFLOAT16 = 16 * 2**-16
# Models with nothing that there is a kernel for except attention, which takes 16 bits.
ONLY_ATTENTION = ("StableAudio3DiTModel",)


def test_every_class_has_a_model():
    """In the table of configurations, and in the page's table of levels."""
    advice = "give it a configuration in tests/every_model.py and a level in docs/support.toml"
    missing = sorted(CLASSES.keys() - MODELS.keys() - {*WITHOUT})
    assert not missing, f"diffusers {diffusers.__version__} has {', '.join(missing)}: {advice}"
    assert MODELS.keys() | {*WITHOUT} == CLASSES.keys() == LEVEL.keys() and len(MODELS) >= 100
    assert {name for name, level in LEVEL.items() if level == "no forward"} == {*WITHOUT}


def test_classes_without_a_forward():
    assert CLASSES["MotionAdapter"].forward(None, torch.zeros(1)) is None
    with pytest.raises(ValueError, match="cannot be run by itself"):
        CLASSES["ControlNetXSAdapter"].forward(None)


@torch.no_grad()
def call(model, arguments):
    """A forward's result: its tensors, and how they are arranged."""
    return pytree.tree_flatten(model(**arguments))


def joined(model, arguments):
    return torch.cat([tensor.float().flatten() for tensor in call(model, arguments)[0]])


def signatures(model):
    return {name: inspect.signature(part.forward) for name, part in model.named_modules()}


def assert_same_form(result, expected):
    """The same classes, in the same order, with the same kinds of tensors."""
    (tensors, form), (others, expected_form) = result, expected
    assert form == expected_form
    for mine, other in zip(tensors, others, strict=True):
        assert (mine.dtype, mine.shape, mine.device) == (other.dtype, other.shape, other.device)


def assert_same(result, expected):
    assert_same_form(result, expected)
    assert all(have_same_bits(*both) for both in zip(result[0], expected[0], strict=True))


def errors(model, plain, make_arguments):
    """The L2 errors of both in bfloat16, and the L2 norm of what the float32 model computes.

    Samples are added while the model's error is more than 1.05 times that of the plain one.
    """
    exact = copy.deepcopy(plain).float()
    squares = torch.zeros(3, dtype=torch.float64)
    for seed in range(MOST_SAMPLES):
        arguments = make_arguments(BFLOAT16, seed)
        expected = joined(exact, as_float32(arguments, BFLOAT16)).double()
        for i, candidate in enumerate((model, plain)):
            squares[i] += (joined(candidate, arguments) - expected).square().sum().cpu()
        squares[2] += expected.square().sum().cpu()
        error, plain_error, norm = squares.sqrt().tolist()
        if seed + 1 >= SAMPLES and error <= 1.05 * plain_error:
            break
    return error, plain_error, norm


def assert_as_close(model, plain, make_arguments):
    """To the float32 model as plain bfloat16. Returns the relative error of the latter."""
    error, plain_error, norm = errors(model, plain, make_arguments)
    assert math.isfinite(error) and 0 < plain_error < 0.1 * norm
    assert error <= 1.05 * plain_error, f"{error / plain_error:.3f} of the plain model's error"
    return plain_error / norm


@every_class
def test_injected_and_ejected(kernel, device, name):
    """The level, signatures, outputs in both dtypes; and after ejection the same bits and state."""
    small, outcomes = MODELS[name], {}
    for dtype in (BFLOAT16, torch.float32):
        plain = small.model(device, dtype)
        model, arguments = copy.deepcopy(plain), small.arguments(device, dtype)
        expected, state = call(model, arguments), copy.deepcopy(model.state_dict())
        report = kernel.inject_kernels(model)
        assert signatures(model) == signatures(plain)
        result = call(model, arguments)
        assert_same_form(result, expected)
        outcomes[dtype] = set(report.levels.values()), any(on_kernels(report).values())
        if dtype == BFLOAT16:
            error = assert_as_close(
                model, plain, lambda dtype, seed: small.arguments(device, dtype, seed)
            )
        else:
            for mine, other in zip(result[0], expected[0], strict=True):
                assert relative_distance(mine, other) <= OF_BFLOAT16 * error
        kernel.eject_kernels(model)
        assert_same(call(model, arguments), expected)
        assert_same(pytree.tree_flatten(model.state_dict()), pytree.tree_flatten(state))
        assert signatures(model) == signatures(plain)
    level = LEVEL[name]
    assert outcomes[BFLOAT16] == ({level}, level != "not at all")
    level = "not at all" if name in ONLY_ATTENTION else level
    assert outcomes[torch.float32] == ({level}, level != "not at all")


@pytest.mark.parametrize("name", [name for name in MODELS if LEVEL[name] == "not at all"])
def test_only_in_cuda_graphs(kernel, device, name):
    model = MODELS[name].model(device, BFLOAT16)
    report = kernel.inject_kernels(model, cuda_graphs=True)
    assert report.levels == {"": "only in CUDA graphs"}


# Of those with the smallest outputs.
@pytest.mark.parametrize("name", ["PriorTransformer", "Cosmos3OmniTransformer"])
def test_a_larger_error_is_found(kernel, device, name):
    """Of 1.25 times that of plain bfloat16."""
    small = MODELS[name]
    plain = small.model(device, BFLOAT16)
    make = lambda dtype, seed: small.arguments(device, dtype, seed)  # noqa: E731
    relative_error = assert_as_close(plain, plain, make)
    model = copy.deepcopy(plain)

    def disturb(module, args, result):
        noisy = lambda x: x * (1 + 0.75 * relative_error * torch.randn_like(x))  # noqa: E731
        return pytree.tree_map(noisy, result)

    model.register_forward_hook(disturb)
    with pytest.raises(AssertionError, match="of the plain model's error"):
        assert_as_close(model, plain, make)


# --------------------------------------------------------------------------------------------------
# torch.compile

# test_conformance.py compiles the families and test_injection_generic.py the UNet. Models of several
# ControlNets add up what each of these computes.
COMPILED_ELSEWHERE = {*FAMILY_OF, "UNet2DConditionModel", *(n for n in MODELS if "Multi" in n)}


def compiled(model, arguments):
    """The result of a compiled model, its number of graphs, and whether there are graph breaks."""
    torch._dynamo.reset()
    counters.clear()
    counter = CompileCounterWithBackend("eager")
    result = joined(torch.compile(model, backend=counter), arguments)
    return result, counter.frame_count, bool(counters["graph_break"])


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("name", [name for name in MODELS if name not in COMPILED_ELSEWHERE])
def test_compiled_without_another_graph_break(kernel, device, name):
    """One graph if the plain model is one, and at most as many."""
    small = MODELS[name]
    plain, arguments = small.model(device, BFLOAT16), small.arguments(device, BFLOAT16)
    model = copy.deepcopy(plain)
    kernel.inject_kernels(model)
    result, graphs, is_broken = compiled(model, arguments)
    # A copy: models keep tables from their first call, and then compile to fewer graphs.
    assert relative_distance(result, joined(copy.deepcopy(plain), arguments)) < 0.1
    if is_broken:
        _, plain_graphs, _ = compiled(plain, arguments)
        assert graphs <= plain_graphs
    else:
        assert graphs == 1
