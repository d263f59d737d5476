"""Results in the caller's memory, `out` or in place: written elements, and refused calls.

Refused is what is not of the result's shape, dtype and device, and what shares elements with itself or with
what is read. Where a derivative is taken: test_differentiation.py.
"""

import contextlib
import random

import pytest
import torch

from checks import MemorySnapshot, assert_same_bits, tensors_of
from inputs import (
    DTYPES,
    WITH_OUT,
    WRITABLE_LAYOUTS,
    coordinates_and_frequencies,
    every_second,
    narrowed,
    normal,
    pairwise,
    rotary_tables,
    widest_dtype,
    writing_call,
)
from test_errors import OUT_FIELDS, longer, refused_unchanged, replace, sentence

OUTPUTS = tuple(OUT_FIELDS)
every_operation = pytest.mark.parametrize("name", WITH_OUT)
every_output = pytest.mark.parametrize(
    ("name", "output"),
    [*((name, "out") for name in WITH_OUT), *(("qk_norm_rope", output) for output in OUTPUTS)],
)
every_kind_of_output = pytest.mark.parametrize("output", OUT_FIELDS)
# Operations whose x may be out itself.
IN_PLACE = ("gelu", "silu")


def call_with_out(kernel, device, name, dtype=None, layout="odd_rows", hidden=128):
    options = {"dtype": dtype or widest_dtype(name), "device": device, "heads": 2}
    options["shape"] = (2, 5, hidden)
    return writing_call(kernel, name, out_layout=layout, **options)


def without_out(arguments):
    return {key: value for key, value in arguments.items() if key != "out"}


# --------------------------------------------------------------------------------------------------
# One result


@pytest.mark.sanitize
@pairwise(name=WITH_OUT, dtype=DTYPES, layout=WRITABLE_LAYOUTS, hidden=[1, 65, 128, 2048])
def test_values(kernel, device, name, dtype, layout, hidden):
    """The same bits as a new result, and no other write."""
    dtype = narrowed(dtype, name)
    function, arguments = call_with_out(kernel, device, name, dtype, layout, hidden)
    out = arguments["out"]
    memory = MemorySnapshot(tensors_of(arguments))
    version = out._version
    assert function(**arguments) is out
    assert_same_bits(out, function(**without_out(arguments)))
    memory.allow(out)
    memory.assert_unchanged()
    assert out._version == version + 1


def freed(tensor):
    tensor.untyped_storage().resize_(2)
    return tensor


# How an output is changed, and the sentence's text after "got".
MISTAKES = {
    "float64": (torch.Tensor.double, "float64"),
    "int64": (torch.Tensor.long, "int64"),
    "stride": (every_second, "stride 2"),
    "longer": (longer, "129)"),
    "fewer_dims": (lambda t: t[0], ""),
    "more_dims": (lambda t: t[None], "(1, 2, 5, "),
    "0d": (lambda t: t[(0,) * t.dim()], "()"),
    "empty": (lambda t: t[:0], "(0, 5, "),
    "expanded": (lambda t: t[:1].expand_as(t), "stride 0 in dimension 0"),
    "expanded_rows": (lambda t: t[:, :1].expand_as(t), "stride 0 in dimension 1"),
    "freed": (freed, "one of 2 bytes"),
    "device": (torch.Tensor.cpu, "cpu"),
}
OTHER_TYPES = [3, 2.5, "x", True, (), [1.0], object()]


@every_output
@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes(kernel, device, name, output, what):
    if (what, device) == ("device", "cpu"):
        pytest.skip("on a CPU the only other device is meta, which gets shapes alone")
    change, got = MISTAKES[what]
    function, arguments = call_with_out(kernel, device, name, layout="contiguous")
    replace(output, change)(arguments)
    got = got if name != "attention" else got.replace("129", "65")
    refused_unchanged(function, arguments, sentence(name, output, got))


