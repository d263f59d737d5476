"""Autoencoders: norm and SiLU in one pass."""

import contextlib
import copy
import dataclasses
import functools

import accelerate
import diffusers
import pytest
import torch
from diffusers.models.autoencoders import (
    autoencoder_kl_hunyuan_video,
    autoencoder_kl_hunyuanimage_refiner,
    autoencoder_kl_hunyuanvideo15,
    autoencoder_kl_ltx,
    autoencoder_kl_qwenimage,
    autoencoder_kl_qwenimage21,
    autoencoder_kl_wan,
)
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import CogVideoXCausalConv3d
from diffusers.models.autoencoders.autoencoder_kl_cosmos import CosmosCausalConv3d
from diffusers.models.autoencoders.autoencoder_kl_ltx2 import (
    LTX2VideoCausalConv3d,
    PerChannelRMSNorm,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import parametrize

import ltx_models
from autoencoders import AUTOENCODERS, IN_SINGLE_PARTS, decode, encode, run
from checks import relative_distance
from injected_pairs import (
    SLACK,
    assert_as_close_as_eager,
    fallen_back,
    group_norm_of_a_gpu,
    injected,
    on_kernels,
    outcome,
    reasons_of,
)
from inputs import every_16_bit_dtype

pytestmark = pytest.mark.usefixtures("_one_thread")

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
every = pytest.mark.parametrize("small", AUTOENCODERS.values(), ids=AUTOENCODERS)


def some(*names):
    return pytest.mark.parametrize("small", [AUTOENCODERS[name] for name in names], ids=names)


ONE_OF_EACH_NORM = ("kl", "wan", "ltx timed", "ltx2", "hunyuan15")
one_of_each_norm = some(*ONE_OF_EACH_NORM)
FEW_BLOCKS = {
    "wan": {"dim_mult": [1, 2], "temperal_downsample": [False]},
    "hunyuan15": {
        "block_out_channels": (16,),
        "spatial_compression_ratio": 1,
        "temporal_compression_ratio": 1,
    },
}


def pair(kernel, small, device, dtype=FLOAT32, change=None, is_injected_first=True, **config):
    """(injected, plain, report, arguments)"""
    plain = small.model(device, dtype, **config)
    both = injected(kernel, plain, change, is_injected_first=is_injected_first)
    return *both, small.arguments(device, dtype)


def small_pair(kernel, name, device, change=None, is_injected_first=True):
    """The same of a decoder with few blocks, and of one frame of few latents."""
    small = AUTOENCODERS[name]
    size = (3, 2) if len(small.latent) == 3 else (1, 3, 2)
    small = dataclasses.replace(small, latent=(small.latent[0], *size), batch=1)
    config = FEW_BLOCKS.get(name, {})
    return pair(kernel, small, device, FLOAT32, change, is_injected_first, **config)


def assert_same(model, plain, arguments, forward=run):
    expected, out = forward(plain, arguments), forward(model, arguments)
    assert out.dtype == expected.dtype
    assert relative_distance(out, expected) <= SLACK[expected.dtype]
    return expected


def assert_only_attention_fell_back(report):
    own = "attention itself is the model's own"
    assert all(r.startswith(own) for reasons in fallen_back(report).values() for r in reasons)


# The modules of each whose calls are all on the kernels, with the number of calls in `run`.
RESNETS = {
    "kl": ("ResnetBlock2D", 10),
    "flux2": ("ResnetBlock2D", 10),
    "wan": ("WanResidualBlock", 39),
    "wan 2.2": ("WanResidualBlock", 39),
    "qwenimage": ("QwenImageResidualBlock", 13),
    "qwenimage21": ("QwenImage21ResidualBlock", 13),
    "ltx": ("LTXVideoResnetBlock3d", 12),
    "ltx timed": ("LTXVideoResnetBlock3d", 11),
    "ltx2": ("LTX2VideoResnetBlock3d", 9),
    "ltx2 timed": ("LTX2VideoResnetBlock3d", 9),
    "hunyuan": ("HunyuanVideoResnetBlockCausal3D", 16),
    "hunyuan15": ("HunyuanVideo15ResnetBlock", 13),
    "refiner": ("HunyuanImageRefinerResnetBlock", 13),
    "cogvideox": ("CogVideoXResnetBlock3D", 10),
}


@pytest.mark.parametrize("name", AUTOENCODERS)
def test_float32(kernel, device, name):
    """Values, the report, and ejection."""
    small = AUTOENCODERS[name]
    model, plain, report, arguments = pair(kernel, small, device)
    assert report.levels == {"": "in part"}
    expected = assert_same(model, plain, arguments)
    counts, (resnet, count) = on_kernels(report), RESNETS[name]
    assert counts[resnet] == count
    ends = [entry for entry in report.replaced if entry.name in ("encoder", "decoder")]
    fused = [entry for entry in ends if "norm with SiLU" in entry.replacement]
    assert len(ends) == 2 and len(fused) == (1 if name == "cogvideox" else 2)
    assert all(counts[entry.module] for entry in ends)
    assert fallen_back(report) == {}
    kernel.eject_kernels(model)
    assert torch.equal(run(model, arguments), expected) and on_kernels(report) == counts


@pytest.mark.drawn(times=0, period=5)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@every
def test_16_bits(kernel, device, small, dtype):
    """Encoding and decoding are as close to the float32 model as eager."""
    # The ratio of single samples varies: from 0.72 to 1.25 in float16 for hunyuan.
    samples, forward = 2, run
    if dtype is FLOAT16:  # whose convolutions are slow on a CPU
        small, samples, forward = dataclasses.replace(small, batch=1), 4, decode
    model, plain, report, arguments = pair(kernel, small, device, dtype)

    def make_arguments(dtype, seed):
        return small.arguments(device, dtype, seed)

    assert_as_close_as_eager(model, plain, make_arguments, samples, forward)
    assert_only_attention_fell_back(report)
    kernel.eject_kernels(model)
    assert torch.equal(decode(model, arguments), decode(plain, arguments))


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("name", IN_SINGLE_PARTS)
def test_single_parts(kernel, device, name, dtype):
    """Their resnets have other norms; their convolutions run on the kernel."""
    model, plain, report, arguments = pair(kernel, IN_SINGLE_PARTS[name], device, dtype)

    def make_arguments(dtype, seed):
        return IN_SINGLE_PARTS[name].arguments(device, dtype, seed)

    if dtype is FLOAT32:
        assert_same(model, plain, arguments)
    else:
        assert_as_close_as_eager(model, plain, make_arguments, 4, decode)
    counts = on_kernels(report)
    assert bool(counts[f"{'CogVideoX' if name == 'mochi' else 'Cosmos'}CausalConv3d"]) == (
        dtype is BFLOAT16
    )
    assert_only_attention_fell_back(report)


def test_spatial_norms_are_reported(kernel, device):
    """The norms of CogVideoX's decoder depend on the latents."""
    _, _, report, _ = pair(kernel, AUTOENCODERS["cogvideox"], device)
    reasons = reasons_of(report)
    assert "CogVideoXSpatialNorm3D" in reasons["decoder.mid_block.resnets.0"]
    assert "encoder.mid_block.resnets.0" not in reasons


def _tile(vae):
    vae.enable_tiling()
    for name in list(vars(vae)):
        if name.startswith("tile_") and "overlap" not in name:
            factor = 2 if isinstance(vae, diffusers.AutoencoderKL) else 4
            # A stride of 2 latents: PyTorch's attention on a GPU refuses tiles of a single one.
            value = 8 if "stride" in name or not hasattr(vae, "tile_sample_stride_height") else 16
            setattr(vae, name, value // factor if "latent" in name else value)
    if hasattr(vae, "tile_sample_min_num_frames"):
        vae.tile_sample_min_num_frames, vae.tile_sample_stride_num_frames = 16, 8


def _by_frames(vae):
    vae.use_framewise_decoding = vae.use_framewise_encoding = True
    vae.tile_sample_min_num_frames, vae.tile_sample_stride_num_frames = 8, 4


@pytest.mark.parametrize(
    "change", [_tile, lambda vae: vae.enable_slicing()], ids=["tiles", "slices"]
)
@some("kl", "wan", "qwenimage", "hunyuan15")
def test_tiles_and_slices(kernel, device, small, change):
    model, plain, report, arguments = pair(kernel, small, device, change=change)
    whole = decode(small.model(device), arguments)
    expected = assert_same(model, plain, arguments, decode)
    if change is _tile:
        is_other = whole.shape != expected.shape or relative_distance(whole, expected) > 1e-3
        assert is_other, "there was one tile"
    assert fallen_back(report) == {}


@some("ltx", "hunyuan")
def test_groups_of_frames(kernel, device, small):
    small = dataclasses.replace(small, latent=(small.latent[0], 3, *small.latent[2:]))
    model, plain, report, arguments = pair(kernel, small, device, change=_by_frames)
    whole = decode(small.model(device), arguments)
    expected = assert_same(model, plain, arguments, decode)
    assert whole.shape != expected.shape or relative_distance(whole, expected) > 1e-3
    assert fallen_back(report) == {}


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "is_as_on_a_gpu"),
    [
        *(("kl", False), ("kl", True), ("qwenimage", False), ("hunyuan15", False)),
        ("cogvideox", False),
    ],
)
def test_strides_of_results(kernel, device, name, is_as_on_a_gpu, monkeypatch):
    """They are eager's or contiguous: with one and two samples, weights in both memory formats, and tiles.

    In eager an attention in the middle may leave channels last.
    """
    small = (AUTOENCODERS | IN_SINGLE_PARTS)[name]
    if is_as_on_a_gpu:
        group_norm_of_a_gpu(kernel, monkeypatch)

    def strides(vae, given):
        time = (given["temb"],) if "temb" in given else ()
        moments, sample = vae.encode(given["x"]).latent_dist, vae.decode(given["z"], *time).sample
        return [
            None if x[0].is_contiguous() else x.stride()
            for x in (moments.parameters, moments.mode(), sample)
        ]

    for change in (None, last_format, _tile):
        model, plain, _, arguments = pair(kernel, small, device, BFLOAT16, change)
        for batch in (1, 2):
            given = {name: x[:batch] for name, x in arguments.items()}
            with torch.no_grad():
                for mine, expected in zip(
                    strides(model, given), strides(plain, given), strict=True
                ):
                    assert mine in (None, expected), (change, batch)


