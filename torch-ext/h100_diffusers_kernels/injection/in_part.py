"""Models without a family, in part: which module runs on which kernel."""

from __future__ import annotations

from typing import Any

from torch import nn

from .linears import LINEAR_GELU
from .patch import Injection, PatchSpec

SPECS: tuple[PatchSpec, ...] = (LINEAR_GELU,)


def spec_of(module: nn.Module) -> PatchSpec | None:
    """The kind that a module is, or None."""
    return next((spec for spec in SPECS if spec.matches(module)), None)


def why_left_alone(module: Any, spec: PatchSpec, injection: Injection) -> str | None:
    """Why a module is left alone, whatever it is called with."""
    return None
