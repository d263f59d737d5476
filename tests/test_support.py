"""docs/support.md is current, and what docs/support.toml says is true.

Features that no other file tests are tested here. ``test_behaviour`` applies each feature with an id to a
model of each family and compares what happens with the table.
"""

import ast
import collections
import contextlib
import copy
import functools
import io
from pathlib import Path

import pytest
import torch
import torchao.quantization as quantization
from diffusers.hooks import LayerSkipConfig, apply_layer_skip
from diffusers.hooks.smoothed_energy_guidance_utils import (
    SmoothedEnergyGuidanceConfig,
    _apply_smoothed_energy_guidance_hook,
)
from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from diffusers.models.transformers.transformer_flux2 import (
    Flux2KVAttnProcessor,
    Flux2KVParallelSelfAttnProcessor,
)
from peft import IA3Config, LoHaConfig, LoKrConfig, LoraConfig, OFTConfig
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import conftest
import render_support
from checks import relative_distance
from families import FAMILIES, KERNEL_HEADS, assert_close, every_family, joined, prepared, run
from family_flux import FLUX, FLUX2
from family_ltx import LTX
from family_qwenimage import QWEN_IMAGE
from family_relatives import CONTROLNETS, COPIES_OF_WAN, copy_of_wan, inputs_of_copy
from family_sd3 import SD3
from family_wan import WAN
from ltx_models import either_order, kernel_calls

pytestmark = pytest.mark.usefixtures("_one_thread")

TABLE = render_support.load()
TESTS = Path(__file__).parent


def test_page_is_current():
    assert set(FAMILIES) == set(TABLE.families)
    assert render_support.PAGE.read_text() == render_support.render(TABLE)


def test_named_tests_exist(request):
    """A name is the beginning of a node id: one case, or all cases of a function. Cases are known only in
    files that are collected as a whole."""
    option = request.config.option
    collected = collections.defaultdict(list)
    for item in () if option.keyword or option.markexpr or option.draw else request.session.items:
        name = item.nodeid.rpartition("/")[2]
        collected[name.partition("::")[0]].append(name)
    for test in {test for feature in TABLE.features for test in feature.tests}:
        file, _, name = test.partition("::")
        assert (TESTS / file).exists(), test
        if name:
            assert name.partition("[")[0] in functions_of(file), test
        if file in collected:
            assert any(case.startswith(test) for case in collected[file]), test


@functools.cache
def functions_of(file):
    """The names of the functions in a file of tests."""
    body = ast.parse((TESTS / file).read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


# ------------------------------------------------------------------------------------------------
# Features with an id: what is done to a model, or how it is run


def with_adapter(config, **options):
    def change(family, model):
        torch.manual_seed(1)
        model.add_adapter(config(target_modules=family.lora_targets, **options))

    return change


def with_trained_norms(family, model):
    torch.manual_seed(1)
    name = family.parts["qk_norm"].rpartition(".")[2]
    targets = ["to_q" if "to_q" in family.lora_targets else family.lora_targets[0]]
    config = LoraConfig(r=2, init_lora_weights=False, target_modules=targets)
    config.modules_to_save = [name]
    model.add_adapter(config)
    with torch.no_grad():
        for saved in family.part(model, "qk_norm").modules_to_save.values():
            saved.weight.mul_(1.5)


def with_quantized_blocks(config):
    def change(family, model):
        for blocks in family.block_lists:
            quantization.quantize_(model.get_submodule(blocks), config())

    return change


class Halved(nn.Module):
    def forward(self, weight):
        return weight * 0.5


def with_parametrized_linears(family, model):
    torch.manual_seed(1)
    parametrizations.weight_norm(family.part(model, "linear"))
    parametrizations.spectral_norm(family.part(model, "up"))
    parametrize.register_parametrization(family.part(model, "output"), "weight", Halved())


def with_pruned_linears(family, model):
    for kind in ("linear", "up", "output"):
        prune.l1_unstructured(family.part(model, kind), "weight", 0.5)


def with_tied_weights(family, model):
    blocks = model.get_submodule(family.block_lists[-1])
    last = dict(blocks[1].named_modules())
    names = [
        name
        for name, module in blocks[0].named_modules()
        if type(module) is nn.Linear
        and name in last
        and module.weight.shape == last[name].weight.shape
    ]
    for name in names[::2]:
        blocks[1].get_submodule(name).weight = blocks[0].get_submodule(name).weight
    parent, _, child = names[1].rpartition(".")
    setattr(blocks[1].get_submodule(parent), child, blocks[0].get_submodule(names[1]))


def with_backward_hooks(family, model):
    for path in family.parts.values():
        model.get_submodule(path).register_full_backward_hook(lambda module, into, out: None)


def with_skipped_layers(family, model):
    config = LayerSkipConfig(indices=[1], fqn=family.block_lists[0], skip_attention=False)
    apply_layer_skip(model, config)


def with_layerwise_casting(family, model):
    model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)