def test_training_mode(kernel, device, monkeypatch):
    """Without derivatives, convolutions get what they get in evaluation, in the same memory format."""
    group_norm_of_a_gpu(kernel, monkeypatch)
    model, _, _, arguments = pair(kernel, AUTOENCODERS["kl"], device, BFLOAT16)
    strides = {True: [], False: []}
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(
                lambda module, args: strides[model.training].append(args[0].stride())
            )
    with torch.no_grad():
        run(model.train(), arguments)
        run(model.eval(), arguments)
    assert strides[True] == strides[False]


def last_format(vae):
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for parameter in vae.parameters():
        if parameter.dim() in formats:
            parameter.data = parameter.to(memory_format=formats[parameter.dim()])


@pytest.mark.parametrize("is_injected_first", [True, False])
@some("kl", "wan", "ltx", "hunyuan15")
def test_channels_last(kernel, device, small, is_injected_first):
    memory_format = torch.channels_last if len(small.latent) == 3 else torch.channels_last_3d
    model, plain, report, arguments = pair(
        kernel, small, device, FLOAT32, last_format, is_injected_first
    )
    arguments = {name: x.contiguous(memory_format=memory_format) for name, x in arguments.items()}
    assert_same(model, plain, arguments)
    assert fallen_back(report) == {}


