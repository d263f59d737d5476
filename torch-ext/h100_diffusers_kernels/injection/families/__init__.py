"""Models that run on the kernels in full, a file each.

A file ends with ``FAMILIES``.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from ..core.forward_state import Family

_MODULES: list[Any] = [
    importlib.import_module(f"{__name__}.{name}")
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__))
]
FAMILIES: tuple[Family, ...] = tuple(family for module in _MODULES for family in module.FAMILIES)
