"""torch.compile and CUDA graphs of injected LTX-Video models."""

from collections import Counter

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from changes import compile_blocks
from families import every_family, prepared
from family_flux import FLUX
from injected_pairs import BFLOAT16, assert_alike, assert_gradients_agree, pair
from ltx_models import calls_of, inputs, kernel_calls, operation_of, run

pytestmark = pytest.mark.usefixtures("_one_thread", "_fresh_compiler")

# A compiled float32 model rounds at other places.
SLACK = 1e-4


def operators(graph_module):
    """How often a graph calls each operation of the package."""
    found = [operation_of(node.target, node.args) for node in graph_module.graph.nodes]
    return dict(Counter(operation for operation in found if operation is not None))


CASES = {  # options of the model and of a forward
    "coordinates and timesteps of each token": (
        {},
        {"video_coords": torch.rand(2, 3, 24), "per_token": True},
    ),
    "attention of two blocks": ({**BFLOAT16, "blocks": 2}, {}),
    "attention without a mask": (BFLOAT16, {"mask": None}),
}


@pytest.mark.parametrize("case", CASES)
def test_whole_graph(kernel, device, case):
    """One graph that holds the operators, compiled once for all inputs of their shapes."""
    config, options = CASES[case]
    config = {"blocks": 1, **config}
    model, plain, _ = pair(kernel, device, **config)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    options = {k: v.to(device) if k == "video_coords" else v for k, v in options.items()}
    has_attention = "dtype" in config
    slack = None if has_attention else SLACK
    for _ in range(2):
        assert_alike(compiled, plain, inputs(model, **options), times=1, slack=slack)
    assert counter.frame_count == 1
    attention = {"attention": 2} if has_attention else {}
    assert operators(counter.graphs[0]) == calls_of(config["blocks"], joined=0, **attention)


@pytest.mark.slow
@pytest.mark.kernels_ci
def test_inductor(kernel, device):
    model, plain, _ = pair(kernel, device, blocks=1, **BFLOAT16)
    assert_alike(torch.compile(model, fullgraph=True), plain, inputs(model))


@pytest.mark.parametrize(
    "config", [{}, pytest.param(BFLOAT16, marks=pytest.mark.slow)], ids=["float32", "attention"]
)
def test_gradients_of_a_compiled_model(kernel, device, config):
    model, plain, _ = pair(kernel, device, blocks=1, **config)
    model.transformer_blocks[0].compile(fullgraph=True, backend="aot_eager")
    assert_gradients_agree(model, plain, inputs(model), 0.1 if config else 1e-3)


@pytest.mark.parametrize("mask", ["padded", None])
def test_no_value_is_read_back(kernel, mask):
    if not torch.cuda.is_available():
        pytest.skip("synchronization is detected on CUDA only")
    model, _, _ = pair(kernel, "cuda", **BFLOAT16)
    arguments = inputs(model, mask=mask)
    run(model, arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert kernel_calls(run, model, arguments)["attention"] == 4
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ------------------------------------------------------------------------------------------------
# Recompiles


def graphs_over_sizes(family, model, device, sizes):
    """The number of graphs of the compiled blocks after a forward with each of these options."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compile_blocks(family, model, fullgraph=True, backend=counter)
    counts = []
    for size in sizes:
        run(model, family.inputs(device, seed=0, **size))
        counts.append(counter.frame_count)
    return counts


SIZES = [{"tokens": 1}, {"tokens": 3, "text_length": 7}, {"tokens": 4, "text_length": 6}]


@pytest.mark.slow
@every_family
@pytest.mark.drawn(times=0, period=5)
def test_no_more_graphs_than_plain(kernel, device, family):
    if family.name == "flux3":
        pytest.skip("its text blocks are given one row for all tokens, which is another layout")
    if family.name == "hidream":
        pytest.skip("its own code reads how many tokens each expert has")
    model, plain, _ = prepared(family, device, config=family.one_block)
    kernel.inject_kernels(model)
    sizes = [*SIZES, {"tokens": 2, "batch": 3}, {"tokens": 5, "batch": 4, "text_length": 8}]
    expected = graphs_over_sizes(family, plain, device, sizes)
    graphs = graphs_over_sizes(family, model, device, sizes)
    assert all(count <= most for count, most in zip(graphs, expected, strict=True))


def test_two_graphs_for_all_sizes(kernel, device):
    """One for the first size, one for all others. The last has enough rows for matrix products that are
    written in place outside of a compiler."""
    model, _, _ = prepared(FLUX, device, config=FLUX.one_block)
    kernel.inject_kernels(model)
    counter = CompileCounterWithBackend("eager")
    model.transformer_blocks[0].compile(fullgraph=True, backend=counter)
    for size in (*SIZES[:2], {"tokens": 400, "text_length": 6}):
        run(model, FLUX.inputs(device, seed=0, **size))
    assert counter.frame_count == 2


def test_classes_do_not_share_recompiles(kernel, device):
    """Two classes of modules, one of which was given two sizes before."""
    model, _, _ = pair(kernel, device)
    embed, gelu = model.time_embed.emb.time_proj, model.transformer_blocks[0].ff.net[0]
    counters, width = [], gelu.proj.in_features
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        for module, shapes in ((embed, [(2,), (3,)]), (gelu, [(2, 4, width), (2, 5, width)])):
            counters.append(CompileCounterWithBackend("eager"))
            module.compile(fullgraph=True, backend=counters[-1])
            for shape in shapes:
                module(torch.ones(shape, device=device))
    assert [counter.frame_count for counter in counters] == [2, 2]
