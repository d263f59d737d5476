"""Chroma, Lumina 2 and Mochi: the masks of their texts, and what attention computes of them."""

import pytest
import torch

from families import FAMILIES, KERNEL_HEADS, assert_close, prepared, run
from injected_pairs import fallen_back, on_kernels
from ltx_models import kernel_calls

pytestmark = pytest.mark.usefixtures("_one_thread")

# For each family a mask of the inputs, and attentions of a forward on the kernel.
MASKS = [
    ("chroma", "padded", 8),
    ("chroma", None, 4),
    *(("lumina2", mask, 6) for mask in ("padded", None)),
    *(("mochi", mask, 2) for mask in ("padded", "scattered", None)),
]


@pytest.mark.parametrize(("name", "mask", "attentions"), MASKS)
def test_attention_of_padded_text(kernel, device, name, mask, attentions):
    """On the kernel, and as close to float64 as the model's own. Chroma's text attends twice."""
    if name not in FAMILIES:
        pytest.skip("this diffusers lacks the model")
    family = FAMILIES[name]
    options = {"mask": mask, "text_length": 9, "seed": 3}
    model, plain, arguments = prepared(
        family, device, torch.bfloat16, config=KERNEL_HEADS, **options
    )
    report = kernel.inject_kernels(model)
    expected = family.reference(plain, arguments)
    distances = [(run(m, arguments).double() - expected).norm() for m in (model, plain)]
    assert distances[0] <= 1.2 * distances[1] + 1e-3 * expected.norm()
    assert kernel_calls(run, model, arguments)["attention"] == attentions
    assert fallen_back(report) == {} and on_kernels(report)


def chroma_pair(kernel, device, dtype=torch.bfloat16, **options):
    model, plain, arguments = prepared(
        FAMILIES["chroma"],
        device,
        dtype,
        config=KERNEL_HEADS,
        mask="padded",
        text_length=9,
        **options,
    )
    return model, plain, arguments, kernel.inject_kernels(model)


def texts(model, arguments):
    """The text's hidden states after the first and the second double block."""
    results = []
    hooks = [
        block.register_forward_hook(lambda block, args, out: results.append(out[0].clone()))
        for block in model.transformer_blocks
    ]
    run(model, arguments)
    for hook in hooks:
        hook.remove()
    return results


def test_padding_of_chroma_attends_without_a_bias(kernel, device, monkeypatch):
    """The mask only adds 1 to scores of two valid tokens, so the padding's results count. The distance is
    compared with that of a model in which the padding has the bias of valid queries."""
    model, plain, arguments, _ = chroma_pair(kernel, device)
    is_padding = arguments["attention_mask"][:, :9] == 0
    assert is_padding.any() and not is_padding.all()
    mine = texts(model, arguments)[0].double()
    in_float64 = FAMILIES["chroma"].cast(arguments, torch.float64)
    exact = texts(plain.double(), in_float64)[0]
    attend = torch.nn.functional.scaled_dot_product_attention

    def attend_with_one_bias(query, key, value, attn_mask, **options):
        return attend(query, key, value, attn_mask[:, :, -1:], **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend_with_one_bias)
    unlike = texts(plain, in_float64)[0]
    effect = (unlike - exact)[is_padding].norm()
    assert (unlike - exact)[~is_padding].norm() < 1e-9 * exact.norm()
    assert (mine - exact)[is_padding].norm() < 0.2 * effect


def test_chroma_with_a_mask_of_booleans(kernel, device):
    """It masks the padding out. The result is the image's, which the padding does not reach."""
    model, plain, arguments, report = chroma_pair(kernel, device)
    arguments["attention_mask"] = arguments["attention_mask"].bool()
    in_float64 = FAMILIES["chroma"].cast(arguments, torch.float64)
    exact = run(plain.double(), {**in_float64, "attention_mask": arguments["attention_mask"]})
    out = run(model, arguments)
    assert (out.double() - exact).norm() < 0.03 * exact.norm()
    assert kernel_calls(run, model, arguments)["attention"] == 4
    assert fallen_back(report) == {}


def test_chroma_in_float32_keeps_its_mask(kernel, device):
    model, plain, arguments, _ = chroma_pair(kernel, device, torch.float32)
    assert_close(run(model, arguments), FAMILIES["chroma"].reference(plain, arguments))


@pytest.mark.parametrize("mask", ["padded", "scattered", None])
def test_mochis_padding_has_the_models_own_results(kernel, device, mask):
    """The valid tokens' results first, then zeros, after the text's own linear layer."""
    family = FAMILIES["mochi"]
    model, plain, arguments = prepared(family, device, mask=mask, text_length=9, batch=3)
    kernel.inject_kernels(model)
    outs = []
    for each in (model, plain):
        hook = each.transformer_blocks[0].attn1.register_forward_hook(
            lambda module, args, out: outs.append(out)
        )
        run(each, arguments)
        hook.remove()
    for mine, own in zip(*outs, strict=True):
        assert_close(mine, own.double())
