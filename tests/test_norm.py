"""rms_norm and layer_norm."""

import pytest
import torch

import eager
from checks import FLOAT32_ARITHMETIC, check, check_nonfinite, poison_memory
from inputs import (
    LAYOUTS,
    MIXTURES,
    SIZES,
    SMALL_SIZES,
    STRIDED_LAYOUTS,
    affine,
    every_16_bit_dtype,
    every_dtype,
    mixed,
    normal,
    rows_of,
    spread,
)

every_norm = pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])


@every_norm
@pytest.mark.parametrize("hidden", SMALL_SIZES)
@every_dtype
def test_small_sizes(kernel, device, name, hidden, dtype):
    x = spread(5, 3, hidden, dtype=dtype, device=device)
    check(kernel, name, x)
    check(kernel, name, x, **affine(name, hidden, dtype, device))


@every_norm
@pytest.mark.parametrize("hidden", SIZES)
@pytest.mark.parametrize("is_affine", [False, True], ids=["plain", "affine"])
@every_dtype
def test_sizes(kernel, device, name, hidden, is_affine, dtype):
    x = normal(rows_of(hidden, dtype), hidden, dtype=dtype, device=device)
    check(kernel, name, x, **(affine(name, hidden, dtype, device) if is_affine else {}))


# From one column to what takes several multiprocessors to hold, on and off multiples of a vector, and more.
WIDTHS = [1, 2, 3, 7, 8, 63, 64, 1000, 1536, 5120, 6144, 8192, 8200, 16384, 20480, 32768]
WIDTHS += [32776, 40000, 65528, 65536, 131080, 800_000, 1_000_000]


@pytest.mark.parametrize(
    "name",
    [
        "rms_norm",
        "layer_norm",
        "layer_norm_modulate",
        "gated_residual",
        "gated_residual_rms_norm_modulate",
    ],
)
@pytest.mark.parametrize("hidden", WIDTHS)
@every_dtype
def test_widths(kernel, device, name, hidden, dtype):
    """Few rows, whose statistics are far apart."""
    factors = torch.tensor([1.0, 0.25, 4.0], device=device)[:, None]
    means = torch.tensor([0.0, 1.0, -2.0], device=device)[:, None]
    x = spread(3, hidden, dtype=torch.float32, device=device) * factors + means
    tensors = {"x": x.to(dtype)}
    if name.startswith("gated"):
        tensors["residual"] = spread(3, hidden, dtype=dtype, device=device)
        tensors["gate"] = normal(hidden, dtype=dtype, device=device)
    if name.endswith("modulate"):
        tensors["scale"] = normal(3, hidden, dtype=dtype, device=device)
        tensors["shift"] = normal(1, hidden, dtype=dtype, device=device)
    if "norm" in name:
        tensors |= affine(name, hidden, dtype, device)
    contract = dtype != torch.float32  # of three rows' statistics the ratio of errors is noise
    # Where values, scales and shifts are far from 0 and cancel, a few float32 roundings of theirs remain.
    roundings = 2 if name.endswith("modulate") else 1
    if "layer_norm" in name and hidden == 1_000_000:
        roundings += 1  # of three million elements one shows those of a mean and a bias that cancel
    slack = FLOAT32_ARITHMETIC * roundings
    check(kernel, name, **tensors, slack=slack, contract=contract)


@pytest.mark.parametrize("name", ["layer_norm", "layer_norm_modulate"])
@pytest.mark.parametrize("hidden", [64, 1536, 5120, 8192, 65536])
@every_dtype
def test_outliers_in_front(kernel, device, name, hidden, dtype):
    """The first values of a row say nothing of the others: far from them, huge, or all there is."""
    x = normal(16, hidden, dtype=torch.float32, device=device)
    x[:, :8] += torch.linspace(-100, 100, 16, device=device)[:, None]
    x[3] = 7
    x[4] = 0
    x[4, 0] = 1000
    tensors = {"x": x.to(dtype)}
    if name.endswith("modulate"):
        tensors["scale"], tensors["shift"] = (
            normal(hidden, dtype=dtype, device=device) for _ in range(2)
        )
    check(kernel, name, **tensors, contract=dtype != torch.float32)


@every_norm
@pytest.mark.parametrize(
    "shape",
    [(4096,), (33, 256), (3, 11, 256), (2, 3, 5, 256), (2, 3, 2, 5, 256), (2, 1, 3, 2, 3, 256)],
    ids=str,
)
@every_dtype
def test_dimensions(kernel, device, name, shape, dtype):
    x = normal(*shape, dtype=dtype, device=device)
    check(kernel, name, x, **affine(name, shape[-1], dtype, device))


@every_norm
@pytest.mark.parametrize("layout", STRIDED_LAYOUTS)
@pytest.mark.parametrize("hidden", [65, 2048, 10240])
@every_dtype
def test_strided_views(kernel, device, name, layout, hidden, dtype):
    x = normal(3, 32, hidden, dtype=dtype, device=device, layout=layout)
    check(kernel, name, x, **affine(name, hidden, dtype, device))


@every_norm
@pytest.mark.parametrize("shape", [(2, 3, 4, 5, 64), (2, 3, 2, 3, 2, 3, 64)], ids=["5d", "7d"])
@every_dtype
def test_leading_dimensions_that_cannot_be_merged(kernel, device, name, shape, dtype):
    x = normal(*shape, dtype=dtype, device=device, layout="transposed")
    check(kernel, name, x, **affine(name, shape[-1], dtype, device))


