"""gated_residual, and the gated residual with the norm that follows it, modulated or not, or twice."""

import pytest
import torch

from checks import check, check_nonfinite
from inputs import (
    LAYOUT_PAIRS,
    MIXTURES,
    MODULATIONS,
    SIZES,
    SMALL_SIZES,
    STRIDED_LAYOUTS,
    affine,
    every_16_bit_dtype,
    every_dtype,
    mixed,
    modulation,
    normal,
    rows_of,
    spread,
)

NORMS = ["gated_residual_rms_norm_modulate", "gated_residual_layer_norm_modulate"]
PAIRS = [f"{name}_pair" for name in NORMS]
every_norm = pytest.mark.parametrize("name", NORMS)
every_pair = pytest.mark.parametrize("name", PAIRS)
every_norm_and_pair = pytest.mark.parametrize("name", NORMS + PAIRS)
every_operation = pytest.mark.parametrize("name", ["gated_residual", *NORMS])
every_operation_and_pair = pytest.mark.parametrize("name", ["gated_residual", *NORMS, *PAIRS])
# Rows that registers hold, that shared memory holds, and that nothing holds or packs do not reach.
GENERAL_SIZES = [7, 65, 256, 1536, 2432, 5120, 10240, 40000, 70001]


def count_of(name):
    """How many tensors modulate or gate."""
    if name == "gated_residual":
        return 1
    return 5 if name in PAIRS else 3


def modulated(name, form, shape, dtype, device, is_gated=True):
    """(gate, scale, shift), or (gate,) for the operation without a norm; gate may be None."""
    tensors = modulation(form, 3, shape, dtype=dtype, device=device)
    if not is_gated:
        tensors[0] = None
    return tensors if "norm" in name else tensors[:1]


@every_operation
@pytest.mark.parametrize("is_gated", [True, False], ids=["gate", "no_gate"])
@pytest.mark.parametrize("hidden", SMALL_SIZES)
@every_dtype
def test_small_sizes(kernel, device, name, is_gated, hidden, dtype):
    shape = (3, 5, hidden)
    residual = spread(*shape, dtype=dtype, device=device)
    x = residual.roll(1, 0)
    rest = modulated(name, "B1D", shape, dtype, device, is_gated)
    if is_gated:
        rest[0].abs_()
    check(kernel, name, residual, x, *rest)


