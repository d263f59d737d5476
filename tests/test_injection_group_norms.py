"""Group norms in models without a family: by themselves, and in diffusers' ResnetBlock2D."""

import copy

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.resnet import ResnetBlock2D
from torch import nn
from torch.nn.utils import parametrize

from changes import Wrap
from checks import operators_of, relative_distance, tensors_of
from injected_pairs import (
    assert_alike,
    assert_as_close_as_eager,
    assert_gradients_agree,
    assert_same_outcome,
    injected,
    outcome,
    reasons_of,
)
from ltx_models import kernel_calls

pytestmark = pytest.mark.usefixtures("_one_thread")

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
FIRST, LAST = torch.contiguous_format, torch.channels_last
CHANNELS, TIME = 16, 24
formats = pytest.mark.parametrize("memory_format", [FIRST, LAST], ids=str)
dtypes = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)


def resnet(device, dtype=FLOAT32, memory_format=FIRST, /, **config):
    """A block in which every parameter matters."""
    torch.manual_seed(3)
    options = {"in_channels": CHANNELS, "temb_channels": TIME, "groups": 4, **config}
    block = ResnetBlock2D(**options)
    for name, parameter in block.named_parameters():
        if "norm" in name and name.endswith("weight"):
            nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith("bias"):
            nn.init.normal_(parameter, std=0.5)
    return block.to(device, dtype, memory_format=memory_format).eval()


def picture(device, dtype=FLOAT32, memory_format=FIRST, channels=CHANNELS, seed=1):
    torch.manual_seed(seed)
    x = torch.randn(2, channels, 6, 8, device=device, dtype=dtype)
    return x.contiguous(memory_format=memory_format)


def arguments_of(block, memory_format=FIRST, seed=1):
    """An image, and a time embedding if the block has a projection for it."""
    weight = block.norm1.weight
    x = picture(weight.device, weight.dtype, memory_format, block.in_channels, seed)
    has_time = block.time_emb_proj is not None
    return x, torch.randn(2, TIME, device=x.device, dtype=x.dtype) if has_time else None


def resnet_pair(kernel, device, change=None, /, dtype=FLOAT32, memory_format=FIRST, **config):
    """(injected, plain, report, arguments)"""
    plain = resnet(device, dtype, memory_format, **config)
    arguments = arguments_of(plain, memory_format)
    return *injected(kernel, plain, change), arguments


@torch.no_grad()
def run(module, arguments):
    return module(*arguments)


def fell_back(report, name=""):
    return next(calls.fell_back for calls in report.calls if calls.name == name)


def count(report, name=""):
    return next(calls.on_kernels for calls in report.calls if calls.name == name)


NORMS = {
    "plain": lambda: nn.GroupNorm(4, CHANNELS),
    "eps": lambda: nn.GroupNorm(4, CHANNELS, eps=0.1),
    "without weight": lambda: nn.GroupNorm(4, CHANNELS, affine=False),
    "one group": lambda: nn.GroupNorm(1, CHANNELS),
    "one channel a group": lambda: nn.GroupNorm(CHANNELS, CHANNELS),
}


def norm_pair(kernel, device, make=NORMS["plain"], dtype=FLOAT32):
    torch.manual_seed(0)
    plain = nn.Sequential(make()).to(device, dtype)
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    return injected(kernel, plain)


@dtypes
@formats
@pytest.mark.parametrize("name", NORMS)
def test_a_norm(kernel, device, name, memory_format, dtype):
    model, plain, report = norm_pair(kernel, device, NORMS[name], dtype)
    assert [(entry.name, entry.replacement) for entry in report.replaced] == [("0", "group_norm")]
    x = picture(device, dtype, memory_format)
    with torch.no_grad():
        assert kernel_calls(model, x) == {"group_norm": 1}
        out, exact = model(x), copy.deepcopy(plain).float()(x.float())
        expected = plain(x)
        assert relative_distance(out, exact) <= max(1.05 * relative_distance(expected, exact), 1e-6)
    assert out.dtype == dtype and out.stride() == expected.stride()
    assert count(report, "0") == 2
    kernel.eject_kernels(model)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x)) and kernel_calls(model, x) == {}


