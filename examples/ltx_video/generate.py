"""Text to video with LTX-Video, its transformer running on h100-diffusers-kernels.

With a CUDA GPU, and a network or the weights in the cache, this generates a video from the prompt.
Without one of them it says so and takes a small LTX with random weights through the same steps, so
that the script always ends in a video file.

    python examples/ltx_video/generate.py --prompt "A red fox in the snow" --compare
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from huggingface_hub import HfApi

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import (
    MAX_SEED,
    PROMPT,
    call_pipeline,
    check_ffmpeg,
    check_kernel_options,
    check_memory,
    check_output,
    check_text,
    kernel_options,
    load_kernel,
    made_up,
    psnr,
    randomize,
    reason_of,
    scratch_folder,
    sync,
)

MODEL_ID = "Lightricks/LTX-Video"
TEXT_TOKENS = 128

# What is generated where the options leave it open: frames, height, width, steps.
PUBLISHED_SIZE = (161, 512, 768, 50)
SMALL_SIZE = (25, 128, 192, 8)

MAX_GUIDANCE, MAX_FRAMES, MAX_SIDE, MAX_FPS = 100, 10_001, 4096, 240

# A model small enough for a CPU, with every kind of layer that the published one has.
SMALL_TRANSFORMER = {
    "in_channels": 16,
    "out_channels": 16,
    "num_attention_heads": 4,
    "attention_head_dim": 64,
    "cross_attention_dim": 256,
    "caption_channels": 64,
    "num_layers": 2,
}
SMALL_VAE = {
    "latent_channels": 16,
    "block_out_channels": (16, 32, 64, 64),
    "decoder_block_out_channels": (16, 32, 64, 64),
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1, 1),
}
# The published scheduler. Transformer and VAE are published in the sizes diffusers defaults to.
SCHEDULER = {
    "use_dynamic_shifting": True,
    "base_shift": 0.95,
    "max_shift": 2.05,
    "base_image_seq_len": 1024,
    "max_image_seq_len": 4096,
    "shift_terminal": 0.1,
}


def published_pipeline(dtype: torch.dtype) -> LTXPipeline:
    """LTX-Video from the Hub, or from the cache; LookupError where it is in neither."""
    offline = None
    try:
        HfApi().model_info(MODEL_ID, timeout=5)
    except Exception as error:  # no common base: huggingface_hub has changed its HTTP client
        offline = f"the Hugging Face Hub does not answer ({type(error).__name__})"
    try:
        return LTXPipeline.from_pretrained(
            MODEL_ID, dtype=dtype, local_files_only=offline is not None
        )
    except OSError as error:
        if offline is None:
            raise
        raise LookupError(f"{offline} and {MODEL_ID} is not in the cache") from error


def random_pipeline(small: bool, device: str, dtype: torch.dtype, seed: int) -> LTXPipeline:
    """LTXPipeline without text encoder: random weights at the published sizes, or a small model."""
    torch.manual_seed(seed)
    with torch.device(device):
        transformer = LTXVideoTransformer3DModel(**(SMALL_TRANSFORMER if small else {}))
        vae = AutoencoderKLLTXVideo(**(SMALL_VAE if small else {}))
        randomize(transformer, dtype)
        randomize(vae, dtype)
    return LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=vae,
        text_encoder=None,
        tokenizer=None,
        transformer=transformer,
    )


def made_up_embeddings(text: str, channels: int, dtype: torch.dtype) -> tuple:
    """(1, 128, channels) embeddings and their (1, 128) mask: random, but a function of the text."""
    embeddings = made_up(text, 1, TEXT_TOKENS, channels).to(dtype)
    return embeddings, torch.arange(TEXT_TOKENS)[None] < 1 + len(text.split())


class StepCallback:
    """Times the denoising steps and, if asked, puts an NVTX range around each but the first."""

    def __init__(self, device: str, nvtx: bool):
        self.device, self.nvtx = device, nvtx
        self.marks: list = []

    def __call__(self, pipe: LTXPipeline, step: int, timestep, callback_kwargs: dict) -> dict:
        if self.device == "cuda":
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())
        if self.nvtx:
            torch.cuda.nvtx.range_pop()
            if step + 1 < pipe.num_timesteps:
                torch.cuda.nvtx.range_push(f"step {step + 1}")
        return callback_kwargs

    def median_ms(self) -> float:
        """Median time from the end of a step to the end of the next."""
        cuda = self.device == "cuda"
        return float(
            np.median(
                [
                    a.elapsed_time(b) if cuda else (b - a) * 1e3
                    for a, b in zip(self.marks[:-1], self.marks[1:], strict=True)
                ]
            )
        )


@contextlib.contextmanager
def nvtx_stages(pipe: LTXPipeline):
    """NVTX ranges around prompt encoding and decoding; opens the range of the first step."""

    def ranged(name, function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            with torch.cuda.nvtx.range(name):
                return function(*args, **kwargs)

        return wrapper

    # The denoising loop begins where the timesteps are set.
    set_timesteps = pipe.scheduler.set_timesteps

    @functools.wraps(set_timesteps)
    def set_timesteps_and_begin(*args, **kwargs):
        set_timesteps(*args, **kwargs)
        torch.cuda.nvtx.range_push("step 0")

    pipe.encode_prompt = ranged("encode prompt", pipe.encode_prompt)
    pipe.vae.decode = ranged("decode", pipe.vae.decode)
    pipe.scheduler.set_timesteps = set_timesteps_and_begin
    try:
        yield
    finally:
        del pipe.encode_prompt, pipe.vae.decode, pipe.scheduler.set_timesteps


@dataclass
class Run:
    """A generated video and what it took."""

    frames: np.ndarray  # (frames, height, width, 3), in [0, 1]
    seconds: float
    step_ms: float


def generate(pipe: LTXPipeline, arguments: dict, name: str, seed: int, device: str, nvtx: bool):
    """Run the pipeline once, with diffusers' progress bar named `name`."""
    callback = StepCallback(device, nvtx)
    with nvtx_stages(pipe) if nvtx else contextlib.nullcontext():
        frames, seconds = call_pipeline(
            pipe, {**arguments, "callback_on_step_end": callback}, name, seed
        )
    return Run(frames, seconds, callback.median_ms())


