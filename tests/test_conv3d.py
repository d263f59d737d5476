"""conv3d. Its derivatives and tracing are in test_fp8.py and test_contracts.py."""

import pytest
import torch

import references
from checks import (
    MemorySnapshot,
    assert_rounded_once,
    map_tensors,
    outcome,
    poison_memory,
    tensors_of,
)
from inputs import conv3d_operands, every_16_bit_dtype, pairwise, sample

CHANNELS_LAST = torch.channels_last_3d


def check(kernel, arguments):
    expected = references.conv3d(**arguments)
    rounded = expected.to(arguments["x"].dtype)
    memory = MemorySnapshot(tensors_of(arguments))
    poison_memory(rounded)
    out = kernel.conv3d(**arguments)
    memory.assert_unchanged()
    assert out.movedim(1, -1).is_contiguous()
    assert (out.shape, out.dtype, out.device) == (expected.shape, rounded.dtype, rounded.device)
    # Errors of float32 sums, relative to the sum of the terms' magnitudes, which may cancel.
    magnitudes = references.conv3d(**map_tensors(lambda t: t.double().abs(), arguments))
    assert_rounded_once(out, expected, 4e-6 * magnitudes + torch.finfo(out.dtype).tiny)
    return out


@pairwise(
    shape=[(3, 5, 7), (1, 16, 16), (4, 17, 9), (2, 8, 35), (1, 40, 3)],
    batch=[1, 2],
    channels=[8, 32, 40, 96],
    out_channels=[3, 8, 33, 96, 136, 200],
    taps=[(3, 3, 3), (1, 3, 3), (3, 1, 1), (1, 1, 1), (1, 1, 3), (3, 3, 1)],
    previous=[0, 1, 2],
    frames=[(2, 0), (1, 1), (0, 2), (0, 0)],
    pixels=[(1, 1), (0, 0), (1, 0)],
    frame_border=["zeros", "replicate"],
    border=["zeros", "replicate", "reflect"],
    has_bias=[True, False],
    dtype=[torch.bfloat16, torch.float16],
)
def test_values(
    kernel,
    device,
    shape,
    batch,
    channels,
    out_channels,
    taps,
    previous,
    frames,
    pixels,
    frame_border,
    border,
    has_bias,
    dtype,
):
    size = (batch, *shape, channels)
    arguments = conv3d_operands(size, out_channels, taps, previous, dtype=dtype, device=device)
    padding = [min(p, n - 1) for p, n in zip((*frames, *pixels), (taps[0], *taps), strict=True)]
    count = shape[0] + previous + sum(padding[:2])
    if count < taps[0]:
        arguments["previous"] = (
            arguments["x"][:, :, :1]
            .expand(-1, -1, 2, -1, -1)
            .contiguous(memory_format=CHANNELS_LAST)
        )
    arguments |= {"padding": padding, "frame_border": frame_border, "border": border}
    check(kernel, {**arguments, "bias": arguments["bias"] if has_bias else None})


@pytest.mark.sanitize
@every_16_bit_dtype
def test_strides(kernel, device, dtype):
    """Frames, rows and columns of a larger tensor, of an image, and frames of another distance before."""
    arguments = conv3d_operands((2, 6, 9, 12, 48), 40, (3, 3, 3), 4, dtype=dtype, device=device)
    x, previous = arguments["x"], arguments["previous"]
    arguments |= {"padding": (0, 0, 1, 1), "border": "reflect"}
    for view in (
        lambda t: t[:, :, 1:3],
        lambda t: t[:, :, ::2],
        lambda t: t[:, :, :, 1:8, 2:9],
        lambda t: t[:, 8:40],
        lambda t: t[1:, :, :2].transpose(3, 4),
    ):
        given = view(x)
        weight = arguments["weight"][:, : given.shape[1]].contiguous()
        check(kernel, {**arguments, "x": given, "previous": view(previous), "weight": weight})


