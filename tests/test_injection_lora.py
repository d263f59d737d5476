"""Adapters of peft: plain LoRA on the kernels, adapters at rest, and what peft computes itself."""

import copy
import itertools
import sys

import peft
import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer

import fp8_models
from adapters import add_lora, linear_layers
from checks import operators_of, relative_distance
from families import FAMILIES, every_family, prepared, run
from family import KERNEL_HEADS
from graphs import module_of
from injected_pairs import assert_as_close_as_eager, fallen_back, injected

FLUX = FAMILIES["flux"]
WEIGHTS = [0.5, 1.5]
NAMES = ["one", "two"]


def add_adapters(family, model, ranks=(2, 8)):
    """Two of different ranks and weights on all linear layers of the blocks."""
    for seed, (name, rank) in enumerate(zip(NAMES, ranks, strict=True)):
        add_lora(family, model, name, seed, rank=rank, targets=linear_layers(family, model))
    model.set_adapters(NAMES, WEIGHTS)


@pytest.fixture
def peft_calls(monkeypatch):
    """The layers for which peft computes an adapter's term."""
    seen, own = [], BaseTunerLayer._cast_input_dtype
    monkeypatch.setattr(
        BaseTunerLayer, "_cast_input_dtype", lambda self, *a: seen.append(self) or own(self, *a)
    )
    return seen


@pytest.fixture
def products_on_kernels(kernel):
    """`linears_lora` for any number of rows, on any device."""
    rows = module_of(kernel, "parts.lora").MIN_ROWS
    before = dict(rows)
    rows.update(cpu=1, cuda=1)
    yield
    rows.update(before)


@pytest.mark.drawn(times=0, period=3)
@every_family
def test_active_adapters(kernel, device, family, peft_calls):
    model, plain, arguments = prepared(family, device)
    before = run(plain, arguments)
    for each in (model, plain):
        add_adapters(family, each)
    report = kernel.inject_kernels(model)
    expected = run(plain, arguments)
    assert relative_distance(before.flatten(), expected.flatten()) > 0.01
    peft_calls.clear()
    assert relative_distance(run(model, arguments), expected) < 1e-5
    assert peft_calls == []
    assert fallen_back(report) == {}
    assert all(line.endswith("on the kernels") for line in report.adapters), report.adapters
    assert f"{report.adapters[0]}\n" in str(report)


@every_family
@pytest.mark.drawn(times=0, period=5)
def test_active_adapters_in_16_bits(kernel, device, family, peft_calls, products_on_kernels):
    plain = family.model(device, torch.bfloat16, **KERNEL_HEADS)
    model, plain, _ = injected(kernel, plain, lambda model: add_adapters(family, model))
    peft_calls.clear()
    names = operators_of(run, model, family.inputs(device, torch.bfloat16))
    assert peft_calls == []
    assert {"linears_lora", "lora_down"} <= {*names}
    arguments = lambda dtype, seed: family.inputs(device, dtype, seed=seed)  # noqa: E731
    assert_as_close_as_eager(model, plain, arguments, samples=3, dtype=torch.bfloat16)


@pytest.mark.parametrize("is_fp8", [False, True], ids=["16 bits", "FP8"])
@pytest.mark.parametrize("name", ["ltx", "wan"])
def test_layers_of_one_input_share_a_first_product(
    kernel, device, name, is_fp8, products_on_kernels
):
    """Per block: query, key, value; the text's key and value; five layers alone. Nothing is copied for it."""
    if is_fp8:
        pytest.importorskip("torchao")
    family = FAMILIES[name]
    model = family.model(device, torch.bfloat16, **KERNEL_HEADS).requires_grad_(False)
    blocks = family.blocks(model)
    if is_fp8:
        for block in blocks:
            fp8_models.quantize(block)
    add_adapters(family, model, ranks=(8, 16))
    kernel.inject_kernels(model)
    arguments = family.inputs(device, torch.bfloat16)
    run(model, arguments)
    names = operators_of(run, model, arguments)
    assert names.count("lora_down") == 7 * len(blocks)
    model.disable_adapters()
    assert names.count("cat") == operators_of(run, model, arguments).count("cat")


def merge(model, plain):
    """Fuses the adapters, and gives the model without adapters the same weights."""
    model.fuse_lora()
    own = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            own[name.replace(".base_layer", "")].data.copy_(parameter)


