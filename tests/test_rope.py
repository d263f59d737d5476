"""rope and rope_3d: rotary embedding from tables, and from a grid with one small table an axis."""

import pytest
import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

from checks import CONTRACT_ELEMENTS, assert_rounded_once, check, check_nonfinite
from inputs import (
    GRID_AXES,
    LAYOUTS,
    PACKED_FORMS,
    PAIR_TABLE_SHAPES,
    STRIDED_LAYOUTS,
    TABLE_SHAPES,
    every_16_bit_dtype,
    every_dtype,
    for_dtypes,
    grid_tables,
    normal,
    packed_query_and_key,
    rotary_tables,
)

every_pair_layout = pytest.mark.parametrize("layout", ["interleaved", "half"])
flat_or_in_heads = pytest.mark.parametrize("has_head_dim", [False, True], ids=["3d", "4d"])
every_table_dtype = pytest.mark.parametrize(
    "table_is_float32", [True, False], ids=["float32_table", "same_dtype_table"]
)
every_nonfinite = pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), float("-inf")], ids=str
)


def rotated(shape, dtype, device, *, has_head_dim=True, layout="contiguous"):
    """x of (batch, seq, heads, head_dim), the last two flattened unless `has_head_dim`."""
    batch, seq, heads, head_dim = shape
    size = shape if has_head_dim else (batch, seq, heads * head_dim)
    return normal(*size, dtype=dtype, device=device, layout=layout)


# --------------------------------------------------------------------------------------------------
# From tables


@pytest.mark.parametrize("table_shape", PAIR_TABLE_SHAPES)
@pytest.mark.parametrize("head_dim", [2, 6, 64, 128])
@flat_or_in_heads
@every_pair_layout
@every_dtype
def test_complex_tables(kernel, device, table_shape, head_dim, has_head_dim, layout, dtype):
    """Of a row of three dimensions they tell the size of a head."""
    shape = (2, 65, 4, head_dim)
    x = rotated(shape, dtype, device, has_head_dim=has_head_dim)
    size = PAIR_TABLE_SHAPES[table_shape](*shape)
    table = torch.complex(*rotary_tables(*size, dtype=torch.float32, device=device))
    check(kernel, "rope", x, table, layout=layout)


