"""rms_norm_modulate and layer_norm_modulate: adaptive layer norm, once or twice of one norm."""

import pytest
import torch

from checks import check, check_nonfinite
from inputs import (
    LAYOUT_PAIRS,
    MIXTURES,
    MODULATIONS,
    SIZES,
    SMALL_SIZES,
    affine,
    every_16_bit_dtype,
    every_dtype,
    mixed,
    modulation,
    normal,
    rows_of,
    spread,
)

NORMS = ["rms_norm_modulate", "layer_norm_modulate"]
PAIRS = [f"{name}_pair" for name in NORMS]
every_norm = pytest.mark.parametrize("name", NORMS)
every_pair = pytest.mark.parametrize("name", PAIRS)
every_norm_and_pair = pytest.mark.parametrize("name", NORMS + PAIRS)
# Rows that registers hold, that shared memory holds, and that nothing holds or packs do not reach.
GENERAL_SIZES = [7, 65, 256, 1536, 2432, 5120, 10240, 40000, 70001]


def count_of(name):
    """How many tensors modulate."""
    return 4 if name in PAIRS else 2


@every_norm
@pytest.mark.parametrize("hidden", SMALL_SIZES)
@every_dtype
def test_small_sizes(kernel, device, name, hidden, dtype):
    shape = (3, 5, hidden)
    x = spread(*shape, dtype=dtype, device=device)
    scale, shift = modulation("B1D", 2, shape, dtype=dtype, device=device)
    check(kernel, name, x, scale, shift)
    check(kernel, name, x, scale, shift, **affine(name, hidden, dtype, device))


