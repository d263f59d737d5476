"""Argument checks for the two paths that do not reach the compiled ones: tracing and differentiation.

They accept and refuse what ``arguments.cpp`` does, in the same words.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection
from typing import Any, NoReturn, Optional

import torch
from torch import Tensor, nn

from ._ops import add_op_namespace_prefix
from .overlap import is_same_view, overlap, overlaps_itself

# A build has kernels for one type of device, which its operators' namespace names.
KERNEL_DEVICE_TYPE = "cuda" if "_cuda_" in add_op_namespace_prefix("") else "cpu"
SUPPORTED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_DIMS = 64  # that the compiled checks hold
MAX_COUNT = 2**31 - 1  # of what a launch or a kernel numbers
MAX_ATTENTION_ROWS = 2**30  # of attention's queries of all heads, and of its keys


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).replace("torch.", "")


def fail(operation: str, sentence: str) -> NoReturn:
    raise ValueError(f"{operation}: {sentence}")


def is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def is_string(value: object) -> bool:
    return isinstance(value, str)


def is_flag(value: object) -> bool:
    return isinstance(value, bool)


def is_number(value: object) -> bool:
    symbolic = (torch.SymInt, torch.SymFloat)
    return isinstance(value, (numbers.Real, *symbolic)) and not isinstance(value, bool)


def is_integer(value: object) -> bool:
    return isinstance(value, (numbers.Integral, torch.SymInt)) and not isinstance(value, bool)


def is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2


def is_rope(value: object) -> bool:
    """None, two tensors in a tuple or a list, or a complex tensor."""
    if isinstance(value, Tensor):
        return value.is_complex()
    return value is None or (
        isinstance(value, (tuple, list)) and len(value) == 2 and all(map(is_tensor, value))
    )


def is_outputs(value: object) -> bool:
    """Two or three tensors in a tuple or a list."""
    return isinstance(value, (tuple, list)) and all(map(is_tensor, value))


def shown(value: object) -> str:
    """A value as sentences give it: plain and short ones themselves, of others their type."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str) and len(value) > 64:
        return f"a string of {len(value)} characters"
    is_plain = value is None or isinstance(value, (str, int, float))
    return repr(value) if is_plain else type(value).__name__


def refuse_type(operation: str, name: str, accepted: str, value: object) -> NoReturn:
    raise TypeError(f"{operation}: {name} must be {accepted}, got {shown(value)}")


def find_proxy(values: tuple) -> Optional[torch.fx.Proxy]:
    """One of the proxies among a call's arguments, those within pairs included."""
    for value in values:
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, torch.fx.Proxy):
                return item
    return None


# The functions ask these of what is not a plain float, int, str or bool, so that every path takes the same
# scalars, and Torch's own conversions none.


def as_number(operation: str, name: str, value: Any, accepted: str = "a number") -> Any:
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        refuse_type(operation, name, accepted, value)
    try:
        return float(value)
    except OverflowError:
        fail(operation, f"{name} must be within float64, got {shown(value)}")


