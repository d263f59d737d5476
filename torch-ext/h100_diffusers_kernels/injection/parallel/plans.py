"""Plans of context parallelism for models for which diffusers has none: which tensors ranks split."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from ...operations.conditions import an
from ..core.checks import find_class
from ..core.patch import INJECTION

logger = logging.getLogger("h100_diffusers_kernels")
_MODELS = "diffusers.models.transformers."
_PARALLEL_MODULE = "diffusers.models._modeling_parallel"


def context_parallel_plan(model: nn.Module) -> dict[str, Any]:
    """The plan of context parallelism for a model: which of its tensors ranks split and gather.

    Pass it to ``enable_parallelism`` before or after :func:`inject_kernels`. Without the injection the own
    code of Stable Diffusion 3 and CogVideoX would attend to each rank's own tokens only.

    Args:
        model: a HunyuanVideo, CogVideoX, Stable Diffusion 3 or Z-Image transformer, or another model for
            which diffusers has a plan.

    Returns:
        The plan. diffusers' own if it has one.

    Raises:
        ValueError: if there is no plan for the model.
        RuntimeError: if this diffusers has no context parallelism.

    Example::

        config = ContextParallelConfig(ulysses_degree=2)
        model.enable_parallelism(config=config, cp_plan=kernel.context_parallel_plan(model))
    """
    own = getattr(model, "_cp_plan", None)
    if own is not None:
        return dict(own)
    for path, make in _PLANS.items():
        cls = find_class(path)
        if cls is not None and isinstance(model, cls):
            module = sys.modules.get(_PARALLEL_MODULE)
            if module is None:
                raise RuntimeError(
                    "context_parallel_plan: this diffusers has no context parallelism"
                )
            return make(model, module.ContextParallelInput, module.ContextParallelOutput)
    names = ", ".join(path.partition(":")[2] for path in _PLANS)
    raise ValueError(
        f"context_parallel_plan: model must be a {names}, or have a plan of diffusers, got "
        f"{an(type(model).__name__)}"
    )


def _two_streams(model: Any, split: Callable, gather: Callable) -> dict[str, Any]:
    """Image and text enter the first block; the last linear layer gathers the image."""
    if INJECTION not in vars(model):
        text = (
            "context_parallel_plan: the own code of %s would be wrong: inject_kernels must follow"
        )
        logger.warning(text, type(model).__name__)
    streams = ("hidden_states", "encoder_hidden_states")
    return {
        "transformer_blocks.0": {name: split(1, 3) for name in streams},
        "proj_out": gather(gather_dim=1, expected_dims=3),
    }


def _cogvideox(model: Any, split: Callable, gather: Callable) -> dict[str, Any]:
    tables = {"image_rotary_emb": [split(0, 2), split(0, 2)]}
    return {"": tables, **_two_streams(model, split, gather)}


def _hunyuan_video(model: Any, split: Callable, gather: Callable) -> dict[str, Any]:
    kind = getattr(model.config, "image_condition_type", None)
    if kind == "token_replace":
        raise ValueError(
            "context_parallel_plan: HunyuanVideo with image_condition_type 'token_replace' counts the "
            "tokens of the first frame, which ranks cannot split"
        )
    tables = {i: split(0, 2, split_output=True) for i in range(2)}
    return {"rope": tables, **_two_streams(model, split, gather)}


def _z_image(model: Any, split: Callable, gather: Callable) -> dict[str, Any]:
    output = gather(gather_dim=1, expected_dims=3)
    plan: dict[str, Any] = {}
    for name in ("noise_refiner", "context_refiner", "layers"):
        count = len(getattr(model, name, None) or ())
        if count == 0:
            continue
        # Every layer gets the mask and the tables of all tokens.
        of_each = {"attn_mask": split(1, 2), "freqs_cis": split(1, 3)}
        first = plan[f"{name}.*"] = of_each
        if count > 1:
            first = plan[f"{name}.0"] = {}
        first["x"] = split(1, 3)
        if name != "layers":
            plan[f"{name}.{count - 1}"] = output
    for size in model.all_final_layer:
        plan[f"all_final_layer.{size}"] = output
    return plan


_PLANS: dict[str, Callable] = {
    f"{_MODELS}transformer_hunyuan_video:HunyuanVideoTransformer3DModel": _hunyuan_video,
    f"{_MODELS}cogvideox_transformer_3d:CogVideoXTransformer3DModel": _cogvideox,
    f"{_MODELS}transformer_sd3:SD3Transformer2DModel": _two_streams,
    f"{_MODELS}transformer_z_image:ZImageTransformer2DModel": _z_image,
}
