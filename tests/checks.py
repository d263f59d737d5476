"""Checks of results: accuracy, new memory or in place as requested, unchanged inputs."""

import math
import sys
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from processes import compute_as_other_threads, one_thread

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reference"))
import eager
import references
from accuracy import ACCURACY_CONTRACT, relative_distance

__all__ = ["compute_as_other_threads", "one_thread"]
# With fewer elements the ratio of L2 errors is noise, because a few large errors dominate. They are only
# checked against the elementwise bound.
CONTRACT_ELEMENTS = 32768
# The error of float32 arithmetic before the one rounding at the output, for values of order 1.
FLOAT32_ARITHMETIC = 4e-6


def arithmetic_slack(name, dtype):
    """The error that an operation's arithmetic may have before its output is rounded.

    Attention also rounds its softmax probabilities to its dtype, before the product with values of order 1.
    In 8 bits it rounds all operands.
    """
    if name.startswith("attention_int8"):
        return 0.25
    return torch.finfo(dtype).eps if name.startswith("attention") else FLOAT32_ARITHMETIC


def poison_memory(*tensors):
    """Fills free memory of the tensors' sizes with NaN, to reveal elements that are never written.

    Otherwise that memory may hold the right result, for example of the eager expression.
    """
    noise = [torch.full_like(tensor, math.nan) for tensor in tensors for _ in range(8)]
    del noise


def tensors_of(*values):
    """All tensors among the arguments, including those in tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_of(*value)
        elif isinstance(value, dict):
            yield from tensors_of(*value.values())


class Observer(TorchDispatchMode):
    """A mode that only observes. Injected models run on the kernels within it, unlike within other modes."""

    def __enter__(self):
        from conftest import load_kernel

        load_kernel().injection.core.checks.TRANSPARENT_MODES.add(type(self))
        return super().__enter__()


def operators_of(function, *args):
    """The names of PyTorch's and the package's operators that a call without gradients runs."""
    return [name for name, _ in operator_calls(function, *args)]


def operator_calls(function, *args):
    """The same with the positional arguments of each."""

    class Calls(Observer):
        def __init__(self):
            super().__init__()
            self.calls = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls.append((func._schema.name.partition("::")[2], args))
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Calls() as seen:
        function(*args)
    return seen.calls


def map_tensors(function, value):
    """The same arguments with `function` applied to every tensor."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [map_tensors(function, item) for item in value]
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    return value


def of_tensors(function, arguments, which=lambda tensor: True):
    """The call as a function of its tensor arguments, including those in tuples; and these tensors."""

    def call(*tensors):
        given = iter(tensors)
        return function(**map_tensors(lambda t: next(given) if which(t) else t, arguments))

    return call, list(filter(which, tensors_of(arguments)))


def outcome(function, arguments):
    """The type and text of a call's error, or the fact that it returns."""
    try:
        function(**arguments)
    except Exception as error:
        return type(error), str(error)
    return "returned", ""


def compiled_outcome(function, arguments):
    """The same for a call traced by Dynamo."""
    torch._dynamo.reset()
    return outcome(torch.compile(function, backend="eager"), arguments)


def clone_storage(tensor):
    """A copy of the whole storage, with the same strides."""
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    storage = tensor.untyped_storage().clone()
    return copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def bits(*results):
    return [tensor.contiguous().view(torch.uint8) for tensor in tensors_of(*results)]


def assert_same_bits(one, other):
    one, other = bits(one), bits(other)
    assert len(one) == len(other) > 0
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _bytes(storage):
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class MemorySnapshot:
    """Copies of the whole storages of tensors."""

    def __init__(self, tensors):
        self._copies = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._copies:
                self._copies[storage.data_ptr()] = (storage, storage.clone())

    def allow(self, tensor):
        """Accept the tensor's current values."""
        _, copy = self._copies[tensor.untyped_storage().data_ptr()]
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        view.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())
        view.copy_(tensor)

    def assert_unchanged(self):
        for storage, copy in self._copies.values():
            assert torch.equal(_bytes(storage), _bytes(copy)), "memory was changed"


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def have_same_bits(a, b):
    """Whether two tensors of the same dtype are equal, including NaN and the sign of zero."""
    if not a.is_floating_point() or a.element_size() not in _INTEGERS:
        return torch.equal(a, b)
    kind = _INTEGERS[a.element_size()]
    return torch.equal(a.detach().contiguous().view(kind), b.detach().contiguous().view(kind))


