"""quantize_fp8 and linear_fp8, and wrong arguments of these and of the products in test_fp8_products.py."""

import math
import re

import pytest
import torch

import references
from checks import (
    MemorySnapshot,
    assert_contract,
    assert_rounded_once,
    assert_same_bits,
    compiled_outcome,
    have_same_bits,
    map_tensors,
    outcome,
    poison_memory,
    relative_distance,
    tensors_of,
)
from conftest import load_kernel
from inputs import (
    DTYPES,
    FP8_PRODUCTS,
    LAYOUTS,
    LORA_DOWN_OF_16_BITS,
    PLAIN_CALLS,
    PLAIN_OPERATIONS,
    every_16_bit_dtype,
    every_dtype,
    every_second,
    fp8_operands,
    normal,
    of_shape,
    pairwise,
    sample,
)

FP8 = torch.float8_e4m3fn
BLOCK_SIZES = [None, 128]
every_block_size = pytest.mark.parametrize("block_size", BLOCK_SIZES)

# --------------------------------------------------------------------------------------------------
# quantize_fp8


def assert_same_values(out, expected):
    """Bitwise, except that zeros may differ in sign, and NaN in payload."""
    assert (out.dtype, out.shape) == (expected.dtype, expected.shape)
    torch.testing.assert_close(out.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


def check_quantized(kernel, x, block_size=None):
    expected = references.quantize_fp8(x, block_size=block_size)
    memory = MemorySnapshot([x])
    poison_memory(*(torch.empty_like(t, dtype=torch.uint8).float() for t in expected))
    results = kernel.quantize_fp8(x, block_size=block_size)
    memory.assert_unchanged()
    for out, reference in zip(results, expected, strict=True):
        assert out.is_contiguous() and out.device == x.device
        assert_same_values(out, reference)
    return results


# Rows that fit in registers, that are longer, and that are not aligned.
SIZES = [1, 7, 8, 16, 100, 127, 128, 129, 136, 256, 1000, 1544, 4096, 8192, 8200, 16384, 16392]
SIZES += [18440, 40000]


@pairwise(hidden=SIZES, block_size=BLOCK_SIZES, dtype=DTYPES)
def test_sizes(kernel, device, hidden, block_size, dtype):
    check_quantized(kernel, normal(5, hidden, dtype=dtype, device=device, std=3.0), block_size)


@pairwise(
    shape=[(256,), (2, 3, 136), (3, 11, 65), (2, 3, 2, 5, 128), (3, 2, 3, 2, 264)],
    layout=LAYOUTS,
    block_size=BLOCK_SIZES,
    dtype=DTYPES,
)
def test_layouts(kernel, device, shape, layout, block_size, dtype):
    check_quantized(kernel, normal(*shape, dtype=dtype, device=device, layout=layout), block_size)


@every_dtype
def test_every_code(kernel, device, dtype):
    """Each E4M3 number, and the numbers between two of them, round to nearest even."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(FP8).float()
    numbers = codes[codes.isfinite()].sort().values
    between = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat([numbers, between, between * (1 + 2**-7), between * (1 - 2**-7)]).to(dtype)
    x8, scale = check_quantized(kernel, x)
    assert scale == 1
    assert torch.equal(x8[: len(numbers)].float(), numbers)
    assert torch.equal(x8.float(), x.to(FP8).float())


@every_block_size
@pytest.mark.parametrize("std", [1e-38, 1e-36, 1e-30, 1e-6, 1e4, 1e30, 1e37])
def test_scales(kernel, device, std, block_size):
    """Rows of which the scale is close to the smallest or the largest float32."""
    check_quantized(kernel, normal(64, 300, dtype=torch.float32, device=device) * std, block_size)


@every_block_size
@pytest.mark.parametrize("hidden", [100, 512, 20000])
@every_dtype
def test_values_that_are_not_finite(kernel, device, hidden, block_size, dtype):
    x = normal(6, hidden, dtype=dtype, device=device)
    x[0, 3], x[1, hidden - 1], x[2, 50] = math.nan, math.inf, -math.inf
    x[3, :] = math.nan
    x8, scale = check_quantized(kernel, x, block_size)
    groups = (1 if block_size is None else math.ceil(hidden / 128)) - 1
    assert scale.isnan().sum(-1).tolist() == [1, 1, 1, 1 + groups, 0, 0]
    assert x8[0, :100].float().isnan().all() and not x8[4:].float().isnan().any()


@every_block_size
@pytest.mark.parametrize("hidden", [100, 512, 20000])
def test_zeros_and_subnormal_scales(kernel, device, hidden, block_size):
    x = normal(5, hidden, dtype=torch.float32, device=device)
    x[0] = 0
    x[1] = -0.0
    x[2] = 448 * torch.finfo(torch.float32).tiny  # the smallest scale
    x[3] = x[2].nextafter(torch.zeros_like(x[2]))
    x[4] *= 1e-41
    x8, scale = check_quantized(kernel, x, block_size)
    assert (scale[[0, 1, 3, 4]] == 0).all() and (x8[[0, 1, 3, 4]].float() == 0).all()
    assert (scale[2] == torch.finfo(torch.float32).tiny).all() and (x8[2].float() == 448).all()


def test_blocks_are_rows_of_their_own(kernel, device):
    x = normal(3, 5 * 128, dtype=torch.bfloat16, device=device)
    x8, scale = kernel.quantize_fp8(x, block_size=128)
    rows, row_scale = kernel.quantize_fp8(x.view(15, 128))
    assert have_same_bits(x8.view(torch.uint8), rows.view(3, -1).view(torch.uint8))
    assert torch.equal(scale, row_scale.view(3, 5))


@every_block_size
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 128), (2, 0, 200)], ids=str)
def test_nothing_to_quantize(kernel, device, shape, block_size):
    x8, scale = kernel.quantize_fp8(torch.ones(shape, device=device), block_size=block_size)
    assert (x8.shape, x8.dtype, scale.dtype) == (shape, FP8, torch.float32)
    assert scale.shape == (*shape[:-1], 1 if block_size is None else math.ceil(shape[-1] / 128))
    assert not scale.any()


def test_equals_torchao(kernel, device):
    quantization = pytest.importorskip("torchao.quantization")
    x = normal(37, 300, dtype=torch.float32, device=device)
    tensor = quantization.Float8Tensor.from_hp(x, FP8, quantization.PerRow())
    x8, scale = kernel.quantize_fp8(x)
    # On a GPU PyTorch multiplies by the rounded 1 / 448.
    is_same = (scale == tensor.scale).squeeze(-1)
    assert is_same.all() if device == "cpu" else is_same.any()
    torch.testing.assert_close(scale, tensor.scale, rtol=2e-7, atol=0)
    assert_same_values(x8[is_same], tensor.qdata[is_same])


# --------------------------------------------------------------------------------------------------
# linear_fp8


def check_linear(kernel, arguments):
    expected = references.linear_fp8(**arguments)
    magnitudes = map_tensors(lambda t: t.double().abs(), arguments)
    rounded = expected.to(arguments["dtype"])
    memory = MemorySnapshot(tensors_of(arguments))
    poison_memory(rounded)
    out = kernel.linear_fp8(**arguments)
    memory.assert_unchanged()
    assert out.is_contiguous()
    assert (out.shape, out.dtype, out.device) == (expected.shape, rounded.dtype, rounded.device)
    # Errors relative to the sum of the terms' magnitudes, which may cancel: of float32 sums, or of the tensor
    # cores' sums of up to 256 products, which keep 14 bits of the largest one.
    arithmetic = 4e-6 if out.is_cpu else 2**-12
    slack = arithmetic * references.linear_fp8(**magnitudes) + torch.finfo(out.dtype).tiny
    assert_rounded_once(out, expected, slack)
    if out.is_cpu:
        assert_contract(out, expected, rounded)
    return out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("size", [(512, 512, 128), (1000, 2048, 2048), (333, 3072, 12288)], ids=str)
@pytest.mark.parametrize("has_outliers", [False, True])
def test_error_beside_exact_accumulation(kernel, size, has_outliers):
    """About that of torch._scaled_mm without fast accumulation, which adds up fewer products at a time."""
    rows, out_features, in_features = size
    x = torch.randn(rows, in_features, device="cuda")
    if has_outliers:
        x[:, ::100] *= 60
    x8, x_scale = kernel.quantize_fp8(x)
    weight, scale = kernel.quantize_fp8(torch.randn(out_features, in_features, device="cuda"))
    expected = references.linear_fp8(x8, x_scale, weight, scale)
    exact = torch._scaled_mm(
        x8, weight.t(), x_scale, scale.t(), out_dtype=torch.bfloat16, use_fast_accum=False
    )
    error = relative_distance(kernel.linear_fp8(x8, x_scale, weight, scale), expected)
    assert error <= 1.02 * relative_distance(exact, expected)


WEIGHT_SCALES = {
    "rows": lambda scale: scale,
    "()": lambda scale: scale[0, 0],
    "(1,)": lambda scale: scale[0],
    "(1,1)": lambda scale: scale[:1],
}
RANKS = [None, 8, 16, 24, 32, 64, (72, 8), 128]
BIASES = {"none": lambda b: None, "T": lambda b: b, "float32": lambda b: b.float() * 1.001}
PRODUCTS = {
    "rows": [(), 1, 2, 63, 64, 65, 130, (2, 3, 5)],
    "in_features": [16, 48, 128, 144, 256, 400, 1024, 4096],
    "is_blocked": [False, True],
    "weight_scale": WEIGHT_SCALES,
}


def linear_arguments(
    rows,
    out_features,
    in_features,
    is_blocked,
    dtype,
    device,
    weight_scale="rows",
    bias="T",
    rank=None,
):
    shape = (*((rows,) if isinstance(rows, int) else rows), in_features)
    blocks = math.ceil(in_features / 128) if is_blocked else 1
    arguments = fp8_operands(shape, out_features, blocks, rank, dtype=dtype, device=device)
    arguments["weight_scale"] = WEIGHT_SCALES[weight_scale](arguments["weight_scale"])
    arguments["bias"] = BIASES[bias](arguments["bias"])
    return arguments


@pairwise(
    **PRODUCTS,
    out_features=[1, 7, 8, 64, 65, 130, 256],
    dtype=[torch.bfloat16, torch.float16],
    bias=BIASES,
    rank=RANKS,
)
def test_products(
    kernel, device, rows, out_features, in_features, is_blocked, dtype, weight_scale, bias, rank
):
    size = rows, out_features, in_features, is_blocked
    check_linear(kernel, linear_arguments(*size, dtype, device, weight_scale, bias, rank))


def one_term_of_each_block(rows, out_features, blocks, device):
    """x and weight, whose products are the sum of one power of two for each block."""
    x = torch.zeros(rows, blocks, 128, device=device)
    weight = torch.zeros(out_features, blocks, 128, device=device)
    for block in range(blocks):
        x[:, block, 37 * block + 1] = 2**block
        weight[:, block, 37 * block + 1] = 1
    return x.flatten(1).to(FP8), weight.flatten(1).to(FP8)


@pytest.mark.parametrize("is_blocked", [False, True])
@every_16_bit_dtype
def test_each_operand_is_where_it_belongs(kernel, device, is_blocked, dtype):
    """Exact products of small integers, in which each row, column and block has its own scale."""
    rows, out_features, blocks = 70, 90, 3
    arguments = linear_arguments(rows, out_features, 128 * blocks, is_blocked, dtype, device)
    arguments["x"], arguments["weight"] = one_term_of_each_block(rows, out_features, blocks, device)
    powers = torch.arange(rows * arguments["x_scale"].shape[1], device=device) % 3
    arguments["x_scale"] = (2.0**powers).view_as(arguments["x_scale"])
    arguments["weight_scale"] = 2.0 ** (torch.arange(out_features, device=device) % 4)[:, None]
    arguments["bias"] = None
    out = kernel.linear_fp8(**arguments)
    assert torch.equal(out.double(), references.linear_fp8(**arguments))


def test_every_pair_of_codes(kernel, device):
    """The product of each E4M3 number with each other one, of which NaN is one."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    x, weight = torch.zeros(2, 256, 16, dtype=torch.uint8, device=device)
    x[:, 3] = weight[:, 3] = codes
    one = torch.ones((), device=device)
    arguments = {"x": x.view(FP8), "weight": weight.view(FP8), "weight_scale": one}
    out = kernel.linear_fp8(**arguments, x_scale=one.expand(256, 1).contiguous())
    values = codes.view(FP8).float()
    torch.testing.assert_close(
        out, torch.outer(values, values).to(torch.bfloat16), rtol=0, atol=0, equal_nan=True
    )


def test_a_scale_that_is_not_finite_affects_its_row(kernel, device):
    arguments = linear_arguments(5, 24, 256, True, torch.bfloat16, device)
    expected = kernel.linear_fp8(**arguments)
    arguments["x_scale"][2, 1] = math.nan
    out = kernel.linear_fp8(**arguments)
    others = [0, 1, 3, 4]
    assert out[2].isnan().all() and torch.equal(out[others], expected[others])


@pytest.mark.parametrize(("rows", "out_features"), [(0, 24), ((2, 0), 24), (5, 0), (0, 0)])
@pytest.mark.parametrize("is_blocked", [False, True])
def test_empty_products(kernel, device, rows, out_features, is_blocked):
    arguments = linear_arguments(rows, out_features, 256, is_blocked, torch.float16, device)
    out = kernel.linear_fp8(**arguments)
    assert out.dtype == torch.float16 and out.shape == (*arguments["x"].shape[:-1], out_features)


def check_out(function, arguments, out, expected):
    """The same bits as new results, and no other write."""
    memory = MemorySnapshot(tensors_of(arguments, out))
    results = function(**arguments, out=out)
    assert all(a is b for a, b in zip(results, out, strict=True))
    assert_same_bits(results, expected)
    for tensor in out:
        memory.allow(tensor)
    memory.assert_unchanged()


# --------------------------------------------------------------------------------------------------
# Derivatives and tracing


REFUSED = (
    "{}: {} must not require grad, carry a tangent or be in a transform of torch.func, "
    "got a tensor that may"
)


def tensor_arguments(name):
    options = {"dtype": torch.bfloat16, "device": "cpu", "shape": (2, 4, 64)}
    _, arguments = sample(load_kernel(), name, **options)
    return [key for key, value in arguments.items() if isinstance(value, torch.Tensor)]


OF_TENSORS = [(name, argument) for name in PLAIN_OPERATIONS for argument in tensor_arguments(name)]
# The same of one operation for each operator.
OPERATORS = {
    "quantize_fp8",
    "linears_lora",
    *FP8_PRODUCTS,
    "lora_down",
    "rms_norm_fp8",
    "geglu_fp8",
}
OPERATORS.add("gated_residual_layer_norm_modulate_fp8")


def refused_for_gradients(kernel, device, name, argument):
    """A call with an argument that requires grad, and its error."""
    function, arguments = sample(kernel, name, dtype=torch.bfloat16, device=device)
    arguments[argument].requires_grad_()
    text = REFUSED.format(function.__name__, argument)
    assert outcome(function, arguments) == (ValueError, text)
    return function, arguments


@pytest.mark.parametrize("name", ["lora_down", *FP8_PRODUCTS, "linears_lora"])
def test_no_derivatives_of_later_tensors_of_a_sequence(kernel, device, name):
    function, arguments = sample(kernel, name, dtype=torch.bfloat16, device=device)
    argument = "downs" if name == "lora_down" else "ups" if "ups" in arguments else "up"
    if argument != "downs":
        first, *others = arguments["ups"] if argument == "ups" else (arguments["up"],)
        several = first[:, :8].clone(), first[:, 8:].clone().requires_grad_()
        arguments[argument] = (several, *others) if argument == "ups" else several
    else:
        arguments["downs"][1].requires_grad_()
    assert outcome(function, arguments) == (ValueError, REFUSED.format(name, argument))


@pytest.mark.parametrize(("name", "argument"), OF_TENSORS)
def test_no_derivatives(kernel, device, name, argument):
    function, arguments = refused_for_gradients(kernel, device, name, argument)
    with torch.no_grad():
        results = function(**arguments)
    plain = map_tensors(torch.Tensor.detach, arguments)
    for out, one in zip(tensors_of(results), tensors_of(function(**plain)), strict=True):
        assert_same_values(out, one)


@pytest.mark.drawn(times=0, period=4)
@pytest.mark.parametrize(
    ("name", "argument"), [case for case in OF_TENSORS if case[0] in OPERATORS]
)
def test_no_derivatives_when_traced(kernel, device, name, argument):
    function, arguments = refused_for_gradients(kernel, device, name, argument)
    assert compiled_outcome(function, arguments) == outcome(function, arguments)


@pytest.mark.parametrize("name", PLAIN_CALLS)
def test_no_transforms(kernel, device, name):
    function, arguments = sample(kernel, name, dtype=torch.bfloat16, device=device)
    first = next(iter(arguments))
    text = re.escape(REFUSED.format(function.__name__, first))

    def call(tensor):
        return next(tensors_of(function(**{**arguments, first: tensor})))

    with pytest.raises(ValueError, match=f"^{text}$"):
        torch.func.vmap(call)(arguments[first])
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match=f"^{text}$"):
        call(arguments[first])


