"""Whether this thread's calls are being captured into a graph by this package, and for which stream."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class _Local(threading.local):
    stream: Any = None
    is_on = False


_local = _Local()


@contextlib.contextmanager
def begin(device: torch.device) -> Iterator[None]:
    """Marks what this thread runs as being captured, for callers on the stream that is current now."""
    before = _local.is_on, _local.stream
    _local.is_on, _local.stream = True, _current_stream(device)
    try:
        yield
    finally:
        _local.is_on, _local.stream = before


def is_on() -> bool:
    """Whether what this thread runs is being captured."""
    return _local.is_on


def stream_of_caller(x: Tensor) -> Any:
    """The stream that a call with ``x`` is on; while it is captured, that of its caller."""
    return _local.stream if _local.is_on else _current_stream(x.device)


def _current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
