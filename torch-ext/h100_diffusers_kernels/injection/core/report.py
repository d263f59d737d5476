"""What an injection did to each module, and how the calls of each replaced module have run."""

from __future__ import annotations

import collections
import logging
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from .adapters import describe_adapters

logger = logging.getLogger("h100_diffusers_kernels")

# How much of a model runs on the kernels.
IN_FULL, IN_PART, NOT_AT_ALL = "in full", "in part", "not at all"
ONLY_GRAPHS = "only in CUDA graphs"
# How a reason begins if it concerns only attention.
OWN_ATTENTION = "attention itself is the model's own"
# Environment variable: any value except 0 makes a fall-back an error.
STRICT = "H100_DIFFUSERS_KERNELS_STRICT"


class Replaced(NamedTuple):
    """A module that runs on the kernels now."""

    name: str
    module: str
    replacement: str


class LeftAlone(NamedTuple):
    """A module or a part of one that was not changed, and why."""

    name: str
    module: str
    reason: str


@dataclass
class Calls:
    """How the calls of a replaced module have run.

    Attributes:
        name: the module's qualified name.
        module: its class.
        on_kernels: the number of calls that ran on the kernels, in all that the report promised.
        fell_back: the number of calls that the model's own code computed, in full or in part, by reason.
        own_attention: the number of calls in which only attention was computed by the model's own code,
            because the user chose a backend or asks for a gradient, by reason. They are not fall-backs.
        in_int8: the number of attentions that were computed in 8 bits.
    """

    name: str
    module: str
    on_kernels: int = 0
    fell_back: dict[str, int] = field(default_factory=collections.Counter)
    own_attention: dict[str, int] = field(default_factory=collections.Counter)
    in_int8: int = 0


@dataclass
class GraphCalls:
    """How the calls of a model with CUDA graphs have run.

    Attributes:
        name: the model's name in the pipeline.
        module: its class.
        captured: the number of graphs captured, each during a call.
        replayed: the number of other calls that were replays.
        uncaptured: the number of calls that ran without a graph, by reason.
    """

    name: str
    module: str
    captured: int = 0
    replayed: int = 0
    uncaptured: dict[str, int] = field(default_factory=collections.Counter)


