"""What a benchmark writes down: where and with what it ran, and its figures, as JSON."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import shlex
import sys
from pathlib import Path

import torch

RESULTS = Path(__file__).resolve().parent / "results"


def processor_name() -> str:
    """The CPU's model name, from Linux's /proc/cpuinfo; `platform` may know only the ISA."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def environment(device: torch.device) -> dict[str, object]:
    """Card, versions and the exact command of this process. Call it after loading the kernels."""
    from kernels import get_loaded_kernels

    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        hardware = {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    else:
        hardware = {"device": processor_name(), "threads": torch.get_num_threads()}
    return {
        **hardware,
        **{name: importlib.metadata.version(name) for name in ("torch", "diffusers", "kernels")},
        "python": platform.python_version(),
        "kernel_ids": [loaded.metadata.id for loaded in get_loaded_kernels()],
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", *sys.argv]),
    }


def write(path: Path, record: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")