@every_operation
@pytest.mark.parametrize("is_gated", [True, False], ids=["gate", "no_gate"])
@pytest.mark.parametrize("hidden", SIZES)
@every_dtype
def test_sizes(kernel, device, name, is_gated, hidden, dtype):
    shape = (2, rows_of(hidden, dtype) // 2, hidden)
    residual, x = (normal(*shape, dtype=dtype, device=device) for _ in range(2))
    check(kernel, name, residual, x, *modulated(name, "B1D", shape, dtype, device, is_gated))


@every_operation
@pytest.mark.parametrize("form", MODULATIONS)
@pytest.mark.parametrize("hidden", [65, 2048])
@every_dtype
def test_broadcast_forms(kernel, device, name, form, hidden, dtype):
    shape = (3, 32, hidden)
    residual, x = (normal(*shape, dtype=dtype, device=device) for _ in range(2))
    check(kernel, name, residual, x, *modulated(name, form, shape, dtype, device))


@every_norm
@pytest.mark.parametrize(
    "forms", [("D", "B1D_table", "BSD"), ("BSD_table", "D", "B1D")], ids="-".join
)
@every_dtype
def test_gate_scale_and_shift_of_different_forms(kernel, device, name, forms, dtype):
    shape = (3, 64, 256)
    residual, x = (normal(*shape, dtype=dtype, device=device) for _ in range(2))
    rest = [modulation(form, 1, shape, dtype=dtype, device=device)[0] for form in forms]
    check(kernel, name, residual, x, *rest, **affine(name, 256, dtype, device))


@every_operation
@pytest.mark.parametrize(("residual_layout", "x_layout"), LAYOUT_PAIRS)
@every_dtype
def test_strided_views(kernel, device, name, residual_layout, x_layout, dtype):
    shape = (3, 16, 520)
    residual = normal(*shape, dtype=dtype, device=device, layout=residual_layout)
    x = normal(*shape, dtype=dtype, device=device, layout=x_layout)
    rest = modulated(name, "B1D_table", shape, dtype, device)
    check(kernel, name, residual, x, *rest)


@every_operation
@pytest.mark.parametrize("layout", STRIDED_LAYOUTS)
@every_dtype
def test_strided_gates(kernel, device, name, layout, dtype):
    shape = (3, 16, 520)
    residual, x = (normal(*shape, dtype=dtype, device=device) for _ in range(2))
    count = 3 if "norm" in name else 1
    rest = [normal(*shape, dtype=dtype, device=device, layout=layout) for _ in range(count)]
    check(kernel, name, residual, x, *rest)


@every_operation
@pytest.mark.parametrize(
    ("x_shape", "shape"),
    [
        ((4096,), (4096,)),
        ((33, 256), (33, 256)),
        ((2, 3, 5, 256), (2, 1, 5, 256)),
        ((2, 3, 2, 5, 256), (2, 1, 2, 1, 256)),
        ((2, 3, 2, 2, 3, 64), (3, 1, 2, 1, 64)),
    ],
    ids=str,
)
@every_dtype
def test_dimensions(kernel, device, name, x_shape, shape, dtype):
    residual, x = (normal(*x_shape, dtype=dtype, device=device) for _ in range(2))
    count = 3 if "norm" in name else 1
    rest = [normal(*shape, dtype=dtype, device=device) for _ in range(count)]
    check(kernel, name, residual, x, *rest)


@every_norm
@every_16_bit_dtype
def test_norm_takes_the_residual_before_it_is_rounded(kernel, device, name, dtype):
    """x only nudges the residual, and the output holds nothing but what the norm makes of that."""
    residual = torch.full((64, 256), 64.0, dtype=dtype, device=device)
    x = normal(64, 256, dtype=dtype, device=device, std=0.05)
    scale, shift = torch.zeros(2, 256, dtype=dtype, device=device)
    if "rms" in name:
        shift -= 1
    check(kernel, name, residual, x, None, scale, shift, slack=4e-4 if "layer" in name else 4e-6)


@every_norm
@every_dtype
def test_eps(kernel, device, name, dtype):
    shape = (2, 64, 256)
    residual, x = (normal(*shape, dtype=dtype, device=device, std=0.02) for _ in range(2))
    rest = modulated(name, "B1D", shape, dtype, device)
    for eps in (0.0, 1e-3, 1.0):
        check(kernel, name, residual, x, *rest, eps=eps)


@every_operation
def test_same_tensor_as_residual_and_x(kernel, device, name):
    shape = (2, 64, 256)
    x = normal(*shape, dtype=torch.bfloat16, device=device)
    check(kernel, name, x, x, *modulated(name, "B1D", shape, torch.bfloat16, device))


@every_operation_and_pair
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("hidden", GENERAL_SIZES)
@every_16_bit_dtype
def test_float32_modulation(kernel, device, name, mixture, hidden, dtype):
    """As Wan has it: what gates and modulates is float32 and the rows are not."""
    shape = (2, rows_of(hidden, dtype) // 2, hidden)
    residual, x = (normal(*shape, dtype=dtype, device=device) for _ in range(2))
    rest = modulation("B1D", count_of(name), shape, dtype=torch.float32, device=device)
    check(kernel, name, residual, x, *mixed(mixture, rest, dtype))
    if "norm" in name:
        parameters = mixed(mixture, affine(name, hidden, torch.float32, device), dtype)
        check(kernel, name, residual, x, *mixed(mixture, rest, dtype), **parameters)


@every_operation_and_pair
@pytest.mark.parametrize("form", MODULATIONS)
@pytest.mark.parametrize("hidden", [65, 2048])
@every_16_bit_dtype
def test_broadcast_forms_of_float32(kernel, device, name, form, hidden, dtype):
    shape = (3, 32, hidden)
    residual, x = (normal(*shape, dtype=dtype, device=device) for _ in range(2))
    rest = modulation(form, count_of(name), shape, dtype=torch.float32, device=device)
    for mixture in MIXTURES:
        check(kernel, name, residual, x, *mixed(mixture, rest, dtype))


@every_operation_and_pair
@pytest.mark.parametrize(("x_layout", "modulation_layout"), LAYOUT_PAIRS)
@every_16_bit_dtype
def test_strided_views_of_float32(kernel, device, name, x_layout, modulation_layout, dtype):
    shape = (3, 16, 520)
    residual, x = (normal(*shape, dtype=dtype, device=device, layout=x_layout) for _ in range(2))
    rest = [
        normal(*shape, dtype=torch.float32, device=device, layout=modulation_layout)
        for _ in range(count_of(name))
    ]
    check(kernel, name, residual, x, *rest)


@every_operation_and_pair
@pytest.mark.parametrize("dims", [5, 7])
@every_16_bit_dtype
def test_float32_of_leading_dimensions_that_cannot_be_merged(kernel, device, name, dims, dtype):
    shape = (2, 3, 2, 3, 2, 3)[: dims - 1] + (64,)
    residual = normal(*shape, dtype=dtype, device=device)
    x = normal(*shape, dtype=dtype, device=device, layout="transposed")
    rest = [normal(*shape, dtype=torch.float32, device=device) for _ in range(count_of(name))]
    check(kernel, name, residual, x, *mixed("even", rest, dtype))


@every_norm
@pytest.mark.parametrize("is_affine", [False, True], ids=["plain", "affine"])
@pytest.mark.parametrize("hidden", GENERAL_SIZES)
@every_dtype
def test_norm_without_modulation(kernel, device, name, is_affine, hidden, dtype):
    """The plain norm of a residual that is added first, as in blocks without adaptive norms."""
    shape = (2, rows_of(hidden, dtype) // 2, hidden)
    residual, x = (normal(*shape, dtype=dtype, device=device) for _ in range(2))
    parameters = affine(name, hidden, dtype, device) if is_affine else {}
    check(kernel, name, residual, x, **parameters)
    check(
        kernel,
        name,
        residual,
        x,
        *modulation("B1D", 1, shape, dtype=dtype, device=device),
        **parameters,
    )


@every_norm
@pytest.mark.parametrize("given", ["scale", "shift"])
@pytest.mark.parametrize("is_gated", [True, False], ids=["gate", "no_gate"])
@pytest.mark.parametrize("is_affine", [False, True], ids=["plain", "affine"])
@every_dtype
def test_scale_or_shift_alone(kernel, device, name, given, is_gated, is_affine, dtype):
    shape = (2, 64, 256)
    residual, x = (normal(*shape, dtype=dtype, device=device) for _ in range(2))
    gate, one = modulation("B1D", 2, shape, dtype=dtype, device=device)
    parameters = affine(name, 256, dtype, device) if is_affine else {}
    gate = {"gate": gate} if is_gated else {}
    check(kernel, name, residual, x, **gate, **{given: one}, **parameters)


@pytest.mark.parametrize("given", ["weight", "bias"])
@every_dtype
def test_norm_with_weight_or_bias_alone(kernel, device, given, dtype):
    residual, x = (normal(2, 64, 256, dtype=dtype, device=device) for _ in range(2))
    vector = {given: normal(256, dtype=dtype, device=device, mean=0.5)}
    check(kernel, "gated_residual_layer_norm_modulate", residual, x, **vector)
    vector[given] = vector[given].float()
    check(kernel, "gated_residual_layer_norm_modulate", residual, x, **vector)


@every_pair
@pytest.mark.parametrize("is_gated", [True, False], ids=["gate", "no_gate"])
@pytest.mark.parametrize("hidden", [*SMALL_SIZES, *SIZES])
@every_dtype
def test_two_modulations(kernel, device, name, is_gated, hidden, dtype):
    is_small = hidden in SMALL_SIZES
    shape = (3, 5, hidden) if is_small else (2, rows_of(hidden, dtype) // 2, hidden)
    residual = (spread if is_small else normal)(*shape, dtype=dtype, device=device)
    x = residual.roll(1, 0) if is_small else normal(*shape, dtype=dtype, device=device)
    gate, *rest = modulation("B1D_table", 5, shape, dtype=dtype, device=device)
    gate = gate.abs() if is_gated else None
    check(kernel, name, residual, x, gate, *rest)
    if not is_small:
        parameters = affine(name, hidden, dtype, device)
        check(kernel, name, residual, x, gate, *rest[:2], None, None, **parameters)


@every_operation_and_pair
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@every_16_bit_dtype
def test_nonfinite_values_of_float32(kernel, device, name, value, dtype):
    shape = (1, 10, 256)
    residual, x = (normal(*shape, dtype=dtype, device=device) for _ in range(2))
    rest = [normal(*shape, dtype=torch.float32, device=device) for _ in range(count_of(name))]
    residual[0, 1, 0] = x[0, 2, 3] = value
    for row, tensor in enumerate(rest, start=3):
        tensor[0, row, 255] = value
    check_nonfinite(kernel, name, residual, x, *rest)


@every_operation
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@every_dtype
def test_nonfinite_values(kernel, device, name, value, dtype):
    shape = (1, 8, 256)
    residual, x = (normal(*shape, dtype=dtype, device=device) for _ in range(2))
    rest = modulated(name, "BSD", shape, dtype, device)
    residual[0, 1, 0] = x[0, 2, 3] = value
    for row, tensor in enumerate(rest, start=3):
        tensor[0, row, 255] = value
    check_nonfinite(kernel, name, residual, x, *rest)


@pytest.mark.sanitize
@pytest.mark.kernels_ci
@every_operation
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
    residual, x = (spread(*shape, dtype=dtype, device=device, layout=layout) for _ in range(2))
    rest = modulated(name, form, shape, dtype, device)
    check(kernel, name, residual, x, *rest, contract=False)


@pytest.mark.sanitize
@pytest.mark.kernels_ci
@every_operation_and_pair
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
    residual, x = (spread(*shape, dtype=dtype, device=device, layout=layout) for _ in range(2))
    rest = modulation("B1D", count_of(name), shape, dtype=torch.float32, device=device)
    check(kernel, name, residual, x, *rest, contract=False)
