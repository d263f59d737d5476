"""Whole pipelines: denoising loop and decoder, without the text encoder.

All blocks of the published models, random weights with scores as peaked as in trained models, made-up prompt
embeddings. All modes share one set of weights and take turns. Each call is a picture or a video of the number
of steps in PIPELINES. Recorded for each mode: seconds, decoder apart; energy, clock and power; memory. Writes
to benchmarks/results/pipelines:

    python benchmarks/pipelines/bench_pipelines.py
    python benchmarks/pipelines/bench_pipelines.py --pipelines flux,ltx --rounds 5
    python benchmarks/pipelines/bench_pipelines.py --pipelines ltx --steps 50 --modes injected,injected+fp8
    python benchmarks/pipelines/bench_pipelines.py --device cpu --tiny --output /tmp/pipelines.json

The modes with FlashAttention-3 need the wheel fa3-fwd. The pages show the run with the most pipelines, of
several the newest.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import numpy as np
import torch
from diffusers.modular_pipelines import flux3
from diffusers.modular_pipelines.flux3.decoders import Flux3DecodeStep
from diffusers.modular_pipelines.flux3.modular_blocks_flux3 import Flux3CoreDenoiseBlocks
from diffusers.modular_pipelines.modular_pipeline import SequentialPipelineBlocks
from peft import LoraConfig
from tabulate import tabulate
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from benchmarks import models
from benchmarks.harness import clocks, cuda_graphs, record, timing
from benchmarks.harness.options import (
    DEVICE,
    DTYPE,
    TINY,
    measure_each,
    modes_on,
    modes_option,
    names_option,
)

from accuracy import psnr
from pipelines import FLOW, MODELS, Model, call_arguments, random_parts, random_pipeline

WEIGHTS = "peaked"
DEFAULT_MODES = (
    *("eager", models.EAGER_FA3, models.REGIONAL, models.FA3),
    *("injected", models.PRECISION_FP8),
)
BASELINES = ("eager", models.REGIONAL, models.FA3)
WARM_UP_STEPS = 2  # with CUDA graphs the second one captures

DEPTH = ("num_layers", "num_single_layers", "n_layers")  # arguments that the examples make small
PROMPT = "A red fox trots through fresh snow at dawn."


@dataclass(frozen=True)
class Pipeline:
    """A pipeline and the number of steps that are timed, of those that the model's card recommends.

    Attributes:
        lora_rank: of an adapter on all linear layers of the blocks; 0 for none.
        assemble: makes a modular pipeline of its parts; None for other pipelines.
        prompt: what the pipeline gets, or made-up embeddings in its place.
    """

    title: str
    model: Model
    steps: int
    published_steps: int
    channels_last: bool = False
    lora_rank: int = 0
    assemble: Callable[[dict[str, Any]], Any] | None = None
    prompt: str = PROMPT

    def build(self, device: torch.device, dtype: torch.dtype, tiny: bool) -> Any:
        made = (self.model, tiny, str(device), dtype, 0)
        pipe = self.assemble(random_parts(*made)) if self.assemble else random_pipeline(*made)
        if self.channels_last:
            self.denoiser(pipe).to(memory_format=torch.channels_last)
        if self.lora_rank:
            add_lora(self.denoiser(pipe), self.lora_rank)
        return pipe

    def modes(self, pipe: Any, modes: list[str]) -> list[str]:
        """Those of the modes that the pipeline has.

        Eager with FlashAttention-3 is measured where diffusers recommends it: in place of a dense mask.
        """
        fa3 = models.flash_attention_3(self.denoiser(pipe))
        left_out = set(models.FA3_MODES) if fa3 is None else set()
        if fa3 != models.FLASH_3_VARLEN:
            left_out.add(models.EAGER_FA3)
        return [mode for mode in modes if mode not in left_out]

    def denoiser(self, pipe: Any) -> torch.nn.Module:
        return getattr(pipe, self.model.denoiser)

    def twin(self, pipe: Any) -> Any:
        """The same pipeline with modules of its own over the same weights."""
        parts = {
            name: models.twin(part) if isinstance(part, torch.nn.Module) else copy.deepcopy(part)
            for name, part in pipe.components.items()
        }
        twin = self.assemble(parts) if self.assemble else type(pipe)(**parts)
        twin.set_progress_bar_config(disable=True)
        return twin

    def call(self, pipe: Any, tiny: bool, **changes: object) -> Callable[..., torch.Tensor]:
        """Calls the pipeline for a number of steps; the frames or the image as a tensor."""
        changes = {"output_type": "pt", **changes}
        arguments = call_arguments(self.model, pipe, tiny, self.prompt, **changes)

        def run(steps: int | None = None) -> torch.Tensor:
            own = arguments if steps is None else {**arguments, "num_inference_steps": steps}
            result = pipe(**own, generator=torch.Generator(pipe.device).manual_seed(0))
            for name in ("images", "frames"):
                result = getattr(result, name, result)
            return result

        return run

    def compile(self, pipe: Any, mode: str) -> None:
        """As the mode asks for."""
        models.compile_as(self.denoiser(pipe), mode)

    def first_calls(
        self, call: Callable[..., Any], steps: int | None, pipe: Any, begin: float
    ) -> dict[str, Any]:
        """Calls until the pipeline is at full speed, and their times, the first one since `begin`."""
        call(WARM_UP_STEPS)
        timing.synchronize(pipe.device)
        seconds = time.perf_counter() - begin
        click.echo(f"{WARM_UP_STEPS} steps with set-up {seconds:.2f} s")
        return {"first_steps_s": seconds}

    def parts(self, pipe: Any) -> Parts:
        """Watches the parts of a call."""
        return Parts(pipe)


def add_lora(model: torch.nn.Module, rank: int) -> None:
    """An adapter with random weights on all linear layers of the blocks, as peft adds one."""
    # A new adapter's second product is 0, unless the weights are random.
    options = {"target_modules": models.linear_layers(model), "init_lora_weights": False}
    model.add_adapter(LoraConfig(r=rank, **options))


def published(
    title: str,
    key: str,
    steps: int,
    denoiser: dict[str, object] | None = None,
    size: tuple[int, ...] | None = None,
    **options: Any,
) -> Pipeline:
    """The example's pipeline with all blocks, and with these changes."""
    model = MODELS[key]
    (cls, config), name = model.parts[model.denoiser], model.denoiser
    config = {k: v for k, v in config.items() if k not in DEPTH} | (denoiser or {})
    published_steps, *sides = model.size
    size = (steps, *(size or sides))
    model = replace(model, size=size, parts={**model.parts, name: (cls, config)})
    return Pipeline(title, model, steps, published_steps, **options)


