"""What a module's forward is made of, as it was at one time, so that a look tells whether it still is.

All that can be reached from the module is looked at: submodules, their attributes, hooks, parameters' memory,
processors and adapters with what they hold, the classes of all these, and the functions that these classes'
files name. Values in parameters' memory are not: a graph reads them at each replay.
"""

from __future__ import annotations

import collections
import enum
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from ...arguments import KERNEL_DEVICE_TYPE
from ..forward_slot import StandIn, stand_in_of
from ..snapshot import state_of
from .memory import Memory, read_all
from .reasons import CannotCapture

# Libraries whose code computes the same of the same, when it is called again.
_MODEL_LIBRARIES = ("diffusers", "transformers", "peft", "torchao", "bitsandbytes")
# Whose modules look at masks' values, unless they are being captured; classes of peft are made of theirs.
_UNCAPTURED_LIBRARY = "transformers"
_KNOWN_LIBRARIES = (
    *_MODEL_LIBRARIES,
    *("torch", __name__.partition(".")[0]),
    *("builtins", "functools", "collections", "types", "enum", "typing", "dataclasses", "abc"),
)
# What these import functions of, besides: to load models, or to compute attention. Any other function that is
# found among theirs was put there by somebody.
_IMPORTED_LIBRARIES = (
    *("accelerate", "gguf", "huggingface_hub", "kernels", "safetensors", "tokenizers", "tqdm"),
    *("bs4", "cv2", "einops", "ftfy", "jinja2", "numpy", "PIL", "psutil", "regex", "requests"),
    *("scipy", "sympy", "yaml", "torchvision", "torch_npu", "torch_xla", "transformers", "triton"),
    *("aiter", "flash_attn", "flash_attn_interface", "sageattention", "xformers"),
    *("packaging", "typing_extensions"),
    # Python 3.9 does not know the names of its own ones.
    *getattr(
        sys,
        "stdlib_module_names",
        (
            *("concurrent", "contextlib", "copy", "importlib", "inspect", "itertools", "json"),
            *("logging", "multiprocessing", "operator", "os", "pathlib", "platform", "random"),
            *("re", "shutil", "tempfile", "textwrap", "threading", "traceback", "urllib"),
            *("uuid", "warnings", "weakref", "zipfile"),
        ),
    ),
)
# Of a module, what its calls do not depend on as long as it has no hooks.
_BOOKKEEPING = frozenset(
    (
        *("_is_full_backward_hook", "_non_persistent_buffers_set"),
        *("_forward_hooks_always_called", "_forward_hooks_with_kwargs"),
        *("_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks"),
        *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    )
)
# Where diffusers keeps which function attention is computed by.
_DISPATCH, _REGISTRY = "diffusers.models.attention_dispatch", "_AttentionBackendRegistry"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Of the module itself, what is around its forward. It holds what holds this, so this must not hold it.
_AROUND = frozenset(
    (
        *("forward", "_old_forward", "_hf_hook", "_diffusers_hook", *_HOOKS),
        *("_h100_diffusers_kernels_plan", "_replicate_for_data_parallel", "_compiled_call_impl"),
    )
)
_IMMUTABLE = (
    *(type(None), bool, int, float, complex, str, bytes, range, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.memory_format, torch.Size, enum.Enum),
)
_OPAQUE = (type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, weakref.ref)
_NO_PARTS = frozenset((*_IMMUTABLE, *_OPAQUE))
_FUNCTIONS = (types.FunctionType, functools._lru_cache_wrapper)
_NO_CODE = _NO_PARTS.union((dict, list, tuple, set))


