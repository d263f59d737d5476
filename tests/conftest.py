"""Fixtures of all tests. They load the kernel as its users do, and run on what the machine has."""

import functools
import os
from pathlib import Path

import pytest
import torch

from checks import one_thread

REPO_ID = "org/h100-diffusers-kernels"
CHECKOUT = Path(__file__).resolve().parents[1]


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
def _one_thread():
    with one_thread():
        yield
