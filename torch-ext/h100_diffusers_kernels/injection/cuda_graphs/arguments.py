"""A call's arguments, as a graph sees them: tensors whose values it reads at each replay, and all the rest,
which was part of what was captured."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from ...arguments import KERNEL_DEVICE_TYPE, PLAIN_TYPES
from .reasons import CannotCapture

# Values that cannot change, and are equal only if they are the same.
_CONSTANTS = (type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.memory_format)
# Libraries choose kernels by how far an address is aligned, up to this many bytes. An allocation of a
# tensor's own is aligned as far on each device.
_ALIGNMENT = 256 if KERNEL_DEVICE_TYPE == "cuda" else 64


class Arguments(NamedTuple):
    """Of one call.

    Attributes:
        key: equal for calls that differ in tensors' values alone.
        tensors: each once, in order.
        leaves: arguments within their containers; a tensor's is its place among ``tensors``, in ``_Place``.
        spec: those containers.
    """

    key: Hashable
    tensors: list[Tensor]
    leaves: list[Any]
    spec: Any

    def with_tensors(self, tensors: list[Tensor]) -> tuple[tuple, dict]:
        """Arguments and keyword arguments, with others in the place of the tensors."""
        leaves = [tensors[leaf] if type(leaf) is _Place else leaf for leaf in self.leaves]
        args, kwargs = _pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


class _Place(int):
    """Of a tensor."""


def read(args: tuple, kwargs: dict) -> Arguments:
    """The arguments of a call.

    Raises:
        CannotCapture: if there are some whose values a graph could not follow.
    """
    leaves, spec = _pytree.tree_flatten((args, kwargs))
    tensors: list[Tensor] = []
    places: dict[int, _Place] = {}
    forms: list[Hashable] = []
    for i, leaf in enumerate(leaves):
        kind = type(leaf)
        if isinstance(leaf, Tensor):
            place = places.get(id(leaf))
            if place is None:
                place = places[id(leaf)] = _Place(len(tensors))
                tensors.append(leaf)
                forms.append(_form(leaf))
            leaves[i] = place
            forms.append(place)
        elif kind is float:
            forms.append(leaf.hex())  # of 0.0, -0.0 and NaN, equality is not what tells them apart
        elif kind in _CONSTANTS or isinstance(leaf, enum.Enum):
            forms.append((kind, leaf))
        else:
            raise CannotCapture(f"it was given a {kind.__name__}, which may hold anything")
    if not tensors:
        raise CannotCapture("it was given no tensor")
    return Arguments((spec, *forms), tensors, leaves, spec)


def _form(tensor: Tensor) -> Hashable:
    device = tensor.device
    if device.type != KERNEL_DEVICE_TYPE:
        raise CannotCapture(f"it was given a tensor on {device.type}")
    if type(tensor) not in PLAIN_TYPES:
        raise CannotCapture(f"it was given a {type(tensor).__name__}")
    if (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        raise CannotCapture("it was given a tensor that is not plain values in memory")
    stride = tensor.stride()
    # PyTorch chooses between products of matrices and of batches by whether a gradient may be asked for, even
    # where none can be.
    return (tensor.shape, stride, tensor.dtype, device, tensor.requires_grad, alignment(tensor))


def alignment(tensor: Tensor) -> int:
    """The bytes to which a tensor's memory is aligned, up to those that matter.

    Of a single number none do: a pipeline's time steps are parts of one tensor.
    """
    address = tensor.data_ptr()
    if address == 0 or all(n == 1 or s == 0 for n, s in zip(tensor.shape, tensor.stride())):
        return _ALIGNMENT
    return min(address & -address, _ALIGNMENT)


def like(tensor: Tensor) -> Tensor:
    """An uninitialized tensor of the same shape, strides, dtype, device and alignment.

    Raises:
        CannotCapture: if elements of the tensor overlap in another way than by a stride of 0.
    """
    sizes = [1 if s == 0 else n for n, s in zip(tensor.shape, tensor.stride())]
    if _overlaps(sizes, tensor.stride()):
        raise CannotCapture("it was given a tensor whose elements overlap in memory")
    extent = 0
    if all(sizes):
        extent = 1 + sum((n - 1) * s for n, s in zip(sizes, tensor.stride()))
    offset = alignment(tensor) % _ALIGNMENT // tensor.element_size()
    flat = torch.empty(extent + offset, dtype=tensor.dtype, device=tensor.device)
    return flat.as_strided(tensor.shape, tensor.stride(), offset)


def _overlaps(sizes: list[int], strides: tuple[int, ...]) -> bool:
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(strides, sizes) if n > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def without_repetition(tensor: Tensor) -> Tensor:
    """The elements that a tensor has in memory, for ``copy_``: one of each dimension with a stride of 0."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