class WatchedState:
    """A module and all that its forward is made of, as they are now.

    Attributes:
        tensors: its parameters and buffers, and all other tensors that were found.
        memory: that of these.

    Raises:
        CannotCapture: if there is something among it whose calls may do more than compute.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root_class = type(root)
        self._root_names: list[str] = []
        self._root_values: list[Any] = []
        self._namespaces: dict[tuple, _Namespaces] = {}  # by their names
        self._empty: list[dict] = []
        self._ordered: list[dict] = []  # whose names a forward may go through one by one
        self._ordered_names: list[Any] = []
        self._sequences: list[Any] = []
        self._items: list[tuple] = []
        self._sets: list[tuple[Any, frozenset]] = []
        self._instances: list[Any] = []
        self._classes: list[type] = []
        self._owners: list[Any] = []  # of the attributes in ``_states``
        self._states: list[dict] = []
        self._slotted: list[tuple[Any, list[str], list[Any]]] = []
        self._known_classes: set[type] = set()
        self.tensors: list[Tensor] = []
        self._libraries: list[types.ModuleType | type] = []  # whose names are looked at
        self._library_values: list[Any] = []
        self._walk(root)
        self._of_tensors = self._read_tensors()
        if self._of_tensors is None:
            raise CannotCapture("a tensor of it has no memory of its own")
        self.memory = Memory(self.tensors)

    # ----------------------------------------------------------------------------------------------
    # The look back

    def holds(self, root: nn.Module) -> bool:
        """Whether all of it is as it was."""
        return (
            all(map(is_, map(type, self._instances), self._classes))
            and all(map(is_, map(state_of, self._owners), self._states))
            # First, as to ask for a name that is gone may make it. How many there are is seen below.
            and _are_alike(
                functools.partial(chain.from_iterable, self._ordered), self._ordered_names
            )
            and all(map(_Namespaces.hold, self._namespaces.values()))
            and not any(self._empty)
            and list(map(len, self._sequences)) == list(map(len, self._items))
            and all(
                map(
                    is_equal, chain.from_iterable(self._sequences), chain.from_iterable(self._items)
                )
            )
            and all(now == then for now, then in self._sets)
            and all(_same(_slots_of(x, names), then) for x, names, then in self._slotted)
            and self._holds_root(root)
            and _same(_values_of(self._libraries), self._library_values)
            and self._read_tensors() == self._of_tensors
        )

    def _holds_root(self, root: nn.Module) -> bool:
        names, values = _around_left_out(root)
        return (
            type(root) is self._root_class
            and names == self._root_names
            and _same(values, self._root_values)
            and _hooks_of_libraries(root) is None
        )

    def _read_tensors(self) -> list[list] | None:
        return read_all(_OF_TENSORS, self.tensors)

    def restore(self, root: nn.Module) -> None:
        """Puts back what is not as it was in attributes, dictionaries and lists: of a call broken off."""
        for owner, state in zip(self._owners, self._states):
            if owner.__dict__ is not state:
                owner.__dict__ = state
        for alike in self._namespaces.values():
            for _, namespace, before in alike:
                _put_back(namespace, before)
        for namespace in self._empty:
            namespace.clear()
        now = dict(zip(*_around_left_out(root)))
        attributes = dict(zip(self._root_names, self._root_values))
        for name in now:
            if name not in attributes:
                del root.__dict__[name]
        root.__dict__.update(attributes)
        for sequence, items in zip(self._sequences, self._items):
            if isinstance(sequence, list) and not _same(sequence, list(items)):
                sequence[:] = items
        for value in self._library_values:
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()  # of tensors that were never computed

    def difference(self, root: nn.Module) -> str:
        """What is not as it was, for the log."""
        for instance, cls in zip((root, *self._instances), (self._root_class, *self._classes)):
            if type(instance) is not cls:
                return f"a {cls.__name__} became a {type(instance).__name__}"
        for place, namespace, then in chain.from_iterable(self._namespaces.values()):
            now = {name: value for name, value in namespace.items() if name not in _BOOKKEEPING}
            for name in {**then, **now}:
                if name not in then or name not in now:
                    return f"{place}.{name} is new or gone"
                if not is_equal(namespace[name], then[name]):
                    return f"{place}.{name} is another"
        for owner, state in zip(self._owners, self._states):
            if owner.__dict__ is not state:
                return f"a {type(owner).__name__} has another __dict__"
        hooks = _hooks_of_libraries(root)
        if hooks is not None:
            return f"it {hooks}"
        names_now, values_now = _around_left_out(root)
        before = dict(zip(self._root_names, self._root_values))
        for name, value in zip(names_now, values_now):
            if name not in before or not is_equal(value, before.pop(name)):
                return f"{name} is another"
        if before:
            return f"{next(iter(before))} is gone"
        if any(self._empty):
            return "a hook or a value was added"
        then_of = iter(self._library_values)
        for library in self._libraries:
            for name, value in vars(library).items():
                if next(then_of, value) is not value:
                    return f"{library.__name__}.{name} is another"
        if self._read_tensors() != self._of_tensors:
            return "parameters or buffers are elsewhere in memory"
        return "a list or set of its parts is another"

    # ----------------------------------------------------------------------------------------------
    # The walk

    def _walk(self, root: nn.Module) -> None:
        seen: set[int] = {id(root)}
        pending: list[tuple[str, Any]] = []

        def add(place: str, values: Iterable[tuple[Any, Any]]) -> None:
            for name, value in values:
                if type(value) in _NO_PARTS or id(value) in seen:
                    continue
                if not isinstance(value, (*_IMMUTABLE, *_OPAQUE)):
                    seen.add(id(value))
                    pending.append((f"{place}.{name}" if place else str(name), value))

        self._root_names, self._root_values = _around_left_out(root)
        _refuse_hooks_of_libraries("it", root)
        self._see_class("it", type(root))
        self._instances, self._classes = [], [type(root)]
        add("", zip(self._root_names, self._root_values))
        while pending:
            place, value = pending.pop()
            add(place, self._see(place, value))
        self._classes, classes = self._classes[1:], list(dict.fromkeys(self._classes))
        self._libraries = list(_libraries_of(classes))
        self._library_values = list(_values_of(self._libraries))
        _refuse_replaced_functions(self._libraries)
        registry = getattr(sys.modules.get(_DISPATCH), _REGISTRY, None)
        for name, value in vars(registry).items() if registry is not None else ():
            if isinstance(value, dict):
                self._namespace(f"{_REGISTRY}.{name}", value)

    def _see(self, place: str, value: Any) -> Iterable[tuple[Any, Any]]:
        """Keeps what a value is, and returns what it consists of."""
        if isinstance(value, Tensor):
            return self._see_tensor(place, value)
        if isinstance(value, nn.Module):
            return self._see_module(place, value)
        if isinstance(value, dict):
            return self._see_namespace(place, value)
        if isinstance(value, (list, tuple, collections.deque)):
            self._sequences.append(value)
            self._items.append(tuple(value))
            return enumerate(value)
        if isinstance(value, (set, frozenset)):
            self._sets.append((value, frozenset(value)))
            return ()
        if isinstance(value, _FUNCTIONS):
            function = inspect.unwrap(value)
            for writer in (value, function):
                _refuse_unknown(place, getattr(writer, "__module__", None))
                _refuse_unknown(place, getattr(writer, "__globals__", {}).get("__name__"))
            return ()
        if isinstance(value, types.MethodType):
            return self._see_method(place, value)
        if isinstance(value, functools.partial):
            return (("func", value.func), ("args", value.args), ("keywords", value.keywords))
        if isinstance(value, StandIn):
            return ()
        return self._see_instance(place, value)

    def _see_tensor(self, place: str, tensor: Tensor) -> Iterable[tuple[Any, Any]]:
        if hasattr(tensor, "__tensor_flatten__"):
            self._see_class(place, type(tensor))
            names, _ = tensor.__tensor_flatten__()
            attributes = vars(tensor)
            self._namespace(place, attributes)
            return [(name, getattr(tensor, name)) for name in names]
        if tensor.device.type != KERNEL_DEVICE_TYPE and isinstance(tensor, nn.Parameter):
            raise CannotCapture(f"{place} is on {tensor.device.type}")
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise CannotCapture(f"{place} is not plain values in memory")
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
            self._see_class(place, type(tensor))
            self._namespace(place, vars(tensor))
        self.tensors.append(tensor)
        return ()

    def _see_module(self, place: str, module: nn.Module) -> Iterable[tuple[Any, Any]]:
        state = module.__dict__
        _refuse_hooks_of_libraries(place, module)
        self._see_hooks(place, module)
        forward = state.get("forward")
        if forward is not None and stand_in_of(forward) is None:
            function = getattr(forward, "__func__", None)
            if function is not type(module).forward:
                raise CannotCapture(f"the forward of {place} was replaced or wrapped")
        if state.get("_compiled_call_impl") is not None or hasattr(module, "_orig_mod"):
            raise CannotCapture(f"{place} is compiled")
        self._see_class(place, type(module))
        self._instances.append(module)
        self._classes.append(type(module))
        self._owners.append(module)
        self._states.append(state)
        self._namespace(place, state, _BOOKKEEPING)
        left_out = _BOOKKEEPING.union(_HOOKS)
        return [(name, value) for name, value in state.items() if name not in left_out]

    def _see_hooks(self, place: str, module: nn.Module) -> None:
        state = module.__dict__
        for name in _HOOKS:
            if state[name]:
                raise CannotCapture(f"{place} has hooks")
            self._empty.append(state[name])

    def _see_namespace(self, place: str, namespace: dict) -> Iterable[tuple[Any, Any]]:
        if not namespace:
            self._empty.append(namespace)
            return ()
        self._namespace(place, namespace)
        self._ordered.append(namespace)
        self._ordered_names.extend(namespace)
        return namespace.items()

    def _see_method(self, place: str, method: Any) -> Iterable[tuple[Any, Any]]:
        if stand_in_of(method) is not None:
            return ()
        _refuse_unknown(place, getattr(method.__func__, "__module__", None))
        return (("__self__", method.__self__),)

    def _see_instance(self, place: str, value: Any) -> Iterable[tuple[Any, Any]]:
        """One of any other class: what it holds in its attributes."""
        if callable(value):
            self._see_class(place, type(value))
        self._instances.append(value)
        self._classes.append(type(value))
        found: list[tuple[str, Any]] = []
        names = _names_of_slots(type(value))
        if names:
            values = _slots_of(value, names)
            self._slotted.append((value, names, values))
            found += zip(names, values)
        state = getattr(value, "__dict__", None)
        if isinstance(state, dict):
            self._owners.append(value)
            self._states.append(state)
            self._namespace(place, state)
            found += state.items()
        return found

    def _see_class(self, place: str, cls: type) -> None:
        if cls in self._known_classes:
            return
        if cls.__module__.partition(".")[0] == _UNCAPTURED_LIBRARY and issubclass(cls, nn.Module):
            raise CannotCapture(f"{place} is of {_UNCAPTURED_LIBRARY}, which decides on values")
        if issubclass(cls, (nn.MultiheadAttention, nn.TransformerEncoderLayer)):
            raise CannotCapture(f"{place} computes in another way while it is captured")
        for base in cls.__mro__:
            _refuse_unknown(place, base.__module__)
        # What it calls may have been put into a class by others.
        for name in ("forward", "__call__"):
            function = getattr(cls, name, None)
            if isinstance(function, types.FunctionType):
                _refuse_unknown(place, function.__globals__.get("__name__"))
        self._known_classes.add(cls)

    def _namespace(self, place: str, namespace: dict, left_out: frozenset = frozenset()) -> None:
        names = tuple([name for name in namespace if name not in left_out])
        alike = self._namespaces.get(names)
        if alike is None:
            alike = self._namespaces[names] = _Namespaces(names)
        alike.add(place, namespace)


class _Namespaces:
    """Dictionaries with the same names that are looked at, and the values that these had.

    There are some thousands with some ten thousand values: no Python code runs for each of them.
    """

    def __init__(self, names: tuple) -> None:
        self._names = names
        self._get: Callable[[dict], Any] = itemgetter(*names) if names else lambda namespace: ()
        self._places: list[str] = []  # for the log
        self._namespaces: list[dict] = []
        self._sizes: list[int] = []
        self._values: list[Any] = []  # one namespace's after the other's

    def add(self, place: str, namespace: dict) -> None:
        self._places.append(place)
        self._namespaces.append(namespace)
        self._sizes.append(len(namespace))
        self._values.extend([namespace[name] for name in self._names])

    def hold(self) -> bool:
        """Whether all have the names and the values that they had."""
        if list(map(len, self._namespaces)) != self._sizes:
            return False
        try:
            return _are_alike(self._now, self._values)
        except KeyError:
            return False

    def _now(self) -> Iterator[Any]:
        found = map(self._get, self._namespaces)
        return found if len(self._names) == 1 else chain.from_iterable(found)

    def __iter__(self) -> Iterator[tuple[str, dict, dict]]:
        """Where each namespace is, what it is, and what it was."""
        values = iter(self._values)
        for place, namespace in zip(self._places, self._namespaces):
            yield place, namespace, dict(zip(self._names, values))


def _are_alike(now: Callable[[], Iterable[Any]], then: list[Any]) -> bool:
    """Whether these are the values of before. Nearly always they are the very same, which is asked first."""
    return all(map(is_, now(), then)) or all(map(is_equal, now(), then))


def _same(now: Iterable[Any], then: list[Any]) -> bool:
    """Whether these are the values of before, and as many."""
    now = list(now)
    return len(now) == len(then) and _are_alike(lambda: now, then)


def _names_of_slots(cls: type) -> list[str]:
    return [
        name
        for base in cls.__mro__
        if "__slots__" in vars(base)
        for name, descriptor in vars(base).items()
        if isinstance(descriptor, types.MemberDescriptorType)
    ]


def _slots_of(instance: Any, names: list[str]) -> list[Any]:
    return [getattr(instance, name, None) for name in names]


_attributes: Any = vars(torch._C.TensorBase)
_OF_TENSORS = (
    *(Tensor.data_ptr, Tensor.stride, Tensor.size),
    *(_attributes["dtype"].__get__, _attributes["requires_grad"].__get__),
)


def is_equal(a: Any, b: Any) -> bool:
    """Whether two values are one, or cannot be told apart."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, torch.Size)):
        return len(a) == len(b) and all(map(is_equal, a, b))
    if isinstance(a, float):
        return a.hex() == b.hex()
    if isinstance(a, types.MethodType):
        return a.__func__ is b.__func__ and a.__self__ is b.__self__
    return isinstance(a, _IMMUTABLE) and bool(a == b)


