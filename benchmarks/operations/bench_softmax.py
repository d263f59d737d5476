"""Softmax over rows of 128 to 65536 elements.

Writes to benchmarks/results/softmax:

    python benchmarks/operations/bench_softmax.py
    python benchmarks/operations/bench_softmax.py --device cpu --tiny --no-compile --output /tmp/softmax.json
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.harness.comparison import Case, Family, Workload, command, normal

SHAPES = (
    (4096, 1024),
    (4608, 4608),  # one head of FLUX's attention
    (2, 32, 2688, 128),  # LTX-Video's cross attention, 49 frames
    (8192, 8192),
    (1024, 65536),
)
TINY_SHAPES = ((4, 96), (2, 2, 3, 128))


def build(workload: Workload, kernel: ModuleType, device: torch.device) -> Case:
    return Case((normal(device, *workload.shape, std=3.0),))


FAMILY = Family(
    "softmax",
    [Workload("softmax", shape) for shape in SHAPES],
    [Workload("softmax", shape) for shape in TINY_SHAPES],
    build,
)
main = command(FAMILY, "Time the softmax and its peers.")

if __name__ == "__main__":
    main()