def write_video(frames: np.ndarray, output: Path, fps: int) -> None:
    """Write a video that plays; else leave what was there, and raise click.ClickException."""
    try:
        with scratch_folder(output.parent) as folder:
            video = folder / "video.mp4"
            encode_video(frames, video, fps)
            check_video(video, frames.shape, fps)
            sync(video)
            if output.exists():
                shutil.copymode(output, video)
            os.replace(video, output)
    except (OSError, ValueError) as error:
        raise click.ClickException(
            f"The video could not be written to {click.format_filename(output)}: {reason_of(error)}."
        ) from None


def encode_video(frames: np.ndarray, path: Path, fps: int) -> None:
    """What diffusers' export_to_video does, but OSError, with ffmpeg's reason, where that fails."""
    from imageio_ffmpeg import get_ffmpeg_exe

    _, height, width, _ = frames.shape
    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(fps)]
    encoding = ["-vcodec", "libx264", "-pix_fmt", "yuv420p", "-crf", "25"]
    ffmpeg = subprocess.run(
        [get_ffmpeg_exe(), "-v", "error", *raw, "-i", "-", *encoding, path],
        input=b"".join((frame * 255).astype(np.uint8).tobytes() for frame in frames),
        capture_output=True,
    )
    if ffmpeg.returncode != 0:
        lines = ffmpeg.stderr.decode(errors="replace").strip().splitlines()
        if ffmpeg.returncode < 0:
            lines = [signal.strsignal(-ffmpeg.returncode) or f"signal {-ffmpeg.returncode}"]
        reason = lines[-1].rpartition("] ")[2] if lines else f"exit status {ffmpeg.returncode}"
        raise OSError(f"ffmpeg failed ({reason})")