@some("kl", "wan")
def test_dtype_that_changes(kernel, device, small):
    """As Stable Diffusion XL's pipeline does before decoding."""
    model, plain, report, arguments = pair(
        kernel, small, device, FLOAT16, lambda vae: vae.to(FLOAT32)
    )
    assert_same(model, plain, {name: x.float() for name, x in arguments.items()})
    assert_only_attention_fell_back(report)


@one_of_each_norm
def test_autocast(kernel, device, small):
    model, plain, report, arguments = pair(kernel, small, device)
    with torch.autocast(device, BFLOAT16):
        assert torch.equal(decode(model, arguments), decode(plain, arguments))
    reasons = {reason for entry in fallen_back(report).values() for reason in entry}
    assert "autocast is on" in reasons and all(r.endswith("autocast is on") for r in reasons)


@one_of_each_norm
def test_gradients(kernel, device, small):
    """The model's own code computes what has a derivative. It is no fall-back."""
    model, plain, report, arguments = pair(kernel, small, device)
    time = (arguments["temb"],) if "temb" in arguments else ()
    gradients = []
    for vae in (model, plain):
        torch.manual_seed(7)
        vae.decode(arguments["z"], *time).sample.square().sum().backward()
        gradients.append({n: p.grad for n, p in vae.named_parameters() if p.grad is not None})
    mine, expected = gradients
    assert mine.keys() == expected.keys() and len(mine) > 20
    largest = max(gradient.norm() for gradient in expected.values())
    for name, gradient in expected.items():
        assert (mine[name] - gradient).norm() <= 1e-4 * (gradient.norm() + 0.01 * largest), name
    assert fallen_back(report) == {}


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("name", ONE_OF_EACH_NORM)
def test_compiled(kernel, device, name):
    """torch.compile traces the classes' own code."""
    model, plain, report, arguments = small_pair(kernel, name, device)
    part = "decoder" if name == "wan" else "decoder.mid_block"
    counter = CompileCounterWithBackend("eager")
    model.get_submodule(part).compile(backend=counter)
    assert_same(model, plain, arguments, decode)
    assert counter.frame_count > 0
    inside = [entry for entry in report.calls if entry.name.startswith(f"{part}.")]
    assert inside and not any(entry.on_kernels for entry in inside)


