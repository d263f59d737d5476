"""Row norms with up to two modulations and an optional gated residual before: one kernel template."""

import math

import pytest
import torch

import eager
from checks import FLOAT32_ARITHMETIC, as_tuple, check, check_nonfinite, poison_memory
from inputs import (
    BRANCH,
    BRANCH_OPERATIONS,
    CHOICES,
    DTYPES,
    FLOAT32_RESIDUAL,
    FLOAT32_RESIDUAL_OPERATIONS,
    LAYOUTS,
    MIXTURES,
    MODULATIONS,
    ROW_NORMS,
    STRIDED_LAYOUTS,
    TABLE,
    TABLE_OPERATIONS,
    TABLE_ROWS,
    every_16_bit_dtype,
    every_dtype,
    mixed,
    modulation,
    normal,
    optional_tensors,
    pairwise,
    rows_of,
    spread,
    with_branch,
    with_index,
    with_table,
)

# The operations, and those that take a float32 residual beside a 16-bit x with one.
CALLS = [*ROW_NORMS, *(name + FLOAT32_RESIDUAL for name in FLOAT32_RESIDUAL_OPERATIONS)]
NORMS = [name for name in ROW_NORMS if "norm" in name]
LAYER_NORMS = [name for name in NORMS if "layer_norm" in name]
every_norm = pytest.mark.parametrize("name", NORMS)
every_nonfinite = pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)

# Rows of few values, rows that fit in registers, in shared memory and in several multiprocessors, with and
# without multiples of a vector, and longer ones.
SIZES = [1, 2, 3, 7, 8, 63, 64, 65, 128, 256, 1000, 1536, 2048, 2432, 3072, 4096, 5120, 6144, 8192]
SIZES += [8200, 10240, 16384, 20480, 32768, 32776, 40000, 65528, 65536, 70001, 131080, 800_000]
SIZES += [1_000_000]
SMALL, LONG = 63, 32776


def row_call(name, shape, dtype, device, *, layout="contiguous", form="B1D", make=normal, **choice):
    """The arguments of a call. `form`: the modulators' broadcast shape, or their layout at full size."""
    plain = name.removesuffix(FLOAT32_RESIDUAL)
    layouts = [layout] if isinstance(layout, str) else layout
    arguments = {}
    for i, key in enumerate(TABLE[plain].rows):
        of_key = torch.float32 if name != plain and key == "residual" else dtype
        layout = layouts[i % len(layouts)]
        arguments[key] = make(*shape, dtype=of_key, device=device, layout=layout)
    extra = modulators(name, shape, dtype, device, form=form, **choice)
    return {**arguments, **extra}


def modulators(
    name, shape, dtype, device, *, form="B1D", given="all", mixture=None, vectors="contiguous"
):
    """All arguments except the rows."""
    operation, hidden = TABLE[name.removesuffix(FLOAT32_RESIDUAL)], shape[-1]
    wide = dtype if mixture is None else torch.float32
    count = len(operation.modulations)
    if form in LAYOUTS:
        values = [normal(*shape, dtype=wide, device=device, layout=form) for _ in range(count)]
    elif form in MODULATIONS:
        values = modulation(form, count, shape, dtype=wide, device=device)
    else:  # each of another form
        forms = ("D", "B1D_table", "BSD") if form == "different" else ("BSD_table", "D", "B1D")
        options = {"dtype": wide, "device": device}
        values = [modulation(forms[i % 3], 1, shape, **options)[0] for i in range(count)]
    arguments = dict(zip(operation.modulations, values, strict=True))
    for key in operation.vectors:
        arguments[key] = normal(hidden, dtype=wide, device=device, layout=vectors, mean=0.5)
    if mixture is not None:
        arguments = mixed(mixture, arguments, dtype)
    optional = optional_tensors(name)
    for index, key in enumerate(optional):
        if not CHOICES[given](index, len(optional)):
            arguments[key] = None
    return arguments


