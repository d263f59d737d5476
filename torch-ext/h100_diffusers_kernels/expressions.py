"""Each operation as an equivalent, differentiable PyTorch expression.

``functional`` takes these where an input requires grad or carries a tangent. Arithmetic is float32,
rounded once, like the kernels'; attention is PyTorch's own.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .differentiation import is_in_dual_level


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


def _by_element(pairs: Tensor, layout: str) -> Tensor:
    """Each pair's value where the layout has the elements of the pair."""
    if layout == "interleaved":
        return pairs.repeat_interleave(2, dim=-1)
    return torch.cat([pairs, pairs], dim=-1)


def _rotated(n: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """``n`` is (B, S, H, d), ``cos`` and ``sin`` are (1 or B, S, 1 or H, d or d/2)."""
    if cos.shape[3] != n.shape[3]:
        cos, sin = _by_element(cos, layout), _by_element(sin, layout)
    if layout == "interleaved":
        a, b = n.unflatten(3, (-1, 2)).unbind(-1)
        rotated = torch.stack([-b, a], dim=-1).flatten(3)
    else:
        a, b = n.chunk(2, dim=3)
        rotated = torch.cat([-b, a], dim=3)
    return n * cos.float() + rotated * sin.float()


def norm_rope(x, weight, cos, sin, *, head_dim, norm, layout, eps) -> Tensor:
    """One of query and key; ``cos`` and ``sin`` are (1 or B, S, 1 or H, d or d/2), or None."""
    n = x.float().reshape(x.shape[0], x.shape[1], -1)
    if norm == "per_head":
        n = _normalized(n.unflatten(2, (-1, head_dim)), eps, False, weight, None)
    else:
        if norm == "across_heads":
            n = _normalized(n, eps, False, weight, None)
        n = n.unflatten(2, (-1, head_dim))
    if cos is not None:
        n = _rotated(n, cos, sin, layout)
    return n.reshape(x.shape).to(x.dtype)


def rope(x, cos, sin, layout) -> Tensor:
    """``cos`` and ``sin`` are (1 or B, S, 1 or H, d), or, where x shows its heads, with d/2."""
    n = x.float()
    if x.dim() == 3:
        head_dim = cos.shape[3]
        n = n.unflatten(2, (x.shape[2] // head_dim if head_dim else 0, head_dim))
    return _rotated(n, cos, sin, layout).reshape(x.shape).to(x.dtype)


def rope_3d(x, frame, height, width, layout) -> Tensor:
    grid = [table[0].shape[0] for table in (frame, height, width)]

    def of_tokens(tables: list[Tensor]) -> Tensor:
        """(1, S, 1, d/2) from the tables of the axes."""
        parts = []
        for axis, table in enumerate(tables):
            shape = [1, 1, 1, table.shape[1]]
            shape[axis] = grid[axis]
            parts.append(table.reshape(shape).expand(*grid, -1))
        return torch.cat(parts, dim=-1).reshape(1, x.shape[1], 1, x.shape[3] // 2)

    cos, sin = (of_tokens([axis[i] for axis in (frame, height, width)]) for i in (0, 1))
    return _rotated(x.float(), cos, sin, layout).to(x.dtype)


def _biased(x: Tensor, bias: Optional[Tensor]) -> Tensor:
    return x.float() if bias is None else x.float() + bias.float()


def gelu(x, approximate, bias) -> Tensor:
    return torch.nn.functional.gelu(_biased(x, bias), approximate=approximate).to(x.dtype)


def silu(x, bias) -> Tensor:
    return torch.nn.functional.silu(_biased(x, bias)).to(x.dtype)


def geglu(x, approximate, bias) -> Tensor:
    value, gate = _biased(x, bias).chunk(2, dim=-1)
    return (value * torch.nn.functional.gelu(gate, approximate=approximate)).to(x.dtype)


def swiglu(x, bias) -> Tensor:
    value, gate = _biased(x, bias).chunk(2, dim=-1)
    return (value * torch.nn.functional.silu(gate)).to(x.dtype)


def softmax(x) -> Tensor:
    return torch.softmax(x.float(), dim=-1).to(x.dtype)


def _scaled_dot_product_attention(q, k, v, mask, scale) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)


def attention(q, k, v, scale, key_bias, key_lengths) -> Tensor:
    dtype, mask, has_keys = q.dtype, None, None
    # PyTorch's kernels take a mask of the query's dtype, and rounding it would not be exact.
    if key_bias is not None and key_bias.dtype != dtype:
        q, k, v = q.float(), k.float(), v.float()
    if key_bias is not None or key_lengths is not None:
        mask = q.new_zeros(k.shape[:2]) if key_bias is None else key_bias
        if key_lengths is not None:
            is_padding = torch.arange(k.shape[1], device=k.device) >= key_lengths[:, None]
            mask = mask.masked_fill(is_padding, -torch.inf)
            k, v = (t.masked_fill(is_padding[:, :, None, None], 0) for t in (k, v))
        # A mask of -inf alone would be left to each of PyTorch's kernels, its gradients too; some have
        # had NaN there.
        has_keys = (mask != -torch.inf).any(1)
        mask = mask.masked_fill(~has_keys[:, None], 0)[:, None, None]
    if is_in_dual_level() or (mask is not None and mask.requires_grad):
        # PyTorch's fused kernels have no forward-mode derivatives, and those of them with a gradient of
        # the mask do not take every length.
        with sdpa_kernel(SDPBackend.MATH):
            out = _scaled_dot_product_attention(q, k, v, mask, scale)
    else:
        out = _scaled_dot_product_attention(q, k, v, mask, scale)
    if has_keys is not None:
        out = out.masked_fill(~has_keys[:, None, None, None], 0)
    return out.to(dtype).contiguous()
