"""Guards: whether a module or a function is exactly what its library defines, asked where it would be used.

Nothing here remembers an answer. Classes and functions are looked up once, as their libraries define them;
whether a module, or a name of a library, still is that one is compared at each use.
"""

from __future__ import annotations

import inspect
import sys
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_modules = torch.nn.modules.module
GLOBAL_HOOKS = (
    _modules._global_forward_hooks,
    _modules._global_forward_pre_hooks,
    _modules._global_backward_hooks,
    _modules._global_backward_pre_hooks,
)
_Module: Any = nn.Module
# How modules are called, unless a debugger or profiler has patched it.
MODULE_CALL, CALL_IMPL = _Module._wrapped_call_impl, _modules.Module._call_impl
# Modes that change no result: torch.set_default_device, and those that only look on.
TRANSPARENT_MODES: set[type] = {DeviceContext}
# Where PyTorch has what it traces by: a trace is to have the kernels.
_TRACERS = ("torch._subclasses", "torch._export", "torch._functorch", "torch.export", "torch.fx")
# The classes of what this package puts in the place of forwards.
STAND_INS: set[type] = set()


class LibraryFunction(NamedTuple):
    """A function of a module or a class; ``function`` is None if it is missing or was replaced."""

    owner: Any
    name: str
    function: Any


def find_class(path: str) -> type | None:
    """The class ``module:name``, if its module is loaded."""
    module, _, name = path.partition(":")
    return getattr(sys.modules.get(module), name, None)


def library_function(path: str, parameters: str | None = None) -> LibraryFunction:
    """``module:function`` or ``module:class.function``.

    ``parameters`` are the names that it must take, in order: another version of the library with other ones
    may compute something else.
    """
    module_name, _, qualified_name = path.partition(":")
    class_name_, _, name = qualified_name.rpartition(".")
    owner = sys.modules.get(module_name)
    if class_name_:
        owner = getattr(owner, class_name_, None)
    function: Any = vars(owner).get(name) if owner is not None else None
    if not _is_written_by(module_name.partition(".")[0], function, name) or (
        parameters is not None and " ".join(inspect.signature(function).parameters) != parameters
    ):
        function = None
    return LibraryFunction(owner, name, function)


def _is_written_by(library: str, function: Any, name: str) -> bool:
    if function is None or getattr(function, "__name__", None) != name:
        return False
    module_globals = getattr(function, "__globals__", None)
    if module_globals is None:  # one of Torch's compiled functions
        namespaces: tuple[Any, ...] = (torch._C._nn, torch._C._VariableFunctions)
        return any(function is getattr(namespace, name, None) for namespace in namespaces)
    return module_globals["__name__"].partition(".")[0] == library


def replaced_function(functions: tuple[LibraryFunction, ...]) -> str | None:
    """Why the kernels cannot stand in for these functions: one of them is not the library's any more."""
    for owner, name, function in functions:
        if function is None or getattr(owner, name, None) is not function:
            return f"{name} was replaced"
    return None


class KnownFunction:
    """A function of a library that is compared where it would be called.

    Attributes:
        function: it; None until its module is loaded.
    """

    __slots__ = ("_path", "function")

    def __init__(self, path: str) -> None:
        self._path = path
        self.look_up()
        _known.append(self)

    def look_up(self) -> None:
        self.function: Any = library_function(self._path).function

    @property
    def is_found(self) -> bool:
        return self.function is not None


class KnownClass:
    """A class, without its subclasses, whose arithmetic the kernels know.

    Attributes:
        cls: the class; None until its module is loaded.
        own_forward: its forward as the library defines it.
        functions: what that forward calls by names that users replace.
    """

    __slots__ = ("_function_paths", "_path", "cls", "functions", "own_forward")

    def __init__(self, path: str, *function_paths: str) -> None:
        self._path = path
        self._function_paths = function_paths
        self.look_up()
        _known.append(self)

    def look_up(self) -> None:
        self.cls: Any = find_class(self._path)
        self.own_forward: Any = library_function(f"{self._path}.forward").function
        self.functions = tuple(map(library_function, self._function_paths))

    @property
    def is_found(self) -> bool:
        return self.own_forward is not None and all(f.function for f in self.functions)


_known: list[Any] = []


def look_up_libraries() -> None:
    """Looks up what is known of libraries, of those that have been loaded by now.

    What was found before stays, as it may have been replaced since.
    """
    for known in _known:
        if not known.is_found:
            known.look_up()


def is_plain(module: Any, known: KnownClass, *others: Any) -> bool:
    """Whether a call of the module, and of each other one, runs nothing but what its library says: it is of
    exactly this class, without hooks or another forward, and no function that it calls was replaced."""
    cls = known.cls
    if (
        type(module) is not cls
        or cls.forward is not known.own_forward
        or cls.__call__ is not _Module.__call__
    ):
        return False
    for owner, name, function in known.functions:
        if getattr(owner, name, None) is not function:
            return False
    for each in (module, *others) if others else (module,):
        state = each.__dict__
        if (
            state["_forward_hooks"]
            or state["_forward_pre_hooks"]
            or state["_backward_hooks"]
            or state["_backward_pre_hooks"]
            or "_compiled_call_impl" in state
            or ("forward" in state and not has_own_forward(each))
            or type(each) is not cls
        ):
            return False
    return True


def has_own_forward(module: nn.Module) -> bool:
    """Whether the forward found on the instance is its class's, as hooks leave it that were removed, or a
    stand-in for it, which computes the same."""
    forward = module.__dict__.get("forward")
    if type(forward) is not MethodType:
        return forward is None
    owner: Any = forward.__self__
    if type(owner) in STAND_INS:
        return owner._module() is module
    return owner is module and forward.__func__ is type(module).forward


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks of its own, or a compiled call, are around the module's forward."""
    state = module.__dict__
    return bool(
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or state.get("_compiled_call_impl") is not None
    )


def why_not_plain(module: Any, known: KnownClass) -> str:
    """The reason for which ``is_plain`` is false, as a clause."""
    if known.cls is None or type(module) is not known.cls:
        return f"is a {class_name(module)}"
    reason = replaced_function(known.functions)
    if known.cls.forward is not known.own_forward or known.cls.__call__ is not _Module.__call__:
        reason = f"{known.cls.__name__}'s forward or __call__ was replaced"
    if reason is not None:
        return f"is a {class_name(module)}, and {reason}"
    return "has hooks or another forward than its class's"


def interposed() -> str | None:
    """What is around all calls of modules or functions now, for which the model's own code has to run."""
    if any(GLOBAL_HOOKS):
        return "hooks are registered for all modules"
    for function, own in ((_Module.__call__, MODULE_CALL), (_Module._call_impl, CALL_IMPL)):
        # PyTorch's tracers replace it, too.
        writer = getattr(function, "__globals__", {}).get("__name__", "")
        if function is not own and not writer.startswith(_TRACERS):
            return "torch.nn.Module.__call__ was replaced"
    modes = _get_current_function_mode_stack() + _get_current_dispatch_mode_stack()
    for mode in modes:
        cls = type(mode)
        if cls not in TRANSPARENT_MODES and not cls.__module__.startswith(_TRACERS):
            return f"it runs within a {cls.__name__}"
    return None


def class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
