"""qk_norm_rope: norm and rotary embedding of query and key."""

import math

import pytest
import torch

import eager
import references
from checks import CONTRACT_ELEMENTS, check, check_nonfinite
from inputs import (
    PACKED_FORMS,
    PAIR_TABLE_SHAPES,
    STRIDED_LAYOUTS,
    TABLE_SHAPES,
    WRITABLE_LAYOUTS,
    coordinates_and_frequencies,
    every_16_bit_dtype,
    every_dtype,
    normal,
    packed_query_and_key,
    rotary_tables,
)

NORMS = ["across_heads", "per_head", "none"]
PAIR_LAYOUTS = ["interleaved", "half"]
every_norm = pytest.mark.parametrize("norm", NORMS)
every_pair_layout = pytest.mark.parametrize("layout", PAIR_LAYOUTS)
in_or_out_of_place = pytest.mark.parametrize(
    "inplace", [False, True], ids=["out_of_place", "inplace"]
)


def query_and_key(shape, dtype, device, *, k_heads=None, has_head_dim=False, layout="contiguous"):
    """q and k of (batch, seq, heads, head_dim), the last two flattened unless `has_head_dim`."""
    batch, seq, heads, head_dim = shape
    tensors = []
    for count in (heads, heads if k_heads is None else k_heads):
        size = (batch, seq, count, head_dim) if has_head_dim else (batch, seq, count * head_dim)
        tensors.append(normal(*size, dtype=dtype, device=device, layout=layout))
    return tensors


def weights(norm, shape, dtype, device, *, k_heads=None, layout="contiguous"):
    """q_weight and k_weight as keyword arguments."""
    *_, heads, head_dim = shape
    if norm == "none":
        return {}
    counts = {"q_weight": heads, "k_weight": heads if k_heads is None else k_heads}
    return {
        name: normal(
            (count if norm == "across_heads" else 1) * head_dim,
            dtype=dtype,
            device=device,
            mean=0.5,
            layout=layout,
        )
        for name, count in counts.items()
    }


@pytest.mark.parametrize("head_dim", [2, 6, 40, 64, 72, 80, 96, 128, 256])
@every_norm
@every_pair_layout
@every_dtype
def test_head_dims(kernel, device, head_dim, norm, layout, dtype):
    seq = math.ceil(CONTRACT_ELEMENTS / (2 * 4 * head_dim))
    shape = (2, seq, 4, head_dim)
    q, k = query_and_key(shape, dtype, device)
    rope = rotary_tables(seq, head_dim, dtype=torch.float32, device=device)
    parameters = weights(norm, shape, dtype, device)
    check(kernel, "qk_norm_rope", q, k, **parameters, rope=rope, heads=4, norm=norm, layout=layout)


@pytest.mark.parametrize("table_shape", TABLE_SHAPES)
@pytest.mark.parametrize(
    "table_is_float32", [True, False], ids=["float32_table", "same_dtype_table"]
)
@every_pair_layout
@pytest.mark.parametrize("norm", ["across_heads", "per_head"])
@every_16_bit_dtype
def test_table_shapes(kernel, device, table_shape, table_is_float32, layout, norm, dtype):
    shape = (2, 65, 4, 64)
    q, k = query_and_key(shape, dtype, device)
    table_dtype = torch.float32 if table_is_float32 else dtype
    rope = rotary_tables(*TABLE_SHAPES[table_shape](*shape), dtype=table_dtype, device=device)
    parameters = weights(norm, shape, dtype, device)
    check(kernel, "qk_norm_rope", q, k, **parameters, rope=rope, heads=4, norm=norm, layout=layout)


@pytest.mark.parametrize("table_layout", ["chunk", "misaligned", "odd_rows", "expanded"])
@every_pair_layout
@every_dtype
def test_strided_tables(kernel, device, table_layout, layout, dtype):
    shape = (2, 65, 4, 64)
    q, k = query_and_key(shape, dtype, device)
    rope = [
        normal(2, 65, 64, dtype=torch.float32, device=device, layout=table_layout) for _ in range(2)
    ]
    check(kernel, "qk_norm_rope", q, k, rope=tuple(rope), heads=4, norm="per_head", layout=layout)


