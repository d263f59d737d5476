"""Which model classes are known, and to which family each belongs."""

from __future__ import annotations

from torch import nn

from . import flux, flux2, ltx, qwenimage, sd3, wan
from .model_forward import Model
from .part import Family

_FAMILIES = tuple(
    family for module in (ltx, flux, flux2, qwenimage, sd3, wan) for family in module.FAMILIES
)


def models_of(family: Family) -> tuple[Model, ...]:
    return tuple(part for part in family.parts if isinstance(part, Model))


def family_of(module: nn.Module) -> Family | None:
    """The family whose model the module is, subclasses included, or None."""
    for family in _FAMILIES:
        if any(model.is_kind_of(module) for model in models_of(family)):
            return family
    return None


def known_models() -> str:
    models = (model for family in _FAMILIES for model in models_of(family))
    return ", ".join(model.path.partition(":")[2] for model in models)
