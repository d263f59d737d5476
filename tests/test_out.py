"""`out`: a tensor of the caller's that is written in place of a new result.

Refused before anything is written: what is not of the result's shape, dtype and device, and what shares
elements with itself or with what is read. Where a derivative is taken: test_differentiation.py.
"""

import random

import pytest
import torch

from checks import MemorySnapshot, assert_same_bits, tensors_of
from inputs import (
    DTYPES,
    WITH_OUT,
    WRITABLE_LAYOUTS,
    out_for,
    pairwise,
    sample,
    widest_dtype,
)
from test_errors import assert_refused, every_second, longer, sentence
from test_overlap import addresses, random_view

every_operation = pytest.mark.parametrize("name", WITH_OUT)
SHAPE = (2, 5, 128)
# Operations whose x may be out itself.
IN_PLACE = ("gelu", "silu")


def call_with_out(kernel, device, name, dtype=None, layout="odd_rows", **options):
    dtype = dtype or widest_dtype(name)
    options = {"dtype": dtype, "device": device, "shape": SHAPE, "heads": 2, **options}
    function, arguments = sample(kernel, name, **options)
    return function, {**arguments, "out": out_for(function, arguments, layout)}


def without_out(arguments):
    return {key: value for key, value in arguments.items() if key != "out"}


# --------------------------------------------------------------------------------------------------
# What is written


@pytest.mark.sanitize
@pairwise(name=WITH_OUT, dtype=DTYPES, layout=WRITABLE_LAYOUTS)
def test_values(kernel, device, name, dtype, layout):
    """The bits of the new result, and nothing beside them."""
    dtype = min(dtype, widest_dtype(name), key=lambda d: d.itemsize)
    function, arguments = call_with_out(kernel, device, name, dtype, layout)
    out = arguments["out"]
    memory = MemorySnapshot(tensors_of(arguments))
    version = out._version
    assert function(**arguments) is out
    assert_same_bits(out, function(**without_out(arguments)))
    memory.allow(out)
    memory.assert_unchanged()
    assert out._version == version + 1


@every_operation
def test_none_is_a_new_result(kernel, device, name):
    function, arguments = call_with_out(kernel, device, name)
    result = function(**{**arguments, "out": None})
    assert result.is_contiguous()
    assert_same_bits(result, function(**without_out(arguments)))


# --------------------------------------------------------------------------------------------------
# What is refused


def other_dtype(tensor):
    return tensor.to(torch.float64)


# What is made of `out`, and what the sentence says that it got.
MISTAKES = {
    "float64": (other_dtype, "float64"),
    "int64": (lambda t: torch.zeros_like(t, dtype=torch.int64), "int64"),
    "stride": (every_second, "stride 2"),
    "longer": (longer, "129)"),
    "fewer_dims": (lambda t: t[0], ""),
    "more_dims": (lambda t: t[None], "(1, 2, 5, "),
    "0d": (lambda t: t[(0,) * t.dim()], "()"),
    "empty": (lambda t: t[:0], "(0, 5, "),
    "expanded": (lambda t: t[:1].expand_as(t), "stride 0 in dimension 0"),
    "expanded_rows": (lambda t: t[:, :1].expand_as(t), "stride 0 in dimension 1"),
}
OTHER_TYPES = [3, 2.5, "x", True, (), [1.0], object()]


def refused(function, arguments, pattern):
    memory = MemorySnapshot(tensors_of(arguments))
    message = assert_refused(function, arguments, pattern)
    memory.assert_unchanged()
    return message


@every_operation
@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes(kernel, device, name, what):
    change, got = MISTAKES[what]
    function, arguments = call_with_out(kernel, device, name, layout="contiguous")
    arguments["out"] = change(arguments["out"])
    got = got if name != "attention" else got.replace("129", "65")
    refused(function, arguments, sentence(name, "out", got))