LAYOUTS = {
    "two dimensions": lambda x: x.flatten(2).mean(2),
    "rows": lambda x: x.flatten(2),
    "rows of pixels": lambda x: x.permute(0, 2, 3, 1).flatten(1, 2).contiguous().transpose(1, 2),
    "a film": lambda x: x[:, :, None].expand(-1, -1, 3, -1, -1).contiguous(),
    "a film by frames": lambda x: torch.stack([x, 2 * x], 1).transpose(1, 2),
    "a part of the channels": lambda x: torch.cat([x, x], 1)[:, 3 : 3 + CHANNELS],
    "transposed": lambda x: x.transpose(2, 3),
    "every second pixel": lambda x: x[..., ::2],
    "expanded": lambda x: x[:, :, :1].expand(-1, -1, 5, -1),
    "nothing": lambda x: x[:0],
    "one sample's channels last": lambda x: (
        x[:1].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    ),
    "any stride of one sample": lambda x: (
        x[:1]
        .contiguous(memory_format=LAST)
        .as_strided((1, *x.shape[1:]), (1, 1, x.shape[1] * x.shape[3], x.shape[1]))
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_norm_of_other_layouts(kernel, device, name):
    """No fallbacks: tensors that the kernel does not take are copied, as PyTorch does."""
    model, plain, report = norm_pair(kernel, device)
    x = LAYOUTS[name](picture(device))
    with torch.no_grad():
        assert kernel_calls(model, x) == {"group_norm": 1}
        out, expected = model(x), plain(x)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert out.stride() == expected.stride() or not x.numel()
    assert fell_back(report, "0") == {}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_raises_what_its_class_raises(kernel, device, name):
    model, plain, _ = norm_pair(kernel, device, NORMS[name])
    for shape in ((2, 12, 3), (2, 15, 3), (CHANNELS,), (1, CHANNELS), (1, CHANNELS, 1, 1)):
        assert_same_outcome(model, plain, torch.randn(shape, device=device))
    x = picture(device)
    assert outcome(model[0], x, x).startswith("TypeError")


def test_what_a_norm_falls_back_for(kernel, device):
    """Counted, with the values of the class."""
    for dtype, dtype_of_x, reason in (
        (FLOAT32, FLOAT32, "autocast is on"),
        (torch.float64, torch.float64, "there are no kernels for float64"),
        (FLOAT32, BFLOAT16, "it was given tensors of different dtypes"),
    ):
        model, plain, report = norm_pair(kernel, device, dtype=dtype)
        with torch.autocast(device, dtype=BFLOAT16, enabled="autocast" in reason):
            assert_same_outcome(model, plain, picture(device).to(dtype_of_x), slack=0)
        assert fell_back(report, "0") == {reason: 1}


def test_a_norm_that_was_changed(kernel, device, monkeypatch):
    x = picture(device)
    model, plain, _ = norm_pair(kernel, device)
    for candidate in (model, plain):
        candidate[0].weight = nn.Parameter(torch.full((CHANNELS,), 3.0, device=device))
        candidate[0].eps = 0.5
        candidate[0].num_groups = 2
    assert_same_outcome(model, plain, x)
    for candidate in (model, plain):
        parametrize.register_parametrization(candidate[0], "weight", nn.Softplus())
    assert_same_outcome(model, plain, x)
    model, plain, report = norm_pair(kernel, device)
    own = F.group_norm
    monkeypatch.setattr(F, "group_norm", lambda *args: 0.5 * own(*args))
    assert_same_outcome(model, plain, x)
    assert fell_back(report, "0") == {"group_norm was replaced": 1}


def test_derivatives_of_a_norm(kernel, device):
    model, plain, report = norm_pair(kernel, device)
    assert_gradients_agree(model, plain, (picture(device).requires_grad_(),))
    assert fell_back(report, "0") == {}


RESNETS = {
    "plain": {},
    "wider": {"out_channels": 24},
    "without time": {"temb_channels": None},
    "without time, as in decoders": {"temb_channels": None, "time_embedding_norm": "group"},
    "activated time": {"skip_time_act": True},
    "up": {"up": True},
    "up by interpolation": {"up": True, "kernel": "sde_vp"},
    "down": {"down": True},
    "down by a filter": {"down": True, "kernel": "fir"},
    "other groups": {"groups_out": 8},
    "scaled": {"output_scale_factor": 2.5},
    "a shortcut without a bias": {"out_channels": 24, "conv_shortcut_bias": False},
}
LEFT_ALONE = {
    "its time embedding is not added: scale_shift": {"time_embedding_norm": "scale_shift"},
    "its activation is a torch.nn.modules.activation.Mish": {"non_linearity": "mish"},
    "its activation is a torch.nn.modules.activation.GELU": {"non_linearity": "gelu"},
}


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@formats
@pytest.mark.parametrize("name", RESNETS)
def test_a_resnet(kernel, device, name, memory_format, dtype):
    block, plain, report, arguments = resnet_pair(
        kernel, device, dtype=dtype, memory_format=memory_format, **RESNETS[name]
    )
    before = [x.clone() for x in tensors_of(arguments)]
    assert kernel_calls(run, block, arguments) == {"group_norm": 2}
    assert (count(report), fell_back(report)) == (1, {})
    assert all(torch.equal(*both) for both in zip(tensors_of(arguments), before, strict=True))
    if dtype == FLOAT32:
        assert_alike(block, plain, arguments, slack=3e-6, times=1)
    else:
        make = lambda _, seed: arguments_of(plain, memory_format, seed)  # noqa: E731
        assert_as_close_as_eager(block, plain, make)
    kernel.eject_kernels(block)
    assert torch.equal(run(block, arguments), run(plain, arguments))
    assert not any("forward" in vars(module) for module in block.modules())


@formats
def test_accuracy_far_from_zero(kernel, device, memory_format):
    """A time embedding and a bias much larger than the image, and a filter that adds up their errors."""

    def enlarge(block):
        block.time_emb_proj.weight.data *= 30
        block.conv1.bias.data *= 30
        weight = block.conv2.weight.data
        weight.copy_(weight.mean((2, 3), keepdim=True).expand_as(weight) * 3)

    config = {"in_channels": 32, "dtype": BFLOAT16, "memory_format": memory_format}
    block, plain, _, _ = resnet_pair(kernel, device, enlarge, **config)
    make = lambda _, seed: arguments_of(plain, memory_format, seed)  # noqa: E731
    assert_as_close_as_eager(block, plain, make)


def test_what_a_resnet_runs(kernel, device):
    """No pass over pixels for the activation, the bias, the time embedding or a scale of 1."""
    block, plain, _, arguments = resnet_pair(kernel, device)
    block.requires_grad_(False)
    assert kernel_calls(block, *arguments) == {"group_norm": 2}
    names = operators_of(block, *arguments)
    assert names.count("group_norm") == 2 and names.count("silu") == 1  # of the time embedding
    # The bias is added to the time embedding; the other one is the sum.
    assert "div" not in names and names.count("add") == 2
    plain_names = operators_of(plain, *arguments)
    assert plain_names.count("silu") == 3 and "div" in plain_names
    block.output_scale_factor = 2.0
    assert operators_of(block, *arguments).count("div") == 1


@pytest.mark.parametrize("reason", LEFT_ALONE)
def test_other_resnets_are_left_alone(kernel, device, reason):
    """Only their norms run on the kernel."""
    block, plain, report, arguments = resnet_pair(kernel, device, **LEFT_ALONE[reason])
    assert reasons_of(report) == {"": reason}
    assert [entry.name for entry in report.replaced] == ["norm1", "norm2"]
    assert kernel_calls(run, block, arguments) == {"group_norm": 2}
    assert_alike(block, plain, arguments)
    assert (count(report), fell_back(report)) == (0, {})


def test_time_embeddings_of_other_forms(kernel, device):
    block, plain, report, (x, temb) = resnet_pair(kernel, device)
    assert_alike(block, plain, (x, temb[:1]), times=1)  # one for all samples
    assert fell_back(report) == {}
    assert_alike(block, plain, (x[:1], temb), times=1)  # one picture, and several times
    reason = "the kernel does not support its time embedding's form"
    assert (count(report), fell_back(report)) == (1, {reason: 1})
    for wrong in (None, temb[None], temb[:, :-1]):
        assert isinstance(assert_same_outcome(block, plain, x, wrong), str)


def test_arguments_that_the_kernels_do_not_take(kernel, device):
    temb = torch.randn(2, CHANNELS, 1, 1, device=device)
    block, plain, report, (x, _) = resnet_pair(kernel, device, temb_channels=None)
    assert_alike(block, plain, (x, temb), times=1)
    reasons = {"it has no projection for the time embedding that it was given": 1}
    assert fell_back(report) == reasons
    # The class takes an image without a batch dimension, with its rows as channels, if their number fits.
    assert_alike(block, plain, (torch.randn(CHANNELS, CHANNELS, 5, device=device), None), times=1)
    reasons["it was given a tensor of 3 dimensions"] = 1
    assert fell_back(report) == reasons
    for candidate in (block, plain):
        with pytest.warns(FutureWarning, match="`scale` argument is deprecated"), torch.no_grad():
            candidate(x, None, scale=1.0)
    reasons["it was given more than an input and a time embedding"] = 1
    assert fell_back(report) == reasons
    with torch.autocast(device, dtype=BFLOAT16):
        assert kernel_calls(run, block, (x, None)) == {}
        assert torch.equal(run(block, (x, None)), run(plain, (x, None)))
    assert fell_back(report) == {**reasons, "autocast is on": 2}
    config = {"temb_channels": None, "time_embedding_norm": "group"}
    block, plain, report, (x, _) = resnet_pair(kernel, device, **config)
    assert torch.equal(run(block, (x, temb)), run(block, (x, None)))
    assert_alike(block, plain, (x, temb), times=1)
    assert count(report) == 3


class HalvedNorm(nn.GroupNorm):
    def forward(self, x):
        return 0.5 * super().forward(x)


CHANGES = {  # the path of the change, the new value, and why the block's own code then runs
    "norm1": ("norm1", lambda old: HalvedNorm(4, CHANNELS), f"norm1 is a {__name__}.HalvedNorm"),
    "norm2": ("norm2", lambda old: HalvedNorm(4, CHANNELS), f"norm2 is a {__name__}.HalvedNorm"),
    "identity": ("norm2", lambda old: nn.Identity(), "norm2 is a torch.nn.modules.linear.Identity"),
    "activation": (
        "nonlinearity",
        lambda old: nn.Tanh(),
        "its activation is a torch.nn.modules.activation.Tanh",
    ),
    "activation in place": (
        "nonlinearity",
        lambda old: nn.SiLU(inplace=True),
        "its activation writes in place",
    ),
    "conv1": ("conv1", Wrap, None),
    "conv2": ("conv2", lambda old: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=4), None),
    "time_emb_proj": ("time_emb_proj", lambda old: nn.Sequential(old, nn.Tanh()), None),
    "dropout": ("dropout", lambda old: nn.Tanh(), None),
    "eps": ("norm2.eps", lambda old: 0.3, None),
    "groups": ("norm1.num_groups", lambda old: 2, None),
    "stride": ("conv2.stride", lambda old: (2, 2), None),
    "padding": ("conv1.padding_mode", lambda old: "circular", None),
    **{
        name: (name, lambda old: nn.Parameter(torch.ones_like(old)), None)
        for name in ("conv1.weight", "conv1.bias", "norm1.weight", "norm2.bias", "conv2.bias")
    },
}


@pytest.mark.parametrize("case", CHANGES)
def test_changes_after_the_injection(kernel, device, case):
    path, make, reason = CHANGES[case]
    owner, _, name = path.rpartition(".")

    def change(block):
        torch.manual_seed(5)
        module = block.get_submodule(owner)
        made = make(getattr(module, name))
        setattr(module, name, made.to(device).eval() if isinstance(made, nn.Module) else made)
        if case == "padding":
            block.conv1._reversed_padding_repeated_twice = [1, 1, 1, 1]
        elif case == "stride":
            block.conv_shortcut.stride = (2, 2)

    config = {"out_channels": 24} if case == "stride" else {}
    block, plain, report, arguments = resnet_pair(kernel, device, **config)
    untouched = run(block, arguments)
    for candidate in (block, plain):
        change(candidate)
    expected, out = (run(c, [x.clone() for x in arguments]) for c in (plain, block))
    assert relative_distance(out, expected) < 3e-6
    assert fell_back(report) == ({} if reason is None else {reason: 1})
    if case not in ("conv1", "activation in place", "stride"):
        assert relative_distance(expected, untouched) > 0.003


def test_channels_last_after_injection(kernel, device):
    block, plain, report, (x, temb) = resnet_pair(kernel, device, out_channels=24)
    block.to(memory_format=LAST)
    out = run(block, (x.contiguous(memory_format=LAST), temb))
    assert relative_distance(out, run(plain, (x, temb))) < 3e-6 and out.is_contiguous(
        memory_format=LAST
    )
    assert (count(report), fell_back(report)) == (1, {})


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_convolution_of_another_dtype_raises_what_its_class_raises(kernel, device, name):
    def change(block):
        setattr(block.conv1, name, nn.Parameter(getattr(block.conv1, name).float()))

    block, plain, _, arguments = resnet_pair(kernel, device, change, dtype=BFLOAT16)
    assert isinstance(assert_same_outcome(block, plain, *arguments), str)


def test_dropout_in_training_without_gradients(kernel, device):
    block, plain, report, arguments = resnet_pair(kernel, device, dropout=0.5, out_channels=24)
    untouched = run(block, arguments)
    outs = []
    for candidate in (block, plain):
        candidate.train()
        torch.manual_seed(6)
        outs.append(run(candidate, arguments))
    assert relative_distance(*outs) < 3e-6 and relative_distance(outs[1], untouched) > 0.1
    assert count(report) == 2


@pytest.mark.parametrize("what", ["everything", "the picture", "the time embedding", "a weight"])
def test_gradients(kernel, device, what):
    block, plain, report, (x, temb) = resnet_pair(kernel, device, out_channels=24)
    for candidate in (block, plain):
        candidate.requires_grad_(what == "everything")
        candidate.conv1.bias.requires_grad_(what in ("everything", "a weight"))
    x.requires_grad_(what == "the picture")
    temb.requires_grad_(what == "the time embedding")
    assert_gradients_agree(block, plain, (x, temb))
    assert fell_back(report) == {}


def test_derivatives_by_transforms(kernel, device):
    """Backward and forward mode for weights given in a call, and vmap over images."""
    block, plain, report, (x, temb) = resnet_pair(kernel, device, out_channels=24)
    weights = {name: p.detach() for name, p in plain.named_parameters()}
    tangents = {name: torch.randn_like(p) for name, p in weights.items()}
    pictures = torch.stack([x, x.flip(0), 2 * x])
    results = []
    for candidate in (block, plain):

        def loss(weights, candidate=candidate):
            return torch.func.functional_call(candidate, weights, (x, temb)).square().mean()

        gradients = torch.func.grad(loss)(weights)
        tangent = torch.func.jvp(loss, (weights,), (tangents,))[1]
        with torch.no_grad():
            mapped = torch.vmap(lambda y, c=candidate: c(y, temb))(pictures)
        results.append([mapped, tangent, *(gradients[name] for name in weights)])
    for mine, expected in zip(*results, strict=True):
        assert expected.any()
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4 * expected.abs().max())
    assert fell_back(report) == {}
