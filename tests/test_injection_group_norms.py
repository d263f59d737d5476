"""Group norms in models without a family: by themselves, and in diffusers' ResnetBlock2D."""

import copy

import accelerate
import diffusers
import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import remove_hook_from_submodules
from diffusers.models.resnet import ResnetBlock2D
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import parametrize

from checks import operators_of, tensors_of
from foreign_modules import Wrap
from graphs import Pair, graphs  # noqa: F401
from injected_pairs import distance
from ltx_models import either_order, kernel_calls
from small_models import BY_NAME

pytestmark = pytest.mark.usefixtures("_one_thread")

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
CHANNELS, TIME = 16, 24
formats = pytest.mark.parametrize(
    "memory_format", [torch.contiguous_format, torch.channels_last], ids=str
)
dtypes = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)


def resnet(device, dtype=FLOAT32, memory_format=torch.contiguous_format, /, **config):
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


def picture(
    device, dtype=FLOAT32, memory_format=torch.contiguous_format, channels=CHANNELS, seed=1
):
    torch.manual_seed(seed)
    x = torch.randn(2, channels, 6, 8, device=device, dtype=dtype)
    return x.contiguous(memory_format=memory_format)


def arguments_of(block, memory_format=torch.contiguous_format, seed=1):
    """A picture, and a time embedding if the block has a projection of it."""
    weight = block.conv1.weight if hasattr(block.conv1, "weight") else block.conv2.weight
    x = picture(weight.device, weight.dtype, memory_format, block.in_channels, seed)
    has_time = block.time_emb_proj is not None
    return x, torch.randn(2, TIME, device=x.device, dtype=x.dtype) if has_time else None


def resnet_pair(kernel, device, dtype=FLOAT32, memory_format=torch.contiguous_format, /, **config):
    """(injected, plain, report, arguments)"""
    plain = resnet(device, dtype, memory_format, **config)
    block = copy.deepcopy(plain)
    return block, plain, kernel.inject_kernels(block), arguments_of(plain, memory_format)


@torch.no_grad()
def run(module, arguments):
    return module(*arguments)


def calls_of(report, name):
    return next(calls for calls in report.calls if calls.name == name)


def assert_as_close_as_eager(block, plain, memory_format):
    exact = copy.deepcopy(plain).float()
    errors = torch.zeros(2, dtype=torch.float64)
    for seed in range(8):
        arguments = arguments_of(plain, memory_format, seed)
        expected = run(exact, [x if x is None else x.float() for x in arguments]).double()
        for i, module in enumerate((block, plain)):
            errors[i] += (run(module, arguments).double() - expected).square().sum().cpu()
    error, eager_error = errors.sqrt().tolist()
    assert eager_error > 0
    assert error <= 1.05 * eager_error, f"{error / eager_error:.3f} of the eager block's"


def assert_alike(block, plain, arguments, slack=3e-6):
    assert distance(run(block, arguments), run(plain, arguments)) < slack


# --------------------------------------------------------------------------------------------------
# torch.nn.GroupNorm by itself

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
    model = copy.deepcopy(plain)
    return model, plain, kernel.inject_kernels(model)


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
        assert distance(out, exact) <= max(1.05 * distance(plain(x), exact), 1e-6)
    assert out.dtype == dtype and out.is_contiguous(memory_format=memory_format)
    assert calls_of(report, "0").on_kernels == 2
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
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_norm_of_other_layouts(kernel, device, name):
    """None is a fall-back: where the kernel does not take it, PyTorch copies it, too."""
    model, plain, report = norm_pair(kernel, device)
    x = LAYOUTS[name](picture(device))
    with torch.no_grad():
        assert kernel_calls(model, x) == {"group_norm": 1}
        torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)
    assert calls_of(report, "0").fell_back == {}


def outcome(module, *args):
    try:
        with torch.no_grad():
            return module(*args)
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def test_what_a_norm_refuses_is_refused_as_by_the_class(kernel, device):
    for make in NORMS.values():
        model, plain, _ = norm_pair(kernel, device, make)
        for shape in ((2, 12, 3), (2, 15, 3), (CHANNELS,), (1, CHANNELS), (1, CHANNELS, 1, 1)):
            x = torch.randn(shape, device=device)
            mine, expected = outcome(model, x), outcome(plain, x)
            if isinstance(expected, str):
                assert mine == expected
            else:
                torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
        assert outcome(model[0], x, x).startswith("TypeError")


