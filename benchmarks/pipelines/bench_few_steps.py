"""Whole calls of few steps: from the prompt to the picture or the video, text encoder included.

Models that need few steps, or whose few-step versions do: all blocks and all text encoders of the published
sizes, and frames as NumPy arrays. Weights are random, with scores of the denoiser as peaked as in trained
models. All modes share one set of weights and take turns. Recorded for each mode: seconds, those of text,
denoising, decoder and rest; the first two calls; memory, and that of decoding. Writes to
benchmarks/results/few_steps:

    python benchmarks/pipelines/bench_few_steps.py
    python benchmarks/pipelines/bench_few_steps.py --pipelines flux,ltx --rounds 5
    python benchmarks/pipelines/bench_few_steps.py --device cpu --tiny --dtype float32 --output /tmp/x.json

"Denoising" is from the end of the scheduler's set_timesteps to the end of its last step. "Rest" is what
remains, such as latents, an audio's decoder, and frames that are copied to the host and converted.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
from diffusers.modular_pipelines.minimax_h3.encoders import MiniMaxH3TextEncoderStep
from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import (
    MiniMaxH3CoreDenoiseStep,
    MiniMaxH3DecodeStep,
)
from diffusers.modular_pipelines.modular_pipeline import SequentialPipelineBlocks
from tabulate import tabulate

from benchmarks import models
from benchmarks.harness import record, timing
from benchmarks.harness.options import DEVICE, DTYPE, TINY, modes_option, names_option
from benchmarks.pipelines import bench_pipelines, text_encoders
from benchmarks.pipelines.bench_pipelines import Parts, Pipeline, TimedMethod, mark, published
from benchmarks.pipelines.text_encoders import TextEncoder

from pipelines import Model

# The denoiser's blocks and the decoder, as diffusers recommends.
COMPILED = models.REGIONAL_AND_DECODER
MODES = (
    *("eager", COMPILED, "injected", models.GRAPHS),
    *(*models.PRECISION_MODES, *models.GRAPHS_PRECISION),
)
DEFAULT_MODES = [mode for mode in MODES if mode not in models.GRAPHS_PRECISION]
BASELINES = ("eager", COMPILED)
TINY_STEPS, TINY_SIZE = 2, {"height": 64, "width": 96}
PARTS = {"text_s": "text", "denoise_s": "denoise", "decoder_s": "decode", "rest_s": "rest"}

PROMPT = (  # as many tokens as CLIP takes
    "A red fox trots through fresh snow at dawn, past a small wooden cabin with a lantern in the window "
    'and a painted sign that reads "OPEN ALL WINTER". Its breath rises in the cold air, long blue shadows '
    "lie between the pines, and the first sunlight touches the peaks. Soft light, fine grain, as in a "
    "nature film."
)


class CompiledDecoder:
    """Compiles the decoder of an autoencoder, and decodes with it. It stands in for the decode method.

    Attributes:
        why_not: why the decoder runs as it was; None if it is compiled.
    """

    def __init__(self, vae: Any, limit_s: float) -> None:
        self._vae, self._decode, self._limit_s = vae, vae.decode, limit_s
        self._is_first, self.why_not = True, None
        vae.decoder.compile()
        vae.decode = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_first:
            return self._decode(*args, **kwargs)
        self._is_first = False
        try:
            with time_limit(self._limit_s):
                return self._decode(*args, **kwargs)
        except Exception as error:
            error = getattr(error, "inner_exception", error)  # of a compiler's error
            self.why_not = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            self._vae.decoder._compiled_call_impl = None
        return self._decode(*args, **kwargs)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """TimeoutError in what takes longer."""

    def give_up(*_: object) -> None:
        raise TimeoutError(f"it takes more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Denoising:
    """Times denoising by the scheduler's methods, which no mode replaces."""

    def __init__(self, scheduler: Any, device: torch.device) -> None:
        self._marks: dict[str, Any] = {}
        for name in ("set_timesteps", "step"):
            method = getattr(type(scheduler), name)

            @functools.wraps(method)  # pipelines look at the arguments
            def watched(scheduler, *args, method=method, name=name, **kwargs):
                result = method(scheduler, *args, **kwargs)
                self._marks[name] = mark(device)
                return result

            # A method, not a function: LTX-2 copies the scheduler, and the copy's method is the copy's.
            setattr(scheduler, name, types.MethodType(watched, scheduler))

    def seconds(self) -> float:
        """Of the last call. The GPU must be idle."""
        return bench_pipelines.seconds_between(self._marks["set_timesteps"], self._marks["step"])


