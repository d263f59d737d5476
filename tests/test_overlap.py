"""In place: tensors that share elements are refused, and views side by side in one buffer are not.

What is refused is compared with the sets of addresses themselves.
"""

import random

import pytest
import torch

from checks import MemorySnapshot, map_tensors, tensors_of
from inputs import (
    PACKED_FORMS,
    coordinates_and_frequencies,
    normal,
    packed_query_and_key,
    rotary_tables,
)
from test_errors import assert_refused, sentence

SHARED = "overlapping elements"


def refused(kernel, arguments, pattern):
    arguments = {"inplace": True, **arguments}
    memory = MemorySnapshot(tensors_of(arguments))
    message = assert_refused(kernel.qk_norm_rope, arguments, pattern)
    memory.assert_unchanged()
    return message


def accepted(kernel, arguments):
    expected = kernel.qk_norm_rope(**map_tensors(torch.clone, arguments))
    results = kernel.qk_norm_rope(**arguments, inplace=True)
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result, reference)
    return results


def test_query_and_key_that_overlap_in_part(kernel, device):
    b = torch.randn(2, 6, 16, device=device)
    pattern = sentence("qk_norm_rope", "k", SHARED)
    for q, k in ((b[:, :5], b[:, 1:]), (b[:, 1:], b[:, :5]), (b[..., :8], b[..., 6:14]), (b, b)):
        refused(kernel, {"q": q, "k": k, "heads": 2}, pattern)


@pytest.mark.parametrize("argument", ["q", "k"])
def test_overlap_within_a_tensor(kernel, device, argument):
    arguments = {key: torch.randn(2, 5, 16, device=device) for key in ("q", "k")}
    for strides in ((20, 7, 1), (80, 15, 1), (16, 16, 1), (72, 16, 1)):
        view = torch.randn(200, device=device).as_strided((2, 5, 16), strides)
        wrong = {**arguments, argument: view, "heads": 2}
        refused(kernel, wrong, sentence("qk_norm_rope", argument, str(strides)))


@pytest.mark.parametrize(
    "argument", ["q_weight", "k_weight", "cos", "sin", "coordinates", "frequencies"]
)
@pytest.mark.parametrize("written", ["q", "k"])
def test_what_is_read_lies_in_what_is_written(kernel, device, argument, written):
    q, k = (torch.randn(2, 4, 16, device=device) for _ in range(2))
    arguments = {"q": q, "k": k, "heads": 2}
    arguments.update({key: torch.ones(16, device=device) for key in ("q_weight", "k_weight")})
    cos, sin = rotary_tables(4, 16, dtype=torch.float32, device=device)
    target = arguments[written]
    inside = {
        "q_weight": target[1, 3],
        "k_weight": target[0, 0],
        "cos": target[0],
        "sin": target[1],
        "coordinates": target[:1, :, 4:7],
        "frequencies": target[1, 2, :2],
    }[argument]
    if argument.endswith("weight"):
        arguments[argument] = inside
    elif argument in ("cos", "sin"):
        arguments["rope"] = (inside, sin) if argument == "cos" else (cos, inside)
    else:
        rope = kernel.CoordinateRope(*coordinates_and_frequencies(1, 4, 3, 2, device))
        arguments["rope"] = rope._replace(**{argument: inside})
    message = refused(kernel, arguments, sentence("qk_norm_rope", argument, SHARED))
    assert f"memory with {written}," in message


@pytest.mark.parametrize("form", PACKED_FORMS)
@pytest.mark.parametrize("is_4d", [False, True])
def test_views_side_by_side(kernel, device, form, is_4d):
    for shape in ((2, 5, 3, 8), (1, 7, 1, 4), (3, 1, 2, 16)):
        q, k = packed_query_and_key(form, shape, torch.float32, device)
        if q.dim() == 3 and is_4d:
            q, k = (t.unflatten(2, shape[2:]) for t in (q, k))
        if q.dim() == 4 and not is_4d:
            if form not in ("unbind", "chunk"):
                continue
            q, k = (t.flatten(2) for t in (q, k))
        accepted(kernel, {"q": q, "k": k, "heads": shape[2]})
        accepted(kernel, {"q": k, "k": q, "heads": shape[2]})


def test_weights_and_tables_beside_what_is_written(kernel, device):
    """All of one buffer: rows of query, key, cosine and sine, and a weight that ends it."""
    buffer = torch.randn(2, 5, 4 * 16 + 16, device=device)
    q, k, cos, sin, _ = buffer.split(16, dim=-1)
    arguments = {"q": q, "k": k, "q_weight": buffer[1, 4, 64:], "rope": (cos, sin), "heads": 2}
    accepted(kernel, arguments)


# --------------------------------------------------------------------------------------------------
# Outputs


def of_outputs(device, **changes):
    q, k, v = (torch.randn(2, 5, 2, 8, device=device) for _ in range(3))
    joint = [torch.zeros(2, 9, 2, 8, device=device) for _ in range(3)]
    weights = {key: torch.ones(8, device=device) for key in ("q_weight", "k_weight")}
    rope = rotary_tables(5, 8, dtype=torch.float32, device=device)
    options = {"v": v, "rope": rope, "heads": 2, "norm": "per_head", **weights}
    return {"q": q, "k": k, "out": tuple(b[:, 4:] for b in joint), **options, **changes}