def _put_back(namespace: dict, before: dict) -> None:
    # Not by methods of its own, which may refuse it; but an ordered one knows its names a second time.
    kind: Any = collections.OrderedDict if isinstance(namespace, collections.OrderedDict) else dict
    for name in [name for name in namespace if name not in before and name not in _BOOKKEEPING]:
        kind.__delitem__(namespace, name)
    for name, value in before.items():
        if namespace.get(name, namespace) is not value:
            kind.__setitem__(namespace, name, value)


def _around_left_out(root: nn.Module) -> tuple[list[str], list[Any]]:
    """The module's own attributes, without those that are about what is around its forward."""
    state = root.__dict__
    names = [name for name in state if name not in _AROUND and name not in _BOOKKEEPING]
    return names, [state[name] for name in names]


def _hooks_of_libraries(module: nn.Module) -> str | None:
    """What accelerate or diffusers put around the module, as a clause that begins with a verb."""
    if "_hf_hook" in module.__dict__:
        return "is offloaded, or on a device by hooks"
    names = getattr(module.__dict__.get("_diffusers_hook"), "hooks", None)
    return f"has hooks of diffusers: {', '.join(names)}" if names else None


def _refuse_hooks_of_libraries(place: str, module: nn.Module) -> None:
    hooks = _hooks_of_libraries(module)
    if hooks is not None:
        raise CannotCapture(f"{place} {hooks}")


