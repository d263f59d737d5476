"""Every wrong argument raises one sentence with the operation, the argument and the given value.

A table of changes, each of which makes one valid call wrong. The sentence is the same without gradients,
with an input that requires grad, in place, and when torch.compile has traced the call and it runs.
"""

import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch

from checks import MemorySnapshot, compiled_outcome, map_tensors, outcome, tensors_of
from conftest import CHECKOUT, load_kernel
from inputs import (
    BRANCH,
    BRANCH_OPERATIONS,
    FLOAT32_RESIDUAL,
    FLOAT32_RESIDUAL_OPERATIONS,
    GATED,
    GRID_AXES,
    HEADS,
    INDEXED,
    OF_LAYER_NORM,
    OPERATIONS,
    QK_OPERATIONS,
    ROW_NORMS,
    TABLE,
    TABLE_OPERATIONS,
    TABLE_ROWS,
    WITH_BLOCKS,
    WITH_FP8_RESULT,
    coordinates_and_frequencies,
    dtype_text,
    every_second,
    of_shape,
    operation_of,
    optional_tensors,
    parameters_of,
    sample,
    virtual_memory,
    widest_dtype,
)
from processes import run
from random_calls import VALUES

BATCH, SEQ, HIDDEN = SHAPE = (2, 16, 256)
HEAD_DIM = HIDDEN // HEADS


@dataclass(frozen=True)
class Mistake:
    operation: str
    argument: str  # that the sentence must name
    what: str
    got: str  # that the sentence must give, after "got"
    change: Callable  # takes the arguments by name, changes them
    is_device: bool = False

    def __str__(self):
        return f"{self.operation}-{self.argument}-{self.what}"


MISTAKES = []


def mistake(operations, argument, what, got, change, **options):
    for operation in [operations] if isinstance(operations, str) else operations:
        MISTAKES.append(Mistake(operation, argument, what, got, change, **options))


# --------------------------------------------------------------------------------------------------
# Changes. Tensors of a rope or an axis have their own names: cos, sin, coordinates, frequencies,
# frame_cos and so on.

ROPE_FIELDS = {"cos": 0, "sin": 1, "coordinates": 0, "frequencies": 1}
KEY_FIELDS = {"k_cos": 0, "k_sin": 1}
OUT_FIELDS = {"q_out": 0, "k_out": 1, "v_out": 2}
AXIS_FIELDS = {
    f"{axis}_{name}": (axis, i) for axis in GRID_AXES for i, name in enumerate(("cos", "sin"))
}
BLOCK_FIELDS = {name: i for i, name in enumerate(load_kernel().KeyBlocks._fields)}
GROUPS = {"rope": ROPE_FIELDS, "k_rope": KEY_FIELDS, "out": OUT_FIELDS, "blocks": BLOCK_FIELDS}
PLACES = {name: (group, i) for group, fields in GROUPS.items() for name, i in fields.items()}
PLACES |= AXIS_FIELDS


def replace(argument, change):
    """A change of one argument: `change` takes the argument's value and returns another."""

    def apply(arguments):
        group, index = PLACES.get(argument, (None, 0))
        if group not in arguments:
            arguments[argument] = change(arguments.get(argument))
            return
        value, fields = arguments[group], list(arguments[group])
        fields[index] = change(fields[index])
        arguments[group] = value._make(fields) if hasattr(value, "_make") else tuple(fields)

    return apply


def all_of(*changes):
    def apply(arguments):
        for change in changes:
            change(arguments)

    return apply


def longer(tensor):
    """One more in the last dimension."""
    return torch.cat([tensor, tensor[..., :1]], dim=-1)


def longer_at(dim):
    return lambda tensor: torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim=dim)


def as_list(tensor):
    return [1.0, 2.0]


def other_device(tensor):
    """A device other than the tests' device."""
    return tensor.cpu() if tensor.is_cuda else tensor.to("meta")


def shape_text(*shape):
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


# --------------------------------------------------------------------------------------------------
# The table


def is_tensor(parameter):
    return any(kind in parameter.annotation for kind in ("Tensor", "Modulator"))


def tensors_by_name(operation):
    """The tensor arguments of an operation, by their names in error texts."""
    if operation in QK_OPERATIONS:
        of_coordinates = ("coordinates", "frequencies")
        fields = {
            "qk_norm_rope": ("cos", "sin"),
            "qk_norm_coordinate_rope": of_coordinates,
            "qk_norm_two_ropes": (*of_coordinates, *KEY_FIELDS),
        }
        return "q", "k", "q_weight", "k_weight", *fields[operation]
    if operation == "rope_3d":
        return "x", *AXIS_FIELDS
    options = {"dtype": widest_dtype(operation), "device": "cpu"}
    _, arguments = sample(load_kernel(), operation, **options)
    return tuple(
        name
        for name, parameter in parameters_of(operation).items()
        if is_tensor(parameter) and name in arguments and name != "out"
    )


ARGUMENTS = {operation: tensors_by_name(operation) for operation in OPERATIONS}
FIELDS = {**ROPE_FIELDS, **AXIS_FIELDS, **KEY_FIELDS}  # tensors of pairs


def wrong_values(operations, argument, *values, got=None):
    for value in values:
        text = str(value) if isinstance(value, (int, float)) else repr(value)
        what = text if len(text) < 30 else type(value).__name__
        change = replace(argument, lambda _, v=value: v)
        mistake(operations, argument, what, text if got is None else got, change)


def wrong_shapes(operations, argument, *sizes, of=None, along=None, got=None, what=""):
    """`of`: arguments that get the shape, if not only the named one. `along`: another change before it."""
    for size in sizes:
        changes = [replace(key, of_shape(*size)) for key in of or (argument,)]
        change = all_of(*([along] if along else []), *changes)
        text = shape_text(*size) if got is None else got
        mistake(operations, argument, f"{what}shape{size}", text, change)


def wrong_dtypes(operations, argument, *dtypes):
    for dtype in dtypes:
        change = replace(argument, lambda t, d=dtype: t.to(d))
        mistake(operations, argument, dtype_text(dtype), dtype_text(dtype), change)


def of_any_tensor(name, argument):
    """Mistakes of every tensor except the first."""
    is_narrow = name in FLOAT32_RESIDUAL_OPERATIONS and argument == "x"  # beside a float32 residual
    of_16_bits = () if is_narrow else (torch.float16,)
    wrong_dtypes(name, argument, torch.float64, *of_16_bits, torch.int64)
    device = replace(argument, other_device)
    mistake(name, argument, "device", "", device, is_device=True)
    # A gate has one value a head, and any strides.
    if not (name.startswith("attention") and argument == "gate"):
        mistake(name, argument, "stride", "stride 2", replace(argument, every_second))
    if name in QK_OPERATIONS and argument in FIELDS:  # as a part of rope
        public = "k_rope" if argument in KEY_FIELDS else "rope"
        mistake(name, public, f"{argument}_list", "", replace(argument, as_list))
        mistake(name, public, f"{argument}_None", "", replace(argument, lambda _: None))
        return
    mistake(name, argument, "list", "list", replace(argument, as_list))
    if argument not in optional_tensors(name, by_keyword=True):
        mistake(name, argument, "None", "None", replace(argument, lambda _: None))


