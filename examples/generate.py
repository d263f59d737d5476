"""Text to image or video with the models that h100-diffusers-kernels serves in full.

python examples/generate.py --model flux --prompt "A red fox in the snow" --output fox.png
python examples/generate.py --model ltx --compare
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

try:
    import click
    import diffusers
    import numpy as np
    import torch
    import transformers  # noqa: F401 (diffusers' models import it)
    from diffusers.utils import export_to_video
    from measure import call, class_table, psnr, time_table, trace
    from PIL import Image

    from pipelines import (
        HUB_ERRORS,
        MODELS,
        SIZE,
        Model,
        call_arguments,
        load_kernel,
        load_pipeline,
        unknown_words,
        why_not_on_hub,
    )
except ModuleNotFoundError as error:
    sys.exit(f"Error: {error}: make build makes .venv, whose Python has all packages.")

PROMPT = "A red fox trots through fresh snow at dawn, its breath steaming in the cold air."
MAX_SEED = 2**64 - 1  # torch.Generator takes no larger one
MAX_SIDE, MAX_FRAMES = 4096, 1025
MAX_STEPS = 999  # of sd15's scheduler
IMAGE_FORMATS = (".png", ".jpg", ".jpeg", ".webp")
VIDEO_FORMATS = (".mp4", ".gif", ".webp")


def reason_of(error: Exception) -> str:
    """An exception's message as a part of a sentence: its first line, or two if that ends in a colon."""
    message = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    first, *others = message.strip().splitlines() or [type(error).__name__]
    if first.endswith(":") and others:
        first += f" {others[0].strip()}"
    reason = textwrap.shorten(first.rstrip(" :."), 300, placeholder=" …")
    return f"not enough memory: {reason}" if isinstance(error, MemoryError) else reason


@contextlib.contextmanager
def one_sentence(subject: str, *errors: type[Exception]) -> Iterator[None]:
    """Raise click.ClickException in place of these errors."""
    try:
        yield
    except errors as error:
        raise click.ClickException(f"{subject}: {reason_of(error)}.") from error


def check_options(model: Model, options: dict, device: str) -> None:
    """Raise click.UsageError, one sentence, for what the single options cannot check."""
    name, given = options["model"], {key for key, value in options.items() if value}
    for pair in (
        ("no_kernels", "compare"),
        ("no_kernels", "kernel"),
        ("no_kernels", "cuda_graphs"),
        ("no_kernels", "precision"),
        ("compile", "cuda_graphs"),
        ("offload", "cuda_graphs"),
        ("prompt", "prompts_file"),
    ):
        if given.issuperset(pair):
            first, second = (f"--{option.replace('_', '-')}" for option in pair)
            raise click.UsageError(f"{first} and {second} exclude each other.")
    for option in ("num_frames", "fps"):
        if option in given and not model.is_video:
            option = option.removeprefix("num_")
            raise click.UsageError(f"--{option} is for videos, and {name} makes an image.")
    if options["negative_prompt"] is not None and "negative_prompt" not in model.call:
        raise click.UsageError(f"{name} takes no --negative-prompt.")
    if options["guidance"] is not None and model.guidance is None:
        raise click.UsageError(f"{name} takes no --guidance.")
    if math.isnan(options["guidance"] or 0):
        raise click.UsageError("--guidance must be a number.")
    for option in ("prompt", "negative_prompt"):
        try:
            (options[option] or "").encode()
        except UnicodeEncodeError:
            raise click.UsageError(f"--{option.replace('_', '-')} is not UTF-8.") from None
    frames = options["num_frames"]
    if frames is not None and frames % model.frames_step != 1:
        raise click.UsageError(
            f"--frames must be a multiple of {model.frames_step} plus 1, got {frames}."
        )
    for side in ("height", "width"):
        if side in given and options[side] % model.side_step != 0:
            raise click.UsageError(
                f"--{side} must be a multiple of {model.side_step}, got {options[side]}."
            )
        if side in given and not model.min_side <= options[side] <= model.max_side:
            raise click.UsageError(
                f"--{side} of {name} must be from {model.min_side} to {model.max_side}, "
                f"got {options[side]}."
            )
    for option in ("offload", "cuda_graphs"):
        if option in given and device == "cpu":
            option = option.replace("_", "-")
            raise click.UsageError(f"--{option} needs a CUDA GPU, and there is none.")
    for option, package in (("offload", "accelerate"), ("precision", "torchao"), ("lora", "peft")):
        if option in given and find_spec(package) is None:
            raise click.UsageError(f"--{option} needs {package} from pip.")
    if "precision" in given and options["dtype"] == "float32":
        raise click.UsageError("--precision needs --dtype bfloat16 or float16.")
    for lora in options["lora"]:
        check_lora(model, name, lora[0])


