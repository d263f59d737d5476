"""Guards: whether a module or a function is exactly what its library defines, checked where it is used.

Results are not cached. Classes and functions are looked up once, as their libraries define them; each check
compares a module, or a name of a library, with them.

- stock: a call of a module runs only its library's code (``is_stock``);
- bare: its call runs a stand-in, without hooks or wrappers (``patch.bare_stand_in``);
- wrapped: it has hooks or wrappers around its forward (``patch.is_wrapped``);
- plain: a tensor is PyTorch's own class (``conditions.is_plain_tensor``);
- native: PyTorch, or this package by the user's choice, is the attention backend (``decision.is_native``).
"""

from __future__ import annotations

import inspect
import sys
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ...operations.conditions import an

_modules = torch.nn.modules.module
GLOBAL_HOOKS = (
    _modules._global_forward_hooks,
    _modules._global_forward_pre_hooks,
    _modules._global_backward_hooks,
    _modules._global_backward_pre_hooks,
)
_Module: Any = nn.Module
# PyTorch's own call of a module, which a debugger or profiler may have patched.
MODULE_CALL, CALL_IMPL = _Module._wrapped_call_impl, _modules.Module._call_impl
# Modes that do not change results: torch.set_default_device, and modes that only observe.
TRANSPARENT_MODES: set[type] = {DeviceContext}
# Modules of PyTorch's tracers, under which the kernels run.
_TRACERS = ("torch._subclasses", "torch._export", "torch._functorch", "torch.export", "torch.fx")
# The classes of this package's replacements of forwards.
STAND_INS: set[type] = set()
_known: list[Any] = []
_tables: list[Any] = []


def find_class(path: str) -> type | None:
    """The class ``module:name``, if its module is loaded."""
    module, _, name = path.partition(":")
    return getattr(sys.modules.get(module), name, None)


class KnownFunction:
    """A function ``module:name`` or ``module:class.name`` as its library defines it.

    Attributes:
        owner: its module or class.
        name: its name there.
        function: the function; None if it is not loaded or its parameters are not ``parameters`` (names in
            order; None for any): another version of the library may compute something different.
    """

    __slots__ = ("_parameters", "_path", "function", "name", "owner")

    def __init__(self, path: str, parameters: str | None = None) -> None:
        self._path = path
        self._parameters = parameters
        self.owner: Any = None
        self.function: Any = None
        self.look_up()
        _known.append(self)

    def look_up(self) -> None:
        if self.function is not None:
            return
        module_name, _, qualified_name = self._path.partition(":")
        class_name_, _, self.name = qualified_name.rpartition(".")
        owner: Any = sys.modules.get(module_name)
        if class_name_:
            owner = getattr(owner, class_name_, None)
        function: Any = vars(owner).get(self.name) if owner is not None else None
        if isinstance(function, staticmethod):
            function = function.__func__
        if _is_written_by(module_name.partition(".")[0], function, self.name) and (
            self._parameters is None
            or " ".join(inspect.signature(function).parameters) == self._parameters
        ):
            self.owner, self.function = owner, function


def _is_written_by(library: str, function: Any, name: str) -> bool:
    if getattr(function, "__name__", None) != name:
        return False
    module_globals = getattr(function, "__globals__", None)
    if module_globals is None:  # one of Torch's compiled functions
        namespaces: tuple[Any, ...] = (torch._C._nn, torch._C._VariableFunctions)
        return any(function is getattr(namespace, name, None) for namespace in namespaces)
    return module_globals["__name__"].partition(".")[0] == library


def replaced_function(functions: tuple[KnownFunction, ...]) -> str | None:
    """Why the kernels cannot replace these functions: one of them is no longer the library's."""
    for known in functions:
        function = known.function
        if function is None or getattr(known.owner, known.name, None) is not function:
            return f"{known.name} was replaced"
    return None


class KnownClass:
    """A class, without its subclasses, whose forward the kernels know.

    Attributes:
        cls: the class; None until its module is loaded.
        own_forward: its forward as the library defines it.
        functions: functions that it calls by names that users may replace; each given as its path, or as
            path and parameters.
        calls: their owner, name and function.
    """

    __slots__ = ("_own_forward", "_path", "calls", "cls", "functions", "own_forward")

    def __init__(self, path: str, *functions: Any, parameters: str | None = None) -> None:
        self._path = path
        self.cls: Any = None
        self._own_forward = KnownFunction(f"{path}.forward", parameters)
        paths = ((f,) if isinstance(f, str) else f for f in functions)
        self.functions = tuple([KnownFunction(*path) for path in paths])
        self.look_up()
        _known.append(self)

    def look_up(self) -> None:
        self.cls = self.cls or find_class(self._path)
        self.own_forward: Any = self._own_forward.function
        self.calls = tuple([(each.owner, each.name, each.function) for each in self.functions])


