"""Norms, plain, modulated and modulated twice, at the hidden sizes of LTX-Video, SD3, FLUX and Wan 14B.

Writes to benchmarks/results/norm:

    python benchmarks/operations/bench_norm.py
    python benchmarks/operations/bench_norm.py --device cpu --tiny --no-compile --output /tmp/norm.json
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.harness.comparison import Case, Family, Workload, command, modulation, normal

MODEL_SHAPES = (
    (2, 2688, 2048),  # LTX-Video, 49 frames 512x768, with guidance
    (2, 8064, 2048),  # LTX-Video, 161 frames
    (4429, 1536),  # SD3
    (4608, 3072),  # FLUX
    (32760, 5120),  # Wan 14B
)
# Includes the smaller shapes in published figures of RMSNorm kernels for these models.
SHAPES = ((1, 1024, 2048), (2, 1024, 2048), *MODEL_SHAPES, (4, 4096, 3072))
TINY_SHAPES = ((2, 6, 128), (5, 96))
WAN_SHAPES = ((1, 32760, 1536), (1, 32760, 5120))  # 1.3B and 14B, as modulated by (1, 1, D)
PAIR_SHAPE = (2, 4429, 2432)  # SD3.5 Large with guidance
AFFINE = ("rms_norm", "layer_norm")
MODULATED = ("rms_norm_modulate", "layer_norm_modulate")
PAIR = "layer_norm_modulate_pair"
FLOAT32 = "float32 modulation"


def build(workload: Workload, kernel: ModuleType, device: torch.device) -> Case:
    hidden = workload.shape[-1]
    x = normal(device, *workload.shape)
    if workload.operation in MODULATED:
        dtype = torch.float32 if workload.variant == FLOAT32 else x.dtype
        return Case((x, *modulation(device, workload.shape, 2, dtype)))
    if workload.operation == PAIR:
        return Case((x, *modulation(device, workload.shape, 4)))
    weight, bias = normal(device, hidden, std=0.2, mean=1.0), normal(device, hidden, std=0.2)
    return Case((x, weight) if workload.operation == "rms_norm" else (x, weight, bias))


FAMILY = Family(
    "norm",
    [
        *(Workload(operation, shape) for operation in AFFINE for shape in SHAPES),
        *(Workload(operation, shape) for operation in MODULATED for shape in SHAPES[1:-1]),
        *(Workload("layer_norm_modulate", shape, FLOAT32) for shape in WAN_SHAPES),
        Workload(PAIR, PAIR_SHAPE),
    ],
    [
        *(
            Workload(operation, shape)
            for operation in (*AFFINE, *MODULATED, PAIR)
            for shape in TINY_SHAPES
        ),
        *(Workload(operation, TINY_SHAPES[0], FLOAT32) for operation in MODULATED),
    ],
    build,
)
main = command(FAMILY, "Time the norms and their peers.")

if __name__ == "__main__":
    main()