def _refuse_unknown(place: str, module_name: str | None) -> None:
    if module_name is not None and module_name.partition(".")[0] not in _KNOWN_LIBRARIES:
        raise CannotCapture(f"{place} runs code of {module_name}, which may do more than compute")


def _refuse_replaced_functions(libraries: Iterable[types.ModuleType | type]) -> None:
    """Functions of others in the place of a library's own."""
    of_libraries: set[Any] = {None, *_IMPORTED_LIBRARIES}
    for library in libraries:
        for name, value in vars(library).items():
            if type(value) in _NO_CODE:
                continue
            for writer in _writers_of(value):
                if writer is not None and writer not in of_libraries:
                    root = writer.partition(".")[0]
                    if writer == "unittest.mock" or root not in _IMPORTED_LIBRARIES:
                        _refuse_unknown(f"{library.__name__}.{name}", writer)
                    of_libraries.add(writer)


def _writers_of(value: Any) -> Iterable[str | None]:
    """The modules that the code of a function, or of what can be called like one, is of."""
    while type(value) is not types.FunctionType:  # what one is wrapped in
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            value = value.__func__
        elif isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, functools._lru_cache_wrapper):
            value = value.__wrapped__
        else:
            is_one = callable(value) and not isinstance(value, type)
            return (type(value).__module__,) if is_one else ()
    # A decorator's may have taken the name of what it is around.
    return (value.__module__, value.__globals__.get("__name__"))


def _libraries_of(classes: Iterable[type]) -> Iterator[types.ModuleType | type]:
    """Classes, and modules of functions, whose names decide on what runs: what somebody puts in the place of
    a function or a method is found there."""
    bases = dict.fromkeys(base for cls in classes for base in cls.__mro__ if base is not object)
    yield from bases
    files = {base.__module__ for base in bases} - {"builtins"}
    for name in tuple(files):
        for value in getattr(sys.modules.get(name), "__dict__", {}).values():
            of = getattr(value, "__module__", None)
            is_code = isinstance(value, (type, *_FUNCTIONS))
            if is_code and isinstance(of, str) and of.partition(".")[0] in _MODEL_LIBRARIES:
                files.add(of)
    for name in sorted(files | {"torch", "torch.nn.functional", "torch._C._nn"}):
        if name in sys.modules:
            yield sys.modules[name]
    registry = getattr(sys.modules.get(_DISPATCH), _REGISTRY, None)
    if registry is not None:
        yield registry
    yield Tensor


def _values_of(libraries: Iterable[Any]) -> Iterator[Any]:
    return chain.from_iterable(vars(library).values() for library in libraries)
