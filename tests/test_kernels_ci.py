"""The quick tests that kernel-builder runs on each build, with only tests/ and the package.

Expected values are PyTorch's own, computed in float64.
"""

import diffusers
import pytest
import torch
import torch.nn.functional as F

pytestmark = [pytest.mark.kernels_ci, pytest.mark.usefixtures("_one_thread")]

BATCH, TOKENS, HEADS, HEAD_DIM = 2, 24, 2, 64
HIDDEN = HEADS * HEAD_DIM
GRID = (2, 3, 4)  # frames, rows and columns of the tokens
OF_MODELS = {"inject_kernels", "eject_kernels", "context_parallel_plan"}
OF_MODELS |= {"enable_guidance_parallelism", "enable_tile_parallelism"}
NOT_OPERATIONS = {*OF_MODELS, "register_attention_backend", "layers"}
FP8_PRODUCTS = {"linear_fp8", "linears_fp8", "linear_gelu_fp8", "linear_gated_residual_fp8"}
FP8_OPERATIONS = {"quantize_fp8", "lora_down", *FP8_PRODUCTS}  # with tests of their own
WITH_FP8_RESULT = ["rms_norm", "layer_norm", "rms_norm_modulate", "layer_norm_modulate"]
WITH_FP8_RESULT += [f"gated_residual_{name}" for name in WITH_FP8_RESULT[2:]]
WITH_FP8_RESULT += ["gelu", "geglu", "swiglu"]


def rms_norm(x, weight=None):
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def layer_norm(x, weight=None, bias=None, eps=1e-6):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def modulate(norm, *modulations):
    """`modulations` are scales and shifts in turn."""
    pairs = zip(modulations[::2], modulations[1::2], strict=True)
    return [norm * (1 + scale) + shift for scale, shift in pairs]


def modulated(norm):
    return lambda x, *modulations: modulate(norm(x), *modulations)


def gated(activation):
    return lambda x: x.chunk(2, -1)[0] * activation(x.chunk(2, -1)[1])


def after_residual(norm):
    def results(residual, x, gate, *modulations):
        h = residual + gate * x
        return [h, *modulate(norm(h), *modulations)]

    return results


