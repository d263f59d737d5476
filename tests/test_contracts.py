"""What every operation keeps whatever it computes: Torch's own checks of an operator, compilation,
streams, graphs, determinism, gradients, empty tensors, and sizes past 2**31 elements."""

import gc
import math
import resource
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from filelock import FileLock

import references
from checks import (
    arithmetic_slack,
    as_tuple,
    assert_rounded_once,
    clone_storage,
    map_tensors,
    on_meta,
    tensors_of,
)
from inputs import (
    ACTIVATIONS,
    BY_COMPLEX,
    BY_PAIR,
    CALLS,
    CALLS_MIXED,
    CALLS_SPARSE,
    CHANNELS_LAST,
    DECLARATIONS,
    DTYPES,
    GRID_AXES,
    HEADS_GIVEN,
    OPERATIONS,
    OUT_OPERATORS,
    QK_OPERATIONS,
    ROPE_OPERATIONS,
    ROW_OPERATIONS,
    every_dtype,
    for_dtypes,
    for_operations,
    grid_tables,
    normal,
    out_for,
    rotary_tables,
    sample,
    virtual_memory,
    widest_dtype,
    without_optional,
)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FEW_DTYPES = [torch.float32, torch.bfloat16]
every_operation = pytest.mark.parametrize("name", CALLS)
every_operation_and_dtype = for_operations(CALLS, DTYPES)
every_operation_and_few_dtypes = for_operations(CALLS, FEW_DTYPES)
every_memory = pytest.mark.parametrize("layout", ["contiguous", "chunk"])
# qk_norm_rope and norm_rope have operators that are given no `Out`, but theirs.
WRITING = ["qk_norm_rope_out", "norm_rope_out"]
REGISTERED = [
    *OPERATIONS,
    *(f"{name}_" for name in (*QK_OPERATIONS, "norm_rope")),
    *WRITING,
    *OUT_OPERATORS,
]
few_dtypes = for_dtypes(*FEW_DTYPES)


def bits(*results):
    return [tensor.contiguous().view(torch.uint8) for tensor in tensors_of(*results)]


def assert_same_bits(one, other):
    one, other = bits(one), bits(other)
    assert len(one) == len(other) > 0
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# --------------------------------------------------------------------------------------------------
# The operator itself


def registered_call(kernel, name, arguments):
    """The registered operator and its positional arguments, by the names in its schema."""
    operator = getattr(kernel._ops.ops, name).default
    values = {
        "eps": 1e-6,
        "approximate": "none",
        "activated": "second",
        "activation": "none",
        "norm": "across_heads",
        "layout": "interleaved",
        **arguments,
    }
    for prefix in ("", "k_"):
        rope = values.pop(f"{prefix}rope", None)
        if isinstance(rope, torch.Tensor):
            values[f"{prefix}cos"] = rope
        elif rope is not None:
            for field, tensor in zip(getattr(rope, "_fields", ("cos", "sin")), rope, strict=True):
                values[prefix + field] = tensor
    if name == "qk_norm_rope_out":
        values.update(zip(("q_out", "k_out", "v_out"), values["out"], strict=True))
    for axis in GRID_AXES:
        if axis in values:
            values[f"{axis}_cos"], values[f"{axis}_sin"] = values.pop(axis)
    arguments = operator._schema.arguments
    return operator, [
        values.get(a.name) if "Optional" in str(a.type) else values[a.name] for a in arguments
    ]


def arguments_of_operator(
    kernel, name, *, by="", has_optional=True, layout="contiguous", **options
):
    """Of a call of the public function that comes to the operator of this name."""
    public = name.rstrip("_").removesuffix("_out")
    options = {"shape": (2, 3, 32), "layout": layout, **options}
    function, arguments = sample(kernel, public + by, **options)
    if not has_optional:
        arguments = without_optional(public, arguments)
    if name in OUT_OPERATORS:
        arguments["out"] = out_for(function, arguments, layout)
    if name == "norm_rope_out":
        arguments["out"] = torch.zeros_like(arguments["x"])
    if name == "qk_norm_rope_out":
        q, k = arguments["q"], arguments["k"]
        joint = q.new_zeros(*q.shape[:1], q.shape[1] + 3, *q.shape[2:])
        arguments["v"] = torch.randn_like(k) if has_optional else None
        v_out = torch.zeros_like(k) if has_optional else None
        arguments["out"] = (joint[:, 3:], torch.zeros_like(k), v_out)
    return arguments


