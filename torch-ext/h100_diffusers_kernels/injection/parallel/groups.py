"""Exchanges between the hosts of a process group's ranks, which do not wait for GPUs."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist


class HostGroup:
    """The ranks of a process group, by the group's collectives of CPU tensors, or by Gloo's.

    Attributes:
        time_limit: how long the group's collectives wait for a rank.
    """

    def __init__(self, group: Any) -> None:
        self._size = dist.get_world_size(group)
        device = torch.device("cpu") if _has_cpu(group) else group._device_types[0]
        self._backend = group._get_backend(device)
        self.time_limit = self._backend.options._timeout
        if not _has_cpu(group):
            # `new_group` would take all processes, or as many groups in each.
            store = dist.distributed_c10d._get_default_store()
            store = dist.PrefixStore(f"h100_diffusers_kernels/{group.group_name}", store)
            place = dist.get_rank(group), self._size
            self._backend = dist.ProcessGroupGloo(store, *place, self.time_limit)

    def gather(self, *numbers: int) -> list[list[int]]:
        """The numbers of each rank.

        Raises:
            RuntimeError: of torch.distributed, if a rank does not join within the time limit.
        """
        own = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        every = [torch.empty_like(own) for _ in range(self._size)]
        self._backend.allgather([every], [own]).wait()
        return [each.tolist() for each in every]


def _has_cpu(group: Any) -> bool:
    return "cpu" in {device.type for device in group._device_types}


@functools.cache
def host_group(group: Any) -> HostGroup:
    return HostGroup(group)
