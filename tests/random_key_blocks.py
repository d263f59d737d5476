"""Lists of key blocks and bounds, and random calls of attention with them against float64.

python tests/random_key_blocks.py [CALLS] [FIRST]
"""

import math
import random
import sys

import torch

from inputs import WRITABLE_LAYOUTS, load_kernel
from test_attention import check_attention, gate_and_addend, in_one, masks, query_key_value

INT32_MAX = 2**31 - 1
BLOCK_SIZES = [(64, 64), (64, 128), (128, 64), (128, 128)]


def in_blocks(length, rows):
    return math.ceil(length / rows)


def list_shape(leading, queries, keys, block_size):
    """Of the lists' indices, which have room for every key block."""
    return *leading, in_blocks(queries, block_size[0]), in_blocks(keys, block_size[1])


def random_lists(shape, device):
    """Counts and indices: random blocks in random order, also none or all of them."""
    counts = torch.randint(shape[-1] + 1, shape[:-1], dtype=torch.int32)
    indices = torch.rand(shape).argsort(-1).int()
    return counts.to(device), indices.to(device)


def around(before, after):
    """A sliding window."""
    return lambda i, keys: (i - before, i + after)


def random_bounds(i, keys):
    """Some are empty, some lie outside of the keys."""
    first, end = torch.randint(-keys // 4 - 1, keys + keys // 4 + 2, (2, *i.shape))
    return first, torch.where(torch.rand(i.shape) < 0.9, end.maximum(first), end)


# The first key and the key after the last one, for queries at the keys i.
BOUNDS = {
    "random": random_bounds,
    "causal": lambda i, keys: (0 * i, i + 1),
    # Causal by frames of 100 tokens, which are no whole number of tiles.
    "frames": lambda i, keys: (0 * i, (i // 100 + 1) * 100),
    "five keys": around(2, 3),
    "window": around(100, 90),
    "last keys": lambda i, keys: (0 * i + max(keys - 70, keys // 2), 0 * i + keys),
    # In a block of queries only some rows have keys in the first tiles.
    "late rows": lambda i, keys: (i % 7 * keys // 8, 0 * i + keys),
    "no bound": lambda i, keys: (0 * i - INT32_MAX - 1, 0 * i + INT32_MAX),
    "every second empty": lambda i, keys: (0 * i + 3, 3 + i % 2 * keys),
    "after the keys": lambda i, keys: (0 * i + keys, 0 * i + keys + 70),
    "empty": lambda i, keys: (0 * i + 7, 0 * i + 7),
}


def key_bounds(kind, leading, queries, keys, device):
    """Different ones for each entry and head of `leading`."""
    entry = torch.arange(math.prod(leading)).reshape(*leading, 1)
    i = torch.arange(queries) * keys // max(queries, 1) + 3 * entry
    bounds = torch.stack(BOUNDS[kind](i, keys), -1)
    return bounds.clamp(-INT32_MAX - 1, INT32_MAX).int().contiguous().to(device)


LISTS = ("none", "bounded", "full", "both")


def key_blocks(
    kernel, lists, bounds, size, block_size, device, *, leading=(1, 1), bounds_leading=(1, 1)
):
    """Random lists, and bounds of a kind or None, for a number of queries and of keys."""
    shape, fields = list_shape(leading, *size, block_size), {}
    for name, of_kind in (("", "bounded"), ("full_", "full")):
        if lists in (of_kind, "both"):
            counts, indices = random_lists(shape, device)
            fields |= {f"{name}kv_num_blocks": counts, f"{name}kv_indices": indices}
    if bounds is not None:
        fields["key_bounds"] = key_bounds(bounds, bounds_leading, *size, device)
    return kernel.KeyBlocks(**fields, block_size=block_size)


# --------------------------------------------------------------------------------------------------
# Random calls


def random_call(kernel, seed, device):
    """Arguments of attention, and what they are."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch, key_heads = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2))
    heads = key_heads * rng.choice((1, 1, 2, 3))
    # Many queries take another kernel on a GPU. On a CPU they take most of the time.
    if rng.random() < (0.5 if device == "cuda" else 0.005):
        queries, keys = rng.randint(1024, 1400), rng.randint(257, 1000)
    else:
        queries, keys = rng.randint(1, 300), rng.randint(1, 400)
    head_dim = rng.choice((8, 64, 64, 128, 128, 8 * rng.randint(1, 16)))
    dtype = rng.choice((torch.bfloat16, torch.bfloat16, torch.float16))
    layout = rng.choice(("contiguous", "contiguous", *WRITABLE_LAYOUTS))
    block_size = rng.choice(BLOCK_SIZES)
    lists, bounds = rng.choice(LISTS), rng.choice((None, *BOUNDS))
    masked = rng.choice(("plain", "plain", "bias", "lengths", "both"))
    extras = rng.choice(("", "", "gate", "addend", "gate+addend"))
    is_flat, std = rng.random() < 0.3, rng.choice((1.0, 1.0, 3.0, 10.0))
    leadings = [(rng.choice((1, batch)), rng.choice((1, heads))) for _ in range(2)]

    how = {"key_heads": key_heads, "layout": layout}
    q, k, v = query_key_value(batch, queries, keys, heads, head_dim, dtype, device, **how)
    k *= std
    lengths = [rng.choice((keys, rng.randint(0, keys))) for _ in range(batch)]
    options = gate_and_addend(extras, q) | masks(masked, k, v, lengths, dtype)
    if "key_bias" in options and rng.random() < 0.5:
        options["key_bias"][rng.randrange(batch), rng.randrange(keys) :] = -math.inf
    if rng.random() < 0.5:
        options["scale"] = rng.choice((0.05, 0.2))
    tensors = [q, k, v]
    if is_flat:
        tensors, options = in_one(tensors, options)
    size, (leading, bounds_leading) = (queries, keys), leadings
    options["blocks"] = key_blocks(
        kernel,
        lists,
        bounds,
        size,
        block_size,
        device,
        leading=leading,
        bounds_leading=bounds_leading,
    )
    options["return_lse"] = rng.random() < 0.5
    what = f"{(batch, queries, keys, heads, key_heads, head_dim)} {dtype} {layout} {block_size}"
    return tensors, options, f"{what} {lists}, bounds {bounds}, {masked} {extras} {std}"


def check(kernel, seed, device):
    """What the call is, and its fault or None."""
    tensors, options, what = random_call(kernel, seed, device)
    try:
        check_attention(kernel, *tensors, **options)
    except (AssertionError, RuntimeError, ValueError, TypeError) as error:
        return what, f"{type(error).__name__}: {error}"
    return what, None


def main(count=1000, first=0):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernel, faults = load_kernel(), 0
    for seed in range(first, first + count):
        what, fault = check(kernel, seed, device)
        if fault is not None:
            faults += 1
            print(f"seed {seed}: {what}: {fault}", flush=True)
    print(f"{count} calls from seed {first} on, {faults} with a fault", flush=True)
    raise SystemExit(faults > 0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