def test_what_a_norm_falls_back_for(kernel, device):
    """Counted, with the values of the class."""
    x = picture(device)
    model, plain, report = norm_pair(kernel, device)
    with torch.autocast(device, dtype=BFLOAT16), torch.no_grad():
        assert torch.equal(model(x), plain(x))
    assert calls_of(report, "0").fell_back == {"autocast is on": 1}
    model, plain, report = norm_pair(kernel, device, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(model(x.double()), plain(x.double()))
    assert calls_of(report, "0").fell_back == {"there are no kernels for float64": 1}
    model, plain, report = norm_pair(kernel, device)
    mine, expected = outcome(model, x.bfloat16()), outcome(plain, x.bfloat16())
    assert type(mine) is type(expected)
    assert mine == expected if isinstance(mine, str) else torch.equal(mine, expected)
    reasons = {"it was given tensors of different dtypes": 1}
    assert calls_of(report, "0").fell_back == reasons


def test_a_norm_that_was_changed(kernel, device, monkeypatch):
    x = picture(device)
    model, plain, report = norm_pair(kernel, device)

    def alike():
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)

    for candidate in (model, plain):
        candidate[0].weight = nn.Parameter(torch.full((CHANNELS,), 3.0, device=device))
        candidate[0].eps = 0.5
        candidate[0].num_groups = 2
    alike()
    for candidate in (model, plain):
        parametrize.register_parametrization(candidate[0], "weight", nn.Softplus())
    alike()
    model, plain, report = norm_pair(kernel, device)
    own = F.group_norm
    monkeypatch.setattr(F, "group_norm", lambda *args: 0.5 * own(*args))
    alike()
    assert calls_of(report, "0").fell_back == {"group_norm was replaced": 1}


def test_gradients_of_a_norm(kernel, device):
    model, plain, report = norm_pair(kernel, device)
    x, y = (picture(device).requires_grad_() for _ in range(2))
    model(x).square().sum().backward()
    plain(y).square().sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert torch.equal(model[0].weight.grad, plain[0].weight.grad)
    assert calls_of(report, "0").on_kernels == 0 and calls_of(report, "0").fell_back == {}


@torch.no_grad()
def test_a_norm_under_vmap(kernel, device):
    model, plain, _ = norm_pair(kernel, device)
    x = torch.stack([picture(device, seed=seed) for seed in range(3)])
    for dim in range(2):
        out = torch.vmap(model, in_dims=dim)(x.movedim(0, dim))
        torch.testing.assert_close(out, torch.stack([plain(s) for s in x]), rtol=1e-5, atol=1e-5)


# --------------------------------------------------------------------------------------------------
# Resnets

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
    "its time embedding goes another way: scale_shift": {"time_embedding_norm": "scale_shift"},
    "its activation is a torch.nn.modules.activation.Mish": {"non_linearity": "mish"},
    "its activation is a torch.nn.modules.activation.GELU": {"non_linearity": "gelu"},
}


@dtypes
@formats
@pytest.mark.parametrize("name", RESNETS)
def test_a_resnet(kernel, device, name, memory_format, dtype):
    config = RESNETS[name]
    block, plain, report, arguments = resnet_pair(kernel, device, dtype, memory_format, **config)
    before = [x.clone() for x in tensors_of(arguments)]
    assert kernel_calls(run, block, arguments) == {"group_norm": 2}
    assert calls_of(report, "").on_kernels == 1 and calls_of(report, "").fell_back == {}
    out, expected = run(block, arguments), run(plain, arguments)
    assert out.dtype == expected.dtype and out.shape == expected.shape
    assert all(torch.equal(*both) for both in zip(tensors_of(arguments), before, strict=True))
    if dtype == FLOAT32:
        assert distance(out, expected) < 3e-6
    else:
        assert_as_close_as_eager(block, plain, memory_format)
    kernel.eject_kernels(block)
    assert torch.equal(run(block, arguments), expected)
    assert not any("forward" in vars(module) for module in block.modules())


