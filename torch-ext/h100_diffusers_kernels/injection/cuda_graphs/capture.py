"""One call captured into a graph: memory for its arguments, what it returned, and what it reads besides."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from ...arguments import PLAIN_TYPES
from .. import recording
from . import arguments as arguments_
from .arguments import Arguments
from .memory import Memory
from .reasons import CannotCapture

_NUMBERS = frozenset((int, float, bool, type(None), str, torch.dtype, torch.device))
_Getter = type(vars(torch._C.TensorBase)["shape"].__get__)
# What tells of a tensor, but not where it is: whoever asks for that may read it.
_OF_SHAPE = frozenset(
    (
        *(Tensor.size, Tensor.stride, Tensor.dim, Tensor.numel, Tensor.storage_offset),
        *(Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size),
        *(Tensor.__len__, Tensor.is_inference, Tensor.is_conj, Tensor.is_neg),
    )
)
# What gives values, or numbers of them, to Python.
_WAITING = frozenset(
    (
        *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__bool__, Tensor.__float__),
        *(Tensor.__int__, Tensor.__index__, Tensor.nonzero, torch.nonzero, Tensor.masked_select),
        *(torch.masked_select, Tensor.unique, torch.unique, Tensor.equal, torch.equal),
        *(Tensor.allclose, torch.allclose, Tensor.is_nonzero, torch.is_nonzero),
    )
)
# That write to nothing but an ``out``, whether somebody counts writes to their operands or not.
_READING = frozenset((torch.cat, torch.stack, Tensor.__getitem__))
# That may write to their operands while nobody counts it, or give away where these are.
_UNCOUNTED = frozenset(
    (
        *(torch.batch_norm, torch.nn.functional.batch_norm, torch.native_batch_norm),
        *(torch.cudnn_batch_norm, torch.batch_norm_gather_stats),
        *(torch.batch_norm_gather_stats_with_counts, torch.batch_norm_update_stats),
        *(torch.fused_moving_avg_obs_fake_quant, torch._fused_moving_avg_obs_fq_helper),
        Tensor.data_ptr,
    )
)
_WRITES_TO_GIVEN = "it writes to a tensor that it is given"
_COPIES = frozenset((Tensor.copy_, Tensor.__setitem__, Tensor.index_put_))


class Capture:
    """A call that can be run again with other values in its tensors.

    Attributes:
        memory: what the graph reads besides its arguments and what is watched.
        leaks: whether something keeps what the call computed, besides its caller.
        writes_outside: whether the call may write to tensors that it neither was given nor made.

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
        watched: list[Tensor],
    ) -> None:
        self._graph = graph
        self._leaves: list[Any] = []
        with torch.inference_mode(False), torch.no_grad():  # their versions tell of writes
            self._inputs = [
                arguments_.like(tensor).requires_grad_(tensor.requires_grad)
                for tensor in arguments.tensors
            ]
        self._targets = [arguments_.without_repetition(tensor) for tensor in self._inputs]
        self._copy_in(arguments.tensors)  # undefined values would be no indices
        args, kwargs = arguments.with_tensors(self._inputs)
        given = _pytree.tree_leaves((args, kwargs))
        recorder = _Recorder(device, self._inputs, watched)

        def run() -> Any:
            with recorder:
                return forward(*args, **kwargs)

        with recording.begin(device):
            result = graph.capture(run)
        try:
            if recorder.refusal is not None:  # somebody caught it on its way
                raise CannotCapture(recorder.refusal)
            recorder.refuse_writes()
            self._leaves, self._spec = _pytree.tree_flatten(result)
            del result
            _refuse_changed_containers(given, _pytree.tree_leaves((args, kwargs)))
            self._refuse_results()
            # It must not be freed.
            self.memory = Memory(list(recorder.externals.values()))
            self.leaks = recorder.has_kept_any(self._results().values())
            self.writes_outside = recorder.writes_outside()
        except BaseException:
            self.reset()
            raise

    def replay(self, tensors: list[Tensor]) -> Any:
        """What the call returns for other values of its tensors, in memory of the caller's own."""

        copies: dict[int, Tensor] = {}

        def begin() -> None:
            # First what there may be too little memory for: a forward that writes must not do so twice.
            copies.update((key, arguments_.like(tensor)) for key, tensor in self._results().items())
            self._copy_in(tensors)

        return self._graph.replay(begin, lambda: self._copy_out(copies))

    def reset(self) -> None:
        self._graph.reset()
        self._inputs, self._targets, self._leaves, self.memory = [], [], [], Memory([])

    def _results(self) -> dict[int, Tensor]:
        """The tensors that the call returns, each once, by id."""
        return {id(leaf): leaf for leaf in self._leaves if isinstance(leaf, Tensor)}

    def _copy_in(self, tensors: list[Tensor]) -> None:
        for target, tensor in zip(self._targets, tensors):
            target.copy_(arguments_.without_repetition(tensor))

    def _copy_out(self, copies: dict[int, Tensor]) -> Any:
        for key, tensor in self._results().items():
            copy = arguments_.without_repetition(copies[key])
            copy.copy_(arguments_.without_repetition(tensor))
        leaves = [copies[id(x)] if isinstance(x, Tensor) else x for x in self._leaves]
        return _pytree.tree_unflatten(leaves, self._spec)

    def _refuse_results(self) -> None:
        for leaf in self._leaves:
            if isinstance(leaf, Tensor):
                if type(leaf) is not Tensor or leaf.layout is not torch.strided:
                    raise CannotCapture(f"it returns a {type(leaf).__name__}")
            elif not isinstance(leaf, (type(None), bool, int, float, str)):
                raise CannotCapture(f"it returns a {type(leaf).__name__}")