def output_refused(kernel, arguments, name, written):
    pattern = sentence("qk_norm_rope", name, SHARED)
    memory = MemorySnapshot(tensors_of(arguments))
    message = assert_refused(kernel.qk_norm_rope, arguments, pattern)
    memory.assert_unchanged()
    assert f"memory with {written}, which is written, got" in message


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("second", range(3))
def test_outputs_that_overlap(kernel, device, first, second):
    if first >= second:
        pytest.skip("each two of them once")
    arguments = of_outputs(device)
    outs, buffer = list(arguments["out"]), torch.zeros(2, 12, 2, 8, device=device)
    outs[first], outs[second] = buffer[:, 1:6], buffer[:, 5:10]
    names = ("q_out", "k_out", "v_out")
    arguments["out"] = tuple(outs)
    output_refused(kernel, arguments, names[second], names[first])
    outs[second] = buffer[:, 6:11]
    arguments["out"] = tuple(outs)
    assert len(kernel.qk_norm_rope(**arguments)) == 3


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("is_whole", [False, True])
def test_outputs_that_overlap_inputs(kernel, device, name, index, is_whole):
    """An input itself may be its own output, and no other; a part of it may not."""
    arguments = of_outputs(device)
    outs, buffer = list(arguments["out"]), torch.randn(2, 6, 2, 8, device=device)
    arguments[name] = buffer[:, :5]
    outs[index] = buffer[:, :5] if is_whole else buffer[:, 1:]
    arguments["out"] = tuple(outs)
    if is_whole and "qkv"[index] == name:
        expected = outs[index].clone()
        result = kernel.qk_norm_rope(**arguments)[index]
        assert torch.equal(result, expected) == (name == "v")
    else:
        written = ("q_out", "k_out", "v_out")[index]
        output_refused(kernel, arguments, name, written)


@pytest.mark.parametrize("name", ["q_weight", "k_weight", "cos", "sin", "k_cos", "k_sin"])
@pytest.mark.parametrize("index", range(3))
def test_outputs_over_what_is_read(kernel, device, name, index):
    arguments = of_outputs(device)
    out = arguments["out"][index]
    inside = out[0, 1, 1] if name.endswith("weight") else out[1, :, 0]
    if name.endswith("weight"):
        arguments[name] = inside
    else:
        of_key = "k_" if name.startswith("k_") else ""
        cos, sin = arguments["rope"]
        arguments[f"{of_key}rope"] = (inside, sin) if name.endswith("cos") else (cos, inside)
    output_refused(kernel, arguments, name, ("q_out", "k_out", "v_out")[index])


def addresses(tensor):
    """Of all bytes of its elements, for each element."""
    starts = torch.tensor([0])
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        starts = (starts[:, None] + torch.arange(size) * stride).flatten()
    bytes_ = tensor.element_size()
    starts = (starts + tensor.storage_offset()) * bytes_
    return (starts[:, None] + torch.arange(bytes_)).flatten().tolist()


def random_view(buffer, generator, rows):
    """(2, rows, 1, 2) with any strides of the first two dimensions, most of them small."""
    batch_stride, row_stride = (generator.choice(range(1, 30)) for _ in range(2))
    reach = batch_stride + (rows - 1) * row_stride + 2
    offset = generator.randrange(min(buffer.numel() - reach, 40))
    return buffer.as_strided((2, rows, 1, 2), (batch_stride, row_stride, 2, 1), offset)


def test_random_views_against_their_addresses(kernel, device):
    generator = random.Random(20)
    counts = {False: 0, True: 0}
    for _ in range(2000):
        rows = generator.choice([1, 2, 3, 5])
        buffer = torch.randn(400, device=device)
        q, k = (random_view(buffer, generator, rows) for _ in range(2))
        tables = buffer.as_strided((rows, 2), (generator.randrange(2, 9), 1), 100)
        arguments = {"q": q, "k": k, "rope": (tables, torch.ones_like(tables)), "heads": 1}
        written = [addresses(t) for t in (q, k)]
        flat = [a for one in written for a in one]
        shares = len(set(flat)) < len(flat) or set(flat) & set(addresses(tables))
        counts[bool(shares)] += 1
        if not shares:
            kernel.qk_norm_rope(**arguments, inplace=True)
        else:
            with pytest.raises(ValueError, match="qk_norm_rope: .* in place, got"):
                kernel.qk_norm_rope(**arguments, inplace=True)
    assert min(counts.values()) > 200, counts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_random_views_of_two_dtypes(kernel, device, dtype):
    """Float32 coordinates in the memory of the written tensors, byte for byte."""
    generator = random.Random(21)
    counts = {False: 0, True: 0}
    for _ in range(1000):
        rows = generator.choice([1, 2, 3])
        buffer = normal(200, dtype=torch.float32, device=device)
        q = random_view(buffer.view(dtype), generator, rows)
        coordinates = buffer.as_strided(
            (1, rows, 1), (1, generator.randrange(1, 40), 1), generator.randrange(0, 60)
        )
        k = torch.randn_like(q.contiguous())
        rope = kernel.CoordinateRope(coordinates, torch.ones(1, device=device))
        arguments = {"q": q, "k": k, "rope": rope, "heads": 1}
        own = addresses(q)
        shares = len(set(own)) < len(own) or bool(set(own) & set(addresses(coordinates)))
        counts[shares] += 1
        if not shares:
            kernel.qk_norm_rope(**arguments, inplace=True)
        else:
            with pytest.raises(ValueError, match="qk_norm_rope: .* in place, got"):
                kernel.qk_norm_rope(**arguments, inplace=True)
    assert min(counts.values()) > 100, counts
