"""The forward that stands in for a module's own, and what all those of one model share."""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, SupportsIndex

import torch
from torch import Tensor, nn

from ..conditions import kernels_take, why_not_taken
from .cuda_graphs.tally import GraphTally
from .forward_slot import StandIn
from .original import Original
from .snapshot import Glance, Snapshot, has_global_hooks
from .tally import Tally

UNKNOWN_FORWARD = "its class's forward is not the one known from diffusers"


class Injection:
    """What the forwards injected into one model share.

    Attributes:
        attention: whether attention itself may run on the package's kernel.
        originals: the functions that the kernels stand in for, as their libraries define them, by path.
        blocks: the names of the model's lists of blocks, in the order of their calls.
        tallies: of each replaced module, by name.
        is_over: whether the kernels were ejected; wrappers of the user's may still hold the forwards.
        local: ``local.forward`` is the forward of the model that this thread is in, or None.
        graphs: how the model's calls were captured, where they may be.
    """

    def __init__(
        self, attention: bool, originals: dict[str, Original], blocks: tuple[str, ...]
    ) -> None:
        self.attention = attention
        self.originals = originals
        self.blocks = blocks
        self.tallies: dict[str, Tally] = {}
        self.graphs: GraphTally | None = None
        self.is_over = False
        self.local = _Local()
        self._watched: set[tuple] = set()
        self._lookups: list[tuple[Callable, str]] = []
        for original in originals.values():
            if original.owner:
                self._watch(original.owner, original.name)
        self._found: tuple = ()

    def _watch(self, owner: Any, name: str) -> None:
        if (owner, name) not in self._watched:
            self._watched.add((owner, name))
            self._lookups.append((vars(owner).get, name))

    def watch(self, cls: type, method: str) -> Any:
        """A method of a class, which decisions depend on from now on; None if it has none."""
        for base in cls.__mro__:
            if method in vars(base):
                self._watch(base, method)
                return vars(base)[method]
        return None

    def functions(self) -> tuple:
        """All functions that decisions depend on, as they are found now: one object as long as they are the
        same."""
        found = tuple([look_up(name) for look_up, name in self._lookups])
        if found != self._found:
            self._found = found
        return self._found

    def __deepcopy__(self, memo: dict) -> Injection:
        duplicate = Injection(self.attention, self.originals, self.blocks)
        duplicate.tallies = {name: tally.fresh() for name, tally in self.tallies.items()}
        duplicate.graphs = None if self.graphs is None else self.graphs.fresh()
        duplicate.is_over = self.is_over
        return duplicate


class _Local(threading.local):
    forward: Any = None


class Parts:
    """What a forward works with, decided by its part, which adds attributes.

    Attributes:
        reason: why the class's own forward has to run, or None.
        notes: why the model's own code computes parts of the call.
        choices: the same, where the user asked for it.
        is_trusted: whether nothing unknown runs in the call, and all layers are what their classes say: what
            is computed of tensors that the kernels take is then such a tensor, too.
        trusted: the same for such calls; None where a part is unknown.
    """

    is_trusted = False

    def __init__(self, reason: str | None = None) -> None:
        self.reason = reason
        self.notes: list[str] = []
        self.choices: list[str] = []
        self.trusted: Parts | None = None

    if TYPE_CHECKING:  # the attributes that a part adds

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    def note(self, reason: str | None, is_choice: bool = False) -> None:
        if reason is not None:
            (self.choices if is_choice else self.notes).append(reason)


class Decision(NamedTuple):
    parts: Parts
    snapshot: Snapshot
    functions: tuple  # of ``Injection.functions``


