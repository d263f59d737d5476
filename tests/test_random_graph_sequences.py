"""A part of the random sequences with CUDA graphs and without, and what they would find."""

import pytest
import torch
from torch.utils import _pytree

import random_graph_sequences
import random_sequences
from families import FAMILIES
from graphs import module_of
from random_graph_sequences import GraphTwins
from random_sequences import Difference

pytestmark = [
    pytest.mark.usefixtures("_one_thread", "_quiet"),
    pytest.mark.filterwarnings("ignore"),
]

SEQUENCES = 6


@pytest.mark.parametrize("family", [*FAMILIES, "pixart", "unet"])
def test_models_with_graphs_are_as_those_without(family, device):
    replayed = 0
    for seed in range(SEQUENCES):
        result = random_sequences.random_sequence(family, seed, device, GraphTwins)
        if result.failure:
            shorter = random_sequences.shrink(result)
            pytest.fail(f"{shorter.message}\n{shorter.traceback}", pytrace=False)
        replayed += result.counts["replayed"]
    assert replayed > 0


def test_a_seed_gives_a_sequence(device):
    first, second = (
        random_sequences.random_sequence("wan", 3, device, GraphTwins) for _ in range(2)
    )
    assert first.sequence == second.sequence
    assert first.counts == second.counts
    assert first.forwards > 0


def failures(device):
    """Of the first sequences of a model, as they come."""
    for seed in range(60):
        result = random_sequences.random_sequence("ltx", seed, device, GraphTwins)
        if result.failure:
            yield result


def test_a_package_that_does_not_look_is_found_out(kernel, device, monkeypatch):
    fingerprint = module_of(kernel, "model_fingerprint")
    monkeypatch.setattr(fingerprint.Fingerprint, "change", lambda self, model: None)
    found = next(result for result in failures(device) if "other bits" in result.failure)
    shorter = random_sequences.shrink(found)
    assert "other bits" in shorter.failure
    assert "from random_graph_sequences import GraphTwins" in shorter.message
    names = [step.name for step in shorter.sequence.steps]
    assert len(names) < len(found.sequence.steps)
    assert names[0] == "inject"
    assert names[-1] in ("forward", "finish")


def test_a_package_that_takes_all_calls_for_one_kind_is_found_out(kernel, device, monkeypatch):
    monkeypatch.setattr(module_of(kernel, "cuda_graphs"), "_settings", lambda: ())
    assert next(failures(device)).failure


def test_results_in_the_graphs_own_memory_are_found_out(kernel, device, monkeypatch):
    def own_results(capture):
        return _pytree.tree_unflatten(capture._leaves, capture._spec)

    monkeypatch.setattr(module_of(kernel, "graph_capture").Capture, "_copy_out", own_results)
    with GraphTwins("ltx", device=device) as twins:
        twins.inject()
        with pytest.raises(Difference, match="an output of before has changed"):
            twins.forward(options="no mask", seed=0, times=4)


def test_graphs_that_outlive_the_kernels_are_found_out(kernel, device, monkeypatch):
    stand_in = module_of(kernel, "cuda_graphs").GraphedStandIn
    monkeypatch.setattr(stand_in, "taken_out", lambda self: None)
    with GraphTwins("ltx", device=device) as twins:
        twins.inject()
        twins.forward(options="no mask", seed=0, times=3)
        graphs = [*twins.watch.captured]
        with pytest.raises(Difference, match="1 graphs are alive"):
            twins.eject()
        assert len(graphs) == 1


def test_calls_that_are_not_counted_are_found_out(kernel, device, monkeypatch):
    stand_in = module_of(kernel, "cuda_graphs").GraphedStandIn
    monkeypatch.setattr(stand_in, "_count", lambda self, reason: None)
    with GraphTwins("ltx", device=device) as twins:
        twins.inject()
        twins.forward(options="no mask", seed=0, times=3)
        with pytest.raises(Difference, match="3 calls, of which 2 are counted"):
            twins.eject()


@pytest.mark.parametrize("mode", random_graph_sequences.MODES)
def test_modes_end_with_their_call(device, mode):
    """And each is one in which a model can be called."""
    with GraphTwins("ltx", device=device, blocks=1) as twins:
        twins.inject()
        before = torch.get_default_dtype(), torch.is_grad_enabled()
        twins.forward(options="no mask", seed=0, mode=mode, times=2)
        assert (torch.get_default_dtype(), torch.is_grad_enabled()) == before
        assert twins.counts["calls that raise"] == 0
        twins.forward(options="no mask", seed=0, times=3)


@pytest.mark.parametrize("form", random_graph_sequences.GOOD_FORMS)
def test_forms_are_arguments_that_a_model_takes(device, form):
    with GraphTwins("ltx", device=device, blocks=1) as twins:
        twins.inject()
        twins.forward(options="no mask", seed=0, form=form, times=3)
        assert twins.forwards == 3
        assert twins.counts["calls that raise"] == 0
