"""Checks in several processes that communicate by gloo: the ranks of a test."""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from conftest import load_kernel


def run_ranks(
    check: Callable, ranks: int, tmp_path: Path, *arguments, timeout: float = 240
) -> None:
    """Runs ``check(kernel, rank, *arguments)`` in each of several new processes of one process group.

    An exception of one rank fails the test with that rank's traceback and ends the others.

    Args:
        check: a function at the top level of a module.
        timeout: after this number of seconds all ranks are killed and the test fails.
    """
    rendezvous = f"file://{tempfile.mkdtemp(dir=tmp_path)}/rendezvous"
    context = torch.multiprocessing.spawn(
        _run_rank, args=(check, ranks, rendezvous, arguments), nprocs=ranks, join=False
    )
    deadline = time.monotonic() + timeout
    try:
        while not context.join(timeout=min(5, timeout)):
            if time.monotonic() > deadline:
                pytest.fail(f"the ranks wait for each other, after {timeout:g} s")
    finally:
        for process in context.processes:
            process.kill()


def _run_rank(rank, check, ranks, rendezvous, arguments):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch.manual_seed(20)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks)
    check(load_kernel(), rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()