@every_operation
@pytest.mark.parametrize("value", OTHER_TYPES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_other_types(kernel, device, name, value, requires_grad):
    function, arguments = call_with_out(kernel, device, name)
    next(tensors_of(arguments)).requires_grad_(requires_grad)
    with pytest.raises(TypeError, match=f"^{name}: out must be a tensor or None, got "):
        function(**{**arguments, "out": value})


@every_operation
def test_another_device(kernel, device, name):
    if device == "cpu":
        pytest.skip("on a CPU the only other device is meta, which gets shapes alone")
    function, arguments = call_with_out(kernel, device, name)
    arguments["out"] = arguments["out"].cpu()
    assert_refused(function, arguments, sentence(name, "out", "cpu"))


@every_operation
def test_freed_memory(kernel, device, name):
    function, arguments = call_with_out(kernel, device, name, layout="contiguous")
    arguments["out"].untyped_storage().resize_(2)
    assert_refused(function, arguments, sentence(name, "out", "one of 2 bytes"))


@every_operation
def test_other_mistakes_come_first(kernel, device, name):
    function, arguments = call_with_out(kernel, device, name)
    leader = next(iter(arguments))
    arguments[leader] = arguments[leader].double()
    arguments["out"] = arguments["out"].double()
    refused(function, arguments, sentence(name, leader, "float64"))


@every_operation
def test_overlap_within_out(kernel, device, name):
    function, arguments = call_with_out(kernel, device, name, layout="contiguous")
    out = arguments["out"]
    strides = [*out.stride()]
    strides[0] = strides[1]
    memory = torch.zeros(out.numel(), dtype=out.dtype, device=device)
    arguments["out"] = memory.as_strided(out.shape, strides)
    refused(function, arguments, sentence(name, "out", f"strides {tuple(strides)}"))


@every_operation
def test_what_is_read_lies_in_out(kernel, device, name):
    """Of each argument in turn one element, the first, is the last one of out."""
    function, arguments = call_with_out(kernel, device, name, layout="contiguous")
    out = arguments["out"]
    for key, value in without_out(arguments).items():
        if not isinstance(value, torch.Tensor):
            continue
        size = value.element_size()
        first = (out.numel() * out.element_size() - size) // size
        buffer = torch.zeros(first + value.numel(), dtype=value.dtype, device=device)
        moved = buffer[first:].view(value.shape).copy_(value)
        beginning = buffer.view(torch.uint8)[: out.numel() * out.element_size()]
        given = {**arguments, key: moved, "out": beginning.view(out.dtype).view(out.shape)}
        refused(function, given, sentence(name, key, "overlapping elements"))


@every_operation
def test_an_argument_is_out(kernel, device, name):
    """Refused, but where each element of the result depends on that one alone."""
    function, arguments = call_with_out(kernel, device, name, layout="contiguous")
    for key, value in without_out(arguments).items():
        if not isinstance(value, torch.Tensor) or value.shape != arguments["out"].shape:
            continue
        # An expanded bias, or a view of its own of the same elements, is as good as the tensor itself.
        same = value.view(value.shape)
        given = {**arguments, key: value, "out": same}
        if name not in IN_PLACE:
            refused(function, given, sentence(name, key, "overlapping elements"))
        else:
            given = {**given, key: value.clone()}
            expected = function(**without_out(given))
            function(**{**given, "out": given[key]})
            assert_same_bits(given[key], expected)


def test_random_views_against_their_addresses(kernel, device):
    """What is refused, compared with the sets of addresses themselves."""
    generator = random.Random(22)
    counts = {False: 0, True: 0}
    for _ in range(1000):
        rows = generator.choice([1, 2, 3, 5])
        buffer = torch.randn(400, device=device)
        x, out = (random_view(buffer, generator, rows)[:, :, 0] for _ in range(2))
        bias = buffer[100:102]
        of_x, of_out, of_bias = map(addresses, (x, out, bias))
        is_same = of_x == of_out and x.stride() == out.stride()
        shares = len(set(of_out)) < len(of_out) or bool(
            set(of_out) & set(of_bias) or (set(of_out) & set(of_x) and not is_same)
        )
        counts[shares] += 1
        arguments = {"x": x, "bias": bias, "out": out}
        if shares:
            with pytest.raises(ValueError, match="^silu: .* to be written|is written, got"):
                kernel.silu(**arguments)
        else:
            expected = kernel.silu(x, bias)
            kernel.silu(**arguments)
            assert torch.equal(out, expected)
    assert min(counts.values()) > 100, counts
