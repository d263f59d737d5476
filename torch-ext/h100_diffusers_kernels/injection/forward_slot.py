"""Where a module keeps its innermost forward.

Hooks for offloading and caching are put around a module's forward by storing it away and assigning
a wrapper in its place: accelerate stores it as ``module._old_forward``, diffusers in the chain of
function references of ``module._diffusers_hook``. A forward that goes to where the innermost one is
stored runs inside of every hook, whether the hook comes before or after it, and stays when the hook is
removed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import MethodType
from typing import Any, Callable

import torch
from torch import nn


class StandIn:
    """What stands in for a module's forward, by its method ``run``.

    torch.compile recompiles for each forward that is found on an instance, unless they are methods of one
    function. This one is not bound to the module, which it holds weakly, so that a model that is
    dropped is freed at once.

    Attributes:
        had_attribute: whether the module had a ``forward`` of its own before, the class's.
    """

    __slots__ = ("__weakref__", "_module", "had_attribute")

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.had_attribute = False

    def run(self, *args, **kwargs) -> Any:
        raise NotImplementedError

    def taken_out(self) -> None:
        """After another forward has taken its place."""

    @property
    def module(self) -> nn.Module | None:
        return self._module()


def stand_in_of(forward: Any) -> StandIn | None:
    """What a forward found on a module belongs to, if it is one that stands in."""
    owner = getattr(forward, "__self__", None)
    return owner if isinstance(owner, StandIn) else None


class ForwardSlot:
    """An attribute that holds a forward of ``module``."""

    def __init__(self, module: nn.Module, holder: Any, attribute: str) -> None:
        self._module = module
        self._holder = holder
        self._attribute = attribute

    @property
    def is_instance_attribute(self) -> bool:
        """Whether it is ``module.forward``, where no attribute means the class's forward."""
        return self._holder is self._module and self._attribute == "forward"

    @property
    def holds_class_forward(self) -> bool:
        value = self._value
        return (
            isinstance(value, MethodType)
            and value.__self__ is self._module
            and value.__func__ is type(self._module).forward
        )

    @property
    def stand_in(self) -> StandIn | None:
        """What stands in for the module's forward here, if anything does."""
        stand_in = stand_in_of(self._value)
        return stand_in if stand_in is not None and stand_in.module is self._module else None

    @property
    def _value(self) -> Any:
        return getattr(self._holder, self._attribute, None)

    def fill(self, forward: Callable) -> None:
        setattr(self._holder, self._attribute, forward)

    def fill_with_class_forward(self) -> None:
        self.fill(MethodType(type(self._module).forward, self._module))

    def clear(self) -> None:
        delattr(self._holder, self._attribute)


def class_forward_slot(module: nn.Module) -> ForwardSlot | None:
    """The slot with the class's forward; None if something unknown has taken its place.

    Wrappers are no bound methods, so it is the innermost one in use.
    """
    return next((slot for slot in _slots(module) if slot.holds_class_forward), None)


def stand_in_slot(module: nn.Module) -> ForwardSlot | None:
    """The slot with what stands in for the class's forward, or None."""
    return next((slot for slot in _slots(module) if slot.stand_in), None)


def _slots(module: nn.Module) -> Iterator[ForwardSlot]:
    yield ForwardSlot(module, module, "forward")
    attributes = vars(module)
    if "_old_forward" in attributes:
        yield ForwardSlot(module, module, "_old_forward")
    for reference in getattr(attributes.get("_diffusers_hook"), "_fn_refs", ()):
        # A hook with a forward of its own keeps the one it replaces as `original_forward`.
        yield ForwardSlot(module, reference, "forward")
        yield ForwardSlot(module, reference, "original_forward")


class ReplicaMaker:
    """Makes nn.DataParallel's replicas of a module with its class's forward: what stands in for it would
    run on the original's parameters."""

    _ATTRIBUTE = "_replicate_for_data_parallel"
    __slots__ = ("_module",)

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self) -> nn.Module:
        module = self._module()
        replica = getattr(type(module), self._ATTRIBUTE)(module)
        self.take_out(replica)
        if stand_in_of(vars(replica).get("forward")) is not None:
            del replica.forward
        return replica

    def __deepcopy__(self, memo: dict) -> ReplicaMaker:
        module: Any = self._module()
        return ReplicaMaker(memo.get(id(module), module))

    @classmethod
    def put_in(cls, module: nn.Module) -> None:
        setattr(module, cls._ATTRIBUTE, cls(module))

    @classmethod
    def take_out(cls, module: nn.Module) -> None:
        if isinstance(vars(module).get(cls._ATTRIBUTE), cls):
            delattr(module, cls._ATTRIBUTE)


def runs_own_forward(module: nn.Module) -> bool:
    """Whether calling the module runs its class's forward, or what stands in for it, and no hooks.

    Hooks of all modules apart: see ``has_global_hooks``.
    """
    forward = module.__dict__.get("forward")
    if forward is not None:
        slot = ForwardSlot(module, module, "forward")
        # Removed hooks leave the class's forward behind, bound to the instance.
        if not (slot.stand_in or slot.holds_class_forward):
            return False
    return not has_hooks(module)


def is_wrapped(module: nn.Module) -> bool:
    """Whether anything is around the forward of a module that is being called.

    While torch.compile traces, what hooks leave on a module is asked for: not every version of it
    sees through a forward that is found on an instance.
    """
    if torch.compiler.is_compiling():
        return hasattr(module, "_hf_hook") or hasattr(module, "_diffusers_hook")
    return not runs_own_forward(module)


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks of its own are around a call of the module."""
    state = module.__dict__
    return bool(
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
    )
