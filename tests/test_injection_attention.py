"""Attention of injected models: where it runs on the package's kernel, and where it stays diffusers'."""

import copy
import functools
import itertools

import accelerate
import pytest
import torch
from diffusers.hooks import apply_group_offloading
from diffusers.models import attention_dispatch
from diffusers.models.transformers import transformer_ltx
from peft import LoraConfig
from torch._dynamo.testing import CompileCounterWithBackend

import ltx_models
from ltx_models import (
    KernelCalls,
    calls_of,
    either_order,
    inputs,
    kernel_calls,
    reference,
    run,
    transformer,
)

pytestmark = pytest.mark.usefixtures("_one_thread")

TEXT_LENGTH = ltx_models.TEXT_LENGTH
HEADS = {"heads": 2, "head_dim": 64}
BOTH = {"attention": 2}  # a block: self-attention and cross-attention


@pytest.fixture(autouse=True)
def _default_backend(monkeypatch):
    """diffusers' choice for all models, which model.set_attention_backend changes too."""
    registry = attention_dispatch._AttentionBackendRegistry
    monkeypatch.setattr(registry, "_active_backend", registry._active_backend)


@pytest.fixture
def injected_pair(kernel, device):
    """Makes (injected model, the same without kernels)."""

    def make(dtype=torch.bfloat16, *, attention=True, **config):
        model = transformer(device, dtype, **{**HEADS, **config})
        plain = copy.deepcopy(model)
        kernel.inject_kernels(model, attention=attention)
        return model, plain

    return make


def assert_close(model, plain, arguments):
    """Within what the roundings of the model's dtype leave open."""
    expected = reference(plain, arguments)
    distance = (run(model, arguments).double() - expected).norm() / expected.norm()
    assert distance < 0.05


class Biases(KernelCalls):
    """Also the shape and dtype of the bias of each call of attention."""

    def __init__(self):
        super().__init__()
        self.of_attention = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.endswith("::attention"):
            bias = args[4]
            self.of_attention.append(None if bias is None else (tuple(bias.shape), bias.dtype))
        return super().__torch_dispatch__(func, types, args, kwargs)


# ------------------------------------------------------------------------------------------------
# Where the kernel runs


