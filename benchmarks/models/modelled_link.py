"""Collectives of a modelled group of ranks, of which only the first one is there.

They move nothing, and count what this rank would send.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from benchmarks.harness import kernel_times

# What a GPU sends to others over NVLink 4, of nominally 450 GB/s in each direction.
LINK_BYTES_PER_S = 370e9
COPY = re.compile(r"copy|memcpy", re.IGNORECASE)


def group_size(group: Any) -> int:
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)
    return group.size()


class Link:
    """Collectives that move nothing, and count what this rank would send."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.sent_bytes = 0
        self._gathered: dict[tuple, collections.deque[torch.Tensor]] = {}

    def _count(self, name: str, sent_bytes: int) -> None:
        self.calls[name] += 1
        self.sent_bytes += sent_bytes

    def all_to_all_single(
        self,
        x: torch.Tensor,
        output_split_sizes: Sequence[int] | None,
        input_split_sizes: Sequence[int] | None,
        group: Any,
        tag: str = "",
    ) -> torch.Tensor:
        """As of funcol. The parts that the rank receives are those that it sends, so shapes must agree."""
        sizes = output_split_sizes, input_split_sizes
        if any(split is not None and len(set(split)) > 1 for split in sizes):
            raise NotImplementedError("all-to-alls of unequal parts are not modelled")
        ranks, moved = group_size(group), x.numel() * x.element_size()
        self._count("all_to_all_single", moved * (ranks - 1) // ranks)
        return x

    def all_gather_tensor(
        self, x: torch.Tensor, gather_dim: int, group: Any, tag: str = ""
    ) -> torch.Tensor:
        """As of funcol. Calls of one shape share two buffers in turn, keys and values, each filled once."""
        ranks = group_size(group)
        self._count("all_gather_tensor", x.numel() * x.element_size() * (ranks - 1))
        key = (*x.shape, x.dtype, x.device, gather_dim, ranks)
        buffers = self._gathered.setdefault(key, collections.deque(maxlen=2))
        if len(buffers) < 2:
            buffers.append(torch.cat([x] * ranks, dim=gather_dim))
        else:
            buffers.rotate()
        return buffers[-1]

    all_gather_single = all_gather_tensor  # its name in later versions of Torch

    def all_gather(
        self, tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None
    ) -> None:
        """As of torch.distributed, which diffusers' attention gathers masks with."""
        self._count("all_gather", tensor.numel() * tensor.element_size() * (len(tensor_list) - 1))
        for one in tensor_list:
            one.copy_(tensor)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Has these collectives be called. The others raise: their results would be anything."""

        def refuse(name: str) -> Callable:
            def collective(*args: object, **kwargs: object) -> None:
                raise NotImplementedError(f"{name} is not modelled")

            return collective

        modelled = {
            funcol: ("all_to_all_single", "all_gather_tensor", "all_gather_single"),
            dist: ("all_gather",),
        }
        others = {
            funcol: ("all_reduce", "permute_tensor", "reduce_scatter_tensor", "broadcast"),
            dist: (
                *("all_reduce", "all_to_all", "all_to_all_single", "all_gather_into_tensor"),
                *("broadcast", "reduce_scatter_tensor", "send", "recv", "batch_isend_irecv"),
            ),
        }
        with contextlib.ExitStack() as stack:
            for name, module in [*sys.modules.items()]:
                if name.endswith("injection.parallel.peer_memory"):  # there is no peer
                    stack.enter_context(mock.patch.dict(module.PEERS, clear=True))
            for module, names in modelled.items():
                for name in filter(functools.partial(hasattr, module), names):
                    stack.enter_context(mock.patch.object(module, name, getattr(self, name)))
            for module, names in others.items():
                for name in names:
                    stack.enter_context(mock.patch.object(module, name, refuse(name)))
            yield


def copies(events: Iterable[dict], calls: int) -> dict[str, float]:
    """Launches and time of the kernels that only copy, per call, from a profiler's trace."""
    copying = [
        event["dur"] / 1e3
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy")
        and kernel_times.classify(event["name"]) == "other"
        and COPY.search(event["name"])
    ]
    return {"launches": len(copying) / calls, "ms": sum(copying) / calls}