@pytest.mark.drawn(times=0, period=3)
@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("name", PLAIN_CALLS)
def test_compile(kernel, device, name, is_dynamic):
    torch._dynamo.reset()
    function, _ = sample(kernel, name, dtype=torch.bfloat16, device=device)
    traced = torch.compile(function, fullgraph=True, backend="eager", dynamic=is_dynamic)
    for shape in ((2, 16, 256), (2, 5, 256), (3, 4, 384)) if is_dynamic else ((2, 16, 256),) * 2:
        _, arguments = sample(kernel, name, dtype=torch.bfloat16, device=device, shape=shape)
        results = tensors_of(traced(**arguments)), tensors_of(function(**arguments))
        assert all(have_same_bits(a, b) for a, b in zip(*results, strict=True))


# --------------------------------------------------------------------------------------------------
# Errors. The valid calls: x (2, 16, 256), weight (40, 256).


def to(dtype):
    return lambda tensor: tensor.float().to(dtype)


def value(constant):
    return lambda _: constant


def of_row_distance(elements):
    """The tensor as columns of a wider one."""

    def change(tensor):
        wide = tensor.new_zeros(*tensor.shape[:-1], elements)
        return wide[..., : tensor.shape[-1]].copy_(tensor)

    return change


CONTIGUOUS = "be contiguous, got shape {} with strides {}"
UNALIGNED = "be aligned to 16 bytes, got an address that is 1 byte past a multiple of them"
MULTIPLE = "have a last dimension that is a positive multiple of 16, got"
STRIDE = "have stride 1 in its last dimension, got stride 2"
FLOATS = "be float32, float16 or bfloat16, got"
OF_RESULT = "be float32 or have the dtype of the result (bfloat16), got"
LOW_OF_RESULT = "have the dtype of the result (bfloat16), got"
MULTIPLE_OF_8 = "have a last dimension that is a positive multiple of 8, got"
ONE_DISTANCE = (
    "have rows at one distance, a multiple of 8 elements, got shape (2, 16, 24) with strides"
)
X_SCALE = "have shape (2, 16, 1) or (2, 16, 2), got"
BROADCAST = "broadcast against residual of shape (2, 16, 40)"
WEIGHT_SCALE = "have shape (40, 1) or one element, got"
LINEAR, GELU, RESIDUAL = "linear_fp8", "linear_gelu_fp8", "linear_gated_residual_fp8"
DOWN, DOWN_16 = "lora_down", LORA_DOWN_OF_16_BITS
# For a call and its argument, or an item of one: changes, and the sentences after "operation: argument must".
MISTAKES = {
    ("quantize_fp8", "x"): [
        (value([1.0]), "be a tensor, got list"),
        (value(None), "be a tensor, got None"),
        (of_shape(), "have at least 1 dimension, got shape ()"),
        (to(FP8), f"{FLOATS} float8_e4m3fn"),
        (to(torch.float64), f"{FLOATS} float64"),
        (every_second, STRIDE),
    ],
    ("quantize_fp8", "block_size"): [
        (value(64), "be 128 or None, got 64"),
        (value(0), "be 128 or None, got 0"),
        (value(True), "be an integer or None, got True"),
        (value(128.0), "be an integer or None, got 128.0"),
        (value("128"), "be an integer or None, got '128'"),
    ],
    (LINEAR, "x"): [
        (value([1.0]), "be a tensor, got list"),
        (to(torch.bfloat16), "be float8_e4m3fn, got bfloat16"),
        (to(torch.float8_e5m2), "be float8_e4m3fn, got float8_e5m2"),
        (of_shape(), "have at least 1 dimension, got shape ()"),
        (of_shape(2, 16, 248), f"{MULTIPLE} 248"),
        (of_shape(2, 16, 0), f"{MULTIPLE} 0"),
        (lambda x: x.mT.contiguous().mT, CONTIGUOUS.format((2, 16, 256), (4096, 1, 16))),
        (lambda x: x[:, :1].expand(2, 16, 256), CONTIGUOUS.format((2, 16, 256), (4096, 0, 1))),
        (LAYOUTS["misaligned"], UNALIGNED),
    ],
    (LINEAR, "x_scale"): [
        (value(1.0), "be a tensor, got 1.0"),
        (to(torch.bfloat16), "be float32, got bfloat16"),
        (of_shape(16, 1), f"{X_SCALE} (16, 1)"),
        (of_shape(2, 16, 256), f"{X_SCALE} (2, 16, 256)"),
        (of_shape(), f"{X_SCALE} ()"),
    ],
    (f"{LINEAR}_in_blocks", "x_scale"): [(every_second, CONTIGUOUS.format((2, 16, 2), (64, 4, 2)))],
    (LINEAR, "weight"): [
        (value(None), "be a tensor, got None"),
        (to(torch.float16), "be float8_e4m3fn, got float16"),
        (of_shape(256), "have shape (N, 256), got (256,)"),
        (of_shape(256, 40), "have shape (N, 256), got (256, 40)"),
        (of_shape(1, 40, 256), "have shape (N, 256), got (1, 40, 256)"),
        (lambda w: w.T.contiguous().T, CONTIGUOUS.format((40, 256), (1, 40))),
        (LAYOUTS["misaligned"], UNALIGNED),
    ],
    (LINEAR, "weight_scale"): [
        (to(torch.float16), "be float32, got float16"),
        (of_shape(40), f"{WEIGHT_SCALE} (40,)"),
        (of_shape(1, 40), f"{WEIGHT_SCALE} (1, 40)"),
        (of_shape(1, 1, 1), f"{WEIGHT_SCALE} (1, 1, 1)"),
        (lambda s: s[:1].expand(40, 1), CONTIGUOUS.format((40, 1), (0, 1))),
    ],
    (LINEAR, "bias"): [
        (value([1.0]), "be a tensor or None, got list"),
        (to(torch.float16), f"{OF_RESULT} float16"),
        (to(FP8), f"{OF_RESULT} float8_e4m3fn"),
        (of_shape(41), "have shape (40,), got (41,)"),
        (of_shape(1, 40), "have shape (40,), got (1, 40)"),
        (every_second, STRIDE),
    ],
    (LINEAR, "low"): [
        (value([1.0]), "be a tensor or None, got list"),
        (to(torch.float16), f"{LOW_OF_RESULT} float16"),
        (to(torch.float32), f"{LOW_OF_RESULT} float32"),
        (of_shape(2, 15, 24), "have shape (2, 16, R), got (2, 15, 24)"),
        (of_shape(16, 24), "have shape (2, 16, R), got (16, 24)"),
        (of_shape(2, 16, 12), f"{MULTIPLE_OF_8} 12"),
        (of_shape(2, 16, 0), f"{MULTIPLE_OF_8} 0"),
        (every_second, STRIDE),
        (lambda t: t[:, :1].expand_as(t), f"{ONE_DISTANCE} (384, 0, 1)"),
        (of_row_distance(28), f"{ONE_DISTANCE} (448, 28, 1)"),
        (lambda t: t.transpose(0, 1).contiguous().transpose(0, 1), f"{ONE_DISTANCE} (24, 48, 1)"),
        (LAYOUTS["misaligned"], UNALIGNED.replace("1 byte", "2 bytes")),
    ],
    (LINEAR, "up"): [
        (to(torch.float16), "have the dtype of low (bfloat16), got float16"),
        (of_shape(40, 16), "have shape (40, 24), got (40, 16)"),
        (of_shape(24, 40), "have shape (40, 24), got (24, 40)"),
        (of_row_distance(32), CONTIGUOUS.format((40, 24), (32, 1))),
        (LAYOUTS["misaligned"], UNALIGNED.replace("1 byte", "2 bytes")),
    ],
    (LINEAR, "dtype"): [
        (value(torch.float32), "be bfloat16 or float16, got float32"),
        (value(FP8), "be bfloat16 or float16, got float8_e4m3fn"),
        (value("bfloat16"), "be a torch.dtype, got 'bfloat16'"),
        (value(None), "be a torch.dtype, got None"),
    ],
    (GELU, "x"): [
        (torch.Tensor.half, "be float8_e4m3fn, got float16"),
        (lambda x: x[..., :8].contiguous(), f"{MULTIPLE} 8"),
    ],
    (GELU, "weight"): [(torch.Tensor.half, "be float8_e4m3fn, got float16")],
    (GELU, "bias"): [
        (torch.Tensor.int, f"{FLOATS} int32"),
        (lambda b: b[:39], "have shape (40,), got (39,)"),
    ],
    (GELU, "low"): [
        (torch.Tensor.float, "be float16 or bfloat16, got float32"),
    ],
    (GELU, "approximate"): [
        (value("erf"), "be 'none' or 'tanh', got 'erf'"),
        (value(None), "be a string, got None"),
    ],
    ("linears_fp8", "x_scale"): [(torch.Tensor.half, "be float32, got float16")],
    ("linears_fp8", "weights"): [
        (lambda w: w[0], "be a tuple or list, got Tensor"),
        (lambda w: w[:1], "hold 2 or 3 tensors, got 1"),
        (lambda w: (*w, w[0]), "hold 2 or 3 tensors, got 4"),
    ],
    ("linears_fp8", "weights[0]"): [(value(None), "be a tensor, got None")],
    ("linears_fp8", "weights[1]"): [
        (lambda w: w[:, :240].contiguous(), "have shape (N, 256), got (7, 240)")
    ],
    ("linears_fp8", "weights[2]"): [
        (value(None), "be a tensor, got None"),
        (torch.Tensor.float, "be float8_e4m3fn, got float32"),
    ],
    ("linears_fp8", "weight_scales"): [
        (value(None), "be a tuple or list, got None"),
        (lambda s: s[:2], "hold 3 tensors, got 2"),
    ],
    ("linears_fp8", "weight_scales[2]"): [(value(2), "be a tensor, got 2")],
    ("linears_fp8", "weight_scales[1]"): [(torch.Tensor.half, "be float32, got float16")],
    ("linears_fp8", "biases"): [
        (lambda b: b[0], "be a tuple, a list or None, got Tensor"),
        (lambda b: b[:2], "hold 3 tensors, got 2"),
    ],
    ("linears_fp8", "biases[1]"): [(value(2.0), "be a tensor or None, got 2.0")],
    ("linears_fp8", "biases[2]"): [(lambda b: b[:3], "have shape (64,), got (3,)")],
    ("linears_fp8", "lows"): [
        (lambda t: t[0], "be a tuple, a list or None, got Tensor"),
        (lambda t: t[:2], "hold 3 tensors, got 2"),
    ],
    ("linears_fp8", "lows[0]"): [
        (value(2.0), "be a tensor or None, got 2.0"),
        (torch.Tensor.half, f"{LOW_OF_RESULT} float16"),
    ],
    ("linears_fp8", "ups[2]"): [(lambda t: t[:3], "have shape (64, 8), got (3, 8)")],
    ("linears_fp8", "dtype"): [(value(torch.float32), "be bfloat16 or float16, got float32")],
    (DOWN, "x"): [
        (torch.Tensor.half, "be float8_e4m3fn, got float16"),
        (lambda x: x[..., :8].contiguous(), f"{MULTIPLE} 8"),
    ],
    (DOWN, "x_scale"): [(of_shape(16, 1), f"{X_SCALE} (16, 1)")],
    (DOWN_16, "x"): [
        (value(None), "be a tensor, got None"),
        (torch.Tensor.float, "be float16 or bfloat16, got float32"),
        (of_shape(), "have at least 1 dimension, got shape ()"),
        (lambda x: x[..., :4].contiguous(), f"{MULTIPLE_OF_8} 4"),
        (lambda x: x.mT.contiguous().mT, f"{STRIDE[:-1]}16"),
        (lambda x: x[:, :1].expand(2, 16, 256), CONTIGUOUS.format((2, 16, 256), (4096, 0, 1))),
        (LAYOUTS["misaligned"], UNALIGNED.replace("1 byte", "2 bytes")),
    ],
    (DOWN, "downs"): [
        (lambda d: d[0], "be a tuple or list, got Tensor"),
        (value(None), "be a tuple or list, got None"),
        (lambda d: (), "hold 1 to 12 tensors, got 0"),
        (lambda d: d[:1] * 13, "hold 1 to 12 tensors, got 13"),
    ],
    (DOWN, "downs[0]"): [
        (value(None), "be a tensor, got None"),
        (torch.Tensor.float, "be float16 or bfloat16, got float32"),
        (of_shape(24, 128), "have shape (R, 256), got (24, 128)"),
        (of_shape(256), "have shape (R, 256), got (256,)"),
        (of_shape(0, 256), "have 1 to 1024 rows, got 0"),
        (of_shape(1025, 256), "have 1 to 1024 rows, got 1025"),
        (lambda d: d.T.contiguous().T, CONTIGUOUS.format((24, 256), (1, 24))),
        (LAYOUTS["misaligned"], UNALIGNED.replace("1 byte", "2 bytes")),
    ],
    (DOWN, "downs[1]"): [
        (value(None), "be a tensor, got None"),
        (value(2.0), "be a tensor, got 2.0"),
        (torch.Tensor.half, "have the dtype of downs[0] (bfloat16), got float16"),
    ],
    (DOWN, "downs[2]"): [(of_shape(8, 128), "have shape (R, 256), got (8, 128)")],
    (DOWN_16, "downs[0]"): [(torch.Tensor.half, "have the dtype of x (bfloat16), got float16")],
    (DOWN, "scales"): [
        (value(2.0), "be a tuple, a list or None, got 2.0"),
        (lambda s: s[:2], "hold 3 numbers, got 2"),
    ],
    (DOWN, "scales[1]"): [
        (value("2"), "be a number, got '2'"),
        (value(None), "be a number, got None"),
        (value(math.inf), "be finite in float32, got inf"),
        (value(1e39), "be finite in float32, got 1e+39"),
    ],
    (RESIDUAL, "residual"): [
        (value(None), "be a tensor, got None"),
        (torch.Tensor.float, "be float16 or bfloat16, got float32"),
        (lambda r: r[:, :3], "have shape (2, 16, 40), got (2, 3, 40)"),
        (every_second, STRIDE),
    ],
    (RESIDUAL, "x"): [(torch.Tensor.half, "be float8_e4m3fn, got float16")],
    (RESIDUAL, "low"): [(of_shape(2, 16, 4), f"{MULTIPLE_OF_8} 4")],
    (RESIDUAL, "gate"): [
        (value(1.0), "be a tensor or None, got 1.0"),
        (lambda g: g[..., :39], f"{BROADCAST} with a last dimension of 40, got (2, 1, 39)"),
        (torch.Tensor.half, "be float32 or have the dtype of residual (bfloat16), got float16"),
    ],
}
every_mistake = pytest.mark.parametrize(
    ("name", "argument", "number"),
    [(*place, number) for place, changes in MISTAKES.items() for number in range(len(changes))],
)