FLUX3 = replace(
    MODELS["flux2"],
    hub_id=None,
    pipeline="Flux3ModularPipeline",
    size=(10, 1024, 1024),
    call={"negative_prompt": "", "output": "images"},
    parts={
        "transformer": ("Flux3Transformer2DModel", {}),
        "vae": ("AutoencoderKLFlux2", {}),
        "scheduler": FLOW,
        "guider": ("guiders.ClassifierFreeGuidance", {"guidance_scale": 3.5}),
    },
    text={"prompt_embeds": (160, "joint_attention_dim")},
)


def _flux3_of(parts: dict[str, Any]) -> flux3.Flux3ModularPipeline:
    blocks = {**Flux3CoreDenoiseBlocks, "decode": Flux3DecodeStep()}
    pipe = SequentialPipelineBlocks.from_blocks_dict(blocks).init_pipeline()
    pipe.update_components(**parts)
    pipe.text_encoder = None
    return pipe


PIPELINES = {
    "flux": published("FLUX.1-dev", "flux", 28),
    "flux_lora": published("FLUX.1-dev with a LoRA of rank 16", "flux", 28, lora_rank=16),
    "flux2": published("FLUX.2-dev", "flux2", 5),
    "flux3": Pipeline("FLUX.3", FLUX3, 10, 50, assemble=_flux3_of),
    "qwenimage": published("Qwen-Image", "qwenimage", 10, size=(1024, 1024)),
    "sd3": published("Stable Diffusion 3.5 Large", "sd3", 28, {"num_layers": 38}),
    "z_image": published("Z-Image-Turbo", "z-image", 9),
    "sdxl": published("Stable Diffusion XL, channels last", "sdxl", 50, channels_last=True),
    "wan": published(
        "Wan 2.1 14B", "wan", 2, {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}
    ),
    "ltx": published("LTX-Video 2B", "ltx", 20),
    "ltx2": published("LTX-2", "ltx2", 3),
    "hunyuan_video15": published("HunyuanVideo 1.5", "hunyuan-video15", 2),
}