def resnet_of(vae):
    return vae.decoder.mid_block.resnets[0]


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def hook(module):
    module.register_forward_hook(lambda _, args, result: result * 1.5)


CHANGES = {
    "hook on a norm": (lambda vae: hook(resnet_of(vae).norm1), "norm1 has hooks"),
    "hook on the activation": (
        lambda vae: hook(resnet_of(vae).nonlinearity),
        "activation has hooks",
    ),
    "hook on a convolution": (lambda vae: hook(resnet_of(vae).conv2), None),
    "hook on a resnet": (lambda vae: hook(resnet_of(vae)), None),
    "another norm": (lambda vae: setattr(resnet_of(vae), "norm2", Doubled()), "norm2 is a"),
    "another activation": (
        lambda vae: setattr(resnet_of(vae), "nonlinearity", nn.Mish()),
        "activation is a torch.nn.modules.activation.Mish",
    ),
}


@pytest.mark.whole
@pytest.mark.parametrize("is_injected_first", [True, False])
@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.parametrize("name", ["wan", "ltx timed"])
def test_changes(kernel, device, name, case, is_injected_first):
    change, reason = CHANGES[case]
    model, plain, report, arguments = small_pair(kernel, name, device, change, is_injected_first)
    expected = assert_same(model, plain, arguments, decode)
    unchanged = decode(AUTOENCODERS[name].model(device, **FEW_BLOCKS.get(name, {})), arguments)
    assert relative_distance(unchanged, expected) > 1e-3, "the change has no effect"
    path = "decoder.mid_block.resnets.0"
    if not is_injected_first and reason is not None:
        assert reason in reasons_of(report)[path]
    else:
        found = fallen_back(report).get(path, {})
        assert any(reason in each for each in found) if reason else found == {}


