"""Whether generated videos show their captions, with the kernels and without, and how much they differ.

The small trained LTX-Video of the examples generates each held-back caption once in each mode, from the same
noise. examples/train_small_ltx/detect.py looks for the color, the motion and the shape of each figure. PSNR
and SSIM compare a mode's videos with eager's. Eager in other attention backends, which differs by rounding
only, shows what they are at best. PSNR against eager in float32 shows the distance from exact arithmetic.
Modes in FP8 have the blocks' linear layers quantized by torchao per row; these need bfloat16. They and
attention in 8 bits run if --modes names them. Writes to benchmarks/results/quality, or quality/int8 with
attention in 8 bits, or quality/fp8 with other modes in FP8:

    python benchmarks/pipelines/bench_quality.py
    python benchmarks/pipelines/bench_quality.py --device cpu --dtype float32 --captions 4 --output out.json
    python benchmarks/pipelines/bench_quality.py --modes eager,injected,injected+fp8 --picture frames.webp
"""

from __future__ import annotations

import importlib
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import numpy as np
import torch
from diffusers.models.attention_dispatch import attention_backend
from PIL import Image
from tabulate import tabulate
from torchmetrics.functional.image import structural_similarity_index_measure as ssim
from tqdm import tqdm

from benchmarks import models
from benchmarks.harness import record
from benchmarks.harness.options import DEVICE, DTYPE, Named
from benchmarks.models.trained_ltx import (
    FOUND,
    TRAINED,
    Scene,
    found,
    generate,
    held_back_scenes,
    load,
)

from accuracy import psnr

CAPTIONS = 64
FRAMES_SHOWN = 6  # of a video, in the picture
FLOAT32 = "eager-float32"
TO_FLOAT32 = "psnr_to_float32_db"
# The attention backend of diffusers by mode. In the others, PyTorch chooses flash attention.
BACKENDS = {"eager-efficient": "_native_efficient", "eager-math": "_native_math"}
FP8_MODES = (models.TORCHAO, models.INJECTED_FP8)
ASKED_FOR = (*FP8_MODES, *models.INT8_MODES)  # only run if --modes names them
MODES = ("eager", "eager-again", *BACKENDS, FLOAT32, "injected", models.GRAPHS, *ASKED_FOR)
NEED_GPU = ("eager-efficient", models.GRAPHS, models.TORCHAO)


def set_up(mode: str, kernel: ModuleType | None, device: torch.device, dtype: torch.dtype) -> Any:
    """The pipeline in this mode."""
    dtype = torch.float32 if mode == FLOAT32 else dtype
    pipe = load(device, dtype)
    models.quantize_for(pipe.transformer, mode)
    if mode in models.INT8_MODES:
        # The model's sequences and heads are below the limits.
        decision = importlib.import_module(f"{kernel.__name__}.injection.attention.decision")
        decision.INT8_MIN_TOKENS = decision.INT8_ABOVE_HEAD_DIM = 1
    if mode.startswith("injected"):
        models.inject(kernel, pipe, mode)
    return pipe


def compared(video: torch.Tensor, eager: torch.Tensor) -> dict[str, float]:
    if torch.equal(video, eager):
        return {"psnr_db": math.inf, "ssim": 1.0}
    return {"psnr_db": psnr(video, eager), "ssim": float(ssim(video, eager, data_range=1.0))}


def of_all(values: Sequence[float]) -> dict[str, float] | None:
    """Median and least; None of no values."""
    return {"median": statistics.median(values), "min": min(values)} if values else None


