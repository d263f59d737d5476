"""Contracts of every operation: Torch's own checks of an operator, compilation,
tracing, streams, graphs, determinism, memory, empty tensors, and sizes past 2**31 elements."""

import ctypes
import gc
import inspect
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from filelock import FileLock
from torch.fx.experimental.proxy_tensor import make_fx

import references
from checks import (
    arithmetic_slack,
    as_tuple,
    assert_rounded_once,
    assert_same_bits,
    clone_storage,
    map_tensors,
    of_tensors,
    outcome,
    tensors_of,
)
from inputs import (
    ALL_CALLS,
    CALLS,
    DTYPES,
    EVERY_CALL,
    FLOAT32_RESIDUAL,
    INT8_WITH_LSE,
    OPERATIONS,
    PLAIN_CALLS,
    PLAIN_OPERATIONS,
    QK_OPERATIONS,
    ROPE_OPERATIONS,
    ROW_OPERATIONS,
    TABLE,
    WITH_LSE,
    WRITING,
    any_call,
    every_kind_of_call,
    grid_tables,
    narrowed,
    normal,
    operation_of,
    pairwise,
    rotary_tables,
    sample,
    virtual_memory,
    widest_dtype,
    without_optional,
    writing_call,
    written_by,
)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
every_call = pytest.mark.parametrize("name", [*CALLS, *PLAIN_CALLS])
every_memory = pytest.mark.parametrize("layout", ["contiguous", "chunk"])
SMALL = {"shape": (2, 5, 64), "heads": 2}

# --------------------------------------------------------------------------------------------------
# The operator itself


def namespace_of(kernel):
    return kernel._ops.add_op_namespace_prefix("").rstrip(":")


def registered(kernel):
    """Operators of the package, by name."""
    schemas = [s.name.split("::") for s in torch._C._jit_get_all_schemas()]
    names = {name for space, name in schemas if space == namespace_of(kernel)}
    return {name: getattr(kernel._ops.ops, name).default for name in names}


def operators_called(kernel, function, arguments):
    """(operator, its arguments) for all operators of the package that a call runs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if operator.namespace == namespace_of(kernel):
                calls.append((operator, args))
            return operator(*args, **(kwargs or {}))

    with torch.no_grad(), Recorder():
        function(**arguments)
    return calls


def check_operator(kernel, device, call, layout, dtype, has_optional, *checks):
    """Runs Torch's checks of the operator that a call runs, with its arguments."""
    name, in_place = call
    options = {"device": device, "layout": layout, "shape": (2, 3, 32)}
    function, arguments = any_call(
        kernel, name, in_place, values=has_optional, dtype=narrowed(dtype, name), **options
    )
    if not has_optional:
        kept = {key: arguments[key] for key in ("out", "inplace") if key in arguments}
        arguments = {**without_optional(name, arguments), **kept}
    calls = operators_called(kernel, function, arguments)
    assert len(calls) == 1
    # The schema check does arithmetic with the inputs, which PyTorch does not support in FP8.
    if any(t.dtype == torch.float8_e4m3fn for t in tensors_of(calls[0][1])):
        checks = [check for check in checks if check != "test_schema"]
    torch.library.opcheck(*calls[0], test_utils=checks)


OPCHECKED = {
    "call": EVERY_CALL,
    "layout": ["contiguous", "chunk", "transposed"],
    "dtype": [torch.float32, torch.bfloat16],
}


@pytest.mark.drawn(pairs=[("call", "has_optional")])
@pytest.mark.parametrize("has_optional", [True, False], ids=["everything", "nothing_optional"])
@pairwise(**OPCHECKED)
def test_opcheck(kernel, device, call, layout, dtype, has_optional):
    checks = ["test_autograd_registration", "test_faketensor", "test_schema"]
    check_operator(kernel, device, call, layout, dtype, has_optional, *checks)


@pytest.mark.drawn(times=0, period=12)
@pairwise(**OPCHECKED, has_optional=[True, False])
def test_opcheck_of_aot_dispatch(kernel, device, call, layout, dtype, has_optional):
    """With symbolic sizes: nearly all the time of the checks."""
    check_operator(kernel, device, call, layout, dtype, has_optional, "test_aot_dispatch_dynamic")


