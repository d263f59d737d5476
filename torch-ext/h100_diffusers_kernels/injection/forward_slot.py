"""Where a module keeps its innermost forward.

Hooks for offloading and caching are put around a module's forward by storing it away and assigning
a wrapper in its place: accelerate stores it as ``module._old_forward``, diffusers in the chain of
function references of ``module._diffusers_hook``. A replacement that goes to where the innermost
forward is stored runs inside of every hook, whether the hook comes before or after it, and stays
when the hook is removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any, Callable

import torch
from torch import nn


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
    def function(self) -> Callable | None:
        """The function that the slot binds to the module; None for anything else."""
        value = getattr(self._holder, self._attribute, None)
        is_bound = isinstance(value, MethodType) and value.__self__ is self._module
        return value.__func__ if is_bound else None

    def bind(self, function: Callable) -> None:
        setattr(self._holder, self._attribute, MethodType(function, self._module))

    def clear(self) -> None:
        delattr(self._holder, self._attribute)


def find_forward_slot(module: nn.Module, function: Callable) -> ForwardSlot | None:
    """The slot that binds ``function`` to the module, or None.

    Wrappers are no bound functions, so the slot with the class's forward is the innermost one in
    use; None then means that something unknown has taken its place.
    """
    for slot in _slots(module):
        if slot.function is function:
            return slot
    return None


def _slots(module: nn.Module) -> Iterator[ForwardSlot]:
    yield ForwardSlot(module, module, "forward")
    attributes = vars(module)
    if "_old_forward" in attributes:
        yield ForwardSlot(module, module, "_old_forward")
    for reference in getattr(attributes.get("_diffusers_hook"), "_fn_refs", ()):
        # A hook with a forward of its own keeps the one it replaces as `original_forward`.
        yield ForwardSlot(module, reference, "forward")
        yield ForwardSlot(module, reference, "original_forward")


def runs_forward(module: nn.Module, function: Callable) -> bool:
    """Whether calling ``module`` runs ``function`` with no hook and no wrapper around it."""
    forward = vars(module).get("forward")
    return (
        (type(module).forward if forward is None else getattr(forward, "__func__", None))
        is function
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
    )


def is_wrapped(module: nn.Module, function: Callable) -> bool:
    """Whether anything is around ``function``, which is known to be the module's innermost forward.

    While torch.compile traces, what hooks leave on a module is asked for: not every version of it
    sees through a forward that is bound to an instance.
    """
    if torch.compiler.is_compiling():
        return hasattr(module, "_hf_hook") or hasattr(module, "_diffusers_hook")
    return not runs_forward(module, function)


def runs_class_forward(module: nn.Module) -> bool:
    """Whether calling ``module`` runs its class's forward and nothing else."""
    return runs_forward(module, type(module).forward)
