"""linears_lora: values, results in the caller's memory, and wrong arguments."""

import math
import re

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
    LAYOUTS,
    WRITABLE_LAYOUTS,
    every_16_bit_dtype,
    every_second,
    lora_operands,
    of_shape,
    pairwise,
    sample,
)
from test_fp8 import REFUSED, check_out, of_row_distance, rows_of_many_tiles, value

APPROXIMATIONS = [None, "none", "tanh"]


def layers_of(arguments):
    count = len(arguments["weights"])
    names = ("weights", "lows", "ups", "biases")
    return list(zip(*(arguments[key] or [None] * count for key in names), strict=True))


def check(kernel, arguments):
    """Each result is rounded once, from sums of float32."""
    x, approximate = arguments["x"], arguments.get("approximate")
    memory = MemorySnapshot(tensors_of(arguments))
    poison_memory(x)
    results = kernel.linears_lora(**arguments)
    memory.assert_unchanged()
    assert isinstance(results, tuple)
    for out, layer in zip(results, layers_of(arguments), strict=True):
        expected = references.linear_lora(x, *layer, approximate=approximate)
        magnitudes = references.linear_lora(*map_tensors(torch.abs, (x, *layer)))
        assert out.is_contiguous() and (out.dtype, out.shape) == (x.dtype, expected.shape)
        # The slope of a GELU is at most 1.13. A GELU for a 16-bit result is less accurate on a GPU.
        gelu = 0 if approximate is None else 1e-5 * expected.abs() + 1e-7
        slack = 4e-6 * 1.13 * magnitudes + gelu + torch.finfo(out.dtype).tiny
        if out.numel() > 0:
            assert_rounded_once(out, expected, slack)
    return results


@pairwise(
    rows=[(), (1,), (65,), (130,), (2, 3, 5), (0,), (257,)],
    layers=[
        *([(7, 8)], [(64, None)], [(130, 72)], [(256, 16), (1, 24)], [(40, 64), (200, None)]),
        *([(8, 128), (0, 8), (193, 40)], [(64, 24), (64, 8), (64, (8, 72, 64, 16))], [(0, None)]),
    ],
    in_features=[8, 64, 72, 200, 512],
    has_biases=[None, False, True],
    approximate=APPROXIMATIONS,
    dtype=[torch.bfloat16, torch.float16],
)
def test_values(kernel, device, rows, layers, in_features, has_biases, approximate, dtype):
    sizes = zip(*layers, strict=True)
    arguments = lora_operands((*rows, in_features), *sizes, dtype=dtype, device=device)
    if has_biases is None:
        arguments["biases"] = None
    elif not has_biases:
        arguments["biases"] = [None, *arguments["biases"][1:]]
    check(kernel, {**arguments, "approximate": approximate})


