"""channel_rms_norm, with an optional modulation and SiLU after it."""

import math

import pytest
import torch
import torch.nn.functional as F

import references
from checks import FLOAT32_ARITHMETIC, assert_rounded_once, check, check_nonfinite
from inputs import DTYPES, IMAGE_LAYOUTS, MIXTURES, every_dtype, laid_out, mixed, normal, pairwise
from test_group_norm import everything as of_group_norm
from test_group_norm import spread

every_memory = pytest.mark.parametrize(
    "is_last", [False, True], ids=["contiguous", "channels_last"]
)
IS_LAST, SILU = [False, True], ["none", "silu"]
OPTIONAL = ["weight", "bias", "scale", "shift"]
# In the decoders of Wan and Qwen-Image, and of LTX-Video, at a quarter of a small size.
MODEL_SHAPES = [
    (1, 96, 4, 120, 208),
    (1, 192, 2, 120, 208),
    (1, 384, 1, 60, 104),
    (1, 96, 256, 256),
]
MODEL_SHAPES += [(2, 128, 9, 32, 48), (1, 512, 5, 16, 24), (1, 1024, 3, 8, 12)]
# Part of a warp's channels, whole warps, one chunk of channels, several even and uneven ones.
CHANNELS = [1, 3, 8, 31, 32, 40, 96, 128, 384, 512, 513, 640, 1024, 1160]
POSITIONS = [1, 7, 8, 64, 72, 255, 1000]


def everything(x, dtype=None, layout="contiguous"):
    """All optional tensors of a call with x."""
    batch, channels = x.shape[:2]
    options = {"dtype": dtype or x.dtype, "device": x.device, "layout": layout}
    of_channels = {name: normal(channels, mean=0.5, **options) for name in ("weight", "bias")}
    return of_channels | {name: normal(batch, channels, **options) for name in ("scale", "shift")}


def check_norm(kernel, x, is_last, **options):
    # Pixels that are one apart, or a channel that is, are contiguous.
    is_last = is_last and x.shape[1] > 1 and math.prod(x.shape[2:]) > 1
    return check(kernel, "channel_rms_norm", x, is_channels_last=is_last, **options)


@pytest.mark.slow
@pytest.mark.parametrize("shape", MODEL_SHAPES, ids=str)
@every_memory
@every_dtype
def test_shapes_of_models(kernel, device, shape, is_last, dtype):
    shape = shape if device == "cuda" else (1, *shape[1:])
    x = laid_out(normal(*shape, dtype=dtype, device=device), is_last)
    given = everything(x)
    check_norm(kernel, x, is_last, weight=given["weight"], activation="silu")
    check_norm(kernel, x, is_last, scale=given["scale"], shift=given["shift"], activation="silu")


@pairwise(
    channels=CHANNELS, positions=POSITIONS, is_last=IS_LAST, dtype=DTYPES, activation=[None, *SILU]
)
def test_channels_and_positions(kernel, device, channels, positions, is_last, dtype, activation):
    """With all optional arguments and each activation, and with no optional argument."""
    x = laid_out(normal(2, channels, positions, dtype=dtype, device=device), is_last)
    options = {**everything(x), "activation": activation} if activation else {}
    check_norm(kernel, x, is_last, **options)


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
        of_memory = (x, values) if 0 not in x.stride() else (x[:, :, :1], values[:, :, :1])
        of_memory[0].copy_(of_memory[1])
        assert not x.isnan().any() and (wide.isnan().any())
    check_norm(kernel, x, is_last, **everything(x), activation="silu")


@pairwise(
    given=[*OPTIONAL, *MIXTURES],
    channels=[24, 30],
    layout=["contiguous", "misaligned"],
    is_last=IS_LAST,
    activation=SILU,
    dtype=DTYPES,
)
def test_each_optional_alone_and_float32(
    kernel, device, given, channels, layout, is_last, activation, dtype
):
    """One of them or all; those in the mixture are float32 while x is 16-bit."""
    x = laid_out(normal(3, channels, 20, 24, dtype=dtype, device=device), is_last)
    options = everything(x, torch.float32, layout)
    if given in MIXTURES:
        options = mixed(given, options, dtype)
    else:
        options = {given: options[given]}
        check_norm(kernel, x, is_last, **{given: options[given].to(dtype)})
    check_norm(kernel, x, is_last, **options, activation=activation)


@every_memory
@every_dtype
def test_strided_modulation(kernel, device, is_last, dtype):
    """Slices of a projected time embedding, and one shared by the batch."""
    x = laid_out(normal(3, 24, 2, 5, 8, dtype=dtype, device=device), is_last)
    table = normal(3, 4, 24, dtype=dtype, device=device)
    embedding = normal(3, 72, dtype=dtype, device=device)
    for scale, shift in (
        table.unbind(1)[1:3],
        (embedding[:, 24:48], embedding[:, 1:25]),
        (embedding[:1, :24].expand(3, 24), None),
        (None, embedding[:1, 24:48].expand(3, 24)),
    ):
        check_norm(kernel, x, is_last, scale=scale, shift=shift)


@pairwise(factor=[0.01, 30.0, 1000.0], is_last=IS_LAST, dtype=DTYPES)
def test_channels_far_from_the_others(kernel, device, factor, is_last, dtype):
    """As in trained models, a few channels have by far the largest values, and positions differ."""
    x = normal(2, 320, 16, 16, dtype=torch.float32, device=device)
    x[:, 3] *= factor
    x[:, 97] += factor
    x[1, 319] -= factor
    x *= torch.logspace(-2, 1, 16, device=device)
    x = laid_out(x.to(dtype), is_last)
    check_norm(kernel, x, is_last, **everything(x), activation="silu")


