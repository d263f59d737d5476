"""What a decision about a module was read from, so that one pass over it tells whether the decision holds.

A module's parts may be replaced, hooked, wrapped or patched at any time, by anyone. What the kernels
stand in for is therefore decided by looking at all of it, and once more wherever a look back finds a
difference.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, is_, itemgetter
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


# What a module registers: its hooks and its submodules.
_registries = itemgetter(
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_modules")
)


state_of = attrgetter("__dict__")


class Snapshot:
    """Modules under a root, and values, as they were when a decision was made.

    Attributes:
        is_quiet: whether a call of the root runs no code but that of known libraries, apart from what is
            around the root itself and inside of modules that have a stand-in of their own.
        stand_ins: those modules.
        see_method: looks up a method of a class, for whoever keeps watch on those.
    """

    # Beside each list of things to look at stands what was found there. The lists are flat, for ``holds`` to
    # go through them without a statement for each item: it is called for each module in each forward.
    __slots__ = (
        *("_root_class", "_root_names", "_root_state", "_root_values"),
        *("_names", "_namespaces", "_values"),
        *("_classes", "_modules", "_registered", "_states"),
        *("_children", "_containers", "_covered", "_empty", "_hooked", "_seen"),
        *("is_quiet", "see_method", "stand_ins"),
    )

    def __init__(self, root: nn.Module, see_method: Callable[[type, str], Any]) -> None:
        # Held by the root, this must not hold the root's attributes in turn.
        self._root_state = id(root.__dict__)
        self._root_class = type(root)
        self._root_names: list[Any] = []
        self._root_values: list[Any] = []
        self._namespaces: list[dict] = []
        self._names: list[Any] = []
        self._values: list[Any] = []
        self._modules: list[nn.Module] = []
        self._classes: list[type] = []
        self._states: list[dict] = []
        self._registered: list[tuple] = []  # of each module, the root at last
        self._empty: list[dict] = []
        self._hooked: list[tuple[dict, ...]] = []
        self._containers: list[dict] = []
        self._children: list[dict] = []
        self._seen: set[tuple[int, Any]] = set()  # what has been looked at, by namespace and name
        self._covered: set[int] = set()  # namespaces that are looked at as a whole
        self.see_method = see_method
        self.is_quiet = True
        self.stand_ins: list[nn.Module] = []

    def see(self, namespace: dict, name: Any) -> Any:
        """A value of a namespace; None if there is none of that name."""
        value = namespace.get(name)
        # Once is enough; and all submodules of the modules in the tree are looked at together.
        if id(namespace) in self._covered or (id(namespace), name) in self._seen:
            return value
        self._seen.add((id(namespace), name))
        if id(namespace) == self._root_state:
            self._root_names.append(name)
            self._root_values.append(value)
        else:
            self._namespaces.append(namespace)
            self._names.append(name)
            self._values.append(value)
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
        """The root and all under it, down to modules that have a stand-in, which see for themselves."""
        classes: set[type] = set()
        pending = [root]
        while pending:
            module = pending.pop()
            if module is not root:
                self._see_module(module)
                self.is_quiet &= runs_own_forward(module)
                self._see_processor(module)
                if stand_in_of(module.__dict__.get("forward")) is not None:
                    self.stand_ins.append(module)
                    continue
            if type(module) not in classes:
                classes.add(type(module))
                self.is_quiet &= self._is_known(type(module), "forward")
            pending.extend(child for child in module._modules.values() if child is not None)
        self._see_registered(root)

    def _see_module(self, module: nn.Module) -> None:
        self._modules.append(module)
        self._classes.append(type(module))
        self._states.append(module.__dict__)
        self.see(module.__dict__, "forward")
        self._see_registered(module)

    def _see_registered(self, module: nn.Module) -> None:
        *hooks, modules = registered = _registries(module.__dict__)
        self._registered.append(registered)
        self._covered.add(id(modules))
        if has_hooks(module):
            self._hooked.append(tuple(hooks))
        else:
            self._empty += hooks
        if modules:
            self._containers.append(modules)
            self._children.append(dict(modules))
        else:
            self._empty.append(modules)

    def _see_processor(self, module: nn.Module) -> None:
        """What an attention's forward calls, if it is no module."""
        processor = module.__dict__.get("processor")
        if processor is not None:
            self.see(module.__dict__, "processor")
            self.is_quiet &= self._is_known(type(processor), "__call__")

    def _is_known(self, cls: type, method: str) -> bool:
        function = self.see_method(cls, method)
        writer = getattr(function, "__globals__", {}).get("__name__", "")
        return all(name.partition(".")[0] in _KNOWN_LIBRARIES for name in (writer, cls.__module__))

    def holds(self, root: nn.Module) -> bool:
        """Whether all of it is as it was."""
        state = root.__dict__
        # Where a dict of hooks or submodules is another one, but equal, the decision holds as well.
        return (
            type(root) is self._root_class
            and all(map(is_, map(state.get, self._root_names), self._root_values))
            and all(map(is_, map(dict.get, self._namespaces, self._names), self._values))
            and list(map(type, self._modules)) == self._classes
            and all(map(is_, map(state_of, self._modules), self._states))
            and (
                not self._registered
                or list(map(_registries, (*self._states, state))) == self._registered
            )
            and not any(self._empty)
            and all(map(any, self._hooked))
            and self._containers == self._children
        )


class Glance:
    """Looks as a ``Snapshot`` does, for decisions that are not kept, such as those made while torch.compile
    traces."""

    def see(self, namespace: dict, name: Any) -> Any:
        return namespace.get(name)

    def see_attribute(self, module: nn.Module, name: str) -> Any:
        return getattr(module, name, None)

    def see_method(self, cls: type, name: str) -> Any:
        return getattr(cls, name, None)

    def see_tree(self, root: nn.Module) -> None:
        """Nothing of it is kept."""


# How a part looks at its module.
Look = Union[Snapshot, Glance]
