"""lora_down. Its errors, derivatives and tracing are in test_fp8.py."""

import math

import pytest
import torch

import references
from checks import MemorySnapshot, assert_rounded_once, map_tensors, poison_memory, tensors_of
from inputs import every_16_bit_dtype, lora_down_operands, pairwise
from test_fp8 import FP8

X_KINDS = ("fp8", "fp8 in blocks", "16 bits")
every_kind = pytest.mark.parametrize("kind", X_KINDS)
every_fp8_kind = pytest.mark.parametrize("kind", X_KINDS[:2])


def down_arguments(kind, rows, ranks, in_features, dtype, device):
    shape = (*((rows,) if isinstance(rows, int) else rows), in_features)
    blocks = {"fp8": 1, "fp8 in blocks": math.ceil(in_features / 128), "16 bits": None}[kind]
    return lora_down_operands(shape, ranks, blocks, dtype=dtype, device=device)


def check_down(kernel, arguments):
    expected = references.lora_down(**arguments)
    magnitudes = map_tensors(lambda t: t.double().abs(), arguments)
    magnitudes["scales"] = [abs(scale) for scale in arguments.get("scales") or []]
    rounded = expected.to(arguments["downs"][0].dtype)
    memory = MemorySnapshot(tensors_of(arguments))
    poison_memory(rounded)
    out = kernel.lora_down(**arguments)
    memory.assert_unchanged()
    assert out.is_contiguous()
    assert (out.shape, out.dtype, out.device) == (expected.shape, rounded.dtype, rounded.device)
    # Errors of float32 sums, relative to the sum of the terms' magnitudes, which may cancel.
    slack = 4e-6 * references.lora_down(**magnitudes) + torch.finfo(out.dtype).tiny
    assert_rounded_once(out, expected, slack)
    return out


@pairwise(
    kind=X_KINDS,
    rows=[(), 1, 7, 64, 65, 130, (2, 3, 5)],
    ranks=[
        (1,),
        (4,),
        (8,),
        (16,) * 3,
        (8, 24, 3),
        (72,),
        (64, 64),
        (200,),
        (7, 16) * 6,
        (128,) * 4,
    ],
    in_features=[16, 48, 128, 272, 1040, 3072],
    dtype=[torch.bfloat16, torch.float16],
)
def test_values(kernel, device, kind, rows, ranks, in_features, dtype):
    check_down(kernel, down_arguments(kind, rows, ranks, in_features, dtype, device))


@every_16_bit_dtype
@pytest.mark.parametrize("in_features", [8, 24, 72, 1048])
def test_multiples_of_8_features(kernel, device, in_features, dtype):
    check_down(kernel, down_arguments("16 bits", 70, (16, 5), in_features, dtype, device))


@every_kind
def test_scales(kernel, device, kind):
    arguments = down_arguments(kind, 9, (16, 3, 8), 64, torch.bfloat16, device)
    for scales in ([0.0, -1.0, 1e-3], (2, 0, -3)):
        out = check_down(kernel, {**arguments, "scales": scales})
    assert not out[:, 16:24].any()
    arguments["downs"] = list(arguments["downs"])
    out = kernel.lora_down(**{**arguments, "scales": None})
    assert torch.equal(out, kernel.lora_down(**{**arguments, "scales": [1.0] * 3}))


@pytest.mark.parametrize("kind", X_KINDS[1:])
@pytest.mark.parametrize("rows", [513, 2500, 5000])
@pytest.mark.parametrize("ranks", [(4,), (16,) * 2, (16,) * 3, (8, 24, 3), (64, 64), (16, 120, 1)])
@pytest.mark.parametrize("in_features", [272, 3072, 15360])
def test_many_rows(kernel, device, kind, rows, ranks, in_features):
    """All tiles and splits of the inner dimension, and the same bits each time."""
    if device == "cpu":
        pytest.skip("a CPU has one loop for all sizes")
    arguments = down_arguments(kind, rows, ranks, in_features, torch.bfloat16, device)
    out = check_down(kernel, arguments)
    for _ in range(5):
        assert torch.equal(kernel.lora_down(**arguments), out)


