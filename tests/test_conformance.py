"""What an injected model of any family does: the same as without kernels, whatever is done to it."""

import collections
import copy
import functools
import gc
import importlib
import inspect
import itertools
import threading
import weakref

import accelerate
import pytest
import torch
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from diffusers import (
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)
from diffusers.hooks import HookRegistry, ModelHook, apply_group_offloading
from diffusers.hooks.layer_skip import AttentionProcessorSkipHook, AttentionScoreSkipFunctionMode
from diffusers.models import attention_dispatch
from peft import LoraConfig
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as global_hooks

from families import (
    FAMILIES,
    KERNEL_HEADS,
    assert_as_close_as_eager,
    assert_close,
    every_family,
    prepared,
    run,
)
from foreign_modules import ForeignBlock, HalvedLinear, Wrap
from ltx_models import either_order, graph_replays, kernel_calls, snapshot

pytestmark = [pytest.mark.usefixtures("_one_thread", "_default_backend")]

ROUNDED = [torch.bfloat16, torch.float16]


@pytest.fixture
def _default_backend(monkeypatch):
    """diffusers' choice for all models, which model.set_attention_backend changes too."""
    registry = attention_dispatch._AttentionBackendRegistry
    monkeypatch.setattr(registry, "_active_backend", registry._active_backend)


def of_families(cases):
    """Parameters (family, case) for each of the cases of each family."""
    pairs = [(family, case) for family in FAMILIES.values() for case in cases(family)]
    return pytest.mark.parametrize(
        "family, case", pairs, ids=[f"{family}-{case}" for family, case in pairs]
    )


def computing(family, model, arguments, expected, slack=1e-5):
    """Runs a float32 model, checks its output, and returns how often it called each operator."""
    outputs = []
    calls = kernel_calls(lambda: outputs.append(run(model, arguments)))
    assert_close(outputs[0], expected, slack)
    return calls


def assert_alike(model, plain, arguments, slack=1e-4):
    """Both in float32, where no float64 model can be made of the plain one."""
    assert_close(run(model, arguments), run(plain, arguments), slack)


def assert_within_rounding(family, model, plain, arguments, exact=None):
    """For one input: what is wrong is far more than this from right. In float32 as `assert_alike`."""
    if plain.dtype == torch.float32:
        return assert_alike(model, plain, arguments)
    exact = copy.deepcopy(plain).float() if exact is None else exact
    expected = run(exact, family.cast(arguments, torch.float32))
    errors = [
        (run(m, arguments).float() - expected).norm() / expected.norm() for m in (model, plain)
    ]
    assert errors[0] <= 1.5 * errors[1] + torch.finfo(model.dtype).eps, errors


# ------------------------------------------------------------------------------------------------
# Values


@pytest.mark.kernels_ci
@of_families(lambda family: family.options)
def test_values(kernel, device, family, case):
    model, plain, arguments = prepared(family, device, **family.options[case])
    kernel.inject_kernels(model)
    assert computing(family, model, arguments, family.reference(plain, arguments))
    assert not kernel_calls(run, plain, arguments)


@every_family
@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
@pytest.mark.parametrize("attention", [True, False], ids=["attention", "no_attention"])
def test_accuracy_contract(kernel, device, family, dtype, attention):
    model, plain, arguments = prepared(family, device, dtype, config=KERNEL_HEADS)
    kernel.inject_kernels(model, attention=attention)
    assert ("attention" in kernel_calls(run, model, arguments)) == attention
    assert_as_close_as_eager(family, model, plain, batch=3, tokens=20, text_length=20)


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_runs_give_the_same_bits(kernel, device, family, dtype):
    model, _, arguments = prepared(family, device, dtype)
    kernel.inject_kernels(model)
    assert torch.equal(run(model, arguments), run(model, arguments))


# ------------------------------------------------------------------------------------------------
# The report


@every_family
def test_report_names_modules(kernel, device, family):
    model, _, _ = prepared(family, device)
    report = kernel.inject_kernels(model)
    classes = {name: type(module).__name__ for name, module in model.named_modules()}
    for entry in report.replaced + report.left_alone:
        assert classes[entry.name] == entry.module
    assert len({entry.name for entry in report.replaced}) == report.num_replaced
    assert {family.parts["block"], family.parts["attention"]} <= {e.name for e in report.replaced}
    assert all(entry.reason for entry in report.left_alone)


@every_family
def test_second_injection_changes_nothing(kernel, device, family):
    model, _, _ = prepared(family, device)
    first = kernel.inject_kernels(model)
    before = snapshot(model)
    second = kernel.inject_kernels(model)
    assert (first.already_injected, second.already_injected) == (False, True)
    assert (second.replaced, second.left_alone) == (first.replaced, first.left_alone)
    assert snapshot(model) == before


@every_family
@pytest.mark.parametrize("attention", [True, False])
def test_second_injection_with_other_options_is_an_error(kernel, device, family, attention):
    model, plain, arguments = prepared(family, device, torch.bfloat16, config=KERNEL_HEADS)
    kernel.inject_kernels(model, attention=attention)
    before = snapshot(model)
    with pytest.raises(ValueError, match="eject_kernels"):
        kernel.inject_kernels(model, attention=not attention)
    assert snapshot(model) == before
    assert ("attention" in kernel_calls(run, model, arguments)) == attention
    kernel.eject_kernels(model)
    kernel.inject_kernels(model, attention=not attention)
    assert ("attention" in kernel_calls(run, model, arguments)) != attention


@every_family
def test_nothing_is_printed(kernel, device, family, capfd):
    model, _, arguments = prepared(family, device)
    capfd.readouterr()
    kernel.inject_kernels(model)
    run(model, arguments)
    kernel.eject_kernels(model)
    assert capfd.readouterr() == ("", "")


@every_family
def test_subclasses_and_wrapped_models_are_known(kernel, device, family):
    model, plain, arguments = prepared(family, device)
    model.__class__ = type("MyTransformer", (type(model),), {})
    kernel.inject_kernels(torch.nn.Sequential(torch.compile(model, backend="eager")))
    assert computing(family, model, arguments, family.reference(plain, arguments))


