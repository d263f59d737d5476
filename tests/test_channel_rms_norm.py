"""channel_rms_norm, with an optional modulation and SiLU after it."""

import math

import pytest
import torch
import torch.nn.functional as F

import references
from checks import FLOAT32_ARITHMETIC, assert_rounded_once, check_nonfinite
from inputs import DTYPES, IMAGE_LAYOUTS, every_dtype, laid_out, normal, pairwise
from test_group_norm import (
    IS_LAST,
    NORMS,
    SILU,
    check_norm,
    every_memory,
    every_norm,
    everything,
    of_groups,
    spread,
)

# Part of a warp's channels, whole warps, one chunk of channels, several even and uneven ones.
CHANNELS = [1, 3, 8, 31, 32, 40, 96, 128, 384, 512, 513, 640, 1024, 1160]
POSITIONS = [1, 7, 8, 64, 72, 255, 1000]
CHANNEL_NORM = NORMS[1]


@pairwise(
    channels=CHANNELS, positions=POSITIONS, is_last=IS_LAST, dtype=DTYPES, activation=[None, *SILU]
)
def test_channels_and_positions(kernel, device, channels, positions, is_last, dtype, activation):
    """With all optional arguments and each activation, and with no optional argument."""
    x = laid_out(normal(2, channels, positions, dtype=dtype, device=device), is_last)
    options = {**everything(CHANNEL_NORM, x), "activation": activation} if activation else {}
    check_norm(kernel, CHANNEL_NORM, x, 0, is_last, **options)


VIEWS = {
    "one_frame": lambda x: x[:, :, 2:3],
    "first_frames": lambda x: x[:, :, :3],
    "middle_frames": lambda x: x[:, :, 1:4],
    "last_frames": lambda x: x[:, :, 4:],
    "every_second_frame": lambda x: x[:, :, ::2],
    "expanded_frame": lambda x: x[:, :, 1:2].expand_as(x),
    "last_samples": lambda x: x[1:],
    "every_second_sample": lambda x: x[::2],
    "channels": lambda x: x[:, 8:16],
    "odd_channels": lambda x: x[:, 3:24],
    "channels_and_frames": lambda x: x[:, 8:, 1:3],
    "rows": lambda x: x[:, :, :, 2:5],
    "columns": lambda x: x[..., :8],
    "odd_columns": lambda x: x[..., 1:6],
    "rows_of_a_frame": lambda x: x[:, :, 3:4, 1:, 8:],
    "padded_frames": lambda x: F.pad(x, (0, 0, 0, 0, 2, 0))[:, :, 2:],
    "padded_frames_with_the_padding": lambda x: F.pad(x, (0, 0, 0, 0, 2, 0)),
    "a_row": lambda x: x[:, :, 0, 0],
}


@pytest.mark.parametrize("view", VIEWS)
@every_memory
@every_dtype
def test_views_of_a_video(kernel, device, view, is_last, dtype):
    """As of a causal decoder, which slices frames. Storage outside of the view holds NaN."""
    wide = laid_out(normal(3, 24, 5, 6, 16, dtype=dtype, device=device), is_last)
    x = VIEWS[view](wide)
    if x.untyped_storage().data_ptr() == wide.untyped_storage().data_ptr():
        values = x.clone()
        wide.fill_(math.nan)
        frames = slice(1 if 0 in x.stride() else None)
        x[:, :, frames].copy_(values[:, :, frames])
        assert not x.isnan().any() and wide.isnan().any()
    options = {**everything(CHANNEL_NORM, x), "activation": "silu"}
    check_norm(kernel, CHANNEL_NORM, x, 0, is_last, **options)


# --------------------------------------------------------------------------------------------------
# With group_norm


@pairwise(
    name=NORMS,
    shape=[
        *((3, 24, 35), (3, 24, 5, 7), (2, 24, 3, 5, 7), (2, 24, 1, 7, 1, 5), (3, 24, 8, 8)),
        (3, 320, 16, 16),
    ],
    layout=IMAGE_LAYOUTS,
    is_last=IS_LAST,
    activation=SILU,
    vectors=["contiguous", "misaligned"],
    dtype=DTYPES,
)
def test_layouts(kernel, device, name, shape, layout, is_last, activation, vectors, dtype):
    x = laid_out(spread(shape, 8, dtype, device), is_last, layout)
    options = {**everything(name, x, layout=vectors), "activation": activation}
    out = check_norm(kernel, name, x, 8, is_last, **options)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if is_last and len(shape) in formats:
        assert out.is_contiguous(memory_format=formats[len(shape)])


@pairwise(name=NORMS, eps=[0.0, 1e-12, 1e-6, 1e-3, 1.0, None], is_last=IS_LAST, dtype=DTYPES)
def test_eps(kernel, device, name, eps, is_last, dtype):
    # Of many groups, as in float32 the error is that of their statistics.
    std = 0.001 if eps is None else 0.02  # tells the default from others
    x = laid_out(normal(8, 256, 16, 16, dtype=dtype, device=device, std=std), is_last)
    check_norm(kernel, name, x, 32, is_last, **({} if eps is None else {"eps": eps}))