@pytest.mark.parametrize("memory", ["misaligned", "odd_rows", "expanded", "conj"])
@pytest.mark.parametrize("head_dim", [64, 6])
@every_pair_layout
def test_views_of_complex_tables(kernel, device, memory, head_dim, layout):
    x = rotated((2, 65, 4, head_dim), torch.bfloat16, device)
    size = (2, 65, 4, head_dim // 2)
    table = torch.complex(*rotary_tables(*size, dtype=torch.float32, device=device))
    table = table.conj() if memory == "conj" else LAYOUTS[memory](table)
    check(kernel, "rope", x, table, layout=layout)


@pytest.mark.parametrize("head_dim", [2, 6, 18, 40, 64, 72, 80, 128, 256])
@flat_or_in_heads
@every_pair_layout
@every_dtype
def test_head_dims(kernel, device, head_dim, has_head_dim, layout, dtype):
    seq = -(-CONTRACT_ELEMENTS // (2 * 4 * head_dim))
    x = rotated((2, seq, 4, head_dim), dtype, device, has_head_dim=has_head_dim)
    cos, sin = rotary_tables(seq, head_dim, dtype=torch.float32, device=device)
    check(kernel, "rope", x, cos, sin, layout=layout)


@pytest.mark.parametrize("table_shape", TABLE_SHAPES)
@flat_or_in_heads
@every_table_dtype
@every_pair_layout
def test_table_shapes(kernel, device, table_shape, has_head_dim, table_is_float32, layout):
    """A table as wide as a row of three dimensions makes the row one head."""
    dtype = torch.bfloat16
    shape = (2, 65, 4, 64)
    x = rotated(shape, dtype, device, has_head_dim=has_head_dim)
    table_dtype = torch.float32 if table_is_float32 else dtype
    tables = rotary_tables(*TABLE_SHAPES[table_shape](*shape), dtype=table_dtype, device=device)
    check(kernel, "rope", x, *tables, layout=layout)


@pytest.mark.parametrize("cos_shape", ["S_d", "B_S_Hd", "1_S_1_d"])
@pytest.mark.parametrize("sin_shape", ["1_S_d", "B_S_1_d", "B_S_H_d"])
@every_pair_layout
def test_cos_and_sin_of_different_shapes(kernel, device, cos_shape, sin_shape, layout):
    shape = (2, 65, 4, 64)
    x = rotated(shape, torch.bfloat16, device)
    cos, sin = (
        normal(*TABLE_SHAPES[form](*shape), dtype=torch.float32, device=device)
        for form in (cos_shape, sin_shape)
    )
    check(kernel, "rope", x, cos, sin, layout=layout)


@pytest.mark.parametrize("table_layout", ["chunk", "transposed", "misaligned", "odd_rows"])
@every_table_dtype
@every_pair_layout
@every_dtype
def test_strided_tables(kernel, device, table_layout, table_is_float32, layout, dtype):
    x = rotated((2, 65, 4, 64), dtype, device)
    table_dtype = torch.float32 if table_is_float32 else dtype
    strided = normal(2, 65, 64, dtype=table_dtype, device=device, layout=table_layout)
    other = normal(2, 65, 64, dtype=table_dtype, device=device)
    check(kernel, "rope", x, strided, other, layout=layout)
    check(kernel, "rope", x, other, strided, layout=layout)


@flat_or_in_heads
@every_dtype
def test_expanded_tables(kernel, device, has_head_dim, dtype):
    x = rotated((2, 65, 4, 64), dtype, device, has_head_dim=has_head_dim)
    cos, sin = (normal(65, 64, dtype=torch.float32, device=device) for _ in range(2))
    check(kernel, "rope", x, cos.expand(2, 65, 64), sin.expand(2, 65, 64))
    cos, sin = (table[None, :, None].expand(2, 65, 4, 64) for table in (cos, sin))
    check(kernel, "rope", x, cos, sin)
    check(kernel, "rope", x, cos[:, :1].expand(2, 65, 4, 64), sin, layout="half")


@pytest.mark.parametrize("memory", STRIDED_LAYOUTS)
@flat_or_in_heads
@pytest.mark.parametrize("head_dim", [64, 18])
@every_pair_layout
@every_dtype
def test_strided_views(kernel, device, memory, has_head_dim, head_dim, layout, dtype):
    shape = (2, 65, 4, head_dim)
    x = rotated(shape, dtype, device, has_head_dim=has_head_dim, layout=memory)
    cos, sin = rotary_tables(65, head_dim, dtype=torch.float32, device=device)
    check(kernel, "rope", x, cos, sin, layout=layout)


@pytest.mark.parametrize("form", PACKED_FORMS)
@every_pair_layout
@every_dtype
def test_packed_projection(kernel, device, form, layout, dtype):
    cos, sin = rotary_tables(65, 64, dtype=torch.float32, device=device)
    for x in packed_query_and_key(form, (2, 65, 4, 64), dtype, device):
        check(kernel, "rope", x, cos, sin, layout=layout)


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 2), (1, 64, 24, 128), (2, 32, 32, 64), (1, 9, 130, 64), (3, 5, 40, 256)],
    ids=str,
)
@every_pair_layout
@every_dtype
def test_model_sizes(kernel, device, shape, layout, dtype):
    batch, seq, _, head_dim = shape
    x = rotated(shape, dtype, device)
    tables = rotary_tables(1, seq, 1, head_dim, dtype=torch.float32, device=device)
    check(kernel, "rope", x, *tables, layout=layout)


@every_pair_layout
@every_dtype
def test_angle_of_zero_changes_nothing(kernel, device, layout, dtype):
    x = rotated((2, 65, 4, 64), dtype, device)
    cos, sin = torch.ones(65, 64, device=device), torch.zeros(65, 64, device=device)
    assert torch.equal(kernel.rope(x, cos, sin, layout), x)


