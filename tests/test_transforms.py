"""The operations under torch.vmap, as nodes of torch.fx, and with fake tensors."""

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from checks import as_tuple, map_tensors, tensors_of
from inputs import CALLS, QK_OPERATIONS, rotary_tables, sample, widest_dtype
from test_contracts import assert_same_bits

every_operation = pytest.mark.parametrize("name", CALLS)
SAMPLES = 3


def small_call(kernel, device, name):
    return sample(kernel, name, dtype=widest_dtype(name), device=device, shape=(2, 5, 64), heads=2)


# --------------------------------------------------------------------------------------------------
# vmap


def assert_close(outs, expected):
    """Rows in other places may be added up in another order."""
    for out, reference in zip(tensors_of(outs), tensors_of(expected), strict=True):
        tolerance = 0.01 if out.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(out, reference, rtol=tolerance, atol=tolerance)


def call_of_tensors(function, arguments):
    """The call as a function of all its tensors, and these."""

    def call(*tensors):
        given = iter(tensors)
        return function(**map_tensors(lambda _: next(given), arguments))

    return call, list(tensors_of(arguments))


def varied(tensor, dim):
    """Samples along `dim`, each other than the others."""
    if tensor.dtype == torch.int32:
        return torch.stack([tensor - i for i in range(SAMPLES)], dim)
    return torch.stack([tensor * (1 + i / 4) for i in range(SAMPLES)], dim)


