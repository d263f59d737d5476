"""Some random sequences of each kind, faults that they must find, and their failure reports."""

import pytest
import torch
from torch.utils import _pytree

import random_sequences
from changes import FP8_CHANGES
from families import FAMILIES, WAITING
from graphs import module_of
from random_inputs import GOOD_FORMS, QUIET_FORMS
from random_modes import GRAPH_MODES
from random_sequences import Difference, Refused, Twins

pytestmark = [
    pytest.mark.usefixtures("_one_thread", "_quiet"),
    pytest.mark.filterwarnings("ignore"),
]

kinds = pytest.mark.parametrize("graphs", [False, True], ids=["kernels", "graphs"])


# Some families' own code waits for the GPU, FIBO 2's with prompts of two lengths: no graph is captured.
CASES = {
    f"{family}-{kind}": (family, kind)
    for kind in ("kernels", "graphs", "fp8", "graphs in fp8")
    for family in [*FAMILIES, "unet", "minimax_music3"]
    if "graphs" not in kind or family not in (*WAITING, "bria_fibo2")
}
families_and_kinds = pytest.mark.parametrize(("family", "kind"), CASES.values(), ids=CASES)


def check(family, seed, device, kind):
    graphs = "graphs" in kind
    result = random_sequences.random_sequence(family, seed, device, graphs, "fp8" in kind)
    if result.failure:
        pytest.fail(f"{result.message}\n{result.traceback}", pytrace=False)
    if graphs and not result.refused and not result.counts["calls that raise"]:
        first = next(step for step in result.sequence.steps if step.name == "inject")
        assert result.counts["replayed"] > 0 or not first.arguments["graphs"]


@pytest.mark.drawn(times=0)
@pytest.mark.parametrize("seed", range(4, 8))
@families_and_kinds
def test_models_do_what_plain_ones_do(device, family, kind, seed):
    check(family, seed, device, kind)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(4), *range(8, 12)])
@families_and_kinds
def test_more_sequences(device, family, kind, seed):
    check(family, seed, device, kind)


@pytest.mark.parametrize("how", FP8_CHANGES)
def test_changes_of_weights_in_fp8(device, how):
    with Twins("ltx", dtype="bfloat16", fp8=True, device=device) as twins:
        twins.quantize_fp8()
        twins.add_lora()
        twins.inject()
        for index in range(3):
            twins.forward()
            twins.change_fp8(how=how, index=index)
        twins.forward()
        twins.finish()


@pytest.mark.parametrize("how", FP8_CHANGES)
def test_changes_of_weights_in_fp8_reach_graphs(device, how):
    """A graph reads the memory of its weights. New weights need a new graph."""
    with Twins("ltx", dtype="bfloat16", graphs=True, fp8=True, device=device, blocks=1) as twins:
        twins.quantize_fp8()
        twins.inject(graphs=True)
        twins.forward(times=3)
        twins.change_fp8(how=how)
        twins.forward(times=3)
        counts = twins.watch.check()
        expected = (1, 4) if how.endswith("in place") else (2, 2)
        assert (counts["captured"], counts["replayed"]) == expected


@kinds
def test_a_seed_gives_a_sequence(device, graphs):
    """A sequence without concurrent threads, so that calls are counted in order."""
    first, second = (random_sequences.random_sequence("ltx", 4, device, graphs) for _ in range(2))
    assert (first.sequence, first.counts) == (second.sequence, second.counts)
    assert first.forwards == second.forwards > 0


# ------------------------------------------------------------------------------------------------
# Faults are found


