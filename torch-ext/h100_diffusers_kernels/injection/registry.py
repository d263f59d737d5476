"""Which model classes are known, and to which family each belongs."""

from __future__ import annotations

from typing import Any

from torch import nn

from . import flux, ltx
from .model_forward import Model

_FAMILIES = (ltx, flux)


def model_part(family: Any) -> Model:
    return next(part for part in family.PARTS if isinstance(part, Model))


def family_of(module: nn.Module) -> Any | None:
    """The family whose model the module is, subclasses included, or None."""
    return next((family for family in _FAMILIES if model_part(family).is_kind_of(module)), None)


def known_models() -> str:
    return ", ".join(model_part(family).path.partition(":")[2] for family in _FAMILIES)
