"""Calls that nothing unknown runs in are made without what modules do around them, and no others are."""

import pytest
import torch

from families import KERNEL_HEADS, every_family, prepared, run

pytestmark = [pytest.mark.usefixtures("_one_thread")]


@pytest.fixture
def called(monkeypatch):
    """The modules that are called as modules."""
    modules = []
    own = torch.nn.Module._call_impl

    def noted(self, *args, **kwargs):
        modules.append(self)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "_call_impl", noted)
    return modules


def injected(kernel, family, device):
    """A model on the kernels in bfloat16, its arguments, and what it makes of them."""
    model, _, arguments = prepared(family, device, torch.bfloat16, config=KERNEL_HEADS)
    kernel.inject_kernels(model)
    return model, arguments, run(model, arguments)


def is_called(modules, module):
    return any(m is module for m in modules)


@every_family
def test_blocks_call_their_parts_directly(kernel, device, family, called):
    model, arguments, expected = injected(kernel, family, device)
    attentions = [
        block.attn if hasattr(block, "attn") else block.attn1 for block in family.blocks(model)
    ]
    for call in ("first", "second"):
        called.clear()
        assert torch.equal(run(model, arguments), expected), call
        assert is_called(called, family.part(model, "block"))
        assert not any(is_called(called, attention) for attention in attentions)


@every_family
def test_calls_are_counted(kernel, device, family):
    model, _, arguments = prepared(family, device, torch.bfloat16, config=KERNEL_HEADS)
    report = kernel.inject_kernels(model)
    for _ in range(3):
        run(model, arguments)
    # Each module once or twice a forward, but those that their attention does without.
    counts = {
        calls.name: calls.on_kernels
        for calls in report.calls
        if not calls.name.endswith("mlp_act_fn")
    }
    assert set(counts.values()) <= {3, 6}, counts
    assert not any(calls.fell_back for calls in report.calls)


@every_family
def test_a_class_that_is_called_in_another_way(kernel, device, family, monkeypatch):
    model, arguments, expected = injected(kernel, family, device)
    attention = family.part(model, "attention")
    own, modules = type(attention).__call__, []

    def call(self, *args, **kwargs):
        modules.append(self)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(type(attention), "__call__", call)
    assert torch.equal(run(model, arguments), expected)
    count = sum(type(module) is type(attention) for module in model.modules())
    assert len(modules) == count


@every_family
@pytest.mark.parametrize("part", ["attention", "activation"])
def test_a_compiled_part(kernel, device, family, part):
    if part not in family.parts:
        pytest.skip("it has none")
    model, arguments, expected = injected(kernel, family, device)
    module = family.part(model, part)
    calls = []

    def compiled(*args, **kwargs):
        calls.append(1)
        return module._call_impl(*args, **kwargs)

    module._compiled_call_impl = compiled
    assert torch.equal(run(model, arguments), expected)
    assert calls == [1]
    module._compiled_call_impl = None
    assert torch.equal(run(model, arguments), expected)
    assert calls == [1]


@every_family
def test_a_part_that_takes_other_attributes_as_a_whole(kernel, device, family):
    """Its dictionary is another one, and the one that was looked at has not changed."""
    model, arguments, _ = injected(kernel, family, device)
    norm = family.part(model, "norm")
    norm.__dict__ = {**norm.__dict__, "eps": 0.5}
    got = run(model, arguments)
    kernel.eject_kernels(model)
    kernel.inject_kernels(model)
    assert torch.equal(got, run(model, arguments))
