"""qk_norm_rope: norm and rotary embedding of query and key."""

import math

import pytest
import torch

import eager
import references
from checks import CONTRACT_ELEMENTS, check, check_nonfinite
from inputs import (
    LAYOUTS,
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


# --------------------------------------------------------------------------------------------------
# One tensor


def rotation(kernel, form, shape, device, heads=None, dtype=torch.float32):
    """What turns a tensor of this shape: tables of a form, a complex one, coordinates or nothing."""
    batch, seq, default_heads, head_dim = shape
    heads = default_heads if heads is None else heads
    shape = (batch, seq, heads, head_dim)
    if form == "none":
        return None
    if form == "coordinates":
        count = (heads * head_dim // 2 - 1) // 3
        return kernel.CoordinateRope(*coordinates_and_frequencies(1, seq, 3, count, device))
    if form.startswith("complex"):
        size = PAIR_TABLE_SHAPES[form.removeprefix("complex_")](*shape)
        return torch.complex(*rotary_tables(*size, dtype=torch.float32, device=device))
    table_shape = {**TABLE_SHAPES, **PAIR_TABLE_SHAPES}[form]
    return rotary_tables(*table_shape(*shape), dtype=dtype, device=device)


ROTATIONS = ["none", "coordinates", "S_d", "B_S_Hd", "1_S_p", "1_S_H_p", "complex_S_p"]
# One head, an odd number and an even one of them, a wide token, heads that are no whole units.
ONE_TENSOR_SHAPES = [(2, 65, 1, 64), (2, 65, 3, 128), (1, 65, 4, 64), (1, 3, 40, 128), (2, 9, 3, 6)]


@pytest.mark.parametrize("form", ROTATIONS)
@pytest.mark.parametrize("shape", ONE_TENSOR_SHAPES, ids=str)
@in_or_out_of_place
@every_norm
@every_pair_layout
@every_dtype
def test_one_tensor(kernel, device, form, shape, inplace, norm, layout, dtype):
    heads = shape[2]
    x, _ = query_and_key(shape, dtype, device, has_head_dim=inplace)
    weight = weights(norm, shape, dtype, device).get("q_weight")
    rope = rotation(kernel, form, shape, device)
    options = {"heads": heads, "norm": norm, "layout": layout, "inplace": inplace}
    check(kernel, "norm_rope", x, weight, rope, **options, contract=False)


@pytest.mark.parametrize("memory", STRIDED_LAYOUTS)
@pytest.mark.parametrize("heads", [3, 4])
@every_norm
@every_dtype
def test_one_strided_tensor(kernel, device, memory, heads, norm, dtype):
    shape = (2, 65, heads, 64)
    x, _ = query_and_key(shape, dtype, device, has_head_dim=True, layout=memory)
    weight = weights(norm, shape, dtype, device).get("q_weight")
    rope = rotary_tables(65, 64, dtype=dtype, device=device)
    check(kernel, "norm_rope", x, weight, rope, heads=heads, norm=norm)


def test_one_tensor_as_query_and_key(kernel, device):
    """Both are computed alike, whichever kernel that takes."""
    shape = (2, 65, 4, 64)
    for norm in NORMS:
        q, k = query_and_key(shape, torch.bfloat16, device)
        parameters = weights(norm, shape, torch.bfloat16, device)
        rope = rotary_tables(65, 64, dtype=torch.float32, device=device)
        options = {"heads": 4, "norm": norm}
        together = kernel.qk_norm_rope(q, k, **parameters, rope=rope, **options)
        for x, name, result in zip((q, k), ("q_weight", "k_weight"), together, strict=True):
            alone = kernel.norm_rope(x, parameters.get(name), rope, **options)
            torch.testing.assert_close(alone, result)


# --------------------------------------------------------------------------------------------------
# Complex tables, weights in float32, a key of its own length and rotation


@pytest.mark.parametrize("form", PAIR_TABLE_SHAPES)
@pytest.mark.parametrize("shape", [(2, 65, 4, 64), (2, 5, 40, 128), (2, 9, 3, 6)], ids=str)
@in_or_out_of_place
@every_norm
@every_pair_layout
@every_dtype
def test_complex_tables(kernel, device, form, shape, inplace, norm, layout, dtype):
    q, k = query_and_key(shape, dtype, device)
    rope = rotation(kernel, f"complex_{form}", shape, device)
    options = {"heads": shape[2], "norm": norm, "layout": layout, "inplace": inplace}
    parameters = weights(norm, shape, dtype, device)
    check(kernel, "qk_norm_rope", q, k, **parameters, rope=rope, **options, contract=False)


@pytest.mark.parametrize("form", ["misaligned", "odd_rows", "expanded", "conj", "neg"])
@in_or_out_of_place
@every_pair_layout
def test_views_of_complex_tables(kernel, device, form, inplace, layout):
    q, k = query_and_key((2, 65, 4, 64), torch.bfloat16, device)
    rope = torch.complex(*rotary_tables(2, 65, 32, dtype=torch.float32, device=device))
    if form == "conj":
        rope = rope.conj()
    elif form == "neg":
        rope = torch._neg_view(rope)
    else:
        rope = LAYOUTS[form](rope)
    options = {"heads": 4, "norm": "per_head", "layout": layout}
    plain = rope.resolve_conj().resolve_neg()
    expected = kernel.qk_norm_rope(q, k, rope=(plain.real.clone(), plain.imag.clone()), **options)
    results = kernel.qk_norm_rope(q, k, rope=rope, **options, inplace=inplace)
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result, reference)


@pytest.mark.parametrize("form", ROTATIONS)
@pytest.mark.parametrize("shape", [(2, 65, 4, 64), (2, 5, 40, 128), (2, 9, 3, 6)], ids=str)
@pytest.mark.parametrize("given", [("q_weight",), ("k_weight",), ("q_weight", "k_weight")])
@pytest.mark.parametrize("norm", ["across_heads", "per_head"])
@every_16_bit_dtype
def test_weights_in_float32(kernel, device, form, shape, given, norm, dtype):
    """The others are of the dtype of the query."""
    q, k = query_and_key(shape, dtype, device)
    parameters = weights(norm, shape, dtype, device)
    exact = weights(norm, shape, torch.float32, device)
    parameters.update({name: exact[name] for name in given})
    rope = rotation(kernel, form, shape, device)
    options = {"heads": shape[2], "norm": norm}
    check(kernel, "qk_norm_rope", q, k, **parameters, rope=rope, **options, contract=False)
    weight = parameters[given[0]]
    check(kernel, "norm_rope", q, weight, rope, **options, contract=False)


@pytest.mark.parametrize(("form", "k_form"), [(f, k) for f in ROTATIONS for k in ROTATIONS[1:]])
@pytest.mark.parametrize("k_heads", [4, 1])
@in_or_out_of_place
@every_norm
@every_dtype
def test_rotation_of_the_key(kernel, device, form, k_form, k_heads, inplace, norm, dtype):
    shape, k_shape = (2, 33, 4, 64), (2, 70, k_heads, 64)
    q, _ = query_and_key(shape, dtype, device)
    k, _ = query_and_key(k_shape, dtype, device)
    options = {"heads": 4, "norm": norm, "inplace": inplace}
    parameters = weights(norm, shape, dtype, device, k_heads=k_heads)
    rope, k_rope = rotation(kernel, form, shape, device), rotation(kernel, k_form, k_shape, device)
    arguments = {**parameters, "rope": rope, "k_rope": k_rope, **options}
    check(kernel, "qk_norm_rope", q, k, **arguments, contract=False)


@pytest.mark.parametrize("k_seq", [1, 70])
@in_or_out_of_place
@every_norm
@every_dtype
def test_key_of_another_length_without_rotation(kernel, device, k_seq, inplace, norm, dtype):
    shape = (2, 33, 4, 64)
    q, _ = query_and_key(shape, dtype, device)
    k, _ = query_and_key((2, k_seq, 2, 64), dtype, device)
    parameters = weights(norm, shape, dtype, device, k_heads=2)
    options = {"heads": 4, "norm": norm, "inplace": inplace, "contract": False}
    check(kernel, "qk_norm_rope", q, k, **parameters, **options)


@pytest.mark.parametrize("length", ["q", "k"])
def test_one_of_query_and_key_is_empty(kernel, device, length):
    q, k = query_and_key((2, 5, 4, 64), torch.bfloat16, device)
    expected = kernel.qk_norm_rope(q, k, heads=4, norm="per_head")
    short = {"q": q, "k": k, length: q[:, :0]}
    results = kernel.qk_norm_rope(**short, heads=4, norm="per_head")
    for name, result, reference in zip("qk", results, expected, strict=True):
        assert torch.equal(result, reference[:, :0] if name == length else reference)


# --------------------------------------------------------------------------------------------------
# Outputs


def joint_slices(tensors, memory):
    """Where each is to be stored: a part of a longer buffer, filled with NaN."""
    outs = []
    for x in tensors:
        if memory == "joint":
            buffer = torch.full_like(torch.cat([x, x[:, :1]], 1), math.nan)
            outs.append(buffer[:, 1:])
        else:
            outs.append(LAYOUTS[memory](torch.full_like(x, math.nan)))
    return tuple(outs)


@pytest.mark.parametrize("form", ROTATIONS)
@pytest.mark.parametrize("memory", ["joint", "transposed", "misaligned", "odd_rows"])
@pytest.mark.parametrize("shape", [(2, 33, 4, 64), (2, 5, 40, 128), (2, 9, 3, 6)], ids=str)
@pytest.mark.parametrize("v_heads", [None, 1, 5])
@every_norm
def test_outputs(kernel, device, form, memory, shape, v_heads, norm):
    dtype = torch.bfloat16
    heads = shape[2]
    tensors = list(query_and_key(shape, dtype, device, has_head_dim=True))
    if v_heads:
        tensors += query_and_key((*shape[:2], v_heads, shape[3]), dtype, device, has_head_dim=True)[
            :1
        ]
    outs = joint_slices(tensors, memory)
    arguments = weights(norm, shape, dtype, device)
    arguments["v"] = tensors[2] if v_heads else None
    arguments["rope"] = rotation(kernel, form, shape, device)
    options = {"heads": heads, "norm": norm, "out": outs, "contract": False}
    results = check(kernel, "qk_norm_rope", *tensors[:2], **arguments, **options)
    assert all(one is other for one, other in zip(results, outs, strict=True))
    if v_heads:
        assert torch.equal(outs[2], tensors[2])


@pytest.mark.parametrize("is_3d", [False, True])
@every_dtype
def test_values_of_a_key_of_another_length(kernel, device, is_3d, dtype):
    q, _ = query_and_key((2, 33, 4, 64), dtype, device, has_head_dim=not is_3d)
    k, v = query_and_key((2, 7, 2, 64), dtype, device, k_heads=3, has_head_dim=not is_3d)
    outs = joint_slices((q, k, v), "joint")
    options = {"heads": 4, "norm": "across_heads", "v": v, "out": outs, "contract": False}
    check(kernel, "qk_norm_rope", q, k, **options)


@every_norm
def test_outputs_that_are_inputs(kernel, device, norm):
    """Some of them in place."""
    q, k = query_and_key((2, 33, 4, 64), torch.bfloat16, device, has_head_dim=True)
    v = torch.randn_like(q)
    rope = rotary_tables(33, 64, dtype=torch.float32, device=device)
    for own in ((True, False, False), (False, True, True), (True, True, True)):
        tensors = [t.clone() for t in (q, k, v)]
        outs = tuple(
            t if is_own else torch.empty_like(t) for t, is_own in zip(tensors, own, strict=True)
        )
        options = {"rope": rope, "heads": 4, "norm": norm, "v": tensors[2], "out": outs}
        check(kernel, "qk_norm_rope", *tensors[:2], **options, contract=False)


def test_values_keep_their_bits(kernel, device):
    """NaN with any payload, too."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device)
    v = bits.view(torch.bfloat16).reshape(1, 64, 4, 256)
    for seq, head_dim in ((64, 256), (8192, 2)):
        v = v.reshape(1, seq, 4, head_dim)
        q = torch.randn(1, seq, 4, head_dim, device=device).to(torch.bfloat16)
        out = tuple(torch.zeros_like(q) for _ in range(3))
        kernel.qk_norm_rope(q, q, v=v, heads=4, norm="none", out=out)
        assert torch.equal(out[2].view(torch.int16), v.view(torch.int16))


@pytest.mark.parametrize("form", ["none", "coordinates", "S_d", "complex_S_p"])
@pytest.mark.parametrize("heads", [1, 3, 4])
@every_norm
@every_dtype
def test_output_of_one_tensor(kernel, device, form, heads, norm, dtype):
    shape = (2, 33, heads, 64)
    x, _ = query_and_key(shape, dtype, device, has_head_dim=True)
    (out,) = joint_slices((x,), "joint")
    weight = weights(norm, shape, dtype, device).get("q_weight")
    rope = rotation(kernel, form, shape, device)
    options = {"heads": heads, "norm": norm, "out": out, "contract": False}
    assert check(kernel, "norm_rope", x, weight, rope, **options) is out


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


@pytest.mark.sanitize
@pytest.mark.kernels_ci
@pytest.mark.parametrize("norm", ["across_heads", "per_head"])
@pytest.mark.parametrize(
    ("shape", "memory", "form", "weight_dtype"),
    [
        ((2, 3, 4, 64), "joint", "S_d", torch.float32),
        ((1, 3, 3, 6), "odd_rows", "complex_1_S_H_p", torch.bfloat16),
        ((1, 2, 40, 128), "joint", "coordinates", torch.float32),
        ((2, 3, 3, 72), "misaligned", "complex_S_p", torch.float32),
    ],
    ids=str,
)
def test_smoke_of_outputs(kernel, device, norm, shape, memory, form, weight_dtype):
    q, k = query_and_key(shape, torch.bfloat16, device, has_head_dim=True)
    v = torch.randn_like(q)
    rope = rotation(kernel, form, shape, device)
    parameters = weights(norm, shape, weight_dtype, device)
    options = {"heads": shape[2], "norm": norm, "rope": rope, "contract": False}
    outs = joint_slices((q, k, v), memory)
    check(kernel, "qk_norm_rope", q, k, **parameters, v=v, out=outs, **options)
    check(kernel, "norm_rope", q, parameters["q_weight"], **options)
    shorter = query_and_key((shape[0], 2, 1, shape[3]), torch.bfloat16, device, has_head_dim=True)
    k_rope = rotation(kernel, "S_p", (shape[0], 2, 1, shape[3]), device)
    check(kernel, "qk_norm_rope", q, shorter[0], k_rope=k_rope, **options)