def after_a_step_of_an_optimizer(family, model):
    arguments = family.inputs(next(model.parameters()).device, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    joined(model(**arguments, return_dict=False)[0]).square().sum().backward()
    optimizer.step()


CHANGES = {
    "float64": lambda family, model: family.in_float64(model),
    "optimizer": after_a_step_of_an_optimizer,
    "layerwise casting": with_layerwise_casting,
    "dora": with_adapter(LoraConfig, r=2, use_dora=True, init_lora_weights=False),
    "loha": with_adapter(LoHaConfig, r=2, init_weights=False),
    "lokr": with_adapter(LoKrConfig, r=2, init_weights=False),
    "ia3": with_adapter(IA3Config, feedforward_modules=[], init_ia3_weights=False),
    "oft": with_adapter(OFTConfig, r=0, oft_block_size=4, init_weights=False),
    "modules to save": with_trained_norms,
    "int8 weights": with_quantized_blocks(quantization.Int8WeightOnlyConfig),
    "int8 activations": with_quantized_blocks(quantization.Int8DynamicActivationInt8WeightConfig),
    "float8 weights": with_quantized_blocks(quantization.Float8WeightOnlyConfig),
    "parametrized linear layers": with_parametrized_linears,
    "parametrized norm": lambda family, model: parametrize.register_parametrization(
        family.part(model, "qk_norm"), "weight", Halved()
    ),
    "pruned": with_pruned_linears,
    "tied weights": with_tied_weights,
    "fused projections": lambda family, model: model.fuse_qkv_projections(),
    "layer skip": with_skipped_layers,
    "backward hooks": with_backward_hooks,
}
WITHOUT_SKIP_HOOKS = (
    *("flux2", "flux3", "krea2", "cosmos3", "z_image", "bria_fibo2", "qwenimage21"),
    *("ernie_image", "hidream", "omnigen", "prx"),
)
WITHOUT_SKIPS = {("layer skip", name) for name in WITHOUT_SKIP_HOOKS}
# The same values in another form do not change what is computed, nor does what diffusers does not know.
NEUTRAL = {"float64", "fused projections", "backward hooks", *WITHOUT_SKIPS}
# diffusers' processor for fused projections cannot attend to the image alone.
CONFIGS = {("fused projections", "sd3"): {"dual_attention_layers": ()}}
# CogVideoX and CogView3+ compute a feed-forward with hooks for both streams at once.
FEWER_CALLS = {("pruned", name): {"gelu": 1} for name in ("cogvideox", "cogview3")}

# A value between two of few bits may be rounded to either.
FEW_BITS = {"layerwise casting", "int8 activations"}
# Attention has no kernel for float32. These heads have none either, so that it counts as left alone although
# the stored weights are bfloat16.
HEADS = {"layerwise casting": {"heads": 2, "head_dim": 136}}
# Its heads have a fixed size, with a kernel, so it is injected after it.
LATER = "layerwise casting", "allegro"


def in_autocast(family, model, arguments):
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        return run(model, arguments)


def in_training(family, model, arguments):
    out = joined(model(**arguments, return_dict=False)[0])
    out.square().sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    # Those of key biases without a norm are zero, except for rounding.
    least = 1e-6 * max(g.norm() for g in gradients)
    return torch.cat([g.flatten() / g.norm() for g in gradients if g.norm() > least])


def with_transposed_input(family, model, arguments):
    def transpose(x):
        x = x.mT.contiguous().mT
        assert x.stride(-1) != 1
        return x

    return run(model, family.with_main(arguments, transpose))


def by_functional_call(family, model, arguments):
    parameters = {name: p.detach() * 1.1 for name, p in model.named_parameters()}
    with torch.no_grad():
        arguments = {**arguments, "return_dict": False}
        return joined(torch.func.functional_call(model, parameters, (), arguments)[0])


@torch.no_grad()
def in_vmap(family, model, arguments):
    stacked = family.with_main(arguments, lambda x: torch.stack([x, 1.25 * x]))

    def forward(x):
        return joined(model(**{**arguments, family.main: x}, return_dict=False)[0])

    with sdpa_kernel(SDPBackend.MATH):  # not all of PyTorch's attentions take a mask in a transform
        return torch.vmap(forward)(stacked[family.main])


RUNS = {
    "autocast": in_autocast,
    "vmap": in_vmap,
    "training": in_training,
    "transposed input": with_transposed_input,
    "negative view": lambda family, model, x: run(model, family.with_main(x, torch._neg_view)),
    "functional_call": by_functional_call,
}


def observed(kernel, model, forward, whole):
    """The behaviour of an injected model, in the words of the table. `whole` belongs to an unchanged model:
    how often it calls each operator, and what its report leaves alone."""
    calls, report = kernel_calls(forward), kernel.inject_kernels(model)
    fell_back = any(entry.fell_back for entry in report.calls)
    if not calls:
        return "own code" if fell_back else "formula"
    return "in part" if fell_back or (calls, report.left_alone) != whole else "kernels"


def sensitivity(family, plain, arguments, expected):
    """How far the plain model's result moves if its inputs change by the rounding of a few operations."""

    def disturbed(seed):
        torch.manual_seed(seed)
        change = lambda x: x * (1 + 1e-6 * torch.randn_like(x))  # noqa: E731
        inexact = {name: arguments[name] for name in family.inexact}
        return {**arguments, **pytree.tree_map(change, inexact)}

    return max(relative_distance(run(plain, disturbed(seed)), expected) for seed in range(2))


def assert_same(out, expected, rounding):
    assert relative_distance(out, expected) <= rounding


@functools.cache
def without_change(name, device, *config):
    """A plain model's result; how often the injected model calls each operator, and what its report leaves
    alone."""
    model, plain, arguments = prepared(FAMILIES[name], device, config=dict(config), seed=5)
    left_alone = conftest.load_kernel().inject_kernels(model).left_alone
    return run(plain, arguments), kernel_calls(run, model, arguments), left_alone


@every_family
@pytest.mark.parametrize("feature", [*CHANGES, *RUNS])
def test_behaviour(kernel, device, family, feature):
    """The values are the plain model's, and the table says where they are computed.

    The model is injected before the change in one half of the families, and after it in the other half.
    """
    position = [*FAMILIES].index(family.name) + [*CHANGES, *RUNS].index(feature)
    is_injected_first = position % 2 == 0 and (feature, family.name) != LATER
    config = CONFIGS.get((feature, family.name), HEADS.get(feature))
    model, plain, arguments = prepared(family, device, config=config, seed=5)
    if TABLE.behaviour(feature, family.name) == "same":
        missing = "pad_sequence|index_put_|scatter|data pointer|fuse_qkv_projections|to_q|use_bias"
        kernel.inject_kernels(model)
        for candidate in (model, plain):
            with pytest.raises((AttributeError, RuntimeError), match=missing):
                CHANGES.get(feature, lambda *_: None)(family, candidate)
                RUNS[feature](family, candidate, arguments)
        return
    unchanged, calls, left_alone = without_change(family.name, device, *(config or {}).items())
    fewer = FEWER_CALLS.get((feature, family.name), {})
    calls = {operator: count - fewer.get(operator, 0) for operator, count in calls.items()}
    whole = calls, left_alone
    if is_injected_first:
        kernel.inject_kernels(model)
    for candidate in (model, plain):
        CHANGES.get(feature, lambda *_: None)(family, candidate)
    kernel.inject_kernels(model)
    arguments = family.cast(arguments, torch.float64 if feature == "float64" else torch.float32)
    forward = RUNS.get(feature, lambda _, model, arguments: run(model, arguments))
    expected = forward(family, plain, arguments)
    rounding = 1e-5
    if feature in FEW_BITS:
        rounding += 2 * sensitivity(family, plain, arguments, expected)
    assert_same(forward(family, model, arguments), expected, rounding)
    if feature in CHANGES and not {feature, (feature, family.name)} & NEUTRAL:
        assert (expected - unchanged).norm() > 1e-4 * unchanged.norm(), "nothing was changed"
    behaviour = observed(kernel, model, lambda: forward(family, model, arguments), whole)
    assert behaviour == TABLE.behaviour(feature, family.name)


def test_every_feature_with_an_id_is_tried():
    tried = {*CHANGES, *RUNS, "make_fx", "export"}
    assert {feature.id for feature in TABLE.features if feature.id is not None} == tried


def traced(model, arguments):
    def forward(x):
        return model(**{**arguments, "hidden_states": x}, return_dict=False)[0]

    graph = make_fx(forward)(arguments["hidden_states"])
    return graph.graph, lambda arguments: graph(arguments["hidden_states"])


def exported(model, arguments):
    options = {**arguments, "return_dict": False}
    program = torch.export.export(model, (), options, strict=False)
    module = program.module()
    return program.graph, lambda arguments: module(**{**options, **arguments})[0]


TRACES = {"make_fx": traced, "export": exported}
some_families = pytest.mark.parametrize("family", [LTX, FLUX], ids=str)


@some_families
@pytest.mark.parametrize("trace", TRACES)
@torch.no_grad()
def test_traced(kernel, device, family, trace):
    """The graph calls the operators, and computes of other inputs what the model does."""
    torch._dynamo.reset()
    model, plain, arguments = prepared(family, device)
    kernel.inject_kernels(model)
    graph, call = TRACES[trace](model, arguments)
    targets = [str(node.target) for node in graph.nodes]
    assert any(target.startswith("_h100_diffusers_kernels") for target in targets)
    others = {**arguments, "hidden_states": torch.randn_like(arguments["hidden_states"])}
    assert_close(call(others), run(plain, others))


@pytest.mark.parametrize(
    "family", [LTX, pytest.param(FLUX, marks=pytest.mark.slow)], ids=str
)  # tracing takes seconds
def test_dynamic_shapes(kernel, device, family):
    torch._dynamo.reset()
    model, plain, _ = prepared(family, device, config=family.one_block)
    kernel.inject_kernels(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    for sizes in ({"batch": 2, "tokens": 3}, {"batch": 3, "tokens": 4, "text_length": 6}):
        arguments = family.inputs(device, **sizes)
        assert_close(run(compiled, arguments), run(plain, arguments), 1e-4)


class Sample(nn.Module):
    """A model of its main argument alone."""

    def __init__(self, family, model, arguments):
        super().__init__()
        self.family, self.model, self.arguments = family, model, arguments

    def forward(self, x):
        arguments = {**self.arguments, self.family.main: x}
        return joined(self.model(**arguments, return_dict=False)[0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.drawn(times=0, period=3)
@every_family
@torch.no_grad()
def test_torchscript_of_a_model(kernel, device, family):
    model, plain, arguments = prepared(family, device)
    kernel.inject_kernels(model)
    x = arguments[family.main]
    if family.name in ("latte", "anyflow") and device == "cuda":
        pytest.skip("PyTorch does not repeat its rows on a GPU while it traces")
    behaviour = TABLE.behaviour("`torch.jit.trace`", family.name)
    if behaviour == "raises":
        for each in (plain, model):
            with pytest.raises((RuntimeError, TypeError), match="aten::masked_fill|__round__"):
                torch.jit.trace(Sample(family, each, arguments), (x,), check_trace=False)
    else:
        assert behaviour == "kernels"
        script = torch.jit.trace(Sample(family, model, arguments), (x,), check_trace=False)
        assert "_h100_diffusers_kernels" in str(script.inlined_graph)
        others = family.with_main(arguments, lambda x: x * 2)
        assert_close(script(others[family.main]), run(plain, others))
    assert_close(run(model, arguments), run(plain, arguments))


def test_autocast_casts_nothing_for_an_operation(kernel, device):
    x = torch.randn(3, 64, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = kernel.rms_norm(x)
        assert kernel_calls(kernel.rms_norm, x) == {"rms_norm": 1}
    assert torch.equal(out, kernel.rms_norm(x)) and out.dtype == torch.float32


def test_negative_views(kernel, device):
    x, weight = torch.randn(2, 3, 64, device=device), torch.randn(64, device=device)
    expected = kernel.rms_norm(-x, -weight)
    assert torch.equal(kernel.rms_norm(torch._neg_view(x), torch._neg_view(weight)), expected)
    imaginary = torch.complex(x, x + 1).conj().imag
    assert imaginary.is_neg()
    contiguous = imaginary.contiguous()
    assert torch.equal(kernel.silu(contiguous), kernel.silu(-(x + 1)))


def test_tensors_of_libraries_are_refused(kernel, device, mesh):
    """The layers know them, and call their module's own code."""
    x = torch.randn(3, 64, device=device)
    linear = nn.Linear(64, 64, device=device)
    quantization.quantize_(linear, quantization.Int8WeightOnlyConfig())
    sharded = distribute_tensor(x, mesh, [Replicate()])
    for call in (lambda: kernel.silu(sharded), lambda: kernel.rms_norm(x, linear.weight[0])):
        with pytest.raises(TypeError, match=r": \w+ must be a plain tensor, got \w+"):
            call()
    norm = RMSNorm(64, eps=1e-6).to(device)
    norm.weight = nn.Parameter(distribute_tensor(norm.weight.detach(), mesh, [Replicate()]))
    out = kernel.layers.RMSNorm.forward(norm, sharded)
    assert_close(out.full_tensor(), norm(sharded).full_tensor())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_operation(kernel, device, use_reentrant):
    x = torch.randn(3, 64, device=device, requires_grad=True)
    weights = torch.linspace(-1, 1, x.numel(), device=device).view_as(x)
    (expected,) = torch.autograd.grad((kernel.rms_norm(x) * weights).sum(), x)
    out = checkpoint(kernel.rms_norm, x, use_reentrant=use_reentrant)
    (out * weights).sum().backward()
    assert_same(x.grad, expected, 1e-5)


class Norms(nn.Module):
    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel

    def forward(self, x, weight):
        return self.kernel.silu(self.kernel.rms_norm(x, weight)) * 2


# A model without this package crashes as well.
loads_compiled_packages = pytest.mark.skipif(
    torch.cuda.is_available() and torch.__version__.startswith("2.11."),
    reason="PyTorch's own loader of models compiled ahead of time crashes there",
)


@loads_compiled_packages
@pytest.mark.slow
@torch.no_grad()
def test_exported_operations(kernel, device, tmp_path):
    """Saved and loaded, and compiled ahead of time; the number of rows is known when they run."""
    model = Norms(kernel)
    x, weight = torch.randn(4, 64, device=device), torch.randn(64, device=device)
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(model, (x, weight), dynamic_shapes=({0: rows}, None))
    targets = [str(node.target) for node in program.graph.nodes]
    assert sum(target.startswith("_h100_diffusers_kernels") for target in targets) == 2
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "norms.pt2")
    )
    others = torch.randn(7, 64, device=device)
    for loaded in (torch.export.load(file).module(), torch._inductor.aoti_load_package(package)):
        assert torch.equal(loaded(others, weight), model(others, weight))


@loads_compiled_packages
@pytest.mark.slow
@some_families
@torch.no_grad()
def test_models_compiled_ahead_of_time(kernel, device, family, tmp_path):
    model, plain, arguments = prepared(family, device, config=family.one_block)
    kernel.inject_kernels(model)
    options = {**arguments, "return_dict": False}
    program = torch.export.export(model, (), options, strict=False)
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "model.pt2")
    )
    compiled = torch._inductor.aoti_load_package(package)
    others = {**arguments, "hidden_states": torch.randn_like(arguments["hidden_states"])}
    assert_close(compiled(**{**options, **others})[0], run(plain, others), 1e-4)


@pytest.mark.usefixtures("mesh")
@every_family
def test_distributed_data_parallel(kernel, device, family):
    model, plain, arguments = prepared(family, device)
    kernel.inject_kernels(model)
    whole = kernel_calls(run, model, arguments)
    model, plain = map(nn.parallel.DistributedDataParallel, (model, plain))
    assert kernel_calls(run, model, arguments) == whole
    assert_close(run(model, arguments), run(plain, arguments))
    gradients = [in_training(family, candidate, arguments) for candidate in (model, plain)]
    assert_same(*gradients, 1e-5)


def has_caches(family):
    return TABLE.behaviour("FasterCache", family.name) != "same"


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES.values() if not has_caches(family)], ids=str
)
def test_no_caches(kernel, device, family):
    """diffusers has none for these models, with kernels or without."""
    model, plain, _ = prepared(family, device)
    kernel.inject_kernels(model)
    assert not hasattr(plain, "enable_cache") and not hasattr(model, "enable_cache")
    assert not family.caches


