"""Derivatives: the formula's backward after a forward on the kernels; only the formula in forward mode and in
transforms of torch.func."""

import functools
import math

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import eager
import references
from checks import (
    ACCURACY_CONTRACT,
    as_tuple,
    assert_same_bits,
    clone_storage,
    map_tensors,
    of_tensors,
    tensors_of,
)
from inputs import (
    CALLS,
    CHOICES,
    DTYPES,
    OPERATIONS,
    every_writing,
    for_dtypes,
    narrowed,
    operation_of,
    pairwise,
    sample,
    widest_dtype,
    without_optional,
    writing_call,
    written_by,
)

every_call = pytest.mark.parametrize("name", CALLS)
SMALL = {"shape": (2, 5, 64), "heads": 2}
# Relative L2 errors of derivatives.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DIFFERENTIATED = "if an input requires grad, carries a tangent or is in a transform of torch.func"


def small_call(kernel, device, name, dtype=None):
    return sample(kernel, name, dtype=dtype or widest_dtype(name), device=device, **SMALL)


def is_differentiable(tensor):
    return tensor.is_floating_point() or tensor.is_complex()


def in_double(tensor):
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.to(dtype) if is_differentiable(tensor) else tensor


def exactly(arguments):
    """In float64, except coordinates and frequencies: their product is computed in float32."""
    exact, rope = map_tensors(in_double, arguments), arguments.get("rope")
    return {**exact, "rope": rope} if hasattr(rope, "frequencies") else exact


def of_differentiable(function, arguments):
    call, leaves = of_tensors(function, arguments, is_differentiable)
    return lambda *values: as_tuple(call(*values)), leaves


def gradients(function, arguments, tangents, **options):
    call, leaves = of_differentiable(function, arguments)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    outs = call(*leaves)
    tangents = [t.to(out.dtype) for t, out in zip(tangents, outs, strict=True)]
    return torch.autograd.grad(outs, leaves, tangents, **options)


def relative_error(value, exact):
    return ((value.to(exact.dtype) - exact).norm() / exact.norm()).item()


def assert_derivative(out, expected, dtype, what=""):
    error = relative_error(out, expected)
    assert error <= TOLERANCES[dtype], f"{what}: relative error {error:.3g}"


# --------------------------------------------------------------------------------------------------
# Gradients


def check_gradients(kernel, name, arguments):
    """Against float64, compared with the eager expression's; with few elements the ratio is noisy."""
    operation = operation_of(name)
    dtypes = [t.dtype for t in tensors_of(arguments) if is_differentiable(t)]
    dtype = max(dtypes, key=lambda dtype: TOLERANCES.get(dtype, 0))
    reference = getattr(references, operation)
    exact = exactly(arguments)
    tangents = [torch.randn_like(out).to(dtype) for out in as_tuple(reference(**exact))]
    expected = gradients(reference, exact, tangents)
    theirs = gradients(getattr(eager, operation), arguments, tangents)
    ours = gradients(getattr(kernel, operation), arguments, tangents)
    leaves = [t for t in tensors_of(arguments) if is_differentiable(t)]
    for i, (leaf, one, other, true) in enumerate(zip(leaves, ours, theirs, expected, strict=True)):
        assert one.dtype == leaf.dtype and one.shape == leaf.shape
        error, limit = relative_error(one, true), relative_error(other, true)
        limit *= ACCURACY_CONTRACT * (1 + 3 / math.sqrt(one.numel()))
        assert error <= TOLERANCES[dtype], f"gradient {i}: relative error {error:.3g}"
        assert error <= limit or error < 1e-9, f"gradient {i}: error {error:.3g}, limit {limit:.3g}"


@pytest.mark.drawn(pairs=[("name", "has_optional")])
@pytest.mark.parametrize("has_optional", [True, False], ids=["everything", "nothing_optional"])
@pairwise(name=CALLS, dtype=DTYPES)
def test_gradients(kernel, device, name, dtype, has_optional):
    options = {"dtype": narrowed(dtype, name), "device": device, "shape": (2, 64, 1024)}
    _, arguments = sample(kernel, name, **options)
    check_gradients(kernel, name, arguments if has_optional else without_optional(name, arguments))


