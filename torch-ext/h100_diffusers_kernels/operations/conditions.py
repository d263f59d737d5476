"""Checks of tensors against the kernels' requirements. They read no values.

Layers and injected models check at each call: LoRA, quantization, offloading, autocast or a move to another
device can happen between two calls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix
from .calls import PLAIN_TYPES, dtype_name, is_differentiated, is_plain_tensor

# A build has kernels for one device type, which its operator namespace names.
KERNEL_DEVICE_TYPE = "cuda" if "_cuda_" in add_op_namespace_prefix("") else "cpu"
ATTENTION_HEAD_DIMS = range(8, 129, 8)
DTYPES_16_BIT = (torch.bfloat16, torch.float16)

_IS_CUDA = KERNEL_DEVICE_TYPE == "cuda"
_DTYPES = (*DTYPES_16_BIT, torch.float32)


def kernels_run_on(x: Tensor) -> bool:
    """Whether the kernels take tensors of ``x``'s class, dtype and device.

    False under autocast, which chooses a dtype for each operation.
    """
    return (
        x.dtype in _DTYPES
        and (x.is_cuda if _IS_CUDA else x.is_cpu)
        and is_plain_tensor(x)
        and not torch.is_autocast_enabled(KERNEL_DEVICE_TYPE)
    )


# Every operation of every block calls the next three functions. So they are inlined and run cheap checks
# first: ``is_contiguous`` takes a third of ``stride``'s time, ``is_cuda`` a fifth of ``device.type``'s.


def kernels_take(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels take ``x`` together with the other tensors."""
    dtype, device = x.dtype, x.device
    if (
        dtype not in _DTYPES
        or not (x.is_cuda if _IS_CUDA else x.is_cpu)
        or (type(x) not in PLAIN_TYPES and not is_plain_tensor(x))
        or torch.is_autocast_enabled(KERNEL_DEVICE_TYPE)
        or not (x.is_contiguous() or x.stride(-1) == 1 or x.shape[-1] <= 1)
    ):
        return False
    for tensor in others:
        if tensor is not None and (
            tensor.dtype is not dtype
            or tensor.device != device
            or not (tensor.is_contiguous() or tensor.stride(-1) == 1 or tensor.shape[-1] <= 1)
            or (type(tensor) not in PLAIN_TYPES and not is_plain_tensor(tensor))
        ):
            return False
    return True


def same_dtype_and_unit_stride(x: Tensor, *others: Tensor | None) -> bool:
    """``kernels_take`` without the device check, for results computed from accepted tensors.

    A layer in between may return another dtype or tensor class.
    """
    dtype = x.dtype
    if dtype not in _DTYPES or (type(x) not in PLAIN_TYPES and not is_plain_tensor(x)):
        return False
    for tensor in others:
        if tensor is not None and (
            tensor.dtype is not dtype
            or not (tensor.is_contiguous() or tensor.stride(-1) == 1 or tensor.shape[-1] <= 1)
            or (type(tensor) not in PLAIN_TYPES and not is_plain_tensor(tensor))
        ):
            return False
    return x.is_contiguous() or x.stride(-1) == 1 or x.shape[-1] <= 1


def modulators_compatible(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the others can normalize and modulate ``x``, a result computed from accepted tensors.

    The others are weights, biases, scales, shifts and gates, each of x's dtype or float32.
    """
    dtype = x.dtype
    for tensor in others:
        if tensor is not None and (
            (tensor.dtype is not dtype and tensor.dtype is not torch.float32)
            or not (tensor.is_contiguous() or tensor.stride(-1) == 1 or tensor.shape[-1] <= 1)
            or (type(tensor) not in PLAIN_TYPES and not is_plain_tensor(tensor))
        ):
            return False
    return same_dtype_and_unit_stride(x)


def group_norm_takes(x: Tensor, *others: Tensor | None, gaps: int = 0) -> bool:
    """Whether ``group_norm``, or ``channel_rms_norm`` with one gap, takes ``x`` (B, C, ...) together with the
    other vectors."""
    if not (kernels_run_on(x) and has_memory_format(x, gaps)):
        return False
    for tensor in others:
        if tensor is not None and (
            tensor.dtype is not x.dtype
            or tensor.device != x.device
            or not (tensor.stride(-1) == 1 or tensor.shape[-1] <= 1)
            or not is_plain_tensor(tensor)
        ):
            return False
    return True


def has_memory_format(x: Tensor, gaps: int = 0) -> bool:
    """Whether ``x`` (B, C, ...) has dense pixels or dense channels, and at most this number of gaps between
    its pixels, as between frames."""
    if x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)):
        return True
    spatial = [(size, step) for size, step in zip(x.shape[2:], x.stride()[2:]) if size != 1]
    is_dense = not spatial or spatial[-1][1] == 1 or x.shape[1] == 1 or x.stride(1) == 1
    pairs = zip(spatial, spatial[1:])
    return is_dense and sum(outer != size * step for (_, outer), (size, step) in pairs) <= gaps


def attention_takes(query: Tensor, key: Tensor, value: Tensor, heads: int | None = None) -> bool:
    """Whether ``attention`` takes them, and no derivative is requested.

    Each is (B, S, H, d), or (B, S, H * d) if ``heads`` is given, computed from accepted tensors.
    """
    of_query, of_key = query.shape, key.shape
    return (
        query.dtype in DTYPES_16_BIT
        and (of_query[3] if heads is None else of_query[2] / heads) in ATTENTION_HEAD_DIMS
        and same_dtype_and_unit_stride(query, key, value)
        and of_query[0] == of_key[0]
        and of_query[2] % of_key[2] == 0  # heads may share keys
        and (
            of_query[3:] == of_key[3:] if heads is None else of_key[2] % (of_query[2] / heads) == 0
        )
        and of_key == value.shape
        and not is_differentiated(query, key, value)
    )


def tracks_derivatives() -> bool:
    """Whether operations called now may be differentiated."""
    return torch.is_grad_enabled() or is_differentiated()


def may_write() -> bool:
    """Whether results may be written to slices of a buffer.

    False while torch.compile traces, which fuses concatenations, and in transforms of ``torch.func``, which
    would need a batched buffer.
    """
    return not (torch.compiler.is_dynamo_compiling() or torch._C._are_functorch_transforms_active())


def why_not_taken(x: Tensor, *others: Tensor | None) -> str:
    """Why ``kernels_take`` is false, as a clause."""
    for tensor in (x, *others):
        if not is_plain_tensor(tensor):
            return f"it was given {an(type(tensor).__name__)}"
    if torch.is_autocast_enabled(KERNEL_DEVICE_TYPE):
        return "autocast is on"
    given, built = x.device.type, KERNEL_DEVICE_TYPE
    if given != built:
        return f"it was given tensors on {given}, and this build is for {built}"
    if x.dtype not in _DTYPES:
        return f"there are no kernels for {dtype_name(x.dtype)}"
    if any(tensor is not None and tensor.dtype != x.dtype for tensor in others):
        return "it was given tensors of different dtypes"
    if any(tensor is not None and tensor.device != x.device for tensor in others):
        return "it was given tensors on different devices"
    return "it was given tensors whose last dimension has gaps"


def an(name: str) -> str:
    """A class's name with its article."""
    vowels = "AEFHILMNORSX" if name[:2].isupper() else "AEIOUaeiou"  # abbreviations are spelled
    return f"{'an' if name[0] in vowels else 'a'} {name}"
