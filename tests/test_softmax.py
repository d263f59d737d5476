"""softmax over the last dimension."""

import math

import pytest
import torch

import references
from checks import CONTRACT_ELEMENTS, FLOAT32_ARITHMETIC, check, check_nonfinite
from inputs import SMALL_SIZES, STRIDED_LAYOUTS, every_dtype, normal

# From what a few threads hold to what several multiprocessors do. The last are rows that these do not hold,
# and one that is no multiple of a vector.
SIZES = [64, 65, 256, 1000, 2048, 4096, 8192, 8200, 16384, 24584, 32768, 40000, 65528, 65536]
SIZES += [131080, 1_000_000, 300_001]


def check_softmax(kernel, x, contract=True):
    """Holds every element to its own size, too: in a long row all of them are close to zero."""
    out = check(kernel, "softmax", x, contract=contract)
    finfo = torch.finfo(x.dtype)
    half_ulp = 0.0 if x.dtype == torch.float32 else finfo.eps / 2
    # Of float16, numbers below the smallest normal one are spaced alike.
    spacing = finfo.smallest_normal * (finfo.eps if x.dtype == torch.float16 else 1)
    torch.testing.assert_close(
        out.double(),
        references.softmax(x),
        rtol=half_ulp + FLOAT32_ARITHMETIC,
        atol=spacing,
        equal_nan=True,
    )
    return out


def rows_of(hidden, dtype):
    """Rows, and whether they are enough for a ratio of errors: each has one of its own sum."""
    if dtype == torch.float32 and hidden > 8200:
        return 3, False
    minimum = 64 if dtype == torch.float32 else 3
    return max(minimum, math.ceil(CONTRACT_ELEMENTS / hidden)), True


@pytest.mark.parametrize("hidden", SMALL_SIZES)
@every_dtype
def test_small_sizes(kernel, device, hidden, dtype):
    check_softmax(kernel, normal(5, 3, hidden, dtype=dtype, device=device))


@pytest.mark.parametrize("hidden", SIZES)
@every_dtype
def test_sizes(kernel, device, hidden, dtype):
    rows, contract = rows_of(hidden, dtype)
    x = normal(rows, hidden, dtype=dtype, device=device, std=3.0)
    check_softmax(kernel, x, contract)


@pytest.mark.parametrize("mean", [-3000.0, 1000.0, 60000.0])
@pytest.mark.parametrize("hidden", [64, 2048, 40000])
@every_dtype
def test_values_far_from_zero(kernel, device, mean, hidden, dtype):
    rows, contract = rows_of(hidden, dtype)
    x = normal(rows, hidden, dtype=dtype, device=device, mean=mean)
    check_softmax(kernel, x, contract and dtype == torch.float32)


@pytest.mark.parametrize("hidden", [63, 1000, 40000, 300001])
@every_dtype
def test_large_range(kernel, device, hidden, dtype):
    """All but a few values of a row underflow."""
    x = normal(3, hidden, dtype=dtype, device=device, std=100.0)
    check(kernel, "softmax", x, contract=False)
    largest = torch.finfo(dtype).max
    x[0, 1] = x[0, hidden - 1] = largest
    x[1, 0] = -largest
    out = check(kernel, "softmax", x, contract=False)
    assert out[0, 1] == out[0, hidden - 1] == 0.5 and out[0].count_nonzero() == 2


@pytest.mark.parametrize("order", ["ascending", "descending"])
@pytest.mark.parametrize("hidden", [65, 2048, 40000, 300001])
@every_dtype
def test_order_of_values(kernel, device, order, hidden, dtype):
    """A running maximum changes with every value, or never."""
    x = torch.linspace(-12, 12, hidden, device=device).expand(3, hidden)
    x = (x if order == "ascending" else x.flip(-1)).to(dtype).contiguous()
    check_softmax(kernel, x, contract=False)


@pytest.mark.parametrize("hidden", [1, 7, 65, 2048, 40000, 300001])
@every_dtype
def test_rows_of_one_value(kernel, device, hidden, dtype):
    values = torch.tensor([[0.0], [-3.0], [30000.0]], device=device)
    x = values.to(dtype).expand(3, hidden).contiguous()
    check_softmax(kernel, x, contract=False)


@pytest.mark.parametrize("shape", [(8192,), (33, 256), (3, 11, 256), (2, 3, 2, 5, 256)], ids=str)
@every_dtype
def test_dimensions(kernel, device, shape, dtype):
    check_softmax(kernel, normal(*shape, dtype=dtype, device=device))


@pytest.mark.parametrize("layout", STRIDED_LAYOUTS)
@pytest.mark.parametrize("hidden", [65, 2048, 10240])
@every_dtype
def test_strided_views(kernel, device, layout, hidden, dtype):
    check_softmax(kernel, normal(3, 11, hidden, dtype=dtype, device=device, layout=layout), False)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5, 64), (2, 3, 2, 3, 2, 3, 64)], ids=["5d", "7d"])
@every_dtype
def test_leading_dimensions_that_cannot_be_merged(kernel, device, shape, dtype):
    check_softmax(kernel, normal(*shape, dtype=dtype, device=device, layout="transposed"))


@every_dtype
def test_stride_of_a_single_column_is_free(kernel, device, dtype):
    x = normal(7, dtype=dtype, device=device).as_strided((7, 1), (1, 7))
    check_softmax(kernel, x)


MASKS = {
    "first_half": lambda hidden: slice(0, hidden // 2),
    "second_half": lambda hidden: slice(hidden // 2, hidden),
    "all_but_the_first": lambda hidden: slice(1, hidden),
    "all_but_the_last": lambda hidden: slice(0, hidden - 1),
    "every_third": lambda hidden: slice(0, hidden, 3),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("hidden", [8, 65, 2048, 300001])
@every_dtype
def test_masks(kernel, device, mask, hidden, dtype):
    """Where a mask has put minus infinity the result is zero, wherever a row's values begin."""
    x = normal(3, hidden, dtype=dtype, device=device)
    hidden_part = MASKS[mask](hidden)
    x[1:, hidden_part] = -math.inf
    out = check_softmax(kernel, x, contract=False)
    assert not out[1:, hidden_part].any()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("hidden", [1, 65, 2048, 70001])
@every_dtype
def test_nonfinite_values(kernel, device, value, hidden, dtype):
    """A row that is minus infinity altogether is NaN, as in PyTorch."""
    x = normal(6, hidden, dtype=dtype, device=device)
    x[0] = -math.inf
    x[1, 0] = x[3, hidden // 2] = x[4, hidden - 1] = value
    check_nonfinite(kernel, "softmax", x)


@pytest.mark.sanitize
@pytest.mark.kernels_ci
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