def check_rows(kernel, name, arguments, **options):
    # Values, scales and shifts far from 0 may cancel, which leaves several of their float32 rounding errors.
    options.setdefault("slack", FLOAT32_ARITHMETIC * (2 if "modulate" in name else 1))
    name = name.removesuffix(FLOAT32_RESIDUAL)
    return check(kernel, name, **arguments, **options)


@pairwise(name=CALLS, hidden=SIZES, dtype=DTYPES, given=CHOICES, mixture=[None, *MIXTURES])
def test_sizes(kernel, device, name, hidden, dtype, given, mixture):
    is_small, is_long = hidden <= SMALL, hidden > LONG
    rows = 3 if is_small or is_long else rows_of(hidden, dtype) // 2
    shape = (5 if is_small else 1 if is_long else 2, rows, hidden)
    mixture = None if dtype == torch.float32 else mixture
    make = spread if is_small or is_long else normal
    arguments = row_call(name, shape, dtype, device, make=make, given=given, mixture=mixture)
    if is_small and arguments.get("gate") is not None:
        arguments["gate"].abs_()
    if is_small and "residual" in arguments:
        arguments["x"] = arguments["residual"].roll(1, 0).to(dtype)
    contract = not (is_long and dtype == torch.float32)  # of few rows the ratio of errors is noise
    # Among millions of elements, one shows the rounding errors of a mean and a bias that cancel.
    roundings = 2 + (hidden >= 800_000)
    check_rows(kernel, name, arguments, contract=contract, slack=FLOAT32_ARITHMETIC * roundings)


PARTS = ("addend", "x_norm", "tanh_gate")
TABLES = ("scale", "shift", "gate")


