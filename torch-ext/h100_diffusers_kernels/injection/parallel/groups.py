"""Process groups of torch.distributed beside the ones that users make."""

from __future__ import annotations

import datetime
import functools
from typing import Any

import torch
import torch.distributed as dist


def time_limit(group: Any) -> datetime.timedelta:
    """How long the group's collectives wait for a rank."""
    device_type = group._device_types[0].type
    limit: datetime.timedelta = group._get_backend(torch.device(device_type)).options._timeout
    return limit


@functools.lru_cache(maxsize=16)
def host_group(group: Any) -> Any:
    """The group itself if it has collectives of CPU tensors, otherwise one of the same ranks that has, with
    the same time limit."""
    if "cpu" in {device.type for device in group._device_types}:
        return group
    ranks, limit = dist.get_process_group_ranks(group), time_limit(group)
    return dist.new_group(ranks, limit, "gloo", use_local_synchronization=True)
