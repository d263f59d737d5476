"""group_norm, with an optional channel bias before it and SiLU after it, and what it has in common with
channel_rms_norm."""

import math

import pytest
import torch

import references
from checks import assert_rounded_once, check, check_nonfinite
from inputs import DTYPES, MIXTURES, every_dtype, laid_out, mixed, normal, pairwise

every_memory = pytest.mark.parametrize(
    "is_last", [False, True], ids=["contiguous", "channels_last"]
)
IS_LAST, SILU = [False, True], ["none", "silu"]
NORMS = ("group_norm", "channel_rms_norm")
every_norm = pytest.mark.parametrize("name", NORMS)
# Each optional tensor of each norm.
OPTIONAL = [("group_norm", key) for key in ("weight", "bias", "channel_bias")]
OPTIONAL += [("channel_rms_norm", key) for key in ("weight", "bias", "scale", "shift")]
# (batch, channels, height, width) in SDXL's U-Net and its autoencoder. Then in the decoders of Wan and
# Qwen-Image, and of LTX-Video, at a quarter of a small size.
OF_SDXL = [(2, 320, 128, 128), (2, 640, 64, 64), (2, 1280, 32, 32), (2, 2560, 32, 32)]
OF_SDXL += [(2, 1920, 64, 64), (2, 512, 64, 64), (1, 128, 256, 256)]
OF_DECODERS = [(1, 96, 4, 120, 208), (1, 192, 2, 120, 208), (1, 384, 1, 60, 104)]
OF_DECODERS += [(1, 96, 256, 256), (2, 128, 9, 32, 48), (1, 512, 5, 16, 24), (1, 1024, 3, 8, 12)]
# Channels and groups: 10, 4, 10, 40, 60, 80 channels per group, one group, one channel per group, odd ones.
GROUPS = [(30, 3), (32, 8), (320, 32), (1280, 32), (1920, 32), (2560, 32), (64, 1), (64, 64)]
GROUPS += [(5, 5), (7, 1), (6, 2), (21, 7), (2000, 2)]
PIXELS = [1, 7, 64, 255, 4096]