@every_norm
@pytest.mark.parametrize("hidden", SIZES)
@every_dtype
def test_sizes(kernel, device, name, hidden, dtype):
    shape = (2, rows_of(hidden, dtype) // 2, hidden)
    x = normal(*shape, dtype=dtype, device=device)
    scale, shift = modulation("B1D", 2, shape, dtype=dtype, device=device)
    check(kernel, name, x, scale, shift)


@every_norm
@pytest.mark.parametrize("form", MODULATIONS)
@pytest.mark.parametrize("hidden", [65, 2048])
@pytest.mark.parametrize("is_affine", [False, True], ids=["plain", "affine"])
@every_dtype
def test_broadcast_forms(kernel, device, name, form, hidden, is_affine, dtype):
    shape = (3, 32, hidden)
    x = normal(*shape, dtype=dtype, device=device)
    scale, shift = modulation(form, 2, shape, dtype=dtype, device=device)
    parameters = affine(name, hidden, dtype, device) if is_affine else {}
    check(kernel, name, x, scale, shift, **parameters)


@every_norm
@pytest.mark.parametrize("scale_form", ["D", "B1D_table", "BSD"])
@pytest.mark.parametrize("shift_form", ["D", "B1D", "BSD_table"])
@every_dtype
def test_scale_and_shift_of_different_forms(kernel, device, name, scale_form, shift_form, dtype):
    shape = (3, 64, 256)
    x = normal(*shape, dtype=dtype, device=device)
    (scale,) = modulation(scale_form, 1, shape, dtype=dtype, device=device)
    (shift,) = modulation(shift_form, 1, shape, dtype=dtype, device=device)
    check(kernel, name, x, scale, shift)


@every_norm
@pytest.mark.parametrize(("x_layout", "modulation_layout"), LAYOUT_PAIRS)
@every_dtype
def test_strided_views(kernel, device, name, x_layout, modulation_layout, dtype):
    shape = (3, 16, 520)
    x = normal(*shape, dtype=dtype, device=device, layout=x_layout)
    scale, shift = (
        normal(*shape, dtype=dtype, device=device, layout=modulation_layout) for _ in range(2)
    )
    check(kernel, name, x, scale, shift)


@every_norm
@pytest.mark.parametrize(
    ("x_shape", "shape"),
    [
        ((4096,), (4096,)),
        ((33, 256), (256,)),
        ((33, 256), (33, 256)),
        ((33, 256), (1, 256)),
        ((2, 3, 5, 256), (2, 1, 5, 256)),
        ((2, 3, 5, 256), (3, 1, 256)),
        ((2, 3, 2, 5, 256), (2, 1, 2, 1, 256)),
        ((2, 3, 2, 5, 256), (1, 3, 1, 5, 256)),
    ],
    ids=str,
)
@every_dtype
def test_dimensions(kernel, device, name, x_shape, shape, dtype):
    x = normal(*x_shape, dtype=dtype, device=device)
    scale, shift = (normal(*shape, dtype=dtype, device=device) for _ in range(2))
    check(kernel, name, x, scale, shift)


@every_norm
@every_dtype
def test_eps(kernel, device, name, dtype):
    shape = (2, 64, 256)
    x = normal(*shape, dtype=dtype, device=device, std=0.02)
    scale, shift = modulation("B1D", 2, shape, dtype=dtype, device=device)
    for eps in (0.0, 1e-3, 1.0):
        check(kernel, name, x, scale, shift, eps=eps)


@every_norm_and_pair
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("hidden", GENERAL_SIZES)
@every_16_bit_dtype
def test_float32_modulation(kernel, device, name, mixture, hidden, dtype):
    """As Wan has it: what modulates is float32 and the rows are not."""
    shape = (2, rows_of(hidden, dtype) // 2, hidden)
    x = normal(*shape, dtype=dtype, device=device)
    rest = modulation("B1D", count_of(name), shape, dtype=torch.float32, device=device)
    parameters = affine(name, hidden, torch.float32, device)
    check(kernel, name, x, *mixed(mixture, rest, dtype))
    check(kernel, name, x, *mixed(mixture, rest, dtype), **mixed(mixture, parameters, dtype))


@every_norm_and_pair
@pytest.mark.parametrize("form", MODULATIONS)
@pytest.mark.parametrize("hidden", [65, 2048])
@every_16_bit_dtype
def test_broadcast_forms_of_float32(kernel, device, name, form, hidden, dtype):
    shape = (3, 32, hidden)
    x = normal(*shape, dtype=dtype, device=device)
    rest = modulation(form, count_of(name), shape, dtype=torch.float32, device=device)
    for mixture in MIXTURES:
        check(kernel, name, x, *mixed(mixture, rest, dtype))


@every_norm_and_pair
@pytest.mark.parametrize(("x_layout", "modulation_layout"), LAYOUT_PAIRS)
@every_16_bit_dtype
def test_strided_views_of_float32(kernel, device, name, x_layout, modulation_layout, dtype):
    """Where rows of 16 bits are aligned to 16 bytes, those of float32 may not be, and the other way round."""
    shape = (3, 16, 520)
    x = normal(*shape, dtype=dtype, device=device, layout=x_layout)
    rest = [
        normal(*shape, dtype=torch.float32, device=device, layout=modulation_layout)
        for _ in range(count_of(name))
    ]
    check(kernel, name, x, *rest)


@every_norm_and_pair
@pytest.mark.parametrize("dims", [5, 7])
@every_16_bit_dtype
def test_float32_of_leading_dimensions_that_cannot_be_merged(kernel, device, name, dims, dtype):
    """What is more than a launch takes is stepped through by each operand's own size of an element."""
    shape = (2, 3, 2, 3, 2, 3)[: dims - 1] + (64,)
    x = normal(*shape, dtype=dtype, device=device, layout="transposed")
    count = count_of(name)
    rest = [normal(*shape, dtype=torch.float32, device=device) for _ in range(count)]
    check(kernel, name, x, *mixed("odd", rest, dtype))


@every_norm
@pytest.mark.parametrize("is_affine", [False, True], ids=["plain", "affine"])
@pytest.mark.parametrize("hidden", GENERAL_SIZES)
@every_dtype
def test_without_shift(kernel, device, name, is_affine, hidden, dtype):
    shape = (2, rows_of(hidden, dtype) // 2, hidden)
    x = normal(*shape, dtype=dtype, device=device)
    (scale,) = modulation("B1D", 1, shape, dtype=dtype, device=device)
    check(kernel, name, x, scale, **(affine(name, hidden, dtype, device) if is_affine else {}))


@every_pair
@pytest.mark.parametrize("is_affine", [False, True], ids=["plain", "affine"])
@pytest.mark.parametrize("hidden", [*SMALL_SIZES, *SIZES])
@every_dtype
def test_two_modulations(kernel, device, name, is_affine, hidden, dtype):
    is_small = hidden in SMALL_SIZES
    shape = (3, 5, hidden) if is_small else (2, rows_of(hidden, dtype) // 2, hidden)
    x = (spread if is_small else normal)(*shape, dtype=dtype, device=device)
    rest = modulation("B1D_table", 4, shape, dtype=dtype, device=device)
    check(kernel, name, x, *rest, **(affine(name, hidden, dtype, device) if is_affine else {}))


@every_pair
@pytest.mark.parametrize("given", ["", "scale", "shift", "second_scale", "second_shift"])
@pytest.mark.parametrize("is_affine", [False, True], ids=["plain", "affine"])
@every_dtype
def test_two_modulations_with_absent_operands(kernel, device, name, given, is_affine, dtype):
    """Each alone, and all but it."""
    shape = (2, 64, 256)
    x = normal(*shape, dtype=dtype, device=device)
    parameters = affine(name, 256, dtype, device) if is_affine else {}
    names = ("scale", "shift", "second_scale", "second_shift")
    rest = dict(zip(names, modulation("B1D", 4, shape, dtype=dtype, device=device), strict=True))
    for is_left_out in (False, True):
        few = {k: t if (k == given) != is_left_out else None for k, t in rest.items()}
        check(kernel, name, x, **few, **parameters)


@every_pair
@pytest.mark.parametrize("x_form", ["contiguous", "unbind", "odd_rows"])
@every_dtype
def test_two_modulations_of_different_forms(kernel, device, name, x_form, dtype):
    shape = (3, 64, 256)
    x = normal(*shape, dtype=dtype, device=device, layout=x_form)
    rest = [
        modulation(form, 1, shape, dtype=dtype, device=device)[0]
        for form in ("BSD", "D", "B1D_table", "BSD_table")
    ]
    check(kernel, name, x, *rest)


@every_norm_and_pair
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@every_16_bit_dtype
def test_nonfinite_values_of_float32(kernel, device, name, value, dtype):
    x = normal(8, 256, dtype=dtype, device=device)
    rest = [normal(8, 256, dtype=torch.float32, device=device) for _ in range(count_of(name))]
    x[1, 0] = value
    for row, tensor in enumerate(rest, start=2):
        tensor[row, 5 * row] = value
    if name in PAIRS:  # so that each result has some of its own
        check_nonfinite(kernel, name, x, *rest, **affine(name, 256, torch.float32, device))
    check_nonfinite(kernel, name, x, *rest)


@every_norm
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@every_dtype
def test_nonfinite_values(kernel, device, name, value, dtype):
    x, scale, shift = (normal(6, 256, dtype=dtype, device=device) for _ in range(3))
    x[1, 0] = scale[2, 5] = shift[4, 255] = value
    check_nonfinite(kernel, name, x, scale, shift, **affine(name, 256, dtype, device))


@pytest.mark.sanitize
@pytest.mark.kernels_ci
@every_norm
@pytest.mark.parametrize(
    ("shape", "layout", "form", "dtype"),
    [
        ((2, 3, 7), "odd_rows", "BSD", torch.bfloat16),
        ((2, 2, 2048), "contiguous", "B1D_table", torch.float32),
        ((2, 2, 1030), "misaligned", "D", torch.float16),
        ((2, 1, 40000), "chunk", "B1D", torch.bfloat16),
    ],
    ids=str,
)
def test_smoke(kernel, device, name, shape, layout, form, dtype):
    x = spread(*shape, dtype=dtype, device=device, layout=layout)
    scale, shift = modulation(form, 2, shape, dtype=dtype, device=device)
    check(kernel, name, x, scale, shift, contract=False, **affine(name, shape[-1], dtype, device))


@pytest.mark.sanitize
@pytest.mark.kernels_ci
@every_norm_and_pair
@pytest.mark.parametrize(
    ("shape", "layout", "dtype"),
    [
        ((2, 3, 7), "odd_rows", torch.bfloat16),
        ((2, 2, 2048), "contiguous", torch.float16),
        ((2, 2, 1030), "misaligned", torch.float16),
        ((2, 1, 40000), "chunk", torch.bfloat16),
    ],
    ids=str,
)
def test_smoke_of_float32(kernel, device, name, shape, layout, dtype):
    x = spread(*shape, dtype=dtype, device=device, layout=layout)
    rest = modulation("B1D", count_of(name), shape, dtype=torch.float32, device=device)
    parameters = affine(name, shape[-1], torch.float32, device)
    check(kernel, name, x, *rest, contract=False)
    check(kernel, name, x, *rest, contract=False, **mixed("even", parameters, dtype))