def summary(scenes: Sequence[Scene], samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of one mode's videos. PSNR and SSIM are of those that are not equal to eager's; None if all are."""
    differ = [sample for sample in samples if sample["psnr_db"] < math.inf]
    return {
        "right": {name: statistics.fmean(s["score"][name] for s in samples) for name in FOUND},
        "wrong": {
            scene.caption: sample["found"]
            for scene, sample in zip(scenes, samples, strict=True)
            if min(sample["score"].values()) < 1
        },
        "equal": len(samples) - len(differ),
        "psnr_db": of_all([sample["psnr_db"] for sample in differ]),
        "ssim": of_all([sample["ssim"] for sample in differ]),
        TO_FLOAT32: of_all([sample[TO_FLOAT32] for sample in samples if TO_FLOAT32 in sample]),
    }


def measure(pipes: Mapping[str, Any], scenes: Sequence[Scene]) -> dict[str, Any]:
    """The summary of each mode's videos."""
    samples: dict[str, list] = {mode: [] for mode in pipes}
    for seed, scene in enumerate(tqdm(scenes, unit="caption", mininterval=10)):
        videos = {}
        for mode, pipe in pipes.items():
            # Not model.set_attention_backend, which chooses for all models.
            with attention_backend(BACKENDS.get(mode, "native")):
                videos[mode] = generate(pipe, scene.caption, seed).float()
        for mode, video in videos.items():
            scores, text = found(scene, video)
            sample = {"score": scores, "found": text, **compared(video, videos["eager"])}
            if FLOAT32 in videos and mode != FLOAT32:
                sample[TO_FLOAT32] = psnr(video, videos[FLOAT32])
            samples[mode].append(sample)
    return {mode: summary(scenes, of_mode) for mode, of_mode in samples.items()}


def write_picture(pipes: Mapping[str, Any], path: Path) -> None:
    """The example's prompt in each mode, from the same noise: a row of frames a mode."""
    rows = []
    for pipe in pipes.values():
        frames = generate(pipe, TRAINED.prompt, 0, output_type="np")
        shown = np.linspace(0, len(frames) - 1, FRAMES_SHOWN).round().astype(int)
        rows.append(np.concatenate(list(frames[shown]), axis=1))
    picture = (np.concatenate(rows) * 255).round().astype(np.uint8)
    Image.fromarray(picture).resize((picture.shape[1] // 2, picture.shape[0] // 2)).save(path)


def show(videos: dict[str, Any]) -> None:
    rows = [
        [mode, *(100 * entry["right"][name] for name in FOUND)]
        + [
            (entry[name] or {}).get(key)
            for name in ("psnr_db", "ssim", TO_FLOAT32)
            for key in ("median", "min")
        ]
        + [entry["equal"]]
        for mode, entry in videos.items()
    ]
    headers = ["mode", *(f"{name} %" for name in FOUND), "PSNR dB", "lowest", "SSIM", "lowest"]
    headers += ["PSNR to float32", "lowest", "equal"]
    click.echo(tabulate(rows, headers, floatfmt=".4g"))


@click.command()
@click.option(
    "--modes",
    type=Named("modes", {mode: mode for mode in MODES}),
    help=f"Comma-separated, eager first, of {', '.join(MODES)}; those that the device has.",
)
@click.option("--captions", type=click.IntRange(1), default=CAPTIONS, show_default=True)
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Only write the example's video here: frames in a row, a row a mode.",
)
@DEVICE
@DTYPE
@record.output_option("quality")
@torch.no_grad()
def main(modes, captions, picture, device, dtype, output) -> None:
    """Generate videos of held-back captions in each mode, and look for what the captions say."""
    if modes is None:
        left_out = NEED_GPU if device.type == "cpu" else ()
        left_out += (FLOAT32,) if dtype == torch.float32 else ()
        left_out += ASKED_FOR
        modes = [mode for mode in MODES if mode not in left_out]
    if modes[0] != "eager":
        raise click.UsageError("the first mode must be eager, with which the others are compared")
    injected = any(mode.startswith("injected") for mode in modes)
    kernel, _ = models.load_kernel() if injected else (None, None)
    pipes = {mode: set_up(mode, kernel, device, dtype) for mode in modes}
    if picture is not None:
        write_picture(pipes, picture)
        return
    environment = record.environment(device)
    name, neutral = "quality", ("modes",)
    if not set(models.INT8_MODES).isdisjoint(modes):
        name = "quality/int8"
    elif not set(FP8_MODES).isdisjoint(modes):
        name = "quality/fp8"
    else:
        neutral = ()
    output = record.destination(output, name, neutral)
    videos = measure(pipes, held_back_scenes(captions))
    show(videos)
    result = {"environment": environment, "dtype": record.dtype_name(dtype)}
    record.finish(output, result | {"captions": captions, "size": TRAINED.size, "videos": videos})


if __name__ == "__main__":
    main()