@pytest.mark.parametrize("is_injected_first", [True, False])
def test_a_parametrized_norm(kernel, device, is_injected_first):
    def change(vae):
        parametrize.register_parametrization(resnet_of(vae).norm1, "gamma", Doubled())

    model, plain, _, arguments = small_pair(kernel, "wan", device, change, is_injected_first)
    assert_same(model, plain, arguments, decode)


@some("wan", "kl")
def test_functions_that_are_replaced(kernel, device, small, monkeypatch):
    model, plain, report, arguments = pair(kernel, small, device)
    name = "normalize" if small.cls == "AutoencoderKLWan" else "group_norm"
    own = getattr(nn.functional, name)
    monkeypatch.setattr(nn.functional, name, lambda *args, **kwargs: 2 * own(*args, **kwargs))
    assert_same(model, plain, arguments, decode)
    assert fallen_back(report)


def test_a_norm_with_another_dtype(kernel, device):
    """PyTorch computes in float32 then."""

    def change(vae):
        for module in vae.decoder.modules():
            if "RMS_norm" in type(module).__name__:
                module.float()

    model, plain, report, arguments = pair(kernel, AUTOENCODERS["wan"], device, BFLOAT16, change)
    # A convolution may refuse float32.
    mine, expected = (outcome(decode, vae, arguments) for vae in (model, plain))
    if isinstance(expected, str):
        assert mine == expected
        assert "it was given tensors of different dtypes" in str(fallen_back(report))
    else:
        assert relative_distance(mine, expected) <= SLACK[BFLOAT16]


def test_offloading(kernel, device):
    """Hooks on the autoencoder itself, as of ``enable_model_cpu_offload``, and on each module."""

    def offload(vae):
        hook = accelerate.hooks.CpuOffload(execution_device=torch.device(device))
        accelerate.hooks.add_hook_to_module(vae, hook, append=True)

    def offload_modules(vae):
        accelerate.cpu_offload(vae.decoder, torch.device(device), offload_buffers=True)

    for change in (offload, offload_modules):
        for is_first in (True, False):
            model, plain, _, arguments = small_pair(kernel, "wan", device, change, is_first)
            assert_same(model, plain, arguments, decode)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
def test_the_least_norm(kernel, device, dtype):
    """``x / max(||x||, 1e-12)`` of tiny values and zeros is that of the class."""
    norm = autoencoder_kl_wan.WanRMS_norm(48, images=False).to(device, dtype)
    nn.init.uniform_(norm.gamma, 0.5, 1.5)
    model, plain, report = injected(kernel, nn.Sequential(norm))
    x = torch.randn(1, 48, 2, 3, 16, device=device)
    x *= 10.0 ** torch.arange(0, -16, -1, device=device)
    x[..., 0, 3] = 0
    x = x.to(dtype)
    with torch.no_grad():
        out, expected = model(x), plain(x)
        exact = copy.deepcopy(plain).double()(x.double())
    assert (out[x == 0] == 0).all() and out.isfinite().all()
    scale, length = exact.norm(dim=1, keepdim=True), x.double().norm(dim=1, keepdim=True)
    error, eager_error = ((y - exact).norm(dim=1, keepdim=True) / scale for y in (out, expected))
    usual = length > 1e-8
    bound = 1.05 * eager_error[usual].square().mean().sqrt() + 1e-6
    assert usual.sum() > 30 and error[usual].square().mean().sqrt() <= bound
    # The kernel divides by sqrt(||x||² + 1e-24): near 1e-12 that is up to sqrt(2) of the class's divisor.
    assert (error[scale > 0] <= 0.3).all()
    assert (error[(length < 1e-13) & (scale > 0)] <= 0.01).all()
    assert dtype is FLOAT16 or ((length > 0) & (length < 1e-13)).any()
    assert on_kernels(report)["WanRMS_norm"] == 1


