"""Calls of the registered operators: kernels, derivatives and one-sentence errors.

A formula is an operator as a differentiable PyTorch expression, with the operator's arguments. It computes
in ``T``, with float32 inside each PyTorch function, or in float32 if any argument is float32.

The operators' C++ checks values and shapes on every path. Python checks argument types after a call has
failed, except for scalars, which Torch would convert silently.
"""

from __future__ import annotations

import numbers
import re
from typing import Any, Callable, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from .._ops import ops

PLAIN_TYPES = frozenset({Tensor, nn.Parameter})
MAX_INTEGER = 2**63 - 1  # of a schema
APPROXIMATIONS = {"none": False, "tanh": True}  # of GELU
MAX_UPS = 4  # of a layer
SEQUENCE_TYPES = frozenset({tuple, list})
OUT_GIVEN = ("out", "None", "a tensor")  # ``refused`` of a `plain_call`

_ERRORS = (AttributeError, IndexError, OverflowError, RuntimeError, TypeError, ValueError)
_NO_MEMORY = re.compile(r"(\w+): cannot allocate (\d+) elements of (\d) bytes on (\S+)")
_DIFFERENTIATED = "if an input requires grad, carries a tangent or is in a transform of torch.func"
_DIFFERENTIABLE = "require grad, carry a tangent or be in a transform of torch.func"
_SEQUENCES = {"weight": "weights", "weight_scale": "weight_scales", "bias": "biases"}
_SEQUENCES |= {"low": "lows", "up": "ups", "out": "out"}
_PUBLIC_NAMES = {
    **dict.fromkeys(("first", "second"), "rope"),
    **dict.fromkeys(("k_first", "k_second"), "k_rope"),
    **{f"{name}_row": name for name in ("scale", "shift", "gate")},
    **{f"{one}_{i}": f"{many}[{i}]" for one, many in _SEQUENCES.items() for i in range(3)},
    "down": "downs[0]",
    "more_downs": "downs",
    "more_up": "up",
    "more_ups": "ups",
}

_are_transforms_active = torch._C._are_functorch_transforms_active
_is_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_dynamo_compiling


# --------------------------------------------------------------------------------------------------
# Types of arguments


def fail(operation: str, sentence: str) -> NoReturn:
    raise ValueError(f"{operation}: {sentence}")


def refuse_type(operation: str, name: str, accepted: str, value: object) -> NoReturn:
    raise TypeError(f"{operation}: {name} must be {accepted}, got {shown(value)}")


def shown(value: object) -> str:
    """A value as text for an error: short plain values by ``repr``, others by their type."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str) and len(value) > 64:
        return f"a string of {len(value)} characters"
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    # Tracing uses its own tensor classes.
    return (
        "Tensor" if isinstance(value, Tensor) and is_plain_tensor(value) else type(value).__name__
    )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).replace("torch.", "")


def number(operation: str, name: str, value: Any, accepted: str = "a number") -> Any:
    if type(value) is float or isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        refuse_type(operation, name, accepted, value)
    try:
        return float(value)
    except OverflowError:
        fail(operation, f"{name} must be within float64, got {shown(value)}")


def count(operation: str, name: str, value: Any, accepted: str = "an integer") -> Any:
    if isinstance(value, torch.SymInt):
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        refuse_type(operation, name, accepted, value)
    value = int(value)
    if value < 1:
        fail(operation, f"{name} must be at least 1, got {shown(value)}")
    if value > MAX_INTEGER:
        fail(operation, f"{name} must be at most {MAX_INTEGER}, got {shown(value)}")
    return value


def choice(operation: str, name: str, value: Any, choices: dict[str, Any]) -> Any:
    """The operator's value for a string option."""
    if not isinstance(value, str):
        refuse_type(operation, name, "a string", value)
    if value not in choices:
        *others, last = map(repr, choices)
        fail(operation, f"{name} must be {', '.join(others)} or {last}, got {shown(value)}")
    return choices[value]


