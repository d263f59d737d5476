"""Results that one rank computes for all, and sends when they are first used.

All ranks run the same code, so that each has the same ``Pending`` tensors in the same order. The first use of
any of them exchanges all of a ``Dealer``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

_FIXED = (int, type(None), type(...))


class Pending(Tensor):
    """A tensor that becomes a plain one, with its value, at its first use by anything. Indexing it by
    constants and concatenating pending tensors are no uses: their results are pending, too."""

    dealer: Dealer

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        pending = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is cls]
        dealer = pending[0].dealer
        if func is Tensor.__getitem__ and _is_fixed(args[1]):
            return dealer.add(lambda: func(*args))
        if func is torch.cat and args and "out" not in kwargs:
            tensors = [*args[0]]  # the caller may change the list
            if all(type(x) is cls and x.dealer is dealer for x in tensors):
                return dealer.add(lambda: func(tensors, *args[1:], **kwargs))
        for each in pending:
            if type(each) is cls:
                each.dealer.settle()
            if type(each) is cls:
                raise RuntimeError("a result was lost: the exchange between the ranks failed")
        return func(*args, **kwargs)


def _is_fixed(index: Any) -> bool:
    items = index if type(index) is tuple else (index,)
    parts = [(i.start, i.stop, i.step) if type(i) is slice else (i,) for i in items]
    return all(type(value) in _FIXED for part in parts for value in part)


def layout_of(x: Tensor) -> Any:
    """The order of the dimensions in memory, from the outermost, their sizes in this order, and the dtype."""
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    return order, [x.shape[dim] for dim in order], x.dtype


class Dealer:
    """Deals results out to the ranks of a process group."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self._entries: list[tuple[Any, ...]] = []
        self._dealt = 0

    def next_owner(self) -> int:
        """The rank that computes the next result. Ranks take turns, from the first after each exchange."""
        self._dealt += 1
        return (self._dealt - 1) % self.size

    def add(
        self, value: Any, owner: int | None = None, layout: Any = None, device: Any = None
    ) -> Tensor:
        """A pending tensor.

        Args:
            value: its value, or a function that returns it after the exchange; None except on the owner.
            owner: the rank that sends the value; None if all ranks have it.
            layout, device: those of the value. The layout is None if only the owner knows it.
        """
        pending: Any = Tensor._make_subclass(Pending, torch.empty(0, device="meta"))
        pending.dealer = self
        self._entries.append((pending, value, owner, layout, device))
        return pending

    def settle(self) -> None:
        """Gives all pending tensors their values."""
        entries, self._entries, self._dealt = self._entries, [], 0
        unknown = [
            value for _, value, owner, layout, _ in entries if owner is not None and not layout
        ]
        layouts: list[Any] = [()] * self.size
        if unknown:
            own = [layout_of(value) for value in unknown if value is not None]
            dist.all_gather_object(layouts, own, self.group)
        of_owner = [*map(iter, layouts)]
        for pending, value, owner, layout, device in entries:
            if owner is not None:
                value = self._exchange(value, owner, layout or next(of_owner[owner]), device)
            elif not isinstance(value, Tensor):
                value = value()
            torch.utils.swap_tensors(pending, value.detach())  # the tensor itself may be in use

    def _exchange(self, value: Any, owner: int, layout: Any, device: Any) -> Tensor:
        order, sizes, dtype = layout
        if owner == self.rank:
            sent = value.permute(order).contiguous()
            if [*sent.shape] != sizes or sent.dtype != dtype:
                raise RuntimeError(
                    "a call returned another shape or dtype than the first of its kind"
                )
        else:
            sent = torch.empty(sizes, dtype=dtype, device=device)
            value = sent.permute([order.index(dim) for dim in range(len(order))])
        dist.broadcast(sent, dist.get_global_rank(self.group, owner), self.group)
        return value


def group_of(caller: str, group: Any) -> Any:
    """The process group: the default one for None, or that of a mesh of one dimension."""
    if not dist.is_initialized():
        raise RuntimeError(f"{caller}: torch.distributed must be initialized by init_process_group")
    group = dist.group.WORLD if group is None else group
    group = group.get_group() if hasattr(group, "get_group") else group
    if dist.get_rank(group) < 0:
        raise ValueError(f"{caller}: group must contain this rank, got one without it")
    return group