@pairwise(name=CALLS, dtype=DTYPES, layout=["contiguous", "chunk", "transposed", "expanded"])
def test_the_forward_is_that_of_the_kernel(kernel, device, name, dtype, layout):
    """Bitwise equality with and without gradients."""
    dtype = narrowed(dtype, name)
    function, arguments = sample(kernel, name, dtype=dtype, device=device, layout=layout, **SMALL)
    expected = function(**arguments)
    for leaf in tensors_of(arguments):
        if is_differentiable(leaf):
            leaf.requires_grad_()
    outs = as_tuple(function(**arguments))
    assert all(out.requires_grad for out in outs)
    assert_same_bits([out.detach() for out in outs], expected)
    assert [out.stride() for out in outs] == [out.stride() for out in as_tuple(expected)]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            outs = as_tuple(function(**arguments))
        assert not any(out.requires_grad for out in outs)
        assert_same_bits(outs, expected)


@every_call
def test_gradient_of_each_input_alone(kernel, device, name):
    function, arguments = small_call(kernel, device, name)
    call, leaves = of_differentiable(function, arguments)
    whole = torch.autograd.grad(
        sum(out.sum() for out in call(*(leaf.requires_grad_() for leaf in leaves))), leaves
    )
    leaves = [leaf.detach() for leaf in leaves]
    for i, leaf in enumerate(leaves):
        leaf.requires_grad_()
        outs = call(*leaves)
        loss = sum(out.sum() for out in outs if out.requires_grad)
        (gradient,) = torch.autograd.grad(loss, [leaf])
        torch.testing.assert_close(gradient, whole[i], rtol=0.02, atol=0.02)
        leaf.requires_grad_(False)
    assert not any(out.requires_grad for out in call(*leaves))


@every_call
def test_double_backward(kernel, device, name):
    """Second derivatives, by a product with the gradient, against the float64 reference's."""
    function, arguments = small_call(kernel, device, name)
    dtype = widest_dtype(name)
    reference = getattr(references, operation_of(name))
    exact = exactly(arguments)
    tangents = [torch.randn_like(out) for out in as_tuple(function(**arguments))]
    factors = [torch.randn_like(t) for t in tensors_of(arguments) if is_differentiable(t)]
    results = []
    for one, given in ((function, arguments), (reference, exact)):
        call, leaves = of_differentiable(one, given)
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        outs = call(*leaves)
        cotangents = [t.to(o.dtype).requires_grad_() for t, o in zip(tangents, outs, strict=True)]
        first = torch.autograd.grad(outs, leaves, cotangents, create_graph=True)
        product = sum((g * f.to(g.dtype)).sum().real for g, f in zip(first, factors, strict=True))
        second = torch.autograd.grad(product, [*leaves, *cotangents], allow_unused=True)
        results.append(second)
    for i, (out, expected) in enumerate(zip(*results, strict=True)):
        if out is None or expected is None:  # where the operation is linear
            assert all(t is None or not t.any() for t in (out, expected)), i
            continue
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
        error = (out.to(expected.dtype) - expected).norm()
        assert error <= tolerance * expected.norm() + 1e-6, f"{i}: {error:.3g}"


@pytest.mark.drawn(times=0, period=3)
@pytest.mark.parametrize("name", OPERATIONS)
def test_compiled_gradients(kernel, device, name):
    function, arguments = small_call(kernel, device, name)
    tangents = [torch.randn_like(out) for out in as_tuple(function(**arguments))]
    torch._dynamo.reset()
    compiled = torch.compile(lambda given: function(**given), fullgraph=True, backend="aot_eager")
    ours = gradients(lambda **given: compiled(given), arguments, tangents)
    for one, other in zip(ours, gradients(function, arguments, tangents), strict=True):
        torch.testing.assert_close(one, other)


