"""One call captured into a graph: copies of its arguments' memory, what it returned, and what it reads besides."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...arguments import PLAIN_TYPES
from .. import recording
from . import arguments as arguments_
from .arguments import Arguments
from .reasons import CannotCapture

_NUMBERS = frozenset((int, float, bool, type(None), str, torch.dtype, torch.device))
_RANDOM = torch.Tag.nondeterministic_seeded
_ON_THE_HOST = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Capture:
    """A call that can be run again with other values in its tensors.

    Raises:
        CannotCapture: if the call does what a graph cannot do again.
        BaseException: whatever the call raises.
    """

    def __init__(
        self,
        graph: Any,
        device: torch.device,
        arguments: Arguments,
        forward: Callable[..., Any],
        is_watched: Callable[[Tensor], bool],
    ) -> None:
        self._graph = graph
        self._leaves: list[Any] = []
        self._externals: list[Tensor] = []
        with _outside_of_inference_mode():
            self._inputs = [
                arguments_.like(tensor).requires_grad_(tensor.requires_grad)
                for tensor in arguments.tensors
            ]
        self._targets = [arguments_.without_repetition(tensor) for tensor in self._inputs]
        self._copy_in(arguments.tensors)  # undefined values would be no indices
        args, kwargs = arguments.with_tensors(self._inputs)
        given = _pytree.tree_leaves((args, kwargs))
        recorder = _Recorder(device, self._inputs)

        def run() -> Any:
            with _outside_of_inference_mode(), recorder:
                return forward(*args, **kwargs)

        with recording.begin(device):
            result = graph.capture(run)
        if recorder.refusal is not None:  # somebody caught it on its way
            self.reset()
            raise recorder.refusal
        try:
            self._leaves, self._spec = _pytree.tree_flatten(result)
            del result
            _refuse_changed_containers(given, _pytree.tree_leaves((args, kwargs)))
            self._refuse_results()
            # What the graph reads besides arguments and what its module watches: it must not be freed.
            self._externals = [t for t in recorder.externals.values() if not is_watched(t)]
            self.leaks = recorder.has_kept_any(self._tensors())
        except BaseException:
            self.reset()
            raise

    def replay(self, tensors: list[Tensor]) -> Any:
        """What the call returns for other values of its tensors, in memory of the caller's own."""

        return self._graph.replay(lambda: self._copy_in(tensors), self._copy_out)

    def reset(self) -> None:
        self._graph.reset()
        self._inputs, self._targets, self._leaves, self._externals = [], [], [], []

    def _tensors(self) -> Iterator[Tensor]:
        return (leaf for leaf in self._leaves if isinstance(leaf, Tensor))

    def _copy_in(self, tensors: list[Tensor]) -> None:
        for target, tensor in zip(self._targets, tensors):
            target.copy_(arguments_.without_repetition(tensor))

    def _copy_out(self) -> Any:
        copies: dict[int, Tensor] = {}
        for tensor in self._tensors():
            if id(tensor) not in copies:
                copies[id(tensor)] = _copy(tensor)
        leaves = [copies[id(x)] if isinstance(x, Tensor) else x for x in self._leaves]
        return _pytree.tree_unflatten(leaves, self._spec)

    def _refuse_results(self) -> None:
        for leaf in self._leaves:
            if isinstance(leaf, Tensor):
                if type(leaf) is not Tensor or leaf.layout is not torch.strided:
                    raise CannotCapture(f"it returns a {type(leaf).__name__}")
            elif not isinstance(leaf, (type(None), bool, int, float, str)):
                raise CannotCapture(f"it returns a {type(leaf).__name__}")