class AllParts(Parts):
    """Text, denoising and decoder of a pipeline's call."""

    def __init__(self, pipe: Any, encode: tuple[Any, str]) -> None:
        super().__init__(pipe)
        self._text = TimedMethod(*encode, pipe.device)
        self._denoising = Denoising(pipe.scheduler, pipe.device)

    def figures(self, seconds: float) -> dict[str, Any]:
        figures = {
            "text_s": self._text.take_seconds(),
            "denoise_s": self._denoising.seconds(),
            **super().figures(seconds),
        }
        rest = seconds - sum(figures.get(part, 0) for part in PARTS)
        return {**figures, "rest_s": rest}


@dataclass(frozen=True)
class FewSteps(Pipeline):
    """A pipeline with its text encoders.

    Attributes:
        encoders: by their names in the pipeline.
        other_parts: what else it needs.
        tiny_size: what a tiny pipeline's call changes of TINY_SIZE.
        added_points: 1 where num_inference_steps counts points of time, the last of which has no step.
        compile_s: how long compiling the decoder may take.
    """

    encoders: Mapping[str, TextEncoder] = field(default_factory=dict)
    other_parts: Mapping[str, Any] = field(default_factory=dict)
    tiny_size: dict[str, int] = field(default_factory=dict)
    added_points: int = 0
    compile_s: float = 180

    def build(self, device: torch.device, dtype: torch.dtype, tiny: bool) -> Any:
        pipe = super().build(device, dtype, tiny)
        # What the pipeline says beside the prompt counts as tokens, too.
        templates = [
            getattr(pipe, name, "") for name in ("system_message", "prompt_template_encode")
        ]
        parts = dict(self.other_parts)
        for name, encoder in self.encoders.items():
            parts[name] = encoder.make(device, dtype, tiny)
            of_text = name.replace("text_encoder", "tokenizer")
            parts[of_text] = encoder.tokenizer([self.prompt, *templates])
        getattr(pipe, "update_components" if self.assemble else "register_modules")(**parts)
        return pipe

    def call(self, pipe: Any, tiny: bool, **changes: object) -> Callable[..., Any]:
        changes = {"output_type": "np", **(TINY_SIZE | self.tiny_size if tiny else {}), **changes}
        run = super().call(pipe, tiny, **changes)

        def run_steps(steps: int | None = None) -> Any:
            return run((TINY_STEPS if steps is None else steps) + self.added_points)

        return run_steps

    def compile(self, pipe: Any, mode: str) -> None:
        super().compile(pipe, mode)
        if mode == COMPILED:
            CompiledDecoder(pipe.vae, self.compile_s)

    def first_calls(
        self, call: Callable[..., Any], steps: int | None, pipe: Any, begin: float
    ) -> dict[str, Any]:
        """The first one with its set-up, and the second one, with which graphs are captured."""
        figures: dict[str, Any] = {}
        for name in ("first_call_s", "second_call_s"):
            call(steps)
            timing.synchronize(pipe.device)
            now = time.perf_counter()
            figures[name], begin = now - begin, now
        first, second = figures.values()
        click.echo(f"first call with set-up {first:.2f} s, second {second:.2f} s")
        why_not = getattr(pipe.vae.decode, "why_not", None)
        if why_not is not None:
            click.echo(f"The decoder is not compiled. {why_not}")
            figures["decoder_not_compiled"] = why_not
        return figures

    def parts(self, pipe: Any) -> Parts:
        if hasattr(pipe, "encode_prompt"):
            return AllParts(pipe, (pipe, "encode_prompt"))
        return AllParts(pipe, (pipe.text_encoder.model, "forward"))


