"""An operation from one function, whose body is its formula as a differentiable PyTorch expression.

``@operation(family)`` makes the public function of it, which calls the registered operator of the same name;
the operator's C++ checks every argument. Where an input requires grad or carries a tangent, the same checks
are made here and the formula is evaluated. What an argument must be is its annotation, one of those below.

The public function is written as text and compiled, as ``dataclasses`` does: the host's part of a call is as
long as a small kernel, and a general wrapper would add a tenth to it.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import re
import typing
from dataclasses import dataclass
from typing import Annotated, Any, Callable, Optional, Union

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import arguments, batching
from ._ops import add_op_namespace_prefix, ops
from .differentiation import is_differentiated

# --------------------------------------------------------------------------------------------------
# What an argument must be


@dataclass(frozen=True)
class Kind:
    """What an argument must be.

    Statements are text in which ``{operation}``, ``{name}`` and ``{leader}``, the first rows, are filled in;
    a name with an underscore in front is one of ``arguments``.

    Attributes:
        accepted: the type in words, for the TypeError.
        accepts: the test of the type.
        convert: statements that make a scalar what the operator takes.
        check: statements that check the value where the operator is not called.
        check_first: the same of the argument that is ``{leader}`` itself.
        fields: of a group of tensors, the names under which the operator takes them.
        prefix: of a group whose tensors have names themselves, what the operator puts before them.
        is_constant: nothing is differentiated with respect to it.
        is_output: it is written, by an operator of its own, ``<name>_out``, whose last argument it is.
        choices: of a string, all that there are.
    """

    accepted: str
    accepts: Callable[[object], bool] = arguments.is_tensor
    convert: str = ""
    check: str = ""
    check_first: str = ""
    fields: tuple[str, ...] = ()
    prefix: str = ""
    is_constant: bool = False
    is_output: bool = False
    choices: tuple[str, ...] = ()

    @property
    def is_tensor(self) -> bool:
        return self.accepts is arguments.is_tensor


def _choice(choices: str) -> Kind:
    check = f"_check_choice('{{operation}}', '{{name}}', {{name}}, _{choices})"
    convert = f"if {{name}} not in _{choices}:\n    {check}"
    values = getattr(arguments, choices)
    return Kind("a string", arguments.is_string, convert, check, choices=values)


_CHECK_INPUT = "_check_input('{operation}', '{name}', {name})"
ROWS = Kind(
    "a tensor",
    check="_check_shape('{operation}', '{name}', {name}, {leader}.shape, '{leader}', {leader})",
    check_first=_CHECK_INPUT,
)
GATED_ROWS = Kind(
    "a tensor", check_first=f"{_CHECK_INPUT}\n_check_gated('{{operation}}', '{{name}}', {{name}})"
)
MODULATION = Kind(
    "a tensor",
    check="_check_broadcastable('{operation}', '{name}', {name}, '{leader}', {leader})",
)
VECTOR = Kind(
    "a tensor",
    check="_check_vector('{operation}', '{name}', {name}, '{leader}', {leader})",
)
NORM_VECTOR = Kind(
    "a tensor",
    check="_check_norm_vector('{operation}', '{name}', {name}, '{leader}', {leader})",
)
TENSOR = Kind("a tensor")
CONSTANT = Kind("a tensor", is_constant=True)
OUT = Kind("a tensor", is_output=True)
NUMBER = Kind(
    "a number",
    arguments.is_number,
    "if type({name}) is not float:\n    {name} = _as_number('{operation}', '{name}', {name})",
)
SCALE = Kind(
    "a number",
    arguments.is_number,
    "{name} = _as_scale('{operation}', '{name}', {name})",
)
INTEGER = Kind("an integer", arguments.is_integer)
COUNT = Kind(
    "an integer",
    arguments.is_integer,
    "if type({name}) is not int or not 0 < {name} <= _MAX_INTEGER:\n"
    "    {name} = _as_count('{operation}', '{name}', {name})",
    check="_as_count('{operation}', '{name}', {name})",
)
FLAG = Kind("True or False", arguments.is_flag)
TABLES = Kind(
    "a pair (cos, sin) of tensors",
    arguments.is_pair,
    "if not isinstance({name}, tuple):\n    raise TypeError\n{name}_cos, {name}_sin = {name}",
    fields=("{name}_cos", "{name}_sin"),
)
_ROPE = "None, a pair (cos, sin), a complex tensor or a CoordinateRope"
ROPE = Kind(_ROPE, arguments.is_rope, fields=("cos", "sin"))
KEY_ROPE = Kind(_ROPE, arguments.is_rope, fields=("k_cos", "k_sin"), prefix="k_")
OUTPUT = Kind("a tensor", fields=("out",))
OUTPUTS = Kind(
    "a tuple (q_out, k_out) or (q_out, k_out, v_out) of tensors",
    arguments.is_outputs,
    fields=("q_out", "k_out", "v_out"),
)

# (..., D), of which the first ones lead and the others have their shape; the same with an even D; what
# broadcasts against them in all dimensions but the last, float32 or T; (D,); (D,), float32 or T; a pair
# (cos, sin) of one axis; what qk_norm_rope rotates by, its key, and where it writes; what is written in place
# of a new result; the rest.
Rows = Annotated[Tensor, ROWS]
GatedRows = Annotated[Tensor, GATED_ROWS]
Modulation = Annotated[Tensor, MODULATION]
Vector = Annotated[Tensor, VECTOR]
NormVector = Annotated[Tensor, NORM_VECTOR]
Tables = Annotated[tuple[Tensor, Tensor], TABLES]
Rope = Annotated[Any, ROPE]
Out = Annotated[Tensor, OUT]
KeyRope = Annotated[Any, KEY_ROPE]
Output = Annotated[Tensor, OUTPUT]
Outputs = Annotated[tuple, OUTPUTS]
Constant = Annotated[Tensor, CONSTANT]
Scale = Annotated[float, SCALE]
Count = Annotated[int, COUNT]
Activation = Annotated[str, _choice("ACTIVATIONS")]
Approximation = Annotated[str, _choice("APPROXIMATIONS")]
Half = Annotated[str, _choice("HALVES")]
Layout = Annotated[str, _choice("LAYOUTS")]
NormScope = Annotated[str, _choice("NORMS")]

_KINDS = {Tensor: TENSOR, float: NUMBER, int: INTEGER, bool: FLAG}


@dataclass(frozen=True)
class Parameter:
    name: str
    kind: Kind
    is_optional: bool
    is_keyword: bool
    default: Any  # inspect.Parameter.empty where there is none

    @property
    def lowered(self) -> tuple[str, ...]:
        """The names under which the operator takes it."""
        return tuple(f.format(name=self.name) for f in self.kind.fields) or (self.name,)

    def is_group(self, value: object) -> bool:
        return isinstance(value, tuple) and 2 <= len(value) <= len(self.kind.fields)

    def items(self, value: object) -> list[tuple[str, object]]:
        """The value by its name, or what a group holds by theirs."""
        if not self.is_group(value):
            return [(self.name, value)]
        group = typing.cast(tuple, value)
        fields = [self.kind.prefix + name for name in getattr(group, "_fields", ())]
        return list(zip(fields or self.lowered, group))

    def check_type(self, operation: str, value: object) -> None:
        if value is None and self.is_optional:
            return
        if self.is_group(value):
            for name, item in self.items(value):
                if not isinstance(item, Tensor):
                    arguments.refuse_type(operation, name, "a tensor", item)
        if not self.kind.accepts(value):
            accepted = self.kind.accepted + (" or None" if self.is_optional else "")
            arguments.refuse_type(operation, self.name, accepted, value)


def _parameters(function: Callable) -> dict[str, Parameter]:
    annotations = typing.get_type_hints(function, include_extras=True)
    parameters = {}
    for name, given in inspect.signature(function).parameters.items():
        annotation = annotations[name]
        is_optional = typing.get_origin(annotation) is Union
        if is_optional:
            annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
        kind = getattr(annotation, "__metadata__", None) or (_KINDS[annotation],)
        is_keyword = given.kind is inspect.Parameter.KEYWORD_ONLY
        parameters[name] = Parameter(name, kind[0], is_optional, is_keyword, given.default)
    return parameters


# --------------------------------------------------------------------------------------------------
# The declaration

ERRORS = (AttributeError, OverflowError, RuntimeError, TypeError, ValueError)
_NO_MEMORY = re.compile(r"(\w+): no memory for (\d+) elements of (\d) bytes on (\S+)")
LIBRARY = torch.library.Library(add_op_namespace_prefix("").rstrip(":"), "IMPL")


class Declaration:
    """What is known of an operation by its public function's name and annotations.

    Attributes:
        function: the public one.
        family: the file of ``torch-ext/operations`` that has its operator.
        check: takes the operator's arguments and refuses what the operator refuses.
        check_values: takes the public function's.
    """

    function: Callable
    check: Callable
    check_values: Callable

    def __init__(self, family: str, function: Callable) -> None:
        self.family = family
        self.name: str = function.__name__
        self.parameters = _parameters(function)

    @property
    def inputs(self) -> list[Parameter]:
        return [p for p in self.parameters.values() if not p.kind.is_output]

    @property
    def has_out(self) -> bool:
        return len(self.inputs) < len(self.parameters)

    @property
    def may_be_out(self) -> list[str]:
        """Those rows that have an element for each of the result, which depends on no other of them."""
        return [p.name for p in self.inputs if p.kind is ROWS]

    def explain(self, error: Exception, values: tuple) -> Any:
        """Raises the error that a call with these values made, or a clearer one. Called while it is handled.

        A call with proxies of torch.fx becomes a node of their graph.
        """
        named = list(zip(self.parameters.values(), values))
        proxy = arguments.find_proxy(values)
        if proxy is not None:
            args = tuple(value for parameter, value in named if not parameter.is_keyword)
            kwargs = {p.name: value for p, value in named if p.is_keyword}
            return proxy.tracer.create_proxy("call_function", self.function, args, kwargs)
        for parameter, value in named:
            parameter.check_type(self.name, value)
        tensors = [
            (name, item)
            for parameter, value in named
            for name, item in parameter.items(value)
            if isinstance(item, Tensor)
        ]
        for name, item in tensors:
            arguments.check_layout(self.name, name, item)
        if any(item.is_neg() or item.is_conj() for _, item in tensors):
            self.check_values(*values)  # the operator was given copies, or copying is what failed
        # What libraries' tensors say of an operator that they do not know.
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            for name, item in tensors:
                if not arguments.is_plain(item):
                    arguments.refuse_type(self.name, name, "a plain tensor", item)
        # What Torch says of a device without this operator.
        if isinstance(error, NotImplementedError):
            parameter, value = named[0]
            arguments.check_kernel_device(self.name, parameter.name, value)
        no_memory = _NO_MEMORY.match(str(error))
        if no_memory:
            _raise_out_of_memory(error, *no_memory.groups())
        raise error


def _raise_out_of_memory(error: Exception, name: str, count: str, size: str, device: str) -> None:
    """Torch's own error does not come through its C interface: it is had by trying once more."""
    dtype = {2: torch.float16, 4: torch.float32}[int(size)]
    cause = error
    try:
        torch.empty(int(count), dtype=dtype, device=device)
    except RuntimeError as again:
        cause = again
    message = f"{name}: no memory for {int(count) * int(size)} bytes on {device}"
    raise torch.OutOfMemoryError(message) from cause


