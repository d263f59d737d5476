"""The fingerprint of a model: all dependencies of its forward except arguments, compared at each replay.

The comparison covers some ten thousand values, so no Python code runs for each of them.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import is_, itemgetter
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..core.checks import find_class, has_hooks, runs_class_forward
from ..core.patch import class_forward_slot, is_wrapped, placed, stand_in_of


class CannotCapture(Exception):
    """A call, or the model, cannot be captured; the message is a clause."""


# The levels of containers and objects that are compared, below a module's attributes.
_DEPTH = 2
_PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_CONSTANTS = (type(None), int, float, str, complex, torch.dtype, torch.device, MethodType)
_NO_CONTAINERS = (type, ModuleType, nn.Module, torch.Generator)
_PARTS = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Attributes that are not compared: those of every module, and those that PyTorch's forwards do not read.
_NOT_COMPARED = vars(nn.Module()).keys() - {"training"} | {"in_features", "out_features"}
# Attributes of the model itself that wrap its forward. They are not stored, because they reference the model.
_AROUND = {"forward", "_old_forward", "_hf_hook", "_diffusers_hook", "_h100_diffusers_kernels"}
# The module of the hooks by which transformers returns hidden states. They only collect outputs.
_RECORDING = "transformers.utils.output_capturing"
# diffusers' hooks that split and gather tokens, and the module that wraps forwards in hooks.
_SPLIT_HOOKS = [
    f"diffusers.hooks.context_parallel:ContextParallel{name}Hook" for name in ("Split", "Gather")
]
_WRAPPING = "diffusers.hooks.hooks"
_DISPATCH, _REGISTRY = "diffusers.models.attention_dispatch", "_AttentionBackendRegistry"


class Addresses:
    """The addresses of tensors."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._then = list(map(Tensor.data_ptr, tensors))

    def hold(self) -> bool:
        return list(map(Tensor.data_ptr, self._tensors)) == self._then