def wrong_call(kernel, device, name, argument, number):
    change, must = MISTAKES[name, argument][number]
    function, arguments = sample(kernel, name, dtype=torch.bfloat16, device=device)
    key, _, index = argument.rstrip("]").partition("[")
    if index:
        arguments[key] = list(arguments[key])
        arguments[key][int(index)] = change(arguments[key][int(index)])
    else:
        arguments[key] = change(arguments[key])
    kind = TypeError if re.match(r"be (a|an) ", must) else ValueError
    return function, arguments, (kind, f"{function.__name__}: {argument} must {must}")


@every_mistake
def test_mistakes(kernel, device, name, argument, number):
    function, arguments, expected = wrong_call(kernel, device, name, argument, number)
    memory = MemorySnapshot(tensors_of(arguments))
    assert outcome(function, arguments) == expected
    memory.assert_unchanged()


@pytest.mark.drawn(times=0, period=3)
@every_mistake
def test_mistakes_when_traced(kernel, device, name, argument, number):
    function, arguments, expected = wrong_call(kernel, device, name, argument, number)
    assert compiled_outcome(function, arguments) == expected


def test_lora_down_of_too_many_columns(kernel, device):
    _, arguments = sample(kernel, "lora_down", dtype=torch.bfloat16, device=device)
    arguments["downs"] = [
        torch.zeros(n, 256, dtype=torch.bfloat16, device=device) for n in (1000, 17, 7)
    ]
    text = "downs must have at most 1024 rows, each number rounded up to a multiple of 8, got 1032"
    assert outcome(kernel.lora_down, arguments) == (ValueError, f"lora_down: {text}")


