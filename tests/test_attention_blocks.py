"""attention with KeyBlocks: each query attends to listed key blocks, within its bounds."""

import math

import pytest
import torch

import random_key_blocks
import references
from checks import assert_rounded_once, assert_same_bits, poison_memory
from inputs import LAYOUTS, SMOKE, pairwise
from random_key_blocks import (
    BLOCK_SIZES,
    BOUNDS,
    LISTS,
    in_blocks,
    key_blocks,
    key_bounds,
    list_shape,
)
from test_attention import (
    EXTRAS,
    HALVES,
    HEAD_DIMS,
    check_attention,
    check_gradients,
    gate_and_addend,
    in_one,
    key_lengths,
    masks,
    needs_cuda,
    pad_with,
    query_key_value,
    scored,
    total_of,
)

SOME_HEAD_DIMS = [8, 64, 72, 128]
LEADING = {
    "one": lambda batch, heads: (1, 1),
    "of each head": lambda batch, heads: (1, heads),
    "of each entry": lambda batch, heads: (batch, 1),
    "of each": lambda batch, heads: (batch, heads),
}
# Queries and keys, around multiples of blocks and far from them.
SIZES = [(1, 1), (65, 64), (128, 128), (70, 300), (200, 257), (130, 600), (300, 129)]
INT32_MAX = 2**31 - 1


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def same_lists(shape, blocks, device):
    """Counts and indices of lists that all are the same."""
    counts = torch.full(shape[:-1], len(blocks), dtype=torch.int32, device=device)
    return counts, int32(blocks, device).expand(*shape[:-1], len(blocks)).contiguous()


# --------------------------------------------------------------------------------------------------
# Lists and bounds


@pairwise(
    lists=["bounded", "full", "both"],
    leading=LEADING,
    block_size=BLOCK_SIZES,
    size=SIZES,
    bounds=[None, "random"],
    heads=[(2, 2), (4, 2), (3, 1)],
    head_dim=SOME_HEAD_DIMS,
    dtype=HALVES,
)
def test_lists(kernel, device, lists, leading, block_size, size, bounds, heads, head_dim, dtype):
    q, k, v = query_key_value(2, *size, heads[0], head_dim, dtype, device, key_heads=heads[1])
    how = {"leading": LEADING[leading](2, heads[0])}
    blocks = key_blocks(kernel, lists, bounds, size, block_size, device, **how)
    check_attention(kernel, q, k, v, blocks=blocks, return_lse=True)


@pytest.mark.drawn(times=2)
@pairwise(
    bounds=BOUNDS,
    lists=LISTS,
    leading=LEADING,
    size=[*SIZES, (1, 300), (300, 1)],
    block_size=BLOCK_SIZES,
    return_lse=[False, True],
    head_dim=HEAD_DIMS,
    dtype=HALVES,
)
def test_bounds(
    kernel, device, bounds, lists, leading, size, block_size, return_lse, head_dim, dtype
):
    q, k, v = query_key_value(2, *size, 2, head_dim, dtype, device)
    how = {"leading": (1, 2), "bounds_leading": LEADING[leading](2, 2)}
    blocks = key_blocks(kernel, lists, bounds, size, block_size, device, **how)
    check_attention(kernel, q, k, v, blocks=blocks, return_lse=return_lse)


# On a GPU many queries take another kernel, for bfloat16 without a bias with float16 probabilities.
@pytest.mark.drawn(times=0, period=12)
@pairwise(
    size=[(1025, 257), (1025, 600), (1150, 1000)],
    lists=LISTS,
    bounds=[None, "random", "causal", "frames", "five keys", "window", "late rows"],
    block_size=BLOCK_SIZES,
    masked=["plain", "bias", "lengths"],
    layout=["contiguous", "unbind", "misaligned", "odd_rows"],
    head_dim=[64, 128, 72],
    dtype=HALVES,
)
def test_many_queries(
    kernel, device, size, lists, bounds, block_size, masked, layout, head_dim, dtype
):
    queries, keys = size
    how = {"key_heads": 1, "layout": layout}
    q, k, v = query_key_value(1, queries, keys, 2, head_dim, dtype, device, **how)
    options = masks(masked, k, v, [keys - 30], dtype)
    how = {"leading": (1, 2), "bounds_leading": (1, 1)}
    blocks = key_blocks(kernel, lists, bounds, size, block_size, device, **how)
    check_attention(kernel, q, k, v, blocks=blocks, return_lse=True, **options)