# ------------------------------------------------------------------------------------------------
# The way back


@pytest.mark.kernels_ci
@every_family
@pytest.mark.parametrize("had_hooks", [False, True], ids=["fresh", "had_hooks"])
def test_eject_gives_back_the_model(kernel, device, family, had_hooks):
    model, _, arguments = prepared(family, device)
    if had_hooks:
        for block in family.blocks(model):
            add_hook_to_module(block, accelerate.hooks.ModelHook())
            remove_hook_from_module(block)
    before, expected = snapshot(model), run(model, arguments)
    attributes = {name: list(vars(module)) for name, module in model.named_modules()}
    for _ in range(2):
        kernel.inject_kernels(model)
        assert kernel_calls(run, model, arguments)
        kernel.eject_kernels(model)
        assert snapshot(model) == before
        assert {name: list(vars(m)) for name, m in model.named_modules()} == attributes
        assert torch.equal(run(model, arguments), expected)
    kernel.eject_kernels(model)
    assert snapshot(model) == before


@every_family
def test_weights_configuration_and_classes_stay(kernel, device, family):
    model, _, arguments = prepared(family, device)
    tensors = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    values = {name: tensor.clone() for name, tensor in tensors.items()}
    keys, config = list(model.state_dict()), dict(model.config)
    classes = {type(module): dict(vars(type(module))) for module in model.modules()}
    kernel.inject_kernels(model)
    run(model, arguments)
    after = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    assert after.keys() == tensors.keys()
    assert all(after[name] is tensors[name] for name in after)
    assert all(torch.equal(after[name], values[name]) for name in after)
    assert (list(model.state_dict()), dict(model.config)) == (keys, config)
    assert {cls: dict(vars(cls)) for cls in classes} == classes


@every_family
def test_copies_are_injected_and_independent(kernel, device, family):
    model, plain, arguments = prepared(family, device)
    expected_of_model = family.reference(plain, arguments)
    kernel.inject_kernels(model)
    run(model, arguments)
    duplicate = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in (*duplicate.parameters(), *plain.parameters()):
            parameter.mul_(1.1)
    expected = family.reference(plain, arguments)
    assert kernel.inject_kernels(duplicate).already_injected
    calls = computing(family, duplicate, arguments, expected)
    assert calls == computing(family, model, arguments, expected_of_model) != {}
    kernel.eject_kernels(duplicate)
    assert snapshot(duplicate).keys() == snapshot(plain).keys()
    assert not computing(family, duplicate, arguments, expected)
    assert computing(family, model, arguments, expected_of_model) == calls


@every_family
def test_a_copy_outlives_the_original(kernel, device, family):
    model, plain, arguments = prepared(family, device)
    kernel.inject_kernels(model)
    model = copy.deepcopy(model)
    gc.collect()
    assert computing(family, model, arguments, family.reference(plain, arguments))


@every_family
def test_saved_and_loaded(kernel, device, family, tmp_path):
    model, plain, arguments = prepared(family, device)
    kernel.inject_kernels(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).to(device)
    assert not kernel_calls(run, loaded, arguments)
    assert torch.equal(run(loaded, arguments), run(plain, arguments))
    kernel.inject_kernels(loaded)
    assert torch.equal(run(loaded, arguments), run(model, arguments))


@every_family
def test_memory_is_given_back_without_the_collector(kernel, device, family):
    model, _, arguments = prepared(family, device)
    kernel.inject_kernels(model)
    run(model, arguments)
    references = [weakref.ref(parameter) for parameter in model.parameters()]
    gc.collect()
    gc.disable()
    try:
        del model
        assert not [1 for reference in references if reference() is not None]
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------------
# Hooks


class Counted(accelerate.hooks.ModelHook):
    """How often its module was called, whatever kind of hook it is used as."""

    def __init__(self):
        self.count = 0

    def pre_forward(self, module, *args, **kwargs):
        self.count += 1
        return args, kwargs


class DiffusersHook(ModelHook):
    def __init__(self, counted):
        super().__init__()
        self.pre_forward = counted.pre_forward


class DiffusersForward(ModelHook):
    """As caches are: it calls the forward that it replaces."""

    def __init__(self, counted):
        super().__init__()
        self.counted = counted

    def new_forward(self, module, *args, **kwargs):
        self.counted.count += 1
        return self.fn_ref.original_forward(*args, **kwargs)


def add_torch_hooks(module, counted):
    module.register_forward_pre_hook(
        lambda module, args, kwargs: counted.pre_forward(module) and None, with_kwargs=True
    )
    module.register_forward_hook(lambda module, args, output: None)


def add_diffusers_hooks(module, counted):
    registry = HookRegistry.check_if_exists_or_initialize(module)
    registry.register_hook(DiffusersHook(Counted()), "inner")
    registry.register_hook(DiffusersForward(counted), "around")


def add_both(module, counted):
    add_hook_to_module(module, Counted())
    add_diffusers_hooks(module, counted)


HOOKS = {
    "torch": add_torch_hooks,
    "accelerate": add_hook_to_module,
    "accelerate_chain": lambda module, counted: (
        add_hook_to_module(module, Counted()),
        add_hook_to_module(module, counted, append=True),
    ),
    "diffusers": add_diffusers_hooks,
    "diffusers_around_accelerate": add_both,
}


@every_family
@pytest.mark.parametrize("kind", HOOKS)
@either_order
def test_hooks_on_every_kind_of_module(kernel, device, family, kind, is_injected_first):
    """Each runs as often as on a plain model, and what is computed is the same."""
    model, plain, arguments = prepared(family, device)
    expected = family.reference(plain, arguments)
    for part in family.parts.values():
        if is_injected_first:
            kernel.inject_kernels(model)
        pair = []
        for candidate in (model, plain):
            counted = Counted()
            HOOKS[kind](candidate.get_submodule(part), counted)
            pair.append(counted)
        kernel.inject_kernels(model)
        assert_close(run(model, arguments), expected)
        run(plain, arguments)
        assert pair[0].count == pair[1].count, part
        if not is_injected_first:
            kernel.eject_kernels(model)
    kernel.eject_kernels(model)
    assert not computing(family, model, arguments, expected)


