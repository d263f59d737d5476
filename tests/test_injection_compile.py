"""torch.compile and CUDA graphs of injected LTX-Video models."""

from collections import Counter

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

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
