"""Fused kernels that make diffusion transformers fast on Hopper GPUs."""

from . import layers
from .functional import (
    CoordinateRope,
    attention,
    gated_residual,
    gated_residual_layer_norm_modulate,
    gated_residual_rms_norm_modulate,
    geglu,
    gelu,
    layer_norm,
    layer_norm_modulate,
    norm_rope,
    qk_norm_rope,
    rms_norm,
    rms_norm_modulate,
    rope,
    rope_3d,
    silu,
    softmax,
    swiglu,
)
from .injection import InjectionReport, eject_kernels, inject_kernels

__all__ = [
    "CoordinateRope",
    "InjectionReport",
    "attention",
    "eject_kernels",
    "gated_residual",
    "gated_residual_layer_norm_modulate",
    "gated_residual_rms_norm_modulate",
    "geglu",
    "gelu",
    "inject_kernels",
    "layer_norm",
    "layer_norm_modulate",
    "layers",
    "norm_rope",
    "qk_norm_rope",
    "rms_norm",
    "rms_norm_modulate",
    "rope",
    "rope_3d",
    "silu",
    "softmax",
    "swiglu",
]
