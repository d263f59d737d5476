"""The processors of an injected model are its own, before, while and after kernels are injected."""

import pytest
import torch
from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor
from torch import nn

from injected_pairs import BFLOAT16, assert_alike, pair
from ltx_models import calls_of, either_order, inputs, kernel_calls, run, transformer

pytestmark = pytest.mark.usefixtures("_one_thread")


def attentions(model):
    return [getattr(b, name) for b in model.transformer_blocks for name in ("attn1", "attn2")]


def test_processors_are_not_touched(kernel, device):
    model = transformer(device, **BFLOAT16)
    before = [attention.processor for attention in attentions(model)]

    def assert_untouched():
        for attention, processor in zip(attentions(model), before, strict=True):
            assert attention.processor is processor
            assert attention.get_processor() is processor
            assert type(processor) is LTXVideoAttnProcessor
            assert vars(processor) == {}
        assert list(model.attn_processors.values()) == before

    kernel.inject_kernels(model)
    assert_untouched()
    assert kernel_calls(run, model, inputs(model)) == calls_of(2, attention=2)
    assert_untouched()
    kernel.eject_kernels(model)
    assert_untouched()


class Changed:
    """Not of diffusers, with another parameter."""

    def __call__(
        self,
        attn,
        hidden_states,
        encoder_hidden_states=None,
        attention_mask=None,
        image_rotary_emb=None,
        strength=0.5,
    ):
        result = LTXVideoAttnProcessor()(
            attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
        )
        return result * strength


class Adapter(nn.Module):
    """As those of IP-Adapters: a module with weights, around the attention of another processor."""

    def __init__(self, hidden=128):
        super().__init__()
        torch.manual_seed(3)
        self.inner = LTXVideoAttnProcessor()
        self.to_ip = nn.Linear(hidden, hidden, dtype=torch.bfloat16)
        nn.init.normal_(self.to_ip.weight, std=0.1)

    def forward(
        self,
        attn,
        hidden_states,
        encoder_hidden_states=None,
        attention_mask=None,
        image_rotary_emb=None,
    ):
        result = self.inner(
            attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
        )
        return result + self.to_ip(hidden_states)


@pytest.mark.parametrize("cls", [Changed, Adapter])
@pytest.mark.parametrize("is_for_all", [True, False], ids=["all", "one"])
@either_order
def test_processors_of_the_users_own(kernel, device, cls, is_for_all, is_injected_first):
    """They stay when the kernels are ejected, and a class's own ones, made anew, run on the kernels."""

    def change(model):
        for attention in attentions(model)[: None if is_for_all else 1]:
            processor = cls()
            if isinstance(processor, nn.Module):
                processor.to(model.device)
            attention.set_processor(processor)

    model, plain, _ = pair(kernel, device, change, is_injected_first=is_injected_first, **BFLOAT16)
    arguments = inputs(plain)
    unlike = run(transformer(device, **BFLOAT16), arguments)
    assert_alike(model, plain, arguments, unlike=unlike)
    assert model.state_dict().keys() == plain.state_dict().keys()
    calls = kernel_calls(run, model, arguments)
    assert calls.get("attention", 0) == (0 if is_for_all else 3)
    processor = model.transformer_blocks[0].attn1.processor
    kernel.eject_kernels(model)
    assert model.transformer_blocks[0].attn1.processor is processor
    kernel.inject_kernels(model)
    for attention in attentions(model):
        attention.set_processor(LTXVideoAttnProcessor())
    for attention in attentions(plain):
        attention.set_processor(LTXVideoAttnProcessor())
    assert_alike(model, plain, arguments)
    assert kernel_calls(run, model, arguments) == calls_of(2, attention=2)


def test_attention_kwargs_that_nobody_expects(kernel, device, caplog):
    """diffusers' warning and the processors' own parameters stay, and a processor called by itself computes
    what it did."""
    model, plain, _ = pair(kernel, device, **BFLOAT16)
    x = torch.randn(2, 6, 128, device=device, dtype=torch.bfloat16)
    messages, results = [], []
    for candidate in (model, plain):
        block = candidate.transformer_blocks[0]
        block.attn2.set_processor(Changed())
        caplog.clear()
        with torch.no_grad():
            block.attn1(x, nonsense=1)
            results.append(
                (
                    block.attn1.processor(block.attn1, x),
                    block.attn2(x, encoder_hidden_states=x, strength=0.25),
                )
            )
        said = [record.getMessage() for record in caplog.records]
        messages.append([message for message in said if "nonsense" in message])
    assert messages[0] == messages[1]
    assert all(torch.equal(*both) for both in zip(*results, strict=True))