def test_every_registered_operator_is_tested(kernel):
    options = {"dtype": torch.bfloat16, "device": "cuda" if torch.cuda.is_available() else "cpu"}
    calls = [any_call(kernel, *call, **options) for call in EVERY_CALL]
    called = {op for call in calls for op, _ in operators_called(kernel, *call)}
    assert called == set(registered(kernel).values())


def test_every_public_operation_is_in_the_table(kernel):
    public = {name for name in kernel.__all__ if inspect.isfunction(getattr(kernel, name))}
    of_models = {"inject_kernels", "eject_kernels"}
    of_models |= {"context_parallel_plan", "register_attention_backend"}
    of_models |= {"enable_guidance_parallelism", "enable_tile_parallelism"}
    assert public - of_models == {*TABLE, *PLAIN_OPERATIONS}


class MallocStatistics(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def allocated():
    """Bytes that malloc has given to this thread and has not got back, and the number of Python's own blocks.
    Other threads and processes do not affect them."""
    gc.collect()  # exceptions are in cycles
    malloc = ctypes.CDLL(None).mallinfo2
    malloc.restype = MallocStatistics
    statistics = malloc()
    return statistics.uordblks + statistics.hblkhd, sys.getallocatedblocks()


def to_double(tensor):
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
@pytest.mark.parametrize("name", [*OPERATIONS, *PLAIN_OPERATIONS])
@pytest.mark.parametrize("is_refused", [False, True], ids=["returns", "raises"])
def test_calls_keep_no_memory(kernel, device, name, is_refused):
    """A call frees all arguments that the dispatcher passes: tensors, optional ones and strings."""
    function, arguments = sample(kernel, name, dtype=widest_dtype(name), device=device, **SMALL)
    if is_refused:
        arguments = map_tensors(to_double, arguments)

    def is_kept(calls):
        """Whether each call keeps memory. What caches take does not grow with the number of calls."""
        before = allocated()
        for _ in range(calls):
            with suppress(ValueError):
                function(**arguments)
        taken, blocks = (after - one for after, one in zip(allocated(), before, strict=True))
        return taken >= 16 * calls or 2 * blocks >= calls

    gc.freeze()  # older objects are not freed meanwhile, and collecting the new ones is fast
    with torch.no_grad():
        is_kept(20)
        assert (outcome(function, arguments)[0] is ValueError) == is_refused
        assert not (is_kept(200) and is_kept(1000))


# --------------------------------------------------------------------------------------------------
# Compilation and tracing


def check_compiled(call, make_arguments, backend="eager"):
    """One graph, which the second call reuses, with the plain call's bits."""
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for attempt in range(2):
        given = make_arguments()
        expected = map_tensors(clone_storage, given)
        with torch._dynamo.config.patch(error_on_recompile=attempt > 0):
            results = compiled(given)
        assert_same_bits(results, call(expected))
        assert_same_bits(given, expected)


@pytest.mark.drawn(times=0, period=5)
@pairwise(name=CALLS, layout=["contiguous", "chunk"], requires_grad=[False, True])
def test_compile_without_graph_break_or_recompilation(kernel, device, name, layout, requires_grad):
    dtype = torch.bfloat16
    options = {"dtype": dtype, "device": device, "layout": layout, **SMALL}
    function, _ = sample(kernel, name, **options)

    def make_arguments():
        _, arguments = sample(kernel, name, **options)
        next(tensors_of(arguments)).requires_grad_(requires_grad)
        return arguments

    check_compiled(lambda given: function(**given), make_arguments)


# One call for each operator.
OF_INDUCTOR = {
    ("gelu", False),
    ("attention", False),
    ("qk_norm_rope", False),
    ("qk_norm_rope", True),
}


@pytest.mark.parametrize(
    ("name", "in_place", "backend"),
    [
        *((*call, "eager") for call in WRITING),
        *(pytest.param(*call, "inductor", marks=pytest.mark.slow) for call in sorted(OF_INDUCTOR)),
    ],
)
@every_memory
def test_compile_what_writes(kernel, device, name, in_place, layout, backend):
    """Writes keep their order in the graph: code before a call sees old values, code after it new ones."""
    options = {"dtype": torch.bfloat16, "device": device, "layout": layout, **SMALL}
    function, _ = writing_call(kernel, name, in_place=in_place, **options)

    def make_arguments():
        arguments = writing_call(kernel, name, in_place=in_place, **options)[1]
        for out in written_by(arguments):
            out.fill_(0.5)
        return arguments

    def call(given):
        before = [out * 2 for out in written_by(given)]
        function(**given)
        return before, [out * 4 for out in written_by(given)]

    with torch.no_grad():
        check_compiled(call, make_arguments, backend)


def transformer_block(kernel, device):
    """The operations mixed with PyTorch's own, which may be fused and reordered."""
    tensors = {
        key: normal(2, 5, 64, dtype=torch.bfloat16, device=device)
        for key in ("hidden", "gate", "scale", "shift")
    }
    packed = normal(64, 192, dtype=torch.bfloat16, device=device) * 0.1
    rope = rotary_tables(5, 64, dtype=torch.float32, device=device)

    def block(given):
        hidden, scale, shift = (given[key] for key in ("hidden", "scale", "shift"))
        n = kernel.rms_norm_modulate(hidden, scale * 0.5, shift)
        q, k, v = (n @ packed).chunk(3, dim=-1)
        q, k = kernel.qk_norm_rope(q, k, rope=rope, heads=2)
        residual, n = kernel.gated_residual_layer_norm_modulate(
            hidden, q * k + kernel.softmax(v), given["gate"], scale, shift
        )
        attended = kernel.attention(q, k, v, heads=1)
        n = kernel.geglu(kernel.gelu(n, bias=n[0, 0]) + kernel.silu(kernel.rope(n, *rope)))
        return (
            kernel.gated_residual(residual, torch.cat([n, n], dim=-1)),
            kernel.layer_norm(attended, None, None, 1e-5),
        )

    return block, tensors


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
def test_compile_a_transformer_block(kernel, device, backend, requires_grad):
    block, tensors = transformer_block(kernel, device)
    for tensor in tensors.values():
        tensor.requires_grad_(requires_grad)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    results = []
    for function in (compiled, block):
        outs = function(tensors)
        loss = sum(out.float().square().sum() for out in outs)
        gradients = torch.autograd.grad(loss, tensors.values()) if requires_grad else ()
        results.append([*outs, *gradients])
    for out, expected in zip(*results, strict=True):
        error = (out.float() - expected.float()).norm() / expected.float().norm()
        # Inductor rounds less often than the formulas that it differentiates.
        assert error < (0.02 if backend == "inductor" and requires_grad else 0.01)


def counted_call(kernel, name, x):
    """A call with a sequence length from x, (1, S, 2, 64)."""
    table, one = x[0, :, 0].float(), x[:1, :1]
    k, rope, options = x, (table, table), {"heads": 2}
    if name == "attention_queries":
        return kernel.attention(x, one, one)
    if name == "attention_keys":
        return kernel.attention(one, x, x)
    if name == "attention_blocks":
        end = torch.arange(x.shape[1], dtype=torch.int32, device=x.device) + 1
        bounds = torch.stack([end // 2, end], 1)[None, None]
        return kernel.attention(x, x, x, blocks=kernel.KeyBlocks(key_bounds=bounds))
    if name == "rope":
        return kernel.rope(x, *rope)
    if name == "rope_3d":
        frame, fixed = table[:, :12], one[0, :, 0, :10].float()
        return kernel.rope_3d(x, (frame, frame), (fixed, fixed), (fixed, fixed))
    if name == "geglu":
        return kernel.geglu(x)
    if name == "qk_norm_two_ropes":
        k, options["k_rope"] = one, (one[0, :, 0], one[0, :, 1])
    if name == "qk_norm_coordinate_rope":
        rope = kernel.CoordinateRope(table[None, :, :3], table[0, :10])
    return kernel.qk_norm_rope(x, k, rope=rope, **options)


COUNTED_CALLS = ["attention_queries", "attention_keys", "attention_blocks", "geglu"]
COUNTED_CALLS += [*ROPE_OPERATIONS, *QK_OPERATIONS]


@pytest.mark.parametrize("name", COUNTED_CALLS)
def test_compile_with_a_length_that_is_known_when_it_runs(kernel, device, name):
    def function(x, count):
        length = count.item()
        torch._check(length > 1)
        torch._check(length <= x.shape[1])
        return counted_call(kernel, name, x.narrow(1, 0, length))

    x = normal(1, 9, 2, 64, dtype=torch.bfloat16, device=device)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="eager", dynamic=True)
    with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=True):
        for length in (5, 7):
            count = torch.tensor(length)
            assert_same_bits(compiled(x, count), function(x, count))


def test_meta_key_of_another_shape(kernel):
    q, k = (torch.empty(2, *size, 64, device="meta") for size in ((5, 4), (7, 2)))
    outs = kernel.qk_norm_rope(q, k, heads=4, norm="per_head")
    assert [out.shape for out in outs] == [q.shape, k.shape]


@pairwise(call=EVERY_CALL, mode=["real", "fake", "symbolic"])
def test_make_fx(kernel, device, call, mode):
    name, in_place = call
    options = {"dtype": widest_dtype(name), "device": device, **SMALL}
    function, arguments = any_call(kernel, name, in_place, **options)
    call, tensors = of_tensors(function, arguments)
    copies = [clone_storage(tensor) for tensor in tensors]
    graph = make_fx(call, tracing_mode=mode)(*copies)
    copies = [clone_storage(tensor) for tensor in tensors]
    assert_same_bits(graph(*copies), function(**arguments))
    assert_same_bits(copies, tensors)


# --------------------------------------------------------------------------------------------------
# Determinism, streams and graphs


# Rows that several multiprocessors share.
OF_LONG_ROWS = ["layer_norm_modulate", "gated_residual_rms_norm_modulate", "rms_norm", "softmax"]
LONG_ROWS = (2, 16, 65536)
SIZES = [(name, (2, 64, 2048)) for name in (*CALLS, *PLAIN_CALLS)]
SIZES += [(name, LONG_ROWS) for name in OF_LONG_ROWS]


@pairwise(size=SIZES, dtype=DTYPES)
def test_two_runs_give_the_same_bits(kernel, device, size, dtype):
    name, shape = size
    dtype = narrowed(dtype, name)
    function, arguments = sample(kernel, name, dtype=dtype, device=device, shape=shape)
    first = function(**arguments)
    for _ in range(3):
        noise = [torch.rand_like(tensor, dtype=torch.float32) for tensor in tensors_of(first)]
        assert_same_bits(function(**arguments), first)
        del noise


@pytest.mark.parametrize("name", [*OPERATIONS, *PLAIN_CALLS])
def test_number_of_threads_does_not_matter(kernel, device, name):
    if device != "cpu":
        pytest.skip("CPU threads")
    options = {"dtype": widest_dtype(name), "device": device, "shape": (2, 64, 2048)}
    function, arguments = sample(kernel, name, **options)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(function(**arguments))
            assert_same_bits(results[0], results[-1])
    finally:
        torch.set_num_threads(threads)


def test_threads_with_rows_of_different_lengths(kernel, device):
    """Launches of one thread do not affect another's, although both set kernel attributes."""
    rows = [torch.randn(4, length, device=device) for length in (2**14, 2**17, 2**18, 2**19)]
    expected = [kernel.softmax(x) for x in rows]
    with ThreadPoolExecutor(len(rows)) as threads:
        launches = 50 if device == "cuda" else 5
        results = threads.map(lambda x: [kernel.softmax(x) for _ in range(launches)], rows)
        for first, outs in zip(expected, results, strict=True):
            for out in outs:
                assert_same_bits(out, first)


@needs_cuda
@every_kind_of_call
def test_runs_on_the_current_stream(kernel, device, name, in_place):
    function, arguments = any_call(kernel, name, in_place, dtype=torch.bfloat16, device=device)
    expected = function(**map_tensors(torch.clone, arguments))
    late = map_tensors(
        lambda t: torch.full_like(t, 0 if t.dtype == torch.int32 else math.nan), arguments
    )
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for target, source in zip(tensors_of(late), tensors_of(arguments), strict=True):
            target.copy_(source)
        result = function(**late)
    stream.synchronize()
    assert_same_bits(result, expected)


@needs_cuda
@pytest.mark.parametrize(
    ("name", "in_place", "size"),
    [
        *((*call, {}) for call in EVERY_CALL),
        *((name, None, {"shape": LONG_ROWS}) for name in OF_LONG_ROWS),
    ],
)
def test_cuda_graph(kernel, device, name, in_place, size):
    options = {"dtype": torch.bfloat16, "device": device, **size}
    function, static = any_call(kernel, name, in_place, **options)
    function(**static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function(**static)
    for _ in range(2):
        _, fresh = any_call(kernel, name, in_place, **options)
        for target, source in zip(tensors_of(static), tensors_of(fresh), strict=True):
            target.copy_(source)
        graph.replay()
        assert_same_bits(result, function(**fresh))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@every_call
def test_runs_on_the_device_of_its_tensors(kernel, name):
    function, arguments = sample(kernel, name, dtype=torch.bfloat16, device="cuda:1")
    with torch.cuda.device(0):
        result = function(**arguments)
    with torch.cuda.device(1):
        assert_same_bits(result, function(**arguments))
    assert all(tensor.device.index == 1 for tensor in tensors_of(result))


# --------------------------------------------------------------------------------------------------
# Sizes


@pairwise(call=ALL_CALLS, shape=[(0, 16, 256), (2, 0, 256), (0, 0, 256)], dtype=DTYPES)
def test_empty_tensors(kernel, device, call, shape, dtype):
    name, in_place = call
    options = {"dtype": narrowed(dtype, name), "device": device, "shape": shape}
    function, arguments = any_call(kernel, name, in_place, **options)
    outs = as_tuple(function(**arguments))
    if name in (WITH_LSE, INT8_WITH_LSE):
        *outs, lse = outs
        assert lse.dtype == torch.float32 and lse.shape == outs[0].shape[:3]
    dtypes = [torch.float32 if FLOAT32_RESIDUAL in name else options["dtype"]]
    dtypes += [options["dtype"]] * (len(outs) - 1)
    assert [out.dtype for out in outs] == dtypes
    of_key = (shape[0], shape[1] + (name == "qk_norm_two_ropes"), shape[2])
    assert [out.flatten(2).shape for out in outs] == [shape, *[of_key] * (len(outs) - 1)]
    if in_place is not None:
        assert all(out is one for out, one in zip(outs, written_by(arguments), strict=True))


@pytest.mark.parametrize("name", ROW_OPERATIONS)
@pytest.mark.parametrize("shape", [(2, 3, 0), (0,)], ids=str)
def test_empty_rows(kernel, device, name, shape):
    _, arguments = sample(kernel, name, dtype=torch.bfloat16, device=device, shape=(1, 1, 8))
    for key, value in arguments.items():
        if isinstance(value, torch.Tensor):
            size = shape if key in TABLE[name].rows else shape[-1:]
            arguments[key] = torch.empty(size, dtype=value.dtype, device=device)
    outs = as_tuple(getattr(kernel, name)(**arguments))
    assert outs and all(out.shape == shape for out in outs)


FAR = 2**31  # elements


def far_apart(shape, dtype, device, memory, offset=0):
    """A view (rows, ..., columns) with rows FAR / 2 elements apart, so that the third begins at 2**31."""
    rows, *rest = shape
    strides = torch.empty(rest, device="meta").stride()
    view = memory.as_strided(shape, (FAR // 2, *strides), offset)
    return view.copy_(normal(*shape, dtype=dtype, device=device))


FAR_DIMS = {"batch": (0, 1, 2, 3), "seq": (1, 0, 2, 3), "head": (1, 2, 0, 3)}
OF_HEADS = ["attention", "attention_int8", *QK_OPERATIONS]
FAR_CALLS = [(name, "batch", False) for name in OPERATIONS if name not in OF_HEADS]
FAR_CALLS += [(name, dim, False) for name in OF_HEADS for dim in FAR_DIMS]
FAR_CALLS += [(name, dim, True) for name in QK_OPERATIONS for dim in FAR_DIMS]


@pytest.mark.parametrize(("name", "far_dim", "inplace"), FAR_CALLS)
def test_offsets_past_2_31(kernel, device, name, far_dim, inplace):
    """Elements with distances beyond 32 bits."""
    dtype = torch.bfloat16
    memory = virtual_memory(FAR + 2**20, dtype, device)
    shape = (3, 3, 192) if name in OF_HEADS else (3, 1, 256)
    heads = 3 if name in OF_HEADS else 4
    function, arguments = sample(kernel, name, dtype=dtype, device=device, shape=shape, heads=heads)
    offset = 0
    for key, value in arguments.items():
        if not isinstance(value, torch.Tensor) or value.dim() < 3 or key == "gate":
            continue
        if name in OF_HEADS:
            far = far_apart((3, 3, 3, 64), dtype, device, memory, offset)
            arguments[key] = far.permute(FAR_DIMS[far_dim])
        else:
            arguments[key] = far_apart(value.shape, dtype, device, memory, offset)
        offset += 4096
    if "k_rope" in arguments:
        arguments["k_rope"] = tuple(table[:3] for table in arguments["k_rope"])
    expected = as_tuple(getattr(references, operation_of(name))(**arguments))
    outs = as_tuple(function(**arguments, **({"inplace": True} if inplace else {})))
    for out, reference in zip(outs, expected, strict=True):
        assert_rounded_once(out, reference, arithmetic_slack(name, dtype))


@pytest.fixture
def _gpu_memory(tmp_path_factory):
    """32 GB of memory, for one test at a time among all processes of this run."""
    with FileLock(tmp_path_factory.getbasetemp().parent / "gpu_memory.lock"):
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if free < 32e9:
            pytest.skip(f"needs 32 GB of GPU memory, {free / 1e9:.1f} GB are free")
        yield
        gc.collect()
        torch.cuda.empty_cache()


# Operation, number of full-size tensors, their shape.
HUGE = [
    ("gelu", 1, (2**20 + 3, 2048)),
    ("gelu", 1, (FAR + 12345,)),
    ("swiglu", 1, (2**19 + 3, 8192)),
    ("softmax", 1, (2**20 + 3, 2048)),
    ("softmax", 1, (2**15 + 3, 65536)),
    ("rms_norm", 1, (2**20 + 3, 2048)),
    ("layer_norm", 1, (2**20 + 3, 2049)),
    ("gated_residual", 3, (2**20 + 3, 2048)),
    ("gated_residual", 2, (FAR + 12345,)),
    ("gated_residual_rms_norm_modulate", 2, (2**20 + 3, 2048)),
]


@needs_cuda
@pytest.mark.usefixtures("_gpu_memory")
@pytest.mark.parametrize(("name", "count", "shape"), HUGE, ids=str)
def test_more_than_2_31_elements(kernel, device, name, count, shape):
    columns, options = shape[-1], {"dtype": torch.bfloat16, "device": device}
    tensors = [torch.empty(shape, **options).normal_() for _ in range(count)]
    small = [normal(columns, **options) for _ in range(3)]
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
@pytest.mark.parametrize("name", ["group_norm", "channel_rms_norm"])
def test_images_of_more_than_2_31_elements(kernel, device, name, is_last):
    """Many images, and one image in which each period has the statistics of the whole."""
    pixels, channels, period = 512, 32, 4096
    shape = (FAR // (pixels * channels) + 3, channels, pixels)
    x = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
    x = x.mT.contiguous().mT if is_last else x
    assert x.numel() > FAR
    norm, reference = getattr(kernel, name), getattr(references, name)
    groups = (8,) if name == "group_norm" else ()
    out = norm(x, *groups)
    for first in (0, shape[0] // 2, shape[0] - 2):
        part = slice(first, first + 2)
        assert_rounded_once(out[part], reference(x[part], *groups))
    del x, out
    one = normal(1, 4, period, dtype=torch.bfloat16, device=device, mean=1.0)
    count = FAR // one.numel() + 1
    x = one.mT.repeat(1, count, 1).mT if is_last else one.repeat(1, 1, count)
    assert x.numel() > FAR
    groups = (2,) if groups else ()
    out, expected = norm(x, *groups), reference(one, *groups)
    for first in (0, count // 2 * period, (count - 1) * period):
        assert_rounded_once(out[..., first : first + period], expected)


@needs_cuda
@pytest.mark.usefixtures("_gpu_memory")
def test_query_and_key_of_more_than_2_31_elements(kernel, device):
    batch, seq, heads, head_dim = 2, 2**19 + 3, 32, 64
    size = batch, seq, 2, heads * head_dim
    q, k = torch.empty(size, dtype=torch.bfloat16, device=device).normal_().unbind(2)
    ends = [(b, slice(s, s + 2)) for b in range(batch) for s in (0, seq // 2, seq - 2)]
    rope = rotary_tables(seq, head_dim, dtype=torch.float32, device=device)
    expected = [
        references.qk_norm_rope(
            *(t[b : b + 1, part] for t in (q, k)), rope=tuple(t[part] for t in rope), heads=heads
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
        k[:, -2:] = 4 * q[:, :1]  # so that the last ones also have weight
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
    """Blocks claim query tiles in lists of 2048, so more blocks than multiprocessors are needed."""
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
