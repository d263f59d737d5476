"""Command-line options that the model benchmarks share, parsed to what they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import click
import flux
import ltx
import models
import torch

MODELS = {"ltx": ltx, "flux": flux}


class Sizes(click.ParamType):
    """Comma-separated sizes of the model that --model names; of LTX-Video where there is no such option."""

    name = "sizes"

    def convert(self, value, param, ctx) -> list[ltx.VideoSize] | list[flux.ImageSize]:
        model = ctx.params.get("model", ltx) if ctx else ltx
        try:
            return [model.parse_size(part) for part in value.split(",")]
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Modes(click.ParamType):
    """Comma-separated modes of models.MODES."""

    name = "modes"

    def convert(self, value, param, ctx) -> list[str]:
        if isinstance(value, list):
            return value
        try:
            return models.check_modes(value.split(","))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _device(ctx, param, value: str | None) -> torch.device:
    if value is None:
        value = "cuda" if torch.cuda.is_available() else "cpu"
    if value == "cuda" and not torch.cuda.is_available():
        raise click.BadParameter("there is no CUDA GPU", ctx, param)
    return torch.device(value)


def _model(ctx, param, value: str) -> ModuleType:
    return MODELS[value]


def _dtype(ctx, param, value: str) -> torch.dtype:
    return getattr(torch, value)


def modes_option(default: Sequence[str]):
    return click.option(
        "--modes",
        type=Modes(),
        default=",".join(default),
        show_default=True,
        help=f"Comma-separated, of {', '.join(models.MODES)}.",
    )


MODEL = click.option(
    "--model",
    type=click.Choice(list(MODELS)),
    default="ltx",
    show_default=True,
    is_eager=True,  # --sizes are this model's
    callback=_model,
)
SIZES = click.option(
    "--sizes",
    type=Sizes(),
    help="Comma-separated FRAMESxHEIGHTxWIDTH, of images HEIGHTxWIDTH, if not the default.",
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
PAUSE = click.option(
    "--pause-s",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Rest of the GPU before each timed sample.",
)
TINY = click.option("--tiny", is_flag=True, help="A tiny model: to try the benchmark itself.")