@dataclass
class InjectionReport:
    """The result of :func:`inject_kernels`. ``str()`` gives an entry for each kind of module, and the counts
    of calls up to now. In its names ``*`` stands for the indices of blocks.

    Attributes:
        replaced: each module replaced: its qualified name, its class, its replacement.
        left_alone: each module considered and not changed, or not as a whole: its qualified name, its class,
            why.
        quantized: the names of the linear layers that ``precision`` quantized to FP8. The others are in
            ``left_alone``.
        already_injected: whether everything was in place before the call, which changed nothing.
        levels: how much of each model runs on the kernels, by its name in the pipeline ("" if it was passed
            by itself): "in full" (its class is known as a whole), "in part" (its norms, activations and
            attentions, one by one), "only in CUDA graphs" (no kernels, and its forward is captured) or "not
            at all" (``left_alone`` says why).
        calls: how each replaced module's calls have run (a property).
        cuda_graphs: how the calls of each model with graphs have run (a property).
        adapters: how the active adapters of peft run now: a line for each way (a property).
        model_name: the model's name in the pipeline, in a report on one model.
        model: a weak reference to the model, in a report on one model.
    """

    replaced: list[Replaced] = field(default_factory=list)
    left_alone: list[LeftAlone] = field(default_factory=list)
    quantized: list[str] = field(default_factory=list)
    already_injected: bool = False
    levels: dict[str, str] = field(default_factory=dict)
    model_name: str = ""
    model: Callable[[], Any] = field(default=lambda: None, repr=False, compare=False)
    counts: dict[str, Calls] = field(default_factory=dict, repr=False, compare=False)
    graph_calls: GraphCalls | None = field(default=None, repr=False, compare=False)
    logged: set[tuple[str, str]] = field(default_factory=set, repr=False, compare=False)
    parts: list[InjectionReport] = field(default_factory=list, repr=False, compare=False)

    @property
    def calls(self) -> list[Calls]:
        """The calls of each replaced module, without those in compiled code and in replays of CUDA graphs."""
        return [
            Calls(
                *(join(part.model_name, c.name), c.module, c.on_kernels),
                *(dict(c.fell_back), dict(c.own_attention), c.in_int8),
            )
            for part in (self, *self.parts)
            for c in part.counts.values()
        ]

    @property
    def cuda_graphs(self) -> list[GraphCalls]:
        """The calls of each model with graphs; none without ``cuda_graphs=True``."""
        return [
            replace(calls, name=part.model_name, uncaptured=dict(calls.uncaptured))
            for part in (self, *self.parts)
            if (calls := part.graph_calls) is not None
        ]

    @property
    def adapters(self) -> list[str]:
        found = []
        for part in (self, *self.parts):
            model = part.model()
            lines = [] if model is None else describe_adapters(model)
            found += [f"{part.model_name}: {line}" if part.model_name else line for line in lines]
        return found

    @property
    def num_replaced(self) -> int:
        return len(self.replaced)

    @property
    def num_left_alone(self) -> int:
        return len(self.left_alone)

    def leave(self, name: str, module: object, reason: str) -> None:
        self.left_alone.append(LeftAlone(name, type(module).__name__, reason))

    def count_of(self, name: str, module: str) -> Calls:
        """The count of a replaced module's calls, in a report on one model."""
        return self.counts.setdefault(name, Calls(name, module))

    def fall_back(self, count: Calls, reason: str) -> None:
        """Counts a call that the model's own code computes, in full or in part. The first one for each reason
        and class of modules is logged.

        Raises:
            RuntimeError: if the environment forbids a fall-back.
        """
        name = join(self.model_name, count.name) or "the model"
        sentence = f"{name} ({count.module}) runs the model's own code: {reason}"
        if os.environ.get(STRICT, "0") not in ("", "0"):
            raise RuntimeError(f"{sentence} ({STRICT} makes this an error)")
        count.fell_back[reason] += 1
        if (count.module, reason) not in self.logged:
            self.logged.add((count.module, reason))
            alike = [c for c in self.counts.values() if c.module == count.module]
            logger.warning("%s (logged once for %s x %s)", sentence, len(alike), count.module)

    def fresh(self) -> InjectionReport:
        """The report of a model's copy, in which nothing is counted yet."""
        counts = {name: Calls(name, count.module) for name, count in self.counts.items()}
        return replace(self, counts=counts, graph_calls=None, logged=set(), parts=[])

    def add(self, other: InjectionReport) -> None:
        """Adds the report on one model, whose names are relative to it."""
        prefix = other.model_name
        self.replaced += [e._replace(name=join(prefix, e.name)) for e in other.replaced]
        self.left_alone += [e._replace(name=join(prefix, e.name)) for e in other.left_alone]
        self.quantized += [join(prefix, name) for name in other.quantized]
        self.levels.update({join(prefix, name): level for name, level in other.levels.items()})
        self.parts.append(other)

    def __str__(self) -> str:
        already = " (before this call already)" if self.already_injected else ""
        lines = [f"{self.num_replaced} replaced{already}, {self.num_left_alone} left alone"]
        lines += [self._level(name) for name in self.levels]
        if self.quantized:
            lines.append(f"{len(self.quantized)} linear layers quantized to FP8")
        lines += _entries("replaced", self.replaced) + _entries("left alone", self.left_alone)
        lines += self.adapters
        calls = self.calls
        on_kernels = sum(c.on_kernels for c in calls)
        fell_back = _totals((c.module, c.fell_back) for c in calls)
        own_attention = _totals((c.module, c.own_attention) for c in calls)
        if on_kernels or fell_back or own_attention:
            lines.append(f"calls on the kernels: {on_kernels}")
        if any(c.in_int8 for c in calls):
            lines.append(f"attentions in 8 bits: {sum(c.in_int8 for c in calls)}")
        lines += [f"calls on the model's own code: {total}" for total in fell_back]
        lines += [f"calls with the model's own attention: {total}" for total in own_attention]
        for graphs in self.cuda_graphs:
            counts = f"{graphs.captured} captured, {graphs.replayed} replayed"
            uncaptured = sum(graphs.uncaptured.values())
            name = graphs.name or "the model"
            lines.append(f"CUDA graphs of {name}: {counts}, {uncaptured} calls without")
        return "\n".join(lines)

    def _level(self, name: str) -> str:
        """A line on one model: how much of it runs on the kernels."""
        prefix = name and f"{name}."
        of_model = (entry.reason for entry in self.left_alone if entry.name.startswith(prefix))
        reasons = dict.fromkeys(r for r in of_model if r.startswith(OWN_ATTENTION))
        return "; ".join([f"{name or 'the model'}: {self.levels[name]}", *reasons])


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _totals(counts: Iterable[tuple[str, Mapping[str, int]]]) -> list[str]:
    """The sum for each class and reason, as text."""
    totals: collections.Counter[tuple[str, str]] = collections.Counter()
    for module, by_reason in counts:
        totals.update({(module, reason): count for reason, count in by_reason.items()})
    return [f"{count} x {module}: {reason}" for (module, reason), count in totals.items()]


def _entries(title: str, entries: Sequence[tuple[str, str, str]]) -> list[str]:
    """The modules of each class with the same text: their number, their names, the text."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, module, text in entries:
        groups.setdefault((module, text), []).append(name or "(the model)")
    wrap = partial(textwrap.wrap, width=100, subsequent_indent=" " * 6)
    lines = [f"{title}:"] if groups else []
    for (module, text), names in groups.items():
        alike = dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names)
        lines += wrap(f"  {len(names)} x {module}: {', '.join(alike)}", break_on_hyphens=False)
        lines += wrap(text, initial_indent=" " * 6)
    return lines
