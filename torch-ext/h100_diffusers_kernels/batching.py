"""The operations under ``torch.vmap``: one call of all samples where an operation takes any number of leading
dimensions, else one call a sample."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from .arguments import check_out, check_written, fail


def has_dense_rows(tensor: Tensor) -> bool:
    return tensor.dim() == 0 or tensor.stride(-1) == 1


def _sample(value, dim: Optional[int], index: int, is_readable: Callable = has_dense_rows):
    if dim is None:
        return value
    sample = value.select(dim, index)
    # Strides that are not readable are vmap's doing.
    return sample if is_readable(sample) else sample.contiguous()


def _without_samples(value, dim: Optional[int]):
    if dim is None:
        return value
    return value.new_zeros(value.shape[:dim] + value.shape[dim + 1 :])


def _out_dims(results):
    return tuple(0 for _ in results) if isinstance(results, tuple) else 0


def _call_each(
    operation: Callable,
    size: int,
    in_dims: tuple,
    args: tuple,
    is_readable: Callable[[Tensor], bool] = has_dense_rows,
):
    if size == 0:
        results = operation(*map(_without_samples, args, in_dims))
        if isinstance(results, tuple):
            results = tuple(result.new_empty((0, *result.shape)) for result in results)
        else:
            results = results.new_empty((0, *results.shape))
        return results, _out_dims(results)
    calls = [
        operation(*(_sample(arg, dim, index, is_readable) for arg, dim in zip(args, in_dims)))
        for index in range(size)
    ]
    if isinstance(calls[0], tuple):
        results = tuple(torch.stack(parts) for parts in zip(*calls))
    else:
        results = torch.stack(calls)
    return results, _out_dims(results)


def by_sample(
    operation: Callable, is_readable: Callable[[Tensor], bool] = has_dense_rows
) -> Callable:
    """The rule of an operation whose dimensions are fixed.

    Args:
        is_readable: whether the operation takes a tensor with such strides.
    """

    def rule(info, in_dims, *args):
        return _call_each(operation, info.batch_size, in_dims, args, is_readable)

    return rule


def by_rows(operation: Any, rows: Collection[str]) -> Callable:
    """The rule of an operation of rows: the samples are its first dimension.

    Args:
        rows: the tensors that are of the leading one's shape, where others broadcast against it.
    """
    names = [argument.name for argument in operation._schema.arguments]
    vectors = ("weight", "bias")

    def rule(info, in_dims, *args):
        x = names.index("x")
        dims = args[x].dim() - (in_dims[x] is not None)
        if dims == 0 or any(d is not None and name in vectors for name, d in zip(names, in_dims)):
            return _call_each(operation, info.batch_size, in_dims, args)

        def batched(name: str, value, dim: Optional[int]):
            if dim is not None:
                value = value.movedim(dim, 0)
                value = value[(slice(None), *[None] * (dims + 1 - value.dim()))]
                # The stride of the last dimension is vmap's doing.
                return value if value.stride(-1) == 1 else value.contiguous()
            return value.expand(info.batch_size, *value.shape) if name in rows else value

        results = operation(*map(batched, names, args, in_dims))
        return results, _out_dims(results)

    return rule


class Writing:
    """What an operator of the query and the key writes, and what it reads meanwhile.

    Attributes:
        operation: the public function, of which sentences speak.
        where: how they say that an input is written.
    """

    def __init__(self, operator: Any) -> None:
        self.operator = operator
        arguments = operator._schema.arguments
        self.names = [argument.name for argument in arguments]
        self.written = [a.name for a in arguments if a.alias_info and a.alias_info.is_write]
        is_of_one = "k" not in self.names
        self.operation = "norm_rope" if is_of_one else "qk_norm_rope"
        # Outputs are named after the inputs that are stored there.
        self.own = {"x": "out"} if is_of_one else {name: f"{name}_out" for name in "qkv"}
        self.where = "" if set(self.own.values()) & set(self.written) else " in place"

    def outputs(self, arguments: tuple) -> dict[str, Optional[Tensor]]:
        named = dict(zip(self.names, arguments))
        return {name: named[name] for name in self.written}

    def check(self, arguments: tuple) -> None:
        read: dict[str, Optional[Tensor]] = {
            name: value
            for name, value in zip(self.names, arguments)
            if isinstance(value, Tensor) and name not in self.written
        }
        check_written(self.operation, self.outputs(arguments), read, self.where, self.own)


def in_place(writing: Writing) -> Callable:
    """The rule of an operator that writes some of its arguments."""

    def rule(info, in_dims, *args):
        for name, value, dim in zip(writing.names, args, in_dims):
            if name in writing.written and value is not None and dim is None:
                fail(
                    writing.operation,
                    f"{name} must be batched to be written{writing.where} under vmap, "
                    "got one tensor for all samples",
                )
        batched = (v if dim is None else v.movedim(dim, 0) for v, dim in zip(args, in_dims))
        writing.check(tuple(batched))
        for index in range(info.batch_size):
            writing.operator(
                *(
                    value
                    if dim is None
                    else value.select(dim, index)
                    if name in writing.written
                    else _sample(value, dim, index)
                    for name, value, dim in zip(writing.names, args, in_dims)
                )
            )
        return None, None

    return rule


def written(operation: Any, public_name: str, may_be_out: Collection[str]) -> Callable:
    """The rule of an operator that writes ``out``, its last argument.

    Args:
        may_be_out: the tensors that ``out`` may be itself.
    """
    names = [argument.name for argument in operation._schema.arguments]

    def rule(info, in_dims, *args):
        *inputs, out = args
        *input_dims, out_dim = in_dims
        if out_dim is None:
            fail(
                public_name,
                "out must be batched to be written under vmap, got one tensor for all samples",
            )
        read = {name: value for name, value in zip(names, inputs) if isinstance(value, Tensor)}
        # Elsewhere in another sample would be in the way of that.
        aligned = [name for name, dim in zip(names, input_dims) if dim == out_dim]
        check_out(public_name, out, read, [name for name in may_be_out if name in aligned])
        for index in range(info.batch_size):
            samples = (_sample(value, dim, index) for value, dim in zip(inputs, input_dims))
            operation(*samples, out.select(out_dim, index))
        return None, None

    return rule