@pytest.mark.sanitize
@pytest.mark.parametrize("border", ["zeros", "replicate", "reflect"])
@pytest.mark.parametrize("out_channels", [8, 96, 128, 192])
@pytest.mark.parametrize("taps", [(3, 3, 3), (3, 1, 1)])
def test_widths_of_tiles(kernel, device, taps, out_channels, border):
    size = (1, 2, 17, 19, 40)
    arguments = conv3d_operands(size, out_channels, taps, 1, dtype=torch.bfloat16, device=device)
    padding = (1, 0, *(n // 2 for n in taps[1:]))
    check(kernel, {**arguments, "padding": padding, "border": border})


@every_16_bit_dtype
@pytest.mark.parametrize("border", ["zeros", "replicate", "reflect"])
@pytest.mark.parametrize("out_channels", [8, 96, 128, 192])
def test_several_tiles(kernel, device, out_channels, border, dtype):
    """Tiles of all shapes with each border, more of them than a GPU computes at a time, and the same bits."""
    if device == "cpu":
        pytest.skip("a CPU has no tiles")
    for height, width in ((70, 100), (8, 130), (130, 8), (33, 65)):
        size = (2, 5, height, width, 72)
        arguments = conv3d_operands(size, out_channels, (3, 3, 3), 2, dtype=dtype, device=device)
        arguments |= {"padding": (0, 0, 1, 1), "border": border}
        out = check(kernel, arguments)
        for _ in range(3):
            assert torch.equal(kernel.conv3d(**arguments), out)


def test_each_operand_is_where_it_belongs(kernel, device):
    """Exact sums of powers of two, in which each frame, row, column, channel and tap has its own factor."""
    arguments = conv3d_operands(
        (1, 3, 5, 4, 16), 24, (3, 3, 3), 0, dtype=torch.bfloat16, device=device
    )

    def powers(shape, dims):
        exponents = sum(
            torch.arange(n, device=device).reshape(*(n if d == dim else 1 for d in range(5))) % k
            for dim, (n, k) in enumerate(zip(shape, dims, strict=True))
        )
        return 2.0 ** exponents.expand(shape)

    x, weight = arguments["x"], arguments["weight"]
    arguments["x"] = (
        powers(x.shape, (1, 3, 2, 3, 2)).bfloat16().contiguous(memory_format=CHANNELS_LAST)
    )
    arguments["weight"] = powers(weight.shape, (3, 2, 3, 2, 3)).bfloat16().contiguous()
    arguments["weight"][:, 2:] = 0
    arguments |= {"padding": (2, 0, 1, 1), "bias": None}
    out = kernel.conv3d(**arguments)
    assert torch.equal(out.double(), references.conv3d(**arguments).bfloat16().double())


@pytest.mark.parametrize("size", [(0, 2, 3, 4, 8), (1, 2, 3, 4, 8)])
def test_empty(kernel, device, size):
    count = 0 if size[0] else 24
    given = conv3d_operands(size, count, (3, 3, 3), 1, dtype=torch.bfloat16, device=device)
    out = kernel.conv3d(**given, padding=(0, 0, 1, 1))
    assert out.shape == (size[0], count, 1, 3, 4) and out.numel() == 0


@every_16_bit_dtype
def test_non_finite_values(kernel, device, dtype):
    """They reach the positions whose taps read them, and no others."""
    given = conv3d_operands((1, 2, 6, 7, 16), 8, (1, 3, 3), 0, dtype=dtype, device=device)
    given["x"][0, 3, 1, 2, 3], given["x"][0, 5, 0, 5, 6] = torch.nan, torch.inf
    out = kernel.conv3d(**given, padding=(0, 0, 1, 1))
    expected = references.conv3d(**given, padding=(0, 0, 1, 1))
    assert torch.equal(out.isnan(), expected.isnan()) and out.isnan().sum() == 9 * 8
    assert torch.equal(out.isinf(), expected.isinf()) and out.isinf().sum() == 4 * 8


STRIDES = "must have channels of stride 1 and other strides that are multiples of 8, got strides "
TAPS = "must have shape (N, 64, ...) with 1 or 3 taps in each of the last dimensions, got "
WRONG = {
    "x of 4 dimensions": ("x", lambda t: t[:, :, 0], "x must have at least 5 dimensions, got"),
    "x of 6 dimensions": ("x", lambda t: t[None], "x must have 5 dimensions, got"),
    "few channels": ("x", lambda t: t[:, :4], "x must have a multiple of 8 channels, got 4"),
    "no frames": ("x", lambda t: t[:, :, :0], "x must have frames, rows and columns, got"),
    "contiguous": ("x", lambda t: t.contiguous(), f"x {STRIDES}"),
    "float32": ("x", lambda t: t.float(), "x must be float16 or bfloat16, got float32"),
    "previous's shape": (
        "previous",
        lambda t: t[:, :, :, 1:],
        "previous must have x's shape with frames of its own, got",
    ),
    "previous's strides": ("previous", lambda t: t.contiguous(), f"previous {STRIDES}"),
    "previous's dtype": (
        "previous",
        lambda t: t.half(),
        "previous must have the dtype of x (bfloat16), got float16",
    ),
    "taps": ("weight", lambda t: t[:, :, :2], f"weight {TAPS}"),
    "weight's channels": ("weight", lambda t: t[:, :8], f"weight {TAPS}"),
    "weight's strides": ("weight", lambda t: t.transpose(3, 4), "weight must be contiguous"),
    "bias": ("bias", lambda t: t[1:], "bias must have shape (24,), got (23,)"),
    "much padding": (
        "padding",
        lambda _: (3, 0, 0, 0),
        "padding[0] must be at least 0 and less than the weight's 3 taps, got 3",
    ),
    "negative padding": (
        "padding",
        lambda _: (0, 0, 0, -1),
        "padding[3] must be at least 0 and less than the weight's 3 taps, got -1",
    ),
    "three paddings": ("padding", lambda _: (0, 0, 0), "padding must hold 4 integers, got 3"),
    "border": (
        "border",
        lambda _: "circular",
        "border must be 'zeros', 'replicate' or 'reflect', got 'circular'",
    ),
    "frame border": (
        "frame_border",
        lambda _: "reflect",
        "frame_border must be 'zeros' or 'replicate', got 'reflect'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values(kernel, device, case):
    argument, change, text = WRONG[case]
    _, arguments = sample(kernel, "conv3d", dtype=torch.bfloat16, device=device)
    arguments[argument] = change(arguments.get(argument))
    with pytest.raises(ValueError, match="conv3d: ") as found:
        kernel.conv3d(**arguments)
    assert str(found.value).startswith(f"conv3d: {text}")


def test_small_images(kernel, device):
    _, arguments = sample(kernel, "conv3d", dtype=torch.bfloat16, device=device)
    x, previous = (arguments[key][:, :, :, :1] for key in ("x", "previous"))
    given = {**arguments, "x": x, "previous": previous}
    text = "x must have at least 2 rows and columns to be reflected"
    error, found = outcome(kernel.conv3d, {**given, "border": "reflect"})
    assert error is ValueError and found.startswith(f"conv3d: {text}")
    given["padding"] = (0, 0, 0, 0)
    text = "x and its padding must be at least as large as the weight's taps"
    error, found = outcome(kernel.conv3d, given)
    assert error is ValueError and found.startswith(f"conv3d: {text}")


@pytest.mark.parametrize("padding", [1, "1111", (1, 1, 1, True), (1.0, 0, 0, 0), None])
def test_wrong_types(kernel, device, padding):
    _, arguments = sample(kernel, "conv3d", dtype=torch.bfloat16, device=device)
    with pytest.raises(TypeError, match="conv3d: padding must be a tuple of 4 integers, got"):
        kernel.conv3d(**{**arguments, "padding": padding})
