"""The ways to replace or add something on an instance, each with its way back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable

from torch import nn

from .forward_slot import find_forward_slot
from .report import InjectionReport, LeftAlone, Replaced


class ForwardReplacement:
    """A module's innermost forward, replaced by a function of the same signature."""

    def __init__(self, module: nn.Module, function: Callable) -> None:
        self._module = module
        self._function = function
        self._had_attribute = False

    def apply(self) -> None:
        slot = find_forward_slot(self._module, type(self._module).forward)
        self._had_attribute = "forward" in vars(self._module)
        slot.bind(self._function)

    def undo(self) -> None:
        slot = find_forward_slot(self._module, self._function)
        if slot is None:
            return  # something else has been put in its place since, and stays
        if slot.is_instance_attribute and not self._had_attribute:
            slot.clear()
        else:
            slot.bind(type(self._module).forward)


class ProcessorReplacement:
    """An attention module's processor, replaced by one that keeps it as ``original``."""

    def __init__(self, attention: nn.Module, processor: Any) -> None:
        self._attention = attention
        self._processor = processor

    def apply(self) -> None:
        self._attention.processor = self._processor

    def undo(self) -> None:
        if self._attention.processor is self._processor:
            self._attention.processor = self._processor.original


class AddedAttribute:
    """An attribute added to an instance, which is this package's alone."""

    def __init__(self, module: nn.Module, name: str, value: Any) -> None:
        self._module = module
        self._name = name
        self._value = value

    def apply(self) -> None:
        setattr(self._module, self._name, self._value)

    def undo(self) -> None:
        vars(self._module).pop(self._name, None)


@dataclass
class Plan:
    """What a family does to one model, before and after it is done. Names are the model's."""

    report: InjectionReport = field(default_factory=InjectionReport)
    replacements: list = field(default_factory=list)

    def replace_forward(self, name: str, module: nn.Module, function: Callable, by: str) -> bool:
        """False, with an entry in the report, if the class's forward is not the one in use."""
        if find_forward_slot(module, type(module).forward) is None:
            return self.leave(name, module, "its forward was replaced by something else")
        self.replacements.append(ForwardReplacement(module, function))
        self.report.replaced.append(Replaced(name, type(module).__name__, by))
        return True

    def replace_processor(self, name: str, attention: nn.Module, processor: Any, by: str) -> bool:
        self.replacements.append(ProcessorReplacement(attention, processor))
        self.report.replaced.append(Replaced(name, type(attention).__name__, by))
        return True

    def leave(self, name: str, module: nn.Module, reason: str) -> bool:
        self.report.left_alone.append(LeftAlone(name, type(module).__name__, reason))
        return False

    def apply(self) -> None:
        for replacement in self.replacements:
            replacement.apply()

    def undo(self) -> None:
        for replacement in reversed(self.replacements):
            replacement.undo()
