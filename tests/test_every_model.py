"""Every class of diffusers' transformers, UNets and ControlNets: injected, compared, ejected, compiled.

The levels are those of docs/support.toml, and the configurations those of every_model.py.
"""

import copy
import inspect

import diffusers
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

import render_support
from checks import have_same_bits, relative_distance
from every_model import CLASSES, FAMILY_OF, MODELS, WITHOUT
from injected_pairs import assert_as_close_as_eager, group_norm_of_a_gpu, on_kernels

pytestmark = pytest.mark.usefixtures("_one_thread", "_quiet")

LEVEL = render_support.load().level
BFLOAT16 = torch.bfloat16
every_class = pytest.mark.parametrize("name", MODELS)
# Errors of both dtypes are compared with those of the plain model. The number of samples depends on that of
# an output's elements, so that a ratio of bfloat16 errors is known within 4%.
ELEMENTS, SAMPLES = 1024, 3
# Errors of these outputs are correlated.
CORRELATED = {"I2VGenXLUNet": 2, "Kandinsky3UNet": 3}
# Orders of summation differ. In float32 the distance from the float64 model is at most this multiple of the
# plain model's, for outputs of 36 elements as well, of which the ratio was up to 1.4. And a few roundings
# more of values of the output's size, where the plain model has less than one.
FLOAT32_RATIO, FLOAT32_FLOOR = 2, 4 * torch.finfo(torch.float32).eps
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
    """The signature of each module's forward. Modules with the same function share it."""
    known, found = {}, {}
    for name, part in model.named_modules():
        function = vars(part).get("forward", type(part).forward)
        if function not in known:
            known[function] = inspect.signature(part.forward)
        found[name] = known[function]
    return found


def assert_same_form(result, expected):
    """The same classes, in the same order, with the same kinds of tensors."""
    (tensors, form), (others, expected_form) = result, expected
    assert form == expected_form
    for mine, other in zip(tensors, others, strict=True):
        assert (mine.dtype, mine.shape, mine.device) == (other.dtype, other.shape, other.device)
        assert mine.stride() == other.stride()


def assert_same(result, expected):
    assert_same_form(result, expected)
    assert all(have_same_bits(*both) for both in zip(result[0], expected[0], strict=True))


def assert_as_close(name, model, plain, device):
    """To the float32 model as plain bfloat16. Returns the relative error of the latter."""
    small = MODELS[name]
    elements = joined(plain, small.arguments(device, BFLOAT16)).numel()
    wanted = ELEMENTS * CORRELATED.get(name, 1)
    error = assert_as_close_as_eager(
        model,
        plain,
        lambda dtype, seed: small.arguments(device, dtype, seed),
        samples=max(SAMPLES, wanted // elements),
        forward=joined,
        dtype=BFLOAT16,
    )
    assert error < 0.1
    return error


def in_float64(model):
    """The same model. Some compute parts in float32 in each dtype, and Kandinsky 5 and Motif Video give these
    to linear layers."""
    for layer in model.modules():
        if type(layer) is torch.nn.Linear:
            layer.register_forward_pre_hook(lambda layer, args: tuple(x.double() for x in args))
    return model.double()


def assert_float32_is_close(result, plain_result, exact):
    for mine, other, true in zip(result, plain_result, exact, strict=True):
        allowed = FLOAT32_RATIO * relative_distance(other, true) + FLOAT32_FLOOR
        assert relative_distance(mine, true) <= allowed


@pytest.mark.drawn(times=0, period=8)
@every_class
@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float32], ids=["bfloat16", "float32"])
def test_injected_and_ejected(kernel, device, name, dtype):
    """The level, signatures and outputs; and after ejection the same bits and state."""
    small = MODELS[name]
    plain = small.model(device, dtype)
    model, arguments = copy.deepcopy(plain), small.arguments(device, dtype)
    report = kernel.inject_kernels(model)
    given = signatures(model)
    expected, result = call(plain, arguments), call(model, arguments)
    assert_same_form(result, expected)
    only_attention = dtype == torch.float32 and name in ONLY_ATTENTION
    level = "not at all" if only_attention else LEVEL[name]
    assert set(report.levels.values()) == {level}
    assert any(on_kernels(report).values()) == (level != "not at all")
    if dtype == BFLOAT16:
        assert_as_close(name, model, plain, device)
    kernel.eject_kernels(model)
    assert given == signatures(plain) == signatures(model)
    assert_same(call(model, arguments), expected)
    assert_same(*(pytree.tree_flatten(one.state_dict()) for one in (model, plain)))
    if dtype == torch.float32:
        exact = call(in_float64(plain), small.arguments(device, torch.float64))[0]
        assert_float32_is_close(result[0], expected[0], exact)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "is_as_on_a_gpu"),
    [
        ("UNet2DConditionModel", False),
        ("UNet2DConditionModel", True),
        ("ControlNetModel", True),
    ],
)
def test_strides_of_results(kernel, device, name, is_as_on_a_gpu, monkeypatch):
    """Weights and images with channels first or last."""
    if is_as_on_a_gpu:
        group_norm_of_a_gpu(kernel, monkeypatch)
    first, last = torch.contiguous_format, torch.channels_last
    for weights, images in ((last, first), (first, last), (last, last)):
        plain = MODELS[name].model(device, BFLOAT16).to(memory_format=weights)
        arguments = MODELS[name].arguments(device, BFLOAT16)
        given = {
            key: x.contiguous(memory_format=images) if x.dim() == 4 else x
            for key, x in arguments.items()
        }
        model = copy.deepcopy(plain)
        kernel.inject_kernels(model)
        assert_same_form(call(model, given), call(plain, given))


@pytest.mark.parametrize("name", [name for name in MODELS if LEVEL[name] == "not at all"])
def test_only_in_cuda_graphs(kernel, device, name):
    model = MODELS[name].model(device, BFLOAT16)
    report = kernel.inject_kernels(model, cuda_graphs=True)
    assert report.levels == {"": "only in CUDA graphs"}


# Of those with the smallest outputs.
@pytest.mark.parametrize("name", ["PriorTransformer", "Cosmos3OmniTransformer"])
def test_a_larger_error_is_found(kernel, device, name):
    """Of 1.25 times that of plain bfloat16, and in float32 of 8 times that of plain float32."""
    small = MODELS[name]
    plain = small.model(device, BFLOAT16)
    relative_error = assert_as_close(name, plain, plain, device)
    model = copy.deepcopy(plain)

    def disturbed(value, error):
        return pytree.tree_map(lambda x: x * (1 + error * torch.randn_like(x)), value)

    model.register_forward_hook(lambda module, args, out: disturbed(out, 0.75 * relative_error))
    with pytest.raises(AssertionError, match="of the eager model's error"):
        assert_as_close(name, model, plain, device)
    plain = small.model(device)
    result = call(plain, small.arguments(device))[0]
    exact = call(in_float64(plain), small.arguments(device, torch.float64))[0]
    assert_float32_is_close(result, result, exact)
    errors = [relative_distance(one, true) for one, true in zip(result, exact, strict=True)]
    with pytest.raises(AssertionError):
        assert_float32_is_close(disturbed(result, 8 * max(errors)), result, exact)


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
@pytest.mark.drawn(times=0, period=5)
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