@every_call
def test_an_input_changed_before_backward_is_noticed(kernel, device, name):
    function, arguments = small_call(kernel, device, name)
    leader = next(tensors_of(arguments))
    x = leader.clone().requires_grad_() * 1
    outs = as_tuple(function(**{**arguments, next(iter(arguments)): x}))
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sum(out.float().sum() for out in outs).backward()


@every_writing
def test_autograd_sees_what_is_written(kernel, device, name, in_place):
    """A backward that needs overwritten values is refused, as for PyTorch's own operators."""
    options = {"dtype": widest_dtype(name), "device": device, **SMALL}
    function, arguments = writing_call(kernel, name, in_place=in_place, **options)
    outs = written_by(arguments)
    versions = [out._version for out in outs]
    losses = [(out * torch.ones_like(out, requires_grad=True)).sum() for out in outs]
    function(**arguments)
    assert [out._version for out in outs] == [version + 1 for version in versions]
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def refused_in(kind, function, arguments, value):
    """Calls with a derivative with respect to one tensor, or within a transform."""

    def call(one):
        return function(**map_tensors(lambda t: one if t is value else t, arguments))

    if kind == "grad":
        return call(value.detach().requires_grad_())
    if kind == "tangent":
        with forward_ad.dual_level():
            return call(forward_ad.make_dual(value, torch.ones_like(value)))
    if kind == "vmap":
        return vmap(call)(value[None])
    return grad(lambda one: call(one)[0].sum())(value)


@every_writing
@pytest.mark.parametrize("kind", ["grad", "tangent", "vmap", "func"])
def test_writing_is_refused_where_a_derivative_is_taken(kernel, device, name, in_place, kind):
    options = {"dtype": widest_dtype(name), "device": device, **SMALL}
    function, arguments = writing_call(kernel, name, in_place=in_place, **options)
    argument, accepted, got = ("inplace", "False", "True") if in_place else ("out", "None", "")
    text = f"^{operation_of(name)}: {argument} must be {accepted} {DIFFERENTIATED}, got .*{got}"
    for i in range(len(list(tensors_of(arguments))) if kind == "grad" else 1):
        given = map_tensors(clone_storage, arguments)
        value = list(tensors_of(given))[i]
        if not is_differentiable(value):
            continue
        before = [out.clone() for out in written_by(given)]
        with pytest.raises(ValueError, match=text):
            refused_in(kind, function, given, value)
        assert_same_bits(written_by(given), before)


# --------------------------------------------------------------------------------------------------
# Forward mode


@for_dtypes(torch.float32, torch.bfloat16)
@every_call
def test_jvp(kernel, device, name, dtype):
    dtype = narrowed(dtype, name)
    function, arguments = small_call(kernel, device, name, dtype)
    call, leaves = of_differentiable(function, arguments)
    tangents = tuple(torch.randn_like(leaf) for leaf in leaves)
    dtypes = [out.dtype for out in as_tuple(function(**arguments))]
    outs, derivatives = jvp(call, tuple(leaves), tangents)
    exact, values = of_differentiable(getattr(references, operation_of(name)), exactly(arguments))
    wide = [t.to(value.dtype) for t, value in zip(tangents, values, strict=True)]
    expected_outs, expected = jvp(exact, tuple(values), tuple(wide))
    for results, exact_results in ((outs, expected_outs), (derivatives, expected)):
        assert [result.dtype for result in results] == dtypes
        for result, reference in zip(results, exact_results, strict=True):
            assert_derivative(result, reference, dtype)


@every_call
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_tangent_of_each_input_alone(kernel, device, name, mode):
    function, arguments = small_call(kernel, device, name)
    call, leaves = of_differentiable(function, arguments)
    for i, leaf in enumerate(leaves):
        with mode(), forward_ad.dual_level():
            dual = forward_ad.make_dual(leaf, torch.rand_like(leaf))
            outs = call(*leaves[:i], dual, *leaves[i + 1 :])
            tangents = [forward_ad.unpack_dual(out).tangent for out in outs]
            assert any(tangent is not None and tangent.any() for tangent in tangents)