for name, (leader, *followers) in ARGUMENTS.items():
    # The tensor that sets dtype, device and shape of the others.
    wrong_dtypes(name, leader, torch.int64, torch.float64, torch.bool, torch.float8_e4m3fn)
    is_image = name in ("group_norm", "channel_rms_norm")
    strides = shape_text(2 * SEQ * HIDDEN, 2 * HIDDEN, 2) if is_image else "stride 2"
    mistake(name, leader, "stride", strides, replace(leader, every_second))
    mistake(name, leader, "list", "list", replace(leader, as_list))
    mistake(name, leader, "None", "None", replace(leader, lambda t: None))
    if name not in QK_OPERATIONS:
        wrong_shapes(name, leader, ())
    operation, columns = TABLE[operation_of(name)], 2 * HIDDEN if name in GATED else HIDDEN
    for argument in followers:
        of_any_tensor(name, argument)
        if argument in (*operation.vectors, "q_weight", "k_weight"):
            wrong_shapes(name, argument, (columns + 1,), (1, columns), ())
        if argument in operation.modulations:
            of_batch = ((BATCH, 1, 1), (BATCH + 1, 1, HIDDEN), (BATCH, HIDDEN))
            of_tokens = ((BATCH, SEQ + 1, HIDDEN), (1, BATCH, SEQ, HIDDEN))
            wrong_shapes(name, argument, (HIDDEN + 1,), (1,), *of_batch, *of_tokens, ())
        if argument in operation.rows:
            wide, longer_rows = (BATCH, SEQ, HIDDEN + 1), (BATCH, SEQ + 1, HIDDEN)
            wrong_shapes(name, argument, wide, longer_rows, (SEQ, HIDDEN), (HIDDEN,))
    if "eps" in parameters_of(name):
        wrong_values(name, "eps", "1e-6", None, True)
    for argument, _ in operation.strings:
        wrong_values(name, argument, "foo", "", None, True, 3)

for name in BRANCH_OPERATIONS:
    call = name + BRANCH
    for argument in ("addend", "x_weight"):
        of_any_tensor(call, argument)
    wide, longer_rows = (BATCH, SEQ, HIDDEN + 1), (BATCH, SEQ + 1, HIDDEN)
    wrong_shapes(call, "addend", wide, longer_rows, (SEQ, HIDDEN), (HIDDEN,))
    wrong_shapes(call, "x_weight", (HIDDEN + 1,), (1, HIDDEN), ())
    mistake(call, "x_weight", "no_x_eps", "a Tensor", replace("x_eps", lambda _: None))
    wrong_values(call, "x_eps", "1e-6")
    wrong_values(call, "tanh_gate", "foo", None, 1)
for name in TABLE_OPERATIONS:
    for argument in TABLE[name].modulations:
        for what, change, got in (
            ("row_stride", every_second, "stride 2"),
            ("row_dtype", torch.Tensor.double, "float64"),
            ("row_shape", longer, shape_text(HIDDEN + 1)),
            ("row_list", as_list, ""),
            ("row_None", lambda _: None, ""),
        ):
            of_row = replace(argument, lambda pair, change=change: (change(pair[0]), pair[1]))
            mistake(name + TABLE_ROWS, argument, what, got, of_row)
        three = replace(argument, lambda pair: (*pair, pair[0]))
        mistake(name + TABLE_ROWS, argument, "three", "", three)
    call, modulations = name + INDEXED, TABLE[name].modulations
    mistake(call, "index", "device", "", replace("index", other_device), is_device=True)
    mistake(call, "index", "list", "list", replace("index", as_list))
    wrong_dtypes(call, "index", torch.int64, torch.int16, torch.float32, torch.bool)
    of_tokens = ((SEQ + 1,), (BATCH + 1, SEQ), (SEQ, BATCH), (BATCH, SEQ, 1), (1, BATCH, SEQ))
    wrong_shapes(call, "index", *of_tokens)
    for argument in modulations:
        tables = ((HIDDEN,), (3, HIDDEN + 1), (BATCH, 3, HIDDEN), (0, HIDDEN), ())
        wrong_shapes(call, argument, *tables, what="table of ")
        wrong_dtypes(call, argument, torch.float64, torch.float16, torch.int64)
        mistake(call, argument, "stride", "stride 2", replace(argument, every_second))
    if len(modulations) > 1:
        wrong_shapes(call, modulations[-1], (2, HIDDEN), what="rows of another table, ")
    if name in BRANCH_OPERATIONS:
        without = all_of(*[replace(argument, lambda _: None) for argument in modulations])
        mistake(call, "index", "no table", "a tensor", without)

# The residual of a valid call is float32.
to_float16 = replace("x", torch.Tensor.half)
for form in (BRANCH, TABLE_ROWS, INDEXED):
    calls = [name + form for name in FLOAT32_RESIDUAL_OPERATIONS]
    mistake(calls, "x", "16_bits", "float16", to_float16)
for name in FLOAT32_RESIDUAL_OPERATIONS:
    call = name + FLOAT32_RESIDUAL
    sizes = (BATCH, SEQ, HIDDEN + 1), (BATCH, SEQ + 1, HIDDEN), (SEQ, HIDDEN), (HIDDEN,), ()
    wrong_shapes(call, "residual", *sizes, along=to_float16)
    of_16_bits = all_of(to_float16, replace("residual", torch.Tensor.bfloat16))
    mistake(call, "x", "of_another_16_bits", "float16", of_16_bits)
    strided = all_of(to_float16, replace("residual", every_second))
    mistake(call, "residual", "stride", "stride 2", strided)
    device = all_of(to_float16, replace("residual", other_device))
    mistake(call, "residual", "device", "", device, is_device=True)
    gate = all_of(to_float16, replace("gate", torch.Tensor.bfloat16))
    mistake(call, "gate", "of_another_16_bits", "bfloat16", gate)

mistake(GATED, "x", "odd", str(2 * HIDDEN + 1), replace("x", longer))
wrong_shapes(GATED, "bias", (HIDDEN,))

# Query and key


def per_head(arguments):
    arguments["norm"] = "per_head"  # but the weights are of size heads * head_dim


def heads_of_4d(arguments):
    for key in ("q", "k"):
        arguments[key] = arguments[key].unflatten(2, (HEADS, HEAD_DIM))
    arguments["heads"] = 2


def odd_head_dim(arguments):
    rope = arguments["rope"]
    for key in ("q", "k", "q_weight", "k_weight"):
        arguments[key] = arguments[key][..., : 7 * HEADS].contiguous()
    if not hasattr(rope, "_make"):
        arguments["rope"] = tuple(table[..., :7].contiguous() for table in rope)
    else:
        arguments["rope"] = rope._replace(frequencies=rope.frequencies[:1])


