"""The keys that each query of an attention attends to, by blocks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor

from .calls import count, fail, refuse_type

_SIZES = (64, 128)
_FLEX = "torch.nn.attention.flex_attention"
_ELEMENTS = 1 << 24  # of a mask that are read at once, to limit the memory


class KeyBlocks(NamedTuple):
    """The keys that each query of an attention attends to: lists of key blocks for each query block, in the
    layout of PyTorch's ``BlockMask``, and bounds for each query.

    A query block is ``block_size[0]`` adjacent queries, a key block ``block_size[1]`` adjacent keys; the last
    ones may be shorter. A query attends to all keys of the blocks in the list ``full_kv_indices`` of its
    query block, and to those within its bounds of the blocks in the list ``kv_indices``. Without both lists
    it attends to all keys within its bounds. A block that a list names twice, or both lists name, counts
    once.

    Attributes:
        kv_num_blocks: ``(B or 1, H or 1, Nq)``, int32, contiguous, or None: the length of each list, for
            ``Nq = ceil(Sq / block_size[0])``. Lengths are read on the device and clamped.
        kv_indices: ``(B or 1, H or 1, Nq, n)``, int32, contiguous, or None: the lists. Indices after a list's
            length, and those of no block, have no effect.
        full_kv_num_blocks: as ``kv_num_blocks``.
        full_kv_indices: as ``kv_indices``.
        block_size: ``(queries, keys)``, each 64 or 128.
        key_bounds: ``(B or 1, H or 1, Sq, 2)``, int32, contiguous, or None: for each query the first key and
            the key after the last one. They may lie outside of the keys. None: all keys.

    Causal attention of equal lengths is ``KeyBlocks(key_bounds=bounds)`` with bounds ``(0, i + 1)`` of query
    ``i``.
    """

    kv_num_blocks: Optional[Tensor] = None
    kv_indices: Optional[Tensor] = None
    full_kv_num_blocks: Optional[Tensor] = None
    full_kv_indices: Optional[Tensor] = None
    block_size: tuple[int, int] = (128, 128)
    key_bounds: Optional[Tensor] = None

    @classmethod
    def from_block_mask(cls, block_mask: Any) -> KeyBlocks:
        """The keys of a ``BlockMask`` of ``torch.nn.attention.flex_attention``.

        Without a ``mask_mod`` the result has the lists alone, and can be made in compiled code and while a
        CUDA graph is captured. A ``mask_mod`` is evaluated for the blocks of ``kv_indices`` and becomes
        ``key_bounds``, which waits for the device.

        Raises:
            TypeError: if it is no ``BlockMask``.
            ValueError: if its blocks have other sizes than 64 and 128, or if its ``mask_mod`` does not give
                each query one interval of the keys in its blocks of ``kv_indices``.

        Example::

            mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 1000, 1000, device="cuda")
            kernel.attention(q, k, v, blocks=kernel.KeyBlocks.from_block_mask(mask))
        """
        if not is_block_mask(block_mask):
            refuse_type("KeyBlocks", "block_mask", "a BlockMask", block_mask)
        found = read_block_mask(block_mask)
        if isinstance(found, str):
            fail("KeyBlocks", f"block_mask cannot be read: {found}")
        return found

    def is_attended(self, queries: int, keys: int) -> Tensor:
        """``(B or 1, H or 1, queries, keys)``, bool: whether each query attends to each key."""
        bounded = _listed(self.kv_num_blocks, self.kv_indices, self.block_size, queries, keys)
        full = _listed(
            self.full_kv_num_blocks, self.full_kv_indices, self.block_size, queries, keys
        )
        if self.key_bounds is not None:
            key = torch.arange(keys, device=self.key_bounds.device)
            first, end = self.key_bounds[..., :1], self.key_bounds[..., 1:]
            within = (first <= key) & (key < end)
            if bounded is not None:
                bounded = bounded & within
            elif full is None:
                bounded = within
        if bounded is None or full is None:
            found = full if bounded is None else bounded
            return torch.ones(1, 1, queries, keys, dtype=torch.bool) if found is None else found
        return bounded | full


def _listed(
    counts: Tensor | None, indices: Tensor | None, block_size: tuple, queries: int, keys: int
) -> Tensor | None:
    """(B or 1, H or 1, queries, keys): whether a query's list has the key's block. None without lists."""
    if counts is None or indices is None:
        return None
    blocks = -(-keys // block_size[1])
    is_counted = torch.arange(indices.shape[3], device=counts.device) < counts[..., None]
    is_counted = is_counted & (indices >= 0) & (indices < blocks)
    # Indices that do not count set an additional block.
    listed = torch.zeros(*indices.shape[:3], blocks + 1, dtype=torch.bool, device=counts.device)
    listed = listed.scatter(3, torch.where(is_counted, indices, blocks).long(), True)
    of_queries = listed[..., :blocks].repeat_interleave(block_size[0], 2)[:, :, :queries]
    return of_queries.repeat_interleave(block_size[1], 3)[..., :keys]


def block_arguments(operation: str, blocks: Any) -> tuple:
    """The operators' arguments for the blocks."""
    if not isinstance(blocks, KeyBlocks):
        refuse_type(operation, "blocks", "a KeyBlocks or None", blocks)
    *lists, block_size, bounds = blocks
    if not isinstance(block_size, tuple) or len(block_size) != 2:
        refuse_type(operation, "block_size", "a pair of integers", block_size)
    rows = (count(operation, "block_size", size, "a pair of integers") for size in block_size)
    return (*lists, *rows, bounds)


