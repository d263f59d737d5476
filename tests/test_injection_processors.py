"""The processors of an injected model are its own, before, while and after kernels are injected."""

import copy

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
    arguments = inputs(model)

    def assert_untouched():
        for attention, processor in zip(attentions(model), before, strict=True):
            assert attention.processor is processor
            assert attention.get_processor() is processor
            assert type(processor) is LTXVideoAttnProcessor
            assert vars(processor) == {}
        assert list(model.attn_processors.values()) == before

    kernel.inject_kernels(model)
    assert_untouched()
    assert kernel_calls(run, model, arguments) == calls_of(2, attention=2)
    assert_untouched()
    kernel.eject_kernels(model)
    assert_untouched()


def test_a_processors_class_makes_another(kernel, device):
    """As diffusers' loaders of IP-Adapters do it, without arguments."""
    model, plain, _ = pair(kernel, device, **BFLOAT16)
    for attention in attentions(model):
        attention.set_processor(type(attention.processor)())
    arguments = inputs(plain)
    assert_alike(model, plain, arguments)
    assert kernel_calls(run, model, arguments) == calls_of(2, attention=2)


class Halved(LTXVideoAttnProcessor):
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs) * 0.5


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


def seeded_adapter():
    torch.manual_seed(3)
    return Adapter()


PROCESSORS = {"subclass": Halved, "own": Changed, "module": seeded_adapter}


@pytest.mark.parametrize("kind", PROCESSORS)
@pytest.mark.parametrize("is_for_all", [True, False], ids=["all", "one"])
@either_order
def test_processors_of_the_users_own(kernel, device, kind, is_for_all, is_injected_first):
    def change(model):
        chosen = attentions(model) if is_for_all else attentions(model)[:1]
        for attention in chosen:
            processor = PROCESSORS[kind]()
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
    assert calls["gated_residual_rms_norm_modulate"] >= 2
    for attention in attentions(model):
        attention.set_processor(LTXVideoAttnProcessor())
    for attention in attentions(plain):
        attention.set_processor(LTXVideoAttnProcessor())
    assert_alike(model, plain, arguments)
    assert kernel_calls(run, model, arguments) == calls_of(2, attention=2)


def test_set_attn_processor(kernel, device):
    """The model's own method, with one processor for all and with one for each."""
    model, plain, _ = pair(kernel, device, **BFLOAT16)
    arguments = inputs(plain)
    for candidate in (model, plain):
        candidate.set_attn_processor(Halved())
    assert {type(p) for p in model.attn_processors.values()} == {Halved}
    assert_alike(model, plain, arguments)
    assert "attention" not in kernel_calls(run, model, arguments)
    for candidate in (model, plain):
        candidate.set_attn_processor({name: Changed() for name in candidate.attn_processors})
    assert_alike(model, plain, arguments)
    for candidate in (model, plain):
        candidate.set_attn_processor(LTXVideoAttnProcessor())
    assert_alike(model, plain, arguments)
    assert kernel_calls(run, model, arguments) == calls_of(2, attention=2)


def test_processors_set_while_injected_stay(kernel, device):
    model = transformer(device, **BFLOAT16)
    kernel.inject_kernels(model)
    processor = Halved()
    model.transformer_blocks[0].attn1.set_processor(processor)
    kernel.eject_kernels(model)
    assert model.transformer_blocks[0].attn1.processor is processor


def test_a_processor_on_its_own(kernel, device):
    """Called by a user's code, it computes what it did."""
    model, plain, _ = pair(kernel, device, **BFLOAT16)
    x = torch.randn(2, 6, 128, device=device, dtype=torch.bfloat16)
    outputs = []
    for candidate in (model, plain):
        attention = candidate.transformer_blocks[0].attn1
        with torch.no_grad():
            outputs.append(attention.processor(attention, x))
    assert torch.equal(*outputs)


def test_attributes_of_a_processor(kernel, device):
    """They are asked at each call, and belong to the processor alone."""
    model, plain, _ = pair(kernel, device, **BFLOAT16)
    arguments = inputs(plain)
    for candidate in (model, plain):
        candidate.transformer_blocks[0].attn2.processor._attention_backend = "_native_math"
    assert kernel_calls(run, model, arguments)["attention"] == 3
    assert_alike(model, plain, arguments)
    duplicate = copy.deepcopy(model)
    duplicate.transformer_blocks[0].attn2.processor._attention_backend = None
    assert kernel_calls(run, duplicate, arguments)["attention"] == 4
    assert kernel_calls(run, model, arguments)["attention"] == 3


def test_attention_kwargs_that_nobody_expects(kernel, device, caplog):
    """diffusers' warning and the processors' own parameters stay."""
    model, plain, _ = pair(kernel, device, **BFLOAT16)
    x = torch.randn(2, 6, 128, device=device, dtype=torch.bfloat16)
    for candidate in (model, plain):
        candidate.transformer_blocks[0].attn2.set_processor(Changed())
    messages = []
    with torch.no_grad():
        for candidate in (model, plain):
            caplog.clear()
            attention = candidate.transformer_blocks[0].attn1
            attention(x, nonsense=1)
            messages.append(
                [r.getMessage() for r in caplog.records if "nonsense" in r.getMessage()]
            )
        halves = [
            m.transformer_blocks[0].attn2(x, encoder_hidden_states=x, strength=0.25)
            for m in (model, plain)
        ]
    assert messages[0] == messages[1]
    assert torch.equal(*halves)
