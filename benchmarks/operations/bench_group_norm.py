"""Group norms with SiLU as in the U-Net and the autoencoder of Stable Diffusion XL at 1024x1024, and RMS
norms over channels as in decoders of video.

Channels have different means and deviations, with a few outliers, as in trained models. In the variant
"N(0, 1)" all are alike. Writes to benchmarks/results/group_norm:

    python benchmarks/operations/bench_group_norm.py
    python benchmarks/operations/bench_group_norm.py --device cpu --tiny --no-compile --output out.json
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from benchmarks.harness.comparison import Case, Family, Workload, command, normal

GROUPS = 32
UNET_SHAPES = (  # with guidance
    (2, 320, 128, 128),
    (2, 960, 128, 128),
    (2, 640, 64, 64),
    (2, 1920, 64, 64),
    (2, 1280, 32, 32),
    (2, 2560, 32, 32),
)
AUTOENCODER_SHAPES = ((1, 512, 128, 128), (1, 128, 1024, 1024))
TRANSFORMER_SHAPES = ((2, 640, 64, 64), (2, 1280, 32, 32))  # before their attention: without SiLU
TINY_SHAPES = ((2, 64, 6, 5), (1, 32, 8, 8))
# Wan 480x832, at three depths of its decoder; Qwen-Image 1024x1024; LTX-Video 512x768, 49 frames.
DECODER_SHAPES = (
    (1, 96, 4, 480, 832),
    (1, 192, 4, 240, 416),
    (1, 384, 2, 120, 208),
    (1, 96, 1024, 1024),
)
MODULATED_SHAPES = ((1, 128, 49, 128, 192), (1, 512, 13, 32, 48))
TINY_DECODER_SHAPE = (1, 96, 2, 6, 8)
SILU, NORM = "SiLU", "norm alone"
EMBEDDING = "SiLU, embedding"  # a projected time embedding is added before
LAST = ", channels last"
CHANNELS_LAST = SILU + LAST
NORMAL = "SiLU, N(0, 1)"
MODULATED = "SiLU, scale and shift"
OUTLIERS = (20.0, 50)  # factor of an outlier channel, and one outlier per this many channels


def image(device: torch.device, *shape: int) -> Tensor:
    """Values as in a trained model: channels with different means and deviations, some of them outliers."""
    channels = (1, shape[1], *[1] * (len(shape) - 2))
    factor, every = OUTLIERS
    scales = normal(device, *channels, std=0.5, dtype=torch.float32).exp()
    scales[:, ::every] *= factor
    means = scales * normal(device, *channels, std=1.5, dtype=torch.float32)
    x = normal(device, *shape)
    return x.mul_(scales).add_(means)


def build(workload: Workload, kernel: ModuleType, device: torch.device) -> Case:
    words = workload.variant.split(", ")
    batch, channels, *_ = workload.shape
    x = (normal if workload.variant.startswith(NORMAL) else image)(device, *workload.shape)
    if "channels last" in words:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    weight, bias = normal(device, channels, std=0.2, mean=1.0), normal(device, channels, std=0.2)
    options: dict[str, object] = {"activation": "silu" if SILU in words else "none"}
    if workload.operation == "channel_rms_norm":
        if "scale and shift" not in words:
            return Case((x, weight), options)
        modulation = {name: normal(device, batch, channels, std=0.2) for name in ("scale", "shift")}
        return Case((x,), {**modulation, **options})
    if "embedding" in words:
        options["channel_bias"] = normal(device, batch, channels, std=0.5)
    return Case((x, GROUPS, weight, bias), options)


def workloads(shapes, transformer_shapes, decoder_shapes, modulated_shapes) -> list[Workload]:
    variants = (SILU, CHANNELS_LAST)
    return [
        *(Workload("channel_rms_norm", shape, SILU) for shape in decoder_shapes),
        *(Workload("channel_rms_norm", shape, MODULATED) for shape in modulated_shapes),
        Workload("channel_rms_norm", decoder_shapes[0], CHANNELS_LAST),
        *(Workload("group_norm", shape, variant) for variant in variants for shape in shapes),
        *(
            Workload("group_norm", shape, variant)
            for variant in (EMBEDDING, EMBEDDING + LAST, NORMAL, NORMAL + LAST)
            for shape in shapes[:1]
        ),
        *(
            Workload("group_norm", shape, variant)
            for variant in (NORM, NORM + LAST)
            for shape in transformer_shapes
        ),
    ]


FAMILY = Family(
    "group_norm",
    workloads(
        (*UNET_SHAPES, *AUTOENCODER_SHAPES), TRANSFORMER_SHAPES, DECODER_SHAPES, MODULATED_SHAPES
    ),
    workloads(TINY_SHAPES, TINY_SHAPES[1:], [TINY_DECODER_SHAPE], [TINY_DECODER_SHAPE]),
    build,
)
main = command(FAMILY, "Time group norms and norms over channels, with SiLU, and their peers.")

if __name__ == "__main__":
    main()