@pytest.mark.parametrize(
    ("name", "layer", "norm"),
    [
        ("flux", "norm1.linear", "norm1_context"),
        ("qwenimage", "img_mod", "txt_norm1"),
        ("sd3", "norm1.linear", "norm1_context"),
    ],
)
def test_hooks_on_one_streams_modulation_and_the_other_streams_norm(
    kernel, device, name, layer, norm
):
    """Neither runs twice, though the kernels cannot stand in for the norm."""
    family = FAMILIES[name]
    model, plain, arguments = prepared(family, device)
    kernel.inject_kernels(model)
    counts = []
    for candidate in (model, plain):
        for part in (layer, norm):
            counted = Counted()
            HOOKS["torch"](candidate.get_submodule(f"transformer_blocks.0.{part}"), counted)
            counts.append(counted)
    assert_alike(model, plain, arguments)
    of_injected, of_plain = counts[:2], counts[2:]
    assert [c.count for c in of_injected] == [c.count for c in of_plain]
    assert all(c.count > 0 for c in of_plain)


class ModuleProcessor(torch.nn.Module):
    """A processor that is a module, as those of IP-Adapters are."""

    def __init__(self, processor):
        super().__init__()
        self.processor = processor

    def forward(self, attn, *args, **kwargs):
        return self.processor(attn, *args, **kwargs)


def test_a_processor_that_is_a_module_is_named(kernel, device):
    model, plain, arguments = prepared(FAMILIES["flux"], device)
    for candidate in (model, plain):
        attention = candidate.transformer_blocks[0].attn
        processor = attention.__dict__.pop("processor")
        attention.processor = ModuleProcessor(processor)
    left_alone = kernel.inject_kernels(model).left_alone
    (reason,) = (e.reason for e in left_alone if e.name == "transformer_blocks.0.attn")
    assert reason.endswith("ModuleProcessor, not the one known")
    assert_alike(model, plain, arguments)


def scaled(value, factor=1.5):
    if isinstance(value, torch.Tensor):
        return value * factor
    first = next(i for i, item in enumerate(value) if item is not None)
    return (*value[:first], value[first] * factor, *value[first + 1 :])


def tensor_of(value):
    if isinstance(value, torch.Tensor):
        return value
    return next(item for item in value if item is not None)


def replace_output(module, args, output):
    return scaled(output)


def scale_in_place(module, args, output):
    tensor_of(output).mul_(1.5)


def write_through_a_view(module, args, output):
    tensor_of(output)[..., 1:].add_(0.5)


def write_without_a_version(module, args, output):
    tensor_of(output).data[..., ::2] += 1


WRITERS = [replace_output, scale_in_place, write_through_a_view, write_without_a_version]


@of_families(lambda family: family.parts)
@either_order
def test_hooks_that_change_what_is_computed(kernel, device, family, case, is_injected_first):
    for hook in WRITERS:
        model, plain, arguments = prepared(family, device)
        if is_injected_first:
            kernel.inject_kernels(model)
        for candidate in (model, plain):
            family.part(candidate, case).register_forward_hook(hook)
        kernel.inject_kernels(model)
        assert_alike(model, plain, arguments)
        with torch.inference_mode():
            out = model(**arguments, return_dict=False)[0]
        assert_close(out.clone(), run(plain, arguments), 1e-4)


@every_family
def test_hooks_that_change_a_blocks_own_weights(kernel, device, family):
    """As block swapping does, before the block's turn."""

    def swap(block, args):
        for name, parameter in list(block.named_parameters(recurse=False)):
            setattr(block, name, torch.nn.Parameter(parameter * -1))
        for module in block.modules():
            if "norm" in type(module).__name__.lower():
                for parameter in module.parameters(recurse=False):
                    parameter.data.mul_(-1)

    model, plain, arguments = prepared(family, device)
    kernel.inject_kernels(model)
    for candidate in (model, plain):
        for block in family.blocks(candidate):
            block.register_forward_pre_hook(swap)
    for _ in range(2):
        assert_alike(model, plain, arguments)


@every_family
def test_hooks_that_change_the_modulation(kernel, device, family):
    name = family.condition
    block = family.part(family.model("cpu"), "next_block")
    place = list(inspect.signature(type(block).forward).parameters).index(name) - 1

    def find(args, kwargs):
        return kwargs[name] if name in kwargs else args[place]

    def halved(module, args, kwargs):
        half = find(args, kwargs) * 0.5
        if name in kwargs:
            return args, {**kwargs, name: half}
        return (*args[:place], half, *args[place + 1 :]), kwargs

    def halve(module, args, kwargs):
        find(args, kwargs).mul_(0.5)

    def halve_data(module, args, kwargs):
        find(args, kwargs).data *= 0.5

    for hook in (halved, halve, halve_data):
        model, plain, arguments = prepared(family, device)
        kernel.inject_kernels(model)
        for candidate in (model, plain):
            block = family.part(candidate, "next_block")
            block.register_forward_pre_hook(hook, with_kwargs=True)
        assert_alike(model, plain, arguments)


@every_family
def test_global_hooks_see_the_same_modules(kernel, device, family):
    model, plain, arguments = prepared(family, device)
    kernel.inject_kernels(model)
    seen = {}
    for candidate in (model, plain):
        names = {module: name for name, module in candidate.named_modules()}
        calls = seen[candidate] = []
        handle = global_hooks.register_module_forward_hook(
            lambda module, args, output, calls=calls, names=names: calls.append(names[module])
        )
        try:
            run(candidate, arguments)
        finally:
            handle.remove()
    assert seen[model] == seen[plain]
    assert computing(family, model, arguments, family.reference(plain, arguments))


