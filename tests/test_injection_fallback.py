"""Fallbacks of replaced modules to the model's own code: logged once, counted, and errors on request."""

import logging

import pytest
import torch
from diffusers.models import attention_dispatch
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers import transformer_ltx
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from changes import Wrap
from checks import relative_distance
from injected_pairs import BFLOAT16, assert_alike, fallen_back, pair
from ltx_models import calls_of, inputs, kernel_calls, pipeline, run, snapshot, transformer

pytestmark = pytest.mark.usefixtures("_one_thread", "_default_backend")

STRICT = "H100_DIFFUSERS_KERNELS_STRICT"
LOGGER = "h100_diffusers_kernels"
FIRST_BLOCK = "transformer_blocks.0"


@pytest.fixture(autouse=True)
def _not_strict(monkeypatch):
    monkeypatch.delenv(STRICT, raising=False)


@pytest.fixture
def injected(kernel, device):
    """(model with kernels, its report, arguments); attention is also on its kernel."""
    model = transformer(device, **BFLOAT16)
    return model, kernel.inject_kernels(model), inputs(model)


def in_autocast(model, arguments):
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        return run(model, arguments)


def with_hooked_norm(model, arguments):
    norm = model.transformer_blocks[0].norm1
    if not norm._forward_hooks:
        norm.register_forward_hook(lambda module, args, output: output * 0.5)
    return run(model, arguments)


def patched(owner, name):
    def with_patch(model, arguments):
        original = getattr(owner, name)
        setattr(owner, name, lambda *args: original(*args) * 0.5)
        try:
            return run(model, arguments)
        finally:
            setattr(owner, name, original)

    with_patch.__name__ = f"with_{name}_patched"
    return with_patch


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


# With a module that falls back.
FALL_BACKS = {
    in_autocast: FIRST_BLOCK,
    with_hooked_norm: FIRST_BLOCK,
    patched(RMSNorm, "forward"): FIRST_BLOCK,
    patched(transformer_ltx, "apply_rotary_emb"): f"{FIRST_BLOCK}.attn1",
    with_global_hook: FIRST_BLOCK,
    with_foreign_processor: f"{FIRST_BLOCK}.attn1",
}
LASTING = (with_hooked_norm, with_foreign_processor)
every_fall_back = pytest.mark.parametrize("fall_back", FALL_BACKS, ids=lambda f: f.__name__)


def warnings(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == LOGGER and record.levelno >= logging.WARNING
    ]


def counts(report):
    return {entry.name: (entry.on_kernels, dict(entry.fell_back)) for entry in report.calls}


def test_counts_are_live(kernel, injected):
    """Counts of each replaced module, also in the report of a second injection and in its text."""
    model, report, arguments = injected
    modules = dict(model.named_modules())
    assert sorted(e.name for e in report.calls) == sorted(e.name for e in report.replaced)
    assert len(report.calls) == 2 * 4 + 3
    assert all(entry.module == type(modules[entry.name]).__name__ for entry in report.calls)
    for times in range(3):
        assert all(count == (times, {}) for count in counts(report).values())
        run(model, arguments)
    second = kernel.inject_kernels(model)
    assert second.already_injected and counts(second) == counts(report)
    run(model, arguments)
    assert counts(second) == counts(report)
    assert {entry.on_kernels for entry in second.calls} == {4}
    with_hooked_norm(model, arguments)
    assert f"calls on the kernels: {5 * len(report.calls) - 1}\n" in str(report)
    assert str(report).endswith(
        "calls on the model's own code: 1 x LTXVideoTransformerBlock: "
        "norm1 has hooks or another forward than its class's"
    )


def test_counts_of_each_module_are_its_own(kernel, injected, capfd):
    """A copy counts for itself, an ejected model and compiled code count nothing, and nothing is printed."""
    model, report, arguments = injected
    capfd.readouterr()
    with_hooked_norm(model, arguments)
    assert fallen_back(report).keys() == {FIRST_BLOCK}
    on_kernels = {entry.name: entry.on_kernels for entry in report.calls}
    assert on_kernels.pop(FIRST_BLOCK) == 0
    assert set(on_kernels.values()) == {1}
    assert capfd.readouterr().out == ""
    kernel.eject_kernels(model)
    before = counts(report)
    with_hooked_norm(model, arguments)
    kernel.inject_kernels(model)
    run(model, arguments)
    assert counts(report) == before


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_code_counts_nothing(kernel, device):
    model, _, report = pair(kernel, device, blocks=1, **BFLOAT16)
    model.transformer_blocks[0].compile(fullgraph=True, backend="eager")
    run(model, inputs(model))
    after = counts(report)
    assert after[""] == (1, {})
    assert all(count == (0, {}) for name, count in after.items() if "block" in name)


