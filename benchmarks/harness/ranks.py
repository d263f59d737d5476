"""The processes of a benchmark on several GPUs, and how they share the work in each mode.

A mode may use fewer GPUs than there are. With one GPU the first rank runs, and the others wait at the
barriers. With several the other ranks run the same in groups of their own, because PyTorch numbers the
allocations of shared memory in each process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar
from unittest import mock

import click
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.harness import timing
from benchmarks.harness.history import SPLITS

# Collectives after which the ranks no longer wait for one that is gone.
TIMEOUT = datetime.timedelta(minutes=2)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Mode:
    """A kind, such as eager or injected, and what its ranks share; one GPU if all degrees are 1.

    Attributes:
        guidance: ranks, or groups of them, that compute the two halves of guidance.
        ring, ulysses: ranks of context parallelism.
        tiles: ranks that decode tiles.
    """

    kind: str
    ring: int = 1
    ulysses: int = 1
    guidance: int = 1
    tiles: int = 1

    @property
    def degrees(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in SPLITS}

    @property
    def degree(self) -> int:
        """The number of GPUs."""
        return math.prod(self.degrees.values())

    def __str__(self) -> str:
        return "+".join([self.kind, *(f"{k}{n}" for k, n in self.degrees.items() if n > 1)])


def degrees_up_to(count: int) -> list[int]:
    """The powers of 2 that divide the number of GPUs, and that number."""
    powers = [2**i for i in range(1, count.bit_length()) if count % 2**i == 0]
    return sorted({*powers, count})


@dataclass
class Ranks:
    """The processes that measure, or the one that is rank 0 of modelled ones."""

    device: torch.device
    rank: int = 0
    is_modelled: bool = False
    meshes: dict[Mode, DeviceMesh] = field(default_factory=dict)

    def echo(self, text: str) -> None:
        if self.rank == 0:
            click.echo(text)

    def mesh(self, mode: Mode) -> DeviceMesh:
        """Of a mode's ranks, with a dimension for each of SPLITS. It is made once, and all ranks call it.

        If the mode has fewer ranks than there are, the others have meshes of their own.
        """
        mode = dataclasses.replace(mode, kind="")
        if mode not in self.meshes:
            groups = dist.get_world_size() // mode.degree
            shape, names = (groups, *mode.degrees.values()), ("groups", *SPLITS)
            mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
            # enable_parallelism does so, too, and gets this one: making it takes all ranks.
            mesh["ring", "ulysses"]._flatten()
            self.meshes[mode] = mesh
        return self.meshes[mode]

    def runs(self, mode: Mode) -> bool:
        """Whether this rank takes part. The others wait."""
        return self.rank == 0 or mode.degree > 1

    def attempt(self, function: Callable[[], Result]) -> tuple[Result | None, str | None]:
        """The function's result, or the error of the first rank that has one. All ranks call it."""
        result, error = None, None
        try:
            result = function()
        except Exception as exception:
            error = f"{type(exception).__name__}: {exception}"
            click.echo(f"Rank {self.rank}: {traceback.format_exc()}", err=True)
        if not self.is_modelled:
            errors: list[str | None] = [None] * dist.get_world_size()
            dist.all_gather_object(errors, error)
            error = next(filter(None, errors), None)
        return (result, None) if error is None else (None, error)

    def milliseconds(self, function: Callable[[], object], device: torch.device) -> float:
        """The slowest rank's time, from a barrier on."""
        if self.is_modelled:
            return timing.milliseconds(function, device)
        timing.synchronize(device)
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
        own = torch.tensor(timing.milliseconds(function, device), device=device)
        dist.all_reduce(own, dist.ReduceOp.MAX)
        return own.item()


@contextlib.contextmanager
def process_group(
    device: torch.device, is_modelled: bool, degrees: Sequence[int]
) -> Iterator[Ranks]:
    """Yields the ranks. Those of a modelled group are not there."""
    one_device = mock.patch.object(torch.accelerator, "device_count", lambda: 1)
    # diffusers divides by the number of accelerators.
    with one_device if device.type == "cpu" else contextlib.nullcontext():
        if is_modelled:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=max(degrees))
            try:
                yield Ranks(device, is_modelled=True)
            finally:
                dist.destroy_process_group()
            return
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
        yield Ranks(device, dist.get_rank())
        dist.destroy_process_group()
