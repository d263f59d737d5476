"""The forward that stands in for a module's own where its calls may be captured."""

from __future__ import annotations

import collections
import contextlib
import copy
import logging
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import nn

from .. import recording
from ..forward_slot import StandIn
from . import arguments, settings
from .capture import Capture
from .device import CudaGraph, Pool, lock
from .reasons import CannotCapture
from .tally import FIRST_CALL, GraphTally
from .watched import WatchedState

if TYPE_CHECKING:
    from ..injected import Injection

_Remembered = collections.OrderedDict[Hashable, Any]

logger = logging.getLogger("h100_diffusers_kernels")

# What captures and replays on a type of device.
GRAPHS: dict[str, Any] = {"cuda": CudaGraph}
_CHANGED_OFTEN = "it changed at each of the last calls"
_TOO_LITTLE_MEMORY = "there is not enough memory for a graph"
_CHANGES_ITSELF = "its forward changes what it is made of"
# Signatures that are known to have been called once, or to be refused, for each graph that may be kept.
_REMEMBERED = 16
# Calls that run as they are before what was refused, or changed again, is looked at anew: twice as many each
# time.
_MOST_CALLS_BETWEEN_LOOKS = 64


class GraphedForward(StandIn):
    """A forward whose calls are captured at the second of a kind, and replayed from then on.

    A call's kind is its arguments, but for tensors' values, and what PyTorch is set to. At each replay all is
    looked at that the module's forward is made of; where that has changed, its graphs are dropped, and the
    call runs as it is.
    """

    __slots__ = (
        *("_captures", "_calls_to_wait", "_inner", "_injection", "_limit", "_once", "_patience"),
        *("_pool", "_refusal", "_refused", "_state"),
    )

    def __init__(
        self, module: nn.Module, inner: StandIn | None, injection: Injection, limit: int, pool: Pool
    ) -> None:
        """
        Args:
            inner: what stands in for the module's forward otherwise; None where its class's own runs.
            limit: how many graphs are kept.
            pool: their memory.
        """
        super().__init__(module)
        self._inner = inner
        self._injection = injection
        self._limit = limit
        self._pool = pool
        self._state: WatchedState | None = None
        self._captures: _Remembered = collections.OrderedDict()
        self._once: _Remembered = collections.OrderedDict()
        self._refused: _Remembered = collections.OrderedDict()
        self._refusal = FIRST_CALL  # why the next call is not captured, where no state is known
        self._calls_to_wait = 0
        self._patience = 0

    @property
    def tally(self) -> GraphTally:
        tally = self._injection.graphs
        assert tally is not None
        return tally

    def run(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        if module is None:
            raise RuntimeError(
                f"the forward of {self.tally.name or 'a model'} was called after its module had been freed"
            )
        if torch.compiler.is_compiling() or recording.is_on() or self._injection.is_over:
            return self._run_inner(*args, **kwargs)
        try:
            of_torch = settings.read()
            call = arguments.read(args, kwargs)
            device = _device_of(call)
        except CannotCapture as refusal:
            with lock:
                self.tally.count_uncaptured(refusal.reason)
            return self._run_inner(*args, **kwargs)
        key = (of_torch, call.key)
        with lock:
            try:
                replayed = self._replay_ahead(key, call)
                reason = self._why_not_replayed(module, key)
                if reason is None:
                    if key in self._captures:
                        return self._replay(key, call, replayed)
                    return self._capture(module, key, device, call)
            except CannotCapture as refusal:
                reason = refusal.reason
                self._remember(self._refused, key, reason)
            except torch.OutOfMemoryError:
                self._start_anew(_TOO_LITTLE_MEMORY)
                reason = _TOO_LITTLE_MEMORY
            replayed = None
            self.tally.count_uncaptured(reason)
        result = self._run_inner(*args, **kwargs)
        with lock, contextlib.suppress(CannotCapture):
            # PyTorch sets itself when it is first used: the order of its attentions, say.
            self._look(module, (settings.read(), call.key))
        return result

    def forget(self) -> None:
        """Drops all graphs, and what is known of the module."""
        while self._captures:  # whatever interrupts this, none stays that was reset
            self._captures.popitem()[1].reset()
        for remembered in (self._once, self._refused):
            remembered.clear()
        self._state = None
        self._refusal = FIRST_CALL

    def taken_out(self) -> None:
        with lock:
            self.forget()

    def _run_inner(self, *args: Any, **kwargs: Any) -> Any:
        if self._inner is not None:
            return self._inner.run(*args, **kwargs)
        module: Any = self._module()
        return type(module).forward(module, *args, **kwargs)

    def _why_not_replayed(self, module: nn.Module, key: Hashable) -> str | None:
        """Why a call is neither replayed nor captured now; None if it is."""
        if self._calls_to_wait > 0:
            self._calls_to_wait -= 1
            return self._refusal
        if self._state is None:
            return self._refusal
        if not self._state.holds(module):
            change = self._state.difference(module)
            self.forget()
            self._wait(_CHANGED_OFTEN if self._patience else FIRST_CALL)
            logger.info(
                "%s: CUDA graphs are dropped, as %s", self.tally.name or "the model", change
            )
            return FIRST_CALL
        if key in self._refused:
            return self._refused[key]
        if key in self._captures and not self._captures[key].memory.holds():
            self._captures.pop(key).reset()
        return None if key in self._captures or key in self._once else FIRST_CALL

    def _replay_ahead(self, key: Hashable, call: arguments.Arguments) -> tuple[Any] | None:
        """What a call returns if all is as it was, which is looked at while the device computes it.

        Until then nobody sees it, and it writes to nothing else. Of what it reads only the memory must be
        known to be there.
        """
        capture = self._captures.get(key)
        if capture is None or capture.writes_outside:
            return None
        assert self._state is not None
        is_there = capture.memory.holds() and self._state.memory.holds()
        return (capture.replay(call.tensors),) if is_there else None

    def _replay(self, key: Hashable, call: arguments.Arguments, replayed: tuple[Any] | None) -> Any:
        capture = self._captures[key]
        (result,) = replayed or (capture.replay(call.tensors),)
        self._captures.move_to_end(key)
        self._patience = 0
        self.tally.replayed += 1
        return result

    def _capture(self, module: nn.Module, key: Hashable, device: torch.device, call: Any) -> Any:
        """What a call returns that is captured."""
        state: Any = self._state
        graph = GRAPHS[device.type](device, self._pool)
        try:
            capture = Capture(graph, device, call, self._run_inner, state.tensors)
        except BaseException as error:
            # What it was in the middle of changing; the call runs again, from its beginning.
            state.restore(module)
            if isinstance(error, torch.OutOfMemoryError):
                self.forget()
                raise CannotCapture(_TOO_LITTLE_MEMORY) from None
            if isinstance(error, Exception) and not isinstance(error, CannotCapture):
                sentence = str(error).partition("\n")[0]
                raise CannotCapture(
                    f"to capture it raises {type(error).__name__}: {sentence}"
                ) from None
            raise
        result = capture.replay(call.tensors)
        if capture.leaks or not state.holds(module):
            # What it keeps has its values by now, but a replay would not do the same again.
            capture.reset()
            self._start_anew(_CHANGES_ITSELF)
            self.tally.count_uncaptured(_CHANGES_ITSELF)
            return result
        self.tally.captured += 1
        self._captures[key] = capture
        while len(self._captures) > self._limit:
            self._captures.popitem(last=False)[1].reset()
        return result

    def _look(self, module: nn.Module, key: Hashable) -> None:
        """After a call that ran as it is."""
        if self._calls_to_wait > 0:
            return
        if self._state is None:
            try:
                self._state = WatchedState(module)
            except CannotCapture as refusal:
                self._wait(refusal.reason)
                return
        if key not in self._captures:
            self._remember(self._once, key, None)

    def _start_anew(self, reason: str) -> None:
        """Without graphs, and not at once: they would be for nothing again."""
        self.forget()
        self._patience = max(1, self._patience)
        self._wait(reason)

    def _wait(self, reason: str) -> None:
        """To look at a module takes as long as a few blocks' host time: not at each of its calls."""
        self._calls_to_wait = self._patience
        self._patience = min(max(1, 2 * self._patience), _MOST_CALLS_BETWEEN_LOOKS)
        self._refusal = reason

    def _remember(self, remembered: _Remembered, key: Hashable, value: Any) -> None:
        remembered[key] = value
        while len(remembered) > _REMEMBERED * self._limit:
            remembered.popitem(last=False)

    def __deepcopy__(self, memo: dict) -> GraphedForward:
        """That of the module's copy, without graphs."""
        module: Any = self._module()
        injection = copy.deepcopy(self._injection, memo)
        pool = copy.deepcopy(self._pool, memo)
        inner = None if self._inner is None else copy.deepcopy(self._inner, memo)
        module = memo.get(id(module), module)
        duplicate = GraphedForward(module, inner, injection, self._limit, pool)
        duplicate.had_attribute = self.had_attribute
        return duplicate

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise TypeError(
            "the model runs on CUDA graphs, which cannot be pickled: call eject_kernels first, or save "
            "the state_dict"
        )


def _device_of(call: arguments.Arguments) -> torch.device:
    device, *others = {tensor.device for tensor in call.tensors}
    if others:
        raise CannotCapture("it was given tensors on several devices")
    if device.type not in GRAPHS:
        raise CannotCapture(f"there are no graphs of what runs on {device.type}")
    if GRAPHS[device.type].is_capturing(device):
        raise CannotCapture("its caller captures it")
    return device
