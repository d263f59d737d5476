"""Norms with a quantized result: E4M3 rows and a scale for each row, from the unrounded values."""

import math

import pytest
import torch

import references
from checks import (
    FLOAT32_ARITHMETIC,
    MemorySnapshot,
    as_tuple,
    assert_same_bits,
    one_thread,
    poison_memory,
    tensors_of,
)
from inputs import (
    BRANCH_OPERATIONS,
    CHOICES,
    DTYPES,
    LAYOUTS,
    MIXTURES,
    MODULATIONS,
    TABLE_OPERATIONS,
    WITH_FP8_RESULT,
    every_dtype,
    normal,
    pairwise,
    with_branch,
    with_index,
    with_table,
)
from test_norm import PARTS, row_call

NORMS = [name.removesuffix("_fp8") for name in WITH_FP8_RESULT if "norm" in name]
GATED = [name for name in NORMS if name in BRANCH_OPERATIONS]
INDEXED = [name for name in NORMS if name in TABLE_OPERATIONS]
every_norm = pytest.mark.parametrize("name", NORMS)

# Rows of vectors and of single elements. In a row of 520 or 1000 elements the packs of float32 results are
# aligned to 4 bytes, those of 16-bit results to 8 bytes.
SIZES = [1, 7, 8, 65, 520, 1000, 2048, 3072, 5120, 6144, 8192, 8200, 70001]

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
SCALE_ERROR = 1e-6  # relative, eight units in the last place of float32
QUOTIENT_ERROR = 1e-5  # relative
# Of values that cancel in a modulation, and of those of a normalized branch.
VALUE_ERROR = 4 * FLOAT32_ARITHMETIC
DIFFERENT_VALUES = 0.005


def rounded(quotients):
    """Float64 values rounded to E4M3, to nearest even."""
    exponents = torch.frexp(quotients).exponent.double() - 1
    steps = 2.0 ** (exponents.clamp(min=-6) - 3)
    return ((quotients / steps).round() * steps).clamp(-LARGEST, LARGEST)


def scales_of(values):
    scales = values.abs().amax(-1, keepdim=True) / LARGEST
    return torch.where(scales < torch.finfo(torch.float32).tiny, 0, scales)


def check_quantized(values, scales, reference):
    """Rows of finite float64 values, and their quantization. On the CPU, whose powers of 2 are exact."""
    values, scales, reference = values.cpu(), scales.cpu(), reference.cpu()
    assert values.dtype == FP8 and values.is_contiguous() and values.shape == reference.shape
    assert scales.dtype == torch.float32 and scales.is_contiguous()
    assert scales.shape == (*reference.shape[:-1], 1)
    if reference.numel() == 0:
        assert not scales.any()
        return
    given, expected = scales.double(), scales_of(reference)
    # The largest of a few values may be one that cancels.
    atol = FLOAT32_ARITHMETIC / LARGEST if reference.shape[-1] <= 8 else 0
    torch.testing.assert_close(given, expected, rtol=SCALE_ERROR, atol=atol)
    # Rounding is monotonic: the result is between the roundings of both ends of the quotient's interval.
    divisor = torch.where(expected == 0, math.inf, expected)
    quotients = reference / divisor
    error = QUOTIENT_ERROR * quotients.abs() + VALUE_ERROR / divisor
    values = values.double()
    lowest, nearest, highest = (rounded(quotients + sign * error) for sign in (-1, 0, 1))
    assert ((lowest <= values) & (values <= highest)).all()
    assert (values != nearest).double().mean() <= DIFFERENT_VALUES
    distance, best = (values * given - reference).norm(), (nearest * expected - reference).norm()
    assert distance <= 1.01 * best + SCALE_ERROR * reference.norm()


