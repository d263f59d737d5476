"""Gated residuals, alone and with the following norm, at the models' hidden sizes.

Writes to benchmarks/results/gated_residual:

    python benchmarks/operations/bench_gated_residual.py
    python benchmarks/operations/bench_gated_residual.py --device cpu --tiny --no-compile --output out.json
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.harness.comparison import Case, Family, Workload, command, modulation, normal
from benchmarks.operations.bench_norm import (
    FLOAT32,
    MODEL_SHAPES,
    PAIR_SHAPE,
    TINY_SHAPES,
    WAN_SHAPES,
)

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
# Residual branches with more parts, and modulations that are a table's row plus an embedding of each token.
SANDWICH, ADDEND = "sandwich", "addend"
TABLE, FLOAT32_TABLE = "table per token", "float32 table per token"
BRANCHES, TABLES = (SANDWICH, ADDEND), (TABLE, FLOAT32_TABLE)
PARTS = (
    Workload("gated_residual", (1, 4608, 3840), SANDWICH),  # Z-Image, 1024x1024
    Workload("gated_residual_rms_norm_modulate", (1, 4608, 3840), SANDWICH),
    Workload("gated_residual", (1, 4608, 6144), ADDEND),
    Workload("gated_residual_layer_norm_modulate", (1, 4608, 6144), ADDEND),
    Workload("gated_residual_rms_norm_modulate", (1, 8064, 4096), TABLE),  # LTX-2
    Workload("gated_residual_layer_norm_modulate", (1, 8064, 3072), FLOAT32_TABLE),  # Wan 2.2 TI2V
)


def build(workload: Workload, kernel: ModuleType, device: torch.device) -> Case:
    residual, x = (normal(device, *workload.shape) for _ in range(2))
    if workload.operation == PAIR:
        return Case((residual, x, *modulation(device, workload.shape, 5)))
    if workload.variant in BRANCHES:
        return build_branch(workload, residual, x)
    if workload.variant in TABLES:
        return build_table(workload, residual, x)
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


def build_branch(workload: Workload, residual: torch.Tensor, x: torch.Tensor) -> Case:
    """Z-Image's sandwich of norms, without a shift, or FLUX.3's sum of attention and feed-forward."""
    hidden = workload.shape[-1]
    gate, scale, shift = modulation(x.device, workload.shape, 3)
    options: dict[str, object] = {"addend": normal(x.device, *workload.shape)}
    if workload.variant == SANDWICH:
        weights = (normal(x.device, hidden, std=0.2, mean=1.0) for _ in range(2))
        options = dict(zip(("weight", "x_weight"), weights, strict=True))
        options |= {"shift": None, "x_eps": 1e-5, "tanh_gate": True}
        if workload.operation == "gated_residual":
            options = {key: options[key] for key in ("x_weight", "x_eps", "tanh_gate")}
    elif workload.operation != "gated_residual":
        options["shift"] = shift
    arguments = (residual, x, gate)
    return Case(
        arguments if workload.operation == "gated_residual" else (*arguments, scale), options
    )


def build_table(workload: Workload, residual: torch.Tensor, x: torch.Tensor) -> Case:
    """Gate, scale and shift of each token: rows of a table plus slices of an embedding (B, S, 6, D)."""
    dtype = torch.float32 if workload.variant == FLOAT32_TABLE else x.dtype
    batch, tokens, hidden = workload.shape
    table = normal(x.device, 6, hidden, std=0.2, dtype=dtype)
    embedding = normal(x.device, batch, tokens, 6, hidden, std=0.2, dtype=dtype).unbind(2)
    gate, shift, scale = ((table[i], embedding[i]) for i in (2, 3, 4))
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
        *PARTS,
    ],
    [
        *(Workload(operation, shape) for operation in (*OPERATIONS, PAIR) for shape in TINY_SHAPES),
        *(Workload(operation, TINY_SHAPES[0], variant) for operation, variant in WAN),
        *(Workload(part.operation, TINY_SHAPES[0], part.variant) for part in PARTS),
    ],
    build,
)
main = command(FAMILY, "Time the gated residuals and their peers.")

if __name__ == "__main__":
    main()