class KnownClasses:
    """A table of known classes: ``by_class`` has for each loaded one its ``KnownClass`` and what else was
    added with it."""

    def __init__(self, *entries: tuple[Any, ...]) -> None:
        self._entries: list[tuple[Any, ...]] = []
        self.by_class: dict[type, Any] = {}
        _tables.append(self)
        for entry in entries:
            self.add(*entry)

    def add(self, known: KnownClass, *others: Any) -> None:
        self._entries.append((known, *others))
        self.look_up()

    def look_up(self) -> None:
        for entry in self._entries:
            if entry[0].cls is not None:
                self.by_class[entry[0].cls] = entry


def look_up_libraries() -> None:
    """Looks up libraries that were loaded later. Earlier results stay, even if users replaced a function."""
    for each in (*_known, *_tables):
        each.look_up()


def is_stock(module: Any, known: KnownClass, *others: Any) -> bool:
    """Whether a call of each module runs only its library's code: it has exactly this class, no hooks, no
    forward of its own, and no function that it calls was replaced."""
    cls = known.cls
    if (
        type(module) is not cls
        or cls.forward is not known.own_forward
        or cls.__call__ is not _Module.__call__
    ):
        return False
    for owner, name, function in known.calls:
        if getattr(owner, name, None) is not function:
            return False
    for each in (module, *others) if others else (module,):
        if type(each) is not cls:
            return False
        state = each.__dict__
        if (  # ``has_hooks``, inlined: blocks ask this of each of their modules
            state["_forward_hooks"]
            or state["_forward_pre_hooks"]
            or state["_backward_hooks"]
            or state["_backward_pre_hooks"]
            or ("_compiled_call_impl" in state and state["_compiled_call_impl"] is not None)
        ):
            return False
        if "forward" in state and state["forward"] is not None:
            bound: Any = getattr(state["forward"], "__self__", None)
            if type(bound) in STAND_INS:  # ``runs_class_forward``, inlined
                if bound.module() is not each:
                    return False
            elif not runs_class_forward(each):
                return False
    return True


def runs_class_forward(module: nn.Module) -> bool:
    """Whether a call runs the class's forward, which removed hooks may have left on the instance, or a
    stand-in, which computes the same."""
    forward = module.__dict__.get("forward")
    if type(forward) is not MethodType:
        return forward is None
    owner: Any = forward.__self__
    if type(owner) in STAND_INS:
        return owner.module() is module
    return owner is module and forward.__func__ is type(module).forward


def has_hooks(module: nn.Module) -> bool:
    """Whether the module has hooks or a compiled call."""
    state = module.__dict__
    return bool(
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or state.get("_compiled_call_impl") is not None
    )


def why_not_stock(module: Any, known: KnownClass) -> str:
    """Why ``is_stock`` is false, as a clause."""
    if type(module) is not known.cls:
        return f"is {an(class_name(module))}"
    reason = replaced_function(known.functions)
    if known.cls.forward is not known.own_forward or known.cls.__call__ is not _Module.__call__:
        reason = f"{known.cls.__name__}'s forward or __call__ was replaced"
    if reason is not None:
        return f"is {an(class_name(module))}, and {reason}"
    return "has hooks or another forward than its class's"


def why_intercepted() -> str | None:
    """Why the model's own code has to run: something intercepts all calls of modules or functions."""
    if any(GLOBAL_HOOKS):
        return "hooks are registered for all modules"
    for function, own in ((_Module.__call__, MODULE_CALL), (_Module._call_impl, CALL_IMPL)):
        # PyTorch's tracers also replace it.
        writer = getattr(function, "__globals__", {}).get("__name__", "")
        if function is not own and not writer.startswith(_TRACERS):
            return "torch.nn.Module.__call__ was replaced"
    for mode in _get_current_function_mode_stack() + _get_current_dispatch_mode_stack():
        cls = type(mode)
        if cls not in TRANSPARENT_MODES and not cls.__module__.startswith(_TRACERS):
            return f"it runs within {an(cls.__name__)}"
    return None


def why_unsupported() -> str | None:
    """Why no model is injected: the diffusers that is loaded is too old."""
    version = getattr(sys.modules.get("diffusers"), "__version__", None)
    if version is None or tuple(map(int, version.split(".")[:2])) >= (0, 36):
        return None
    return f"diffusers {version} is loaded, and 0.36 or later is needed"


def class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
