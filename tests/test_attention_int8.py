"""attention_int8: attention with INT8 query and key, and E4M3 value and probabilities.

Results are compared with exact products of the rounded query, key and value. The rest is the rounding of the
probabilities: each element is held to a bound, and the relative L2 error to what the rounding gives.
"""

import math

import pytest
import torch

import attention_inputs
import int8_attention
import references
from accuracy import relative_distance
from checks import MemorySnapshot, assert_same_bits, poison_memory, tensors_of
from inputs import (
    LAYOUTS,
    PACKED_FORMS,
    SMOKE,
    STRIDED_LAYOUTS,
    normal,
    packed_projection,
    pairwise,
)

pytestmark = pytest.mark.usefixtures("_one_thread")
HALVES, HEAD_DIMS = [torch.float16, torch.bfloat16], [64, 128]
NAMES = ("q", "k", "v")

# The relative L2 error against exact products of the rounded operands. E4M3 rounds a probability with an
# error of 2.5% (RMS). As the values' signs are random, the results have the same.
ROUNDED_PROBABILITIES = 0.04
# Against attention without rounding, for scores with a standard deviation of up to 3 nats. The values'
# rounding adds 2.5%, query's and key's 1% a nat.
ALL_ROUNDING = 0.07
# FP8 tensor cores sum 128 products with 14 bits.
FP8_SUMS = 4e-3


def query_key_value(batch, queries, keys, heads, head_dim, dtype, device, *, key_heads=None, **how):
    sizes = [(queries, heads), *[(keys, heads if key_heads is None else key_heads)] * 2]
    how = {"dtype": dtype, "device": device, **how}
    return [normal(batch, seq, count, head_dim, **how) for seq, count in sizes]


def key_lengths(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def pad_with(value, lengths, *tensors):
    """Writes the value to the keys from each length on."""
    for b, length in enumerate(lengths):
        for tensor in tensors:
            tensor[b, min(max(length, 0), tensor.shape[1]) :] = value


def with_gate_and_addend(results, gate, addend):
    """Emulated results and their bounds after the gate and the addend."""
    factor = 1.0 if gate is None else gate.double()[..., None]
    out = results.out * factor + (0.0 if addend is None else addend.double())
    bounds = [t * abs(factor) for t in (results.out_bound, results.magnitude)]
    return results._replace(out=out, out_bound=bounds[0], magnitude=bounds[1])


def check_int8(kernel, q, k, v, *, limit=None, **options):
    """Checks results with and without lse.

    limit: of the relative L2 error, or None. Few rows may have twice that.
    """
    heads, gate, addend = (options.get(name) for name in ("heads", "gate", "addend"))
    by_head = (q, k, v) if heads is None else references.split_heads(heads, q, k, v)
    of_heads = None if addend is None else addend.reshape(by_head[0].shape)
    chosen = {name: options.get(name) for name in ("scale", "key_lengths")}
    expected = int8_attention.emulate(*by_head, **chosen)
    expected = with_gate_and_addend(expected, gate, of_heads)
    few = 1 if expected.lse.numel() >= 64 else 2
    inputs = list(tensors_of((q, k, v), options))
    memory = MemorySnapshot(inputs)
    poison_memory(q)
    alone = kernel.attention_int8(q, k, v, **options)
    out, lse = kernel.attention_int8(q, k, v, return_lse=True, **options)
    memory.assert_unchanged()
    finfo, of_scores = torch.finfo(q.dtype), expected.score_error
    slack = expected.out_bound + 2 * of_scores[..., None] * expected.magnitude
    slack = slack + finfo.eps / 2 * expected.out.abs() + finfo.smallest_normal
    for result in (alone, out):
        assert result.dtype == q.dtype and result.shape == q.shape and result.is_contiguous()
        result = result.double().reshape(expected.out.shape)
        excess = (result - expected.out).abs() - slack
        assert not (excess > 0).any(), f"an element is {excess.max():.3g} beyond its bound"
        error = relative_distance(result, expected.out)
        assert limit is None or error <= limit * few, f"relative L2 error {error:.3g}"
    assert lse.dtype == torch.float32 and lse.is_contiguous()
    is_empty = expected.lse == -math.inf
    assert torch.equal(lse == -math.inf, is_empty)
    excess = ((lse - expected.lse).abs() - expected.lse_bound - of_scores)[~is_empty]
    assert not (excess > 0).any(), f"lse is {excess.max():.3g} beyond its bound"


# --------------------------------------------------------------------------------------------------
# Sizes, memory and options


@pairwise(
    queries=[1, 63, 65, 130, 300],
    keys=[1, 7, 127, 128, 129, 200, 300],
    heads=[(1, 1), (3, 3), (4, 2), (3, 1)],
    batch=[1, 2],
    head_dim=[8, 24, 64, 72, 96, 128],
    dtype=HALVES,
)
def test_sizes(kernel, device, queries, keys, heads, batch, head_dim, dtype):
    sizes = (batch, queries, keys, heads[0], head_dim)
    tensors = query_key_value(*sizes, dtype, device, key_heads=heads[1])
    check_int8(kernel, *tensors, limit=ROUNDED_PROBABILITIES)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="too slow on a CPU")
