"""lora_down_fp8. Its errors, derivatives and tracing are in test_fp8.py."""

import math

import pytest
import torch

import references
from checks import MemorySnapshot, assert_rounded_once, map_tensors, poison_memory, tensors_of
from inputs import every_16_bit_dtype, lora_down_operands, pairwise
from test_fp8 import FP8


def down_arguments(rows, rank, in_features, is_blocked, dtype, device, alpha=0.7):
    shape = (*((rows,) if isinstance(rows, int) else rows), in_features)
    blocks = math.ceil(in_features / 128) if is_blocked else 1
    arguments = lora_down_operands(shape, rank, blocks, dtype=dtype, device=device)
    return {**arguments, "alpha": alpha}


def check_down(kernel, arguments):
    expected = references.lora_down_fp8(**arguments)
    magnitudes = map_tensors(lambda t: t.double().abs(), arguments)
    magnitudes["alpha"] = abs(arguments["alpha"])
    rounded = expected.to(arguments["down"].dtype)
    memory = MemorySnapshot(tensors_of(arguments))
    poison_memory(rounded)
    out = kernel.lora_down_fp8(**arguments)
    memory.assert_unchanged()
    assert out.is_contiguous()
    assert (out.shape, out.dtype, out.device) == (expected.shape, rounded.dtype, rounded.device)
    # Errors of float32 sums, relative to the sum of the terms' magnitudes, which may cancel.
    slack = 4e-6 * references.lora_down_fp8(**magnitudes) + torch.finfo(out.dtype).tiny
    assert_rounded_once(out, expected, slack)
    return out


@pairwise(
    rows=[(), 1, 7, 64, 65, 130, (2, 3, 5)],
    rank=[8, 16, 24, 64, 72, 200, 512],
    in_features=[16, 48, 128, 272, 1040, 3072],
    is_blocked=[False, True],
    dtype=[torch.bfloat16, torch.float16],
    alpha=[1, 0.7, -2.5, 0],
)
def test_values(kernel, device, rows, rank, in_features, is_blocked, dtype, alpha):
    size = rows, rank, in_features, is_blocked
    check_down(kernel, down_arguments(*size, dtype, device, alpha))


@pytest.mark.parametrize("rows", [513, 2500, 5000])
@pytest.mark.parametrize("rank", [16, 32, 64, 136])
@pytest.mark.parametrize("in_features", [272, 3072, 15360])
def test_many_rows(kernel, device, rows, rank, in_features):
    """All tiles and splits of the inner dimension, and the same bits each time."""
    if device == "cpu":
        pytest.skip("a CPU has one loop for all sizes")
    arguments = down_arguments(rows, rank, in_features, True, torch.bfloat16, device)
    out = check_down(kernel, arguments)
    for _ in range(5):
        assert torch.equal(kernel.lora_down_fp8(**arguments), out)


@every_16_bit_dtype
@pytest.mark.parametrize("is_blocked", [False, True])
def test_each_operand_is_where_it_belongs(kernel, device, is_blocked, dtype):
    """Exact sums of powers of two, in which each row, column and block has its own factor."""
    rows, rank, blocks = 70, 88, 3
    arguments = down_arguments(rows, rank, 128 * blocks, is_blocked, dtype, device, 0.5)
    x, down = (torch.zeros(n, blocks, 128, device=device) for n in (rows, rank))
    columns = torch.arange(rank, device=device)
    for block in range(blocks):
        x[:, block, 37 * block + 1] = 2**block
        down[:, block, 37 * block + 1] = 2.0 ** (columns % 3 - block % 2)
    powers = torch.arange(rows * arguments["x_scale"].shape[1], device=device) % 3
    arguments["x"], arguments["down"] = x.flatten(1).to(FP8), down.flatten(1).to(dtype)
    arguments["x_scale"] = (2.0**powers).view_as(arguments["x_scale"])
    out = kernel.lora_down_fp8(**arguments)
    assert torch.equal(out.double(), references.lora_down_fp8(**arguments))


@every_16_bit_dtype
def test_every_code(kernel, device, dtype):
    """Each E4M3 number, of which two are NaN, is converted exactly, at each place of a block."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    one, down = torch.ones(256, 1, device=device), torch.eye(128, dtype=dtype, device=device)
    x = codes[:, None].expand(256, 128).contiguous().view(FP8)
    out = kernel.lora_down_fp8(x, one, down)
    is_number = ~x.float().isnan()
    assert torch.equal(out.isnan(), ~is_number)
    assert torch.equal(out[is_number].float(), x.float()[is_number])


@pytest.mark.parametrize("is_blocked", [False, True])
def test_scales_of_zero_and_nan_affect_their_rows(kernel, device, is_blocked):
    arguments = down_arguments(70, 24, 256, is_blocked, torch.bfloat16, device)
    expected = kernel.lora_down_fp8(**arguments)
    arguments["x_scale"][2, -1] = math.nan
    arguments["x_scale"][66] = 0
    out = kernel.lora_down_fp8(**arguments)
    others = [row for row in range(70) if row not in (2, 66)]
    assert out[2].isnan().all() and (out[66] == 0).all()
    assert torch.equal(out[others], expected[others])


@pytest.mark.parametrize("rows", [0, (2, 0)])
def test_no_rows(kernel, device, rows):
    arguments = down_arguments(rows, 24, 256, True, torch.float16, device)
    out = kernel.lora_down_fp8(**arguments)
    assert out.dtype == torch.float16 and out.shape == (*arguments["x"].shape[:-1], 24)
