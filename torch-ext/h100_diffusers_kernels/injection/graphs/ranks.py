"""Agreement of ranks on CUDA graphs.

A graph of a rank under context parallelism holds collectives, which NCCL matches only if all ranks captured
them together and replay them together. Ranks may differ in what they can do: a hook was added on one, or its
weights moved. So before a forward they exchange what they would do, on the host, without waiting for the GPU.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch.distributed as dist
from torch import nn

from ..parallel.exchange import config_of_model
from ..parallel.groups import host_group

NO_GRAPH, CAPTURE = -1, 0  # instead of the number of the graph that a rank would replay


class Ranks:
    """The ranks that compute one call of a model together; one without context parallelism.

    Attributes:
        is_alone: whether there is one.
        have_voted: whether this one has told the others what it would do.
        are_replaying: whether all others replay a graph, and wait for this one's.
    """

    def __init__(self, model: nn.Module | None) -> None:
        config = config_of_model(model)
        self._group: Any = None
        if config is not None:
            self._group = host_group(config._flattened_mesh.get_group())
        self.have_voted = self.is_alone = self._group is None
        self.are_replaying = False

    def bounds(self, number: int) -> tuple[int, int]:
        """The least and the greatest of the ranks' numbers.

        Raises:
            RuntimeError: of torch.distributed, if a rank does not join within the group's time limit.
        """
        self.have_voted = True
        if self.is_alone:
            return number, number
        numbers = [each for (each,) in self._group.gather(number)]
        self.are_replaying = min(numbers) > CAPTURE
        return min(numbers), max(numbers)

    def agree(self, number: int) -> bool:
        """Whether all ranks have this number."""
        return self.bounds(number) == (number, number)


_parallel: weakref.WeakSet[Any] = weakref.WeakSet()  # the stand-ins whose graphs hold collectives


def drop_before_destruction(stand_in: Any) -> None:
    """Has ``destroy_process_group`` drop the stand-in's graphs first: it waits for them without end."""
    _parallel.add(stand_in)
    _replace_destruction()


@functools.cache
def _replace_destruction() -> None:
    module: Any = dist.distributed_c10d
    own = module.destroy_process_group

    @functools.wraps(own)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        for stand_in in [*_parallel]:
            stand_in.taken_out()
        return own(*args, **kwargs)

    package: Any = dist
    package.destroy_process_group = module.destroy_process_group = destroy_process_group