@pairwise(lists=["bounded", "full", "both"], block_size=BLOCK_SIZES, queries=[70, 1025])
def test_empty_lists(kernel, device, lists, block_size, queries):
    """Zeros, and -inf for the logarithm. The second head has one block."""
    size, dtype = (queries, 300), torch.bfloat16
    q, k, v = query_key_value(1, *size, 2, 64, dtype, device)
    blocks = key_blocks(kernel, lists, None, size, block_size, device, leading=(1, 2))
    for counts in (blocks.kv_num_blocks, blocks.full_kv_num_blocks):
        if counts is not None:
            counts[:, 0], counts[:, 1] = 0, 1
    poison_memory(q, torch.empty(q.shape[:3], device=device))
    out, lse = check_attention(kernel, q, k, v, blocks=blocks, return_lse=True, contract=False)
    assert not out[:, :, 0].any() and lse[:, :, 0].isneginf().all()
    assert out[:, :, 1].any() and lse[:, :, 1].isfinite().all()


@pytest.mark.parametrize("has_room", [False, True], ids=["no columns", "columns"])
def test_lists_without_columns_or_keys(kernel, device, has_room):
    for keys in (0, 100):
        q, k, v = query_key_value(1, 70, keys, 2, 64, torch.bfloat16, device)
        counts = torch.full((1, 1, 1), 5, dtype=torch.int32, device=device)
        indices = int32([[[[0, 7, 1] if has_room else []]]], device)
        blocks = kernel.KeyBlocks(counts, indices)
        out, lse = check_attention(kernel, q, k, v, blocks=blocks, return_lse=True)
        has_keys = has_room and keys > 0
        assert out.any() == has_keys and lse.isneginf().all() != has_keys


ORDERS = {
    "ascending": lambda n: [*range(n)],
    "descending": lambda n: [*range(n)][::-1],
    "duplicates": lambda n: [*range(n), *range(n)],
    "outside": lambda n: [n, -1, *range(n), INT32_MAX, -(2**31), n + 1],
}


@pytest.mark.drawn(times=0, period=6)
@pairwise(
    order=ORDERS,
    list=["bounded", "full", "both", "bounds", "nothing"],
    block_size=BLOCK_SIZES,
    size=[(1, 1), (70, 300), (200, 256), (1025, 300)],
    head_dim=HEAD_DIMS,
    dtype=HALVES,
)
def test_all_blocks(kernel, device, order, list, block_size, size, head_dim, dtype):
    """As without lists, also if all keys are within the bounds."""
    q, k, v = query_key_value(1, *size, 2, head_dim, dtype, device)
    shape = list_shape((1, 1), *size, block_size)
    lists = same_lists(shape, ORDERS[order](shape[-1]), device)
    none, bounds = (None, None), None
    if list in ("bounded", "bounds"):
        bounds = key_bounds("no bound", (1, 1), *size, device)
    bounded = lists if list in ("bounded", "both") else none
    full = lists if list in ("full", "both") else none
    blocks = kernel.KeyBlocks(*bounded, *full, block_size, bounds)
    results = check_attention(kernel, q, k, v, blocks=blocks, return_lse=True)
    dense = kernel.attention(q, k, v, return_lse=True)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(results[0], dense[0], rtol=2 * eps, atol=eps)
    torch.testing.assert_close(results[1], dense[1], rtol=4e-6, atol=4e-6)


