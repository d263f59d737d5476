"""The activations."""

import math

import pytest
import torch

from checks import CONTRACT_ELEMENTS, check, check_nonfinite
from inputs import (
    ACTIVATIONS,
    DECLARATION,
    DECLARATIONS,
    STRIDED_LAYOUTS,
    every_16_bit_dtype,
    every_dtype,
    normal,
)


def variants(*kinds):
    """Operation and keyword arguments, by name: with each of an operation's approximations."""
    calls = {}
    for name in ACTIVATIONS:
        parameters = DECLARATIONS[name].parameters
        if parameters["x"].kind not in kinds:
            continue
        calls[name] = (name, {})
        approximate = parameters.get("approximate")
        for choice in approximate.kind.choices if approximate else ():
            if choice != approximate.default:
                calls[f"{name}_{choice}"] = (name, {"approximate": choice})
    return calls


PLAIN = variants(DECLARATION.ROWS)
GATED = variants(DECLARATION.GATED_ROWS)
every_activation = pytest.mark.parametrize("activation", [*PLAIN, *GATED])
every_plain = pytest.mark.parametrize("activation", PLAIN)
every_gated = pytest.mark.parametrize("activation", GATED)

SIZES = [1, 2, 3, 5, 7, 8, 63, 64, 65, 128, 256, 1000, 1367, 2048, 6826, 8192, 40000, 70001]


def resolve(activation):
    """The operation's name, its keyword arguments, and how many inputs make one output."""
    name, options = {**PLAIN, **GATED}[activation]
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
    x = torch.cat([torch.ones_like(gate), gate])
    check(kernel, name, x, contract=False, **options)


@every_plain
def test_float32_values_of_every_magnitude(kernel, device, activation):
    name, options, _ = resolve(activation)
    exponents = torch.linspace(-37, 38, 50001, dtype=torch.float64, device=device)
    magnitudes = (10**exponents).to(torch.float32)
    x = torch.cat([magnitudes, -magnitudes, torch.linspace(-20, 20, 50001, device=device)])
    check(kernel, name, x, contract=False, **options)


@every_gated
def test_first_half_is_the_factor(kernel, device, activation):
    """As in diffusers: the second half goes through the activation."""
    name, options, _ = resolve(activation)
    x = torch.tensor([[3.0, -5.0, 2.0, 0.0]], device=device)
    out = check(kernel, name, x, **options)
    assert out[0, 0] > 0 and out[0, 1] == 0


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
