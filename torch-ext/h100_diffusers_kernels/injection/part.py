"""What a kind of module is to its family: its class, the forward that stands in, and what that works with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Callable, NamedTuple

from torch import nn

from .injected import Injection, Parts
from .original import Original, find_class, find_original
from .snapshot import Look, Snapshot


@dataclass(frozen=True)
class Part:
    """A kind of module whose forward is replaced. Subclasses add what its forward works with.

    Attributes:
        path: of its class, ``module:class``. Subclasses without a forward of their own belong to it.
        parameters: of the class's forward, in order.
        forward: stands in for it: ``forward(module, injected, *args, **kwargs)``.
        operations: what it runs on, for the report.
    """

    path: str
    parameters: str | None
    forward: Callable
    operations: str

    def is_kind_of(self, module: nn.Module) -> bool:
        cls = find_class(self.path)
        return cls is not None and isinstance(module, cls)

    def originals(self) -> dict[str, Original]:
        """The functions that the forward stands in for, besides its class's own."""
        return {}

    def own_forward(self) -> Original:
        return find_original(f"{self.path}.forward", self.parameters)

    def decide(self, module: nn.Module, injection: Injection, snapshot: Look) -> Parts:
        """What the forward works with, as the module is now."""
        parts = Parts()
        self.see(module, snapshot)
        self.fill(parts, module, injection, snapshot)
        if parts.reason is None and not parts.notes and isinstance(snapshot, Snapshot):
            parts.trusted = self.trust(parts, module, snapshot)
        return parts

    def see(self, module: nn.Module, snapshot: Look) -> None:
        snapshot.see_tree(module)

    def fill(self, parts: Parts, module: nn.Module, injection: Injection, snapshot: Look) -> None:
        """Adds what the forward works with, or the reason for which it cannot."""

    def trust(self, parts: Parts, module: nn.Module, snapshot: Look) -> Parts | None:
        """What the forward works with in calls that nothing unknown runs in; None if it is nothing else."""
        return None

    def has_own_method(
        self, module: nn.Module, name: str, injection: Injection, snapshot: Look
    ) -> bool:
        """Whether a method, which is among the originals, is its class's as the library defines it."""
        known = injection.originals[f"{self.path}.{name}"].function
        return (
            snapshot.see(module.__dict__, name) is None
            and snapshot.see_method(type(module), name) is known
        )

    def describe(self, parts: Parts) -> str:
        return self.operations


class Family(NamedTuple):
    """Models whose blocks are alike.

    Attributes:
        name: as its users know it.
        parts: the kinds of modules whose forwards are replaced, the models themselves among them.
        left_alone: names of modules of the model that are not, and why.
        outside: parts of modules of the model that are in none of its blocks, by name.
    """

    name: str
    parts: tuple[Part, ...]
    left_alone: dict[str, str]
    outside: Mapping[str, Part] = MappingProxyType({})