@formats
def test_what_is_smooth_and_far_from_zero_is_as_accurate(kernel, device, memory_format):
    """A time embedding and a bias much larger than the picture, and a filter that adds up their errors."""
    config = {"in_channels": 32, "groups": 4}
    block, plain, _, _ = resnet_pair(kernel, device, BFLOAT16, memory_format, **config)
    for candidate in (block, plain):
        candidate.time_emb_proj.weight.data *= 30
        candidate.conv1.bias.data *= 30
        weight = candidate.conv2.weight.data
        weight.copy_(weight.mean((2, 3), keepdim=True).expand_as(weight) * 3)
    assert_as_close_as_eager(block, plain, memory_format)


def test_what_a_resnet_runs(kernel, device):
    """No pass over pixels for the activation, the bias, the time embedding or a scale of 1."""
    block, plain, _, arguments = resnet_pair(kernel, device)
    names = operators_of(block, *arguments)
    assert names.count("group_norm") == 2 and names.count("silu") == 1  # of the time embedding
    assert (
        "div" not in names and names.count("add") == 2
    )  # the bias to the time embedding, and the sum
    plain_names = operators_of(plain, *arguments)
    assert plain_names.count("silu") == 3 and "div" in plain_names
    block.output_scale_factor = 2.0
    assert operators_of(block, *arguments).count("div") == 1


def test_channels_last_after_injection(kernel, device):
    block, plain, report, (x, temb) = resnet_pair(kernel, device, out_channels=24)
    expected = run(block, (x, temb))
    block.to(memory_format=torch.channels_last)
    x = x.contiguous(memory_format=torch.channels_last)
    out = run(block, (x, temb))
    assert distance(out, expected) < 3e-6 and out.is_contiguous(memory_format=torch.channels_last)
    assert calls_of(report, "").on_kernels == 2 and calls_of(report, "").fell_back == {}


@pytest.mark.parametrize("reason", LEFT_ALONE)
def test_other_resnets_are_left_alone(kernel, device, reason):
    """But for their norms."""
    block, plain, report, arguments = resnet_pair(kernel, device, **LEFT_ALONE[reason])
    assert [(entry.name, entry.reason) for entry in report.left_alone] == [("", reason)]
    assert [entry.name for entry in report.replaced] == ["norm1", "norm2"]
    assert kernel_calls(run, block, arguments) == {"group_norm": 2}
    assert_alike(block, plain, arguments)
    assert calls_of(report, "").fell_back == {} and calls_of(report, "").on_kernels == 0


def test_time_embeddings_of_other_forms(kernel, device):
    block, plain, report, (x, temb) = resnet_pair(kernel, device)
    assert_alike(block, plain, (x, temb[:1]))  # one for all samples
    assert calls_of(report, "").fell_back == {}
    assert_alike(block, plain, (x[:1], temb))  # one picture, and several times
    assert calls_of(report, "").fell_back == {
        "its time embedding has another form than the kernel knows": 1
    }
    assert calls_of(report, "").on_kernels == 1
    for wrong in (None, temb[None], temb[:, :-1]):
        assert isinstance(outcome(plain, x, wrong), str)
        assert outcome(block, x, wrong) == outcome(plain, x, wrong)


def test_a_time_embedding_without_a_projection(kernel, device):
    block, plain, report, (x, _) = resnet_pair(kernel, device, temb_channels=None)
    temb = torch.randn(2, CHANNELS, 1, 1, device=device)
    assert_alike(block, plain, (x, temb))
    reason = "it has no projection for the time embedding that it was given"
    assert calls_of(report, "").fell_back == {reason: 1}
    block, plain, report, (x, _) = resnet_pair(
        kernel, device, temb_channels=None, time_embedding_norm="group"
    )
    assert torch.equal(run(block, (x, temb)), run(block, (x, None)))
    assert_alike(block, plain, (x, temb))
    assert calls_of(report, "").on_kernels == 3


def test_a_picture_without_a_batch(kernel, device):
    """Which the class takes, its rows as channels, where there are as many."""
    block, plain, report, _ = resnet_pair(kernel, device, temb_channels=None)
    x = torch.randn(CHANNELS, CHANNELS, 5, device=device)
    assert_alike(block, plain, (x, None))
    assert calls_of(report, "").fell_back == {"it was given a tensor of 3 dimensions": 1}