DECLARATIONS: dict[str, Declaration] = {}


def operation(
    family: str,
    check: Optional[Callable] = None,
    is_readable: Callable[[Tensor], bool] = batching.has_dense_rows,
) -> Callable[[Callable], Callable]:
    """Makes the public function of an operation of its formula.

    Args:
        family: the file of ``torch-ext/operations`` that has the operator.
        check: ``check(operation, *arguments of the operator)`` refuses what the operator refuses, in the same
            words; None where the annotations say all of it, as they do of operations of rows.
        is_readable: whether the operator takes a tensor with such strides.
    """

    def declare(formula: Callable) -> Callable:
        declaration = Declaration(family, formula)
        operator = getattr(ops, declaration.name).default
        if check is None:
            declaration.check = _compiled(declaration, "check", _check_text(declaration), {})
            rows = [p.name for p in declaration.inputs if p.kind.check_first]
            rule = batching.by_rows(operator, rows)
        else:
            declaration.check = functools.partial(check, declaration.name)
            rule = batching.by_sample(operator, is_readable)
        torch.library.register_vmap(operator, rule, lib=LIBRARY)
        declaration.check_values = lambda *values: declaration.check(
            *(
                item
                for parameter, value in zip(declaration.parameters.values(), values)
                if not parameter.kind.is_output
                for _, item in parameter.items(value)
            )
        )
        names = {
            "formula": formula,
            "operator": operator,
            "check": declaration.check,
            "explain": declaration.explain,
        }
        if declaration.has_out:
            names["operator_out"] = _register_out(declaration)
        text = _function_text(declaration)
        function = _compiled(declaration, declaration.name, text, names)
        function.__defaults__ = formula.__defaults__
        function.__kwdefaults__ = formula.__kwdefaults__
        declaration.function = functools.update_wrapper(function, formula)
        DECLARATIONS[declaration.name] = declaration
        if declaration.has_out:
            # A node that writes stays in its graph though its result is not used.
            torch.fx.has_side_effect(function)
        return function

    return declare