def sample_of_operator(kernel, name, **options):
    return registered_call(kernel, name, arguments_of_operator(kernel, name, **options))


@pytest.mark.kernels_ci
@for_operations(REGISTERED, FEW_DTYPES)
@every_memory
def test_opcheck(kernel, device, name, layout, dtype):
    operator, values = sample_of_operator(kernel, name, dtype=dtype, device=device, layout=layout)
    torch.library.opcheck(operator, values)


@pytest.mark.parametrize("name", REGISTERED)
def test_opcheck_with_nothing_optional(kernel, device, name):
    options = {"dtype": torch.bfloat16, "device": device}
    operator, values = sample_of_operator(kernel, name, has_optional=False, **options)
    torch.library.opcheck(operator, values)


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    "name", [name for name in REGISTERED if name.startswith(("rope", "qk_norm_rope", "norm_rope"))]
)
@pytest.mark.parametrize("by", [BY_PAIR, BY_COMPLEX])
@few_dtypes
def test_opcheck_by_pair(kernel, device, name, by, dtype):
    if name == "rope_3d":
        pytest.skip("its tables are always by pair")
    operator, values = sample_of_operator(kernel, name, by=by, dtype=dtype, device=device)
    torch.library.opcheck(operator, values)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", [*CALLS_MIXED, *CALLS_SPARSE, CHANNELS_LAST, HEADS_GIVEN])
def test_opcheck_of_mixed_dtypes_absent_operands_and_other_layouts(kernel, device, name):
    function, arguments = sample(
        kernel, name, dtype=torch.bfloat16, device=device, shape=(2, 3, 32)
    )
    operator, values = registered_call(kernel, function.__name__, arguments)
    torch.library.opcheck(operator, values)


def test_every_registered_operator_is_tested(kernel):
    namespace = kernel._ops.ops.name if hasattr(kernel._ops.ops, "name") else None
    registered = {
        schema.name.split("::")[1]
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.split("::")[0] == namespace
    }
    assert registered == set(REGISTERED)


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def to_double(tensor):
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


@every_operation
@pytest.mark.parametrize("is_refused", [False, True], ids=["returns", "raises"])
def test_calls_keep_no_memory(kernel, device, name, is_refused):
    """What the dispatcher hands over, a call frees: tensors, optional ones and strings."""
    function, arguments = sample(kernel, name, dtype=widest_dtype(name), device=device)
    if is_refused:
        arguments = map_tensors(to_double, arguments)

    def call():
        with pytest.raises(ValueError) if is_refused else nullcontext():
            function(**arguments)

    def keeps_memory(calls):
        before = resident_bytes()
        for _ in range(calls):
            call()
        smallest_allocation = 32
        return resident_bytes() - before >= calls * smallest_allocation

    with torch.no_grad():
        keeps_memory(10_000)  # fills what is kept once
        # What grows for another reason does not grow with the number of calls.
        assert not (keeps_memory(10_000) and keeps_memory(40_000))


# --------------------------------------------------------------------------------------------------
# Compilation


@every_operation
@every_memory
def test_compile_without_graph_break_or_recompilation(kernel, device, name, layout):
    function, first = sample(
        kernel, name, dtype=torch.bfloat16, device=device, shape=(2, 5, 64), layout=layout
    )
    _, second = sample(
        kernel, name, dtype=torch.bfloat16, device=device, shape=(2, 5, 64), layout=layout
    )
    torch._dynamo.reset()
    compiled = torch.compile(lambda arguments: function(**arguments), fullgraph=True)
    with torch.no_grad():
        assert_same_bits(compiled(first), function(**first))
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert_same_bits(compiled(second), function(**second))


@pytest.mark.parametrize("name", [*QK_OPERATIONS, "norm_rope"])
@every_memory
def test_compile_in_place(kernel, device, name, layout):
    function, arguments = sample(
        kernel, name, dtype=torch.bfloat16, device=device, shape=(2, 5, 64), layout=layout
    )
    arguments["inplace"] = True
    torch._dynamo.reset()
    compiled = torch.compile(lambda given: function(**given), fullgraph=True)
    with torch.no_grad():
        for attempt in range(2):
            given, expected = (map_tensors(clone_storage, arguments) for _ in range(2))
            with torch._dynamo.config.patch(error_on_recompile=attempt > 0):
                compiled(given)
            function(**expected)
            names = ("x",) if name == "norm_rope" else ("q", "k")
            assert_same_bits([given[n] for n in names], [expected[n] for n in names])