def test_default_layout_is_interleaved(kernel, device):
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], device=device).view(1, 1, 1, 4)
    cos, sin = torch.zeros(1, 4, device=device), torch.ones(1, 4, device=device)
    assert kernel.rope(x, cos, sin).flatten().tolist() == [-2, 1, -4, 3]
    assert kernel.rope(x, cos, sin, "half").flatten().tolist() == [-3, -4, 1, 2]


@every_nonfinite
@every_pair_layout
@every_dtype
def test_nonfinite_values(kernel, device, value, layout, dtype):
    x = rotated((2, 9, 4, 64), dtype, device)
    x[0, 1, 3, 5] = x[1, 2, 0, 63] = x[1, 8, 3, 0] = value
    cos, sin = rotary_tables(9, 64, dtype=torch.float32, device=device)
    check_nonfinite(kernel, "rope", x, cos, sin, layout=layout)


@every_nonfinite
@every_pair_layout
@pytest.mark.parametrize(("width", "column"), [(64, 60), (32, 30)], ids=["by_element", "by_pair"])
def test_nonfinite_tables(kernel, device, value, layout, width, column):
    x = rotated((2, 9, 4, 64), torch.bfloat16, device)
    cos, sin = rotary_tables(9, width, dtype=torch.float32, device=device)
    cos[2, 5] = sin[7, column] = value
    check_nonfinite(kernel, "rope", x, cos, sin, layout=layout)


@pytest.mark.sanitize
@pytest.mark.kernels_ci
@every_pair_layout
@pytest.mark.parametrize(
    ("shape", "memory", "table", "dtype"),
    [
        ((2, 3, 4, 64), "chunk", "S_d", torch.bfloat16),
        ((1, 3, 3, 6), "odd_rows", "B_S_H_d", torch.bfloat16),
        ((1, 2, 8, 128), "contiguous", "1_S_1_d", torch.float32),
        ((2, 3, 2, 72), "misaligned", "B_S_Hd", torch.float16),
        ((2, 3, 4, 64), "contiguous", "S_p", torch.bfloat16),
        ((1, 3, 8, 128), "chunk", "B_S_H_p", torch.float32),
        ((2, 3, 3, 6), "odd_rows", "1_S_H_p", torch.float16),
    ],
    ids=str,
)
@every_table_dtype
def test_smoke(kernel, device, layout, shape, memory, table, dtype, table_is_float32):
    x = rotated(shape, dtype, device, layout=memory)
    table_dtype = torch.float32 if table_is_float32 else dtype
    table_shape = {**TABLE_SHAPES, **PAIR_TABLE_SHAPES}[table](*shape)
    tables = rotary_tables(*table_shape, dtype=table_dtype, device=device)
    check(kernel, "rope", x, *tables, layout=layout, contract=False)


# --------------------------------------------------------------------------------------------------
# From tables of one value a pair