@pytest.mark.parametrize("table_shape", PAIR_TABLE_SHAPES)
@pytest.mark.parametrize(
    "table_is_float32", [True, False], ids=["float32_table", "same_dtype_table"]
)
@every_pair_layout
@pytest.mark.parametrize("norm", ["across_heads", "per_head"])
@pytest.mark.parametrize(
    ("has_head_dim", "inplace"), [(False, False), (True, True)], ids=["3d", "4d-inplace"]
)
@every_dtype
def test_pair_tables(
    kernel, device, table_shape, table_is_float32, layout, norm, has_head_dim, inplace, dtype
):
    shape = (2, 65, 4, 64)
    q, k = query_and_key(shape, dtype, device, has_head_dim=has_head_dim)
    table_dtype = torch.float32 if table_is_float32 else dtype
    rope = rotary_tables(*PAIR_TABLE_SHAPES[table_shape](*shape), dtype=table_dtype, device=device)
    check(
        kernel,
        "qk_norm_rope",
        q,
        k,
        **weights(norm, shape, dtype, device),
        rope=rope,
        heads=4,
        norm=norm,
        layout=layout,
        inplace=inplace,
    )


@pytest.mark.parametrize("head_dim", [2, 6, 40, 72, 128, 256])
@pytest.mark.parametrize("has_head_dim", [False, True], ids=["3d", "4d"])
@every_norm
@every_pair_layout
@every_dtype
def test_head_dims_of_pair_tables(kernel, device, head_dim, has_head_dim, norm, layout, dtype):
    """With another number of key heads."""
    shape = (2, math.ceil(CONTRACT_ELEMENTS / (2 * 4 * head_dim)), 4, head_dim)
    q, k = query_and_key(shape, dtype, device, k_heads=8, has_head_dim=has_head_dim)
    rope = rotary_tables(shape[1], head_dim // 2, dtype=torch.float32, device=device)
    parameters = weights(norm, shape, dtype, device, k_heads=8)
    check(kernel, "qk_norm_rope", q, k, **parameters, rope=rope, heads=4, norm=norm, layout=layout)


@pytest.mark.parametrize("table_layout", ["chunk", "misaligned", "odd_rows", "expanded"])
@every_pair_layout
@every_dtype
def test_strided_pair_tables(kernel, device, table_layout, layout, dtype):
    q, k = query_and_key((2, 65, 4, 64), dtype, device)
    rope = [
        normal(2, 65, 4, 32, dtype=torch.float32, device=device, layout=table_layout),
        normal(2, 65, 32, dtype=torch.float32, device=device, layout=table_layout),
    ]
    for tables in (rope, reversed(rope)):
        check(kernel, "qk_norm_rope", q, k, rope=tuple(tables), heads=4, layout=layout)


@pytest.mark.parametrize("has_head_dim", [False, True], ids=["3d", "4d"])
@every_norm
@every_dtype
def test_without_rotation(kernel, device, has_head_dim, norm, dtype):
    shape = (2, 65, 4, 64)
    q, k = query_and_key(shape, dtype, device, has_head_dim=has_head_dim)
    check(kernel, "qk_norm_rope", q, k, **weights(norm, shape, dtype, device), heads=4, norm=norm)


@pytest.mark.parametrize("norm", ["across_heads", "per_head"])
@pytest.mark.parametrize("head_dim", [1, 7, 65])
def test_odd_head_dim_without_rotation(kernel, device, norm, head_dim):
    shape = (2, 65, 4, head_dim)
    q, k = query_and_key(shape, torch.bfloat16, device)
    parameters = weights(norm, shape, torch.bfloat16, device)
    check(kernel, "qk_norm_rope", q, k, **parameters, heads=4, norm=norm)


@pytest.mark.parametrize("given", [(), ("q_weight",), ("k_weight",)], ids=["none", "q", "k"])
@pytest.mark.parametrize("norm", ["across_heads", "per_head"])
@every_dtype
def test_weights_left_out(kernel, device, given, norm, dtype):
    shape = (2, 65, 4, 64)
    q, k = query_and_key(shape, dtype, device)
    rope = rotary_tables(65, 64, dtype=torch.float32, device=device)
    parameters = weights(norm, shape, dtype, device)
    parameters = {name: parameters[name] for name in given}
    check(kernel, "qk_norm_rope", q, k, **parameters, rope=rope, heads=4, norm=norm)


@pytest.mark.parametrize("norm", ["across_heads", "per_head"])
@every_dtype
def test_misaligned_weights(kernel, device, norm, dtype):
    shape = (2, 65, 4, 64)
    q, k = query_and_key(shape, dtype, device)
    rope = rotary_tables(65, 64, dtype=dtype, device=device)
    parameters = weights(norm, shape, dtype, device, layout="misaligned")
    check(kernel, "qk_norm_rope", q, k, **parameters, rope=rope, heads=4, norm=norm)


@pytest.mark.parametrize("k_heads", [1, 8])
@pytest.mark.parametrize("has_head_dim", [False, True], ids=["3d", "4d"])
@in_or_out_of_place
@pytest.mark.parametrize("norm", ["across_heads", "per_head"])
@every_pair_layout
@every_dtype
def test_key_with_another_number_of_heads(
    kernel, device, k_heads, has_head_dim, inplace, norm, layout, dtype
):
    shape = (2, 65, 4, 64)
    q, k = query_and_key(shape, dtype, device, k_heads=k_heads, has_head_dim=has_head_dim)
    rope = rotary_tables(2, 65, 1, 64, dtype=torch.float32, device=device)
    parameters = weights(norm, shape, dtype, device, k_heads=k_heads)
    check(
        kernel,
        "qk_norm_rope",
        q,
        k,
        **parameters,
        rope=rope,
        heads=4,
        norm=norm,
        layout=layout,
        inplace=inplace,
    )


@pytest.mark.parametrize("memory", STRIDED_LAYOUTS)
@pytest.mark.parametrize("has_head_dim", [False, True], ids=["3d", "4d"])
@pytest.mark.parametrize("head_dim", [64, 6])
@every_norm
@every_dtype
def test_strided_views(kernel, device, memory, has_head_dim, head_dim, norm, dtype):
    shape = (2, 65, 4, head_dim)
    q, k = query_and_key(shape, dtype, device, has_head_dim=has_head_dim, layout=memory)
    rope = rotary_tables(65, head_dim, dtype=torch.float32, device=device)
    parameters = weights(norm, shape, dtype, device)
    check(kernel, "qk_norm_rope", q, k, **parameters, rope=rope, heads=4, norm=norm)


@pytest.mark.parametrize("memory", WRITABLE_LAYOUTS)
@pytest.mark.parametrize("has_head_dim", [False, True], ids=["3d", "4d"])
@every_norm
@every_pair_layout
@every_dtype
def test_inplace_on_strided_views(kernel, device, memory, has_head_dim, norm, layout, dtype):
    shape = (2, 65, 4, 64)
    q, k = query_and_key(shape, dtype, device, has_head_dim=has_head_dim, layout=memory)
    rope = rotary_tables(65, 64, dtype=torch.float32, device=device)
    parameters = weights(norm, shape, dtype, device)
    check(
        kernel,
        "qk_norm_rope",
        q,
        k,
        **parameters,
        rope=rope,
        heads=4,
        norm=norm,
        layout=layout,
        inplace=True,
    )


@pytest.mark.parametrize("form", PACKED_FORMS)
@in_or_out_of_place
@every_norm
@every_pair_layout
@every_dtype
def test_packed_projection(kernel, device, form, inplace, norm, layout, dtype):
    shape = (2, 65, 4, 64)
    q, k = packed_query_and_key(form, shape, dtype, device)
    rope = rotary_tables(65, 64, dtype=torch.float32, device=device)
    parameters = weights(norm, shape, dtype, device)
    check(
        kernel,
        "qk_norm_rope",
        q,
        k,
        **parameters,
        rope=rope,
        heads=4,
        norm=norm,
        layout=layout,
        inplace=inplace,
    )


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 2), (1, 64, 32, 64), (2, 32, 24, 128), (1, 9, 130, 64), (3, 5, 40, 256)],
    ids=str,
)
@pytest.mark.parametrize("norm", ["across_heads", "per_head"])
@in_or_out_of_place
@every_dtype
def test_model_sizes(kernel, device, shape, norm, inplace, dtype):
    batch, seq, heads, head_dim = shape
    q, k = query_and_key(shape, dtype, device)
    rope = rotary_tables(batch, seq, heads * head_dim, dtype=torch.float32, device=device)
    check(
        kernel,
        "qk_norm_rope",
        q,
        k,
        **weights(norm, shape, dtype, device),
        rope=rope,
        heads=heads,
        norm=norm,
        inplace=inplace,
    )