def out_tensors(operation: str, out: Any, names: str, size: int, condition: str = "") -> tuple:
    """The tensors of ``out``. ``names`` and ``condition`` are for errors: its accepted forms, and when it has
    ``size`` tensors."""
    types = {*map(type, out)} if isinstance(out, (tuple, list)) else {type(None)}
    if types != {Tensor} and not all(issubclass(each, Tensor) for each in types):
        refuse_type(operation, "out", f"a tuple {names} of tensors or None", out)
    if len(out) != size:
        fail(operation, f"out must hold {size} tensors{condition}, got {len(out)}")
    return tuple(out)


def layers_of(
    operation: str, required: dict[str, Any], optional: dict[str, Any], minimum: int
) -> tuple[list[Any], list[Tensor] | None]:
    """The tensors of each layer, in the order of the sequences, which are given by name, and None for those
    of absent layers up to three. Those of ``optional`` may be None or have Nones. The first sequence sets the
    number of layers, from ``minimum`` to 3. Also the ups of all layers beyond each one's first, or None."""
    ups, more = optional["ups"], None
    if type(ups) in SEQUENCE_TYPES and not SEQUENCE_TYPES.isdisjoint(map(type, ups)):
        firsts, more = _first_ups(operation, ups)
        optional = {**optional, "ups": firsts}
    columns = [*required.values(), *optional.values()]
    size = len(columns[0]) if type(columns[0]) in SEQUENCE_TYPES else 0
    is_right = minimum <= size <= 3
    for i, tensors in enumerate(columns):
        if tensors is None and i >= len(required):
            columns[i] = (None,) * size
        elif (
            type(tensors) not in SEQUENCE_TYPES
            or len(tensors) != size
            or (i < len(required) and not PLAIN_TYPES.issuperset(map(type, tensors)))
        ):
            is_right = False
    if not is_right:
        _explain_layers(operation, required, optional, minimum)
    layers: list[Any] = []
    for layer in zip(*columns):
        layers += layer
    return layers + [None] * (len(columns) * 3 - len(layers)), more


def first_up(operation: str, name: str, up: Any) -> tuple[Tensor, list[Tensor]]:
    """The first of a layer's ups, and the others."""
    if not 1 <= len(up) <= MAX_UPS:
        fail(operation, f"{name} must hold 1 to {MAX_UPS} tensors, got {len(up)}")
    for i, each in enumerate(up):
        if not isinstance(each, Tensor):
            refuse_type(operation, f"{name}[{i}]", "a tensor", each)
    return up[0], list(up[1:])


def _first_ups(operation: str, ups: Any) -> tuple[list[Any], list[Tensor]]:
    """The first up of each layer, and the others of all layers."""
    firsts: list[Any] = []
    more: list[Tensor] = []
    for i, up in enumerate(ups):
        others: list[Tensor] = []
        if type(up) in SEQUENCE_TYPES:
            up, others = first_up(operation, f"ups[{i}]", up)
        firsts.append(up)
        more += others
    return firsts, more


def _explain_layers(
    operation: str, required: dict[str, Any], optional: dict[str, Any], minimum: int
) -> None:
    """Raises what ``layers_of`` has to say, if that is not left to the operator."""
    first, leaders = next(iter(required.items()))
    for name, tensors in {**required, **optional}.items():
        if tensors is None and name in optional:
            continue
        if not isinstance(tensors, (tuple, list)):
            accepted = "a tuple or list" if name in required else "a tuple, a list or None"
            refuse_type(operation, name, accepted, tensors)
        if not minimum <= len(leaders) <= 3:
            accepted = "2 or 3" if minimum == 2 else "1 to 3"
            fail(operation, f"{first} must hold {accepted} tensors, got {len(leaders)}")
        if len(tensors) != len(leaders):
            fail(operation, f"{name} must hold {len(leaders)} tensors, got {len(tensors)}")
        if name in required:
            # The operator takes None for a layer that is absent.
            for i in range(minimum, len(tensors)):
                if not isinstance(tensors[i], Tensor):
                    refuse_type(operation, f"{name}[{i}]", "a tensor", tensors[i])


def is_plain_tensor(tensor: Tensor | None) -> bool:
    """Whether a tensor is None, plain, or stands for a plain one while torch.compile traces."""
    cls = type(tensor)
    return tensor is None or cls in PLAIN_TYPES or cls.__module__.startswith("torch._subclasses.")


def required(*tensors: Tensor | None) -> None:
    """Raises if a tensor is None, for fakes: Torch passes None for any tensor, and tracing would not fail."""
    if any(tensor is None for tensor in tensors):
        raise TypeError("a tensor is None")