def test_lora_down_of_fp8_needs_scales(kernel, device):
    _, arguments = sample(kernel, "lora_down", dtype=torch.bfloat16, device=device)
    arguments["x_scale"] = None
    text = "x_scale must be given with a float8_e4m3fn x, got None"
    assert outcome(kernel.lora_down, arguments) == (ValueError, f"lora_down: {text}")


@pytest.mark.parametrize("argument", ["x_scale", "weight", "weight_scale", "bias"])
def test_another_device(kernel, device, argument):
    if device == "cpu":
        pytest.skip("on a CPU the only other device is meta, which gets shapes alone")
    function, arguments = sample(kernel, "linear_fp8", dtype=torch.bfloat16, device=device)
    arguments[argument] = arguments[argument].cpu()
    text = f"linear_fp8: {argument} must be on the device of x (cuda:0), got cpu"
    assert outcome(function, arguments) == (ValueError, text)


@pytest.mark.parametrize("name", PLAIN_CALLS)
def test_tensors_without_their_memory(kernel, device, name):
    function, arguments = sample(kernel, name, dtype=torch.bfloat16, device=device)
    for argument, tensor in arguments.items():
        if isinstance(tensor, torch.Tensor):
            changed = {**arguments, argument: tensor.clone()}
            changed[argument].untyped_storage().resize_(2)
            needed = tensor.numel() * tensor.element_size()
            text = f"{argument} must have a storage of at least {needed} bytes, got one of 2 bytes"
            assert outcome(function, changed) == (ValueError, f"{function.__name__}: {text}")