def check_video(path: Path, shape: tuple[int, ...], fps: int) -> None:
    """Decode a video and raise ValueError if it is not of this shape and rate."""
    import imageio.v3 as imageio

    try:
        rate = imageio.immeta(path, plugin="FFMPEG")["fps"]
        shapes = [frame.shape for frame in imageio.imiter(path, plugin="FFMPEG")]
    except Exception as error:  # imageio raises whatever its parser of ffmpeg's output meets
        raise ValueError(f"what ffmpeg wrote cannot be read ({reason_of(error)})") from error
    if rate != fps or shapes != [shape[1:]] * shape[0]:
        sizes = " and ".join(f"{width}x{height}" for height, width, _ in sorted(set(shapes)))
        raise ValueError(
            f"it plays {len(shapes)} frames of {sizes or 'no size'} at {rate} a second"
        )


def sizes_of(options: dict, defaults: tuple[int, ...]) -> list[int]:
    """Frames, height, width and steps."""
    return [
        default if options[name] is None else options[name]
        for name, default in zip(("frames", "height", "width", "steps"), defaults, strict=True)
    ]


def check_options(options: dict, device: str) -> None:
    """Raise click.UsageError, one sentence, for what the single options cannot check."""
    if options["frames"] is not None and options["frames"] % 8 != 1:
        raise click.UsageError(f"--frames must be a multiple of 8 plus 1, got {options['frames']}.")
    for side in ("height", "width"):
        if options[side] is not None and options[side] % 32 != 0:
            raise click.UsageError(f"--{side} must be a multiple of 32, got {options[side]}.")
    if math.isnan(options["guidance"]):
        raise click.UsageError("--guidance must be a number, got nan.")
    for text in ("prompt", "negative_prompt"):
        check_text(f"--{text.replace('_', '-')}", options[text])
    frames, height, width, _ = sizes_of(options, SMALL_SIZE)
    check_memory(frames, height, width)
    check_kernel_options(options)
    if device == "cpu" and options["nvtx"]:
        raise click.UsageError("--nvtx needs a CUDA GPU, and there is none.")
    if device == "cpu" and options["offload"] != "none":
        raise click.UsageError("--offload needs a CUDA GPU, and there is none.")
    check_ffmpeg()


def build_pipeline(options: dict, device: str) -> tuple[LTXPipeline, dict]:
    """The pipeline on its device, and the arguments of its call."""
    dtype = getattr(torch, options["dtype"])
    pipe, missing = None, None
    if device == "cpu":
        missing = "there is no CUDA GPU"
    elif not options["random_weights"]:
        try:
            pipe = published_pipeline(dtype)
        except LookupError as error:
            missing = str(error)
    if missing is not None:
        click.echo(f"Running a small LTX with random weights, whose video is noise: {missing}.")

    texts = {"prompt": options["prompt"], "negative_prompt": options["negative_prompt"]}
    if pipe is not None:
        arguments = dict(texts)
    else:
        pipe = random_pipeline(missing is not None, device, dtype, options["seed"])
        arguments = {}
        for name, text in texts.items():
            channels = pipe.transformer.config.caption_channels
            embeddings, mask = made_up_embeddings(text, channels, dtype)
            arguments[f"{name}_embeds"] = embeddings.to(device)
            arguments[f"{name}_attention_mask"] = mask.to(device)

    names = ("num_frames", "height", "width", "num_inference_steps")
    sizes = sizes_of(options, PUBLISHED_SIZE if missing is None else SMALL_SIZE)
    arguments.update(zip(names, sizes, strict=True))
    arguments["frame_rate"] = options["fps"]
    arguments["guidance_scale"] = options["guidance"]
    if pipe.vae.config.timestep_conditioning:
        # LTX-Video 0.9.1 and later decode slightly noised latents.
        arguments["decode_timestep"], arguments["decode_noise_scale"] = 0.05, 0.025

    if options["offload"] == "model":
        pipe.enable_model_cpu_offload()
    elif options["offload"] == "sequential":
        pipe.enable_sequential_cpu_offload()
    else:
        pipe.to(device)
    return pipe, arguments


