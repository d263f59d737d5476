"""Text to video with LTX-Video, its transformer running on h100-diffusers-kernels.

With a CUDA GPU, and a network or the weights in the cache, this generates a video from the prompt.
Without one of them it says so and takes a small LTX with random weights through the same steps, so
that the script always ends in a video file.

    python examples/ltx_video/generate.py --prompt "A red fox in the snow" --compare
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import zlib
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
from diffusers.utils import export_to_video
from huggingface_hub import HfApi
from kernels import get_kernel

MODEL_ID = "Lightricks/LTX-Video"
KERNEL_ID = "org/h100-diffusers-kernels"
KERNEL_VERSION = 1
CHECKOUT = Path(__file__).resolve().parents[2]
TEXT_TOKENS = 128

# What is generated where the options leave it open: frames, height, width, steps.
PUBLISHED_SIZE = (161, 512, 768, 50)
SMALL_SIZE = (25, 128, 192, 8)

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
    with torch.device(device), torch.no_grad():
        transformer = LTXVideoTransformer3DModel(**(SMALL_TRANSFORMER if small else {}))
        vae = AutoencoderKLLTXVideo(**(SMALL_VAE if small else {}))
        for name, weight in [*transformer.named_parameters(), *vae.named_parameters()]:
            # Unit gain: what passes through a layer keeps its scale, so the video has contrast.
            if name.endswith(".weight") and weight.ndim > 1:
                weight.normal_(std=weight[0].numel() ** -0.5)
            weight.data = weight.data.to(dtype)
    return LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=vae.eval(),
        text_encoder=None,
        tokenizer=None,
        transformer=transformer.eval(),
    )


def made_up_embeddings(text: str, channels: int, dtype: torch.dtype) -> tuple:
    """(1, 128, channels) embeddings and their (1, 128) mask: random, but a function of the text."""
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(text.encode()))
    embeddings = torch.randn(1, TEXT_TOKENS, channels, generator=generator).to(dtype)
    return embeddings, torch.arange(TEXT_TOKENS)[None] < 1 + len(text.split())


def load_kernel(kernel: str | None):
    """The kernel package: `kernel` is a Hub id or a local path, None this checkout's build."""
    repo_id = KERNEL_ID
    if kernel is not None and Path(kernel).is_dir():
        os.environ["LOCAL_KERNELS"] = f"{KERNEL_ID}={Path(kernel).resolve()}"
    elif kernel is not None:
        repo_id = kernel
    elif "LOCAL_KERNELS" not in os.environ and (CHECKOUT / "build").is_dir():
        os.environ["LOCAL_KERNELS"] = f"{KERNEL_ID}={CHECKOUT}"

    try:
        return get_kernel(repo_id, version=KERNEL_VERSION, trust_remote_code=True)
    except Exception as error:  # of the Hub, the file system or the loader: it ends the script
        reason = (str(error).strip().splitlines() or [""])[0].rstrip(" :.")
        raise click.ClickException(
            f"{repo_id} could not be loaded ({type(error).__name__}: {reason}); build it with "
            "tools/build_variant.py, name another with --kernel, or pass --no-kernels."
        ) from error


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
    pipe.set_progress_bar_config(desc=name)
    start = time.perf_counter()
    with nvtx_stages(pipe) if nvtx else contextlib.nullcontext():
        frames = pipe(
            **arguments,
            generator=torch.Generator("cpu").manual_seed(seed),
            callback_on_step_end=callback,
            output_type="np",  # the copy to the host waits for the GPU
        ).frames[0]
    seconds = time.perf_counter() - start
    if not np.isfinite(frames).all():
        raise click.ClickException(f"{name}: the video has values that are not finite.")
    return Run(frames, seconds, callback.median_ms())


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Peak signal-to-noise ratio of two videos with values in [0, 1], in dB."""
    error = float(np.mean((a.astype(np.float64) - b.astype(np.float64)) ** 2))
    return float("inf") if error == 0 else -10 * float(np.log10(error))


def check_options(options: dict) -> None:
    """Raise click.UsageError, one sentence, for what the single options cannot check."""
    if options["frames"] is not None and options["frames"] % 8 != 1:
        raise click.UsageError(f"--frames must be a multiple of 8 plus 1, got {options['frames']}.")
    for side in ("height", "width"):
        if options[side] is not None and options[side] % 32 != 0:
            raise click.UsageError(f"--{side} must be a multiple of 32, got {options[side]}.")
    for other in ("compare", "kernel"):
        if options["no_kernels"] and options[other]:
            raise click.UsageError(f"--no-kernels and --{other} exclude each other.")
    if options["output"].suffix != ".mp4":
        raise click.UsageError(f"--output must end in .mp4, got {options['output'].name}.")
    if not torch.cuda.is_available() and options["nvtx"]:
        raise click.UsageError("--nvtx needs a CUDA GPU, and there is none.")
    if not torch.cuda.is_available() and options["offload"] != "none":
        raise click.UsageError("--offload needs a CUDA GPU, and there is none.")
    try:
        import imageio_ffmpeg  # noqa: F401  the mp4 encoder: better to miss it before the work
    except ImportError:
        raise click.UsageError("Writing mp4 needs imageio and imageio-ffmpeg from pip.") from None


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

    size = PUBLISHED_SIZE if missing is None else SMALL_SIZE
    for name, option, default in zip(
        ("num_frames", "height", "width", "num_inference_steps"),
        ("frames", "height", "width", "steps"),
        size,
        strict=True,
    ):
        arguments[name] = default if options[option] is None else options[option]
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
@click.option(
    "--prompt",
    default="A red fox trots through fresh snow at dawn, its breath steaming in the cold air.",
    help="What the video shows.",
)
@click.option(
    "--negative-prompt",
    default="worst quality, inconsistent motion, blurry, jittery, distorted",
    help="What it should not show; without effect at --guidance 1.",
)
@click.option("--frames", type=click.IntRange(min=9), help="A multiple of 8 plus 1: 161, small 25.")
@click.option("--height", type=click.IntRange(min=32), help="A multiple of 32: 512, small 128.")
@click.option("--width", type=click.IntRange(min=32), help="A multiple of 32: 768, small 192.")
@click.option("--steps", type=click.IntRange(min=2), help="Denoising steps: 50, small 8.")
@click.option(
    "--guidance",
    type=click.FloatRange(min=1),
    default=3.0,
    show_default=True,
    help="Scale of classifier-free guidance; 1 switches it off.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--fps", type=click.IntRange(min=1), default=25, show_default=True)
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
@click.option("--no-kernels", is_flag=True, help="Leave the pipeline as diffusers builds it.")
@click.option("--compare", is_flag=True, help="Run without and with the kernels: time, PSNR.")
@click.option("--kernel", help="Hub id or local path of the kernels, if not this checkout's build.")
@click.option(
    "--random-weights",
    is_flag=True,
    help="Published sizes with random weights and made-up prompt embeddings: no download.",
)
@click.option("--nvtx", is_flag=True, help="NVTX ranges around stages and steps.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("outputs/ltx_video.mp4"),
    show_default=True,
)
def main(**options) -> None:
    """Generate a video with LTX-Video, its transformer running on h100-diffusers-kernels.

    Where two defaults are given, the second is that of the small model that runs where there is no
    GPU, or no way to the weights.
    """
    check_options(options)
    device = "cuda" if torch.cuda.is_available() else "cpu"
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
    output = options["output"].resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    export_to_video(list(runs.popitem()[1].frames), str(output), fps=options["fps"])
    click.echo(f"Wrote {output}")


if __name__ == "__main__":
    main()
