"""The keys that each query of an attention attends to, by blocks."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .calls import count, refuse_type


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
            bounded = within if bounded is None and full is None else bounded
            bounded = None if bounded is None else bounded & within
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
