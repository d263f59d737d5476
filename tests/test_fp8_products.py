"""linears_fp8, linear_gelu_fp8 and linear_gated_residual_fp8, and FP8 results in the caller's memory."""

import math

import pytest
import torch

import references
from checks import (
    MemorySnapshot,
    assert_rounded_once,
    assert_same_bits,
    compiled_outcome,
    map_tensors,
    outcome,
    poison_memory,
    tensors_of,
)
from inputs import (
    FP8_WITH_OUT,
    LAYOUTS,
    WRITABLE_LAYOUTS,
    every_second,
    normal,
    pairwise,
    sample,
    several_weights,
    writing_call,
)
from test_fp8 import (
    BIASES,
    FP8,
    PRODUCTS,
    RANKS,
    REFUSED,
    WEIGHT_SCALES,
    check_linear,
    check_out,
    linear_arguments,
    one_term_of_each_block,
    rows_of_many_tiles,
)
from test_norm_fp8 import rounded

APPROXIMATIONS = ["none", "tanh"]
every_approximation = pytest.mark.parametrize("approximate", APPROXIMATIONS)

# --------------------------------------------------------------------------------------------------
# linear_gelu_fp8

GELU_BIASES = {**BIASES, "float16": lambda b: b.half()}


def gelu_arguments(*size, approximate="none", bias="T", device, **options):
    arguments = linear_arguments(*size, dtype=torch.bfloat16, device=device, **options)
    arguments["bias"] = GELU_BIASES[bias](arguments["bias"])
    del arguments["dtype"]
    return {**arguments, "approximate": approximate}


def gelu_reference(arguments):
    """The float64 values before quantization, and their errors: those of test_fp8.check_linear."""
    operands = {key: value for key, value in arguments.items() if key != "approximate"}
    product = references.linear_fp8(**operands)
    magnitudes = references.linear_fp8(**map_tensors(lambda t: t.double().abs(), operands))
    arithmetic = 4e-6 if product.is_cpu else 2**-12
    values = torch.nn.functional.gelu(product, approximate=arguments["approximate"])
    # The slope of a GELU is at most 1.13.
    return values, 1.13 * arithmetic * magnitudes + 1e-5 * values.abs() + 1e-12


def in_blocks(values):
    return torch.nn.functional.pad(values, (0, -values.shape[-1] % 128)).unflatten(-1, (-1, 128))


def check_gelu(kernel, arguments):
    reference, slack = gelu_reference(arguments)
    memory = MemorySnapshot(tensors_of(arguments))
    poison_memory(reference.float())
    values, scale = kernel.linear_gelu_fp8(**arguments)
    memory.assert_unchanged()
    assert values.is_contiguous() and scale.is_contiguous() and values.device == reference.device
    assert (values.dtype, values.shape) == (FP8, reference.shape)
    assert (scale.dtype, scale.shape[:-1]) == (torch.float32, reference.shape[:-1])
    assert scale.shape[-1] == math.ceil(reference.shape[-1] / 128)
    if reference.numel() == 0:
        return values, scale
    blocks, errors, given = in_blocks(reference).abs(), in_blocks(slack), scale.double()
    assert (given >= (blocks - errors).amax(-1) / 448 * (1 - 1e-6)).all()
    assert (given <= (blocks + errors).amax(-1) / 448 * (1 + 1e-6)).all()
    # Rounding is monotonic: the result is between the roundings of both ends of the quotient's interval.
    divisor = given.repeat_interleave(128, -1)[..., : reference.shape[-1]]
    divisor = torch.where(divisor == 0, math.inf, divisor)
    lowest, highest = (
        rounded(((reference + sign * slack) / divisor).cpu()).to(values.device) for sign in (-1, 1)
    )
    assert ((lowest <= values.double()) & (values.double() <= highest)).all()
    if values.is_cpu and reference.numel() > 1000:
        assert (values.double() != rounded(reference / divisor)).double().mean() < 0.005
    return values, scale


@pairwise(
    **PRODUCTS,
    out_features=[1, 7, 16, 100, 127, 128, 129, 136, 256, 300],
    bias=GELU_BIASES,
    approximate=APPROXIMATIONS,
    rank=RANKS,
    is_float16=[False, True],
)
def test_gelu(
    kernel,
    device,
    rows,
    out_features,
    in_features,
    is_blocked,
    weight_scale,
    bias,
    approximate,
    rank,
    is_float16,
):
    size = rows, out_features, in_features, is_blocked
    options = {"weight_scale": weight_scale, "bias": bias, "approximate": approximate, "rank": rank}
    arguments = gelu_arguments(*size, **options, device=device)
    if rank is not None and is_float16:
        halves = {key: arguments[key] for key in ("low", "up")}
        arguments |= map_tensors(torch.Tensor.half, halves)
    check_gelu(kernel, arguments)


