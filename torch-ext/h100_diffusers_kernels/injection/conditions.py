"""What must hold for a kernel to stand in for a model's own code.

``has_known_method`` is asked once, at injection. The others are asked at each call, because LoRA,
quantization, offloading, autocast or another device may come at any time; none of them reads a
tensor's values.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from .._ops import add_op_namespace_prefix
from ..arguments import ATTENTION_HEAD_DIMS

# A build has kernels for one type of device, which its operators' namespace names.
KERNEL_DEVICE_TYPE = "cuda" if "_cuda_" in add_op_namespace_prefix("") else "cpu"

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ATTENTION_DTYPES = (torch.bfloat16, torch.float16)
_PLAIN_TYPES = (Tensor, nn.Parameter)


def has_known_method(cls: type, known: type, method: str, parameters: str | None = None) -> bool:
    """Whether ``cls`` is a ``known`` and has its ``method``, written by ``known``'s own library.

    ``parameters`` are the names that it must take, in order: another version of the library with
    other ones may compute something else.
    """
    function = getattr(known, method)
    library = known.__module__.partition(".")[0]
    return (
        issubclass(cls, known)
        and getattr(cls, method) is function
        and function.__globals__["__name__"].partition(".")[0] == library
        and (parameters is None or " ".join(inspect.signature(function).parameters) == parameters)
    )


def class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def kernels_run_on(x: Tensor) -> bool:
    """Whether the kernels take tensors of ``x``'s dtype and device.

    False under autocast, which decides on a dtype operation by operation.
    """
    return (
        x.device.type == KERNEL_DEVICE_TYPE
        and x.dtype in _DTYPES
        and not torch.is_autocast_enabled(x.device.type)
    )


def kernels_take(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels take ``x``, and each other tensor given along with it."""
    if not kernels_run_on(x):
        return False
    for tensor in (x, *others):
        if tensor is not None and (
            tensor.dtype != x.dtype
            or tensor.device != x.device
            or (tensor.stride(-1) != 1 and tensor.shape[-1] > 1)
        ):
            return False
    return True


def attention_takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether ``attention`` computes with them, each (B, S, H, d), and no gradient is asked for."""
    return (
        query.dtype in _ATTENTION_DTYPES
        and query.shape[3] in ATTENTION_HEAD_DIMS
        and kernels_take(query, key, value)
        and query.shape[0] == key.shape[0]
        and query.shape[2:] == key.shape[2:]
        and key.shape == value.shape
        and not (
            torch.is_grad_enabled()
            and (query.requires_grad or key.requires_grad or value.requires_grad)
        )
    )


def as_key_bias(mask: Tensor, key: Tensor) -> Tensor | None:
    """The bias (B, Sk) that ``attention`` takes, of a ``mask`` (B, 1, Sk) that is added to the
    scores of all queries and heads; None of any other mask."""
    if (
        mask.dim() != 3
        or mask.shape[0] != key.shape[0]
        or mask.shape[1] != 1
        or mask.shape[2] != key.shape[1]
        or mask.dtype not in (key.dtype, torch.float32)
        or mask.device != key.device
        or (mask.stride(2) != 1 and mask.shape[2] > 1)
        or (torch.is_grad_enabled() and mask.requires_grad)
    ):
        return None
    return mask.squeeze(1)


def is_plain(parameter: Tensor | None) -> bool:
    """Whether a parameter, if there is one, is no quantized or sharded subclass of Tensor."""
    return parameter is None or type(parameter) in _PLAIN_TYPES
