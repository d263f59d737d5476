"""CUDA graphs of models whose tokens ranks share, emulated on CPUs: all ranks replay a graph, or none."""

import copy
import datetime

import pytest
import torch
import torch.distributed as dist

from checks import relative_distance
from families import FAMILIES, run
from graphs import EmulatedGraph, module_of, use_emulated_graphs
from ranks import in_ranks
from test_context_parallel import (
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

    def __init__(self, kernel, name, how, is_injected_first=True):
        prepare_rank()
        use_emulated_graphs(kernel)
        module_of(kernel, "graphs.cuda_graphs").GRAPHS["cpu"] = EmulatedGraph
        self.family, self.model, self.plain = model_of(name)
        self.whole = copy.deepcopy(self.plain)
        for model, options in ((self.plain, {}), (self.model, {"cuda_graphs": True})):
            if not is_injected_first:
                parallelize(kernel, model, how)
            self.report = kernel.inject_kernels(model, **options)
            if is_injected_first:
                self.call_alone(model)
                parallelize(kernel, model, how)
        self.seed = 0

    def call_alone(self, model):
        """Before it is parallel, until its graph is replayed."""
        for seed in range(3):
            run(model, inputs_of(self.family, options=INPUTS[self.family.name][0], seed=seed))

    @property
    def counts(self):
        """The numbers of calls of this rank that captured a graph, were replays, and neither."""
        (calls,) = self.report.cuda_graphs
        return calls.captured, calls.replayed, sum(calls.uncaptured.values())

    def arguments(self, **options):
        self.seed += 1
        options = INPUTS[self.family.name][0] | options
        return inputs_of(self.family, options=options, seed=self.seed)

    @torch.inference_mode()
    def call(self, **options):
        """Whether a call was a replay, after a bitwise comparison with the model without graphs."""
        arguments, before = self.arguments(**options), self.counts[1]
        out, expected = run(self.model, arguments), run(self.plain, arguments)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        return self.counts[1] > before

    def calls_until_replayed(self, most=8, **options):
        return next(i for i in range(1, most + 1) if self.call(**options))


def of_all_ranks(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@pytest.mark.drawn(times=0, period=6)
@pytest.mark.parametrize("how", [ULYSSES, RING], ids=["ulysses", "ring"])
@pytest.mark.parametrize("name", [name for name in INPUTS if name in FAMILIES])
@in_ranks
def test_forwards_are_replayed(kernel, name, how):
    """With one graph for each kind of calls, right after the model in one process."""
    pair = Pair(kernel, name, how, is_injected_first=how == ULYSSES)
    captured, replayed, others = pair.counts
    assert pair.calls_until_replayed() == 3
    assert pair.calls_until_replayed(batch=3) == 3
    assert pair.call() and pair.call()
    expected = (captured + 2, replayed + 4, others + 2)
    assert of_all_ranks(pair.counts) == [expected] * 2
    arguments = pair.arguments()
    assert relative_distance(run(pair.model, arguments), run(pair.whole, arguments)) < 2e-6


def moved(pair):
    weight = pair.family.part(pair.model, "linear").weight
    weight.data = weight.data.clone()


def raising(error):
    def capture(*_):
        raise error

    return capture


@in_ranks
def test_one_rank_changes(kernel, rank, monkeypatch):
    """Then no rank replays, no rank waits, and all replay again as soon as they can."""
    module_of(kernel, "parallel.groups")._has_cpu = lambda group: False  # as of NCCL's groups
    pair = Pair(kernel, "flux", ULYSSES)
    pair.calls_until_replayed()
    if rank == 1:
        moved(pair)
    assert not pair.call()
    assert len(set(of_all_ranks(pair.calls_until_replayed()))) == 1

    block = pair.family.part(pair.model, "block")
    if rank == 1:
        handle = block.register_forward_hook(lambda *_: None)
    assert not any(pair.call() for _ in range(4))
    assert of_all_ranks(pair.counts[0]) == [pair.counts[0]] * 2
    if rank == 1:
        handle.remove()
    assert len(set(of_all_ranks(pair.calls_until_replayed()))) == 1

    # Another kind of calls, whose capture fails on one rank, or with which it is refused.
    graphs = module_of(kernel, "graphs.cuda_graphs")
    for batch, error in ((3, torch.OutOfMemoryError()), (4, RuntimeError("no capture"))):
        with monkeypatch.context() as patch:
            if rank == 1:
                patch.setattr(graphs, "Capture", raising(error))
            assert not any(pair.call(batch=batch) for _ in range(4))
        assert pair.calls_until_replayed() <= 3
    with torch.autograd.set_detect_anomaly(rank == 1):
        assert not pair.call()
    if rank == 1:
        # Its graphs begin anew, with other numbers than those of the others.
        kernel.eject_kernels(pair.model)
        pair.report = kernel.inject_kernels(pair.model, cuda_graphs=True)
    assert pair.calls_until_replayed() <= 4
    assert pair.call()


@pytest.mark.parametrize("ranks", [4])
@in_ranks
def test_hosts_of_some_ranks(kernel, rank, ranks):
    """Other ranks do not take part in an exchange, and may have exchanged with others before."""
    groups = module_of(kernel, "parallel.groups")
    groups._has_cpu = lambda group: False
    pair, everyone = dist.new_group([0, 1]), dist.new_group()
    if rank < 2:
        assert groups.host_group(pair).gather(rank, 7) == [[0, 7], [1, 7]]
    assert groups.host_group(everyone).gather(rank) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("where", ["", "block"], ids=["before-the-graph", "within-a-forward"])
@in_ranks
def test_one_rank_fails(kernel, rank, where, tmp_path):
    """The others raise, too, after the group's time limit."""
    pair = Pair(kernel, "flux", ULYSSES)
    pair.calls_until_replayed()
    config = pair.model._parallel_config.context_parallel_config
    for group in {mesh.get_group() for mesh in (config._flattened_mesh, config._ulysses_mesh)}:
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=2), group)
    if rank == 1:
        failing = pair.family.part(pair.model, where) if where else pair.model
        failing.register_forward_pre_hook(raising(ValueError()))
    with torch.inference_mode(), pytest.raises(ValueError if rank == 1 else RuntimeError):
        run(pair.model, pair.arguments())
    dist.destroy_process_group()  # its connections are broken
    rendezvous = f"file://{tmp_path}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)


@in_ranks
def test_graphs_end_with_the_groups(kernel):
    """``destroy_process_group`` would wait for them without end."""
    group, before = dist.new_group(), EmulatedGraph.alive
    pair = Pair(kernel, "flux", ULYSSES)
    pair.calls_until_replayed()
    assert EmulatedGraph.alive == before + 1
    dist.destroy_process_group(group)
    assert EmulatedGraph.alive == before
