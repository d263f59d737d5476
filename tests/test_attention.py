"""attention: softmax(scale * q kᵀ + key_bias) v for every batch entry and head."""

import math

import pytest
import torch

import attention_inputs
import references
from checks import (
    assert_rounded_once,
    check,
    check_nonfinite,
    map_tensors,
    poison_memory,
)
from inputs import (
    LAYOUTS,
    PACKED_FORMS,
    SMOKE,
    STRIDED_LAYOUTS,
    WRITABLE_LAYOUTS,
    every_16_bit_dtype,
    normal,
    packed_projection,
    pairwise,
)

every_head_dim = pytest.mark.parametrize("head_dim", [64, 128], ids=["d64", "d128"])
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="too slow on a CPU")
HALVES, HEAD_DIMS = [torch.float16, torch.bfloat16], [64, 128]
BIAS_DTYPES = [None, torch.float32]  # None: of the query's dtype

# Around multiples of tile sizes, and far from them.
QUERY_LENGTHS = [1, 63, 64, 65, 191, 192, 193, 300]
KEY_LENGTHS = [1, 7, 64, 127, 128, 129, 176, 177, 255, 256, 257, 300, 1000]
INT32_MAX = 2**31 - 1

# For many queries the CUDA kernel takes bfloat16 values, and their probabilities, in float16, and rescales
# rows only where these would overflow.
LAZY_QUERIES, LAZY_KEYS = 1024, 256
FEW_AND_MANY = [130, 1025]
# The error of the logarithm, without that of the scores. For thousands of keys it is an ulp.
LSE_SLACK = 2e-6


def query_key_value(
    batch, queries, keys, heads, head_dim, dtype, device, *, key_heads=None, layout="contiguous"
):
    key_heads = heads if key_heads is None else key_heads
    sizes = [(queries, heads), (keys, key_heads), (keys, key_heads)]
    return [
        normal(batch, seq, count, head_dim, dtype=dtype, device=device, layout=layout)
        for seq, count in sizes
    ]