@pairwise(
    name=NORMS,
    value=[math.nan, math.inf, -math.inf],
    shape=[(4, 24, 5, 7), (4, 320, 16, 16), (4, 640, 8, 8)],
    is_last=IS_LAST,
    activation=SILU,
    dtype=DTYPES,
)
def test_nonfinite_values(kernel, device, name, value, shape, is_last, activation, dtype):
    """In the first, a middle and the last place of a group; other groups or positions are as they were."""
    x = normal(*shape, dtype=dtype, device=device)
    size = shape[1] // 8
    x[1, 0, 0, 0] = x[2, 3 * size + size // 2, 2, 2] = x[3, -1, -1, -1] = value
    x = laid_out(x, is_last)
    options = {**everything(name, x), "activation": activation}
    check_nonfinite(kernel, name, x, *of_groups(name, 8), **options)


@pairwise(name=NORMS, is_last=IS_LAST, dtype=DTYPES)
def test_silu_of_large_values(kernel, device, name, is_last, dtype):
    """Where exp(-n) is 0, denormal or infinite."""
    x = laid_out(spread((2, 8, 6, 8), 2, dtype, device), is_last)
    bias = torch.tensor([-200.0, -90.0, -88.0, -20.0, 20.0, 88.0, 90.0, 200.0], device=device)
    options = {"weight": torch.full_like(bias, 0.5), "bias": bias, "activation": "silu"}
    # The exponent's rounding grows with it, where the result is small.
    check_norm(kernel, name, x, 2, is_last, **options, slack=100 * FLOAT32_ARITHMETIC)


@pairwise(
    name=NORMS,
    shape=[(0, 32, 4, 4), (2, 0, 4, 4), (2, 32, 0, 4), (2, 32, 4, 0), (0, 32, 1), (2, 0, 1)],
    is_last=IS_LAST,
    dtype=DTYPES,
)
def test_empty_tensors(kernel, device, name, shape, is_last, dtype):
    x = torch.empty(shape, dtype=dtype, device=device)
    if is_last and len(shape) == 4:
        x = x.to(memory_format=torch.channels_last)
    out = getattr(kernel, name)(x, *of_groups(name, 4), **everything(name, x), activation="silu")
    assert out.shape == shape and out.dtype == dtype and out.device == x.device


@pytest.mark.parametrize("shape", [(0, 32), (2, 0)], ids=str)
def test_empty_tensors_without_pixels(kernel, device, shape):
    x = torch.empty(shape, device=device)
    assert kernel.group_norm(x, 4, **everything("group_norm", x)).shape == shape


@every_norm
@pytest.mark.parametrize("dim", range(5))
@every_memory
def test_vmap_of_images(kernel, device, name, dim, is_last):
    """The caller has not chosen the layout with vmap's dimension among an image's."""
    x = laid_out(spread((2, 8, 3, 4), 2, torch.float32, device), is_last)
    several = torch.stack([x, x * 2, x + 1], dim)
    groups, options = of_groups(name, 2), everything(name, x)
    norm, reference = getattr(kernel, name), getattr(references, name)
    outs = torch.vmap(lambda one: norm(one, *groups, **options), in_dims=dim)(several)
    expected = [reference(one, *groups, **options) for one in several.unbind(dim)]
    assert_rounded_once(outs, torch.stack(expected))


@every_norm
@every_memory
def test_compile_with_any_size(kernel, device, name, is_last):
    """One graph for images of several sizes, which keeps their layout."""

    def norm(x):
        return getattr(kernel, name)(x + 1, *of_groups(name, 2), activation="silu") * 2

    torch._dynamo.reset()
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in ((2, 8, 6, 5), (2, 8, 9, 4), (3, 8, 12, 7)):
        x = laid_out(spread(size, 2, torch.bfloat16, device), is_last)
        with torch.no_grad():
            out, expected = compiled(x), norm(x)
        assert torch.equal(out, expected) and out.stride() == expected.stride() == x.stride()


@every_norm
@every_memory
def test_gradients_keep_the_memory_format(kernel, device, name, is_last):
    x = laid_out(spread((2, 8, 3, 4), 2, torch.float32, device), is_last).requires_grad_()
    options = {**everything(name, x), "activation": "silu"}
    out = getattr(kernel, name)(x, *of_groups(name, 2), **options)
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert out.stride() == x.stride()
    # PyTorch's own backward of a group norm gives a contiguous gradient on a GPU.
    if name == "channel_rms_norm" or device == "cpu":
        assert gradient.stride() == x.stride()


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("shape", "groups", "layout", "dtype"),
    [
        ((2, 6, 5, 7), 3, "odd_rows", torch.bfloat16),
        ((2, 64, 8, 8), 8, "contiguous", torch.float32),
        ((2, 96, 3, 8, 8), 8, "contiguous", torch.bfloat16),
        ((2, 40, 9, 9), 4, "misaligned", torch.float16),
        ((1, 64, 48, 48), 2, "contiguous", torch.float16),
        ((1, 8, 160, 160), 1, "contiguous", torch.bfloat16),
        ((1, 1160, 8, 9), 2, "contiguous", torch.bfloat16),
        ((1, 30, 61, 61), 3, "odd_rows", torch.float32),
        ((1, 600, 7, 7), 3, "odd_rows", torch.float32),
        ((2, 640, 1, 1), 32, "contiguous", torch.bfloat16),
        ((2, 24, 16, 16), 6, "chunk of the batch", torch.float16),
    ],
    ids=str,
)
@every_norm
@every_memory
@pytest.mark.parametrize("activation", SILU)
def test_smoke(kernel, device, name, shape, groups, layout, dtype, is_last, activation):
    x = laid_out(spread(shape, groups, dtype, device), is_last, layout)
    options = {**everything(name, x), "activation": activation, "contract": False}
    check_norm(kernel, name, x, groups, is_last, **options)