def test_further_arguments(kernel, device):
    block, plain, report, arguments = resnet_pair(kernel, device)
    for candidate in (block, plain):
        with pytest.warns(FutureWarning, match="`scale` argument is deprecated"), torch.no_grad():
            out = candidate(*arguments, scale=1.0)
    assert out.shape == arguments[0].shape
    reason = "it was given more than an input and a time embedding"
    assert calls_of(report, "").fell_back == {reason: 1}


def test_autocast_runs_the_classs_own_code(kernel, device):
    block, plain, report, arguments = resnet_pair(kernel, device)
    with torch.autocast(device, dtype=BFLOAT16):
        assert kernel_calls(run, block, arguments) == {}
        assert torch.equal(run(block, arguments), run(plain, arguments))
    assert calls_of(report, "").fell_back == {"autocast is on": 2}


# --------------------------------------------------------------------------------------------------
# What is put around or in the place of its parts


def doubled(module, args, output):
    return 2 * output


HOOKED = {  # whether the block's own code runs then
    "": False,
    "norm1": True,
    "norm2": True,
    "nonlinearity": True,
    "conv1": False,
    "conv2": False,
    "conv_shortcut": False,
    "time_emb_proj": False,
    "dropout": False,
    "upsample": False,
}


@pytest.mark.parametrize("path", HOOKED)
@either_order
def test_hooks(kernel, device, path, is_injected_first):
    plain = resnet(device, out_channels=24, up=True)
    block, arguments = copy.deepcopy(plain), arguments_of(plain)
    untouched = run(plain, arguments)
    if is_injected_first:
        kernel.inject_kernels(block)
        run(block, arguments)
    handles = [c.get_submodule(path).register_forward_hook(doubled) for c in (block, plain)]
    report = kernel.inject_kernels(block)
    assert_alike(block, plain, arguments)
    if path != "dropout":
        assert distance(run(plain, arguments), untouched) > 0.01
    counted = calls_of(report, "")
    said = {**counted.fell_back, **{entry.reason: 1 for entry in report.left_alone}}
    assert any("hooks" in reason for reason in said) == HOOKED[path]
    for handle in handles:
        handle.remove()
    before = calls_of(report, "").on_kernels
    assert distance(run(block, arguments), untouched) < 3e-6
    assert calls_of(report, "").on_kernels == before + 1


def test_hooks_of_all_modules_see_the_same_modules(kernel, device):
    block, plain, _, arguments = resnet_pair(kernel, device, out_channels=24, up=True)
    seen = []
    for candidate in (block, plain):
        names = {module: name for name, module in candidate.named_modules()}
        calls = []
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, *_, calls=calls, names=names: calls.append(names[module])
        )
        try:
            run(candidate, arguments)
        finally:
            handle.remove()
        seen.append(calls)
    assert seen[0] == seen[1] and "norm1" in seen[0]


@pytest.mark.parametrize("target", ["conv1", "time_emb_proj", "conv2", "conv_shortcut"])
@either_order
def test_lora(kernel, device, target, is_injected_first):
    plain = resnet(device, out_channels=24)
    block, arguments = copy.deepcopy(plain), arguments_of(plain)
    untouched = run(plain, arguments)
    if is_injected_first:
        kernel.inject_kernels(block)
        run(block, arguments)
    for candidate in (block, plain):
        torch.manual_seed(4)
        config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=[target])
        inject_adapter_in_model(config, candidate)
    report = kernel.inject_kernels(block)
    assert kernel_calls(run, block, arguments) == {"group_norm": 2}
    assert_alike(block, plain, arguments)
    assert distance(run(plain, arguments), untouched) > 0.01
    assert calls_of(report, "").fell_back == {}


