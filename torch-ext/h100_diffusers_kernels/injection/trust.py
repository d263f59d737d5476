"""What a module works with in calls that nothing unknown runs in, without the checks that they need not make.

A call may be trusted if its block was looked at in the forward that is in progress (``ModelForward``), and
all of its layers are what their classes say. The tensors that a block is given are looked at, as in every
call. What PyTorch's linear layers and the kernels make of them is like them, and is not looked at again.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Callable

from torch import Tensor, nn

from .forward_slot import stand_in_of
from .injected import Injected, Parts
from .snapshot import Look


def trusted_parts(parts: Parts, names: Iterable[str], snapshot: Look) -> Parts | None:
    """The parts with these in a trusted form, and all others as they are; None if one has no such form."""
    result = Parts()
    vars(result).update(vars(parts))
    result.is_trusted = True
    for name in names:
        value = getattr(parts, name)
        form = trusted_form(value, snapshot)
        if form is None and value is not None:
            return None
        setattr(result, name, form)
    return result


def trusted_form(value: Any, snapshot: Look) -> Any:
    """What computes the same as ``value`` in calls that are trusted, or None."""
    if isinstance(value, nn.Module):
        return called_directly(value, snapshot)
    return None if value is None else value.trusted(snapshot)


class _Direct:
    """What stands in for a module's forward where a block that is trusted calls it, with what it has made.

    That the module's decision holds was seen with the block.
    """

    __slots__ = ("injected", "injection")

    def __init__(self, injected: Injected) -> None:
        self.injected = injected
        self.injection = injected.injection

    def parts(self, module: nn.Module, x: Tensor, *others: Tensor | None) -> Any | None:
        injected = self.injected
        parts = injected.trusted
        if parts is None:
            return injected.parts(module, x, *others)
        self.injection.tallies[injected.name].on_kernels += 1
        return parts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.injected, name)  # what is seldom asked for


def called_directly(module: nn.Module, snapshot: Look) -> Callable | None:
    """What stands in for the module's forward, to be called without ``nn.Module.__call__``; None where that
    may do more.

    A look at a block sees whether there are hooks around it.
    """
    stand_in: Any = stand_in_of(module.__dict__.get("forward"))
    if (
        stand_in is None
        or stand_in.module is not module
        or snapshot.see(module.__dict__, "_compiled_call_impl") is not None
    ):
        return None
    return partial(stand_in.part.forward, module, _Direct(stand_in))
