"""softmax over the last dimension."""

import math

import pytest
import torch

import references
from checks import CONTRACT_ELEMENTS, FLOAT32_ARITHMETIC, check, check_nonfinite
from inputs import DTYPES, LAYOUTS, every_dtype, normal, pairwise

# From rows that fit in a few threads to rows that need several multiprocessors. The last ones do not fit in
# these, and one is not a multiple of a vector.
SIZES = [1, 2, 3, 7, 8, 63, 64, 65, 256, 1000, 2048, 4096, 8192, 8200, 16384, 24584, 32768]
SIZES += [40000, 65528, 65536, 131080, 300_001, 1_000_000]


def check_softmax(kernel, x, contract=True):
    """Also checks each element relative to its own size: in a long row all are close to zero."""
    out = check(kernel, "softmax", x, contract=contract)
    finfo = torch.finfo(x.dtype)
    half_ulp = 0.0 if x.dtype == torch.float32 else finfo.eps / 2
    # In float16, subnormal numbers have one spacing.
    spacing = finfo.smallest_normal * (finfo.eps if x.dtype == torch.float16 else 1)
    limits = {"rtol": half_ulp + FLOAT32_ARITHMETIC, "atol": spacing}
    torch.testing.assert_close(out.double(), references.softmax(x), **limits, equal_nan=True)
    return out


def rows_of(hidden, dtype):
    """Rows, and whether they are enough for a ratio of errors: each has the rounding error of its sum."""
    if dtype == torch.float32 and hidden > 8200:
        return 3, False
    minimum = 64 if dtype == torch.float32 else 3
    return max(minimum, math.ceil(CONTRACT_ELEMENTS / hidden)), True


@pairwise(hidden=SIZES, dtype=DTYPES)
def test_sizes(kernel, device, hidden, dtype):
    rows, contract = rows_of(hidden, dtype)
    x = normal(rows, hidden, dtype=dtype, device=device, std=3.0)
    check_softmax(kernel, x, contract)


def constant(*rows):
    return lambda x: torch.tensor(rows, device=x.device).expand_as(x)


def even_steps(first, last):
    return lambda x: torch.linspace(first, last, x.shape[-1], device=x.device).expand_as(x)


# Changes of rows that are standard normal.
CHANGES = {
    "far_below": lambda x: x - 3000.0,
    "far_above": lambda x: x + 60000.0,
    "wide": lambda x: x * 100,  # most values of a row underflow
    # A running maximum that changes with every value, or never.
    "ascending": even_steps(-12, 12),
    "descending": even_steps(12, -12),
    "of_one_value": constant([0.0], [-3.0], [30000.0]),
}


@pairwise(change=CHANGES, hidden=[1, 7, 65, 2048, 40000, 300_001], dtype=DTYPES)
def test_values(kernel, device, change, hidden, dtype):
    x = CHANGES[change](normal(3, hidden, dtype=torch.float32, device=device))
    check_softmax(kernel, x.to(dtype).contiguous(), contract=False)


@pytest.mark.parametrize("hidden", [63, 1000, 40000, 300_001])
@every_dtype
def test_largest_values(kernel, device, hidden, dtype):
    x = normal(3, hidden, dtype=dtype, device=device, std=100.0)
    largest = torch.finfo(dtype).max
    x[0, 1] = x[0, hidden - 1] = largest
    x[1, 0] = -largest
    out = check(kernel, "softmax", x, contract=False)
    assert out[0, 1] == out[0, hidden - 1] == 0.5 and out[0].count_nonzero() == 2


@pairwise(
    shape=[(8192,), (2, 3, 2, 5, 256), (2, 3, 2, 3, 2, 3, 64), (3, 11, 65), (3, 11, 10240), (7, 1)],
    layout=LAYOUTS,
    dtype=DTYPES,
)
def test_layouts(kernel, device, shape, layout, dtype):
    x = normal(*shape, dtype=dtype, device=device, layout=layout)
    check_softmax(kernel, x, contract=False)


def test_stride_of_a_single_column_is_free(kernel, device):
    x = normal(7, dtype=torch.float32, device=device).as_strided((7, 1), (1, 7))
    check_softmax(kernel, x)


MASKS = {
    "first_half": lambda hidden: slice(0, hidden // 2),
    "second_half": lambda hidden: slice(hidden // 2, hidden),
    "all_but_the_first": lambda hidden: slice(1, hidden),
    "all_but_the_last": lambda hidden: slice(0, hidden - 1),
    "every_third": lambda hidden: slice(0, hidden, 3),
}


@pairwise(mask=MASKS, hidden=[8, 65, 2048, 300_001], dtype=DTYPES)
def test_masks(kernel, device, mask, hidden, dtype):
    """Masked values (minus infinity) give zero, wherever a row's other values start."""
    x = normal(3, hidden, dtype=dtype, device=device)
    hidden_part = MASKS[mask](hidden)
    x[1:, hidden_part] = -math.inf
    out = check_softmax(kernel, x, contract=False)
    assert not out[1:, hidden_part].any()


@pairwise(value=[math.nan, math.inf, -math.inf], hidden=[1, 65, 2048, 70001], dtype=DTYPES)
def test_nonfinite_values(kernel, device, value, hidden, dtype):
    """A row of only minus infinity is NaN, as in PyTorch."""
    x = normal(6, hidden, dtype=dtype, device=device)
    x[0] = -math.inf
    x[1, 0] = x[3, hidden // 2] = x[4, hidden - 1] = value
    check_nonfinite(kernel, "softmax", x)


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("shape", "layout", "dtype"),
    [
        ((2, 3, 7), "odd_rows", torch.bfloat16),
        ((3, 2048), "contiguous", torch.float32),
        ((3, 1030), "misaligned", torch.float16),
        ((2, 40000), "contiguous", torch.bfloat16),
        ((2, 70001), "odd_rows", torch.float32),
        ((2, 300001), "contiguous", torch.float16),
    ],
    ids=str,
)
def test_smoke(kernel, device, shape, layout, dtype):
    check_softmax(kernel, normal(*shape, dtype=dtype, device=device, layout=layout), False)