@pairwise(block_size=BLOCK_SIZES, size=[(200, 300), (130, 129)], lists=["bounded", "full", "both"])
def test_values_without_effect(kernel, device, block_size, size, lists):
    """Indices that are no block, values beyond a count, duplicates, and their order. Counts are clamped."""
    q, k, v = query_key_value(2, *size, 2, 64, torch.bfloat16, device)
    shape = list_shape((2, 2), *size, block_size)
    blocks = key_blocks(kernel, lists, "window", size, block_size, device, leading=(2, 2))
    expected = kernel.attention(q, k, v, blocks=blocks, return_lse=True)
    fields = {}
    for name in ("", "full_"):
        counts, indices = (getattr(blocks, name + f) for f in ("kv_num_blocks", "kv_indices"))
        if counts is None:
            continue
        place = torch.arange(shape[-1], device=device)
        rest = torch.randint(-9, 0, shape, dtype=torch.int32).to(device) * 1000
        rest[..., ::2] = shape[-1]
        of_list = torch.where(place < counts[..., None], indices, rest)
        # Twice each, among values that are no block; then a count beyond the columns, or below 0.
        longer = torch.stack([of_list, rest, of_list], -1).flatten(-2)
        longer_counts = torch.full_like(counts, INT32_MAX)
        longer_counts[counts == 0] = -5
        fields |= {f"{name}kv_num_blocks": longer_counts, f"{name}kv_indices": longer.contiguous()}
    changed = blocks._replace(**fields)
    assert_same_bits(kernel.attention(q, k, v, blocks=changed, return_lse=True), expected)
    # Values after a list's count.
    for name in fields:
        if name.endswith("indices"):
            counts = getattr(blocks, name.replace("kv_indices", "kv_num_blocks"))
            columns = torch.arange(shape[-1], device=device)
            others = getattr(blocks, name).masked_fill(columns >= counts[..., None], 0)
            fields[name] = others
        else:
            fields[name] = getattr(blocks, name)
    changed = blocks._replace(**fields)
    assert_same_bits(kernel.attention(q, k, v, blocks=changed, return_lse=True), expected)


@pytest.mark.parametrize("block_size", BLOCK_SIZES, ids=str)
@pytest.mark.parametrize("lists", LISTS)
def test_is_attended(kernel, device, lists, block_size):
    queries, keys = size = (150, 270)
    leading = {"leading": (2, 1), "bounds_leading": (1, 3)}
    blocks = key_blocks(kernel, lists, "random", size, block_size, device, **leading)
    found = blocks.is_attended(queries, keys).cpu()
    entries, heads = 1 if lists == "none" else 2, 1 if lists == "full" else 3
    assert found.shape == (entries, heads, queries, keys)
    found, bounds = found.expand(2, 3, -1, -1).tolist(), blocks.key_bounds.tolist()
    lists_of = {
        name: (counts.tolist(), indices.tolist())
        for name, counts, indices in (
            ("bounded", blocks.kv_num_blocks, blocks.kv_indices),
            ("full", blocks.full_kv_num_blocks, blocks.full_kv_indices),
        )
        if counts is not None
    }

    def is_listed(name, b, i, key):
        if name not in lists_of:
            return lists == "none" and name == "bounded"
        counts, indices = lists_of[name]
        row = i // block_size[0]
        return key // block_size[1] in indices[b][0][row][: counts[b][0][row]]

    for b, h, i, key in (
        (b, h, i, j)
        for b in (0, 1)
        for h in (0, 2)
        for i in range(0, 150, 7)
        for j in range(0, keys, 3)
    ):
        first, end = bounds[0][h][i]
        expected = is_listed("full", b, i, key)
        expected = expected or (is_listed("bounded", b, i, key) and first <= key < end)
        assert found[b][h][i][key] == expected, (b, h, i, key)


def test_is_attended_without_lists_or_bounds(kernel):
    assert kernel.KeyBlocks().is_attended(3, 5).all()
    assert kernel.KeyBlocks().is_attended(3, 5).shape == (1, 1, 3, 5)


# --------------------------------------------------------------------------------------------------
# With the other arguments


