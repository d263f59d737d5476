"""Parts of the operations' formulas, as differentiable PyTorch expressions.

Arithmetic is float32, rounded once, by the operation, like the kernels'; attention is PyTorch's own.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .differentiation import is_in_dual_level


def rms_normalized(h: Tensor, weight: Optional[Tensor], eps: float) -> Tensor:
    n = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return n if weight is None else n * weight.float()


def layer_normalized(
    h: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float
) -> Tensor:
    n = rms_normalized(h - h.mean(-1, keepdim=True), weight, eps)
    return n if bias is None else n + bias.float()


def group_normalized(
    x: Tensor,
    num_groups: int,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    eps: float,
    channel_bias: Optional[Tensor],
) -> Tensor:
    if channel_bias is not None:
        x = x + channel_bias.float().reshape(*channel_bias.shape, *[1] * (x.dim() - 2))
    weight, bias = (vector if vector is None else vector.float() for vector in (weight, bias))
    return torch.group_norm(x, num_groups, weight, bias, eps)


def modulated(n: Tensor, scale: Optional[Tensor], shift: Optional[Tensor]) -> Tensor:
    n = n if scale is None else n * (1 + scale.float())
    return n if shift is None else n + shift.float()


def gated(residual: Tensor, x: Tensor, gate: Optional[Tensor]) -> Tensor:
    h = x.float()
    return residual.float() + (h if gate is None else gate.float() * h)


def biased(x: Tensor, bias: Optional[Tensor]) -> Tensor:
    return x.float() if bias is None else x.float() + bias.float()


def value_and_gate(x: Tensor, bias: Optional[Tensor], activated: str) -> tuple[Tensor, Tensor]:
    """The halves of ``x + bias``, that one last which is to be activated."""
    first, second = biased(x, bias).chunk(2, dim=-1)
    return (first, second) if activated == "second" else (second, first)


def by_head(table: Tensor, heads: int, head_dim: int) -> Tensor:
    """A table of a rotation as (1 or B, S, 1 or H, d or d/2)."""
    table = table[None] if table.dim() == 2 else table
    if table.dim() == 4:
        return table
    is_of_head = table.shape[-1] in (head_dim, head_dim // 2)
    return table.unsqueeze(2) if is_of_head else table.unflatten(2, (heads, head_dim))


def _by_element(pairs: Tensor, layout: str) -> Tensor:
    """Each pair's value where the layout has the elements of the pair."""
    if layout == "interleaved":
        return pairs.repeat_interleave(2, dim=-1)
    return torch.cat([pairs, pairs], dim=-1)


def rotated(n: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """``n`` is (B, S, H, d), ``cos`` and ``sin`` are (1 or B, S, 1 or H, d or d/2)."""
    if cos.shape[3] != n.shape[3]:
        cos, sin = _by_element(cos, layout), _by_element(sin, layout)
    if layout == "interleaved":
        a, b = n.unflatten(3, (-1, 2)).unbind(-1)
        turned = torch.stack([-b, a], dim=-1).flatten(3)
    else:
        a, b = n.chunk(2, dim=3)
        turned = torch.cat([-b, a], dim=3)
    return n * cos.float() + turned * sin.float()


def norm_rope(x, weight, cos, sin, *, head_dim, norm, layout, eps) -> Tensor:
    """One of query and key; ``cos`` and ``sin`` are (1 or B, S, 1 or H, d or d/2), or None."""
    n = x.float().reshape(x.shape[0], x.shape[1], -1)
    if norm == "per_head":
        n = rms_normalized(n.unflatten(2, (-1, head_dim)), weight, eps)
    else:
        if norm == "across_heads":
            n = rms_normalized(n, weight, eps)
        n = n.unflatten(2, (-1, head_dim))
    if cos is not None:
        n = rotated(n, cos, sin, layout)
    return n.reshape(x.shape).to(x.dtype)


def of_tokens(frame: Tensor, height: Tensor, width: Tensor) -> Tensor:
    """(1, S, 1, d/2) from a table (positions, pairs) of each axis."""
    tables = (frame, height, width)
    grid = [table.shape[0] for table in tables]
    parts = []
    for axis, table in enumerate(tables):
        shape = [1, 1, 1, table.shape[1]]
        shape[axis] = grid[axis]
        parts.append(table.reshape(shape).expand(*grid, -1))
    return torch.cat(parts, dim=-1).flatten(0, 2)[None, :, None]


def _scaled_dot_product_attention(q, k, v, mask, scale) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)


def attended(q, k, v, scale, key_bias, key_lengths) -> Tensor:
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