LAYOUTS = {
    "contiguous": lambda x: x,
    "frames": lambda x: x[:, :, 1:3],
    "pixels": lambda x: x[..., ::2],
    "by frames": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last_3d),
    "transposed": lambda x: x.transpose(3, 4),
    "tile": lambda x: x[:, :, :, 1:, :3],
    "one": lambda x: x[:, :, :1],
}
WAN_CONVOLUTION = functools.partial(autoencoder_kl_wan.WanCausalConv3d, 16, 24, 3, padding=1)
COGVIDEOX_CONVOLUTION = functools.partial(CogVideoXCausalConv3d, 16, 24, 3)
UNIT_NORM = functools.partial(autoencoder_kl_wan.WanRMS_norm, 6, images=False, bias=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [UNIT_NORM, PerChannelRMSNorm], ids=["unit", "per channel"])
def test_layouts(kernel, device, make, layout):
    norm = make().to(device)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    model, plain, report = injected(kernel, nn.Sequential(norm))
    x = LAYOUTS[layout](torch.randn(2, 6, 4, 5, 8, device=device))
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)
    assert fallen_back(report) == {}


def test_format_of_an_image(kernel, device):
    """Qwen-Image 2.1's convolution takes it without the frame, whose stride says nothing then."""
    norm = autoencoder_kl_qwenimage21.QwenImage21RMS_norm(32, images=False).to(device)
    model, plain, _ = injected(kernel, nn.Sequential(norm))
    x = torch.randn(2, 6, 4, 32, device=device)[:, None].permute(0, 4, 1, 2, 3)
    for stride in (32, 768):
        image = x.as_strided(x.shape, (768, 1, stride, 128, 32))
        with torch.no_grad():
            out, expected = model(image), plain(image)
        torch.testing.assert_close(out, expected)
        assert out.squeeze(2).stride() == expected.squeeze(2).stride() == (768, 1, 128, 32)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize(
    "library", [autoencoder_kl_wan, autoencoder_kl_qwenimage], ids=["wan", "qwen"]
)
def test_upsampling_has_the_same_bits(kernel, device, library, dtype):
    cls = getattr(library, "WanUpsample", None) or library.QwenImageUpsample
    model, plain, report = injected(
        kernel, nn.Sequential(cls(scale_factor=(2.0, 2.0), mode="nearest-exact"))
    )
    x = torch.randn(3, 20, 5, 7, device=device).to(dtype)
    x[0, 0, 0, :2] = torch.tensor([torch.nan, torch.inf])
    for each in (x, x.contiguous(memory_format=torch.channels_last), x[:, ::2]):
        with torch.no_grad():
            out, expected = model(each), plain(each)
        assert torch.equal(out.nan_to_num(7), expected.nan_to_num(7))
        assert out.dtype == expected.dtype
        is_last = out.is_contiguous(memory_format=torch.channels_last)
        assert is_last or (dtype is FLOAT32 and out.stride() == expected.stride())
    assert list(on_kernels(report).values()) == [0 if dtype is FLOAT32 else 3]


