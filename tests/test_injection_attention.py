"""Attention of injected LTX-Video models: when the kernel computes it, and when diffusers does."""

import itertools

import pytest
import torch
from diffusers.models import attention_dispatch
from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor

import ltx_models
from checks import relative_distance
from families import FAMILIES, prepared
from families import run as family_run
from injected_pairs import BFLOAT16, assert_alike, assert_gradients_agree, pair, reasons_of
from ltx_models import KernelCalls, calls_of, inputs, kernel_calls, run, transformer

pytestmark = pytest.mark.usefixtures("_one_thread", "_default_backend")

TEXT_LENGTH = ltx_models.TEXT_LENGTH
HEADS = {"heads": 2, "head_dim": 64}
BOTH = {"attention": 2}  # a block: self-attention and cross-attention


class Biases(KernelCalls):
    """Also records shape and dtype of the bias in each call of attention."""

    def __init__(self):
        super().__init__()
        self.of_attention = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.endswith("::attention"):
            bias = args[4]
            self.of_attention.append(None if bias is None else (tuple(bias.shape), bias.dtype))
        return super().__torch_dispatch__(func, types, args, kwargs)


def biases(model, arguments):
    with Biases() as calls:
        run(model, arguments)
    assert dict(calls.counts) == calls_of(2, **BOTH)
    assert calls.of_attention[::2] == [None, None]
    assert calls.of_attention[1] == calls.of_attention[3]
    return calls.of_attention[1]


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    ("mask", "head_dim"), [("padded", 64), ("padded", 128), ("full", 64), (None, 64)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_both_attentions_run_on_the_kernel(kernel, device, dtype, mask, head_dim):
    model, plain, _ = pair(kernel, device, dtype=dtype, heads=2, head_dim=head_dim)
    arguments = inputs(model, mask=mask)
    assert biases(model, arguments) == (None if mask is None else ((2, TEXT_LENGTH), dtype))
    assert kernel_calls(run, plain, arguments) == {}
    assert_alike(model, plain, arguments)


def test_padding_has_no_weight(kernel, device):
    model, _, _ = pair(kernel, device, **BFLOAT16)
    arguments = inputs(model)
    changed = arguments["encoder_hidden_states"].clone()
    changed[0, 2:] = 100.0  # the first sample has two tokens of text
    other = run(model, {**arguments, "encoder_hidden_states": changed})
    assert torch.equal(run(model, arguments), other)


OTHER_MASKS = {
    "bias of each query": torch.randn(2, 24, TEXT_LENGTH),
    "bias of each head": torch.randn(2 * 2, 1, TEXT_LENGTH),
    "booleans": torch.arange(TEXT_LENGTH).expand(2, 1, -1) < 4,
    "bias of all queries": torch.randn(2, 1, TEXT_LENGTH),
}


@pytest.mark.parametrize("case", OTHER_MASKS)
def test_other_masks_keep_the_models_attention(kernel, device, case):
    """Except a bias shared by all queries: the kernel adds it in float32, which PyTorch does not accept."""
    model, plain, _ = pair(kernel, device, **BFLOAT16)
    mask = OTHER_MASKS[case].to(device)
    arguments = inputs(model, encoder_attention_mask=mask)
    if case == "bias of all queries":
        assert biases(model, arguments) == ((2, TEXT_LENGTH), torch.float32)
    elif mask.is_floating_point():
        arguments["encoder_attention_mask"] = mask.bfloat16()
    if case != "bias of all queries":
        assert kernel_calls(run, model, arguments) == calls_of(2, attention=1)
    exact = ltx_models.cast(arguments, torch.float32)
    if mask.is_floating_point():
        exact["encoder_attention_mask"] = arguments["encoder_attention_mask"].float()
    assert relative_distance(run(model, arguments), run(plain.float(), exact)) < 0.05


@pytest.mark.parametrize("head_dim", [20, 136])
def test_other_head_sizes_keep_the_models_attention(kernel, device, head_dim):
    model = transformer(device, torch.bfloat16, heads=2, head_dim=head_dim)
    reasons = reasons_of(kernel.inject_kernels(model))
    assert kernel_calls(run, model, inputs(model)) == calls_of(2)
    for block, attention in itertools.product(range(2), ("attn1", "attn2")):
        reason = reasons[f"transformer_blocks.{block}.{attention}"]
        assert f"its heads have {head_dim} elements; the kernel takes multiples of 8" in reason


def test_float32_keeps_the_models_attention(kernel, device):
    """The dtype is checked on every call, because it may change."""
    model, plain, _ = pair(kernel, device, **HEADS)
    arguments = inputs(model)
    assert kernel_calls(run, model, arguments) == calls_of(2)
    assert_alike(model, plain, arguments)
    model, plain = model.bfloat16(), plain.bfloat16()
    arguments = ltx_models.cast(arguments, torch.bfloat16)
    assert kernel_calls(run, model, arguments) == calls_of(2, **BOTH)
    assert_alike(model, plain, arguments)


def test_gradients_of_16_bits(kernel, device):
    """Gradients have the plain model's values. Without gradients attention is on the kernel."""
    model, plain, _ = pair(kernel, device, **BFLOAT16)
    arguments = inputs(model)
    assert_gradients_agree(model, plain, arguments, 0.1)
    model.requires_grad_(False)
    assert kernel_calls(lambda: model(**arguments))["attention"] == 4


def test_backend_of_one_module(kernel, device):
    """The choice is read at each call, and belongs only to that module's processor."""
    model, plain, _ = pair(kernel, device, **BFLOAT16)
    native = attention_dispatch.AttentionBackendName.NATIVE
    arguments = inputs(model)
    processor = model.transformer_blocks[0].attn2.processor
    for backend, count in ((native, 3), ("_native_math", 3), (None, 4)):
        processor._attention_backend = backend
        assert kernel_calls(run, model, arguments) == {**calls_of(2), "attention": count}
        assert_alike(model, plain, arguments)


@pytest.fixture
def masks(monkeypatch):
    """Gets the shape of the mask of each call of attention by ``_native_math``, and by PyTorch's choice."""
    given = []
    backends = attention_dispatch._AttentionBackendRegistry._backends
    name = attention_dispatch.AttentionBackendName._NATIVE_MATH
    native, math = torch.nn.functional.scaled_dot_product_attention, backends[name]

    def looking(original):
        def attention(*args, attn_mask=None, **kwargs):
            given.append(None if attn_mask is None else tuple(attn_mask.shape))
            return original(*args, attn_mask=attn_mask, **kwargs)

        return attention

    monkeypatch.setitem(backends, name, looking(math))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", looking(native))
    return given


def test_masks_of_other_backends(kernel, device, masks):
    """Only PyTorch's own choice of attention is known to broadcast a mask over the heads."""
    model, plain, _ = pair(kernel, device)
    arguments = inputs(model)
    expected = run(plain, arguments)
    masks.clear()
    assert relative_distance(run(model, arguments), expected) < 1e-5
    assert masks == [None, (2, 1, 1, TEXT_LENGTH)] * 2
    masks.clear()
    with attention_dispatch.attention_backend("_native_math"):
        assert relative_distance(run(model, arguments), expected) < 1e-5
    assert [mask for mask in masks if mask != (2, 1, 1, TEXT_LENGTH)][:1] == [None]
    assert (2, 4, 1, TEXT_LENGTH) in masks


class Changed:
    """A foreign function with another parameter."""

    def __call__(self, attn, hidden_states, *args, strength=0.5):
        return LTXVideoAttnProcessor()(attn, hidden_states, *args) * strength


def test_unexpected_attention_kwargs(kernel, device, caplog):
    """diffusers' warning and the processors' own parameters stay, and a direct call of a processor computes
    the same."""
    model, plain, _ = pair(kernel, device, **BFLOAT16)
    x = torch.randn(2, 6, 128, device=device, dtype=torch.bfloat16)
    messages, results = [], []
    for candidate in (model, plain):
        block = candidate.transformer_blocks[0]
        block.attn2.set_processor(Changed())
        caplog.clear()
        with torch.no_grad():
            block.attn1(x, nonsense=1)
            of_processor = block.attn1.processor(block.attn1, x)
            results.append((of_processor, block.attn2(x, encoder_hidden_states=x, strength=0.25)))
        said = [record.getMessage() for record in caplog.records]
        messages.append([message for message in said if "nonsense" in message])
    assert messages[0] == messages[1]
    assert all(torch.equal(*both) for both in zip(*results, strict=True))


@pytest.mark.parametrize(("head_dim", "is_used"), [(40, False), (48, True)])
def test_heads_without_a_fast_norm(kernel, device, head_dim, is_used):
    """``qk_norm_rope`` takes 16 elements of a head at once in 16 bits. Norms of other heads are operations of
    their own."""
    model, plain, arguments = prepared(
        FAMILIES["cogview3"], device, torch.bfloat16, config={"heads": 2, "head_dim": head_dim}
    )
    kernel.inject_kernels(model)
    operations = kernel_calls(family_run, model, arguments)
    assert any(operation.startswith("qk_norm_rope") for operation in operations) == is_used
    assert relative_distance(family_run(model, arguments), family_run(plain, arguments)) < 0.02
