"""Gated residuals, alone and with the modulated norm that follows, at the models' hidden sizes.

Writes to benchmarks/results/gated_residual:

    python benchmarks/bench_gated_residual.py
    python benchmarks/bench_gated_residual.py --device cpu --tiny --no-compile --output /tmp/gated.json
"""

from __future__ import annotations

from types import ModuleType

import torch
from bench_norm import MODEL_SHAPES, TINY_SHAPES
from comparison import Case, Family, Workload, command, modulation, normal

OPERATIONS = (
    "gated_residual",
    "gated_residual_rms_norm_modulate",
    "gated_residual_layer_norm_modulate",
)


def build(workload: Workload, kernel: ModuleType, device: torch.device) -> Case:
    residual, x = (normal(device, *workload.shape) for _ in range(2))
    gate, scale, shift = modulation(device, workload.shape, 3)
    if workload.operation == "gated_residual":
        return Case((residual, x, gate))
    return Case((residual, x, gate, scale, shift))


FAMILY = Family(
    "gated_residual",
    [Workload(operation, shape) for operation in OPERATIONS for shape in MODEL_SHAPES],
    [Workload(operation, shape) for operation in OPERATIONS for shape in TINY_SHAPES],
    build,
)
main = command(FAMILY, "Time the gated residuals beside their peers.")

if __name__ == "__main__":
    main()