@every_family
@either_order
def test_smoothed_energy_guidance(kernel, device, family, is_injected_first):
    """With kernels it fails where it fails without, and computes the same otherwise."""
    if family.name == "omnigen":
        pytest.skip("diffusers takes its attention for cross-attention, which the guidance leaves")
    model, plain, arguments = prepared(family, device)
    unchanged = run(plain, arguments)
    if is_injected_first:
        kernel.inject_kernels(model)
    config = SmoothedEnergyGuidanceConfig(indices=[0], fqn=family.block_lists[0])
    fails = TABLE.behaviour("smoothed energy guidance", family.name) == "same"
    outputs = []
    for candidate in (plain, model):
        with pytest.raises(AttributeError) if fails else contextlib.nullcontext():
            _apply_smoothed_energy_guidance_hook(candidate, config, 1.0)
            kernel.inject_kernels(model)
            outputs.append(run(candidate, arguments))
    if not fails:
        assert (outputs[0] - unchanged).norm() > 1e-3 * unchanged.norm()
        assert_close(outputs[1], outputs[0])
        calls = kernel_calls(run, model, arguments)
        has_rotation = family.name not in ("pixart", "latte")  # nor norms of query and key
        assert bool({"qk_norm_rope", "qk_norm_rope_out"} & calls.keys()) == has_rotation
        assert not any(entry.fell_back for entry in kernel.inject_kernels(model).calls)


