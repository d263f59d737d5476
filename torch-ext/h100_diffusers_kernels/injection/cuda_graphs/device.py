"""CUDA's part of a capture: a graph, the memory that graphs share, and the order in which they run."""

from __future__ import annotations

import collections
import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Of all captures and replays, in all threads: a capture is alone, and graphs share memory and libraries'
# workspaces, so that they have to run one after the other.
lock = threading.RLock()


class Pool:
    """The memory that the graphs of a pipeline share: what one of them computes in between, the next one may
    overwrite."""

    def __init__(self) -> None:
        self._handles: dict[torch.device, Any] = {}
        self._users: collections.Counter[torch.device] = collections.Counter()

    def enter(self, device: torch.device) -> Any:
        """Its handle, for one graph more. Memory whose graphs are all gone is no pool any longer."""
        if self._users[device] == 0:
            self._handles[device] = torch.cuda.graph_pool_handle()
        self._users[device] += 1
        return self._handles[device]

    def leave(self, device: torch.device) -> None:
        self._users[device] -= 1

    def __deepcopy__(self, memo: dict) -> Pool:
        return memo.setdefault(id(self), Pool())


class _Device:
    """What all graphs of one device share."""

    _of: dict[torch.device, _Device] = {}

    def __init__(self, device: torch.device) -> None:
        # Libraries keep a workspace for each stream.
        self.capture_stream = torch.cuda.Stream(device)
        # A capture takes the state of the default generator away from other threads, which may draw from it
        # meanwhile: captures get this one instead, as nothing that is captured draws any.
        self.default_generator = torch.cuda.default_generators[device.index]
        self._generator = self.default_generator.clone_state()
        self._keeps_generator = torch.cuda.CUDAGraph()  # what it needs on the device is made once
        self._keeps_generator.register_generator_state(self._generator)
        self._last: Any = None  # the stream of the last replay
        self._done = torch.cuda.Event()

    @classmethod
    def of(cls, device: torch.device) -> _Device:
        if device not in cls._of:
            with torch.cuda.device(device):
                cls._of[device] = cls(device)
        return cls._of[device]

    def begin(self, graph: torch.cuda.CUDAGraph, handle: Any) -> None:
        """Begins a capture on the current stream."""
        state = self.default_generator.graphsafe_get_state()
        self.default_generator.graphsafe_set_state(self._generator)
        try:
            graph.capture_begin(pool=handle, capture_error_mode="thread_local")
        finally:
            self.default_generator.graphsafe_set_state(state)

    def in_order(self, run: Callable[[], Any]) -> Any:
        """``run()``, whose work begins when that of the last one is done, on whatever stream that was."""
        stream = torch.cuda.current_stream()
        if self._last is not None and self._last != stream:
            stream.wait_event(self._done)
        try:
            return run()
        finally:
            self._done.record(stream)
            self._last = stream


class CudaGraph:
    """What a function runs on a device, to be run again."""

    def __init__(self, device: torch.device, pool: Pool) -> None:
        self._shared = _Device.of(device)
        self._device = device
        self._pool = pool
        self._graph: Any = None

    @staticmethod
    def is_capturing(device: torch.device) -> bool:
        """Whether somebody captures what is run now."""
        return torch.cuda.is_current_stream_capturing()

    def capture(self, run: Callable[[], Any]) -> Any:
        """``run()``, of which nothing is computed yet; the graph is none if it raises."""
        graph = torch.cuda.CUDAGraph()
        handle = self._pool.enter(self._device)
        try:
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()
                # What is cached outside of the pool could not be given back while the capture lasts.
                torch.cuda.empty_cache()
                with torch.cuda.stream(self._shared.capture_stream), _no_garbage_collection():
                    result = _capture(self._shared, graph, handle, run)
        except BaseException:
            self._pool.leave(self._device)
            raise
        self._graph = graph
        return result

    def replay(self, before: Callable[[], None], after: Callable[[], Any]) -> Any:
        """What ``after()`` returns, of a replay after ``before()``, all on the current stream."""

        def run() -> Any:
            before()
            self._graph.replay()
            return after()

        if torch.cuda.current_device() == self._device.index:
            return self._shared.in_order(run)
        with torch.cuda.device(self._device):
            return self._shared.in_order(run)

    def reset(self) -> None:
        """Frees what belongs to the graph, when it has run."""
        if self._graph is not None:
            torch.cuda.synchronize(self._device)
            self._graph.reset()
            self._graph = None
            self._pool.leave(self._device)

    def __del__(self) -> None:
        if self._graph is not None:
            self._pool.leave(self._device)


def _capture(
    shared: _Device, graph: torch.cuda.CUDAGraph, handle: Any, run: Callable[[], Any]
) -> Any:
    shared.begin(graph, handle)
    try:
        result = run()
        graph.capture_end()
    except BaseException:
        try:
            graph.capture_end()
        except Exception:  # it says that the capture has failed, and leaves this undone
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), handle)
            torch._C._cuda_releasePool(torch.cuda.current_device(), handle)
        graph.reset()
        raise
    return result


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A graph of somebody's that it finds cannot be freed during a capture: PyTorch ends the process."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
