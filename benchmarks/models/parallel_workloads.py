"""What bench_parallel.py measures, and in which modes: a step, whole pipelines and decoders."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from diffusers import ContextParallelConfig
from torch import Tensor

from benchmarks import models
from benchmarks.harness.ranks import Mode
from benchmarks.models import bench_decoders
from benchmarks.models.bench_decoders import DECODERS, Decoder
from benchmarks.models.bench_every_model import AUTOENCODERS
from benchmarks.models.flux import FLUX
from benchmarks.models.ltx import LTX_VIDEO, LTXSize
from benchmarks.models.published import ImageSize, Published, VideoSize
from benchmarks.models.qwenimage import QWENIMAGE
from benchmarks.models.stable_diffusion import SD3
from benchmarks.models.wan import WAN
from benchmarks.pipelines import bench_pipelines
from benchmarks.pipelines.bench_pipelines import PIPELINES, Pipeline, published

if TYPE_CHECKING:
    from benchmarks.models.bench_parallel import Run

WEIGHTS = "peaked"
GUIDANCE = 4.0
# Kinds of modes. Decoders are injected, and decode the whole at once or in tiles.
EAGER, INJECTED, GRAPHS = "eager", "injected", "graphs"
TILED, DEFAULT_TILES = "tiled", "default-tiles"
# The modes of benchmarks.models of these kinds with linear layers in a precision.
INJECTIONS = {
    (INJECTED, None): "injected",
    (GRAPHS, None): models.GRAPHS,
    (INJECTED, "fp8"): models.PRECISION_FP8,
    (GRAPHS, "fp8"): f"{models.GRAPHS}+precision-fp8",
}
MAX_ULYSSES = 8  # divides the heads of the models here
SD3_MAX_ULYSSES = 2  # of 38 heads
# Stable Diffusion 3.5's with max_sequence_length=251. Ranks cannot share the 333 of the default.
SD3_TEXT_TOKENS = 77 + 251


@dataclass
class Prepared:
    """A mode that can be timed, with its first output."""

    forward: Callable[[], Any]
    report: Any = None
    output: Tensor | None = None
    graphs_before: dict[str, Any] | None = None


def share(model: torch.nn.Module, run: Run, mode: Mode) -> None:
    """Have the ranks of a mode share a denoiser's forwards."""
    if mode.ring * mode.ulysses > 1:
        config = ContextParallelConfig(
            ring_degree=mode.ring,
            ulysses_degree=mode.ulysses,
            mesh=run.ranks.mesh(mode)["ring", "ulysses"],
        )
        plan = run.kernel.context_parallel_plan(model)
        model.enable_parallelism(config=config, cp_plan=plan)
    if mode.guidance > 1:
        group = run.ranks.mesh(mode)["guidance"].get_group()
        run.kernel.enable_guidance_parallelism(model, group)