class Boom(Exception):
    pass


@of_families(lambda family: family.parts)
def test_an_exception_in_mid_forward_leaves_nothing(kernel, device, family, case):
    def boom(module, *args):
        raise Boom

    model, plain, arguments = prepared(family, device)
    kernel.inject_kernels(model)
    part = family.part(model, case)
    for add in (part.register_forward_pre_hook, part.register_forward_hook):
        handle = add(boom)
        with pytest.raises(Boom):
            run(model, arguments)
        handle.remove()
        assert computing(family, model, arguments, family.reference(plain, arguments))


# ------------------------------------------------------------------------------------------------
# Other parts than the known ones


def put(model, path, make):
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, make(model.get_submodule(path)))


@of_families(lambda family: family.parts)
@either_order
def test_wrapped_parts(kernel, device, family, case, is_injected_first):
    model, plain, arguments = prepared(family, device)
    expected = family.reference(plain, arguments)
    if is_injected_first:
        kernel.inject_kernels(model)
    put(model, family.parts[case], Wrap)
    kernel.inject_kernels(model)
    assert computing(family, model, arguments, expected)
    kernel.eject_kernels(model)
    assert not computing(family, model, arguments, expected)


@of_families(lambda family: family.parts)
@either_order
def test_parts_of_another_model(kernel, device, family, case, is_injected_first):
    model, plain, arguments = prepared(family, device)
    path = family.parts[case]
    if is_injected_first:
        kernel.inject_kernels(model)
    for candidate in (model, plain):
        put(candidate, path, lambda old: family.model(device, seed=7).get_submodule(path))
    kernel.inject_kernels(model)
    assert computing(family, model, arguments, family.reference(plain, arguments))


@every_family
@either_order
def test_a_block_of_the_users_own(kernel, device, family, is_injected_first):
    for kind in ("block", "next_block"):
        model, plain, arguments = prepared(family, device)
        if is_injected_first:
            kernel.inject_kernels(model)
        for candidate in (model, plain):
            put(candidate, family.parts[kind], ForeignBlock)
        kernel.inject_kernels(model)
        assert computing(family, model, arguments, family.reference(plain, arguments))


def other_norms(old):
    """Norms that may stand in a norm's place, by what makes them."""
    shape = getattr(old, "normalized_shape", None) or old.dim
    width = tuple(shape)[-1]
    torch.manual_seed(3)
    with_bias = torch.nn.LayerNorm(width)
    torch.nn.init.normal_(with_bias.bias)
    other_eps = copy.deepcopy(old)
    other_eps.eps = 0.3
    without_eps = torch.nn.RMSNorm(width, eps=None, elementwise_affine=False)
    return [with_bias, torch.nn.Identity(), other_eps, without_eps]


NORMS = {"norm", "norm2", "inner_norm", "qk_norm", "added_norm"}


@of_families(lambda family: sorted(NORMS & family.parts.keys()))
@either_order
def test_other_norms(kernel, device, family, case, is_injected_first):
    path = family.parts[case]
    if "AdaLayerNorm" in type(family.model("cpu").get_submodule(path)).__name__:
        pytest.skip("it returns more than a norm")
    for i in range(4):
        model, plain, arguments = prepared(family, device)
        if is_injected_first:
            kernel.inject_kernels(model)
        for candidate in (model, plain):
            put(candidate, path, lambda old, i=i: other_norms(old)[i].to(device))
        kernel.inject_kernels(model)
        assert_alike(model, plain, arguments)


@every_family
@either_order
def test_other_processors(kernel, device, family, is_injected_first):
    base = getattr(importlib.import_module(family.module), family.processor)

    class Scaling(base):
        def __call__(self, *args, **kwargs):
            return scaled(super().__call__(*args, **kwargs))

    for processor in (Scaling, base):
        model, plain, arguments = prepared(family, device)
        if is_injected_first:
            kernel.inject_kernels(model)
        for candidate in (model, plain):
            family.part(candidate, "attention").set_processor(processor())
        kernel.inject_kernels(model)
        assert computing(family, model, arguments, family.reference(plain, arguments))
        assert type(family.part(model, "attention").processor) is processor
        kernel.eject_kernels(model)
        assert type(family.part(model, "attention").processor) is processor
        assert torch.equal(run(model, arguments), run(plain, arguments))


@of_families(lambda family: [*family.parts, ""])
@either_order
def test_another_forward_on_the_instance(kernel, device, family, case, is_injected_first):
    """As guidance methods put it there; "" is the model itself."""
    model, plain, arguments = prepared(family, device)
    if is_injected_first:
        kernel.inject_kernels(model)
    for candidate in (model, plain):
        part = family.part(candidate, case) if case else candidate
        part.forward = lambda *args, forward=part.forward, **kwargs: scaled(
            forward(*args, **kwargs)
        )
    kernel.inject_kernels(model)
    assert_alike(model, plain, arguments)
    kernel.eject_kernels(model)
    assert torch.equal(run(model, arguments), run(plain, arguments))


def patched(original):
    @functools.wraps(original)
    def function(*args, **kwargs):
        return scaled(original(*args, **kwargs))

    return function


@of_families(lambda family: family.parts)
@either_order
def test_patched_classes(kernel, device, monkeypatch, family, case, is_injected_first):
    model, plain, arguments = prepared(family, device)
    if is_injected_first:
        kernel.inject_kernels(model)
    cls = type(family.part(model, case))
    if cls is torch.nn.Identity:
        pytest.skip("nothing to patch")
    with monkeypatch.context() as patch:
        patch.setattr(cls, "forward", patched(cls.forward))
        kernel.inject_kernels(model)
        assert_alike(model, plain, arguments)
    # As it was before, if it was put in before.
    assert_close(run(model, arguments), family.reference(plain, arguments))


FUNCTIONS = ("F.rms_norm", "F.layer_norm", "F.gelu", "F.silu", "F.scaled_dot_product_attention")