@pairwise(given=OPTIONAL, is_last=IS_LAST, activation=SILU, dtype=DTYPES)
def test_nonfinite_parameters(kernel, device, given, is_last, activation, dtype):
    x = laid_out(normal(2, 24, 5, 7, dtype=dtype, device=device), is_last)
    options = everything(x)
    options[given][..., 3] = math.nan
    options[given][..., 9] = math.inf
    options[given][..., -1] = -math.inf
    check_nonfinite(kernel, "channel_rms_norm", x, **options, activation=activation)


# --------------------------------------------------------------------------------------------------
# With group_norm

# A function of x and the groups, and all optional arguments.
NORMS = {
    "group_norm": (lambda kernel, x, groups, **o: kernel.group_norm(x, groups, **o), of_group_norm),
    "channel_rms_norm": (
        lambda kernel, x, groups, **o: kernel.channel_rms_norm(x, **o),
        everything,
    ),
}
every_norm = pytest.mark.parametrize("name", NORMS)


def check_either(kernel, name, x, groups, is_last, **options):
    arguments = (x, groups) if name == "group_norm" else (x,)
    is_last = is_last and x.shape[1] > 1 and math.prod(x.shape[2:]) > 1
    return check(kernel, name, *arguments, is_channels_last=is_last, **options)


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
    options = {**NORMS[name][1](x, layout=vectors), "activation": activation}
    out = check_either(kernel, name, x, 8, is_last, **options)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if is_last and len(shape) in formats:
        assert out.is_contiguous(memory_format=formats[len(shape)])


@pairwise(name=NORMS, eps=[0.0, 1e-12, 1e-6, 1e-3, 1.0, None], is_last=IS_LAST, dtype=DTYPES)
def test_eps(kernel, device, name, eps, is_last, dtype):
    # Of many groups, as in float32 the error is that of their statistics.
    std = 0.001 if eps is None else 0.02  # tells the default from others
    x = laid_out(normal(8, 256, 16, 16, dtype=dtype, device=device, std=std), is_last)
    check_either(kernel, name, x, 32, is_last, **({} if eps is None else {"eps": eps}))


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
    options = {**NORMS[name][1](x), "activation": activation}
    groups = (8,) if name == "group_norm" else ()
    check_nonfinite(kernel, name, x, *groups, **options)


@pairwise(name=NORMS, is_last=IS_LAST, dtype=DTYPES)
def test_silu_of_large_values(kernel, device, name, is_last, dtype):
    """Where exp(-n) is 0, denormal or infinite."""
    x = laid_out(spread((2, 8, 6, 8), 2, dtype, device), is_last)
    bias = torch.tensor([-200.0, -90.0, -88.0, -20.0, 20.0, 88.0, 90.0, 200.0], device=device)
    options = {"weight": torch.full_like(bias, 0.5), "bias": bias, "activation": "silu"}
    # The exponent's rounding grows with it, where the result is small.
    check_either(kernel, name, x, 2, is_last, **options, slack=100 * FLOAT32_ARITHMETIC)


@pairwise(
    name=NORMS,
    shape=[(0, 32, 4, 4), (2, 0, 4, 4), (2, 32, 0, 4), (2, 32, 4, 0), (0, 32, 1), (2, 0, 1)],
    is_last=IS_LAST,
    dtype=DTYPES,
)
def test_empty_tensors(kernel, device, name, shape, is_last, dtype):
    norm, everything_of = NORMS[name]
    x = torch.empty(shape, dtype=dtype, device=device)
    if is_last and len(shape) == 4:
        x = x.to(memory_format=torch.channels_last)
    out = norm(kernel, x, 4, **everything_of(x), activation="silu")
    assert out.shape == shape and out.dtype == dtype and out.device == x.device


@pytest.mark.parametrize("shape", [(0, 32), (2, 0)], ids=str)
def test_empty_tensors_without_pixels(kernel, device, shape):
    x = torch.empty(shape, device=device)
    assert kernel.group_norm(x, 4, **of_group_norm(x)).shape == shape


@every_norm
@pytest.mark.parametrize("dim", range(5))
@every_memory
def test_vmap_of_images(kernel, device, name, dim, is_last):
    """The caller has not chosen the layout with vmap's dimension among an image's."""
    norm, everything_of = NORMS[name]
    x = laid_out(spread((2, 8, 3, 4), 2, torch.float32, device), is_last)
    several = torch.stack([x, x * 2, x + 1], dim)
    options = everything_of(x)
    outs = torch.vmap(lambda one: norm(kernel, one, 2, **options), in_dims=dim)(several)
    expected = [norm(references, one, 2, **options) for one in several.unbind(dim)]
    assert_rounded_once(outs, torch.stack(expected))


@every_norm
@every_memory
def test_compile_with_any_size(kernel, device, name, is_last):
    """One graph for images of several sizes, which keeps their layout."""

    def norm(x):
        return NORMS[name][0](kernel, x + 1, 2, activation="silu") * 2

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
    norm, everything_of = NORMS[name]
    x = laid_out(spread((2, 8, 3, 4), 2, torch.float32, device), is_last)
    out = norm(kernel, x.requires_grad_(), 2, **everything_of(x), activation="silu")
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert gradient.stride() == out.stride() == x.stride()


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
    options = {**NORMS[name][1](x), "activation": activation, "contract": False}
    check_either(kernel, name, x, groups, is_last, **options)