def mark(device: torch.device) -> Any:
    """A point of time on the device. On a GPU an event, so that nothing waits."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """Between two marks. The GPU must be idle."""
    return end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3


class TimedMethod:
    """Stands in for a method of a part of a pipeline, and times it on the device."""

    def __init__(self, owner: Any, name: str, device: torch.device) -> None:
        self._method, self._device = getattr(owner, name), device
        self._calls: list[tuple[Any, Any]] = []
        setattr(owner, name, self)

    def __call__(self, *args: object, **kwargs: object) -> object:
        begin = mark(self._device)
        result = self._method(*args, **kwargs)
        self._calls.append((begin, mark(self._device)))
        return result

    def take_seconds(self) -> float:
        """The time of all calls since the last `take_seconds`. The GPU must be idle."""
        seconds = sum(itertools.starmap(seconds_between, self._calls))
        self._calls.clear()
        return seconds


class Decoder(TimedMethod):
    """Also asks for the most memory that decoding takes above what was there before.

    Attributes:
        added_bytes: that memory; None on a CPU.
        peak_before: the most memory in use before decoding.
    """

    added_bytes: int | None = None
    peak_before = 0

    def __call__(self, *args: object, **kwargs: object) -> object:
        if self._device.type != "cuda":
            return super().__call__(*args, **kwargs)
        self.peak_before = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        result = super().__call__(*args, **kwargs)
        self.added_bytes = torch.cuda.max_memory_allocated(self._device) - before
        return result


class Parts:
    """The watched parts of a pipeline's call: the decoder."""

    def __init__(self, pipe: Any) -> None:
        self.decoder = Decoder(pipe.vae, "decode", pipe.device)

    def figures(self, seconds: float) -> dict[str, Any]:
        """Of the last call, which took this time."""
        return {
            "decoder_s": self.decoder.take_seconds(),
            "decoder_bytes": self.decoder.added_bytes,
        }


