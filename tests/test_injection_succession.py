"""The end of a block and the beginning of the next in one operation, whatever comes between them."""

import copy

import pytest
import torch

from ltx_models import calls_of, computing, inputs, reference, run, transformer

pytestmark = pytest.mark.usefixtures("_one_thread")

BLOCKS = 3


@pytest.fixture
def models(kernel, device):
    """(injected model, the same without kernels, arguments)"""
    model = transformer(device, blocks=BLOCKS)
    plain = copy.deepcopy(model)
    kernel.inject_kernels(model)
    return model, plain, inputs(model)


def scaled_in_place(module, args, output):
    output.mul_(1.5)


def replaced(module, args, output):
    return output * 1.5


def written_through_a_view(module, args, output):
    output[:, 1:].add_(0.5)


@pytest.mark.parametrize("hook", [scaled_in_place, replaced, written_through_a_view])
def test_a_hook_changes_what_is_handed_on(models, hook):
    model, plain, arguments = models
    for candidate in (model, plain):
        candidate.transformer_blocks[0].register_forward_hook(hook)
    expected = reference(plain, arguments)
    # Block 0 leaves nothing to block 1.
    assert computing(expected, model, arguments) == calls_of(BLOCKS, joined=BLOCKS - 2)


def test_a_block_is_given_another_time_embedding(models):
    model, plain, arguments = models

    def later(module, args, kwargs):
        return args, {**kwargs, "temb": kwargs["temb"] * 0.5}

    for candidate in (model, plain):
        candidate.transformer_blocks[1].register_forward_pre_hook(later, with_kwargs=True)
    expected = reference(plain, arguments)
    # Nothing is left to block 1, nor by it.
    assert computing(expected, model, arguments) == calls_of(BLOCKS, joined=0)


def test_the_time_embedding_is_changed_in_place(models):
    model, plain, arguments = models

    def halve(module, args, kwargs):
        kwargs["temb"].mul_(0.5)

    for candidate in (model, plain):
        candidate.transformer_blocks[1].register_forward_pre_hook(halve, with_kwargs=True)
    computing(reference(plain, arguments), model, arguments)


def test_a_block_is_left_out(models):
    model, plain, arguments = models
    for candidate in (model, plain):
        del candidate.transformer_blocks[1]
    expected = reference(plain, arguments)
    assert computing(expected, model, arguments) == calls_of(BLOCKS - 1)


def test_a_copy_hands_on_to_its_own_blocks(models):
    model, plain, arguments = models
    duplicate = copy.deepcopy(model)
    with torch.no_grad():
        for candidate in (duplicate, plain):
            candidate.transformer_blocks[1].scale_shift_table.mul_(2)
    assert computing(reference(plain, arguments), duplicate, arguments) == calls_of(BLOCKS)


def test_inference_mode(models):
    model, plain, arguments = models
    expected = reference(plain, arguments)
    with torch.inference_mode():
        out = model(
            **{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        )
    torch.testing.assert_close(out.sample.double(), expected, rtol=1e-5, atol=1e-5)


def test_nothing_is_left_on_the_result(models):
    model, _, arguments = models
    outputs = []
    hooks = [
        block.register_forward_hook(lambda module, args, output: outputs.append(output))
        for block in model.transformer_blocks
    ]
    run(model, arguments)
    for hook in hooks:
        hook.remove()
    assert len(outputs) == BLOCKS
    assert all(not vars(output) for output in outputs)