def splits(degree: int, is_guided: bool, max_ulysses: int) -> list[dict[str, int]]:
    """How this number of GPUs shares a forward: by Ulysses, and by guidance with Ulysses in each half."""
    known = [{"ulysses": degree}]
    if is_guided and degree % 2 == 0:
        known.append({"guidance": 2, "ulysses": degree // 2})
    return [split for split in known if split["ulysses"] <= max_ulysses]


def rings(degree: int) -> Iterator[dict[str, int]]:
    if degree > 2 and degree % 2 == 0:
        yield {"ring": 2, "ulysses": degree // 2}
    yield {"ring": degree}


# ----------------------------------------------------------------------------------------------
# One step


def divisible(size: Any, degree: int) -> Any:
    """The size, or the next smaller one whose tokens `degree` divides: with fewer frames, or rows."""
    while size.tokens % degree:
        if hasattr(size, "frames"):
            size = dataclasses.replace(size, frames=size.frames - 8)
        else:
            size = dataclasses.replace(size, height=size.height - 16)
    if size.tokens <= 0:
        raise ValueError(f"no smaller size has tokens that {degree} divides")
    return size


def shorten(model: torch.nn.Module, blocks: int | None) -> dict[str, int]:
    """Leave out blocks beyond `blocks` of each stack; the numbers of those that stay."""
    counts = {}
    for name, stack in list(model.named_children()):
        if isinstance(stack, torch.nn.ModuleList):
            kept = stack[:blocks]
            model.set_submodule(name, kept)
            counts[name] = len(kept)
    return counts


def denoise(model: Any, calls: Sequence[Mapping[str, Any]]) -> Tensor:
    """One forward, or the two of a step as pipelines with guidance call them. Each rank uses the result."""
    if len(calls) == 1:
        output = models.output_of(model(**calls[0]))
        _ = output.shape  # results that other ranks compute arrive now
        return output
    outputs = []
    for name, arguments in zip(("cond", "uncond"), calls, strict=True):
        with model.cache_context(name):
            outputs.append(models.output_of(model(**arguments)))
    cond, uncond = outputs
    return uncond + GUIDANCE * (cond - uncond)


@dataclass(frozen=True)
class Step:
    """A step of a published model, most with fewer blocks.

    Attributes:
        precision: of linear layers, as of inject_kernels.
        is_guided: whether guidance has two halves: of a stacked batch, or of two calls if the model's batch
            is 1.
        max_ulysses: the most ranks that share the model's heads.
        has_eager_ulysses: whether the eager model runs under Ulysses.
        changed_inputs: those that are not the pipeline's.
        in_a_row: the steps that are timed together, as in a denoising loop.
    """

    part: ClassVar[str] = "step"
    rounds: ClassVar[int] = 5
    warm_up_rounds: ClassVar[int] = 2  # after a first call; graphs are captured in the second

    name: str
    published: Published
    size: Any
    precision: str | None = None
    is_guided: bool = False
    max_ulysses: int = MAX_ULYSSES
    has_eager_ulysses: bool = True
    changed_inputs: Mapping[str, object] = field(default_factory=dict)
    text_tokens: int | None = None
    in_a_row: int = 10

    def modes(self, run: Run, degrees: Sequence[int]) -> list[Mode]:
        kinds = [INJECTED] if run.ranks.is_modelled else run.kinds
        kinds = [EAGER, *kinds] if self.precision is None else kinds
        modes = [Mode(kind) for kind in kinds]
        for degree in degrees:
            for kind in kinds:
                is_guided = self.is_guided and kind != EAGER and not run.ranks.is_modelled
                if kind != EAGER or self.has_eager_ulysses:
                    ways = splits(degree, is_guided, self.max_ulysses)
                    modes += [Mode(kind, **split) for split in ways]
            if run.with_rings:
                modes += [Mode(INJECTED, **split) for split in rings(degree)]
        return modes

    def calls(self, model: Any, size: Any, run: Run) -> list[dict[str, Any]]:
        """The arguments of each forward of a step; of modelled ranks only the first one."""

        def inputs(seed: int) -> dict[str, Any]:
            options = {"seed": seed, "text_tokens": self.text_tokens}
            given = self.published.inputs(model, size, run.ranks.device, run.dtype, **options)
            return {**given, **self.changed_inputs}

        calls = [inputs(0)]
        if self.is_guided and self.published.batch == 1 and not run.ranks.is_modelled:
            text = "encoder_hidden_states"
            calls.append({**calls[0], text: inputs(1)[text]})
        return calls

    def prepare(
        self, model: torch.nn.Module, calls: Sequence[Mapping[str, Any]], run: Run, mode: Mode
    ) -> Prepared:
        """A twin of the model in this mode."""
        twin, report = models.twin(model), None
        if mode.kind != EAGER:
            report = models.inject(run.kernel, twin, INJECTIONS[mode.kind, self.precision])
        share(twin, run, mode)
        return Prepared(functools.partial(denoise, twin, calls), report)

    def measure(self, run: Run) -> None:
        """At the size that the degrees divide; degrees of different sizes have an entry each."""
        source, device = self.published, run.ranks.device
        asked = source.tiny_sizes[0] if run.is_tiny else self.size
        of_size: dict[Any, list[int]] = {}
        for degree in run.degrees:
            of_size.setdefault(divisible(asked, degree), []).append(degree)
        model = source.transformer(device, run.dtype, run.is_tiny)
        whole = {**shorten(model, None), **({} if run.is_tiny else source.published_blocks)}
        kept = shorten(model, run.blocks)
        for size, degrees in of_size.items():
            calls = self.calls(model, size, run)
            entry = {
                "model": source.name_of(run.is_tiny).partition(", ")[0],
                "size": str(size),
                "asked_size": str(asked),
                "tokens": size.tokens,
                "text_tokens": self.text_tokens or source.text_tokens,
                "batch": source.batch,
                "forwards": len(calls),
                "precision": self.precision,
                "blocks": kept,
                "published_blocks": whole,
                "changed_inputs": dict(self.changed_inputs),
            }
            prepare = functools.partial(self.prepare, model, calls, run)
            with models.weights(model, WEIGHTS):
                run.measure(self, self.modes(run, degrees), degrees, prepare, entry)


STEPS = (
    Step("flux", FLUX, ImageSize(1024, 1024)),
    Step("flux_fp8", FLUX, ImageSize(1024, 1024), precision="fp8"),
    Step("qwenimage", QWENIMAGE, ImageSize(1024, 1024), is_guided=True),
    Step(
        "sd3",
        SD3,
        ImageSize(1024, 1024),
        is_guided=True,
        max_ulysses=SD3_MAX_ULYSSES,
        has_eager_ulysses=False,  # diffusers has no plan of it
        text_tokens=SD3_TEXT_TOKENS,
    ),
    Step("wan", WAN, VideoSize(81, 480, 832), is_guided=True, in_a_row=1),
    Step("wan_720p", WAN, VideoSize(81, 720, 1280), is_guided=True, in_a_row=1),
    # Eager LTX-Video cannot share its heads with a mask: it has one for each head of the model.
    Step("ltx", LTX_VIDEO, LTXSize(161, 512, 768), is_guided=True, has_eager_ulysses=False),
    Step("flux_2048", FLUX, ImageSize(2048, 2048)),
    Step(
        "ltx_257",
        LTX_VIDEO,
        LTXSize(257, 704, 1216),
        changed_inputs={"encoder_attention_mask": None},
        in_a_row=1,
    ),
)
MODELLED_STEPS = ("wan_720p", "ltx_257", "flux_2048")
ONLY_IF_NAMED = ("flux_2048", "ltx_257")

# ----------------------------------------------------------------------------------------------
# Whole pipelines


@dataclass(frozen=True)
class WholePipeline:
    """A pipeline of bench_pipelines.py: all blocks and the decoder, without text encoders.

    With CUDA graphs where there is a GPU. Guidance is shared before tokens.
    """

    part: ClassVar[str] = "pipeline"
    rounds: ClassVar[int] = 3
    warm_up_rounds: ClassVar[int] = 0  # the first call is a whole one
    in_a_row: ClassVar[int] = 1

    name: str
    pipeline: Pipeline
    precision: str | None = None
    is_guided: bool = False
    max_ulysses: int = MAX_ULYSSES

    def modes(self, run: Run) -> list[Mode]:
        ways = [splits(degree, self.is_guided, self.max_ulysses)[-1:] for degree in run.degrees]
        return [Mode(run.kinds[-1], **split) for split in ({}, *itertools.chain(*ways))]

    def prepare(self, pipe: Any, steps: int | None, run: Run, mode: Mode) -> Prepared:
        injection = INJECTIONS[mode.kind, self.precision]
        call, twin, report = bench_pipelines.set_up(
            self.pipeline, pipe, run.kernel, injection, run.is_tiny
        )
        share(self.pipeline.denoiser(twin), run, mode)

        def whole() -> Tensor:
            return torch.as_tensor(call(steps))

        return Prepared(whole, report)

    def measure(self, run: Run) -> None:
        pipe = self.pipeline.build(run.ranks.device, run.dtype, run.is_tiny)
        steps = 2 if run.is_tiny else self.pipeline.steps
        _, height, width, *frames = self.pipeline.model.size
        entry = {
            "model": "tiny " * run.is_tiny + self.pipeline.title,
            "size": "x".join(map(str, (*frames, height, width))),
            "steps": steps,
            "precision": self.precision,
        }
        prepare = functools.partial(self.prepare, pipe, steps, run)
        with models.weights(self.pipeline.denoiser(pipe), WEIGHTS):
            run.measure(self, self.modes(run), run.degrees, prepare, entry)


def _with_text(pipeline: Pipeline, tokens: int) -> Pipeline:
    text = {**pipeline.model.text, "prompt_embeds": (tokens, "joint_attention_dim")}
    return replace(pipeline, model=replace(pipeline.model, text=text))


WHOLE_PIPELINES = (
    WholePipeline("flux", PIPELINES["flux"]),
    WholePipeline("flux_fp8", PIPELINES["flux"], precision="fp8"),
    WholePipeline(
        "qwenimage",
        published("Qwen-Image", "qwenimage", 50, size=(1024, 1024)),
        is_guided=True,
    ),
    WholePipeline(
        "sd3",
        _with_text(PIPELINES["sd3"], SD3_TEXT_TOKENS),
        is_guided=True,
        max_ulysses=SD3_MAX_ULYSSES,
    ),
)

# ----------------------------------------------------------------------------------------------
# Decoders


def tile_in_four(vae: Any, z: Tensor, overlap: int) -> None:
    """Tiled decoding in two rows of two tiles, one for each of four GPUs, with this overlap in latents.

    A tile begins a stride after the one before it. Wan's 60 by 104 latents have tiles of 34 by 56, which are
    272 by 448 pixels, and strides of 30 by 52. diffusers' own tiles would be 15, and overlap by a quarter.
    """
    rows, columns = (-(-side // 2) for side in z.shape[-2:])
    if hasattr(vae, "tile_overlap_factor"):  # its tiles are square
        tile = max(rows, columns) + overlap
        vae.tile_latent_min_size, vae.tile_overlap_factor = tile, overlap / tile
        vae.tile_sample_min_size = tile * 2 ** (len(vae.config.block_out_channels) - 1)
        vae.enable_tiling()
        return
    ratio = vae.spatial_compression_ratio
    vae.enable_tiling(
        tile_sample_min_height=(rows + overlap) * ratio,
        tile_sample_min_width=(columns + overlap) * ratio,
        tile_sample_stride_height=rows * ratio,
        tile_sample_stride_width=columns * ratio,
    )


@dataclass(frozen=True)
class Decoding:
    """A decoder of bench_decoders.py, injected: the whole on one GPU, and tiles on one and on several.

    Attributes:
        overlap: of tile_in_four.
    """

    part: ClassVar[str] = "decode"
    rounds: ClassVar[int] = 5
    warm_up_rounds: ClassVar[int] = 1
    in_a_row: ClassVar[int] = 1

    name: str
    decoder: Decoder
    overlap: int = 4

    def modes(self, run: Run) -> list[Mode]:
        # diffusers' tiles are larger than all that a tiny model decodes.
        kinds = [TILED] if run.is_tiny else [TILED, DEFAULT_TILES]
        tiles = [Mode(kind, tiles=count) for kind in kinds for count in (1, *run.degrees)]
        return [Mode(INJECTED), *tiles]

    def prepare(self, vae: Any, z: Tensor, run: Run, mode: Mode) -> Prepared:
        twin = models.twin(vae)
        run.kernel.inject_kernels(SimpleNamespace(components={"vae": twin}))
        if mode.kind == TILED:
            tile_in_four(twin, z, 1 if run.is_tiny else self.overlap)
        elif mode.kind == DEFAULT_TILES:
            twin.enable_tiling()
        if mode.tiles > 1:
            group = run.ranks.mesh(mode)["tiles"].get_group()
            run.kernel.enable_tile_parallelism(twin, group)
        return Prepared(functools.partial(bench_decoders.decode, twin, z))

    def measure(self, run: Run) -> None:
        vae, z = self.decoder.build(run.ranks.device, run.is_tiny)
        size = self.decoder.frames.replace(" × ", "x")
        title = "tiny " * run.is_tiny + self.decoder.title
        entry = {"model": title, "size": size, "precision": None}
        prepare = functools.partial(self.prepare, vae, z, run)
        run.measure(self, self.modes(run), run.degrees, prepare, entry)


LARGE_FLUX = replace(
    DECODERS["flux"],
    frames="2048 × 2048",
    latent=(16, 256, 256),
    # Its tiles are as large as the pictures that it was trained on.
    changes={**AUTOENCODERS["kl"][1], "sample_size": 1024},
)
DECODINGS = (
    Decoding("wan", DECODERS["wan"]),
    Decoding("ltx", DECODERS["ltx"], overlap=2),
    Decoding("flux", LARGE_FLUX),
)
Workload = Step | WholePipeline | Decoding
WORKLOADS: tuple[Workload, ...] = (*STEPS, *WHOLE_PIPELINES, *DECODINGS)
PARTS = ("step", "pipeline", "decode")
