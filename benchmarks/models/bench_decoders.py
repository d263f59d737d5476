"""Decoders: latents to frames, of published sizes, eager and injected.

Modes take turns and share one set of random weights. Recorded for each: milliseconds, the first and second
call with injection or compilation, the most memory of a call, and the relative L2 distance of a small decode
from float32's. Decoders that are transformers are also compiled and replayed from CUDA graphs. Writes to
benchmarks/results/decoders:

    python benchmarks/models/bench_decoders.py
    python benchmarks/models/bench_decoders.py --decoders wan,ltx --rounds 5
    python benchmarks/models/bench_decoders.py --device cpu --tiny --output /tmp/decoders.json
"""

from __future__ import annotations

import copy
import functools
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import diffusers
import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks import models
from benchmarks.harness import record, timing
from benchmarks.harness.options import DEVICE, TINY, measure_each, names_option
from benchmarks.models import bench_every_model

import autoencoders
from checks import relative_distance

DTYPE = torch.bfloat16
COMPILED, GRAPHS = "compiled", models.GRAPHS
LTX2 = {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8}


@dataclass(frozen=True)
class Decoder:
    """An autoencoder, the size of its latents, and what they become.

    Attributes:
        key: of its class and configuration in bench_every_model and in tests/autoencoders.py.
        changes: to the configuration.
        is_transformer: whether its decoder is one, which is compiled and captured, too.
    """

    title: str
    frames: str
    key: str
    latent: tuple[int, ...]
    changes: dict[str, Any] = field(default_factory=dict)
    is_transformer: bool = False

    def build(self, device: torch.device, is_tiny: bool) -> tuple[Any, Tensor]:
        if is_tiny:
            known = {**autoencoders.AUTOENCODERS, **autoencoders.IN_SINGLE_PARTS}
            known["minimax h3"] = autoencoders.MINIMAX_H3
            small = known[self.key]
            vae, latent = small.model(device), small.latent
        else:
            cls, config, *_ = bench_every_model.AUTOENCODERS[self.key]
            config = self.changes or config
            vae = models.build(getattr(diffusers, cls), config, device, torch.float32, seed=0)
            latent = self.latent
        kept = {*(vae._keep_in_fp32_modules or ())}
        for name, parameter in vae.named_parameters():
            if not kept.intersection(name.split(".")):
                parameter.data = parameter.data.to(DTYPE)
        return vae.requires_grad_(False), models.normal(device, DTYPE, seed=0)(1, *latent)

    @property
    def modes(self) -> tuple[str, ...]:
        more = (COMPILED, GRAPHS) if self.is_transformer else ()
        return ("eager", "injected", *more)


DECODERS = {
    "wan": Decoder("Wan 2.1", "81 × 480 × 832", "wan", (16, 21, 60, 104)),
    "qwenimage": Decoder("Qwen-Image", "1024 × 1024", "qwenimage", (16, 1, 128, 128)),
    "ltx": Decoder("LTX-Video", "121 × 704 × 1216", "ltx", (128, 16, 22, 38)),
    "ltx2": Decoder("LTX-2", "121 × 512 × 768", "ltx2", (128, 16, 16, 24), LTX2),
    "hunyuan15": Decoder("HunyuanVideo 1.5", "61 × 480 × 848", "hunyuan15", (32, 16, 30, 53)),
    "hunyuan": Decoder("HunyuanVideo", "33 × 272 × 480", "hunyuan", (16, 9, 34, 60)),
    "cogvideox": Decoder("CogVideoX", "17 × 480 × 720", "cogvideox", (16, 5, 60, 90)),
    "mochi": Decoder("Mochi", "37 × 240 × 424", "mochi", (12, 7, 30, 53)),
    "cosmos": Decoder("Cosmos", "25 × 480 × 832", "cosmos", (16, 4, 60, 104)),
    "flux": Decoder("FLUX.1", "1024 × 1024", "kl", (16, 128, 128)),
    "minimax_h3": Decoder(
        "MiniMax-H3",
        "39 × 720 × 1280",
        "minimax h3",
        (24, 12, 45, 80),
        {"decoder_num_layers": 36},
        is_transformer=True,
    ),
}


