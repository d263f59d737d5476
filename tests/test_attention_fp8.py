"""attention_fp8: attention of heads of 128 elements, quantized in blocks from the unrounded values."""

import inspect
import math

import pytest
import torch

import references
from checks import (
    MemorySnapshot,
    assert_same_bits,
    compiled_outcome,
    one_thread,
    outcome,
    poison_memory,
    relative_distance,
    tensors_of,
)
from inputs import LAYOUTS, WRITABLE_LAYOUTS, every_16_bit_dtype, normal, pairwise
from test_attention import (
    HALVES,
    attention_slack,
    gate_and_addend,
    key_lengths,
    pad_with,
    query_key_value,
    rows_with_peaks,
)
from test_fp8_products import check_in_blocks
from test_norm_fp8 import FP8

HEAD_DIM = 128
# Queries and keys of each kernel; with 1024 queries and 257 keys bfloat16 takes the lazy softmax.
SIZES = [(1, 1), (63, 7), (65, 127), (70, 257), (130, 300), (1025, 100), (1025, 300)]
LAZY = (1025, 300)


def dequantized(values, scale):
    return values.double() * scale.double().repeat_interleave(128, -1)


def check_attention_fp8(kernel, q, k, v, *, written=None, **options):
    """Holds each value to the roundings of the reference's interval, and all of them to the error of the
    unrounded result's quantization. `written` is the call's `out`."""
    with one_thread():
        reference = references.attention(q, k, v, **options)
        slack = attention_slack(q, k, v, **options) + 1e-6 * reference.abs()
    if options.get("addend") is not None:
        slack += 1e-6 * options["addend"].double().abs()
    memory = MemorySnapshot(tensors_of(q, k, v, options, written))
    poison_memory(torch.empty_like(reference, dtype=torch.uint8).float())
    values, scale = results = kernel.attention_fp8(q, k, v, **options, out=written)
    if written is None:
        assert values.is_contiguous() and scale.is_contiguous()
    else:
        assert all(a is b for a, b in zip(results, written, strict=True))
        for tensor in written:
            memory.allow(tensor)
    memory.assert_unchanged()
    check_in_blocks(values, scale, reference, slack)
    if reference.any():
        best = dequantized(*references.quantize_fp8(reference.float(), block_size=128))
        error = relative_distance(dequantized(values, scale), reference)
        assert error <= 1.01 * relative_distance(best, reference) + torch.finfo(q.dtype).eps
    return values, scale


def flat(q, k, v, options):
    """The same call with tensors (B, S, H * d)."""
    options = {**options, "heads": q.shape[2]}
    if "addend" in options:
        options["addend"] = options["addend"].flatten(2)
    return *(t.flatten(2) for t in (q, k, v)), options


# --------------------------------------------------------------------------------------------------
# Values