def assert_rounded_once(out, reference, slack=FLOAT32_ARITHMETIC):
    """Every element is the reference up to one rounding to its dtype and `slack`: the arithmetic's error for
    values of order 1, or a tensor of errors."""
    half_ulp = 0.0 if out.dtype == torch.float32 else torch.finfo(out.dtype).eps / 2
    if isinstance(slack, torch.Tensor):
        excess = (out.double() - reference).abs() - slack - half_ulp * reference.abs()
        assert (excess <= 0).all(), f"an element is {excess.max():.3g} beyond its bound"
        return
    torch.testing.assert_close(
        out.double(), reference, rtol=half_ulp + slack, atol=slack, equal_nan=True
    )


def assert_contract(out, reference, eager_out):
    """The relative L2 error is at most 1.05 times the eager expression's."""
    if not reference.any():
        assert not out.any()
        return
    error, eager_error = relative_distance(out, reference), relative_distance(eager_out, reference)
    limit = ACCURACY_CONTRACT * eager_error if eager_error else torch.finfo(torch.float32).eps
    assert error <= limit, (
        f"relative L2 error {error:.4g}, of the eager expression {eager_error:.4g}"
    )


def as_tuple(result):
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def check(
    kernel, name, *args, slack=FLOAT32_ARITHMETIC, contract=True, is_channels_last=False, **kwargs
):
    """Run an operation and check its contracts. Reference and eager expression are found by name.

    `contract=False` omits the comparison of errors, for inputs with too few rows. The result must be
    contiguous or channels last. With several results, `slack` may be a tuple.
    """
    given_out = kwargs.pop("out", None)
    with one_thread():
        expected = as_tuple(getattr(references, name)(*args, **kwargs))
        eager_outs = as_tuple(getattr(eager, name)(*args, **kwargs))
    if given_out is not None:
        kwargs["out"] = given_out
    inputs = list(tensors_of(args, kwargs))
    memory = MemorySnapshot(inputs)
    poison_memory(*eager_outs)
    result = getattr(kernel, name)(*args, **kwargs)
    outs = as_tuple(result)
    assert len(outs) == len(expected)
    if kwargs.get("inplace"):
        for out, written in zip(outs, inputs[: len(outs)], strict=True):
            assert out.data_ptr() == written.data_ptr() and out.stride() == written.stride()
            memory.allow(written)
    elif given_out is not None:
        for out, written in zip(outs, as_tuple(given_out), strict=True):
            assert out is written
            memory.allow(written)
    else:
        storages = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        for out in outs:
            assert (out.movedim(1, -1) if is_channels_last else out).is_contiguous()
            assert out.numel() == 0 or out.untyped_storage().data_ptr() not in storages
    memory.assert_unchanged()
    with one_thread():
        slacks = slack if isinstance(slack, tuple) else (slack,) * len(outs)
        for out, reference, eager_out, one in zip(outs, expected, eager_outs, slacks, strict=True):
            assert out.shape == reference.shape
            assert (out.dtype, out.device) == (eager_out.dtype, eager_out.device)
            assert_rounded_once(out, reference, one)
            if contract and out.numel() >= CONTRACT_ELEMENTS:
                assert_contract(out, reference, eager_out)
    return result


def check_nonfinite(kernel, name, *args, slack=FLOAT32_ARITHMETIC, **kwargs):
    """NaN and infinities are at the same places as in the eager expression, and the rest is accurate.

    The expression is evaluated in float64 on the CPU, because PyTorch has bugs: on some processors its
    float32 erf returns NaN for infinity at some positions in a tensor, and its fused RMS norm on a GPU
    returns NaN for a whole row with an infinity, where the formula has zeros.
    """
    rope = kwargs.get("rope")
    outs = as_tuple(getattr(kernel, name)(*args, **kwargs))
    expected = as_tuple(getattr(references, name)(*args, **kwargs))
    args, kwargs = map_tensors(lambda tensor: tensor.double().cpu(), (args, kwargs))
    if hasattr(rope, "frequencies"):
        # The product of coordinates and frequencies is computed in float32.
        kwargs["rope"] = type(rope)(*(tensor.cpu() for tensor in rope))
    eager_outs = as_tuple(getattr(eager, name)(*args, **kwargs))
    for out, reference, eager_out in zip(outs, expected, eager_outs, strict=True):
        assert not eager_out.isfinite().all(), "the case has no NaN or infinity"
        for kind in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(kind(out.cpu()), kind(eager_out))
        finite = out.isfinite()
        assert_rounded_once(out[finite], reference[finite], slack)
