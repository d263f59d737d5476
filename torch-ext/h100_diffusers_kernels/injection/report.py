"""What an injection did, module by module."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .cuda_graphs.tally import GraphTally
from .tally import Tally

# How much of a model runs on the kernels.
IN_FULL, IN_PART, NOT_AT_ALL = "in full", "in part", "not at all"


@dataclass(frozen=True)
class Replaced:
    """A module that runs on the kernels now."""

    name: str
    module: str
    replacement: str


@dataclass(frozen=True)
class LeftAlone:
    """A module that was not changed, or a part of one, and why."""

    name: str
    module: str
    reason: str


@dataclass(frozen=True)
class Calls:
    """How the calls of a replaced module were computed so far.

    Attributes:
        name: the module's qualified name.
        module: its class.
        on_kernels: how many ran on the kernels, in all that the report promised.
        fell_back: how many the model's own code computed, as a whole or in part, by reason.
    """

    name: str
    module: str
    on_kernels: int
    fell_back: dict[str, int]


@dataclass(frozen=True)
class GraphCalls:
    """How the calls of a model that may be captured into CUDA graphs ran so far.

    Attributes:
        name: the model's name in the pipeline.
        module: its class.
        captured: how many graphs were captured, each in the call that it is of.
        replayed: how many other calls were replays of them.
        uncaptured: how many calls ran as they are, by reason.
    """

    name: str
    module: str
    captured: int
    replayed: int
    uncaptured: dict[str, int]


@dataclass
class InjectionReport:
    """The result of :func:`inject_kernels`; ``str()`` gives one line for each kind of module.

    Attributes:
        replaced: each module replaced: its qualified name, its class, what it is replaced by.
        left_alone: each module looked at and not changed, or not as a whole: its qualified name, its
            class, why.
        already_injected: whether everything was in place before the call, which changed nothing.
        levels: how much of each model runs on the kernels, by its name in the pipeline ("" where it was
            given by itself): "in full" (its class is known as a whole), "in part" (its norms, activations
            and attentions, each by itself) or "not at all" (``left_alone`` says why).
        calls: how each replaced module's calls were computed up to now (a property).
        cuda_graphs: how the calls of each model that may be captured ran up to now (a property).
    """

    replaced: list[Replaced] = field(default_factory=list)
    left_alone: list[LeftAlone] = field(default_factory=list)
    already_injected: bool = False
    levels: dict[str, str] = field(default_factory=dict)
    tallies: list[tuple[str, Tally]] = field(default_factory=list, repr=False, compare=False)
    graph_tallies: list[tuple[str, GraphTally]] = field(
        default_factory=list, repr=False, compare=False
    )

    @property
    def calls(self) -> list[Calls]:
        """The calls of each replaced module up to now. What torch.compile has compiled is not counted, and
        neither is what a CUDA graph replays."""
        return [
            Calls(join(prefix, tally.name), tally.module, tally.on_kernels, dict(tally.fell_back))
            for prefix, tally in self.tallies
        ]

    @property
    def cuda_graphs(self) -> list[GraphCalls]:
        """The calls of each model that may be captured, up to now; none without ``cuda_graphs=True``."""
        return [
            GraphCalls(
                join(prefix, tally.name),
                tally.module,
                tally.captured,
                tally.replayed,
                dict(tally.uncaptured),
            )
            for prefix, tally in self.graph_tallies
        ]

    @property
    def num_replaced(self) -> int:
        return len(self.replaced)

    @property
    def num_left_alone(self) -> int:
        return len(self.left_alone)

    def extend(self, prefix: str, other: InjectionReport) -> None:
        """Adds the entries of ``other``, whose names are relative to the module ``prefix``."""
        pairs: tuple[tuple[list, list], ...] = (
            (self.replaced, other.replaced),
            (self.left_alone, other.left_alone),
        )
        for entries, more in pairs:
            entries.extend(replace(entry, name=join(prefix, entry.name)) for entry in more)
        self.levels.update({join(prefix, name): level for name, level in other.levels.items()})
        self.tallies.extend((join(prefix, name), tally) for name, tally in other.tallies)
        self.graph_tallies.extend(
            (join(prefix, name), tally) for name, tally in other.graph_tallies
        )

    def __str__(self) -> str:
        already = " (before this call already)" if self.already_injected else ""
        lines = [f"{self.num_replaced} replaced{already}, {self.num_left_alone} left alone"]
        lines += [f"{name or 'the model'}: {level}" for name, level in self.levels.items()]
        lines += _table(
            "replaced", [(entry.module, entry.replacement, entry.name) for entry in self.replaced]
        )
        lines += _table(
            "left alone", [(entry.module, entry.reason, entry.name) for entry in self.left_alone]
        )
        return "\n".join(lines)


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _table(title: str, entries: list[tuple[str, str, str]]) -> list[str]:
    """One line for the modules of a class that share a text, with the first and the last name."""
    groups: dict[tuple[str, str], list[str]] = {}
    for module, text, name in entries:
        groups.setdefault((module, text), []).append(name or "(the model)")
    rows = [
        (f"{len(names)} x {module}", names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}")
        + (text,)
        for (module, text), names in groups.items()
    ]
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return [f"{title}:"] + [
        f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}" for row in rows
    ]
