"""Every model class and autoencoder, eager and injected: which of them the kernels slow down.

Wall time, which includes the launches, and GPU time, which does not, of one forward each. Both modes share
one set of weights and take turns; figures are medians. Speedups below SLOWER are listed. There are three
groups:

- published: the models of the other benchmarks, with their widths, tokens and a few of their blocks;
- autoencoders: decoding and encoding with published widths, of samples large enough for the GPU to be the
  limit;
- small: every class, with its configuration in tests/every_model.py, wider and with more samples where the
  class accepts that. Launches dominate their wall time.

GPU time is missing for models that wait for the GPU. Writes to benchmarks/results/every_model:

    python benchmarks/models/bench_every_model.py
    python benchmarks/models/bench_every_model.py --only "MiniMax|Wan" --output /tmp/every.json
    python benchmarks/models/bench_every_model.py --device cpu --tiny --only PRX --output /tmp/every.json
"""

from __future__ import annotations

import collections
import contextlib
import functools
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import diffusers
import torch
from tabulate import tabulate
from torch.utils import _pytree as pytree

from benchmarks import models
from benchmarks.harness import record, timing
from benchmarks.harness.options import DEVICE, PUBLISHED, TINY
from benchmarks.models import bench_in_part

import autoencoders
import every_model

SLOWER = 0.98
MODES = ("eager", "injected")
DTYPE = torch.bfloat16
WARM_UP_CALLS = 2
# Of each forward and kind of time, so that all classes take a few minutes.
SECONDS, MIN_ROUNDS, MAX_ROUNDS = 0.2, 3, 11
WIDER, MORE_SAMPLES = 8, 16
WIDTHS = re.compile(
    r"(audio_|cross_|num_|n_|dit_|kv_|key_value_|attention_|hidden_|model_|embed_|moe_|intermediate_|ffn?_|"
    r"inner_|d_)*(heads|size|dim|model|ff|ffn)"
)
# Of a head, of channels or of the text.
NOT_WIDTHS = re.compile(
    r"head_dim|sample_size|patch_size|vocab|text|cap|time|freq|cond|adaln|embedding"
)

Forward = Callable[[torch.nn.Module], object]


@dataclass(frozen=True)
class Entry:
    """What is measured.

    Attributes:
        make: ``make(device, is_tiny)`` is a model and some forwards of it, by name.
    """

    group: str
    name: str
    make: Callable[[torch.device, bool], tuple[torch.nn.Module, dict[str, Forward]]]


# --------------------------------------------------------------------------------------------------
# Published models


def _published(entry: Any, device: torch.device, is_tiny: bool) -> tuple[Any, dict[str, Forward]]:
    model, arguments = bench_in_part.model_and_arguments(entry, device, is_tiny)
    return model, {"forward": lambda twin: twin(**arguments)}


# --------------------------------------------------------------------------------------------------
# Autoencoders

