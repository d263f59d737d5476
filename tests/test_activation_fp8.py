"""Activations with a quantized result: E4M3 rows and a scale for each row, from the unrounded values."""

import inspect

import pytest
import torch

import references
from checks import MemorySnapshot, one_thread, outcome, poison_memory, tensors_of
from inputs import DTYPES, GATED, LAYOUTS, normal, pairwise
from test_activation import BIASES, VARIANTS, with_bias
from test_norm_fp8 import FP8, check_quantized

QUANTIZED = {
    activation: call for activation, call in VARIANTS.items() if not activation.startswith("silu")
}
every_activation = pytest.mark.parametrize("activation", QUANTIZED)
# Rows of one to three packs a thread, and of single elements; those of LTX-Video, FLUX and Wan.
SIZES = [1, 7, 8, 65, 520, 1000, 3072, 4104, 8192, 12288, 13824, 18432, 18440]


def check_activation(kernel, activation, x, **options):
    name, choices = QUANTIZED[activation]
    options = {**choices, **options}
    with one_thread():
        reference = getattr(references, name)(x, **options)
    inputs = list(tensors_of(x, options))
    memory = MemorySnapshot(inputs)
    poison_memory(reference.to(FP8))
    values, scales = getattr(kernel, f"{name}_fp8")(x, **options)
    memory.assert_unchanged()
    assert values.is_contiguous() and scales.is_contiguous()
    # The reference of a GELU has no accurate value far below 0.
    is_accurate = (reference.abs() > 1e-12).any(-1) | (reference == 0).all(-1) & (x == 0).all(-1)
    assert not (scales[~is_accurate] > 1e-12).any()
    with one_thread():
        check_quantized(values[is_accurate], scales[is_accurate], reference[is_accurate])


def width(activation, hidden):
    return 2 * hidden if QUANTIZED[activation][0] in GATED else hidden


@pairwise(activation=QUANTIZED, hidden=SIZES, dtype=DTYPES, bias=BIASES)
def test_sizes(kernel, device, activation, hidden, dtype, bias):
    x = normal(33, width(activation, hidden), dtype=dtype, device=device, std=2.0)
    check_activation(kernel, activation, x, **with_bias({}, bias, x))


@pairwise(activation=QUANTIZED, layout=LAYOUTS, hidden=[65, 2048], dtype=DTYPES, bias=BIASES)
def test_layouts(kernel, device, activation, layout, hidden, dtype, bias):
    x = normal(3, 8, width(activation, hidden), dtype=dtype, device=device, layout=layout)
    check_activation(kernel, activation, x, **with_bias({}, bias, x))


@every_activation
@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 0, 64)], ids=str)
def test_empty(kernel, device, activation, shape):
    x = normal(*shape, dtype=torch.bfloat16, device=device)
    check_activation(kernel, activation, x)


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


@every_activation
def test_same_signature_and_errors_as_the_unquantized_activation(kernel, device, activation):
    name, choices = QUANTIZED[activation]
    plain, quantized = getattr(kernel, name), getattr(kernel, f"{name}_fp8")
    parameters = dict(inspect.signature(plain).parameters)
    del parameters["out"]
    assert dict(inspect.signature(quantized).parameters) == parameters
    x = normal(2, 64, dtype=torch.bfloat16, device=device)
    wrong = [
        {"x": x.int()},
        {"x": x, "bias": x[0, :7]},
        {"x": x, "bias": x[0].float()},
        {"x": x[:, ::2]},
        {"x": [1.0]},
        {"x": x, "activated": "third"} if name in GATED else {"x": x, "approximate": "cube"},
    ]
    wrong += [{"x": x[:, :63]}] * (name in GATED)
    for arguments in wrong:
        kind, text = outcome(plain, {**choices, **arguments})
        assert kind in (TypeError, ValueError)
        expected = text.replace(f"{name}:", f"{name}_fp8:", 1)
        assert outcome(quantized, {**choices, **arguments}) == (kind, expected)


@pytest.mark.sanitize
@every_activation
@pytest.mark.parametrize("hidden", [7, 2048, 12288])
def test_smoke(kernel, device, activation, hidden):
    x = normal(3, width(activation, hidden), dtype=torch.bfloat16, device=device)
    check_activation(kernel, activation, x, **with_bias({}, "contiguous", x))