@pytest.mark.parametrize("ranks", [(1024,), (80,) * 12, (1,) * 12, (512, 505)], ids=str)
@every_kind
def test_many_columns(kernel, device, kind, ranks):
    check_down(kernel, down_arguments(kind, 66, ranks, 144, torch.float16, device))


@every_16_bit_dtype
@every_kind
@pytest.mark.parametrize("ranks", [(88,), (16, 48, 32), (3, 70, 8, 1)], ids=str)
def test_each_operand_is_where_it_belongs(kernel, device, kind, dtype, ranks):
    """Exact sums of powers of two, in which each row, column and block has its own factor."""
    rows, blocks = 70, 3
    arguments = down_arguments(kind, rows, ranks, 128 * blocks, dtype, device)
    arguments["scales"] = [2.0 ** (i % 3 - 1) for i in range(len(ranks))]
    x, down = (torch.zeros(n, blocks, 128, device=device) for n in (rows, sum(ranks)))
    columns = torch.arange(sum(ranks), device=device)
    for block in range(blocks):
        x[:, block, 37 * block + 1] = 2**block
        down[:, block, 37 * block + 1] = 2.0 ** (columns % 3 - block % 2)
    arguments["x"] = x.flatten(1).to(dtype if kind == "16 bits" else FP8)
    if "x_scale" in arguments:
        powers = torch.arange(arguments["x_scale"].numel(), device=device) % 3
        arguments["x_scale"] = (2.0**powers).view_as(arguments["x_scale"])
    arguments["downs"] = [part.contiguous() for part in down.flatten(1).to(dtype).split(ranks)]
    out = kernel.lora_down(**arguments)
    assert torch.equal(out.double(), references.lora_down(**arguments))


@every_16_bit_dtype
def test_every_code(kernel, device, dtype):
    """Each E4M3 number, of which two are NaN, is converted exactly, at each place of a block."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    one, down = torch.ones(256, 1, device=device), torch.eye(128, dtype=dtype, device=device)
    x = codes[:, None].expand(256, 128).contiguous().view(FP8)
    out = kernel.lora_down(x, [down], x_scale=one)
    is_number = ~x.float().isnan()
    assert torch.equal(out.isnan(), ~is_number)
    assert torch.equal(out[is_number].float(), x.float()[is_number])


@every_16_bit_dtype
def test_every_place_of_16_bits(kernel, device, dtype):
    """Each feature of a row is multiplied by its own column of down."""
    x = torch.randn(200, 192, device=device).to(dtype)
    downs = torch.eye(192, dtype=dtype, device=device).split((64, 8, 120))
    assert torch.equal(kernel.lora_down(x, downs), x)


@every_fp8_kind
def test_scales_of_zero_and_nan_affect_their_rows(kernel, device, kind):
    arguments = down_arguments(kind, 70, (24,), 256, torch.bfloat16, device)
    expected = kernel.lora_down(**arguments)
    arguments["x_scale"][2, -1] = math.nan
    arguments["x_scale"][66] = 0
    out = kernel.lora_down(**arguments)
    others = [row for row in range(70) if row not in (2, 66)]
    assert out[2].isnan().all() and (out[66] == 0).all()
    assert torch.equal(out[others], expected[others])


@every_kind
def test_rows_are_independent(kernel, device, kind):
    """A NaN in a row of x, and in a row of a matrix, affects that row and that column."""
    arguments = down_arguments(kind, 70, (5, 24), 256, torch.bfloat16, device)
    expected = kernel.lora_down(**arguments)
    arguments["x"].view(torch.uint8)[3] = 255
    arguments["downs"][1][2] = math.nan
    out = kernel.lora_down(**arguments)
    others = torch.arange(70, device=device) != 3
    assert out[3, :5].isnan().all() and out[3, 8:].isnan().all() and out[:, 10].isnan().all()
    out[:, 10] = expected[:, 10] = 0
    assert torch.equal(out[others], expected[others])


@pytest.mark.parametrize("rows", [0, (2, 0)])
@every_kind
def test_no_rows(kernel, device, kind, rows):
    arguments = down_arguments(kind, rows, (24, 3), 256, torch.float16, device)
    out = kernel.lora_down(**arguments)
    assert out.dtype == torch.float16 and out.shape == (*arguments["x"].shape[:-1], 32)