@pairwise(
    masked=["plain", "bias", "lengths", "both"],
    extras=["", *EXTRAS],
    is_flat=[False, True],
    return_lse=[False, True],
    layout=LAYOUTS,
    lists=LISTS,
    bounds=[None, "random", "frames"],
    heads=[(2, 2), (4, 2), (3, 1)],
    head_dim=[*SOME_HEAD_DIMS, 40, 96],
    dtype=HALVES,
)
def test_options(
    kernel,
    device,
    masked,
    extras,
    is_flat,
    return_lse,
    layout,
    lists,
    bounds,
    heads,
    head_dim,
    dtype,
):
    size = (150, 280)
    how = {"key_heads": heads[1], "layout": layout}
    q, k, v = query_key_value(2, *size, heads[0], head_dim, dtype, device, **how)
    if layout == "expanded":  # padding cannot be written to it
        k, v = k.contiguous(), v.contiguous()
    options = gate_and_addend(extras, q) | masks(masked, k, v, [280, 111], dtype)
    if "key_bias" in options:
        options["key_bias"][0, :200] = -math.inf
    how = {"leading": (2, heads[0]), "bounds_leading": (1, heads[0])}
    options["blocks"] = key_blocks(kernel, lists, bounds, size, (64, 64), device, **how)
    if is_flat:
        (q, k, v), options = in_one([q, k, v], options)
    check_attention(kernel, q, k, v, return_lse=return_lse, scale=0.2, **options)


@pairwise(
    length=[0, 1, 63, 64, 65, 100, 128, 129, 200, 299, 300, 301, INT32_MAX, -1],
    padding=[math.nan, math.inf],
    lists=LISTS,
    bounds=[None, "window", "late rows"],
    block_size=BLOCK_SIZES,
    head_dim=HEAD_DIMS,
    dtype=HALVES,
)
def test_key_lengths(kernel, device, length, padding, lists, bounds, block_size, head_dim, dtype):
    """Also within a listed block, and before all of them."""
    size, lengths = (100, 300), [300, length]
    q, k, v = query_key_value(2, *size, 2, head_dim, dtype, device)
    pad_with(padding, lengths, k, v)
    blocks = key_blocks(kernel, lists, bounds, size, block_size, device, leading=(2, 1))
    options = {"key_lengths": key_lengths(lengths, device), "blocks": blocks}
    _, lse = check_attention(kernel, q, k, v, return_lse=True, **options)
    if length <= 0:
        assert lse[1].isneginf().all()


@pytest.mark.drawn(times=0, period=6)
@pairwise(
    lists=["bounded", "full"],
    block_size=BLOCK_SIZES,
    queries=[130, 1025],
    layout=["contiguous", "misaligned"],
    head_dim=[64, 128, 72],
)
def test_keys_that_are_not_listed_are_not_read(
    kernel, device, lists, block_size, queries, layout, head_dim
):
    """They may be NaN."""
    size, dtype = (queries, 600), torch.bfloat16
    q, k, v = query_key_value(2, *size, 2, head_dim, dtype, device, layout=layout)
    last = in_blocks(600, block_size[1]) - 1
    blocks = same_lists(list_shape((1, 1), *size, block_size), [last, 1, 2], device)
    blocks = blocks if lists == "bounded" else (None, None, *blocks)
    unlisted = [slice(block_size[1] * i, block_size[1] * (i + 1)) for i in (0, *range(3, last))]
    for part in unlisted:
        k[:, part], v[:, part] = math.nan, math.nan
    blocks = kernel.KeyBlocks(*blocks, block_size=block_size)
    check_attention(kernel, q, k, v, blocks=blocks, return_lse=True, contract=False)


