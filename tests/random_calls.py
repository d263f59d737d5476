"""Random wrong calls of the operations: each must raise one sentence, the same on every path.

A seed gives a valid call with one to three changes. If it raises, the error must be a ValueError or
TypeError, in one sentence that names the operation and an argument, and memory must be unchanged. The same
call must raise the same with an input that requires grad, in a graph traced with fake tensors, and, for every
hundredth call, under torch.compile.
"""

import math
import random
import re
import warnings
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from checks import MemorySnapshot, compiled_outcome, of_tensors, outcome, tensors_of
from inputs import (
    CALLS,
    DTYPES,
    GRID_AXES,
    LAYOUTS,
    TABLE,
    WITH_OUT,
    WRITABLE_LAYOUTS,
    load_kernel,
    narrowed,
    out_for,
    parameters_of,
    sample,
)

OTHER_DTYPES = [
    *(torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
# Some of these values are valid for some arguments.
VALUES = [
    *(None, True, False, 0, 1, -1, 2, 3, 64, 2.5, 1e-6, -0.0, 1e300, 1e-50, 1j),
    *(math.nan, math.inf, -math.inf, 2**31, 2**63, -(2**63) - 1, 10**400),
    *("", "none", "tanh", "half", "interleaved", "per_head", "erf", "\ud800", "a\0b", "a\nb"),
    *("x" * 10**5, b"none", (), [], {}, [0.1], (None, None), object(), torch.float32, int),
    *(np.float32(0.5), np.int64(2), np.zeros((2, 3)), slice(None), Ellipsis, print),
]


# --------------------------------------------------------------------------------------------------
# Mistakes


def of_dimensions(change):
    """The change of a tensor with dimensions. One without gets a dimension."""
    return lambda tensor, rng: change(tensor, rng) if tensor.dim() else tensor[None]


def longer(tensor, rng):
    if tensor.numel() == 0:
        return tensor[None]
    dim = rng.randrange(tensor.dim())
    return torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim)


def shorter(tensor, rng):
    dim = rng.randrange(tensor.dim())
    return tensor.narrow(dim, 0, max(tensor.shape[dim] - 1, 0))


def another_shape(tensor, rng):
    shape = [rng.choice((0, 1, 2, 3, 16, 64)) for _ in range(rng.randrange(6))]
    return torch.ones(shape, dtype=tensor.dtype, device=tensor.device)


def another_layout(tensor, rng):
    make = rng.choice(
        [
            torch.Tensor.to_sparse,
            torch.Tensor.to_sparse_csr,
            lambda t: t.cpu().float().to_mkldnn(),
            lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.quint8),
            lambda t: torch.nested.nested_tensor([t.flatten(), t.flatten()[:1]]),
            lambda t: torch.nested.nested_tensor([t.flatten(), t.flatten()], layout=torch.jagged),
            lambda t: t.to(torch.complex64).conj(),
        ]
    )
    try:
        return make(tensor)
    except (IndexError, RuntimeError):  # not every layout exists for every tensor
        return tensor.double()


def without_memory(tensor, rng):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(rng.choice((0, 1, 2)))
    return tensor


def no_tensor(tensor, rng):
    return rng.choice([*VALUES, tensor.tolist() if tensor.numel() < 100 else "x"])


CHANGES = {
    "strided": of_dimensions(lambda t, rng: t.repeat_interleave(2, dim=-1)[..., ::2]),
    "longer": of_dimensions(longer),
    "shorter": of_dimensions(shorter),
    "another_shape": another_shape,
    "flat": lambda t, rng: t.flatten(),
    "more_dimensions": lambda t, rng: t[(None,) * rng.choice((1, 2, 61, 62, 63, 64, 70))],
    "transposed": lambda t, rng: t.mT if t.dim() >= 2 else t[None],
    "expanded": lambda t, rng: t[:1].expand_as(t) if t.dim() else t.expand(2),
    "another_dtype": lambda t, rng: t.to(rng.choice([*OTHER_DTYPES, *DTYPES])),
    "another_layout": another_layout,
    # On a CPU the only other device is meta, which has only shapes.
    "another_device": lambda t, rng: t.cpu() if t.is_cuda else t.double(),
    "without_memory": without_memory,
    "no_tensor": no_tensor,
}
# A fake tensor shows none of these changes.
NOT_TRACED = ("another_layout", "another_device", "without_memory", "more_dimensions")
DYNAMO_EVERY = 100


@dataclass
class Call:
    """A call and its mistakes."""

    seed: int
    function: object
    arguments: dict
    changes: list = field(default_factory=list)

    @property
    def name(self):
        return self.function.__name__


def _is_plain(tensor):
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    if not is_strided or tensor.is_quantized or tensor.is_meta:
        return False
    is_whole = tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 2
    return is_whole and not tensor.is_neg() and not tensor.is_conj()


