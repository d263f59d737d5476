"""What PyTorch is set to at a call, in this thread and in all: kernels are chosen by it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ...arguments import KERNEL_DEVICE_TYPE
from ...conditions import tracks_derivatives
from ..snapshot import has_global_hooks
from .reasons import CannotCapture

_GETTERS = (
    *("_get_deterministic_algorithms", "_get_deterministic_algorithms_warn_only"),
    "_get_deterministic_fill_uninitialized_memory",
    *("_get_cudnn_enabled", "_get_cudnn_benchmark", "_get_cudnn_deterministic"),
    "_get_cublas_allow_fp16_accumulation",
    "_get_cublas_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_bf16_reduced_precision_reduction",
    *("_get_blas_preferred_backend", "_get_linalg_preferred_backend"),
    *("_get_flash_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_math_sdp_enabled"),
    *("_get_cudnn_sdp_enabled", "_get_fa3_sdp_enabled", "_get_overrideable_sdp_enabled"),
    *("_get_math_sdp_allow_fp16_bf16_reduction", "_get_sdp_priority_order"),
    *("_get_sm_carveout_experimental", "_get_mkldnn_enabled"),
)
_getters: tuple[Callable[[], Any], ...] = (
    torch.get_default_dtype,
    *(getattr(torch._C, name) for name in _GETTERS if hasattr(torch._C, name)),
)
# Whether float32 products may use TF32 has several names, which raise if they are set to contradict each
# other.
_PRECISIONS = [("generic", "all"), *(("cuda", op) for op in ("all", "matmul", "conv", "rnn"))]


def read() -> Hashable:
    """Equal for calls of which kernels are chosen alike.

    Raises:
        CannotCapture: where the call must run as it is.
    """
    if tracks_derivatives():
        raise CannotCapture("gradients may be asked for: call it under torch.inference_mode")
    if torch.is_autocast_enabled(KERNEL_DEVICE_TYPE):
        raise CannotCapture("autocast is on")
    if torch._C._len_torch_dispatch_stack():
        raise CannotCapture("it runs within a dispatch mode")
    if torch.jit.is_tracing():
        raise CannotCapture("it is traced")
    if has_global_hooks():
        raise CannotCapture("hooks are registered for all modules")
    if torch.is_anomaly_enabled():
        raise CannotCapture("anomaly detection is on")
    return (
        torch.is_inference_mode_enabled(),
        _default_devices(),
        *[_as_constant(get()) for get in _getters],
        *_precisions(),
    )


def _default_devices() -> Hashable:
    if not torch._C._len_torch_function_stack():
        return ()
    modes = _get_current_function_mode_stack()
    if any(type(mode) is not DeviceContext for mode in modes):
        raise CannotCapture("it runs within a function mode")
    return tuple([mode.device for mode in modes])


def _as_constant(value: Any) -> Hashable:
    return tuple(value) if isinstance(value, list) else value


def _precisions() -> list[str]:
    getter = getattr(torch._C, "_get_fp32_precision_getter", None)
    if getter is None:
        return [torch.get_float32_matmul_precision(), str(torch.backends.cudnn.allow_tf32)]
    return [getter(*of) for of in _PRECISIONS]
