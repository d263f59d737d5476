"""Clock, power, energy and throttling of the GPU while something runs, from NVML."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click
import torch

PERIOD_S = 0.05


@contextmanager
def watch(device: torch.device) -> Iterator[dict[str, float]]:
    """Yields a dict, filled at the end of the block. It stays empty on a CPU.

    Medians of the SM clock and of the power, the energy in joules, and the shares of samples in which the
    power limit or the temperature lowered the clock. Figures measured under thermal throttling depend on the
    machine more than on the code.
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
    samples: list[tuple[int, float, int]] = []
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(PERIOD_S):
            samples.append(
                (
                    pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
                    pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
                    pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
                )
            )

    thread = threading.Thread(target=sample, daemon=True)
    begin = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    thread.start()
    try:
        yield summary
        torch.cuda.synchronize(device)
        summary["joules"] = (pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - begin) / 1e3
    finally:
        ended.set()
        thread.join()
        pynvml.nvmlShutdown()
    if samples:
        clocks, watts, reasons = zip(*samples, strict=True)
        summary.update(
            sm_mhz=statistics.median(clocks),
            watts=statistics.median(watts),
            power_cap=_share(reasons, pynvml.nvmlClocksEventReasonSwPowerCap),
            thermal_slowdown=_share(reasons, thermal),
        )


def _share(reasons: Sequence[int], wanted: int) -> float:
    return sum(bool(reason & wanted) for reason in reasons) / len(reasons)


def show(summary: dict[str, float]) -> None:
    """Print the dict of `watch`."""
    if summary:
        click.echo(
            f"{summary['sm_mhz']:.0f} MHz, {summary['watts']:.0f} W, "
            f"at the power limit in {summary['power_cap']:.0%} of the samples"
        )
        if summary["thermal_slowdown"]:
            click.echo(
                "THERMAL THROTTLING: these figures depend on the machine, not only on the code"
            )