@of_families(lambda family: (*family.functions, *FUNCTIONS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@either_order
def test_patched_functions(kernel, device, monkeypatch, family, case, dtype, is_injected_first):
    model, plain, arguments = prepared(family, device, dtype, config=KERNEL_HEADS)
    if is_injected_first:
        kernel.inject_kernels(model)
    owner = torch.nn.functional if case.startswith("F.") else importlib.import_module(family.module)
    name = case.removeprefix("F.")
    monkeypatch.setattr(owner, name, patched(getattr(owner, name)))
    kernel.inject_kernels(model)
    assert_within_rounding(family, model, plain, arguments)


# ------------------------------------------------------------------------------------------------
# Offloading and casting


def sequential(model, device, **_):
    accelerate.cpu_offload(model, execution_device=torch.device(device))


def whole_model(model, device, **_):
    accelerate.cpu_offload_with_hook(model, execution_device=torch.device(device))


def groups(offload_type, use_stream=False, to_disk=False):
    def offload(model, device, folder):
        if use_stream and device != "cuda":
            pytest.skip("there are no streams on a CPU")
        apply_group_offloading(
            model,
            onload_device=torch.device(device),
            offload_device=torch.device("cpu"),
            offload_type=offload_type,
            num_blocks_per_group=1 if offload_type == "block_level" else None,
            use_stream=use_stream,
            offload_to_disk_path=str(folder) if to_disk else None,
        )

    return offload


OFFLOADING = {
    "sequential": sequential,
    "whole_model": whole_model,
    "blocks": groups("block_level"),
    "leaves": groups("leaf_level"),
    "blocks_with_stream": groups("block_level", use_stream=True),
    "leaves_with_stream": groups("leaf_level", use_stream=True),
    "blocks_to_disk": groups("block_level", to_disk=True),
    "leaves_to_disk": groups("leaf_level", to_disk=True),
}


@every_family
@pytest.mark.parametrize("kind", OFFLOADING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@either_order
def test_offloading(kernel, device, tmp_path, family, kind, dtype, is_injected_first):
    heads = {} if dtype == torch.float32 else KERNEL_HEADS
    model, plain, arguments = prepared(family, device, dtype, config=heads)
    expected = family.reference(plain, arguments)
    if is_injected_first:
        kernel.inject_kernels(model)
    OFFLOADING[kind](model, device, folder=tmp_path)
    kernel.inject_kernels(model)
    eager = run(plain, arguments)
    for _ in range(2):
        out = run(model, arguments)
        if dtype == torch.float32:
            assert_close(out, expected)
        else:
            errors = [(values.double() - expected).norm() for values in (out, eager)]
            assert errors[0] <= 1.5 * errors[1], errors
    assert kernel_calls(run, model, arguments)
    kernel.eject_kernels(model)
    assert not kernel_calls(run, model, arguments)
    assert torch.equal(run(model, arguments), eager)


@every_family
@pytest.mark.parametrize("kind", ["sequential", "whole_model"])
@either_order
def test_offloading_is_taken_back(kernel, device, family, kind, is_injected_first):
    model, plain, arguments = prepared(family, device)
    expected, before = family.reference(plain, arguments), snapshot(model)
    if is_injected_first:
        kernel.inject_kernels(model)
    OFFLOADING[kind](model, device)
    kernel.inject_kernels(model)
    run(model, arguments)
    remove_hook_from_module(model, recurse=True)
    model.to(device)
    assert computing(family, model, arguments, expected)
    kernel.eject_kernels(model)
    assert snapshot(model) == before


@every_family
@either_order
def test_layerwise_casting(kernel, device, family, is_injected_first):
    model, plain, arguments = prepared(family, device)
    if is_injected_first:
        kernel.inject_kernels(model)
    for candidate in (model, plain):
        candidate.enable_layerwise_casting(
            storage_dtype=torch.bfloat16, compute_dtype=torch.float32
        )
    kernel.inject_kernels(model)
    assert kernel_calls(run, model, arguments)
    assert_alike(model, plain, arguments)


@every_family
def test_dtype_changes_after_the_injection(kernel, device, family):
    model, plain, _ = prepared(family, device, torch.bfloat16)
    kernel.inject_kernels(model)
    model, plain = model.float(), plain.float()
    arguments = family.inputs(device)
    assert computing(family, model, arguments, family.reference(plain, arguments))


# ------------------------------------------------------------------------------------------------
# Adapters and quantized layers


def add_lora(family, model, name="default", seed=1):
    torch.manual_seed(seed)
    config = LoraConfig(
        r=2, lora_alpha=4, init_lora_weights=False, target_modules=family.lora_targets
    )
    model.add_adapter(config, adapter_name=name)


@every_family
@either_order
def test_lora(kernel, device, family, is_injected_first):
    """Loaded, scaled, joined by another, switched off, fused, removed."""
    model, plain, arguments = prepared(family, device)
    without = family.reference(plain, arguments)
    if is_injected_first:
        kernel.inject_kernels(model)
    for candidate in (model, plain):
        add_lora(family, candidate)
    kernel.inject_kernels(model)
    expected = family.reference(plain, arguments)
    assert (expected - without).norm() > 0.01 * without.norm()
    calls = computing(family, model, arguments, expected)
    assert calls
    changes = [
        lambda candidate: candidate.set_adapters("default", weights=0.5),
        lambda candidate: add_lora(family, candidate, "other", seed=2),
        lambda candidate: candidate.set_adapters(["default", "other"], weights=[0.7, 0.4]),
        lambda candidate: candidate.delete_adapters("other"),
        lambda candidate: candidate.disable_adapters(),
        lambda candidate: candidate.enable_adapters(),
        lambda candidate: candidate.fuse_lora(),
    ]
    for change in changes:
        for candidate in (model, plain):
            change(candidate)
        expected = family.reference(plain, arguments)
        assert computing(family, model, arguments, expected, slack=1e-4) == calls
    model.unfuse_lora()
    model.unload_lora()
    assert computing(family, model, arguments, without, slack=1e-4) == calls


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@either_order
def test_quantized_layers(kernel, device, family, dtype, is_injected_first):
    quantization = pytest.importorskip("torchao.quantization")
    model, plain, arguments = prepared(family, device, dtype)
    if is_injected_first:
        kernel.inject_kernels(model)
    for candidate in (model, plain):
        for blocks in family.block_lists:
            quantization.quantize_(
                candidate.get_submodule(blocks), quantization.Int8WeightOnlyConfig()
            )
    kernel.inject_kernels(model)
    assert kernel_calls(run, model, arguments)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    out, expected = run(model, arguments), run(plain, arguments)
    assert (out - expected).norm() <= tolerance * expected.norm()


each_feed_forward = of_families(
    lambda family: [part for part in family.parts if part.startswith("feed_forward")]
)


def append_layer(feed_forward):
    feed_forward.net.append(torch.nn.Tanh())


def hook_dropout(feed_forward):
    feed_forward.net[1].register_forward_hook(lambda module, args, output: output * 0.5)


def drop_bias(feed_forward):
    feed_forward.net[2].bias = None


def swap_weight(feed_forward):
    weight = feed_forward.net[2].weight
    feed_forward.net[2].weight = torch.nn.Parameter(weight.detach() * 0.5)


def skip_dropout_and_halve(feed_forward):
    up, _, down = feed_forward.net
    feed_forward.forward = lambda x: down(up(x)) * 0.5


@each_feed_forward
@pytest.mark.parametrize(
    "change", [append_layer, hook_dropout, drop_bias, swap_weight, skip_dropout_and_halve]
)
@either_order
def test_changes_inside_of_a_feed_forward(kernel, device, family, case, change, is_injected_first):
    model, plain, arguments = prepared(family, device)
    unlike = run(plain, arguments)
    if is_injected_first:
        kernel.inject_kernels(model)
        assert_alike(model, plain, arguments)
    for candidate in (model, plain):
        change(family.part(candidate, case))
    kernel.inject_kernels(model)
    assert_alike(model, plain, arguments)
    assert (run(plain, arguments) - unlike).norm() > 1e-3 * unlike.norm()


@every_family
def test_dropout_drops_in_training(kernel, device, family):
    model, plain, arguments = prepared(family, device)
    kernel.inject_kernels(model)

    def drawn(candidate):
        torch.manual_seed(5)
        return run(candidate, arguments)

    assert_close(drawn(model), drawn(plain), 1e-4)
    unlike = drawn(plain)
    for candidate in (model, plain):
        candidate.train()
        for module in candidate.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.5
    assert_close(drawn(model), drawn(plain), 1e-4)
    assert (drawn(plain) - unlike).norm() > 0.1 * unlike.norm()
    for candidate in (model, plain):
        candidate.eval()
    assert_close(drawn(model), unlike, 1e-4)


@pytest.mark.usefixtures("_fresh_compiler")
@each_feed_forward
@either_order
def test_a_compiled_feed_forward_runs_compiled(kernel, device, family, case, is_injected_first):
    model, plain, arguments = prepared(family, device)
    counter = CompileCounterWithBackend("eager")
    if is_injected_first:
        kernel.inject_kernels(model)
        run(model, arguments)
    family.part(model, case).compile(backend=counter)
    kernel.inject_kernels(model)
    assert_close(run(model, arguments), family.reference(plain, arguments), 1e-4)
    assert counter.frame_count > 0


class Bfloat16Linear(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).bfloat16()


@every_family
@pytest.mark.parametrize("cls", [HalvedLinear, Bfloat16Linear])
@either_order
def test_linear_layers_of_another_class(kernel, device, family, cls, is_injected_first):
    """One that returns another dtype: what comes after meets mixed dtypes."""
    model, plain, arguments = prepared(family, device)
    if is_injected_first:
        kernel.inject_kernels(model)
    for candidate in (model, plain):
        for kind in ("output", "up") if cls is HalvedLinear else ("output",):
            family.part(candidate, kind).__class__ = cls
    kernel.inject_kernels(model)
    assert kernel_calls(run, model, arguments)
    # A value between two of bfloat16 may be rounded to the one or the other.
    assert_alike(model, plain, arguments, slack=1e-4 if cls is HalvedLinear else 2e-2)


# ------------------------------------------------------------------------------------------------
# Caches and guidance

STEPS = 6
CACHES = {
    "first_block": lambda timestep: FirstBlockCacheConfig(threshold=0.2),
    "pyramid": lambda timestep: PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=timestep
    ),
    "taylorseer": lambda timestep: TaylorSeerCacheConfig(
        cache_interval=2,
        disable_cache_before_step=2,
        taylor_factors_dtype=torch.float32,
        cache_identifiers=[r"(transformer_)?blocks\.\d+\.(attn1?|ffn?|img_mlp)$"],
    ),
    "mag": lambda timestep: MagCacheConfig(
        threshold=1.0, num_inference_steps=STEPS, mag_ratios=torch.ones(STEPS)
    ),
}


def denoised(model, arguments, times):
    """The outputs of some steps, from which a cache leaves something out."""
    latents, outputs = arguments["hidden_states"], []
    for step in range(STEPS):
        times.append(700 - 10 * step)
        with model.cache_context("cond"):
            outputs.append(run(model, {**arguments, "hidden_states": latents}))
        latents = latents - 0.01 * outputs[-1]
    return torch.stack(outputs)


@of_families(lambda family: family.caches)
@either_order
def test_caches(kernel, device, family, case, is_injected_first):
    model, plain, arguments = prepared(family, device)
    if is_injected_first:
        kernel.inject_kernels(model)
    times = []
    for candidate in (model, plain):
        candidate.enable_cache(CACHES[case](lambda: times[-1]))
    kernel.inject_kernels(model)
    expected = denoised(plain, arguments, times)
    outputs = []
    calls = kernel_calls(lambda: outputs.append(denoised(model, arguments, times)))
    assert_close(outputs[0], expected, 1e-4)
    model.disable_cache()
    all_calls = computing(
        family, model, arguments, family.reference(family.model(device), arguments)
    )
    assert 0 < sum(calls.values()) < STEPS * sum(all_calls.values())
    kernel.eject_kernels(model)
    assert not kernel_calls(run, model, arguments)


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_are_skipped(kernel, device, family, dtype):
    """As diffusers' guiders do it: by a function mode over F.scaled_dot_product_attention."""
    model, plain, arguments = prepared(family, device, dtype, config=KERNEL_HEADS)
    kernel.inject_kernels(model)
    with AttentionScoreSkipFunctionMode():
        assert_within_rounding(family, model, plain, arguments)
        assert "attention" not in kernel_calls(run, model, arguments)
    exact = copy.deepcopy(plain).float()
    for candidate in (model, plain, exact):
        attention = family.part(candidate, "attention")
        hook = AttentionProcessorSkipHook(None, skip_attention_scores=True)
        HookRegistry.check_if_exists_or_initialize(attention).register_hook(hook, "skip")
    assert_within_rounding(family, model, plain, arguments, exact)


# ------------------------------------------------------------------------------------------------
# Attention backends


@every_family
@pytest.mark.parametrize("name", ["_native_math", "native"])
@either_order
def test_attention_backend_of_the_model(kernel, device, family, name, is_injected_first):
    model, plain, arguments = prepared(family, device, torch.bfloat16, config=KERNEL_HEADS)
    if is_injected_first:
        kernel.inject_kernels(model)
        assert "attention" in kernel_calls(run, model, arguments)
    model.set_attention_backend(name)
    kernel.inject_kernels(model)
    calls = kernel_calls(run, model, arguments)
    assert calls and ("attention" in calls) != family.has_backends
    assert_within_rounding(family, model, plain, arguments)
    model.reset_attention_backend()
    registry = attention_dispatch._AttentionBackendRegistry
    registry.set_active_backend(attention_dispatch.AttentionBackendName.NATIVE)
    assert "attention" in kernel_calls(run, model, arguments)


@every_family
def test_attention_backend_by_context_manager(kernel, device, family):
    model, plain, arguments = prepared(family, device, torch.bfloat16, config=KERNEL_HEADS)
    kernel.inject_kernels(model)
    with attention_dispatch.attention_backend("_native_math"):
        assert ("attention" in kernel_calls(run, model, arguments)) != family.has_backends
        assert_within_rounding(family, model, plain, arguments)
    assert "attention" in kernel_calls(run, model, arguments)


# ------------------------------------------------------------------------------------------------
# torch.compile and CUDA graphs


def compile_blocks(family, model, **options):
    """As diffusers does it for those models that tell their blocks."""
    if model._repeated_blocks:
        return model.compile_repeated_blocks(**options)
    for block in family.blocks(model):
        block.compile(**options)


@pytest.mark.usefixtures("_fresh_compiler")
@every_family
@pytest.mark.parametrize("regional", [False, True], ids=["model", "blocks"])
def test_compiled(kernel, device, family, regional):
    """In one graph (for each class of blocks), that holds the operators, compiled once."""
    config = {**KERNEL_HEADS, **family.one_block}
    dtype = torch.float32 if regional else torch.bfloat16
    model, plain, _ = prepared(family, device, dtype, config=config)
    kernel.inject_kernels(model)
    counter = CompileCounterWithBackend("aot_eager" if regional else "eager")
    if regional:
        compile_blocks(family, model, fullgraph=True, backend=counter)
    else:
        model.compile(fullgraph=True, backend=counter)
    for seed in range(2):
        assert_within_rounding(family, model, plain, family.inputs(device, dtype, seed=seed))
    assert counter.frame_count == (len(family.block_lists) if regional else 1)
    for graph in counter.graphs:
        targets = [str(node.target) for node in graph.graph.nodes]
        assert any(target.startswith("_h100_diffusers_kernels") for target in targets)


@pytest.mark.usefixtures("_fresh_compiler")
@every_family
def test_injected_and_ejected_after_compilation(kernel, device, family):
    model, plain, arguments = prepared(family, device, config=family.one_block)
    expected = family.reference(plain, arguments)
    compile_blocks(family, model, backend="eager")
    for change in (lambda model: None, kernel.inject_kernels, kernel.eject_kernels):
        change(model)
        assert_close(run(model, arguments), expected, 1e-4)


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_graph(kernel, device, family, dtype):
    if device != "cuda":
        pytest.skip("CUDA graphs need CUDA")
    heads = {} if dtype == torch.float32 else KERNEL_HEADS
    model, _, arguments = prepared(family, device, dtype, config=heads)
    kernel.inject_kernels(model)
    further = (family.inputs(device, dtype, seed=seed) for seed in range(2))
    for out in graph_replays(model, arguments, further):
        torch.testing.assert_close(out, run(model, arguments))


# ------------------------------------------------------------------------------------------------
# Derivatives


def gradients_of(model, arguments):
    """Of each parameter, for a loss in which every element of the output counts differently."""
    model.zero_grad()
    out = model(**arguments, return_dict=False)[0]
    weights = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype)
    (out.flatten() * weights).sum().backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


@every_family
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_gradients(kernel, device, family, checkpointing):
    model, plain, arguments = prepared(family, device)
    model.train()
    kernel.inject_kernels(model)
    if checkpointing:
        model.enable_gradient_checkpointing()
    expected = gradients_of(plain.double(), family.cast(arguments, torch.float64))
    gradients = gradients_of(model, arguments)
    assert gradients.keys() == expected.keys()
    for name, value in expected.items():
        assert (gradients[name] - value).norm() <= 1e-4 * value.norm(), name


@every_family
def test_gradients_of_the_adapters_alone(kernel, device, family):
    model, plain, arguments = prepared(family, device)
    kernel.inject_kernels(model)
    for candidate in (model, plain):
        candidate.requires_grad_(False)
        add_lora(family, candidate)
    expected = gradients_of(plain.double(), family.cast(arguments, torch.float64))
    gradients = gradients_of(model, arguments)
    assert gradients.keys() == expected.keys()
    assert all("lora" in name for name in expected)
    for name, value in expected.items():
        assert (gradients[name] - value).norm() <= 1e-4 * value.norm(), name


@every_family
@pytest.mark.parametrize("of", ["inputs", "parameters"])
def test_forward_mode_derivatives(kernel, device, family, of):
    model, plain, arguments = prepared(family, device)
    kernel.inject_kernels(model)
    torch.manual_seed(8)
    directions = {name: torch.randn_like(p) for name, p in plain.named_parameters()}
    directions["hidden_states"] = torch.randn_like(arguments["hidden_states"])

    def tangent(candidate, dtype):
        mine = family.cast(arguments, dtype)
        parameters = {name: p.detach() for name, p in candidate.named_parameters()}
        names = ["hidden_states"] if of == "inputs" else list(parameters)

        def function(*values):
            given = dict(zip(names, values, strict=True))
            if of == "inputs":
                return candidate(**{**mine, **given}, return_dict=False)[0]
            return torch.func.functional_call(candidate, given, (), {**mine, "return_dict": False})[
                0
            ]

        primals = tuple(mine[n] if of == "inputs" else parameters[n] for n in names)
        with sdpa_kernel(SDPBackend.MATH):
            return torch.func.jvp(
                function, primals, tuple(directions[name].to(dtype) for name in names)
            )[1]

    expected = tangent(plain.double(), torch.float64)
    assert expected.norm() > 0
    assert_close(tangent(model, torch.float32), expected, 1e-4)


# ------------------------------------------------------------------------------------------------
# Modes, dtypes, threads


@every_family
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "enable_grad"])
def test_modes(kernel, device, family, mode):
    model, plain, arguments = prepared(family, device)
    expected = family.reference(plain, arguments)
    model.requires_grad_(False)
    kernel.inject_kernels(model)
    with getattr(torch, mode)():
        for _ in range(2):
            assert_close(model(**arguments, return_dict=False)[0].clone(), expected)
        assert kernel_calls(lambda: model(**arguments))


