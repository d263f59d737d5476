"""A call captured into a CUDA graph: its arguments, its results, and other tensors that it reads."""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from ...operations.conditions import KERNEL_DEVICE_TYPE, PLAIN_TYPES, an
from ..core.cache import capturing
from ..core.checks import TRANSPARENT_MODES
from ..parallel.exchange import received
from .model_fingerprint import Addresses, CannotCapture

# Serializes captures and replays of all threads: nothing may run during a capture, and graphs share memory
# and libraries' workspaces.
lock = threading.RLock()
# Types of immutable values that are interchangeable if equal. Floats are not.
_CONSTANTS = (type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.memory_format)
# Libraries choose kernels by the alignment of addresses, up to this many bytes.
_ALIGNMENT = 256 if KERNEL_DEVICE_TYPE == "cuda" else 64


class Arguments(NamedTuple):
    """The arguments of one call.

    Attributes:
        key: equal for calls that differ in tensor values only.
        tensors: without duplicates, all on one device.
        leaves: the arguments, without their containers.
        spec: the containers.
    """

    key: Hashable
    tensors: list[Tensor]
    leaves: list[Any]
    spec: Any

    def with_tensors(self, tensors: list[Tensor]) -> Any:
        """Arguments and keyword arguments, with other tensors."""
        others = dict(zip(map(id, self.tensors), tensors))
        leaves = [others.get(id(leaf), leaf) for leaf in self.leaves]
        return _pytree.tree_unflatten(leaves, self.spec)


def read_arguments(args: tuple, kwargs: dict) -> Arguments:
    """A call's arguments. Raises CannotCapture if one may hold values that a graph cannot update."""
    leaves, spec = _pytree.tree_flatten((args, kwargs))
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    numbers = {key: number for number, key in enumerate(tensors)}
    forms: list[Hashable] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            forms.append((numbers[id(leaf)], _form(leaf)))
        elif type(leaf) is float:
            forms.append(leaf.hex())  # tells 0.0 from -0.0, and NaN is equal to itself
        elif type(leaf) in _CONSTANTS or isinstance(leaf, enum.Enum):
            forms.append((type(leaf), leaf))
        else:
            raise CannotCapture(
                f"it was given {an(type(leaf).__name__)}, which graphs cannot update"
            )
    devices = sorted({str(tensor.device) for tensor in tensors.values()})
    if len(devices) != 1:
        raise CannotCapture(f"it was given tensors on {', '.join(devices) or 'no device'}")
    return Arguments((spec, *forms), list(tensors.values()), leaves, spec)


def _form(tensor: Tensor) -> Hashable:
    is_plain = type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided
    if not is_plain or tensor.is_quantized or tensor.is_conj():
        raise CannotCapture(f"it was given {an(type(tensor).__name__)} without plain values")
    # PyTorch's choice of matmul depends on requires_grad.
    form = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
    return (*form, _alignment(tensor))


def _alignment(tensor: Tensor) -> int:
    """Alignment in bytes, at most the relevant maximum. Scalars count as aligned: time steps are slices."""
    address = tensor.data_ptr()
    if address == 0 or _extent(tensor) == 1:
        return _ALIGNMENT
    return min(address & -address, _ALIGNMENT)


def _extent(tensor: Tensor) -> int:
    """The number of elements in a tensor's memory span."""
    return tensor.numel() and 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))


def _memory(tensor: Tensor) -> Tensor:
    """A tensor's memory span as one dimension, so that a copy includes overlaps and gaps."""
    return tensor.detach().as_strided((_extent(tensor),), (1,))


def like(tensor: Tensor) -> Tensor:
    """An uninitialized tensor of the same shape, strides, dtype, device and alignment."""
    offset = _alignment(tensor) % _ALIGNMENT // tensor.element_size()
    memory = torch.empty(_extent(tensor) + offset, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, tensor.stride(), offset)


