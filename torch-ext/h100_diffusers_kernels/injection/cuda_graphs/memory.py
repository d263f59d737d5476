"""Which memory tensors reach: a graph reads it wherever the tensors are by then."""

from __future__ import annotations

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
        return self._read() == self._then

    def _read(self) -> list[list]:
        return [
            *(list(map(read, self._tensors)) for read in _OF_ALL),
            *(list(map(read, self._scattered)) for read in _OF_SCATTERED),
        ]