@pairwise(
    size=SIZES,
    heads=[(2, 2), (4, 2), (3, 1)],  # of queries and keys
    layout=WRITABLE_LAYOUTS,
    masked=["plain", "bias", "lengths", "both"],
    extras=["", "gate", "addend", "gate+addend"],
    is_flat=[False, True],
    dtype=HALVES,
)
def test_values(kernel, device, size, heads, layout, masked, extras, is_flat, dtype):
    queries, keys = size
    sizes = (2, queries, keys, heads[0], HEAD_DIM)
    q, k, v = query_key_value(*sizes, dtype, device, key_heads=heads[1], layout=layout)
    options = gate_and_addend(extras, q)
    if masked in ("bias", "both"):
        options["key_bias"] = normal(2, keys, dtype=dtype, device=device, std=2.0)
    if masked in ("lengths", "both"):
        lengths = [keys, keys // 3]
        options["key_lengths"] = key_lengths(lengths, device)
        pad_with(math.nan, lengths, k, v)
    if is_flat:
        q, k, v, options = flat(q, k, v, options)
    check_attention_fp8(kernel, q, k, v, **options)


@pairwise(layout=LAYOUTS, size=[(70, 130), (70, 300), LAZY], dtype=HALVES)
def test_strided_inputs_with_heads_given(kernel, device, layout, size, dtype):
    queries, keys = size
    q, k, v = (
        normal(2, seq, 3 * HEAD_DIM, dtype=dtype, device=device, layout=layout)
        for seq in (queries, keys, keys)
    )
    check_attention_fp8(kernel, q, k, v, heads=3)


@pairwise(size=[(65, 128), (70, 512), (1030, 512)], is_flat=[False, True], dtype=HALVES)
def test_exact_values(kernel, device, size, is_flat, dtype):
    """Averages of integers, which are exact in float32 and are not rounded to 16 bits before."""
    queries, keys = size
    q, k, v = query_key_value(2, queries, keys, 3, HEAD_DIM, dtype, device)
    k.zero_()
    v = (v * 20 + 40).round()
    exact = v.double().mean(1, keepdim=True).expand(q.shape)
    assert not torch.equal(exact.to(dtype).double(), exact)
    options = {}
    if is_flat:
        exact = exact.flatten(2)
        q, k, v, options = flat(q, k, v, options)
    check_in_blocks(*kernel.attention_fp8(q, k, v, **options), exact, 2**-22 * exact.abs())


@pairwise(size=SIZES, dtype=HALVES)
def test_both_shapes_give_the_same_bits(kernel, device, size, dtype):
    """The scale of (B, S, H * d) is that of quantize_fp8's blocks, that of (B, S, H, d) likewise."""
    q, k, v = query_key_value(2, *size, 3, HEAD_DIM, dtype, device)
    values, scale = kernel.attention_fp8(q, k, v)
    *tensors, options = flat(q, k, v, {})
    flat_values, flat_scale = kernel.attention_fp8(*tensors, **options)
    assert_same_bits((values.flatten(2), scale.flatten(2)), (flat_values, flat_scale))
    for results, t in (((values, scale), q), ((flat_values, flat_scale), q.flatten(2))):
        plain = kernel.quantize_fp8(t, block_size=128)
        assert [r.shape for r in results] == [r.shape for r in plain]


@pairwise(factor=[1e-30, 1e-6, 1e-3, 1e3, 3e4, 1e30], size=[(130, 300), LAZY])
def test_range_of_values(kernel, device, factor, size):
    """With many queries, tiles whose float16 values are inaccurate are computed and stored twice."""
    q, k, v = query_key_value(2, *size, 3, HEAD_DIM, torch.bfloat16, device)
    for part in (v, v[0, :, 1], v[:, ::50, 2]):
        before = part.clone()
        part *= factor
        check_attention_fp8(kernel, q, k, v)
        part.copy_(before)


def test_linear_layer_of_the_result(kernel, device):
    q, k, v = query_key_value(2, 70, 300, 3, HEAD_DIM, torch.bfloat16, device)
    *tensors, options = flat(q, k, v, {})
    weight = normal(64, 3 * HEAD_DIM, dtype=torch.bfloat16, device=device)
    x8, x_scale = kernel.attention_fp8(*tensors, **options)
    weight8, weight_scale = kernel.quantize_fp8(weight)
    out = kernel.linear_fp8(x8, x_scale, weight8, weight_scale)
    exact = references.attention(*tensors, **options) @ weight.double().T
    assert relative_distance(out, exact) < 0.05


# --------------------------------------------------------------------------------------------------
# Zeros, and values that are not finite


@pairwise(
    how=["no keys", "length 0", "bias of -infinity"],
    size=[(70, 130), (70, 300), LAZY],
    addend=[False, True],
    dtype=HALVES,
)
def test_rows_without_keys(kernel, device, how, size, addend, dtype):
    queries, keys = size if how != "no keys" else (size[0], 0)
    q, k, v = query_key_value(2, queries, keys, 3, HEAD_DIM, dtype, device)
    options = gate_and_addend("addend" if addend else "", q)
    if how == "length 0":
        options["key_lengths"] = key_lengths([0, -5], device)
    elif how == "bias of -infinity":
        options["key_bias"] = torch.full((2, keys), -math.inf, device=device)
    poison_memory(q)
    results = kernel.attention_fp8(q, k, v, **options)
    if addend:
        assert_same_bits(results, references.quantize_fp8(options["addend"], block_size=128))
    else:
        assert not any(t.float().any() for t in results)


@pytest.mark.parametrize("shape", [(0, 5, 7, 2), (2, 0, 7, 2), (2, 5, 7, 0)], ids=str)
@every_16_bit_dtype
def test_without_queries(kernel, device, shape, dtype):
    q, k, v = query_key_value(*shape, HEAD_DIM, dtype, device)
    values, scale = kernel.attention_fp8(q, k, v)
    assert (values.shape, values.dtype) == (q.shape, FP8)
    assert (scale.shape, scale.dtype) == ((*q.shape[:3], 1), torch.float32)


@pairwise(value=[math.nan, math.inf, -math.inf], size=[(70, 130), (70, 300), LAZY], dtype=HALVES)
def test_values_that_are_not_finite(kernel, device, value, size, dtype):
    """Of one query and of one head: their values and scales are NaN, and all others stay."""
    q, k, v = query_key_value(2, *size, 3, HEAD_DIM, dtype, device)
    expected = kernel.attention_fp8(q, k, v)
    q[1, 66, 0, 5] = value
    v[0, 3, 2, 7] = value
    values, scale = kernel.attention_fp8(q, k, v)
    is_nan = torch.zeros(q.shape[:3], dtype=torch.bool, device=device)
    is_nan[1, 66, 0] = is_nan[0, :, 2] = True
    assert values[is_nan].float().isnan().all() and scale[is_nan].isnan().all()
    assert_close = torch.testing.assert_close
    # Rows in the tile of one that is not finite may be computed in another way.
    assert_close(scale[~is_nan], expected[1][~is_nan], rtol=0.01, atol=0)
    others = [dequantized(*r)[~is_nan] for r in ((values, scale), expected)]
    assert relative_distance(*others) < 0.01


# --------------------------------------------------------------------------------------------------
# Results in the caller's memory


@pytest.mark.parametrize("offset", [0, 128, 16, 8, 1])
@pairwise(size=[(70, 130), (70, 300), LAZY], is_flat=[False, True], dtype=HALVES)
def test_columns_of_a_wider_tensor(kernel, device, offset, size, is_flat, dtype):
    """As in FLUX's single blocks. Values at any alignment."""
    q, k, v = query_key_value(2, *size, 3, HEAD_DIM, dtype, device)
    options = {}
    expected = kernel.attention_fp8(q, k, v)
    if is_flat:
        q, k, v, options = flat(q, k, v, options)
        expected = expected[0].flatten(2), expected[1].flatten(2)
    width = expected[0].shape[-1]
    values = torch.zeros(*q.shape[:-1], 2 * width, device=device).to(FP8)
    scale = torch.zeros(*q.shape[:-1], 8, device=device)
    out = (
        values[..., offset : offset + width],
        scale[..., 2 : 2 + expected[1].shape[-1]],
    )
    check_attention_fp8(kernel, q, k, v, written=out, **options)
    assert_same_bits(out, expected)


@pytest.mark.parametrize("shape", [(1, 70, 3), (2, 1, 3), (2, 70, 1), (1, 1, 1)], ids=str)
def test_strides_of_dimensions_of_size_1_are_free(kernel, device, shape):
    q = normal(*shape, HEAD_DIM, dtype=torch.bfloat16, device=device)

    def with_odd_strides(t):
        sizes = zip(t.shape[:-1], t.stride(), strict=False)
        return t.as_strided(t.shape, [*(7 if size == 1 else stride for size, stride in sizes), 1])

    out = torch.zeros(q.shape, device=device).to(FP8), torch.zeros(*shape, 1, device=device)
    out = tuple(map(with_odd_strides, out))
    check_attention_fp8(kernel, with_odd_strides(q), q, q, written=out)


# --------------------------------------------------------------------------------------------------
# Errors


def test_same_signature_as_attention(kernel):
    plain, quantized = (
        inspect.signature(f).parameters for f in (kernel.attention, kernel.attention_fp8)
    )
    assert list(plain) == list(quantized)
    assert all(plain[name] == quantized[name] for name in plain if name != "out")


@pytest.mark.parametrize("head_dim", [0, 8, 64, 120, 136, 256])
def test_other_head_dims(kernel, device, head_dim):
    q = torch.zeros(2, 5, 3, head_dim, dtype=torch.bfloat16, device=device)
    text = f"attention_fp8: q must have a head_dim of 128, got {head_dim}"
    for arguments in (
        {"q": q, "k": q, "v": q},
        {**dict.fromkeys("qkv", q.flatten(2)), "heads": 3},
    ):
        assert outcome(kernel.attention_fp8, arguments) == (ValueError, text)
        assert compiled_outcome(kernel.attention_fp8, arguments) == (ValueError, text)


def test_errors_are_those_of_attention(kernel, device):
    q, k, v = query_key_value(2, 5, 7, 4, HEAD_DIM, torch.bfloat16, device)
    for change in (
        {"q": None},
        {"q": q.float()},
        {"q": q[..., ::2]},
        {"q": q.flatten(2)},
        {"k": k.half()},
        {"k": k[:, :, :3]},
        {"k": k[..., :64]},
        {"v": v[:, :6]},
        {"v": [1.0]},
        {"scale": "1"},
        {"scale": 0},
        {"heads": 0},
        {"heads": 4},
        {"heads": 2.5},
        {"key_bias": torch.zeros(2, 6, device=device)},
        {"key_lengths": torch.zeros(2, device=device)},
        {"gate": torch.zeros(2, 5, 3, device=device)},
        {"addend": q.float()},
        {"addend": 1},
    ):
        arguments = {"q": q, "k": k, "v": v, **change}
        kind, text = outcome(kernel.attention, arguments)
        assert kind in (TypeError, ValueError), change
        expected = kind, text.replace("attention:", "attention_fp8:", 1)
        assert outcome(kernel.attention_fp8, arguments) == expected


# --------------------------------------------------------------------------------------------------


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("queries", "keys", "layout"),
    [
        (70, 100, "contiguous"),
        (65, 130, "odd_rows"),
        (130, 300, "chunk"),
        (1025, 300, "contiguous"),
    ],
)
@pytest.mark.parametrize("offset", [0, 1])
def test_smoke(kernel, device, queries, keys, layout, offset):
    q, k, v = query_key_value(1, queries, keys, 2, HEAD_DIM, torch.bfloat16, device, layout=layout)
    values = torch.zeros(1, queries, 2, 2 * HEAD_DIM, device=device).to(FP8)
    out = values[..., offset : offset + HEAD_DIM], torch.zeros(1, queries, 2, 1, device=device)
    check_attention_fp8(kernel, q, k, v, written=out, **gate_and_addend("gate+addend", q))


@pytest.mark.sanitize
def test_tiles_that_are_computed_twice(kernel, device):
    """Values and averages that are tiny or huge, and rows that are rescaled."""
    q, k, v = rows_with_peaks(1025, 600, HEAD_DIM, 60, device)
    check_attention_fp8(kernel, q, k, v)
    for factor in (1e-6, 1e6):
        check_attention_fp8(kernel, q, k, v * factor)
