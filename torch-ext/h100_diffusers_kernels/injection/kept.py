"""Values that a forward keeps from call to call: a denoising loop asks for the same ones at each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from . import recording
from .injected import Injected

Values = TypeVar("Values", bound=tuple)


class Kept(NamedTuple):
    """Tensors, and what they were made of."""

    key: tuple
    values: tuple

    @staticmethod
    def of(injected: Injected, x: Tensor, arguments: tuple, make: Callable[[], Values]) -> Values:
        """The values of ``arguments``, made on x's device, or those kept if they were made of the same."""
        if torch.compiler.is_compiling() or not _may_be_kept(x, arguments):
            return make()
        key = (x.device, recording.stream_of_caller(x), *_flat(arguments))
        kept: Any = injected.kept
        if kept is None or kept.key != key:
            # Tensors of inference mode could be in no gradient later, nor tell that they were written to.
            with torch.inference_mode(False), torch.no_grad():
                kept = Kept(key, make())
            # What is made while a CUDA graph is captured has no values until the graph is replayed.
            if not recording.is_on() and all(type(tensor) is Tensor for tensor in kept.values):
                injected.kept = kept
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
        and (
            recording.is_on()
            # Modes make tensors without values, or see what they are made from, and so do captures of others.
            or torch._C._len_torch_dispatch_stack() == 0
            and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
        )
    )