# ------------------------------------------------------------------------------------------------
# Companions of one family


HIDDEN = KERNEL_HEADS["heads"] * KERNEL_HEADS["head_dim"]


def calls_with_ip_adapter(kernel, device, family, is_injected_first, make, adapted):
    """A model's calls with IP-Adapters, which `make` makes. The result is the plain model's."""
    model, plain, arguments = prepared(family, device, config=KERNEL_HEADS)
    without = run(plain, arguments)
    if is_injected_first:
        kernel.inject_kernels(model)
    for candidate in (model, plain):
        torch.manual_seed(4)
        for block in candidate.transformer_blocks:
            block.attn.set_processor(make().to(device))
    kernel.inject_kernels(model)
    arguments = {**arguments, "joint_attention_kwargs": adapted}
    expected = run(plain, arguments)
    assert (expected - without).norm() > 0.01 * without.norm()
    assert_close(run(model, arguments), expected)
    return model, kernel_calls(run, model, arguments)


@either_order
def test_ip_adapter(kernel, device, is_injected_first):
    """Its processors attend to the image's tokens. The rest of their blocks runs on the kernels."""
    adapted = {"ip_hidden_states": [torch.randn(2, 4, 24, device=device)]}
    make = functools.partial(FluxIPAdapterAttnProcessor, HIDDEN, 24, num_tokens=(4,), scale=[0.7])
    model, calls = calls_with_ip_adapter(kernel, device, FLUX, is_injected_first, make, adapted)
    # Each block's own, and one that is handed over from a single block to the next.
    assert calls["gated_residual_layer_norm_modulate"] == 5
    assert calls["qk_norm_rope"] == len(model.single_transformer_blocks)
    assert "qk_norm_rope_out" not in calls