def check_vmap(call, tensors, in_dims):
    batched = [t if d is None else varied(t, d) for t, d in zip(tensors, in_dims, strict=True)]
    expected = [
        as_tuple(
            call(
                *(
                    t if d is None else t.select(d, i).contiguous()
                    for t, d in zip(batched, in_dims, strict=True)
                )
            )
        )
        for i in range(SAMPLES)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a rule that is missing
        outs = torch.vmap(call, in_dims=tuple(in_dims))(*batched)
    assert_close(as_tuple(outs), tuple(map(torch.stack, zip(*expected, strict=True))))


@every_operation
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_vmap_of_every_tensor(kernel, device, name, dim):
    call, tensors = call_of_tensors(*small_call(kernel, device, name))
    in_dims = [min(dim, t.dim()) if dim >= 0 else t.dim() for t in tensors]
    check_vmap(call, tensors, in_dims)


@every_operation
def test_vmap_of_each_tensor_alone(kernel, device, name):
    call, tensors = call_of_tensors(*small_call(kernel, device, name))
    for index in range(len(tensors)):
        for dim in (0, 1):
            check_vmap(call, tensors, [dim if i == index else None for i in range(len(tensors))])


@every_operation
def test_vmap_of_all_but_one(kernel, device, name):
    call, tensors = call_of_tensors(*small_call(kernel, device, name))
    if len(tensors) < 2:
        pytest.skip("one tensor")
    for index in range(len(tensors)):
        check_vmap(call, tensors, [None if i == index else 0 for i in range(len(tensors))])


@every_operation
def test_vmap_in_vmap(kernel, device, name):
    call, tensors = call_of_tensors(*small_call(kernel, device, name))
    first = varied(tensors[0], 0)
    outs = torch.vmap(torch.vmap(lambda x: call(x, *tensors[1:])))(first[None])
    expected = [as_tuple(call(x, *tensors[1:])) for x in first]
    assert_close(as_tuple(outs), tuple(torch.stack(o)[None] for o in zip(*expected, strict=True)))


@every_operation
def test_vmap_of_no_samples(kernel, device, name):
    call, tensors = call_of_tensors(*small_call(kernel, device, name))
    expected = as_tuple(call(*tensors))
    outs = as_tuple(torch.vmap(call)(*(t.new_zeros(0, *t.shape) for t in tensors)))
    for out, one in zip(outs, expected, strict=True):
        assert (out.shape, out.dtype) == ((0, *one.shape), one.dtype)


def test_vmap_of_rows_is_one_call(kernel, device):
    x, scale = torch.randn(4, 3, 8, device=device), torch.randn(4, 8, device=device)

    def call(row, scale):
        return kernel.rms_norm_modulate(row, scale, scale)

    graph = make_fx(torch.vmap(call))(x, scale)
    assert sum("rms_norm_modulate" in str(node.target) for node in graph.graph.nodes) == 1


def test_vmap_keeps_refusals(kernel, device):
    x = torch.randn(4, 8, device=device)
    with pytest.raises(ValueError, match="rms_norm: x must have at least 1 dimension"):
        torch.vmap(kernel.rms_norm)(x[0])
    with pytest.raises(ValueError, match="rms_norm: weight must have shape"):
        torch.vmap(lambda row: kernel.rms_norm(row, x[0, :3]))(x)


@pytest.mark.parametrize("name", QK_OPERATIONS)
@pytest.mark.parametrize("in_dims", [(0, 0), (0, 1), (2, 1)])
def test_vmap_in_place(kernel, device, name, in_dims):
    function, arguments = small_call(kernel, device, name)
    q, k = (varied(arguments[key], dim) for key, dim in zip("qk", in_dims, strict=True))

    def call(q, k):
        return function(**{**arguments, "q": q, "k": k}, inplace=True)

    expected = torch.vmap(lambda q, k: function(**{**arguments, "q": q, "k": k}), in_dims)(q, k)
    results = torch.vmap(call, in_dims)(q, k)
    assert_close(results, expected)
    written = tuple(t.movedim(dim, 0) for t, dim in zip((q, k), in_dims, strict=True))
    assert_close(written, expected)


@pytest.mark.parametrize("name", QK_OPERATIONS)
def test_vmap_in_place_refusals(kernel, device, name):
    function, arguments = small_call(kernel, device, name)
    q, k = arguments["q"], arguments["k"]
    before = q.clone(), k.clone()

    def call(q, k):
        return function(**{**arguments, "q": q, "k": k}, inplace=True)

    several = varied(q, 0)
    for given, in_dims, text in (
        ((several, k), (0, None), "k must be batched to be written in place"),
        ((q, several), (None, 0), "q must be batched to be written in place"),
        ((q.expand(3, 2, 5, 64), several), (0, 0), "q must not be expanded .* stride 0"),
        ((several, several), (0, 0), "k must not share memory with q"),
        ((several[:2], several[1:]), (0, 0), "k must not share memory with q"),
    ):
        copy = several.clone()
        with pytest.raises(ValueError, match=f"qk_norm_rope: {text}"):
            torch.vmap(call, in_dims)(*given)
        assert torch.equal(several, copy)
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, 0, 2), (None, 0, 1)])
def test_vmap_with_outputs(kernel, device, in_dims):
    rope = rotary_tables(5, 64, dtype=torch.float32, device=device)
    x, out_k, out_v = (torch.randn(3, 2, 5, 1, 64, device=device) for _ in range(3))
    out = torch.zeros_like(x)
    arguments = [x[0] if in_dims[0] is None else x, x.clone(), out]
    arguments = [
        t if dim is None else t.movedim(0, dim).contiguous().movedim(dim, 0)
        for t, dim in zip(arguments, in_dims, strict=True)
    ]
    dims = tuple(None if dim is None else 0 for dim in in_dims)

    def call(q, k, out, out_k, out_v):
        outs = (out, out_k, out_v)
        return kernel.qk_norm_rope(q, k, rope=rope, heads=1, v=k, out=outs)

    given = (*arguments, out_k, out_v)
    results = torch.vmap(call, (*dims, 0, 0))(*given)
    for index in range(3):
        q = x[0] if dims[0] is None else x[index]
        expected = (*kernel.qk_norm_rope(q, x[index], rope=rope, heads=1), x[index])
        for result, written, reference in zip(results, given[2:], expected, strict=True):
            assert torch.equal(result[index], reference)
            assert torch.equal(written[index], reference)


def test_vmap_refuses_outputs(kernel, device):
    x = torch.randn(3, 2, 5, 1, 64, device=device)
    out = torch.zeros_like(x)

    def call(x, out):
        return kernel.norm_rope(x, heads=1, out=out)

    with pytest.raises(ValueError, match="norm_rope: out must be batched to be written under vmap"):
        torch.vmap(call, (0, None))(x, out[0])
    with pytest.raises(ValueError, match="norm_rope: out must not be expanded to be written, got"):
        torch.vmap(call)(x, out[:1].expand_as(x))
    with pytest.raises(ValueError, match="norm_rope: x must not share memory with out, which is"):
        torch.vmap(call)(out[:2], out[1:])
    assert not out.any()
    copy = x.clone()
    assert torch.equal(
        torch.vmap(call)(copy, copy), kernel.norm_rope(x.flatten(0, 1), heads=1).view_as(x)
    )