def _refuse_changed_containers(given: list[Any], now: list[Any]) -> None:
    if len(given) != len(now) or any(a is not b for a, b in zip(given, now)):
        raise CannotCapture("it changes a list or dictionary that it is given")


class _Recorder(TorchFunctionMode):
    """Sees what a call asks of PyTorch: tensors from outside that it reads, and what a graph cannot do again.

    It is a function mode, as operations are made of others in another way within a dispatch mode. The device
    itself refuses to wait for the host in a capture, and to draw random numbers.

    Attributes:
        externals: tensors that were neither given nor made in the call nor are watched, by id.
        refusal: the reason of what was raised, if anything was. The error itself would hold the model.
    """

    def __init__(self, device: torch.device, inputs: list[Tensor], watched: list[Tensor]) -> None:
        super().__init__()
        self._device = device
        self._inputs = inputs
        self._versions = [tensor._version for tensor in inputs]
        self._watched = [tensor for tensor in watched if tensor.device == device]
        self._watched_ids = set(map(id, self._watched))
        self._watched_storages = set(map(_storage, self._watched))
        self._watched_versions = list(map(_version, self._watched))
        # Of what was given and what was made. A weak reference keeps a storage's number from being another's.
        self._own: dict[int, StorageWeakRef | None] = dict.fromkeys(map(_storage, inputs))
        self._elsewhere: set[int] = set()  # of what was made, on other devices
        self._writes = False
        self.externals: dict[int, Tensor] = {}
        self._external_storages: set[int] = set()
        self._views: dict[int, Tensor] = {}  # of externals, made in the call; kept for their ids
        self.refusal: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if type(func) is _Getter or func in _OF_SHAPE:
            result = func(*args, **(kwargs or {}))
            if type(result) in PLAIN_TYPES:
                self._see_view(args[0], result)
            return result
        try:
            return self._record(func, args, kwargs or {})
        except CannotCapture as refusal:
            self.refusal = refusal.reason
            raise

    def refuse_writes(self) -> None:
        """To the tensors that were given: their memory is not the caller's."""
        if any(tensor._version != then for tensor, then in zip(self._inputs, self._versions)):
            raise CannotCapture(_WRITES_TO_GIVEN)

    def writes_outside(self) -> bool:
        """Whether anything may have been written to that was neither given nor made: nobody counts writes to
        what was made in inference mode."""
        versions = self._watched_versions
        return self._writes or None in versions or list(map(_version, self._watched)) != versions

    def _record(self, func: Any, args: tuple, kwargs: dict) -> Any:
        read = _tensors_in(args)
        if kwargs:
            read += _tensors_in(kwargs.values())
        own, watched = self._own, self._watched_ids
        outside: list[Tensor] = []
        given: list[Tensor] = []
        elsewhere: list[Tensor] = []
        for tensor in read:
            if id(tensor) in watched:
                continue
            storage = tensor.untyped_storage()._cdata
            if storage not in own:
                self._see_external(func, tensor, storage)
                outside.append(tensor)
            elif own[storage] is None:
                given.append(tensor)
            elif storage in self._elsewhere:
                elsewhere.append(tensor)
        if func in _UNCOUNTED and any(_storage(tensor) not in own for tensor in read):
            self._writes = True
        if func in _WAITING and len(elsewhere) < len(read):
            raise CannotCapture(f"it waits for values on the host ({_name(func)})")
        if (outside or given) and (func not in _READING or "out" in kwargs):
            result = self._run_counted(func, args, kwargs, outside, given)
        else:
            result = func(*args, **kwargs)
        made = [result] if type(result) in PLAIN_TYPES else _tensors_in((result,))
        for tensor in made:
            untyped = tensor.untyped_storage()
            storage = untyped._cdata
            if storage in own:
                if storage in self._elsewhere:
                    self._place(tensor, storage)
            elif not self._is_external(storage):
                own[storage] = StorageWeakRef(untyped)
                self._place(tensor, storage)
            elif storage in self._external_storages and id(tensor) not in self.externals:
                self._views[id(tensor)] = tensor
        if elsewhere:
            self._refuse_copies(func, read, elsewhere, made)
        return result

    def _run_counted(
        self, func: Any, args: tuple, kwargs: dict, outside: list[Tensor], given: list[Tensor]
    ) -> Any:
        versions = list(map(_version, outside))
        given_versions = list(map(_version, given))
        result = func(*args, **kwargs)
        if list(map(_version, outside)) != versions:
            self._writes = True
        uncounted = [tensor for tensor, version in zip(outside, versions) if version is None]
        if uncounted and _may_write(func, args, kwargs, uncounted):
            self._writes = True
        if list(map(_version, given)) != given_versions:  # through ``data``, too
            raise CannotCapture(_WRITES_TO_GIVEN)
        return result

    def _is_external(self, storage: int) -> bool:
        return storage in self._watched_storages or storage in self._external_storages

    def _see_view(self, tensor: Tensor, view: Tensor) -> None:
        """One that is an attribute of the tensor, as ``T`` and ``data`` are."""
        storage = _storage(view)
        if (
            type(tensor) in PLAIN_TYPES
            and storage == _storage(tensor)
            and storage not in self._own
            and storage not in self._watched_storages
            and tensor.device == self._device
        ):
            self._see_external(None, tensor, storage)
            self._views[id(view)] = view

    def _see_external(self, func: Any, tensor: Tensor, storage: int) -> None:
        if tensor.device != self._device:
            raise CannotCapture(f"it reads a tensor on {tensor.device} ({_name(func)})")
        if storage not in self._watched_storages and id(tensor) not in self._views:
            self.externals[id(tensor)] = tensor
            self._external_storages.add(storage)

    def _place(self, tensor: Tensor, storage: int) -> None:
        if tensor.device == self._device:
            self._elsewhere.discard(storage)
        else:
            self._elsewhere.add(storage)

    def _refuse_copies(
        self, func: Any, read: list[Tensor], elsewhere: list[Tensor], made: list[Tensor]
    ) -> None:
        """A copy reads the host's memory at each replay; a number among operands is part of a launch."""
        is_alone = len(elsewhere) == len(read)
        if not any(tensor.device == self._device for tensor in (made if is_alone else read)):
            return
        if is_alone or func in _COPIES or any(tensor.dim() for tensor in elsewhere):
            raise CannotCapture(f"it copies from one device to another ({_name(func)})")

    def has_kept_any(self, results: Iterable[Tensor]) -> bool:
        """Whether anything keeps memory of the call's own besides its results."""
        returned = {_storage(tensor) for tensor in results}
        made = ((storage, ref) for storage, ref in self._own.items() if ref is not None)
        kept = [ref for storage, ref in made if storage not in returned]
        if not all(ref.expired() for ref in kept):
            gc.collect()
        return not all(ref.expired() for ref in kept)


def _name(func: Any) -> str:
    return getattr(func, "__name__", None) or str(func)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _may_write(func: Any, args: tuple, kwargs: dict, tensors: list[Tensor]) -> bool:
    """Whether a function may write to the memory of some of its operands: of operators their schemas tell."""
    if not isinstance(func, torch._ops.OpOverload):
        return True
    parameters = {parameter.name: parameter for parameter in func._schema.arguments}
    given = [*zip(parameters, args), *kwargs.items()]
    written = [value for name, value in given if parameters[name].is_write]
    return not set(map(_storage, _tensors_in(written))).isdisjoint(map(_storage, tensors))


def _version(tensor: Tensor) -> int | None:
    """Changes when it is written to; None where nobody counts that."""
    return None if tensor.is_inference() else tensor._version


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
