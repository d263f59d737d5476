"""rope and rope_3d: rotary embedding from tables, and from a grid with one small table per axis."""

import math

import pytest
import torch

from checks import CONTRACT_ELEMENTS, check, check_nonfinite
from inputs import (
    DTYPES,
    GRID_AXES,
    LAYOUTS,
    PACKED_FORMS,
    PAIR_LAYOUTS,
    PAIR_TABLE_SHAPES,
    TABLE_SHAPES,
    grid_tables,
    heads_of,
    normal,
    packed_projection,
    pairwise,
    rotary_tables,
)

every_pair_layout = pytest.mark.parametrize("layout", PAIR_LAYOUTS)
NONFINITE = [math.nan, math.inf, -math.inf]
ALL_TABLE_SHAPES = {**TABLE_SHAPES, **PAIR_TABLE_SHAPES}


def wide(is_float32, dtype):
    return torch.float32 if is_float32 else dtype


# --------------------------------------------------------------------------------------------------
# From tables


@pairwise(
    head_dim=[2, 6, 18, 40, 64, 72, 80, 128, 256],
    table=["S_d", "S_p", "complex"],
    has_head_dim=[False, True],
    is_float32=[True, False],
    layout=PAIR_LAYOUTS,
    dtype=DTYPES,
)
def test_head_dims(kernel, device, head_dim, table, has_head_dim, is_float32, layout, dtype):
    """For a 3-D x, tables determine the head size."""
    seq = -(-CONTRACT_ELEMENTS // (2 * 4 * head_dim))
    has_head_dim = has_head_dim or table == "S_p"
    x = heads_of((2, seq, 4, head_dim), dtype, device, has_head_dim=has_head_dim)
    width = head_dim if table == "S_d" else head_dim // 2
    is_float32 = is_float32 or table == "complex"
    tables = rotary_tables(seq, width, dtype=wide(is_float32, dtype), device=device)
    tables = (torch.complex(*tables),) if table == "complex" else tables
    check(kernel, "rope", x, *tables, layout=layout)


@pairwise(
    table=ALL_TABLE_SHAPES,
    has_head_dim=[False, True],
    is_float32=[True, False],
    layout=PAIR_LAYOUTS,
    shape=[(2, 65, 4, 64), (2, 65, 5, 18), (1, 1, 1, 2), (3, 5, 40, 256), (1, 9, 130, 64)],
)
def test_table_shapes(kernel, device, table, has_head_dim, is_float32, layout, shape):
    """A table as wide as a row of a 3-D x makes the row one head."""
    dtype = torch.bfloat16
    flat = heads_of(shape, dtype, device, has_head_dim=False)
    in_heads = flat.unflatten(2, shape[2:])
    x = in_heads if has_head_dim or table in PAIR_TABLE_SHAPES else flat
    size = ALL_TABLE_SHAPES[table](*shape)
    tables = rotary_tables(*size, dtype=wide(is_float32, dtype), device=device)
    check(kernel, "rope", x, *tables, layout=layout)
    if table in PAIR_TABLE_SHAPES:
        tables = rotary_tables(*size, dtype=torch.float32, device=device)
        x = in_heads if has_head_dim else flat
        check(kernel, "rope", x, torch.complex(*tables), layout=layout)


@pairwise(cos_shape=TABLE_SHAPES, sin_shape=TABLE_SHAPES, layout=PAIR_LAYOUTS)
def test_cos_and_sin_of_different_shapes(kernel, device, cos_shape, sin_shape, layout):
    shape = (2, 65, 4, 64)
    x = heads_of(shape, torch.bfloat16, device)
    cos, sin = (
        normal(*TABLE_SHAPES[form](*shape), dtype=torch.float32, device=device)
        for form in (cos_shape, sin_shape)
    )
    check(kernel, "rope", x, cos, sin, layout=layout)


@pairwise(
    memory=LAYOUTS,
    width=[64, 32],
    has_heads=[False, True],
    is_float32=[True, False],
    layout=PAIR_LAYOUTS,
    dtype=DTYPES,
)
def test_strided_tables(kernel, device, memory, width, has_heads, is_float32, layout, dtype):
    x = heads_of((2, 65, 4, 64), dtype, device)
    size = (2, 65, 4, width) if has_heads else (2, 65, width)
    options = {"dtype": wide(is_float32, dtype), "device": device}
    strided, other = normal(*size, **options, layout=memory), normal(2, 65, width, **options)
    check(kernel, "rope", x, strided, other, layout=layout)
    check(kernel, "rope", x, other, strided, layout=layout)


@pairwise(
    memory=["misaligned", "odd_rows", "expanded", "conj"], head_dim=[64, 6], layout=PAIR_LAYOUTS
)
def test_views_of_complex_tables(kernel, device, memory, head_dim, layout):
    x = heads_of((2, 65, 4, head_dim), torch.bfloat16, device)
    size = (2, 65, 4, head_dim // 2)
    table = torch.complex(*rotary_tables(*size, dtype=torch.float32, device=device))
    table = table.conj() if memory == "conj" else LAYOUTS[memory](table)
    check(kernel, "rope", x, table, layout=layout)


@pairwise(
    memory=LAYOUTS,
    has_head_dim=[False, True],
    head_dim=[64, 18],
    is_by_pair=[False, True],
    layout=PAIR_LAYOUTS,
    dtype=DTYPES,
)
def test_strided_views(kernel, device, memory, has_head_dim, head_dim, is_by_pair, layout, dtype):
    shape = (2, 65, 4, head_dim)
    has_head_dim = has_head_dim or is_by_pair
    x = heads_of(shape, dtype, device, has_head_dim=has_head_dim, layout=memory)
    width = head_dim // 2 if is_by_pair else head_dim
    cos, sin = rotary_tables(65, width, dtype=torch.float32, device=device)
    check(kernel, "rope", x, cos, sin, layout=layout)


@pairwise(form=PACKED_FORMS, layout=PAIR_LAYOUTS, dtype=DTYPES)
def test_packed_projection(kernel, device, form, layout, dtype):
    tables = rotary_tables(60, 64, dtype=torch.float32, device=device)
    axes = grid_tables((5, 3, 4), (12, 10, 10), dtype=torch.float32, device=device)
    for x in packed_projection(form, (2, 60, 4, 64), dtype, device):
        check(kernel, "rope", x, *tables, layout=layout)
        check(kernel, "rope_3d", x.view(2, 60, 4, 64), **axes, layout=layout)


def test_default_layout_is_interleaved(kernel, device):
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], device=device).view(1, 1, 1, 4)
    cos, sin = torch.zeros(1, 4, device=device), torch.ones(1, 4, device=device)
    assert kernel.rope(x, cos, sin).flatten().tolist() == [-2, 1, -4, 3]
    assert kernel.rope(x, cos, sin, "half").flatten().tolist() == [-3, -4, 1, 2]