def _register_out(declaration: Declaration) -> Any:
    """The operator that writes ``out``, and what happens to it under vmap and with negative views."""
    operator = getattr(ops, f"{declaration.name}_out").default

    def without_negative_views(*values):
        *inputs, out = values
        if out.is_neg():
            arguments.fail(
                declaration.name,
                "out must not be a negative view to be written, got one with its negative bit set",
            )
        operator(*(v.resolve_neg() if isinstance(v, Tensor) else v for v in inputs), out)

    rule = batching.written(operator, declaration.name, declaration.may_be_out)
    torch.library.register_vmap(operator, rule, lib=LIBRARY)
    LIBRARY.impl(operator, without_negative_views, "Negative")
    return operator


def check_out(name: str, result: Tensor, *values: Any) -> None:
    """What the operator of an operation that writes ``out``, the last of the values, refuses of it.

    The others have been checked, and ``result`` is what they would give.
    """
    declaration = DECLARATIONS[name]
    *inputs, out = values
    names = [n for parameter in declaration.inputs for n in parameter.lowered]
    read = {n: value for n, value in zip(names, inputs) if isinstance(value, Tensor)}
    leader = next(iter(read))
    arguments.check_shape(name, "out", out, result.shape, leader, read[leader])
    arguments.check_out(name, out, read, declaration.may_be_out)


