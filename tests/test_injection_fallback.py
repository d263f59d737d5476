"""Where a replaced module's call is the model's own code: logged once, counted, and an error if asked for."""

import logging
from collections import Counter

import pytest
import torch
from diffusers.models import attention_dispatch
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers import transformer_ltx
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from foreign_modules import Wrap
from injected_pairs import BFLOAT16, assert_alike, fallen_back, pair
from ltx_models import (
    calls_of,
    inputs,
    kernel_calls,
    pipeline,
    run,
    snapshot,
    transformer,
)

pytestmark = pytest.mark.usefixtures("_one_thread")

STRICT = "H100_DIFFUSERS_KERNELS_STRICT"
LOGGER = "h100_diffusers_kernels"
FIRST_BLOCK = "transformer_blocks.0"


@pytest.fixture(autouse=True)
def _not_strict(monkeypatch):
    monkeypatch.delenv(STRICT, raising=False)
    registry = attention_dispatch._AttentionBackendRegistry
    monkeypatch.setattr(registry, "_active_backend", registry._active_backend)


@pytest.fixture
def injected(kernel, device):
    """(model with kernels, its report, arguments); attention is on its kernel, too."""
    model = transformer(device, **BFLOAT16)
    return model, kernel.inject_kernels(model), inputs(model)


# ------------------------------------------------------------------------------------------------
# What makes a call fall back: (changes the model, runs it, the modules that it concerns)


def in_autocast(model, arguments):
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        return run(model, arguments)


def in_float64(model, arguments):
    model.double()
    return run(model, {**arguments, **doubled(arguments)})


def doubled(arguments):
    names = ("hidden_states", "encoder_hidden_states")
    return {name: arguments[name].double() for name in names}


def with_hooked_norm(model, arguments):
    norm = model.transformer_blocks[0].norm1
    if not norm._forward_hooks:
        norm.register_forward_hook(lambda module, args, output: output * 0.5)
    return run(model, arguments)


def with_another_norm(model, arguments):
    block = model.transformer_blocks[0]
    if type(block.norm2) is RMSNorm:
        block.norm2 = Wrap(block.norm2)
    return run(model, arguments)


def with_patched_class(model, arguments):
    original = RMSNorm.forward
    RMSNorm.forward = lambda self, x: original(self, x) * 0.5
    try:
        return run(model, arguments)
    finally:
        RMSNorm.forward = original


def with_patched_function(model, arguments):
    original = transformer_ltx.apply_rotary_emb
    transformer_ltx.apply_rotary_emb = lambda x, freqs: original(x, freqs) * 0.5
    try:
        return run(model, arguments)
    finally:
        transformer_ltx.apply_rotary_emb = original


def with_global_hook(model, arguments):
    register = nn.modules.module.register_module_forward_hook
    handle = register(lambda module, args, output: None)
    try:
        return run(model, arguments)
    finally:
        handle.remove()


def with_foreign_processor(model, arguments):
    attention = model.transformer_blocks[0].attn1
    if type(attention.processor) is transformer_ltx.LTXVideoAttnProcessor:

        class Processor(transformer_ltx.LTXVideoAttnProcessor):
            def __call__(self, *args, **kwargs):
                return super().__call__(*args, **kwargs) * 0.5

        attention.set_processor(Processor())
    return run(model, arguments)


def on_another_device(model, arguments):
    model.to("meta")
    arguments = {
        k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in arguments.items()
    }
    return run(model, arguments)


# With a module that falls back.
FALL_BACKS = {
    in_autocast: FIRST_BLOCK,
    in_float64: FIRST_BLOCK,
    with_hooked_norm: FIRST_BLOCK,
    with_another_norm: FIRST_BLOCK,
    with_patched_class: FIRST_BLOCK,
    with_patched_function: f"{FIRST_BLOCK}.attn1",
    with_global_hook: FIRST_BLOCK,
    with_foreign_processor: f"{FIRST_BLOCK}.attn1",
    on_another_device: FIRST_BLOCK,
}
every_fall_back = pytest.mark.parametrize("fall_back", FALL_BACKS, ids=lambda f: f.__name__)


def warnings(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == LOGGER and record.levelno >= logging.WARNING
    ]