@either_order
def test_offloading(kernel, device, is_injected_first):
    """Each layer's weights come for its call alone: the norms run on the kernel one by one."""
    plain = resnet(device, out_channels=24)
    block, arguments = copy.deepcopy(plain), arguments_of(plain)
    if is_injected_first:
        kernel.inject_kernels(block)
        run(block, arguments)
    accelerate.cpu_offload(block, execution_device=torch.device(device), offload_buffers=False)
    report = kernel.inject_kernels(block)
    assert kernel_calls(run, block, arguments) == {"group_norm": 2}
    assert_alike(block, plain, arguments)
    assert block.norm1.weight.is_meta
    remove_hook_from_submodules(block)
    kernel.eject_kernels(block)
    assert torch.equal(run(block.to(device), arguments), run(plain, arguments))
    assert report.calls


class HalvedNorm(nn.GroupNorm):
    def forward(self, x):
        return 0.5 * super().forward(x)


REPLACED = {
    f"norm1 is a {__name__}.HalvedNorm": ("norm1", lambda old: HalvedNorm(4, old.num_channels)),
    f"norm2 is a {__name__}.HalvedNorm": ("norm2", lambda old: HalvedNorm(4, old.num_channels)),
    "norm2 is a torch.nn.modules.linear.Identity": ("norm2", lambda old: nn.Identity()),
    "its activation is a torch.nn.modules.activation.Tanh": ("nonlinearity", lambda old: nn.Tanh()),
    "its activation writes in place": ("nonlinearity", lambda old: nn.SiLU(inplace=True)),
    "conv1": ("conv1", lambda old: Wrap(old)),
    "conv2": ("conv2", lambda old: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=4)),
    "time_emb_proj": ("time_emb_proj", lambda old: nn.Sequential(old, nn.Tanh())),
    "dropout": ("dropout", lambda old: nn.Tanh()),
}


@pytest.mark.parametrize("case", REPLACED)
def test_parts_that_are_replaced_after_injection(kernel, device, case):
    name, make = REPLACED[case]
    block, plain, report, arguments = resnet_pair(kernel, device)
    untouched = run(block, arguments)
    for candidate in (block, plain):
        torch.manual_seed(5)
        setattr(candidate, name, make(getattr(candidate, name)).to(device).eval())
    arguments = [x.clone() for x in arguments]
    out = run(block, [x.clone() for x in arguments])
    assert distance(out, run(plain, arguments)) < 3e-6
    assert calls_of(report, "").fell_back == ({} if case == name else {case: 1})
    assert case in ("conv1", "its activation writes in place") or distance(out, untouched) > 0.01


def test_weights_that_are_replaced_or_written_after_injection(kernel, device):
    block, plain, report, arguments = resnet_pair(kernel, device, out_channels=24)
    for name, parameter in list(plain.named_parameters()):
        untouched = run(block, arguments)
        path, _, attribute = name.rpartition(".")
        values = torch.randn_like(parameter)
        for candidate, writes in ((block, name.endswith("bias")), (plain, True)):
            if writes:
                candidate.get_parameter(name).data.copy_(values)
            else:
                setattr(candidate.get_submodule(path), attribute, nn.Parameter(values.clone()))
        assert_alike(block, plain, arguments)
        assert distance(run(block, arguments), untouched) > 1e-3, name
    for candidate in (block, plain):
        candidate.norm2.eps, candidate.norm1.num_groups = 0.3, 2
        candidate.conv1.stride = candidate.conv_shortcut.stride = (2, 2)
    assert_alike(block, plain, arguments)
    assert calls_of(report, "").fell_back == {}


def test_another_padding_is_the_modules_own(kernel, device):
    block, plain, report, arguments = resnet_pair(kernel, device)
    untouched = run(plain, arguments)
    for candidate in (block, plain):
        candidate.conv1.padding_mode = "circular"
        candidate.conv1._reversed_padding_repeated_twice = [1, 1, 1, 1]
    assert_alike(block, plain, arguments)
    assert distance(run(plain, arguments), untouched) > 0.01
    assert kernel_calls(run, block, arguments) == {"group_norm": 2}


@pytest.mark.parametrize("name", ["conv2d", "group_norm", "silu", "linear"])
def test_functions_of_pytorch_that_are_replaced(kernel, device, monkeypatch, name):
    block, plain, report, arguments = resnet_pair(kernel, device)
    untouched = run(block, arguments)
    own = getattr(F, name)
    monkeypatch.setattr(F, name, lambda *args, **kwargs: 0.5 * own(*args, **kwargs))
    assert_alike(block, plain, arguments)
    assert distance(run(plain, arguments), untouched) > 0.01
    monkeypatch.undo()
    assert distance(run(block, arguments), untouched) == 0