def set_up(vae: Any, kernel: ModuleType, mode: str) -> Any:
    twin = models.twin(vae)
    if mode == COMPILED:
        twin.decoder.compile()
    elif mode != "eager":
        pipe = SimpleNamespace(components={"vae": twin})
        kernel.inject_kernels(pipe, cuda_graphs=mode == GRAPHS)
    return twin


def decode(vae: Any, z: Tensor) -> Tensor:
    return vae.decode(z, return_dict=False)[0]


def small_part(z: Tensor) -> Tensor:
    """A part of the latents that float32 convolutions decode in a moment."""
    part = z[:, :, :7] if z.dim() == 5 else z
    return part[..., : max(z.shape[-2] // 4, 4), : max(z.shape[-1] // 4, 4)].contiguous()


def errors(twins: dict[str, Any], vae: Any, z: Tensor) -> dict[str, float]:
    z = small_part(z)
    with torch.backends.cudnn.flags(allow_tf32=False):
        exact = decode(copy.deepcopy(vae).float(), z.float())
    return {mode: relative_distance(decode(twin, z), exact) for mode, twin in twins.items()}


def seconds(function: Any, device: torch.device) -> float:
    return timing.wall_milliseconds(function, device) / 1e3


def measure(
    decoder: Decoder, kernel: ModuleType, rounds: int, device: torch.device, is_tiny: bool
) -> dict[str, Any]:
    vae, z = decoder.build(device, is_tiny)
    twins, results = {}, {}
    for mode in decoder.modes:
        begin = time.perf_counter()
        twins[mode] = set_up(vae, kernel, mode)
        set_up_s = time.perf_counter() - begin
        call = functools.partial(decode, twins[mode], z)
        first = set_up_s + seconds(call, device)
        results[mode] = {"set_up_s": set_up_s, "first_s": first, "second_s": seconds(call, device)}
        results[mode]["call_bytes"] = models.peak_bytes(call, device)
    calls = {mode: functools.partial(decode, twin, z) for mode, twin in twins.items()}
    samples = timing.interleave(calls, rounds, device, seconds)
    distances = errors(twins, vae, z)
    for mode, result in results.items():
        result["seconds"] = timing.summarize(samples[mode])
        result["error"] = distances[mode]
    medians = {mode: result["seconds"]["median"] for mode, result in results.items()}
    return {
        "name": next(name for name, known in DECODERS.items() if known is decoder),
        "title": decoder.title,
        "frames": decoder.frames,
        "rounds": rounds,
        "modes": results,
        "speedups": timing.speedups(medians),
    }


def show(entry: dict[str, Any]) -> None:
    rows = []
    for mode, result in entry["modes"].items():
        memory = result["call_bytes"] and result["call_bytes"] / 2**30
        rows.append(
            [
                mode,
                result["seconds"]["median"],
                100 * result["seconds"]["spread"],
                entry["speedups"][mode].get("eager"),
                entry["speedups"][mode].get(COMPILED),
                result["first_s"],
                result["second_s"],
                memory,
                1e3 * result["error"],
            ]
        )
    headers = ["mode", "seconds", "spread %", "x eager", "x compiled", "first s", "second s", "GiB"]
    click.echo(f"\n{entry['title']}, {entry['frames']}")
    click.echo(tabulate(rows, [*headers, "error 1e-3"], floatfmt=".3f"))


@click.command(help="Time decoders, eager and injected.")
@names_option("--decoders", DECODERS)
@DEVICE
@TINY
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@record.output_option("decoders")
@torch.no_grad()
def main(decoders, device, tiny, rounds, output) -> None:
    kernel, _ = models.load_kernel()
    result: dict[str, Any] = {
        "environment": record.environment(device),
        "dtype": record.dtype_name(DTYPE),
        "decoders": [],
    }
    output = record.destination(output, "decoders", ("decoders", "modes"))

    def measure_one(decoder: Decoder) -> None:
        entry = measure(decoder, kernel, rounds, device, tiny)
        result["decoders"].append(entry)
        record.write(output, result)
        show(entry)

    measure_each({d.title: functools.partial(measure_one, d) for d in decoders}, device)
    record.say_where(output)


if __name__ == "__main__":
    main()