@pytest.mark.drawn(times=0, period=3)
@pytest.mark.parametrize("name", OPERATIONS)
def test_jvp_compiled(kernel, device, name):
    function, arguments = small_call(kernel, device, name)
    call, leaves = of_differentiable(function, arguments)
    tangents = tuple(torch.randn_like(leaf) for leaf in leaves)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *given: jvp(call, given, tangents), fullgraph=True, backend="eager"
    )
    outs, expected = compiled(*leaves), jvp(call, tuple(leaves), tangents)
    for out, reference in zip(tensors_of(outs), tensors_of(expected), strict=True):
        assert_derivative(out, reference.double(), widest_dtype(name))


def one_row(kernel, name, device):
    """A function of one tensor, and that tensor, small enough for all second derivatives."""
    if name.startswith("attention"):
        x = torch.randn(1, 2, 1, 64, device=device).bfloat16()
        return lambda q: getattr(kernel, name)(q, x, x.sin()), torch.randn_like(x)
    # The norm of one element is its sign.
    shape = (1, 12, 1) if name == "channel_rms_norm" else (1, 1, 12)
    options = {"dtype": torch.float32, "device": device, "shape": shape, "heads": 1}
    function, arguments = sample(kernel, name, **options)
    key = next(iter(arguments))
    return lambda value: as_tuple(function(**{**arguments, key: value}))[0], arguments[key]


@pytest.mark.parametrize("name", OPERATIONS)
def test_jacobians_and_hessian(kernel, device, name):
    function, x = one_row(kernel, name, device)
    rtol, atol = (0.02, 0.02) if name.startswith("attention") else (1e-4, 1e-5)
    tolerances = {"rtol": rtol, "atol": atol}
    forward = jacfwd(function)(x)
    assert forward.any()
    torch.testing.assert_close(forward, jacrev(function)(x), **tolerances)

    def loss(value):
        return function(value).float().square().sum()

    torch.testing.assert_close(hessian(loss)(x), jacrev(jacfwd(loss))(x), **tolerances)


# --------------------------------------------------------------------------------------------------
# Transforms of torch.func

SAMPLES = 3


def varied(tensor, dim):
    """Different samples along `dim`."""
    if tensor.dtype == torch.int32:
        return torch.stack([tensor - i for i in range(SAMPLES)], dim)
    return torch.stack([tensor * (1 + i / 4) for i in range(SAMPLES)], dim)


# Choices of the tensors that have samples.
BATCHED = ("all", "first", "last", "all_but_first", "even")


@pairwise(name=CALLS, batched=BATCHED, dim=[0, 1, -1])
def test_vmap(kernel, device, name, batched, dim):
    function, arguments = small_call(kernel, device, name)
    call, tensors = of_tensors(function, arguments)
    in_dims = [
        (dim if dim >= 0 else tensor.dim()) if CHOICES[batched](i, len(tensors)) else None
        for i, tensor in enumerate(tensors)
    ]
    several = [t if d is None else varied(t, d) for t, d in zip(tensors, in_dims, strict=True)]
    outs = vmap(call, in_dims=tuple(in_dims))(*several)
    for i in range(SAMPLES):
        pairs = zip(several, in_dims, strict=True)
        one = [t if d is None else t.select(d, i).contiguous() for t, d in pairs]
        for out, expected in zip(as_tuple(outs), as_tuple(call(*one)), strict=True):
            tolerance = 0.02 if out.dtype == torch.bfloat16 else 2e-5
            if name.startswith("attention_int8"):  # of which vmap computes the unrounded formula
                tolerance = 0.2
            torch.testing.assert_close(out[i], expected, rtol=tolerance, atol=tolerance)


SEEN_ONLY_INSIDE = {
    # Each hides w's derivative from the operation in a different way.
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
