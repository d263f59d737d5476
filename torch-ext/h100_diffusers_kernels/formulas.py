"""The operators' formulas as differentiable PyTorch expressions, with the operators' arguments.

The kernels' backward differentiates these expressions. Forward-mode derivatives and transforms of
``torch.func`` run them. They compute in ``T``, with float32 inside each PyTorch function, or in float32 if
any argument is float32.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Optional

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from ._ops import ops
from .operators import is_differentiated

# Not from torch.nn.functional, whose functions users may replace.
_gelu = torch.nn.functional.gelu
_pad = torch.nn.functional.pad
_scaled_dot_product_attention = torch.nn.functional.scaled_dot_product_attention
_silu = torch.nn.functional.silu

NO_NORM, ACROSS_HEADS, PER_HEAD, LAYER_PER_HEAD = range(4)
INTERLEAVED, HALF = range(2)


def _promoted(*tensors: Optional[Tensor]) -> tuple:
    """The tensors in a common dtype: float32 if their dtypes differ."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    if len(dtypes) == 1:
        return tensors
    return tuple(tensor if tensor is None else tensor.float() for tensor in tensors)


# --------------------------------------------------------------------------------------------------
# Norm, modulation, residual and gate


def _normalized(
    h: Tensor, is_layer_norm: bool, weight: Optional[Tensor], bias: Optional[Tensor], eps: float
) -> Tensor:
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)  # PyTorch's second derivative of layer_norm needs a weight
    if forward_ad._current_level < 0:
        if is_layer_norm:
            return torch.layer_norm(h, h.shape[-1:], weight, bias, eps)
        return torch.rms_norm(h, h.shape[-1:], weight, eps)
    # PyTorch's forward mode has bugs: layer_norm's second derivative is wrong, and so is rms_norm's dtype.
    x = h.float()
    if is_layer_norm:
        x = x - x.mean(-1, keepdim=True)
    n = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    n = n if weight is None else n * weight
    return (n if bias is None else n + bias).to(h.dtype)


def _modulated(n: Tensor, scale: Optional[Tensor], shift: Optional[Tensor]) -> Tensor:
    if scale is None:
        return n if shift is None else n + shift
    return n * (1 + scale) if shift is None else torch.addcmul(shift, n, 1 + scale)


def _of_rows(table: Optional[Tensor], index: Optional[Tensor]) -> Optional[Tensor]:
    """The modulator of each row, if ``table`` (N, D) is a table."""
    if table is None or index is None:
        return table
    # In float32: a table's gradient is a sum over all rows that chose the same one.
    rows = table.to(torch.promote_types(table.dtype, torch.float32))
    return rows[index.clamp(0, table.shape[0] - 1)].to(table.dtype)


def _sum(modulator: Optional[Tensor], row: Optional[Tensor]) -> Optional[Tensor]:
    return modulator if row is None else row if modulator is None else modulator + row


def norm(
    x: Tensor,
    is_layer_norm: bool,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    scale: Optional[Tensor],
    shift: Optional[Tensor],
    eps: float,
    scale_row: Optional[Tensor] = None,
    shift_row: Optional[Tensor] = None,
    index: Optional[Tensor] = None,
) -> Tensor:
    dtype = x.dtype
    x, weight, bias, scale, shift, scale_row, shift_row = _promoted(
        x, weight, bias, scale, shift, scale_row, shift_row
    )
    scale, shift = _of_rows(scale, index), _of_rows(shift, index)
    scale, shift = _sum(scale, scale_row), _sum(shift, shift_row)
    return _modulated(_normalized(x, is_layer_norm, weight, bias, eps), scale, shift).to(dtype)


