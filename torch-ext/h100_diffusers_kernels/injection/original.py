"""Classes and functions as their libraries define them.

A kernel stands in for what a library computes, not for what somebody has put in its place: originals are
looked up once, at injection, and compared with what is found at the call. Nothing is imported: the user's
program has loaded what its models consist of.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any, NamedTuple

import torch


class Original(NamedTuple):
    """A function of a module or of a class; ``function`` is None if it is missing or had been replaced."""

    owner: Any
    name: str
    function: Any

    def is_in_use(self) -> bool:
        """Whether the library's own function is found under its name."""
        return self.function is not None and vars(self.owner).get(self.name) is self.function


def find_class(path: str) -> type | None:
    """The class ``module:name``, if its module is loaded."""
    module, _, name = path.partition(":")
    return getattr(sys.modules.get(module), name, None)


def find_original(path: str, parameters: str | None = None) -> Original:
    """``module:function`` or ``module:class.function``.

    ``parameters`` are the names that it must take, in order: another version of the library with
    other ones may compute something else.
    """
    module_name, _, qualified_name = path.partition(":")
    class_name, _, name = qualified_name.rpartition(".")
    owner = sys.modules.get(module_name)
    if class_name:
        owner = getattr(owner, class_name, None)
    function: Any = vars(owner).get(name) if owner is not None else None
    if not _is_written_by(module_name.partition(".")[0], function, name) or (
        parameters is not None and " ".join(inspect.signature(function).parameters) != parameters
    ):
        function = None
    return Original(owner, name, function)


def _is_written_by(library: str, function: Any, name: str) -> bool:
    if function is None or getattr(function, "__name__", None) != name:
        return False
    module_globals = getattr(function, "__globals__", None)
    if module_globals is None:  # one of Torch's compiled functions
        namespaces: tuple[Any, ...] = (torch._C._nn, torch._C._VariableFunctions)
        return any(function is getattr(namespace, name, None) for namespace in namespaces)
    return module_globals["__name__"].partition(".")[0] == library


def class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
