"""What a module works with in calls that nothing unknown runs in, without the checks that such calls need not make.

A call may be trusted if its block was looked at in the forward that is in progress (``ModelForward``), and all of its
layers are what their classes say. The tensors that it is given are looked at, as in every call. What
PyTorch's linear layers and the kernels make of them has their dtype and form, and is not looked at again.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Callable

from torch import nn

from .forward_slot import stand_in_of
from .injected import Parts
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
    return partial(stand_in.part.forward, module, stand_in)