@pytest.mark.drawn(times=0, period=5)
@pairwise(
    lists=["bounded", "full"],
    block_size=BLOCK_SIZES,
    queries=[300, 1025],
    layout=["contiguous", "misaligned"],
    head_dim=[64, 128, 72],
)
def test_keys_that_only_other_queries_read(
    kernel, device, lists, block_size, queries, layout, head_dim
):
    """NaN in a key block changes only queries whose lists have it, here every second query block."""
    size, dtype = (queries, 600), torch.bfloat16
    q, k, v = query_key_value(1, *size, 2, head_dim, dtype, device, layout=layout)
    shape = list_shape((1, 1), *size, block_size)
    counts, indices = same_lists(shape, [1, 0, 3, 2], device)
    counts[:, :, ::2] = 3
    fields = (counts, indices) if lists == "bounded" else (None, None, counts, indices)
    blocks = kernel.KeyBlocks(*fields, block_size=block_size)
    of_block = slice(2 * block_size[1], 3 * block_size[1])
    k[:, of_block], v[:, of_block] = 0, 0
    expected = references.attention(q, k, v, blocks=blocks)
    k[:, of_block], v[:, of_block] = math.nan, math.nan
    out = kernel.attention(q, k, v, blocks=blocks)
    reads = torch.arange(queries, device=device) // block_size[0] % 2 == 1
    assert out[:, reads].isnan().all()
    slack = torch.finfo(dtype).eps
    assert_rounded_once(out[:, ~reads], expected[:, ~reads], slack)


# --------------------------------------------------------------------------------------------------
# Values


@pytest.mark.drawn(times=0, period=6)
@pairwise(
    order=["rising", "falling", "peak", "valley"],
    steepness=[0.1, 1.0],
    bounds=["late rows", "last keys", "causal", "random"],
    lists=LISTS,
    block_size=BLOCK_SIZES,
    queries=[130, 1025],
    head_dim=HEAD_DIMS,
    dtype=HALVES,
)
def test_order_of_scores(
    kernel, device, order, steepness, bounds, lists, block_size, queries, head_dim, dtype
):
    """A running maximum that changes with every key or never, also for rows whose first tiles are masked."""
    keys = 577
    q, k, v = query_key_value(1, queries, keys, 2, head_dim, dtype, device)
    q = 1 + q * 0.01
    score = torch.linspace(-0.5, 0.5, keys, device=device) * keys * steepness
    orders = {"falling": score.flip(0), "peak": -score.abs(), "valley": score.abs()}
    k = scored(k * 0.01, orders.get(order, score), dtype)
    size, leading = (queries, keys), {"leading": (1, 2)}
    blocks = key_blocks(kernel, lists, bounds, size, block_size, device, **leading)
    check_attention(kernel, q, k, v, blocks=blocks, return_lse=True)


@pytest.mark.drawn(times=0, period=4)
@pairwise(
    std=[1e-3, 5.0, 30.0],
    bounds=[None, "late rows"],
    lists=["none", "both"],
    queries=[130, 1025],
    head_dim=HEAD_DIMS,
    dtype=HALVES,
)
def test_range_of_scores(kernel, device, std, bounds, lists, queries, head_dim, dtype):
    size = (queries, 600)
    q, k, v = query_key_value(1, *size, 2, head_dim, dtype, device)
    blocks = key_blocks(kernel, lists, bounds, size, (128, 64), device, leading=(1, 2))
    check_attention(kernel, q * std, k, v, blocks=blocks, return_lse=True)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_masked_keys_with_the_largest_scores(kernel, device, head_dim):
    """Scores outside of the bounds do not set the running maximum, of which the rest would vanish."""
    size, dtype = (1025, 600), torch.bfloat16
    q, k, v = query_key_value(1, *size, 1, head_dim, dtype, device)
    q = 1 + q * 0.01
    for first in (64, 500):
        score = torch.zeros(600, device=device)
        score[first : first + 70] = 300
        large = scored(k * 0.01, score)
        bounds = torch.tensor([0, 600], dtype=torch.int32, device=device).repeat(1, 1, 1025, 1)
        bounds[:, :, ::2] = int32([first + 70, 600], device)
        bounds[:, :, 1::3] = int32([0, first], device)
        blocks = kernel.KeyBlocks(key_bounds=bounds)
        check_attention(kernel, q, large, v, blocks=blocks, return_lse=True)


@pytest.mark.drawn(times=0, period=3)
@pairwise(factor=[1e-6, 1e5], lists=["none", "both"], head_dim=HEAD_DIMS)
def test_values_beyond_float16(kernel, device, factor, lists, head_dim):
    size = (1025, 600)
    q, k, v = query_key_value(1, *size, 2, head_dim, torch.bfloat16, device)
    v[:, :, 0] *= factor
    blocks = key_blocks(kernel, lists, "frames", size, (128, 64), device, leading=(1, 2))
    check_attention(kernel, q, k, v, blocks=blocks)