AT_REST = {
    "disabled": lambda model, plain: model.disable_adapters(),
    "a scale of 0": lambda model, plain: model.set_adapters(NAMES, [0.0, 0.0]),
    "merged": merge,
    "deleted": lambda model, plain: model.delete_adapters(NAMES),
}


@pytest.mark.drawn(times=0, period=5)
@every_family
@pytest.mark.parametrize("state", AT_REST)
def test_adapters_at_rest_cost_nothing(kernel, device, family, state, peft_calls, monkeypatch):
    """The same operators with the same results as in the injected model that never had an adapter."""
    model, plain, arguments = prepared(family, device)
    plain.requires_grad_(False)  # as peft does; PyTorch's products depend on it
    kernel.inject_kernels(plain)
    add_adapters(family, model)
    report = kernel.inject_kernels(model)
    run(model, arguments)
    AT_REST[state](model, plain)
    for each in (plain, model):
        run(each, arguments)  # tables are cached
    peft_calls.clear()
    for name in ("parts.linears", "attention.modules"):  # the code of active ones
        users = module_of(kernel, name)
        monkeypatch.setattr(users, "lora_products", lambda *arguments: peft_calls.append(arguments))
    results = []
    calls = [
        operators_of(lambda each=each: results.append(run(each, arguments)))
        for each in (plain, model)
    ]
    assert calls[0] == calls[1]
    assert torch.equal(*results)
    assert peft_calls == [] and fallen_back(report) == {}


def lora(**options):
    return peft.LoraConfig(r=4, init_lora_weights=False, **options)


