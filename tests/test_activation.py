"""The activations."""

import math

import pytest
import torch

from checks import CONTRACT_ELEMENTS, check, check_nonfinite
from inputs import (
    ACTIVATIONS,
    DTYPES,
    GATED,
    LAYOUTS,
    TABLE,
    WRITABLE_LAYOUTS,
    every_16_bit_dtype,
    every_dtype,
    normal,
    pairwise,
)

# Operation and keyword arguments by name, for each value of an operation's string arguments.
VARIANTS = {name: (name, {}) for name in ACTIVATIONS}
VARIANTS |= {
    f"{name}_{choice}": (name, {key: choice})
    for name in ACTIVATIONS
    for key, (_, choice) in TABLE[name].strings
}
PLAIN = [activation for activation, (name, _) in VARIANTS.items() if name not in GATED]
every_activation = pytest.mark.parametrize("activation", VARIANTS)
every_plain = pytest.mark.parametrize("activation", PLAIN)
SIZES = [1, 2, 3, 5, 7, 8, 63, 64, 65, 128, 256, 1000, 1367, 2048, 6826, 8192, 40000, 70001]
BIASES = [None, "contiguous", "misaligned"]


def resolve(activation):
    """The operation's name, its keyword arguments, and the number of inputs per output."""
    name, options = VARIANTS[activation]
    return name, options, 2 if name in GATED else 1


def with_bias(options, bias, x):
    if bias is None:
        return options
    return {**options, "bias": normal(x.shape[-1], dtype=x.dtype, device=x.device, layout=bias)}


@pairwise(activation=VARIANTS, hidden=SIZES, dtype=DTYPES, bias=BIASES)
def test_sizes(kernel, device, activation, hidden, dtype, bias):
    name, options, inputs = resolve(activation)
    rows = max(4, math.ceil(2 * CONTRACT_ELEMENTS / hidden))
    x = normal(rows, inputs * hidden, dtype=dtype, device=device, std=2.0)
    check(kernel, name, x, **with_bias(options, bias, x))


SHAPES = [(8192,), (33, 256), (3, 32, 130), (3, 32, 4096), (2, 3, 2, 5, 256)]
SHAPES += [(2, 3, 2, 3, 2, 3, 64)]


@pairwise(activation=VARIANTS, shape=SHAPES, layout=LAYOUTS, dtype=DTYPES, bias=BIASES)
def test_layouts(kernel, device, activation, shape, layout, dtype, bias):
    """Some leading dimensions cannot be merged."""
    name, options, _ = resolve(activation)
    x = normal(*shape, dtype=dtype, device=device, layout=layout)
    check(kernel, name, x, **with_bias(options, bias, x))


@every_activation
@every_dtype
def test_bias_that_cancels(kernel, device, activation, dtype):
    """The sum is not rounded before the activation."""
    name, options, inputs = resolve(activation)
    x = normal(64, inputs * 512, dtype=dtype, device=device, mean=64.0, std=0.5)
    bias = normal(inputs * 512, dtype=dtype, device=device, mean=-64.0, std=0.5)
    check(kernel, name, x, **options, bias=bias)


def every_value(dtype, device):
    """Every finite value of a 16-bit dtype."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16)
    values = patterns.view(dtype)
    return values[values.isfinite()]


@every_activation
@every_16_bit_dtype
def test_every_16_bit_value(kernel, device, activation, dtype):
    name, options, inputs = resolve(activation)
    x = every_value(dtype, device)
    if inputs == 2:
        halves = [torch.ones_like(x), x]
        x = torch.cat(halves[::-1] if options.get("activated") == "first" else halves)
    check(kernel, name, x, contract=False, **options)


@every_plain
def test_float32_values_of_every_magnitude(kernel, device, activation):
    name, options, _ = resolve(activation)
    exponents = torch.linspace(-37, 38, 50001, dtype=torch.float64, device=device)
    magnitudes = (10**exponents).to(torch.float32)
    x = torch.cat([magnitudes, -magnitudes, torch.linspace(-20, 20, 50001, device=device)])
    check(kernel, name, x, contract=False, **options)


@pairwise(activation=PLAIN, layout=WRITABLE_LAYOUTS, hidden=[65, 2048], dtype=DTYPES, bias=BIASES)
def test_in_place(kernel, device, activation, layout, hidden, dtype, bias):
    """`out` may be x itself."""
    name, options, _ = resolve(activation)
    x = normal(3, 32, hidden, dtype=dtype, device=device, layout=layout)
    check(kernel, name, x, **with_bias(options, bias, x), out=x)


@pairwise(
    activation=VARIANTS,
    value=[math.nan, math.inf, -math.inf],
    dtype=DTYPES,
    is_in_bias=[False, True],
)
def test_nonfinite_values(kernel, device, activation, value, dtype, is_in_bias):
    name, options, inputs = resolve(activation)
    x = normal(6, inputs * 257, dtype=dtype, device=device)
    options = with_bias(options, "contiguous" if is_in_bias else None, x)
    if is_in_bias:
        options["bias"][0] = options["bias"][-1] = value
    else:
        for row in range(6):
            x[row, 97 * row % x.shape[1]] = x[row, (41 * row + 200) % x.shape[1]] = value
    check_nonfinite(kernel, name, x, **options)


@pytest.mark.sanitize
@every_activation
@pytest.mark.parametrize(
    ("shape", "layout", "dtype", "bias"),
    [
        ((2, 3, 14), "odd_rows", torch.bfloat16, "misaligned"),
        ((3, 2048), "misaligned", torch.float32, None),
        ((3, 2048), "chunk", torch.float16, "contiguous"),
        ((3, 2048), "contiguous", torch.bfloat16, None),
    ],
    ids=str,
)
def test_smoke(kernel, device, activation, shape, layout, dtype, bias):
    name, options, _ = resolve(activation)
    x = normal(*shape, dtype=dtype, device=device, layout=layout)
    check(kernel, name, x, contract=False, **with_bias(options, bias, x))