@every_approximation
def test_gelu_of_small_values_and_outlier_channels(kernel, device, approximate):
    """Products of order 1, where a GELU is no straight line, beside some of order 100."""
    arguments = gelu_arguments(100, 384, 256, False, approximate=approximate, device=device)
    arguments["weight_scale"] *= 0.002
    arguments["weight_scale"][5::100] *= 100
    values, _ = check_gelu(kernel, arguments)
    assert (values.float() < 0).any() and (values.float() > 100).any()


@every_approximation
def test_gelu_is_quantized_exactly(kernel, device, approximate):
    """Of integers from 16 on, where a GELU is the identity. Each row, column and block has its own scale."""
    rows, out_features, blocks = 70, 300, 3
    x, weight = one_term_of_each_block(rows, out_features, blocks, device)
    column = torch.arange(out_features, device=device)[:, None]
    row_scale = 2.0 ** (torch.arange(rows, device=device) % 3)[:, None]
    arguments = {
        "x": x,
        "x_scale": row_scale,
        "weight": weight,
        "weight_scale": 2.0 ** (column % 4),
    }
    arguments |= {"bias": (column.flatten() * 3 + 16).float(), "approximate": approximate}
    exact, _ = gelu_reference(arguments)
    assert torch.equal(exact.round(), exact)
    results = kernel.linear_gelu_fp8(**arguments)
    assert_same_bits(results, references.quantize_fp8(exact.float(), block_size=128))


def test_gelu_of_zeros(kernel, device):
    arguments = gelu_arguments(5, 200, 128, False, bias="none", device=device)
    arguments["x"] = torch.zeros(5, 128, device=device).to(FP8)
    values, scale = kernel.linear_gelu_fp8(**arguments)
    assert not values.float().any() and not scale.any()


@every_approximation
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gelu_of_values_that_are_not_finite(kernel, device, approximate, value):
    arguments = gelu_arguments(70, 300, 256, False, approximate=approximate, device=device)
    expected = kernel.linear_gelu_fp8(**arguments)
    arguments["x_scale"][66] = value
    arguments["bias"][140] = value
    values, scale = kernel.linear_gelu_fp8(**arguments)
    assert values[66].float().isnan().all() and scale[66].isnan().all()
    assert values[:, 128:256].float().isnan().all() and scale[:, 1].isnan().all()
    others = [row for row in range(70) if row != 66]
    assert_same_bits(scale[others][:, [0, 2]], expected[1][others][:, [0, 2]])
    for part in (slice(0, 128), slice(256, 300)):
        assert_same_bits(values[others][:, part], expected[0][others][:, part])


@pytest.mark.parametrize(("rows", "out_features"), [(0, 24), ((2, 0), 24), (5, 0), (0, 0)])
def test_gelu_of_nothing(kernel, device, rows, out_features):
    check_gelu(kernel, gelu_arguments(rows, out_features, 256, False, device=device))


@every_approximation
def test_gelu_of_many_tiles(kernel, device, approximate):
    size = (rows_of_many_tiles(2305, device), 4104, 272, False)
    check_gelu(kernel, gelu_arguments(*size, approximate=approximate, device=device))


@pytest.mark.sanitize
@every_approximation
@pytest.mark.parametrize("out_features", [136, 1301])
@pytest.mark.parametrize("is_blocked", [False, True])
def test_smoke_of_gelu(kernel, device, approximate, out_features, is_blocked):
    options = {"approximate": approximate, "rank": (72, 8) if is_blocked else 16}
    size = (130, out_features, 400, is_blocked)
    check_gelu(kernel, gelu_arguments(*size, **options, device=device))


# --------------------------------------------------------------------------------------------------
# linears_fp8