# --------------------------------------------------------------------------------------------------
# From masks


def is_block_mask(x: Any) -> bool:
    """Whether it is a ``BlockMask``. Their module is slow to import, and loaded if there is one."""
    cls = getattr(sys.modules.get(_FLEX), "BlockMask", None)
    return cls is not None and isinstance(x, cls)


def read_block_mask(block_mask: Any) -> Union[KeyBlocks, str]:
    """``KeyBlocks.from_block_mask``, or why the mask cannot be read, as a clause."""
    rows, columns = block_mask.BLOCK_SIZE
    if rows not in _SIZES or columns not in _SIZES:
        return f"its blocks have {rows} queries and {columns} keys; the kernel takes 64 and 128"
    if block_mask.kv_indices.dim() != 4:
        return "its lists have no dimensions of samples and heads"
    given = {name: getattr(block_mask, name) for name in KeyBlocks._fields[:4]}
    found: Any = {
        name: None if x is None else x.to(torch.int32).contiguous() for name, x in given.items()
    }
    found["block_size"] = rows, columns
    if not has_mask_mod(block_mask):
        return KeyBlocks(**found)
    if torch.compiler.is_compiling():
        return "its mask_mod is not evaluated in compiled code"
    if block_mask.kv_indices.is_cuda and torch.cuda.is_current_stream_capturing():
        return "its mask_mod is not evaluated while a CUDA graph is captured"
    bounds = _bounds_of_mask_mod(block_mask)
    if bounds is None:
        return "its mask_mod does not give each query one interval of keys"
    return KeyBlocks(**found, key_bounds=bounds)


def has_mask_mod(block_mask: Any) -> bool:
    """Whether its blocks of ``kv_indices`` have keys that are not attended to."""
    return block_mask.mask_mod is not sys.modules[_FLEX].noop_mask


