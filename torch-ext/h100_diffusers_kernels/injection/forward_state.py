"""One forward of a model: what its blocks share, and what one computes for the next, while it lasts.

Between the end of a block and the beginning of the next, code of others may run: hooks, wrappers, a list of
the user's own. So a block hands over only inside of the model's own forward, and where nothing is around
either of the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor, nn

from ..conditions import tracks_derivatives
from .patch import Call, PatchSpec, StandIn, bare_stand_in


class _Handed(NamedTuple):
    """What was computed for a block, and from which arguments of it."""

    block: nn.Module
    arguments: tuple[Any, ...]
    values: Any


class ForwardState:
    """A model's forward in progress, in which no derivative is asked for.

    ``block_lists`` are the names of its lists of blocks.
    """

    def __init__(self, model: nn.Module, block_lists: tuple[str, ...]) -> None:
        self._model = model
        self._block_lists = block_lists
        self._successors: dict[int, nn.Module] | None = None
        self._handed: _Handed | None = None
        self._may_hand_over = True
        self._shared: dict[str, tuple[Any, int, Any]] = {}

    def successor(self, block: nn.Module) -> tuple[nn.Module, StandIn] | None:
        """The block after ``block`` and its stand-in, if the one may compute the other's beginning."""
        if not self._may_hand_over or bare_stand_in(block) is None:
            return None
        if self._successors is None:
            self._successors = {}
            for name in self._block_lists:
                blocks = self._model._modules.get(name)
                if type(blocks) is nn.ModuleList:
                    each: list[Any] = list(blocks._modules.values())
                    self._successors.update({id(a): b for a, b in zip(each, each[1:])})
        successor = self._successors.get(id(block))
        stand_in = None if successor is None else bare_stand_in(successor)
        return None if successor is None or stand_in is None else (successor, stand_in)

    def hand_over(self, block: nn.Module, arguments: tuple[Any, ...], values: Any) -> None:
        """Leave values for a block, which were computed from these arguments of its next call."""
        self._handed = _Handed(block, arguments, values)

    def take_over(self, block: nn.Module, arguments: tuple[Any, ...]) -> Any:
        """What was left for a block that is called with these very arguments, or None."""
        handed, self._handed = self._handed, None
        if handed is None:
            return None
        if handed.block is not block or not all(map(is_, arguments, handed.arguments)):
            # Something comes between blocks, such as a ControlNet's residuals: it would be in vain again.
            self._may_hand_over = False
            return None
        return handed.values

    def shared(self, name: str, x: Any, make: Callable[[Any], Any]) -> Any:
        """``make(x)``, kept under ``name`` for the next block that asks with the same ``x``."""
        version = _version(x)
        made = self._shared.get(name)
        if made is None or made[0] is not x or made[1] != version:
            made = self._shared[name] = (x, version, make(x))
        return made[2]


def _version(x: Any) -> int:
    """Changes when a tensor is written to; inference tensors do not tell."""
    return x._version if isinstance(x, Tensor) and not x.is_inference() else 0


@dataclass(frozen=True, eq=False)
class ModelSpec(PatchSpec):
    """A model, or a part of one that calls a list of blocks: its own forward, which they share a state in.

    Attributes:
        blocks: the names of its lists of blocks, in the order of their calls.
    """

    blocks: tuple[str, ...] = ()


def forward_with_state(self: nn.Module, call: Call, *args: Any, **kwargs: Any) -> Any:
    """The forward of the model's class, with a ``ForwardState`` for its blocks."""
    if torch.compiler.is_compiling() or tracks_derivatives():
        return call.own_forward(self, *args, **kwargs)
    spec: Any = call.stand_in.spec
    local = call.injection.local
    outer, local.state = local.state, ForwardState(self, spec.blocks)
    try:
        return call.own_forward(self, *args, **kwargs)
    finally:
        local.state = outer


def model_spec(path: str, *blocks: str) -> ModelSpec:
    operations = "its own forward, in which its blocks share values"
    return ModelSpec(path, None, forward_with_state, operations, blocks=blocks)