def few_steps(
    title: str,
    key: str,
    steps: int,
    encoders: Mapping[str, TextEncoder] | TextEncoder,
    call: Mapping[str, Any],
    denoiser: dict[str, object] | None = None,
    size: tuple[int, ...] | None = None,
    scheduler: Mapping[str, Any] | None = None,
    guider: Mapping[str, Any] | None = None,
    tiny_size: Mapping[str, int] | None = None,
    **options: Any,
) -> FewSteps:
    """The pipeline of bench_pipelines.py with these text encoders, and these arguments of its call."""
    known = published(title, key, steps, denoiser, size, **options)
    parts = dict(known.model.parts)
    for name, changes in (("scheduler", scheduler), ("guider", guider)):
        if changes is not None:
            cls, config = parts[name]
            parts[name] = (cls, {**config, **changes})
    model = replace(known.model, call=dict(call), parts=parts, trained=None)
    known = replace(known, model=model, published_steps=steps)
    return of_model(known, encoders, tiny_size=dict(tiny_size or {}))


def of_model(
    pipeline: Pipeline, encoders: Mapping[str, TextEncoder] | TextEncoder, **options: Any
) -> FewSteps:
    if isinstance(encoders, TextEncoder):
        encoders = {"text_encoder": encoders}
    return FewSteps(**{**vars(pipeline), "prompt": PROMPT}, encoders=encoders, **options)


MINIMAX_H3 = Model(
    hub_id="MiniMaxAI/MiniMax-H3",
    pipeline="MiniMaxH3ModularPipeline",
    size=(4, 480, 832, 124),  # the fewest frames that the pipeline makes
    call={"output": "videos"},
    parts={
        "transformer": ("MiniMaxH3Transformer3DModel", {}),
        "vae": ("AutoencoderKLMiniMaxH3", {}),
        "audio_vae": (
            "AutoencoderKLMiniMaxH3Audio",
            {"latents_mean": (0.0,) * 32, "latents_std": (1.0,) * 32},
        ),
        "scheduler": ("MiniMaxH3Scheduler", {"shift": 12.0}),
        "audio_scheduler": ("MiniMaxH3Scheduler", {"shift": 3.0}),
    },
    text={},
    small={
        "hidden_size": 128,
        "rope_freq_dim": 16,
        "time_embed_hidden_dim": 64,
        "time_embed_dim": 64,
        "decoder_num_layers": 1,
        "decoder_num_attention_heads": 1,
        "block_out_channels": (32,) * 6,
        "encoder_dim": 8,
        "latent_dim": 64,
        "decoder_dim": 128,
        "resblock_kernel_sizes": (3,),
        "resblock_dilation_sizes": ((1,),),
    },
    side_step=32,
    frames_step=17,
    fps=24,
)


class OfText:
    """In place of MiniMax-H3's processor, which needs files: all tokens are text."""

    def create_mm_token_type_ids(self, prompts: list[list[int]]) -> list[list[int]]:
        return [[0] * len(prompt) for prompt in prompts]


def minimax_h3_of(parts: dict[str, Any]) -> Any:
    blocks = {
        "text_encoder": MiniMaxH3TextEncoderStep(),
        "denoise": MiniMaxH3CoreDenoiseStep(),
        "decode": MiniMaxH3DecodeStep(),
    }
    blocks["denoise"].sub_blocks["denoise"].set_progress_bar_config(disable=True)
    pipe = SequentialPipelineBlocks.from_blocks_dict(blocks).init_pipeline()
    pipe.update_components(**parts)
    return pipe


