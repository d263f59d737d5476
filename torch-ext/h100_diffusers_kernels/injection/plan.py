"""What is done to one model, and its way back."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from .cuda_graphs.device import Pool
from .cuda_graphs.forward import GraphedForward
from .cuda_graphs.tally import GraphTally
from .forward_slot import ReplicaMaker, class_forward_slot, stand_in_slot
from .injected import UNKNOWN_FORWARD, Injected, Injection
from .model_forward import Model
from .original import Original, class_name
from .part import Family, Part
from .report import IN_FULL, NOT_AT_ALL, InjectionReport, LeftAlone, Replaced
from .snapshot import Glance
from .tally import Tally

# Of a model without a family.
NO_MODULE = "it has no module that there is a kernel for"


class Plan:
    """The forwards to be put into a model, and the report on them. Names are the model's.

    Attributes:
        options: those of ``inject_kernels``.
        report: what is replaced, and what is not.
        is_empty: whether there is nothing to do.
    """

    def __init__(self, injection: Injection, options: dict[str, Any]) -> None:
        self.options = options
        self.report = InjectionReport()
        self._injection = injection
        self._planned: list[Injected] = []
        self._graphed: nn.Module | None = None
        self._graphs: weakref.ref | None = None  # the forward that was put around the model's
        self._modules: list[weakref.ref] = []  # a model that is dropped is to be freed

    def __deepcopy__(self, memo: dict) -> Plan:
        """That of the model's copy."""
        duplicate = Plan(copy.deepcopy(self._injection, memo), self.options)
        duplicate.report.extend("", self.report)
        duplicate._report_tallies()
        copies = [memo.get(id(reference())) for reference in self._modules]
        duplicate._modules = [weakref.ref(module) for module in copies if module is not None]
        graphs = None if self._graphs is None else self._graphs()
        if graphs is not None:
            duplicate._graphs = weakref.ref(copy.deepcopy(graphs, memo))
        return duplicate

    @property
    def is_empty(self) -> bool:
        return not (self._planned or self._graphed is not None or self._modules)

    @property
    def found_nothing(self) -> bool:
        """Whether there is no module that could have been replaced."""
        return self.is_empty and all(entry.reason == NO_MODULE for entry in self.report.left_alone)

    def replace_forward(self, name: str, module: nn.Module, part: Part) -> None:
        """Plan it, or report why not."""
        if class_forward_slot(module) is None:
            self.leave(name, module, "its forward was replaced by something else")
            return
        injected = Injected(module, part, name, self._injection)
        if not injected.knows_forward_of(module):
            self.leave(name, module, UNKNOWN_FORWARD)
            return
        parts = part.decide(module, self._injection, Glance())
        if parts.reason is None:
            operations = part.describe(parts)
            self.report.replaced.append(Replaced(name, type(module).__name__, operations))
        for reason in (parts.reason, *parts.notes, *parts.choices):
            if reason is not None:
                self.leave(name, module, reason)
        # Its parts are looked up at each call: they may be others by then.
        self._planned.append(injected)
        reported = (parts.reason, *parts.notes)
        self._injection.tallies[name] = Tally(name, type(module).__name__, reported)

    def capture(self, model: nn.Module) -> None:
        """Plan to capture the model's calls, or report why not."""
        if class_forward_slot(model) is None:
            self.leave("", model, "no CUDA graphs: its forward was replaced by something else")
            return
        self._injection.graphs = GraphTally("", type(model).__name__)
        self._graphed = model

    def leave(self, name: str, module: nn.Module, reason: str) -> None:
        self.report.left_alone.append(LeftAlone(name, type(module).__name__, reason))

    def apply(self, pool: Pool) -> None:
        """Do all of it, or nothing. Graphs use the memory of ``pool``."""
        planned, self._planned = self._planned, []
        graphed, self._graphed = self._graphed, None
        modules: list[Any] = [injected.module for injected in planned]
        if graphed is not None and all(module is not graphed for module in modules):
            modules.append(graphed)
        self._modules = [weakref.ref(module) for module in modules]
        self._report_tallies()
        try:
            for injected in planned:
                _put_in(injected)
            if graphed is not None:
                limit = self.options["max_cuda_graphs"]
                self._graphs = _put_around(graphed, self._injection, limit, pool)
        except BaseException:
            _take_out(modules)
            raise

    def undo(self, model: nn.Module) -> None:
        """Give back its forward to each module that is, or was at the injection, the model's.

        One whose forward was replaced by something else since keeps that.
        """
        self._injection.is_over = True
        modules = (reference() for reference in self._modules)
        _take_out([*model.modules(), *(module for module in modules if module is not None)])
        graphs = None if self._graphs is None else self._graphs()
        if graphs is not None:  # something unknown may have been put around it
            graphs.taken_out()

    def _report_tallies(self) -> None:
        self.report.tallies = [("", tally) for tally in self._injection.tallies.values()]
        graphs = self._injection.graphs
        self.report.graph_tallies = [] if graphs is None else [("", graphs)]