def spread(shape, groups, dtype, device):
    """Values with a spread in each group, so that the norm of few values is well-conditioned."""
    values = torch.randn(shape[0], groups, math.prod(shape[1:]) // groups, device=device) * 0.1
    values += torch.linspace(-1, 1, values.shape[-1], device=device)
    # Neither a channel nor a pixel has the smallest or the largest ones.
    order = torch.randperm(values.shape[-1], device=device)
    return values[..., order].reshape(shape).to(dtype)


def parameters(channels, dtype, device, layout="contiguous"):
    return {
        name: normal(channels, dtype=dtype, device=device, layout=layout, mean=0.5)
        for name in ("weight", "bias")
    }


def everything(name, x, dtype=None, layout="contiguous"):
    """All optional tensors of a call with x."""
    batch, channels = x.shape[:2]
    dtype = dtype or x.dtype
    given = parameters(channels, dtype, x.device, layout)
    names, std = (("channel_bias",), 0.3) if name == "group_norm" else (("scale", "shift"), 1)
    options = {"dtype": dtype, "device": x.device, "layout": layout, "std": std}
    return given | {key: normal(batch, channels, **options) for key in names}


def of_groups(name, groups):
    """The arguments after x."""
    return (groups,) if name == "group_norm" else ()


def check_norm(kernel, name, x, groups, is_last, **options):
    # Pixels that are one apart, or a channel that is, are contiguous.
    is_last = is_last and x.shape[1] > 1 and math.prod(x.shape[2:]) > 1
    return check(kernel, name, x, *of_groups(name, groups), is_channels_last=is_last, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"),
    [*(("group_norm", s) for s in OF_SDXL), *(("channel_rms_norm", s) for s in OF_DECODERS)],
    ids=str,
)
@every_memory
@every_dtype
def test_shapes_of_models(kernel, device, name, shape, is_last, dtype):
    shape = shape if device == "cuda" else (1, *shape[1:])
    x = laid_out(normal(*shape, dtype=dtype, device=device), is_last)
    given = everything(name, x)
    apart = [("weight",), ("scale", "shift")] if name == "channel_rms_norm" else [given]
    for keys in apart:
        part = {key: given[key] for key in keys}
        check_norm(kernel, name, x, 32, is_last, **part, activation="silu")


@pairwise(size=GROUPS, pixels=PIXELS, is_last=IS_LAST, dtype=DTYPES, activation=[None, *SILU])
def test_groups_and_pixels(kernel, device, size, pixels, is_last, dtype, activation):
    """With all optional arguments and each activation, and with no optional argument."""
    channels, groups = size
    batch = 1 if channels * pixels > 2**21 else 3
    x = laid_out(spread((batch, channels, pixels), groups, dtype, device), is_last)
    options = {**everything("group_norm", x), "activation": activation} if activation else {}
    check_norm(kernel, "group_norm", x, groups, is_last, **options)


@every_memory
@every_dtype
def test_channels_of_a_wider_tensor(kernel, device, is_last, dtype):
    """A slice of a skip connection's concatenated result."""
    wide = laid_out(spread((2, 96, 6, 6), 1, dtype, device), is_last)
    for part in (wide[:, 32:64], wide[:, 1:33], wide[:, 63:], wide[1:, :32]):
        check_norm(kernel, "group_norm", part, 4 if part.shape[1] == 32 else 11, is_last)


@every_memory
@every_dtype
def test_expanded_channels(kernel, device, is_last, dtype):
    """Of one channel for all, and of one entry for the batch; a single pixel's stride is free."""
    x = spread((2, 1, 40), 1, dtype, device)
    check_norm(kernel, "group_norm", x.expand(2, 8, 40), 2, False, **parameters(8, dtype, device))
    x = laid_out(spread((1, 8, 40), 2, dtype, device), is_last).expand(3, 8, 40)
    check_norm(kernel, "group_norm", x, 2, is_last, **everything("group_norm", x))
    x = spread((3, 8), 2, dtype, device).as_strided((3, 8, 1, 1), (8, 1, 5, 3))
    check_norm(kernel, "group_norm", x, 2, is_last, **everything("group_norm", x))


@every_norm
@every_memory
@every_dtype
def test_strided_modulation(kernel, device, name, is_last, dtype):
    """Slices of a projected time embedding, and one shared by the batch."""
    x = laid_out(spread((3, 24, 2, 5, 8), 3, dtype, device), is_last)
    embedding = normal(3, 72, dtype=dtype, device=device, std=0.3)
    one, other, shared = embedding[:, 24:48], embedding[:, 1:25], embedding[:1, :24].expand(3, 24)
    if name == "group_norm":
        calls = [{"channel_bias": part} for part in (one, other, shared)]
    else:
        rows = normal(3, 4, 24, dtype=dtype, device=device).unbind(1)
        pairs = [rows[1:3], (one, other), (shared, None), (None, shared)]
        calls = [{"scale": scale, "shift": shift} for scale, shift in pairs]
    for given in calls:
        check_norm(kernel, name, x, 3, is_last, **given)


@pairwise(
    call=[*OPTIONAL, *((name, mixture) for name in NORMS for mixture in MIXTURES)],
    channels=[24, 30],
    layout=["contiguous", "misaligned"],
    is_last=IS_LAST,
    activation=SILU,
    dtype=DTYPES,
)
def test_each_optional_alone_and_float32(
    kernel, device, call, channels, layout, is_last, activation, dtype
):
    """One of them or all; those in the mixture are float32 while x is 16-bit."""
    name, given = call
    x = laid_out(spread((3, channels, 20, 24), 6, dtype, device), is_last)
    options = everything(name, x, torch.float32, layout)
    if given in MIXTURES:
        options = mixed(given, options, dtype)
    else:
        options = {given: options[given]}
        check_norm(kernel, name, x, 6, is_last, **{given: options[given].to(dtype)})
    check_norm(kernel, name, x, 6, is_last, **options, activation=activation)


@pairwise(size=[(320, 32, 4096), (64, 32, 64), (30, 3, 255)], is_last=IS_LAST, dtype=DTYPES)
def test_values_far_from_zero(kernel, device, size, is_last, dtype):
    """The mean of squares minus the squared mean would have no correct digit."""
    channels, groups, pixels = size
    mean = 1000.0 if dtype == torch.float32 else 100.0
    x = normal(2, channels, pixels, dtype=dtype, device=device, mean=mean)
    x[:, ::2] -= 2 * x[:, ::2] * (torch.arange(2, device=device) % 2)[:, None, None]
    x = laid_out(x, is_last)
    check_norm(kernel, "group_norm", x, groups, is_last, activation="silu")
    # The sum with a bias is rounded to float32.
    check_norm(
        kernel, "group_norm", x, groups, is_last, **everything("group_norm", x), slack=4e-7 * mean
    )


@pairwise(name=NORMS, factor=[0.01, 30.0, 1000.0], is_last=IS_LAST, dtype=DTYPES)
def test_channels_far_from_the_others(kernel, device, name, factor, is_last, dtype):
    """As in trained models, a few channels have by far the largest values or means, and positions differ."""
    x = normal(2, 320, 32, 32, dtype=torch.float32, device=device)
    x[:, 3] *= factor
    x[:, 97] += factor
    x[1, 319] -= factor
    if name == "channel_rms_norm":
        x *= torch.logspace(-2, 1, 32, device=device)
    x = laid_out(x.to(dtype), is_last)
    given = everything(name, x)
    given.pop("channel_bias", None)
    check_norm(kernel, name, x, 32, is_last, **given, activation="silu")


@pairwise(pixels=[1, 7, 4096], is_last=IS_LAST, dtype=DTYPES)
def test_groups_of_one_value(kernel, device, pixels, is_last, dtype):
    values = torch.tensor([0.0, 1.0, -3.0, 0.1, 1000.1], device=device).to(dtype)
    x = laid_out(values[:, None, None].expand(5, 24, pixels), is_last)
    out = kernel.group_norm(x, 3, **(of_channels := parameters(24, dtype, device)))
    assert_rounded_once(out, of_channels["bias"].double()[:, None].expand(5, 24, pixels))


@pairwise(call=OPTIONAL, is_last=IS_LAST, activation=SILU, dtype=DTYPES)
def test_nonfinite_parameters(kernel, device, call, is_last, activation, dtype):
    name, given = call
    x = laid_out(normal(2, 24, 5, 7, dtype=dtype, device=device), is_last)
    options = everything(name, x)
    options[given][..., 3] = math.nan
    if call != ("group_norm", "weight"):
        options[given][..., 9] = math.inf
        options[given][..., -1] = -math.inf
    check_nonfinite(kernel, name, x, *of_groups(name, 6), **options, activation=activation)


@every_memory
@every_dtype
def test_infinite_weight(kernel, device, is_last, dtype):
    """As in the formula. PyTorch also multiplies the mean by the weight, which makes some channels NaN."""
    x = laid_out(normal(2, 24, 5, 7, dtype=dtype, device=device), is_last)
    weight = parameters(24, dtype, device)["weight"]
    weight[3], weight[9] = math.inf, -math.inf
    out, expected = kernel.group_norm(x, 6, weight), references.group_norm(x, 6, weight)
    assert expected.isposinf().any() and expected.isneginf().any()
    assert_rounded_once(out, expected)


def test_layouts_are_what_they_are_called(device):
    """All tests of views depend on this, and on the test of layouts."""
    values = normal(2, 24, 5, 7, dtype=torch.bfloat16, device=device)
    assert laid_out(values, False).stride() == (840, 35, 7, 1)
    assert laid_out(values, True).stride() == (840, 1, 168, 24)
    assert laid_out(values, False, "odd_rows").stride() == (888, 37, 7, 1)
    assert laid_out(values, True, "chunk of the batch").stride() == (2520, 1, 168, 24)