E = text_encoders
PIPELINES = {
    "flux": few_steps(
        "FLUX.1-schnell",
        "flux",
        4,
        {"text_encoder": E.CLIP_L, "text_encoder_2": E.T5_XXL},
        {"guidance_scale": 0.0, "max_sequence_length": 256},
        {"guidance_embeds": False},
        scheduler={"shift": 1.0},
    ),
    "qwenimage": few_steps(
        "Qwen-Image", "qwenimage", 8, E.QWEN25_VL, {"true_cfg_scale": 1.0}, size=(1024, 1024)
    ),
    "z_image": few_steps("Z-Image-Turbo", "z-image", 8, E.QWEN3_4B, {"guidance_scale": 0.0}),
    "sdxl": few_steps(
        "Stable Diffusion XL, channels last",
        "sdxl",
        4,
        {"text_encoder": E.CLIP_L, "text_encoder_2": E.CLIP_G},
        {"guidance_scale": 0.0},
        scheduler={"timestep_spacing": "trailing"},
        channels_last=True,
    ),
    "ltx": few_steps(
        "LTX-Video 2B", "ltx", 8, E.T5_XXL, {"guidance_scale": 1.0}, size=(704, 1216, 121)
    ),
    "ltx2": few_steps(
        "LTX-2",
        "ltx2",
        8,
        E.GEMMA3_12B,
        {
            "frame_rate": 24.0,
            **dict.fromkeys(("guidance_scale", "audio_guidance_scale"), 1.0),
            **dict.fromkeys(("stg_scale", "audio_stg_scale"), 0.0),
            **dict.fromkeys(("modality_scale", "audio_modality_scale"), 1.0),
        },
    ),
    "wan": few_steps(
        "Wan 2.1 14B",
        "wan",
        4,
        E.UMT5_XXL,
        {"guidance_scale": 1.0},
        {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
        tiny_size={"num_frames": 5},
    ),
    "hunyuan_video15": few_steps(
        "HunyuanVideo 1.5",
        "hunyuan-video15",
        8,
        {"text_encoder": E.QWEN25_VL_TEXT, "text_encoder_2": E.BYT5},
        {},
        guider={"enabled": False},
        tiny_size={"num_frames": 5},
    ),
    "minimax_h3": of_model(
        Pipeline("MiniMax-H3", MINIMAX_H3, 4, 4, assemble=minimax_h3_of),
        E.QWEN3_VL_32B,
        other_parts={"processor": OfText()},
        tiny_size={"num_frames": 124},
        added_points=1,
    ),
}


def show(entry: dict[str, Any]) -> None:
    rows = []
    for mode, result in entry["modes"].items():
        over = entry["speedups"][mode]
        row = [mode, result["seconds"]["median"], 100 * result["seconds"]["spread"]]
        row += [*(result[part] for part in PARTS), *(over.get(other) for other in BASELINES)]
        row += [result["first_call_s"], result["second_call_s"]]
        row += [(result.get(key) or 0) / 2**30 for key in ("memory_bytes", "decoder_bytes")]
        rows.append([*row, result.get("psnr_to_eager_db")])
    headers = ["mode", "seconds", "spread %", *PARTS.values(), *(f"x {name}" for name in BASELINES)]
    headers += ["first call", "second", "memory GiB", "decode GiB", "PSNR"]
    click.echo(f"\n{entry['title']}, {entry['size']}, {entry['steps']} steps")
    click.echo(tabulate(rows, headers, floatfmt=".3f"))


@click.command()
@names_option("--pipelines", PIPELINES)
@modes_option(DEFAULT_MODES, MODES)
@DEVICE
@DTYPE
@TINY
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@record.output_option("few_steps")
@torch.no_grad()
def main(pipelines, modes, device, dtype, tiny, rounds, output) -> None:
    """Time whole calls of few steps, from the prompt to the frames, in each mode."""
    options = {"rounds": rounds, "device": device, "dtype": dtype, "tiny": tiny}
    bench_pipelines.measure_pipelines(
        "few_steps", pipelines, PIPELINES, modes, output, show, **options
    )


if __name__ == "__main__":
    main()
