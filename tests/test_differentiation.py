"""Derivatives of the operations in the ways of asking for them that requires_grad does not show:
forward mode, and the transforms of torch.func in one another and within a compiled function."""

import functools

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import references
from checks import as_tuple, map_tensors, tensors_of
from inputs import (
    CALLS,
    HEADS_GIVEN,
    QK_OPERATIONS,
    for_operations,
    sample,
    widest_dtype,
)
from test_contracts import assert_same_bits, differentiable

every_operation = pytest.mark.parametrize("name", CALLS)
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def small_call(kernel, device, name, dtype=None):
    return sample(
        kernel, name, dtype=dtype or widest_dtype(name), device=device, shape=(2, 5, 64), heads=2
    )


def of_differentiable(function, arguments):
    """The call as a function of its differentiable arguments alone, and these."""
    leaves = differentiable(arguments)

    def call(*values):
        return as_tuple(function(**{**arguments, **dict(zip(leaves, values, strict=True))}))

    return call, tuple(leaves.values())


def assert_derivative(out, expected, dtype, what=""):
    error = (out.double() - expected).norm() / expected.norm()
    assert error <= TOLERANCES[dtype], f"{what}: relative error {error:.3g}"


@for_operations(CALLS, list(TOLERANCES))
def test_jvp(kernel, device, name, dtype):
    function, arguments = small_call(kernel, device, name, dtype)
    call, leaves = of_differentiable(function, arguments)
    tangents = tuple(torch.randn_like(leaf) for leaf in leaves)
    outs, derivatives = jvp(call, leaves, tangents)
    exact, _ = of_differentiable(getattr(references, function.__name__), arguments)
    in_double = [tuple(t.double() for t in tensors) for tensors in (leaves, tangents)]
    expected_outs, expected = jvp(exact, *in_double)
    for out, reference in zip(outs, expected_outs, strict=True):
        assert_derivative(out, reference, dtype, "result")
    for derivative, reference in zip(derivatives, expected, strict=True):
        assert derivative.dtype == dtype
        assert_derivative(derivative, reference, dtype, "derivative")


@every_operation
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_tangent_of_each_input_alone(kernel, device, name, mode):
    function, arguments = small_call(kernel, device, name)
    count = sum(t.is_floating_point() for t in tensors_of(arguments))
    for index in range(count):
        with mode(), forward_ad.dual_level():
            given = iter(range(len(list(tensors_of(arguments)))))

            def with_tangent(tensor, given=given, index=index):
                is_chosen = tensor.is_floating_point() and next(given) == index
                return (
                    forward_ad.make_dual(tensor, torch.rand_like(tensor)) if is_chosen else tensor
                )

            outs = as_tuple(function(**map_tensors(with_tangent, arguments)))
            tangents = [forward_ad.unpack_dual(out).tangent for out in outs]
            assert any(tangent is not None and tangent.any() for tangent in tangents)


@every_operation
def test_no_tangent_takes_the_kernel(kernel, device, name):
    function, arguments = small_call(kernel, device, name)
    expected = function(**arguments)
    other = torch.ones(3, device=device)
    with forward_ad.dual_level():
        forward_ad.make_dual(other, other)
        assert_same_bits(function(**arguments), expected)
        duals = map_tensors(
            lambda t: forward_ad.make_dual(t, t) if t.is_floating_point() else t, arguments
        )
        with forward_ad._set_fwd_grad_enabled(False):
            assert_same_bits(function(**duals), expected)


@pytest.mark.parametrize("name", QK_OPERATIONS)
def test_in_place_where_an_input_carries_a_tangent(kernel, device, name):
    function, arguments = small_call(kernel, device, name)
    before = arguments["q"].clone()
    with forward_ad.dual_level():
        k = forward_ad.make_dual(arguments["k"], torch.ones_like(arguments["k"]))
        with pytest.raises(ValueError, match="qk_norm_rope: inplace must be False .* tangent, got"):
            function(**{**arguments, "k": k}, inplace=True)
    assert torch.equal(arguments["q"], before)