def check_norm(kernel, name, arguments, **options):
    """Runs the quantized norm of the name. Its residual is that of the unquantized one, bit for bit."""
    arguments = {**arguments, **options}
    with one_thread():
        reference = as_tuple(getattr(references, name)(**arguments))[-1]
    inputs = list(tensors_of(arguments))
    memory = MemorySnapshot(inputs)
    poison_memory(reference.to(FP8))
    *residual, values, scales = getattr(kernel, f"{name}_fp8")(**arguments)
    memory.assert_unchanged()
    if residual:
        assert_same_bits(residual[0], getattr(kernel, name)(**arguments)[0])
    with one_thread():
        check_quantized(values, scales, reference)
    return values, scales


def shape_of(hidden):
    return (2, 16 if hidden <= 8192 else 3, hidden)


@pairwise(name=NORMS, hidden=SIZES, dtype=DTYPES, given=CHOICES, mixture=[None, *MIXTURES])
def test_sizes(kernel, device, name, hidden, dtype, given, mixture):
    mixture = None if dtype == torch.float32 else mixture
    arguments = row_call(name, shape_of(hidden), dtype, device, given=given, mixture=mixture)
    if "modulate" in name and not name.startswith("gated") and arguments["scale"] is None:
        arguments["scale"] = normal(hidden, dtype=dtype, device=device)
    if hidden <= 8:  # a layer norm of few values close to each other has no accurate result
        for key in ("x", "residual"):
            if key in arguments:
                steps = torch.linspace(-8, 8, hidden, device=device)
                arguments[key] = (arguments[key] / 8 + steps).to(dtype)
        if arguments.get("gate") is not None:
            arguments["gate"] = arguments["gate"].abs()
    check_norm(kernel, name, arguments)


@pairwise(
    name=NORMS,
    layout=[*LAYOUTS, ("contiguous", "transposed"), ("odd_rows", "contiguous")],
    form=[*MODULATIONS, "transposed", "different"],
    hidden=[65, 520, 2048],
    dtype=DTYPES,
)
def test_layouts(kernel, device, name, layout, form, hidden, dtype):
    arguments = row_call(name, (3, 5, hidden), dtype, device, layout=layout, form=form)
    check_norm(kernel, name, arguments)


@pairwise(
    name=NORMS,
    shape=[(4096,), (33, 256), (2, 3, 5, 256), (2, 3, 4, 5, 72), (2, 3, 2, 3, 2, 3, 64)],
    layout=["contiguous", "transposed", ("contiguous", "transposed")],
    dtype=DTYPES,
)
def test_dimensions(kernel, device, name, shape, layout, dtype):
    """Leading dimensions that cannot be merged, in one launch or in several."""
    arguments = row_call(name, shape, dtype, device, layout=layout, form="contiguous")
    check_norm(kernel, name, arguments)


@pairwise(
    name=INDEXED,
    hidden=[7, 65, 520, 2048, 5120, 8192, 8200],
    dtype=DTYPES,
    form=["B1D", "BSD", "BSD_table", "different"],
    mixture=[None, *MIXTURES],
    given=["all", "all_but_last", "first"],
    parts=[(), *((part,) for part in PARTS), PARTS],
    tables=[None, "rows", "index", "both"],
)
def test_branches_and_tables(
    kernel, device, name, hidden, dtype, form, mixture, given, parts, tables
):
    """Parts of a residual branch, rows of tables, and tables from which each token chooses its rows."""
    mixture = None if dtype == torch.float32 else mixture
    options = {"form": form, "mixture": mixture, "given": given}
    arguments = row_call(name, shape_of(hidden), dtype, device, **options)
    if name in GATED:
        arguments = with_branch(arguments, parts, given != "first")
    elif arguments["scale"] is None:
        arguments["scale"] = normal(hidden, dtype=dtype, device=device)
    if tables in ("index", "both"):
        arguments = with_index(arguments)
    if tables in ("rows", "both"):
        arguments = with_table(arguments)
    check_norm(kernel, name, arguments)


