"""rms_norm_modulate and layer_norm_modulate: adaptive layer norm."""

import pytest
import torch

from checks import check, check_nonfinite
from inputs import (
    LAYOUT_PAIRS,
    MODULATIONS,
    SIZES,
    SMALL_SIZES,
    affine,
    every_dtype,
    modulation,
    normal,
    rows_of,
    spread,
)

every_norm = pytest.mark.parametrize("name", ["rms_norm_modulate", "layer_norm_modulate"])


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
