"""Activations at the feed-forward sizes of LTX-Video, SD3, FLUX and Wan 14B.

A shape is that of the input, which for the gated ones is twice as wide as the output. Liger's gated
ones take two contiguous tensors.

Writes to benchmarks/results/activation:

    python benchmarks/bench_activation.py
    python benchmarks/bench_activation.py --device cpu --tiny --no-compile --output /tmp/activation.json
"""

from __future__ import annotations

from types import ModuleType

import torch
from comparison import Case, Family, Workload, command, normal

BIAS = "bias"
VARIANTS = (
    ("gelu", "tanh"),
    ("gelu", "none"),
    ("silu", ""),
    ("geglu", "tanh"),
    ("geglu", "none"),
    ("swiglu", ""),
)
LTX_SHAPE = (2, 8064, 8192)
SHAPES = (
    LTX_SHAPE,
    (4429, 6144),  # SD3
    (4608, 12288),  # FLUX
    (32760, 13824),  # Wan 14B
)
# Those of what is published on GELU and GEGLU kernels for these models: outputs 2048, 4096, 8192 wide.
HIDDEN_SIZES = (2048, 4096, 8192)
TINY_SHAPE = (2, 6, 128)


def build(workload: Workload, kernel: ModuleType, device: torch.device) -> Case:
    words = workload.variant.split(", ")
    options = {}
    if workload.operation in ("gelu", "geglu"):
        options["approximate"] = words[0]
    if BIAS in words:
        options["bias"] = normal(device, workload.shape[-1])
    return Case((normal(device, *workload.shape),), options)


def with_bias(shape: tuple[int, ...]) -> list[Workload]:
    return [
        Workload(operation, shape, ", ".join(filter(None, [variant, BIAS])))
        for operation, variant in VARIANTS
    ]


FAMILY = Family(
    "activation",
    [
        *(Workload(operation, shape, v) for operation, v in VARIANTS for shape in SHAPES),
        *with_bias(LTX_SHAPE),
        *(Workload("gelu", (2, 1024, hidden), "tanh") for hidden in HIDDEN_SIZES),
        *(Workload("geglu", (2, 1024, 2 * hidden), "none") for hidden in HIDDEN_SIZES),
    ],
    [
        *(Workload(operation, TINY_SHAPE, variant) for operation, variant in VARIANTS),
        *with_bias(TINY_SHAPE),
    ],
    build,
)
main = command(FAMILY, "Time the activations beside their peers.")

if __name__ == "__main__":
    main()
