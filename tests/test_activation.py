"""The activations."""

import math

import pytest
import torch

from checks import CONTRACT_ELEMENTS, MemorySnapshot, check, check_nonfinite, clone_storage
from inputs import (
    ACTIVATIONS,
    DECLARATION,
    DECLARATIONS,
    LAYOUT_PAIRS,
    STRIDED_LAYOUTS,
    WRITABLE_LAYOUTS,
    every_16_bit_dtype,
    every_dtype,
    normal,
)


def variants(names):
    """Operation and keyword arguments, by name: with each choice of an operation's strings."""
    calls = {}
    for name in names:
        calls[name] = (name, {})
        for key, parameter in DECLARATIONS[name].parameters.items():
            for choice in parameter.kind.choices:
                if choice != parameter.default:
                    calls[f"{name}_{choice}"] = (name, {key: choice})
    return calls


def is_of_kind(name, kind):
    return DECLARATIONS[name].parameters["x"].kind is kind


# Of one tensor, of one with both halves, and of two tensors.
PAIRED = variants(name for name in ACTIVATIONS if "gate" in DECLARATIONS[name].parameters)
PLAIN = variants(
    name for name in ACTIVATIONS if is_of_kind(name, DECLARATION.ROWS) and name not in PAIRED
)
GATED = variants(name for name in ACTIVATIONS if is_of_kind(name, DECLARATION.GATED_ROWS))
every_activation = pytest.mark.parametrize("activation", [*PLAIN, *GATED])
every_plain = pytest.mark.parametrize("activation", PLAIN)
every_gated = pytest.mark.parametrize("activation", GATED)
every_paired = pytest.mark.parametrize("activation", PAIRED)

SIZES = [1, 2, 3, 5, 7, 8, 63, 64, 65, 128, 256, 1000, 1367, 2048, 6826, 8192, 40000, 70001]


def resolve(activation):
    """The operation's name, its keyword arguments, and how many inputs make one output."""
    name, options = {**PLAIN, **GATED, **PAIRED}[activation]
    return name, options, 2 if activation in GATED else 1


@every_activation
@pytest.mark.parametrize("hidden", SIZES)
@every_dtype
def test_sizes(kernel, device, activation, hidden, dtype):
    name, options, inputs = resolve(activation)
    rows = max(4, math.ceil(2 * CONTRACT_ELEMENTS / hidden))
    x = normal(rows, inputs * hidden, dtype=dtype, device=device, std=2.0)
    check(kernel, name, x, **options)


@every_activation
@pytest.mark.parametrize(
    "shape", [(8192,), (33, 256), (3, 11, 256), (2, 3, 5, 256), (2, 3, 2, 5, 256)], ids=str
)
@every_dtype
def test_dimensions(kernel, device, activation, shape, dtype):
    name, options, _ = resolve(activation)
    check(kernel, name, normal(*shape, dtype=dtype, device=device), **options)


@every_activation
@pytest.mark.parametrize("hidden", SIZES)
@every_dtype
def test_bias(kernel, device, activation, hidden, dtype):
    name, options, inputs = resolve(activation)
    rows = max(4, math.ceil(2 * CONTRACT_ELEMENTS / hidden))
    x = normal(rows, inputs * hidden, dtype=dtype, device=device)
    bias = normal(inputs * hidden, dtype=dtype, device=device)
    check(kernel, name, x, **options, bias=bias)


@every_activation
@pytest.mark.parametrize("bias_layout", ["misaligned", "contiguous"])
@pytest.mark.parametrize("layout", ["contiguous", *STRIDED_LAYOUTS])
@pytest.mark.parametrize("hidden", [65, 2048])
@every_dtype
def test_bias_of_strided_views(kernel, device, activation, bias_layout, layout, hidden, dtype):
    name, options, inputs = resolve(activation)
    x = normal(3, 16, inputs * hidden, dtype=dtype, device=device, layout=layout)
    bias = normal(inputs * hidden, dtype=dtype, device=device, layout=bias_layout)
    check(kernel, name, x, **options, bias=bias)


