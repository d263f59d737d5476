"""Checks in several processes that communicate by gloo: the ranks of a test.

One server per test run imports the libraries and forks the ranks of each check, so that a rank starts in
milliseconds and knows nothing of earlier checks.
"""

import faulthandler
import functools
import importlib
import inspect
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from conftest import load_kernel

# Ranks that wait for each other use next to no processor time. A slow machine's ranks use what they get.
IDLE_SECONDS, IDLE_SHARE = 60, 0.02


_init_gloo = dist.ProcessGroupGloo.__init__


def init_gloo_of_one_worker(self, store, rank, size, timeout):
    """For ``ProcessGroupGloo.__init__``.

    PyTorch makes two workers. Both write the name of the collective that they finished to one string, without
    a lock. A name that this string allocates for (ring attention's has 19 characters) is then freed twice.
    """
    options = self._Options()
    options._threads, options._timeout = 1, timeout
    options._devices = [self.create_device(interface="lo")]
    _init_gloo(self, store, rank, size, options)


def in_ranks(check: Callable) -> Callable:
    """Makes a test of ``check(kernel, rank, ...)``, which runs in several new processes of one process group.

    There are two, or as many as the argument `ranks` says. The other arguments are fixtures and parameters,
    which must be picklable. An exception of one rank fails the test with that rank's traceback and ends the
    others. So does a wait without end.
    """
    names = set(inspect.signature(check).parameters) - {"kernel", "rank"}

    @functools.wraps(check)
    def test(device, tmp_path, **arguments):
        if device != "cpu":
            pytest.skip("the ranks would need a GPU each")
        if "tmp_path" in names:
            arguments["tmp_path"] = tmp_path
        _run_ranks(check, arguments.get("ranks", 2), tmp_path, arguments)

    kind = inspect.Parameter.KEYWORD_ONLY
    fixtures = sorted({"device", "tmp_path", *names})
    test.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in fixtures])
    return test


def _run_ranks(check, ranks, tmp_path, arguments):
    _start_server()
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    context = torch.multiprocessing.start_processes(
        _run_rank,
        args=(check.__module__, check.__qualname__, ranks, folder, arguments),
        nprocs=ranks,
        join=False,
        start_method="forkserver",
    )
    try:
        used, since = 0.0, time.monotonic()
        while not context.join(timeout=2):
            waited = time.monotonic() - since
            if waited < IDLE_SECONDS:
                continue
            before, used = used, sum(map(_processor_time, context.pids()))
            if used - before < IDLE_SHARE * waited:
                pytest.fail(f"the ranks wait for each other:\n{_stacks(context.pids(), folder)}")
            since = time.monotonic()
    finally:
        for process in context.processes:
            process.kill()


def _start_server():
    """Its environment is that of the first call."""
    multiprocessing.set_forkserver_preload(["rank_imports"])
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # the server does not get sys.path
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH") if path is None else os.environ.update(PYTHONPATH=path)


def _processor_time(pid):
    try:
        return sum(psutil.Process(pid).cpu_times()[:2])
    except psutil.NoSuchProcess:
        return 0.0


def _stacks(pids, folder):
    """Where each rank is."""
    for pid in filter(psutil.pid_exists, pids):
        os.kill(pid, signal.SIGUSR1)
    time.sleep(2)
    return "\n".join(file.read_text() for file in sorted(folder.glob("stack*")))


def _run_rank(rank, module, name, ranks, folder, arguments):
    stack = (folder / f"stack{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack)
    faulthandler.enable()  # a rank that is ended by a signal shows where it was
    dist.ProcessGroupGloo.__init__ = init_gloo_of_one_worker
    torch.set_num_threads(1)
    torch.manual_seed(20)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks)
    check = getattr(importlib.import_module(module), name).__wrapped__
    given = {"kernel": load_kernel(), "rank": rank, **arguments}
    check(**{name: given[name] for name in inspect.signature(check).parameters})
    dist.barrier()
    dist.destroy_process_group()
