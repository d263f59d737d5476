"""Values that cost real work, kept from call to call by what they were made of: a denoising loop asks for the
same ones at each step."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .patch import Call

Values = TypeVar("Values", bound=tuple)


class _Capture(threading.local):
    """Whether this thread's calls are being captured into a CUDA graph by this package, for callers on which
    stream."""

    stream: Any = None
    is_on = False


_capture = _Capture()


@contextlib.contextmanager
def capturing(device: torch.device) -> Iterator[None]:
    """Marks what this thread runs as being captured, for callers on the stream that is current now."""
    before = _capture.is_on, _capture.stream
    _capture.is_on, _capture.stream = True, _current_stream(device)
    try:
        yield
    finally:
        _capture.is_on, _capture.stream = before


def is_capturing() -> bool:
    return _capture.is_on


def _current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


class Kept(NamedTuple):
    """Tensors, and what they were made of."""

    key: tuple
    values: tuple

    @staticmethod
    def of(call: Call, x: Tensor, arguments: tuple, make: Callable[[], Values]) -> Values:
        """The values of ``arguments``, made on x's device, or those kept if they were made of the same."""
        if torch.compiler.is_compiling() or not _may_be_kept(x, arguments):
            return make()
        stream = _capture.stream if _capture.is_on else _current_stream(x.device)
        key = (x.device, stream, *_flat(arguments))
        kept: Any = call.stand_in.cached
        if kept is None or kept.key != key:
            # Tensors of inference mode could be in no gradient later, nor tell that they were written to.
            with torch.inference_mode(False), torch.no_grad():
                kept = Kept(key, make())
            # What is made while a CUDA graph is captured has no values until the graph is replayed.
            if not _capture.is_on and all(type(tensor) is Tensor for tensor in kept.values):
                call.stand_in.cached = kept
        return kept.values


def _flat(arguments: tuple) -> Iterator[Any]:
    for argument in arguments:
        if isinstance(argument, (tuple, list)):
            yield from (len(argument), *argument)
        else:
            yield argument


def _may_be_kept(x: Tensor, arguments: tuple) -> bool:
    """Whether values made now from these arguments are right in another call with equal ones."""
    return (
        # Arrays and tensors may have other values by then.
        all(argument is None or type(argument) in (int, float) for argument in _flat(arguments))
        # Modes make tensors without values, or see what they are made from, and so do captures of others.
        and (
            _capture.is_on
            or torch._C._len_torch_dispatch_stack() == 0
            and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
        )
    )
