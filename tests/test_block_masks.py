"""``KeyBlocks`` read from PyTorch's ``BlockMask`` and from dense masks."""

import sys

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

DOCUMENTS = torch.arange(300) // 70
LENGTHS = torch.tensor([40, 300])
# The mask_mod, samples, heads, and whether the keys of each query are an interval.
MASKS = {
    "causal": (lambda b, h, q, k: q >= k, None, None, True),
    "documents": (lambda b, h, q, k: on(q, DOCUMENTS)[q] == on(q, DOCUMENTS)[k], None, None, True),
    "padding by sample": (lambda b, h, q, k: (k < on(q, LENGTHS)[b]) & (q >= k), 2, None, True),
    "window by head": (lambda b, h, q, k: (q - k).abs() <= 20 + 30 * h, None, 3, True),
    "no keys": (lambda b, h, q, k: k < 0, None, None, True),
    "all keys": (lambda b, h, q, k: k >= 0, None, None, True),
    "some queries": (lambda b, h, q, k: q % 3 == 0, None, None, True),
    "every second key": (lambda b, h, q, k: (q + k) % 2 == 0, None, None, False),
    "first keys and a window": (
        lambda b, h, q, k: (k < 9) | ((q - k).abs() < 9),
        None,
        None,
        False,
    ),
}


def on(x, table):
    return table.to(x.device)


def key_blocks_module(kernel):
    return sys.modules[f"{kernel.__name__}.operations.key_blocks"]


@pytest.mark.parametrize("lengths", [(300, 300), (256, 256), (130, 300)], ids=str)
@pytest.mark.parametrize("block_size", [64, 128, (64, 128)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_mask_mod(kernel, device, name, block_size, lengths, monkeypatch):
    """Also in parts, as a large mask is evaluated."""
    mask_mod, samples, heads, is_interval = MASKS[name]
    shape = samples, heads, *lengths
    mask = create_block_mask(mask_mod, *shape, device=device, BLOCK_SIZE=block_size)
    expected = create_mask(mask_mod, *shape, device=device)
    module = key_blocks_module(kernel)
    for elements in (module._ELEMENTS, 3 * 128 * 128):
        monkeypatch.setattr(module, "_ELEMENTS", elements)
        bounds = module.bounds_of_mask(expected)
        if is_interval:
            blocks = kernel.KeyBlocks.from_block_mask(mask)
            assert torch.equal(blocks.is_attended(*lengths).expand_as(expected), expected)
            dense = kernel.KeyBlocks(key_bounds=bounds)
            assert torch.equal(dense.is_attended(*lengths), expected)
        else:
            assert bounds is None
            with pytest.raises(ValueError, match="does not give each query one interval of keys"):
                kernel.KeyBlocks.from_block_mask(mask)


def test_full_blocks_apart_from_an_interval(kernel, device):
    """Only keys of the bounded blocks have to be an interval."""
    mask_mod = lambda b, h, q, k: (k < 128) | ((k >= 256) & (k < 300))  # noqa: E731
    mask = create_block_mask(mask_mod, None, None, 128, 512, device=device)
    blocks = kernel.KeyBlocks.from_block_mask(mask)
    assert blocks.full_kv_num_blocks.item() == blocks.kv_num_blocks.item() == 1
    expected = create_mask(mask_mod, None, None, 128, 512, device=device)
    assert torch.equal(blocks.is_attended(128, 512), expected)


def test_values_of_dense_masks(kernel, device):
    """0 and -inf alone. A large negative number is a bias."""
    read = key_blocks_module(kernel).bounds_of_mask
    is_seen = torch.ones(40, 40, dtype=torch.bool, device=device).tril()[None, None]
    expected = read(is_seen)
    for dtype in (torch.float32, torch.bfloat16):
        bias = torch.zeros(is_seen.shape, dtype=dtype, device=device)
        assert torch.equal(read(bias.masked_fill(~is_seen, -torch.inf)), expected)
        assert read(bias.masked_fill(~is_seen, -10000.0)) is None
        assert read(bias.masked_fill(~is_seen, -torch.inf) + 1) is None


def lists(device, dtype=torch.int32):
    """NABLA's: all blocks are full, in lists of other dtypes and strides."""
    seen = (torch.rand(1, 2, 4, 4, device=device) < 0.5) | torch.eye(4, device=device).bool()
    counts = seen.sum(-1).to(dtype)
    indices = seen.int().argsort(-1, descending=True).to(dtype)
    indices = indices.transpose(2, 3).contiguous().transpose(2, 3)
    return seen, torch.zeros_like(counts), indices, counts, indices


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_lists_alone(kernel, device, dtype):
    seen, *given = lists(device, dtype)
    mask = BlockMask.from_kv_blocks(*given, BLOCK_SIZE=64, mask_mod=None)
    blocks = kernel.KeyBlocks.from_block_mask(mask)
    assert blocks.key_bounds is None and blocks.block_size == (64, 64)
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in blocks[:4])
    expected = seen.repeat_interleave(64, 2).repeat_interleave(64, 3)
    assert torch.equal(blocks.is_attended(256, 256), expected)


@pytest.mark.usefixtures("_fresh_compiler")
def test_lists_in_compiled_code(kernel, device):
    """A mask_mod is not evaluated in it."""

    def attend(q, given, mask_mod=None):
        mask = BlockMask.from_kv_blocks(*given, BLOCK_SIZE=64, mask_mod=mask_mod)
        return kernel.attention(q, q, q, blocks=kernel.KeyBlocks.from_block_mask(mask))

    q = torch.randn(1, 256, 2, 64, device=device).bfloat16()
    _, *given = lists(device)
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, given), attend(q, given))


def test_mistakes(kernel, device):
    with pytest.raises(TypeError, match="^KeyBlocks: block_mask must be a BlockMask, got 3$"):
        kernel.KeyBlocks.from_block_mask(3)
    causal = MASKS["causal"][0]
    mask = create_block_mask(causal, None, None, 512, 512, device=device, BLOCK_SIZE=256)
    with pytest.raises(ValueError, match="blocks have 256 queries and 256 keys; the kernel takes"):
        kernel.KeyBlocks.from_block_mask(mask)
    mask = create_block_mask(causal, None, None, 512, 512, device=device)[:, :, 1:2]
    with pytest.raises(RuntimeError, match="mask_mod from a sliced BlockMask"):
        kernel.KeyBlocks.from_block_mask(mask)