def held_bytes(device: torch.device, with_pools: bool) -> int:
    """Memory in use; with the pools of CUDA graphs, all that PyTorch holds and could not give back."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return (torch.cuda.memory_reserved if with_pools else torch.cuda.memory_allocated)(device)


def weights_of(pipe: Any) -> dict[int, int]:
    """The bytes of each storage of weights and buffers of all parts of a pipeline, by its address."""
    storages = {}

    def add(tensor: torch.Tensor) -> None:
        if is_traceable_wrapper_subclass(tensor):  # such as torchao's
            for name in tensor.__tensor_flatten__()[0]:
                add(getattr(tensor, name))
        else:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()

    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            for tensor in (*part.parameters(), *part.buffers()):
                add(tensor.data if isinstance(tensor, torch.nn.Parameter) else tensor)
    return storages


def set_up(
    pipeline: Pipeline, pipe: Any, kernel: ModuleType | None, mode: str, tiny: bool
) -> tuple[Callable[..., torch.Tensor], Any, Any]:
    """The call of a pipeline in this mode, the pipeline, and the report of the injection."""
    twin = pipeline.twin(pipe)
    models.quantize_for(pipeline.denoiser(twin), mode)
    report = models.inject(kernel, twin, mode) if mode.startswith("injected") else None
    pipeline.compile(twin, mode)
    return pipeline.call(twin, tiny), twin, report


def timed_call(
    call: Callable[..., torch.Tensor | np.ndarray], parts: Parts, device: torch.device
) -> tuple[torch.Tensor, dict[str, Any]]:
    """One picture or video, and its figures: seconds, those of its parts, clock, power and energy, and the
    most memory that the call takes above what was there before."""
    timing.synchronize(device)
    before = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    with clocks.watch(device) as clock:
        begin = time.perf_counter()
        picture = torch.as_tensor(call())
        timing.synchronize(device)
        seconds = time.perf_counter() - begin
    if not torch.isfinite(picture).all():
        raise RuntimeError("the result has non-finite values")
    peak = None
    if device.type == "cuda":
        peak = max(torch.cuda.max_memory_allocated(device), parts.decoder.peak_before) - before
    figures = {"seconds": seconds, **parts.figures(seconds), "call_bytes": peak, **clock}
    return picture.cpu(), figures


def summary(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the calls of one mode."""
    entry: dict[str, Any] = {"seconds": timing.summarize([s["seconds"] for s in samples])}
    for key in samples[0].keys() - {"seconds"}:
        values = [s[key] for s in samples if s.get(key) is not None]
        entry[key] = statistics.median(values) if values else None
    return entry


def measure(
    pipeline: Pipeline,
    kernel: ModuleType | None,
    modes: list[str],
    rounds: int,
    device: torch.device,
    dtype: torch.dtype,
    tiny: bool,
    steps: int | None = None,
) -> dict[str, Any]:
    """All modes of one pipeline, with its own number of steps if none is given."""
    pipe = pipeline.build(device, dtype, tiny)
    steps = pipeline.steps if steps is None and not tiny else steps
    does_not_fit = []
    with models.weights(pipeline.denoiser(pipe), WEIGHTS):
        calls, results, reports, pictures = {}, {}, {}, {}

        def measure_call(mode: str, whole: Callable[[], Any], parts: Parts) -> dict[str, Any]:
            pictures[mode], figures = timed_call(whole, parts, device)
            return figures

        for mode in pipeline.modes(pipe, modes):
            has_graphs = mode in models.GRAPHS_MODES
            before = held_bytes(device, has_graphs)
            begin = time.perf_counter()
            click.echo(f"{pipeline.title} {mode}: ", nl=False)
            try:
                call, twin, reports[mode] = set_up(pipeline, pipe, kernel, mode, tiny)
                first = pipeline.first_calls(call, steps, twin, begin)
            except torch.OutOfMemoryError:
                click.echo("does not fit beside the other modes' weights")
                does_not_fit.append(mode)
                call = twin = reports[mode] = None
                gc.collect()
                continue
            weights, shared = weights_of(twin), weights_of(pipe)
            own = sum(size for place, size in weights.items() if place not in shared)
            results[mode] = {
                **first,
                "weight_bytes": sum(weights.values()),
                "held_bytes": max(0, held_bytes(device, has_graphs) - before - own),
            }
            whole = functools.partial(call, steps)
            calls[mode] = functools.partial(measure_call, mode, whole, pipeline.parts(twin))
        samples = timing.interleave(calls, rounds, device, lambda call, device: call())
    for mode, result in results.items():
        result.update(summary(samples[mode]))
        if mode in models.GRAPHS_MODES:
            result["graphs"] = cuda_graphs.counts(reports[mode])
        if result["call_bytes"] is not None:
            parts = ("weight_bytes", "held_bytes", "call_bytes")
            result["memory_bytes"] = sum(result[part] for part in parts)
        if "eager" in samples and mode != "eager":
            distance = psnr(pictures[mode], pictures["eager"])
            result["psnr_to_eager_db"] = distance if math.isfinite(distance) else None
    medians = {mode: result["seconds"]["median"] for mode, result in results.items()}
    return {
        "title": pipeline.title,
        "size": "x".join(str(side) for side in _sides(pipeline)),
        "steps": steps,
        "published_steps": pipeline.published_steps,
        "weights": WEIGHTS,
        "rounds": rounds,
        "parameters": sum(p.numel() for p in pipeline.denoiser(pipe).parameters()),
        "modes": results,
        "does_not_fit": does_not_fit,
        "speedups": timing.speedups(medians),
    }