def _parameters(schema: Any) -> list[tuple[str, bool, bool]]:
    """For each argument: its name in the public function, whether it is a tensor, whether it may be None."""
    kinds = [(a.name, str(a.type)) for a in schema.arguments]
    optional = [kind.startswith("Optional") or name == "out" for name, kind in kinds]
    return [
        (_PUBLIC_NAMES.get(n, n), "Tensor" in k and "List" not in k, o)
        for (n, k), o in zip(kinds, optional)
    ]


def _check_tensors(operation: str, parameters: list, arguments: tuple) -> None:
    """Raises if a tensor argument is not a strided tensor."""
    for (name, is_tensor, is_optional), value in zip(parameters, arguments):
        if not isinstance(value, Tensor):
            if is_tensor and not (is_optional and value is None):
                accepted = "a tensor or None" if is_optional else "a tensor"
                refuse_type(operation, name, accepted, value)
            continue
        if value.is_nested:
            given = "a nested one"
        elif value.layout is not torch.strided:
            given = f"one of layout {str(value.layout).replace('torch.', '')}"
        elif value.is_quantized:
            given = f"a quantized one of {dtype_name(value.dtype)}"
        else:
            continue
        fail(operation, f"{name} must be a strided tensor, got {given}")


def _explain(operation: str, parameters: list, arguments: tuple, error: Exception) -> NoReturn:
    """Raises a one-sentence error for a failed call, or the original error. Called while it is handled."""
    _check_tensors(operation, parameters, arguments)
    no_memory = _NO_MEMORY.match(str(error))
    if no_memory:
        name, elements, size, device = no_memory.groups()
        cause, byte_count = error, int(elements) * int(size)
        try:  # Again, for Torch's own error, which its C interface loses.
            torch.empty(byte_count, dtype=torch.uint8, device=device)
        except RuntimeError as again:
            cause = again
        message = f"{name}: cannot allocate {byte_count} bytes on {device}"
        raise torch.OutOfMemoryError(message) from cause
    if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
        # Raised by other libraries' tensor classes for unknown operators.
        for (name, *_), value in zip(parameters, arguments):
            if isinstance(value, Tensor) and not is_plain_tensor(value):
                refuse_type(operation, name, "a plain tensor", value)
    raise error


# --------------------------------------------------------------------------------------------------
# Derivatives


