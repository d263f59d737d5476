"""One forward of a model: what its blocks share and hand on to each other while it lasts.

Between the end of a block and the beginning of the next, and between a look at all blocks and the call of
one of them, code of others may run: hooks, wrappers, modules of the user's own. It may change anything,
in ways that no tensor tells. So a block hands on to the next only inside of the model's own forward and
where nothing is around either of them, and blocks are looked at together only where nothing unknown
runs in any of them. Both end with the forward, and nothing is kept on tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor, nn

from ..conditions import tracks_derivatives
from .forward_slot import has_hooks, stand_in_of
from .injected import Injected, Injection
from .part import Part
from .snapshot import Snapshot, has_global_hooks

# To look at all blocks before the GPU has the work of some would leave it waiting.
_BLOCKS_BEFORE_LOOK = 4


class _Handed(NamedTuple):
    """What was computed for a block, and from which arguments of it."""

    block: nn.Module
    arguments: tuple[Tensor, ...]
    values: Any


class ModelForward:
    """A model's forward in progress, in which no derivative is asked for."""

    def __init__(self, model: nn.Module, injection: Injection) -> None:
        lists = [getattr(model, name, None) for name in injection.blocks]
        # A list of the user's own may do anything between two blocks.
        is_known = all(type(list_) is nn.ModuleList for list_ in lists)
        self._lists = [tuple(list_._modules.values()) for list_ in lists] if is_known else []
        self._is_quiet = None if is_known else False
        self._ended = 0  # blocks
        self._injection = injection
        self._handed: _Handed | None = None
        self._rows: tuple[Tensor, dict[int, tuple[Tensor, ...]]] | None = None

    def end(self) -> None:
        self._lists, self._is_quiet, self._handed, self._rows = [], False, None, None

    def is_quiet(self) -> bool:
        """Whether, from the first time that this is asked, nothing unknown runs in any block.

        The decisions on their parts are then known to hold, and are not looked at again.
        """
        if self._is_quiet is None:
            functions = self._injection.functions()
            self._is_quiet = not has_global_hooks() and all(
                _is_quiet(block, functions) for blocks in self._lists for block in blocks
            )
            if self._is_quiet:
                for blocks in self._lists:
                    for block in blocks:
                        for injected in _stand_ins(block):
                            injected.seen_by = self
        return self._is_quiet

    def following(self, block: nn.Module) -> tuple[nn.Module, Injected] | None:
        """The block after ``block`` and what stands in for its forward, if the end of one may compute the
        other's beginning."""
        successor = self._successor(block)
        if successor is None:
            return None
        self._ended += 1
        is_time = self._ended >= min(_BLOCKS_BEFORE_LOOK, len(self._lists[0]) - 1)
        is_quiet = self.is_quiet() if is_time else self._is_quiet
        if not is_quiet and (has_global_hooks() or not (_is_bare(block) and _is_bare(successor))):
            return None
        injected = stand_in_of(successor.forward)
        return None if injected.decide(successor).reason is not None else (successor, injected)

    def _successor(self, block: nn.Module) -> nn.Module | None:
        for blocks in self._lists:
            for i, other in enumerate(blocks):
                if other is block:
                    return blocks[i + 1] if i + 1 < len(blocks) else None
        return None

    def hand_over(self, block: nn.Module, arguments: tuple[Tensor, ...], values: Any) -> None:
        """Leave values for a block, which were computed from these arguments of its next call."""
        self._handed = _Handed(block, arguments, values)

    def take_over(self, block: nn.Module, arguments: tuple[Tensor, ...]) -> Any:
        """What was left for a block that is called with these very arguments, or None."""
        handed, self._handed = self._handed, None
        if (
            handed is None
            or handed.block is not block
            or any(mine is not its for mine, its in zip(arguments, handed.arguments, strict=True))
            or not (self._is_quiet or _is_bare(block))
        ):
            return None
        return handed.values

    def rows(self, block: nn.Module, name: str, temb: Tensor) -> tuple[Tensor, ...] | None:
        """The rows of ``block.name + temb``, each (B, 1, D), made for all blocks of a list at once.

        None where that may not be done, or not yet, or would take memory: with an embedding for each token.
        """
        if temb.shape[1] != 1 or not self._is_quiet:
            return None
        if self._rows is None or self._rows[0] is not temb:
            self._rows = (temb, {})
        rows = self._rows[1]
        if id(block) not in rows:
            blocks = next((list_ for list_ in self._lists if block in list_), ())
            rows.update(_rows_of_all(blocks, name, temb))
        return rows.get(id(block))


def _rows_of_all(
    blocks: tuple[nn.Module, ...], name: str, temb: Tensor
) -> dict[int, tuple[Tensor, ...]]:
    tables = [block._parameters.get(name) for block in blocks]
    first = tables[0] if tables else None
    if first is None or any(
        table is None
        or type(table) is not nn.Parameter
        or table.shape != first.shape
        or table.dtype != temb.dtype
        or table.device != temb.device
        for table in tables
    ):
        return {}
    count, size = first.shape
    # (blocks, rows, 1, 1, D) + (rows, B, 1, D)
    of_time = temb.view(temb.shape[0], count, 1, size).transpose(0, 1)
    rows = (torch.stack(tables)[:, :, None, None] + of_time).flatten(0, 1).unbind(0)
    return {id(block): rows[i * count : (i + 1) * count] for i, block in enumerate(blocks)}


def _is_bare(block: nn.Module) -> bool:
    """Whether a call of the block runs what stands in for its forward, and nothing around it."""
    stand_in = stand_in_of(block.__dict__.get("forward"))
    return stand_in is not None and stand_in.module is block and not has_hooks(block)


def _is_quiet(module: nn.Module, functions: tuple) -> bool:
    if not _is_bare(module):
        return False
    injected = stand_in_of(module.forward)
    return (
        injected.decide(module, functions).reason is None
        and injected.is_quiet
        and all(_is_quiet(child, functions) for child in injected.stand_ins)
    )


def _stand_ins(module: nn.Module) -> Iterator[Injected]:
    injected = stand_in_of(module.forward)
    yield injected
    for child in injected.stand_ins:
        yield from _stand_ins(child)


def _model_forward(self: nn.Module, injected: Injected, *args, **kwargs) -> Any:
    """The forward of the model's class, with a ``ModelForward`` for its blocks."""
    if torch.compiler.is_compiling() or tracks_derivatives():
        return injected.class_forward(self, *args, **kwargs)
    injected.count([])
    local = injected.injection.local
    outer, local.forward = local.forward, ModelForward(self, injected.injection)
    try:
        return injected.class_forward(self, *args, **kwargs)
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

    def see(self, module: nn.Module, snapshot: Snapshot) -> None:
        """Blocks see for themselves."""


def forward_in_progress(injected: Injected) -> ModelForward | None:
    """The forward of the model that a call of one of its modules belongs to, if it may share."""
    if torch.compiler.is_compiling():
        return None
    forward = injected.injection.local.forward
    return None if forward is None or tracks_derivatives() else forward