class Fingerprint:
    """A snapshot of a model: modules, attributes, weights' addresses, functions and classes.

    Attributes:
        tensors: the parameters, buffers and other tensors found.
        addresses: their addresses.

    Raises:
        CannotCapture: if a module's call may do more than compute.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tensors: list[Tensor] = []
        self._seen: set[int] = set()
        self._objects: list[Any] = []  # their classes are compared
        self._quantized: list[Tensor] = []  # torch.utils.swap_tensors exchanges their dictionaries
        self._states: list[dict] = []  # of modules
        self._empty: list[dict] = []
        self._views: list[Any] = []  # lists, tuples, and dictionaries' values
        # Dictionaries in which the values of some names are compared, by these names.
        self._named: dict[tuple[str, ...], list[Any]] = {}
        for name, module in model.named_modules():
            is_model = module is model
            if _is_wrapped(module, is_model):
                reason = "has hooks or another forward than its class's, or is compiled"
                raise CannotCapture(f"{name or 'it'} {reason}")
            self._add_module(module, is_model)
        self._add_functions({type(model), *map(type, self._objects)})
        del self._seen
        self._sizes = self._current_sizes()
        self._values = list(self._current_values(model))
        try:
            self.addresses = Addresses(self.tensors)
        except RuntimeError:
            raise CannotCapture("one of its tensors has no storage") from None

    def change(self, model: nn.Module) -> str | None:
        """The first change found, except addresses, as a clause, or None."""
        is_same_size = self._current_sizes() == self._sizes and not any(self._empty)
        if not is_same_size or _is_wrapped(model, is_model=True):
            return "a module, a hook or an adapter was added or removed"
        try:
            if all(map(is_, self._current_values(model), self._values)):
                return None
            values = list(self._current_values(model))
        except KeyError:  # a name was removed
            values = []
        if len(values) != len(self._values) or not all(map(_is_equal, values, self._values)):
            return "a module, an attribute or a function was replaced"
        self._values = values  # so that the next comparison is fast
        return None

    def _current_sizes(self) -> list[int]:
        return [*map(len, self._states), *map(len, self._views)]

    def _current_values(self, model: nn.Module) -> Iterator[Any]:
        attributes = _attributes_of(model, is_model=True)
        named = [map(itemgetter(*names), each) for names, each in self._named.items()]
        of_model = [type(model), *attributes, *attributes.values()]
        classes = map(type, self._objects)
        dictionaries = map(vars, self._quantized)
        return chain.from_iterable(chain([of_model, classes, dictionaries], self._views, *named))

    def _add_module(self, module: nn.Module, is_model: bool) -> None:
        state, attributes = vars(module), _attributes_of(module, is_model)
        for name in _PARTS if is_model else (*_PARTS, *_HOOKS):
            self._look_into(state[name], 1)
        for value in attributes.values():
            self._look_into(value, _DEPTH)
        if not is_model:
            self._objects.append(module)
            self._states.append(state)
            self._add_names(state, attributes)

    def _add_names(self, namespace: Any, names: Iterable[str]) -> None:
        """Adds the values of some names of a dictionary."""
        key = tuple(names)
        if key:  # for a single name itemgetter returns no tuple
            self._named.setdefault(key if len(key) > 1 else key * 2, []).append(namespace)

    def _look_into(self, value: Any, depth: int) -> None:
        if isinstance(value, _CONSTANTS) or id(value) in self._seen:
            return
        is_plain = type(value) in _PLAIN_TENSORS
        if is_plain:
            self.tensors.append(value)
        elif isinstance(value, Tensor):  # quantized: its values are attributes
            self._quantized.append(value)
            depth = _DEPTH
        elif depth == 0 or isinstance(value, _NO_CONTAINERS) or stand_in_of(value) is not None:
            return
        self._seen.add(id(value))
        if isinstance(value, (dict, list, tuple)):
            self._add_items(value, depth - 1)
        elif not is_plain and not hasattr(value, "__code__"):
            self._objects.append(value)
            attributes = getattr(value, "__dict__", None)
            if isinstance(attributes, dict):
                self._add_items(attributes, depth - 1)

    def _add_items(self, container: Any, depth: int) -> None:
        is_dict = isinstance(container, dict)
        if is_dict and not container:
            self._empty.append(container)
            return
        view = container.values() if is_dict else container
        self._views.append(view)
        for value in view:
            self._look_into(value, depth)

    def _add_functions(self, classes: set[type]) -> None:
        """Adds the functions of classes, of the classes' files and of ``torch.nn.functional``."""
        bases = {base for cls in classes for base in cls.__mro__}
        files = {sys.modules.get(base.__module__) for base in bases}
        for namespace in {*bases, *files, nn.functional} - {builtins, None}:
            values = vars(namespace)
            self._add_names(values, [name for name in values if callable(values[name])])
        registry = getattr(sys.modules.get(_DISPATCH), _REGISTRY, None)
        if registry is not None:  # of attention backends
            self._add_names(vars(registry), vars(registry))
            for value in vars(registry).values():
                self._look_into(value, 1)


def _is_wrapped(module: nn.Module, is_model: bool) -> bool:
    """Whether a call of the module may run more than its forward. PyTorch's hooks on the model itself, and
    wrappers of its forward, also run at each replay."""
    state = vars(module)
    hooks = getattr(state.get("_diffusers_hook"), "hooks", None) or {}
    splits = tuple(map(find_class, _SPLIT_HOOKS))
    return (
        "_hf_hook" in state
        or any(type(hook) not in splits for hook in hooks.values())
        or state.get("_compiled_call_impl") is not None
        or "_orig_mod" in module._modules
        or (
            not is_model
            and is_wrapped(module)
            and not _is_only_recorded(module)
            and not (hooks and _is_only_split(module))
        )
    )


def _is_only_split(module: nn.Module) -> bool:
    """Whether a module with diffusers' hooks has no other wrappers. A capture has the hooks' collectives."""
    wrapper = getattr(vars(module).get("forward"), "func", None)
    is_known = class_forward_slot(module) is not None or any(placed([module]))
    return not has_hooks(module) and getattr(wrapper, "__module__", None) == _WRAPPING and is_known


def _is_only_recorded(module: nn.Module) -> bool:
    hooks, *others = (vars(module)[name] for name in _HOOKS)
    are_recorders = all(getattr(h, "__module__", None) == _RECORDING for h in hooks.values())
    return are_recorders and not any(others) and runs_class_forward(module)


def _attributes_of(module: nn.Module, is_model: bool) -> dict[str, Any]:
    left_out = _NOT_COMPARED | _AROUND if is_model else _NOT_COMPARED
    return {name: value for name, value in vars(module).items() if name not in left_out}


def _is_equal(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, _CONSTANTS) and bool(a == b))