# --------------------------------------------------------------------------------------------------
# Gradients


@pairwise(
    lists=LISTS,
    bounds=[None, "causal", "random"],
    masked=["plain", "bias", "lengths"],
    heads=[(2, 2), (4, 2)],
    return_lse=[False, True],
    is_flat=[False, True],
)
def test_gradients(kernel, device, lists, bounds, masked, heads, return_lse, is_flat):
    size = (70, 140)
    q, k, v = query_key_value(2, *size, heads[0], 24, torch.bfloat16, device, key_heads=heads[1])
    options = masks(masked, k, v, [140, 100], torch.float32) | gate_and_addend("gate+addend", q)
    how = {"leading": (2, heads[0]), "bounds_leading": (1, 1)}
    blocks = key_blocks(kernel, lists, bounds, size, (64, 64), device, **how)
    options["blocks"] = blocks
    if is_flat:
        (q, k, v), options = in_one([q, k, v], options)
    leaves = {"q": q, "k": k, "v": v}
    for name in ("gate", "addend", "key_bias"):
        if name in options:
            leaves[name] = options.pop(name)
    of_out, has_keys = total_of(q), None
    if return_lse:
        options["return_lse"] = True
        lse = kernel.attention(**leaves, **options)[1]
        has_keys, seed = lse.isfinite(), torch.randn_like(lse)

    def total(results):
        if has_keys is None:
            return of_out(results)
        out, lse = results
        # A query without keys has no gradient.
        return of_out(out) + (lse * seed.to(lse.dtype))[has_keys].sum()

    check_gradients(kernel, leaves, options, total)


def test_keys_that_are_not_listed_have_no_gradient(kernel, device):
    """Also if they are NaN, as in memory that is not written yet."""
    size = (70, 200)
    q, k, v = query_key_value(1, *size, 2, 64, torch.bfloat16, device)
    counts, indices = same_lists(list_shape((1, 1), *size, (64, 64)), [1, 3], device)
    k[:, :64], v[:, :64], v[:, 128:192] = math.nan, math.nan, math.nan
    leaves = [t.requires_grad_() for t in (q, k, v)]
    blocks = kernel.KeyBlocks(counts, indices, block_size=(64, 64))
    out = kernel.attention(*leaves, blocks=blocks)
    gradients = torch.autograd.grad(out.float().square().sum(), leaves)
    assert all(g.isfinite().all() and g.any() for g in gradients)
    for gradient in gradients[1:]:
        assert not gradient[:, :64].any() and not gradient[:, 128:192].any()


# --------------------------------------------------------------------------------------------------
# Contracts


@pytest.mark.parametrize("return_lse", [False, True])
def test_blocks_exclude_out(kernel, device, return_lse):
    q, k, v = query_key_value(1, 5, 7, 2, 64, torch.bfloat16, device)
    option = "return_lse" if return_lse else "blocks"
    options = {"blocks": kernel.KeyBlocks(), "return_lse": return_lse}
    with pytest.raises(
        ValueError, match=f"^attention: out must be None with {option}, got Tensor$"
    ):
        kernel.attention(q, k, v, out=torch.empty_like(q), **options)