def as_integer(operation: str, name: str, value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        refuse_type(operation, name, "an integer", value)
    return int(value)


def as_count(operation: str, name: str, value: object) -> int:
    count = as_integer(operation, name, value)
    if count < 1:
        fail(operation, f"{name} must be at least 1, got {shown(count)}")
    if count > MAX_INTEGER:
        fail(operation, f"{name} must be at most {MAX_INTEGER}, got {shown(count)}")
    return count


def as_heads(operation: str, value: object) -> int:
    return as_count(operation, "heads", value)


def as_scale(operation: str, name: str, value: object) -> float:
    scale = value if type(value) is float else as_number(operation, name, value, "a number or None")
    if not MIN_SCALE <= scale <= MAX_SCALE:
        fail(operation, f"{name} must be positive and finite in float32, got {scale}")
    return scale


def check_flag(operation: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        refuse_type(operation, name, "True or False", value)


def check_choice(operation: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        refuse_type(operation, name, "a string", value)
    if value not in choices:
        *others, last = map(repr, choices)
        fail(operation, f"{name} must be {', '.join(others)} or {last}, got {shown(value)}")


ACTIVATIONS = ("none", "silu")
APPROXIMATIONS = ("none", "tanh")
HALVES = ("first", "second")
LAYOUTS = ("interleaved", "half")
MIN_SCALE, MAX_SCALE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
MAX_INTEGER = 2**63 - 1  # of a schema
NORMS = ("across_heads", "per_head", "none")


PLAIN_TYPES = (Tensor, nn.Parameter)
# Subclasses of Tensor that stand for plain ones while something is traced.
_TRACED_TYPES = "torch._subclasses."


def is_plain(tensor: Optional[Tensor]) -> bool:
    """Whether a tensor, if there is one, is no quantized, sharded or otherwise special subclass."""
    cls = type(tensor)
    return tensor is None or cls in PLAIN_TYPES or cls.__module__.startswith(_TRACED_TYPES)


def check_layout(operation: str, name: str, tensor: Tensor) -> None:
    """``tensor`` is strided. Torch has no kernels of this package for others, and says so at length."""
    if tensor.is_nested:
        given = "a nested one"
    elif tensor.layout is not torch.strided:
        given = f"one of layout {str(tensor.layout).replace('torch.', '')}"
    elif tensor.is_quantized:
        given = f"a quantized one of {dtype_name(tensor.dtype)}"
    else:
        return
    fail(operation, f"{name} must be a strided tensor, got {given}")


def check_kernel_device(operation: str, name: str, tensor: Tensor) -> None:
    """``tensor`` is where this build has kernels, or nowhere."""
    if tensor.device.type not in (KERNEL_DEVICE_TYPE, "meta"):
        where = "on a CUDA device" if KERNEL_DEVICE_TYPE == "cuda" else "on the CPU"
        kernels = KERNEL_DEVICE_TYPE.upper()
        fail(
            operation,
            f"{name} must be {where} (this build has {kernels} kernels), got {tensor.device}",
        )


def check_input(
    operation: str,
    name: str,
    x: Tensor,
    min_dims: int = 1,
    accepts_float32: bool = True,
    any_strides: bool = False,
) -> None:
    """``x`` has a supported device and dtype, ``min_dims`` to 64 dimensions and unit stride in the last,
    unless it may have any."""
    check_kernel_device(operation, name, x)
    if x.dtype not in SUPPORTED_DTYPES or (x.dtype == torch.float32 and not accepts_float32):
        float32 = "float32, " if accepts_float32 else ""
        fail(operation, f"{name} must be {float32}float16 or bfloat16, got {dtype_name(x.dtype)}")
    if x.dim() > MAX_DIMS:
        fail(operation, f"{name} must have at most {MAX_DIMS} dimensions, got {x.dim()}")
    if x.dim() < min_dims:
        plural = "dimension" if min_dims == 1 else "dimensions"
        fail(
            operation,
            f"{name} must have at least {min_dims} {plural}, got shape {tuple(x.shape)}",
        )
    if any_strides:
        _check_stored(operation, name, x)
    else:
        check_readable(operation, name, x)


def check_gated(operation: str, name: str, x: Tensor) -> None:
    """``x`` has two halves."""
    if x.shape[-1] % 2:
        fail(operation, f"{name} must have an even last dimension, got {x.shape[-1]}")


def check_readable(operation: str, name: str, tensor: Tensor) -> None:
    """``tensor`` has unit stride in its last dimension, and its storage all of its elements."""
    if tensor.layout is not torch.strided:
        check_layout(operation, name, tensor)
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        if torch._C._are_functorch_transforms_active():
            return  # the stride is vmap's doing
        fail(
            operation,
            f"{name} must have stride 1 in its last dimension, got stride {tensor.stride(-1)}",
        )
    _check_stored(operation, name, tensor)


def _check_stored(operation: str, name: str, tensor: Tensor) -> None:
    """The storage of ``tensor`` has all of its elements."""
    if tensor.layout is not torch.strided:
        check_layout(operation, name, tensor)
    if torch.compiler.is_compiling() or not _has_memory(tensor) or tensor.numel() == 0:
        return
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    needed = (tensor.storage_offset() + reach + 1) * tensor.element_size()
    held = tensor.untyped_storage().nbytes()
    if held < needed:
        fail(
            operation,
            f"{name} must have a storage of at least {needed} bytes, got one of {held} bytes",
        )


def _has_memory(tensor: Tensor) -> bool:
    """Not so of tensors that are traced, wrapped by a transform, or sharded."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and not tensor.is_meta
        and not torch._C._are_functorch_transforms_active()
        and not torch._is_functional_tensor(tensor)
    )


def check_device(operation: str, name: str, tensor: Tensor, x_name: str, x: Tensor) -> None:
    if tensor.device != x.device:
        fail(
            operation, f"{name} must be on the device of {x_name} ({x.device}), got {tensor.device}"
        )


def check_dtype(operation: str, name: str, tensor: Tensor, x_name: str, x: Tensor) -> None:
    if tensor.dtype != x.dtype:
        fail(
            operation,
            f"{name} must have the dtype of {x_name} ({dtype_name(x.dtype)}), "
            f"got {dtype_name(tensor.dtype)}",
        )


def check_shape(
    operation: str, name: str, tensor: Tensor, shape: tuple, x_name: str, x: Tensor
) -> None:
    """``tensor`` has x's dtype and device, exactly ``shape``, and unit last stride."""
    check_device(operation, name, tensor, x_name, x)
    check_dtype(operation, name, tensor, x_name, x)
    _check_exact_shape(operation, name, tensor, shape)


def _check_exact_shape(operation: str, name: str, tensor: Tensor, shape: tuple) -> None:
    if tuple(tensor.shape) != tuple(shape):
        fail(operation, f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    check_readable(operation, name, tensor)


def check_vector(operation: str, name: str, tensor: Tensor, x_name: str, x: Tensor) -> None:
    """``tensor`` has one value for each of x's last dimension."""
    check_shape(operation, name, tensor, (x.shape[-1],), x_name, x)


def check_norm_vector(operation: str, name: str, tensor: Tensor, x_name: str, x: Tensor) -> None:
    """The same, and ``tensor`` may be float32 whatever ``x`` is."""
    check_device(operation, name, tensor, x_name, x)
    _check_float32_or_dtype(operation, name, tensor, x_name, x)
    _check_exact_shape(operation, name, tensor, (x.shape[-1],))


def check_broadcastable(operation: str, name: str, tensor: Tensor, x_name: str, x: Tensor) -> None:
    """``tensor``, float32 or of x's dtype, broadcasts against ``x`` in every dimension but the last."""
    check_device(operation, name, tensor, x_name, x)
    _check_float32_or_dtype(operation, name, tensor, x_name, x)
    dims = tensor.dim()
    matches = 1 <= dims <= x.dim() and tensor.shape[-1] == x.shape[-1]
    if matches and dims > 1:
        matches = all(
            size in (1, full) for size, full in zip(tensor.shape[:-1], x.shape[x.dim() - dims : -1])
        )
    if not matches:
        fail(
            operation,
            f"{name} must broadcast against {x_name} of shape {tuple(x.shape)} with a last "
            f"dimension of {x.shape[-1]}, got {tuple(tensor.shape)}",
        )
    check_readable(operation, name, tensor)


def _check_heads(operation: str, name: str, x: Tensor, heads: int, norm: str, layout: str) -> int:
    """``x`` leads a norm and a rotation; returns its head dimension."""
    check_input(operation, name, x, min_dims=3)
    check_choice(operation, "norm", norm, NORMS)
    check_choice(operation, "layout", layout, LAYOUTS)
    if x.dim() > 4:
        fail(
            operation,
            f"{name} must have shape (batch, seq, heads*head_dim) or (batch, seq, heads, head_dim), "
            f"got {tuple(x.shape)}",
        )
    return _head_dim(operation, name, x, heads)


def _head_dim(operation: str, name: str, x: Tensor, heads: int) -> int:
    """Of ``x`` (B, S, heads * d) or (B, S, heads, d)."""
    heads = as_heads(operation, heads)
    if x.dim() == 4 and x.shape[2] != heads:
        fail(
            operation,
            f"heads must equal the third dimension of {name} ({x.shape[2]}), got {heads}",
        )
    if x.dim() == 3 and x.shape[2] % heads:
        fail(
            operation, f"heads must divide the last dimension of {name} ({x.shape[2]}), got {heads}"
        )
    return x.shape[3] if x.dim() == 4 else x.shape[2] // heads


def _has_heads(x: Tensor, q: Tensor, seq: int, head_dim: int) -> bool:
    """Whether ``x`` is like the query, but for its length and its number of heads."""
    if x.dim() != q.dim() or x.shape[0] != q.shape[0] or x.shape[1] != seq:
        return False
    if x.dim() == 4:
        return x.shape[3] == head_dim
    return x.shape[2] % head_dim == 0 if head_dim else x.shape[2] == 0


def _check_norm_weight(
    operation: str,
    name: str,
    weight: Optional[Tensor],
    x_name: str,
    x: Tensor,
    width: int,
    norm: str,
    head_dim: int,
) -> None:
    """The weight of rows of ``width`` elements; ``x`` leads."""
    if weight is None:
        return
    if norm == "none":
        fail(
            operation,
            f"{name} is accepted only with norm 'across_heads' or 'per_head', got norm 'none'",
        )
    check_device(operation, name, weight, x_name, x)
    _check_float32_or_dtype(operation, name, weight, x_name, x)
    _check_exact_shape(operation, name, weight, (head_dim if norm == "per_head" else width,))


def _check_qk(
    operation: str,
    q: Tensor,
    k: Tensor,
    q_weight: Optional[Tensor],
    k_weight: Optional[Tensor],
    heads: int,
    norm: str,
    layout: str,
    has_one_length: bool,
) -> int:
    """Everything of ``qk_norm_rope`` but its rotation; returns the head dimension."""
    head_dim = _check_heads(operation, "q", q, heads, norm, layout)
    check_device(operation, "k", k, "q", q)
    check_dtype(operation, "k", k, "q", q)
    k_seq = q.shape[1] if has_one_length or k.dim() < 2 else k.shape[1]
    if not _has_heads(k, q, k_seq, head_dim):
        fail(
            operation,
            f"k must have the batch{', seq' if has_one_length else ''} and head_dim of q of shape "
            f"{tuple(q.shape)} (head_dim {head_dim}), got {tuple(k.shape)}",
        )
    check_readable(operation, "k", k)
    k_heads = heads_of(k, head_dim)
    _require_countable_heads(operation, "q", q, max(heads, k_heads), head_dim)
    if norm == "across_heads":
        _require_countable_token(operation, "q", q, heads, head_dim)
        _require_countable_token(operation, "k", q, k_heads, head_dim)
    if k_seq != q.shape[1]:
        _require_countable_of(operation, "k", k, norm, head_dim)
    for name, weight, x in (("q_weight", q_weight, q), ("k_weight", k_weight, k)):
        width = x.shape[2:].numel()
        _check_norm_weight(operation, name, weight, "q", q, width, norm, head_dim)
    return head_dim


def _require_countable_of(operation: str, name: str, x: Tensor, norm: str, head_dim: int) -> None:
    """Of the key and the values, whose length the query does not have."""
    heads = heads_of(x, head_dim)
    _require_countable_heads(operation, name, x, heads, head_dim)
    if norm == "across_heads":
        _require_countable_token(operation, name, x, heads, head_dim)


def heads_of(x: Tensor, head_dim: int) -> int:
    """Heads of a tensor (B, S, H*d) or (B, S, H, d)."""
    return x.shape[2:].numel() // head_dim if head_dim else 0


def check_written(
    operation: str,
    outputs: dict[str, Optional[Tensor]],
    read_only: dict[str, Optional[Tensor]],
    where: str = " in place",
    own: Optional[dict[str, str]] = None,
) -> None:
    """The outputs overlap neither themselves nor each other, nor what is read while they are written; but
    what ``own`` has may be exactly the output of that name."""
    written = {name: tensor for name, tensor in outputs.items() if tensor is not None}
    for name, tensor in written.items():
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
            if isinstance(size, int) and size > 1 and isinstance(stride, int) and stride == 0:
                fail(
                    operation,
                    f"{name} must not be expanded to be written{where}, got stride 0 in dimension "
                    f"{dim}",
                )
        if overlaps_itself(tensor):
            fail(
                operation,
                f"{name} must not overlap itself to be written{where}, got shape "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}",
            )
    for index, (name, tensor) in enumerate(written.items()):
        _check_read(operation, name, tensor, dict(list(written.items())[:index]), where)
    for name, other in read_only.items():
        if other is not None:
            _check_read(operation, name, other, written, where, (own or {}).get(name))


def check_out(
    operation: str, out: Tensor, read: dict[str, Tensor], may_be_out: Collection[str] = ()
) -> None:
    """``out`` overlaps neither itself nor what is read, but for those tensors that it may be itself."""
    check_written(operation, {"out": out}, dict(read), "", dict.fromkeys(may_be_out, "out"))


def refuse_out(operation: str) -> NoReturn:
    """What is written to a tensor of the caller's has no derivatives."""
    fail(
        operation,
        "out must be None where an argument requires grad or carries a tangent, got a tensor",
    )


def _check_read(
    operation: str,
    name: str,
    tensor: Tensor,
    written: dict[str, Tensor],
    where: str,
    own: Optional[str] = None,
) -> None:
    for written_name, output in written.items():
        if not overlap(tensor, output):
            continue
        if written_name != own or not is_same_view(tensor, output):
            fail(
                operation,
                f"{name} must not share memory with {written_name}, which is written{where}, "
                "got overlapping elements",
            )


def check_output(
    operation: str, name: str, out: Tensor, x_name: str, x: Tensor, leader_name: str, leader: Tensor
) -> None:
    """``out`` can take what is made of ``x``."""
    check_device(operation, name, out, leader_name, leader)
    check_dtype(operation, name, out, leader_name, leader)
    if out.shape != x.shape:
        fail(
            operation,
            f"{name} must have the shape of {x_name} {tuple(x.shape)}, got {tuple(out.shape)}",
        )
    check_readable(operation, name, out)


def _is_above(count: int, limit: int) -> bool:
    """False where tracing has no bound for the count: the compiled check asks again."""
    if isinstance(count, int):
        return count > limit
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(count > limit)


def _require_countable(
    operation: str, name: str, x: Tensor, what: str, sizes: tuple, limit: int = MAX_COUNT
) -> None:
    """``what``, the product of the sizes, is at most ``limit``. Of an empty ``x`` nothing is counted."""
    if _is_above(math.prod(sizes), limit) and x.numel():
        factors = " * ".join(map(str, sizes))
        fail(operation, f"{name} must have a {what} of at most {limit}, got {factors}")


def _require_countable_heads(
    operation: str, name: str, x: Tensor, heads: int, head_dim: int
) -> None:
    _require_countable(operation, name, x, "batch * seq * heads", (*x.shape[:2], heads))
    _require_countable(operation, name, x, "head_dim", (head_dim,))


def _require_countable_token(
    operation: str, name: str, x: Tensor, heads: int, head_dim: int
) -> None:
    _require_countable(operation, name, x, "heads * head_dim", (heads, head_dim))


def _require_equal_heads(operation: str, name: str, heads: int, k_heads: int) -> None:
    if heads != k_heads:
        fail(
            operation,
            f"{name} that differ between heads need q and k with the same number of heads, "
            f"got {heads} and {k_heads}",
        )


def _require_even_head_dim(operation: str, x_name: str, head_dim: int) -> None:
    if head_dim % 2:
        fail(operation, f"{x_name} must have an even head_dim to be rotated, got {head_dim}")


def _check_float32_or_dtype(
    operation: str, name: str, table: Tensor, x_name: str, x: Tensor
) -> None:
    if table.dtype not in (torch.float32, x.dtype):
        fail(
            operation,
            f"{name} must be float32 or have the dtype of {x_name} ({dtype_name(x.dtype)}), "
            f"got {dtype_name(table.dtype)}",
        )


def _check_table(
    operation: str,
    name: str,
    table: Tensor,
    x_name: str,
    x: Tensor,
    seq: int,
    heads: int,
    head_dim: int,
) -> None:
    """The table is (1 or B, S, 1 or H, d or d/2), or less of it; a complex one of d/2."""
    check_device(operation, name, table, x_name, x)
    of_pairs = table.dtype == torch.complex64
    if not of_pairs:
        _check_float32_or_dtype(operation, name, table, x_name, x)
    batch = x.shape[0]
    shape = (1, *table.shape) if table.dim() == 2 else tuple(table.shape)
    matches = len(shape) in (3, 4) and shape[0] in (1, batch) and shape[1] == seq
    lasts = (head_dim // 2,) if of_pairs else (head_dim, head_dim // 2)
    is_of_head = len(shape) > 0 and shape[-1] in lasts
    if matches and len(shape) == 4:
        matches = shape[2] in (1, heads) and is_of_head
    elif matches:
        matches = is_of_head or (shape[2] == heads * head_dim and not of_pairs)
    if not matches and of_pairs:
        fail(
            operation,
            f"{name} must have shape (S, d/2), (1 or B, S, d/2) or (1 or B, S, 1 or H, d/2) with "
            f"B = {batch}, S = {seq}, H = {heads}, d = {head_dim}, got {tuple(table.shape)}",
        )
    if not matches:
        fail(
            operation,
            f"{name} must have shape (S, d or d/2), (S, H*d), (1 or B, S, d or d/2), "
            f"(1 or B, S, H*d) or (1 or B, S, 1 or H, d or d/2) with B = {batch}, S = {seq}, "
            f"H = {heads}, d = {head_dim}, got {tuple(table.shape)}",
        )
    check_readable(operation, name, table)


def _is_view_of_complex(table: Tensor) -> bool:
    if table.dtype != torch.float32 or table.dim() < 2 or table.shape[-1] != 2:
        return False
    return table.stride(-1) == 1 and (table.stride(-2) == 2 or table.shape[-2] == 1)


def check_tables(
    operation: str,
    cos: Tensor,
    sin: Optional[Tensor],
    x_name: str,
    x: Tensor,
    seq: int,
    heads: int,
    head_dim: int,
    prefix: str = "",
    accepts_view: bool = False,
) -> None:
    """Both tables are of one value an element, or both of one a pair, or a complex one is both, where
    ``accepts_view`` also as a view of real numbers (..., 2)."""
    cos_name, sin_name = f"{prefix}cos", f"{prefix}sin"
    _require_even_head_dim(operation, x_name, head_dim)
    of = (x_name, x, seq, heads, head_dim)
    if accepts_view and sin is None and _is_view_of_complex(cos):
        cos = torch.view_as_complex(cos)
    if cos.dtype == torch.complex64:
        if sin is not None:
            fail(
                operation,
                f"{sin_name} must be None where {cos_name} is complex, got a tensor of "
                f"{dtype_name(sin.dtype)}",
            )
        _check_table(operation, cos_name, cos, *of)
        return
    if sin is None:
        fail(
            operation,
            f"{sin_name} must be given along with a {cos_name} of {dtype_name(cos.dtype)}, got None",
        )
    _check_table(operation, cos_name, cos, *of)
    _check_table(operation, sin_name, sin, *of)
    is_by_pair = [table.shape[-1] == head_dim // 2 for table in (cos, sin)]
    if is_by_pair[0] != is_by_pair[1]:
        held = "pair" if is_by_pair[0] else "element"
        fail(
            operation,
            f"{sin_name} must hold one value for each {held}, as {cos_name} does, "
            f"got {tuple(sin.shape)}",
        )
    check_dtype(operation, sin_name, sin, cos_name, cos)


def _require_heads_of_tables(
    operation: str, tables: dict[str, Optional[Tensor]], heads: int, head_dim: int, k_heads: int
) -> None:
    for name, table in tables.items():
        if table is None:
            continue
        is_of_head = table.shape[-1] in (head_dim, head_dim // 2)
        if table.shape[2] != 1 if table.dim() == 4 else not is_of_head:
            _require_equal_heads(operation, name, heads, k_heads)


def check_rope(operation: str, x: Tensor, cos: Tensor, sin: Optional[Tensor], layout: str) -> None:
    """Every argument of ``rope``."""
    check_input(operation, "x", x, min_dims=3)
    check_choice(operation, "layout", layout, LAYOUTS)
    if x.dim() > 4:
        fail(
            operation,
            "x must have shape (batch, seq, heads*head_dim) or (batch, seq, heads, head_dim), "
            f"got {tuple(x.shape)}",
        )
    if x.dim() == 4:
        heads, head_dim = x.shape[2:]
    else:
        width, head_dim = x.shape[2], cos.shape[-1] if cos.dim() else 0
        of_pairs = cos.dtype == torch.complex64
        head_dim = 2 * head_dim if of_pairs else head_dim
        if cos.dim() == 0 or (width % head_dim if head_dim else width):
            fail(
                operation,
                f"cos must have a last dimension that divides {'half of ' if of_pairs else ''}the "
                f"last dimension of x ({width}), got shape {tuple(cos.shape)}",
            )
        heads = width // head_dim if head_dim else 0
    _require_even_head_dim(operation, "x", head_dim)
    _require_countable_heads(operation, "x", x, heads, head_dim)
    check_tables(operation, cos, sin, "x", x, x.shape[1], heads, head_dim)


def check_rope_3d(
    operation: str,
    x: Tensor,
    frame_cos: Tensor,
    frame_sin: Tensor,
    height_cos: Tensor,
    height_sin: Tensor,
    width_cos: Tensor,
    width_sin: Tensor,
    layout: str,
) -> None:
    """Every argument of ``rope_3d``."""
    check_input(operation, "x", x, min_dims=4)
    check_choice(operation, "layout", layout, LAYOUTS)
    if x.dim() != 4:
        fail(
            operation,
            f"x must have shape (batch, seq, heads, head_dim), got {tuple(x.shape)}",
        )
    _require_even_head_dim(operation, "x", x.shape[3])
    _require_countable_heads(operation, "x", x, *x.shape[2:])
    axes = {
        "frame": (frame_cos, frame_sin),
        "height": (height_cos, height_sin),
        "width": (width_cos, width_sin),
    }
    for axis, (cos, sin) in axes.items():
        for name, table in ((f"{axis}_cos", cos), (f"{axis}_sin", sin)):
            check_device(operation, name, table, "x", x)
            _check_float32_or_dtype(operation, name, table, "x", x)
            check_dtype(operation, name, table, "frame_cos", frame_cos)
            if table.dim() != 2 or any(_is_above(size, MAX_COUNT) for size in table.shape):
                fail(
                    operation,
                    f"{name} must have shape (positions, pairs), each at most {MAX_COUNT}, "
                    f"got {tuple(table.shape)}",
                )
            check_readable(operation, name, table)
        if sin.shape != cos.shape:
            fail(
                operation,
                f"{axis}_sin must have the shape of {axis}_cos {tuple(cos.shape)}, "
                f"got {tuple(sin.shape)}",
            )
    sizes, pairs = zip(*(cos.shape for cos, _ in axes.values()))
    if x.shape[3] != 2 * sum(pairs):
        fail(
            operation,
            f"x must have a head_dim of 2 * ({pairs[0]} + {pairs[1]} + {pairs[2]}) for the pairs "
            f"of frame, height and width, got {x.shape[3]}",
        )
    if x.shape[1] != sizes[0] * sizes[1] * sizes[2]:
        fail(
            operation,
            f"x must have a seq of {sizes[0]} * {sizes[1]} * {sizes[2]} for the positions of "
            f"frame, height and width, got {x.shape[1]}",
        )


def _check_rotation(
    operation: str,
    rotation: tuple,
    leader_name: str,
    leader: Tensor,
    name: str,
    x: Tensor,
    head_dim: int,
    k_heads: Optional[int] = None,
    prefix: str = "",
) -> None:
    """What turns ``x``, and with it a key of ``k_heads``: (cos, sin, coordinates, frequencies)."""
    names = [f"{prefix}{field}" for field in ("cos", "sin", "coordinates", "frequencies")]
    cos, sin, coordinates, frequencies = rotation
    given = [field for field, tensor in zip(names, rotation) if tensor is not None]
    heads = heads_of(x, head_dim)
    if coordinates is not None or frequencies is not None:
        if cos is not None or sin is not None:
            first = names[3] if coordinates is None else names[2]
            fail(operation, f"{given[0]} must be None along with {first}, got a tensor")
        if len(given) < 2:
            missing = names[2] if coordinates is None else names[3]
            fail(operation, f"{missing} must be given along with {given[0]}, got None")
        _check_coordinates(
            operation,
            {names[2]: coordinates, names[3]: frequencies},
            leader_name,
            leader,
            name,
            x,
            heads,
            head_dim,
            k_heads,
        )
    elif cos is not None:
        of = (leader_name, leader, x.shape[1], heads, head_dim)
        check_tables(operation, cos, sin, *of, prefix, accepts_view=True)
        if k_heads is not None:
            is_view = sin is None and cos.dtype != torch.complex64
            tables = {names[0]: cos[..., 0] if is_view else cos, names[1]: sin}
            _require_heads_of_tables(operation, tables, heads, head_dim, k_heads)
    elif sin is not None:
        fail(operation, f"{names[0]} must be given along with {names[1]}, got None")


def check_norm_rope(
    x: Tensor,
    weight: Optional[Tensor],
    cos: Optional[Tensor],
    sin: Optional[Tensor],
    coordinates: Optional[Tensor],
    frequencies: Optional[Tensor],
    heads: int,
    norm: str,
    layout: str,
) -> None:
    """Every argument of ``norm_rope`` but its output."""
    operation = "norm_rope"
    head_dim = _check_heads(operation, "x", x, heads, norm, layout)
    _require_countable_heads(operation, "x", x, heads, head_dim)
    if norm == "across_heads":
        _require_countable_token(operation, "x", x, heads, head_dim)
    width = x.shape[2:].numel()
    _check_norm_weight(operation, "weight", weight, "x", x, width, norm, head_dim)
    rotation = (cos, sin, coordinates, frequencies)
    _check_rotation(operation, rotation, "x", x, "x", x, head_dim)


def check_qk_norm_two_ropes(
    q: Tensor,
    k: Tensor,
    q_weight: Optional[Tensor],
    k_weight: Optional[Tensor],
    cos: Optional[Tensor],
    sin: Optional[Tensor],
    coordinates: Optional[Tensor],
    frequencies: Optional[Tensor],
    k_cos: Optional[Tensor],
    k_sin: Optional[Tensor],
    k_coordinates: Optional[Tensor],
    k_frequencies: Optional[Tensor],
    heads: int,
    norm: str,
    layout: str,
) -> None:
    """Every argument of ``qk_norm_rope`` but its values and outputs."""
    operation = "qk_norm_rope"
    rotation = (cos, sin, coordinates, frequencies)
    of_key = (k_cos, k_sin, k_coordinates, k_frequencies)
    is_given, is_given_of_key = (
        any(tensor is not None for tensor in tensors) for tensors in (rotation, of_key)
    )
    turn_alike = is_given and not is_given_of_key
    weights = (q_weight, k_weight)
    head_dim = _check_qk(operation, q, k, *weights, heads, norm, layout, turn_alike)
    k_heads = None if is_given_of_key else heads_of(k, head_dim)
    _check_rotation(operation, rotation, "q", q, "q", q, head_dim, k_heads)
    if is_given_of_key:
        _check_rotation(operation, of_key, "q", q, "k", k, head_dim, prefix="k_")


def check_qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Optional[Tensor],
    k_weight: Optional[Tensor],
    cos: Optional[Tensor],
    sin: Optional[Tensor],
    heads: int,
    norm: str,
    layout: str,
) -> None:
    """Of one pair of tables, or without a rotation."""
    none = (None,) * 6
    check_qk_norm_two_ropes(q, k, q_weight, k_weight, cos, sin, *none, heads, norm, layout)


def check_qk_norm_coordinate_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Optional[Tensor],
    k_weight: Optional[Tensor],
    coordinates: Tensor,
    frequencies: Tensor,
    heads: int,
    norm: str,
    layout: str,
) -> None:
    """Of coordinates that both turn by."""
    rotation = (None, None, coordinates, frequencies, *(None,) * 4)
    check_qk_norm_two_ropes(q, k, q_weight, k_weight, *rotation, heads, norm, layout)


def check_values(operation: str, q: Tensor, k: Tensor, v: Tensor, heads: int, norm: str) -> None:
    """``v`` is copied beside a valid key."""
    head_dim = q.shape[2:].numel() // heads
    check_device(operation, "v", v, "q", q)
    check_dtype(operation, "v", v, "q", q)
    if not _has_heads(v, q, k.shape[1], head_dim):
        fail(
            operation,
            f"v must have the batch, seq and head_dim of k of shape {tuple(k.shape)} "
            f"(head_dim {head_dim}), got {tuple(v.shape)}",
        )
    check_readable(operation, "v", v)
    _require_countable_of(operation, "v", v, norm, head_dim)


def _check_coordinates(
    operation: str,
    rotation: dict[str, Tensor],
    leader_name: str,
    leader: Tensor,
    name: str,
    x: Tensor,
    heads: int,
    head_dim: int,
    k_heads: Optional[int],
) -> None:
    """Coordinates and frequencies, by their names."""
    _require_even_head_dim(operation, leader_name, head_dim)
    for field, tensor in rotation.items():
        check_device(operation, field, tensor, leader_name, leader)
        if tensor.dtype != torch.float32:
            fail(operation, f"{field} must be float32, got {dtype_name(tensor.dtype)}")
    (coordinates_name, coordinates), (frequencies_name, frequencies) = rotation.items()
    batch, seq = x.shape[0], x.shape[1]
    if (
        coordinates.dim() != 3
        or coordinates.shape[0] not in (1, batch)
        or coordinates.shape[1] != seq
        or coordinates.shape[2] < 1
    ):
        fail(
            operation,
            f"{coordinates_name} must have shape (1 or {batch}, {seq}, axes), "
            f"got {tuple(coordinates.shape)}",
        )
    check_readable(operation, coordinates_name, coordinates)
    if frequencies.dim() != 1:
        fail(
            operation,
            f"{frequencies_name} must have one dimension, got shape {tuple(frequencies.shape)}",
        )
    check_readable(operation, frequencies_name, frequencies)
    if k_heads is not None:
        _require_equal_heads(operation, coordinates_name, heads, k_heads)
    _require_countable_token(operation, name, leader, heads, head_dim)
    pairs, axes = heads * head_dim // 2, coordinates.shape[2]
    if axes * frequencies.shape[0] > pairs:
        fail(
            operation,
            f"{frequencies_name} must hold at most {pairs // axes} values for {pairs} pairs and "
            f"{axes} axes, got {frequencies.shape[0]}",
        )


def check_tables_dim(dim: int, rotated_pairs: int) -> None:
    """The number of columns that ``CoordinateRope.tables`` is asked for."""
    operation = "CoordinateRope.tables"
    as_integer(operation, "dim", dim)
    if dim % 2 or dim < 2 * rotated_pairs:
        fail(
            operation,
            f"dim must be even and at least {2 * rotated_pairs}, two for each axis and frequency, "
            f"got {dim}",
        )


ATTENTION_HEAD_DIMS = (64, 128)


def check_attention(
    operation: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: Optional[float],
    key_bias: Optional[Tensor],
    key_lengths: Optional[Tensor],
    heads: Optional[int],
) -> None:
    is_given = heads is not None
    check_input(operation, "q", q, min_dims=3 if is_given else 4, accepts_float32=False)
    if q.dim() != (3 if is_given else 4):
        form = "heads*head_dim) where heads is given" if is_given else "heads, head_dim)"
        fail(operation, f"q must have shape (batch, seq, {form}, got {tuple(q.shape)}")
    if heads is None:
        heads, head_dim = q.shape[2:]
    else:
        head_dim = _head_dim(operation, "q", q, heads)
    batch, query_length = q.shape[:2]
    if head_dim not in ATTENTION_HEAD_DIMS:
        fail(operation, f"q must have a head_dim of 64 or 128, got {head_dim}")
    check_device(operation, "k", k, "q", q)
    check_dtype(operation, "k", k, "q", q)
    if not _has_heads(k, q, k.shape[1] if k.dim() > 1 else 0, head_dim):
        in_heads = f" in heads of {head_dim}" if is_given else ""
        fail(
            operation,
            f"k must have the batch and head_dim of q of shape {tuple(q.shape)}{in_heads}, "
            f"got {tuple(k.shape)}",
        )
    key_length, key_heads = k.shape[1], heads_of(k, head_dim)
    if heads % key_heads if key_heads else heads:
        fail(
            operation,
            f"k must have a number of heads that divides that of q ({heads}), got {key_heads}",
        )
    check_readable(operation, "k", k)
    check_device(operation, "v", v, "q", q)
    check_dtype(operation, "v", v, "q", q)
    _check_exact_shape(operation, "v", v, k.shape)
    queries = (batch, query_length, heads)
    _require_countable(operation, "q", q, "batch * seq * heads", queries, MAX_ATTENTION_ROWS)
    _require_countable(operation, "k", q, "seq", (key_length,), MAX_ATTENTION_ROWS)
    if scale is not None:
        as_scale(operation, "scale", scale)
    if key_bias is not None:
        check_device(operation, "key_bias", key_bias, "q", q)
        _check_float32_or_dtype(operation, "key_bias", key_bias, "q", q)
        _check_exact_shape(operation, "key_bias", key_bias, (batch, key_length))
    if key_lengths is not None:
        check_device(operation, "key_lengths", key_lengths, "q", q)
        if key_lengths.dtype != torch.int32:
            fail(operation, f"key_lengths must be int32, got {dtype_name(key_lengths.dtype)}")
        _check_exact_shape(operation, "key_lengths", key_lengths, (batch,))


def is_channels_last(operation: str, x: Tensor) -> bool:
    """Whether the channels of ``x``, (B, C, ...), are last in memory; else they come before the pixels.

    Raises:
        ValueError: if neither is so, or there are gaps between the spatial dimensions.
    """
    count = stride = 1
    if x.numel() == 0:
        return False
    for size, step in zip(reversed(x.shape[2:]), reversed(x.stride()[2:])):
        if size == 1:
            continue
        if count == 1:
            stride = step
        elif step != stride * count:
            fail(
                operation,
                f"x must have no gaps between its spatial dimensions, got strides {x.stride()}",
            )
        count *= size
    if count == 1 or stride == 1:
        return False
    if x.shape[1] > 1 and x.stride(1) != 1:
        fail(
            operation,
            "x must have stride 1 in its spatial dimensions or in its channels, "
            f"got strides {x.stride()}",
        )
    return True


def has_dense_images(tensor: Tensor) -> bool:
    """Whether group_norm takes it: an image, or a tensor of less dimensions with unit stride in its last."""
    if tensor.dim() < 3:
        return tensor.dim() == 0 or tensor.stride(-1) == 1
    try:
        is_channels_last("group_norm", tensor)
    except ValueError:
        return False
    return True


def check_group_norm(
    operation: str,
    x: Tensor,
    num_groups: int,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    eps: float,
    channel_bias: Optional[Tensor],
    activation: str,
) -> None:
    check_input(operation, "x", x, min_dims=2, any_strides=True)
    batch, channels, *spatial = x.shape
    if channels % as_count(operation, "num_groups", num_groups):
        fail(operation, f"num_groups must divide the channels of x ({channels}), got {num_groups}")
    if not torch._C._are_functorch_transforms_active():  # else strides are vmap's doing
        is_channels_last(operation, x)
    group = (channels // num_groups, math.prod(spatial))
    _require_countable(operation, "x", x, "group", group)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            check_device(operation, name, vector, "x", x)
            _check_float32_or_dtype(operation, name, vector, "x", x)
            _check_exact_shape(operation, name, vector, (channels,))
    if channel_bias is not None:
        check_device(operation, "channel_bias", channel_bias, "x", x)
        _check_float32_or_dtype(operation, "channel_bias", channel_bias, "x", x)
        _check_exact_shape(operation, "channel_bias", channel_bias, (batch, channels))
    check_choice(operation, "activation", activation, ACTIVATIONS)