@click.command()
@click.option("--prompt", default=PROMPT, help="What the video shows.")
@click.option(
    "--negative-prompt",
    default="worst quality, inconsistent motion, blurry, jittery, distorted",
    help="What it should not show; without effect at --guidance 1.",
)
@click.option(
    "--frames", type=click.IntRange(9, MAX_FRAMES), help="A multiple of 8 plus 1: 161, small 25."
)
@click.option(
    "--height", type=click.IntRange(32, MAX_SIDE), help="A multiple of 32: 512, small 128."
)
@click.option(
    "--width", type=click.IntRange(32, MAX_SIDE), help="A multiple of 32: 768, small 192."
)
@click.option("--steps", type=click.IntRange(min=2), help="Denoising steps: 50, small 8.")
@click.option(
    "--guidance",
    type=click.FloatRange(1, MAX_GUIDANCE),
    default=3.0,
    show_default=True,
    help="Scale of classifier-free guidance; 1 switches it off.",
)
@click.option("--seed", type=click.IntRange(0, MAX_SEED), default=0, show_default=True)
@click.option("--fps", type=click.IntRange(1, MAX_FPS), default=25, show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="bfloat16",
    show_default=True,
)
@click.option(
    "--offload",
    type=click.Choice(["none", "model", "sequential"]),
    default="none",
    show_default=True,
    help="Keep what is not running in host memory.",
)
@click.option("--compile", "compiled", is_flag=True, help="torch.compile the transformer.")
@kernel_options
@click.option(
    "--random-weights",
    is_flag=True,
    help="Published sizes with random weights and made-up prompt embeddings: no download.",
)
@click.option("--nvtx", is_flag=True, help="NVTX ranges around stages and steps.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, readable=False, writable=True, path_type=Path),
    default=Path("outputs/ltx_video.mp4"),
    show_default=True,
)
def main(**options) -> None:
    """Generate a video with LTX-Video, its transformer running on h100-diffusers-kernels.

    Where two defaults are given, the second is that of the small model that runs where there is no
    GPU, or no way to the weights.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    check_options(options, device)
    sizes = sizes_of(options, PUBLISHED_SIZE if device == "cuda" else SMALL_SIZE)
    output = check_output(options["output"], ".mp4", math.prod(sizes[:3]))
    # Before the pipeline: kernels that cannot be loaded should cost no download.
    kernels = None if options["no_kernels"] else load_kernel(options["kernel"])
    pipe, arguments = build_pipeline(options, device)

    runs = {}
    for mode in ("eager", "kernels"):
        if not options["compare"] and (mode == "eager") != (kernels is None):
            continue
        if mode == "kernels":
            click.echo(kernels.inject_kernels(pipe))
        if options["compiled"]:
            torch.compiler.reset()
            # The hooks of offloading run between graphs; without them it is one graph.
            pipe.transformer.compile(fullgraph=options["offload"] == "none", dynamic=False)
        run = functools.partial(
            generate, pipe, seed=options["seed"], device=device, nvtx=options["nvtx"]
        )
        if options["compare"]:
            # First uses of libraries, and compilation, belong to neither side of the comparison.
            run({**arguments, "num_inference_steps": 2}, f"{mode}, warm-up")
        runs[mode] = run(arguments, mode)
        click.echo(f"{mode}: {runs[mode].seconds:.2f} s, {runs[mode].step_ms:.1f} ms a step")

    if options["compare"]:
        eager, injected = runs["eager"], runs["kernels"]
        click.echo(
            f"kernels against eager: {eager.seconds / injected.seconds:.2f} times as fast, "
            f"a step {eager.step_ms / injected.step_ms:.2f} times as fast, "
            f"PSNR {psnr(eager.frames, injected.frames):.1f} dB"
        )
    write_video(runs.popitem()[1].frames, output, options["fps"])
    click.echo(f"Wrote {click.format_filename(output)}")


if __name__ == "__main__":
    # A run that is told to end takes its temporary files along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()