def check_linears(kernel, arguments):
    """Each result has the bits of linear_fp8 on a CPU, and its bounds anywhere."""
    memory = MemorySnapshot(tensors_of(arguments))
    results = kernel.linears_fp8(**arguments)
    memory.assert_unchanged()
    assert isinstance(results, tuple) and len(results) == len(arguments["weights"])
    shared = {key: arguments[key] for key in ("x", "x_scale", "dtype")}
    optional = [arguments[key] or [None] * len(results) for key in ("biases", "lows", "ups")]
    layers = zip(arguments["weights"], arguments["weight_scales"], *optional, strict=True)
    for out, layer in zip(results, layers, strict=True):
        names = ("weight", "weight_scale", "bias", "low", "up")
        one = {**shared, **dict(zip(names, layer, strict=True))}
        expected = check_linear(kernel, one) if out.numel() > 0 else kernel.linear_fp8(**one)
        assert out.is_contiguous() and (out.dtype, out.shape) == (expected.dtype, expected.shape)
        if out.is_cpu:
            assert torch.equal(out, expected)
        elif out.numel() > 0:
            # Tiles may have other widths, in which products might be added in another order.
            torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-3)


@pairwise(
    rows=[1, 65, 130, (2, 3, 5), 0],
    out_features=[
        *((64, 64, 64), (256, 7), (1, 130, 40), (130, 0, 24), (0, 8), (0, 0), (200, 300, 193))
    ],
    in_features=[16, 144, 400],
    is_blocked=[False, True],
    dtype=[torch.bfloat16, torch.float16],
    weight_scale=WEIGHT_SCALES,
    bias=BIASES,
    ranks=[(None, None, None), (8, 64, 24), (None, 16, 128), ((72, 8), None, (16, 16, 64, 8))],
)
def test_linears(
    kernel, device, rows, out_features, in_features, is_blocked, dtype, weight_scale, bias, ranks
):
    one = linear_arguments(rows, 8, in_features, is_blocked, dtype, device)
    arguments = several_weights(one, out_features, ranks)
    if 0 not in out_features:
        scales = map_tensors(WEIGHT_SCALES[weight_scale], arguments["weight_scales"])
        arguments["weight_scales"] = scales
    arguments["biases"] = tuple(BIASES[bias](b) for b in arguments["biases"])
    check_linears(kernel, arguments)


def test_linears_with_and_without_biases(kernel, device):
    one = linear_arguments(33, 8, 256, False, torch.bfloat16, device)
    arguments = several_weights(one, (40, 24, 16))
    first, second, third = arguments["biases"]
    for biases in (None, (first, None, third), (None, second.float(), None)):
        check_linears(kernel, {**arguments, "biases": biases})


def test_linears_of_lists(kernel, device):
    function, arguments = sample(kernel, "linears_fp8", dtype=torch.bfloat16, device=device)
    lists = {key: list(v) if isinstance(v, tuple) else v for key, v in arguments.items()}
    assert_same_bits(function(**lists), function(**arguments))


@pytest.mark.parametrize("is_blocked", [False, True])
def test_linears_of_many_tiles(kernel, device, is_blocked):
    rows = rows_of_many_tiles(2305, device)
    one = linear_arguments(rows, 8, 272, is_blocked, torch.bfloat16, device)
    check_linears(kernel, several_weights(one, (1301, 1032, 3000), (24, None, 128)))


@pytest.mark.sanitize
@pytest.mark.parametrize("is_blocked", [False, True])
def test_smoke_of_linears(kernel, device, is_blocked):
    one = linear_arguments(130, 8, 400, is_blocked, torch.bfloat16, device)
    check_linears(kernel, several_weights(one, (136, 1301, 8), (None, (16, 72), 16)))


@pytest.mark.parametrize("argument", ["weights", "weight_scales", "biases", "lows", "ups"])
@pytest.mark.parametrize("index", [0, 2])
def test_no_derivatives_of_linears(kernel, device, argument, index):
    function, arguments = sample(kernel, "linears_fp8", dtype=torch.bfloat16, device=device)
    tensors = list(arguments[argument])
    tensors[index] = tensors[index].clone().requires_grad_()
    text = REFUSED.format("linears_fp8", f"{argument}[{index}]")
    assert outcome(function, {**arguments, argument: tensors}) == (ValueError, text)


# --------------------------------------------------------------------------------------------------
# linear_gated_residual_fp8

# Shapes of gates, for a residual (B, S, N).
GATES = {
    "none": lambda *shape: None,
    "N": lambda batch, seq, size: (size,),
    "B_1_N": lambda batch, seq, size: (batch, 1, size),
    "1_S_N": lambda batch, seq, size: (1, seq, size),
    "B_S_N": lambda *shape: shape,
}