@either_order
def test_ip_adapter_of_sd3(kernel, device, is_injected_first):
    image, time = torch.randn(2, 4, 24, device=device), torch.randn(2, 20, device=device)
    make = functools.partial(
        SD3IPAdapterJointAttnProcessor2_0,
        *(HIDDEN, 24, KERNEL_HEADS["head_dim"]),
        timesteps_emb_dim=20,
        scale=0.7,
    )
    adapted = {"ip_hidden_states": image, "temb": time}
    _, calls = calls_with_ip_adapter(kernel, device, SD3, is_injected_first, make, adapted)
    assert calls["gated_residual_layer_norm_modulate"] and calls["gelu"]
    assert not {"qk_norm_rope", "qk_norm_rope_out", "attention"} & calls.keys()


@either_order
def test_processors_with_kept_keys_and_values(kernel, device, is_injected_first):
    """FLUX.2 klein's, which keep those of reference images for the next steps."""
    model, plain, arguments = prepared(FLUX2, device, config=KERNEL_HEADS)
    if is_injected_first:
        kernel.inject_kernels(model)
    for candidate in (model, plain):
        for block in candidate.transformer_blocks:
            block.attn.set_processor(Flux2KVAttnProcessor())
        for block in candidate.single_transformer_blocks:
            block.attn.set_processor(Flux2KVParallelSelfAttnProcessor())
    kernel.inject_kernels(model)
    first = {**arguments, "kv_cache_mode": "extract", "num_ref_tokens": 3}
    with torch.no_grad():
        (out, kept), (expected, plain_kept) = (
            candidate(**first, return_dict=False) for candidate in (model, plain)
        )
    assert_close(out, expected)
    others = {
        "hidden_states": arguments["hidden_states"][:, 3:],
        "img_ids": arguments["img_ids"][3:],
    }
    later = {**arguments, **others, "kv_cache_mode": "cached"}
    expected = run(plain, {**later, "kv_cache": plain_kept})
    assert_close(run(model, {**later, "kv_cache": kept}), expected)
    calls = kernel_calls(run, model, {**later, "kv_cache": kept})
    assert calls["gated_residual_layer_norm_modulate"] and calls["layer_norm_modulate"]
    assert not {"qk_norm_rope", "qk_norm_rope_out", "attention"} & calls.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_image_as_context(kernel, device, dtype):
    """Wan attends to it apart from the text, of which it knows the number of tokens."""
    config = {**KERNEL_HEADS, "image_dim": 20, "added_kv_proj_dim": HIDDEN}
    model, plain, arguments = prepared(WAN, device, dtype, config=config, text_length=512)
    kernel.inject_kernels(model)
    image = torch.randn(2, 7, 20, device=device).to(dtype)
    arguments["encoder_hidden_states_image"] = image
    expected = run(plain, arguments)
    others = run(plain, {**arguments, "encoder_hidden_states_image": -image})
    assert (others - expected).norm() > 0.02 * expected.norm()
    assert_same(run(model, arguments), expected, 1e-5 if dtype == torch.float32 else 1.5e-2)
    calls = kernel_calls(run, model, arguments)
    assert calls["gated_residual_layer_norm_modulate"] == 5
    if dtype == torch.bfloat16:
        assert calls["attention"] == 3 * len(model.blocks)
        assert calls["gated_residual"] == 1  # attention to the image adds that to the text


