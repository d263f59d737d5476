"""Text to image or video with the models that h100-diffusers-kernels serves in full.

    python examples/generate.py --model flux --prompt "A red fox in the snow" --output fox.png
    python examples/generate.py --model wan --random-weights --compare

LTX-Video has an example of its own, in ltx_video.
"""

from __future__ import annotations

import inspect
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import diffusers
import torch
from diffusers.utils import export_to_video, numpy_to_pil

sys.path.insert(0, str(Path(__file__).resolve().parent))

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
)

MAX_SIDE, MAX_FRAMES = 2048, 1025
FPS = 16  # Wan's

# Arguments of the pipelines; and what is generated without a GPU, where the options leave it open.
SIZE = ("num_inference_steps", "height", "width", "num_frames")
SMALL_SIZE = (4, 128, 192, 9)


@dataclass(frozen=True)
class Model:
    """A model on the Hub, and what a pipeline like it with random weights is made of.

    Attributes:
        size: steps, height, width and, of a video, frames, as on the model's card.
        guidance: the card's other arguments of the pipeline.
        transformer, vae: the class, and its published configuration where diffusers has another
            default; but transformers have fewer blocks, so that they are made in seconds.
        text_tokens: the length of made-up prompt embeddings.
    """

    hub_id: str
    pipeline: str
    size: tuple[int, ...]
    guidance: dict[str, float | str]
    transformer: tuple[str, dict]
    vae: tuple[str, dict]
    text_tokens: int = 512

    @property
    def is_video(self) -> bool:
        return len(self.size) == len(SIZE)


IMAGE_VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 16,
}
# Stable Diffusion 3.5 Large but for its blocks.
SD3_TRANSFORMER = {
    "num_layers": 8,
    "num_attention_heads": 38,
    "caption_projection_dim": 38 * 64,
    "pos_embed_max_size": 192,
    "qk_norm": "rms_norm",
}
# What a model for a CPU changes, where its class has it.
SMALL = {
    "num_layers": 2,
    "num_single_layers": 2,
    "num_attention_heads": 2,
    "caption_projection_dim": 2 * 64,
    "ffn_dim": 512,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
    "text_dim": 64,
    "block_out_channels": (32, 32, 32, 32),
    "layers_per_block": 1,
    "base_dim": 16,
    "num_res_blocks": 1,
}

MODELS = {
    "flux": Model(
        hub_id="black-forest-labs/FLUX.1-dev",
        pipeline="FluxPipeline",
        size=(50, 1024, 1024),
        guidance={"guidance_scale": 3.5},
        transformer=(
            "FluxTransformer2DModel",
            {"num_layers": 5, "num_single_layers": 10, "guidance_embeds": True},
        ),
        vae=("AutoencoderKL", {**IMAGE_VAE, "scaling_factor": 0.3611, "shift_factor": 0.1159}),
    ),
    "flux2": Model(
        hub_id="black-forest-labs/FLUX.2-dev",
        pipeline="Flux2Pipeline",
        size=(50, 1024, 1024),
        guidance={"guidance_scale": 4.0},
        transformer=("Flux2Transformer2DModel", {"num_layers": 2, "num_single_layers": 6}),
        vae=("AutoencoderKLFlux2", {}),
    ),
    "sd3": Model(
        hub_id="stabilityai/stable-diffusion-3.5-large",
        pipeline="StableDiffusion3Pipeline",
        size=(28, 1024, 1024),
        guidance={"guidance_scale": 3.5, "negative_prompt": ""},
        transformer=("SD3Transformer2DModel", SD3_TRANSFORMER),
        vae=("AutoencoderKL", {**IMAGE_VAE, "scaling_factor": 1.5305, "shift_factor": 0.0609}),
        text_tokens=333,
    ),
    "qwenimage": Model(
        hub_id="Qwen/Qwen-Image",
        pipeline="QwenImagePipeline",
        size=(50, 1328, 1328),
        guidance={"true_cfg_scale": 4.0, "negative_prompt": " "},
        transformer=("QwenImageTransformer2DModel", {"num_layers": 6}),
        vae=("AutoencoderKLQwenImage", {}),
        text_tokens=128,
    ),
    "wan": Model(
        hub_id="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        pipeline="WanPipeline",
        size=(50, 480, 832, 81),
        guidance={"guidance_scale": 5.0, "negative_prompt": ""},
        transformer=(
            "WanTransformer3DModel",
            {"num_layers": 10, "num_attention_heads": 12, "ffn_dim": 8960},
        ),
        vae=("AutoencoderKLWan", {}),
    ),
}