@every_operation
@pytest.mark.parametrize("value", OTHER_TYPES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_other_types(kernel, device, name, value, requires_grad):
    function, arguments = call_with_out(kernel, device, name)
    next(tensors_of(arguments)).requires_grad_(requires_grad)
    with pytest.raises(TypeError, match=f"^{name}: out must be a tensor or None, got "):
        function(**{**arguments, "out": value})


@every_operation
def test_other_mistakes_come_first(kernel, device, name):
    function, arguments = call_with_out(kernel, device, name)
    leader = next(iter(arguments))
    arguments[leader] = arguments[leader].double()
    arguments["out"] = arguments["out"].double()
    refused_unchanged(function, arguments, sentence(name, leader, "float64"))


@every_operation
def test_what_is_read_lies_in_out(kernel, device, name):
    """The first element of each argument in turn is the last one of out."""
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
        refused_unchanged(function, given, sentence(name, key, "overlapping elements"))


@every_operation
def test_an_argument_is_out(kernel, device, name):
    """Refused, except for operations whose elements only depend on the same element."""
    function, arguments = call_with_out(kernel, device, name, layout="contiguous")
    for key, value in without_out(arguments).items():
        if not isinstance(value, torch.Tensor) or value.shape != arguments["out"].shape:
            continue
        # An expanded bias, or another view of the same elements, is equivalent to the tensor itself.
        same = value.view(value.shape)
        given = {**arguments, key: value, "out": same}
        if name not in IN_PLACE:
            refused_unchanged(function, given, sentence(name, key, "overlapping elements"))
        else:
            given = {**given, key: value.clone()}
            expected = function(**without_out(given))
            function(**{**given, "out": given[key]})
            assert_same_bits(given[key], expected)


# --------------------------------------------------------------------------------------------------
# Query and key in place

SHARED = "overlapping elements"


def test_query_and_key_that_overlap(kernel, device):
    b = torch.randn(2, 6, 16, device=device)
    pattern = sentence("qk_norm_rope", "k", SHARED)
    for q, k in ((b[:, :5], b[:, 1:]), (b[:, 1:], b[:, :5]), (b[..., :8], b[..., 6:14]), (b, b)):
        arguments = {"q": q, "k": k, "heads": 2, "inplace": True}
        refused_unchanged(kernel.qk_norm_rope, arguments, pattern)


@pytest.mark.parametrize(
    "argument", ["q_weight", "k_weight", "cos", "sin", "coordinates", "frequencies"]
)
@pytest.mark.parametrize("written", ["q", "k"])
def test_what_is_read_lies_in_what_is_written(kernel, device, argument, written):
    q, k = (torch.randn(2, 4, 16, device=device) for _ in range(2))
    arguments = {"q": q, "k": k, "heads": 2, "inplace": True}
    arguments.update({key: torch.ones(16, device=device) for key in ("q_weight", "k_weight")})
    cos, sin = rotary_tables(4, 16, dtype=torch.float32, device=device)
    target = arguments[written]
    rope = kernel.CoordinateRope(*coordinates_and_frequencies(1, 4, 3, 2, device))
    arguments |= {
        "q_weight": {"q_weight": target[1, 3]},
        "k_weight": {"k_weight": target[0, 0]},
        "cos": {"rope": (target[0], sin)},
        "sin": {"rope": (cos, target[1])},
        "coordinates": {"rope": rope._replace(coordinates=target[:1, :, 4:7])},
        "frequencies": {"rope": rope._replace(frequencies=target[1, 2, :2])},
    }[argument]
    pattern = sentence("qk_norm_rope", argument, SHARED)
    message = refused_unchanged(kernel.qk_norm_rope, arguments, pattern)
    assert f"memory with {written}," in message


# --------------------------------------------------------------------------------------------------
# Outputs of query, key and values


def of_outputs(device, **changes):
    q, k, v = (torch.randn(2, 5, 2, 8, device=device) for _ in range(3))
    joint = [torch.zeros(2, 9, 2, 8, device=device) for _ in range(3)]
    weights = {key: torch.ones(8, device=device) for key in ("q_weight", "k_weight")}
    rope = rotary_tables(5, 8, dtype=torch.float32, device=device)
    options = {"v": v, "rope": rope, "heads": 2, "norm": "per_head", **weights}
    return {"q": q, "k": k, "out": tuple(b[:, 4:] for b in joint), **options, **changes}


def output_refused(kernel, arguments, name, written):
    pattern = sentence("qk_norm_rope", name, SHARED)
    message = refused_unchanged(kernel.qk_norm_rope, arguments, pattern)
    assert f"memory with {written}, which is written, got" in message


@pytest.mark.parametrize(("first", "second"), [(0, 1), (0, 2), (1, 2)])
def test_outputs_that_overlap(kernel, device, first, second):
    arguments = of_outputs(device)
    outs, buffer = list(arguments["out"]), torch.zeros(2, 12, 2, 8, device=device)
    outs[first], outs[second] = buffer[:, 1:6], buffer[:, 5:10]
    arguments["out"] = tuple(outs)
    output_refused(kernel, arguments, OUTPUTS[second], OUTPUTS[first])
    outs[second] = buffer[:, 6:11]
    arguments["out"] = tuple(outs)
    assert len(kernel.qk_norm_rope(**arguments)) == 3


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("is_whole", [False, True])
def test_outputs_that_overlap_inputs(kernel, device, name, index, is_whole):
    """An input may be its own output, but not another's. A slice of it may not."""
    arguments = of_outputs(device)
    outs, buffer = list(arguments["out"]), torch.randn(2, 6, 2, 8, device=device)
    arguments[name] = buffer[:, :5]
    outs[index] = buffer[:, :5] if is_whole else buffer[:, 1:]
    arguments["out"] = tuple(outs)
    if is_whole and "qkv"[index] == name:
        expected = outs[index].clone()
        result = kernel.qk_norm_rope(**arguments)[index]
        assert torch.equal(result, expected) == (name == "v")
    else:
        output_refused(kernel, arguments, name, OUTPUTS[index])


@every_kind_of_output
@pytest.mark.parametrize("has_head_dim", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        *((2, 5, 3, 1, 8), (2, 5, 4, 1, 8), (2, 5, 2, 2, 8), (2, 5, 0, 2, 8), (2, 5, 2, 0, 8)),
        *((2, 5, 2, 1, 4), (2, 5, 2, 1, 16), (1, 5, 2, 1, 8), (2, 4, 2, 1, 8), (2, 2, 1, 5, 8)),
        *((2, 5, 1, 2, 1, 8), (2, 5, 2, 1, 8, 1)),
    ],
    ids=str,
)
def test_chunks_of_heads_of_other_shapes(kernel, device, output, has_head_dim, shape):
    arguments = of_outputs(device)
    if not has_head_dim:
        tensors = {name: arguments[name].flatten(2) for name in ("q", "k", "v")}
        out = tuple(t.unflatten(2, (2, 1, 8)) for t in map(torch.zeros_like, tensors.values()))
        arguments |= {**tensors, "out": out}
    replace(output, lambda _: torch.zeros(shape, device=device))(arguments)
    refused_unchanged(kernel.qk_norm_rope, arguments, sentence("qk_norm_rope", output, str(shape)))