@contextlib.contextmanager
def _outside_of_inference_mode() -> Iterator[None]:
    """Within it, PyTorch shows a dispatch mode operations as a whole that are made of others, and takes them apart
    below of where it knows whether a parameter requires a gradient, by which it chooses between them."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _copy(tensor: Tensor) -> Tensor:
    copy = arguments_.like(tensor)
    arguments_.without_repetition(copy).copy_(arguments_.without_repetition(tensor))
    return copy


def _refuse_changed_containers(given: list[Any], now: list[Any]) -> None:
    if len(given) != len(now) or any(a is not b for a, b in zip(given, now)):
        raise CannotCapture("it changes a list or dictionary that it is given")


class _Recorder(TorchDispatchMode):
    """Sees each operation of a call: tensors from outside that it reads, and what a graph cannot do again.

    Attributes:
        externals: tensors that were neither given nor made in the call, one for each memory.
        refusal: what was raised, if anything was.
    """

    def __init__(self, device: torch.device, inputs: list[Tensor]) -> None:
        super().__init__()
        self._device = device
        self._given = {_storage(tensor) for tensor in inputs}
        self._made: dict[int, StorageWeakRef] = {}
        self._elsewhere: set[int] = set()  # of what was made, on other devices
        self.externals: dict[int, Tensor] = {}
        self.refusal: CannotCapture | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in a capture, and the wrapper takes its time at each operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._record(func, args, kwargs or {})
        except CannotCapture as refusal:
            self.refusal = refusal
            raise

    def _record(self, func: Any, args: tuple, kwargs: dict) -> Any:
        read = _tensors_in(args)
        if kwargs:
            read += _tensors_in(kwargs.values())
        if func is torch.ops.aten.lift_fresh.default:  # of a tensor made of numbers just now
            self._make(read[0], _storage(read[0]), False)
        storages = [_storage(tensor) for tensor in read]
        for tensor, storage in zip(read, storages):
            if storage not in self._made and storage not in self._given:
                if tensor.device != self._device:
                    raise CannotCapture(f"it reads a tensor on {tensor.device} ({func})")
                self.externals.setdefault(storage, tensor)
        reads_elsewhere = self._elsewhere and not self._elsewhere.isdisjoint(storages)
        reads_here = bool(read) and not (reads_elsewhere and self._elsewhere.issuperset(storages))
        if reads_elsewhere or "device" in kwargs:
            self._refuse_copies(func, read, reads_here, kwargs.get("device"))
        if reads_here:
            checks = _checks_of(func)
            if checks is not None:
                self._refuse_operation(func, checks, args, kwargs)
        result = func(*args, **kwargs)
        for tensor in _tensors_in((result,)):
            storage = _storage(tensor)
            if storage not in storages:
                self._make(tensor, storage, reads_here)
        return result

    def _make(self, tensor: Tensor, storage: int, is_here: bool) -> None:
        self._made[storage] = StorageWeakRef(tensor.untyped_storage())
        if is_here or tensor.device == self._device:
            self._elsewhere.discard(storage)
        else:
            self._elsewhere.add(storage)

    def _refuse_copies(self, func: Any, read: list[Tensor], reads_here: bool, to: Any) -> None:
        """From one device to another the host would wait; single numbers are part of a launch."""
        elsewhere = [tensor for tensor in read if tensor.device != self._device]
        is_copy = func is torch.ops.aten.copy_.default
        is_moved = read and to is not None and torch.device(to).type != read[0].device.type
        if is_moved or (reads_here and any(is_copy or tensor.dim() for tensor in elsewhere)):
            raise CannotCapture(f"it copies from one device to another ({func})")

    def _refuse_operation(self, func: Any, checks: _Checks, args: tuple, kwargs: dict) -> None:
        if checks.waits and not _is_index_of_numbers(func, args):
            raise CannotCapture(f"it waits for values on the host ({func})")
        if checks.is_random:
            names = [argument.name for argument in func._schema.arguments]
            given = {**dict(zip(names, args)), **kwargs}
            # Attention draws numbers for its dropout alone, and dropout where it is trained.
            chance = given.get("dropout_p", 0.0) if "dropout_p" in names else given.get("p", 1.0)
            if chance != 0.0 and given.get("train", True) is not False:
                raise CannotCapture(f"it draws random numbers ({func})")
        for place, name in checks.written:
            value = args[place] if place < len(args) else kwargs.get(name)
            if any(_storage(tensor) in self._given for tensor in _tensors_in((value,))):
                raise CannotCapture(f"it writes to a tensor that it is given ({func})")

    def has_kept_any(self, results: Iterator[Tensor]) -> bool:
        """Whether anything keeps memory of the call's own besides its results."""
        returned = {_storage(tensor) for tensor in results}
        kept = [ref for storage, ref in self._made.items() if storage not in returned]
        if not all(ref.expired() for ref in kept):
            gc.collect()
        return not all(ref.expired() for ref in kept)


class _Checks(NamedTuple):
    """What an operation may do that a graph cannot.

    Attributes:
        waits: whether what it returns depends on values.
        is_random: whether it may draw random numbers.
        written: the arguments that it writes to, by place and name.
    """

    waits: bool
    is_random: bool
    written: tuple[tuple[int, str], ...]


@functools.cache
def _checks_of(func: Any) -> _Checks | None:
    """None if there is nothing to check."""
    checks = _Checks(
        any(tag in func.tags for tag in _ON_THE_HOST),
        _RANDOM in func.tags,
        tuple(
            (i, argument.name)
            for i, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ),
    )
    return checks if any(checks) else None


def _is_index_of_numbers(func: Any, args: tuple) -> bool:
    """Whether it is one by numbers: by a mask, how many elements there are depends on its values."""
    return func is torch.ops.aten.index.Tensor and all(
        index is None or index.dtype in (torch.int32, torch.int64) for index in args[1]
    )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Those among some values, and those that others are made of."""
    found: list[Tensor] = []
    for value in values:
        kind = type(value)
        if kind in PLAIN_TYPES:
            found.append(value)
        elif kind in _NUMBERS:
            continue
        elif isinstance(value, (list, tuple)):
            found += _tensors_in(value)
        elif isinstance(value, Tensor):
            parts = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else ()
            found += _tensors_in([getattr(value, part) for part in parts]) if parts else [value]
    return found
