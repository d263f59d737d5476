"""torch.compile and CUDA graphs of injected models."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from checks import one_thread
from ltx_models import calls_of, graph_replays, inputs, prepared, reference, transformer
from ltx_models import run as run_model


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    with one_thread():
        yield
    torch._dynamo.reset()


def operators(graph_module):
    """How often a graph calls each operator of the package."""
    counts = {}
    for node in graph_module.graph.nodes:
        namespace, _, name = str(node.target).partition(".")
        if namespace.startswith("_h100_diffusers_kernels"):
            counts[name.split(".")[0]] = counts.get(name.split(".")[0], 0) + 1
        elif "_addmm_activation" in str(node.target):
            counts["gelu"] = counts.get("gelu", 0) + 1
    return counts


def assert_runs(compiled, model_for_inputs, plain, count, **options):
    """Fresh inputs of the same shapes give right values without another compilation."""
    for _ in range(2):
        arguments = inputs(model_for_inputs, **options)
        out = run_model(compiled, arguments)
        expected = reference(plain, arguments)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    assert count.frame_count == 1


@pytest.mark.parametrize(
    "options", [{}, {"per_token": True}, {"mask": None}, {"batch": 1}], ids=str
)
def test_whole_graph(kernel, device, options):
    """One graph that holds the operators, compiled once."""
    model, plain = transformer(device), transformer(device)
    kernel.inject_kernels(model)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    assert_runs(compiled, model, plain, counter, **options)
    (graph,) = counter.graphs
    assert operators(graph) == calls_of(2, joined=0)


def test_coordinates_in_a_whole_graph(kernel, device):
    model, plain = transformer(device), transformer(device)
    kernel.inject_kernels(model)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    assert_runs(compiled, model, plain, counter, video_coords=torch.rand(2, 3, 24, device=device))
    assert operators(counter.graphs[0]) == calls_of(2, joined=0)


@pytest.mark.kernels_ci
def test_inductor(kernel, device):
    model, plain = transformer(device), transformer(device)
    kernel.inject_kernels(model)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    assert_runs(compiled, model, plain, counter)


def test_dynamic_shapes(kernel, device):
    """No more graphs than the model needs without kernels."""
    graphs = {}
    for inject in (lambda model: None, kernel.inject_kernels):
        model, plain = transformer(device, blocks=1), transformer(device, blocks=1)
        inject(model)
        counter = CompileCounterWithBackend("eager")
        compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
        for batch, grid in ((2, (2, 3, 4)), (3, (3, 4, 5))):
            arguments = inputs(model, batch=batch, grid=grid)
            out = run_model(compiled, arguments)
            expected = reference(plain, arguments)
            torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
        graphs[inject] = counter.frame_count
        torch._dynamo.reset()
    assert graphs[kernel.inject_kernels] == min(graphs.values())


def test_repeated_blocks(kernel, device):
    """diffusers' regional compilation: one graph for all blocks."""
    model, plain = transformer(device, blocks=3), transformer(device, blocks=3)
    kernel.inject_kernels(model)
    counter = CompileCounterWithBackend("aot_eager")
    model.compile_repeated_blocks(fullgraph=True, backend=counter)
    assert_runs(model, model, plain, counter)
    assert operators(counter.graphs[0]) == calls_of(1)


@pytest.mark.parametrize("regional", [False, True], ids=["model", "blocks"])
def test_injected_and_ejected_after_compilation(kernel, device, regional):
    """What was compiled before is not run any more, and is again after the ejection."""
    model, arguments, expected = prepared(device)
    counter = CompileCounterWithBackend("aot_eager")
    if regional:
        model.compile_repeated_blocks(fullgraph=True, backend=counter)
    else:
        model.compile(fullgraph=True, backend=counter)
    for inject, graphs in ((None, 1), (kernel.inject_kernels, 2), (kernel.eject_kernels, 2)):
        if inject is not None:
            inject(model)
        out = run_model(model, arguments)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
        assert counter.frame_count == graphs
    blocks = 1 if regional else 2
    assert [operators(graph) for graph in counter.graphs] == [{}, calls_of(blocks, joined=0)]


def test_gradients_of_a_compiled_model(kernel, device):
    model, plain = transformer(device), transformer(device)
    kernel.inject_kernels(model)
    arguments = inputs(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for candidate in (compiled, plain):
        candidate(**arguments, return_dict=False)[0].square().sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4)


def test_cuda_graph(kernel):
    if not torch.cuda.is_available():
        pytest.skip("CUDA graphs need CUDA")
    model, arguments, _ = prepared("cuda")
    plain = transformer("cuda")
    kernel.inject_kernels(model)
    for out in graph_replays(model, arguments, (inputs(model) for _ in range(2))):
        torch.testing.assert_close(out.double(), reference(plain, arguments), rtol=1e-5, atol=1e-5)


def test_no_value_is_read_back(kernel):
    if not torch.cuda.is_available():
        pytest.skip("synchronization is detected on CUDA only")
    model, arguments, expected = prepared("cuda")
    kernel.inject_kernels(model)
    run_model(model, arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = run_model(model, arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
