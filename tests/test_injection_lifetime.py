"""Lifetime of an injection: memory that it keeps alive, copies, saving, and interrupted injections."""

import contextlib
import copy
import gc
import io
import itertools
import weakref

import pytest
import torch
from torch import nn

from injected_pairs import assert_alike, pair
from ltx_models import calls_of, inputs, kernel_calls, run, snapshot, transformer

pytestmark = pytest.mark.usefixtures("_one_thread")


@contextlib.contextmanager
def without_garbage_collection():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def alive(references):
    return [name for name, reference in references.items() if reference() is not None]


def test_a_removed_block_frees_its_weights(kernel, device):
    """Its neighbours do not keep it alive."""
    with without_garbage_collection():
        model, _, _ = pair(kernel, device)
        run(model, inputs(model))
        block = model.transformer_blocks[1]
        references = {name: weakref.ref(p) for name, p in block.named_parameters()}
        del block, model.transformer_blocks[1]
        assert references and alive(references) == []
        run(model, inputs(model))


def test_hidden_states_are_freed_after_a_forward(kernel, device):
    """Values passed between blocks in one forward do not stay for the next."""
    with without_garbage_collection():
        model, _, _ = pair(kernel, device, blocks=3)
        references = {}
        for i, block in enumerate(model.transformer_blocks):
            block.ff.register_forward_hook(
                lambda m, args, output, i=i: references.update({i: weakref.ref(output)})
            )
        run(model, inputs(model))
        assert len(references) == 3
        assert alive(references) == []


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    return loaded, len(file.getvalue())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("place", ["", "attn1", "ff", "ff.net.0"], ids=lambda p: p or "block")
def test_a_hook_saves_what_a_module_gives(kernel, device, mode, place):
    model, _, _ = pair(kernel, device, blocks=3)
    sizes = []

    def hook(module, args, output):
        loaded, size = saved(output)
        assert torch.equal(loaded, output) and torch.equal(copy.deepcopy(output), output)
        assert vars(output) == {}
        sizes.append((size, output.untyped_storage().nbytes()))

    for block in model.transformer_blocks:
        block.get_submodule(place).register_forward_hook(hook)
    with mode():
        model(**inputs(model))
    assert len(sizes) == 3
    for size, expected in sizes:
        assert size <= expected + 4096


class Stop(Exception):
    pass


@contextlib.contextmanager
def stopping_at(monkeypatch, count):
    """Raises when, for the count-th time, a module's attribute named forward or one of this package's is set
    or deleted."""
    counter = itertools.count(1)

    def stop_at_count(name):
        if (name == "forward" or "h100" in name) and next(counter) == count:
            raise Stop

    set_attribute, delete_attribute = nn.Module.__setattr__, nn.Module.__delattr__

    def setattr_(self, name, value):
        stop_at_count(name)
        set_attribute(self, name, value)

    def delattr_(self, name):
        stop_at_count(name)
        delete_attribute(self, name)

    with monkeypatch.context() as patches:
        patches.setattr(nn.Module, "__setattr__", setattr_)
        patches.setattr(nn.Module, "__delattr__", delattr_)
        yield


def state_of(model):
    return snapshot(model), {name: list(vars(module)) for name, module in model.named_modules()}


class Holder:
    """Of two models."""

    def __init__(self, device):
        self.one, self.other = transformer(device), transformer(device)


COUNTS = [1, 2, 6, 10]


@pytest.mark.parametrize("count", [*COUNTS, 13, 20])
def test_an_injection_that_fails_changes_nothing(kernel, device, monkeypatch, count):
    """It is complete, for all models, or not done at all."""
    holder = Holder(device)
    models, arguments = (holder.one, holder.other), inputs(holder.one)
    before = [state_of(model) for model in models]
    with pytest.raises(Stop), stopping_at(monkeypatch, count):
        kernel.inject_kernels(holder)
    assert [state_of(model) for model in models] == before
    assert [kernel_calls(run, model, arguments) for model in models] == [{}, {}]
    kernel.eject_kernels(holder)
    assert [state_of(model) for model in models] == before
    assert not kernel.inject_kernels(holder).already_injected
    for model in models:
        assert kernel_calls(run, model, arguments) == calls_of(2)
        assert_alike(model, transformer(device), arguments)
    kernel.eject_kernels(holder)
    assert [state_of(model) for model in models] == before


@pytest.mark.parametrize("count", COUNTS)
def test_an_ejection_that_fails_can_be_repeated(kernel, device, monkeypatch, count):
    model = transformer(device)
    arguments = inputs(model)
    before, expected = snapshot(model), run(model, arguments)
    kernel.inject_kernels(model)
    with contextlib.suppress(Stop), stopping_at(monkeypatch, count):
        kernel.eject_kernels(model)
    kernel.eject_kernels(model)
    assert snapshot(model) == before
    assert torch.equal(run(model, arguments), expected)
    assert not kernel.inject_kernels(model).already_injected
    assert kernel_calls(run, model, arguments) == calls_of(2)
