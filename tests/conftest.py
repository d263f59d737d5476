"""Fixtures of all tests. They load the kernel as users do, on this machine's device."""

import functools
import gc
import os
from pathlib import Path

import pytest
import tomllib
import torch

import selection
from processes import one_thread

# Values are compared with float64: convolutions must compute in float32.
torch.backends.cudnn.allow_tf32 = False
if not torch.cuda.is_available():
    # PyTorch's own spends most of its time on keeping the stack for a GPU that may come later.
    torch.manual_seed = torch.default_generator.manual_seed

CHECKOUT = Path(__file__).resolve().parents[1]
GENERAL = tomllib.loads((CHECKOUT / "build.toml").read_text(encoding="utf-8"))["general"]
REPO_ID, VERSION = GENERAL["hub"]["repo-id"], GENERAL["version"]
# kernel-builder has only tests/, the package and its sources. There tests that need more are not collected.
if not (CHECKOUT / "reference").is_dir():
    collect_ignore_glob = ["test_[!k]*.py"]


@functools.cache
def load_kernel():
    """The kernel package: this checkout's build, or the one in LOCAL_KERNELS."""
    os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={CHECKOUT}")
    from kernels import get_kernel

    return get_kernel(REPO_ID, version=VERSION, trust_remote_code=True)


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
def mesh(device, monkeypatch):
    """A device mesh with only this process."""
    from torch import distributed

    from ranks import init_gloo_of_one_worker

    monkeypatch.setattr(distributed.ProcessGroupGloo, "__init__", init_gloo_of_one_worker)
    backend = "nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with one_thread():
            yield distributed.device_mesh.init_device_mesh(device, (1,))
    finally:
        distributed.destroy_process_group()


@pytest.fixture
def _default_backend(monkeypatch):
    """diffusers' choice for all models, which model.set_attention_backend also changes."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    monkeypatch.setattr(registry, "_active_backend", registry._active_backend)


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
    """Silences libraries, whose messages about a thousand models would hide the failure."""
    for name in ("diffusers", "accelerate", "peft", "h100_diffusers_kernels"):
        caplog.set_level("CRITICAL", logger=name)


def pytest_addoption(parser):
    selection.add_options(parser)


def pytest_configure(config):
    """Limits threads, because workers of pytest-xdist share the cores. Tests of several threads set their own
    number."""
    config.pluginmanager.register(selection.Selection())
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if workers > 1:
        threads = max(1, torch.get_num_threads() // workers)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # for processes that tests start


def pytest_collection_finish():
    """Excludes imported modules and collected tests from garbage collection, which many tests call."""
    gc.collect()
    gc.freeze()