@pytest.mark.parametrize("name", ["qk_norm_rope_out", "norm_rope_out"])
@every_memory
def test_compile_with_outputs(kernel, device, name, layout):
    """What is written stays in the graph, and is seen by what comes after it."""
    function = getattr(kernel, name.removesuffix("_out"))
    options = {"dtype": torch.bfloat16, "device": device, "shape": (2, 5, 64), "layout": layout}
    arguments = arguments_of_operator(kernel, name, **options)

    def call(given):
        for out in as_tuple(given["out"]):
            out.fill_(1)
        function(**given)
        return [out * 2 for out in as_tuple(given["out"])]

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True)
    with torch.no_grad():
        for attempt in range(2):
            given, expected = (map_tensors(clone_storage, arguments) for _ in range(2))
            with torch._dynamo.config.patch(error_on_recompile=attempt > 0):
                results = compiled(given)
            assert_same_bits(results, call(expected))
            assert_same_bits(given["out"], expected["out"])


def test_compile_a_joint_buffer(kernel, device):
    """Two streams write to the slices of one buffer, which is made within."""
    image, text = (normal(2, n, 4, 64, dtype=torch.bfloat16, device=device) for n in (5, 3))
    rope = torch.complex(*rotary_tables(8, 32, dtype=torch.float32, device=device))
    options = {"heads": 4, "norm": "per_head"}

    def joined(image, text, rope):
        q, k, v = (image.new_empty(2, 8, 4, 64) for _ in range(3))
        for x, begin, end in ((text, 0, 3), (image, 3, 8)):
            out = tuple(buffer[:, begin:end] for buffer in (q, k, v))
            kernel.qk_norm_rope(x, x, rope=rope[begin:end], **options, v=x, out=out)
        return q, k, v

    both = torch.cat([text, image], 1)
    q, k = kernel.qk_norm_rope(both, both, rope=rope, **options)
    torch._dynamo.reset()
    with torch.no_grad():
        assert_same_bits(joined(image, text, rope), (q, k, both))
        assert_same_bits(torch.compile(joined, fullgraph=True)(image, text, rope), (q, k, both))


def counted_call(kernel, name, x):
    """A call of which a length is that of x, (1, S, 2, 64)."""
    table = x[0, :, 0].float()
    one = x[:1, :1]
    if name == "attention_queries":
        return kernel.attention(x, one, one)
    if name == "attention_keys":
        return kernel.attention(one, x, x)
    if name == "rope":
        return kernel.rope(x, table, table)
    if name == "rope_3d":
        frame, fixed = table[:, :12], one[0, :, 0, :10].float()
        return kernel.rope_3d(x, (frame, frame), (fixed, fixed), (fixed, fixed))
    rope = (table, table)
    if name == "qk_norm_two_ropes":
        return kernel.qk_norm_rope(x, one, rope=rope, k_rope=(one[0, :, 0], one[0, :, 1]), heads=2)
    if name == "qk_norm_coordinate_rope":
        rope = kernel.CoordinateRope(table[None, :, :3], table[0, :10])
    return kernel.qk_norm_rope(x, x, rope=rope, heads=2)


COUNTED_CALLS = ["attention_queries", "attention_keys", *ROPE_OPERATIONS, *QK_OPERATIONS]


@pytest.mark.parametrize("name", COUNTED_CALLS)
def test_compile_with_a_length_that_is_known_when_it_runs(kernel, device, name):
    def function(x, count):
        length = count.item()
        torch._check(length > 1)
        torch._check(length <= x.shape[1])
        return counted_call(kernel, name, x.narrow(1, 0, length))

    x = normal(1, 9, 2, 64, dtype=torch.bfloat16, device=device)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=True):
        for length in (5, 7):
            count = torch.tensor(length)
            assert_same_bits(compiled(x, count), function(x, count))


def test_compile_a_transformer_block(kernel, device):
    """The operations among each other and among PyTorch's own, which may be fused and reordered."""
    shape, heads = (2, 5, 64), 2
    tensors = {
        key: normal(*shape, dtype=torch.bfloat16, device=device)
        for key in ("hidden", "gate", "scale", "shift")
    }
    packed = normal(64, 192, dtype=torch.bfloat16, device=device) * 0.1
    rope = rotary_tables(5, 64, dtype=torch.float32, device=device)

    def block(hidden, gate, scale, shift):
        n = kernel.rms_norm_modulate(hidden, scale * 0.5, shift)
        q, k, v = (n @ packed).chunk(3, dim=-1)
        q, k = kernel.qk_norm_rope(q, k, rope=rope, heads=heads)
        residual, n = kernel.gated_residual_layer_norm_modulate(
            hidden, q * k + kernel.softmax(v), gate, scale, shift
        )
        n = kernel.geglu(kernel.gelu(n, bias=n[0, 0]) + kernel.silu(kernel.rope(n, *rope)))
        return kernel.gated_residual(residual, torch.cat([n, n], dim=-1)), kernel.layer_norm(n)

    torch._dynamo.reset()
    with torch.no_grad():
        outs = torch.compile(block, fullgraph=True)(**tensors)
        for out, expected in zip(outs, block(**tensors), strict=True):
            torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)