@every_activation
@pytest.mark.parametrize("shape", [(8192,), (33, 256), (2, 3, 2, 5, 256)], ids=str)
@every_dtype
def test_bias_with_dimensions(kernel, device, activation, shape, dtype):
    name, options, _ = resolve(activation)
    x = normal(*shape, dtype=dtype, device=device)
    check(kernel, name, x, **options, bias=normal(shape[-1], dtype=dtype, device=device))


@every_activation
@every_dtype
def test_bias_that_cancels(kernel, device, activation, dtype):
    """The sum is not rounded before the activation."""
    name, options, inputs = resolve(activation)
    x = normal(64, inputs * 512, dtype=dtype, device=device, mean=64.0, std=0.5)
    bias = normal(inputs * 512, dtype=dtype, device=device, mean=-64.0, std=0.5)
    check(kernel, name, x, **options, bias=bias)


@every_activation
@pytest.mark.parametrize("layout", STRIDED_LAYOUTS)
@pytest.mark.parametrize("hidden", [65, 2048])
@every_dtype
def test_strided_views(kernel, device, activation, layout, hidden, dtype):
    name, options, inputs = resolve(activation)
    x = normal(3, 32, inputs * hidden, dtype=dtype, device=device, layout=layout)
    check(kernel, name, x, **options)


@every_activation
@pytest.mark.parametrize("shape", [(2, 3, 4, 5, 64), (2, 3, 2, 3, 2, 3, 64)], ids=["5d", "7d"])
@every_dtype
def test_leading_dimensions_that_cannot_be_merged(kernel, device, activation, shape, dtype):
    name, options, _ = resolve(activation)
    x = normal(*shape, dtype=dtype, device=device, layout="transposed")
    check(kernel, name, x, **options)