@pytest.mark.slow
@pytest.mark.drawn(times=0, period=6)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("lists", ["none", "bounded", "both"])
def test_compiled_for_any_size(kernel, device, lists, requires_grad):
    """One graph for different numbers of blocks."""

    def function(q, k, v, *fields):
        blocks = kernel.KeyBlocks(*fields[:4], (64, 64), fields[4])
        return kernel.attention(q, k, v, blocks=blocks, return_lse=True)

    torch._dynamo.reset()
    backend = "aot_eager" if requires_grad else "eager"
    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=True)
    for size in ((200, 300), (70, 500)):
        tensors = query_key_value(2, *size, 2, 64, torch.bfloat16, device)
        leaves = [t.requires_grad_(requires_grad) for t in tensors]
        blocks = key_blocks(kernel, lists, "causal", size, (64, 64), device, leading=(1, 2))
        arguments = *leaves, *blocks[:4], blocks.key_bounds
        with torch._dynamo.config.patch(error_on_recompile=size[0] == 70):
            results = compiled(*arguments)
        expected = function(*arguments)
        assert_same_bits([t.detach() for t in results], [t.detach() for t in expected])
        if requires_grad:
            gradients = [torch.autograd.grad(r[0].sum(), leaves) for r in (results, expected)]
            for one, other in zip(*gradients, strict=True):
                torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


@pairwise(lists=LISTS, bounds=[None, "random"], queries=[130, 1025], head_dim=HEAD_DIMS)
def test_same_bits(kernel, device, lists, bounds, queries, head_dim):
    """With and without lse, and for lists that are repeated for each entry and head."""
    size = (queries, 300)
    q, k, v = query_key_value(2, *size, 2, head_dim, torch.bfloat16, device)
    blocks = key_blocks(kernel, lists, bounds, size, (64, 128), device)
    results = kernel.attention(q, k, v, blocks=blocks, return_lse=True)
    assert_same_bits(kernel.attention(q, k, v, blocks=blocks, return_lse=True), results)
    assert_same_bits(kernel.attention(q, k, v, blocks=blocks), results[0])
    *fields, block_size, key_bounds = blocks
    fields, (key_bounds,) = (
        [None if t is None else t.expand(2, 2, *t.shape[2:]).contiguous() for t in tensors]
        for tensors in (fields, [key_bounds])
    )
    repeated = kernel.KeyBlocks(*fields, block_size, key_bounds)
    assert_same_bits(kernel.attention(q, k, v, blocks=repeated, return_lse=True), results)


@needs_cuda
@pytest.mark.parametrize("std", [1, 8])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_hundreds_of_launches_give_the_same_bits(kernel, device, head_dim, std):
    """More blocks than multiprocessors, with lists of different lengths."""
    size = (2688, 2688)
    q, k, v = query_key_value(2, *size, 16, head_dim, torch.bfloat16, device)
    q *= std
    how = {"leading": (2, 16), "bounds_leading": (1, 1)}
    blocks = key_blocks(kernel, "both", "frames", size, (64, 64), device, **how)
    # Some logarithms are -infinity, which have no relative error.
    first = check_attention(kernel, q, k, v, blocks=blocks, return_lse=True, contract=False)
    differ = torch.zeros((), dtype=torch.bool, device=device)
    for _ in range(500):
        for one, other in zip(
            kernel.attention(q, k, v, blocks=blocks, return_lse=True), first, strict=True
        ):
            differ |= (one != other).any()
    assert not differ


@pytest.mark.sanitize
@pytest.mark.drawn(times=0, period=3)
@pytest.mark.parametrize(("shape", "head_dim", "layout", "dtype"), SMOKE, ids=str)
def test_smoke(kernel, device, shape, head_dim, layout, dtype):
    batch, queries, keys, heads, key_heads = shape
    size, how = (queries, keys), {"key_heads": key_heads, "layout": layout}
    q, k, v = query_key_value(batch, *size, heads, head_dim, dtype, device, **how)
    for lists, bounds, block_size in (
        ("both", "random", (64, 64)),
        ("none", "frames", (128, 128)),
        ("bounded", None, (128, 64)),
    ):
        how = {"leading": (1, heads), "bounds_leading": (batch, 1)}
        blocks = key_blocks(kernel, lists, bounds, size, block_size, device, **how)
        check_attention(kernel, q, k, v, contract=False, blocks=blocks)


@pytest.mark.drawn(times=0, period=4)
@pytest.mark.parametrize("seed", range(40))
def test_random_calls(kernel, device, seed):
    """``tests/random_key_blocks.py`` tries more."""
    what, fault = random_key_blocks.check(kernel, seed, device)
    assert fault is None, f"{what}: {fault}"