class Injected(StandIn):
    """A forward that stands in for a module's own: ``part.forward(module, injected, *args, **kwargs)``.

    Attributes:
        part: what the module is to its family. ``part.decide(module, injection, snapshot)`` tells the
            ``Parts`` that its forward works with.
        name: the module's name in its model.
        kept: what the forward keeps from call to call.
    """

    __slots__ = ("_decision", "injection", "kept", "name", "part", "seen_in")

    def __init__(self, module: nn.Module, part: Any, name: str, injection: Injection) -> None:
        super().__init__(module)
        self.part = part
        self.name = name
        self.injection = injection
        self.kept: Any = None
        self._decision: Decision | None = None
        self.seen_in: Any = None  # the look at the model's blocks that saw the decision hold

    def run(self, *args, **kwargs) -> Any:
        module = self._module()
        if module is None:
            raise RuntimeError(
                f"the forward of {self.name or 'a model'} was called after its module had been freed"
            )
        if not self.injection.is_over:
            if self.knows_forward_of(module):
                return self.part.forward(module, self, *args, **kwargs)
            self.count([UNKNOWN_FORWARD])
        return type(module).forward(module, *args, **kwargs)

    def knows_forward_of(self, module: nn.Module) -> bool:
        """Whether the module's class has the forward that this one stands in for."""
        own = self.injection.originals[self.part.path].function
        return own is not None and type(module).forward is own

    def __deepcopy__(self, memo: dict) -> Injected:
        """That of the module's copy, where the module is being copied."""
        module: Any = self._module()
        injection = copy.deepcopy(self.injection, memo)
        duplicate = Injected(memo.get(id(module), module), self.part, self.name, injection)
        duplicate.had_attribute = self.had_attribute
        return duplicate

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise TypeError(
            f"{self.name or 'the model'} runs on injected kernels, which cannot be pickled: "
            "call eject_kernels first, or save the state_dict"
        )

    def parts(
        self,
        module: nn.Module,
        x: Tensor,
        *others: Tensor | None,
        takes: Callable[..., bool] = kernels_take,
    ) -> Any | None:
        """What a call works with; None, counted, where the class's own forward has to run.

        The tensors are those that the call is given and that the kernels are to take.
        """
        parts = self.decide(module)
        reason = parts.reason
        if reason is None and not takes(x, *others):
            reason = why_not_taken(x, *others)
        if reason is not None:
            self.count([reason])
            return None
        if parts.is_trusted:
            self.injection.tallies[self.name].on_kernels += 1
        else:
            self.count(parts.notes)
        return parts

    def class_forward(self, module: nn.Module, *args, **kwargs) -> Any:
        """Runs the forward that this one stands in for."""
        # torch.compile does not see through the attribute of every class.
        return self.injection.originals[self.part.path].function(module, *args, **kwargs)

    def decide(self, module: nn.Module) -> Any:
        """What the module's forward works with."""
        if torch.compiler.is_compiling():
            return self.part.decide(module, self.injection, Glance())
        forward = self.injection.local.forward
        if forward is not None and (forward.look is self.seen_in or forward.sees(module)):
            decision: Any = self._decision
            parts = decision.parts
            return parts.trusted if forward.trusts and parts.trusted is not None else parts
        if has_global_hooks():
            return Parts("hooks are registered for all modules")
        return self.decision(module, self.injection.functions()).parts

    @property
    def checked(self) -> Any:
        """The parts of the last decision, for calls that are not trusted."""
        decision: Any = self._decision
        return decision.parts

    @property
    def trusted(self) -> Any | None:
        """The parts of the last decision, for calls that are trusted, if it has such."""
        decision: Any = self._decision
        return decision.parts.trusted

    def parts_if_trusted(self) -> Any | None:
        """The parts of a call that is trusted, if this is one."""
        if torch.compiler.is_compiling():
            return None
        forward = self.injection.local.forward
        is_trusted = forward is not None and forward.trusts and forward.look is self.seen_in
        return self.trusted if is_trusted else None

    def decision(self, module: nn.Module, functions: tuple) -> Decision:
        """The part's decision, made again if anything that it was read from has changed.

        ``functions`` are those of ``Injection.functions``.
        """
        decision = self._decision
        if (
            decision is None
            or decision.functions is not functions
            or not decision.snapshot.holds(module)
        ):
            snapshot = Snapshot(module, self.injection.watch)
            parts = self.part.decide(module, self.injection, snapshot)
            # To decide may have added to the functions.
            decision = self._decision = Decision(parts, snapshot, self.injection.functions())
        return decision

    def count(self, reasons: list[str]) -> None:
        """Counts a call, with the reasons for which the model's own code computes it or parts of it."""
        if torch.compiler.is_compiling():
            return
        tally = self.injection.tallies[self.name]
        if not (reasons and tally.fall_back(reasons)):
            tally.on_kernels += 1

    def leave(self, reason: str) -> None:
        """Counts a call that the model's own code computes as a whole, unless the report said so."""
        if not torch.compiler.is_compiling():
            self.injection.tallies[self.name].fall_back([reason])

    def fall_back(self, reason: str) -> None:
        """Counts a call that was counted as one on the kernels as one that falls back in part."""
        if torch.compiler.is_compiling():
            return
        tally = self.injection.tallies[self.name]
        if tally.fall_back([reason]):
            tally.on_kernels -= 1