@every_operation
def test_meta_tensors(kernel, device, name):
    """Fake results have the shape, dtype and strides of real ones."""
    function, arguments = sample(
        kernel, name, dtype=torch.float16, device="cpu", shape=(2, 5, 64), layout="chunk"
    )

    fakes = as_tuple(function(**map_tensors(on_meta, arguments)))
    if device == "cuda":
        function, arguments = sample(
            kernel, name, dtype=torch.float16, device=device, shape=(2, 5, 64), layout="chunk"
        )
    outs = as_tuple(function(**arguments))
    for fake, out in zip(fakes, outs, strict=True):
        assert fake.is_meta
        assert (fake.shape, fake.dtype, fake.stride()) == (out.shape, out.dtype, out.stride())


# --------------------------------------------------------------------------------------------------
# Determinism, streams and graphs


# Rows that several multiprocessors share.
of_long_rows = pytest.mark.parametrize(
    "name", ["layer_norm_modulate", "gated_residual_rms_norm_modulate", "rms_norm", "softmax"]
)
LONG_ROWS = (2, 16, 65536)


@every_operation_and_dtype
def test_two_runs_give_the_same_bits(kernel, device, name, dtype):
    check_two_runs(kernel, device, name, dtype, (2, 64, 2048))


@of_long_rows
@every_dtype
def test_two_runs_over_long_rows_give_the_same_bits(kernel, device, name, dtype):
    check_two_runs(kernel, device, name, dtype, LONG_ROWS)


def check_two_runs(kernel, device, name, dtype, shape):
    function, arguments = sample(kernel, name, dtype=dtype, device=device, shape=shape)
    first = function(**arguments)
    for _ in range(3):
        noise = [torch.rand_like(tensor, dtype=torch.float32) for tensor in tensors_of(first)]
        assert_same_bits(function(**arguments), first)
        del noise


@every_operation
def test_number_of_threads_does_not_matter(kernel, device, name):
    if device != "cpu":
        pytest.skip("CPU threads")
    function, arguments = sample(
        kernel, name, dtype=widest_dtype(name), device=device, shape=(2, 64, 2048)
    )
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(function(**arguments))
    finally:
        torch.set_num_threads(threads)
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


@needs_cuda
@every_operation
def test_runs_on_the_current_stream(kernel, device, name):
    function, arguments = sample(kernel, name, dtype=torch.bfloat16, device=device)
    expected = function(**arguments)
    late = {
        key: torch.full_like(value, math.nan if value.is_floating_point() else 0)
        if isinstance(value, torch.Tensor)
        else value
        for key, value in arguments.items()
    }
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for key, value in late.items():
            if isinstance(value, torch.Tensor):
                value.copy_(arguments[key])
        result = function(**late)
    stream.synchronize()
    assert_same_bits(result, expected)


def test_threads_with_rows_of_different_lengths(kernel, device):
    """What one thread asks of the device for its rows leaves another's as they are."""
    rows = [torch.randn(4, length, device=device) for length in (2**14, 2**17, 2**18, 2**19)]
    expected = [kernel.softmax(x) for x in rows]
    with ThreadPoolExecutor(len(rows)) as threads:
        results = threads.map(lambda x: [kernel.softmax(x) for _ in range(200)], rows)
        for first, outs in zip(expected, results, strict=True):
            for out in outs:
                assert_same_bits(out, first)


@needs_cuda
@every_operation
def test_cuda_graph(kernel, device, name):
    check_graph(kernel, device, name)


@needs_cuda
@of_long_rows
def test_cuda_graph_of_long_rows(kernel, device, name):
    check_graph(kernel, device, name, shape=LONG_ROWS)


