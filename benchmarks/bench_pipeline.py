"""The whole LTX-Video pipeline without the text encoder: denoising loop and VAE decoding.

Random weights at the published sizes, made-up prompt embeddings, guidance 3 (so batch 2), decoded frames stay
on the GPU. All modes share one set of weights and take turns: eager, injected and, on a GPU, injected with
CUDA graphs. Writes to benchmarks/results/pipeline:

    python benchmarks/bench_pipeline.py
    python benchmarks/bench_pipeline.py --modes eager,compiled,injected --videos 49x512x704:30
    python benchmarks/bench_pipeline.py --device cpu --tiny --output /tmp/pipeline.json
"""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import click
import clocks
import cuda_graphs
import ltx
import models
import record
import timing
import torch
from distance import psnr
from options import DEVICE, DTYPE, TINY, Sizes, modes_on, modes_option
from tabulate import tabulate

GUIDANCE = 3.0
DEFAULT_MODES = ("eager", "injected", models.GRAPHS)
DEFAULT_VIDEOS = "49x512x704:30,161x512x768:50"
TINY_VIDEOS = "9x64x96:3,17x64x96:2"


@dataclass(frozen=True)
class Video:
    """A video and its number of denoising steps."""

    size: ltx.VideoSize
    steps: int

    def __str__(self) -> str:
        return f"{self.size}:{self.steps}"


class Videos(click.ParamType):
    """Comma-separated FRAMESxHEIGHTxWIDTH:STEPS."""

    name = "videos"

    def convert(self, value, param, ctx) -> list[Video]:
        videos = []
        for part in value.split(","):
            size, _, steps = part.partition(":")
            # The scheduler's shift to a terminal sigma divides by zero at one step.
            if not steps.isdecimal() or int(steps) < 2:
                self.fail(f"a video is FRAMESxHEIGHTxWIDTH:STEPS, got {part!r}", param, ctx)
            videos.append(Video(Sizes().convert(size, param, ctx)[0], int(steps)))
        return videos


def seconds(run, device: torch.device) -> float:
    """Time of one call by the clock, from an idle device to an idle device."""
    timing.synchronize(device)
    begin = time.perf_counter()
    run()
    timing.synchronize(device)
    return time.perf_counter() - begin


def build(
    mode: str, model: torch.nn.Module, vae: torch.nn.Module, kernel: ModuleType | None
) -> tuple[ltx.LTXPipeline, Any]:
    """A pipeline in the given mode, with the weights of both, and the report of the injection."""
    pipe = ltx.pipeline(models.twin(model), models.twin(vae))
    report = models.inject(kernel, pipe, mode) if mode.startswith("injected") else None
    models.compile_as(pipe.transformer, mode)
    return pipe, report


def measure_video(
    model: torch.nn.Module,
    vae: torch.nn.Module,
    kernel: ModuleType | None,
    video: Video,
    modes: list[str],
    rounds: int,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, object]:
    """All modes on one video."""
    prompt = ltx.prompt(model, device, dtype)

    def run(pipe, steps=video.steps, output_type="pt"):
        return pipe(
            **prompt,
            num_frames=video.size.frames,
            height=video.size.height,
            width=video.size.width,
            frame_rate=ltx.FRAME_RATE,
            num_inference_steps=steps,
            guidance_scale=GUIDANCE,
            generator=torch.Generator(device).manual_seed(0),
            output_type=output_type,
        ).frames

    runs, results, reports = {}, {}, {}
    for mode in modes:
        pipe, reports[mode] = build(mode, model, vae, kernel)
        warm_up = seconds(functools.partial(run, pipe, steps=2), device)
        click.echo(f"{video} {mode}: two steps, with what happens once: {warm_up:.2f} s")
        runs[mode] = functools.partial(run, pipe)
        results[mode] = {"first_two_steps_s": warm_up}

    frames = {}

    def timed(mode):
        frames[mode] = None  # freed before the next video is made
        frames[mode] = runs[mode]()

    with clocks.watch(device) as clock:
        samples = timing.interleave(
            {mode: functools.partial(timed, mode) for mode in modes}, rounds, device, seconds
        )
    for mode, result in results.items():
        if not torch.isfinite(frames[mode]).all():
            raise RuntimeError(f"{mode}: the video has non-finite values")
        result["seconds"] = timing.summarize(samples[mode])
        if mode == models.GRAPHS:
            calls = rounds * video.steps
            result["graphs"] = cuda_graphs.check_replayed(reports[mode], calls)
        if "eager" in frames and mode != "eager":
            distance = psnr(frames[mode], frames["eager"])
            result["psnr_to_eager_db"] = distance if math.isfinite(distance) else None

    latents = torch.randn(1, vae.config.latent_channels, *video.size.latent, device=device)
    decode = functools.partial(vae.decode, latents.to(dtype))
    decode()
    medians = {mode: result["seconds"]["median"] for mode, result in results.items()}
    return {
        "tokens": video.size.tokens,
        "batch": 2,
        "steps": video.steps,
        "vae_decode_ms": timing.summarize([timing.milliseconds(decode, device) for _ in range(3)]),
        "clocks": clock,
        "modes": results,
        "speedups": timing.speedups(medians),
    }


def show(video: str, result: dict) -> None:
    rows = [
        [mode, entry["seconds"]["median"], 100 * entry["seconds"]["spread"]]
        + [result["speedups"][mode].get(other) for other in ("eager", "compiled")]
        + [entry.get("psnr_to_eager_db")]
        for mode, entry in result["modes"].items()
    ]
    click.echo(
        f"\n{video}, {result['batch']}x{result['tokens']} tokens, "
        f"VAE decoding {result['vae_decode_ms']['median']:.0f} ms"
    )
    headers = ["mode", "seconds", "spread %", "x eager", "x compiled", "PSNR to eager"]
    click.echo(tabulate(rows, headers, floatfmt=".2f"))
    clocks.show(result["clocks"])


@click.command()
@click.option("--videos", type=Videos(), help=f"[default: {DEFAULT_VIDEOS}]")
@modes_option(DEFAULT_MODES)
@DEVICE
@DTYPE
@TINY
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@record.output_option("pipeline")
@torch.no_grad()
def main(videos, modes, device, dtype, tiny, rounds, output) -> None:
    """Time the whole LTX-Video pipeline, without the text encoder, in each mode."""
    modes = modes_on(device, modes)
    injected = any(mode.startswith("injected") for mode in modes)
    kernel, _ = models.load_kernel() if injected else (None, None)
    model = ltx.transformer(device, dtype, tiny)
    vae = ltx.vae(device, dtype, tiny)
    results = {
        "environment": record.environment(device),
        "model": "LTX-Video 2B, random weights" if not tiny else "tiny LTX, random weights",
        "dtype": record.dtype_name(dtype),
        "guidance": GUIDANCE,
        "rounds": rounds,
        "videos": {},
    }
    videos = videos or Videos().convert(TINY_VIDEOS if tiny else DEFAULT_VIDEOS, None, None)
    output = record.destination(output, "pipeline", results["environment"])
    for video in videos:
        torch.compiler.reset()
        results["videos"][str(video)] = measure_video(
            model, vae, kernel, video, modes, rounds, device, dtype
        )
        if output is not None:
            record.write(output, results)
        show(str(video), results["videos"][str(video)])
    if output is not None:
        click.echo(f"\nWrote {output}")


if __name__ == "__main__":
    main()