def check_residual(kernel, arguments):
    operands = {k: v for k, v in arguments.items() if k not in ("residual", "gate")}
    residual, gate = arguments["residual"].double(), arguments["gate"]
    gate = torch.ones((), device=residual.device) if gate is None else gate.double()
    expected = residual + gate * references.linear_fp8(**operands)
    magnitudes = references.linear_fp8(**map_tensors(lambda t: t.double().abs(), operands))
    arithmetic = 4e-6 if residual.is_cpu else 2**-12
    slack = arithmetic * (gate.abs() * magnitudes + residual.abs())
    memory = MemorySnapshot(tensors_of(arguments))
    poison_memory(arguments["residual"])
    out = kernel.linear_gated_residual_fp8(**arguments)
    memory.assert_unchanged()
    assert out.is_contiguous() and out.dtype == arguments["residual"].dtype
    assert out.shape == expected.shape
    if out.numel() > 0:
        assert_rounded_once(out, expected, slack + torch.finfo(out.dtype).tiny)


def residual_arguments(
    shape,
    in_features,
    is_blocked,
    gate,
    dtype,
    device,
    layout="contiguous",
    wide_gate=False,
    **bias,
):
    *rows, out_features = shape
    size = tuple(rows), out_features, in_features, is_blocked
    arguments = linear_arguments(*size, dtype, device, **bias)
    del arguments["dtype"]
    arguments["weight_scale"] *= 0.01
    gate_shape = GATES[gate](*shape)
    gate_dtype = torch.float32 if wide_gate else dtype
    given = gate_shape and normal(*gate_shape, dtype=gate_dtype, device=device)
    residual = normal(*shape, dtype=dtype, device=device, layout=layout)
    return {"residual": residual, **arguments, "gate": given}


@pairwise(
    shape=[
        *((1, 1, 8), (2, 33, 65), (1, 130, 256), (3, 64, 130)),
        *((2, 70, 200), (1, 300, 7), (2, 0, 8), (2, 3, 0)),
    ],
    in_features=[16, 144, 400],
    is_blocked=[False, True],
    gate=GATES,
    wide_gate=[False, True],
    layout=LAYOUTS,
    bias=BIASES,
    dtype=[torch.bfloat16, torch.float16],
    rank=RANKS,
)
def test_residual(
    kernel, device, shape, in_features, is_blocked, gate, wide_gate, layout, bias, dtype, rank
):
    options = {"layout": layout, "bias": bias, "wide_gate": wide_gate, "rank": rank}
    check_residual(
        kernel, residual_arguments(shape, in_features, is_blocked, gate, dtype, device, **options)
    )


# For tiles of 128 and of 192 columns.
@pytest.mark.parametrize(("gate", "rank"), [("B_1_N", None), ("B_1_N", (8, 64)), ("B_S_N", 16)])
@pytest.mark.parametrize("size", [(2305, 4104, 1040), (2561, 3200, 272)], ids=str)
def test_residual_of_many_tiles(kernel, device, gate, rank, size):
    rows, out_features, in_features = size
    shape = 1, rows_of_many_tiles(rows, device), out_features
    arguments = residual_arguments(
        shape, in_features, False, gate, torch.bfloat16, device, rank=rank
    )
    check_residual(kernel, arguments)


@pytest.mark.sanitize
def test_leading_dimensions_that_cannot_be_merged(kernel, device):
    """Also if the last one is the smallest."""
    for rows in [(4, 3, 2), (3, 3, 3), (2, 3, 4), (2, 5, 3, 2)]:
        shape = *rows, 136
        for layout in ("contiguous", "transposed"):
            options = {"dtype": torch.bfloat16, "device": device, "layout": layout, "rank": 24}
            arguments = residual_arguments(shape, 400, True, "none", **options)
            check_residual(kernel, arguments)
            gate = normal(rows[0], 1, *shape[2:], dtype=torch.bfloat16, device=device)
            check_residual(kernel, {**arguments, "gate": gate})
        arguments = gelu_arguments(rows, 136, 400, True, device=device)
        expected = check_gelu(kernel, arguments)
        out = tuple(LAYOUTS["transposed"](torch.full_like(t, math.nan)) for t in expected)
        check_out(kernel.linear_gelu_fp8, arguments, out, expected)


@pytest.mark.sanitize
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("out_features", [136, 1301])
@pytest.mark.parametrize("is_blocked", [False, True])
def test_smoke_of_residual(kernel, device, gate, out_features, is_blocked):
    shape = 1, 130, out_features
    check_residual(kernel, residual_arguments(shape, 400, is_blocked, gate, torch.bfloat16, device))


