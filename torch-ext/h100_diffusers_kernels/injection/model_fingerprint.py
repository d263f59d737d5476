"""What a model's forward depends on besides its arguments, compared before a CUDA graph's result is used.

The comparison runs over some ten thousand values, so no Python code runs for each of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import is_, itemgetter
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .checks import has_own_forward
from .patch import stand_in_of


class CannotCapture(Exception):
    """A call, or the model, cannot be captured; ``reason`` is a clause."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


# Levels of containers and objects that are looked into, from a module's attributes on.
_DEPTH = 2
_PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_CONSTANTS = (type(None), int, float, str, complex, torch.dtype, torch.device, MethodType)
_NO_CONTAINERS = (type, ModuleType, nn.Module, torch.Generator)
_PARTS = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Attributes that are not compared: what every module has, and what forwards of PyTorch do not read.
_NOT_COMPARED = frozenset(vars(nn.Module())) - {"training"} | {"in_features", "out_features"}
# Of the model itself: what is around its forward. These hold the model, so they must not be held here.
_AROUND = ("forward", "_old_forward", "_hf_hook", "_diffusers_hook", "_h100_diffusers_kernels")
_DISPATCH, _REGISTRY = "diffusers.models.attention_dispatch", "_AttentionBackendRegistry"


class Addresses:
    """Where tensors are in memory."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._then = list(map(Tensor.data_ptr, tensors))

    def hold(self) -> bool:
        return list(map(Tensor.data_ptr, self._tensors)) == self._then


class Fingerprint:
    """A model as it is now: modules, attributes, weights' addresses, functions and classes.

    Attributes:
        tensors: the parameters, buffers and other tensors that were found.
        addresses: those of these tensors.

    Raises:
        CannotCapture: if the model has a part whose calls may do more than compute.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tensors: list[Tensor] = []
        self._seen: set[int] = set()
        self._objects: list[Any] = []
        self._classes: list[type] = []
        self._empty: list[dict] = []
        self._views: list[Any] = []  # lists, tuples, and dictionaries' values
        self._items: list[Any] = []
        # By names: how these are read of a dictionary, the dictionaries, and the values that they had.
        self._namespaces: dict[tuple, tuple[Callable, list[Any], list[Any]]] = {}
        self._sized: list[Any] = []
        self._model_attributes = _attributes_of(model, _AROUND)
        self._model_class = type(model)
        for name, module in model.named_modules():
            self._add_module(name or "it", module, model)
        self._add_code([type(model), *self._classes])
        self._seen.clear()
        self._sizes = list(map(len, self._sized))
        try:
            self.addresses = Addresses(self.tensors)
        except RuntimeError:
            raise CannotCapture("a tensor of it has no memory of its own") from None

    def change(self, model: nn.Module) -> str | None:
        """What is not as it was, as a clause; None if nothing is."""
        if not self.addresses.hold():
            return "parameters or buffers are elsewhere in memory"
        if (
            type(model) is not self._model_class
            or _is_hooked(model)
            or any(self._empty)
            or list(map(len, self._sized)) != self._sizes
            or not all(map(is_, map(type, self._objects), self._classes))
        ):
            return "a module, a hook or an adapter was added, replaced or removed"
        attributes = _attributes_of(model, _AROUND)
        then = self._model_attributes
        if attributes.keys() != then.keys() or not all(
            map(_is_equal, attributes.values(), then.values())
        ):
            return "an attribute of the model is another"
        if not _hold(lambda: chain.from_iterable(self._views), self._items):
            return "a parameter, or an item of a dictionary or list, is another"
        try:
            if all(map(_hold_names, self._namespaces.values())):
                return None
        except KeyError:
            pass
        return "an attribute or a function is another"

    def _add_module(self, name: str, module: nn.Module, model: nn.Module) -> None:
        state = vars(module)
        is_model = module is model
        is_wrapped = not (is_model or stand_in_of(state.get("forward")) or has_own_forward(module))
        if is_wrapped or _is_hooked(module):
            raise CannotCapture(
                f"{name} has hooks of accelerate or diffusers, or a forward that was replaced"
            )
        if state.get("_compiled_call_impl") is not None or "_orig_mod" in module._modules:
            raise CannotCapture(f"{name} is compiled")
        if not is_model:
            if any(state[hooks] for hooks in _HOOKS):
                raise CannotCapture(f"{name} has hooks")
            self._objects.append(module)
            self._classes.append(type(module))
            self._empty += [state[hooks] for hooks in _HOOKS]
            self._sized.append(state)
            self._add_names(state, tuple(_attributes_of(module)), _DEPTH)
        else:
            for value in self._model_attributes.values():
                self._look_into(value, _DEPTH)
        for part in _PARTS:
            self._look_into(state[part], 1)

    def _add_names(self, namespace: Any, names: tuple, depth: int) -> None:
        """Adds some values of a dictionary, and what they consist of."""
        if not names:
            return
        _, namespaces, values = self._namespaces.setdefault(names, (itemgetter(*names), [], []))
        namespaces.append(namespace)
        values += [namespace[name] for name in names]
        for name in names:
            self._look_into(namespace[name], depth)

    def _look_into(self, value: Any, depth: int) -> None:
        if isinstance(value, _CONSTANTS) or id(value) in self._seen:
            return
        if type(value) in _PLAIN_TENSORS:
            self.tensors.append(value)
        elif isinstance(value, Tensor):  # quantized: the values are attributes of it
            depth = _DEPTH
        elif depth == 0 or isinstance(value, _NO_CONTAINERS) or stand_in_of(value) is not None:
            return
        self._seen.add(id(value))
        if isinstance(value, (dict, list, tuple)):
            self._add_items(value, depth - 1)
        elif type(value) not in _PLAIN_TENSORS and not hasattr(value, "__code__"):
            attributes = getattr(value, "__dict__", None)
            self._objects.append(value)
            self._classes.append(type(value))
            if isinstance(attributes, dict):
                self._add_items(attributes, depth - 1)

    def _add_items(self, container: Any, depth: int) -> None:
        view = container.values() if isinstance(container, dict) else container
        if not view and isinstance(container, dict):
            self._empty.append(container)
            return
        self._views.append(view)
        self._sized.append(view)
        self._items += view
        for value in view:
            self._look_into(value, depth)

    def _add_code(self, classes: Iterable[type]) -> None:
        """Adds the functions of classes, and those that the classes' files and PyTorch name."""
        bases = dict.fromkeys(base for cls in classes for base in cls.__mro__ if base is not object)
        files = dict.fromkeys(sys.modules.get(base.__module__) for base in bases)
        for namespace in (*bases, *files, nn.functional):
            if namespace is not None and namespace is not sys.modules["builtins"]:
                functions = {n: v for n, v in vars(namespace).items() if callable(v)}
                self._add_names(vars(namespace), tuple(functions), 0)
        registry = getattr(sys.modules.get(_DISPATCH), _REGISTRY, None)
        if registry is not None:  # of attention backends
            self._add_names(vars(registry), tuple(vars(registry)), 1)


def _is_hooked(module: nn.Module) -> bool:
    """Whether accelerate or diffusers have put hooks around its forward."""
    state = vars(module)
    return "_hf_hook" in state or bool(getattr(state.get("_diffusers_hook"), "hooks", None))


def _attributes_of(module: nn.Module, left_out: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _NOT_COMPARED and name not in left_out
    }


def _hold_names(group: tuple[Callable, list[Any], list[Any]]) -> bool:
    read, namespaces, values = group
    if len(values) == len(namespaces):  # of a single name, itemgetter gives no tuple
        return _hold(lambda: map(read, namespaces), values)
    return _hold(lambda: chain.from_iterable(map(read, namespaces)), values)


def _hold(read: Callable[[], Iterator[Any]], then: list[Any]) -> bool:
    """Whether the values are those of before. Equal ones take their place, so that the next look is quick."""
    if all(map(is_, read(), then)):
        return True
    now = list(read())
    if not all(map(_is_equal, now, then)):
        return False
    then[:] = now
    return True


def _is_equal(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, _CONSTANTS) and bool(a == b))