@pairwise(name=NORMS, eps=[0.0, 1e-3, 1.0, None], dtype=DTYPES)
def test_eps(kernel, device, name, eps, dtype):
    arguments = row_call(name, (2, 16, 256), dtype, device)
    for key in ("x", "residual"):
        if key in arguments:
            arguments[key] *= 0.02
    check_norm(kernel, name, arguments, **({} if eps is None else {"eps": eps}))


@pytest.mark.parametrize("hidden", [65, 256, 8200])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@every_norm
def test_nonfinite_values(kernel, device, name, value, hidden):
    """A row with a NaN or an infinity has the scale NaN and only NaN, and no other row has one."""
    arguments = row_call(name, (1, 8, hidden), torch.bfloat16, device, form="BSD")
    names = [key for key in arguments if key not in ("weight", "bias")]
    for row, key in enumerate(names, start=1):
        arguments[key][0, row, hidden - 1] = value
    *_, values, scales = getattr(kernel, f"{name}_fp8")(**arguments)
    reference = as_tuple(getattr(references, name)(**arguments))[-1]
    is_finite = reference.isfinite().all(-1)
    assert not is_finite[0, 1] and is_finite[0, 0]
    assert torch.equal(scales[..., 0].isnan(), ~is_finite)
    assert values.float()[~is_finite].isnan().all()
    check_quantized(values[is_finite], scales[is_finite], reference[is_finite])


@pytest.mark.parametrize("hidden", [65, 256, 8200])
@every_dtype
def test_zero_and_tiny_rows(kernel, device, dtype, hidden):
    """Values whose scale would be subnormal are 0, with the scale 0."""
    x = normal(4, hidden, dtype=dtype, device=device)
    x[1] = 0
    tiny = torch.full((hidden,), 1e-37, device=device)
    for name in ("rms_norm_fp8", "layer_norm_fp8"):
        values, scales = getattr(kernel, name)(x)
        assert not scales[1].any() and not values[1].float().any()
        assert (scales[[0, 2, 3]] > 0).all()
        values, scales = getattr(kernel, name)(x, tiny)
        assert not scales.any() and not values.float().any()
    x[0, 0] = 1000  # about sqrt(hidden) after the norm
    _, scales = kernel.rms_norm_fp8(x, torch.full((hidden,), 1e-35, device=device))
    assert scales[0] >= torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("shape", [(0,), (0, 256), (3, 0), (2, 0, 64), (2, 3, 0)], ids=str)
@every_norm
def test_empty(kernel, device, name, shape):
    """Rows without elements have the scale 0."""
    arguments = row_call(name, shape, torch.bfloat16, device, form="contiguous")
    poison_memory(torch.empty(3, device=device))
    *residual, values, scales = getattr(kernel, f"{name}_fp8")(**arguments)
    assert values.shape == shape and scales.shape == (*shape[:-1], 1)
    assert [tensor.shape for tensor in residual] == [shape] * name.startswith("gated")
    assert not scales.any()


@pytest.mark.parametrize("name", GATED)
def test_unrounded_values_are_quantized(kernel, device, name):
    """x is tiny beside the residual, but determines the result."""
    residual = torch.full((16, 256), 64.0, dtype=torch.bfloat16, device=device)
    x = normal(16, 256, dtype=torch.bfloat16, device=device, std=0.05)
    shift = torch.full((256,), -1.0 if "rms" in name else 0.0, device=device)
    reference = getattr(references, name)(residual, x, shift=shift)[1]
    _, values, scales = getattr(kernel, f"{name}_fp8")(residual, x, shift=shift)
    error = (values.double() * scales - reference).norm() / reference.norm()
    assert error < 0.03


@pytest.mark.sanitize
@every_norm
@pytest.mark.parametrize("hidden", [7, 2048], ids=["scalar", "vector"])
def test_smoke(kernel, device, name, hidden):
    arguments = row_call(name, (2, 3, hidden), torch.bfloat16, device)
    check_norm(kernel, name, arguments)