class Lora(click.ParamType):
    """A file, a folder or a Hub id, and a scale after a colon, by default 1."""

    name = "file[:scale]"

    def convert(self, value, param, ctx) -> tuple[str, float]:
        if isinstance(value, tuple):
            return value
        source, colon, scale = value.rpartition(":")
        try:
            scale = float(scale)
        except ValueError:  # part of a path, such as a drive
            source, colon = "", ""
        if colon and not math.isfinite(scale):
            self.fail(f"{value!r} has a scale that is not finite.", param, ctx)
        return (source, scale) if colon else (value, 1.0)


def check_lora(model: Model, name: str, lora: str) -> None:
    """Raise click.UsageError, one sentence, if there is no such LoRA, or nothing that loads it."""
    if not hasattr(getattr(diffusers, model.pipeline), "load_lora_weights"):
        raise click.UsageError(f"{name} takes no --lora, because diffusers loads none for it.")
    if not os.path.exists(lora) and (reason := why_not_on_hub(lora)):
        raise click.UsageError(f"--lora is no file or folder, and {reason}.")


def read_prompts(options: dict) -> list[str | None]:
    """One prompt, None for the default, or those of the file; click.UsageError if it has none."""
    if options["prompts_file"] is None:
        return [options["prompt"]]
    file = click.format_filename(options["prompts_file"])
    try:
        lines = options["prompts_file"].read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(
            f"--prompts-file {file} cannot be read: {reason_of(error)}."
        ) from None
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise click.UsageError(f"--prompts-file {file} has no prompt.")
    return prompts


def check_output(output: Path, formats: tuple[str, ...]) -> None:
    """Raise click.UsageError, one sentence, if the output cannot be written."""
    name = click.format_filename(output)
    if output.suffix.lower() not in formats:
        raise click.UsageError(f"--output must end in {', '.join(formats)}, got {name}.")
    if output.suffix.lower() == ".mp4" and find_spec("imageio_ffmpeg") is None:
        raise click.UsageError("Writing MP4 needs imageio and imageio-ffmpeg from pip.")
    try:
        if output.is_dir():
            raise OSError("it is a folder")
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output.parent):
            pass
    except OSError as error:
        is_file = isinstance(error, (FileExistsError, NotADirectoryError))
        reason = (
            f"{click.format_filename(output.parent)} is not a folder"
            if is_file
            else reason_of(error)
        )
        raise click.UsageError(f"--output {name} cannot be written: {reason}.") from None


def write(frames: np.ndarray, output: Path, fps: int) -> None:
    """Write an image or a video; if that fails, leave what was there and raise click.ClickException."""
    first, *others = (Image.fromarray(frame) for frame in frames)
    suffix = output.suffix.lower()
    try:
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=".output-") as folder:
            file = Path(folder, f"output{suffix}")
            if suffix == ".mp4":
                from imageio_ffmpeg import count_frames_and_secs

                export_to_video([first, *others], str(file), fps=fps)
                written, _ = count_frames_and_secs(str(file))
                if written != len(frames):
                    raise OSError(f"ffmpeg wrote {written} of {len(frames)} frames")
            elif others:
                first.save(file, save_all=True, append_images=others, duration=1000 / fps, loop=0)
            else:
                first.save(file, quality=95)
            os.replace(file, output)
    except (OSError, RuntimeError) as error:
        raise click.ClickException(
            f"{click.format_filename(output)} could not be written: {reason_of(error)}."
        ) from error
    click.echo(f"Wrote {click.format_filename(output)}")