def test_both_raise_the_same_or_it_is_a_difference():
    def raises(twins, error):
        def act(model):
            raise error if model is twins.tested else ValueError

        return act

    with Twins("ltx") as twins:
        with pytest.raises(Refused):
            twins.apply(raises(twins, ValueError))
        with pytest.raises(Difference, match="KeyError.*plain model: ValueError"):
            twins.apply(raises(twins, KeyError))
        with pytest.raises(Difference, match="no error"):
            twins.apply(lambda model: 1 // (model is twins.tested))


def test_hooks_of_a_float32_model_that_raises_alone_do_not_count(device):
    """A copy with layerwise casting runs the forwards of the original, whose weights are in FP8. Autocast
    converts them for the others, and is off for the float32 model."""
    with Twins("ltx", dtype="bfloat16", device=device) as twins:
        twins.inject()
        twins.layerwise_casting()
        twins.deepcopy()
        twins.global_hook(cls=None)
        twins.forward(mode="autocast")
        assert "float32" not in twins.models


def test_stale_graphs_are_found(kernel, device, monkeypatch):
    fingerprint = module_of(kernel, "graphs.model_fingerprint").Fingerprint
    monkeypatch.setattr(fingerprint, "change", lambda self, model: None)
    results = (random_sequences.random_sequence("ltx", s, device, True) for s in range(8))
    assert any("other bits" in (result.failure or "") for result in results)


def own_results(capture):
    """Results that are not copied out of the graph's memory."""
    return _pytree.tree_unflatten(capture._leaves, capture._spec)


@pytest.mark.parametrize(
    ("owner", "name", "replacement", "message"),
    [
        (
            "graphs.graph_capture.Capture",
            "_copy_out",
            own_results,
            "an output of an earlier call has",
        ),
        ("graphs.cuda_graphs.GraphedStandIn", "taken_out", lambda self: None, "1 graphs are alive"),
        (
            *("graphs.cuda_graphs.GraphedStandIn", "_count", lambda self, reason: None),
            "4 calls, of which 3 are counted",
        ),
    ],
    ids=["results in the graph's memory", "graphs that outlive the kernels", "uncounted calls"],
)
def test_faults_of_graphs_are_found(kernel, device, monkeypatch, owner, name, replacement, message):
    module, _, cls = owner.rpartition(".")
    monkeypatch.setattr(getattr(module_of(kernel, module), cls), name, replacement)
    with Twins("ltx", graphs=True, device=device) as twins:
        twins.inject(graphs=True)
        with pytest.raises(Difference, match=message):
            twins.forward(options="no mask", times=4)
            graphs = [*twins.watch.captured]  # noqa: F841
            twins.eject()


def with_another_scale(rows, weight, earlier):
    return rows, weight._replace(scale=weight.scale * 1.5)


def with_a_wrong_token(rows, weight, earlier):
    values = rows.values.view(torch.uint8).clone()
    values[:, 0] = values[:, 1]
    values = values.view(rows.values.dtype)
    return type(rows)(values, rows.scale, rows.dtype, rows.weights), weight


def with_earlier_rows(rows, weight, earlier):
    return earlier, weight


@pytest.mark.parametrize("fault", [with_another_scale, with_a_wrong_token, with_earlier_rows])
def test_faults_of_one_fp8_layer_are_found(kernel, device, monkeypatch, fault):
    linears = module_of(kernel, "parts.linears")
    own, seen = linears.fp8_products, []

    def products(rows, weights):
        results = list(own(rows, weights))
        for i, weight in enumerate(weights):
            if weight.values is layer.weight.qdata:
                seen.append(rows)
                if len(seen) > 1:
                    results[i] = linears.fp8_product(*fault(rows, weight, seen[0]))
        return results

    monkeypatch.setattr(linears, "fp8_products", products)
    with Twins("ltx", dtype="bfloat16", fp8=True, device=device) as twins:
        twins.quantize_fp8()
        twins.inject()
        layer = twins.tested.get_submodule("transformer_blocks.0.attn1.to_v")
        twins.forward()
        with pytest.raises(Difference, match="from the float32 model's"):
            twins.forward(seed=1)


def test_a_model_that_outlives_its_last_reference_is_found(device):
    with Twins("ltx", dtype="bfloat16", fp8=True, device=device) as twins:
        twins.quantize_fp8()
        twins.inject()
        twins.forward()
        kept = twins.tested  # noqa: F841
        with pytest.raises(Difference, match="outlives its last reference"):
            twins.free()


def test_a_backward_that_raises_keeps_no_model(device):
    """A hook changes values that were saved for it."""
    with Twins("unet", device=device) as twins:
        block = "up_blocks.0.attentions.0.transformer_blocks.0"
        twins.hook(module=block, kind="keyword", way="in place")
        twins.forward(mode="backward")
        assert twins.counts["calls that raise"] == 1
        twins.free()


# ------------------------------------------------------------------------------------------------
# Modes and forms


# Modes in which a graph of a call within no_grad may be replayed.
MODES_OF_ONE_GRAPH = ("no_grad", "other stream", "thread", "threads")


@pytest.mark.parametrize("mode", GRAPH_MODES)
def test_modes_have_graphs_of_their_own_or_none(device, mode):
    """Each mode allows calls of a model, and ends with the call."""
    with Twins("ltx", graphs=True, device=device, blocks=1) as twins:
        twins.inject(graphs=True)
        twins.forward(times=3)
        counts = twins.watch.check()
        assert counts["captured"] == 1 and counts["replayed"] > 0
        before = torch.get_default_dtype(), torch.is_grad_enabled()
        twins.forward(mode=mode)
        assert (torch.get_default_dtype(), torch.is_grad_enabled()) == before
        assert twins.counts["calls that raise"] == 0
        assert (twins.watch.check()["replayed"] > 0) == (mode in MODES_OF_ONE_GRAPH)
        twins.forward()


@pytest.mark.parametrize("form", GOOD_FORMS)
def test_forms_are_captured(device, form):
    """Except tensors of a subclass. Graphs of calls in another form are not replayed for them."""
    with Twins("ltx", graphs=True, device=device, blocks=1) as twins:
        twins.inject(graphs=True)
        twins.forward(options="no mask", times=3)
        twins.watch.check()
        twins.forward(options="no mask", form=form, times=3)
        assert twins.forwards == 6
        assert twins.counts["calls that raise"] == 0
        assert (twins.watch.check()["replayed"] > 0) == (form in QUIET_FORMS)
