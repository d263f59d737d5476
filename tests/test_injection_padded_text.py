"""The masks of texts, and what attention computes of them."""

import copy

import pytest
import torch

import random_masks
from families import FAMILIES, KERNEL_HEADS, assert_close, prepared, run
from injected_pairs import fallen_back, on_kernels
from ltx_models import KernelCalls, kernel_calls

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


class KeyLengths(KernelCalls):
    """Counts attentions with key lengths, and with a bias of the keys."""

    lengths = biases = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.endswith("::attention"):
            self.biases += args[4] is not None
            self.lengths += args[5] is not None
        return super().__torch_dispatch__(func, types, args, kwargs)


def lengths_and_biases(model, arguments):
    with KeyLengths() as calls:
        run(model, arguments)
    return calls.lengths, calls.biases


class Masked:
    """A family's model, injected, and the same without kernels and in float64."""

    def __init__(self, kernel, device, name, dtype=torch.bfloat16, **options):
        self.family = FAMILIES[name]
        options = {"text_length": 9, "seed": 3, **options}
        self.injected, self.plain, self.arguments = prepared(
            self.family, device, dtype, config=KERNEL_HEADS, **options
        )
        self.exact = copy.deepcopy(self.plain).double()
        self.models = (self.injected, self.plain, self.exact)
        kernel.inject_kernels(self.injected)

    def check(self, mode=torch.no_grad):
        with mode():
            in_float64 = self.family.cast(copy.deepcopy(self.arguments), torch.float64)
            exact = run(self.exact, in_float64)
            outs = [run(m, copy.deepcopy(self.arguments)).double() for m in self.models[:2]]
        distances = [(out - exact).norm() / exact.norm() for out in outs]
        assert distances[0] <= 1.5 * distances[1] + 1e-3, distances


# Where the model's own code makes the mask, and the number of its attentions.
PREFIXES = {
    "hunyuan_video": ({}, 4),
    "hunyuan_video15": ({}, 2),
    "lumina2": ({"mask": "padded"}, 2),
    "z_image": ({"prompts": (70, 6)}, 4),
    "ernie_image": ({"mask": "padded"}, 2),
}


def test_valid_tokens_first_are_a_number_of_keys(kernel, device):
    for name in PREFIXES.keys() & FAMILIES.keys():
        options, count = PREFIXES[name]
        masked = Masked(kernel, device, name, **options)
        assert lengths_and_biases(masked.injected, masked.arguments)[0] == count, name
        masked.check()


def test_any_mask_of_the_text_of_lumina2(kernel, device):
    """Its text blocks get the mask itself, its other blocks a number of tokens."""
    masked = Masked(kernel, device, "lumina2")
    left = torch.zeros(2, 9, dtype=torch.bool, device=device)
    left[0, 4:], left[1, 2:] = True, True
    holes = left.clone()
    holes[:, 6] = False
    for mask in (left.flip(1), left, holes, left.t().contiguous().t(), left[1:].expand(2, 9)):
        for dtype in (torch.bool, torch.int64):
            masked.arguments["encoder_attention_mask"] = mask.to(dtype)
            masked.check()


def test_hooks_hide_keys_of_hunyuan_video(kernel, device):
    """Hooks and wrappers of a block or an attention replace the mask, or write to it where tensors have no
    versions. Later blocks see what was written."""
    masked = Masked(kernel, device, "hunyuan_video")
    for target in ("block", "attention", "both", "wrapped block"):
        for way in random_masks.WAYS:
            for which in (0, 1):  # the first block of one list, and the last of the other
                undo = []
                for model in masked.models:
                    change = random_masks.Change(masked.family, way, 5)
                    undo.append(
                        random_masks.change_model(masked.family, model, target, change, which)
                    )
                masked.check(torch.inference_mode)
                for function in undo:
                    function()
    assert lengths_and_biases(masked.injected, masked.arguments) == (4, 0)


def test_padding_of_hunyuan_video15_attends_to_nothing(kernel, device):
    """Hooks may let later blocks read it."""
    masked = Masked(kernel, device, "hunyuan_video15")
    texts = []
    for model in (masked.injected, masked.exact):
        hook = model.transformer_blocks[0].register_forward_hook(
            lambda block, args, out: texts.append(out[1].double())
        )
        dtype = next(model.parameters()).dtype
        run(model, masked.family.cast(masked.arguments, dtype))
        hook.remove()
    mine, exact = texts
    for row, other in zip(mine.flatten(0, 1), exact.flatten(0, 1), strict=True):
        assert (row - other).norm() < 0.05 * other.norm()


def test_replaced_methods_that_make_masks_of_z_image(kernel, device, monkeypatch):
    """On the class and on the instance: users hide the padding of prompts."""
    masked = Masked(kernel, device, "z_image", prompts=(70, 6))
    cls = type(masked.plain)
    if not hasattr(cls, "_build_unified_sequence"):
        pytest.skip("this diffusers makes them in the forward")
    make = cls._build_unified_sequence

    def without_padding(*args, **kwargs):
        tokens, freqs, mask, *rest = make(*args, **kwargs)
        mask = mask.clone()
        mask[:, 16:32] = False
        return tokens, freqs, mask, *rest

    with monkeypatch.context() as patch:
        patch.setattr(cls, "_build_unified_sequence", without_padding)
        masked.check()
    for model in masked.models:
        model._build_unified_sequence = without_padding.__get__(model)
    masked.check()
    for model in masked.models:
        del model._build_unified_sequence
    assert lengths_and_biases(masked.injected, masked.arguments)[0] == 4


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_attention_with_another_mask(kernel, device):
    """What is compiled in part may be given any mask."""
    masked = Masked(kernel, device, "hunyuan_video")
    attention, _, exact = (model.transformer_blocks[0].attn for model in masked.models)
    tokens = [torch.randn(2, n, 128, device=device).bfloat16() for n in (6, 4)]
    mask = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1, 0], device=device).bool().expand(2, 1, 1, 10)
    attention = torch.compile(attention, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        outs = attention(*tokens, mask)
        expected = exact(*[x.double() for x in tokens], mask)
    for out, other in zip(outs, expected, strict=True):
        assert (out.double() - other).norm() < 0.02 * other.norm()


@pytest.mark.parametrize("seed", range(8))
def test_random_masks(kernel, device, seed):
    """``tests/random_masks.py`` tries more."""
    what, fault = random_masks.check(kernel, seed, device)
    assert fault in (None, random_masks.PLAIN_RAISES), f"{what}: {fault}"