@every_operation
def test_jvp_compiled(kernel, device, name):
    function, arguments = small_call(kernel, device, name)
    call, leaves = of_differentiable(function, arguments)
    tangents = tuple(torch.randn_like(leaf) for leaf in leaves)
    torch._dynamo.reset()
    # The graph is what is in question; the code that is made of it on a CPU is Torch's own, and slow to make.
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(
        lambda *given: jvp(call, given, tangents), fullgraph=True, backend=backend
    )
    outs, expected = compiled(*leaves), jvp(call, leaves, tangents)
    for out, reference in zip(tensors_of(outs), tensors_of(expected), strict=True):
        assert_derivative(out, reference.double(), widest_dtype(name))


def one_row(kernel, name, device):
    """A function of one tensor, and that tensor, few enough elements for all second derivatives."""
    if name in ("attention", HEADS_GIVEN):
        x = torch.randn(1, 2, 1, 64, device=device).bfloat16()
        if name == HEADS_GIVEN:
            x = x.flatten(2)
            return lambda q: kernel.attention(q, x, x.sin(), heads=1), torch.randn_like(x)
        return lambda q: kernel.attention(q, x, x.sin()), torch.randn_like(x)
    function, arguments = sample(
        kernel, name, dtype=torch.float32, device=device, shape=(1, 1, 12), heads=1
    )
    key = next(iter(arguments))
    return lambda value: as_tuple(function(**{**arguments, key: value}))[0], arguments[key]


@every_operation
def test_jacobians_and_hessian(kernel, device, name):
    function, x = one_row(kernel, name, device)
    tolerances = {"rtol": 1e-4, "atol": 1e-5}
    if name in ("attention", HEADS_GIVEN):
        tolerances = {"rtol": 0.02, "atol": 0.02}
    forward = jacfwd(function)(x)
    assert forward.any()
    torch.testing.assert_close(forward, jacrev(function)(x), **tolerances)

    def loss(value):
        return function(value).float().square().sum()

    torch.testing.assert_close(hessian(loss)(x), jacrev(jacfwd(loss))(x), **tolerances)


SEEN_ONLY_INSIDE = {
    # Each hides from the operation, in another way, that w's derivative is being taken.
    "vmap": lambda f, w: vmap(f)(w),
    "vmap_of_a_result": lambda f, w: vmap(lambda row: f(row * 2))(w),
    "inner_grad": lambda f, w: grad(lambda v: (f(w * 1.0) * v).sum())(torch.ones_like(w)),
}


@pytest.mark.parametrize("form", SEEN_ONLY_INSIDE)
def test_gradient_through_a_transform(kernel, device, form):
    x, v = torch.randn(2, 3, 8, device=device)
    through, silu = SEEN_ONLY_INSIDE[form], torch.nn.functional.silu

    def loss(f, w):
        return (through(f, w) * v).sum()

    for one in (x.clone().requires_grad_(), x):
        expected = grad(functools.partial(loss, silu))(x)
        torch.testing.assert_close(grad(functools.partial(loss, kernel.silu))(x), expected)
        if one.requires_grad:
            (actual,) = torch.autograd.grad(loss(kernel.silu, one), [one])
            torch.testing.assert_close(actual, expected)


def test_tangent_through_vmap(kernel, device):
    x, v = torch.randn(2, 3, 8, device=device)
    silu = torch.nn.functional.silu
    _, expected = jvp(silu, (x,), (v,))
    _, derivative = jvp(vmap(kernel.silu), (x,), (v,))
    torch.testing.assert_close(derivative, expected)
    with forward_ad.dual_level():
        out = vmap(kernel.silu)(forward_ad.make_dual(x, v))
        torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, expected)
        weight = forward_ad.make_dual(x[0], v[0])
        out = vmap(lambda row: kernel.rms_norm(row, weight))(x)
        assert forward_ad.unpack_dual(out).tangent.any()
        out = vmap(lambda row: row + kernel.silu(weight))(x)
        torch.testing.assert_close(forward_ad.unpack_dual(out).tangent[1], expected[0])
