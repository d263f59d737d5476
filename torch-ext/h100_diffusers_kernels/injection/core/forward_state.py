"""State of one forward of a model: values shared by its blocks, and values that a block passes to the next.

Users' code may run between two blocks: hooks, wrappers, a custom list class. So a block passes values on only
inside the model's own forward, and only if neither block has hooks or wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import is_
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from ...operations.conditions import tracks_derivatives
from .patch import Call, MethodSpec, PatchSpec, bare_stand_in


class ForwardState:
    """A model's forward in progress, without derivatives.

    ``block_lists`` are the paths of its lists of blocks.

    Attributes:
        shared: the values of ``Call.shared``.
        text_length: the number of tokens of the text, if a block has set it.
        block_mask: the mask of a form that the model's own code ensures, which a block gives its attention.
        has_known_masks: False once users' code may have changed masks.
    """

    def __init__(self, model: nn.Module, block_lists: tuple[str, ...]) -> None:
        self._successors: dict[Any, Any] = {}  # the block after each block of a list, or None
        for path in block_lists:
            blocks: Any = model
            for name in path.split("."):
                blocks = None if blocks is None else blocks._modules.get(name)
            if type(blocks) is nn.ModuleList:
                each = [*blocks._modules.values()]
                self._successors.update(zip(each, [*each[1:], None]))
        self._handed: tuple[nn.Module, tuple[Any, ...], Any] | None = None
        self._may_hand_over = True
        self.shared: dict[Any, tuple[Any, int, Any]] = {}
        self.text_length: int | None = None
        self.block_mask: Any = None
        self.has_known_masks = True

    def distrust(self) -> None:
        """Called where hooks may change or write to what blocks share."""
        self.shared.clear()
        self.has_known_masks = False

    def successor(self, block: nn.Module, spec: PatchSpec) -> nn.Module | None:
        """The block after ``block``, if it is of this kind and has no hooks or wrappers."""
        if not self._may_hand_over:
            return None
        successor = self._successors.get(block)
        return successor if successor is not None and bare_stand_in(spec, successor) else None

    def has_hooks(self) -> bool:
        """Whether hooks get the blocks' arguments."""
        return any(block._forward_pre_hooks for block in self._successors)

    def calls(self, block: nn.Module) -> bool:
        """Whether the model itself calls the block, and not a user's module."""
        return block in self._successors

    def hand_over(self, block: nn.Module, arguments: tuple[Any, ...], values: Any) -> None:
        """Stores values for a block, computed from these arguments of its next call."""
        self._handed = (block, arguments, values)

    def take_over(self, block: nn.Module, arguments: tuple[Any, ...]) -> Any:
        """The values stored for a block if it is called with the same argument objects, otherwise None."""
        handed, self._handed = self._handed, None
        if handed is None:
            return None
        its_block, its_arguments, values = handed
        if its_block is not block or not all(map(is_, arguments, its_arguments)):
            # Code between blocks, such as a ControlNet, changes the arguments: later values would be unused.
            self._may_hand_over = False
            return None
        return values


@dataclass(frozen=True, eq=False)
class ModelSpec(PatchSpec):
    """A model, or a part of it, whose own forward calls lists of blocks that share state.

    Attributes:
        blocks: the paths of the lists, in the order of their calls.
        plan: makes the model's plan of context parallelism, if diffusers has none; see ``parallel.plans``.
    """

    blocks: tuple[str, ...] = ()
    plan: Callable[..., dict[str, Any]] | None = None


def forward_with_state(self: nn.Module, call: Call, *args: Any, **kwargs: Any) -> Any:
    """The forward of the model's class, with a ``ForwardState`` for its blocks."""
    if torch.compiler.is_compiling() or tracks_derivatives():
        return call.stand_in.own_forward(self, *args, **kwargs)
    spec: Any = call.stand_in.spec
    return run_with_state(spec.blocks, call.stand_in.own_forward, self, call, *args, **kwargs)


def run_with_state(
    blocks: tuple[str, ...], forward: Any, self: nn.Module, call: Call, *args: Any, **kwargs: Any
) -> Any:
    """``forward(self, ...)``, with a ``ForwardState`` for these lists of blocks."""
    state = call.stand_in.injection.state
    outer, state.value = state.value, ForwardState(self, blocks)
    try:
        return forward(self, *args, **kwargs)
    finally:
        state.value = outer


def model_spec(path: str, *blocks: str, plan: Any = None) -> ModelSpec:
    operations = "wrapped: its blocks share values within one forward"
    return ModelSpec(path, forward_with_state, operations, blocks=blocks, plan=plan)


COMPUTED_ONCE = "runs once per forward, on the model's own code"


class Family(NamedTuple):
    """Models with the same kinds of blocks.

    Attributes:
        name: the public name.
        specs: the kinds of modules whose forwards are replaced, including the models.
        once: names of modules of the model that are left alone, because they run once per forward.
        layers: the linear layers that ``precision=`` quantizes, a ``precision.Layers``.
        outside: specs of modules outside of the blocks, by name.
        int8_tiers: the values of ``precision=`` with which attention runs in 8 bits, too.
        methods: of modules around the models, which call them.
    """

    name: str
    specs: tuple[PatchSpec, ...]
    once: tuple[str, ...]
    layers: Any
    outside: Mapping[str, PatchSpec] = MappingProxyType({})
    int8_tiers: tuple[str, ...] = ("fp8-fast",)
    methods: tuple[MethodSpec, ...] = ()

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        return tuple(spec for spec in self.specs if isinstance(spec, ModelSpec))