@every_kind_of_output
@pytest.mark.parametrize("chunk_heads", [1, 2, 2**16])
def test_most_heads_in_chunks(kernel, device, output, chunk_heads):
    name, index = output[0], OUT_FIELDS[output]
    for heads in (2**16, 2**17):
        x = torch.randn(2, 5, heads, 2, device=device)
        arguments = {**dict.fromkeys("qkv", x[:, :, :1]), "norm": "none", name: x}
        arguments["out"] = [torch.zeros_like(x[:, :, :1]) for _ in range(3)]
        arguments["heads"] = arguments["q"].shape[2]
        arguments["out"][index] = torch.zeros_like(x).unflatten(2, (-1, chunk_heads))
        if heads > 2**16:
            pattern = sentence("qk_norm_rope", output, str(heads))
            refused_unchanged(kernel.qk_norm_rope, arguments, pattern)
        else:
            out = kernel.qk_norm_rope(**arguments)[index]
            assert torch.equal(out.flatten(2, 3), x)


@every_kind_of_output
def test_chunks_of_heads_that_overlap(kernel, device, output):
    arguments = of_outputs(device)
    index = OUT_FIELDS[output]
    expanded = torch.zeros(2, 5, 1, 1, 8, device=device).expand(-1, -1, 2, -1, -1)
    replace(output, lambda _: expanded)(arguments)
    pattern = sentence("qk_norm_rope", output, "stride 0 in dimension 2")
    refused_unchanged(kernel.qk_norm_rope, arguments, pattern)
    sliding = torch.zeros(200, device=device).as_strided((2, 5, 2, 1, 8), (80, 16, 4, 8, 1))
    replace(output, lambda _: sliding)(arguments)
    refused_unchanged(kernel.qk_norm_rope, arguments, sentence("qk_norm_rope", output, "strides"))
    # A view of its own input in another shape.
    name = "qkv"[index]
    replace(output, lambda _: arguments[name].unflatten(2, (2, 1)))(arguments)
    output_refused(kernel, arguments, name, output)