@pairwise(value=NONFINITE, width=[64, 32], layout=PAIR_LAYOUTS, dtype=DTYPES)
def test_nonfinite_values(kernel, device, value, width, layout, dtype):
    """In x, and in its tables."""
    x = heads_of((2, 9, 4, 64), dtype, device)
    cos, sin = rotary_tables(9, width, dtype=torch.float32, device=device)
    of_tables = cos.clone(), sin.clone()
    of_tables[0][2, 5] = of_tables[1][7, width - 2] = value
    check_nonfinite(kernel, "rope", x, *of_tables, layout=layout)
    x[0, 1, 3, 5] = x[1, 2, 0, 63] = x[1, 8, 3, 0] = value
    check_nonfinite(kernel, "rope", x, cos, sin, layout=layout)


@pytest.mark.sanitize
@every_pair_layout
@pytest.mark.parametrize(
    ("shape", "memory", "table", "dtype", "is_float32"),
    [
        ((2, 3, 4, 64), "chunk", "S_d", torch.bfloat16, True),
        ((1, 3, 3, 6), "odd_rows", "B_S_H_d", torch.bfloat16, False),
        ((1, 2, 8, 128), "contiguous", "1_S_1_d", torch.float32, True),
        ((2, 3, 2, 72), "misaligned", "B_S_Hd", torch.float16, False),
        ((2, 3, 4, 64), "contiguous", "S_p", torch.bfloat16, True),
        ((1, 3, 8, 128), "chunk", "B_S_H_p", torch.float32, True),
        ((2, 3, 3, 6), "odd_rows", "1_S_H_p", torch.float16, False),
    ],
    ids=str,
)
def test_smoke(kernel, device, layout, shape, memory, table, dtype, is_float32):
    x = heads_of(shape, dtype, device, layout=memory)
    size = ALL_TABLE_SHAPES[table](*shape)
    tables = rotary_tables(*size, dtype=wide(is_float32, dtype), device=device)
    check(kernel, "rope", x, *tables, layout=layout, contract=False)


