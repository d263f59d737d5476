"""Time of a pipeline's call by part, its trace and its time by kernel class, and their tables."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from tabulate import tabulate
from torch.autograd import DeviceType
from torch.profiler import profile, record_function
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reference"))

from kernel_classes import CLASSES, PACKAGE, classify

PROFILED_STEPS = 3
CLASS_NAMES = {key: name for key, name in CLASSES.items() if key != "other"} | {
    "ours": "this package's other kernels",
    "other": CLASSES["other"],
}
PARTS = ("text encoding", "a step (median)", "all steps", "decoding", "total")
CHANGED_PARTS = PARTS[1:]  # by the kernels


class StepBar(tqdm):
    """The pipeline's progress bar. It tells `begin` which part of the call begins."""

    def __init__(self, total: int, begin, name: str):
        bar = "{desc}: {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}, {rate_inv_fmt}"
        super().__init__(total=total, desc=name, unit="step", bar_format=bar)
        self.begin = begin
        begin("step 1")

    def update(self, n: int = 1):
        super().update(n)
        self.begin("decoding" if self.n == self.total else f"step {self.n + 1}")


def call(pipe, arguments: dict, name: str, seed: int, annotate: bool = False) -> tuple:
    """The first result of a pipeline as (frames, height, width, 3) bytes, and its times.

    An image is one frame. The progress bar is named `name`. The times are seconds by PARTS; text
    encoding includes the latents. `annotate` puts each part in a range of torch.profiler, and waits
    for the GPU between parts. Raises MemoryError without enough memory, and FloatingPointError for
    a result that is not finite.
    """
    cuda = torch.cuda.is_available()
    marks: list = []

    with contextlib.ExitStack() as current:

        def begin(part: str) -> None:
            if annotate:
                if cuda:
                    torch.cuda.synchronize()
                current.close()
                current.enter_context(record_function(part))
            marks.append(torch.cuda.Event(enable_timing=True) if cuda else time.perf_counter())
            if cuda:
                marks[-1].record()

        pipe.progress_bar = lambda total: StepBar(total, begin, name)
        try:
            begin("text encoding")
            result = pipe(
                **arguments,
                generator=torch.Generator("cpu").manual_seed(seed),
                output_type="np",
                return_dict=False,
            )[0][0]
            begin("end")
        except RuntimeError as error:
            # The CPU's allocator has no class of errors of its own.
            if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
                raise MemoryError(str(error)) from error
            raise
        finally:
            del pipe.progress_bar
    if not np.isfinite(result).all():
        raise FloatingPointError("the result has values that are not finite")

    if cuda:
        torch.cuda.synchronize()
        marks = [marks[0].elapsed_time(mark) / 1e3 for mark in marks]
    seconds = [end - start for start, end in zip(marks, marks[1:], strict=False)]
    steps = seconds[1:-1]
    times = (seconds[0], statistics.median(steps), sum(steps), seconds[-1], sum(seconds))
    frames = (result * 255).round().astype(np.uint8)
    return frames.reshape(-1, *frames.shape[-3:]), dict(zip(PARTS, times, strict=True))


def time_table(runs: Mapping[str, list[dict[str, float]]]) -> str:
    """Median times of the runs of each side, and how many times as fast the last is."""
    rows = []
    for part in PARTS:
        seconds = [statistics.median(run[part] for run in side) for side in runs.values()]
        rows.append([part, *(f"{s:.3f} s" for s in seconds)])
        if len(seconds) == 2 and part in CHANGED_PARTS:
            rows[-1].append(f"{seconds[0] / seconds[1]:.2f}×")
    headers = ["", *runs] + ["times as fast"] * (len(runs) == 2)
    return tabulate(rows, headers, stralign="right", colalign=["left"])


def trace(pipe, arguments: dict, name: str, seed: int, path: Path) -> dict[str, dict[str, float]]:
    """Write the trace of a call with few steps; return milliseconds by class, of a step and of decoding.

    They are times of GPU kernels or, without a GPU, of CPU operators without those they call.
    """
    cuda = torch.cuda.is_available()
    with profile(acc_events=True) as profiler:
        call(pipe, arguments | {"num_inference_steps": PROFILED_STEPS}, name, seed, annotate=True)
    profiler.export_chrome_trace(str(path))

    parts = ["decoding", *(f"step {step}" for step in range(2, PROFILED_STEPS + 1))]
    events = profiler.events()
    ranges = {
        event.name: event.time_range
        for event in events
        if event.device_type == DeviceType.CPU and event.name in parts
    }
    times: dict[str, dict[str, float]] = {
        "a step": defaultdict(float),
        "decoding": defaultdict(float),
    }
    for event in events:
        if (event.device_type == DeviceType.CUDA) != cuda or event.is_user_annotation:
            continue
        for part, span in ranges.items():
            if span.start <= event.time_range.start <= span.end:
                key = classify(event.name)
                key = "ours" if key == "other" and PACKAGE in event.name else key
                us = event.self_device_time_total if cuda else event.self_cpu_time_total
                column, count = (part, 1) if part == "decoding" else ("a step", PROFILED_STEPS - 1)
                times[column][key] += us / 1e3 / count
    return times


def class_table(sides: Mapping[str, dict[str, dict[str, float]]]) -> str:
    """What `trace` returned of each side, as a table."""
    columns = [(part, side) for part in ("a step", "decoding") for side in sides]
    headers = ["", *(f"{part}, {side}" for part, side in columns)]
    rows = [
        [name, *(f"{sides[side][part].get(key, 0.0):.2f} ms" for part, side in columns)]
        for key, name in CLASS_NAMES.items()
    ]
    total = [f"{sum(sides[side][part].values()):.2f} ms" for part, side in columns]
    return tabulate([*rows, ["total", *total]], headers, stralign="right", colalign=["left"])


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Peak signal-to-noise ratio of two arrays of bytes, in dB."""
    error = float(np.square(a.astype(np.float32) - b).mean(dtype=np.float64))
    return float("inf") if error == 0 else 10 * float(np.log10(255**2 / error))