@pytest.mark.parametrize("head_dim", [2, 6, 18, 40, 64, 72, 80, 128, 256])
@every_table_dtype
@every_pair_layout
@every_dtype
def test_head_dims_of_pair_tables(kernel, device, head_dim, table_is_float32, layout, dtype):
    seq = -(-CONTRACT_ELEMENTS // (2 * 4 * head_dim))
    x = rotated((2, seq, 4, head_dim), dtype, device)
    table_dtype = torch.float32 if table_is_float32 else dtype
    tables = rotary_tables(seq, head_dim // 2, dtype=table_dtype, device=device)
    check(kernel, "rope", x, *tables, layout=layout)


@pytest.mark.parametrize("cos_shape", PAIR_TABLE_SHAPES)
@pytest.mark.parametrize("sin_shape", ["S_p", "B_S_1_p", "B_S_H_p"])
@pytest.mark.parametrize("head_dim", [64, 18])
@every_table_dtype
@every_pair_layout
def test_shapes_of_pair_tables(
    kernel, device, cos_shape, sin_shape, head_dim, table_is_float32, layout
):
    dtype = torch.bfloat16
    shape = (2, 65, 5, head_dim)  # an odd number of heads
    x = rotated(shape, dtype, device)
    cos, sin = (
        normal(
            *PAIR_TABLE_SHAPES[form](*shape),
            dtype=torch.float32 if table_is_float32 else dtype,
            device=device,
        )
        for form in (cos_shape, sin_shape)
    )
    check(kernel, "rope", x, cos, sin, layout=layout)


@pytest.mark.parametrize(
    "table_layout", ["chunk", "transposed", "expanded", "misaligned", "odd_rows"]
)
@every_table_dtype
@every_pair_layout
@every_dtype
def test_strided_pair_tables(kernel, device, table_layout, table_is_float32, layout, dtype):
    x = rotated((2, 65, 4, 64), dtype, device)
    table_dtype = torch.float32 if table_is_float32 else dtype
    strided = normal(2, 65, 4, 32, dtype=table_dtype, device=device, layout=table_layout)
    other = normal(2, 65, 32, dtype=table_dtype, device=device)
    check(kernel, "rope", x, strided, other, layout=layout)
    check(kernel, "rope", x, other, strided, layout=layout)


@pytest.mark.parametrize("memory", STRIDED_LAYOUTS)
@every_pair_layout
@every_dtype
def test_strided_views_by_pair_tables(kernel, device, memory, layout, dtype):
    x = rotated((2, 65, 4, 64), dtype, device, layout=memory)
    tables = rotary_tables(65, 32, dtype=torch.float32, device=device)
    check(kernel, "rope", x, *tables, layout=layout)


@pytest.mark.parametrize("head_dim", [64, 18])
@every_pair_layout
@every_dtype
def test_pair_tables_agree_with_full_tables(kernel, device, head_dim, layout, dtype):
    x = rotated((2, 65, 4, head_dim), dtype, device)
    pairs = rotary_tables(65, head_dim // 2, dtype=torch.float32, device=device)
    if layout == "interleaved":
        full = [table.repeat_interleave(2, dim=-1) for table in pairs]
    else:
        full = [torch.cat([table, table], dim=-1) for table in pairs]
    assert torch.equal(kernel.rope(x, *pairs, layout), kernel.rope(x, *full, layout))


def test_flat_rows_take_the_head_dim_of_their_tables(kernel, device):
    x = rotated((2, 65, 4, 64), torch.float32, device)
    tables = rotary_tables(65, 32, dtype=torch.float32, device=device)
    flat = kernel.rope(x.flatten(2), *tables)
    assert torch.equal(flat.view(2, 65, 8, 32), kernel.rope(x.view(2, 65, 8, 32), *tables))


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
every_grid = pytest.mark.parametrize("grid", GRIDS)


def on_grid(name, dtype, device, *, batch=2, memory="contiguous", table_dtype=torch.float32):
    """x and the axes' tables."""
    grid, heads, head_dim, pairs = GRIDS[name]
    shape = (batch, grid[0] * grid[1] * grid[2], heads, head_dim)
    x = rotated(shape, dtype, device, layout=memory)
    return x, grid_tables(grid, pairs, dtype=table_dtype, device=device)


@every_grid
@every_pair_layout
@every_table_dtype
@every_dtype
def test_grids(kernel, device, grid, layout, table_is_float32, dtype):
    table_dtype = torch.float32 if table_is_float32 else dtype
    x, tables = on_grid(grid, dtype, device, table_dtype=table_dtype)
    check(kernel, "rope_3d", x, **tables, layout=layout)


@pytest.mark.parametrize("memory", STRIDED_LAYOUTS)
@pytest.mark.parametrize("grid", ["cogvideox", "18"])
@every_pair_layout
@every_dtype
def test_strided_views_on_a_grid(kernel, device, memory, grid, layout, dtype):
    x, tables = on_grid(grid, dtype, device, memory=memory)
    check(kernel, "rope_3d", x, **tables, layout=layout)


@pytest.mark.parametrize("form", PACKED_FORMS)
@every_pair_layout
@for_dtypes(torch.float32, torch.bfloat16)
def test_packed_projection_on_a_grid(kernel, device, form, layout, dtype):
    tables = grid_tables((5, 3, 4), (12, 10, 10), dtype=torch.float32, device=device)
    for x in packed_query_and_key(form, (2, 60, 4, 64), dtype, device):
        x = x.view(2, 60, 4, 64)
        check(kernel, "rope_3d", x, **tables, layout=layout)


@pytest.mark.parametrize("table_layout", ["chunk", "transposed", "misaligned", "odd_rows"])
@pytest.mark.parametrize("axis", GRID_AXES)
@every_pair_layout
@every_16_bit_dtype
def test_strided_tables_of_an_axis(kernel, device, table_layout, axis, layout, dtype):
    x, tables = on_grid("cogvideox", dtype, device)
    size = tables[axis][0].shape
    strided = normal(1, *size, dtype=torch.float32, device=device, layout=table_layout)[0]
    plain = tables[axis][0]
    check(kernel, "rope_3d", x, **{**tables, axis: (strided, plain)}, layout=layout)
    check(kernel, "rope_3d", x, **{**tables, axis: (plain, strided)}, layout=layout)


@pytest.mark.parametrize("axis", GRID_AXES)
def test_expanded_tables_of_an_axis(kernel, device, axis):
    x, tables = on_grid("cogvideox", torch.bfloat16, device)
    row = tuple(table[:1].expand_as(table) for table in tables[axis])
    check(kernel, "rope_3d", x, **{**tables, axis: row})


def axis_tables(table, grid, dims):
    """The tables (size, pairs) of the axes, out of one (S, d) that holds every value twice."""
    frames, rows, columns = grid
    table = table[:, ::2].contiguous().view(frames, rows, columns, -1)
    frame, height, width = table.split([dim // 2 for dim in dims], dim=-1)
    return frame[:, 0, 0], height[0, :, 0], width[0, 0]


def check_against_full_tables(kernel, cos, sin, grid, dims, device):
    cos, sin = cos.to(device), sin.to(device)
    axes = zip(axis_tables(cos, grid, dims), axis_tables(sin, grid, dims), strict=True)
    x = rotated((2, cos.shape[0], 3, cos.shape[1]), torch.float32, device)
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2).double()
    expected = x.double() * cos[:, None].double() + turned * sin[:, None].double()
    assert_rounded_once(kernel.rope_3d(x, *axes), expected)
    assert_rounded_once(kernel.rope(x, cos, sin), expected)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_rotates_as_wan_does(kernel, device, head_dim):
    grid = (3, 4, 5)
    rope = WanRotaryPosEmbed(head_dim, (1, 2, 2), 1024)
    latents = torch.empty(1, 1, grid[0], 2 * grid[1], 2 * grid[2])
    cos, sin = (table.float().view(-1, head_dim) for table in rope(latents))
    side = 2 * (head_dim // 6)
    dims = (head_dim - 2 * side, side, side)
    check_against_full_tables(kernel, cos, sin, grid, dims, device)


def test_rotates_as_cogvideox_does(kernel, device):
    frames, rows, columns = grid = (3, 4, 6)
    cos, sin = get_3d_rotary_pos_embed(
        64, ((0, 0), (rows, columns)), grid_size=(rows, columns), temporal_size=frames
    )
    check_against_full_tables(kernel, cos, sin, grid, (16, 24, 24), device)


@every_nonfinite
@every_pair_layout
@every_dtype
def test_nonfinite_values_on_a_grid(kernel, device, value, layout, dtype):
    x, tables = on_grid("cogvideox", dtype, device)
    x[0, 1, 3, 5] = x[1, 139, 0, 63] = x[1, 8, 3, 0] = value
    tables["height"][0][2, 3] = value
    check_nonfinite(kernel, "rope_3d", x, **tables, layout=layout)


@pytest.mark.sanitize
@pytest.mark.kernels_ci
@every_pair_layout
@pytest.mark.parametrize(
    ("grid", "memory", "dtype"),
    [
        ("wan_128", "chunk", torch.bfloat16),
        ("18", "odd_rows", torch.float16),
        ("image", "contiguous", torch.float32),
        ("no_columns", "misaligned", torch.bfloat16),
    ],
    ids=str,
)
@every_table_dtype
def test_smoke_on_a_grid(kernel, device, layout, grid, memory, dtype, table_is_float32):
    table_dtype = torch.float32 if table_is_float32 else dtype
    x, tables = on_grid(grid, dtype, device, batch=1, memory=memory, table_dtype=table_dtype)
    check(kernel, "rope_3d", x, **tables, layout=layout, contract=False)
