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

on_both_paths = pytest.mark.parametrize("is_traced", [False, True], ids=["run", "traced"])
SHARED = "overlapping elements"


def on_meta_together(arguments):
    """Without values: views of one storage stay views of one storage."""
    storages = {}

    def on_meta(tensor):
        key = tensor.untyped_storage().data_ptr()
        if key not in storages:
            size = tensor.untyped_storage().nbytes()
            storages[key] = torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage()
        view = torch.empty(0, dtype=tensor.dtype, device="meta")
        return view.set_(storages[key], tensor.storage_offset(), tensor.shape, tensor.stride())

    return map_tensors(on_meta, arguments)


def refused(kernel, arguments, pattern, is_traced):
    arguments = {"inplace": True, **arguments}
    if is_traced:
        return assert_refused(kernel.qk_norm_rope, on_meta_together(arguments), pattern)
    memory = MemorySnapshot(tensors_of(arguments))
    message = assert_refused(kernel.qk_norm_rope, arguments, pattern)
    memory.assert_unchanged()
    return message


def accepted(kernel, arguments, is_traced):
    if is_traced:
        return kernel.qk_norm_rope(**on_meta_together(arguments), inplace=True)
    expected = kernel.qk_norm_rope(**map_tensors(torch.clone, arguments))
    results = kernel.qk_norm_rope(**arguments, inplace=True)
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result, reference)
    return results


@on_both_paths
def test_query_and_key_that_overlap_in_part(kernel, device, is_traced):
    b = torch.randn(2, 6, 16, device=device)
    pattern = sentence("qk_norm_rope", "k", SHARED)
    for q, k in ((b[:, :5], b[:, 1:]), (b[:, 1:], b[:, :5]), (b[..., :8], b[..., 6:14]), (b, b)):
        refused(kernel, {"q": q, "k": k, "heads": 2}, pattern, is_traced)


@on_both_paths
@pytest.mark.parametrize("argument", ["q", "k"])
def test_overlap_within_a_tensor(kernel, device, is_traced, argument):
    arguments = {key: torch.randn(2, 5, 16, device=device) for key in ("q", "k")}
    for strides in ((20, 7, 1), (80, 15, 1), (16, 16, 1), (72, 16, 1)):
        view = torch.randn(200, device=device).as_strided((2, 5, 16), strides)
        wrong = {**arguments, argument: view, "heads": 2}
        refused(kernel, wrong, sentence("qk_norm_rope", argument, str(strides)), is_traced)


@on_both_paths
@pytest.mark.parametrize(
    "argument", ["q_weight", "k_weight", "cos", "sin", "coordinates", "frequencies"]
)
@pytest.mark.parametrize("written", ["q", "k"])
def test_what_is_read_lies_in_what_is_written(kernel, device, is_traced, argument, written):
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
    message = refused(kernel, arguments, sentence("qk_norm_rope", argument, SHARED), is_traced)
    assert f"memory with {written}," in message


@on_both_paths
@pytest.mark.parametrize("form", PACKED_FORMS)
@pytest.mark.parametrize("is_4d", [False, True])
def test_views_side_by_side(kernel, device, is_traced, form, is_4d):
    for shape in ((2, 5, 3, 8), (1, 7, 1, 4), (3, 1, 2, 16)):
        q, k = packed_query_and_key(form, shape, torch.float32, device)
        if q.dim() == 3 and is_4d:
            q, k = (t.unflatten(2, shape[2:]) for t in (q, k))
        if q.dim() == 4 and not is_4d:
            if form not in ("unbind", "chunk"):
                continue
            q, k = (t.flatten(2) for t in (q, k))
        accepted(kernel, {"q": q, "k": k, "heads": shape[2]}, is_traced)
        accepted(kernel, {"q": k, "k": q, "heads": shape[2]}, is_traced)


@on_both_paths
def test_weights_and_tables_beside_what_is_written(kernel, device, is_traced):
    """All of one buffer: rows of query, key, cosine and sine, and a weight that ends it."""
    buffer = torch.randn(2, 5, 4 * 16 + 16, device=device)
    q, k, cos, sin, _ = buffer.split(16, dim=-1)
    arguments = {"q": q, "k": k, "q_weight": buffer[1, 4, 64:], "rope": (cos, sin), "heads": 2}
    accepted(kernel, arguments, is_traced)


# --------------------------------------------------------------------------------------------------
# Outputs


def of_outputs(device, **changes):
    q, k, v = (torch.randn(2, 5, 2, 8, device=device) for _ in range(3))
    joint = [torch.zeros(2, 9, 2, 8, device=device) for _ in range(3)]
    weights = {key: torch.ones(8, device=device) for key in ("q_weight", "k_weight")}
    rope = rotary_tables(5, 8, dtype=torch.float32, device=device)
    options = {"v": v, "rope": rope, "heads": 2, "norm": "per_head", **weights}
    return {"q": q, "k": k, "out": tuple(b[:, 4:] for b in joint), **options, **changes}


def output_refused(kernel, arguments, name, written, is_traced):
    pattern = sentence("qk_norm_rope", name, SHARED)
    if is_traced:
        message = assert_refused(kernel.qk_norm_rope, on_meta_together(arguments), pattern)
    else:
        memory = MemorySnapshot(tensors_of(arguments))
        message = assert_refused(kernel.qk_norm_rope, arguments, pattern)
        memory.assert_unchanged()
    assert f"memory with {written}, which is written, got" in message