@pairwise(
    name=TABLE_OPERATIONS,
    hidden=[size for size in SIZES if size <= 20480],
    dtype=DTYPES,
    layout=LAYOUTS,
    parts=[(), PARTS[:1], PARTS[1:2], PARTS[2:], PARTS[:2], PARTS[1:], PARTS],
    tables=[
        None,
        "rows",
        *((rows, is_shared) for rows in (1, 2, 7) for is_shared in (False, True)),
    ],
    form=["B1D", "BSD", "BSD_table", "different"],
    mixture=[None, *MIXTURES],
    given=CHOICES,
)
def test_branches_and_tables(
    kernel, device, name, hidden, dtype, layout, parts, tables, form, mixture, given
):
    """Residuals of a normalized branch, of a sum of two, and with tanh of the gate. A modulation is also a
    table's row plus an embedding, or each token chooses its row of a table."""
    shape = (2, 3 if hidden <= SMALL else rows_of(hidden, dtype) // 2, hidden)
    mixture = None if dtype == torch.float32 else mixture
    choice = {"layout": layout, "form": form, "mixture": mixture, "given": given}
    arguments = row_call(name, shape, dtype, device, **choice)
    if "residual" in arguments:
        arguments = with_branch(arguments, parts, given != "none")
    if tables == "rows":
        arguments = with_table(arguments)
    elif tables and any(arguments.get(key) is not None for key in TABLES):
        arguments = with_index(arguments, *tables)
    check_rows(kernel, name, arguments, slack=FLOAT32_ARITHMETIC * 4, contract=hidden > SMALL)


@pairwise(name=TABLE_OPERATIONS, hidden=[7, 2048], dtype=DTYPES, is_strided=[False, True])
def test_index_outside_of_the_table(kernel, device, name, hidden, dtype, is_strided):
    """It is clamped. The index and the rows of the tables may be strided."""
    arguments = with_index(row_call(name, (2, 5, hidden), dtype, device), rows=4)
    index = torch.tensor([[-(2**31), -1, 0, 3, 4], [5, 2**31 - 1, 2, 1, -7]])
    index = index.to(torch.int32).to(device)
    if is_strided:
        index = torch.stack([index, index + 1], dim=2)[..., 0]
        for key in TABLES:
            if key in arguments:
                arguments[key] = arguments[key].repeat(1, 2)[:, :hidden]
    function = getattr(kernel, name)
    clamped = function(**{**arguments, "index": index.clamp(0, 3).contiguous()})
    torch.testing.assert_close(function(**{**arguments, "index": index}), clamped, rtol=0, atol=0)


def test_index_of_any_leading_dimensions(kernel, device):
    x = normal(2, 3, 4, 65, dtype=torch.float32, device=device)
    arguments = with_index({"x": x, "scale": x, "shift": x})
    arguments["index"] = arguments["index"][:, :1]
    check_rows(kernel, "layer_norm_modulate", arguments)
    single = {**arguments, "x": x[0, 0, 0], "index": arguments["index"][0, 0, 0]}
    check_rows(kernel, "layer_norm_modulate", single)


@pairwise(
    name=CALLS,
    layout=[
        *((layout, layout) for layout in LAYOUTS),
        *((layout, "contiguous") for layout in STRIDED_LAYOUTS),
        *(("contiguous", layout) for layout in STRIDED_LAYOUTS),
    ],
    form=[*MODULATIONS, *STRIDED_LAYOUTS, "different", "reversed"],
    hidden=[65, 520, 2048, 10240],
    dtype=DTYPES,
    mixture=[None, *MIXTURES],
    vectors=["contiguous", "misaligned"],
)
def test_layouts(kernel, device, name, layout, form, hidden, dtype, mixture, vectors):
    """16-bit rows may be aligned to 16 bytes when float32 operands are not, and vice versa."""
    mixture = None if dtype == torch.float32 else mixture
    options = {"layout": layout, "form": form, "mixture": mixture, "vectors": vectors}
    check_rows(kernel, name, row_call(name, (3, 16, hidden), dtype, device, **options))


# Shapes of rows and modulators.
DIMENSIONS = [
    ((4096,), (4096,)),
    ((33, 256), (256,)),
    ((33, 256), (1, 256)),
    ((2, 3, 5, 256), (2, 1, 5, 256)),
    ((2, 3, 5, 256), (3, 1, 256)),
    ((2, 3, 2, 5, 256), (1, 3, 1, 5, 256)),
    ((2, 3, 2, 2, 3, 64), (3, 1, 2, 1, 64)),
    ((2, 3, 4, 5, 64), (2, 3, 4, 5, 64)),
    ((2, 3, 2, 3, 2, 3, 64), (2, 3, 2, 3, 2, 3, 64)),
]


@pairwise(
    name=CALLS,
    shapes=DIMENSIONS,
    layout=["contiguous", "transposed", ("contiguous", "transposed")],
    dtype=DTYPES,
    mixture=[None, "odd"],
)
def test_dimensions(kernel, device, name, shapes, layout, dtype, mixture):
    """Leading dimensions that cannot be merged, in one launch or in several."""
    shape, of_modulation = shapes
    arguments = row_call(name, shape, dtype, device, layout=layout, form="contiguous")
    for i, key in enumerate(TABLE[name.removesuffix(FLOAT32_RESIDUAL)].modulations):
        wide = torch.float32 if mixture and i % 2 and dtype != torch.float32 else dtype
        arguments[key] = normal(*of_modulation, dtype=wide, device=device)
    check_rows(kernel, name, arguments)


@every_norm
def test_stride_of_a_single_column_is_free(kernel, device, name):
    arguments = row_call(name, (7, 1), torch.bfloat16, device, form="contiguous")
    for key in TABLE[name].rows:
        arguments[key] = arguments[key].flatten().as_strided((7, 1), (1, 7))
    check_rows(kernel, name, arguments)


@pairwise(name=NORMS, eps=[0.0, 1e-12, 1e-3, 1.0, None], dtype=DTYPES)
def test_eps(kernel, device, name, eps, dtype):
    arguments = row_call(name, (2, 64, 256), dtype, device)
    for key in TABLE[name].rows:
        arguments[key] *= 0.001 if eps is None else 0.02
    # Small values reveal the default eps.
    check_rows(kernel, name, arguments, **({} if eps is None else {"eps": eps}))


@pairwise(name=LAYER_NORMS, hidden=[64, 1536, 5120, 8192, 65536], dtype=DTYPES)
def test_outliers_in_front(kernel, device, name, hidden, dtype):
    """The first values of a row are bad pivots: far from the others, huge, or the only ones."""
    x = normal(16, hidden, dtype=torch.float32, device=device)
    x[:, :8] += torch.linspace(-100, 100, 16, device=device)[:, None]
    x[3] = 7
    x[4] = 0
    x[4, 0] = 1000
    arguments = row_call(name, (16, hidden), dtype, device, form="contiguous", given="all_but_last")
    arguments["x"] = x.to(dtype)
    if "residual" in arguments:
        arguments["residual"] = torch.zeros_like(arguments["x"])
        arguments["gate"] = torch.ones_like(arguments["gate"])
    check_rows(kernel, name, arguments, contract=dtype != torch.float32)


@pairwise(mean=[10.0, 300.0], hidden=[64, 2048, 40000], dtype=DTYPES)
def test_values_far_from_zero(kernel, device, mean, hidden, dtype):
    x = normal(rows_of(hidden, dtype), hidden, dtype=dtype, device=device, mean=mean)
    check(kernel, "layer_norm", x, slack=4e-7 * mean)


@every_norm
@every_dtype
def test_rows_of_one_value(kernel, device, name, dtype):
    arguments = row_call(name, (3, 512), dtype, device, form="contiguous")
    rows = torch.tensor([[0.0], [1.0], [-3.0]], dtype=dtype, device=device).expand(3, 512)
    arguments.update({key: rows.contiguous() for key in TABLE[name].rows})
    if "gate" in arguments:
        arguments["gate"] = torch.full_like(rows, 2.0)
    check_rows(kernel, name, arguments)


@pytest.mark.parametrize("name", [name for name in NORMS if name.startswith("gated")])
@every_16_bit_dtype
def test_norm_takes_the_residual_before_it_is_rounded(kernel, device, name, dtype):
    """x is tiny beside the residual, but determines the norm's output."""
    residual = torch.full((64, 256), 64.0, dtype=dtype, device=device)
    x = normal(64, 256, dtype=dtype, device=device, std=0.05)
    scale, shift = torch.zeros(2, 256, dtype=dtype, device=device)
    if "rms" in name:
        shift -= 1
    given = {"gate": None, "scale": scale, "shift": shift}
    given |= {"second_scale": shift, "second_shift": scale} if name.endswith("pair") else {}
    slack = 4e-4 if "layer" in name else 4e-6
    check(kernel, name, residual, x, **given, slack=slack)


@pytest.mark.parametrize("name", FLOAT32_RESIDUAL_OPERATIONS)
@pairwise(hidden=[65, 2048, 10240], dtype=DTYPES[1:], of_gate=[None, torch.float32, "x"])
def test_rounding_of_a_float32_sum(kernel, device, name, hidden, dtype, of_gate):
    """Once after the product and once after the sum, at most: float32 keeps what 16 bits would lose."""
    residual = normal(2, 9, hidden, dtype=torch.float32, device=device, mean=100.0)
    x = normal(2, 9, hidden, dtype=dtype, device=device, std=1e-3)
    gate = None
    if of_gate is not None:
        gate = normal(hidden, dtype=dtype if of_gate == "x" else of_gate, device=device)
    h, *n = as_tuple(getattr(kernel, name)(residual, x, gate))
    assert h.dtype == torch.float32 and all(each.dtype == dtype for each in n)
    term = x.double() if gate is None else gate.double() * x.double()
    expected = residual.double() + term
    assert ((h - expected).abs() <= 2**-24 * 1.001 * (term.abs() + expected.abs())).all()


@every_nonfinite
@pairwise(name=CALLS, hidden=[65, 256, 10240], dtype=DTYPES, mixture=[None, "all"])
def test_nonfinite_values(kernel, device, name, value, hidden, dtype, mixture):
    """In the first, a middle and the last place of a row, and in each operand."""
    shape = (1, 12, hidden)
    mixture = None if dtype == torch.float32 else mixture
    arguments = row_call(name, shape, dtype, device, form="BSD", mixture=mixture)
    x = arguments["x"]
    x[0, 1, 0] = x[0, 3, hidden // 2] = x[0, 4, hidden - 1] = value
    name = name.removesuffix(FLOAT32_RESIDUAL)
    others = [key for key in arguments if key not in ("x", *TABLE[name].vectors)]
    for row, key in enumerate(others, start=5):
        arguments[key][0, row, 5 * row] = value
    check_nonfinite(kernel, name, **arguments)


@pytest.mark.parametrize("name", [name for name in NORMS if "residual" not in name])
@every_dtype
def test_nonfinite_weight(kernel, device, name, dtype):
    arguments = row_call(name, (6, 256), dtype, device, form="contiguous")
    arguments["weight"][3], arguments["weight"][7] = math.nan, math.inf
    check_nonfinite(kernel, name, **arguments)


OF_BRANCHES = [name + how for name in BRANCH_OPERATIONS for how in (BRANCH, BRANCH + TABLE_ROWS)]


@pytest.mark.sanitize
@pytest.mark.parametrize("name", [*CALLS, *OF_BRANCHES])
@pytest.mark.parametrize(
    ("shape", "layout", "form", "dtype", "mixture"),
    [
        ((2, 3, 7), "odd_rows", "BSD", torch.bfloat16, None),
        ((2, 2, 2048), "contiguous", "B1D_table", torch.float32, None),
        ((2, 2, 1030), "misaligned", "D", torch.float16, "even"),
        ((2, 1, 16384), "contiguous", "B1D", torch.float16, "all"),
        ((2, 1, 40000), "chunk", "B1D", torch.bfloat16, "odd"),
        ((1, 2, 65536), "contiguous", "D", torch.float32, None),
        ((1, 2, 70001), "odd_rows", "D", torch.float32, None),
    ],
    ids=str,
)
def test_smoke(kernel, device, name, shape, layout, form, dtype, mixture):
    options = {"layout": layout, "form": form, "mixture": mixture, "make": spread}
    operation, of_branch, table = name.partition(BRANCH)
    arguments = row_call(operation, shape, dtype, device, **options)
    if "gate" in arguments:
        arguments["gate"].abs_()
    arguments = with_branch(arguments) if of_branch else arguments
    arguments = with_table(arguments) if table else arguments
    check_rows(kernel, operation, arguments, contract=False)


def test_memory_of_an_eager_result_is_poisoned(device):
    """All tests of values depend on this."""
    for _ in range(20):
        right = eager.rms_norm(normal(64, 65, dtype=torch.bfloat16, device=device))
        poison_memory(right)
        assert (torch.empty_like(right) == right).float().mean() < 0.1


def test_layouts_are_what_they_are_called(device):
    """All tests of strided views depend on this."""
    options = {"dtype": torch.bfloat16, "device": device}
    views = {name: normal(3, 4, 64, layout=name, **options) for name in LAYOUTS}
    assert {name: view.stride() for name, view in views.items()} == {
        "contiguous": (256, 64, 1),
        "unbind": (768, 192, 1),
        "chunk": (768, 192, 1),
        "transposed": (64, 192, 1),
        "expanded": (0, 64, 1),
        "misaligned": (256, 64, 1),
        "odd_rows": (268, 67, 1),
    }
    assert views["contiguous"].data_ptr() % 16 == 0
    assert views["misaligned"].data_ptr() % 16 == 2
    assert all(view.isfinite().all() for view in views.values())
