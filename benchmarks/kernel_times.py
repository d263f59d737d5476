"""GPU time of a forward by kernel class, from the kernel events of torch.profiler's trace."""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

PACKAGE = "h100_diffusers_kernels"
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace's events
CLASSES = {
    "gemm": "matrix products",
    "attention": "attention",
    "convolution": "convolutions",
    "other": "everything else",
}

# The names of Inductor's pointwise and reduction kernels list the operators fused into them, and so
# may say addmm or attention; only its templates (triton_tem) are matrix products or attention.
_INDUCTOR_LOOP = re.compile(r"^triton_(poi|red|per|for|split_scan)_")
_ATTENTION = re.compile(r"flash|fmha|sdpa|attention", re.IGNORECASE)
# Of a library also the changes of layout around it. cuDNN's attention is an "fprop" too.
_CONVOLUTION = re.compile(
    r"conv(?!ert)|fprop|dgrad|wgrad|implicit_gemm|winograd|im2col|vol2col|nchwTo|nhwcTo|ncdhwTo|ndhwcTo",
    re.IGNORECASE,
)
_MATRIX_TEMPLATE = re.compile(
    r"^triton_(tem|mm).*mm"
)  # which may be fused with what follows a convolution
_GEMM = re.compile(r"nvjet|gemm|gemv|cutlass|cublas|splitk|triton_tem|triton_mm", re.IGNORECASE)


def classify(name: str) -> str:
    """Key of CLASSES for a kernel, by the names that cuBLAS, cuDNN, ATen and Triton give theirs."""
    if _INDUCTOR_LOOP.match(name):
        return "other"
    if _ATTENTION.search(name):
        return "attention"
    if _CONVOLUTION.search(name) and not _MATRIX_TEMPLATE.match(name):
        return "convolution"
    return "gemm" if _GEMM.search(name) else "other"


def trace(forward: Callable[[], object], calls: int) -> list[dict]:
    """Events of the Chrome trace that torch.profiler writes of `calls` calls."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities):
        forward()  # starting the profiler disturbs the first call under it
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(calls):
            forward()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def idle(intervals: Iterable[tuple[float, float]]) -> float:
    """Time between the first start and the last end that no interval covers."""
    gaps, end = 0.0, None
    for start, stop in sorted(intervals):
        if end is not None:
            gaps += max(0.0, start - end)
        end = stop if end is None else max(end, stop)
    return gaps


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Time that at least one interval covers."""
    intervals = list(intervals)
    first, last = min(start for start, _ in intervals), max(stop for _, stop in intervals)
    return last - first - idle(intervals)


def breakdown(events: Iterable[dict], calls: int, top: int = 15) -> dict[str, object]:
    """Time (ms) and launches a call: by class, of this package's kernels, of the largest others,
    and the time between kernels, and that in which there is one.

    Of kernels that overlap, as one that comes up while the one before is ending, the times add up to more
    than that.

    Copies and fills that the GPU does count as kernels of the class "other".
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
        raise RuntimeError("the trace holds no kernel: was the forward run on the GPU?")

    kernels = [
        {
            "name": name,
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
        # Names in full: two instantiations of a template differ in their arguments alone.
        "largest_others": others[:top],
        "all_ours": [kernel for kernel in kernels if kernel["ours"]],
        "products_and_attention": [k for k in kernels if k["class"] != "other"][:top],
    }