def layer_norm_modulate_pair(
    x: Tensor,
    scale: Optional[Tensor],
    shift: Optional[Tensor],
    second_scale: Optional[Tensor],
    second_shift: Optional[Tensor],
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    eps: float,
) -> tuple[Tensor, Tensor]:
    dtype = x.dtype
    x, scale, shift, second_scale, second_shift, weight, bias = _promoted(
        x, scale, shift, second_scale, second_shift, weight, bias
    )
    n = _normalized(x, True, weight, bias, eps)
    return (
        _modulated(n, scale, shift).to(dtype),
        _modulated(n, second_scale, second_shift).to(dtype),
    )


def gated_residual(
    residual: Tensor,
    x: Tensor,
    gate: Optional[Tensor],
    gate_row: Optional[Tensor] = None,
    addend: Optional[Tensor] = None,
    x_weight: Optional[Tensor] = None,
    x_eps: Optional[float] = None,
    tanh_gate: bool = False,
    index: Optional[Tensor] = None,
) -> Tensor:
    dtype = x.dtype
    residual, x, gate, gate_row, addend, x_weight = _promoted(
        residual, x, gate, gate_row, addend, x_weight
    )
    x = x if addend is None else x + addend
    x = x if x_eps is None else _normalized(x, False, x_weight, None, x_eps)
    gate = _sum(_of_rows(gate, index), gate_row)
    gate = torch.tanh(gate) if tanh_gate and gate is not None else gate
    return (residual + x if gate is None else torch.addcmul(residual, gate, x)).to(dtype)


def gated_residual_norm_modulate(
    residual: Tensor,
    x: Tensor,
    is_layer_norm: bool,
    gate: Optional[Tensor],
    scale: Optional[Tensor],
    shift: Optional[Tensor],
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    eps: float,
    scale_row: Optional[Tensor] = None,
    shift_row: Optional[Tensor] = None,
    gate_row: Optional[Tensor] = None,
    addend: Optional[Tensor] = None,
    x_weight: Optional[Tensor] = None,
    x_eps: Optional[float] = None,
    tanh_gate: bool = False,
    index: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    h = gated_residual(residual, x, gate, gate_row, addend, x_weight, x_eps, tanh_gate, index)
    modulation = (scale, shift, eps, scale_row, shift_row, index)
    return h, norm(h, is_layer_norm, weight, bias, *modulation)


def gated_residual_layer_norm_modulate_pair(
    residual: Tensor, x: Tensor, gate: Optional[Tensor], *modulation
) -> tuple[Tensor, Tensor, Tensor]:
    h = gated_residual(residual, x, gate)
    return (h, *layer_norm_modulate_pair(h, *modulation))


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    eps: float,
    channel_bias: Optional[Tensor],
    silu: bool,
) -> Tensor:
    dtype = x.dtype
    x, weight, bias, channel_bias = _promoted(x, weight, bias, channel_bias)
    if channel_bias is not None:
        x = x + channel_bias.reshape(*channel_bias.shape, *[1] * (x.dim() - 2))
    if torch._C._are_functorch_transforms_active():
        x = x.contiguous()  # vmap has no other memory format
    n = torch.group_norm(x, num_groups, weight, bias, eps)
    return (_silu(n) if silu else n).to(dtype)


def channel_rms_norm(
    x: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    scale: Optional[Tensor],
    shift: Optional[Tensor],
    eps: float,
    silu: bool,
) -> Tensor:
    def at_each_position(tensor: Tensor) -> Tensor:
        """``(C,)`` or ``(B, C)``, to broadcast against ``x``."""
        return tensor.reshape(*tensor.shape, *[1] * (x.dim() - 2))

    # Over dimension 1, so that the gradients keep the memory format of x.
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    n = h * torch.rsqrt(h.square().mean(1, keepdim=True) + eps)
    n = n if weight is None else n * at_each_position(weight)
    n = n if bias is None else n + at_each_position(bias)
    scale, shift = (t if t is None else at_each_position(t) for t in (scale, shift))
    n = _modulated(n, scale, shift)
    return (_silu(n) if silu else n).to(x.dtype)


# --------------------------------------------------------------------------------------------------
# Norm and rotary embedding