def _sides(pipeline: Pipeline) -> list[int]:
    """Frames if any, height and width."""
    _, height, width, *frames = pipeline.model.size
    return [*frames, height, width]


def show(entry: dict[str, Any]) -> None:
    rows = []
    for mode, result in entry["modes"].items():
        over = entry["speedups"][mode]
        row = [mode, result["seconds"]["median"], 100 * result["seconds"]["spread"]]
        row += [result["decoder_s"], *(over.get(other) for other in BASELINES)]
        row += [result.get(key) for key in ("joules", "watts", "sm_mhz", "power_cap")]
        row += [result["weight_bytes"] / 2**30, result.get("memory_bytes", 0) / 2**30]
        rows.append([*row, result.get("psnr_to_eager_db")])
    headers = ["mode", "seconds", "spread %", "decoder s", *(f"x {other}" for other in BASELINES)]
    headers += ["joules", "watts", "MHz", "at limit", "weights GiB", "memory GiB", "PSNR"]
    click.echo(f"\n{entry['title']}, {entry['size']}, {entry['steps']} steps")
    click.echo(tabulate(rows, headers, floatfmt=".3f"))


def measure_pipelines(
    benchmark: str,
    pipelines: Sequence[Pipeline],
    known: Mapping[str, Pipeline],
    modes: list[str],
    output: Path | None,
    show: Callable[[dict[str, Any]], None],
    device: torch.device,
    dtype: torch.dtype,
    **options: Any,
) -> None:
    """Measures pipelines of a table in each mode, one after the other, and writes and shows the results."""
    modes = modes_on(device, modes)
    injected = any(mode.startswith("injected") for mode in modes)
    kernel, _ = models.load_kernel() if injected else (None, None)
    result: dict[str, Any] = {
        "environment": record.environment(device),
        "dtype": record.dtype_name(dtype),
        "pipelines": [],
    }
    where = record.destination(output, benchmark, ("pipelines", "modes"))

    def measure_one(name: str) -> None:
        begin = time.perf_counter()
        entry = measure(known[name], kernel, modes, device=device, dtype=dtype, **options)
        entry = {"name": name, **entry, "wall_s": time.perf_counter() - begin}
        result["pipelines"].append(entry)
        record.write(where, result)
        show(entry)
        click.echo(f"{entry['title']}: {entry['wall_s']:.0f} s for all modes")

    names = {id(pipeline): name for name, pipeline in known.items()}
    chosen = [names[id(pipeline)] for pipeline in pipelines]
    measure_each({name: functools.partial(measure_one, name) for name in chosen}, device)
    record.say_where(where)


@click.command()
@names_option("--pipelines", PIPELINES)
@modes_option(DEFAULT_MODES)
@DEVICE
@DTYPE
@TINY
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), help="In place of each pipeline's own number.")
@record.output_option("pipelines")
@torch.no_grad()
def main(pipelines, modes, device, dtype, tiny, rounds, steps, output) -> None:
    """Time whole pipelines, without the text encoder, in each mode."""
    options = {"rounds": rounds, "device": device, "dtype": dtype, "tiny": tiny, "steps": steps}
    measure_pipelines("pipelines", pipelines, PIPELINES, modes, output, show, **options)


if __name__ == "__main__":
    main()