def parameters(function) -> dict[str, inspect.Parameter]:
    """What a function takes, or a class when it is made, by name."""
    return dict(inspect.signature(function).parameters)


def random_pipeline(model: Model, small: bool, device: str, seed: int):
    """A pipeline without text encoders, its weights random: few blocks, or a small model."""
    cls = getattr(diffusers, model.pipeline)
    # What has no default: text encoders, tokenizers, and the parts made here.
    parts = {name: None for name, p in parameters(cls).items() if p.default is p.empty}
    parts["scheduler"] = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    torch.manual_seed(seed)
    for part in ("transformer", "vae"):
        name, config = getattr(model, part)
        module = getattr(diffusers, name)
        if small:
            config = config | {key: SMALL[key] for key in SMALL.keys() & parameters(module)}
        with torch.device(device):
            parts[part] = randomize(module(**config), torch.bfloat16)
    return cls(**parts)


def made_up_prompts(pipe, prompts: dict[str, str], tokens: int, device: str) -> dict:
    """Arguments that stand for the prompts: random, but a function of the text."""
    config = pipe.transformer.config
    arguments = {}
    width = config.text_dim if "text_dim" in config else config.joint_attention_dim
    for name, text in prompts.items():
        prefix = name.removesuffix("prompt")
        arguments[f"{name}_embeds"] = made_up(text, 1, tokens, width).bfloat16()
        arguments[f"{name}_embeds_mask"] = torch.ones(1, tokens, dtype=torch.bool)
        pooled = made_up(text, 1, config.get("pooled_projection_dim", 0)).bfloat16()
        arguments[f"{prefix}pooled_prompt_embeds"] = pooled
    taken = arguments.keys() & parameters(pipe.__call__)
    return {name: arguments[name].to(device) for name in taken}


def build_pipeline(model: Model, options: dict, device: str) -> tuple:
    """The pipeline on its device, and the arguments of its call but the size."""
    arguments = {"prompt": options["prompt"], **model.guidance}
    if options["random_weights"]:
        click.echo(f"Running {options['model']} with random weights: what comes out is noise.")
        pipe = random_pipeline(model, device == "cpu", device, options["seed"])
        prompts = {name: arguments.pop(name) for name in list(arguments) if "prompt" in name}
        arguments.update(made_up_prompts(pipe, prompts, model.text_tokens, device))
    else:
        try:
            pipe = diffusers.DiffusionPipeline.from_pretrained(model.hub_id, dtype=torch.bfloat16)
        except OSError as error:
            raise click.ClickException(
                f"{model.hub_id} could not be loaded ({reason_of(error)}); "
                "--random-weights needs no download."
            ) from error
    if options["offload"] == "model":
        pipe.enable_model_cpu_offload()
    else:
        pipe.to(device)
    return pipe, arguments


