"""Fixtures of all tests. They load the kernel as its users do, and run on what the machine has."""

import functools
import gc
import os
from pathlib import Path

import pytest
import torch

from threads import one_thread

# Values are compared with float64: convolutions must compute in float32.
torch.backends.cudnn.allow_tf32 = False

REPO_ID = "org/h100-diffusers-kernels"
CHECKOUT = Path(__file__).resolve().parents[1]
# kernel-builder has tests/, the package and its sources, and nothing else of the repository. There only the
# tests that need nothing else run.
if not (CHECKOUT / "reference").is_dir():
    collect_ignore_glob = ["test_[!k]*.py"]


@functools.cache
def load_kernel():
    """The kernel package: this checkout's build, or the one that LOCAL_KERNELS names."""
    os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={CHECKOUT}")
    from kernels import get_kernel

    return get_kernel(REPO_ID, version=1, trust_remote_code=True)


@pytest.fixture(scope="session")
def kernel():
    return load_kernel()


@pytest.fixture(scope="session")
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20)


@pytest.fixture
def mesh(device):
    """A device mesh of this process alone."""
    from torch import distributed

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with one_thread():
            yield distributed.device_mesh.init_device_mesh(device, (1,))
    finally:
        distributed.destroy_process_group()


@pytest.fixture
def _one_thread():
    with one_thread():
        yield


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def _quiet(kernel, caplog):
    """What libraries have to say of a thousand models would hide the message."""
    for name in ("diffusers", "accelerate", "peft", "h100_diffusers_kernels"):
        caplog.set_level("CRITICAL", logger=name)


def pytest_configure():
    """Workers of pytest-xdist share the cores: threads that wait for each other's core take most of the time
    otherwise. What several threads compute has tests of its own, which set their number."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if workers > 1:
        threads = max(1, torch.get_num_threads() // workers)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of the processes that tests start


def pytest_collection_finish():
    """What was imported and collected stays to the end, and many tests call the garbage collector, which
    would look through all of it."""
    gc.collect()
    gc.freeze()