def fewer_k_heads(arguments):
    arguments["k"] = arguments["k"][..., :HEAD_DIM].contiguous()
    arguments["k_weight"] = None


def with_values(arguments, v=None):
    arguments["v"] = torch.ones_like(arguments["k"]) if v is None else v


def with_outputs(arguments, count=2):
    outs = [torch.zeros_like(arguments[key]) for key in "qk"]
    arguments["out"] = tuple([*outs, torch.zeros_like(outs[1])][:count])


for name in QK_OPERATIONS:
    length = SEQ + (name == "qk_norm_two_ropes")
    wrong_shapes(name, "q", (SEQ, HIDDEN), (BATCH, SEQ, 2, 2, HEAD_DIM))
    of_key = ((BATCH + 1, length, HIDDEN), (BATCH, length, HIDDEN + 1), (length, HIDDEN))
    wrong_shapes(name, "k", *of_key, (BATCH, length, HEADS, HEAD_DIM))
    if name == "qk_norm_two_ropes":
        longer_key = replace("k", longer_at(1))
        mistake(name, "k_cos", "of_another_length", shape_text(length, HEAD_DIM), longer_key)
    else:
        wrong_shapes(name, "k", (BATCH, SEQ + 1, HIDDEN))
    mistake(name, "q_weight", "per_head", shape_text(HIDDEN), per_head)
    for weight, other in (("q_weight", "k_weight"), ("k_weight", "q_weight")):
        no_norm = all_of(replace("norm", lambda _: "none"), replace(other, lambda _: None))
        mistake(name, weight, "norm_none", "none", no_norm)
    wrong_values(name, "heads", 0, -4, 3, 512, "4", None, 4.0)
    mistake(name, "heads", "4d", "2", heads_of_4d)
    mistake(name, "q", "odd_head_dim", "7", odd_head_dim)
    for argument in ("rope", "k_rope"):
        wrong_values(name, argument, "half", 1.0, (), (None,), torch.ones(SEQ, HEAD_DIM), got="")
    mistake(name, "rope", "three", "", replace("rope", lambda r: (r[0], r[1], r[1])))
    mistake(name, "out", "v_alone", "None", with_values)
    mistake(name, "out", "of_v_alone", "2", all_of(with_values, with_outputs))
    mistake(name, "out", "of_no_v", "3", lambda a: with_outputs(a, count=3))
    mistake(name, "out", "one", "1", lambda a: with_outputs(a, count=1))
    mistake(name, "out", "of_None", "", all_of(with_outputs, replace("q_out", lambda _: None)))
    mistake(name, "v", "list", "list", lambda a: (with_outputs(a, 3), with_values(a, [1.0])))
for argument in ("q_bias", "k_bias"):
    of_any_tensor(OF_LAYER_NORM, argument)
    wrong_shapes(OF_LAYER_NORM, argument, (HEAD_DIM + 1,), (1, HEAD_DIM), ())
wrong_values("qk_norm_rope", "out", torch.ones(2), "q", got="")
for got, change in {
    shape_text(BATCH, SEQ - 1, HIDDEN): lambda t: t[:, 1:],
    shape_text(BATCH, SEQ, HIDDEN - HEADS): lambda t: t[..., HEADS:],
    shape_text(1, SEQ, HIDDEN): lambda t: t[:1],
    "float16": torch.Tensor.half,
    "stride 2": every_second,
}.items():
    of_values = all_of(with_values, partial(with_outputs, count=3), replace("v", change))
    mistake("qk_norm_rope", "v", got, got, of_values)