@pytest.mark.kernels_ci
@pytest.mark.parametrize("mask", ["padded", "full", None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_both_attentions_run_on_the_kernel(injected_pair, dtype, mask):
    model, plain = injected_pair(dtype)
    arguments = inputs(model, mask=mask)
    with Biases() as calls:
        run(model, arguments)
    assert dict(calls.counts) == calls_of(2, **BOTH)
    bias = None if mask is None else ((2, TEXT_LENGTH), dtype)
    assert calls.of_attention == [None, bias] * 2
    assert kernel_calls(run, plain, arguments) == {}
    assert_close(model, plain, arguments)


@pytest.mark.parametrize("mask", ["padded", None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_accuracy_contract(injected_pair, dtype, mask):
    model, plain = injected_pair(dtype, blocks=4)
    ltx_models.assert_as_close_as_eager(model, plain, grid=(4, 6, 8), mask=mask)


def test_padding_has_no_weight(injected_pair):
    model, _ = injected_pair()
    arguments = inputs(model)
    changed = arguments["encoder_hidden_states"].clone()
    changed[0, 2:] = 100.0  # the first sample has two tokens of text
    assert torch.equal(
        run(model, arguments), run(model, {**arguments, "encoder_hidden_states": changed})
    )


def test_two_runs_give_the_same_bits(injected_pair):
    model, _ = injected_pair()
    arguments = inputs(model)
    assert torch.equal(run(model, arguments), run(model, arguments))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_head_sizes_of_the_kernel(injected_pair, head_dim):
    model, plain = injected_pair(heads=1, head_dim=head_dim)
    arguments = inputs(model)
    assert kernel_calls(run, model, arguments) == calls_of(2, **BOTH)
    assert_close(model, plain, arguments)


def test_bias_of_all_queries_and_heads_in_float32(injected_pair):
    """The kernel adds it as it is. (PyTorch's attention wants it in the query's dtype.)"""
    model, plain = injected_pair()
    bias = torch.randn(2, 1, TEXT_LENGTH, device=model.device)
    arguments = inputs(model, encoder_attention_mask=bias)
    with Biases() as calls:
        run(model, arguments)
    assert calls.of_attention == [None, ((2, TEXT_LENGTH), torch.float32)] * 2
    widened = {**arguments, "encoder_attention_mask": bias.double()}
    expected = reference(plain, widened)
    assert (run(model, arguments).double() - expected).norm() < 0.05 * expected.norm()


# ------------------------------------------------------------------------------------------------
# Where it does not


OTHER_MASKS = {
    "bias of each query": lambda device: torch.randn(2, 24, TEXT_LENGTH, device=device),
    "bias of each head": lambda device: torch.randn(2 * 2, 1, TEXT_LENGTH, device=device),
    "booleans": lambda device: torch.arange(TEXT_LENGTH, device=device).expand(2, 1, -1) < 4,
}


@pytest.mark.parametrize("case", OTHER_MASKS)
def test_other_masks_keep_the_models_attention(injected_pair, device, case):
    model, plain = injected_pair()
    mask = OTHER_MASKS[case](device)
    if mask.is_floating_point():
        mask = mask.to(model.dtype)
    arguments = inputs(model, encoder_attention_mask=mask)
    assert kernel_calls(run, model, arguments) == calls_of(2, attention=1)
    exact = copy.deepcopy(plain).double()
    if mask.is_floating_point():
        mask = mask.double()
    expected = run(
        exact, {**ltx_models.cast(arguments, torch.float64), "encoder_attention_mask": mask}
    )
    assert (run(model, arguments).double() - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("head_dim", [16, 96])
def test_other_head_sizes_keep_the_models_attention(kernel, device, head_dim):
    model = transformer(device, torch.bfloat16, heads=2, head_dim=head_dim)
    report = kernel.inject_kernels(model)
    assert kernel_calls(run, model, inputs(model)) == calls_of(2)
    reasons = {entry.name: entry.reason for entry in report.left_alone}
    for block, attention in itertools.product(range(2), ("attn1", "attn2")):
        reason = reasons[f"transformer_blocks.{block}.{attention}"]
        assert f"its heads have {head_dim} elements, and the kernel's 64 and 128" in reason


def test_float32_keeps_the_models_attention(injected_pair):
    """Which is told at each call, as the dtype may change."""
    model, plain = injected_pair(torch.float32)
    arguments = inputs(model)
    assert ltx_models.computing(reference(plain, arguments), model, arguments) == calls_of(2)
    model, plain = model.bfloat16(), plain.bfloat16()
    arguments = ltx_models.cast(arguments, torch.bfloat16)
    assert kernel_calls(run, model, arguments) == calls_of(2, **BOTH)
    assert_close(model, plain, arguments)


def test_autocast_keeps_the_models_attention(injected_pair, device):
    model, _ = injected_pair(torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert kernel_calls(run, model, inputs(model)).get("attention") is None


def test_gradients_keep_the_models_attention(injected_pair):
    model, plain = injected_pair()
    arguments = inputs(model)
    with KernelCalls() as calls:
        model(**arguments, return_dict=False)[0].float().square().sum().backward()
    assert "attention" not in calls.counts
    plain(**arguments, return_dict=False)[0].float().square().sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.grad - theirs.grad).norm() <= 0.1 * theirs.grad.norm()
    model.requires_grad_(False)
    with KernelCalls() as calls:
        model(**arguments)
    assert calls.counts["attention"] == 4


def test_parallelism_keeps_the_models_attention(injected_pair, monkeypatch):
    model, _ = injected_pair()
    config, given = object(), []
    original = transformer_ltx.dispatch_attention_fn

    @functools.wraps(original)
    def dispatch(*args, parallel_config, **kwargs):
        given.append(parallel_config)
        return original(*args, parallel_config=None, **kwargs)

    for block in model.transformer_blocks:
        block.attn1.processor._parallel_config = config
    monkeypatch.setattr(transformer_ltx, "dispatch_attention_fn", dispatch)
    assert kernel_calls(run, model, inputs(model)) == calls_of(2)
    assert given == [config, None] * 2


# ------------------------------------------------------------------------------------------------
# attention=False


def test_attention_can_be_left_alone(kernel, device, injected_pair):
    model, plain = injected_pair(attention=False)
    arguments = inputs(model)
    assert kernel_calls(run, model, arguments) == calls_of(2)
    assert_close(model, plain, arguments)
    report = kernel.inject_kernels(model, attention=False)
    left_alone = [entry for entry in report.left_alone if ".attn" in entry.name]
    assert len(left_alone) == 4
    assert all("attention=False" in entry.reason for entry in left_alone)
    assert "attention=False" in str(report)
    replaced = {entry.name: entry.replacement for entry in report.replaced}
    assert replaced["transformer_blocks.0.attn1"] == "qk_norm_rope, rms_norm"
    assert replaced["transformer_blocks.0.attn2"] == "qk_norm_rope, rms_norm"


def test_report_names_attention(kernel, device):
    report = kernel.inject_kernels(transformer(device, torch.bfloat16, **HEADS))
    assert not [entry for entry in report.left_alone if ".attn" in entry.name]
    replaced = {entry.name: entry.replacement for entry in report.replaced}
    assert replaced["transformer_blocks.0.attn1"] == "qk_norm_rope, rms_norm, attention"
    assert replaced["transformer_blocks.0.attn2"] == "qk_norm_rope, rms_norm, attention"


@pytest.mark.parametrize("first", [True, False])
def test_second_injection_asks_for_something_else(kernel, injected_pair, first):
    model, plain = injected_pair(attention=first)
    before = ltx_models.snapshot(model)
    sentence = (
        rf"injected with attention={first}, got attention={not first}: call eject_kernels first$"
    )
    with pytest.raises(ValueError, match=sentence):
        kernel.inject_kernels(model, attention=not first)
    assert ltx_models.snapshot(model) == before
    arguments = inputs(model)
    calls = {True: calls_of(2, **BOTH), False: calls_of(2)}
    assert kernel_calls(run, model, arguments) == calls[first]
    kernel.eject_kernels(model)
    assert torch.equal(run(model, arguments), run(plain, arguments))
    kernel.inject_kernels(model, attention=not first)
    assert kernel_calls(run, model, arguments) == calls[not first]


def test_it_is_a_keyword(kernel, device):
    with pytest.raises(TypeError):
        kernel.inject_kernels(transformer(device), False)


# ------------------------------------------------------------------------------------------------
# A backend that was chosen


CHOICES = ["_native_math", "native"]


@either_order
@pytest.mark.parametrize("name", CHOICES)
def test_backend_of_the_model(kernel, device, name, is_injected_first):
    """Even if it names what diffusers takes by itself."""
    model = transformer(device, torch.bfloat16, **HEADS)
    plain, arguments = copy.deepcopy(model), inputs(model)
    if is_injected_first:
        kernel.inject_kernels(model)
        assert kernel_calls(run, model, arguments) == calls_of(2, **BOTH)
    model.set_attention_backend(name)
    kernel.inject_kernels(model)
    assert kernel_calls(run, model, arguments) == calls_of(2)
    assert_close(model, plain, arguments)
    model.reset_attention_backend()
    # What was chosen for all models with it stays, as it does in diffusers.
    registry = attention_dispatch._AttentionBackendRegistry
    own = calls_of(2, **BOTH) if name == "native" else calls_of(2)
    assert kernel_calls(run, model, arguments) == own
    registry.set_active_backend(attention_dispatch.AttentionBackendName.NATIVE)
    assert kernel_calls(run, model, arguments) == calls_of(2, **BOTH)


def test_backend_by_context_manager(injected_pair):
    model, plain = injected_pair()
    arguments = inputs(model)
    with attention_dispatch.attention_backend("_native_math"):
        assert kernel_calls(run, model, arguments) == calls_of(2)
        assert_close(model, plain, arguments)
    assert kernel_calls(run, model, arguments) == calls_of(2, **BOTH)


@either_order
def test_backend_of_the_environment(kernel, device, is_injected_first):
    """diffusers makes DIFFUSERS_ATTN_BACKEND its choice for all models, once, as it is imported."""
    model = transformer(device, torch.bfloat16, **HEADS)
    registry = attention_dispatch._AttentionBackendRegistry
    if is_injected_first:
        kernel.inject_kernels(model)
    registry._active_backend = attention_dispatch.AttentionBackendName("_native_math")
    kernel.inject_kernels(model)
    assert kernel_calls(run, model, inputs(model)) == calls_of(2)


def test_backend_of_one_module(injected_pair):
    model, _ = injected_pair()
    native = attention_dispatch.AttentionBackendName.NATIVE
    model.transformer_blocks[0].attn2.processor._attention_backend = native
    assert kernel_calls(run, model, inputs(model)) == {**calls_of(2), "attention": 3}


# ------------------------------------------------------------------------------------------------
# torch.compile and CUDA graphs


def attentions(graph_module):
    targets = [str(node.target) for node in graph_module.graph.nodes]
    return sum(".attention" in t and t.startswith("_h100_diffusers_kernels") for t in targets)


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("options", [{}, {"mask": None}, {"batch": 1}], ids=str)
def test_whole_graph(injected_pair, options):
    """One graph that holds the operator, compiled once."""
    model, plain = injected_pair()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for _ in range(2):
        assert_close(compiled, plain, inputs(model, **options))
    assert counter.frame_count == 1
    assert attentions(counter.graphs[0]) == 4


@pytest.mark.kernels_ci
@pytest.mark.usefixtures("_fresh_compiler")
def test_inductor(injected_pair):
    model, plain = injected_pair(blocks=1)
    compiled = torch.compile(model, fullgraph=True)
    arguments = inputs(model)
    assert_close(compiled, plain, arguments)


@pytest.mark.usefixtures("_fresh_compiler")
def test_dynamic_shapes(injected_pair):
    """No more graphs than the model needs without kernels."""
    model, plain = injected_pair(blocks=1)
    graphs = []
    for candidate in (model, plain):
        counter = CompileCounterWithBackend("eager")
        compiled = torch.compile(candidate, fullgraph=True, backend=counter, dynamic=True)
        for batch, grid in ((2, (2, 3, 4)), (3, (3, 4, 5)), (4, (2, 2, 3))):
            assert_close(compiled, plain, inputs(model, batch=batch, grid=grid))
        graphs.append(counter.graphs)
        torch._dynamo.reset()
    assert [attentions(graph) for graph in graphs[0]] == [2] * len(graphs[0])
    assert len(graphs[0]) <= len(graphs[1])


@pytest.mark.usefixtures("_fresh_compiler")
def test_backend_chosen_after_compilation(injected_pair):
    model, plain = injected_pair()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    arguments = inputs(model)
    assert_close(compiled, plain, arguments)
    with attention_dispatch.attention_backend("_native_math"):
        assert_close(compiled, plain, arguments)
    assert_close(compiled, plain, arguments)
    if torch.__version__ < "2.12":
        pytest.skip("Torch 2.11 does not compile anew when an attribute of a class has changed")
    assert [attentions(graph) for graph in counter.graphs] == [4, 0]


@pytest.mark.usefixtures("_fresh_compiler")
def test_training_of_a_compiled_model(injected_pair):
    model, _ = injected_pair()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    compiled(**inputs(model), return_dict=False)[0].float().square().sum().backward()
    assert attentions(counter.graphs[0]) == 0
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_cuda_graph(injected_pair):
    if not torch.cuda.is_available():
        pytest.skip("CUDA graphs need CUDA")
    model, _ = injected_pair()
    arguments = inputs(model)
    for out in ltx_models.graph_replays(model, arguments, (inputs(model) for _ in range(2))):
        assert torch.equal(out, run(model, arguments))


@pytest.mark.parametrize("mask", ["padded", None])
def test_no_value_is_read_back(injected_pair, mask):
    if not torch.cuda.is_available():
        pytest.skip("synchronization is detected on CUDA only")
    model, _ = injected_pair()
    arguments = inputs(model, mask=mask)
    run(model, arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with KernelCalls() as calls:
            run(model, arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert calls.counts["attention"] == 4


# ------------------------------------------------------------------------------------------------
# What else is done to the model


@either_order
def test_lora(kernel, device, is_injected_first):
    model = transformer(device, torch.bfloat16, **HEADS)
    if is_injected_first:
        kernel.inject_kernels(model)
    config = LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "to_k", "to_v"])
    model.add_adapter(config)
    plain = copy.deepcopy(model)
    kernel.eject_kernels(plain)
    kernel.inject_kernels(model)
    arguments = inputs(model)
    assert kernel_calls(run, plain, arguments) == {}
    assert kernel_calls(run, model, arguments) == calls_of(2, **BOTH)
    assert_close(model, plain, arguments)


def test_hooks_and_copies(injected_pair):
    model, plain = injected_pair()

    def double(module, args, output):
        return output * 2

    for candidate in (model, plain):
        candidate.transformer_blocks[0].attn1.register_forward_hook(double)
    duplicate = copy.deepcopy(model)
    arguments = inputs(model)
    for candidate in (model, duplicate):
        assert kernel_calls(run, candidate, arguments) == calls_of(2, **BOTH)
        assert_close(candidate, plain, arguments)


def group_offload(model):
    device = torch.device(model.device)
    apply_group_offloading(model, onload_device=device, offload_type="leaf_level")


def sequential_offload(model):
    accelerate.cpu_offload(model, execution_device=model.device)


@pytest.mark.parametrize("offload", [group_offload, sequential_offload])
@either_order
def test_offloading(kernel, device, offload, is_injected_first):
    model = transformer(device, torch.bfloat16, **HEADS)
    plain, arguments = copy.deepcopy(model), inputs(model)
    if is_injected_first:
        kernel.inject_kernels(model)
    offload(model)
    kernel.inject_kernels(model)
    assert kernel_calls(run, model, arguments)["attention"] == 4
    assert_close(model, plain, arguments)
    kernel.eject_kernels(model)
    assert kernel_calls(run, model, arguments) == {}
