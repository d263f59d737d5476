"""qk_norm_rope: norm and rotary embedding of query and key."""

import math

import pytest
import torch

import eager
import references
from checks import CONTRACT_ELEMENTS, MemorySnapshot, assert_same_bits, check, check_nonfinite
from inputs import (
    DTYPES,
    LAYOUTS,
    NORM_SCOPES,
    PACKED_FORMS,
    PAIR_LAYOUTS,
    PAIR_TABLE_SHAPES,
    STRIDED_LAYOUTS,
    TABLE_SHAPES,
    WRITABLE_LAYOUTS,
    coordinates_and_frequencies,
    every_dtype,
    heads_of,
    normal,
    packed_projection,
    pairwise,
    rotary_tables,
)

every_norm = pytest.mark.parametrize("norm", NORM_SCOPES)
every_pair_layout = pytest.mark.parametrize("layout", PAIR_LAYOUTS)
NORMALIZING = NORM_SCOPES[:3]
NONFINITE = [math.nan, math.inf, -math.inf]
EVERY_TABLE = {**TABLE_SHAPES, **PAIR_TABLE_SHAPES}
# Rotations: none, coordinates, or tables in several forms. Complex tables hold cosine and sine.
ROTATIONS = ["none", "coordinates", "S_d", "B_S_Hd", "1_S_p", "1_S_H_p", "complex_S_p"]
# One head, an odd and an even number of heads, a wide token, heads that are not whole units.
SHAPES = [(2, 65, 1, 64), (2, 65, 3, 128), (2, 65, 4, 64), (2, 5, 40, 128), (2, 9, 3, 6)]


def query_and_key(shape, dtype, device, *, k_heads=None, has_head_dim=False, **options):
    batch, seq, heads, head_dim = shape
    k_shape = (batch, seq, heads if k_heads is None else k_heads, head_dim)
    options["has_head_dim"] = has_head_dim
    return [heads_of(size, dtype, device, **options) for size in (shape, k_shape)]


def weights(norm, shape, dtype, device, *, k_heads=None, layout="contiguous"):
    """q_weight and k_weight as keyword arguments, for LayerNorm also the biases."""
    *_, heads, head_dim = shape
    if norm == "none":
        return {}
    counts = {"q_weight": heads, "k_weight": heads if k_heads is None else k_heads}
    if norm == "layer_per_head":
        counts.update(q_bias=1, k_bias=1)
    options = {"dtype": dtype, "device": device, "mean": 0.5, "layout": layout}
    return {
        name: normal((count if norm == "across_heads" else 1) * head_dim, **options)
        for name, count in counts.items()
    }


