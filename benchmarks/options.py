"""Command-line options that the model benchmarks share, parsed to what they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import ltx
import record
import torch


class VideoSizes(click.ParamType):
    """Comma-separated FRAMESxHEIGHTxWIDTH."""

    name = "sizes"

    def convert(self, value, param, ctx) -> list[ltx.VideoSize]:
        sizes = []
        for part in value.split(","):
            try:
                size = ltx.VideoSize(*(int(number) for number in part.split("x")))
            except (TypeError, ValueError):
                self.fail(f"a size is FRAMESxHEIGHTxWIDTH, got {part!r}", param, ctx)
            if size.frames % 8 != 1 or size.height % 32 or size.width % 32:
                self.fail(
                    "frames must be a multiple of 8 plus 1, height and width multiples of 32, "
                    f"got {part}",
                    param,
                    ctx,
                )
            sizes.append(size)
        return sizes


class Modes(click.ParamType):
    """Comma-separated modes of ltx.MODES."""

    name = "modes"

    def convert(self, value, param, ctx) -> list[str]:
        if isinstance(value, list):
            return value
        try:
            return ltx.check_modes(value.split(","))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _device(ctx, param, value: str | None) -> torch.device:
    if value is None:
        value = "cuda" if torch.cuda.is_available() else "cpu"
    if value == "cuda" and not torch.cuda.is_available():
        raise click.BadParameter("there is no CUDA GPU", ctx, param)
    return torch.device(value)


def _dtype(ctx, param, value: str) -> torch.dtype:
    return getattr(torch, value)


def modes_option(default: Sequence[str]):
    return click.option(
        "--modes",
        type=Modes(),
        default=",".join(default),
        show_default=True,
        help=f"Comma-separated, of {', '.join(ltx.MODES)}.",
    )


def output_option(name: str):
    return click.option(
        "--output",
        type=click.Path(dir_okay=False, path_type=Path),
        default=record.RESULTS / f"{name}.json",
        help=f"JSON file, if not benchmarks/results/{name}.json.",
    )


SIZES = click.option(
    "--sizes", type=VideoSizes(), help="Comma-separated FRAMESxHEIGHTxWIDTH, if not the default."
)
DEVICE = click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    callback=_device,
    help="The GPU where there is one.",
)
DTYPE = click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="bfloat16",
    show_default=True,
    callback=_dtype,
)
TINY = click.option("--tiny", is_flag=True, help="A tiny model: to try the benchmark itself.")