def rotate(x, cos, sin):
    """Interleaved pairs of the last dimension, by tables with one value for each token and pair."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    rotated = pairs * torch.complex(cos, sin)[:, None]
    return torch.view_as_real(rotated).flatten(-2)


def norm_and_rotate(x, weight, cos, sin):
    return rotate(rms_norm(x, weight).unflatten(-1, (HEADS, HEAD_DIM)), cos, sin).flatten(-2)


def rotate_grid(x, *axes):
    places = torch.meshgrid(*(torch.arange(size, device=x.device) for size in GRID), indexing="ij")
    of_axes = [[t[place.flatten()] for t in pair] for pair, place in zip(axes, places, strict=True)]
    return rotate(x, *(torch.cat(tables, -1) for tables in zip(*of_axes, strict=True)))


def attention(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


# Shapes of the arguments. A pair (cos, sin) is written as its shape in a tuple.
ROWS, VECTOR, MODULATION = (BATCH, TOKENS, HIDDEN), (HIDDEN,), (BATCH, 1, HIDDEN)
PAIR, GATED = (MODULATION, MODULATION), (ROWS, ROWS, MODULATION)
GATED_PAIRS = (*GATED, *PAIR, *PAIR)
TOKEN_HEADS, IMAGE = (BATCH, TOKENS, HEADS, HEAD_DIM), (BATCH, 64, 6, 5)
TABLES = ((TOKENS, HEAD_DIM // 2),)
AXES = (((2, 12),), ((3, 10),), ((4, 10),))
# Operation: its arguments' shapes, keyword arguments, and the same in PyTorch.
CASES = {
    "rms_norm": ((ROWS, VECTOR), {}, rms_norm),
    "layer_norm": ((ROWS, VECTOR, VECTOR), {}, lambda *a: layer_norm(*a, eps=1e-5)),
    "rms_norm_modulate": ((ROWS, *PAIR), {}, modulated(rms_norm)),
    "layer_norm_modulate": ((ROWS, *PAIR), {}, modulated(layer_norm)),
    "layer_norm_modulate_pair": ((ROWS, *PAIR, *PAIR), {}, modulated(layer_norm)),
    "gated_residual": (GATED, {}, lambda residual, x, g: residual + g * x),
    "gated_residual_rms_norm_modulate": ((*GATED, *PAIR), {}, after_residual(rms_norm)),
    "gated_residual_layer_norm_modulate": ((*GATED, *PAIR), {}, after_residual(layer_norm)),
    "gated_residual_layer_norm_modulate_pair": (GATED_PAIRS, {}, after_residual(layer_norm)),
    "group_norm": ((IMAGE,), {"num_groups": 8}, lambda x: F.group_norm(x, 8)),
    "channel_rms_norm": (
        (IMAGE, (64,)),
        {"activation": "silu"},
        lambda x, weight: F.silu(rms_norm(x.movedim(1, -1), weight).movedim(-1, 1)),
    ),
    "qk_norm_rope": (
        (ROWS, ROWS, VECTOR, VECTOR, TABLES),
        {"heads": HEADS},
        lambda q, k, qw, kw, rope: [norm_and_rotate(q, qw, *rope), norm_and_rotate(k, kw, *rope)],
    ),
    "rope": ((TOKEN_HEADS, TABLES), {}, lambda x, rope: rotate(x, *rope)),
    "rope_3d": ((TOKEN_HEADS, *AXES), {}, rotate_grid),
    "gelu": ((ROWS,), {}, F.gelu),
    "silu": ((ROWS,), {}, F.silu),
    "geglu": ((ROWS,), {}, gated(F.gelu)),
    "swiglu": ((ROWS,), {}, gated(F.silu)),
    "softmax": ((ROWS,), {}, lambda x: x.softmax(-1)),
    "attention": ((TOKEN_HEADS,) * 3, {}, attention),
    "attention_int8": ((TOKEN_HEADS,) * 3, {}, attention),
}


def normal(shape, dtype, device):
    """A tensor, or a cosine and a sine in float32 for a shape in a tuple."""
    if isinstance(shape[0], int):
        return torch.randn(shape, dtype=dtype, device=device)
    angle = torch.randn(shape[0], device=device)
    return angle.cos(), angle.sin()


def as_list(results):
    return [results] if isinstance(results, torch.Tensor) else list(results)


class Case:
    """An operation, its arguments, and the float64 arguments of the same expression in PyTorch."""

    def __init__(self, kernel, name, dtype, device):
        self.operation = getattr(kernel, name)
        shapes, self.options, self.expression = CASES[name]
        self.arguments = [normal(shape, dtype, device) for shape in shapes]
        self.doubles = [
            tuple(t.double() for t in one) if isinstance(one, tuple) else one.double()
            for one in self.arguments
        ]
        if name == "rope":
            self.arguments[1:] = self.arguments[1]

    def run(self, *arguments):
        return as_list(self.operation(*arguments, **self.options))

    def expected(self):
        return as_list(self.expression(*self.doubles))


def test_every_operation_has_a_case(kernel):
    operations = {name for name in kernel.__all__ if name.islower()}
    others = {
        "linears_lora",
        "conv3d",
        *FP8_OPERATIONS,
        *(f"{name}_fp8" for name in WITH_FP8_RESULT),
    }
    assert operations - NOT_OPERATIONS - others == set(CASES)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_values(kernel, device, name, dtype):
    if name.startswith("attention") and dtype == torch.float32:
        pytest.skip("attention takes 16 bits")
    case = Case(kernel, name, dtype, device)
    # One rounding at the output. Attention also rounds its softmax probabilities.
    slack = torch.finfo(dtype).eps if name == "attention" else 4e-6
    half_ulp = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    for out, reference in zip(case.run(*case.arguments), case.expected(), strict=True):
        assert out.dtype == dtype
        if name == "attention_int8":
            assert (out.double() - reference).norm() < 0.08 * reference.norm()
            continue
        torch.testing.assert_close(out.double(), reference, rtol=half_ulp + slack, atol=slack)


def test_traced(kernel, device):
    """All operations compile without a graph break, and the traced graph is bitwise equal."""
    torch._dynamo.reset()
    cases = {name: Case(kernel, name, torch.bfloat16, device) for name in CASES}

    def call(arguments):
        return {name: case.run(*arguments[name]) for name, case in cases.items()}

    arguments = {name: case.arguments for name, case in cases.items()}
    results = torch.compile(call, backend="aot_eager", fullgraph=True)(arguments)
    for name, expected in call(arguments).items():
        pairs = zip(results[name], expected, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), name


@pytest.mark.parametrize("block_size", [None, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_quantize_fp8(kernel, device, block_size, dtype):
    x = torch.randn(BATCH, TOKENS, 3 * HIDDEN, dtype=dtype, device=device)
    x8, scale = kernel.quantize_fp8(x, block_size=block_size)
    groups = x.float().unflatten(-1, (-1, block_size or x.shape[-1]))
    # A tensor: PyTorch multiplies by the inverse of a number on a GPU.
    expected = groups.abs().amax(-1, keepdim=True) / torch.tensor(448.0, device=device)
    assert torch.equal(scale, expected.squeeze(-1))
    quotients = (groups / expected).to(torch.float8_e4m3fn).flatten(-2)
    assert x8.dtype == torch.float8_e4m3fn and torch.equal(x8.float(), quotients.float())


@pytest.mark.parametrize("name", WITH_FP8_RESULT)
def test_fp8_results(kernel, device, name):
    """Each value is within half a step of E4M3 of the unquantized result."""
    case = Case(kernel, name, torch.bfloat16, device)
    *residual, x8, scale = getattr(kernel, f"{name}_fp8")(*case.arguments, **case.options)
    *expected_residual, expected = case.expected()
    for out, reference in zip(residual, expected_residual, strict=True):
        torch.testing.assert_close(out.double(), reference, rtol=2**-8, atol=4e-6)
    largest = expected.abs().amax(-1, keepdim=True) / 448
    torch.testing.assert_close(scale.double(), largest, rtol=4e-6, atol=0)
    # Steps of subnormal numbers are 2^-9.
    half_step = torch.maximum(expected.abs() / 16, largest * 2**-10) * 1.001
    assert ((x8.double() * scale - expected).abs() <= half_step).all()


@pytest.mark.parametrize("block_size", [None, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_linear_fp8(kernel, device, block_size, dtype):
    """Also traced."""
    features = 3 * HIDDEN
    weight, weight_scale = kernel.quantize_fp8(torch.randn(80, features, device=device))
    bias = torch.randn(80, dtype=dtype, device=device)

    def call(x):
        x8, scale = kernel.quantize_fp8(x, block_size=block_size)
        out = kernel.linear_fp8(x8, scale, weight, weight_scale, bias, dtype=dtype)
        return x8.float(), scale, out

    x = torch.randn(BATCH, TOKENS, features, dtype=dtype, device=device)
    results = x8, scale, out = call(x)
    x8 = x8.double() * scale.double().repeat_interleave(block_size or features, -1)
    expected = F.linear(x8, weight.double() * weight_scale.double(), bias.double())
    # Sums of a few hundred terms, of which some cancel. A GPU keeps 14 bits of 128 terms.
    slack = (4e-6 if device == "cpu" else 1e-3) * expected.abs().max().item()
    assert out.dtype == dtype
    half_ulp = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(out.double(), expected, rtol=half_ulp, atol=slack)
    torch._dynamo.reset()
    traced = torch.compile(call, backend="aot_eager", fullgraph=True)(x)
    assert all(torch.equal(a, b) for a, b in zip(traced, results, strict=True))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_other_fp8_products(kernel, device, approximate):
    """Of several weights, with a residual, and with a quantized GELU."""
    features, columns = 3 * HIDDEN, 200
    weight, weight_scale = kernel.quantize_fp8(torch.randn(columns, features, device=device))
    x = kernel.quantize_fp8(torch.randn(BATCH, TOKENS, features, device=device))
    bias = torch.randn(columns, device=device)
    one = (*x, weight, weight_scale, bias)
    product = kernel.linear_fp8(*one)
    two = kernel.linears_fp8(*x, [weight] * 2, [weight_scale] * 2, [bias, None])
    assert torch.equal(two[0], product) and not torch.equal(two[1], product)

    low = torch.randn(BATCH, TOKENS, 16, device=device).bfloat16()
    up = torch.randn(columns, 16, device=device).bfloat16()
    out = kernel.linear_fp8(*one, low=low, up=up)
    term = low.double() @ up.double().T
    # The product and the sum were rounded to bfloat16.
    slack = (product.abs() + term.abs()) / 64
    assert ((out - (product + term)).abs() <= slack).all()

    residual = torch.randn(BATCH, TOKENS, columns, device=device)
    gate = torch.randn(BATCH, 1, columns, device=device)
    out = kernel.linear_gated_residual_fp8(residual.bfloat16(), *one, gate=gate)
    # The product and the residual were rounded to bfloat16.
    slack = (residual.abs() + (gate * product).abs()) / 128
    assert ((out - (residual + gate * product)).abs() <= slack).all()

    downs = [torch.randn(rank, features, device=device).bfloat16() for rank in (16, 3)]
    out = kernel.lora_down(x[0], downs, [0.5, -1], x[1])
    wide = x[0].double() * x[1].double()
    expected = torch.cat([0.5 * wide @ downs[0].double().T, -wide @ downs[1].double().T], -1)
    torch.testing.assert_close(out[..., :19].double(), expected, rtol=1 / 256, atol=1e-3)
    assert out.shape[-1] == 24 and not out[..., 19:].any()

    values, scales = kernel.linear_gelu_fp8(*one, approximate=approximate)
    expected = F.gelu(product.double(), approximate=approximate)
    largest = [block.abs().amax(-1) / 448 for block in expected.split(128, -1)]
    # The product was rounded to bfloat16.
    torch.testing.assert_close(scales.double(), torch.stack(largest, -1), rtol=2**-7, atol=0)
    steps = scales.double().repeat_interleave(128, -1)[..., :columns]
    slack = torch.maximum(expected.abs() / 16, steps * 2**-10) + product.double().abs() / 128
    assert ((values.double() * steps - expected).abs() <= 1.01 * slack).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("approximate", [None, "none", "tanh"])
def test_lora(kernel, device, dtype, approximate):
    def tensor(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    x = tensor(BATCH, TOKENS, HIDDEN)
    sizes, ranks = (200, HIDDEN), (16, 72)
    weights, biases = [tensor(size, HIDDEN) for size in sizes], [tensor(sizes[0]), None]
    lows = tensor(BATCH, TOKENS, sum(ranks)).split(ranks, -1)
    ups = [tensor(*shape) for shape in zip(sizes, ranks, strict=True)]
    results = kernel.linears_lora(x, weights, lows, ups, biases, approximate=approximate)
    for out, weight, low, up, bias in zip(results, weights, lows, ups, biases, strict=True):
        bias = bias if bias is None else bias.double()
        expected = F.linear(x.double(), weight.double(), bias) + low.double() @ up.double().T
        if approximate is not None:
            expected = F.gelu(expected, approximate=approximate)
        half_ulp = torch.finfo(dtype).eps / 2
        torch.testing.assert_close(out.double(), expected, rtol=half_ulp + 1e-5, atol=1e-4)
    low = kernel.lora_down(x, [weights[0][:16]])
    torch.testing.assert_close(low, x @ weights[0][:16].T, rtol=1 / 64, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_conv3d(kernel, device, dtype):
    x = torch.randn(BATCH, 16, 3, 5, 7, device=device).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last_3d)
    weight = torch.randn(24, 16, 3, 3, 3, device=device).to(dtype)
    out = kernel.conv3d(x, weight, padding=(2, 0, 1, 1), previous=x[:, :, :2])
    padded = F.pad(torch.cat([x[:, :, :2], x], 2).double(), (1, 1, 1, 1, 2, 0))
    half_ulp = torch.finfo(dtype).eps / 2
    expected = F.conv3d(padded, weight.double())
    torch.testing.assert_close(out.double(), expected, rtol=half_ulp + 1e-5, atol=1e-3)


def test_a_wrong_call_raises_one_sentence(kernel, device):
    x = torch.randn(3, 64, device=device)
    with pytest.raises(ValueError, match=r"^rms_norm: weight must .*\S$") as raised:
        kernel.rms_norm(x, torch.randn(63, device=device))
    assert "\n" not in str(raised.value)
    with pytest.raises(TypeError, match=r"^rms_norm: x must be "):
        kernel.rms_norm([1.0])


def test_an_injected_model(kernel, device):
    """It computes the plain model's values, and has its bits again when ejected."""
    torch.manual_seed(0)
    channels = {"in_channels": 8, "out_channels": 8, "caption_channels": 32, "num_layers": 2}
    heads = {"num_attention_heads": HEADS, "attention_head_dim": HEAD_DIM}
    model = diffusers.LTXVideoTransformer3DModel(**channels, **heads, cross_attention_dim=HIDDEN)
    model = model.to(device, torch.bfloat16).eval()
    arguments = {
        "hidden_states": torch.randn(BATCH, TOKENS, 8),
        "encoder_hidden_states": torch.randn(BATCH, 5, 32),
        "timestep": torch.tensor([500.0, 20.0]),
        "encoder_attention_mask": torch.ones(BATCH, 5),
    }
    arguments = {name: t.to(device, torch.bfloat16) for name, t in arguments.items()}
    sizes = dict(zip(("num_frames", "height", "width"), GRID, strict=True))

    def forward():
        with torch.no_grad():
            return model(**arguments, **sizes, return_dict=False)[0]

    plain = forward()
    report = kernel.inject_kernels(model)
    injected = forward()
    assert list(report.levels.values()) == ["in full"]
    assert not torch.equal(injected, plain)
    assert (injected - plain).norm() < 0.02 * plain.norm()
    kernel.eject_kernels(model)
    assert torch.equal(forward(), plain)
