"""What a decision about a module was read from, so that one pass over it tells whether the decision holds.

A module's parts may be replaced, hooked, wrapped or patched at any time, by anyone. What the kernels
stand in for is therefore decided by looking at all of it, and once more wherever a look back finds a
difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Union

import torch
from torch import nn

from .forward_slot import has_hooks, runs_own_forward, stand_in_of

_modules = torch.nn.modules.module
_GLOBAL_HOOKS = (
    _modules._global_forward_hooks,
    _modules._global_forward_pre_hooks,
    _modules._global_backward_hooks,
    _modules._global_backward_pre_hooks,
)
# Libraries whose modules change nothing but what they return.
_KNOWN_LIBRARIES = ("torch", "diffusers", "peft", "torchao", "bitsandbytes")


def has_global_hooks() -> bool:
    """Whether hooks are around every call of every module."""
    for hooks in _GLOBAL_HOOKS:  # noqa: SIM110 - any() of a generator takes twice as long
        if hooks:
            return True
    return False


class Snapshot:
    """Modules under a root, and values, as they were when a decision was made.

    Attributes:
        is_quiet: whether a call of the root runs no code but that of known libraries, apart from what is
            around the root itself and inside of modules that have a stand-in of their own.
        stand_ins: those modules.
        see_method: looks up a method of a class, for whoever keeps watch on those.
    """

    __slots__ = (
        *("_root_state", "_root_values", "_tree", "_values"),
        *("is_quiet", "see_method", "stand_ins"),
    )

    def __init__(self, root: nn.Module, see_method: Callable[[type, str], Any]) -> None:
        # Held by the root, this must not hold the root's attributes in turn.
        self._root_state = id(root.__dict__)
        self.see_method = see_method
        self._root_values: list[tuple] = []
        self._values: list[tuple] = []
        self._tree: list[tuple] = []
        self.is_quiet = True
        self.stand_ins: list[nn.Module] = []

    def see(self, namespace: Mapping, name: Any) -> Any:
        """A value of a namespace; None if there is none of that name."""
        value = namespace.get(name)
        if id(namespace) == self._root_state:
            self._root_values.append((name, value))
        else:
            self._values.append((namespace, name, value))
        return value

    def see_attribute(self, module: nn.Module, name: str) -> Any:
        """A submodule, parameter, buffer or other attribute of an instance; None if there is none."""
        namespaces = (module.__dict__, module._parameters, module._buffers, module._modules)
        for namespace in namespaces:
            if name in namespace:
                return self.see(namespace, name)
        for namespace in namespaces:
            self.see(namespace, name)
        return getattr(type(module), name, None)

    def see_tree(self, root: nn.Module) -> None:
        """A module and all under it, down to those that have a stand-in, which see for themselves."""
        classes: set[type] = set()
        pending = [root]
        while pending:
            module = pending.pop()
            is_root = id(module.__dict__) == self._root_state
            children = tuple(module._modules.values())
            forward = None if is_root else module.__dict__.get("forward")
            hooked = has_hooks(module)
            self._tree.append(
                (None if is_root else module, type(module), forward, hooked, children)
            )
            if not is_root:
                self.is_quiet &= runs_own_forward(module)
                if stand_in_of(forward) is not None:
                    self.stand_ins.append(module)
                    continue
            if type(module) not in classes:
                classes.add(type(module))
                self.is_quiet &= self._is_known(type(module))
            pending.extend(child for child in children if child is not None)

    def _is_known(self, cls: type) -> bool:
        forward = self.see_method(cls, "forward")
        writer = getattr(forward, "__globals__", {}).get("__name__", "")
        return all(name.partition(".")[0] in _KNOWN_LIBRARIES for name in (writer, cls.__module__))

    def holds(self, root: nn.Module) -> bool:
        """Whether all of it is as it was."""
        state = root.__dict__
        for name, value in self._root_values:
            if state.get(name) is not value:
                return False
        for namespace, name, value in self._values:
            if namespace.get(name) is not value:
                return False
        for module, cls, forward, hooked, children in self._tree:
            if module is None:
                module, forward = root, root.__dict__.get("forward")
            state = module.__dict__
            if (
                module.__class__ is not cls
                or state.get("forward") is not forward
                or hooked
                != bool(
                    state["_forward_hooks"]
                    or state["_forward_pre_hooks"]
                    or state["_backward_hooks"]
                    or state["_backward_pre_hooks"]
                )
            ):
                return False
            modules = state["_modules"]
            if (tuple(modules.values()) if modules else ()) != children:
                return False
        return True


class Glance:
    """Looks as a ``Snapshot`` does, for decisions that are not kept, such as those made while torch.compile
    traces."""

    def see(self, namespace: Mapping, name: Any) -> Any:
        return namespace.get(name)

    def see_attribute(self, module: nn.Module, name: str) -> Any:
        return getattr(module, name, None)

    def see_method(self, cls: type, name: str) -> Any:
        return getattr(cls, name, None)

    def see_tree(self, root: nn.Module) -> None:
        """Nothing of it is kept."""


# How a part looks at its module.
Look = Union[Snapshot, Glance]
