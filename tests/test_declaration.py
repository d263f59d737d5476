"""What is declared of an operation in Python, against what its C++ registers, and what it makes of it."""

import inspect
import linecache
import traceback
import typing

import pytest
import torch

from inputs import (
    DECLARATION,
    DECLARATIONS,
    OPERATIONS,
    OUT_OPERATORS,
    QK_OPERATIONS,
    sample,
    widest_dtype,
)

TYPES = {
    DECLARATION.NUMBER: "float",
    DECLARATION.SCALE: "float",
    DECLARATION.INTEGER: "int",
    DECLARATION.COUNT: "int",
    DECLARATION.FLAG: "bool",
}
EVERY_ROTATION = ("cos", "sin", "coordinates", "frequencies")
ROTATIONS = {
    "qk_norm_rope": ("cos", "sin"),
    "qk_norm_coordinate_rope": ("coordinates", "frequencies"),
}
# Operators that take other arguments than the public function, or in another order.
PARAMETERS = {
    "qk_norm_rope": "q k q_weight k_weight rope heads norm layout eps",
    "qk_norm_coordinate_rope": "q k q_weight k_weight rope heads norm layout eps",
    "qk_norm_two_ropes": "q k q_weight k_weight rope k_rope heads norm layout eps",
    "qk_norm_rope_out": "q k v q_weight k_weight rope k_rope out heads norm layout eps",
    "norm_rope": "x weight rope heads norm layout eps",
    "norm_rope_out": "x weight rope out heads norm layout eps",
}
WRITING = [
    *(f"{name}_" for name in (*QK_OPERATIONS, "norm_rope")),
    *("qk_norm_rope_out", "norm_rope_out"),
]


def declared_arguments(operator):
    """(name, type) of each argument as the schema has it, from the declaration."""
    operator = operator.removesuffix("_")
    public = operator.removesuffix("_out")
    if operator in PARAMETERS:
        public = "qk_norm_rope" if operator.startswith("qk") else "norm_rope"
    parameters = DECLARATIONS[public].parameters
    names = PARAMETERS[operator].split() if operator in PARAMETERS else parameters
    for parameter in (parameters[name] for name in names):
        kind = parameter.kind
        if kind.is_output:  # chooses between operators
            if operator in OUT_OPERATORS:
                yield parameter.name, "Tensor"
            continue
        if kind in (DECLARATION.ROPE, DECLARATION.KEY_ROPE):
            is_optional = operator != "qk_norm_coordinate_rope"
            for name in ROTATIONS.get(operator, EVERY_ROTATION):
                yield kind.prefix + name, "Optional[Tensor]" if is_optional else "Tensor"
            continue
        if kind in (DECLARATION.OUTPUT, DECLARATION.OUTPUTS):
            for name in parameter.lowered:
                yield name, "Optional[Tensor]" if name == "v_out" else "Tensor"
            continue
        type_name = "str" if kind.choices else TYPES.get(kind, "Tensor")
        for name in parameter.lowered:
            yield name, f"Optional[{type_name}]" if parameter.is_optional else type_name


@pytest.mark.parametrize("operator", [*OPERATIONS, *WRITING, *OUT_OPERATORS])
def test_schema(kernel, operator):
    schema = getattr(kernel._ops.ops, operator).default._schema
    assert [(a.name, str(a.type)) for a in schema.arguments] == list(declared_arguments(operator))
    assert not any(argument.has_default_value() for argument in schema.arguments)


@pytest.mark.parametrize("operator", OUT_OPERATORS)
def test_schema_of_what_writes_to_out(kernel, operator):
    schema = getattr(kernel._ops.ops, operator).default._schema
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written == ["out"] and schema.returns == []


@pytest.mark.parametrize("operator", OPERATIONS)
def test_results_of_the_schema(kernel, operator):
    function, _ = sample(kernel, operator, dtype=widest_dtype(operator), device="cpu")
    schema = getattr(kernel._ops.ops, operator).default._schema
    results = typing.get_type_hints(function)["return"]
    count = len(typing.get_args(results)) or 1
    assert [str(r.type) for r in schema.returns] == ["Tensor"] * count


def test_every_public_operation_is_declared(kernel):
    public = {
        name
        for name in kernel.__all__
        if inspect.isfunction(getattr(kernel, name)) and not name.endswith("kernels")
    }
    assert public == set(DECLARATIONS)
    for name, declared in DECLARATIONS.items():
        assert declared.function is getattr(kernel, name)


@pytest.mark.parametrize("name", DECLARATIONS)
def test_public_functions_look_as_they_were_written(kernel, name):
    function, declared = getattr(kernel, name), DECLARATIONS[name]
    assert function.__name__ == function.__qualname__ == name
    assert function.__module__.endswith(".functional")
    signature = inspect.signature(function)
    assert list(signature.parameters) == list(declared.parameters)
    for parameter in signature.parameters.values():
        assert parameter.default == declared.parameters[parameter.name].default
    assert f"def {name}(" in inspect.getsource(function)


def test_a_traceback_shows_the_lines_of_a_compiled_function(kernel):
    with pytest.raises(ValueError) as raised:
        kernel.silu(torch.ones(2, dtype=torch.int64))
    lines = [frame.line for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert "return _operator(x, bias)" in lines
    assert linecache.getline("<silu>", 2).strip() == "def silu(x, bias, *, out):"
