"""Imported once by the server that forks ranks, which then have all of this."""

import gc

import pytest  # noqa: F401
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401
from diffusers.hooks import context_parallel  # noqa: F401
from torch.nn.parallel import DistributedDataParallel  # noqa: F401

import families  # noqa: F401
from conftest import load_kernel

load_kernel()
gc.freeze()
