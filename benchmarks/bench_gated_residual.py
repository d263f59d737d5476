"""Gated residuals, alone and with the following norm, at the models' hidden sizes.

Writes to benchmarks/results/gated_residual:

    python benchmarks/bench_gated_residual.py
    python benchmarks/bench_gated_residual.py --device cpu --tiny --no-compile --output /tmp/gated.json
"""

from __future__ import annotations

from types import ModuleType

import torch
from bench_norm import FLOAT32, MODEL_SHAPES, PAIR_SHAPE, TINY_SHAPES, WAN_SHAPES
from comparison import Case, Family, Workload, command, modulation, normal

OPERATIONS = (
    "gated_residual",
    "gated_residual_rms_norm_modulate",
    "gated_residual_layer_norm_modulate",
)
PAIR = "gated_residual_layer_norm_modulate_pair"
# Wan's norm before cross-attention has weight and bias, and follows a gated residual.
AFFINE = "float32 gate, weight and bias"
WAN = (
    ("gated_residual", FLOAT32),
    ("gated_residual_layer_norm_modulate", FLOAT32),
    ("gated_residual_layer_norm_modulate", AFFINE),
)


def build(workload: Workload, kernel: ModuleType, device: torch.device) -> Case:
    residual, x = (normal(device, *workload.shape) for _ in range(2))
    if workload.operation == PAIR:
        return Case((residual, x, *modulation(device, workload.shape, 5)))
    dtype = torch.float32 if workload.variant in (FLOAT32, AFFINE) else x.dtype
    gate, scale, shift = modulation(device, workload.shape, 3, dtype)
    if workload.variant == AFFINE:
        hidden = workload.shape[-1]
        weight = normal(device, hidden, std=0.2, mean=1.0, dtype=dtype)
        bias = normal(device, hidden, std=0.2, dtype=dtype)
        return Case((residual, x, gate), {"weight": weight, "bias": bias})
    if workload.operation == "gated_residual":
        return Case((residual, x, gate))
    return Case((residual, x, gate, scale, shift))


FAMILY = Family(
    "gated_residual",
    [
        *(Workload(operation, shape) for operation in OPERATIONS for shape in MODEL_SHAPES),
        *(
            Workload(operation, shape, variant)
            for operation, variant in WAN
            for shape in WAN_SHAPES
        ),
        Workload(PAIR, PAIR_SHAPE),
    ],
    [
        *(Workload(operation, shape) for operation in (*OPERATIONS, PAIR) for shape in TINY_SHAPES),
        *(Workload(operation, TINY_SHAPES[0], variant) for operation, variant in WAN),
    ],
    build,
)
main = command(FAMILY, "Time the gated residuals and their peers.")

if __name__ == "__main__":
    main()
