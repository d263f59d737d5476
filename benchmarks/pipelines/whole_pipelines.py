"""Whole pipelines at their published depth, with random weights and without text encoders.

The models are those of the examples with all blocks, and FLUX.3, which has a modular pipeline only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers.modular_pipelines import flux3
from diffusers.modular_pipelines.flux3.decoders import Flux3DecodeStep
from diffusers.modular_pipelines.flux3.modular_blocks_flux3 import Flux3CoreDenoiseBlocks
from diffusers.modular_pipelines.modular_pipeline import SequentialPipelineBlocks
from pipelines import FLOW, MODELS, Model, call_arguments, random_parts, random_pipeline

from benchmarks import models

DEPTH = ("num_layers", "num_single_layers", "n_layers")  # arguments that the examples make small
PROMPT = "A red fox trots through fresh snow at dawn."


@dataclass(frozen=True)
class Pipeline:
    """A pipeline and the number of steps that are timed, of those that the model's card recommends."""

    title: str
    model: Model
    steps: int
    published_steps: int
    channels_last: bool = False

    def build(self, device: torch.device, dtype: torch.dtype, tiny: bool) -> Any:
        make = _flux3_pipeline if self.model is FLUX3 else random_pipeline
        pipe = make(self.model, tiny, str(device), dtype, 0)
        if self.channels_last:
            self.denoiser(pipe).to(memory_format=torch.channels_last)
        return pipe

    def denoiser(self, pipe: Any) -> torch.nn.Module:
        return getattr(pipe, self.model.denoiser)

    def twin(self, pipe: Any) -> Any:
        """The same pipeline with modules of its own over the same weights."""
        parts = {
            name: models.twin(part) if isinstance(part, torch.nn.Module) else copy.deepcopy(part)
            for name, part in pipe.components.items()
        }
        twin = _flux3_of(parts) if self.model is FLUX3 else type(pipe)(**parts)
        twin.set_progress_bar_config(disable=True)
        return twin

    def call(self, pipe: Any, tiny: bool, **changes: object) -> Callable[..., torch.Tensor]:
        """Calls the pipeline for a number of steps; the frames or the image as a tensor."""
        changes = {"output_type": "pt", **changes}
        if self.model is FLUX3:
            changes["output"] = "images"
        arguments = call_arguments(self.model, pipe, tiny, PROMPT, **changes)

        def run(steps: int | None = None) -> torch.Tensor:
            own = arguments if steps is None else {**arguments, "num_inference_steps": steps}
            result = pipe(**own, generator=torch.Generator(pipe.device).manual_seed(0))
            if isinstance(result, torch.Tensor):
                return result
            return result.images if hasattr(result, "images") else result.frames

        return run


def _published(
    title: str,
    key: str,
    steps: int,
    denoiser: dict[str, object] | None = None,
    size: tuple[int, ...] | None = None,
    channels_last: bool = False,
) -> Pipeline:
    """The example's pipeline with all blocks, and with these changes."""
    model = MODELS[key]
    (cls, config), name = model.parts[model.denoiser], model.denoiser
    config = {k: v for k, v in config.items() if k not in DEPTH} | (denoiser or {})
    published_steps, *sides = model.size
    size = (steps, *(size or sides))
    model = replace(model, size=size, parts={**model.parts, name: (cls, config)})
    return Pipeline(title, model, steps, published_steps, channels_last)


FLUX3 = replace(
    MODELS["flux2"],
    hub_id=None,
    pipeline="Flux3ModularPipeline",
    size=(10, 1024, 1024),
    call={"negative_prompt": ""},
    parts={
        "transformer": ("Flux3Transformer2DModel", {}),
        "vae": ("AutoencoderKLFlux2", {}),
        "scheduler": FLOW,
        "guider": ("guiders.ClassifierFreeGuidance", {"guidance_scale": 3.5}),
    },
    text={"prompt_embeds": (160, "joint_attention_dim")},
)


def _flux3_of(parts: dict[str, Any]) -> flux3.Flux3ModularPipeline:
    blocks = {**Flux3CoreDenoiseBlocks, "decode": Flux3DecodeStep()}
    pipe = SequentialPipelineBlocks.from_blocks_dict(blocks).init_pipeline()
    pipe.update_components(**parts)
    pipe.text_encoder = None
    return pipe


def _flux3_pipeline(*arguments: Any) -> flux3.Flux3ModularPipeline:
    return _flux3_of(random_parts(*arguments))


PIPELINES = {
    "flux": _published("FLUX.1-dev", "flux", 28),
    "flux2": _published("FLUX.2-dev", "flux2", 10),
    "flux3": Pipeline("FLUX.3", FLUX3, 10, 50),
    "qwenimage": _published("Qwen-Image", "qwenimage", 10, size=(1024, 1024)),
    "sd3": _published("Stable Diffusion 3.5 Large", "sd3", 28, {"num_layers": 38}),
    "z_image": _published("Z-Image-Turbo", "z-image", 9),
    "sdxl": _published("Stable Diffusion XL, channels last", "sdxl", 50, channels_last=True),
    "wan": _published(
        "Wan 2.1 14B", "wan", 2, {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}
    ),
    "ltx": _published("LTX-Video 2B", "ltx", 20),
    "ltx2": _published("LTX-2", "ltx2", 5),
    "hunyuan_video15": _published("HunyuanVideo 1.5", "hunyuan-video15", 2),
}