@every_norm
def test_same_tensor_as_query_and_key(kernel, device, norm):
    q, _ = query_and_key((2, 65, 4, 64), torch.bfloat16, device)
    rope = rotary_tables(65, 64, dtype=torch.float32, device=device)
    check(kernel, "qk_norm_rope", q, q, rope=rope, heads=4, norm=norm)


@pytest.mark.parametrize("norm", ["across_heads", "per_head"])
@every_dtype
def test_eps(kernel, device, norm, dtype):
    q, k = (normal(2, 64, 256, dtype=dtype, device=device, std=0.02) for _ in range(2))
    for eps in (0.0, 1e-3, 1.0):
        check(kernel, "qk_norm_rope", q, k, heads=4, norm=norm, eps=eps)


@pytest.mark.parametrize(
    ("axes", "count"),
    [(3, 42), (3, 1), (2, 64), (1, 128), (4, 32), (3, 0)],
    ids=["pad2", "pad125", "2axes_pad0", "1axis_pad0", "4axes_pad0", "no_frequency"],
)
@pytest.mark.parametrize(
    ("coordinate_batch", "inplace"), [(1, False), (2, True)], ids=["out_of_place-1", "inplace-B"]
)
@every_norm
@every_pair_layout
@every_dtype
def test_coordinates(kernel, device, axes, count, coordinate_batch, inplace, norm, layout, dtype):
    shape = (2, 65, 4, 64)
    q, k = query_and_key(shape, dtype, device)
    rope = coordinates_and_frequencies(coordinate_batch, 65, axes, count, device)
    check(
        kernel,
        "qk_norm_rope",
        q,
        k,
        **weights(norm, shape, dtype, device),
        rope=kernel.CoordinateRope(*rope),
        heads=4,
        norm=norm,
        layout=layout,
        inplace=inplace,
        contract=count > 1,  # of few rotated pairs the ratio of errors is noise
    )


