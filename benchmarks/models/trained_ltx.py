"""The small trained LTX-Video, called as the example calls it, and captions held back in its training."""

from __future__ import annotations

import random
from typing import Any

import torch
from clips import Scene, random_scene
from detect import detect, score

from pipelines import MODELS, SIZE, trained_pipeline

TRAINED = MODELS["ltx"].trained
FOUND = ("color", "motion", "shape")


def held_back_scenes(count: int) -> list[Scene]:
    """Always the same scenes."""
    choose = random.Random(0)
    return [random_scene(choose, held_back=True) for _ in range(count)]


def load(device: torch.device, dtype: torch.dtype) -> Any:
    pipe = trained_pipeline(TRAINED, str(device), dtype).to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe: Any, caption: str, seed: int, **changes: object) -> torch.Tensor:
    """The video (frames, 3, height, width), 0 to 1, or what `output_type` says; `changes` are arguments."""
    arguments = {**TRAINED.call, **dict(zip(SIZE, TRAINED.size, strict=True)), **changes}
    generator = torch.Generator().manual_seed(seed)
    return pipe(caption, generator=generator, **{"output_type": "pt", **arguments}).frames[0]


def middle_forward(pipe: Any, steps: int) -> dict[str, Any]:
    """Arguments of the denoising model in the middle of a video of the first scene."""
    calls: list[dict[str, Any]] = []
    hook = pipe.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True
    )
    (scene,) = held_back_scenes(1)
    generate(pipe, scene.caption, 0, num_inference_steps=steps, output_type="latent")
    hook.remove()
    return calls[steps // 2]


def found(scene: Scene, video: torch.Tensor) -> tuple[dict[str, float], str]:
    """Shares of the scene's figures with each of FOUND, and what was found."""
    frames = (video * 255).round().to(torch.uint8).movedim(1, -1).cpu().numpy()
    figures = detect(frames, len(scene.figures))
    return score(scene, figures), " and ".join(map(str, figures)) or "nothing"
