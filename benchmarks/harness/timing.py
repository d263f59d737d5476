"""Timing of functions that take turns, so that clock drift affects all of them equally."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

FLUSH_BYTES = 256 << 20  # five times the L2 cache
HEAD_START_CYCLES = 2_000_000  # about a millisecond of the GPU
MAX_HEAD_START_CYCLES = HEAD_START_CYCLES << 6
BACK_TO_BACK_CALLS = 20
WARM_UP_ROUNDS = 2  # of cold_microseconds

Name = TypeVar("Name", bound=Hashable)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(function: Callable[[], object], device: torch.device) -> float:
    """Time of one call that starts on an idle device, by CUDA events; on a CPU by the wall clock."""
    synchronize(device)
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)
    begin = time.perf_counter()
    function()
    return (time.perf_counter() - begin) * 1e3


def host_microseconds(
    function: Callable[[], object], device: torch.device, calls: int = 1
) -> float:
    """CPU time of a call: mean over `calls` that start on an idle device and do not wait for it.

    On a CPU it includes the work.
    """
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - begin) * 1e6 / calls


def wall_milliseconds(
    function: Callable[[], object], device: torch.device, calls: int = 1
) -> float:
    """Mean wall time of `calls` calls back to back, from an idle device to an idle device.

    Nothing waits between them, as in a denoising loop.
    """
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    synchronize(device)
    return (time.perf_counter() - begin) * 1e3 / calls


class Stopwatch:
    """Microseconds of one call, with a cold cache or among calls of its kind; on a CPU by the wall clock.

    Samples exclude launch times: the GPU spins until everything is enqueued. If the spin was too short,
    the sample is repeated with twice the spin.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            self._flush = torch.ones(FLUSH_BYTES // 4, dtype=torch.float32, device=device)
            self._sum = torch.empty((), dtype=torch.float32, device=device)

    def cold(self, function: Callable[[], object], device: torch.device) -> float:
        """One call with an L2 cache that has none of its data and no dirty lines.

        The cache is filled by reads: dirty lines would be written back during the call.
        """
        if device.type != "cuda":
            return milliseconds(function, device) * 1e3

        def flush() -> None:
            torch.sum(self._flush, dim=0, out=self._sum)

        return self._sample(function, flush)

    def warm(self, function: Callable[[], object], device: torch.device) -> float:
        """Mean over calls back to back, on tensors that may stay in the L2 cache."""
        calls = repeated(function, BACK_TO_BACK_CALLS)
        if device.type != "cuda":
            return milliseconds(calls, device) * 1e3 / BACK_TO_BACK_CALLS
        return self._sample(calls, function) / BACK_TO_BACK_CALLS

    @staticmethod
    def _sample(function: Callable[[], object], prepare: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        head_start = HEAD_START_CYCLES
        while head_start <= MAX_HEAD_START_CYCLES:
            torch.cuda._sleep(head_start)
            prepare()
            start.record()
            function()
            end.record()
            was_ahead = not start.query()
            end.synchronize()
            if was_ahead:
                return start.elapsed_time(end) * 1e3
            head_start *= 2
        raise RuntimeError("the function waits for the GPU, or the host is too slow to keep ahead")


def repeated(function: Callable[[], object], calls: int) -> Callable[[], None]:
    """A function that makes `calls` calls, one after the other."""

    def call() -> None:
        for _ in range(calls):
            function()

    return call


def balanced_orders(names: Sequence[Name]) -> Iterator[Sequence[Name]]:
    """Endless orders of `names`, in which each name follows each other one equally often.

    A balanced set has as many orders as names, or twice as many for an odd number: the designs of
    E. J. Williams, Experimental designs balanced for the estimation of residual effects of treatments,
    Australian Journal of Scientific Research, 1949.
    """
    count = len(names)
    zigzag = [(i + 1) // 2 * (-1) ** (i + 1) for i in range(count)]  # 0, 1, -1, 2, -2 ...
    while True:
        for step in (1, -1):
            for shift in range(count):
                yield [names[(i + shift) % count] for i in zigzag][::step]


def interleave(
    functions: Mapping[Name, Callable[[], object]],
    rounds: int,
    device: torch.device,
    measure: Callable[[Callable[[], object], torch.device], float] = milliseconds,
    pause_s: float = 0.0,
) -> dict[Name, list[float]]:
    """Measure each function once per round, in balanced orders.

    At its power limit a GPU clocks lower for a while after a function with high power, which slows down
    the next one. Balanced orders spread this evenly. A pause of `pause_s` before each sample lets the
    clock recover.
    """
    samples: dict[Name, list[float]] = {name: [] for name in functions}
    for order in itertools.islice(balanced_orders(list(functions)), rounds):
        for name in order:
            synchronize(device)
            time.sleep(pause_s)
            samples[name].append(measure(functions[name], device))
    return samples


def summarize(samples: list[float]) -> dict[str, float]:
    """Median, extremes and quartile spread (relative to the median) of the samples."""
    median = statistics.median(samples)
    if len(samples) > 1:
        low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    else:
        low = high = median
    return {
        "median": median,
        "min": min(samples),
        "max": max(samples),
        "spread": (high - low) / median,
        "samples": len(samples),
    }


def cold_microseconds(
    functions: Mapping[Name, Callable[[], object]], rounds: int, device: torch.device
) -> dict[Name, dict[str, float]]:
    """`summarize` of each function's microseconds with a cold cache, after rounds to warm up."""
    cold = Stopwatch(device).cold
    interleave(functions, WARM_UP_ROUNDS, device, cold)
    samples = interleave(functions, rounds, device, cold)
    return {name: summarize(values) for name, values in samples.items()}


def speedups(times: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """For each name, its speedup over each other one."""
    return {
        name: {other: theirs / own for other, theirs in times.items() if other != name}
        for name, own in times.items()
    }


def time_to_full_speed(
    change: Callable[[], object],
    forward: Callable[[], object],
    device: torch.device,
    forwards: int = 8,
    tolerance: float = 0.05,
) -> dict[str, float]:
    """Time from the call of `change` to the end of the first forward at full speed.

    Full speed is the median of the later half of `forwards` synchronized calls. A call is at full speed
    if it is within `tolerance` of it.
    """
    synchronize(device)
    begin = time.perf_counter()
    change()
    synchronize(device)
    ends = [time.perf_counter() - begin]
    for _ in range(forwards):
        forward()
        synchronize(device)
        ends.append(time.perf_counter() - begin)
    durations = [b - a for a, b in zip(ends[:-1], ends[1:], strict=True)]
    steady = statistics.median(durations[forwards // 2 :])
    first = next(i for i, time_ in enumerate(durations) if time_ <= (1 + tolerance) * steady)
    return {
        "change_s": ends[0],
        "first_forward_s": durations[0],
        "steady_forward_s": steady,
        "forwards_before": first,
        "full_speed_s": ends[first + 1],
    }
