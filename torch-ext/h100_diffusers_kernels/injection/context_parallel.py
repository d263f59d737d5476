"""context_parallel_plan."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from ..operations.conditions import an
from .families import FAMILIES

_PARALLEL_MODULE = "diffusers.models._modeling_parallel"


def context_parallel_plan(model: nn.Module) -> dict[str, Any]:
    """The plan of context parallelism for a model: which of its tensors ranks split and gather.

    Pass it to ``enable_parallelism`` before or after :func:`inject_kernels`. Without the injection the own
    code of some models, such as CogVideoX, would attend to each rank's own tokens only; a warning says so.

    Args:
        model: a transformer for which this package or diffusers has a plan; docs/several_gpus.md lists them.

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
    specs = [spec for family in FAMILIES for spec in family.models if spec.plan is not None]
    for spec in specs:
        if spec.plan is not None and spec.matches(model):
            module = sys.modules.get(_PARALLEL_MODULE)
            if module is None:
                raise RuntimeError(
                    "context_parallel_plan: this diffusers has no context parallelism"
                )
            return spec.plan(model, module.ContextParallelInput, module.ContextParallelOutput)
    names = ", ".join(spec.path.partition(":")[2] for spec in specs)
    raise ValueError(
        f"context_parallel_plan: model must be a {names}, or have a plan of diffusers, got "
        f"{an(type(model).__name__)}"
    )
