"""What the examples share: options, kernels, random weights, one call of a pipeline, the output file."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import time
import zlib
from pathlib import Path

import click
import numpy as np
import torch
from kernels import get_kernel

KERNEL_ID = "org/h100-diffusers-kernels"
KERNEL_VERSION = 1
CHECKOUT = Path(__file__).resolve().parents[1]

PROMPT = "A red fox trots through fresh snow at dawn, its breath steaming in the cold air."
MAX_SEED = 2**64 - 1  # torch.Generator takes no larger one
FLOAT_PIXEL_BYTES = 3 * 4


def kernel_options(command):
    """Give a command the options of the kernels."""
    for option in (
        click.option(
            "--kernel", help="Hub id or local path of the kernels, if not this checkout's build."
        ),
        click.option(
            "--compare", is_flag=True, help="Run without and with the kernels: time, PSNR."
        ),
        click.option(
            "--no-kernels", is_flag=True, help="Leave the pipeline as diffusers builds it."
        ),
    ):
        command = option(command)
    return command


def reason_of(error: Exception) -> str:
    """What an exception says, as a part of a sentence."""
    message = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (message.strip().splitlines() or [type(error).__name__])[0].rstrip(" :.")


def check_text(option: str, text: str) -> None:
    """Raise click.UsageError for text that is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise click.UsageError(f"{option} must be text in UTF-8.") from None


def check_memory(frames: int, height: int, width: int) -> None:
    """Raise click.UsageError for a video that the host's memory does not hold as float32."""
    video = frames * height * width * FLOAT_PIXEL_BYTES
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if video > memory:
        raise click.UsageError(
            f"{frames} frames of {width}x{height} take {video / 1e9:.1f} GB, "
            f"and the memory of this machine has {memory / 1e9:.1f}."
        )


def check_kernel_options(options: dict) -> None:
    """Raise click.UsageError for options of the kernels beside --no-kernels."""
    for other in ("compare", "kernel"):
        if options["no_kernels"] and options[other]:
            raise click.UsageError(f"--no-kernels and --{other} exclude each other.")


def check_ffmpeg() -> None:
    """Raise click.UsageError where no video can be written: better before the work."""
    try:
        import imageio.v3  # noqa: F401
        import imageio_ffmpeg

        imageio_ffmpeg.get_ffmpeg_exe()
    except ImportError:
        raise click.UsageError("Writing mp4 needs imageio and imageio-ffmpeg from pip.") from None
    except RuntimeError as error:
        raise click.UsageError(f"Writing mp4 needs ffmpeg: {reason_of(error)}.") from None


@contextlib.contextmanager
def scratch_folder(parent: Path):
    """A temporary folder in `parent`, which is made if need be and stays if something is in it then."""
    made = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix=".output-") as folder:
            yield Path(folder)
    finally:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()


def sync(path: Path) -> None:
    """Have a file on the disk, or the OSError that writing it there gives."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def check_output(output: Path, suffix: str, num_pixels: int) -> Path:
    """The file that is to be written; click.UsageError, one sentence, where it could not be."""
    name = click.format_filename(output)
    if not output.name.endswith(suffix):
        raise click.UsageError(f"--output must end in {suffix}, got {name}.")
    try:
        output = output.resolve()
        if output.exists() and not output.is_file():
            raise OSError(errno.EINVAL, "it is not a regular file")
        nearest = next(folder for folder in output.parents if folder.exists())
        if not nearest.is_dir():
            raise OSError(errno.ENOTDIR, f"{click.format_filename(nearest)} is not a folder")
        with scratch_folder(output.parent) as folder:
            file = folder / f"output{suffix}"
            file.write_bytes(bytes(num_pixels // 8))  # room for a bit a pixel
            sync(file)
    except (OSError, RuntimeError) as error:  # RuntimeError: a circle of links
        raise click.UsageError(f"--output {name} cannot be written: {reason_of(error)}.") from None
    return output


def load_kernel(kernel: str | None):
    """The kernel package: `kernel` is a Hub id or a local path, None this checkout's build."""
    repo_id = KERNEL_ID
    if kernel is not None and os.path.isdir(kernel):
        os.environ["LOCAL_KERNELS"] = f"{KERNEL_ID}={Path(kernel).resolve()}"
    elif kernel is not None:
        repo_id = kernel
    elif "LOCAL_KERNELS" not in os.environ and (CHECKOUT / "build").is_dir():
        os.environ["LOCAL_KERNELS"] = f"{KERNEL_ID}={CHECKOUT}"

    try:
        return get_kernel(repo_id, version=KERNEL_VERSION, trust_remote_code=True)
    except Exception as error:  # of the Hub, the file system or the loader: it ends the script
        raise click.ClickException(
            f"{repo_id} could not be loaded ({type(error).__name__}: {reason_of(error)}); build it "
            "with tools/build_variant.py, name another with --kernel, or pass --no-kernels."
        ) from error


@torch.no_grad()
def randomize(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Give a model random weights, in the dtype but where diffusers keeps float32.

    Unit gain: what passes through a layer keeps its scale, so that what comes out has contrast.
    """
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, weight in model.named_parameters():
        if name.endswith(".weight") and weight.ndim > 1:
            weight.normal_(std=weight[0].numel() ** -0.5)
        if kept.isdisjoint(name.split(".")):
            weight.data = weight.data.to(dtype)
    return model.eval()


def made_up(text: str, *shape: int) -> torch.Tensor:
    """Normal numbers, which are a function of the text, in the place of its embeddings."""
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(text.encode()))
    return torch.randn(shape, generator=generator)


def call_pipeline(pipe, arguments: dict, name: str, seed: int) -> tuple[np.ndarray, float]:
    """The pipeline's first result, with values in [0, 1], and the seconds that it took.

    Diffusers' progress bar is named `name`.
    """
    pipe.set_progress_bar_config(desc=name)
    start = time.perf_counter()
    try:
        result = pipe(
            **arguments,
            generator=torch.Generator("cpu").manual_seed(seed),
            output_type="np",  # the copy to the host waits for the GPU
            return_dict=False,
        )[0][0]
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise click.ClickException(f"{name}: not enough memory: {reason_of(error)}.") from error
    seconds = time.perf_counter() - start
    if not np.isfinite(result).all():
        raise click.ClickException(f"{name}: the result has values that are not finite.")
    return result, seconds


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Peak signal-to-noise ratio of two images or videos with values in [0, 1], in dB."""
    error = float(np.mean((a.astype(np.float64) - b.astype(np.float64)) ** 2))
    return float("inf") if error == 0 else -10 * float(np.log10(error))
