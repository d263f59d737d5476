"""Which models are known as a whole, and by which family."""

from __future__ import annotations

from torch import nn

from . import flux, flux2, ltx, qwenimage, sd3, wan
from .family import Family

FAMILIES: tuple[Family, ...] = tuple(
    family for module in (ltx, flux, flux2, qwenimage, sd3, wan) for family in module.FAMILIES
)


def family_of(module: nn.Module) -> Family | None:
    """The family whose model the module is, subclasses included, or None."""
    for family in FAMILIES:
        if any(model.matches(module) for model in family.models):
            return family
    return None


def known_models() -> str:
    models = (model for family in FAMILIES for model in family.models)
    return ", ".join(model.path.partition(":")[2] for model in models)
