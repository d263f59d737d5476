"""Models that run on the kernels in full, a file each.

A file ends with ``FAMILIES``. Its ``IN_PART``, if any, are specs for models without a family, too.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from ..core.forward_state import Family
from ..core.patch import PatchSpec

_MODULES: list[Any] = [
    importlib.import_module(f"{__name__}.{name}")
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__))
]
FAMILIES: tuple[Family, ...] = tuple(family for module in _MODULES for family in module.FAMILIES)
IN_PART: tuple[PatchSpec, ...] = tuple(
    spec for module in _MODULES for spec in getattr(module, "IN_PART", ())
)
