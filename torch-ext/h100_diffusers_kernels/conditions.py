"""What tensors the kernels take: asked by layers and injected models at each call, without reading values.

LoRA, quantization, offloading, autocast or another device may come at any time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix
from .operators import PLAIN_TYPES, is_differentiated, is_plain

# A build has kernels for one type of device; the namespace of its operators names it.
KERNEL_DEVICE_TYPE = "cuda" if "_cuda_" in add_op_namespace_prefix("") else "cpu"
ATTENTION_HEAD_DIMS = (64, 128)

_IS_CUDA = KERNEL_DEVICE_TYPE == "cuda"

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ATTENTION_DTYPES = (torch.bfloat16, torch.float16)


def kernels_run_on(x: Tensor) -> bool:
    """Whether the kernels take tensors of ``x``'s kind, dtype and device.

    False under autocast, which decides on a dtype operation by operation.
    """
    return (
        x.dtype in _DTYPES
        and (x.is_cuda if _IS_CUDA else x.is_cpu)
        and is_plain(x)
        and not torch.is_autocast_enabled(KERNEL_DEVICE_TYPE)
    )


# Every part of every block asks the next three. So they are written out, without calls, and ask what is
# quick first: ``is_contiguous`` takes a third of ``stride``, ``is_cuda`` a fifth of ``device.type``.


def kernels_take(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels take ``x``, and each other tensor given along with it."""
    dtype, device = x.dtype, x.device
    if (
        dtype not in _DTYPES
        or not (x.is_cuda if _IS_CUDA else x.is_cpu)
        or (type(x) not in PLAIN_TYPES and not is_plain(x))
        or torch.is_autocast_enabled(KERNEL_DEVICE_TYPE)
        or not (x.is_contiguous() or x.stride(-1) == 1 or x.shape[-1] <= 1)
    ):
        return False
    for tensor in others:
        if tensor is not None and (
            tensor.dtype is not dtype
            or tensor.device != device
            or not (tensor.is_contiguous() or tensor.stride(-1) == 1 or tensor.shape[-1] <= 1)
            or (type(tensor) not in PLAIN_TYPES and not is_plain(tensor))
        ):
            return False
    return True


def same_dtype_and_unit_stride(x: Tensor, *others: Tensor | None) -> bool:
    """Whether tensors that were computed from such as the kernels take are still alike.

    A layer in between may give another dtype, or a tensor of another kind.
    """
    dtype = x.dtype
    if dtype not in _DTYPES or (type(x) not in PLAIN_TYPES and not is_plain(x)):
        return False
    for tensor in others:
        if tensor is not None and (
            tensor.dtype is not dtype
            or not (tensor.is_contiguous() or tensor.stride(-1) == 1 or tensor.shape[-1] <= 1)
            or (type(tensor) not in PLAIN_TYPES and not is_plain(tensor))
        ):
            return False
    return x.is_contiguous() or x.stride(-1) == 1 or x.shape[-1] <= 1


def modulators_compatible(x: Tensor, *others: Tensor | None) -> bool:
    """Whether ``x``, of such as the kernels take, can be normalized and modulated with the others.

    They are weights, biases, scales, shifts and gates, each of x's dtype or float32.
    """
    dtype = x.dtype
    for tensor in others:
        if tensor is not None and (
            (tensor.dtype is not dtype and tensor.dtype is not torch.float32)
            or not (tensor.is_contiguous() or tensor.stride(-1) == 1 or tensor.shape[-1] <= 1)
            or (type(tensor) not in PLAIN_TYPES and not is_plain(tensor))
        ):
            return False
    return same_dtype_and_unit_stride(x)


def group_norm_takes(x: Tensor, *others: Tensor | None) -> bool:
    """Whether ``group_norm`` takes ``x`` (B, C, ...), and each vector given along with it."""
    if not (kernels_run_on(x) and has_memory_format(x)):
        return False
    for tensor in others:
        if tensor is not None and (
            tensor.dtype is not x.dtype
            or tensor.device != x.device
            or not _has_unit_stride(tensor)
            or not is_plain(tensor)
        ):
            return False
    return True


def has_memory_format(x: Tensor) -> bool:
    """Whether the pixels of ``x`` (B, C, ...), or the channels of each, are side by side, and there are no
    gaps between pixels."""
    if x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)):
        return True
    count = stride = 1
    for size, step in zip(reversed(x.shape[2:]), reversed(x.stride()[2:])):
        if size == 1:
            continue
        if count == 1:
            stride = step
        elif step != stride * count:
            return False
        count *= size
    return count == 1 or stride == 1 or x.shape[1] == 1 or x.stride(1) == 1


def why_not_taken(x: Tensor, *others: Tensor | None) -> str:
    """The reason for which ``kernels_take`` is false, as a clause."""
    for tensor in (x, *others):
        if not is_plain(tensor):
            return f"it was given a {type(tensor).__name__}"
    if torch.is_autocast_enabled(KERNEL_DEVICE_TYPE):
        return "autocast is on"
    if x.device.type != KERNEL_DEVICE_TYPE:
        return (
            f"it was given tensors on {x.device.type}, and this build is for {KERNEL_DEVICE_TYPE}"
        )
    if x.dtype not in _DTYPES:
        return f"there are no kernels for {dtype_name(x.dtype)}"
    if any(tensor is not None and tensor.dtype != x.dtype for tensor in others):
        return "it was given tensors of different dtypes"
    if any(tensor is not None and tensor.device != x.device for tensor in others):
        return "it was given tensors on different devices"
    return "it was given tensors whose last dimension has gaps"


def _has_unit_stride(tensor: Tensor) -> bool:
    return tensor.stride(-1) == 1 or tensor.shape[-1] <= 1


def tracks_derivatives() -> bool:
    """Whether derivatives may be taken of what is computed now."""
    return torch.is_grad_enabled() or is_differentiated()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).replace("torch.", "")


def may_write() -> bool:
    """Whether results may be written to parts of a buffer.

    Not while torch.compile traces, which fuses concatenations; nor in a transform of ``torch.func``, in which
    the buffer would have to be batched.
    """
    return not (torch.compiler.is_dynamo_compiling() or torch._C._are_functorch_transforms_active())


def attention_takes(query: Tensor, key: Tensor, value: Tensor, heads: int | None = None) -> bool:
    """Whether ``attention`` computes with them, and no derivative is asked for.

    Each is (B, S, H, d), or (B, S, H * d) with a number of heads. They were computed from tensors such as the
    kernels take.
    """
    of_query, of_key = query.shape, key.shape
    return (
        query.dtype in ATTENTION_DTYPES
        and (of_query[3] if heads is None else of_query[2] / heads) in ATTENTION_HEAD_DIMS
        and same_dtype_and_unit_stride(query, key, value)
        and of_query[::2] == of_key[::2]
        and of_query[3:] == of_key[3:]
        and of_key == value.shape
        and not is_differentiated(query, key, value)
    )