def counts(report):
    return {entry.name: (entry.on_kernels, dict(entry.fell_back)) for entry in report.calls}


# ------------------------------------------------------------------------------------------------
# Counts


def test_counts_name_each_replaced_module(injected):
    model, report, _ = injected
    modules = dict(model.named_modules())
    assert sorted(e.name for e in report.calls) == sorted(e.name for e in report.replaced)
    assert {f"{FIRST_BLOCK}{part}" for part in ("", ".attn1", ".attn2", ".ff.net.0")} < set(
        counts(report)
    )
    for entry in report.calls:
        assert entry.module == type(modules[entry.name]).__name__
        assert (entry.on_kernels, entry.fell_back) == (0, {})


def test_counts_are_live(injected):
    model, report, arguments = injected
    for times in (1, 2, 3):
        run(model, arguments)
        assert len(report.calls) == 2 * 4 + 3
        assert all(count == (times, {}) for count in counts(report).values())


def test_a_second_injection_reports_the_same_counts(kernel, injected):
    model, report, arguments = injected
    run(model, arguments)
    second = kernel.inject_kernels(model)
    assert second.already_injected
    assert counts(second) == counts(report)
    run(model, arguments)
    assert counts(second) == counts(report)
    assert {entry.on_kernels for entry in second.calls} == {2}


def test_counts_of_a_pipeline(kernel, device):
    pipe = pipeline(device)
    report = kernel.inject_kernels(pipe)
    run(pipe.transformer, inputs(pipe.transformer))
    assert sorted(e.name for e in report.calls) == sorted(e.name for e in report.replaced)
    assert counts(report)["transformer.transformer_blocks.1"][0] == 1


@every_fall_back
def test_fall_backs_are_counted(injected, fall_back):
    model, report, arguments = injected
    run(model, arguments)
    for _ in range(2):
        fall_back(model, arguments)
    before, after = counts(report)[FALL_BACKS[fall_back]]
    assert before == 1
    assert set(after.values()) == {2}
    assert all(isinstance(reason, str) and reason for reason in after)


def test_counts_of_each_module_are_its_own(injected):
    model, report, arguments = injected
    with_hooked_norm(model, arguments)
    assert fallen_back(report).keys() == {FIRST_BLOCK}
    on_kernels = {entry.name: entry.on_kernels for entry in report.calls}
    assert on_kernels.pop(FIRST_BLOCK) == 0
    assert set(on_kernels.values()) == {1}


def test_an_ejected_model_counts_no_more(kernel, injected):
    model, report, arguments = injected
    run(model, arguments)
    kernel.eject_kernels(model)
    before = counts(report)
    run(model, arguments)
    with_hooked_norm(model, arguments)
    assert counts(report) == before
    kernel.inject_kernels(model)
    run(model, arguments)
    assert counts(report) == before


def test_compiled_code_counts_nothing(injected):
    model, report, arguments = injected
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    before = counts(report)
    assert len(before) == 2 * 4 + 3
    for _ in range(2):
        run(compiled, arguments)
    assert counts(report) == before
    torch._dynamo.reset()


# ------------------------------------------------------------------------------------------------
# The log


@every_fall_back
def test_each_class_and_reason_is_logged_once(injected, caplog, fall_back):
    model, report, arguments = injected
    with caplog.at_level(logging.INFO, logger=LOGGER):
        run(model, arguments)
        assert warnings(caplog) == []
        for _ in range(3):
            fall_back(model, arguments)
    messages = warnings(caplog)
    first = {}
    for calls in report.calls:
        for reason in calls.fell_back:
            first.setdefault((calls.module, reason), calls.name)
    modules = [calls.module for calls in report.calls]
    assert len(messages) == len(first) > 0
    for (module, reason), name in first.items():
        beginning = f"{name or 'the model'} ({module}) runs the model's own code: {reason} "
        (text,) = [text for text in messages if f"({module})" in text and reason in text]
        assert text.startswith(beginning)
        assert f"for {modules.count(module)} x {module})" in text