@pytest.mark.parametrize("name", COPIES_OF_WAN)
def test_models_with_wans_block(kernel, device, name):
    plain = copy_of_wan(name).to(device)
    model = copy.deepcopy(plain)
    assert list(kernel.inject_kernels(model).levels.values()) == ["in full"]
    arguments = inputs_of_copy(name, device)
    assert_close(run(model, arguments), run(plain, arguments))
    calls = kernel_calls(run, model, arguments)
    assert calls["qk_norm_rope"] >= 2 and calls["gated_residual_layer_norm_modulate"] >= 5
    assert not any(entry.fell_back for entry in kernel.inject_kernels(model).calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_frames_with_noise_of_their_own(kernel, device, dtype):
    """SkyReels-V2 has a timestep for each frame, and frames that see those before them alone."""
    config = {"num_frame_per_block": 2, "attention_head_dim": 64}
    plain = copy_of_wan("SkyReelsV2Transformer3DModel", **config).to(device, dtype)
    model = copy.deepcopy(plain)
    report = kernel.inject_kernels(model)
    arguments = {
        "hidden_states": torch.randn(1, 4, 4, 4, 6, device=device, dtype=dtype),
        "encoder_hidden_states": torch.randn(1, 5, 24, device=device, dtype=dtype),
        "timestep": torch.tensor([[500, 500, 700, 900]], device=device),
        "enable_diffusion_forcing": True,
    }
    expected = run(plain, arguments)
    assert_same(run(model, arguments), expected, 1e-5 if dtype == torch.float32 else 3e-2)
    calls = kernel_calls(run, model, arguments)
    assert calls["gated_residual_layer_norm_modulate"] == 5
    if dtype == torch.bfloat16:
        assert calls["attention"] == calls["attention_blocks"] == 2
        assert not any(entry.fell_back for entry in report.calls)


@pytest.mark.parametrize("mask", ["padded", "holes"])
def test_the_mask_of_a_padded_text(kernel, device, mask):
    """Qwen-Image's is a bias on the keys: attention stays on the kernel, and padding has no weight."""
    model, plain, arguments = prepared(
        QWEN_IMAGE, device, torch.bfloat16, config=KERNEL_HEADS, mask=mask, text_length=9
    )
    kernel.inject_kernels(model)
    assert kernel_calls(run, model, arguments)["attention"] == len(model.transformer_blocks)
    expected = run(plain, arguments)
    assert_same(run(model, arguments), expected, 3e-2)
    unmasked = {**arguments, "encoder_hidden_states_mask": None}
    assert (run(plain, unmasked) - expected).norm() > 0.05 * expected.norm()
    text = arguments["encoder_hidden_states"]
    padding = arguments["encoder_hidden_states_mask"] == 0
    assert padding.any()
    other = torch.where(padding[..., None], -text, text)
    out = run(model, {**arguments, "encoder_hidden_states": other})
    assert torch.equal(out, run(model, arguments))


@pytest.mark.parametrize("name", ["flux", "bria"])
def test_residuals_of_a_controlnet(kernel, device, name):
    """What is added to a block's results keeps it from sharing a pass with the next. Bria adds those of its
    single blocks in place, to fewer tokens."""
    model, plain, arguments = prepared(FAMILIES[name], device)
    kernel.inject_kernels(model)
    whole, without = kernel_calls(run, model, arguments), run(plain, arguments)
    samples = torch.randn(*arguments["hidden_states"].shape[:2], plain.inner_dim, device=device)
    if name == "bria":
        samples = samples[:, arguments["encoder_hidden_states"].shape[1] :]
    else:
        arguments["controlnet_block_samples"] = [samples]
    arguments["controlnet_single_block_samples"] = [samples]
    expected = run(plain, arguments)
    assert (expected - without).norm() > 0.01 * without.norm()
    assert_close(run(model, arguments), expected)
    calls = kernel_calls(run, model, arguments)
    for operation in ("qk_norm_rope", "qk_norm_rope_out", "gelu"):
        assert calls[operation] == whole[operation]
    assert not any(entry.fell_back for entry in kernel.inject_kernels(model).calls)


@pytest.mark.parametrize("name", CONTROLNETS)
def test_a_controlnet_is_a_model_of_its_family(kernel, device, name):
    plain = FAMILIES[name].model(device)
    controlnet = CONTROLNETS[name](plain)

    class Pipeline:
        components = {"transformer": plain, "controlnet": controlnet}

    report = kernel.inject_kernels(Pipeline())
    assert report.levels == {"transformer": "in full", "controlnet": "in full"}
    replaced = {entry.name for entry in report.replaced}
    assert "controlnet.transformer_blocks.0" in replaced
