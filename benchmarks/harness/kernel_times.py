"""GPU time of a forward by kernel class, from the kernel events of torch.profiler's trace."""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from kernel_classes import CLASSES, PACKAGE, classify

# What every name has, or all of one library's.
COMMON = re.compile(r"^void |\(anonymous namespace\)::|\b(h100_diffusers_kernels|at::native)::")
LONGEST_NAME = 60  # characters
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace's events


def trace(forward: Callable[[], object], calls: int) -> list[dict]:
    """Events of torch.profiler's Chrome trace of `calls` calls."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities):
        forward()  # the profiler's start disturbs the first call
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(calls):
            forward()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def short_name(kernel: str) -> str:
    """For results: without COMMON, and cut."""
    return COMMON.sub("", kernel)[:LONGEST_NAME]


def idle(intervals: Iterable[tuple[float, float]]) -> float:
    """Time between the first start and the last end without any interval."""
    gaps, end = 0.0, None
    for start, stop in sorted(intervals):
        if end is not None:
            gaps += max(0.0, start - end)
        end = stop if end is None else max(end, stop)
    return gaps


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Time with at least one interval."""
    intervals = list(intervals)
    first, last = min(start for start, _ in intervals), max(stop for _, stop in intervals)
    return last - first - idle(intervals)


def breakdown(events: Iterable[dict], calls: int, top: int = 15) -> dict[str, object]:
    """Time (ms) and launches per call: by class, of this package's kernels, and of the largest others; the
    time between kernels; and the time with at least one running kernel.

    The sum of kernel times exceeds the latter if kernels overlap, for example with programmatic dependent
    launch. Copies and fills by the GPU count as kernels of the class "other".
    """
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    intervals = []
    for event in events:
        if event.get("cat") in ON_GPU:
            times[event["name"]] += event["dur"] / 1e3
            counts[event["name"]] += 1
            intervals.append((event["ts"], event["ts"] + event["dur"]))
    if not times:
        raise RuntimeError("the trace has no kernel: did the forward run on the GPU?")

    kernels = [
        {
            "name": short_name(name),
            "class": classify(name),
            "ours": PACKAGE in name,
            "ms": times[name] / calls,
            "launches": counts[name] / calls,
        }
        for name in sorted(times, key=times.__getitem__, reverse=True)
    ]

    def total(chosen: list[dict]) -> dict[str, float]:
        return {key: sum(kernel[key] for kernel in chosen) for key in ("ms", "launches")}

    others = [kernel for kernel in kernels if kernel["class"] == "other"]
    return {
        "total": total(kernels),
        "idle_ms": idle(intervals) / 1e3 / calls,
        "covered_ms": covered(intervals) / 1e3 / calls,
        "classes": {
            key: total([kernel for kernel in kernels if kernel["class"] == key]) for key in CLASSES
        },
        "ours": total([kernel for kernel in kernels if kernel["ours"]]),
        "largest_others": others[:top],
        "all_ours": [kernel for kernel in kernels if kernel["ours"]],
        "products_and_attention": [k for k in kernels if k["class"] != "other"][:top],
    }