def load_loras(pipe, loras: tuple[tuple[str, float], ...], name: str) -> None:
    """Load LoRAs with their scales."""
    adapters = [f"lora_{i}" for i in range(len(loras))]
    for adapter, (lora, _) in zip(adapters, loras, strict=True):
        load_lora(pipe, lora, name, adapter)
    if adapters:
        pipe.set_adapters(adapters, [scale for _, scale in loras])


def load_lora(pipe, lora: str, name: str, adapter: str) -> None:
    """Load a LoRA and say where it runs; raise click.ClickException, one sentence, if it does not fit."""
    errors = (*HUB_ERRORS, LookupError, RuntimeError, ValueError)
    with one_sentence(f"--lora {lora} could not be loaded into {name}", *errors):
        # Its error is the sentence here.
        logging.getLogger("diffusers.loaders.peft").addFilter(
            lambda record: record.levelno < logging.ERROR
        )
        pipe.load_lora_weights(lora, adapter_name=adapter)
        layers = {
            part: sum(
                adapter in getattr(module, "lora_A", ()) for module in getattr(pipe, part).modules()
            )
            for part, adapters in pipe.get_list_adapters().items()
            if adapter in adapters
        }
        if not layers:
            raise ValueError("it has no layer of that model")
    parts = (f"{count} layers of the {part}" for part, count in layers.items())
    click.echo(f"The LoRA {lora} runs on {' and '.join(parts)}.")


def build_pipeline(model: Model, options: dict, device: str, prompts: list[str | None]) -> tuple:
    """The pipeline on its device, and the arguments of its call for each prompt."""
    dtype = getattr(torch, options["dtype"] or ("float32" if device == "cpu" else "bfloat16"))
    random_weights, seed = options["random_weights"], options["seed"]
    try:
        pipe, small = load_pipeline(model, device, dtype, random_weights, seed)
    except (*HUB_ERRORS, ImportError, ValueError) as error:
        raise click.ClickException(
            f"{options['model']} could not be loaded ({reason_of(error)}); "
            "--random-weights needs no download."
        ) from error
    name = f"a small {options['model']}" if small else options["model"]
    if small and options["precision"]:
        raise click.ClickException(
            f"--precision needs layers as wide as the published model's, and {name} would run: {small}."
        )
    trained = model.trained if small and not random_weights else None
    default = PROMPT if trained is None else trained.prompt
    texts = [default if prompt is None else prompt for prompt in prompts]
    if trained is not None:
        click.echo(f"Running a small trained {options['model']}: {small}.")
        if unknown := unknown_words(pipe, " ".join(texts)):
            click.echo(f"It does not know these words of the prompt: {', '.join(unknown)}.")
    elif small or random_weights:
        reason = f": {small}" if small else ""
        click.echo(f"Running {name} with random weights, and the result is noise{reason}.")
    load_loras(pipe, options["lora"], name)
    changes = {name: options[name] for name in SIZE}
    changes["negative_prompt"] = options["negative_prompt"]
    if model.guidance is not None:
        changes[model.guidance] = options["guidance"]
    if options["model"] in ("ltx", "ltx2"):
        changes["frame_rate"] = options["fps"]
    changes = {name: value for name, value in changes.items() if value is not None}
    arguments = [call_arguments(model, pipe, bool(small), text, **changes) for text in texts]
    if options["offload"] == "model":
        pipe.enable_model_cpu_offload()
    elif options["offload"] == "sequential":
        pipe.enable_sequential_cpu_offload()
    else:
        pipe.to(device)
    return pipe, arguments


