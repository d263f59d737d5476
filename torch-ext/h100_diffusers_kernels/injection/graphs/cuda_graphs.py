"""CUDA graphs of models' forwards, replayed as long as the model and PyTorch's settings are unchanged."""

from __future__ import annotations

import collections
import copy
import functools
import logging
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from ...operations.conditions import KERNEL_DEVICE_TYPE, tracks_derivatives
from ..core.cache import is_capturing
from ..core.checks import why_intercepted
from ..core.patch import Injection, PatchSpec, StandIn
from ..core.report import GraphCalls
from .graph_capture import Arguments, Capture, CudaGraph, Pool, lock, read_arguments
from .model_fingerprint import CannotCapture, Fingerprint
from .ranks import CAPTURE, NO_GRAPH, Ranks, drop_before_destruction

logger = logging.getLogger("h100_diffusers_kernels")

# The class that captures and replays, by device type.
GRAPHS: dict[str, Any] = {"cuda": CudaGraph}
FIRST_CALL = "the first call of its kind"
_MOVED = "parameters or buffers moved in memory"
_CHANGES_ITSELF = "its forward changes the model"
_OTHER_RANKS = "another rank runs without this graph"
# The number of remembered keys of calls, for each graph that may be kept.
_REMEMBERED = 16
# The limit of the exponential backoff, in calls, for models that were refused or changed again.
_MAX_BACKOFF = 64