def check_options(model: Model, options: dict, device: str) -> None:
    """Raise click.UsageError, one sentence, for what the single options cannot check."""
    frames = options["num_frames"]
    if frames is not None and not model.is_video:
        raise click.UsageError(f"--frames is for videos, and {options['model']} makes an image.")
    if frames is not None and frames % 4 != 1:
        raise click.UsageError(f"--frames must be a multiple of 4 plus 1, got {frames}.")
    for side in ("height", "width"):
        if options[side] is not None and options[side] % 16 != 0:
            raise click.UsageError(f"--{side} must be a multiple of 16, got {options[side]}.")
    check_text("--prompt", options["prompt"])
    check_kernel_options(options)
    if device == "cpu" and options["offload"] != "none":
        raise click.UsageError("--offload needs a CUDA GPU, and there is none.")
    if device == "cpu" and not options["random_weights"]:
        raise click.UsageError(
            "There is no CUDA GPU; without one, --random-weights runs a small model."
        )
    if model.is_video:
        check_ffmpeg()


@click.command()
@click.option("--model", type=click.Choice(list(MODELS)), required=True)
@click.option("--prompt", default=PROMPT, help="What the image or video shows.")
@click.option(
    "--frames",
    "num_frames",
    type=click.IntRange(1, MAX_FRAMES),
    help="Of a video: a multiple of 4 plus 1.",
)
@click.option("--height", type=click.IntRange(16, MAX_SIDE), help="A multiple of 16.")
@click.option("--width", type=click.IntRange(16, MAX_SIDE), help="A multiple of 16.")
@click.option("--steps", "num_inference_steps", type=click.IntRange(2), help="Denoising steps.")
@click.option("--seed", type=click.IntRange(0, MAX_SEED), default=0, show_default=True)
@click.option(
    "--offload",
    type=click.Choice(["none", "model"]),
    default="none",
    show_default=True,
    help="Keep what is not running in host memory.",
)
@kernel_options
@click.option(
    "--random-weights",
    is_flag=True,
    help="Random weights, made-up prompt embeddings, no download: few blocks of the published "
    "widths, or without a GPU a small model.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, readable=False, writable=True, path_type=Path),
    help="outputs/<model>.png, or .mp4 of a video.",
)
def main(**options) -> None:
    """Generate an image or a video, the transformer running on h100-diffusers-kernels.

    Sizes and steps that are not given are those of the model's card, or small ones without a GPU.
    """
    model = MODELS[options["model"]]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    check_options(model, options, device)
    defaults = model.size if device == "cuda" else SMALL_SIZE[: len(model.size)]
    size = {name: options[name] or default for name, default in zip(SIZE, defaults, strict=False)}
    grid = (size.get("num_frames", 1), size["height"], size["width"])
    check_memory(*grid)
    suffix = ".mp4" if model.is_video else ".png"
    output = options["output"] or Path("outputs", options["model"] + suffix)
    output = check_output(output, suffix, math.prod(grid))
    # Before the pipeline: kernels that cannot be loaded should cost no download.
    kernels = None if options["no_kernels"] else load_kernel(options["kernel"])
    pipe, arguments = build_pipeline(model, options, device)
    arguments.update(size)

    results, seconds = {}, {}
    for mode in ("eager", "kernels"):
        if not options["compare"] and (mode == "eager") != (kernels is None):
            continue
        if mode == "kernels":
            click.echo(kernels.inject_kernels(pipe))
        if options["compare"]:
            # First uses of libraries belong to neither side of the comparison.
            warm_up = {**arguments, "num_inference_steps": 2}
            call_pipeline(pipe, warm_up, f"{mode}, warm-up", options["seed"])
        results[mode], seconds[mode] = call_pipeline(pipe, arguments, mode, options["seed"])
        click.echo(f"{mode}: {seconds[mode]:.2f} s")

    if options["compare"]:
        click.echo(
            f"kernels against eager: {seconds['eager'] / seconds['kernels']:.2f} times as fast, "
            f"PSNR {psnr(results['eager'], results['kernels']):.1f} dB"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    _, result = results.popitem()
    if model.is_video:
        export_to_video(list(result), str(output), fps=FPS)
    else:
        numpy_to_pil(result)[0].save(output)
    click.echo(f"Wrote {click.format_filename(output)}")


if __name__ == "__main__":
    main()
