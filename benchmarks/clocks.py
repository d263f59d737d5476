"""Clock, power and throttling of the GPU while something runs, from NVML."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import click
import torch

PERIOD_S = 0.05


@contextmanager
def watch(device: torch.device) -> Iterator[dict[str, float]]:
    """Yields a dict, filled at the end of the block with medians over the block and the share of
    samples with thermal throttling. It stays empty on a CPU.

    Figures measured under thermal throttling depend on the machine more than on the code.
    """
    summary: dict[str, float] = {}
    if device.type != "cuda":
        yield summary
        return
    import pynvml

    pynvml.nvmlInit()
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    thermal = (
        pynvml.nvmlClocksEventReasonSwThermalSlowdown
        | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
    )
    samples: list[tuple[int, float, bool]] = []
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(PERIOD_S):
            samples.append(
                (
                    pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
                    pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
                    bool(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle) & thermal),
                )
            )

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield summary
    finally:
        ended.set()
        thread.join()
        pynvml.nvmlShutdown()
    if samples:
        clocks, watts, is_hot = zip(*samples, strict=True)
        summary.update(
            sm_mhz=statistics.median(clocks),
            watts=statistics.median(watts),
            thermal_slowdown=sum(is_hot) / len(samples),
        )


def show(summary: dict[str, float]) -> None:
    """Print the dict of `watch`."""
    if summary:
        click.echo(f"{summary['sm_mhz']:.0f} MHz, {summary['watts']:.0f} W")
        if summary["thermal_slowdown"]:
            click.echo(
                "THERMAL THROTTLING: these figures depend on the machine, not only on the code"
            )
