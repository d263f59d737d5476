"""Query and key: norm and rotary embedding."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn.functional import pad  # here, because users may replace it

from .._ops import add_op_namespace_prefix, ops
from .calls import (
    MAX_INTEGER,
    choice,
    count,
    fail,
    is_differentiated,
    kernel_call,
    number,
    out_tensors,
    plain_call,
    promoted,
    refuse_type,
    required,
)
from .norm import normalized
from .rope import INTERLEAVED, LAYOUTS, by_head, rotated

_NORMS = {"across_heads": 1, "per_head": 2, "layer_per_head": 3, "none": 0}


def _angles(coordinates: Tensor, frequencies: Tensor, pairs: int) -> Tensor:
    """Angles (1 or B, S, pairs) of a token's pairs. The unrotated pairs come first, with angle 0."""
    angles = (coordinates.unsqueeze(-2) * frequencies.unsqueeze(-1)).flatten(2)
    return pad(angles, (pairs - angles.shape[-1], 0))


def _rotated(n: Tensor, rotation: Any, layout: int) -> Tensor:
    """``n`` (B, S, H, d), rotated by an operator's arguments."""
    first, second, is_coordinates = rotation
    if first is None:
        return n
    if is_coordinates:
        _, _, heads, head_dim = n.shape
        angles = _angles(first, second, heads * head_dim // 2).unflatten(2, (heads, -1))
        first, second = angles.cos(), angles.sin()
    return rotated(n, first, second, layout)


class _RotatedByKernel(torch.autograd.Function):
    """Query and key (B, S, H, d), rotated by the kernel. A rotation is linear, so its gradient is the
    transposed rotation, which the kernel also computes."""

    @staticmethod
    def forward(ctx, q, k, first, second, is_coordinates, layout):
        ctx.save_for_backward(first, second)
        ctx.options = is_coordinates, layout
        options = is_coordinates, q.shape[2], _NORMS["none"], layout, 0.0
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


def _normalized(x, weight, bias, head_dim, norm, eps):
    """``x`` as (B, S, H, d), normalized."""
    if norm == _NORMS["across_heads"]:
        x = normalized(x.reshape(x.shape[0], x.shape[1], -1), False, weight, None, eps)
    x = by_head(x, head_dim)
    if norm == _NORMS["per_head"]:
        return normalized(x, False, weight, bias, eps)
    if norm == _NORMS["layer_per_head"]:
        # In float32: a weight's gradient is a sum over all heads of all tokens.
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight, bias = (None if t is None else t.to(dtype) for t in (weight, bias))
        return normalized(x.to(dtype), True, weight, bias, eps).to(x.dtype)
    return x


def _two_ropes_formula(q, k, v, *arguments):
    q_weight, k_weight, q_bias, k_bias, *rotations, heads, norm, layout, eps = arguments
    rotation, k_rotation = rotations[:3], rotations[3:]
    dtype, shapes = q.dtype, (q.shape, k.shape)
    head_dim = q.shape[2:].numel() // heads
    q, k, q_weight, k_weight, q_bias, k_bias = promoted(q, k, q_weight, k_weight, q_bias, k_bias)
    q = _normalized(q, q_weight, q_bias, head_dim, norm, eps)
    k = _normalized(k, k_weight, k_bias, head_dim, norm, eps)
    table = rotation[0]
    if table is not None and table is k_rotation[0] and not is_differentiated(*rotation):
        q, k = _RotatedByKernel.apply(q, k, *rotation, layout)
    else:
        q, k = _rotated(q, rotation, layout), _rotated(k, k_rotation, layout)
    return q.reshape(shapes[0]).to(dtype), k.reshape(shapes[1]).to(dtype)


def _formula(q, k, *arguments):
    parameters, rotation, options = arguments[:4], arguments[4:7], arguments[7:]
    return _two_ropes_formula(q, k, None, *parameters, *rotation, *rotation, *options)


class CoordinateRope(NamedTuple):
    """A rotary embedding computed from each token's coordinates, without tables of size S·D.

    A token has ``heads * d / 2`` pairs (head-major). The first ``pad = heads * d / 2 - axes * F`` are not
    rotated. The angle of pair ``pad + i`` is ``frequencies[i // axes] * coordinates[b, s, i % axes]``,
    rounded to float32.

    Attributes:
        coordinates: ``(1 or B, S, axes)``, float32.
        frequencies: ``(F,)``, float32, shared by the axes.

    Source: the rotary embedding of LTX-Video, https://arxiv.org/abs/2501.00103, where ``coordinates``
    is the (frame, height, width) grid times 2 minus 1.
    """

    coordinates: Tensor
    frequencies: Tensor

    def tables(self, dim: int) -> tuple[Tensor, Tensor]:
        """``(cos, sin)``, each ``(1 or B, S, dim)``, float32, for a row of ``dim = heads * d`` elements
        in the interleaved layout: every angle twice, the unrotated pairs first.

        Raises TypeError or ValueError unless ``dim`` is an even integer of at least ``2 * axes * F``.
        """
        pairs = self.coordinates.shape[-1] * self.frequencies.shape[0]
        if isinstance(dim, bool) or not isinstance(dim, (numbers.Integral, torch.SymInt)):
            refuse_type("CoordinateRope.tables", "dim", "an integer", dim)
        if dim % 2 or dim < 2 * pairs:
            fail("CoordinateRope.tables", f"dim must be even and at least {2 * pairs}, got {dim}")
        angles = _angles(self.coordinates, self.frequencies, dim // 2).repeat_interleave(2, dim=-1)
        return angles.cos(), angles.sin()


def _rotation(name: str, rope: Any, writes: bool) -> tuple:
    """The operators' arguments for a rotation: ``(first, second, is_coordinates)``."""
    if rope is None:
        return None, None, False
    if isinstance(rope, Tensor) and rope.is_complex():
        if writes and torch.compiler.is_compiling() and rope.dtype == torch.complex64:
            # Inductor refuses an operator that writes if an argument is complex.
            return torch.view_as_real(rope.resolve_conj()), None, False
        return rope, None, False
    if isinstance(rope, (tuple, list)) and len(rope) == 2:
        first, second = rope
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            return first, second, isinstance(rope, CoordinateRope)
    accepted = "None, a pair (cos, sin) of tensors, a complex tensor or a CoordinateRope"
    refuse_type("qk_norm_rope", name, accepted, rope)


def _two_ropes_kernel(q, k, *arguments):
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    ops.qk_norm_rope_out.default(q, k, *arguments, q_out, k_out, None, False)
    return q_out, k_out


_qk_norm_rope = kernel_call("qk_norm_rope", _formula)
_qk_norm_two_ropes = kernel_call(
    "qk_norm_rope", _two_ropes_formula, "qk_norm_rope_out", _two_ropes_kernel
)
_qk_norm_rope_out = plain_call("qk_norm_rope", "qk_norm_rope_out")


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Optional[Tensor] = None,
    k_weight: Optional[Tensor] = None,
    rope: Any = None,
    *,
    heads: int,
    norm: str = "across_heads",
    layout: str = "interleaved",
    eps: float = 1e-6,
    inplace: bool = False,
    k_rope: Any = None,
    v: Optional[Tensor] = None,
    out: Optional[tuple] = None,
    q_bias: Optional[Tensor] = None,
    k_bias: Optional[Tensor] = None,
) -> tuple[Any, ...]:
    """Query and key, normalized and rotated.

    ``n = x / sqrt(mean(x²) + eps) * weight``, or LayerNorm of each head, then each pair ``(a, b)`` of ``n``
    becomes ``(a * cos_a - b * sin_a, b * cos_b + a * sin_b)``.

    Args:
        q: ``(B, S, heads * d)`` or ``(B, S, heads, d)``, T; strided in any dimension except the last.
        k: likewise, with the same B and d. Its number of heads may differ. Its S may differ if ``rope`` is
            None or ``k_rope`` is given.
        q_weight, k_weight: norm weights, float32 or T, or None; ``(heads * d,)`` across heads, ``(d,)``
            per head.
        rope: None for no rotation; ``(cos, sin)``, or ``cos + i sin``, complex64, in the forms that the
            operation ``rope`` takes for a 4-D ``x``; or a :class:`CoordinateRope`.
        heads: number of heads of ``q``.
        norm: ``"across_heads"`` (RMS, mean over all heads of a token), ``"per_head"`` (RMS),
            ``"layer_per_head"`` (LayerNorm) or ``"none"``.
        layout: as in ``rope``.
        inplace: write the results to ``q`` and ``k``.
        k_rope: the key's rotation, for the key's S and number of heads, in the forms of ``rope``; None to
            use ``rope``.
        v: values ``(B, S, any * d)`` or ``(B, S, any, d)``, T, with the key's S, copied to ``v_out``.
        out: ``(q_out, k_out)`` or, with ``v``, ``(q_out, k_out, v_out)``, with the shapes of q, k and v, T,
            strided in any dimension except the last, for example slices of a joint buffer. They must not
            overlap each other or an input, but each may be its own input. An output may also have the shape
            ``(B, S, C, H / C, d)``, for H heads in C chunks, for example a view of the buffer
            ``(C, S, B, H / C, d)`` that an all-to-all sends.
        q_bias, k_bias: biases of ``"layer_per_head"``, ``(d,)``, float32 or T, or None.

    Returns:
        ``(q, k)`` in the given shapes, or ``out`` as a tuple.

    Source: Su et al., 2021, https://arxiv.org/abs/2104.09864; query-key norm: Henry et al., 2020,
    https://arxiv.org/abs/2010.04245, with an RMS norm.
    """
    if type(heads) is not int or not 0 < heads <= MAX_INTEGER:
        heads = count("qk_norm_rope", "heads", heads)
    eps = number("qk_norm_rope", "eps", eps)
    try:
        options = heads, _NORMS[norm], LAYOUTS[layout], eps
    except (KeyError, TypeError):
        choice("qk_norm_rope", "norm", norm, _NORMS)
        choice("qk_norm_rope", "layout", layout, LAYOUTS)
        raise
    if inplace is False and k_rope is v is out is None:
        rotation = _rotation("rope", rope, False)
        return _qk_norm_rope(q, k, q_weight, k_weight, q_bias, k_bias, *rotation, *options)
    if not isinstance(inplace, bool):
        refuse_type("qk_norm_rope", "inplace", "True or False", inplace)
    writes = inplace or out is not None
    rotation = _rotation("rope", rope, writes)
    k_rotation = _rotation("k_rope", k_rope, writes)
    arguments = q_weight, k_weight, q_bias, k_bias, *rotation, *k_rotation, *options
    if v is not None and out is None:
        fail("qk_norm_rope", "out must be given along with v, got None")
    if not writes:
        return _qk_norm_two_ropes(q, k, v, *arguments)
    if out is None:
        outputs, refused = (q, k), ("inplace", "False", "True")
    else:
        if inplace:
            fail("qk_norm_rope", "inplace must be False along with out, got True")
        names = "(q_out, k_out) or (q_out, k_out, v_out)"
        size, condition = (2, " without v") if v is None else (3, " with v")
        outputs = out_tensors("qk_norm_rope", out, names, size, condition)
        refused = "out", "None", type(out).__name__
    q_out, k_out, v_out = (*outputs, None)[:3]
    arguments = q, k, v, *arguments, q_out, k_out, v_out, inplace
    return _qk_norm_rope_out(*arguments, written=outputs, refused=refused)


@torch.library.register_fake(add_op_namespace_prefix("qk_norm_rope"))
def _qk_norm_rope_fake(q, k, *_):
    return q.new_empty(q.shape), k.new_empty(k.shape)


@torch.library.register_fake(add_op_namespace_prefix("qk_norm_rope_out"))
def _qk_norm_rope_out_fake(q, k, *_):
    required(q, k)
