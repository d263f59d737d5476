"""One forward of a model: what its blocks share and hand on to each other while it lasts.

Between the end of a block and the beginning of the next, and between a look at a block and its call, code
of others may run: hooks, wrappers, modules of the user's own. It may change anything, in ways that no
tensor tells. So a block hands on to the next only inside of the model's own forward and where nothing is
around either of them, and what was seen of a block ahead of its call is trusted only where nothing unknown
runs in any block up to it. Both end with the forward, and nothing is kept on tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from operator import is_
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor, nn

from ..conditions import tracks_derivatives
from . import recording
from .forward_slot import has_hooks, stand_in_of
from .injected import Injected, Injection
from .part import Part
from .snapshot import Look, has_global_hooks

# At the end of one. To look at all of them at once would take longer than the GPU has work queued.
_BLOCKS_LOOKED_AT = 2
# How modules are called, where nobody has replaced it.
_CALL: Any = nn.Module.__call__


class _Handed(NamedTuple):
    """What was computed for a block, and from which arguments of it."""

    block: nn.Module
    arguments: tuple[Tensor, ...]
    values: Any


class ModelForward:
    """A model's forward in progress, in which no derivative is asked for.

    ``blocks`` are the names of its lists of blocks, in the order of their calls.

    Attributes:
        look: what the stand-ins that were looked at in this forward keep, as long as it is trusted.
        trusts: whether calls of what was looked at need not look at what they compute: no derivative is
            taken, and no mode makes other tensors than PyTorch's functions do.
    """

    def __init__(self, model: nn.Module, injection: Injection, blocks: tuple[str, ...]) -> None:
        lists: list[Any] = [getattr(model, name, None) for name in blocks]
        # A list of the user's own may do anything between two blocks.
        is_known = all(type(list_) is nn.ModuleList for list_ in lists)
        lists = [list(list_._modules.values()) for list_ in lists] if is_known else []
        self._blocks = [block for list_ in lists for block in list_]
        self._places = {id(block): i for i, block in enumerate(self._blocks)}
        self._successors = {id(a): b for list_ in lists for a, b in zip(list_, list_[1:])}
        self._looked_at = 0  # of the blocks, in the order of their calls
        self._functions: Any = None  # the injection's, at the first look
        self._may_look = is_known and len(self._places) == len(self._blocks)
        self._injection = injection
        self._handed: _Handed | None = None
        self._rows: tuple[Tensor, dict[int, tuple[Tensor, ...]]] | None = None
        self._made: dict[str, tuple[Any, Any]] = {}  # of ``once``, by name
        self._may_hand_over = True
        self.look = object()
        self.trusts = False
        self._is_native: bool | None = None
        self._shared: dict[tuple, tuple] = {}  # of ``shared``, with what it was made of

    def end(self) -> None:
        self._stop_looking()
        self._blocks, self._places, self._successors = [], {}, {}
        self._handed = self._rows = None
        self._made, self._shared = {}, {}

    def is_quiet(self) -> bool:
        """Whether, from the first time that this is asked, nothing unknown runs in any block."""
        self._look_up_to(len(self._blocks))
        return self._may_look

    def _look_up_to(self, end: int) -> None:
        """Looks at the next blocks, as long as nothing unknown runs in any.

        The decisions on their parts are then known to hold, and are not looked at again: what runs until
        their calls is the model's own forward and blocks that were looked at before.
        """
        if not self._may_look or min(end, len(self._blocks)) <= self._looked_at:
            return
        if self._functions is None:
            self._functions = self._injection.functions()
        ahead = self._blocks[self._looked_at : end]
        if not has_global_hooks() and all(map(self._sees_quiet, ahead)):
            self._looked_at += len(ahead)
            self.trusts = (
                (torch._C._len_torch_function_stack() == 0 or recording.is_on())
                and torch._C._len_torch_dispatch_stack() == 0
                and not tracks_derivatives()
            )
        else:
            self._stop_looking()

    def _stop_looking(self) -> None:
        """No block is looked at any more, and nothing is trusted that was seen of some."""
        self._may_look, self._looked_at, self.look = False, 0, object()
        self.trusts = False

    def _sees_quiet(self, module: nn.Module) -> bool:
        """Whether a call of a module with a stand-in runs nothing unknown."""
        injected = _bare_stand_in(module)
        if injected is None:
            return False
        parts, snapshot, _ = injected.decision(module, self._functions)
        if (
            parts.reason is not None
            or not snapshot.is_quiet
            or not injected.knows_forward_of(module)
            or type(module).__call__ is not _CALL
        ):
            return False
        injected.seen_in = self.look
        for child in snapshot.stand_ins:  # noqa: SIM110 - all() of a generator takes twice as long
            if not self._sees_quiet(child):
                return False
        return True

    def sees(self, module: nn.Module) -> bool:
        """Looks at the module and those after it, if it is the next block to be called.

        Returns:
            Whether it is, and nothing unknown runs in it.
        """
        place = self._places.get(id(module))
        if place is None or place != self._looked_at:
            return False
        self._look_up_to(place + 1 + _BLOCKS_LOOKED_AT)
        return self.was_seen(module)

    def was_seen(self, block: nn.Module) -> bool:
        """Whether nothing unknown runs in a block, nor in any block up to it."""
        return self._places.get(id(block), self._looked_at) < self._looked_at

    def following(self, block: nn.Module) -> tuple[nn.Module, Injected, Any] | None:
        """The block after ``block``, what stands in for its forward and what that works with, if the end
        of one may compute the other's beginning."""
        successor = self._successors.get(id(block))
        if successor is None or not self._may_hand_over:
            return None
        self._look_up_to(max(self._looked_at, self._places[id(block)] + 1) + _BLOCKS_LOOKED_AT)
        if not self.was_seen(successor) and (
            has_global_hooks() or not (_bare_stand_in(block) and _bare_stand_in(successor))
        ):
            return None
        injected: Any = stand_in_of(successor.forward)
        parts = injected.decide(successor)
        return None if parts.reason is not None else (successor, injected, parts)

    def hand_over(self, block: nn.Module, arguments: tuple[Tensor, ...], values: Any) -> None:
        """Leave values for a block, which were computed from these arguments of its next call."""
        self._handed = _Handed(block, arguments, values)

    def take_over(self, block: nn.Module, arguments: tuple[Tensor, ...]) -> Any:
        """What was left for a block that is called with these very arguments, or None."""
        handed, self._handed = self._handed, None
        if handed is None:
            return None
        if (
            handed.block is not block
            or not all(map(is_, arguments, handed.arguments))
            or not (self.was_seen(block) or _bare_stand_in(block))
        ):
            # Something comes between blocks, such as a ControlNet's residuals: it would be in vain again.
            self._may_hand_over = False
            return None
        return handed.values

    def once(self, injected: Injected, name: str, x: Any, make: Callable[[Any], Any]) -> Any:
        """``make(x)``; what was made of the same ``x`` before, where nothing unknown has run since.

        ``injected`` stands in for the forward of a block, or of a part of one. Nothing that a model's own
        forward gives to all of its blocks is changed by it in between.
        """
        if injected.seen_in is not self.look:
            return make(x)
        made = self._made.get(name)
        if made is None or made[0] is not x:
            made = self._made[name] = (x, make(x))
        return made[1]

    def shared(self, x: Any, form: Any, make: Callable[[], Any]) -> Any:
        """What was made before of the same ``x`` in the same ``form``, for calls that are trusted."""
        key = (id(x), form)
        made = self._shared.get(key)
        if made is None:
            made = self._shared[key] = (x, make())
        return made[1]

    def is_native(self, parts: Any, is_native_active: Callable[[Any], bool]) -> bool:
        """Whether attention is left to PyTorch's own choice, for calls that are trusted.

        What is chosen for all attentions does not change between them.
        """
        processor = parts.processor
        if parts.dispatch is None:
            return True
        if processor._attention_backend is not None or processor._parallel_config is not None:
            return False
        if self._is_native is None:
            self._is_native = is_native_active(parts)
        return self._is_native

    def rows(self, block: nn.Module, name: str, temb: Tensor) -> tuple[Tensor, ...] | None:
        """The rows of ``block.name + temb``, each (B, 1, D), made at once for all blocks that were looked at.

        None where that may not be done, or not yet, or would take memory: with an embedding for each token.
        """
        if temb.shape[1] != 1 or not self.was_seen(block):
            return None
        if self._rows is None or self._rows[0] is not temb:
            self._rows = (temb, {})
        rows = self._rows[1]
        if id(block) not in rows:
            ahead = self._blocks[self._places[id(block)] : self._looked_at]
            rows.update(_rows_of_all(ahead, name, temb))
        return rows.get(id(block))