# --------------------------------------------------------------------------------------------------
# From a grid

# Grid, heads, head_dim, and the pairs of each axis.
GRIDS = {
    "wan_128": ((3, 4, 5), 8, 128, (22, 21, 21)),
    "wan_64": ((2, 15, 16), 8, 64, (12, 10, 10)),
    "cogvideox": ((4, 5, 7), 4, 64, (8, 12, 12)),
    "hunyuan": ((5, 3, 4), 6, 128, (8, 28, 28)),
    "frames_alone": ((60, 1, 1), 8, 64, (32, 0, 0)),
    "rows_alone": ((1, 60, 1), 8, 64, (0, 32, 0)),
    "columns_alone": ((1, 1, 60), 8, 64, (0, 0, 32)),
    "image": ((1, 8, 9), 8, 64, (0, 16, 16)),
    "no_rows": ((6, 5, 2), 8, 64, (16, 0, 16)),
    "no_columns": ((6, 5, 2), 8, 64, (15, 17, 0)),
    "6": ((9, 11, 13), 5, 6, (1, 1, 1)),
    "18": ((9, 11, 5), 5, 18, (2, 3, 4)),
    "80": ((7, 3, 5), 4, 80, (14, 13, 13)),
    "2": ((9, 11, 31), 6, 2, (0, 0, 1)),
    "one_token": ((1, 1, 1), 3, 64, (12, 10, 10)),
}


def on_grid(name, dtype, device, *, batch=2, memory="contiguous", table_dtype=torch.float32):
    """x and the axes' tables."""
    grid, heads, head_dim, pairs = GRIDS[name]
    shape = (batch, grid[0] * grid[1] * grid[2], heads, head_dim)
    x = heads_of(shape, dtype, device, layout=memory)
    return x, grid_tables(grid, pairs, dtype=table_dtype, device=device)


@pairwise(grid=GRIDS, memory=LAYOUTS, layout=PAIR_LAYOUTS, is_float32=[True, False], dtype=DTYPES)
def test_grids(kernel, device, grid, memory, layout, is_float32, dtype):
    table_dtype = wide(is_float32, dtype)
    x, tables = on_grid(grid, dtype, device, memory=memory, table_dtype=table_dtype)
    check(kernel, "rope_3d", x, **tables, layout=layout)


@pairwise(
    table_layout=["chunk", "transposed", "misaligned", "odd_rows", "expanded"],
    axis=GRID_AXES,
    layout=PAIR_LAYOUTS,
    dtype=DTYPES,
)
def test_strided_tables_of_an_axis(kernel, device, table_layout, axis, layout, dtype):
    x, tables = on_grid("cogvideox", dtype, device)
    plain = tables[axis][0]
    strided = normal(*plain.shape, dtype=torch.float32, device=device, layout=table_layout)
    for pair in ((strided, plain), (plain, strided)):
        check(kernel, "rope_3d", x, **{**tables, axis: pair}, layout=layout)


@pairwise(value=NONFINITE, layout=PAIR_LAYOUTS, dtype=DTYPES)
def test_nonfinite_values_on_a_grid(kernel, device, value, layout, dtype):
    x, tables = on_grid("cogvideox", dtype, device)
    x[0, 1, 3, 5] = x[1, 139, 0, 63] = x[1, 8, 3, 0] = value
    tables["height"][0][2, 3] = value
    check_nonfinite(kernel, "rope_3d", x, **tables, layout=layout)


@pytest.mark.sanitize
@every_pair_layout
@pytest.mark.parametrize(
    ("grid", "memory", "dtype", "is_float32"),
    [
        ("wan_128", "chunk", torch.bfloat16, False),
        ("18", "odd_rows", torch.float16, True),
        ("image", "contiguous", torch.float32, True),
        ("no_columns", "misaligned", torch.bfloat16, True),
    ],
    ids=str,
)
def test_smoke_on_a_grid(kernel, device, layout, grid, memory, dtype, is_float32):
    table_dtype = wide(is_float32, dtype)
    x, tables = on_grid(grid, dtype, device, batch=1, memory=memory, table_dtype=table_dtype)
    check(kernel, "rope_3d", x, **tables, layout=layout, contract=False)
