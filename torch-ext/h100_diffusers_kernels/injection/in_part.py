"""Models without a family, in part: which module runs on which kernel.

How such a model puts its modules together is unknown, so none is fused with what comes before or after it: a
module's stand-in computes the same from the same arguments.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from ..arguments import ATTENTION_HEAD_DIMS
from .activations import GATED_ACTIVATIONS
from .attention import head_dim_of
from .attention_processors import ProcessorSpec, attention_spec
from .linears import LINEAR_GELU
from .norm_modules import ADAPTIVE_NORMS, GROUP_NORM, NORMS
from .patch import Injection, PatchSpec
from .unets import BASIC_BLOCK, RESNET_BLOCK, SPATIAL_TRANSFORMER

SPECS: tuple[PatchSpec, ...] = (
    *(RESNET_BLOCK, SPATIAL_TRANSFORMER, BASIC_BLOCK),
    *(*ADAPTIVE_NORMS, *NORMS, GROUP_NORM),
    *(replace(LINEAR_GELU, left_to_compiler=True), *GATED_ACTIVATIONS),
)


def spec_of(module: nn.Module) -> PatchSpec | None:
    """The kind that a module is, or None."""
    found = next((spec for spec in SPECS if spec.matches(module)), None)
    return attention_spec(module) if found is None else found


def why_left_alone(module: Any, spec: PatchSpec, injection: Injection) -> str | None:
    """Why a module is left alone, whatever it is called with."""
    if not isinstance(spec, ProcessorSpec):
        return None
    if not injection.options["attention"]:
        return "attention itself is the model's own: asked for by attention=False"
    head_dim = head_dim_of(module)
    if head_dim is not None and head_dim not in ATTENTION_HEAD_DIMS:
        known = " and ".join(map(str, ATTENTION_HEAD_DIMS))
        return f"its heads have {head_dim} elements, and the kernel's {known}"
    return None