def compile_denoiser(denoiser: torch.nn.Module) -> None:
    """Compile the repeated blocks, or all of a model without a list of them."""
    torch.compiler.reset()
    if getattr(denoiser, "_repeated_blocks", None):
        denoiser.compile_repeated_blocks()
    else:
        denoiser.compile()


def run_side(
    side: str, pipe, calls: list[dict], options: dict, times: list
) -> Iterator[np.ndarray]:
    """Run all calls; yield the frames of each, and append the times of each run."""
    seed, repeat = options["seed"], options["repeat"]
    if options["compare"] or options["profile"] or repeat > 1:
        # First uses of libraries, compilation and captures belong to no time.
        call(pipe, calls[0] | {"num_inference_steps": 2}, f"{side}, warm-up", seed)
    for number, arguments in enumerate(calls, 1):
        for run in range(1, repeat + 1):
            name = side
            name += f", prompt {number}" if len(calls) > 1 else ""
            name += f", run {run}" if repeat > 1 else ""
            frames, seconds = call(pipe, arguments, name, seed)
            times.append(seconds)
            step_ms = seconds["a step (median)"] * 1e3
            click.echo(f"{name}: {seconds['total']:.2f} s, {step_ms:.1f} ms a step")
        yield frames


@click.command()
@click.option("--model", type=click.Choice(list(MODELS)), required=True)
@click.option("--prompt", help="What the image or video shows.")
@click.option(
    "--prompts-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A text file, one prompt a line: one numbered output each.",
)
@click.option("--negative-prompt", help="What it should not show; not every model takes it.")
@click.option(
    "--guidance",
    type=click.FloatRange(0, 100),
    help="Scale of guidance; 1, or 0 for z-image, switches it off.",
)
@click.option(
    "--steps", "num_inference_steps", type=click.IntRange(2, MAX_STEPS), help="Denoising steps."
)
@click.option("--height", type=click.IntRange(32, MAX_SIDE), help="A multiple of 16 or 32.")
@click.option("--width", type=click.IntRange(32, MAX_SIDE), help="A multiple of 16 or 32.")
@click.option(
    "--frames",
    "num_frames",
    type=click.IntRange(5, MAX_FRAMES),
    help="Of a video: a multiple of 4, 6 or 8 plus 1.",
)
@click.option("--fps", type=click.IntRange(1, 240), help="Of a video.")
@click.option("--seed", type=click.IntRange(0, MAX_SEED), default=0, show_default=True)
@click.option(
    "--repeat",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Runs of each prompt; the table has their medians.",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="bfloat16, or without a GPU float32, which CPUs convolve faster.",
)
@click.option(
    "--offload",
    type=click.Choice(["none", "model", "sequential"]),
    default="none",
    show_default=True,
    callback=lambda context, option, value: None if value == "none" else value,
    help="Keep what is not running in host memory.",
)
@click.option(
    "--precision",
    type=click.Choice(["fp8", "fp8-fast"]),
    help="Linear layers of the transformer's blocks in FP8; fp8-fast: more of them.",
)
@click.option(
    "--lora",
    type=Lora(),
    multiple=True,
    help="A LoRA to load: a file, a folder or a Hub id, and its scale; may be given several times.",
)
@click.option("--compile", is_flag=True, help="torch.compile the transformer's blocks.")
@click.option("--cuda-graphs", is_flag=True, help="Replay forwards from CUDA graphs.")
@click.option(
    "--compare",
    is_flag=True,
    help="Also run without the kernels: times, PSNR, both results side by side in a second file.",
)
@click.option("--no-kernels", is_flag=True, help="Leave the pipeline as diffusers builds it.")
@click.option("--kernel", help="Hub id or local path of the kernels, if not this checkout's build.")
@click.option(
    "--random-weights",
    is_flag=True,
    help="No download: the published widths, few blocks, made-up prompt embeddings.",
)
@click.option(
    "--profile",
    is_flag=True,
    help="Write a trace of three steps for ui.perfetto.dev, and print the time by kernel class.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="An image (PNG, JPEG, WebP) or a video (MP4, GIF, WebP); outputs/<model>.png or .mp4.",
)
def main(**options) -> None:
    """Generate an image or a video, the transformer running on h100-diffusers-kernels.

    Sizes and steps default to those of the model's card. Without a GPU, or where neither the Hub nor
    the cache has the weights, a small model runs instead: a trained one for ltx, which knows few words,
    and one with random weights for the others.
    """
    model = MODELS[options["model"]]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    check_options(model, options, device)
    prompts = read_prompts(options)
    output = options["output"] or Path(
        "outputs", options["model"] + (".mp4" if model.is_video else ".png")
    )
    outputs = [output]
    if options["prompts_file"]:
        digits = len(str(len(prompts)))
        outputs = [
            output.with_stem(f"{output.stem}-{number:0{digits}}")
            for number in range(1, len(prompts) + 1)
        ]
    for path in outputs:
        check_output(path, VIDEO_FORMATS if model.is_video else IMAGE_FORMATS)

    kernels = None
    if not options["no_kernels"]:  # before the pipeline, which may be a long download
        try:
            kernels = load_kernel(options["kernel"])
        except LookupError as error:
            raise click.ClickException(
                f"{error}: run make build, name others with --kernel, or pass --no-kernels."
            ) from error
        except Exception as error:  # of the Hub, the file system or the loader: it ends the script
            raise click.ClickException(
                f"The kernels could not be loaded ({type(error).__name__}: {reason_of(error)}); build "
                "them with make build, name others with --kernel, or pass --no-kernels."
            ) from error
        if not hasattr(kernels, "inject_kernels"):
            raise click.ClickException(f"--kernel {options['kernel']} has no inject_kernels.")
    try:
        pipe, calls = build_pipeline(model, options, device, prompts)
    except torch.OutOfMemoryError as error:
        raise click.ClickException(
            f"{options['model']} does not fit into the GPU's memory; --offload model needs less of it."
        ) from error

    fps = options["fps"] or model.fps
    eager, times, classes = [], {}, {}
    errors = [FloatingPointError, ImportError, MemoryError, torch.OutOfMemoryError, ValueError]
    if options["compile"]:
        from torch._dynamo.exc import TorchDynamoException

        errors.append(TorchDynamoException)
    for side in ("eager", "injected"):
        if not options["compare"] and (side == "eager") != (kernels is None):
            continue
        first_of_two = options["compare"] and side == "eager"
        trace_file = output.with_suffix(f".{side}.trace.json" if first_of_two else ".trace.json")
        with one_sentence(side, *errors):
            if side == "injected":
                chosen = {name: options[name] for name in ("cuda_graphs", "precision")}
                click.echo(kernels.inject_kernels(pipe, **chosen))
            if options["compile"]:
                compile_denoiser(getattr(pipe, model.denoiser))
                side += ", compiled"
            times[side] = []
            for path, frames in zip(
                outputs, run_side(side, pipe, calls, options, times[side]), strict=True
            ):
                if first_of_two:
                    eager.append(frames)
                    continue
                write(frames, path, fps)
                if options["compare"]:
                    reference = eager.pop(0)
                    both = np.concatenate([reference, frames], axis=2)
                    write(both, path.with_stem(f"{path.stem}-compare"), fps)
                    click.echo(f"PSNR of injected against eager: {psnr(reference, frames):.1f} dB")
            if options["profile"]:
                name = f"{side}, profile"
                classes[side] = trace(pipe, calls[0], name, options["seed"], trace_file)
                click.echo(f"Wrote {click.format_filename(trace_file)}")

    click.echo(f"\n{time_table(times)}")
    if options["profile"]:
        kind = "GPU time by kernel" if device == "cuda" else "CPU time by operator"
        click.echo(f"\n{kind} class\n\n{class_table(classes)}")


if __name__ == "__main__":
    main()