def test_another_reason_is_logged_again(injected, caplog):
    model, report, arguments = injected
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        in_autocast(model, arguments)
        first = len(warnings(caplog))
        with_hooked_norm(model, arguments)
    assert len(warnings(caplog)) == first + 1 > 1
    assert len(fallen_back(report)[FIRST_BLOCK]) == 2


def test_another_model_logs_for_itself(kernel, device, caplog):
    for _ in range(2):
        model = transformer(device, **BFLOAT16)
        kernel.inject_kernels(model)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger=LOGGER):
            with_hooked_norm(model, inputs(model))
        assert len(warnings(caplog)) == 1


def test_nothing_is_printed(injected, capfd):
    model, _, arguments = injected
    capfd.readouterr()
    with_hooked_norm(model, arguments)
    assert capfd.readouterr().out == ""


# ------------------------------------------------------------------------------------------------
# Values


@every_fall_back
def test_what_falls_back_has_the_models_values(kernel, device, fall_back):
    if fall_back is on_another_device:
        pytest.skip("on meta there are no values")
    model, plain, _ = pair(kernel, device, **BFLOAT16)
    arguments = inputs(plain)
    expected, out = fall_back(plain, arguments), fall_back(model, arguments)
    assert out.dtype == expected.dtype
    assert (out.double() - expected.double()).norm() < 0.03 * expected.double().norm()


# ------------------------------------------------------------------------------------------------
# Strict


def assert_one_sentence(error, name):
    text = str(error)
    assert "\n" not in text and text.strip() == text
    assert name in text
    assert ". " not in text.replace(name, "")


@every_fall_back
def test_strict_raises(kernel, device, monkeypatch, fall_back):
    monkeypatch.setenv(STRICT, "1")
    model = transformer(device, **BFLOAT16)
    kernel.inject_kernels(model)
    arguments = inputs(model)
    assert kernel_calls(run, model, arguments) == calls_of(2, attention=2)
    with pytest.raises(RuntimeError) as error:
        fall_back(model, arguments)
    assert_one_sentence(error.value, "")
    classes = {type(module).__name__ for module in model.modules()}
    assert any(name in str(error.value) for name in classes)
    # The error leaves nothing behind.
    if fall_back in (in_autocast, with_patched_class, with_patched_function, with_global_hook):
        assert_alike(model, transformer(device, **BFLOAT16), arguments)


def test_strict_names_module_class_and_reason(kernel, device, monkeypatch):
    model = transformer(device, **BFLOAT16)
    report = kernel.inject_kernels(model)
    arguments = inputs(model)
    with_hooked_norm(model, arguments)
    ((name, reasons),) = fallen_back(report).items()
    (reason,) = reasons
    monkeypatch.setenv(STRICT, "1")
    other = transformer(device, **BFLOAT16)
    kernel.inject_kernels(other)
    with pytest.raises(RuntimeError) as error:
        with_hooked_norm(other, arguments)
    for part in (name, "LTXVideoTransformerBlock", reason):
        assert part in str(error.value)


@pytest.mark.parametrize("value", ["0", ""])
def test_strict_can_be_off(kernel, device, monkeypatch, value):
    monkeypatch.setenv(STRICT, value)
    model = transformer(device, **BFLOAT16)
    report = kernel.inject_kernels(model)
    with_hooked_norm(model, inputs(model))
    assert fallen_back(report)


def strict_attention_false(kernel, model, arguments):
    kernel.eject_kernels(model)
    kernel.inject_kernels(model, attention=False)
    run(model, arguments)


def strict_backend(kernel, model, arguments):
    with attention_dispatch.attention_backend("_native_math"):
        run(model, arguments)
    model.set_attention_backend("_native_math")
    run(model, arguments)


def strict_gradients(kernel, model, arguments):
    model(**arguments, return_dict=False)[0].float().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def strict_tangents(kernel, model, arguments):
    model.float()
    x = arguments["hidden_states"].float()
    arguments = {**arguments, "encoder_hidden_states": arguments["encoder_hidden_states"].float()}
    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        out = run(
            model, {**arguments, "hidden_states": forward_ad.make_dual(x, torch.ones_like(x))}
        )
        assert forward_ad.unpack_dual(out).tangent.any()


CHOICES = [
    strict_attention_false,
    strict_backend,
    strict_gradients,
    strict_tangents,
]


