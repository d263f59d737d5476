"""Which memory tensors reach: a graph reads it wherever the tensors are by then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_attributes: Any = vars(torch._C.TensorBase)
# Of a contiguous tensor these tell which memory it reaches; of any other its size and strides do, too.
_OF_ALL = (Tensor.data_ptr, _attributes["nbytes"].__get__, Tensor.is_contiguous)
_OF_SCATTERED = (Tensor.size, Tensor.stride)


class Memory:
    """The memory of some tensors."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._scattered = [tensor for tensor in tensors if not tensor.is_contiguous()]
        self._then = self._read()

    def holds(self) -> bool:
        """Whether the tensors are where they were, and reach as far."""
        now = self._read()
        return None not in now and now == self._then

    def _read(self) -> tuple[list[list] | None, ...]:
        return read_all(_OF_ALL, self._tensors), read_all(_OF_SCATTERED, self._scattered)


def read_all(
    readers: Sequence[Callable[[Tensor], Any]], tensors: list[Tensor]
) -> list[list] | None:
    """What each of the functions tells of each of the tensors; None where one has no memory of its own."""
    try:
        return [list(map(read, tensors)) for read in readers]
    except RuntimeError:
        return None
