"""What a family of models is: the kinds of modules whose forwards are replaced in it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from .forward_state import ModelSpec
from .patch import PatchSpec

COMPUTED_ONCE = "computed once a forward, by the model's own code"


class Family(NamedTuple):
    """Models whose blocks are alike.

    Attributes:
        name: as its users know it.
        specs: the kinds of modules whose forwards are replaced, the models themselves among them.
        left_alone: names of modules of the model that are not, and why.
        outside: specs of modules of the model that are in none of its blocks, by name.
    """

    name: str
    specs: tuple[PatchSpec, ...]
    left_alone: dict[str, str]
    outside: Mapping[str, PatchSpec] = MappingProxyType({})

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        return tuple(spec for spec in self.specs if isinstance(spec, ModelSpec))
