"""Tensors cached between calls: a denoising loop needs the same ones at each step. Their cache key is the
arguments that they were computed from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from .patch import Call, ThreadValue

Values = TypeVar("Values", bound=tuple)


# Of a module. A graph of each size is captured with its own.
_MOST_ENTRIES = 8
# The caller's stream, while this package captures this thread's calls into a CUDA graph.
_callers_stream = ThreadValue()


@contextlib.contextmanager
def capturing(device: torch.device) -> Iterator[None]:
    """Marks this thread's calls as being captured, for callers on the current stream."""
    before, _callers_stream.value = _callers_stream.value, _current_stream(device)
    try:
        yield
    finally:
        _callers_stream.value = before


def is_capturing() -> bool:
    return _callers_stream.value is not None


def _current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else "cpu"


def cached(call: Call, x: Tensor, arguments: tuple, make: Callable[[], Values]) -> Values:
    """``make()`` on x's device, or its cached result in this module for equal arguments."""
    stream = _callers_stream.value
    flat: list[Any] = []
    for argument in arguments:
        is_list = isinstance(argument, (tuple, list))
        flat += (len(argument), *argument) if is_list else (argument,)
    if (
        torch.compiler.is_compiling()
        # Arrays and tensors may change their values before the next call.
        or not all(argument is None or type(argument) in (bool, int, float) for argument in flat)
        # Modes, and a user's captures, create tensors without values or observe their creation.
        or stream is None
        and (
            torch._C._len_torch_dispatch_stack() > 0
            or (x.is_cuda and torch.cuda.is_current_stream_capturing())
        )
    ):
        return make()
    key = (x.device, _current_stream(x.device) if stream is None else stream, *flat)
    entries = call.stand_in.cached or {}
    values = entries.get(key)
    if values is None:
        # Inference tensors cannot be used by autograd later, and have no version.
        with torch.inference_mode(False), torch.no_grad():
            values = make()
        # Tensors made during a capture have no values until the graph is replayed.
        if stream is None and all(type(tensor) is Tensor for tensor in values):
            latest = [*entries.items()][1 - _MOST_ENTRIES :]
            call.stand_in.cached = dict([*latest, (key, values)])
    return values