_PICTURES = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 16,
}
_WAN22 = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "dim_mult": [1, 2, 4, 4],
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
}
# Class, configuration, and the sizes of latents and samples without the batch. Those of --tiny are small.
AUTOENCODERS: dict[str, tuple[str, dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "kl": ("AutoencoderKL", _PICTURES, (16, 128, 128), (3, 512, 512)),
    "flux2": ("AutoencoderKLFlux2", {}, (32, 128, 128), (3, 512, 512)),
    "temporal decoder": (
        "AutoencoderKLTemporalDecoder",
        {**{k: v for k, v in _PICTURES.items() if k != "up_block_types"}, "latent_channels": 4},
        (4, 64, 64),
        (3, 256, 256),
    ),
    "asymmetric": (
        "AsymmetricAutoencoderKL",
        {
            "down_block_types": _PICTURES["down_block_types"],
            "down_block_out_channels": (128, 256, 512, 512),
            "layers_per_down_block": 2,
            "up_block_types": _PICTURES["up_block_types"],
            "up_block_out_channels": (192, 384, 768, 768),
            "layers_per_up_block": 3,
        },
        (4, 64, 64),
        (3, 256, 256),
    ),
    "vq": (
        "VQModel",
        {**_PICTURES, "latent_channels": 4},
        (4, 64, 64),
        (3, 256, 256),
    ),
    "wan": ("AutoencoderKLWan", {}, (16, 3, 60, 104), (3, 9, 240, 416)),
    "wan 2.2": ("AutoencoderKLWan", _WAN22, (48, 2, 30, 52), (3, 5, 480, 832)),
    "qwenimage": ("AutoencoderKLQwenImage", {}, (16, 1, 128, 128), (3, 1, 512, 512)),
    "qwenimage21": ("AutoencoderKLQwenImage21", {}, (64, 1, 64, 64), (4, 1, 256, 256)),
    "ltx": ("AutoencoderKLLTXVideo", {}, (128, 7, 16, 24), (3, 25, 512, 768)),
    "ltx2": ("AutoencoderKLLTX2Video", {}, (128, 7, 16, 24), (3, 25, 512, 768)),
    "hunyuan": ("AutoencoderKLHunyuanVideo", {}, (16, 5, 32, 32), (3, 17, 256, 256)),
    "hunyuan15": ("AutoencoderKLHunyuanVideo15", {}, (32, 5, 16, 16), (3, 17, 256, 256)),
    "refiner": ("AutoencoderKLHunyuanImageRefiner", {}, (32, 5, 16, 16), (3, 17, 256, 256)),
    "cogvideox": ("AutoencoderKLCogVideoX", {}, (16, 3, 60, 90), (3, 9, 480, 720)),
    "mochi": ("AutoencoderKLMochi", {}, (12, 3, 30, 53), (3, 7, 480, 848)),
    # One tile: of less it decodes nothing.
    "allegro": ("AutoencoderKLAllegro", {}, (4, 6, 40, 40), (3, 24, 320, 320)),
    "cosmos": ("AutoencoderKLCosmos", {}, (16, 2, 64, 64), (3, 9, 512, 512)),
    "magvit": ("AutoencoderKLMagvit", {}, (16, 2, 32, 32), (3, 9, 512, 512)),
    "kvae": ("AutoencoderKLKVAE", {}, (16, 128, 128), (3, 1024, 1024)),
    "minimax h3": (
        "AutoencoderKLMiniMaxH3",
        {"decoder_num_layers": 8},
        (24, 7, 45, 80),
        (3, 17, 256, 256),
    ),
}


def _encode_and_decode(vae: Any, z: torch.Tensor, x: torch.Tensor, *more: Any) -> Any:
    return vae, {"decode": lambda vae: vae.decode(z, *more), "encode": lambda vae: vae.encode(x)}


def _autoencoder(name: str, device: torch.device, is_tiny: bool) -> tuple[Any, dict[str, Forward]]:
    if is_tiny:
        small = autoencoders.AUTOENCODERS[name]
        given = small.arguments(device, DTYPE)
        time_ = (given["temb"],) if "temb" in given else ()
        return _encode_and_decode(small.model(device, DTYPE), given["z"], given["x"], *time_)
    cls, config, *sizes = AUTOENCODERS[name]
    vae = models.build(getattr(diffusers, cls), config, device, DTYPE, seed=0)
    draw = models.normal(device, DTYPE, seed=0)
    if name == "allegro":  # it only decodes in tiles
        vae.enable_tiling()
    frames = (1,) if name == "temporal decoder" else ()
    return _encode_and_decode(vae, *(draw(1, *size) for size in sizes), *frames)


# --------------------------------------------------------------------------------------------------
# Other classes


def _wider(config: dict[str, Any], by: int) -> dict[str, Any]:
    """The configuration with more heads, and wider by the same factor."""
    return {
        name: value * by
        for name, value in config.items()
        if type(value) is int
        and WIDTHS.fullmatch(name)
        and not NOT_WIDTHS.search(name)
        and (value >= 64 or "heads" in name)
    }


def _more_samples(arguments: dict[str, Any], by: int) -> dict[str, Any]:
    """The arguments, whose tensors of two samples get more samples."""

    def more(value: Any) -> Any:
        is_batch = isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == 2
        return value.repeat(by, *[1] * (value.dim() - 1)) if is_batch else value

    return pytree.tree_map(more, arguments)


def _small(name: str, device: torch.device, is_tiny: bool) -> tuple[Any, dict[str, Forward]]:
    """The largest that the class accepts, of wider models and of more samples."""
    small = every_model.MODELS[name]
    makers = [functools.partial(small.model, device, DTYPE)]
    arguments = small.arguments(device, DTYPE)
    choices = [arguments]
    if not is_tiny:
        choices.insert(0, _more_samples(arguments, MORE_SAMPLES))
        if isinstance(small, every_model.SmallModel):
            wider = _wider(small.config, WIDER)
            makers.insert(0, functools.partial(small.model, device, DTYPE, **wider))
    for make in makers:
        with contextlib.suppress(Exception):
            model = make()
            for given in choices:
                with contextlib.suppress(Exception):
                    model(**given)
                    return model, {"forward": lambda twin, given=given: twin(**given)}
    raise RuntimeError(f"{name} cannot be run")


def entries(is_tiny: bool) -> Iterator[Entry]:
    for model in dict.fromkeys((*PUBLISHED, *bench_in_part.MODELS.values())):
        yield Entry("published", model.name, functools.partial(_published, model))
    for name in autoencoders.AUTOENCODERS if is_tiny else AUTOENCODERS:
        yield Entry("autoencoders", name, functools.partial(_autoencoder, name))
    for name in every_model.MODELS:
        yield Entry("small", name, functools.partial(_small, name))


# --------------------------------------------------------------------------------------------------
# Measurement


def medians(
    forwards: dict[str, Callable[[], object]],
    device: torch.device,
    measure: Callable[[Callable[[], object], torch.device], float],
    rounds: int | None,
) -> dict[str, float]:
    if rounds is None:
        begin = time.perf_counter()
        timing.interleave(forwards, 1, device, measure)
        seconds = time.perf_counter() - begin
        rounds = round(min(max(SECONDS / seconds, MIN_ROUNDS), MAX_ROUNDS))
    samples = timing.interleave(forwards, rounds, device, measure)
    return {mode: statistics.median(values) for mode, values in samples.items()}


def measure(
    entry: Entry, kernel: ModuleType, device: torch.device, is_tiny: bool, rounds: int | None
) -> Iterator[dict[str, Any]]:
    """The times of each of an entry's forwards."""
    model, forwards = entry.make(device, is_tiny)
    twins = {mode: models.twin(model) for mode in MODES}
    report = models.inject(kernel, twins["injected"], "injected")
    stopwatch = timing.Stopwatch(device)
    for name, forward in forwards.items():
        before = _fallbacks(report)
        both = {mode: functools.partial(forward, twin) for mode, twin in twins.items()}
        timing.interleave(both, WARM_UP_CALLS, device)
        result: dict[str, Any] = {
            "group": entry.group,
            "model": entry.name,
            "forward": name,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "wall_ms": medians(both, device, timing.wall_milliseconds, rounds),
        }
        try:
            times = medians(both, device, stopwatch.cold, rounds)
            result["gpu_ms"] = {mode: microseconds / 1e3 for mode, microseconds in times.items()}
        except RuntimeError as error:
            result["gpu_ms"], result["no_gpu_time"] = None, str(error)
        for kind in ("wall", "gpu"):
            of_kind = result[f"{kind}_ms"]
            result[f"{kind}_speedup"] = of_kind and of_kind["eager"] / of_kind["injected"]
        result["fell_back"] = sorted(_fallbacks(report) - before)
        yield result


def _fallbacks(report: Any) -> collections.Counter[str]:
    """The number of calls that the model's own code computed, by reason."""
    return sum(
        (collections.Counter(calls.fell_back) for calls in report.calls), collections.Counter()
    )


def slower(results: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Those slower injected than eager, in "wall" or "gpu" time."""
    key = f"{kind}_speedup"
    found = [result for result in results if result[key] and result[key] < SLOWER]
    return sorted(found, key=lambda result: result[key])


def show(results: list[dict[str, Any]]) -> None:
    for kind in ("wall", "gpu"):
        found = slower(results, kind)
        click.echo(f"\n{len(found)} of {len(results)} are slower injected, in {kind} time")
        keys = ("group", "model", "forward")
        rows = [
            [
                *(result[key] for key in keys),
                *result[f"{kind}_ms"].values(),
                result[f"{kind}_speedup"],
                "; ".join(result["fell_back"]),
            ]
            for result in found
        ]
        headers = [*keys, *(f"{mode} ms" for mode in MODES), "speedup", "falls back"]
        if rows:
            click.echo(tabulate(rows, headers, floatfmt=".3f"))


@click.command()
@DEVICE
@TINY
@click.option("--only", help="A regular expression that groups or names contain.")
@click.option("--rounds", type=click.IntRange(min=1), help="If not as many as fit into SECONDS.")
@record.output_option("every_model")
@torch.no_grad()
def main(device, tiny, only, rounds, output) -> None:
    """Measure all classes one after the other."""
    kernel, _ = models.load_kernel()
    result: dict[str, Any] = {
        "environment": record.environment(device),
        "dtype": record.dtype_name(DTYPE),
        "every_model": [],
        "not_measured": {},
    }
    output = record.destination(output, "every_model")
    chosen = [e for e in entries(tiny) if only is None or re.search(only, f"{e.group} {e.name}")]
    for entry in chosen:
        try:
            result["every_model"] += measure(entry, kernel, device, tiny, rounds)
        except Exception as error:  # the other classes are still measured
            result["not_measured"][entry.name] = f"{type(error).__name__}: {error}"
            click.echo(f"{entry.name}:\n{traceback.format_exc()}", err=True)
        if entry.group != "small":
            models.free(device)
        record.write(output, result)
    show(result["every_model"])
    for name, reason in result["not_measured"].items():
        click.echo(f"not measured: {name}: {reason}")
    record.say_where(output)


if __name__ == "__main__":
    main()