@pytest.mark.parametrize("largest_angle", [1.0, 15708.0, 1e5, 1e6, 4e6, 1e9, 1e30])
@pytest.mark.parametrize("norm", ["across_heads", "none"])
@every_dtype
def test_large_angles(kernel, device, largest_angle, norm, dtype):
    """The published LTX-Video sizes: 32 heads of 64, 341 frequencies an axis, one identity pair."""
    shape = (1, 64, 32, 64)
    q, k = query_and_key(shape, dtype, device)
    rope = coordinates_and_frequencies(1, 64, 3, 341, device, largest_angle)
    rope[0][0, 0] = 1.0  # the largest angle itself
    check(
        kernel,
        "qk_norm_rope",
        q,
        k,
        **weights(norm, shape, dtype, device),
        rope=kernel.CoordinateRope(*rope),
        heads=32,
        norm=norm,
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@every_pair_layout
@every_dtype
def test_nonfinite_coordinates(kernel, device, value, layout, dtype):
    q, k = query_and_key((2, 9, 4, 64), dtype, device)
    coordinates, frequencies = coordinates_and_frequencies(1, 9, 3, 42, device)
    coordinates[0, 3, 1] = coordinates[0, 7, 0] = value
    rope = kernel.CoordinateRope(coordinates, frequencies)
    check_nonfinite(kernel, "qk_norm_rope", q, k, rope=rope, heads=4, layout=layout)


@every_dtype
def test_strided_coordinates(kernel, device, dtype):
    q, k = query_and_key((2, 65, 4, 64), dtype, device)
    coordinates, frequencies = coordinates_and_frequencies(2, 65, 3, 42, device)
    for view in (
        coordinates[:1].expand(2, 65, 3),
        normal(2, 65, 3, dtype=torch.float32, device=device, layout="chunk"),
        normal(2, 65, 3, dtype=torch.float32, device=device, layout="transposed"),
    ):
        rope = kernel.CoordinateRope(view, frequencies)
        check(kernel, "qk_norm_rope", q, k, rope=rope, heads=4)


@pytest.mark.parametrize("form", PACKED_FORMS)
@in_or_out_of_place
@every_dtype
def test_coordinates_on_a_packed_projection(kernel, device, form, inplace, dtype):
    shape = (2, 65, 4, 64)
    q, k = packed_query_and_key(form, shape, dtype, device)
    rope = kernel.CoordinateRope(*coordinates_and_frequencies(1, 65, 3, 42, device))
    parameters = weights("across_heads", shape, dtype, device)
    check(kernel, "qk_norm_rope", q, k, **parameters, rope=rope, heads=4, inplace=inplace)


@pytest.mark.parametrize(
    ("axes", "count", "dim"), [(3, 341, 2048), (3, 42, 256), (2, 32, 128), (1, 3, 10)]
)
@pytest.mark.parametrize("batch", [1, 2])
def test_coordinate_tables(kernel, device, axes, count, dim, batch):
    rope = kernel.CoordinateRope(*coordinates_and_frequencies(batch, 65, axes, count, device))
    cos, sin = rope.tables(dim)
    expected = references.coordinate_tables(*rope, dim // 2)
    for table, reference in zip((cos, sin), expected, strict=True):
        assert table.shape == (batch, 65, dim)
        assert table.dtype == torch.float32
        reference = reference.repeat_interleave(2, dim=-1)
        torch.testing.assert_close(table.double(), reference, rtol=2e-7, atol=2e-7)
    assert torch.equal(cos, eager.coordinate_tables(*rope, dim)[0])


@pytest.mark.parametrize("layout", PAIR_LAYOUTS)
def test_coordinates_agree_with_their_tables(kernel, device, layout):
    q, k = query_and_key((2, 65, 4, 64), torch.float32, device)
    rope = kernel.CoordinateRope(*coordinates_and_frequencies(1, 65, 3, 42, device))
    cos, sin = (table.unflatten(-1, (4, 64)) for table in rope.tables(256))
    if layout == "half":
        cos, sin = (torch.cat([table[..., ::2]] * 2, dim=-1) for table in (cos, sin))
    from_coordinates = kernel.qk_norm_rope(q, k, rope=rope, heads=4, layout=layout)
    from_tables = kernel.qk_norm_rope(q, k, rope=(cos, sin), heads=4, layout=layout)
    torch.testing.assert_close(from_coordinates, from_tables, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@every_norm
@every_pair_layout
@every_dtype
def test_nonfinite_values(kernel, device, value, norm, layout, dtype):
    q, k = query_and_key((2, 9, 4, 64), dtype, device)
    q[0, 1, 3] = q[1, 2, 255] = k[0, 4, 128] = value
    rope = rotary_tables(9, 64, dtype=torch.float32, device=device)
    check_nonfinite(kernel, "qk_norm_rope", q, k, rope=rope, heads=4, norm=norm, layout=layout)


@pytest.mark.sanitize
@pytest.mark.kernels_ci
@pytest.mark.parametrize("norm", ["across_heads", "per_head"])
@every_pair_layout
@pytest.mark.parametrize(
    ("shape", "memory", "table", "inplace", "dtype"),
    [
        ((2, 3, 4, 64), "chunk", "S_d", True, torch.bfloat16),
        ((1, 3, 3, 6), "odd_rows", "B_S_H_d", False, torch.bfloat16),
        ((1, 2, 32, 64), "contiguous", "coordinates", False, torch.float32),
        ((2, 3, 2, 72), "misaligned", "coordinates", True, torch.float16),
        ((2, 3, 4, 64), "contiguous", "S_p", True, torch.bfloat16),
        ((1, 3, 3, 6), "odd_rows", "B_S_H_p", False, torch.float32),
    ],
    ids=str,
)
def test_smoke(kernel, device, norm, layout, shape, memory, table, inplace, dtype):
    batch, seq, heads, head_dim = shape
    q, k = query_and_key(shape, dtype, device, layout=memory)
    if table == "coordinates":
        count = (heads * head_dim // 2 - 1) // 3
        rope = coordinates_and_frequencies(batch, seq, 3, count, device)
        rope = kernel.CoordinateRope(*rope)
    else:
        table_shape = {**TABLE_SHAPES, **PAIR_TABLE_SHAPES}[table](*shape)
        rope = rotary_tables(*table_shape, dtype=torch.float32, device=device)
    check(
        kernel,
        "qk_norm_rope",
        q,
        k,
        **weights(norm, shape, dtype, device),
        rope=rope,
        heads=heads,
        norm=norm,
        layout=layout,
        inplace=inplace,
        contract=False,
    )