# --------------------------------------------------------------------------------------------------
# Low-rank terms


@pytest.mark.sanitize
@pytest.mark.parametrize("is_blocked", [False, True])
def test_low_rank_terms_of_columns_of_a_wider_tensor(kernel, device, is_blocked):
    """What lies beside the columns is not read, nor are rows beyond the last."""
    options = {"dtype": torch.bfloat16, "device": device}
    wide = torch.full((2, 70, 64), math.nan, **options)
    for offset, rank in ((0, 8), (8, 24), (16, 48)):
        one = residual_arguments((2, 70, 200), 272, is_blocked, "B_1_N", rank=rank, **options)
        given = {**one, "low": wide[..., offset : offset + rank].copy_(one["low"])}
        function = kernel.linear_gated_residual_fp8
        check_residual(kernel, given)
        assert_same_bits(function(**given), function(**one))
        one = {key: value for key, value in one.items() if key not in ("residual", "gate")}
        given = {**one, "low": given["low"]}
        for function in (kernel.linear_fp8, kernel.linear_gelu_fp8):
            assert_same_bits(function(**given), function(**one))
        wide.fill_(math.nan)


@pytest.mark.parametrize("name", ["linear_fp8", "linear_gelu_fp8", "linear_gated_residual_fp8"])
def test_half_of_a_low_rank_term(kernel, device, name):
    function, arguments = sample(kernel, name, dtype=torch.bfloat16, device=device)
    text = "low and up must be given together, got only"
    for missing, given in (("low", "up"), ("up", "low")):
        refused = outcome(function, {**arguments, missing: None})
        assert refused == (ValueError, f"{name}: {text} {given}")
    function, arguments = sample(kernel, "linears_fp8", dtype=torch.bfloat16, device=device)
    text = "linears_fp8: lows[0] and ups[0] must be given together, got only ups[0]"
    assert outcome(function, {**arguments, "lows": None}) == (ValueError, text)


def test_low_of_another_dtype_than_the_residual(kernel, device):
    options = {"dtype": torch.bfloat16, "device": device}
    function, arguments = sample(kernel, "linear_gated_residual_fp8", **options)
    arguments |= {key: arguments[key].half() for key in ("low", "up")}
    text = "low must have the dtype of residual (bfloat16), got float16"
    assert outcome(function, arguments) == (ValueError, f"linear_gated_residual_fp8: {text}")


# --------------------------------------------------------------------------------------------------
# Results in the caller's memory

every_writing_call = pytest.mark.parametrize("name", FP8_WITH_OUT)


@pytest.mark.sanitize
@pairwise(
    name=FP8_WITH_OUT,
    layout=WRITABLE_LAYOUTS,
    scale_layout=WRITABLE_LAYOUTS,
    shape=[(2, 5, 256), (1, 1, 2048), (3, 7, 400), (2, 70, 128)],
)
def test_out(kernel, device, name, layout, scale_layout, shape):
    """The same bits as new results, and no other write."""
    options = {"dtype": torch.bfloat16, "device": device, "shape": shape}
    function, arguments = sample(kernel, name, **options)
    expected = function(**arguments)
    values, scale = (torch.full_like(t, math.nan) for t in expected)
    out = LAYOUTS[layout](values), LAYOUTS[scale_layout](scale)
    versions = [t._version for t in out]
    check_out(function, arguments, out, expected)
    assert [t._version for t in out] == [version + 1 for version in versions]


@pytest.mark.parametrize("out_features", [300, 384])
@pytest.mark.parametrize("offset", [0, 128, 8])
def test_out_of_rows_with_any_alignment(kernel, device, out_features, offset):
    """Columns of a wider tensor, at an offset that is not always aligned to 16 bytes."""
    arguments = gelu_arguments((2, 70), out_features, 256, False, device=device)
    values, scale = kernel.linear_gelu_fp8(**arguments)
    for width in (1024, 1000):
        wide = torch.zeros(2, 70, width, device=device).to(FP8)
        scales = torch.zeros(2, 70, 9, device=device)
        out = wide[..., offset : offset + out_features], scales[..., 2 : 2 + scale.shape[-1]]
        check_out(kernel.linear_gelu_fp8, arguments, out, (values, scale))