def test_counts_of_a_pipeline(kernel, device):
    """Modules keep their paths from the injection, including a wrapper's attribute."""
    pipe = pipeline(device)
    blocks = pipe.transformer.transformer_blocks
    blocks[1] = Wrap(blocks[1])
    report = kernel.inject_kernels(pipe)
    run(pipe.transformer, inputs(pipe.transformer))
    assert sorted(e.name for e in report.calls) == sorted(e.name for e in report.replaced)
    assert counts(report)["transformer.transformer_blocks.1.wrapped"] == (1, {})


@every_fall_back
def test_fall_backs_are_counted(kernel, device, fall_back, caplog):
    """With the model's values; each class and reason is logged once."""
    model, plain, report = pair(kernel, device, **BFLOAT16)
    arguments = inputs(model)
    with caplog.at_level(logging.INFO, logger=LOGGER):
        run(model, arguments)
        assert warnings(caplog) == []
        for _ in range(2):
            out = fall_back(model, arguments)
    before, after = counts(report)[FALL_BACKS[fall_back]]
    assert before == 1
    assert set(after.values()) == {2}
    assert all(isinstance(reason, str) and reason for reason in after)
    assert relative_distance(out, fall_back(plain, arguments)) < 0.03
    first = {}
    for calls in report.calls:
        for reason in calls.fell_back:
            first.setdefault((calls.module, reason), calls.name)
    messages = warnings(caplog)
    assert len(messages) == len(first) > 0
    modules = [calls.module for calls in report.calls]
    for (module, reason), name in first.items():
        beginning = f"{name or 'the model'} ({module}) runs the model's own code: {reason} "
        (text,) = [text for text in messages if f"({module})" in text and reason in text]
        assert text.startswith(beginning)
        assert f"for {modules.count(module)} x {module})" in text


def test_another_reason_and_another_model_are_logged_again(kernel, injected, device, caplog):
    model, report, arguments = injected
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        in_autocast(model, arguments)
        first = len(warnings(caplog))
        with_hooked_norm(model, arguments)
        assert len(warnings(caplog)) == first + 1 > 1
        assert len(fallen_back(report)[FIRST_BLOCK]) == 2
        other = transformer(device, **BFLOAT16)
        kernel.inject_kernels(other)
        with_hooked_norm(other, arguments)
    assert len(warnings(caplog)) == first + 2


@every_fall_back
def test_strict_raises(kernel, device, monkeypatch, fall_back):
    """One sentence, which names the module, its class and the reason; the error leaves nothing behind."""
    counted, arguments = transformer(device, **BFLOAT16), inputs(transformer(device, **BFLOAT16))
    report = kernel.inject_kernels(counted)
    fall_back(counted, arguments)
    monkeypatch.setenv(STRICT, "1")
    model = transformer(device, **BFLOAT16)
    kernel.inject_kernels(model)
    assert kernel_calls(run, model, arguments) == calls_of(2, attention=2)
    with pytest.raises(RuntimeError) as error:
        fall_back(model, arguments)
    text = str(error.value)
    assert "\n" not in text and text.strip() == text and ". " not in text
    said = [
        (calls.name or "the model") in text and calls.module in text and reason in text
        for calls in report.calls
        for reason in calls.fell_back
    ]
    assert any(said)
    if fall_back not in LASTING:
        assert_alike(model, transformer(device, **BFLOAT16), arguments)


@pytest.mark.parametrize("value", ["0", ""])
def test_strict_can_be_off(monkeypatch, injected, value):
    monkeypatch.setenv(STRICT, value)
    model, report, arguments = injected
    with_hooked_norm(model, arguments)
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
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        out = run(model, {**arguments, "hidden_states": dual})
        assert forward_ad.unpack_dual(out).tangent.any()


CHOICES = [strict_attention_false, strict_backend, strict_gradients, strict_tangents]


@pytest.mark.parametrize("choose", CHOICES, ids=lambda choose: choose.__name__)
def test_choices_of_the_user_are_no_fall_backs(kernel, injected, monkeypatch, caplog, choose):
    monkeypatch.setenv(STRICT, "1")
    model, report, arguments = injected
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        choose(kernel, model, arguments)
    assert warnings(caplog) == []
    assert fallen_back(report) == {}


@pytest.mark.parametrize("position", [0, 1], ids=["first", "last"])
def test_other_options_for_one_of_several_models(kernel, device, position):
    """The other models are unchanged, in any order."""

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
    names = {entry.name.split(".")[0] for entry in report.replaced}
    assert names == {"transformer_0", "transformer_1"}