def _rows_of_all(blocks: list[nn.Module], name: str, temb: Tensor) -> dict[int, tuple[Tensor, ...]]:
    tables: list[Any] = [block._parameters.get(name) for block in blocks]
    first = tables[0]
    if any(
        type(table) is not nn.Parameter
        or table.shape != first.shape
        or table.dtype != first.dtype
        or table.device != temb.device
        for table in tables
    ):
        return {}
    count, size = first.shape[-2:]
    # (blocks, rows, 1, 1, D) + (rows, B, 1, D)
    of_time = temb.view(temb.shape[0], count, 1, size).transpose(0, 1)
    rows = (torch.stack(tables).view(-1, count, 1, 1, size) + of_time).flatten(0, 1).unbind(0)
    return {id(block): rows[i * count : (i + 1) * count] for i, block in enumerate(blocks)}


def _bare_stand_in(module: nn.Module) -> Injected | None:
    """What stands in for the module's forward, if a call runs that and nothing around it."""
    stand_in: Any = stand_in_of(module.__dict__.get("forward"))
    return (
        stand_in
        if stand_in is not None and stand_in.module is module and not has_hooks(module)
        else None
    )


def _model_forward(self: nn.Module, injected: Injected, *args, **kwargs) -> Any:
    """The forward of the model's class, with a ``ModelForward`` for its blocks."""
    if torch.compiler.is_compiling() or tracks_derivatives():
        return injected.class_forward(self, *args, **kwargs)
    injected.count([])
    with marked_forward(self, injected.injection, injected.injection.blocks):
        return injected.class_forward(self, *args, **kwargs)


@contextlib.contextmanager
def marked_forward(
    model: nn.Module, injection: Injection, blocks: tuple[str, ...]
) -> Iterator[None]:
    """The forward of a model, or of a part of one that calls these blocks, from its beginning to its end."""
    local = injection.local
    outer, local.forward = local.forward, ModelForward(model, injection, blocks)
    try:
        yield
    finally:
        local.forward.end()
        local.forward = outer


@dataclass(frozen=True)
class Model(Part):
    """A model, whose forward is marked where it begins and where it ends.

    Attributes:
        blocks: the names of its lists of blocks.
    """

    parameters: str | None = None
    forward: Callable = _model_forward
    operations: str = "its own forward, marked where it begins and ends"
    blocks: tuple[str, ...] = ()

    def see(self, module: nn.Module, snapshot: Look) -> None:
        """Blocks see for themselves."""


def forward_in_progress(injected: Injected) -> ModelForward | None:
    """The forward of the model that a call of one of its modules belongs to, if it may share."""
    if torch.compiler.is_compiling():
        return None
    forward = injected.injection.local.forward
    if forward is None or (forward.trusts and injected.seen_in is forward.look):
        return forward
    return None if tracks_derivatives() else forward