class Capture:
    """A captured call that can be replayed with other tensor values. ``model_tensors`` are the model's, whose
    addresses are compared at each call.

    Attributes:
        externals: the addresses of other tensors that it reads.
        number: of the capture, the same on all ranks of context parallelism.

    Raises:
        CannotCapture: if a graph cannot repeat the call.
        Exception: any error of the call itself.
    """

    number = 0

    def __init__(
        self, graph: Any, call: Arguments, forward: Callable[..., Any], model_tensors: list[Tensor]
    ) -> None:
        device = call.tensors[0].device
        self.graph = graph
        with torch.inference_mode(False), torch.no_grad():  # their versions reveal writes
            self._inputs = [like(t).requires_grad_(t.requires_grad) for t in call.tensors]
        self._copy_in(call.tensors)  # uninitialized values may be invalid indices
        args, kwargs = call.with_tensors(self._inputs)
        known = [*self._inputs, *model_tensors]
        versions = _versions(known)
        recorder = _Recorder(device, known)

        def run() -> Any:
            with recorder:
                # A result may be that of a collective which nothing has waited for.
                result = _pytree.tree_map_only(Tensor, received, forward(*args, **kwargs))
            return result, [*map(_cache_tensors, _pytree.tree_leaves(result))]

        with capturing(device):
            result, in_caches = graph.capture(run)
        self._leaves, self._spec = _pytree.tree_flatten(result)
        results = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self._results = {id(tensor): tensor for tensor in itertools.chain(results, *in_caches)}
        self.externals = Addresses(list(recorder.externals.values()))
        refusal = recorder.refusal  # raised in the call, which may have caught it
        if _versions(known) != versions:
            refusal = refusal or "it writes to its arguments, parameters or buffers"
        for leaf in self._leaves:
            is_tensor = type(leaf) is Tensor and leaf.layout is torch.strided
            is_value = isinstance(leaf, (type(None), bool, int, float, str))
            if not (is_tensor or is_value or _is_cache(leaf)):
                refusal = refusal or f"it returns {an(type(leaf).__name__)}"
        if refusal is not None:
            graph.reset()
            raise CannotCapture(refusal)

    def replay(self, tensors: list[Tensor]) -> Any:
        """The call's results for other tensor values, in new memory."""
        return self.graph.replay(lambda: self._copy_in(tensors), self._copy_out)

    def _copy_in(self, tensors: list[Tensor]) -> None:
        for target, tensor in zip(self._inputs, tensors):
            _memory(target).copy_(_memory(tensor))

    def _copy_out(self) -> Any:
        copies: dict[int, Any] = {key: like(tensor) for key, tensor in self._results.items()}
        for key, tensor in self._results.items():
            _memory(copies[key]).copy_(_memory(tensor))
        # A deep copy of a cache has these copies of its tensors.
        leaves = [
            copy.deepcopy(leaf, {**copies}) if _is_cache(leaf) else copies.get(id(leaf), leaf)
            for leaf in self._leaves
        ]
        return _pytree.tree_unflatten(leaves, self._spec)


def _is_cache(value: Any) -> bool:
    """Whether it is transformers' cache of keys and values."""
    return type(value).__module__ == "transformers.cache_utils"


def _cache_tensors(value: Any) -> list[Tensor]:
    layers = value.layers if _is_cache(value) else ()
    return [t for layer in layers for t in vars(layer).values() if isinstance(t, Tensor)]


def _versions(tensors: list[Tensor]) -> list[int | None]:
    return [None if tensor.is_inference() else tensor._version for tensor in tensors]


class _Recorder(TorchFunctionMode):
    """Finds the tensors that a call reads besides its arguments and the model's. They must not move.

    Attributes:
        externals: these tensors, by id.
        refusal: why the call cannot be captured, or None.
    """

    def __init__(self, device: torch.device, known: list[Tensor]) -> None:
        super().__init__()
        self._device = device
        self._known = {_storage(tensor) for tensor in known if tensor.device == device}
        # Storages made in the call. A weak reference prevents reuse of the id.
        self._made: dict[int, StorageWeakRef] = {}
        self.externals: dict[int, Tensor] = {}
        self.refusal: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # In a function mode, functions of torch.nn.functional call themselves by their public names.
        if not getattr(func, "__globals__", _TORCH)["__name__"].startswith("torch"):
            self._refuse(f"{func.__name__} was replaced")
        read = _tensors_in((args, kwargs))
        storages = set(map(_storage, read))
        for tensor in read:
            if _storage(tensor) not in self._known and _storage(tensor) not in self._made:
                if tensor.device != self._device:
                    self._refuse(f"it reads a tensor on {tensor.device}")
                self.externals[id(tensor)] = tensor
        is_number = len(args) == 1 and type(args[0]) in (bool, int, float)
        if is_number and func in (torch.tensor, torch.as_tensor):
            # These copy a number from the host; a fill has it as a launch argument.
            func, args = torch.full, ((), *args)
        result = func(*args, **kwargs)
        made = _tensors_in(result)
        for tensor in made:
            if _storage(tensor) not in storages:
                self._made[_storage(tensor)] = StorageWeakRef(tensor.untyped_storage())
        # A copy would read the host's memory at each replay. Scalars are launch arguments.
        if len({t.device for t in (*read, *made) if t.dim() or func is Tensor.copy_}) > 1:
            self._refuse("it copies from one device to another")
        return result

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        raise CannotCapture(reason)