def rotation(kernel, form, shape, device, dtype=torch.float32):
    batch, seq, heads, head_dim = shape
    if form == "none":
        return None
    if form == "coordinates":
        count = (heads * head_dim // 2 - 1) // 3
        return kernel.CoordinateRope(*coordinates_and_frequencies(1, seq, 3, count, device))
    if form.startswith("complex"):
        size = PAIR_TABLE_SHAPES[form.removeprefix("complex_")](*shape)
        return torch.complex(*rotary_tables(*size, dtype=torch.float32, device=device))
    return rotary_tables(*EVERY_TABLE[form](*shape), dtype=dtype, device=device)


def check_call(kernel, q, k, *, heads, norm, layout="interleaved", **options):
    options = {"heads": heads, "norm": norm, "layout": layout, **options}
    return check(kernel, "qk_norm_rope", q, k, **options)


@pairwise(
    head_dim=[2, 6, 40, 64, 72, 80, 96, 128, 256],
    form=["S_d", "1_S_p", "complex_S_p", "coordinates"],
    norm=NORM_SCOPES,
    layout=PAIR_LAYOUTS,
    has_head_dim=[False, True],
    k_heads=[4, 8],
    dtype=DTYPES,
)
def test_head_dims(kernel, device, head_dim, form, norm, layout, has_head_dim, k_heads, dtype):
    """Also with another number of key heads, if all heads share their tables."""
    k_heads = 4 if form == "coordinates" else k_heads
    shape = (2, math.ceil(CONTRACT_ELEMENTS / (2 * 4 * head_dim)), 4, head_dim)
    q, k = query_and_key(shape, dtype, device, k_heads=k_heads, has_head_dim=has_head_dim)
    parameters = weights(norm, shape, dtype, device, k_heads=k_heads)
    rope = rotation(kernel, form, shape, device)
    check_call(kernel, q, k, **parameters, rope=rope, heads=4, norm=norm, layout=layout)


@pairwise(
    table=[*EVERY_TABLE, *(f"complex_{name}" for name in PAIR_TABLE_SHAPES)],
    shape=SHAPES,
    is_float32=[True, False],
    layout=PAIR_LAYOUTS,
    norm=NORM_SCOPES,
    has_head_dim=[False, True],
    inplace=[False, True],
    dtype=DTYPES,
)
def test_table_shapes(
    kernel, device, table, shape, is_float32, layout, norm, has_head_dim, inplace, dtype
):
    q, k = query_and_key(shape, dtype, device, has_head_dim=has_head_dim)
    rope = rotation(kernel, table, shape, device, torch.float32 if is_float32 else dtype)
    options = {"heads": shape[2], "norm": norm, "layout": layout, "inplace": inplace}
    parameters = weights(norm, shape, dtype, device)
    check_call(kernel, q, k, **parameters, rope=rope, **options, contract=False)


@pairwise(
    memory=["chunk", "misaligned", "odd_rows", "expanded"],
    width=[64, 32],
    norm=NORM_SCOPES,
    layout=PAIR_LAYOUTS,
    dtype=DTYPES,
)
def test_strided_tables(kernel, device, memory, width, norm, layout, dtype):
    """Cosine and sine of different shapes, one by head."""
    q, k = query_and_key((2, 65, 4, 64), dtype, device)
    options = {"dtype": torch.float32, "device": device, "layout": memory}
    by_head, by_token = (normal(*size, width, **options) for size in ((2, 65, 4), (2, 65)))
    for rope in ((by_head, by_token), (by_token, by_head)):
        check_call(kernel, q, k, rope=rope, heads=4, norm=norm, layout=layout)


@pairwise(
    memory=["contiguous", "misaligned", "odd_rows", "expanded", "conj"],
    inplace=[False, True],
    layout=PAIR_LAYOUTS,
)
def test_views_of_complex_tables(kernel, device, memory, inplace, layout):
    q, k = query_and_key((2, 65, 4, 64), torch.bfloat16, device)
    rope = torch.complex(*rotary_tables(2, 65, 32, dtype=torch.float32, device=device))
    rope = rope.conj() if memory == "conj" else LAYOUTS[memory](rope)
    options = {"heads": 4, "norm": "per_head", "layout": layout}
    plain = rope.resolve_conj()
    expected = kernel.qk_norm_rope(q, k, rope=(plain.real.clone(), plain.imag.clone()), **options)
    results = kernel.qk_norm_rope(q, k, rope=rope, **options, inplace=inplace)
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result, reference)


@pairwise(norm=NORMALIZING, head_dim=[1, 7, 65])
def test_odd_head_dim_without_rotation(kernel, device, norm, head_dim):
    shape = (2, 65, 4, head_dim)
    q, k = query_and_key(shape, torch.bfloat16, device)
    parameters = weights(norm, shape, torch.bfloat16, device)
    check_call(kernel, q, k, **parameters, heads=4, norm=norm)


GIVEN_WEIGHTS = [(), ("q_weight",), ("k_weight", "k_bias"), ("q_weight", "k_weight", "q_bias")]


