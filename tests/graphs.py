"""Shared by the tests of CUDA graphs: graphs on a CPU, and pairs of models with and without graphs."""

import copy
import sys

import pytest
import torch

from emulated_graphs import EmulatedGraph, Record
from family import joined


def module_of(kernel, name):
    """One of the modules of the package's injection."""
    return sys.modules[f"{kernel.__name__}.injection.{name}"]


@pytest.fixture
def graphs(kernel, monkeypatch):
    """The package with emulated graphs on a CPU."""
    use_emulated_graphs(kernel)
    monkeypatch.setitem(module_of(kernel, "graphs.cuda_graphs").GRAPHS, "cpu", EmulatedGraph)
    return kernel


def use_emulated_graphs(kernel, *modes):
    """The emulated capture is a dispatch mode, in which the kernels must still run."""
    module_of(kernel, "core.checks").TRANSPARENT_MODES.update((Record, *modes))


class Pair:
    """A model with graphs, and the same model injected without graphs. ``change`` is applied to both."""

    def __init__(self, kernel, family, device, dtype=torch.float32, config=None, **options):
        self.family, self.device, self.dtype = family, device, dtype
        self.model = family.model(device, dtype, **(config or {})).eval()
        self.plain = copy.deepcopy(self.model)
        kernel.inject_kernels(self.plain)
        self.report = kernel.inject_kernels(self.model, cuda_graphs=True, **options)
        self.seed = 0

    @property
    def calls(self):
        (calls,) = self.report.cuda_graphs
        return calls

    def both(self, change):
        change(self.plain)
        change(self.model)

    def inputs(self, **options):
        self.seed += 1
        return self.family.inputs(self.device, self.dtype, seed=self.seed, **options)

    @torch.inference_mode()
    def call(self, arguments=None, **options):
        """The output with graphs, after a bitwise comparison with the one without."""
        arguments = self.inputs(**options) if arguments is None else arguments
        out = joined(self.model(**arguments, return_dict=False)[0])
        expected = joined(self.plain(**arguments, return_dict=False)[0])
        torch.testing.assert_close(
            out, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{text}\n{self.calls}"
        )
        return out

    def captured(self, **options):
        """Calls until the first replay; returns the number of calls."""
        replayed = self.calls.replayed
        for calls in range(1, 9):
            self.call(**options)
            if self.calls.replayed > replayed:
                return calls
        raise AssertionError(f"no replay in 8 calls: {self.calls}")
