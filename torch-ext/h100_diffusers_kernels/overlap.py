"""Whether strided tensors have elements in common, as ``overlap.cpp`` answers it, for tensors without memory
and for those that ``torch.vmap`` batches.

Elements in common are solutions of an equation of strides in bounded integers. It is solved one stride at a
time, the largest first: what the smaller ones can add up to leaves few multiples of it to try.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_MAX_STEPS = 1 << 14


class _TooManySteps(Exception):
    pass


def _is_symbolic(tensor: Tensor) -> bool:
    numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return not all(isinstance(number, int) for number in numbers)


class _Terms:
    """Multiples of strides: step -> the largest count."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def add(self, step: int, count: int) -> None:
        if step and count:
            self.counts[step] = self.counts.get(step, 0) + count

    def add_up(self) -> None:
        self.steps = sorted(self.counts, reverse=True)
        self.reach = [0]
        for step in reversed(self.steps):
            self.reach.insert(0, self.reach[0] + step * self.counts[step])
        self.tried = 0

    def _try(self) -> None:
        self.tried += 1
        if self.tried > _MAX_STEPS:
            raise _TooManySteps

    def can_add_up(self, first: int, total: int) -> bool:
        if not 0 <= total <= self.reach[first]:
            return False
        if first == len(self.steps):
            return True
        step, rest = self.steps[first], self.reach[first + 1]
        least = max(0, -((rest - total) // step))
        for count in range(least, min(self.counts[step], total // step) + 1):
            self._try()
            if self.can_add_up(first + 1, total - count * step):
                return True
        return False

    def can_cancel(self, first: int, total: int, has_multiple: bool) -> bool:
        if abs(total) > self.reach[first]:
            return False
        if first == len(self.steps):
            return has_multiple
        step, rest = self.steps[first], self.reach[first + 1]
        count = self.counts[step]
        least = max(-count if has_multiple else 0, -((total + rest) // step))
        for multiple in range(least, min(count, (rest - total) // step) + 1):
            self._try()
            if self.can_cancel(first + 1, total + multiple * step, has_multiple or multiple != 0):
                return True
        return False


def overlaps_itself(tensor: Tensor) -> bool:
    """Exact for all layouts that are met; True where the answer would take too many steps, and False of
    symbolic sizes."""
    if _is_symbolic(tensor) or tensor.numel() == 0:
        return False
    terms = _Terms()
    for size, stride in zip(tensor.shape, tensor.stride()):
        if size == 1:
            continue
        if stride == 0 or stride in terms.counts:
            return True
        terms.add(stride, size - 1)
    terms.add_up()
    if all(step > rest for step, rest in zip(terms.steps, terms.reach[1:])):
        return False
    try:
        return terms.can_cancel(0, 0, False)
    except _TooManySteps:
        return True


def is_same_view(a: Tensor, b: Tensor) -> bool:
    """Whether the elements of the two, of one dtype, are the same, each at the same index."""
    if a is b:
        return True
    if _is_symbolic(a) or _is_symbolic(b) or a.shape != b.shape:
        return False
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return False
    strides = zip(a.shape, a.stride(), b.stride())
    return a.storage_offset() == b.storage_offset() and all(
        size <= 1 or stride == other for size, stride, other in strides
    )


def overlap(a: Tensor, b: Tensor) -> bool:
    """Likewise of two tensors."""
    if _is_symbolic(a) or _is_symbolic(b) or a.numel() == 0 or b.numel() == 0:
        return False
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return False
    terms = _Terms()
    begins: list[Any] = []  # integers, as nothing is symbolic
    extents: list[Any] = []
    for tensor in (a, b):
        bytes_ = tensor.element_size()
        begins.append(tensor.storage_offset() * bytes_)
        extents.append(bytes_ - 1)
        terms.add(1, bytes_ - 1)
        for size, stride in zip(tensor.shape, tensor.stride()):
            terms.add(stride * bytes_, size - 1)
            extents[-1] += stride * bytes_ * (size - 1)
    # Steps that reach no further than the run of bytes below them make it longer.
    for step in sorted(terms.counts):
        if 1 < step <= terms.counts[1] + 1:
            terms.counts[1] += step * terms.counts.pop(step)
    terms.add_up()
    try:
        return terms.can_add_up(0, begins[1] - begins[0] + extents[1])
    except _TooManySteps:
        return True