def every_value(dtype, device):
    """Every finite value of a 16-bit dtype."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16)
    values = patterns.view(dtype)
    return values[values.isfinite()]


@every_plain
@every_16_bit_dtype
def test_every_16_bit_value(kernel, device, activation, dtype):
    name, options, _ = resolve(activation)
    check(kernel, name, every_value(dtype, device), contract=False, **options)


@every_gated
@every_16_bit_dtype
def test_every_16_bit_gate(kernel, device, activation, dtype):
    name, options, _ = resolve(activation)
    gate = every_value(dtype, device)
    halves = [torch.ones_like(gate), gate]
    x = torch.cat(halves[::-1] if options.get("activated") == "first" else halves)
    check(kernel, name, x, contract=False, **options)


@every_plain
def test_float32_values_of_every_magnitude(kernel, device, activation):
    name, options, _ = resolve(activation)
    exponents = torch.linspace(-37, 38, 50001, dtype=torch.float64, device=device)
    magnitudes = (10**exponents).to(torch.float32)
    x = torch.cat([magnitudes, -magnitudes, torch.linspace(-20, 20, 50001, device=device)])
    check(kernel, name, x, contract=False, **options)


@every_gated
def test_which_half_is_the_factor(kernel, device, activation):
    """The second half goes through the activation, as in diffusers, or the first where that is asked for."""
    name, options, _ = resolve(activation)
    factor, gate = torch.tensor([[3.0, -5.0], [2.0, 0.0]], device=device)
    halves = [gate, factor] if options.get("activated") == "first" else [factor, gate]
    out = check(kernel, name, torch.cat(halves)[None], **options)
    assert out[0, 0] > 0 and out[0, 1] == 0


# --------------------------------------------------------------------------------------------------
# Of two tensors


def pair(*shape, dtype, device, layouts=("contiguous", "contiguous"), **options):
    return [normal(*shape, dtype=dtype, device=device, layout=k, **options) for k in layouts]


@every_paired
@pytest.mark.parametrize("hidden", SIZES)
@every_dtype
def test_sizes_of_pairs(kernel, device, activation, hidden, dtype):
    name, options, _ = resolve(activation)
    rows = max(4, math.ceil(2 * CONTRACT_ELEMENTS / hidden))
    check(kernel, name, *pair(rows, hidden, dtype=dtype, device=device, std=2.0), **options)


@every_paired
@pytest.mark.parametrize("layouts", LAYOUT_PAIRS, ids=str)
@pytest.mark.parametrize("hidden", [65, 2048])
@every_dtype
def test_pairs_of_strided_views(kernel, device, activation, layouts, hidden, dtype):
    name, options, _ = resolve(activation)
    tensors = pair(3, 32, hidden, dtype=dtype, device=device, layouts=layouts)
    check(kernel, name, *tensors, **options)


@every_paired
@pytest.mark.parametrize(
    "shape", [(8192,), (33, 256), (2, 3, 2, 5, 256), (2, 3, 2, 3, 2, 3, 64)], ids=str
)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@every_dtype
def test_dimensions_of_pairs(kernel, device, activation, shape, layout, dtype):
    name, options, _ = resolve(activation)
    tensors = pair(*shape, dtype=dtype, device=device, layouts=("contiguous", layout))
    check(kernel, name, *tensors, **options)


@every_paired
@pytest.mark.parametrize("hidden", [64, 65])
@every_dtype
def test_a_pair_in_one_tensor(kernel, device, activation, hidden, dtype):
    """In either order, the gate before the factor as behind it; and a tensor that gates itself."""
    name, options, _ = resolve(activation)
    halves = normal(3, 7, 2 * hidden, dtype=dtype, device=device).chunk(2, dim=-1)
    for x, gate in (halves, halves[::-1], (halves[0], halves[0])):
        check(kernel, name, x, gate, **options)


def test_pairs_are_as_the_halves_of_one_tensor(kernel, device):
    x = normal(5, 512, dtype=torch.bfloat16, device=device)
    first, second = (half.contiguous() for half in x.chunk(2, dim=-1))
    assert torch.equal(kernel.gated_silu(first, second), kernel.swiglu(x))
    assert torch.equal(kernel.gated_silu(second, first), kernel.swiglu(x, activated="first"))
    for approximate in ("none", "tanh"):
        expected = kernel.geglu(x, approximate, activated="first")
        assert torch.equal(kernel.gated_gelu(second, first, approximate), expected)


@every_paired
@every_16_bit_dtype
def test_every_16_bit_gate_of_a_pair(kernel, device, activation, dtype):
    name, options, _ = resolve(activation)
    gate = every_value(dtype, device)
    check(kernel, name, torch.ones_like(gate), gate, contract=False, **options)


@every_paired
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@every_dtype
def test_nonfinite_pairs(kernel, device, activation, value, dtype):
    name, options, _ = resolve(activation)
    x, gate = pair(6, 257, dtype=dtype, device=device)
    for row in range(6):
        x[row, 97 * row % 257] = value
        gate[row, (41 * row + 200) % 257] = value
    check_nonfinite(kernel, name, x, gate, **options)


@pytest.mark.sanitize
@pytest.mark.kernels_ci
@every_paired
@pytest.mark.parametrize("layouts", [("odd_rows", "contiguous"), ("chunk", "chunk")], ids=str)
@pytest.mark.parametrize("hidden", [7, 2048])
def test_smoke_of_pairs(kernel, device, activation, layouts, hidden):
    name, options, _ = resolve(activation)
    x, gate = pair(3, hidden, dtype=torch.bfloat16, device=device, layouts=layouts)
    check(kernel, name, x, gate, contract=False, **options)


# --------------------------------------------------------------------------------------------------
# Written to a tensor of the caller's


def calls_of_size(activation, hidden, dtype, device, layout="contiguous"):
    name, options, inputs = resolve(activation)
    count = 2 if activation in PAIRED else 1
    shape = (3, 32, inputs * hidden)
    tensors = pair(*shape, dtype=dtype, device=device, layouts=[layout] * count)
    if count == 1:
        options = {**options, "bias": normal(shape[-1], dtype=dtype, device=device)}
    return name, tensors, options


@pytest.mark.parametrize("activation", [*PLAIN, *GATED, *PAIRED])
@pytest.mark.parametrize("layout", WRITABLE_LAYOUTS)
@pytest.mark.parametrize("hidden", [1, 65, 2048])
@every_dtype
def test_out(kernel, device, activation, layout, hidden, dtype):
    name, tensors, options = calls_of_size(activation, hidden, dtype, device)
    out = normal(3, 32, hidden, dtype=dtype, device=device, layout=layout)
    check(kernel, name, *tensors, **options, out=out)


@pytest.mark.parametrize("activation", [*PLAIN, *PAIRED])
@pytest.mark.parametrize("layout", WRITABLE_LAYOUTS)
@pytest.mark.parametrize("hidden", [65, 2048])
@every_dtype
def test_in_place(kernel, device, activation, layout, hidden, dtype):
    """A tensor is written over itself, as `out`, and the other one of two is left alone."""
    name, tensors, options = calls_of_size(activation, hidden, dtype, device, layout)
    expected = getattr(kernel, name)(*tensors, **options)
    for index in range(len(tensors)):
        given = [clone_storage(tensor) for tensor in tensors]
        memory = MemorySnapshot(given)
        out = getattr(kernel, name)(*given, **options, out=given[index])
        assert out is given[index] and torch.equal(out, expected)
        memory.allow(out)
        memory.assert_unchanged()


def test_beside_attention_in_one_buffer(kernel, device):
    """As in a single block of FLUX: attention and feed-forward, which one projection takes together."""
    dtype, heads, head_dim = torch.bfloat16, 2, 64
    buffer = normal(2, 9, 128 + 512, dtype=dtype, device=device)
    q, k, v = (normal(2, 9, heads, head_dim, dtype=dtype, device=device) for _ in range(3))
    x = normal(2, 9, 512, dtype=dtype, device=device)
    attended, activated = buffer.split((128, 512), dim=-1)
    kernel.attention(q, k, v, out=attended.unflatten(-1, (heads, head_dim)))
    kernel.gelu(x, "tanh", out=activated)
    expected = [kernel.attention(q, k, v).flatten(2), kernel.gelu(x, "tanh")]
    assert torch.equal(buffer, torch.cat(expected, dim=-1))


@every_activation
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@every_dtype
def test_nonfinite_values(kernel, device, activation, value, dtype):
    name, options, inputs = resolve(activation)
    x = normal(6, inputs * 257, dtype=dtype, device=device)
    for row in range(6):
        x[row, (97 * row) % x.shape[1]] = value
        x[row, (41 * row + 200) % x.shape[1]] = value
    check_nonfinite(kernel, name, x, **options)


@every_activation
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@every_dtype
def test_nonfinite_bias(kernel, device, activation, value, dtype):
    name, options, inputs = resolve(activation)
    x = normal(6, inputs * 257, dtype=dtype, device=device)
    bias = normal(inputs * 257, dtype=dtype, device=device)
    bias[0] = bias[inputs * 257 - 1] = value
    check_nonfinite(kernel, name, x, **options, bias=bias)


@pytest.mark.sanitize
@pytest.mark.kernels_ci
@every_activation
@pytest.mark.parametrize(
    ("shape", "layout", "dtype"),
    [
        ((2, 3, 14), "odd_rows", torch.bfloat16),
        ((3, 2048), "misaligned", torch.float32),
        ((3, 2048), "chunk", torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("bias_layout", [None, "contiguous", "misaligned"])
def test_smoke(kernel, device, activation, shape, layout, dtype, bias_layout):
    name, options, _ = resolve(activation)
    x = normal(*shape, dtype=dtype, device=device, layout=layout)
    if bias_layout is not None:
        bias = normal(shape[-1], dtype=dtype, device=device, layout=bias_layout)
        options = {**options, "bias": bias}
    check(kernel, name, x, contract=False, **options)