def key_lengths(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def pad_with(value, lengths, *tensors):
    """Writes the value to the keys from each length on."""
    for b, length in enumerate(lengths):
        for tensor in tensors:
            tensor[b, min(max(length, 0), tensor.shape[1]) :] = value


def masks(masked, k, v, lengths, dtype):
    """A random bias, lengths with NaN as padding, or both."""
    options = {}
    if masked in ("bias", "both"):
        options["key_bias"] = normal(*k.shape[:2], dtype=dtype, device=k.device, std=2.0)
    if masked in ("lengths", "both"):
        options["key_lengths"] = key_lengths(lengths, k.device)
        pad_with(math.nan, lengths, k, v)
    return options


def largest_score(q, k, scale, key_bias):
    """A bound of the magnitude of the scores."""
    if k.numel() == 0:
        return 0.0
    norms = [t.double().norm(dim=-1).nan_to_num(0, 0, 0).amax().item() for t in (q, k)]
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    bias = torch.zeros(1) if key_bias is None else key_bias[key_bias.isfinite()]
    return norms[0] * norms[1] * scale + (bias.abs().amax().item() if bias.numel() else 0.0)


def float16_slack(q, k, v, options):
    """The largest error of probabilities in float16, from its spacing near zero.

    Keys far below a row's largest are off by up to 2^-12.5 of the row together, as if all of them had
    the same weight.
    """
    is_lazy = (
        q.is_cuda
        and q.dtype == torch.bfloat16
        and q.shape[1] >= LAZY_QUERIES
        and k.shape[1] > LAZY_KEYS
        and options.get("key_bias") is None
    )
    if not is_lazy:
        return torch.zeros_like(q[:, :1], dtype=torch.float64)
    of_keys = v.double().nan_to_num(0, 0, 0).abs().mean(1, keepdim=True)
    return 2**-12.5 * of_keys.repeat_interleave(q.shape[2] // k.shape[2], 2)


def check_attention(kernel, q, k, v, *, contract=True, written=None, **options):
    """Holds every element to the size of what is averaged in it.

    A probability has an error of half an ulp of 16 bits, and of what float32 leaves of its score.

    `written` is the call's `out`.
    """
    finfo = torch.finfo(q.dtype)
    heads, gate = options.get("heads"), options.get("gate")
    of_averages = {**options, "gate": None if gate is None else gate.abs(), "addend": None}
    of_averages["return_lse"] = False
    magnitudes = references.attention(q, k, v.abs(), **of_averages)
    by_head = [q, k, v] if heads is None else references.split_heads(heads, q, k, v)
    score = largest_score(*by_head[:2], options.get("scale"), options.get("key_bias"))
    of_probabilities = finfo.eps / 2 + 1e-4 + 2**-20 * score
    slack = of_probabilities * magnitudes + finfo.eps / 2 * finfo.smallest_normal
    of_float16 = float16_slack(*by_head, options)
    if gate is not None:
        of_float16 = of_float16 * gate.abs()[..., None]
    slack = slack + of_float16 if heads is None else slack + of_float16.flatten(2)
    if options.get("return_lse"):
        slack = slack, LSE_SLACK + 2**-20 * score
    return check(
        kernel, "attention", q, k, v, out=written, slack=slack, contract=contract, **options
    )


# --------------------------------------------------------------------------------------------------
# Results in the caller's tensor


def memory_for_output(layout, shape, dtype, device):
    """A view filled with NaN, in a buffer filled with NaN."""
    return normal(*shape, dtype=dtype, device=device, layout=layout).fill_(math.nan)


# Queries and keys for each of the kernels.
@pairwise(
    size=[(70, 0), (70, 100), (200, 200), (200, 300), (1025, 300)],
    layout=WRITABLE_LAYOUTS,
    head_dim=HEAD_DIMS,
    dtype=HALVES,
)
def test_out(kernel, device, size, layout, head_dim, dtype):
    queries, keys = size
    q, k, v = query_key_value(2, queries, keys, 3, head_dim, dtype, device)
    out = memory_for_output(layout, q.shape, dtype, device)
    check_attention(kernel, q, k, v, written=out)
    assert torch.equal(out, kernel.attention(q, k, v))


@pytest.mark.parametrize("layout", ["contiguous", "odd_rows"])
@pytest.mark.parametrize("shape", [(1, 70, 3), (2, 1, 3), (2, 70, 1), (1, 1, 1)], ids=str)
def test_strides_of_dimensions_of_size_1_of_out_are_free(kernel, device, layout, shape):
    q = normal(*shape, 64, dtype=torch.bfloat16, device=device)
    out = memory_for_output(layout, q.shape, torch.bfloat16, device)
    sizes = zip(q.shape, out.stride(), strict=True)
    out = out.as_strided(out.shape, [7 if size == 1 else stride for size, stride in sizes])
    check_attention(kernel, q, q, q, written=out)


# --------------------------------------------------------------------------------------------------
# Sizes


@pairwise(queries=QUERY_LENGTHS, keys=KEY_LENGTHS, head_dim=HEAD_DIMS, dtype=HALVES)
def test_lengths(kernel, device, queries, keys, head_dim, dtype):
    check_attention(kernel, *query_key_value(2, queries, keys, 2, head_dim, dtype, device))


@pairwise(
    heads=[(1, 1), (3, 3), (8, 2), (6, 1), (6, 3), (12, 4)],  # of queries and keys
    batch=[1, 3, 17],
    queries=[1, 2, 65, 130],
    head_dim=HEAD_DIMS,
    dtype=HALVES,
)
def test_heads_and_batches(kernel, device, heads, batch, queries, head_dim, dtype):
    sizes = (batch, queries, 177, heads[0], head_dim)
    check_attention(kernel, *query_key_value(*sizes, dtype, device, key_heads=heads[1]))


@needs_cuda
@pairwise(
    shape=[
        (2, 1000, 1000, 32, 32, 64),
        (2, 1000, 1000, 16, 16, 128),
        (1, 4000, 4000, 12, 12, 64),
        (1, 4000, 4000, 12, 12, 128),
        (3, 2688, 128, 32, 32, 64),
        (1, 257, 20_000, 8, 2, 128),
        (40, 130, 300, 12, 4, 64),
        (700, 3, 5, 6, 1, 64),
    ],
    masked=["plain", "bias", "lengths", "both"],
    dtype=HALVES,
)
def test_many_tiles(kernel, device, shape, masked, dtype):
    """More blocks than multiprocessors, so that each multiprocessor gets several."""
    batch, queries, keys, heads, key_heads, head_dim = shape
    size = batch, queries, keys, heads, head_dim
    q, k, v = query_key_value(*size, dtype, device, key_heads=key_heads)
    lengths = [keys - b * keys // batch for b in range(batch)]
    check_attention(kernel, q, k, v, **masks(masked, k, v, lengths, dtype))


ALL_HEAD_DIMS = range(8, 129, 8)
EXTRAS = ["gate", "addend", "gate+addend"]


def in_one(tensors, options):
    """The same call of tensors (B, S, H * d)."""
    options = {**options, "heads": tensors[0].shape[2]}
    if "addend" in options:
        options["addend"] = options["addend"].flatten(2)
    return [t.flatten(2) for t in tensors], options


def total_of(q):
    seed = normal(*q.shape, dtype=q.dtype, device=q.device)
    return lambda out: (out * seed.to(out.dtype)).sum()


def check_gradients(kernel, leaves, options, total):
    """Of the total of the results, with respect to the leaves."""

    def in_double(tensor):
        return tensor.double() if tensor.is_floating_point() else tensor

    grads = []
    for function, convert in ((kernel.attention, torch.clone), (references.attention, in_double)):
        others, given = map_tensors(convert, (options, leaves))
        given = {name: t.detach().requires_grad_() for name, t in given.items()}
        result = total(function(**given, **others))
        found = torch.autograd.grad(result, list(given.values()), allow_unused=True)
        pairs = zip(given.values(), found, strict=True)
        grads.append([torch.zeros_like(t) if g is None else g for t, g in pairs])
    for name, one, other in zip(leaves, *grads, strict=True):
        other = other.nan_to_num(0)  # of entries without keys
        error = (one.double() - other).norm()
        assert error <= 0.02 * other.norm(), f"gradient of {name}: error {error:.3g}"


def gate_and_addend(extras, q, gate_dtype=None):
    """`gate_dtype`: None for q's dtype. The addend is strided."""
    options = {}
    if "gate" in extras:
        gate = normal(*q.shape[:3], dtype=gate_dtype or q.dtype, device=q.device, mean=0.5)
        options["gate"] = gate
    if "addend" in extras:
        options["addend"] = normal(*q.shape, dtype=q.dtype, device=q.device, layout="odd_rows")
    return options


@pairwise(
    head_dim=ALL_HEAD_DIMS,
    dtype=HALVES,
    size=[(1, 1), (70, 7), (65, 300), (200, 130), (1025, 300)],
    layout=WRITABLE_LAYOUTS,
    heads=[(2, 2), (4, 2), (3, 1)],
    masked=["plain", "bias", "lengths", "both"],
    extras=["", *EXTRAS],
    writes=[False, True],
)
def test_head_dims(kernel, device, head_dim, dtype, size, layout, heads, masked, extras, writes):
    queries, keys = size
    sizes = (2, queries, keys, heads[0], head_dim)
    how = {"key_heads": heads[1], "layout": layout}
    q, k, v = query_key_value(*sizes, dtype, device, **how)
    options = gate_and_addend(extras, q) | masks(masked, k, v, [keys, keys // 3], dtype)
    written = memory_for_output("odd_rows", q.shape, dtype, device) if writes else None
    check_attention(kernel, q, k, v, written=written, **options)


@pairwise(
    extras=EXTRAS,
    gate_dtype=[None, torch.float32],
    is_flat=[False, True],
    keys=[0, 1, 300],
    head_dim=[8, 64, 72, 128],
    dtype=HALVES,
)
def test_gate_and_addend(kernel, device, extras, gate_dtype, is_flat, keys, head_dim, dtype):
    q, k, v = query_key_value(2, 70, keys, 3, head_dim, dtype, device)
    options = gate_and_addend(extras, q, gate_dtype)
    if is_flat:
        (q, k, v), options = in_one([q, k, v], options)
    check_attention(kernel, q, k, v, **options)


@pytest.mark.parametrize(
    ("leaf", "keys"),
    [*((leaf, 20) for leaf in ("q", "k", "v", "gate", "addend")), ("gate", 0), ("addend", 0)],
)
def test_gradients_with_gate_and_addend(kernel, device, leaf, keys):
    q, k, v = query_key_value(2, 9, keys, 3, 24, torch.bfloat16, device)
    tensors = {"q": q, "k": k, "v": v, **gate_and_addend("gate+addend", q, torch.float32)}
    options = {name: t for name, t in tensors.items() if name != leaf}
    check_gradients(kernel, {leaf: tensors[leaf]}, options, total_of(q))


@pairwise(option=["plain", "bias", "lengths"], queries=[0, 1, 70], head_dim=HEAD_DIMS, dtype=HALVES)
def test_without_keys(kernel, device, option, queries, head_dim, dtype):
    q, k, v = query_key_value(2, queries, 0, 3, head_dim, dtype, device)
    options = masks(option, k, v, [0, 5], dtype)
    poison_memory(q, torch.empty(q.shape[:3], device=device))
    out, lse = kernel.attention(q, k, v, **options, return_lse=True)
    assert lse.shape == q.shape[:3] and lse.isneginf().all()
    for result in (out, kernel.attention(q, k, v, **options)):
        assert result.shape == q.shape and not result.any()


@pytest.mark.parametrize(
    "shape",
    [(0, 5, 7, 2, 2), (2, 0, 7, 2, 2), (2, 5, 7, 0, 0), (2, 5, 7, 0, 3), (2, 0, 0, 2, 2)],
    ids=str,
)
@every_16_bit_dtype
def test_without_queries(kernel, device, shape, dtype):
    q, k, v = query_key_value(*shape[:4], 64, dtype, device, key_heads=shape[4])
    out = kernel.attention(q, k, v)
    assert out.shape == q.shape and out.dtype == dtype


# --------------------------------------------------------------------------------------------------
# Memory


@pairwise(form=PACKED_FORMS, keys=[1, 130], head_dim=HEAD_DIMS, dtype=HALVES)
def test_packed_projections(kernel, device, form, keys, head_dim, dtype):
    """q, k and v as views of one tensor."""
    views = [
        view if view.dim() == 4 else view.unflatten(2, (3, head_dim))
        for view in packed_projection(form, (2, keys, 3, head_dim), dtype, device)
    ]
    assert len({view.untyped_storage().data_ptr() for view in views}) == 1
    check_attention(kernel, *views)


@pairwise(layout=STRIDED_LAYOUTS, which=["q", "k", "v", "qkv"], head_dim=HEAD_DIMS, dtype=HALVES)
def test_strided_views(kernel, device, layout, which, head_dim, dtype):
    """Memory outside a view's elements is NaN."""
    plain = query_key_value(2, 70, 130, 3, head_dim, dtype, device)
    views = query_key_value(2, 70, 130, 3, head_dim, dtype, device, layout=layout)
    tensors = [
        view if name in which else one for name, one, view in zip("qkv", plain, views, strict=True)
    ]
    check_attention(kernel, *tensors)


@pairwise(dim=[0, 1, 2], which=["q", "k", "v", "kv"], dtype=HALVES)
def test_expanded_dimensions(kernel, device, which, dim, dtype):
    tensors = query_key_value(3, 70, 130, 3, 64, dtype, device)
    tensors = [
        t.narrow(dim, 0, 1).expand_as(t) if name in which else t
        for name, t in zip("qkv", tensors, strict=True)
    ]
    check_attention(kernel, *tensors, contract=False)


@every_16_bit_dtype
def test_strides_of_dimensions_of_size_1_are_free(kernel, device, dtype):
    tensors = [
        normal(64, dtype=dtype, device=device).as_strided((1, 1, 1, 64), (3, INT32_MAX, 7, 1))
        for _ in range(3)
    ]
    bias = normal(1, dtype=dtype, device=device).as_strided((1, 1), (INT32_MAX, 5))
    check_attention(kernel, *tensors, key_bias=bias)


# --------------------------------------------------------------------------------------------------
# Tensors (B, S, H * d), as returned by linear layers


@pytest.mark.sanitize
@pairwise(layout=LAYOUTS, key_heads=[1, 2, 4], head_dim=HEAD_DIMS, dtype=HALVES)
def test_heads_given(kernel, device, layout, key_heads, head_dim, dtype):
    heads = 4
    options = {"dtype": dtype, "device": device, "layout": layout}
    q = normal(2, 70, heads * head_dim, **options)
    k, v = (normal(2, 130, key_heads * head_dim, **options) for _ in range(2))
    out = check_attention(kernel, q, k, v, heads=heads)
    assert out.shape == q.shape and out.is_contiguous()
    expected = kernel.attention(*references.split_heads(heads, q, k, v))
    assert torch.equal(out, expected.flatten(2))


@pairwise(queries=FEW_AND_MANY, head_dim=HEAD_DIMS, dtype=HALVES)
def test_heads_given_with_all_options(kernel, device, queries, head_dim, dtype):
    tensors = query_key_value(2, queries, 300, 2, head_dim, dtype, device)
    bias = normal(2, 300, dtype=torch.float32, device=device)
    options = {"scale": 0.1, "key_bias": bias, "key_lengths": key_lengths([300, 211], device)}
    (q, k, v), options = in_one(tensors, options)
    for out in (None, memory_for_output("chunk", q.shape, dtype, device)):
        check_attention(kernel, q, k, v, written=out, **options)


# --------------------------------------------------------------------------------------------------
# Scale


@pairwise(scale=[None, 1e-3, 0.05, 1, 1.7], head_dim=HEAD_DIMS, dtype=HALVES)
def test_scale(kernel, device, scale, head_dim, dtype):
    tensors = query_key_value(2, 130, 177, 3, head_dim, dtype, device)
    check_attention(kernel, *tensors, scale=scale)


# --------------------------------------------------------------------------------------------------
# Bias


def masked(*index):
    def change(bias):
        bias[index] = -math.inf

    return change


BIASES = {
    "random": lambda bias: None,
    "minus_infinity_at_the_end": masked(..., slice(210, None)),
    "minus_infinity_in_the_first_200": masked(..., slice(0, 200)),
    "minus_infinity_in_a_tile": masked(..., slice(64, 256)),
    "every_third": masked(..., slice(None, None, 3)),
    "one_key_left": lambda bias: bias.fill_(-math.inf)[:, bias.shape[1] // 2].fill_(1.0),
    "whole_entry": masked(1),
    "all_entries": masked(...),
    "large": lambda bias: bias.add_(3000.0),
    "large_negative": lambda bias: bias.sub_(10000.0),  # as masks of finite values have it
    "steps": lambda bias: bias[:, ::2].add_(300.0),
}


@pairwise(kind=BIASES, keys=[257, 300], bias_dtype=BIAS_DTYPES, head_dim=HEAD_DIMS, dtype=HALVES)
def test_key_bias(kernel, device, kind, bias_dtype, keys, head_dim, dtype):
    q, k, v = query_key_value(3, 65, keys, 4, head_dim, dtype, device, key_heads=2)
    bias = normal(3, keys, dtype=bias_dtype or dtype, device=device, std=2.0)
    BIASES[kind](bias)
    # A large bias leaves few bits of a score in float32, which dominates the error of some elements.
    contract = not kind.startswith("large")
    out = check_attention(kernel, q, k, v, key_bias=bias, contract=contract)
    for b in range(3):
        is_left_out = not (bias[b] > -math.inf).any()
        assert out[b].any() != is_left_out


@pairwise(
    layout=["contiguous", "expanded", "misaligned", "odd_rows", "chunk", "unbind"],
    keys=[1, 7, 64, 129, 177],
    bias_dtype=BIAS_DTYPES,
    dtype=HALVES,
)
def test_layouts_of_biases(kernel, device, layout, keys, bias_dtype, dtype):
    q, k, v = query_key_value(3, 70, keys, 2, 64, dtype, device)
    bias = normal(3, keys, dtype=bias_dtype or dtype, device=device, std=2.0, layout=layout)
    check_attention(kernel, q, k, v, key_bias=bias)


# --------------------------------------------------------------------------------------------------
# Lengths

LENGTHS = [0, 1, 63, 64, 65, 100, 127, 128, 129, 256, 299, 300, 301, INT32_MAX, -1, -(2**31)]


@pairwise(length=LENGTHS, padding=[math.nan, math.inf, 1e4], head_dim=HEAD_DIMS, dtype=HALVES)
def test_key_lengths(kernel, device, length, padding, head_dim, dtype):
    q, k, v = query_key_value(3, 65, 300, 2, head_dim, dtype, device)
    lengths = [300, length, 177]
    pad_with(padding, lengths, k, v)
    out = check_attention(kernel, q, k, v, key_lengths=key_lengths(lengths, device))
    assert out[1].any() == (length > 0)


@pairwise(queries=[1, 130], keys=[1, 64, 177], dtype=HALVES)
def test_key_lengths_of_few_keys(kernel, device, queries, keys, dtype):
    lengths = [keys, 0, 1, keys - 1, keys // 2, keys + 1]
    q, k, v = query_key_value(len(lengths), queries, keys, 2, 64, dtype, device)
    pad_with(math.nan, lengths, k, v)
    check_attention(kernel, q, k, v, key_lengths=key_lengths(lengths, device))


@pairwise(
    lengths=[(300, 70, 0), (64, 128, 257), (1, 300, 200), (129, 299)],
    call=[(queries, bias) for queries in FEW_AND_MANY for bias in ("no bias", *BIAS_DTYPES)],
    head_dim=HEAD_DIMS,
    dtype=HALVES,
)
def test_bias_and_lengths(kernel, device, lengths, call, head_dim, dtype):
    queries, bias_dtype = call
    batch, options = len(lengths), {"key_lengths": key_lengths(lengths, device)}
    q, k, v = query_key_value(batch, queries, 300, 4, head_dim, dtype, device, key_heads=2)
    pad_with(math.nan, lengths, k, v)
    if bias_dtype != "no bias":
        bias = normal(batch, 300, dtype=bias_dtype or dtype, device=device, std=2.0)
        bias[1, :70] = -math.inf  # all keys, where the length is 70
        pad_with(math.nan, lengths, bias)
        options["key_bias"] = bias
    check_attention(kernel, q, k, v, **options)


# --------------------------------------------------------------------------------------------------
# Values


@pairwise(
    queries=FEW_AND_MANY,
    std=[0.0, 1e-3, 5.0, 30.0],
    keys=[100, 300, 600],
    return_lse=[False, True],
    head_dim=HEAD_DIMS,
    dtype=HALVES,
)
def test_range_of_scores(kernel, device, queries, std, keys, return_lse, head_dim, dtype):
    q, k, v = query_key_value(2, queries, keys, 2, head_dim, dtype, device)
    check_attention(kernel, q * std, k, v, return_lse=return_lse)


def scored(k, score, dtype=torch.bfloat16):
    """Keys with these scores for queries of about 1."""
    return (k + score[:, None, None] / math.sqrt(k.shape[3])).to(dtype)


@pairwise(
    queries=FEW_AND_MANY,
    order=["rising", "falling", "peak", "valley"],
    steepness=[0.01, 0.1, 1.0],
    head_dim=HEAD_DIMS,
    dtype=HALVES,
)
def test_order_of_scores(kernel, device, queries, order, steepness, head_dim, dtype):
    """A running maximum that changes with every key, or never."""
    keys = 577
    q, k, v = query_key_value(2, queries, keys, 2, head_dim, dtype, device)
    q = 1 + q * 0.01
    score = torch.linspace(-0.5, 0.5, keys, device=device) * keys * steepness
    orders = {"falling": score.flip(0), "peak": -score.abs(), "valley": score.abs()}
    check_attention(kernel, q, scored(k * 0.01, orders.get(order, score), dtype), v)


@pairwise(queries=FEW_AND_MANY, value=[0.0, 1.0, -3.0, 1000.0], head_dim=HEAD_DIMS, dtype=HALVES)
def test_constant_values(kernel, device, queries, value, head_dim, dtype):
    q, k, v = query_key_value(2, queries, 300, 2, head_dim, dtype, device)
    v.fill_(value)
    check_attention(kernel, q, k, v)
    q.fill_(1.5)
    k.fill_(-0.5)
    check_attention(kernel, q, k, v)


@pairwise(factor=[1e-30, 1e-6, 1e-3, 1e3, 3e4, 1e30], queries=FEW_AND_MANY, head_dim=HEAD_DIMS)
def test_range_of_values(kernel, device, queries, factor, head_dim):
    """All values, those of one head, or a few of them are far from 1."""
    dtype = torch.bfloat16
    q, k, v = query_key_value(2, queries, 300, 3, head_dim, dtype, device)
    for part in (v, v[0, :, 1], v[:, ::50, 2]):
        before = part.clone()
        part *= factor
        check_attention(kernel, q, k, v)
        part.copy_(before)


@pytest.mark.sanitize
@every_head_dim
def test_values_beyond_float16(kernel, device, head_dim):
    """Many queries, and heads whose values or averages are tiny or huge, or cancel each other."""
    q, k, v = query_key_value(1, 1025, 300, 3, head_dim, torch.bfloat16, device)
    v[:, :, 0] *= 1e-6
    v[:, :, 1] *= 1e4
    q[:, :, 2] = 0
    v[:, ::2, 2] = 1
    v[:, 1::2, 2] = -1
    check_attention(kernel, q, k, v)


@pairwise(gap=[3, 6, 9, 12, 13.2, 15], queries=FEW_AND_MANY, head_dim=HEAD_DIMS, dtype=HALVES)
def test_one_key_above_all_others(kernel, device, queries, gap, head_dim, dtype):
    """Many small weights beside a large one, which comes first, in the middle or last."""
    keys = 2000
    q, k, v = query_key_value(1, queries, keys, 1, head_dim, dtype, device)
    q = 1 + q * 0.01
    for large in (0, 700, keys - 1):
        score = torch.zeros(keys, device=device)
        score[large] = gap
        check_attention(kernel, q, scored(k * 0.01, score, dtype), v + 1)


@every_head_dim
def test_large_float16_values(kernel, device, head_dim):
    """Averages of float16's largest value do not overflow."""
    largest = torch.finfo(torch.float16).max
    q, k, v = query_key_value(2, 65, 300, 2, head_dim, torch.float16, device)
    v.fill_(largest)
    v[1] = -largest
    out = kernel.attention(q, k, v)
    torch.testing.assert_close(out.double(), v[:, :65].double(), rtol=2e-3, atol=0)


@pairwise(kind=attention_inputs.INPUTS, head_dim=HEAD_DIMS, return_lse=[False, True])
def test_scores_as_models_have_them(kernel, device, kind, head_dim, return_lse):
    """Peaked rows, tokens in clusters, a sink, scores that rise: many tiles of keys."""
    inputs = attention_inputs.INPUTS[kind]((1, 1025, 1500, 2, head_dim), device)
    check_attention(kernel, *inputs, return_lse=return_lse)


def rows_with_peaks(queries, keys, head_dim, highest, device):
    """Each row has a peak of random height (in nats) in each tile of 128 keys."""
    tiles = -(-keys // 128)
    q = torch.zeros(1, queries, 1, head_dim, device=device)
    k = torch.randn(1, keys, 1, head_dim, device=device) * 0.1
    q[0, :, 0, :tiles] = torch.rand(queries, tiles, device=device) * highest
    places = torch.randint(128, (tiles,), device=device) + 128 * torch.arange(tiles, device=device)
    for tile, place in enumerate(places.clamp(max=keys - 1).tolist()):
        k[0, place, 0, :tiles] = 0
        k[0, place, 0, tile] = math.sqrt(head_dim)
    v = torch.randn(1, keys, 1, head_dim, device=device)
    return [t.to(torch.bfloat16) for t in (q, k, v)]


@pytest.mark.slow
@pairwise(highest=[10, 25, 60, 200, 1000], keys=[300, 1500, 4000], head_dim=HEAD_DIMS)
def test_rows_that_rise_at_different_tiles(kernel, device, keys, highest, head_dim):
    """Neighbouring rows are rescaled at different times, some beyond float32's range."""
    check_attention(kernel, *rows_with_peaks(1100, keys, head_dim, highest, device))


def rescaled_and_recomputed_rows(head_dim, device):
    """Peaked rows, then values beyond float16, whose tiles are computed twice."""
    yield rows_with_peaks(1025, 600, head_dim, 60, device)
    q, k, v = query_key_value(1, 1025, 300, 3, head_dim, torch.bfloat16, device)
    v[:, :, 0] *= 1e-6
    v[:, 1, 1] *= 1e5
    yield q, k, v


@pytest.mark.sanitize
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("head_dim", [40, *HEAD_DIMS, 72, 96, 112])
def test_rescaled_and_recomputed_rows(kernel, device, head_dim, return_lse):
    for inputs in rescaled_and_recomputed_rows(head_dim, device):
        check_attention(kernel, *inputs, contract=False, return_lse=return_lse)


@pytest.mark.parametrize("half", [0, 1])
@every_head_dim
def test_rise_within_a_tile(kernel, device, half, head_dim):
    """Only keys in one half of a tile exceed all earlier ones, by 12 to 80 nats."""
    keys = 1024
    q, k, v = query_key_value(1, 1025, keys, 1, head_dim, torch.bfloat16, device)
    score = torch.zeros(keys, device=device)
    for tile, height in enumerate((0, 12, 26, 40, 80, 80.5, 81, 160)):
        score[128 * tile + 64 * half + 17] = height
    q = 1 + q * 0.01
    check_attention(kernel, q, scored(k * 0.01, score), v)


@pytest.mark.slow
@pairwise(gap=[13.5, 14.5, 15.2, 16.5], large=[0, 8063], head_dim=HEAD_DIMS)
def test_thousands_of_keys_far_below_one(kernel, device, large, gap, head_dim):
    """Probabilities around float16's smallest number, with a sum of up to 1% of the row."""
    keys = 8064
    q, k, v = query_key_value(1, 1025, keys, 1, head_dim, torch.bfloat16, device)
    score = torch.zeros(keys, device=device)
    score[large] = gap
    q = 1 + q * 0.001
    check_attention(kernel, q, scored(k * 0, score), v * 0.1 + 1)


# Tensor, index and value to set.
NONFINITE = {
    "nan_in_a_key": [("k", (0, 100, 1, 5), math.nan)],
    "nan_in_the_last_key": [("k", (0, -1, 1, 63), math.nan)],
    "nan_in_a_query": [("q", (1, 69, 0, 0), math.nan)],
    "infinity_in_a_query": [("q", (1, 3, 0, 0), math.inf)],
    "infinity_in_a_key": [("k", (0, 100, 1, 5), math.inf)],
    # For positive queries; another key's value is NaN.
    "score_of_minus_infinity": [("k", (0, 100, 1, 5), -math.inf), ("v", (1, 3), math.nan)],
    "nan_in_a_value": [("v", (0, 100, 1, 5), math.nan)],
    "infinity_in_a_value": [("v", (0, 100, 1, 5), math.inf), ("v", (1, 0, 0, 7), -math.inf)],
    "both_infinities_in_values": [("v", (0, 100, 1, 5), math.inf), ("v", (0, 0, 1, 5), -math.inf)],
}


@pairwise(change=NONFINITE, queries=FEW_AND_MANY, head_dim=HEAD_DIMS, dtype=HALVES)
def test_nonfinite_values(kernel, device, queries, change, head_dim, dtype):
    q, k, v = query_key_value(2, queries, 300, 2, head_dim, dtype, device)
    if change == "score_of_minus_infinity":
        q.abs_()
    for name, index, value in NONFINITE[change]:
        {"q": q, "k": k, "v": v}[name][index] = value
    check_nonfinite(kernel, "attention", q, k, v, slack=torch.finfo(dtype).eps)
    _, lse = kernel.attention(q, k, v, return_lse=True)
    _, expected = references.attention(q, k, v, return_lse=True)
    expected = expected.masked_fill(expected == math.inf, math.nan)  # of a score of infinity
    torch.testing.assert_close(lse.double(), expected, rtol=4e-6, atol=4e-6, equal_nan=True)


@pairwise(value=[math.nan, math.inf, "any NaN"], bias_dtype=BIAS_DTYPES, dtype=HALVES)
def test_nonfinite_biases(kernel, device, value, bias_dtype, dtype):
    """The lowest bits of a float32 NaN have no meaning."""
    q, k, v = query_key_value(3, 70, 300, 2, 64, dtype, device)
    bias = normal(3, 300, dtype=bias_dtype or dtype, device=device)
    bias[2, 0] = -math.inf
    bias[1, 100] = value if value != "any NaN" else math.nan
    if value == "any NaN" and bias_dtype:
        bits = bias.view(torch.int32)
        bits[0, 100], bits[1, 299] = 0x7FC000FF, 0x7FFFFFFF
    slack = torch.finfo(dtype).eps
    check_nonfinite(kernel, "attention", q, k, v, key_bias=bias, slack=slack)


# --------------------------------------------------------------------------------------------------
# Logarithms of the sums of the exponentials


@pairwise(
    size=[(1, 1), (70, 7), (65, 128), (200, 256), (65, 300), (1025, 257), (1025, 600)],
    head_dim=[*HEAD_DIMS, 72],
    dtype=HALVES,
    layout=WRITABLE_LAYOUTS,
    heads=[(2, 2), (4, 2), (3, 1)],
    masked=["plain", "bias", "lengths", "both"],
    extras=["", *EXTRAS],
    is_flat=[False, True],
)
def test_lse(kernel, device, size, head_dim, dtype, layout, heads, masked, extras, is_flat):
    queries, keys = size
    how = {"key_heads": heads[1], "layout": layout}
    q, k, v = query_key_value(3, queries, keys, heads[0], head_dim, dtype, device, **how)
    options = gate_and_addend(extras, q) | masks(masked, k, v, [keys, keys // 3, 0], dtype)
    if "key_bias" in options:
        options["key_bias"][1] = -math.inf
    if is_flat:
        (q, k, v), options = in_one([q, k, v], options)
    out, lse = check_attention(kernel, q, k, v, return_lse=True, **options)
    assert lse.dtype == torch.float32 and lse.shape == (3, queries, heads[0])
    masked_entries = {"plain": [], "bias": [1], "lengths": [2], "both": [1, 2]}[masked]
    for entry in masked_entries:
        assert lse[entry].isneginf().all()
        if "addend" not in options:
            assert not out[entry].any()


@pairwise(
    queries=FEW_AND_MANY,
    split=[(300, 300), (100, 500), (0, 600)],
    masked=["plain", "bias", "lengths"],
    head_dim=[*HEAD_DIMS, 72],
    dtype=HALVES,
)
def test_parts_of_the_keys_are_merged_by_lse(
    kernel, device, queries, split, masked, head_dim, dtype
):
    """As in attention whose keys are spread over several GPUs. One batch entry has keys in one part only."""
    heads, count = 4, sum(split)
    q, k, v = query_key_value(2, queries, count, heads, head_dim, dtype, device, key_heads=2)
    bias = normal(2, count, dtype=torch.float32, device=device) if masked == "bias" else None
    lengths = [count, split[0] // 2] if masked == "lengths" else [count, count]
    outs, lses, first = [], [], 0
    for keys in split:
        part = slice(first, first + keys)
        options = {"key_bias": None if bias is None else bias[:, part]}
        if masked == "lengths":
            options["key_lengths"] = key_lengths([length - first for length in lengths], device)
        out, lse = kernel.attention(q, k[:, part], v[:, part], return_lse=True, **options)
        outs.append(out.float())
        lses.append(lse)
        first += keys
    lse = torch.stack(lses).logsumexp(0)
    weights = (torch.stack(lses) - lse.masked_fill(lse == -math.inf, 0)).exp()
    merged = (torch.stack(outs) * weights[..., None]).sum(0).to(dtype)
    options = {"key_bias": bias}
    if masked == "lengths":
        options["key_lengths"] = key_lengths(lengths, device)
    expected, expected_lse = references.attention(q, k, v, return_lse=True, **options)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=4e-6, atol=4e-6)
    # Each part is rounded, and then their sum.
    bound = references.attention(q, k, v.abs(), **options)
    slack = 2 * torch.finfo(dtype).eps * bound + float16_slack(q, k, v, options) + 1e-6
    assert_rounded_once(merged, expected, slack)


def test_lse_excludes_out(kernel, device):
    q, k, v = query_key_value(1, 5, 7, 2, 64, torch.bfloat16, device)
    with pytest.raises(
        ValueError, match="^attention: out must be None with return_lse, got Tensor$"
    ):
        kernel.attention(q, k, v, out=torch.empty_like(q), return_lse=True)


# --------------------------------------------------------------------------------------------------
# Gradients


@pairwise(
    masked=["plain", "bias", "lengths", "both"],
    heads=[(2, 2), (4, 2)],
    which=["lse", "both"],
    dtype=HALVES,
)
def test_gradients_of_lse(kernel, device, masked, heads, which, dtype):
    q, k, v = query_key_value(3, 6, 9, heads[0], 64, dtype, device, key_heads=heads[1])
    options = masks(masked, k, v, [9, 5, 0], torch.float32)
    leaves = {"q": q, "k": k, "v": v}
    if "key_bias" in options:
        leaves["key_bias"] = options.pop("key_bias")
        leaves["key_bias"][1] = -math.inf
    has_keys = torch.tensor([True, "key_bias" not in leaves, not options], device=device)
    of_out, seed = total_of(q), normal(*q.shape[:3], dtype=dtype, device=device)

    def total(results):
        out, lse = results
        # A query without keys has no gradient.
        of_lse = (lse * seed.to(lse.dtype))[has_keys].sum()
        return of_lse + of_out(out) if which == "both" else of_lse

    check_gradients(kernel, leaves, {**options, "return_lse": True}, total)


@pairwise(bias_dtype=BIAS_DTYPES, dtype=HALVES)
def test_gradients_with_padding(kernel, device, bias_dtype, dtype):
    """Padding keys, a batch entry without keys, and one whose keys all have a bias of -inf."""
    lengths = [5, 0, 7, 9]
    q, k, v = query_key_value(4, 6, 9, 4, 64, dtype, device, key_heads=2)
    bias = normal(4, 9, dtype=bias_dtype or dtype, device=device)
    bias[2] = -math.inf
    bias[3, 4] = -math.inf
    pad_with(math.nan, lengths, k, v)
    leaves = {"q": q, "k": k, "v": v, "key_bias": bias}
    check_gradients(kernel, leaves, {"key_lengths": key_lengths(lengths, device)}, total_of(q))


@pytest.mark.parametrize("leaf", ["q", "k", "v"])
def test_gradients_without_keys(kernel, device, leaf):
    q, k, v = query_key_value(2, 5, 0, 2, 64, torch.bfloat16, device)
    arguments = {"q": q, "k": k, "v": v}
    arguments[leaf].requires_grad_()
    out = kernel.attention(**arguments)
    assert out.shape == q.shape and not out.any()
    (gradient,) = torch.autograd.grad(out.sum(), [arguments[leaf]])
    assert not gradient.any()


# --------------------------------------------------------------------------------------------------
# Contracts


@needs_cuda
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize(
    "shape, std, launches",
    [
        ((2, 8064, 128, 32, 64), 1, 10_000),
        ((2, 8064, 256, 32, 128), 1, 3_000),
        ((2, 2688, 2688, 32, 64), 1, 1_000),
        ((2, 2688, 2688, 16, 128), 1, 1_000),
        ((2, 2688, 2688, 32, 64), 8, 1_000),
        ((2, 2688, 2688, 16, 128), 8, 1_000),
    ],
)
def test_thousands_of_launches_give_the_same_bits(kernel, device, shape, std, launches, bias):
    """Occasionally a copy takes far longer than the next ones. Some rows of peaked scores are rescaled."""
    batch, queries, keys, heads, head_dim = shape
    q, k, v = query_key_value(batch, queries, keys, heads, head_dim, torch.bfloat16, device)
    q *= std
    key_bias = normal(batch, keys, dtype=torch.float32, device=device) if bias else None
    first = kernel.attention(q, k, v, key_bias=key_bias)
    differ = torch.zeros((), dtype=torch.bool, device=device)
    for _ in range(launches // 100):
        for _ in range(100):
            out = kernel.attention(q, k, v, key_bias=key_bias)
        differ |= (out != first).any()
    assert not differ


@needs_cuda
@every_head_dim
def test_tensors_written_right_before_and_after(kernel, device, head_dim):
    """Copies of a launch stay in order with earlier and later kernels."""
    shape = (2, 2688, 2688, 8, head_dim)
    drawn = [query_key_value(*shape, torch.bfloat16, device) for _ in range(3)]
    expected = [kernel.attention(*tensors) for tensors in drawn]
    torch.cuda.synchronize()
    q, k, v = (torch.empty_like(t) for t in drawn[0])
    norm_weight = torch.ones(head_dim, dtype=torch.bfloat16, device=device)
    differ = torch.zeros((), dtype=torch.bool, device=device)
    for index in range(300):
        for target, source in zip((q, k, v), drawn[index % 3], strict=True):
            target.copy_(source)
        out = kernel.attention(q, k, v)
        # With programmatic dependent launch a kernel starts while the previous one ends.
        for target in (q, k, v):
            kernel.gated_residual(target, kernel.rms_norm(target, norm_weight))
            target.fill_(math.nan)
        differ |= (out != expected[index % 3]).any()
    assert not differ


@pytest.mark.sanitize
@pytest.mark.parametrize(("shape", "head_dim", "layout", "dtype"), SMOKE, ids=str)
def test_smoke(kernel, device, shape, head_dim, layout, dtype):
    batch, queries, keys, heads, key_heads = shape
    size, how = (batch, queries, keys, heads, head_dim), {"key_heads": key_heads, "layout": layout}
    q, k, v = query_key_value(*size, dtype, device, **how)
    check_attention(kernel, q, k, v, contract=False)
    if keys > 1:
        lengths = [keys, 70][:batch]
        bias = normal(batch, keys, dtype=torch.float32, device=device)
        options = {"key_bias": bias, "key_lengths": key_lengths(lengths, device)}
        options |= gate_and_addend("gate+addend", q)
        check_attention(kernel, q, k, v, contract=False, **options)
