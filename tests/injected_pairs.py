"""Pairs of an injected model and the same model without kernels, with the same changes."""

import collections
import copy
import sys

import torch
from torch.utils import _pytree as pytree

from changes import weighted_sum
from checks import relative_distance
from family import joined
from ltx_models import inputs, transformer
from small_models import run

# A size that attention's kernel accepts.
BFLOAT16 = {"dtype": torch.bfloat16, "heads": 2, "head_dim": 64}

# The relative distance between the two because of roundings in a model's dtype.
SLACK = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 0.006, torch.float64: 0}


def injected(kernel, plain, change=None, *, is_injected_first=True, **options):
    """(injected copy, the model or module itself, the injection's report).

    `change` is applied to both; `options` are those of `inject_kernels`.
    """
    model = copy.deepcopy(plain)
    if change is not None:
        change(plain)
        if not is_injected_first:
            change(model)
    report = kernel.inject_kernels(model, **options)
    if change is not None and is_injected_first:
        change(model)
    return model, plain, report


def pair(kernel, device, change=None, *, is_injected_first=True, attention=True, **options):
    """`injected` of an LTX-Video model; `options` are those of `ltx_models.transformer`."""
    plain = transformer(device, **options)
    return injected(kernel, plain, change, is_injected_first=is_injected_first, attention=attention)


def assert_alike(
    model, plain, arguments=None, *, unlike=None, forward=run, times=2, slack=None, changed=None
):
    """Both compute the same in each of several forwards, and differ from the output `unlike`.

    Args:
        arguments: arguments of `forward`; by default those of an LTX-Video model.
        slack: the maximum distance; by default the effect of the dtype's roundings.
        changed: the minimum distance from `unlike`; by default three times `slack`.
    """
    arguments = inputs(plain) if arguments is None else arguments
    for _ in range(times):
        expected, out = forward(plain, arguments), forward(model, arguments)
        assert (out.dtype, out.shape) == (expected.dtype, expected.shape)
        slack = SLACK[expected.dtype] if slack is None else slack
        if unlike is not None:
            effect = relative_distance(unlike.flatten(), expected.flatten())
            assert effect > (changed or 3 * slack), "the change has no effect"
        assert relative_distance(out, expected) <= slack


def outcome(module, *args, **kwargs):
    """The result of a call without gradients, or the first line of its error."""
    try:
        with torch.no_grad():
            return module(*args, **kwargs)
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]


def assert_same_outcome(model, plain, *args, slack=1e-5, **kwargs):
    """Both return the same or raise the same. Returns the plain model's outcome."""
    out, expected = outcome(model, *args, **kwargs), outcome(plain, *args, **kwargs)
    if isinstance(expected, str):
        assert out == expected
    else:
        torch.testing.assert_close(out, expected, rtol=slack, atol=slack)
    return expected


# The ratio of two relative errors of n elements has a standard deviation of at most 1.25 / sqrt(n), as
# measured for 16 samples of 100 models. Correct models whose errors are more correlated have lower ratios.
SPREAD = 1.25


def assert_as_close_as_eager(model, plain, make_arguments, samples=8, forward=run, dtype=None):
    """The distance from the float32 model is at most 1.05 times that of the eager model, `plain`.

    Three standard deviations are allowed for chance, so that the verdict does not depend on the processor.

    Args:
        make_arguments: `make_arguments(dtype, seed)` makes the same values in each dtype.
        dtype: by default that of the first parameter.

    Returns:
        The eager model's relative error.
    """
    exact = copy.deepcopy(plain).float()
    dtype = next(plain.parameters()).dtype if dtype is None else dtype
    squares, elements = torch.zeros(3, dtype=torch.float64), 0
    for seed in range(samples):
        arguments = make_arguments(dtype, seed)
        expected = forward(exact, as_float32(arguments, dtype)).double()
        elements += expected.numel()
        for i, candidate in enumerate((model, plain)):
            squares[i] += (forward(candidate, arguments) - expected).square().sum().cpu()
        squares[2] += expected.square().sum().cpu()
    error, eager_error, norm = squares.sqrt().tolist()
    assert eager_error > 0
    limit = 1.05 + 3 * SPREAD / elements**0.5
    assert error <= limit * eager_error, f"{error / eager_error:.3f} of the eager model's error"
    return eager_error / norm


def as_float32(arguments, dtype):
    """The arguments with all tensors of a dtype converted to float32."""
    if isinstance(arguments, torch.Tensor):
        return arguments.float() if arguments.dtype == dtype else arguments
    if isinstance(arguments, dict):
        return {name: as_float32(value, dtype) for name, value in arguments.items()}
    if isinstance(arguments, (list, tuple)):
        return type(arguments)(as_float32(value, dtype) for value in arguments)
    return arguments


def assert_gradients_agree(model, plain, arguments, slack=1e-4):
    """Gradients of all parameters, and of the arguments that require one.

    Arguments are given by name or as a tuple.
    """
    gradients = []
    for candidate in (model, plain):
        candidate.zero_grad()
        wanted = dict(candidate.named_parameters())
        if isinstance(arguments, dict):
            result = joined(candidate(**arguments, return_dict=False)[0])
        else:
            result = candidate(*arguments)
        given = pytree.tree_leaves(arguments)
        wanted |= {str(i): x for i, x in enumerate(given) if isinstance(x, torch.Tensor)}
        wanted = {name: x for name, x in wanted.items() if x.requires_grad}
        found = torch.autograd.grad(weighted_sum(result), list(wanted.values()), allow_unused=True)
        gradients.append(dict(zip(wanted, found, strict=True)))
    mine, expected = gradients
    expected = {name: gradient for name, gradient in expected.items() if gradient is not None}
    assert expected and {name for name in mine if mine[name] is not None} == expected.keys()
    # Some, such as those of key biases, are zero except for rounding errors.
    rounding = 0.01 * torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        assert (mine[name] - gradient).norm() <= slack * (gradient.norm() + rounding), name


def fallen_back(report):
    """The fallbacks of each module: reasons and counts."""
    return {entry.name: dict(entry.fell_back) for entry in report.calls if entry.fell_back}


def on_kernels(report):
    """The number of calls on the kernels by class."""
    counts = collections.Counter()
    for entry in report.calls:
        counts[entry.module] += entry.on_kernels
    return counts


def reasons_of(report):
    """The reason for each module that is left alone, by its name."""
    return {entry.name: entry.reason for entry in report.left_alone}


def group_norm_of_a_gpu(kernel, monkeypatch):
    """On a CPU, group norms return the memory formats of a GPU, where PyTorch's result is contiguous."""
    own = torch.group_norm
    monkeypatch.setattr(torch, "group_norm", lambda x, *args: own(x.contiguous(), *args))
    module = sys.modules[f"{kernel.__name__}.injection.parts.norm_modules"]
    monkeypatch.setattr(module, "PYTORCH_KEEPS_FORMAT", False)