def check_graph(kernel, device, name, **size):
    function, static = sample(kernel, name, dtype=torch.bfloat16, device=device, **size)
    function(**static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function(**static)
    for _ in range(2):
        _, fresh = sample(kernel, name, dtype=torch.bfloat16, device=device, **size)
        for target, source in zip(tensors_of(static), tensors_of(fresh), strict=True):
            target.copy_(source)
        graph.replay()
        assert_same_bits(result, function(**fresh))


@needs_cuda
@pytest.mark.parametrize("name", QK_OPERATIONS)
def test_cuda_graph_in_place(kernel, device, name):
    function, static = sample(kernel, name, dtype=torch.bfloat16, device=device, layout="chunk")
    q, k = static["q"].clone(), static["k"].clone()
    function(**static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(**static, inplace=True)
    static["q"].copy_(q)
    static["k"].copy_(k)
    graph.replay()
    assert_same_bits((static["q"], static["k"]), function(**{**static, "q": q, "k": k}))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@every_operation
def test_runs_on_the_device_of_its_tensors(kernel, name):
    function, arguments = sample(kernel, name, dtype=torch.bfloat16, device="cuda:1")
    with torch.cuda.device(0):
        result = function(**arguments)
    with torch.cuda.device(1):
        assert_same_bits(result, function(**arguments))
    assert all(tensor.device.index == 1 for tensor in tensors_of(result))


# --------------------------------------------------------------------------------------------------
# Gradients


def differentiable(arguments):
    """The tensors that a gradient is asked for."""
    return {
        key: value
        for key, value in arguments.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }


def gradients(function, arguments, tangents, leaves):
    outs = as_tuple(function(**arguments))
    loss = sum((out.double() * tangent).sum() for out, tangent in zip(outs, tangents, strict=True))
    return torch.autograd.grad(loss, leaves)


@every_operation_and_few_dtypes
def test_gradients(kernel, device, name, dtype):
    function, arguments = sample(kernel, name, dtype=dtype, device=device, shape=(2, 5, 64))
    reference = getattr(references, function.__name__)
    exact = {
        key: value.double() if key in differentiable(arguments) else value
        for key, value in arguments.items()
    }
    tangents = [torch.randn_like(out) for out in as_tuple(reference(**exact))]
    for given in (arguments, exact):
        for leaf in differentiable(given).values():
            leaf.requires_grad_()
    actual = gradients(function, arguments, tangents, list(differentiable(arguments).values()))
    expected = gradients(reference, exact, tangents, list(differentiable(exact).values()))
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 1e-2}[dtype]
    for key, one, other in zip(differentiable(arguments), actual, expected, strict=True):
        assert one.dtype == arguments[key].dtype
        error = (one.double() - other).norm() / other.norm()
        assert error <= tolerance, f"gradient of {key}: relative error {error:.3g}"


@every_operation
def test_gradient_of_each_input_alone(kernel, device, name):
    function, arguments = sample(kernel, name, dtype=widest_dtype(name), device=device)
    for key, leaf in differentiable(arguments).items():
        leaf.requires_grad_()
        outs = as_tuple(function(**arguments))
        loss = sum(out.sum() for out in outs if out.requires_grad)
        (gradient,) = torch.autograd.grad(loss, [leaf])
        assert gradient.isfinite().all() and gradient.any(), key
        leaf.requires_grad_(False)
    assert not any(out.requires_grad for out in as_tuple(function(**arguments)))


@every_operation_and_dtype
def test_differentiable_path_is_as_accurate(kernel, device, name, dtype):
    function, arguments = sample(kernel, name, dtype=dtype, device=device)
    plain = as_tuple(function(**arguments))
    expected = as_tuple(getattr(references, function.__name__)(**arguments))
    next(tensors_of(arguments)).requires_grad_()
    outs = as_tuple(function(**arguments))
    assert any(out.requires_grad for out in outs)
    for out, reference, other in zip(outs, expected, plain, strict=True):
        assert (out.shape, out.dtype) == (other.shape, other.dtype)
        assert_rounded_once(out.detach(), reference, arithmetic_slack(name, dtype))


@every_operation
def test_no_grad_takes_the_kernel(kernel, device, name):
    function, arguments = sample(kernel, name, dtype=torch.bfloat16, device=device)
    expected = function(**arguments)
    for leaf in differentiable(arguments).values():
        leaf.requires_grad_()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            outs = as_tuple(function(**arguments))
        assert not any(out.requires_grad for out in outs)
        assert_same_bits(outs, expected)


@pytest.mark.parametrize("name", QK_OPERATIONS)
def test_autograd_sees_what_is_written_in_place(kernel, device, name):
    """A backward that needs the values from before is refused, as for PyTorch's own operators."""
    function, arguments = sample(kernel, name, dtype=torch.float32, device=device)
    factor = torch.ones(256, device=device, requires_grad=True)
    loss = (arguments["q"] * factor).sum() + (arguments["k"] * factor).sum()
    function(**arguments, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --------------------------------------------------------------------------------------------------
# Sizes


@every_operation_and_dtype
@pytest.mark.parametrize("shape", [(0, 16, 256), (2, 0, 256), (0, 0, 256)], ids=str)
def test_empty_tensors(kernel, device, name, shape, dtype):
    function, arguments = sample(kernel, name, dtype=dtype, device=device, shape=shape)
    outs = as_tuple(function(**arguments))
    assert outs and all(out.dtype == dtype for out in outs)
    *others, last = (out.flatten(2).shape for out in outs)
    assert all(other == shape for other in others)
    longer = (shape[0], shape[1] + 1, shape[2])
    assert last == (longer if name == "qk_norm_two_ropes" else shape)


@pytest.mark.parametrize("name", QK_OPERATIONS)
def test_empty_tensors_in_place(kernel, device, name):
    function, arguments = sample(
        kernel, name, dtype=torch.bfloat16, device=device, shape=(2, 0, 256)
    )
    q, k = function(**arguments, inplace=True)
    assert q is arguments["q"] and k is arguments["k"]


@pytest.mark.parametrize("name", [*ROW_OPERATIONS, *ACTIVATIONS, "softmax"])
@pytest.mark.parametrize("shape", [(2, 3, 0), (0,)], ids=str)
def test_empty_rows(kernel, device, name, shape):
    columns = shape[-1]
    _, arguments = sample(kernel, name, dtype=torch.bfloat16, device=device, shape=(1, 1, 8))
    for key, value in differentiable(arguments).items():
        is_of_rows = DECLARATIONS[name].parameters[key].kind.check_first
        size = shape if is_of_rows else (columns,)
        arguments[key] = torch.empty(size, dtype=value.dtype, device=device)
    outs = as_tuple(getattr(kernel, name)(**arguments))
    assert outs and all(out.shape == shape for out in outs)


FAR = 2**31  # elements


def far_apart(shape, dtype, device, memory, offset=0):
    """A view (rows, ..., columns), the rows FAR / 2 elements apart: the third begins at 2**31."""
    rows, *rest = shape
    strides = torch.empty(rest, device="meta").stride()
    view = memory.as_strided(shape, (FAR // 2, *strides), offset)
    return view.copy_(normal(*shape, dtype=dtype, device=device))


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in QK_OPERATIONS])
def test_offsets_past_2_31(kernel, device, name):
    """Rows so far apart that 32 bits cannot count the elements between them."""
    dtype = torch.bfloat16
    memory = virtual_memory(FAR + 2**20, dtype, device)
    function, arguments = sample(kernel, name, dtype=dtype, device=device, shape=(3, 1, 256))
    offset = 0
    for key, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.dim() >= 3:
            arguments[key] = far_apart(value.shape, dtype, device, memory, offset)
            offset += 4096
    expected = as_tuple(getattr(references, name)(**arguments))
    for out, reference in zip(as_tuple(function(**arguments)), expected, strict=True):
        assert_rounded_once(out, reference, arithmetic_slack(name, dtype))


FAR_DIMS = {"batch": (0, 1, 2, 3), "seq": (1, 0, 2, 3), "head": (1, 2, 0, 3)}


@pytest.mark.parametrize("far_dim", FAR_DIMS)
def test_attention_offsets_past_2_31(kernel, device, far_dim):
    dtype = torch.bfloat16
    memory = virtual_memory(FAR + 2**20, dtype, device)
    q, k, v = (
        far_apart((3, 3, 3, 64), dtype, device, memory, offset).permute(FAR_DIMS[far_dim])
        for offset in (0, 4096, 8192)
    )
    expected = references.attention(q, k, v)
    assert_rounded_once(kernel.attention(q, k, v), expected, arithmetic_slack("attention", dtype))


@pytest.mark.parametrize("name", QK_OPERATIONS)
@pytest.mark.parametrize("inplace", [False, True], ids=["out_of_place", "inplace"])
@pytest.mark.parametrize("far_dim", FAR_DIMS)
def test_query_and_key_offsets_past_2_31(kernel, device, name, inplace, far_dim):
    dtype = torch.bfloat16
    memory = virtual_memory(FAR + 2**20, dtype, device)
    q, k = (
        far_apart((3, 3, 3, 64), dtype, device, memory, offset).permute(FAR_DIMS[far_dim])
        for offset in (0, 4096)
    )
    function, arguments = sample(
        kernel, name, dtype=dtype, device=device, shape=(3, 3, 192), heads=3
    )
    if "k_rope" in arguments:
        arguments["k_rope"] = tuple(table[:3] for table in arguments["k_rope"])
    arguments.update({"q": q, "k": k})
    expected = references.qk_norm_rope(**arguments)
    for out, reference in zip(function(**arguments, inplace=inplace), expected, strict=True):
        assert_rounded_once(out, reference)


@pytest.fixture
def _gpu_memory(tmp_path_factory):
    """32 GB of it, for one test at a time of all processes of this run."""
    with FileLock(tmp_path_factory.getbasetemp().parent / "gpu_memory.lock"):
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if free < 32e9:
            pytest.skip(f"needs 32 GB of GPU memory, {free / 1e9:.1f} GB are free")
        yield
        gc.collect()
        torch.cuda.empty_cache()


# Operation, keyword arguments that are not of full size, tensors of full size, shape of these.
HUGE = {
    "gelu": ("gelu", 1, (2**20 + 3, 2048)),
    "gelu_1d": ("gelu", 1, (FAR + 12345,)),
    "swiglu": ("swiglu", 1, (2**19 + 3, 8192)),
    "softmax": ("softmax", 1, (2**20 + 3, 2048)),
    "softmax_of_long_rows": ("softmax", 1, (2**15 + 3, 65536)),
    "rms_norm": ("rms_norm", 1, (2**20 + 3, 2048)),
    "layer_norm_odd": ("layer_norm", 1, (2**20 + 3, 2049)),
    "gated_residual": ("gated_residual", 3, (2**20 + 3, 2048)),
    "gated_residual_1d": ("gated_residual", 2, (FAR + 12345,)),
    "gated_residual_rms_norm_modulate": ("gated_residual_rms_norm_modulate", 2, (2**20 + 3, 2048)),
}


@needs_cuda
@pytest.mark.usefixtures("_gpu_memory")
@pytest.mark.parametrize("case", HUGE)
def test_more_than_2_31_elements(kernel, device, case):
    name, count, shape = HUGE[case]
    tensors = [
        torch.empty(shape, dtype=torch.bfloat16, device=device).normal_() for _ in range(count)
    ]
    columns = shape[-1]
    small = [normal(columns, dtype=torch.bfloat16, device=device) for _ in range(3)]
    small = small if name.endswith("modulate") else []
    outs = as_tuple(getattr(kernel, name)(*tensors, *small))
    assert tensors[0].numel() > FAR
    step = 4 if len(shape) > 1 else 8192
    boundary = FAR // (columns if len(shape) > 1 else 1)
    for start in (0, boundary // 2, boundary - step // 2, shape[0] - step):
        part = slice(start, start + step)
        expected = as_tuple(getattr(references, name)(*(t[part] for t in tensors), *small))
        for out, reference in zip(outs, expected, strict=True):
            assert_rounded_once(out[part], reference)


@needs_cuda
@pytest.mark.usefixtures("_gpu_memory")
@pytest.mark.parametrize("is_last", [False, True], ids=["contiguous", "channels_last"])
def test_images_of_more_than_2_31_elements(kernel, device, is_last):
    """In many images, and in one of which each period has the statistics of the whole."""
    pixels, channels, period = 512, 32, 4096
    shape = (FAR // (pixels * channels) + 3, channels, pixels)
    x = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
    x = x.mT.contiguous().mT if is_last else x
    assert x.numel() > FAR
    out = kernel.group_norm(x, 8)
    for first in (0, shape[0] // 2, shape[0] - 2):
        part = slice(first, first + 2)
        assert_rounded_once(out[part], references.group_norm(x[part], 8))
    del x, out
    one = normal(1, 4, period, dtype=torch.bfloat16, device=device, mean=1.0)
    count = FAR // one.numel() + 1
    x = one.mT.repeat(1, count, 1).mT if is_last else one.repeat(1, 1, count)
    assert x.numel() > FAR
    out, expected = kernel.group_norm(x, 2), references.group_norm(one, 2)
    for first in (0, count // 2 * period, (count - 1) * period):
        assert_rounded_once(out[..., first : first + period], expected)


@needs_cuda
@pytest.mark.usefixtures("_gpu_memory")
def test_query_and_key_of_more_than_2_31_elements(kernel, device):
    batch, seq, heads, head_dim = 2, 2**19 + 3, 32, 64
    packed = torch.empty(
        batch, seq, 2, heads * head_dim, dtype=torch.bfloat16, device=device
    ).normal_()
    q, k = packed.unbind(2)
    ends = [(b, slice(s, s + 2)) for b in range(batch) for s in (0, seq // 2, seq - 2)]
    rope = rotary_tables(seq, head_dim, dtype=torch.float32, device=device)
    expected = [
        references.qk_norm_rope(
            q[b : b + 1, part],
            k[b : b + 1, part],
            rope=tuple(table[part] for table in rope),
            heads=heads,
        )
        for b, part in ends
    ]
    kernel.qk_norm_rope(q, k, rope=rope, heads=heads, inplace=True)
    for (b, part), references_of_part in zip(ends, expected, strict=True):
        for out, reference in zip((q, k), references_of_part, strict=True):
            assert_rounded_once(out[b : b + 1, part], reference)


@needs_cuda
@pytest.mark.usefixtures("_gpu_memory")
@pytest.mark.parametrize("name", ROPE_OPERATIONS)
def test_rotation_of_more_than_2_31_elements(kernel, device, name):
    batch, heads, head_dim = 2, 8, 128
    frames, rows, columns = grid = (1025, 32, 33)
    seq = frames * rows * columns
    x = torch.empty(batch, seq, heads, head_dim, dtype=torch.bfloat16, device=device).normal_()
    assert x.numel() > FAR
    if name == "rope":
        cos, sin = rotary_tables(seq, head_dim, dtype=torch.float32, device=device)
        out = kernel.rope(x, cos, sin)
    else:
        tables = grid_tables(grid, (22, 21, 21), dtype=torch.float32, device=device)
        out = kernel.rope_3d(x, **tables)
    for b in range(batch):
        for frame in (0, frames // 2, frames - 1):
            part = slice(frame * rows * columns, (frame + 1) * rows * columns)
            if name == "rope":
                expected = references.rope(x[b : b + 1, part], cos[part], sin[part])
            else:
                one = tuple(table[frame : frame + 1] for table in tables["frame"])
                expected = references.rope_3d(x[b : b + 1, part], **{**tables, "frame": one})
            assert_rounded_once(out[b : b + 1, part], expected)


@needs_cuda
@pytest.mark.usefixtures("_gpu_memory")
@pytest.mark.parametrize("far", ["queries", "keys"])
def test_attention_of_more_than_2_31_elements(kernel, device, far):
    dtype, heads, length = torch.bfloat16, 32, 2**20 + 3
    lengths = {"queries": (length, 64), "keys": (5, length)}[far]
    q, k, v = (
        torch.empty(1, seq, heads, 64, dtype=dtype, device=device).normal_()
        for seq in (lengths[0], lengths[1], lengths[1])
    )
    assert max(q.numel(), k.numel()) > FAR
    if far == "keys":
        k[:, -2:] = 4 * q[:, :1]  # so that the last ones, too, have a weight
    out = kernel.attention(q, k, v)
    slack = arithmetic_slack("attention", dtype)
    for head in (0, heads // 2, heads - 1):
        one = slice(head, head + 1)
        for start in (0, lengths[0] // 2, max(lengths[0] - 4, 0)):
            part = slice(start, start + 4)
            expected = references.attention(q[:, part, one], k[:, :, one], v[:, :, one])
            assert_rounded_once(out[:, part, one], expected, slack)


@needs_cuda
@pytest.mark.usefixtures("_gpu_memory")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_of_more_tiles_than_a_block_a_multiprocessor_can_list(kernel, device, head_dim):
    """Blocks claim tiles of queries into lists of 2048: more blocks are needed than multiprocessors."""
    dtype, listed, tile_queries = torch.bfloat16, 2048, {64: 192, 128: 128}[head_dim]
    tiles = 8
    length = tiles * tile_queries
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    heads = blocks * listed // tiles + 1000
    assert length >= 1024  # from there on tiles are claimed
    q = torch.randn(1, length, 1, head_dim, dtype=dtype, device=device)
    k, v = (torch.randn(1, 384, 1, head_dim, dtype=dtype, device=device) for _ in range(2))
    expected = references.attention(q, k, v)
    out = kernel.attention(q.expand(1, length, heads, head_dim), k, v)
    first = out[:, :, :1]
    assert_rounded_once(first, expected, arithmetic_slack("attention", dtype))
    for part in out.split(4096, dim=2):
        assert torch.equal(part, first.expand_as(part))
