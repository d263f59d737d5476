"""Models whose attention has a mask by blocks: eager, compiled block by block, and injected.

Kandinsky 5 and the super-resolution of Kandinsky 6 choose key blocks of 64 for each head and block of queries
(NABLA), and pass a ``BlockMask`` to FlexAttention, which is compiled in all modes. SkyReels-V2 with diffusion
forcing attends to earlier frames. All modes share one set of weights and take turns. With random weights
NABLA's estimates are nearly equal, so its threshold leaves out the share of blocks that it says. The result
has the share that was attended to. Models have a few of their blocks, at published widths and sizes. Writes
to benchmarks/results/block_masks:

    python benchmarks/models/bench_block_masks.py
    python benchmarks/models/bench_block_masks.py --models skyreels --output /tmp/block_masks.json
    python benchmarks/models/bench_block_masks.py --device cpu --tiny --output /tmp/block_masks.json
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
from diffusers.models import transformers
from diffusers.models.attention_dispatch import attention_backend
from tabulate import tabulate
from torch.nn.attention import flex_attention

from benchmarks import models
from benchmarks.harness import record, timing
from benchmarks.harness.options import DEVICE, TINY, names_option
from benchmarks.models.bench_in_part import DTYPE, RUNS, WARM_UP_ROUNDS, measure_each
from benchmarks.models.kandinsky import KANDINSKY6_SR, LITE, PRO, Kandinsky5
from benchmarks.models.published import Given, Published, PublishedVideo, VideoSize

PEERS, OURS = ("eager", models.REGIONAL), ("injected", f"injected+{models.REGIONAL}")


NABLA = {
    "attention_type": "nabla",
    "attention_P": 0.15,
    "attention_wT": 11,
    "attention_wW": 3,
    "attention_wH": 3,
}


class Nabla(Kandinsky5):
    """Kandinsky 5 Lite for 10 seconds."""

    key, name = "kandinsky5_lite", "Kandinsky 5 Lite, 10 s, 4 blocks"
    config = {**LITE, **NABLA}
    tiny_config = {
        "in_visual_dim": 4,
        "in_text_dim": 64,
        "in_text_dim2": 12,
        "time_dim": 16,
        "model_dim": 128,
        "ff_dim": 96,
        "num_visual_blocks": 2,
        "num_text_blocks": 1,
        **NABLA,
        "attention_P": 0.1,
        "attention_wT": 3,
    }
    sizes = (VideoSize(241, 512, 768),)
    tiny_sizes = (VideoSize(9, 128, 256),)


class NablaPro(Nabla):
    """Kandinsky 5 Pro."""

    key, name = "kandinsky5_pro", "Kandinsky 5 Pro, 5 s, 2 blocks"
    config = {**PRO, **NABLA}
    sizes = (VideoSize(121, 768, 1280),)


class SkyReels(PublishedVideo):
    """SkyReels-V2 14B with diffusion forcing: five latent frames have a timestep, and see those before."""

    key, name, tiny_name = "skyreels", "SkyReels-V2 14B, 97 frames, 2 blocks", "tiny SkyReels-V2"
    cls = transformers.SkyReelsV2Transformer3DModel
    config = {
        "num_layers": 2,
        "num_attention_heads": 40,
        "attention_head_dim": 128,
        "ffn_dim": 13824,
        "inject_sample_info": True,
        "num_frame_per_block": 5,
    }
    tiny_config = {
        "num_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 64,
        "ffn_dim": 128,
        "text_dim": 64,
        "num_frame_per_block": 2,
    }
    text_tokens = 512
    sizes = (VideoSize(97, 544, 960),)
    tiny_sizes = (VideoSize(13, 64, 96),)

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        config = model.config
        frames = given.size.latent[0]
        steps = torch.arange(frames, device=given.device) // config.num_frame_per_block
        arguments = {
            "hidden_states": given.normal(1, config.in_channels, *given.size.unpacked),
            "encoder_hidden_states": given.normal(1, given.text_tokens, config.text_dim),
            "timestep": (given.timestep - 100 * steps)[None],
            "enable_diffusion_forcing": True,
        }
        if config.inject_sample_info:
            arguments["fps"] = [1]
        return arguments


MODELS = {entry.key: entry for entry in (Nabla(), NablaPro(), KANDINSKY6_SR, SkyReels())}


@contextlib.contextmanager
def compiled_flex(device: torch.device) -> Iterator[list[float]]:
    """FlexAttention compiled on GPUs, as its users do; the shares of key blocks that its masks attend to."""
    plain, shares = flex_attention.flex_attention, []
    compiled = torch.compile(plain, dynamic=False) if device.type == "cuda" else plain

    def flex(*args: Any, **options: Any) -> Any:
        mask = options["block_mask"]
        if mask is not None:
            # With heads of 64 elements its default tiles are larger than NABLA's blocks, and it fails.
            rows, columns = mask.BLOCK_SIZE
            options["kernel_options"] = {"BLOCK_M": rows, "BLOCK_N": columns}
        if torch.compiler.is_compiling():
            return plain(*args, **options)
        if mask is not None:
            counts = mask.full_kv_num_blocks
            shares.append(counts.float().mean().item() / counts.shape[-1])
        return compiled(*args, **options)

    flex_attention.flex_attention = flex
    try:
        yield shares
    finally:
        flex_attention.flex_attention = plain


def measure(
    entry: Published, kernel: ModuleType, device: torch.device, is_tiny: bool, rounds: int
) -> dict[str, Any]:
    model = entry.transformer(device, DTYPE, is_tiny)
    size, *_ = entry.tiny_sizes if is_tiny else entry.sizes
    arguments = entry.inputs(model, size, device, DTYPE)
    has_lists = not isinstance(entry, SkyReels)
    twins = {
        mode: models.twin(model)
        for mode in (*PEERS, *OURS)
        if device.type == "cuda" or "comp" not in mode
    }
    report = None
    # For all models, which set_attention_backend also does.
    backend = attention_backend("flex") if has_lists else contextlib.nullcontext()
    with backend, compiled_flex(device) as shares, models.weights(model, "peaked"):
        for mode, instance in twins.items():
            if mode in OURS:
                report = models.inject(kernel, instance, mode)
            models.compile_as(instance, mode)
        forwards = {mode: functools.partial(twin, **arguments) for mode, twin in twins.items()}
        results = {mode: forward()[0].float() for mode, forward in forwards.items()}
        share = statistics.mean(shares) if shares else None
        shares.clear()
        timing.interleave(forwards, WARM_UP_ROUNDS, device)
        runs = [timing.interleave(forwards, rounds, device) for _ in range(RUNS)]
    medians = [{mode: statistics.median(times) for mode, times in run.items()} for run in runs]
    exact = results["eager"]
    distances = {m: ((r - exact).norm() / exact.norm()).item() for m, r in results.items()}
    return {
        "model": entry.name_of(is_tiny),
        "size": str(size),
        "share": share,
        "ms": medians,
        "speedups": {
            ours: {p: [run[p] / run[ours] for run in medians] for p in PEERS if p in twins}
            for ours in OURS
            if ours in twins
        },
        "distance_from_eager": distances,
        "report": str(report),
    }


def show(measured: Sequence[dict[str, Any]]) -> None:
    rows = [
        [m["model"], m["share"], ours, peer, *runs, m["distance_from_eager"][ours]]
        for m in measured
        for ours, of_peers in m["speedups"].items()
        for peer, runs in of_peers.items()
    ]
    names = ["mode", "over", *[f"run {i + 1}" for i in range(RUNS)], "distance"]
    click.echo(tabulate(rows, ["model", "share", *names], floatfmt=".4g"))


@click.command()
@DEVICE
@TINY
@names_option("--models", MODELS, "entries")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@record.output_option("block_masks")
@torch.no_grad()
def main(device, tiny, entries, rounds, output) -> None:
    """Measure the models one after the other."""
    measure_each("block_masks", measure, entries, device, tiny, rounds, output, show)


if __name__ == "__main__":
    main()