def _change(call, rng):
    name = rng.choice(list(call.arguments))
    value = call.arguments[name]
    if not all(map(_is_plain, tensors_of(value))):
        return  # no further change applies
    if isinstance(value, torch.Tensor):
        change = rng.choice(list(CHANGES))
        call.arguments[name] = CHANGES[change](value, rng)
        call.changes.append((name, change))
    elif isinstance(value, tuple) and value and rng.random() < 0.8:
        change, index = rng.choice(list(CHANGES)), rng.randrange(len(value))
        if isinstance(value[index], torch.Tensor):
            items = list(value)
            items[index] = CHANGES[change](items[index], rng)
            call.arguments[name] = value._make(items) if hasattr(value, "_make") else tuple(items)
            call.changes.append((f"{name}[{index}]", change))
    else:
        call.arguments[name] = rng.choice(VALUES)
        call.changes.append((name, call.arguments[name]))


def _change_names(call, rng):
    """Adds an argument, or omits one."""
    if rng.random() < 0.5:
        call.arguments[rng.choice(("foo", "y", "weights", "dim", "out"))] = rng.choice(VALUES[:20])
        call.changes.append(("names", "one more"))
    else:
        call.arguments.pop(rng.choice(list(call.arguments)))
        call.changes.append(("names", "one less"))


def random_call(seed, device):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kernel = load_kernel()
    operation = rng.choice(CALLS)
    function, arguments = sample(
        kernel,
        operation,
        dtype=narrowed(rng.choice(DTYPES), operation),
        device=device,
        shape=(2, 3, 64),
        heads=2,
        layout=rng.choice(list(LAYOUTS)),
    )
    for name, parameter in parameters_of(function.__name__).items():
        is_tensor = any(kind in parameter.annotation for kind in ("Tensor", "Modulator"))
        if not is_tensor and name not in arguments and rng.random() < 0.5:
            arguments[name] = parameter.default
    if operation in WITH_OUT and rng.random() < 0.5:
        arguments["out"] = None
        arguments["out"] = out_for(function, arguments, rng.choice(WRITABLE_LAYOUTS))
    call = Call(seed, function, arguments)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _change(call, rng)
    if rng.random() < 0.05:
        _change_names(call, rng)
    return call


# --------------------------------------------------------------------------------------------------
# Checks


def sentence(name):
    """One line with the operation, an argument, accepted and given values; or Python's error for names."""
    names = set(parameters_of(name))
    if name == "qk_norm_rope":
        fields = {"cos", "sin", "coordinates", "frequencies"}
        names |= fields | {f"k_{field}" for field in fields} | {"q_out", "k_out", "v_out"}
    if name == "attention":
        names |= set(load_kernel().KeyBlocks._fields)
    if name == "rope_3d":
        names |= {f"{axis}_{field}" for axis in GRID_AXES for field in ("cos", "sin")}
    argument = "|".join(sorted(names))
    return re.compile(
        rf"{name}: (?:{argument})\b[^\n]+, got [^\n]+"
        rf"|{name}\(\) (?:missing|got an unexpected)[^\n]* argument[^\n]*'\w+'[^\n]*"
    )


PATTERNS = {name: sentence(name) for name in TABLE}


def traced_outcome(function, arguments):
    """The outcome of running a call's graph, traced with fake tensors."""
    call, tensors = of_tensors(function, arguments)
    return outcome(lambda: make_fx(call, tracing_mode="fake")(*tensors)(*tensors), {})


def _leader(arguments):
    """A tensor that may require grad, or None."""
    plain = filter(_is_plain, tensors_of(arguments))
    return next((t for t in plain if t.is_floating_point() and t.is_leaf), None)


def fault(call):
    """The fault; None if the call is refused correctly, or "valid" if it raises nothing."""
    with torch.no_grad():
        memory = MemorySnapshot([t for t in tensors_of(call.arguments) if _is_plain(t)])
        kind, message = expected = outcome(call.function, call.arguments)
        if kind == "returned":
            return "valid"
        memory.assert_unchanged()
    if kind not in (ValueError, TypeError):
        return f"{kind.__name__}: {message}"
    if len(message) > 1200 or not PATTERNS[call.name].fullmatch(message):
        return f"not one sentence that names an argument: {message!r}"
    leader = _leader(call.arguments)
    writes = call.arguments.get("inplace") is True or call.arguments.get("out") is not None
    if leader is not None and not writes:
        leader.requires_grad_()
        other = outcome(call.function, call.arguments)
        leader.requires_grad_(False)
        if other != expected:
            return f"{message!r}, but if an input requires grad {other}"
    if not any(isinstance(c, str) and c in NOT_TRACED for _, c in call.changes):
        others = {"traced": traced_outcome}
        # Dynamo itself fails for integers beyond float64.
        is_huge = any(type(v) is int and v.bit_length() > 1000 for v in call.arguments.values())
        if call.seed % DYNAMO_EVERY == 0 and not is_huge:
            others["compiled"] = compiled_outcome
        for how, of_path in others.items():
            with torch.no_grad():
                other = of_path(call.function, call.arguments)
            if other != expected:
                return f"{message!r}, but {how} {other}"
    return None


def check_seed(seed, device):
    """("valid", "refused" or the fault, the changes)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = random_call(seed, device)
        try:
            found = fault(call)
        except AssertionError as error:
            found = str(error)
    return found or "refused", f"{call.name}: {call.changes}"