@every_norm
@every_dtype
def test_stride_of_a_single_column_is_free(kernel, device, name, dtype):
    x = normal(7, dtype=dtype, device=device).as_strided((7, 1), (1, 7))
    check(kernel, name, x, **affine(name, 1, dtype, device))


@every_norm
@pytest.mark.parametrize("hidden", [64, 2048])
@every_dtype
def test_misaligned_weight(kernel, device, name, hidden, dtype):
    x = normal(rows_of(hidden, dtype), hidden, dtype=dtype, device=device)
    check(kernel, name, x, **affine(name, hidden, dtype, device, layout="misaligned"))


@every_norm
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("hidden", [7, 65, 1536, 5120, 10240, 40000])
@every_16_bit_dtype
def test_float32_weight_and_bias(kernel, device, name, mixture, hidden, dtype):
    """As FP32LayerNorm has them in a model of 16 bits."""
    x = normal(rows_of(hidden, dtype), hidden, dtype=dtype, device=device)
    parameters = affine(name, hidden, torch.float32, device)
    check(kernel, name, x, **mixed(mixture, parameters, dtype))


@pytest.mark.parametrize("given", ["weight", "bias"])
@pytest.mark.parametrize("layout", ["contiguous", "misaligned"])
@every_16_bit_dtype
def test_layer_norm_with_float32_weight_or_bias_alone(kernel, device, given, layout, dtype):
    x = normal(128, 256, dtype=dtype, device=device)
    vector = normal(256, dtype=torch.float32, device=device, layout=layout)
    check(kernel, "layer_norm", x, **{given: vector})


@pytest.mark.parametrize("given", ["weight", "bias"])
@every_dtype
def test_layer_norm_with_weight_or_bias_alone(kernel, device, given, dtype):
    x = normal(128, 256, dtype=dtype, device=device)
    check(kernel, "layer_norm", x, **{given: normal(256, dtype=dtype, device=device)})


@every_norm
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-6, 1e-3, 1.0])
@every_dtype
def test_eps(kernel, device, name, eps, dtype):
    x = normal(128, 256, dtype=dtype, device=device, std=0.02)
    check(kernel, name, x, eps=eps)


@every_norm
def test_default_eps(kernel, device, name):
    x = normal(128, 256, dtype=torch.float32, device=device, std=1e-3)
    check(kernel, name, x)


@pytest.mark.parametrize("mean", [10.0, 300.0])
@pytest.mark.parametrize("hidden", [64, 2048, 40000])
@every_dtype
def test_layer_norm_of_values_far_from_zero(kernel, device, mean, hidden, dtype):
    x = normal(rows_of(hidden, dtype), hidden, dtype=dtype, device=device, mean=mean)
    check(kernel, "layer_norm", x, slack=4e-7 * mean)


@every_norm
@every_dtype
def test_rows_of_one_value(kernel, device, name, dtype):
    x = torch.tensor([[0.0], [1.0], [-3.0]], dtype=dtype, device=device).expand(3, 512)
    check(kernel, name, x.contiguous(), **affine(name, 512, dtype, device))


@every_norm
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("hidden", [65, 2048, 10240])
@every_dtype
def test_nonfinite_values(kernel, device, name, value, hidden, dtype):
    x = normal(6, hidden, dtype=dtype, device=device)
    x[1, 0] = x[3, hidden // 2] = x[4, hidden - 1] = value
    check_nonfinite(kernel, name, x, **affine(name, hidden, dtype, device))


@every_norm
@every_dtype
def test_nonfinite_weight(kernel, device, name, dtype):
    x = normal(6, 256, dtype=dtype, device=device)
    parameters = affine(name, 256, dtype, device)
    parameters["weight"][3] = float("nan")
    parameters["weight"][7] = float("inf")
    check_nonfinite(kernel, name, x, **parameters)


@pytest.mark.sanitize
@pytest.mark.kernels_ci
@every_norm
@pytest.mark.parametrize(
    ("shape", "layout", "dtype"),
    [
        ((2, 3, 7), "odd_rows", torch.bfloat16),
        ((3, 2048), "contiguous", torch.float32),
        ((3, 1030), "misaligned", torch.float16),
        ((2, 16384), "contiguous", torch.float16),
        ((2, 40000), "contiguous", torch.bfloat16),
        ((2, 65536), "contiguous", torch.float32),
        ((2, 70001), "odd_rows", torch.float32),
    ],
    ids=str,
)
def test_smoke(kernel, device, name, shape, layout, dtype):
    x = spread(*shape, dtype=dtype, device=device, layout=layout)
    check(kernel, name, x, contract=False, **affine(name, shape[-1], dtype, device))


def test_memory_of_an_eager_result_is_poisoned(device):
    """All tests of values rest on this."""
    for _ in range(20):
        right = eager.rms_norm(normal(64, 65, dtype=torch.bfloat16, device=device))
        poison_memory(right)
        assert (torch.empty_like(right) == right).float().mean() < 0.1


def test_layouts_are_what_they_are_called(device):
    """All tests of strided views rest on this."""
    views = {
        name: normal(3, 4, 64, dtype=torch.bfloat16, device=device, layout=name) for name in LAYOUTS
    }
    strides = {name: view.stride() for name, view in views.items()}
    assert strides == {
        "contiguous": (256, 64, 1),
        "unbind": (768, 192, 1),
        "chunk": (768, 192, 1),
        "transposed": (64, 192, 1),
        "expanded": (0, 64, 1),
        "misaligned": (256, 64, 1),
        "odd_rows": (268, 67, 1),
    }
    assert views["contiguous"].data_ptr() % 16 == 0
    assert views["misaligned"].data_ptr() % 16 == 2
    assert all(view.isfinite().all() for view in views.values())