def test_no_memory(kernel, device):
    x = torch.ones(1, 16, device=device).expand(2**46, 16)
    text = f"quantize_fp8: cannot allocate {2**50} bytes on {device}.*"
    with pytest.raises(torch.OutOfMemoryError, match=text):
        kernel.quantize_fp8(x)


def rows_of_many_tiles(rows, device):
    """More tiles than a GPU has multiprocessors. A CPU has none."""
    return rows if device == "cuda" else rows // 16


# For tiles of 128 and of 192 columns.
@pytest.mark.parametrize(
    ("rows", "out_features", "in_features"), [(2305, 4104, 1040), (2561, 3200, 272)], ids=str
)
@pytest.mark.parametrize("is_blocked", [False, True])
def test_products_of_many_tiles(kernel, device, rows, out_features, in_features, is_blocked):
    size = (rows_of_many_tiles(rows, device), out_features, in_features)
    check_linear(kernel, linear_arguments(*size, is_blocked, torch.bfloat16, device))


@pytest.mark.sanitize
@every_block_size
@pytest.mark.parametrize(
    ("shape", "layout"),
    [((2, 3, 7), "odd_rows"), ((3, 2048), "contiguous"), ((2, 40000), "misaligned")],
    ids=str,
)
def test_smoke(kernel, device, shape, layout, block_size):
    x = normal(*shape, dtype=torch.bfloat16, device=device, layout=layout)
    check_quantized(kernel, x, block_size)


@pytest.mark.sanitize
@pytest.mark.parametrize("is_blocked", [False, True])
@pytest.mark.parametrize("out_features", [136, 13001])  # one tile, several tiles of odd rows
def test_smoke_of_products(kernel, device, is_blocked, out_features):
    size = 130, out_features, 400, is_blocked
    check_linear(kernel, linear_arguments(*size, torch.bfloat16, device))