@every_family
def test_autocast_runs_the_models_own_code(kernel, device, family):
    model, plain, arguments = prepared(family, device)
    kernel.inject_kernels(model)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert not kernel_calls(run, model, arguments)
        assert torch.equal(run(model, arguments), run(plain, arguments))
    assert computing(family, model, arguments, family.reference(plain, arguments))


@every_family
def test_float64_runs_the_models_own_code(kernel, device, family):
    model, plain, arguments = prepared(family, device, torch.float64)
    kernel.inject_kernels(model)
    assert not kernel_calls(run, model, arguments)
    assert torch.equal(run(model, arguments), run(plain, arguments))


@every_family
def test_mixed_dtypes(kernel, device, family):
    """Blocks of 16 bits in a model of 32, and the reverse, with casts around them."""

    def cast_to(dtype):
        def cast(value):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                return value.to(dtype)
            if isinstance(value, (tuple, list)):
                return tuple(map(cast, value))
            return value

        return cast

    for inner, outer in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        model, plain, arguments = prepared(family, device, outer, config=KERNEL_HEADS)
        kernel.inject_kernels(model)
        for candidate in (model, plain):
            block = family.part(candidate, "next_block").to(inner)
            down, up = cast_to(inner), cast_to(outer)
            block.register_forward_pre_hook(
                lambda block, args, kwargs, down=down: (
                    down(args),
                    {k: v if k == "image_rotary_emb" else down(v) for k, v in kwargs.items()},
                ),
                with_kwargs=True,
            )
            block.register_forward_hook(lambda block, args, output, up=up: up(output))
        out, expected = run(model, arguments), run(plain, arguments)
        assert (out - expected).norm() < 3e-2 * expected.norm()