_TORCH = {"__name__": "torch"}
TRANSPARENT_MODES.add(_Recorder)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a value; a subclass's inner tensors."""
    found = []
    for leaf in _pytree.tree_leaves(value):
        if isinstance(leaf, Tensor) and hasattr(leaf, "__tensor_flatten__"):
            found += _tensors_in([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        elif isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            found.append(leaf)
    return found


# --------------------------------------------------------------------------------------------------
# CUDA


class Pool:
    """The memory pool of a pipeline's graphs, which overwrite each other's intermediate results.

    Attributes:
        graphs: those that use the pool. It is freed with the last one.
    """

    def __init__(self) -> None:
        self.graphs: weakref.WeakSet[CudaGraph] = weakref.WeakSet()

    def handle(self, device: torch.device) -> Any:
        handles = (graph.handle for graph in self.graphs if graph.device == device)
        return next(handles, None) or torch.cuda.graph_pool_handle()

    def __deepcopy__(self, memo: dict) -> Pool:
        return memo.setdefault(id(self), Pool())


class _Device:
    """A device's stream for all captures, because libraries keep a workspace per stream, and ``done``, the
    event at the end of the last replay."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.done = torch.cuda.Event()
        # A capture locks the default generator's state, which other threads may use. It gets this state
        # instead, because captured code must not draw random numbers.
        self._default_generator = torch.cuda.default_generators[device.index]
        self._generator = self._default_generator.clone_state()
        self._keeps_generator = torch.cuda.CUDAGraph()  # its memory on the device is allocated once
        self._keeps_generator.register_generator_state(self._generator)

    def begin(self, graph: torch.cuda.CUDAGraph, handle: Any) -> None:
        """Begins a capture on the current stream."""
        state = self._default_generator.graphsafe_get_state()
        self._default_generator.graphsafe_set_state(self._generator)
        try:
            graph.capture_begin(pool=handle, capture_error_mode="thread_local")
        finally:
            self._default_generator.graphsafe_set_state(state)


_device = functools.cache(_Device)


class CudaGraph:
    """A function's launches on a device, captured for replays."""

    def __init__(self, device: torch.device, pool: Pool) -> None:
        self.device = device
        self.handle: Any = None  # of the pool
        self._pool = pool
        self._graph: Any = None

    is_capturing = staticmethod(torch.cuda.is_current_stream_capturing)

    def capture(self, run: Callable[[], Any]) -> Any:
        """Captures ``run()``, which computes nothing yet. If it raises, no graph remains."""
        graph = torch.cuda.CUDAGraph()
        self.handle = self._pool.handle(self.device)
        with torch.cuda.device(self.device), _no_garbage_collection():
            shared = _device(self.device)
            torch.cuda.synchronize()
            # Memory cached outside of the pool cannot be released during a capture.
            torch.cuda.empty_cache()
            with torch.cuda.stream(shared.stream):
                shared.begin(graph, self.handle)
                try:
                    result = run()
                    graph.capture_end()
                except BaseException:
                    self._end_failed(graph)
                    raise
        self._graph = graph
        self._pool.graphs.add(self)
        return result

    def _end_failed(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except Exception:  # the capture has failed; PyTorch does not do this then
            torch._C._cuda_endAllocateToPool(self.device.index, self.handle)
            torch._C._cuda_releasePool(self.device.index, self.handle)
        graph.reset()

    def replay(self, before: Callable[[], None], after: Callable[[], Any]) -> Any:
        """Runs ``before()``, a replay and ``after()`` on the current stream; returns ``after``'s result."""
        with torch.cuda.device(self.device):
            stream, done = torch.cuda.current_stream(), _device(self.device).done
            # Graphs share memory: each waits for the last one, on any stream.
            stream.wait_event(done)
            try:
                before()
                self._graph.replay()
                return after()
            finally:
                done.record(stream)

    def reset(self) -> None:
        """Frees the graph's resources after its last replay."""
        if self._graph is not None:
            torch.cuda.synchronize(self.device)
            self._graph.reset()
            self._graph = None
            self._pool.graphs.discard(self)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Pauses garbage collection: if it frees another graph during a capture, PyTorch aborts the process."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
