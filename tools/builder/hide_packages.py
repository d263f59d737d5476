"""pytest plugin: only the packages in $VISIBLE_PACKAGES, and what they require, can be imported."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def with_requirements(names: list[str]) -> set[str]:
    """The packages and all that they require without extras; PackageNotFoundError if one is not installed."""
    found: set[str] = set()
    while names:
        name = canonicalize_name(names.pop())
        if name not in found:
            found.add(name)
            needed = map(Requirement, metadata.requires(name) or [])
            names += [
                r.name for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})
            ]
    return found


class Finder:
    """Finds the modules that another finder finds, except hidden ones."""

    def __init__(self, finder: Any, hidden: set[str]) -> None:
        self.finder, self.hidden = finder, hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        is_hidden = name.partition(".")[0] in self.hidden
        return None if is_hidden else self.finder.find_spec(name, path, target)


visible = with_requirements(os.environ["VISIBLE_PACKAGES"].split())
hidden = {
    module
    for module, packages in metadata.packages_distributions().items()
    if visible.isdisjoint(map(canonicalize_name, packages))
}
if imported := sorted(hidden & sys.modules.keys()):
    raise RuntimeError(f"imported before they could be hidden: {', '.join(imported)}")
sys.meta_path[:] = [Finder(finder, hidden) for finder in sys.meta_path]