def checked(name: str) -> Callable[[Callable], Callable]:
    """Makes the checks of an operation before ``shapes``, which then knows only shapes of valid calls."""
    check = DECLARATIONS[name].check

    def decorate(shapes: Callable) -> Callable:
        @functools.wraps(shapes)
        def fake(*values):
            check(*values)
            return shapes(*values)

        return fake

    return decorate


# --------------------------------------------------------------------------------------------------
# The text of the functions

_NAMES = {
    "ERRORS": ERRORS,
    "forward_ad": forward_ad,
    "is_differentiated": is_differentiated,
    "is_compiling": torch.compiler.is_compiling,
    "is_grad_enabled": torch.is_grad_enabled,
    "increment_version": torch.autograd.graph.increment_version,
    "are_transforms_active": torch._C._are_functorch_transforms_active,
}


def _indented(text: str, steps: int) -> str:
    return "".join(" " * 4 * steps + line + "\n" for line in text.splitlines())


def _lowered(declaration: Declaration) -> str:
    return ", ".join(name for p in declaration.inputs for name in p.lowered)


def _check_text(declaration: Declaration) -> str:
    """A function of the operator's arguments that checks each by its kind."""
    lines, leader = "", ""
    for parameter in declaration.inputs:
        kind, name = parameter.kind, parameter.name
        is_first = bool(kind.check_first) and not leader
        leader = leader or (name if is_first else "")
        text = (kind.check_first if is_first else kind.check).format(
            operation=declaration.name, name=name, leader=leader
        )
        if text and parameter.is_optional:
            lines += _indented(f"if {name} is not None:\n" + _indented(text, 1), 1)
        else:
            lines += _indented(text, 1)
    return f"def check({_lowered(declaration)}):\n{lines}"