def coordinate_angles(coordinates: Tensor, frequencies: Tensor, pairs: int) -> Tensor:
    """Angles (1 or B, S, pairs) of a token's pairs. The unrotated pairs come first, with angle 0."""
    angles = (coordinates.unsqueeze(-2) * frequencies.unsqueeze(-1)).flatten(2)
    return _pad(angles, (pairs - angles.shape[-1], 0))


def _tables(
    first: Any,
    second: Any,
    is_coordinates: bool,
    heads: int,
    head_dim: int,
) -> Optional[tuple[Tensor, Tensor]]:
    """``(cos, sin)``, each (1 or B, S, 1 or H, d or d/2), from an operator's rotation arguments."""
    if first is None:
        return None
    if is_coordinates:
        angles = coordinate_angles(first, second, heads * head_dim // 2)
        first, second = (
            angles.cos().unflatten(2, (heads, -1)),
            angles.sin().unflatten(2, (heads, -1)),
        )
    elif second is None:
        # Operators that write take a complex table as a real view (..., 2).
        first, second = (first.real, first.imag) if first.is_complex() else first.unbind(-1)

    def by_head(table: Tensor) -> Tensor:
        table = table[None] if table.dim() == 2 else table
        if table.dim() == 4:
            return table
        is_of_head = table.shape[-1] in (head_dim, head_dim // 2)
        return table.unsqueeze(2) if is_of_head else table.unflatten(2, (heads, head_dim))

    return by_head(first), by_head(second)


def _rotated(n: Tensor, cos: Tensor, sin: Tensor, layout: int) -> Tensor:
    """``n`` (B, S, H, d), rotated in float32."""

    def halves(x: Tensor) -> tuple:
        return x.unflatten(3, (-1, 2)).unbind(-1) if layout == INTERLEAVED else x.chunk(2, dim=3)

    cos, sin = cos.float(), sin.float()
    is_per_pair = cos.shape[3] != n.shape[3]
    (cos_a, cos_b), (sin_a, sin_b) = ((t, t) if is_per_pair else halves(t) for t in (cos, sin))
    a, b = halves(n.float())
    a, b = torch.addcmul(a * cos_a, b, sin_a, value=-1), torch.addcmul(b * cos_b, a, sin_b)
    return torch.stack([a, b], -1).flatten(3) if layout == INTERLEAVED else torch.cat([a, b], 3)


class _RotatedByKernel(torch.autograd.Function):
    """Query and key (B, S, H, d), rotated by the kernel. A rotation is linear, so its gradient is the
    transposed rotation, which the kernel also computes."""

    @staticmethod
    def forward(ctx, q, k, first, second, is_coordinates, layout):
        ctx.save_for_backward(first, second)
        ctx.options = is_coordinates, layout
        options = is_coordinates, q.shape[2], NO_NORM, layout, 0.0
        return ops.qk_norm_rope.default(q, k, *[None] * 4, first, second, *options)

    @staticmethod
    def backward(ctx, q, k):
        first, second = ctx.saved_tensors
        is_coordinates, layout = ctx.options
        head_dim = q.shape[3]
        if second is None:
            first = first.conj().resolve_conj()
        elif is_coordinates or first.shape[-1] == head_dim // 2:
            second = -second
        else:  # the two elements of a pair have different sines, which are swapped
            shape = (-1, 2) if layout == INTERLEAVED else (-1, 2, head_dim // 2)
            pairs = second.unflatten(-1, shape)
            second = -pairs.flip(-1 if layout == INTERLEAVED else -2).reshape(second.shape)
        inputs = q.contiguous(), k.contiguous(), first, second, is_coordinates, layout
        return (*_RotatedByKernel.apply(*inputs), None, None, None, None)


def _by_head(
    x: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    head_dim: int,
    norm_scope: int,
    eps: float,
) -> Tensor:
    """``x`` as (B, S, H, d), normalized."""
    x = x.reshape(x.shape[0], x.shape[1], -1)
    if norm_scope == ACROSS_HEADS:
        x = _normalized(x, False, weight, None, eps)
    x = x.unflatten(2, (x.shape[2] // head_dim if head_dim else 0, head_dim))
    if norm_scope == PER_HEAD:
        return _normalized(x, False, weight, bias, eps)
    if norm_scope == LAYER_PER_HEAD:
        # In float32: a weight's gradient is a sum over all heads of all tokens.
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight, bias = (None if t is None else t.to(dtype) for t in (weight, bias))
        return _normalized(x.to(dtype), True, weight, bias, eps).to(x.dtype)
    return x


def _rotated_by(n: Tensor, rotation: tuple[Any, Any, bool], layout: int) -> Tensor:
    tables = _tables(*rotation, n.shape[2], n.shape[3])
    return n if tables is None else _rotated(n, *tables, layout)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Optional[Tensor],
    k_weight: Optional[Tensor],
    q_bias: Optional[Tensor],
    k_bias: Optional[Tensor],
    first: Optional[Tensor],
    second: Optional[Tensor],
    is_coordinates: bool,
    heads: int,
    norm_scope: int,
    layout: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    rotation = first, second, is_coordinates
    parameters = q_weight, k_weight, q_bias, k_bias
    return qk_norm_two_ropes(
        q, k, None, *parameters, *rotation, *rotation, heads, norm_scope, layout, eps
    )


def qk_norm_two_ropes(
    q: Tensor,
    k: Tensor,
    v: None,
    q_weight: Optional[Tensor],
    k_weight: Optional[Tensor],
    q_bias: Optional[Tensor],
    k_bias: Optional[Tensor],
    first: Optional[Tensor],
    second: Optional[Tensor],
    is_coordinates: bool,
    k_first: Optional[Tensor],
    k_second: Optional[Tensor],
    k_is_coordinates: bool,
    heads: int,
    norm_scope: int,
    layout: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    dtype, shapes = q.dtype, (q.shape, k.shape)
    head_dim = q.shape[2:].numel() // heads
    q, k, q_weight, k_weight, q_bias, k_bias = _promoted(q, k, q_weight, k_weight, q_bias, k_bias)
    q = _by_head(q, q_weight, q_bias, head_dim, norm_scope, eps)
    k = _by_head(k, k_weight, k_bias, head_dim, norm_scope, eps)
    rotation, k_rotation = (first, second, is_coordinates), (k_first, k_second, k_is_coordinates)
    if first is not None and first is k_first and not is_differentiated(first, second):
        q, k = _RotatedByKernel.apply(q, k, *rotation, layout)
    else:
        q, k = _rotated_by(q, rotation, layout), _rotated_by(k, k_rotation, layout)
    return q.reshape(shapes[0]).to(dtype), k.reshape(shapes[1]).to(dtype)


def rope(x: Tensor, cos: Tensor, sin: Optional[Tensor], layout: int) -> Tensor:
    head_dim = x.shape[3] if x.dim() == 4 else cos.shape[-1] * (2 if sin is None else 1)
    n = _by_head(x, None, None, head_dim, NO_NORM, 0.0)
    return _rotated_by(n, (cos, sin, False), layout).reshape(x.shape).to(x.dtype)


def rope_3d(x: Tensor, *tables_and_layout) -> Tensor:
    *tables, layout = tables_and_layout

    def of_tokens(axes: list[Tensor]) -> Tensor:
        """(1, S, 1, d/2) from a table (positions, pairs) of each axis."""
        grid = [table.shape[0] for table in axes]
        parts = []
        for axis, table in enumerate(axes):
            shape = [1, 1, 1, table.shape[1]]
            shape[axis] = grid[axis]
            parts.append(table.reshape(shape).expand(*grid, -1))
        return torch.cat(parts, dim=-1).flatten(0, 2)[None, :, None]

    return _rotated(x, of_tokens(tables[::2]), of_tokens(tables[1::2]), layout).to(x.dtype)


# --------------------------------------------------------------------------------------------------
# Activations, softmax, attention


def activation(
    x: Tensor,
    bias: Optional[Tensor],
    is_silu: bool,
    is_gated: bool,
    tanh_approximation: bool,
    first_is_activated: bool,
) -> Tensor:
    def activated(h: Tensor) -> Tensor:
        return (
            _silu(h) if is_silu else _gelu(h, approximate="tanh" if tanh_approximation else "none")
        )

    h = x if bias is None else x + bias
    if not is_gated:
        return activated(h)
    first, second = h.chunk(2, dim=-1)
    return activated(first) * second if first_is_activated else first * activated(second)


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, dim=-1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: Optional[float],
    key_bias: Optional[Tensor],
    key_lengths: Optional[Tensor],
    heads: Optional[int],
    gate: Optional[Tensor] = None,
    addend: Optional[Tensor] = None,
) -> Tensor:
    shape, dtype = q.shape, q.dtype
    q, k, v, mask, has_keys = _masked(q, k, v, key_bias, key_lengths, heads)
    # PyTorch's fused kernels support neither forward mode nor vmap, and with a gradient of the mask they do
    # not accept every length.
    with sdpa_kernel(SDPBackend.MATH) if is_differentiated(mask) else nullcontext():
        out = _scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
        ).transpose(1, 2)
    if has_keys is not None:
        out = out.masked_fill(~has_keys[:, None, None, None], 0)
    if gate is not None:
        out = out.float() * gate[..., None]
    out = out.reshape(shape)
    if addend is not None:
        out = out.float() + addend
    return out.to(dtype)


def attention_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: Optional[float],
    key_bias: Optional[Tensor],
    key_lengths: Optional[Tensor],
    heads: Optional[int],
    gate: Optional[Tensor] = None,
    addend: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    out = attention(q, k, v, scale, key_bias, key_lengths, heads, gate, addend)
    q, k, _, mask, has_keys = _masked(q, k, v, key_bias, key_lengths, heads)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    queries, keys = q.float().transpose(1, 2), k.float().permute(0, 2, 3, 1)
    if q.shape[2] != k.shape[2]:
        keys = keys.repeat_interleave(q.shape[2] // max(k.shape[2], 1), dim=1)
    scores = queries @ keys * scale
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(3).transpose(1, 2)
    if has_keys is not None:
        lse = lse.masked_fill(~has_keys[:, None, None], -torch.inf)
    return out, lse.contiguous()


def _masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_bias: Optional[Tensor],
    key_lengths: Optional[Tensor],
    heads: Optional[int],
) -> tuple[Tensor, Tensor, Tensor, Optional[Tensor], Optional[Tensor]]:
    """Query, key and value by head and in a common dtype, a mask to add to the scores, and for each batch
    entry whether it has keys. Without keys the mask is 0, because some of PyTorch's kernels give NaN."""
    if heads is not None:
        head_dim = q.shape[2] // heads
        q, k, v = (tensor.unflatten(2, (-1, head_dim)) for tensor in (q, k, v))
    q, k, v, key_bias = _promoted(q, k, v, key_bias)  # PyTorch's kernels take a mask of q's dtype
    if key_bias is None and key_lengths is None:
        return q, k, v, None, None
    mask = q.new_zeros(k.shape[:2]) if key_bias is None else key_bias
    if key_lengths is not None:
        is_padding = torch.arange(k.shape[1], device=k.device) >= key_lengths[:, None]
        mask = mask.masked_fill(is_padding, -torch.inf)
        k, v = (tensor.masked_fill(is_padding[:, :, None, None], 0) for tensor in (k, v))
    has_keys = (mask != -torch.inf).any(1)
    return q, k, v, mask.masked_fill(~has_keys[:, None], 0)[:, None, None], has_keys