# Convolutions of 16 channels, and whether they run on the kernel.
CONVOLUTIONS = {
    "wan": (lambda: autoencoder_kl_wan.WanCausalConv3d(16, 24, 3, padding=1), True),
    "wan, time": (
        lambda: autoencoder_kl_wan.WanCausalConv3d(16, 24, (3, 1, 1), padding=(1, 0, 0)),
        True,
    ),
    "wan, pixels": (lambda: autoencoder_kl_wan.WanCausalConv3d(16, 24, 1), False),
    "qwenimage": (
        lambda: autoencoder_kl_qwenimage.QwenImageCausalConv3d(16, 3, 3, padding=1),
        True,
    ),
    **{
        f"ltx, {padding_mode}, {is_causal}": (
            functools.partial(
                autoencoder_kl_ltx.LTXVideoCausalConv3d,
                *(16, 24),
                padding_mode=padding_mode,
                is_causal=is_causal,
            ),
            padding_mode != "circular",
        )
        for padding_mode in ("zeros", "reflect", "circular")
        for is_causal in (True, False)
    },
    "ltx2": (lambda: LTX2VideoCausalConv3d(16, 24, spatial_padding_mode="reflect"), True),
    "hunyuan": (lambda: autoencoder_kl_hunyuan_video.HunyuanVideoCausalConv3d(16, 24), True),
    "hunyuan15": (
        lambda: autoencoder_kl_hunyuanvideo15.HunyuanVideo15CausalConv3d(16, 200),
        True,
    ),
    "refiner, zeros": (
        lambda: autoencoder_kl_hunyuanimage_refiner.HunyuanImageRefinerCausalConv3d(
            16, 24, pad_mode="constant"
        ),
        True,
    ),
    "hunyuan, 5 rows": (
        lambda: autoencoder_kl_hunyuan_video.HunyuanVideoCausalConv3d(16, 24, (3, 5, 3)),
        False,
    ),
    "cogvideox": (lambda: CogVideoXCausalConv3d(16, 24, 3), True),
    "mochi": (lambda: CogVideoXCausalConv3d(16, 24, 3, pad_mode="replicate"), True),
    "cogvideox, pixels": (lambda: CogVideoXCausalConv3d(16, 24, 1), False),
    "cosmos": (lambda: CosmosCausalConv3d(16, 24, (1, 3, 3), padding=1), True),
    "cosmos, time": (lambda: CosmosCausalConv3d(16, 24, (3, 1, 1), padding=0), True),
    "cosmos, reflect": (
        lambda: CosmosCausalConv3d(16, 24, 3, padding=1, pad_mode="reflect"),
        True,
    ),
}


def first(result):
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions(kernel, device, case, dtype):
    """As close to float64 as eager, and with channels last, for inputs of each layout."""
    make, is_on_kernel = CONVOLUTIONS[case]
    is_on_kernel = is_on_kernel and dtype is not FLOAT32
    model, plain, report = injected(kernel, nn.ModuleList([make()]).to(device, dtype))
    x = torch.randn(2, 16, 4, 5, 8, device=device).to(dtype)
    views = [layout(x) for layout in LAYOUTS.values()]
    last = LAYOUTS["channels last"](x)
    views += [last[:1].expand(3, -1, -1, -1, -1), last[..., 1:2].expand(-1, -1, -1, -1, 4)]
    for each in views:
        with torch.no_grad():
            out, expected = first(model[0](each)), first(plain[0](each))
            exact = first(copy.deepcopy(plain[0]).double()(each.double()))
        limit = 1.05 if dtype is not FLOAT32 else 1.5
        assert relative_distance(out, exact) <= limit * relative_distance(expected, exact) + 1e-7
        assert not is_on_kernel or out.movedim(1, -1).is_contiguous()
    assert list(on_kernels(report).values()) == [is_on_kernel * len(views)]
    assert fallen_back(report) == {}


@every_16_bit_dtype
@pytest.mark.parametrize("frames", [1, 2, 4])
@pytest.mark.parametrize("cached", [None, 1, 2, 3])
@pytest.mark.parametrize("cls", [WAN_CONVOLUTION, COGVIDEOX_CONVOLUTION])
def test_frames_from_before(kernel, device, cls, cached, frames, dtype):
    """Also more of them than the convolution looks back, which Wan's crops; and the next call's."""
    if cls is COGVIDEOX_CONVOLUTION and cached in (1, 3):
        pytest.skip("CogVideoX's holds two frames")
    model, plain, report = injected(kernel, nn.ModuleList([cls()]).to(device, dtype))
    x = torch.randn(2, 16, frames, 5, 8, device=device).to(dtype)
    before = None if cached is None else torch.randn(2, 16, cached, 5, 8, device=device).to(dtype)
    with torch.no_grad():
        results, expected = model[0](x, before), plain[0](x, before)
    assert relative_distance(first(results), first(expected)) <= SLACK[dtype]
    if isinstance(expected, tuple):
        assert torch.equal(results[1], expected[1])
    assert list(on_kernels(report).values()) == [1]