@pairwise(
    form=ROTATIONS,
    shape=SHAPES,
    given=GIVEN_WEIGHTS,
    in_float32=GIVEN_WEIGHTS,
    memory=["contiguous", "misaligned"],
    norm=NORMALIZING,
    dtype=DTYPES,
)
def test_weights(kernel, device, form, shape, given, in_float32, memory, norm, dtype):
    """Some weights and biases or none, in the query's dtype or float32."""
    q, k = query_and_key(shape, dtype, device)
    parameters = weights(norm, shape, torch.float32, device, layout=memory)
    parameters = {name: parameters[name] for name in given if name in parameters}
    for name in parameters.keys() - {*in_float32}:
        parameters[name] = LAYOUTS[memory](parameters[name].to(dtype))
    rope = rotation(kernel, form, shape, device)
    options = {"heads": shape[2], "norm": norm, "contract": shape[1] == 65}
    check_call(kernel, q, k, **parameters, rope=rope, **options)


@pairwise(
    memory=[*STRIDED_LAYOUTS, *PACKED_FORMS],
    shape=SHAPES,
    has_head_dim=[False, True],
    form=ROTATIONS,
    inplace=[False, True],
    norm=NORM_SCOPES,
    layout=PAIR_LAYOUTS,
    dtype=DTYPES,
)
def test_strided_views(
    kernel, device, memory, shape, has_head_dim, form, inplace, norm, layout, dtype
):
    if memory in PACKED_FORMS:
        q, k, _ = packed_projection(memory, shape, dtype, device)
    else:
        q, k = query_and_key(shape, dtype, device, has_head_dim=has_head_dim, layout=memory)
    options = {"heads": shape[2], "norm": norm, "layout": layout, "contract": False}
    options["inplace"] = inplace and memory != "expanded"
    parameters = weights(norm, shape, dtype, device)
    check_call(kernel, q, k, **parameters, rope=rotation(kernel, form, shape, device), **options)


@pairwise(eps=[0.0, 1e-3, 1.0], norm=NORMALIZING, dtype=DTYPES)
def test_eps(kernel, device, eps, norm, dtype):
    q, k = (normal(2, 64, 256, dtype=dtype, device=device, std=0.02) for _ in range(2))
    check_call(kernel, q, k, heads=4, norm=norm, eps=eps)


# --------------------------------------------------------------------------------------------------
# Coordinates


@pairwise(
    size=[(3, 42), (3, 1), (2, 64), (1, 128), (4, 32), (3, 0)],  # axes and frequencies
    batch=[1, 2],
    memory=["contiguous", "chunk", "transposed", "expanded"],
    inplace=[False, True],
    norm=NORM_SCOPES,
    layout=PAIR_LAYOUTS,
    dtype=DTYPES,
)
def test_coordinates(kernel, device, size, batch, memory, inplace, norm, layout, dtype):
    shape = (2, 65, 4, 64)
    q, k = query_and_key(shape, dtype, device)
    coordinates, frequencies = coordinates_and_frequencies(batch, 65, *size, device)
    rope = kernel.CoordinateRope(LAYOUTS[memory](coordinates), frequencies)
    options = {"heads": 4, "norm": norm, "layout": layout, "inplace": inplace}
    options["contract"] = size[1] > 1  # of few rotated pairs the ratio of errors is noise
    check_call(kernel, q, k, **weights(norm, shape, dtype, device), rope=rope, **options)


@pairwise(
    largest_angle=[1.0, 15708.0, 1e5, 1e6, 4e6, 1e9, 1e30],
    norm=["across_heads", "none"],
    dtype=DTYPES,
)
def test_large_angles(kernel, device, largest_angle, norm, dtype):
    """The published LTX-Video sizes: 32 heads of 64, 341 frequencies per axis, one identity pair."""
    shape = (1, 64, 32, 64)
    q, k = query_and_key(shape, dtype, device)
    rope = coordinates_and_frequencies(1, 64, 3, 341, device, largest_angle)
    rope[0][0, 0] = 1.0  # the largest angle itself
    parameters = weights(norm, shape, dtype, device)
    check_call(kernel, q, k, **parameters, rope=kernel.CoordinateRope(*rope), heads=32, norm=norm)