# Each with a word of the report if peft computes it.
KINDS = {
    "LoRA": (lora, None),
    "rank-stabilized": (lambda **o: lora(use_rslora=True, **o), None),
    "patterns": (lambda **o: lora(rank_pattern={"to_q": 7}, alpha_pattern={"to_k": 3}, **o), None),
    "biases": (lambda **o: lora(lora_bias=True, **o), None),
    "dropout": (lambda **o: lora(lora_dropout=0.1, **o), None),
    "DoRA": (lambda **o: lora(use_dora=True, **o), "DoraLinearVariant"),
    "LoHa": (lambda **o: peft.LoHaConfig(r=4, init_weights=False, **o), "loha"),
    "LoKr": (lambda **o: peft.LoKrConfig(r=4, init_weights=False, **o), "lokr"),
    "OFT": (lambda **o: peft.OFTConfig(r=0, oft_block_size=4, init_weights=False, **o), "oft"),
    "BOFT": (lambda **o: peft.BOFTConfig(boft_block_size=4, init_weights=False, **o), "boft"),
    "IA3": (
        lambda **o: peft.IA3Config(feedforward_modules=[], init_ia3_weights=False, **o),
        "ia3",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_adapters(kernel, device, kind):
    config, word = KINDS[kind]
    model, plain, arguments = prepared(FLUX, device)
    base = copy.deepcopy(plain)
    for each in (model, plain):
        torch.manual_seed(0)
        each.add_adapter(config(target_modules=FLUX.lora_targets))
        each.eval()
    report = kernel.inject_kernels(model)
    assert relative_distance(run(model, arguments), run(plain, arguments)) < 1e-5
    reasons = {reason for reasons in fallen_back(report).values() for reason in reasons}
    if word is None:
        assert reasons == set()
    else:
        assert len(reasons) == 1 and word in reasons.pop()
        assert all(word in line for line in report.adapters)
    model.disable_adapters()
    before = fallen_back(report)
    assert relative_distance(run(model, arguments), run(base, arguments)) < 1e-5
    assert fallen_back(report) == before
    assert all(line.endswith("at rest") for line in report.adapters)


def test_dropout_in_training_is_pefts(kernel, device):
    model, _, arguments = prepared(FLUX, device)
    model.add_adapter(lora(lora_dropout=0.5, target_modules=FLUX.lora_targets))
    report = kernel.inject_kernels(model)
    model.train()
    assert not torch.equal(run(model, arguments), run(model, arguments))
    assert "dropout in training" in str(report)


def on_a_hook(model):
    layer = FLUX.part(model, "attention").to_v
    layer.register_forward_hook(lambda module, args, output: 2 * output)


def in_float32(model):
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.double()


def of_other_weights(model):
    """As an average of weights does, which changes no version of a tensor."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(parameter.data.flip(0))


def of_tensors(model):
    """As `enable_lora_hotswap` does for compiled models."""
    for module in model.modules():
        for name, scale in getattr(module, "scaling", {}).items():
            module.scaling[name] = torch.tensor(1.25 * scale)


def hot_swapped(model):
    torch.manual_seed(7)
    state = peft.get_peft_model_state_dict(model, adapter_name="one")
    state = {name: torch.randn_like(value) / 4 for name, value in state.items()}
    model.load_lora_adapter(state, prefix=None, adapter_name="one", hotswap=True)


CHANGES = (on_a_hook, in_float32, of_other_weights, of_tensors, hot_swapped)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_changes_between_calls(kernel, device, change, dtype, products_on_kernels):
    model, plain, arguments = prepared(FLUX, device, dtype, config=KERNEL_HEADS)
    for each in (model, plain):
        add_adapters(FLUX, each)
    kernel.inject_kernels(model)
    before = run(model, arguments)
    for each in (model, plain):
        change(each)
    expected = run(plain, arguments)
    slack = 1e-5 if dtype == torch.float32 else 0.03
    assert relative_distance(run(model, arguments), expected) < slack
    if change is not in_float32:
        assert relative_distance(before, expected) > 2 * slack


def test_many_adapters(kernel, device, products_on_kernels):
    """More matrices than one operation takes."""
    model, plain, arguments = prepared(FLUX, device, torch.bfloat16, config=KERNEL_HEADS)
    names = [f"adapter{i}" for i in range(5)]
    for each in (model, plain):
        for seed, name in enumerate(names):
            add_lora(FLUX, each, name, seed, rank=1 + seed)
        each.set_adapters(names, [0.3, 0.5, -0.2, 0.0, 0.7])
    report = kernel.inject_kernels(model)
    assert relative_distance(run(model, arguments), run(plain, arguments)) < 0.03
    assert fallen_back(report) == {}


@pytest.mark.parametrize("is_fp8", [False, True], ids=["16 bits", "FP8"])
def test_high_ranks(kernel, device, is_fp8, products_on_kernels):
    """More columns than one operation takes."""
    plain = FLUX.model(device, torch.bfloat16, **KERNEL_HEADS).requires_grad_(False)
    if is_fp8:
        pytest.importorskip("torchao")
        for block in FLUX.blocks(plain):
            fp8_models.quantize(block)
    model = copy.deepcopy(plain)
    for each in (model, plain):
        add_lora(FLUX, each, rank=600, alpha=100)
    report = kernel.inject_kernels(model)
    arguments = FLUX.inputs(device, torch.bfloat16)
    expected = run(fp8_models.eager(plain) if is_fp8 else plain, arguments)
    assert relative_distance(run(model, arguments), expected) < (0.1 if is_fp8 else 0.03)
    assert fallen_back(report) == {}


def test_gradients_are_pefts(kernel, device, peft_calls):
    model, plain, arguments = prepared(FLUX, device)
    grads = []
    for each in (model, plain):
        add_lora(FLUX, each)
        if each is model:
            kernel.inject_kernels(model)
        with torch.enable_grad():
            each(**arguments, return_dict=False)[0].square().sum().backward()
        grads.append([p.grad for n, p in each.named_parameters() if "lora_" in n])
    assert len(grads[0]) == len(grads[1]) > 0
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def frames_of(function):
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call" and "torch/nn/modules" not in frame.f_code.co_filename

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("is_fp8", [False, True], ids=["16 bits", "FP8"])
def test_python_frames_of_a_double_block(kernel, device, is_fp8, products_on_kernels):
    """With LoRA on all layers, beside none: time of the host."""
    if is_fp8:
        pytest.importorskip("torchao")
    counts = {}
    for has_lora, blocks in itertools.product((False, True), (2, 3)):
        options = {**KERNEL_HEADS, "blocks": blocks, "single_blocks": 1}
        model = FLUX.model(device, torch.bfloat16, **options).requires_grad_(False)
        if is_fp8:
            for block in FLUX.blocks(model):
                fp8_models.quantize(block)
        if has_lora:
            add_lora(FLUX, model, rank=8, targets=linear_layers(FLUX, model))
        kernel.inject_kernels(model)
        arguments = FLUX.inputs(device, torch.bfloat16)
        run(model, arguments)
        counts[has_lora, blocks] = frames_of(lambda: run(model, arguments))  # noqa: B023
    with_lora, without = (counts[has_lora, 3] - counts[has_lora, 2] for has_lora in (True, False))
    assert with_lora <= 1.5 * without, counts
