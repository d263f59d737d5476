"""Which model classes are known, and to which family each belongs."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from . import ltx

# Classes are looked up where the user's program has loaded them: nothing is imported here.
_FAMILIES = {
    "diffusers.models.transformers.transformer_ltx.LTXVideoTransformer3DModel": ltx,
}


def family_of(module: nn.Module) -> Any | None:
    """The family whose model the module is, subclasses included, or None."""
    for path, family in _FAMILIES.items():
        module_name, _, class_name = path.rpartition(".")
        known = getattr(sys.modules.get(module_name), class_name, None)
        if known is not None and isinstance(module, known):
            return family
    return None


def known_models() -> str:
    return ", ".join(path.rpartition(".")[2] for path in _FAMILIES)