@pairwise(size=[(3, 341, 2048), (3, 42, 256), (2, 32, 128), (1, 3, 10)], batch=[1, 2])
def test_coordinate_tables(kernel, device, size, batch):
    axes, count, dim = size
    rope = kernel.CoordinateRope(*coordinates_and_frequencies(batch, 65, axes, count, device))
    cos, sin = rope.tables(dim)
    expected = references.coordinate_tables(*rope, dim // 2)
    for table, reference in zip((cos, sin), expected, strict=True):
        assert table.shape == (batch, 65, dim)
        assert table.dtype == torch.float32
        reference = reference.repeat_interleave(2, dim=-1)
        torch.testing.assert_close(table.double(), reference, rtol=2e-7, atol=2e-7)
    assert torch.equal(cos, eager.coordinate_tables(*rope, dim)[0])


@pairwise(
    value=NONFINITE, where=["q", "coordinates"], norm=NORM_SCOPES, layout=PAIR_LAYOUTS, dtype=DTYPES
)
def test_nonfinite_values(kernel, device, value, where, norm, layout, dtype):
    q, k = query_and_key((2, 9, 4, 64), dtype, device)
    if where == "q":
        q[0, 1, 3] = q[1, 2, 255] = k[0, 4, 128] = value
        rope = rotary_tables(9, 64, dtype=torch.float32, device=device)
    else:
        rope = rotation(kernel, "coordinates", (2, 9, 4, 64), device)
        rope.coordinates[0, 3, 1] = rope.coordinates[0, 7, 0] = value
    options = {"rope": rope, "heads": 4, "norm": norm, "layout": layout}
    check_nonfinite(kernel, "qk_norm_rope", q, k, **options)


# --------------------------------------------------------------------------------------------------
# A key with its own length and rotation


@pairwise(
    form=ROTATIONS,
    k_form=ROTATIONS,
    k_heads=[1, 3, 4],
    k_seq=[1, 70],
    inplace=[False, True],
    norm=NORM_SCOPES,
    layout=PAIR_LAYOUTS,
    dtype=DTYPES,
)
def test_rotation_of_the_key(
    kernel, device, form, k_form, k_heads, k_seq, inplace, norm, layout, dtype
):
    """Without a key rotation the query has none, because their lengths differ."""
    shape, k_shape = (2, 33, 4, 64), (2, k_seq, k_heads, 64)
    q, k = (heads_of(size, dtype, device, has_head_dim=False) for size in (shape, k_shape))
    rope = None if k_form == "none" else rotation(kernel, form, shape, device)
    k_rope = rotation(kernel, k_form, k_shape, device)
    parameters = weights(norm, shape, dtype, device, k_heads=k_heads)
    options = {"heads": 4, "norm": norm, "layout": layout, "inplace": inplace, "contract": False}
    check_call(kernel, q, k, **parameters, rope=rope, k_rope=k_rope, **options)


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
    """Outputs filled with NaN; for "joint" slices of longer buffers."""
    if memory != "joint":
        return tuple(LAYOUTS[memory](torch.full_like(x, math.nan)) for x in tensors)
    return tuple(torch.full_like(torch.cat([x, x[:, :1]], 1), math.nan)[:, 1:] for x in tensors)


@pairwise(
    form=ROTATIONS,
    memory=["joint", *WRITABLE_LAYOUTS],
    shape=SHAPES,
    v_heads=[None, 1, 5],
    has_head_dim=[False, True],
    norm=NORM_SCOPES,
    dtype=DTYPES,
)
def test_outputs(kernel, device, form, memory, shape, v_heads, has_head_dim, norm, dtype):
    tensors = query_and_key(shape, dtype, device, has_head_dim=has_head_dim)
    arguments = weights(norm, shape, dtype, device)
    if v_heads:
        of_values = (*shape[:2], v_heads, shape[3])
        arguments["v"] = heads_of(of_values, dtype, device, has_head_dim=has_head_dim)
        tensors.append(arguments["v"])
    outs = joint_slices(tensors, memory)
    options = {"heads": shape[2], "norm": norm, "out": outs, "contract": False}
    rope = rotation(kernel, form, shape, device)
    check_call(kernel, *tensors[:2], **arguments, rope=rope, **options)
    assert v_heads is None or torch.equal(outs[2], tensors[2])


@pytest.mark.parametrize("is_3d", [False, True])
@every_dtype
def test_values_of_a_key_of_another_length(kernel, device, is_3d, dtype):
    q = heads_of((2, 33, 4, 64), dtype, device, has_head_dim=not is_3d)
    k, v = query_and_key((2, 7, 2, 64), dtype, device, k_heads=3, has_head_dim=not is_3d)
    outs = joint_slices((q, k, v), "joint")
    check_call(kernel, q, k, heads=4, norm="across_heads", v=v, out=outs, contract=False)


@every_norm
def test_outputs_that_are_inputs(kernel, device, norm):
    """Some of them in place."""
    q, k = query_and_key((2, 33, 4, 64), torch.bfloat16, device, has_head_dim=True)
    v = torch.randn_like(q)
    rope = rotary_tables(33, 64, dtype=torch.float32, device=device)
    for own in ((True, False, False), (False, True, True), (True, True, True)):
        tensors = [t.clone() for t in (q, k, v)]
        pairs = zip(tensors, own, strict=True)
        outs = tuple(t if is_own else torch.empty_like(t) for t, is_own in pairs)
        options = {"rope": rope, "heads": 4, "norm": norm, "v": tensors[2], "out": outs}
        check_call(kernel, *tensors[:2], **options, contract=False)


# An all-to-all's buffer; a part of one; chunks, or heads, that are not aligned to 16 bytes.
CHUNK_LAYOUTS = ["sent", "part", "odd_chunks", "odd_heads"]


def in_chunks(shape, chunks, memory, dtype, device):
    """A view (batch, seq, chunks, heads / chunks, head_dim) of a buffer filled with NaN."""
    batch, seq, heads, head_dim = shape
    size = chunks, seq, batch, heads // chunks, head_dim
    if memory == "sent":
        buffer = torch.full(size, math.nan, dtype=dtype, device=device)
    elif memory == "part":
        longer = chunks + 1, seq + 1, batch, size[3] + 1, head_dim
        buffer = torch.full(longer, math.nan, dtype=dtype, device=device)[1:, :seq, :, 1:]
    else:
        head = head_dim + (memory == "odd_heads")
        row, token = size[3] * head, batch * size[3] * head
        chunk = seq * token + (memory == "odd_chunks")
        buffer = torch.full((chunks * chunk,), math.nan, dtype=dtype, device=device)
        buffer = buffer.as_strided(size, (chunk, token, row, head, 1))
    return buffer.permute(2, 1, 0, 3, 4)


@pairwise(
    form=ROTATIONS,
    memory=CHUNK_LAYOUTS,
    shape=[(2, 65, 4, 64), (2, 17, 6, 128), (3, 5, 40, 128), (2, 9, 3, 6), (1, 3, 6, 256)],
    chunks=["one", "few", "heads"],
    v_heads=[None, 1, 2],  # as a multiple
    own_key=[False, True],
    has_head_dim=[False, True],
    norm=NORM_SCOPES,
    dtype=DTYPES,
)
def test_outputs_in_chunks_of_heads(
    kernel, device, form, memory, shape, chunks, v_heads, own_key, has_head_dim, norm, dtype
):
    """The same bits as with other outputs, and no other write."""
    batch, seq, heads, head_dim = shape
    few = next(n for n in range(2, heads + 1) if heads % n == 0)
    chunks = {"one": 1, "few": few, "heads": heads}[chunks]
    k_shape = (batch, seq + 2 if own_key else seq, heads, head_dim)
    shapes = [shape, k_shape, (*k_shape[:2], heads * v_heads, head_dim) if v_heads else None]
    q, k, v = (s and heads_of(s, dtype, device, has_head_dim=has_head_dim) for s in shapes)
    options = weights(norm, shape, dtype, device)
    options |= {"heads": heads, "norm": norm, "v": v, "rope": rotation(kernel, form, shape, device)}
    if own_key:
        options["k_rope"] = rotation(kernel, form, k_shape, device)
    shapes = list(filter(None, shapes))
    # Both take the kernels for aligned data, or both the others.
    is_odd = memory.startswith("odd") and not (memory == "odd_chunks" and chunks == 1)
    layout = LAYOUTS["misaligned" if is_odd else "contiguous"]
    expected = tuple(layout(torch.empty_like(t)) for t in (q, k, v) if t is not None)
    kernel.qk_norm_rope(q, k, **options, out=expected)

    outs = tuple(in_chunks(s, chunks, memory, dtype, device) for s in shapes)
    memory = MemorySnapshot([q, k, *outs])
    results = kernel.qk_norm_rope(q, k, **options, out=outs)
    for result, out, other in zip(results, outs, expected, strict=True):
        assert result is out
        assert_same_bits(out.reshape(other.shape), other)
        memory.allow(out)
    memory.assert_unchanged()


@pytest.mark.sanitize
@every_norm
def test_outputs_in_chunks_of_one_buffer(kernel, device, norm):
    """Query, key and values of each destination side by side: one all-to-all sends them."""
    batch, seq, heads, head_dim, chunks = shape = (2, 7, 4, 64, 2)
    q, k = query_and_key(shape[:4], torch.bfloat16, device)
    v = torch.randn_like(k)
    rope = rotary_tables(seq, head_dim, dtype=torch.float32, device=device)
    options = {"rope": rope, "heads": heads, "norm": norm, "v": v}
    size = chunks, seq, batch, 3, heads // chunks, head_dim
    buffer = torch.full(size, math.nan, dtype=torch.bfloat16, device=device)
    kernel.qk_norm_rope(q, k, **options, out=buffer.permute(3, 2, 1, 0, 4, 5).unbind(0))
    outs = tuple(torch.empty_like(t) for t in (q, k, v))
    kernel.qk_norm_rope(q, k, **options, out=outs)
    for i, out in enumerate(outs):
        for chunk, of_chunk in enumerate(out.unflatten(2, (heads, head_dim)).chunk(chunks, 2)):
            assert_same_bits(buffer[chunk, :, :, i].transpose(0, 1), of_chunk)


def test_values_keep_their_bits(kernel, device):
    """Including NaN with any payload."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device)
    v = bits.view(torch.bfloat16).reshape(1, 64, 4, 256)
    for seq, head_dim in ((64, 256), (8192, 2)):
        v = v.reshape(1, seq, 4, head_dim)
        q = torch.randn(1, seq, 4, head_dim, device=device).to(torch.bfloat16)
        out = tuple(torch.zeros_like(q) for _ in range(3))
        kernel.qk_norm_rope(q, q, v=v, heads=4, norm="none", out=out)
        assert torch.equal(out[2].view(torch.int16), v.view(torch.int16))


@pytest.mark.sanitize
@pytest.mark.parametrize("norm", NORMALIZING)
@every_pair_layout
@pytest.mark.parametrize(
    ("shape", "memory", "form", "inplace", "dtype"),
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
def test_smoke(kernel, device, norm, layout, shape, memory, form, inplace, dtype):
    q, k = query_and_key(shape, dtype, device, layout=memory)
    options = {"heads": shape[2], "norm": norm, "layout": layout, "inplace": inplace}
    options["rope"] = rotation(kernel, form, shape, device)
    check_call(kernel, q, k, **weights(norm, shape, dtype, device), **options, contract=False)


@pytest.mark.sanitize
@pytest.mark.parametrize("norm", NORMALIZING)
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
    check_call(kernel, q, k, **parameters, v=v, out=outs, **options)
    k_shape = (shape[0], 2, 1, shape[3])
    shorter = heads_of(k_shape, torch.bfloat16, device, has_head_dim=True)
    check_call(kernel, q, shorter, k_rope=rotation(kernel, "S_p", k_shape, device), **options)
