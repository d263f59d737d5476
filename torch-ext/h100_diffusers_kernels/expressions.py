"""Each operation as an equivalent, differentiable PyTorch expression.

``functional`` takes these where an input requires grad. Arithmetic is float32, rounded once, like the
kernels'.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor


def _normalized(x: Tensor, eps: float, center: bool, weight, bias) -> Tensor:
    if center:
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        x = x * weight.float()
    return x if bias is None else x + bias.float()


def _modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return x * (1 + scale.float()) + shift.float()


def _residual(residual: Tensor, x: Tensor, gate: Optional[Tensor]) -> Tensor:
    x = x.float()
    return residual.float() + (x if gate is None else gate.float() * x)


def rms_norm(x, weight, eps) -> Tensor:
    return _normalized(x.float(), eps, False, weight, None).to(x.dtype)


def layer_norm(x, weight, bias, eps) -> Tensor:
    return _normalized(x.float(), eps, True, weight, bias).to(x.dtype)


def rms_norm_modulate(x, scale, shift, weight, eps) -> Tensor:
    return _modulated(_normalized(x.float(), eps, False, weight, None), scale, shift).to(x.dtype)


def layer_norm_modulate(x, scale, shift, weight, bias, eps) -> Tensor:
    return _modulated(_normalized(x.float(), eps, True, weight, bias), scale, shift).to(x.dtype)


def gated_residual(residual, x, gate) -> Tensor:
    return _residual(residual, x, gate).to(x.dtype)


def gated_residual_rms_norm_modulate(
    residual, x, gate, scale, shift, weight, eps
) -> tuple[Tensor, Tensor]:
    h = _residual(residual, x, gate)
    out = _modulated(_normalized(h, eps, False, weight, None), scale, shift)
    return h.to(x.dtype), out.to(x.dtype)


def gated_residual_layer_norm_modulate(
    residual, x, gate, scale, shift, weight, bias, eps
) -> tuple[Tensor, Tensor]:
    h = _residual(residual, x, gate)
    out = _modulated(_normalized(h, eps, True, weight, bias), scale, shift)
    return h.to(x.dtype), out.to(x.dtype)


def norm_rope(x, weight, cos, sin, *, head_dim, norm, layout, eps) -> Tensor:
    """One of query and key; ``cos`` and ``sin`` are (1 or B, S, 1 or H, d), or None."""
    n = x.float().reshape(x.shape[0], x.shape[1], -1)
    if norm == "per_head":
        n = _normalized(n.unflatten(2, (-1, head_dim)), eps, False, weight, None)
    else:
        if norm == "across_heads":
            n = _normalized(n, eps, False, weight, None)
        n = n.unflatten(2, (-1, head_dim))
    if cos is not None:
        if layout == "interleaved":
            a, b = n.unflatten(3, (-1, 2)).unbind(-1)
            rotated = torch.stack([-b, a], dim=-1).flatten(3)
        else:
            a, b = n.chunk(2, dim=3)
            rotated = torch.cat([-b, a], dim=3)
        n = n * cos.float() + rotated * sin.float()
    return n.reshape(x.shape).to(x.dtype)


def gelu(x, approximate) -> Tensor:
    return torch.nn.functional.gelu(x.float(), approximate=approximate).to(x.dtype)


def silu(x) -> Tensor:
    return torch.nn.functional.silu(x.float()).to(x.dtype)


def geglu(x, approximate) -> Tensor:
    value, gate = x.float().chunk(2, dim=-1)
    return (value * torch.nn.functional.gelu(gate, approximate=approximate)).to(x.dtype)


def swiglu(x) -> Tensor:
    value, gate = x.float().chunk(2, dim=-1)
    return (value * torch.nn.functional.silu(gate)).to(x.dtype)