@pytest.mark.parametrize("cls", [nn.Conv2d, nn.GroupNorm, nn.SiLU, nn.Linear, ResnetBlock2D])
def test_patched_classes(kernel, device, monkeypatch, cls):
    block, plain, report, arguments = resnet_pair(kernel, device)
    untouched = run(block, arguments)
    own = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, *args: 0.5 * own(self, *args))
    assert_alike(block, plain, arguments)
    assert distance(run(plain, arguments), untouched) > 0.01


def test_a_convolution_of_another_dtype_is_refused_as_by_the_class(kernel, device):
    for name in ("weight", "bias"):
        block, plain, _, arguments = resnet_pair(kernel, device, BFLOAT16)
        for candidate in (block, plain):
            values = getattr(candidate.conv1, name).float()
            setattr(candidate.conv1, name, nn.Parameter(values))
        assert isinstance(outcome(plain, *arguments), str)
        assert outcome(block, *arguments) == outcome(plain, *arguments)


# --------------------------------------------------------------------------------------------------
# Training, compilation, graphs


def test_dropout_in_training_without_gradients(kernel, device):
    block, plain, report, arguments = resnet_pair(kernel, device, dropout=0.5, out_channels=24)
    untouched = run(block, arguments)
    outs = []
    for candidate in (block, plain):
        candidate.train()
        torch.manual_seed(6)
        outs.append(run(candidate, arguments))
    assert distance(*outs) < 3e-6 and distance(outs[1], untouched) > 0.1
    assert calls_of(report, "").on_kernels == 2


@pytest.mark.parametrize("what", ["everything", "the picture", "the time embedding", "a weight"])
def test_gradients(kernel, device, what):
    block, plain, report, arguments = resnet_pair(kernel, device, out_channels=24)
    gradients = []
    for candidate in (block, plain):
        x, temb = (argument.clone() for argument in arguments)
        candidate.requires_grad_(what == "everything")
        wanted = {
            "everything": [*candidate.parameters()],
            "the picture": [x],
            "the time embedding": [temb],
            "a weight": [candidate.conv1.bias],
        }[what]
        for tensor in wanted:
            tensor.requires_grad_()
        candidate(x, temb).square().sum().backward()
        gradients.append([tensor.grad for tensor in wanted])
    for mine, expected in zip(*gradients, strict=True):
        assert expected.any()
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4 * expected.abs().max())
    assert calls_of(report, "").on_kernels == 0 and calls_of(report, "").fell_back == {}


def test_grad_mode_without_anything_that_requires_grad(kernel, device):
    block, plain, report, arguments = resnet_pair(kernel, device)
    block.requires_grad_(False)
    assert kernel_calls(block, *arguments) == {"group_norm": 2}


def test_derivatives_by_transforms(kernel, device):
    """Of weights that are given for a call, backward and forward."""
    block, plain, report, (x, temb) = resnet_pair(kernel, device, out_channels=24)
    weights = {name: p.detach() for name, p in plain.named_parameters()}
    tangents = {name: torch.randn_like(p) for name, p in weights.items()}
    results = []
    for candidate in (block, plain):

        def loss(weights, candidate=candidate):
            return torch.func.functional_call(candidate, weights, (x, temb)).square().mean()

        gradients = torch.func.grad(loss)(weights)
        tangent = torch.func.jvp(loss, (weights,), (tangents,))[1]
        results.append([tangent, *(gradients[name] for name in weights)])
    for mine, expected in zip(*results, strict=True):
        assert expected.any()
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4 * expected.abs().max())
    assert calls_of(report, "").fell_back == {}
    assert_alike(block, plain, (x, temb))


@torch.no_grad()
def test_vmap(kernel, device):
    block, plain, _, (x, temb) = resnet_pair(kernel, device)
    pictures = torch.stack([x, x.flip(0), 2 * x])
    out = torch.vmap(lambda y: block(y, temb))(pictures)
    assert distance(out, torch.stack([plain(y, temb) for y in pictures])) < 3e-6