def test_images_are_convolved_in_autoencoders_only(kernel, device):
    vae = AUTOENCODERS["kl"].model(device, BFLOAT16)
    report = kernel.inject_kernels(vae)
    with torch.no_grad():
        out = vae.decoder.up_blocks[0](torch.randn(1, 64, 8, 6, device=device).to(BFLOAT16))
    assert out.is_contiguous(memory_format=torch.channels_last)
    counts = {entry.name: entry.on_kernels for entry in report.calls}
    assert counts["decoder.up_blocks.0.resnets.0.conv1"] == 1
    module = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU(), nn.GroupNorm(2, 8))
    report = kernel.inject_kernels(module.to(device, BFLOAT16))
    assert [entry.module for entry in report.replaced] == ["GroupNorm"]


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
def test_causal_mask_has_the_same_bits(kernel, device, dtype):
    attention = autoencoder_kl_hunyuanvideo15.HunyuanVideo15AttnBlock(8)
    attention.norm = nn.Identity()
    model, plain, report = injected(kernel, nn.Sequential(attention).to(device, dtype))
    x = torch.randn(1, 8, 4, 3, 5, device=device).to(dtype)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    assert on_kernels(report) == {"HunyuanVideo15AttnBlock": 1}


def test_a_pipeline(kernel, device):
    """Its autoencoder is injected in part, without CUDA graphs, and ejected with the rest."""
    pipe = ltx_models.pipeline(device)
    latent = torch.randn(1, ltx_models.CHANNELS, 2, 3, 3, device=device)
    with torch.no_grad():
        expected = pipe.vae.decode(latent).sample
    report = kernel.inject_kernels(pipe, cuda_graphs=True)
    assert report.levels == {"transformer": "in full", "vae": "in part"}
    assert [entry.name for entry in report.cuda_graphs] == ["transformer"]
    assert "forward" not in vars(pipe.vae)
    with torch.no_grad():
        out = pipe.vae.decode(latent).sample
    assert relative_distance(out, expected) <= SLACK[FLOAT32]
    assert any(entry.on_kernels and entry.name.startswith("vae.") for entry in report.calls)
    assert kernel.inject_kernels(pipe, cuda_graphs=True).already_injected
    kernel.eject_kernels(pipe)
    with torch.no_grad():
        assert torch.equal(pipe.vae.decode(latent).sample, expected)


def test_an_autoencoder_of_two_pipelines(kernel, device):
    """Their options for CUDA graphs may differ."""
    first, second = ltx_models.pipeline(device), ltx_models.pipeline(device)
    second.vae = first.vae
    kernel.inject_kernels(first, cuda_graphs=True)
    report = kernel.inject_kernels(second)
    assert report.levels["vae"] == "in part" and not report.already_injected
    with pytest.raises(ValueError, match="vae runs on kernels injected with attention=True"):
        kernel.inject_kernels(
            diffusers.LTXPipeline(None, first.vae, None, None, ltx_models.transformer(device)),
            attention=False,
        )
    kernel.eject_kernels(second)
    assert kernel.inject_kernels(first.vae).levels == {"": "in part"}


def test_graphs_of_an_autoencoder_by_itself(kernel, device):
    vae = AUTOENCODERS["kl"].model(device)
    report = kernel.inject_kernels(vae, cuda_graphs=True)
    assert [entry.module for entry in report.cuda_graphs] == ["AutoencoderKL"]
    kernel.eject_kernels(vae)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every
def test_peak_of_memory(kernel, device, small):
    """Of images whose activations take more memory than a weight."""
    sizes = ((*size[:-2], 16 * size[-2], 16 * size[-1]) for size in (small.latent, small.sample))
    small = dataclasses.replace(small, **dict(zip(("latent", "sample"), sizes, strict=True)))
    model, plain, _, arguments = pair(kernel, small, device, BFLOAT16)
    peaks = []
    for forward in (encode, decode):
        for vae in (plain, model):
            forward(vae, arguments)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with contextlib.suppress(StopIteration):
                forward(vae, arguments)
            peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 1.01 * peaks[0] and peaks[3] <= 1.01 * peaks[2]