class GraphedStandIn(StandIn):
    """A stand-in that captures the second call of a kind and replays the graph from then on.

    Calls of a kind differ only in tensor values. Each replay compares the model with its fingerprint. If the
    model changed, its graphs are dropped, the result is discarded and the call runs without a graph.
    """

    def __init__(
        self, model: nn.Module, inner: StandIn | None, injection: Injection, pool: Pool
    ) -> None:
        """``inner``: the stand-in for the forward without graphs; None if the class's own runs."""
        cls: Any = type(model)
        super().__init__(model, _spec_of(cls) if inner is None else inner.spec, "", injection)
        if inner is None:  # it does not run on a kernel
            self.own_forward = cls.forward
            del injection.report.counts[self.count.name]
        else:
            self.reported = inner.reported
        self._has_spec = inner is not None
        self._calls = injection.report.graph_calls = GraphCalls("", cls.__name__)
        self._pool = pool
        self._captures: collections.OrderedDict[Hashable, Capture] = collections.OrderedDict()
        # Reasons why calls were not captured, by key.
        self._seen: collections.OrderedDict[Hashable, str] = collections.OrderedDict()
        self._fingerprint: Fingerprint | None = None
        self._refusal = FIRST_CALL  # reason for a missing fingerprint
        self._calls_to_wait = 0  # until the first fingerprint
        self._backoff = 0
        self._number = CAPTURE  # of the last capture, the same on all ranks

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        """As ``StandIn.run``."""
        if not isinstance(self, GraphedStandIn):  # a wrapper bound this to the module
            return StandIn.run(self, *args, **kwargs)
        return self.call(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """One call: replayed, captured, or run without a graph."""
        module = self.module()
        if torch.compiler.is_compiling() or is_capturing():
            return self._run(*args, **kwargs)
        if module is None or self.injection.is_over:
            self.taken_out()  # a wrapper may still hold this
            return self._run(*args, **kwargs)
        key: Any = None
        with lock:
            ranks = Ranks(module)
            try:
                _refuse_modes()
                call = read_arguments(args, kwargs)
                _refuse_device(call.tensors[0].device)
                _settle(call.tensors[0].device)
                key = (_settings(), call.key)
                return self._replay_or_capture(module, key, call, ranks)
            except CannotCapture as refusal:
                reason = str(refusal)
            except torch.OutOfMemoryError:
                if ranks.are_replaying:
                    raise
                self.taken_out()
                reason = self._seen[key] = "there is not enough memory for a graph"
            if not ranks.have_voted:
                ranks.agree(NO_GRAPH)
            self._count(reason)
        result = self._run(*args, **kwargs)
        if key is not None:
            with lock:
                self._look(module, key)
        return result

    def taken_out(self) -> None:
        """Drops all graphs and the fingerprint."""
        with lock:
            while self._captures:  # popped first, so that an interrupt leaves no reset graph here
                self._captures.popitem()[1].graph.reset()
            self._seen.clear()
            self._fingerprint = None
            self._refusal = FIRST_CALL

    def copied(self, module: nn.Module, memo: dict) -> StandIn:
        """The stand-in of the module's copy, without graphs."""
        injection, pool = copy.deepcopy((self.injection, self._pool), memo)
        duplicate = GraphedStandIn(module, self if self._has_spec else None, injection, pool)
        duplicate.had_attribute = self.had_attribute
        return duplicate

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        if self._has_spec or module is None:
            return StandIn.run(self, *args, **kwargs)
        return type(module).forward(module, *args, **kwargs)

    def _replay_or_capture(
        self, module: nn.Module, key: Hashable, call: Arguments, ranks: Ranks
    ) -> Any:
        """The call's result. Raises CannotCapture if it has to run without a graph."""
        fingerprint, capture = self._fingerprint, self._captures.get(key)
        if fingerprint is None:
            raise CannotCapture(self._refusal)
        has_moved = not fingerprint.addresses.hold()
        if capture is not None and (has_moved or not capture.externals.hold()):
            self._drop(key)
            capture = None
        result = None
        if capture is not None and ranks.is_alone:
            # The model is compared while the device computes. Ranks compare theirs before they agree.
            result = capture.replay(call.tensors)
        change = _MOVED if has_moved else fingerprint.change(module)
        if change is not None:
            self.taken_out()
            self._wait("it changed at each of the last calls" if self._backoff else FIRST_CALL)
            logger.info("%s: CUDA graphs are dropped: %s", self._name, change)
            raise CannotCapture(FIRST_CALL)
        reason = FIRST_CALL if capture is not None else self._seen.get(key)
        if reason != FIRST_CALL:
            raise CannotCapture(reason or FIRST_CALL)
        if not ranks.agree(CAPTURE if capture is None else capture.number):
            self._drop(key)
            raise CannotCapture(_OTHER_RANKS)
        if capture is None:
            return self._capture(module, fingerprint, key, call, ranks)
        if not ranks.is_alone:
            result = capture.replay(call.tensors)
        self._captures.move_to_end(key)
        self._backoff = 0
        self._calls.replayed += 1
        return result

    def _drop(self, key: Hashable) -> None:
        """Drops the graph of a kind of calls, if there is one. The next call is captured."""
        if key in self._captures:
            self._captures.pop(key).graph.reset()

    def _capture(
        self,
        module: nn.Module,
        fingerprint: Fingerprint,
        key: Hashable,
        call: Arguments,
        ranks: Ranks,
    ) -> Any:
        device = call.tensors[0].device
        graph = GRAPHS[device.type](device, self._pool)
        number = NO_GRAPH
        try:
            capture = Capture(graph, call, self._run, fingerprint.tensors)
            number = self._number + 1
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            sentence = str(error).partition("\n")[0]
            is_known = isinstance(error, CannotCapture)
            reason = "" if is_known else f"its capture raised {type(error).__name__}: "
            self._seen[key] = reason + sentence
            raise CannotCapture(self._seen[key]) from None
        finally:
            # Either all ranks have captured, or none uses its graph. Nothing was computed yet.
            least, greatest = ranks.bounds(number)
            self._number = max(self._number, greatest)
        if least == NO_GRAPH:
            graph.reset()
            raise CannotCapture(_OTHER_RANKS)
        capture.number = self._number
        if not ranks.is_alone:
            drop_before_destruction(self)
        result = capture.replay(call.tensors)
        if not fingerprint.addresses.hold() or fingerprint.change(module) is not None:
            # A replay would not change the model.
            graph.reset()
            self.taken_out()
            self._wait(_CHANGES_ITSELF)
            self._count(_CHANGES_ITSELF)
            return result
        self._calls.captured += 1
        self._captures[key] = capture
        while len(self._captures) > self.injection.options["max_cuda_graphs"]:
            self._captures.popitem(last=False)[1].graph.reset()
        return result

    def _look(self, module: nn.Module, key: Hashable) -> None:
        """Takes the fingerprint and stores the key, after a call without a graph."""
        if self._fingerprint is None:
            if self._calls_to_wait > 0:
                self._calls_to_wait -= 1
                return
            try:
                self._fingerprint = Fingerprint(module)
            except CannotCapture as refusal:
                self._wait(str(refusal))
                return
        self._seen.setdefault(key, FIRST_CALL)
        while len(self._seen) > _REMEMBERED * self.injection.options["max_cuda_graphs"]:
            self._seen.popitem(last=False)

    def _wait(self, reason: str) -> None:
        """Delays the next fingerprint with exponential backoff: it takes the CPU time of several blocks."""
        self._calls_to_wait = self._backoff
        self._backoff = min(max(1, 2 * self._backoff), _MAX_BACKOFF)
        self._refusal = reason

    @property
    def _name(self) -> str:
        return self.injection.report.model_name or "the model"

    def _count(self, reason: str) -> None:
        """Counts a call without a graph. The first for each reason is logged, except for first calls."""
        self._calls.uncaptured[reason] += 1
        if self._calls.uncaptured[reason] == 1 and reason != FIRST_CALL:
            logger.warning(
                "%s (%s) runs without a CUDA graph: %s", self._name, self._calls.module, reason
            )


@functools.cache
def _spec_of(cls: Any) -> PatchSpec:
    return PatchSpec(f"{cls.__module__}:{cls.__qualname__}", cls.forward, "")


# --------------------------------------------------------------------------------------------------
# PyTorch's modes and settings


def _refuse_modes() -> None:
    modes = (
        (tracks_derivatives(), "derivatives may be requested: call it under torch.inference_mode"),
        (torch.is_autocast_enabled(KERNEL_DEVICE_TYPE), "autocast is on"),
        (torch.jit.is_tracing(), "it is being traced"),
        (torch.is_anomaly_enabled(), "anomaly detection is on"),
    )
    reason = next((reason for is_on, reason in modes if is_on), None) or why_intercepted()
    if reason is not None:
        raise CannotCapture(reason)


def _refuse_device(device: torch.device) -> None:
    if device.type not in GRAPHS:
        raise CannotCapture(f"CUDA graphs do not run on {device.type}")
    if GRAPHS[device.type].is_capturing():
        raise CannotCapture("its caller is capturing a CUDA graph")


_GETTERS = (
    *("_get_deterministic_algorithms", "_get_deterministic_algorithms_warn_only"),
    "_get_deterministic_fill_uninitialized_memory",
    *("_get_cudnn_enabled", "_get_cudnn_benchmark", "_get_cudnn_deterministic"),
    "_get_cublas_allow_fp16_accumulation",
    "_get_cublas_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_bf16_reduced_precision_reduction",
    *("_get_blas_preferred_backend", "_get_linalg_preferred_backend"),
    *("_get_flash_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_math_sdp_enabled"),
    *("_get_cudnn_sdp_enabled", "_get_fa3_sdp_enabled", "_get_overrideable_sdp_enabled"),
    *("_get_math_sdp_allow_fp16_bf16_reduction", "_get_sdp_priority_order"),
    *("_get_sm_carveout_experimental", "_get_mkldnn_enabled"),
)
_getters = (
    *(torch.is_inference_mode_enabled, torch.get_default_dtype),
    *(getattr(torch._C, name) for name in _GETTERS if hasattr(torch._C, name)),
)
# Whether float32 matmuls may use TF32. The public names raise if their values contradict each other.
_PRECISIONS = [("generic", "all"), *(("cuda", op) for op in ("all", "matmul", "conv", "rnn"))]


@functools.cache
def _settle(device: torch.device) -> None:
    """PyTorch's first choice of an attention on a GPU changes the order of its attentions. Otherwise a
    pipeline's first decode would do so, after the first graphs."""
    x = torch.empty(1, 1, 64, 64, device=device, dtype=torch.bfloat16)
    torch._fused_sdp_choice(x, x, x)


def _settings() -> Hashable:
    """Part of the key: PyTorch's settings that affect its choice of kernels."""
    values = [get() for get in _getters]
    has_modes = torch._C._len_torch_function_stack()
    return (
        torch.get_default_device() if has_modes else None,
        *[tuple(value) if isinstance(value, list) else value for value in values],
        *[torch._C._get_fp32_precision_getter(*names) for names in _PRECISIONS],
    )