@every_family
def test_fake_tensors_leave_nothing_behind(kernel, device, family):
    model, plain, arguments = prepared(family, device)
    plain_copy = copy.deepcopy(plain)
    with FakeTensorMode(allow_non_fake_inputs=True):
        run(plain_copy, arguments)
    try:
        is_left_whole = bool(run(plain_copy, arguments).isfinite().all())
    except RuntimeError:
        is_left_whole = False
    if not is_left_whole:
        pytest.skip("without kernels too, a cache of the model's own keeps fake tensors")
    kernel.inject_kernels(model)
    for _ in range(2):
        with FakeTensorMode(allow_non_fake_inputs=True):
            run(model, arguments)
        assert computing(family, model, arguments, family.reference(plain, arguments))


@every_family
def test_threads(kernel, device, family):
    """Eight at once on one model, each with inputs of its own."""
    model, plain, _ = prepared(family, device)
    kernel.inject_kernels(model)
    options = list(family.options.values())
    inputs = [family.inputs(device, seed=i, **options[i % len(options)]) for i in range(8)]
    expected = [family.reference(plain, arguments) for arguments in inputs]
    barrier, outputs, errors = threading.Barrier(8), [[] for _ in inputs], []

    def work(i):
        try:
            barrier.wait()
            for _ in range(5):
                outputs[i].append(run(model, inputs[i]))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for i, mine in enumerate(outputs):
        assert len(mine) == 5
        for out in mine:
            assert_close(out, expected[i])


@every_family
def test_counts_of_modules_called(kernel, device, family):
    """Linear layers are always called as modules, so that whatever is put on them works."""
    model, plain, arguments = prepared(family, device)
    kernel.inject_kernels(model)
    counts = {}
    for candidate in (model, plain):
        count = counts[candidate] = collections.Counter()
        for name, module in candidate.named_modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(
                    lambda module, args, output, name=name, count=count: count.update([name])
                )
        run(candidate, arguments)
    assert counts[model] == counts[plain]