def _put_in(injected: Injected) -> None:
    module: Any = injected.module
    slot: Any = class_forward_slot(module)
    injected.had_attribute = "forward" in vars(module)
    ReplicaMaker.put_in(module)
    slot.fill(injected.run)


def _put_around(model: nn.Module, injection: Injection, limit: int, pool: Pool) -> weakref.ref:
    """Graphs around what stands in for the model's forward, or around its class's own."""
    slot: Any = stand_in_slot(model)
    inner = None if slot is None else slot.stand_in
    graphed = GraphedForward(model, inner, injection, limit, pool)
    if inner is None:
        slot = class_forward_slot(model)
        graphed.had_attribute = "forward" in vars(model)
        ReplicaMaker.put_in(model)
    else:
        graphed.had_attribute = inner.had_attribute
    slot.fill(graphed.run)
    return weakref.ref(graphed)


def _take_out(modules: Iterable[Any]) -> None:
    for module in modules:
        ReplicaMaker.take_out(module)
        slot = stand_in_slot(module)
        if slot is None:
            continue
        stand_in: Any = slot.stand_in
        if slot.is_instance_attribute and not stand_in.had_attribute:
            slot.clear()
        else:
            slot.fill_with_class_forward()
        stand_in.taken_out()


def plan_model(model: nn.Module, family: Family, options: dict[str, Any]) -> Plan:
    """What to replace in a model of a family, what not, and why not."""
    parts: tuple[Part, ...] = family.parts
    originals: dict[str, Original] = {}
    for known in (*parts, *family.outside.values()):
        originals.update({known.path: known.own_forward(), **known.originals()})
    models = (part for part in parts if isinstance(part, Model))
    blocks = next(known.blocks for known in models if known.is_kind_of(model))
    plan = Plan(Injection(options["attention"], originals, blocks), options)
    if getattr(model, "_parallel_config", None) is not None:
        plan.leave("", model, "parallelism is on: each rank holds a part of the tokens only")
        plan.report.levels[""] = NOT_AT_ALL
        return plan
    for name, module in model.named_modules():
        outside = (family.outside[name],) if name in family.outside else ()
        part = next((part for part in (*outside, *parts) if part.is_kind_of(module)), None)
        if part is not None:
            plan.replace_forward(name, module, part)
        for path in getattr(part, "inner", ()):
            _report_stranger(plan, name, module, path, parts)
    for name, reason in family.left_alone.items():
        module = getattr(model, name, None)
        if isinstance(module, nn.Module):
            plan.leave(name, module, reason)
    plan.report.levels[""] = IN_FULL
    return plan


def _report_stranger(
    plan: Plan, name: str, block: nn.Module, path: str, parts: tuple[Part, ...]
) -> None:
    """Where a part is expected in a block and something else is found, the report names it."""
    module: Any = block
    for child in path.split("."):
        if child not in module._modules:
            break  # what is there instead is built in another way
        module, name = module._modules[child], f"{name}.{child}"
    if module is not None and not any(part.is_kind_of(module) for part in parts):
        plan.leave(name, module, f"a {class_name(module)}, called as it is")