# --------------------------------------------------------------------------------------------------
# torch.fx


@every_operation
def test_fx_traces_a_call_as_one_node(kernel, device, name):
    function, arguments = small_call(kernel, device, name)
    call, tensors = call_of_tensors(function, arguments)

    class Model(torch.nn.Module):
        # torch.fx takes no variable number of arguments
        def forward(self, a, b=None, c=None, d=None, e=None, f=None, g=None, h=None, i=None):
            return call(*(a, b, c, d, e, f, g, h, i)[: len(tensors)])

    graph = torch.fx.symbolic_trace(Model())
    graph.graph.eliminate_dead_code()
    calls = [n for n in graph.graph.nodes if getattr(n.target, "__name__", "") == function.__name__]
    assert len(calls) == 1
    assert_same_bits(graph(*tensors), function(**arguments))
    # A leaf decides about derivatives when it is called.
    leader = tensors[0].clone().requires_grad_()
    assert any(t.requires_grad for t in tensors_of(as_tuple(graph(leader, *tensors[1:]))))


def test_fx_traces_an_expression(kernel, device):
    x = torch.randn(3, 8, device=device)
    graph = torch.fx.symbolic_trace(lambda z: kernel.silu(z) + 1)
    assert torch.equal(graph(x), kernel.silu(x) + 1)


def test_fx_keeps_what_is_written_in_place(kernel, device):
    cos, sin = rotary_tables(5, 64, dtype=torch.float32, device=device)

    def forward(q, k):
        kernel.qk_norm_rope(q, k, rope=(cos, sin), heads=1, inplace=True)
        return q

    graph = torch.fx.symbolic_trace(forward)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    q, k = torch.randn(2, 1, 5, 64, device=device)
    expected, _ = kernel.qk_norm_rope(q, k, rope=(cos, sin), heads=1)
    assert torch.equal(graph(q, k), expected)


def test_fx_keeps_what_is_written_to_outputs(kernel, device):
    def forward(q, k, q_out, k_out):
        kernel.qk_norm_rope(q, k, heads=1, out=(q_out, k_out))
        kernel.norm_rope(q_out, heads=1, norm="none", out=q_out)
        return q_out, k_out

    graph = torch.fx.symbolic_trace(forward)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    q, k = torch.randn(2, 1, 5, 64, device=device)
    expected = kernel.qk_norm_rope(q, k, heads=1)
    results = graph(q, k, torch.zeros_like(q), torch.zeros_like(k))
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


# --------------------------------------------------------------------------------------------------
# Fake tensors


@every_operation
@pytest.mark.parametrize("requires_grad", [False, True])
def test_fake_tensors(kernel, device, name, requires_grad):
    function, arguments = small_call(kernel, device, name)
    next(tensors_of(arguments)).requires_grad_(requires_grad)
    outs = as_tuple(function(**arguments))
    with FakeTensorMode() as mode:
        fakes = as_tuple(function(**map_tensors(mode.from_tensor, arguments)))
    for fake, out in zip(fakes, outs, strict=True):
        assert (fake.shape, fake.dtype, fake.device) == (out.shape, out.dtype, out.device)
        assert fake.stride() == out.stride()
    assert_same_bits(function(**arguments), outs)


@pytest.mark.parametrize("name", QK_OPERATIONS)
def test_fake_tensors_in_place(kernel, device, name):
    function, arguments = small_call(kernel, device, name)
    with FakeTensorMode() as mode:
        fakes = map_tensors(mode.from_tensor, arguments)
        results = function(**fakes, inplace=True)
    assert results[0] is fakes["q"] and results[1] is fakes["k"]


@every_operation
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(kernel, device, name, mode):
    function, arguments = small_call(kernel, device, name)
    call, tensors = call_of_tensors(function, arguments)
    graph = make_fx(call, tracing_mode=mode)(*tensors)
    assert_same_bits(graph(*tensors), function(**arguments))