@pytest.mark.usefixtures("_fresh_compiler")
@formats
def test_compiled(kernel, device, memory_format):
    block, plain, _, arguments = resnet_pair(kernel, device, FLOAT32, memory_format)
    counter = CompileCounterWithBackend("eager")
    block.compile(fullgraph=True, backend=counter)
    for seed in range(2):
        assert_alike(block, plain, arguments_of(plain, memory_format, seed))
    assert counter.frame_count == 1
    targets = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert not any("h100" in target for target in targets)  # Inductor fuses them with what follows


class _Unet:
    """A small UNet, as pairs with and without graphs take it."""

    def __init__(self, name, memory_format):
        self.small, self.memory_format = BY_NAME[name], memory_format

    def model(self, device, dtype, **config):
        return self.small.model(device, dtype, **config).to(memory_format=self.memory_format)

    def inputs(self, device, dtype, seed=0):
        return self.small.arguments(device, dtype, seed)


@formats
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_cuda_graphs(graphs, device, dtype, memory_format):  # noqa: F811
    """The same bits with and without, and a changed part is seen before the next replay."""
    pair = Pair(graphs, _Unet("unet_of_sdxl", memory_format), device, dtype)
    pair.captured()

    def halve(model):
        with torch.no_grad():
            model.mid_block.resnets[0].conv1.bias.mul_(0.5)

    def replace_weight(model):
        norm = model.mid_block.resnets[0].norm2
        norm.weight = nn.Parameter(norm.weight.detach() * 2)

    def replace_norm(model):
        resnet = model.mid_block.resnets[1]
        resnet.norm1 = HalvedNorm(8, resnet.in_channels).to(device, dtype)

    for change in (halve, replace_weight):
        arguments = pair.inputs()
        before = pair.call(arguments)
        pair.both(change)
        assert not torch.equal(pair.call(arguments), before)
        pair.captured()
    arguments = pair.inputs()
    before = pair.call(arguments)
    pair.both(replace_norm)
    assert not torch.equal(pair.call(arguments), before)


# --------------------------------------------------------------------------------------------------
# In models


@formats
@pytest.mark.parametrize("name", ["unet", "unet_of_sdxl", "controlnet", "svd"])
def test_models(kernel, device, name, memory_format):
    """All group norms run on the kernel, each resnet's as part of it."""
    small = BY_NAME[name]
    model = small.model(device, BFLOAT16)
    if name != "svd":
        model = model.to(memory_format=memory_format)
    plain, arguments = copy.deepcopy(model), small.arguments(device, BFLOAT16)
    report = kernel.inject_kernels(model)

    def forward(candidate):
        with torch.no_grad():
            return candidate(**arguments, return_dict=False)

    norms = [module for module in plain.modules() if type(module) is nn.GroupNorm]
    resnets = [module for module in plain.modules() if type(module) is ResnetBlock2D]
    assert norms and resnets
    assert kernel_calls(forward, model)["group_norm"] == len(norms)
    counted = {"GroupNorm": 0, "ResnetBlock2D": 0}
    for calls in report.calls:
        if calls.module in counted:
            counted[calls.module] += calls.on_kernels
            assert calls.fell_back == {}
    assert counted["ResnetBlock2D"] == len(resnets)
    assert counted["GroupNorm"] == len(norms) - 2 * len(resnets)
    for mine, expected in zip(tensors_of(forward(model)), tensors_of(forward(plain)), strict=True):
        assert distance(mine, expected) < 0.04


@formats
def test_an_autoencoder(kernel, device, memory_format):
    vae = diffusers.AutoencoderKL(block_out_channels=(32, 64), norm_num_groups=8, **_VAE)
    plain = vae.to(device, memory_format=memory_format).eval()
    vae = copy.deepcopy(plain)
    report = kernel.inject_kernels(vae)
    assert report.levels == {"": "in part"}
    x = torch.randn(1, 3, 16, 16, device=device).contiguous(memory_format=memory_format)
    with torch.no_grad():
        assert distance(vae(x).sample, plain(x).sample) < 1e-5
    counted = [calls for calls in report.calls if calls.module == "ResnetBlock2D"]
    assert counted and all(calls.on_kernels == 1 and not calls.fell_back for calls in counted)


_VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
