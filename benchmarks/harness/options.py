"""Command-line options that the model benchmarks share, parsed to what they stand for."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
import torch

from benchmarks import models
from benchmarks.models.bria import BRIA, FIBO, FIBO2
from benchmarks.models.cogview import COGVIEW3, COGVIEW4, EASYANIMATE, GLM_IMAGE
from benchmarks.models.cosmos3 import COSMOS3
from benchmarks.models.ernie_image import ERNIE_IMAGE
from benchmarks.models.flux import CHROMA, FLUX, FLUX2, FLUX3
from benchmarks.models.hunyuan_video import HUNYUAN_VIDEO, HUNYUAN_VIDEO15
from benchmarks.models.images import (
    COSMOS,
    HIDREAM,
    LONGCAT_IMAGE,
    LUMINA2,
    OVIS_IMAGE,
    PRX,
    Z_IMAGE,
)
from benchmarks.models.joyimage import JOYIMAGE, JOYIMAGE_PLUS
from benchmarks.models.kandinsky import KANDINSKY5, KANDINSKY5_PRO, KANDINSKY6
from benchmarks.models.ltx import LTX2, LTX2_DISTILLED, LTX_VIDEO
from benchmarks.models.motif_video import MOTIF_VIDEO
from benchmarks.models.nucleus import NUCLEUS_IMAGE
from benchmarks.models.omnigen import OMNIGEN
from benchmarks.models.pixart import LATTE, PIXART
from benchmarks.models.published import Published
from benchmarks.models.qwenimage import KREA2, QWENIMAGE, QWENIMAGE21
from benchmarks.models.stable_diffusion import SD3, SDXL, SDXL_CHANNELS_LAST
from benchmarks.models.videos import ALLEGRO, COGVIDEOX, MINIMAX_H3, MOCHI
from benchmarks.models.wan import WAN, WAN_SMALL
from benchmarks.models.wan_relatives import ANYFLOW, ANYFLOW_FAR, HELIOS

PUBLISHED: tuple[Published, ...] = (
    *(LTX_VIDEO, FLUX, FLUX2, SD3, QWENIMAGE, WAN, WAN_SMALL, COSMOS, ALLEGRO),
    *(HUNYUAN_VIDEO, HUNYUAN_VIDEO15, LTX2, LTX2_DISTILLED, Z_IMAGE, FLUX3, KREA2),
    *(CHROMA, LONGCAT_IMAGE, OVIS_IMAGE, PRX, BRIA, FIBO, FIBO2, LUMINA2, MOCHI),
    *(COGVIDEOX, EASYANIMATE, COGVIEW3, COGVIEW4, GLM_IMAGE, SDXL, SDXL_CHANNELS_LAST),
    *(PIXART, LATTE, HELIOS, ANYFLOW, ANYFLOW_FAR, MOTIF_VIDEO),
    *(COSMOS3, NUCLEUS_IMAGE, ERNIE_IMAGE, HIDREAM, JOYIMAGE, JOYIMAGE_PLUS, OMNIGEN),
    *(QWENIMAGE21, MINIMAX_H3, KANDINSKY5, KANDINSKY5_PRO, KANDINSKY6),
)
MODELS = {published.key: published for published in PUBLISHED}
ALL = "all"


class Sizes(click.ParamType):
    """Comma-separated sizes of the model that --model names; of LTX-Video where there is no such option."""

    name = "sizes"

    def convert(self, value, param, ctx) -> list[Any]:
        model = ctx.params.get("model", LTX_VIDEO) if ctx else LTX_VIDEO
        if isinstance(model, list):
            if len(model) > 1:
                self.fail("sizes are of one model", param, ctx)
            (model,) = model
        try:
            return [model.parse_size(part) for part in value.split(",")]
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Modes(click.ParamType):
    """Comma-separated modes, in their order."""

    name = "modes"

    def __init__(self, known: Sequence[str]) -> None:
        self.known = known

    def convert(self, value, param, ctx) -> list[str]:
        if isinstance(value, list):
            return value
        modes = value.split(",")
        if unknown := [mode for mode in modes if mode not in self.known]:
            self.fail(
                f"mode must be one of {', '.join(self.known)}, got {unknown[0]!r}", param, ctx
            )
        return [mode for mode in self.known if mode in modes]


class Models(click.ParamType):
    """Comma-separated names of MODELS, or all of them, in their order."""

    name = "models"

    def convert(self, value, param, ctx) -> list[Published]:
        if isinstance(value, list):
            return value
        names = set(MODELS) if value == ALL else set(value.split(","))
        if unknown := sorted(names - set(MODELS)):
            known = ", ".join([*MODELS, ALL])
            self.fail(f"model must be one of {known}, got {unknown[0]!r}", param, ctx)
        return [published for name, published in MODELS.items() if name in names]


class Named(click.ParamType):
    """Comma-separated names of a table, as what the table has by them, in the given order."""

    def __init__(self, name: str, known: Mapping[str, Any]) -> None:
        self.name = name
        self.known = known

    def convert(self, value, param, ctx) -> list[Any]:
        if isinstance(value, list):
            return value
        names = value.split(",")
        if unknown := sorted(set(names) - set(self.known)):
            self.fail(f"must be of {', '.join(self.known)}, got {unknown[0]!r}", param, ctx)
        return [self.known[name] for name in names]


def _device(ctx, param, value: str | None) -> torch.device:
    if value is None:
        value = "cuda" if torch.cuda.is_available() else "cpu"
    if value == "cuda" and not torch.cuda.is_available():
        raise click.BadParameter("there is no CUDA GPU", ctx, param)
    return torch.device(value)


def _model(ctx, param, value: str) -> Published:
    return MODELS[value]


def _dtype(ctx, param, value: str) -> torch.dtype:
    return getattr(torch, value)


def modes_option(default: Sequence[str], known: Sequence[str] = models.MODES):
    return click.option(
        "--modes",
        type=Modes(known),
        default=",".join(default),
        show_default=True,
        help=f"Comma-separated, of {', '.join(known)}.",
    )


def names_option(option: str, known: Mapping[str, Any], parameter: str | None = None):
    """Comma-separated names of a table, by default all. ``parameter`` is main's, if not the option's name."""
    name = option.removeprefix("--")
    return click.option(
        option,
        parameter or name,
        type=Named(name, known),
        default=",".join(known),
        show_default=True,
    )


def modes_on(device: torch.device, modes: Sequence[str]) -> list[str]:
    """Those that there are on the device; a line says which ones are left out."""
    try:
        possible, sentence = models.possible_modes(modes, device)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if sentence is not None:
        click.echo(sentence)
    return possible


def measure_each(measures: Mapping[str, Callable[[], object]], device: torch.device) -> None:
    """Call each, and free what it held. If one of several fails, the others are still called."""
    failed = []
    for name, measure in measures.items():
        try:
            measure()
        except Exception:
            if len(measures) == 1:
                raise
            failed.append(name)
            click.echo(traceback.format_exc(), err=True)
        models.free(device)
    if failed:
        raise click.ClickException(f"not measured: {', '.join(failed)}")


MODEL = click.option(
    "--model",
    type=click.Choice(list(MODELS)),
    default="ltx",
    show_default=True,
    is_eager=True,  # --sizes are this model's
    callback=_model,
)
SEVERAL_MODELS = click.option(
    "--model",
    type=Models(),
    default="ltx",
    show_default=True,
    is_eager=True,  # --sizes are this model's
    help=f"Comma-separated, of {', '.join(MODELS)}; or {ALL}.",
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