@every_writing_call
def test_compiled_out(kernel, device, name):
    options = {"dtype": torch.bfloat16, "device": device}
    function, arguments = writing_call(kernel, name, **options)
    expected = function(**{**arguments, "out": None})

    def call(given):
        return function(**given)[1] * 2

    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        out = tuple(t.clone() for t in arguments["out"])
        result = torch.compile(call, fullgraph=True, backend=backend)({**arguments, "out": out})
        assert_same_bits(out, expected)
        assert torch.equal(result, expected[1] * 2)


A_PAIR = "out must be a tuple (values, scale) of tensors or None, got"
EXPANDED = "must not be expanded to be written, got stride 0 in dimension"
OVERLAP = "is written, got overlapping elements"
# Changes of the pair, and the sentences after the operation.
OUT_MISTAKES = [
    (lambda v, s: v, f"{A_PAIR} Tensor"),
    (lambda v, s: (v, None), f"{A_PAIR} tuple"),
    (lambda v, s: (v,), "out must hold 2 tensors, got 1"),
    (lambda v, s: (s, v), "values_out must be float8_e4m3fn, got float32"),
    (lambda v, s: (v, v), "scale_out must be float32, got float8_e4m3fn"),
    (lambda v, s: (v[:1], s), "values_out must have shape {values}, got {one_value}"),
    (lambda v, s: (v, s[:1]), "scale_out must have shape {scale}, got {one_scale}"),
    (
        lambda v, s: (every_second(v), s),
        "values_out must have stride 1 in its last dimension, got stride 2",
    ),
    (lambda v, s: (v[:1].expand_as(v), s), f"values_out {EXPANDED} 0"),
    (lambda v, s: (v, s[:, :1].expand_as(s)), f"scale_out {EXPANDED} 1"),
    (
        lambda v, s: (v, v.view(-1)[: 4 * s.numel()].view(torch.float32).view(s.shape)),
        f"scale_out must not share memory with values_out, which {OVERLAP}",
    ),
]


@every_writing_call
@pytest.mark.parametrize(("change", "text"), OUT_MISTAKES)
def test_mistakes_of_out(kernel, device, name, change, text):
    options = {"dtype": torch.bfloat16, "device": device, "out_layout": "contiguous"}
    function, arguments = writing_call(kernel, name, **options)
    values, scale = arguments["out"]
    shapes = {"values": values, "scale": scale, "one_value": values[:1], "one_scale": scale[:1]}
    text = text.format(**{key: tuple(tensor.shape) for key, tensor in shapes.items()})
    arguments["out"] = change(values, scale)
    memory = MemorySnapshot(tensors_of(arguments, values, scale))
    given = outcome(function, arguments)
    memory.assert_unchanged()
    kind = TypeError if text.startswith(A_PAIR) else ValueError
    assert given == (kind, f"{function.__name__}: {text}")
    assert compiled_outcome(function, arguments) == given


@every_writing_call
def test_what_is_read_lies_in_out(kernel, device, name):
    """The first element of each argument in turn is the last one of an output."""
    options = {"dtype": torch.bfloat16, "device": device, "out_layout": "contiguous"}
    function, arguments = writing_call(kernel, name, **options)
    for written, out in zip(("values_out", "scale_out"), arguments["out"], strict=True):
        for key, value in arguments.items():
            if not isinstance(value, torch.Tensor):
                continue
            bytes_ = out.numel() * out.element_size()
            first = (bytes_ - 16) // 16 * 16 // value.element_size()
            buffer = torch.zeros(first + value.numel(), device=device).to(value.dtype)
            moved = buffer[first:].view(value.shape).copy_(value)
            covered = buffer.view(torch.uint8)[:bytes_].view(out.dtype).view(out.shape)
            outs = [covered if tensor is out else tensor for tensor in arguments["out"]]
            given = outcome(function, {**arguments, key: moved, "out": tuple(outs)})
            text = f"{key} must not share memory with {written}, which {OVERLAP}"
            assert given == (ValueError, f"{function.__name__}: {text}")


@every_writing_call
def test_no_derivatives_with_out(kernel, device, name):
    options = {"dtype": torch.bfloat16, "device": device}
    function, arguments = writing_call(kernel, name, **options)
    for key, value in arguments.items():
        if isinstance(value, torch.Tensor):
            given = {**arguments, key: value.clone().requires_grad_()}
            refused = ValueError, REFUSED.format(function.__name__, key)
            assert outcome(function, given) == refused
            with torch.no_grad():
                function(**given)
    arguments["out"][1].requires_grad_()
    refused = ValueError, REFUSED.format(function.__name__, "scale_out")
    assert outcome(function, arguments) == refused