@on_both_paths
@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("second", range(3))
def test_outputs_that_overlap(kernel, device, is_traced, first, second):
    if first >= second:
        pytest.skip("each two of them once")
    arguments = of_outputs(device)
    outs, buffer = list(arguments["out"]), torch.zeros(2, 12, 2, 8, device=device)
    outs[first], outs[second] = buffer[:, 1:6], buffer[:, 5:10]
    names = ("q_out", "k_out", "v_out")
    arguments["out"] = tuple(outs)
    output_refused(kernel, arguments, names[second], names[first], is_traced)
    outs[second] = buffer[:, 6:11]
    arguments["out"] = tuple(outs)
    given = on_meta_together(arguments) if is_traced else arguments
    assert len(kernel.qk_norm_rope(**given)) == 3


@on_both_paths
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("is_whole", [False, True])
def test_outputs_that_overlap_inputs(kernel, device, is_traced, name, index, is_whole):
    """An input itself may be its own output, and no other; a part of it may not."""
    arguments = of_outputs(device)
    outs, buffer = list(arguments["out"]), torch.randn(2, 6, 2, 8, device=device)
    arguments[name] = buffer[:, :5]
    outs[index] = buffer[:, :5] if is_whole else buffer[:, 1:]
    arguments["out"] = tuple(outs)
    if is_whole and "qkv"[index] == name:
        given = on_meta_together(arguments) if is_traced else arguments
        expected = outs[index].clone()
        result = kernel.qk_norm_rope(**given)[index]
        assert is_traced or torch.equal(result, expected) == (name == "v")
    else:
        written = ("q_out", "k_out", "v_out")[index]
        output_refused(kernel, arguments, name, written, is_traced)


@on_both_paths
@pytest.mark.parametrize("name", ["q_weight", "k_weight", "cos", "sin", "k_cos", "k_sin"])
@pytest.mark.parametrize("index", range(3))
def test_outputs_over_what_is_read(kernel, device, is_traced, name, index):
    arguments = of_outputs(device)
    out = arguments["out"][index]
    inside = out[0, 1, 1] if name.endswith("weight") else out[1, :, 0]
    if name.endswith("weight"):
        arguments[name] = inside
    else:
        of_key = "k_" if name.startswith("k_") else ""
        cos, sin = arguments["rope"]
        arguments[f"{of_key}rope"] = (inside, sin) if name.endswith("cos") else (cos, inside)
    output_refused(kernel, arguments, name, ("q_out", "k_out", "v_out")[index], is_traced)


@pytest.mark.parametrize("index", range(3))
def test_outputs_that_are_negative_views(kernel, device, index):
    arguments = of_outputs(device)
    outs = list(arguments["out"])
    outs[index] = torch._neg_view(outs[index])
    arguments["out"] = tuple(outs)
    name = ("q_out", "k_out", "v_out")[index]
    assert_refused(
        kernel.qk_norm_rope, arguments, sentence("qk_norm_rope", name, "negative bit set")
    )


@on_both_paths
def test_output_of_one_tensor(kernel, device, is_traced):
    buffer = torch.randn(2, 9, 16, device=device)
    weight = torch.ones(16, device=device)

    def call(x, out, weight=weight):
        arguments = {"x": x, "weight": weight, "heads": 2, "out": out}
        return kernel.norm_rope(**(on_meta_together(arguments) if is_traced else arguments))

    for x, out, message in (
        (buffer[:, :5], buffer[:, 4:], "x must not share memory with out, which is written, got"),
        (buffer[:, :5, :8], buffer[:, :5, 4:12], "x must not share memory with out"),
    ):
        with pytest.raises(ValueError, match=f"norm_rope: {message}"):
            call(x, out, None)
    with pytest.raises(ValueError, match="norm_rope: weight must not share memory with out"):
        call(buffer[:, :4], buffer[:, 4:8], buffer[1, 6])
    call(buffer[:, :4], buffer[:, 4:8])
    call(buffer[:, :4], buffer[:, :4])


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


@on_both_paths
def test_random_views_against_their_addresses(kernel, device, is_traced):
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
        given = on_meta_together(arguments) if is_traced else arguments
        if not shares:
            kernel.qk_norm_rope(**given, inplace=True)
        else:
            with pytest.raises(ValueError, match="qk_norm_rope: .* in place, got"):
                kernel.qk_norm_rope(**given, inplace=True)
    assert min(counts.values()) > 200, counts


@on_both_paths
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_random_views_of_two_dtypes(kernel, device, is_traced, dtype):
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
        given = on_meta_together(arguments) if is_traced else arguments
        if not shares:
            kernel.qk_norm_rope(**given, inplace=True)
        else:
            with pytest.raises(ValueError, match="qk_norm_rope: .* in place, got"):
                kernel.qk_norm_rope(**given, inplace=True)
    assert min(counts.values()) > 100, counts


@pytest.mark.parametrize("argument", ["q", "k"])
def test_negative_views_in_place(kernel, device, argument):
    arguments = {key: torch.randn(2, 4, 16, device=device) for key in ("q", "k")}
    arguments[argument] = torch._neg_view(arguments[argument])
    pattern = sentence("qk_norm_rope", argument, "negative bit set")
    refused(kernel, {**arguments, "heads": 2}, pattern, is_traced=False)


def test_negative_views_that_are_read_in_place(kernel, device):
    q, k = torch.randn(2, 2, 4, 16, device=device)
    weight = torch.randn(16, device=device)
    rope = rotary_tables(4, 16, dtype=torch.float32, device=device)
    negative = tuple(torch._neg_view(table) for table in rope)
    expected = kernel.qk_norm_rope(q, k, -weight, rope=(-rope[0], -rope[1]), heads=2)
    weight = torch._neg_view(weight)
    results = kernel.qk_norm_rope(q, k, weight, rope=negative, heads=2, inplace=True)
    for result, reference in zip(results, expected, strict=True):
        assert torch.equal(result, reference)