@pytest.mark.parametrize("name", ["q_weight", "k_weight", "cos", "sin", "k_cos", "k_sin"])
@pytest.mark.parametrize("index", range(3))
def test_outputs_over_what_is_read(kernel, device, name, index):
    arguments = of_outputs(device)
    out = arguments["out"][index]
    inside = out[0, 1, 1] if name.endswith("weight") else out[1, :, 0]
    if name.endswith("weight"):
        arguments[name] = inside
    else:
        of_key = "k_" if name.startswith("k_") else ""
        cos, sin = arguments["rope"]
        arguments[f"{of_key}rope"] = (inside, sin) if name.endswith("cos") else (cos, inside)
    output_refused(kernel, arguments, name, OUTPUTS[index])


# --------------------------------------------------------------------------------------------------
# Random views: refused exactly if sets of addresses intersect


def addresses(tensor):
    """Addresses of all bytes of each element."""
    starts = torch.tensor([0])
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        starts = (starts[:, None] + torch.arange(size) * stride).flatten()
    bytes_ = tensor.element_size()
    starts = (starts + tensor.storage_offset()) * bytes_
    return (starts[:, None] + torch.arange(bytes_)).flatten().tolist()


def random_view(buffer, generator, rows):
    """(2, rows, 1, 2) with any strides of the first two dimensions, most of them small."""
    batch_stride, row_stride = (generator.choice(range(30)) for _ in range(2))
    reach = batch_stride + (rows - 1) * row_stride + 2
    offset = generator.randrange(min(buffer.numel() - reach, 40))
    return buffer.as_strided((2, rows, 1, 2), (batch_stride, row_stride, 2, 1), offset)


def query_and_key(kernel, generator, device, dtype):
    """Both in one buffer, with tables."""
    rows = generator.choice([1, 2, 3, 5])
    buffer = torch.randn(400, device=device).to(dtype)
    q, k = (random_view(buffer, generator, rows) for _ in range(2))
    cos = buffer.as_strided((rows, 2), (generator.randrange(2, 9), 1), 100)
    return {"q": q, "k": k, "rope": (cos, torch.ones_like(cos))}, (q, k), cos


def query_and_coordinates(kernel, generator, device, dtype):
    """Float32 coordinates in the written memory, byte for byte."""
    rows = generator.choice([1, 2, 3])
    buffer = normal(200, dtype=torch.float32, device=device)
    q = random_view(buffer.view(dtype), generator, rows)
    coordinates = buffer.as_strided(
        (1, rows, 1), (1, generator.randrange(1, 40), 1), generator.randrange(0, 60)
    )
    rope = kernel.CoordinateRope(coordinates, torch.ones(1, device=device))
    return {"q": q, "k": torch.randn_like(q.contiguous()), "rope": rope}, (q,), coordinates


@pytest.mark.parametrize("draw", [query_and_key, query_and_coordinates])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_random_views_in_place(kernel, device, draw, dtype):
    generator = random.Random(20)
    counts = {False: 0, True: 0}
    for _ in range(1000):
        arguments, written, read = draw(kernel, generator, device, dtype)
        own = [address for tensor in written for address in addresses(tensor)]
        shares = len(set(own)) < len(own) or bool(set(own) & set(addresses(read)))
        counts[shares] += 1
        refusal = pytest.raises(ValueError, match="qk_norm_rope: .* in place, got")
        with refusal if shares else contextlib.nullcontext():
            kernel.qk_norm_rope(**arguments, heads=1, inplace=True)
    assert min(counts.values()) > 100, counts


def test_random_views_as_out(kernel, device):
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
