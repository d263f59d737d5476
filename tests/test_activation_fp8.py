"""Activations with a quantized result: E4M3 rows and a scale for each row or block, from the unrounded
values."""

import math

import pytest
import torch

import references
from checks import (
    MemorySnapshot,
    assert_same_bits,
    compiled_outcome,
    one_thread,
    outcome,
    poison_memory,
    tensors_of,
)
from inputs import DTYPES, GATED, LAYOUTS, every_dtype, normal, pairwise, sample
from test_activation import BIASES, VARIANTS, with_bias
from test_fp8 import check_out
from test_norm_fp8 import FP8, check_quantized

QUANTIZED = {
    activation: call for activation, call in VARIANTS.items() if not activation.startswith("silu")
}
every_activation = pytest.mark.parametrize("activation", QUANTIZED)
WITH_BLOCKS = [activation for activation in QUANTIZED if activation.startswith("swiglu")]
every_with_blocks = pytest.mark.parametrize("activation", WITH_BLOCKS)
# With the size of the blocks.
CALLS = [*((activation, None) for activation in QUANTIZED), *((one, 128) for one in WITH_BLOCKS)]
# Rows of one to three packs a thread, and of single elements; those of LTX-Video, FLUX and Wan; of one block
# and of less; rows that are longer than a thread block holds.
SIZES = [1, 7, 8, 65, 100, 127, 128, 129, 136, 520, 1000, 3072, 4104, 8192, 8200]
SIZES += [12288, 13824, 18432, 18440, 40000]


def in_blocks(tensor):
    """The whole blocks of a row as rows of their own, then the last, shorter one."""
    whole = tensor.shape[-1] // 128 * 128
    yield tensor[..., :whole].contiguous().unflatten(-1, (-1, 128))
    if whole < tensor.shape[-1]:
        yield tensor[..., whole:].contiguous()


def check_blocks(values, scales, reference):
    assert values.dtype == FP8 and values.shape == reference.shape
    assert scales.shape == (*reference.shape[:-1], math.ceil(reference.shape[-1] / 128))
    whole = reference.shape[-1] // 128
    of_blocks = scales[..., :whole, None].contiguous(), scales[..., whole:].contiguous()
    for part in zip(in_blocks(values), of_blocks, in_blocks(reference), strict=False):
        check_quantized(*part)


def check_activation(kernel, activation, x, block_size=None, **options):
    name, choices = QUANTIZED[activation]
    options = {**choices, **options}
    with one_thread():
        reference = getattr(references, name)(x, **options)
    inputs = list(tensors_of(x, options))
    memory = MemorySnapshot(inputs)
    poison_memory(reference.to(FP8))
    how = {} if block_size is None else {"block_size": block_size}
    values, scales = getattr(kernel, f"{name}_fp8")(x, **options, **how)
    memory.assert_unchanged()
    assert values.is_contiguous() and scales.is_contiguous()
    if block_size is not None:
        with one_thread():
            return check_blocks(values, scales, reference)
    # The reference of a GELU has no accurate value far below 0.
    is_accurate = (reference.abs() > 1e-12).any(-1) | (reference == 0).all(-1) & (x == 0).all(-1)
    assert not (scales[~is_accurate] > 1e-12).any()
    with one_thread():
        check_quantized(values[is_accurate], scales[is_accurate], reference[is_accurate])


def width(activation, hidden):
    return 2 * hidden if QUANTIZED[activation][0] in GATED else hidden


@pairwise(call=CALLS, hidden=SIZES, dtype=DTYPES, bias=BIASES)
def test_sizes(kernel, device, call, hidden, dtype, bias):
    activation, block_size = call
    x = normal(33, width(activation, hidden), dtype=dtype, device=device, std=2.0)
    check_activation(kernel, activation, x, block_size, **with_bias({}, bias, x))


@pairwise(call=CALLS, layout=LAYOUTS, hidden=[65, 2048], dtype=DTYPES, bias=BIASES)
def test_layouts(kernel, device, call, layout, hidden, dtype, bias):
    activation, block_size = call
    x = normal(3, 8, width(activation, hidden), dtype=dtype, device=device, layout=layout)
    check_activation(kernel, activation, x, block_size, **with_bias({}, bias, x))