def _function_text(declaration: Declaration) -> str:
    parameters = list(declaration.parameters.values())
    convert = ""
    for parameter in parameters:
        text = parameter.kind.convert.format(operation=declaration.name, name=parameter.name)
        if parameter.is_optional and text:
            text = f"if {parameter.name} is not None:\n" + _indented(text, 1)
        convert += f"{text}\n" if text else ""
    positional = ", ".join(p.name for p in parameters if not p.is_keyword)
    keywords = ", ".join(p.name for p in parameters if p.is_keyword)
    signature = f"{positional}, *, {keywords}" if keywords else positional
    by_name = ", ".join(
        f"{p.name}={p.name}" if p.is_keyword else p.name for p in declaration.inputs
    )
    differentiable = ", ".join(
        name
        for p in declaration.inputs
        if (p.kind.is_tensor or p.kind.fields) and not p.kind.is_constant
        for name in p.lowered
    )
    values = "".join(f"{p.name}, " for p in parameters)
    may_be_differentiated = """(
    _is_grad_enabled() or _forward_ad._current_level >= 0 or _are_transforms_active()
)"""
    # Autograd notices a backward that needs what out was before.
    write = f"""\
if out is not None:
    if {_indented(may_be_differentiated, 1).strip()} and _is_differentiated({differentiable}, out):
        _refuse_out('{declaration.name}')
    _operator_out({_lowered(declaration)}, out)
    if not _is_compiling():
        _increment_version(out)
    return out
"""
    return f"""\
def {declaration.name}({signature}):
    try:
{_indented(convert, 2)}\
{_indented(write, 2) if declaration.has_out else ""}\
        if {_indented(may_be_differentiated, 2).strip()} and _is_differentiated({differentiable}):
            _check({_lowered(declaration)})
            return _formula({by_name})
        return _operator({_lowered(declaration)})
    except _ERRORS as error:
        return _explain(error, ({values}))
"""


def _compiled(declaration: Declaration, name: str, text: str, names: dict[str, Any]) -> Callable:
    """The function ``name`` of the text, in which names with an underscore are of ``names``, or known."""
    used = sorted(set(re.findall(r"(?<![\w.])_([A-Za-z]\w*)", text)))
    known = {**vars(arguments), **_NAMES, **names}
    given = ", ".join(f"_{key}" for key in used)
    text = f"def bind({given}):\n{_indented(text, 1)}    return {name}\n"
    file = f"<{name} of {declaration.name}>" if name == "check" else f"<{declaration.name}>"
    linecache.cache[file] = (
        len(text),
        None,
        text.splitlines(keepends=True),
        file,
    )  # for tracebacks
    namespace: dict[str, Any] = {}
    exec(compile(text, file, "exec"), namespace)
    return namespace["bind"](*(known[key] for key in used))