@pytest.mark.parametrize("choose", CHOICES, ids=lambda choose: choose.__name__)
def test_what_a_user_chose_is_no_fall_back(kernel, device, monkeypatch, caplog, choose):
    monkeypatch.setenv(STRICT, "1")
    model = transformer(device, **BFLOAT16)
    report = kernel.inject_kernels(model)
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        choose(kernel, model, inputs(model))
    assert warnings(caplog) == []
    assert len(report.calls) == 2 * 4 + 3
    assert fallen_back(report) == {}


# ------------------------------------------------------------------------------------------------
# A second injection


def test_the_same_options_again(kernel, device):
    for options in ({}, {"attention": True}, {"attention": False}):
        model = transformer(device, **BFLOAT16)
        first = kernel.inject_kernels(model, **options)
        before = snapshot(model)
        second = kernel.inject_kernels(model, **options)
        assert second.already_injected and not first.already_injected
        assert snapshot(model) == before


@pytest.mark.parametrize("attention", [True, False])
def test_other_options_are_an_error(kernel, device, attention):
    model = transformer(device, **BFLOAT16)
    kernel.inject_kernels(model, attention=attention)
    arguments = inputs(model)
    before, expected = snapshot(model), kernel_calls(run, model, arguments)
    with pytest.raises(ValueError, match="eject_kernels") as error:
        kernel.inject_kernels(model, attention=not attention)
    text = str(error.value)
    assert text.startswith("inject_kernels") and "\n" not in text
    assert f"attention={attention}" in text and f"attention={not attention}" in text
    assert snapshot(model) == before
    assert kernel_calls(run, model, arguments) == expected
    kernel.eject_kernels(model)
    kernel.inject_kernels(model, attention=not attention)
    assert kernel_calls(run, model, arguments) != expected


@pytest.mark.parametrize("position", [0, 1], ids=["first", "last"])
def test_other_options_for_one_of_several_models(kernel, device, position):
    """Nothing is done to the others, whichever comes first."""

    class Pipeline:
        def __init__(self, models):
            self.components = {f"transformer_{i}": model for i, model in enumerate(models)}

    models = [transformer(device, **BFLOAT16) for _ in range(2)]
    kernel.inject_kernels(models[position], attention=False)
    before = [snapshot(model) for model in models]
    with pytest.raises(ValueError, match="eject_kernels"):
        kernel.inject_kernels(Pipeline(models))
    assert [snapshot(model) for model in models] == before
    assert kernel_calls(run, models[1 - position], inputs(models[0])) == {}
    report = kernel.inject_kernels(Pipeline(models), attention=False)
    assert not report.already_injected
    assert {entry.name.split(".")[0] for entry in report.replaced} == {
        "transformer_0",
        "transformer_1",
    }


def test_other_options_for_a_pipeline(kernel, device):
    pipe = pipeline(device)
    kernel.inject_kernels(pipe, attention=False)
    before = snapshot(pipe.transformer)
    with pytest.raises(ValueError, match="eject_kernels"):
        kernel.inject_kernels(pipe)
    assert snapshot(pipe.transformer) == before


OF_REPLACED = {"forward"}


def test_one_attribute_of_the_model(kernel, device):
    """And no other of any module, except forwards."""
    model = transformer(device)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    kernel.inject_kernels(model)
    run(model, inputs(model))
    after = {name: set(vars(module)) for name, module in model.named_modules()}
    more = {name: after[name] - before[name] - OF_REPLACED for name in before}
    assert more.pop("") == {"_h100_diffusers_kernels"}
    assert not any(more.values())
    kernel.eject_kernels(model)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


def test_a_wrapped_block_is_counted_by_its_own_name(kernel, device):
    """The modules are known by what they were called when kernels were injected."""
    model = transformer(device, **BFLOAT16)
    model.transformer_blocks[1] = Wrap(model.transformer_blocks[1])
    report = kernel.inject_kernels(model)
    run(model, inputs(model))
    names = Counter(entry.name for entry in report.calls)
    assert names["transformer_blocks.1.wrapped"] == 1
    assert counts(report)["transformer_blocks.1.wrapped"] == (1, {})
