"""Activations at the feed-forward sizes of LTX-Video, SD3, FLUX and Wan 14B.

Shapes are those of the first tensor, which for geglu and swiglu is twice as wide as the output. Liger's gated
activations take two contiguous tensors. A result written "beside" another goes to the end of each row of a
wider tensor, as in the single blocks of FLUX.

Writes to benchmarks/results/activation:

    python benchmarks/operations/bench_activation.py
    python benchmarks/operations/bench_activation.py --device cpu --tiny --no-compile --output out.json
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.harness.comparison import Case, Family, Workload, command, normal

BIAS, FIRST, BESIDE = "bias", "first", "beside"
VARIANTS = (
    ("gelu", "tanh"),
    ("gelu", "none"),
    ("silu", ""),
    ("geglu", "tanh"),
    ("geglu", "none"),
    ("swiglu", ""),
)
OTHER_VARIANTS = (
    ("swiglu", FIRST),
    ("gelu", f"tanh, {BESIDE}"),
    ("swiglu", f"{FIRST}, {BESIDE}"),
)
LTX_SHAPE = (2, 8064, 8192)
FLUX_SHAPE = (4608, 12288)
SHAPES = (
    LTX_SHAPE,
    (4429, 6144),  # SD3
    FLUX_SHAPE,
    (32760, 13824),  # Wan 14B
)
# Shapes in published figures of GELU and GEGLU kernels for these models: outputs 2048, 4096, 8192 wide.
HIDDEN_SIZES = (2048, 4096, 8192)
TINY_SHAPE = (2, 6, 128)
BESIDE_COLUMNS = 3072  # of attention's result, in FLUX


def build(workload: Workload, kernel: ModuleType, device: torch.device) -> Case:
    words = workload.variant.split(", ")
    *rows, columns = workload.shape
    x = normal(device, *workload.shape)
    options: dict[str, object] = {}
    if workload.operation in ("gelu", "geglu"):
        options["approximate"] = words[0]
    if BIAS in words:
        options["bias"] = normal(device, columns)
    if FIRST in words:
        options["activated"] = FIRST
    if BESIDE in words:
        width = columns // 2 if workload.operation == "swiglu" else columns
        options["out"] = normal(device, *rows, width + BESIDE_COLUMNS)[..., BESIDE_COLUMNS:]
    return Case((x,), options)


def with_bias(shape: tuple[int, ...]) -> list[Workload]:
    return [
        Workload(operation, shape, ", ".join(filter(None, [variant, BIAS])))
        for operation, variant in VARIANTS
    ]


def others(shape: tuple[int, ...]) -> list[Workload]:
    return [Workload(operation, shape, variant) for operation, variant in OTHER_VARIANTS]


FAMILY = Family(
    "activation",
    [
        *(Workload(operation, shape, v) for operation, v in VARIANTS for shape in SHAPES),
        *with_bias(LTX_SHAPE),
        *others(FLUX_SHAPE),
        *(Workload("gelu", (2, 1024, hidden), "tanh") for hidden in HIDDEN_SIZES),
        *(Workload("geglu", (2, 1024, 2 * hidden), "none") for hidden in HIDDEN_SIZES),
    ],
    [
        *(Workload(operation, TINY_SHAPE, variant) for operation, variant in VARIANTS),
        *with_bias(TINY_SHAPE),
        *others(TINY_SHAPE),
    ],
    build,
)
main = command(FAMILY, "Time the activations and their peers.")

if __name__ == "__main__":
    main()