@pairwise(
    shape=[
        (2, 1000, 1000, 32, 64),
        (2, 1000, 1000, 16, 128),
        (3, 2688, 128, 32, 64),
        (1, 257, 20_000, 8, 128),
        (40, 130, 300, 12, 64),
    ],
    has_lengths=[False, True],
    dtype=HALVES,
)
def test_many_tiles(kernel, device, shape, has_lengths, dtype):
    """More blocks than multiprocessors, so that each multiprocessor gets several."""
    batch, queries, keys, heads, head_dim = shape
    q, k, v = query_key_value(*shape, dtype, device, key_heads=heads // 4)
    options = {}
    if has_lengths:
        lengths = [keys - b * keys // batch for b in range(batch)]
        pad_with(math.nan, lengths, k, v)
        options["key_lengths"] = key_lengths(lengths, device)
    check_int8(kernel, q, k, v, limit=ROUNDED_PROBABILITIES, **options)


@pairwise(form=PACKED_FORMS, keys=[1, 130], head_dim=HEAD_DIMS, dtype=HALVES)
def test_packed_projections(kernel, device, form, keys, head_dim, dtype):
    views = [
        view if view.dim() == 4 else view.unflatten(2, (3, head_dim))
        for view in packed_projection(form, (2, keys, 3, head_dim), dtype, device)
    ]
    check_int8(kernel, *views, limit=ROUNDED_PROBABILITIES)


@pairwise(
    layout=STRIDED_LAYOUTS, which=["q", "k", "v", "qkv"], head_dim=[64, 72, 128], dtype=HALVES
)
def test_strided_views(kernel, device, layout, which, head_dim, dtype):
    """Memory outside of a view's elements is NaN."""
    plain = query_key_value(2, 70, 130, 3, head_dim, dtype, device)
    views = [
        LAYOUTS[layout](t) if name in which else t for name, t in zip(NAMES, plain, strict=True)
    ]
    check_int8(kernel, *views, limit=ROUNDED_PROBABILITIES)


@pytest.mark.sanitize
@pairwise(
    extras=["", "gate", "addend", "gate+addend"],
    gate_dtype=[None, torch.float32],
    is_flat=[False, True],
    keys=[1, 300],
    has_lengths=[False, True],
    head_dim=[8, 64, 72, 128],
    dtype=HALVES,
)
def test_options(kernel, device, extras, gate_dtype, is_flat, keys, has_lengths, head_dim, dtype):
    q, k, v = query_key_value(2, 70, keys, 4, head_dim, dtype, device, key_heads=2)
    options = {"scale": 0.15}
    if "gate" in extras:
        how = {"dtype": gate_dtype or dtype, "device": device, "mean": 0.5}
        options["gate"] = normal(2, 70, 4, **how)
    if "addend" in extras:
        options["addend"] = normal(*q.shape, dtype=dtype, device=device, layout="odd_rows")
    if has_lengths:
        lengths = [keys, keys // 3]
        pad_with(math.nan, lengths, k, v)
        options["key_lengths"] = key_lengths(lengths, device)
    if is_flat:
        q, k, v = (t.flatten(2) for t in (q, k, v))
        options["heads"] = 4
        if "addend" in extras:
            options["addend"] = options["addend"].flatten(2)
    check_int8(kernel, q, k, v, limit=ROUNDED_PROBABILITIES, **options)


@pairwise(
    length=[0, 1, 64, 127, 128, 129, 299, 300, 301, 2**31 - 1, -1, -(2**31)],
    padding=[math.nan, math.inf, 1e4],
    head_dim=HEAD_DIMS,
    dtype=HALVES,
)
def test_key_lengths(kernel, device, length, padding, head_dim, dtype):
    q, k, v = query_key_value(3, 65, 300, 2, head_dim, dtype, device)
    lengths = [300, length, 177]
    pad_with(padding, lengths, k, v)
    options = {"key_lengths": key_lengths(lengths, device)}
    check_int8(kernel, q, k, v, limit=ROUNDED_PROBABILITIES, **options)


@pytest.mark.parametrize("queries", [0, 5])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_without_keys(kernel, device, queries, dtype):
    q, k, v = query_key_value(2, queries, 0, 3, 64, dtype, device)
    poison_memory(q, torch.empty(q.shape[:3], device=device))
    out, lse = kernel.attention_int8(q, k, v, return_lse=True)
    assert out.shape == q.shape and not out.any()
    assert lse.shape == q.shape[:3] and lse.isneginf().all()


# --------------------------------------------------------------------------------------------------
# Scales and means


def check_halves(kernel, q, k, v):
    """Of the channels of the value, which share no scale: the relative L2 errors of each are limited."""
    expected = int8_attention.emulate(q, k, v).out
    out = kernel.attention_int8(q, k, v).double()
    norm = expected.norm(dim=1)
    assert (norm > 0).all()
    errors = (out - expected).norm(dim=1) / norm
    assert (errors <= 2 * ROUNDED_PROBABILITIES).all(), f"relative L2 error {errors.max():.3g}"


# Channels that have no effect on the scores, except through scales.
MARKS = 8


@pairwise(tensor=["q", "k"], head_dim=HEAD_DIMS, dtype=HALVES)
def test_values_that_share_a_scale(kernel, device, tensor, head_dim, dtype):
    """Large values in groups of tokens, in channels that are 0 in the other tensor, make the rounding of
    these groups coarse. They must have no effect on other groups."""
    q, k, v = query_key_value(1, 300, 300, 2, head_dim, dtype, device)
    changed, other = (q, k) if tensor == "q" else (k, q)
    other[..., :MARKS] = 0
    token = torch.arange(300, device=device)
    # Another group in each tile of keys, of whose tokens only the even ones are large.
    shares = token % 4 == 1 if tensor == "q" else token % 8 // 2 == token // 128
    is_large = shares if tensor == "q" else shares & (token % 2 == 0)
    signs = normal(1, 300, 2, MARKS, dtype=dtype, device=device).sign()
    changed[:, is_large, 0, :MARKS] = 400 * signs[:, is_large, 0]
    check_int8(kernel, q, k, v, limit=ROUNDED_PROBABILITIES)
    if tensor == "k":
        keys = int8_attention.rotated(k[0, :, 0].double())
        errors = (int8_attention.rounded_keys(keys) - keys).norm(dim=1)
        assert errors[shares].min() > 10 * errors[~shares].max()


@pairwise(head_dim=HEAD_DIMS, key_heads=[1, 2])
def test_scale_of_each_channel_of_the_value(kernel, device, head_dim, key_heads):
    """Magnitudes that lie further apart than E4M3's."""
    q, k, v = query_key_value(2, 65, 300, 2, head_dim, torch.bfloat16, device, key_heads=key_heads)
    power = (
        torch.arange(v.numel() // 300, device=device).view(2, 1, key_heads, head_dim) * 7 % 9 - 4
    )
    check_halves(kernel, q, k, (v * 1e6**power).to(v.dtype))


MEAN = 100.0


def keys_around_a_mean(device, dtype=torch.bfloat16):
    """Keys whose mean is far larger than their spread, and differs between heads and batch entries."""
    q, k, v = query_key_value(2, 130, 300, 4, 64, dtype, device, key_heads=2)
    means = normal(2, 1, 2, 64, dtype=torch.float32, device=device).sign() * MEAN
    lengths = [300, 177]
    k = (k + means).to(dtype)
    pad_with(math.nan, lengths, k, v)
    return (q, k, v), {"key_lengths": key_lengths(lengths, device)}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_mean_of_the_keys(kernel, device, dtype):
    """Without the mean taken off, and without its product in lse, the results would be far off."""
    tensors, options = keys_around_a_mean(device, dtype)
    check_int8(kernel, *tensors, limit=ROUNDED_PROBABILITIES, **options)
    expected, expected_lse = references.attention(*tensors, **options, return_lse=True)
    out, lse = kernel.attention_int8(*tensors, **options, return_lse=True)
    others = {
        "subtracts_mean": int8_attention.emulate(*tensors, **options, subtracts_mean=False),
        "corrects_lse": int8_attention.emulate(*tensors, **options, corrects_lse=False),
    }
    assert relative_distance(out, expected) < ALL_ROUNDING
    assert relative_distance(others["subtracts_mean"].out, expected) > 2 * ALL_ROUNDING
    assert (lse - expected_lse).abs().amax() < 0.1
    assert (others["corrects_lse"].lse - expected_lse).abs().amax() > 10


# --------------------------------------------------------------------------------------------------
# Values


@pairwise(kind=attention_inputs.INPUTS, head_dim=HEAD_DIMS)
def test_scores_as_models_have_them(kernel, device, kind, head_dim):
    """Peaked rows, tokens in clusters, a sink, scores that rise by tiles."""
    inputs = attention_inputs.INPUTS[kind]((1, 130, 400, 2, head_dim), device)
    typical = ROUNDED_PROBABILITIES if kind in attention_inputs.TYPICAL else None
    check_int8(kernel, *inputs, limit=typical)


@pairwise(std=[1, 2, 3], head_dim=HEAD_DIMS)
def test_distance_from_unrounded_attention(kernel, device, std, head_dim):
    inputs = attention_inputs.random_scores((1, 300, 1000, 2, head_dim), device, std)
    out = kernel.attention_int8(*inputs)
    error = relative_distance(out, references.attention(*inputs))
    assert 0.02 < error < ALL_ROUNDING


@pairwise(
    order=["rising", "falling", "peak", "valley"],
    steepness=[0.01, 0.1, 1.0],
    head_dim=HEAD_DIMS,
    dtype=HALVES,
)
def test_order_of_scores(kernel, device, order, steepness, head_dim, dtype):
    """A running maximum that changes with every key, or never."""
    keys = 577
    q, k, v = query_key_value(1, 130, keys, 2, head_dim, dtype, device)
    score = torch.linspace(-0.5, 0.5, keys, device=device) * keys * steepness
    orders = {"falling": score.flip(0), "peak": -score.abs(), "valley": score.abs()}
    added = orders.get(order, score)[:, None, None] / math.sqrt(head_dim)
    check_int8(kernel, 1 + q * 0.01, (k * 0.01 + added).to(dtype), v)


@pytest.mark.sanitize
@pytest.mark.parametrize("height", [8.0, 80.0, 1000.0, 20000.0])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rows_that_rise_after_the_first_tile(kernel, device, height, head_dim):
    """Some rows rise by this number of nats at one key, others do not. Neighbouring keys are 0 there."""
    q, k, v = query_key_value(1, 130, 400, 1, head_dim, torch.bfloat16, device)
    q[:, ::3, :, 0] = math.sqrt(head_dim)
    q[:, 1::3, :, 0] = -1
    k[..., 0] = 0
    k[:, 333, :, 0] = height
    check_int8(kernel, q, k, v)
    out = kernel.attention_int8(q, k, v)
    if height > 50:
        value = int8_attention.in_e4m3(v[0, :, 0].double(), 0)[333]
        rows = out[0, ::3, 0].double()
        torch.testing.assert_close(rows, value.expand_as(rows), rtol=6e-3, atol=1e-6)


@pytest.mark.parametrize("keys", [8192, 65536])
def test_weights_beside_a_sink(kernel, device, keys):
    """Many keys share half of the weight, with probabilities that are among the smallest of E4M3."""
    q, k, v = attention_inputs.attention_sink((1, 64, keys, 1, 64), device)
    v.fill_(1)
    v[:, keys // 2] = 0
    share, expected = (
        attend(q, k, v).double().mean() for attend in (kernel.attention_int8, references.attention)
    )
    assert abs(share / expected - 1) < 0.03


@pairwise(factor=[0.0, 1e-30, 1e-4, 1e4, 1e30], tensor=["q", "k", "v"], head_dim=HEAD_DIMS)
def test_range_of_values(kernel, device, factor, tensor, head_dim):
    """The other factor of the scores is scaled by the inverse."""
    q, k, v = query_key_value(1, 65, 200, 2, head_dim, torch.bfloat16, device)
    inverse = 1 / factor if factor else 1.0
    if tensor == "v":
        v *= factor
    else:
        q, k = (q * factor, k * inverse) if tensor == "q" else (q * inverse, k * factor)
    check_int8(kernel, q, k, v, limit=ROUNDED_PROBABILITIES)


def test_equal_keys(kernel, device):
    """All keys are the mean: each score is the same, and lse is that of the given keys."""
    q, k, v = query_key_value(1, 65, 200, 2, 64, torch.bfloat16, device)
    k[:] = k[:, :1]
    out, lse = kernel.attention_int8(q, k, v, return_lse=True)
    score = torch.einsum("bqhd,bhd->bqh", q.double(), k[:, 0].double()) / 8
    torch.testing.assert_close(lse.double(), score + math.log(200), rtol=1e-5, atol=1e-5)
    mean = int8_attention.in_e4m3(v.double(), 1).mean(1, keepdim=True)
    torch.testing.assert_close(out.double(), mean.expand_as(out), rtol=6e-3, atol=FP8_SUMS)


@pairwise(std=[0, 1, 3], head_dim=HEAD_DIMS, dtype=HALVES)
def test_weights_have_a_sum_of_1(kernel, device, std, head_dim, dtype):
    """The sums are those of the rounded probabilities, so that equal values are their own average."""
    q, k, v = query_key_value(1, 65, 300, 2, head_dim, dtype, device)
    v[:] = v[:, :1]
    out = kernel.attention_int8(q * std, k, v)
    limit = max(torch.finfo(dtype).eps, FP8_SUMS)
    torch.testing.assert_close(out, v[:, :65], rtol=limit, atol=0)


# Tensor, place and value that is set, and where the result is NaN.
NONFINITE = {
    "nan_in_a_query": ("q", (1, 69, 0, 3), math.nan, (1, 69, 0)),
    "infinity_in_a_query": ("q", (1, 3, 1, 0), math.inf, (1, 3, 1)),
    "nan_in_a_key": ("k", (0, 100, 1, 5), math.nan, (0, slice(None), slice(2, 4))),
    "nan_in_the_last_key": ("k", (0, -1, 0, 63), math.nan, (0, slice(None), slice(0, 2))),
    "infinity_in_a_key": ("k", (1, 0, 1, 5), -math.inf, (1, slice(None), slice(2, 4))),
    "nan_in_a_value": ("v", (0, 100, 1, 5), math.nan, (0, slice(None), slice(2, 4), 5)),
    "infinity_in_a_value": ("v", (1, 0, 0, 7), math.inf, (1, slice(None), slice(0, 2), 7)),
}


@pairwise(change=NONFINITE, queries=[70, 130], head_dim=HEAD_DIMS, dtype=HALVES)
def test_nonfinite_values(kernel, device, change, queries, head_dim, dtype):
    drawn = query_key_value(2, queries, 300, 4, head_dim, dtype, device, key_heads=2)
    tensors = dict(zip(NAMES, drawn, strict=True))
    expected, expected_lse = kernel.attention_int8(**tensors, return_lse=True)
    name, index, value, places = NONFINITE[change]
    tensors[name][index] = value
    expected[places] = math.nan
    if name != "v":
        expected_lse[places] = math.nan
    results = kernel.attention_int8(**tensors, return_lse=True)
    for result, one in zip(results, (expected, expected_lse), strict=True):
        assert torch.equal(result.isnan(), one.isnan())
        assert relative_distance(result.nan_to_num(0), one.nan_to_num(0)) < ROUNDED_PROBABILITIES


# --------------------------------------------------------------------------------------------------
# Logarithms, gradients, bits


@pairwise(
    split=[(300, 300), (100, 500), (0, 600)],
    has_lengths=[False, True],
    head_dim=HEAD_DIMS,
    dtype=HALVES,
)
def test_parts_of_the_keys_are_merged_by_lse(kernel, device, split, has_lengths, head_dim, dtype):
    """The keys' means differ between the parts. One batch entry may have keys in one part only."""
    count = sum(split)
    q, k, v = query_key_value(2, 130, count, 4, head_dim, dtype, device, key_heads=2)
    k[:, : split[0]] += 0.2
    lengths = [count, split[0] // 2 if has_lengths else count]
    outs, lses, first = [], [], 0
    for keys in split:
        part = slice(first, first + keys)
        options = {"key_lengths": key_lengths([length - first for length in lengths], device)}
        out, lse = kernel.attention_int8(q, k[:, part], v[:, part], return_lse=True, **options)
        outs.append(out.double())
        lses.append(lse.double())
        first += keys
    lse = torch.stack(lses).logsumexp(0)
    weights = (torch.stack(lses) - lse.masked_fill(lse == -math.inf, 0)).exp()
    merged = (torch.stack(outs) * weights[..., None]).sum(0)
    options = {"key_lengths": key_lengths(lengths, device)}
    expected, expected_lse = references.attention(q, k, v, return_lse=True, **options)
    has_keys = expected_lse > -math.inf
    assert torch.equal(lse > -math.inf, has_keys)
    assert (lse - expected_lse)[has_keys].abs().amax() < 0.1
    assert relative_distance(merged, expected) < ALL_ROUNDING


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradients_are_those_of_attention(kernel, device, dtype):
    """Bit for bit, with lengths, gate and lse."""
    q, k, v = query_key_value(2, 9, 20, 4, 24, dtype, device, key_heads=2)
    gate = normal(2, 9, 4, dtype=torch.float32, device=device)
    options = {"key_lengths": key_lengths([20, 7], device), "return_lse": True}
    of_out, of_lse = torch.randn_like(q), torch.randn(q.shape[:3], device=device)
    gradients = []
    for function in (kernel.attention, kernel.attention_int8):
        leaves = [t.detach().clone().requires_grad_() for t in (q, k, v, gate)]
        results = function(*leaves[:3], gate=leaves[3], **options)
        gradients.append(torch.autograd.grad(results, leaves, (of_out, of_lse)))
    assert_same_bits(*gradients)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="launches of a GPU")
@pytest.mark.parametrize("shape", [(2, 2688, 2688, 32, 64), (2, 2688, 2688, 16, 128)], ids=str)
def test_thousands_of_launches_give_the_same_bits(kernel, device, shape):
    """Occasionally a copy takes far longer than the next ones. Some rows of peaked scores are rescaled."""
    q, k, v = query_key_value(*shape, torch.bfloat16, device)
    q *= 4
    first = kernel.attention_int8(q, k, v)
    differ = torch.zeros((), dtype=torch.bool, device=device)
    for _ in range(1000):
        differ |= (kernel.attention_int8(q, k, v) != first).any()
    assert not differ


@pytest.mark.sanitize
@pytest.mark.parametrize(("shape", "head_dim", "layout", "dtype"), SMOKE, ids=str)
def test_smoke(kernel, device, shape, head_dim, layout, dtype):
    batch, queries, keys, heads, key_heads = shape
    sizes = (batch, queries, keys, heads, head_dim)
    q, k, v = query_key_value(*sizes, dtype, device, key_heads=key_heads, layout=layout)
    check_int8(kernel, q, k, v)
    lengths = key_lengths([keys, keys // 2][:batch], device)
    check_int8(kernel, q, k, v, key_lengths=lengths)