def promoted(*tensors: Tensor | None) -> tuple:
    """A formula's tensors in a common dtype: float32 if their dtypes differ."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    if len(dtypes) == 1:
        return tensors
    return tuple(tensor if tensor is None else tensor.float() for tensor in tensors)


class _Differentiable(torch.autograd.Function):
    """Forward runs the kernel, backward differentiates the formula."""

    @staticmethod
    def forward(ctx, kernel: Callable, formula: Callable, *arguments):
        ctx.formula = formula
        ctx.arguments = [None if isinstance(a, Tensor) else a for a in arguments]
        ctx.positions = [i for i, a in enumerate(arguments) if isinstance(a, Tensor)]
        ctx.save_for_backward(*[arguments[i] for i in ctx.positions])
        ctx.set_materialize_grads(False)
        return kernel(*arguments)

    @staticmethod
    def backward(ctx, *gradients):
        creates_graph = torch.is_grad_enabled()
        arguments, needed = list(ctx.arguments), []
        with torch.enable_grad():
            for i, tensor in zip(ctx.positions, ctx.saved_tensors):
                if ctx.needs_input_grad[2 + i]:
                    needed.append(i)
                    tensor = tensor.view_as(tensor) if creates_graph else tensor.detach()
                    tensor.requires_grad_()
                arguments[i] = tensor
            results = ctx.formula(*arguments)
            results = results if isinstance(results, tuple) else (results,)
            # A result need not depend on an input that requires grad.
            used = [(r, g) for r, g in zip(results, gradients) if g is not None and r.requires_grad]
            tensors = [r for r, _ in used], [arguments[i] for i in needed], [g for _, g in used]
            inputs = torch.autograd.grad(*tensors, create_graph=creates_graph, allow_unused=True)
        found = dict(zip(needed, inputs))
        return None, None, *(found.get(i) for i in range(len(arguments)))


# torch.autograd.Function.apply only adds support for transforms of torch.func.
_differentiable = super(torch.autograd.Function, _Differentiable).apply


def _requires_grad(arguments: tuple) -> bool:
    for argument in arguments:
        if isinstance(argument, Tensor):
            if argument.requires_grad:
                return True
        elif type(argument) in SEQUENCE_TYPES and _requires_grad(argument):
            return True
    return False


def is_differentiated(*arguments: Any) -> bool:
    """Whether a tensor argument may be differentiated: grad mode is on and one requires grad, or forward mode
    or a transform of ``torch.func`` is active."""
    return (
        forward_ad._current_level >= 0
        or _are_transforms_active()
        or (_is_grad_enabled() and _requires_grad(arguments))
    )


# --------------------------------------------------------------------------------------------------
# Calls


def kernel_call(
    operation: str, formula: Callable, name: str | None = None, forward: Callable | None = None
) -> Callable:
    """The function that calls an operator for the public function ``operation``, by default of the same name.

    ``forward`` replaces the call if the operator writes; it takes no written arguments.
    """
    overload = getattr(ops, name or operation).default
    parameters = _parameters(overload._schema)
    kernel = forward or overload
    # The overload's own __call__ is a Python frame around this, which Dynamo cannot trace.
    untraced = forward or overload._op

    # Dynamo cannot trace torch.autograd.grad, AOTAutograd can.
    @torch.compiler.allow_in_graph
    def differentiable(*arguments):
        return _Differentiable.apply(kernel, formula, *arguments)

    def call(*arguments):
        try:
            is_traced = _is_compiling()
            if is_traced:
                _check_tensors(operation, parameters, arguments)
            if forward_ad._current_level >= 0 or _are_transforms_active():
                if not (is_traced or _are_transforms_active()):
                    kernel(*arguments)  # its checks
                return formula(*arguments)
            if _is_grad_enabled() and _requires_grad(arguments):
                if is_traced:
                    return differentiable(*arguments)
                return _differentiable(untraced, formula, *arguments)
            return kernel(*arguments) if is_traced else untraced(*arguments)
        except _ERRORS as error:
            _explain(operation, parameters, arguments, error)

    call.__name__ = operation
    return call


def plain_call(operation: str, name: str | None = None) -> Callable:
    """The function that calls an operator without derivatives. It raises if an input may be differentiated.

    The function takes the operator's arguments and two named ones. ``written`` holds the tensors that the
    operator writes, and is returned. ``refused`` is for operations that have derivatives unless they write:
    the argument that requests writing, its accepted value and the given value, for the error.
    """
    overload = getattr(ops, name or operation).default
    parameters = _parameters(overload._schema)
    untraced = overload._op

    def call(*arguments, written: Any = None, refused: tuple[str, str, str] | None = None):
        # Before the try block, whose errors Dynamo of Torch 2.11 cannot trace.
        if (  # ``is_differentiated``, inlined
            forward_ad._current_level >= 0
            or _are_transforms_active()
            or (_is_grad_enabled() and _requires_grad(arguments))
        ):
            _refuse_derivatives(operation, parameters, arguments, refused)
        try:
            if _is_compiling():
                _check_tensors(operation, parameters, arguments)
                results = overload(*arguments)
            else:
                results = untraced(*arguments)
                # Autograd then detects a backward that needs the overwritten values.
                if written is not None:
                    torch.autograd.graph.increment_version(written)
            return results if written is None else written
        except _ERRORS as error:
            _explain(operation, parameters, arguments, error)

    call.__name__ = operation
    return call


def _refuse_derivatives(
    operation: str, parameters: list, arguments: tuple, refused: tuple[str, str, str] | None
) -> NoReturn:
    _check_tensors(operation, parameters, arguments)
    if refused is None:
        # The first tensor that requires grad, otherwise the first argument: a transform may be of any.
        names = [p[0] for p, v in zip(parameters, arguments) if _requires_grad((v,))]
        argument = names[0] if names else parameters[0][0]
        fail(operation, f"{argument} must not {_DIFFERENTIABLE}, got a tensor that may")
    argument, accepted, given = refused
    fail(operation, f"{argument} must be {accepted} {_DIFFERENTIATED}, got {given}")
