"""diffusers' Transformer2DModel in UNets: channels last in, channels last out."""

import copy

import pytest
import torch
from diffusers import Transformer2DModel
from torch import nn

from graphs import Pair, graphs  # noqa: F401
from small_models import BY_NAME

pytestmark = pytest.mark.usefixtures("_one_thread")

LAST, FIRST = torch.channels_last, torch.contiguous_format
projections = pytest.mark.parametrize("use_linear_projection", [False, True])
OUTPUT = "_get_output_for_continuous_inputs"


def transformer(device, memory_format=LAST, /, **config):
    torch.manual_seed(0)
    model = Transformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=16,
        norm_num_groups=4,
        cross_attention_dim=12,
        **config,
    )
    return model.to(device, memory_format=memory_format).eval()


def arguments_of(device, memory_format=LAST):
    torch.manual_seed(1)
    image = torch.randn(2, 16, 6, 8, device=device).contiguous(memory_format=memory_format)
    return {
        "hidden_states": image,
        "encoder_hidden_states": torch.randn(2, 5, 12, device=device),
        "return_dict": False,
    }


@torch.no_grad()
def run(model, arguments):
    return model(**arguments)[0]


def calls_of(report):
    return next(calls for calls in report.calls if calls.module == "Transformer2DModel")


@projections
@pytest.mark.parametrize("memory_format", [LAST, FIRST], ids=str)
def test_the_format_is_kept(kernel, device, use_linear_projection, memory_format):
    plain = transformer(device, memory_format, use_linear_projection=use_linear_projection)
    model = copy.deepcopy(plain)
    report = kernel.inject_kernels(model)
    arguments = arguments_of(device, memory_format)
    out, expected = run(model, arguments), run(plain, arguments)
    assert out.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert calls_of(report).on_kernels == (memory_format is LAST)
    assert not calls_of(report).fell_back
    kernel.eject_kernels(model)
    assert torch.equal(run(model, arguments), expected)


def test_other_ways_to_call_it(kernel, device):
    plain = transformer(device)
    model = copy.deepcopy(plain)
    kernel.inject_kernels(model)
    arguments = arguments_of(device)
    image = arguments.pop("hidden_states")
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], device=device)
    with torch.no_grad():
        out = model(image, encoder_attention_mask=mask, **arguments)[0]
        expected = plain(image, encoder_attention_mask=mask, **arguments)[0]
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        arguments["return_dict"] = True
        out = model(image, **arguments).sample
        torch.testing.assert_close(out, plain(image, **arguments).sample, rtol=1e-4, atol=1e-5)


def test_hooks_on_the_projection_see_it(kernel, device):
    model = transformer(device, use_linear_projection=True)
    kernel.inject_kernels(model)
    before = run(model, arguments_of(device))
    image = arguments_of(device)["hidden_states"]
    hook = model.proj_out.register_forward_hook(lambda module, args, out: out * 0)
    assert torch.equal(run(model, arguments_of(device)), image)
    hook.remove()
    assert torch.equal(run(model, arguments_of(device)), before)


@pytest.mark.parametrize("where", ["class", "module"])
def test_another_method_of_the_users_is_called(kernel, device, monkeypatch, where):
    model = transformer(device)
    report = kernel.inject_kernels(model)

    def zeros(*args, residual, **kwargs):
        return torch.zeros_like(residual)

    monkeypatch.setattr(Transformer2DModel if where == "class" else model, OUTPUT, zeros)
    assert not run(model, arguments_of(device)).any()
    assert calls_of(report).fell_back == {f"{OUTPUT} was replaced": 1}


def test_subclasses_are_left_alone(kernel, device):
    class Other(Transformer2DModel):
        pass

    model = nn.Sequential(transformer(device))
    model[0].__class__ = Other
    report = kernel.inject_kernels(model)
    assert "Other" not in [entry.module for entry in report.replaced]


def test_gradients(kernel, device):
    plain = transformer(device)
    model = copy.deepcopy(plain)
    kernel.inject_kernels(model)
    results = []
    for candidate in (model, plain):
        arguments = arguments_of(device)
        image = arguments["hidden_states"].requires_grad_()
        candidate(**arguments)[0].square().sum().backward()
        results.append([image.grad, *(p.grad for p in candidate.parameters())])
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-4)


def test_compiled(kernel, device):
    model = transformer(device)
    kernel.inject_kernels(model)
    expected = run(model, arguments_of(device))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    out = run(compiled, arguments_of(device))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


class _Unet:
    """A UNet with channels last, as a family of the tests."""

    name, small = "unet_of_sdxl", BY_NAME["unet_of_sdxl"]

    def model(self, device, dtype):
        return self.small.model(device, dtype).to(memory_format=LAST)

    def inputs(self, device, dtype, seed):
        return self.small.arguments(device, dtype, seed)


def test_cuda_graphs(graphs, device):  # noqa: F811
    pair = Pair(graphs, _Unet(), device)
    pair.captured()
    pair.both(lambda model: model.down_blocks[-1].attentions[0].proj_out.weight.data.mul_(2))
    pair.call()