def _bounds_of_mask_mod(block_mask: Any) -> Tensor | None:
    """``KeyBlocks.key_bounds`` by the ``mask_mod``, or None if they do not express it."""
    counts, indices = block_mask.kv_num_blocks, block_mask.kv_indices
    (queries, keys), (rows, columns) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    batch, heads, query_blocks, length = indices.shape
    device = indices.device
    is_counted = torch.arange(length, device=device) < counts[..., None]
    sample, head, row, place = is_counted.nonzero(as_tuple=True)
    begin = indices[sample, head, row, place].long()[:, None] * columns
    query = row[:, None] * rows + torch.arange(rows, device=device)
    key = begin + torch.arange(columns, device=device)
    # A block at the end may be shorter, and ``mask_mod`` may index tensors of the tokens.
    is_query, is_key = query < queries, key < keys
    arguments = sample, head, query.clamp(max=queries - 1), key.clamp(max=keys - 1)
    first, end, seen = (torch.empty_like(query, dtype=torch.int32) for _ in range(3))
    evaluate = _by_block(block_mask.mask_mod)
    step = _ELEMENTS // (rows * columns)
    for start in range(0, len(sample), step):
        some = slice(start, start + step)
        visible = evaluate(*(x[some] for x in arguments)) & is_key[some, None]
        first[some], end[some], seen[some] = _extent(visible, key[some, None])
    # Of all blocks of a query.
    place = (sample * heads + head)[:, None] * query_blocks * rows + query
    count = batch * heads * query_blocks * rows
    firsts = torch.full((count,), keys, dtype=torch.int32, device=device)
    firsts = firsts.scatter_reduce(0, place.flatten(), first.flatten(), "amin")
    ends = torch.zeros_like(firsts).scatter_reduce(0, place.flatten(), end.flatten(), "amax")
    until = (begin + columns).clamp(max=keys)
    within = torch.minimum(ends[place], until) - torch.maximum(firsts[place], begin)
    if not ((within.clamp(min=0) == seen) | ~is_query).all():
        return None
    bounds = torch.stack((firsts, ends), dim=1).view(batch, heads, -1, 2)
    return bounds[:, :, :queries].contiguous()


def _by_block(mask_mod: Callable) -> Callable:
    """``mask_mod`` for samples and heads (n,), queries (n, r) and keys (n, c): (n, r, c)."""
    # As in PyTorch's ``create_mask``: it takes scalars, also as indices of tensors.
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    by_key = torch.vmap(mask_mod, in_dims=(None, None, None, 0))
    by_query = torch.vmap(by_key, in_dims=(None, None, 0, None))
    by_block = torch.vmap(by_query)

    def evaluate(*arguments: Tensor) -> Any:
        with TransformGetItemToIndex():
            return by_block(*arguments)

    return evaluate


def _extent(visible: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The first visible key, the key after the last one, and the number of visible keys, over the last
    dimension."""
    key = key.to(torch.int32)
    first = torch.where(visible, key, torch.iinfo(torch.int32).max).amin(-1)
    end = torch.where(visible, key + 1, 0).amax(-1)
    return first, end, visible.sum(-1, dtype=torch.int32)


def bounds_of_mask(mask: Tensor) -> Tensor | None:
    """``KeyBlocks.key_bounds`` by a mask (B, H, Sq, Sk), of booleans or of 0 and -inf; None if it has other
    values, or if the keys of a query are no interval. Waits for the device.

    Values from float16's lowest on count as -inf, if the query has a key with 0.
    """
    batch, heads, _, keys = mask.shape
    key = torch.arange(keys, device=mask.device)
    bounds, is_read = [], []
    for some in mask.split(max(1, _ELEMENTS // (batch * heads * keys)), dim=2):
        visible = some if some.dtype == torch.bool else some == 0
        first, end, seen = _extent(visible, key)
        if some.dtype != torch.bool:
            is_hidden = torch.where((seen > 0).unsqueeze(3), some <= -65504, some == -torch.inf)
            is_read.append((visible | is_hidden).all())
        is_read.append(((end - first).clamp(min=0) == seen).all())
        bounds.append(torch.stack((first.clamp(max=keys), end), dim=3))
    return torch.cat(bounds, dim=2) if torch.stack(is_read).all() else None


def causal_bounds(queries: int, device: torch.device, start: int = 0) -> Tensor:
    """``KeyBlocks.key_bounds`` of the queries from ``start`` on, which attend to the keys up to their own."""
    end = torch.arange(start + 1, start + queries + 1, dtype=torch.int32, device=device)
    return torch.stack((torch.zeros_like(end), end), dim=1)[None, None]