@every_with_blocks
@every_dtype
def test_blocks_are_rows_of_their_own(kernel, device, activation, dtype):
    _, choices = QUANTIZED[activation]
    x = normal(3, 2, 5, 128, dtype=dtype, device=device)
    values, scales = kernel.swiglu_fp8(x.flatten(1), **choices, block_size=128)
    rows, row_scales = kernel.swiglu_fp8(x.transpose(1, 2).flatten(2), **choices)
    assert_same_bits((values, scales), (rows.flatten(1), row_scales.flatten(1)))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("shape", [(0, 64), (0, 512), (3, 0), (2, 0, 64)], ids=str)
def test_empty(kernel, device, call, shape):
    activation, block_size = call
    x = normal(*shape, dtype=torch.bfloat16, device=device)
    check_activation(kernel, activation, x, block_size)


@every_activation
@pytest.mark.parametrize("hidden", [7, 2048])
def test_zeros_and_nan(kernel, device, activation, hidden):
    name, choices = QUANTIZED[activation]
    x = normal(4, width(activation, hidden), dtype=torch.bfloat16, device=device)
    x[1] = 0
    x[2, 3] = torch.nan
    values, scales = getattr(kernel, f"{name}_fp8")(x, **choices)
    assert not values[1].float().any() and scales[1] == 0
    assert values[2].float().isnan().all() and scales[2].isnan()
    assert values[[0, 3]].float().isfinite().all() and scales[[0, 3]].isfinite().all()


@pytest.mark.parametrize("hidden", [300, 2048])
def test_zeros_and_nan_in_blocks(kernel, device, hidden):
    x = normal(3, 2, hidden, dtype=torch.bfloat16, device=device)
    x[0, :, 128:256] = 0
    x[1, 1, 130] = torch.nan
    x[2, 0, hidden - 1] = torch.inf
    values, scales = kernel.swiglu_fp8(x.flatten(1), block_size=128)
    assert not values[0, 128:256].float().any() and scales[0, 1] == 0
    is_lost = torch.zeros(3, hidden, dtype=torch.bool, device=device)
    is_lost[1, 128:256] = is_lost[2, (hidden - 1) // 128 * 128 :] = True
    assert torch.equal(values.float().isnan(), is_lost)
    assert torch.equal(scales.isnan(), is_lost[:, ::128])


# --------------------------------------------------------------------------------------------------
# Results in the caller's memory, also tested by test_fp8_products.py


@pytest.mark.sanitize
@pairwise(
    columns=[8, 136, 256, 300, 1024],
    first=[0, 128, 8, 3],
    width=[2048, 2000, 1999],
    block_size=[None, 128],
    dtype=DTYPES,
)
def test_out_of_rows_with_any_alignment(kernel, device, columns, first, width, block_size, dtype):
    x = normal(2, 5, 2 * columns, dtype=dtype, device=device)
    expected = kernel.swiglu_fp8(x, block_size=block_size)
    values = torch.zeros(2, 5, width, device=device).to(FP8)
    scale = torch.full((2, 5, expected[1].shape[-1] + 5), math.nan, device=device)
    out = values[..., first : first + columns], scale[..., 3 : 3 + expected[1].shape[-1]]
    check_out(kernel.swiglu_fp8, {"x": x, "block_size": block_size}, out, expected)


# --------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize("block_size", [64, 0, True, 128.0, "128"])
def test_block_sizes_are_those_of_quantize_fp8(kernel, device, block_size):
    function, arguments = sample(kernel, "swiglu_fp8", dtype=torch.bfloat16, device=device)
    arguments["block_size"] = block_size
    given = outcome(function, arguments)
    x = arguments["x"]
    kind, text = outcome(kernel.quantize_fp8, {"x": x, "block_size": block_size})
    assert given == (kind, text.replace("quantize_fp8:", "swiglu_fp8:"))
    assert compiled_outcome(function, arguments) == given


@pytest.mark.parametrize(
    ("is_silu", "is_gated", "name"),
    [(False, False, "gelu_fp8"), (True, False, "silu_fp8"), (False, True, "geglu_fp8")],
)
def test_the_operator_refuses_blocks_of_other_activations(kernel, device, is_silu, is_gated, name):
    x = torch.ones(3, 256, device=device)
    with pytest.raises(ValueError, match=f"^{name}: is_blocked must be False, got True$"):
        kernel._ops.ops.activation_fp8(x, None, is_silu, is_gated, False, False, True)


@pytest.mark.sanitize
@pairwise(call=CALLS, hidden=[7, 2048, 12288, 40000], dtype=DTYPES)
def test_smoke(kernel, device, call, hidden, dtype):
    activation, block_size = call
    x = normal(3, width(activation, hidden), dtype=dtype, device=device)
    check_activation(kernel, activation, x, block_size, **with_bias({}, "contiguous", x))