SIZES_OF_TABLES = [
    *((HEAD_DIM,), (HEAD_DIM // 2,), (SEQ + 1, HEAD_DIM), (SEQ + 1, HEAD_DIM // 2)),
    *((SEQ, HEAD_DIM // 4), (SEQ, HIDDEN // 2), (1, SEQ + 1, HIDDEN), (BATCH + 1, SEQ, HIDDEN)),
    *((BATCH + 1, SEQ, HEAD_DIM // 2), (BATCH, SEQ, 2 * HEAD_DIM), (BATCH, SEQ, HIDDEN // 2)),
    *((BATCH, SEQ, 2, HEAD_DIM), (BATCH, SEQ, 2, HEAD_DIM // 2)),
    *((BATCH, SEQ, HEADS, HEAD_DIM // 4), (BATCH, HEADS, SEQ, HEAD_DIM), (1, 1, SEQ, 1, HEAD_DIM)),
]
for argument in ("cos", "sin"):
    wrong_shapes("qk_norm_rope", argument, *SIZES_OF_TABLES)
# One table with one value per pair and one with one value per element: the error names the second.
for size in ((SEQ, HEAD_DIM // 2), (BATCH, SEQ, HEADS, HEAD_DIM // 2)):
    wrong_shapes("qk_norm_rope", "sin", size)
    got = shape_text(1, SEQ, HIDDEN)
    wrong_shapes("qk_norm_rope", "sin", size, of=("cos",), got=got, what="cos_")
by_pair = (1, SEQ, HEADS, HEAD_DIM // 2)
both, heads_differ = ("cos", "sin"), f"{HEADS} and 1"
wrong_shapes("qk_norm_rope", "cos", by_pair, of=both, along=fewer_k_heads, got=heads_differ)
mistake("qk_norm_rope", "cos", "k_heads", heads_differ, fewer_k_heads)
mistake("qk_norm_coordinate_rope", "coordinates", "k_heads", heads_differ, fewer_k_heads)
of_coordinates = [(SEQ, 3), (1, SEQ + 1, 3), (BATCH + 1, SEQ, 3), (1, 3, SEQ), (1, SEQ, 0)]
wrong_shapes("qk_norm_coordinate_rope", "coordinates", *of_coordinates, (1, SEQ, 1, 3))
wrong_shapes("qk_norm_coordinate_rope", "frequencies", (), (1, 42))
wrong_shapes("qk_norm_coordinate_rope", "frequencies", (43,), got="43")

# Complex tables.
for name, where in (("qk_norm_rope", "rope"), ("rope", "cos")):

    def with_complex(arguments, size, dtype=torch.complex64, where=where):
        x = arguments.get("q", arguments.get("x"))
        arguments[where] = torch.ones(size, dtype=dtype, device=x.device)
        if where == "cos":
            arguments["x"] = x.unflatten(2, (HEADS, HEAD_DIM))
            arguments["sin"] = None

    for size in ((HEAD_DIM // 2,), (SEQ + 1, HEAD_DIM // 2), (SEQ, HEAD_DIM), (SEQ, HIDDEN // 2)):
        wrong = partial(with_complex, size=size)
        mistake(name, "cos", f"complex{size}", shape_text(*size), wrong)
    wrong = partial(with_complex, size=(SEQ, HEAD_DIM // 2), dtype=torch.complex128)
    mistake(name, "sin", "complex128", "None", wrong)
    beside = replace("cos", lambda t: torch.complex(t, t))
    mistake(name, "sin", "beside_complex", "float32", beside)

# rope and rope_3d

in_heads = replace("x", lambda t: t.unflatten(2, (HEADS, HEAD_DIM)))
for name, last in (("rope", "sin"), ("rope_3d", "width_sin")):
    wrong_shapes(name, "x", (SEQ, HIDDEN), (BATCH, SEQ, 2, 2, HEAD_DIM))
    to_half = [replace(key, lambda t: t.to(torch.float16)) for key in ("x", last)]
    mistake(name, last, "dtype_of_x_alone", "float16", all_of(*to_half))
of_rows = [(HEAD_DIM,), (SEQ + 1, HEAD_DIM), (1, SEQ + 1, HEAD_DIM), (BATCH + 1, SEQ, HEAD_DIM)]
of_rows += [(BATCH, SEQ, 2, HEAD_DIM), (BATCH, HEADS, SEQ, HEAD_DIM), (1, 1, SEQ, 1, HEAD_DIM)]
wrong_shapes("rope", "cos", *of_rows, (SEQ, 48), (SEQ, 2 * HIDDEN), (SEQ, 0), (), of=both)
of_sine = [(HEAD_DIM,), (SEQ + 1, HEAD_DIM), (SEQ, HEAD_DIM // 2), (SEQ, 2 * HEAD_DIM)]
wrong_shapes("rope", "sin", (), *of_sine)
# A 4-D x determines d. For other errors of tables see qk_norm_rope.
for size in ((SEQ, HEAD_DIM // 4), (BATCH, SEQ, HEADS, 2 * HEAD_DIM)):
    wrong_shapes("rope", "cos", size, of=both, along=in_heads, what="4d_")


def odd_heads(arguments):
    arguments["x"] = arguments["x"][..., : 7 * HEADS].contiguous()
    for key in ("cos", "sin"):
        arguments[key] = arguments[key][..., :7].contiguous()


mistake("rope", "x", "odd_head_dim", "7", odd_heads)
mistake("rope_3d", "x", "odd_head_dim", "7", replace("x", lambda t: t[..., :7].contiguous()))
wrong_shapes("rope_3d", "x", SHAPE)
wrong_shapes("rope_3d", "x", (BATCH, SEQ, HEADS, HEAD_DIM + 2), got=str(HEAD_DIM + 2))
wrong_shapes("rope_3d", "x", (BATCH, SEQ + 1, HEADS, HEAD_DIM), got=str(SEQ + 1))
for axis in GRID_AXES:
    cos, sin = f"{axis}_cos", f"{axis}_sin"
    for what, change, got in (
        ("longer", longer_at(0), str(SEQ)),
        ("wider", longer, str(HEAD_DIM)),
        ("no_positions", lambda t: t[:0], str(SEQ)),
        ("no_pairs", lambda t: t[:, :0], str(HEAD_DIM)),
    ):
        of_both = all_of(replace(cos, change), replace(sin, change))
        mistake("rope_3d", "x", f"{axis}_{what}", got, of_both)
        mistake("rope_3d", sin, what, "", replace(sin, change))
    for argument in (cos, sin):
        wrong_shapes("rope_3d", argument, (), (8,), (1, 2, 8), (1, 2, 2, 8))
    wrong_values("rope_3d", axis, None, "half", 1.0)
    wrong_values("rope_3d", axis, (), (None,), torch.ones(2, 3, 4), got="")
    mistake("rope_3d", axis, "three", "", replace(axis, lambda pair: (*pair, pair[0])))
    mistake("rope_3d", axis, "list", "list", replace(axis, list))

# group_norm: x is (BATCH, SEQ, HIDDEN), with SEQ channels.

wrong_shapes("group_norm", "x", (SEQ,))
OF_IMAGES = {
    "transposed": lambda t: t.unflatten(2, (-1, 16)).mT,
    "pixels_apart": every_second,
    "channels_last_apart": lambda t: every_second(t.mT.contiguous()).mT,
    "expanded_pixels": lambda t: t[:, :, :1].expand(BATCH, SEQ, HIDDEN),
}


def rows_and_frames_apart(tensor):
    return longer_at(3)(longer(tensor.unflatten(2, (4, -1, 8))))[:, :, :, :-1, :-1]


of_pictures = {
    "rows_apart": lambda t: longer(t.unflatten(2, (-1, 16)))[..., :-1],
    "frames_apart": lambda t: longer_at(3)(t.unflatten(2, (4, -1, 16)))[:, :, :, :-1],
}
of_videos = {"rows_and_frames_apart": rows_and_frames_apart}
for name, own in (("group_norm", of_pictures), ("channel_rms_norm", of_videos)):
    for what, change in {**own, **OF_IMAGES}.items():
        strides = shape_text(*change(torch.empty(SHAPE)).stride())
        mistake(name, "x", what, strides, replace("x", change))
counts = (0, -4, 3, 2 * SEQ, True, "4", None, 4.0, 2**63, 2**70, -(2**70))
wrong_values("group_norm", "num_groups", *counts)
of_images = [(SEQ,), (1, SEQ), (BATCH, 1), (BATCH + 1, SEQ), (BATCH, SEQ, 1), (BATCH, HIDDEN), ()]
wrong_shapes("group_norm", "channel_bias", *of_images)
for name in ("group_norm", "channel_rms_norm"):
    for argument in ("weight", "bias"):
        wrong_shapes(name, argument, (SEQ + 1,), (1,), (HIDDEN,), (1, SEQ), (SEQ, 1), ())

# channel_rms_norm: likewise. A video may have a gap between two of its spatial dimensions.

wrong_shapes("channel_rms_norm", "x", (SEQ,), (BATCH, SEQ))
for argument in ("scale", "shift"):
    wrong_shapes("channel_rms_norm", argument, *of_images)

# attention: q, k and v are (BATCH, SEQ, HEADS, HEAD_DIM)

ALL = ("q", "k", "v")
ATTENTIONS = ("attention", "attention_int8")
wrong_dtypes(ATTENTIONS, "q", torch.float32)
wrong_shapes(ATTENTIONS, "q", SHAPE, (1, BATCH, SEQ, HEADS, HEAD_DIM))
for size in (1, 4, 12, 63, 65, 127, 129, 136, 256, 0):
    wrong_shapes(ATTENTIONS, "q", (BATCH, SEQ, HEADS, size), of=ALL, got=str(size))
of_keys = [SHAPE, (1, SEQ, HEADS, HEAD_DIM), (BATCH, SEQ, HEADS, 2 * HEAD_DIM), ()]
wrong_shapes(ATTENTIONS, "k", *of_keys, (BATCH + 1, SEQ, HEADS, HEAD_DIM), of=("k", "v"))
for heads in (0, 3, 2 * HEADS):
    size = (BATCH, SEQ, heads, HEAD_DIM)
    wrong_shapes(ATTENTIONS, "k", size, of=("k", "v"), got=str(heads))
other_lengths = [(BATCH, SEQ + 1, HEADS, HEAD_DIM), (BATCH, 1, HEADS, HEAD_DIM)]
wrong_shapes(ATTENTIONS, "v", *of_keys, *other_lengths, (BATCH, SEQ, 1, HEAD_DIM))
wrong_values(ATTENTIONS, "scale", 0, -1, math.nan, math.inf, -math.inf, 1e-50, 1e39, "0.1")
wrong_values(ATTENTIONS, "scale", 0.0, -1.0, [0.1], got="")
of_bias = [(SEQ,), (1, SEQ), (BATCH, 1), (BATCH, SEQ + 1), (SEQ, BATCH), (BATCH, 1, 1, SEQ), ()]
wrong_shapes("attention", "key_bias", *of_bias)
wrong_dtypes("attention", "key_bias", torch.bool, torch.int32)
of_gate = ((BATCH, SEQ, 1), (BATCH, SEQ, HEADS, 1), (BATCH, HEADS, SEQ), (SEQ, HEADS), ())
wrong_shapes(ATTENTIONS, "gate", *of_gate)
wrong_shapes(ATTENTIONS, "addend", *of_keys, (BATCH, SEQ, HEADS * HEAD_DIM))
wrong_shapes(ATTENTIONS, "key_lengths", (1,), (BATCH + 1,), (BATCH, 1), (1, BATCH), ())
wrong_dtypes(ATTENTIONS, "key_lengths", torch.int16, torch.float32, torch.bool)
wrong_values(ATTENTIONS, "return_lse", "foo", None, 1)
expanded = replace("key_lengths", lambda t: t[:1].expand(BATCH))
mistake(ATTENTIONS, "key_lengths", "expanded", "stride 0", expanded)


def in_one(*changes, heads=HEADS):
    """The call with its number of heads, and q, k and v flattened; further changes come after that."""
    packed = [replace(key, lambda t: t.flatten(2)) for key in ALL]
    return all_of(*packed, replace("heads", lambda _: heads), *changes)


for value in (0, -4, 3, 10**6, 2**63, "4", 4.0, True):
    mistake(ATTENTIONS, "heads", repr(value), str(value), in_one(heads=value))
of_heads = replace("heads", lambda _: HEADS)
mistake(ATTENTIONS, "q", "4d_heads", shape_text(BATCH, SEQ, HEADS, HEAD_DIM), of_heads)
packed = {"along": in_one(), "what": "heads_"}
wide = HEADS * HEAD_DIM
wrong_shapes(ATTENTIONS, "q", (BATCH, SEQ), (wide,), (), got="", **packed)
for heads in (1, 16 * HEADS):
    mistake(ATTENTIONS, "q", f"heads_{heads}", str(wide // heads), in_one(heads=heads))
of_keys = [(BATCH, SEQ, HEADS, HEAD_DIM), (BATCH + 1, SEQ, wide), (BATCH, SEQ, wide + 1)]
wrong_shapes(ATTENTIONS, "k", *of_keys, (BATCH, SEQ), (), of=("k", "v"), **packed)
for heads in (0, 3, 2 * HEADS):
    size = (BATCH, SEQ, heads * HEAD_DIM)
    wrong_shapes(ATTENTIONS, "k", size, of=("k", "v"), got=str(heads), **packed)
of_values = [(BATCH, SEQ, HEADS, HEAD_DIM), (BATCH, SEQ, HEAD_DIM), (BATCH, 1, wide)]
wrong_shapes(ATTENTIONS, "v", *of_values, **packed)


# Key blocks: one block of queries and one of keys. Lists of full blocks are (BATCH, HEADS, 1, 1), others are
# shared.

BOUNDED_LISTS = {"kv_num_blocks": "kv_indices", "kv_indices": "kv_num_blocks"}
FULL_LISTS = {f"full_{one}": f"full_{other}" for one, other in BOUNDED_LISTS.items()}
PAIRED = BOUNDED_LISTS | FULL_LISTS
for argument in (*PAIRED, "key_bounds"):
    wrong_dtypes(WITH_BLOCKS, argument, torch.int64, torch.float32, torch.bool)
    device = replace(argument, other_device)
    mistake(WITH_BLOCKS, argument, "device", "", device, is_device=True)
    mistake(WITH_BLOCKS, argument, "list", "list", replace(argument, as_list))
    inner = {"key_bounds": (SEQ, 2)}.get(argument, (1, 1) if "indices" in argument else (1,))
    for leading in ((BATCH + 1, HEADS), (BATCH, HEADS + 1), (BATCH, 2), (0, 1), (1, 0), (1,), ()):
        wrong_shapes(WITH_BLOCKS, argument, (*leading, *inner))
    wrong_shapes(WITH_BLOCKS, argument, (1, 1, 1, *inner), (1, 1, inner[0] + 1, *inner[1:]), ())
    of_all = replace(argument, lambda t: t.expand(BATCH, HEADS, *t.shape[2:]))
    if argument == "key_bounds":
        strides = shape_text(0, 0, 2, 1)
        mistake(WITH_BLOCKS, argument, "expanded", strides, of_all)
        mistake(WITH_BLOCKS, argument, "stride", "4, 2)", replace(argument, every_second))
        transposed = replace(argument, lambda t: t.mT.contiguous().mT)
        mistake(
            WITH_BLOCKS, argument, "transposed", shape_text(2 * SEQ, 2 * SEQ, 1, SEQ), transposed
        )
    else:
        mistake(WITH_BLOCKS, argument, "None", "None", replace(argument, lambda _: None))
for argument in BOUNDED_LISTS:
    of_all = replace(argument, lambda t: t.expand(BATCH, HEADS, *t.shape[2:]))
    both = all_of(of_all, replace(PAIRED[argument], lambda t: t.expand(BATCH, HEADS, *t.shape[2:])))
    mistake(WITH_BLOCKS, "kv_num_blocks", f"expanded with {argument}", "strides (0, 0", both)
several = replace("kv_indices", of_shape(BATCH, HEADS, 1, 1))
mistake(WITH_BLOCKS, "kv_indices", "of each", shape_text(BATCH, HEADS, 1, 1), several)
shared = replace("full_kv_num_blocks", of_shape(1, HEADS, 1))
mistake(WITH_BLOCKS, "full_kv_indices", "of each", shape_text(BATCH, HEADS, 1, 1), shared)
strided = replace("kv_indices", lambda t: torch.cat([t, t], 3).repeat(1, 1, 1, 2)[..., ::2])
mistake(WITH_BLOCKS, "kv_indices", "stride", "2)", strided)
wrong_shapes(WITH_BLOCKS, "key_bounds", (1, 1, SEQ, 1), (1, 1, SEQ, 3), (1, 1, 2, SEQ))
sizes = (
    (64,),
    (64, 64, 64),
    [64, 64],
    64,
    None,
    "64",
    (64.0, 64),
    (True, 64),
    (64, None),
    (64, "64"),
)
wrong_values(WITH_BLOCKS, "block_size", *sizes, got="")
for size in ((64, 96), (32, 64), (256, 128), (1, 1)):
    wrong_values(WITH_BLOCKS, "block_size", size)
for value in (0, -64, 2**70):
    wrong_values(WITH_BLOCKS, "block_size", (64, value), got=str(value))
    wrong_values(WITH_BLOCKS, "block_size", (value, 64), got=str(value))
no_blocks = torch.ones(BATCH, SEQ), True, 1, "foo", (), (None,) * 6, torch.int32
wrong_values("attention", "blocks", *no_blocks, got="")
with_out = replace("out", lambda _: torch.zeros(BATCH, SEQ, HEADS, HEAD_DIM).bfloat16())
mistake(WITH_BLOCKS, "out", "given", "Tensor", with_out)


# --------------------------------------------------------------------------------------------------
# The tests


def valid_call(kernel, operation, device, shape=SHAPE, heads=HEADS):
    function, arguments = sample(
        kernel, operation, dtype=widest_dtype(operation), device=device, shape=shape, heads=heads
    )
    if "norm" in operation:
        arguments.setdefault("eps", 1e-6)
    if operation in QK_OPERATIONS:
        arguments.update({"norm": "across_heads", "layout": "interleaved"})
    return function, arguments


def sentence(operation, argument, got):
    """One line: operation, argument, accepted values, given value."""
    return re.compile(rf"{operation}: {argument}\b[^\n]+, got [^\n]*{re.escape(got)}[^\n]*")


def assert_refused(function, arguments, pattern):
    with pytest.raises((ValueError, TypeError)) as raised:
        function(**arguments)
    message = str(raised.value)
    assert pattern.fullmatch(message), f"{message!r} is not {pattern.pattern!r}"
    return message


def refused_unchanged(function, arguments, pattern):
    memory = MemorySnapshot(t for t in tensors_of(arguments) if t.device.type != "meta")
    message = assert_refused(function, arguments, pattern)
    memory.assert_unchanged()
    return message


def wrong_call(kernel, case, device):
    """The function, its arguments with a wrong one, and the pattern of the error."""
    if case.is_device and device == "cpu":
        pytest.skip("on a CPU the only other device is meta, which gets shapes alone")
    function, arguments = valid_call(kernel, case.operation, device)
    case.change(arguments)
    return function, arguments, sentence(operation_of(case.operation), case.argument, case.got)


@pytest.mark.whole
@pytest.mark.parametrize("case", MISTAKES, ids=str)
def test_mistakes(kernel, device, case):
    function, arguments, pattern = wrong_call(kernel, case, device)
    with torch.no_grad():
        message = refused_unchanged(function, arguments, pattern)
        expected = outcome(function, arguments)
        name = function.__name__
        if f"{name}_fp8" in WITH_FP8_RESULT and FLOAT32_RESIDUAL not in case.operation:
            text = message.replace(f"{name}:", f"{name}_fp8:", 1)
            assert outcome(getattr(kernel, f"{name}_fp8"), arguments) == (expected[0], text)
        is_of_outputs = case.argument in ("v", "out", "q_out")
        if case.operation in QK_OPERATIONS and not is_of_outputs:
            in_place = {**arguments, "inplace": True}
            assert refused_unchanged(function, in_place, pattern) == message
    for tensor in tensors_of(arguments) if not is_of_outputs else ():
        if tensor.is_floating_point() and tensor.device.type != "meta":
            tensor.requires_grad_()
            assert outcome(function, arguments) == expected
            tensor.requires_grad_(False)


@pytest.mark.parametrize("name", WITH_FP8_RESULT)
def test_fp8_results_take_the_same_arguments(kernel, name):
    plain, quantized = (dict(parameters_of(n)) for n in (name.removesuffix("_fp8"), name))
    for of_results in ("out", "block_size"):
        plain.pop(of_results, None)
        quantized.pop(of_results, None)
    assert list(quantized.values()) == list(plain.values())


def traced_mistakes():
    """Each with and without gradients; one in fourteen is not slow. Operation and argument are parameters of
    their own, for draws."""
    counts, cases = Counter(), []
    for i, case in enumerate(MISTAKES):
        place = case.operation, case.argument
        number = counts[place]
        counts[place] += 1
        for requires_grad in (False, True):
            name = f"{case}-{'grad' if requires_grad else 'no_grad'}"
            marks = [pytest.mark.slow] if i % 14 else []
            cases.append(pytest.param(*place, number, requires_grad, marks=marks, id=name))
    return cases


@pytest.mark.parametrize(("operation", "argument", "number", "requires_grad"), traced_mistakes())
def test_mistakes_when_traced(kernel, device, operation, argument, number, requires_grad):
    of_place = [m for m in MISTAKES if (m.operation, m.argument) == (operation, argument)]
    function, arguments, _ = wrong_call(kernel, of_place[number], device)
    if requires_grad:
        leaders = [t for t in tensors_of(arguments) if t.is_floating_point() and not t.is_meta]
        if not leaders or argument in ("v", "out", "q_out"):
            pytest.skip("no input that may require grad")
        leaders[0].requires_grad_()
    assert compiled_outcome(function, arguments) == outcome(function, arguments)


SCALARS = [
    (argument, operation)
    for operation in OPERATIONS
    for argument, parameter in parameters_of(operation).items()
    if not is_tensor(parameter) and argument not in ("out",)
]
A_ROPE = "None, a pair (cos, sin) of tensors, a complex tensor or a CoordinateRope"
ACCEPTED_TYPES = {
    **dict.fromkeys(("eps", "x_eps", "scale"), "a number"),
    **dict.fromkeys(("heads", "num_groups"), "an integer"),
    **dict.fromkeys(("tanh_gate", "return_lse", "inplace"), "True or False"),
    **dict.fromkeys(("rope", "k_rope"), A_ROPE),
    "blocks": "a KeyBlocks",
    "out": "a tuple (q_out, k_out) or (q_out, k_out, v_out) of tensors",
}


@pytest.mark.parametrize(("argument", "operation"), SCALARS)
def test_every_path_takes_the_same_scalars(kernel, device, argument, operation):
    values = [
        *(value for value in VALUES if value is not None),
        *(4.0, 2**70, b"half", (None,), np.int64(HEADS), np.array(0.5)),
        *(torch.tensor(value, device=device) for value in (0.5, [0.5], [[0.5] * HIDDEN], 4, True)),
        torch.tensor(0.5, device=device, requires_grad=True),
    ]
    is_of_attention = argument == "heads" and operation.startswith("attention")
    given = f"{operation}_heads_given" if is_of_attention else operation
    function, arguments = valid_call(kernel, given, device)
    leader = next(tensors_of(arguments))
    for value in values:
        arguments[argument] = value
        leader.requires_grad_(False)
        with torch.no_grad():
            expected = outcome(function, arguments)
        leader.requires_grad_()
        if value is True and argument == "inplace":
            continue  # refused for inputs that require grad
        assert outcome(function, arguments) == expected, repr(value)
        kind, message = expected
        assert kind in ("returned", ValueError, TypeError), f"{value!r}: {expected}"
        if kind == "returned":
            assert argument == "rope" or not isinstance(value, (torch.Tensor, np.ndarray, complex))
        else:
            # With other heads, it is q that has a wrong head_dim, or gate that has a wrong shape.
            others = f"{argument}|cos|k_cos|weight|q_weight|q_out"
            names = "heads|q|gate" if is_of_attention else others
            assert re.fullmatch(rf"{function.__name__}: (?:{names}) [^\n]*, got [^\n]*", message)
        if kind is TypeError and message.split(": ")[1].startswith(argument):
            text = ACCEPTED_TYPES.get(argument, "a string")
            is_optional = parameters_of(operation)[argument].annotation.startswith("Optional")
            text += " or None" if is_optional else ""
            assert message.startswith(f"{function.__name__}: {argument} must be {text}, got ")


@pytest.mark.parametrize("operation", ARGUMENTS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_tensors_without_their_memory(kernel, device, operation, requires_grad):
    """A storage may have been freed, as in sharded training, or shrunk."""
    function, arguments = valid_call(kernel, operation, device)
    for argument in ARGUMENTS[operation]:
        for bytes_left in (0, 2):
            changed = map_tensors(torch.clone, arguments)
            tensors = []
            replace(argument, lambda t, found=tensors: found.append(t) or t)(changed)
            (tensor,) = tensors
            tensor.requires_grad_(requires_grad and tensor.is_floating_point())
            needed = tensor.numel() * tensor.element_size()
            tensor.untyped_storage().resize_(bytes_left)
            text = f"{function.__name__}: {argument} must have a storage of at least {needed} bytes"
            pattern = re.compile(rf"{text}, got one of {bytes_left} bytes")
            assert_refused(function, changed, pattern)


def test_views_without_their_memory(kernel, device):
    buffer = torch.ones(48, device=device)
    x = torch.ones(3, 16, device=device)
    weight = buffer[16:32]
    buffer.untyped_storage().resize_(128)
    assert torch.equal(kernel.rms_norm(x, weight), kernel.rms_norm(x))
    buffer.untyped_storage().resize_(127)
    message = "rms_norm: weight must have a storage of at least 128 bytes, got one of 127 bytes"
    assert_refused(kernel.rms_norm, {"x": x, "weight": weight}, re.compile(message))
    empty = torch.ones(0, 16, device=device)
    empty.untyped_storage().resize_(0)
    assert kernel.rms_norm(empty).shape == (0, 16)


@pytest.mark.parametrize("dim", [13, 2, 0, -2, 10, 2**70 + 1, 12.0, "12", None, True, [12]])
def test_columns_of_tables(kernel, device, dim):
    rope = kernel.CoordinateRope(*coordinates_and_frequencies(1, 3, 3, 2, device))
    assert rope.tables(12)[0].shape == rope.tables(np.int64(12))[1].shape == (1, 3, 12)
    error, accepted = TypeError, "an integer"
    if type(dim) is int:
        error, accepted = ValueError, "even and at least 12"
    with pytest.raises(error, match=f"^CoordinateRope.tables: dim must be {accepted}, got ."):
        rope.tables(dim)


OF_OTHER_LAYOUTS = {
    "one of layout sparse_coo": torch.Tensor.to_sparse,
    "one of layout sparse_csr": lambda t: t.flatten(1).to_sparse_csr(),
    "one of layout _mkldnn": lambda t: t.cpu().float().to_mkldnn(),
    "a quantized one of quint8": lambda t: torch.quantize_per_tensor(
        t.float(), 0.1, 0, torch.quint8
    ),
    "a nested one": lambda t: torch.nested.nested_tensor([t[0], t[0]], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", OF_OTHER_LAYOUTS)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_tensors_that_are_not_strided(kernel, device, operation, layout, requires_grad):
    function, arguments = valid_call(kernel, operation, device)
    leader, *others = tensors_of(arguments)
    (argument, *_) = ARGUMENTS[operation]
    arguments[argument] = OF_OTHER_LAYOUTS[layout](leader)
    if others and requires_grad:
        others[0].requires_grad_()
    text = f"{function.__name__}: {argument} must be a strided tensor, got {layout}"
    assert_refused(function, arguments, re.compile(re.escape(text)))


@pytest.mark.parametrize("operation", [*ROW_NORMS, "gelu", "silu", "softmax"])
def test_no_memory(kernel, device, operation):
    """The error is Torch's or, on a CPU, the same type with Torch's as its cause."""
    function, arguments = valid_call(kernel, operation, device)
    for argument in TABLE[operation].rows:
        arguments[argument] = arguments[argument][:1].expand(2**42, SEQ, -1)
    columns = HIDDEN
    for argument in TABLE[operation].modulations:
        arguments[argument] = arguments[argument][:1]
    text = rf"{operation}: cannot allocate {2**42 * SEQ * columns * 4} bytes on {device}.*"
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError, match=text) as raised:
        function(**arguments)
    cause = raised.value.__cause__
    assert isinstance(cause, torch.OutOfMemoryError if device == "cuda" else RuntimeError)
    assert re.search("out of memory|can't allocate memory", str(cause))


# A CUDA runtime that reports compute capability 8.6 for every GPU.
OTHER_CAPABILITY = """
#define _GNU_SOURCE
#include <dlfcn.h>
int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  if (attribute == 75) return *value = 8, 0;
  if (attribute == 76) return *value = 6, 0;
  int (*ask)(int*, int, int) = dlsym(RTLD_NEXT, "cudaDeviceGetAttribute");
  return ask(value, attribute, device);
}
"""


@pytest.mark.parametrize("operation", ["rms_norm", "softmax"])
def test_a_gpu_of_another_compute_capability(kernel, device, tmp_path, operation):
    if device != "cuda":
        pytest.skip("needs the CUDA build")
    (tmp_path / "other.c").write_text(OTHER_CAPABILITY)
    library = tmp_path / "other.so"
    compile_ = ["cc", "-shared", "-fPIC", "-o", library, tmp_path / "other.c", "-ldl"]
    assert run(*compile_).returncode == 0
    code = (
        "from conftest import load_kernel; import torch\n"
        f"load_kernel().{operation}(torch.ones(2, 8, device='cuda'))"
    )
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    process = run(sys.executable, "-c", code, cwd=CHECKOUT / "tests", env=environment)
    assert process.returncode != 0
    text = "x must be on a GPU of compute capability 9.0, got cuda:0 of compute capability 8.6"
    assert f"ValueError: {operation}: {text}" in process.stderr


@pytest.mark.parametrize("operation", ARGUMENTS)
def test_tensors_of_the_cpu_given_to_a_cuda_build(kernel, device, operation):
    if device != "cuda":
        pytest.skip("needs the CUDA build")
    function, arguments = valid_call(kernel, operation, "cpu")
    name = operation_of(operation)
    assert_refused(function, arguments, sentence(name, next(iter(arguments)), "cpu"))


def test_outputs_and_in_place(kernel, device):
    function, arguments = valid_call(kernel, "qk_norm_rope", device)
    with_outputs(arguments)
    arguments["inplace"] = True
    refused_unchanged(function, arguments, sentence("qk_norm_rope", "inplace", "True"))


def test_every_argument_is_in_the_table(kernel):
    """A new argument needs its mistakes in the table."""
    tested = {(operation_of(case.operation), case.argument) for case in MISTAKES}
    for operation in {operation_of(call) for call in ARGUMENTS}:
        for argument in parameters_of(operation):
            if argument not in ("inplace", "out"):  # test_out.py
                assert (operation, argument) in tested, f"{operation}: {argument}"


# --------------------------------------------------------------------------------------------------
# Sizes that launches and kernels store in 32 bits


@dataclass(frozen=True)
class Limit:
    operation: str
    sentence: str  # with {} for the size
    changes: Callable  # size -> changes of a call of one token with one head of 64 elements
    refused: int  # the least size

    def __str__(self):
        return f"{self.operation}-{self.sentence.replace(' ', '_')}"

    def assert_refused(self, kernel, device, **options):
        function, arguments = valid_call(kernel, self.operation, device, shape=(1, 1, 64), heads=1)
        optional = ("q_weight", "k_weight", "weight", "key_bias", "key_lengths")
        arguments = {key: value for key, value in arguments.items() if key not in optional}
        for argument, change in self.changes(self.refused).items():
            replace(argument, change)(arguments)
        text = re.escape(self.sentence.format(self.refused))
        pattern = re.compile(rf"{operation_of(self.operation)}: {text}")
        assert_refused(function, {**arguments, **options}, pattern)


def rows(*sizes):
    """These leading dimensions, expanded from one row in memory."""
    return lambda tensor: tensor.flatten().expand(*sizes, -1)


def unwritten(*sizes):
    return lambda t: virtual_memory(math.prod(sizes), torch.float16, t.device).reshape(sizes)


def rows_of_table(size):
    return lambda tensor: tensor[:1].expand(size, -1)


def value(constant):
    return lambda _: constant


LIMITS = []


def limit(operations, sentence, changes, refused=2**31):
    for operation in [operations] if isinstance(operations, str) else operations:
        LIMITS.append(Limit(operation, sentence, changes, refused))


HEADS_OF_TOKENS = "must have a batch * seq * heads of at most 2147483647, got"
limit("rope", f"x {HEADS_OF_TOKENS} {{}} * 1 * 1", lambda n: {"x": rows(n, 1)})
limit("rope_3d", f"x {HEADS_OF_TOKENS} {{}} * 1 * 1", lambda n: {"x": rows(n, 1, 1)})
of_query = f"q {HEADS_OF_TOKENS} {{}} * 1 * 1"
limit(QK_OPERATIONS[:2], of_query, lambda n: dict.fromkeys("qk", rows(n, 1)))


def long_key(n):
    return {"k": lambda t: t[:, :1].expand(1, n, 64), **dict.fromkeys(KEY_FIELDS, rows_of_table(n))}


limit("qk_norm_two_ropes", f"k {HEADS_OF_TOKENS} 1 * {{}} * 1", long_key)


def of_wide_tokens(n):
    return {**dict.fromkeys("qk", rows(1, 1, n)), "heads": value(n)}


ELEMENTS_OF_TOKEN = "must have a heads * head_dim of at most 2147483647, got {} * 64"
limit(QK_OPERATIONS[:2], f"q {ELEMENTS_OF_TOKEN}", of_wide_tokens, 2**25)
of_key = f"k {ELEMENTS_OF_TOKEN}"
limit("qk_norm_rope", of_key, lambda n: {"q": rows(1, 1, 1), "k": rows(1, 1, n)}, 2**25)

ELEMENTS_OF_HEAD = "must have a head_dim of at most 2147483647, got {}"


def of_huge_heads(n, names, tables=("cos", "sin")):
    return {**dict.fromkeys(names, unwritten(1, 1, 1, n)), **dict.fromkeys(tables, unwritten(1, n))}


def of_huge_grid(n):
    sizes = dict.fromkeys(AXIS_FIELDS, 0) | dict.fromkeys(("frame_cos", "frame_sin"), n // 2)
    return {"x": unwritten(1, 1, 1, n), **{key: unwritten(1, size) for key, size in sizes.items()}}


limit("rope", f"x {ELEMENTS_OF_HEAD}", lambda n: of_huge_heads(n, ["x"]))
limit("rope_3d", f"x {ELEMENTS_OF_HEAD}", of_huge_grid)
limit("qk_norm_rope", f"q {ELEMENTS_OF_HEAD}", lambda n: of_huge_heads(n, "qk"))
limit("qk_norm_coordinate_rope", f"q {ELEMENTS_OF_HEAD}", lambda n: of_huge_heads(n, "qk", ()))

QUERIES = "q must have a batch * seq * heads of at most 1073741824, got"
KEYS, MANY = "k must have a seq of at most 1073741824, got {}", 2**30 + 1
of_all = f"{QUERIES} {{}} * 1 * 1"
limit(ATTENTIONS, of_all, lambda n: dict.fromkeys("qkv", rows(n, 1, 1)), MANY)
limit(ATTENTIONS, f"{QUERIES} 1 * {{}} * 1", lambda n: {"q": rows(1, n, 1)}, MANY)
limit(ATTENTIONS, KEYS, lambda n: dict.fromkeys("kv", rows(1, n, 1)), MANY)
of_blocks = "k must have a seq of at most 8388608, got {}"
limit(WITH_BLOCKS, of_blocks, lambda n: dict.fromkeys("kv", rows(1, n, 1)), 2**23 + 1)


@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_sizes_that_cannot_be_counted(kernel, device, limit):
    with torch.no_grad():
        if limit.operation != "qk_norm_two_ropes":  # its results are allocated before it is checked
            limit.assert_refused(kernel, device)
        if limit.operation in QK_OPERATIONS:
            limit.assert_refused(kernel, device, inplace=True)


@pytest.mark.parametrize("name", ["rope", "attention"])
def test_empty_tensors_of_any_size(kernel, device, name):
    empty = torch.empty(0, 2**31, 1, 64, dtype=torch.bfloat16, device=device)
    if name == "rope":
        tables = (torch.empty(1, 64, device=device).expand(2**31, 64) for _ in range(2))
        out = kernel.rope(empty, *tables)
    else:
        out = kernel.attention(empty, empty, empty)
    assert out.shape == empty.shape
