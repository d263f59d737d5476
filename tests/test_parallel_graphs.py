"""CUDA graphs of models whose tokens ranks share, emulated on CPUs: all ranks replay a graph, or none."""

import copy
import datetime
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from checks import relative_distance
from families import FAMILIES, run
from graphs import EmulatedGraph, module_of, use_emulated_graphs
from ranks import in_ranks
from test_context_parallel import (
    BOTH,
    INPUTS,
    RING,
    ULYSSES,
    inputs_of,
    model_of,
    parallelize,
    prepare_rank,
)


class Pair:
    """A parallel model with graphs, and the same parallel model without."""

    def __init__(self, kernel, name, how, is_injected_first=True, **config):
        prepare_rank()
        use_emulated_graphs(kernel)
        self.graphs = module_of(kernel, "graphs.cuda_graphs").GRAPHS
        self.graphs["cpu"] = EmulatedGraph
        self.family, self.model, self.plain = model_of(name, **config)
        self.whole = copy.deepcopy(self.plain)
        for model, options in ((self.plain, {}), (self.model, {"cuda_graphs": True})):
            if not is_injected_first:
                parallelize(kernel, model, how)
            self.report = kernel.inject_kernels(model, **options)
            if is_injected_first:
                parallelize(kernel, model, how)
        self.seed = 0

    @property
    def counts(self):
        """Captured, replayed, and others, of this rank."""
        (calls,) = self.report.cuda_graphs
        return calls.captured, calls.replayed, sum(calls.uncaptured.values())

    @property
    def reasons(self):
        (calls,) = self.report.cuda_graphs
        return set(calls.uncaptured)

    @torch.inference_mode()
    def call(self, **options):
        """Compares a call bit by bit with one without graphs; whether it was a replay."""
        self.seed += 1
        arguments = inputs_of(self.family, options=options, seed=self.seed)
        before = self.counts[1]
        out, expected = run(self.model, arguments), run(self.plain, arguments)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        return self.counts[1] > before

    def until_replayed(self, calls=4, **options):
        """The number of calls until a replay."""
        return next(i for i in range(1, calls + 1) if self.call(**options))

    def check(self):
        """Against the model in one process."""
        arguments = inputs_of(self.family, seed=self.seed + 1)
        assert relative_distance(run(self.plain, arguments), run(self.whole, arguments)) < 2e-6


def everyone(value):
    """The values of all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@pytest.mark.parametrize(
    ("name", "how"),
    [("flux", ULYSSES), ("wan", ULYSSES), ("sd3", ULYSSES), ("ltx", RING), ("qwenimage", RING)],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
@in_ranks
def test_forwards_are_replayed(kernel, name, how):
    for is_first in (True, False):
        pair = Pair(kernel, name, how, is_first)
        options = INPUTS[name][0]
        assert pair.until_replayed(**options) == 3
        assert pair.until_replayed(**options | {"batch": 3}) == 3  # another kind of calls
        assert pair.call(**options) and pair.call(**options)
        assert everyone(pair.counts) == [(2, 4, 2)] * 2