@every_16_bit_dtype
def test_each_operand_is_where_it_belongs(kernel, device, dtype):
    """Exact products of small integers, with another factor in each row, column and stage."""
    rows, out_features, in_features, rank = 150, 200, 200, 72
    feature = torch.arange(in_features, device=device)
    row, column = (torch.arange(size, device=device)[:, None] for size in (rows, out_features))
    x = (feature == row % in_features) * (1.0 + row % 3)
    weight = (column % 7 - 3.0) * (1 + feature // 64)
    term = torch.arange(rank, device=device)
    low, up = (term == row % rank) * 1.0, (column % 5 - 2.0) * (1 + term // 16)
    given = [[t.to(dtype)] for t in (weight, low, up)]
    (out,) = kernel.linears_lora(x.to(dtype), *given)
    assert torch.equal(out.float(), x @ weight.T + low @ up.T)


# For tiles of 256, of 160 and of 128 columns, and of 160 with several layers.
@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("rows", "out_features", "in_features"),
    [
        *((2305, (4600,), 520), (2305, (4104,), 520), (2305, (2424,), 136)),
        (1100, (1301, 1032, 3000), 272),
    ],
    ids=str,
)
@pytest.mark.parametrize("approximate", [None, "tanh"])
def test_many_tiles(kernel, device, rows, out_features, in_features, approximate):
    shape = rows_of_many_tiles(rows, device), in_features
    options = {"dtype": torch.bfloat16, "device": device}
    arguments = lora_operands(shape, out_features, (72, 16, None)[: len(out_features)], **options)
    check(kernel, {**arguments, "approximate": approximate})


@pytest.mark.sanitize
@pytest.mark.parametrize("approximate", APPROXIMATIONS)
def test_smoke(kernel, device, approximate):
    sizes = (136, 1301, 8), (72, (16, 72), None)
    arguments = lora_operands((130, 200), *sizes, dtype=torch.bfloat16, device=device)
    check(kernel, {**arguments, "approximate": approximate})


@pytest.mark.sanitize
def test_columns_of_a_wider_low(kernel, device):
    """What lies beside the columns is not read."""
    options = {"dtype": torch.bfloat16, "device": device}
    one = lora_operands((2, 70, 136), (200, 64, 72), (8, 24, 16), **options)
    wide = torch.full((2, 70, 64), math.nan, **options)
    places = ((0, 8), (16, 40), (40, 56))
    lows = [
        wide[..., begin:end].copy_(low)
        for (begin, end), low in zip(places, one["lows"], strict=True)
    ]
    assert_same_bits(check(kernel, {**one, "lows": lows}), kernel.linears_lora(**one))


def test_lists(kernel, device):
    function, arguments = sample(kernel, "linears_lora", dtype=torch.bfloat16, device=device)
    lists = {key: list(v) if isinstance(v, tuple) else v for key, v in arguments.items()}
    assert_same_bits(function(**lists), function(**arguments))


def test_values_that_are_not_finite(kernel, device):
    arguments = lora_operands((70, 72), (200,), (24,), dtype=torch.bfloat16, device=device)
    arguments["approximate"] = "tanh"
    (expected,) = kernel.linears_lora(**arguments)
    arguments["x"][66, 3] = math.nan
    arguments["lows"][0][5, 2] = math.nan
    (out,) = kernel.linears_lora(**arguments)
    assert out[[5, 66]].isnan().all()
    others = [row for row in range(70) if row not in (5, 66)]
    assert_same_bits(out[others], expected[others])


# --------------------------------------------------------------------------------------------------
# Results in the caller's memory


@pytest.mark.sanitize
@pairwise(
    layout=WRITABLE_LAYOUTS,
    other_layout=WRITABLE_LAYOUTS,
    shape=[(2, 5, 136), (1, 1, 64), (3, 70, 72), (2, 3, 4, 16)],
    out_features=[(40, 7), (200, 130), (64, 64)],
)
def test_out(kernel, device, layout, other_layout, shape, out_features):
    """The same bits as new results, and no other write."""
    options = {"dtype": torch.bfloat16, "device": device}
    arguments = lora_operands(shape, out_features, (24, 8), **options)
    expected = kernel.linears_lora(**arguments)
    first, second = (torch.full_like(t, math.nan) for t in expected)
    out = LAYOUTS[layout](first), LAYOUTS[other_layout](second)
    versions = [t._version for t in out]
    check_out(kernel.linears_lora, arguments, out, expected)
    assert [t._version for t in out] == [version + 1 for version in versions]


def test_out_of_tokens_of_a_joint_sequence(kernel, device):
    """With samples that are launches of their own."""
    options = {"dtype": torch.bfloat16, "device": device}
    arguments = lora_operands((3, 33, 72), (64, 200, 64), (8, None, 24), **options)
    expected = kernel.linears_lora(**arguments)
    joint = [torch.zeros(3, 50, t.shape[-1], **options) for t in expected]
    out = tuple(t[:, 10:43] for t in joint)
    check_out(kernel.linears_lora, arguments, out, expected)
    assert all(not t[:, :10].any() and not t[:, 43:].any() for t in joint)


def test_compiled_out(kernel, device):
    options = {"dtype": torch.bfloat16, "device": device}
    function, arguments = sample(kernel, "linears_lora", **options)
    expected = function(**arguments)

    def call(given):
        return function(**given)[1] * 2

    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        out = tuple(torch.zeros_like(t) for t in expected)
        result = torch.compile(call, fullgraph=True, backend=backend)({**arguments, "out": out})
        assert_same_bits(out, expected)
        assert torch.equal(result, expected[1] * 2)


def test_what_is_read_lies_in_out(kernel, device):
    options = {"dtype": torch.bfloat16, "device": device}
    one = lora_operands((40, 40), (40,), (40,), **options)
    out = torch.zeros(40, 40, **options)
    changed = {
        "x": {"x": out},
        **{f"{key}[0]": {key: (out,)} for key in ("weights", "lows", "ups")},
        "biases[0]": {"biases": (out[39],)},
    }
    for name, change in changed.items():
        given = outcome(kernel.linears_lora, {**one, **change, "out": (out,)})
        text = f"{name} must not share memory with out[0], which is written"
        assert given == (ValueError, f"linears_lora: {text}, got overlapping elements")


def test_results_that_overlap(kernel, device):
    options = {"dtype": torch.bfloat16, "device": device}
    arguments = lora_operands((5, 40), (40, 40), (None, None), **options)
    out = torch.zeros(5, 60, **options)
    given = outcome(kernel.linears_lora, {**arguments, "out": (out[:, :40], out[:, 20:])})
    text = "out[1] must not share memory with out[0], which is written, got overlapping elements"
    assert given == (ValueError, f"linears_lora: {text}")


# --------------------------------------------------------------------------------------------------
# Derivatives and wrong arguments. The valid call: x (2, 16, 256), weights of 40, 7 and 64 rows.


@pytest.mark.parametrize("argument", ["x", "weights", "lows", "ups", "biases"])
@pytest.mark.parametrize("index", [0, 2])
def test_no_derivatives(kernel, device, argument, index):
    function, arguments = sample(kernel, "linears_lora", dtype=torch.bfloat16, device=device)
    if argument == "x":
        arguments["x"].requires_grad_()
    else:
        arguments[argument][index].requires_grad_()
        argument = f"{argument}[{index}]"
    refused = ValueError, REFUSED.format("linears_lora", argument)
    assert outcome(function, arguments) == refused
    with torch.no_grad():
        function(**arguments)


A_TUPLE = "be a tuple or list, got"
OF_X = "have the dtype of x (bfloat16), got"
MULTIPLE = "have a last dimension that is a positive multiple of 8, got"
# For an argument, or an item of one: changes, and the sentences after "linears_lora: argument must".
MISTAKES = {
    "x": [
        (value([1.0]), "be a tensor, got list"),
        (torch.Tensor.float, "be float16 or bfloat16, got float32"),
        (of_shape(), "have at least 1 dimension, got shape ()"),
        (of_shape(2, 16, 252), f"{MULTIPLE} 252"),
        (every_second, "have stride 1 in its last dimension, got stride 2"),
        (
            lambda x: x[:, :1].expand_as(x),
            "be contiguous, got shape (2, 16, 256) with strides (4096, 0, 1)",
        ),
        (
            LAYOUTS["misaligned"],
            "be aligned to 16 bytes, got an address that is 2 bytes past a multiple of them",
        ),
    ],
    "weights": [
        (lambda w: w[0], f"{A_TUPLE} Tensor"),
        (lambda w: (), "hold 1 to 3 tensors, got 0"),
        (lambda w: (*w, w[0]), "hold 1 to 3 tensors, got 4"),
    ],
    "weights[0]": [
        (value(None), "be a tensor, got None"),
        (torch.Tensor.half, f"{OF_X} float16"),
        (of_shape(40, 248), "have shape (N, 256), got (40, 248)"),
        (lambda w: w.T.contiguous().T, "be contiguous, got shape (40, 256) with strides (1, 40)"),
    ],
    "weights[2]": [(value(None), "be a tensor, got None")],
    "lows": [
        (lambda t: t[0], "be a tuple, a list or None, got Tensor"),
        (lambda t: t[:2], "hold 3 tensors, got 2"),
    ],
    "lows[0]": [
        (value(1.0), "be a tensor or None, got 1.0"),
        (torch.Tensor.half, f"{OF_X} float16"),
        (of_shape(2, 16, 20), f"{MULTIPLE} 20"),
        (of_shape(2, 24), "have shape (2, 16, R), got (2, 24)"),
        (
            of_row_distance(28),
            "have rows at one distance, a multiple of 8 elements, got shape (2, 16, 24) with "
            "strides (448, 28, 1)",
        ),
    ],
    "ups": [(lambda t: t[0], "be a tuple, a list or None, got Tensor")],
    "ups[2]": [
        (torch.Tensor.half, "have the dtype of lows[2] (bfloat16), got float16"),
        (of_shape(64, 16), "have shape (64, 8), got (64, 16)"),
    ],
    "biases": [
        (lambda b: b[0], "be a tuple, a list or None, got Tensor"),
        (lambda b: b[:1], "hold 3 tensors, got 1"),
    ],
    "biases[1]": [
        (torch.Tensor.float, f"{OF_X} float32"),
        (of_shape(8), "have shape (7,), got (8,)"),
    ],
    "approximate": [
        (value("erf"), "be 'none', 'tanh' or None, got 'erf'"),
        (value(False), "be a string or None, got False"),
    ],
    "out": [
        (lambda o: o[0], "be a tuple (first, ...) of tensors or None, got Tensor"),
        (lambda o: o[:2], "hold 3 tensors, got 2"),
    ],
    "out[1]": [
        (torch.Tensor.float, f"{OF_X} float32"),
        (lambda o: o[..., :6], "have shape (2, 16, 7), got (2, 16, 6)"),
        (every_second, "have stride 1 in its last dimension, got stride 2"),
        (
            lambda o: o[:1].expand_as(o),
            "not be expanded to be written, got stride 0 in dimension 0",
        ),
    ],
}


@pytest.mark.parametrize(
    ("argument", "number"),
    [(key, number) for key, changes in MISTAKES.items() for number in range(len(changes))],
)
def test_mistakes(kernel, device, argument, number):
    change, must = MISTAKES[argument][number]
    function, arguments = sample(kernel, "linears_lora", dtype=torch.bfloat16, device=device)
    arguments["out"] = tuple(torch.zeros_like(t) for t in function(**arguments))
    key, _, index = argument.rstrip("]").partition("[")
    if index:
        arguments[key] = list(arguments[key])
        arguments[key][int(index)] = change(arguments[key][int(index)])
    else:
        arguments[key] = change(arguments[key])
    kind = TypeError if re.match(r"be (a|an) ", must) else ValueError
    expected = kind, f"linears_lora: {argument} must {must}"
    memory = MemorySnapshot(tensors_of(arguments))
    assert outcome(function, arguments) == expected
    memory.assert_unchanged()
    assert compiled_outcome(function, arguments) == expected


@pytest.mark.parametrize(
    ("ups", "error", "text"),
    [
        (
            lambda up: (up, up),
            ValueError,
            "the ups of all layers must have the columns of low, got more",
        ),
        (lambda up: (), ValueError, "ups[0] must hold 1 to 4 tensors, got 0"),
        (lambda up: (up,) * 5, ValueError, "ups[0] must hold 1 to 4 tensors, got 5"),
        (lambda up: (up, None), TypeError, "ups[0][1] must be a tensor, got None"),
        (
            lambda up: (up[:, :8].clone(), up[:, :4].clone()),
            ValueError,
            "ups[0][1] must have a last dimension that is a positive multiple of 8, got 4",
        ),
        (
            lambda up: (up[:, :8], up[:, 8:]),
            ValueError,
            "ups[0] must be contiguous, got shape (40, 8) with strides (24, 1)",
        ),
        (
            lambda up: (up[:, :8].clone(), up.half()),
            ValueError,
            "ups[0][1] must have the dtype of lows[0] (bfloat16), got float16",
        ),
    ],
)
def test_mistakes_of_several_ups(kernel, device, ups, error, text):
    function, arguments = sample(kernel, "linears_lora", dtype=torch.bfloat16, device=device)
    first, *others = arguments["ups"]
    arguments["ups"] = (ups(first), *others)
    expected = error, f"linears_lora: {text}"
    assert outcome(function, arguments) == expected
    assert compiled_outcome(function, arguments) == expected


def test_half_of_a_low_rank_term(kernel, device):
    function, arguments = sample(kernel, "linears_lora", dtype=torch.bfloat16, device=device)
    text = "lows[0] and ups[0] must be given together, got only lows[0]"
    given = {**arguments, "ups": (None, *arguments["ups"][1:])}
    assert outcome(function, given) == (ValueError, f"linears_lora: {text}")
