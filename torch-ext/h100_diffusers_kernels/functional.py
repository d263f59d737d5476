"""The operations: one documented function each.

``T`` is bfloat16, float16 or float32. Arithmetic is float32, rounded once, at the output; attention may
round its weights to 16 bits, too. Leading dimensions are rows; inputs may be strided in every dimension
but the last and are not copied; results are new contiguous tensors. Where an input requires grad or
carries a forward-mode tangent, the equivalent differentiable PyTorch expression runs instead. A wrong
argument raises ValueError, or TypeError for its type, in one sentence, before anything is launched or
written.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor

from . import batching, expressions
from ._ops import add_op_namespace_prefix, ops
from .arguments import (
    APPROXIMATIONS,
    ARGUMENT_ERRORS,
    LAYOUTS,
    MAX_INTEGER,
    MAX_SCALE,
    MIN_SCALE,
    NORMS,
    as_heads,
    as_number,
    as_scale,
    check_activation,
    check_attention,
    check_choice,
    check_coordinates,
    check_flag,
    check_in_place,
    check_input,
    check_qk,
    check_rope,
    check_rope_3d,
    check_row_operation,
    check_tables_dim,
    check_types,
    explains_types,
    find_proxy,
    heads_of,
    require_heads_of_tables,
    rope_table_views,
)
from .differentiation import is_differentiated

# Looked up once: each look-up through torch.ops runs Python code, at every call.
_rms_norm = ops.rms_norm.default
_layer_norm = ops.layer_norm.default
_rms_norm_modulate = ops.rms_norm_modulate.default
_layer_norm_modulate = ops.layer_norm_modulate.default
_gated_residual = ops.gated_residual.default
_gated_residual_rms_norm_modulate = ops.gated_residual_rms_norm_modulate.default
_gated_residual_layer_norm_modulate = ops.gated_residual_layer_norm_modulate.default
_qk_norm_rope = ops.qk_norm_rope.default
_qk_norm_rope_ = ops.qk_norm_rope_.default
_qk_norm_coordinate_rope = ops.qk_norm_coordinate_rope.default
_qk_norm_coordinate_rope_ = ops.qk_norm_coordinate_rope_.default
_rope = ops.rope.default
_rope_3d = ops.rope_3d.default
_gelu = ops.gelu.default
_silu = ops.silu.default
_geglu = ops.geglu.default
_swiglu = ops.swiglu.default
_softmax = ops.softmax.default
_attention = ops.attention.default


# --------------------------------------------------------------------------------------------------
# Norm, modulation, residual and gate


@explains_types
def rms_norm(x: Tensor, weight: Optional[Tensor] = None, eps: float = 1e-6) -> Tensor:
    """Root mean square norm over the last dimension: ``x / sqrt(mean(x²) + eps) * weight``.

    Args:
        x: ``(..., D)``, T.
        weight: ``(D,)``, T, or None.
        eps: added to the mean square.

    Source: Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467.
    """
    if type(eps) is not float:
        eps = as_number("rms_norm", "eps", eps)
    if is_differentiated(x, weight):
        check_row_operation("rms_norm", x, weight=weight)
        return expressions.rms_norm(x, weight, eps)
    return _rms_norm(x, weight, eps)


@torch.library.register_fake(add_op_namespace_prefix("rms_norm"))
def _rms_norm_fake(x, weight, eps):
    check_row_operation("rms_norm", x, weight=weight)
    return x.new_empty(x.shape)


@explains_types
def layer_norm(
    x: Tensor, weight: Optional[Tensor] = None, bias: Optional[Tensor] = None, eps: float = 1e-5
) -> Tensor:
    """Layer norm over the last dimension, as ``torch.nn.functional.layer_norm``.

    Args:
        x: ``(..., D)``, T.
        weight, bias: ``(D,)``, T, or None, independently of each other.
        eps: added to the (biased) variance.

    Source: Ba et al., 2016, https://arxiv.org/abs/1607.06450.
    """
    if type(eps) is not float:
        eps = as_number("layer_norm", "eps", eps)
    if is_differentiated(x, weight, bias):
        check_row_operation("layer_norm", x, weight=weight, bias=bias)
        return expressions.layer_norm(x, weight, bias, eps)
    return _layer_norm(x, weight, bias, eps)


@torch.library.register_fake(add_op_namespace_prefix("layer_norm"))
def _layer_norm_fake(x, weight, bias, eps):
    check_row_operation("layer_norm", x, weight=weight, bias=bias)
    return x.new_empty(x.shape)


@explains_types
def rms_norm_modulate(
    x: Tensor, scale: Tensor, shift: Tensor, weight: Optional[Tensor] = None, eps: float = 1e-6
) -> Tensor:
    """Adaptive RMS norm: ``rms_norm(x, weight, eps) * (1 + scale) + shift``.

    Args:
        x: ``(..., D)``, T.
        scale, shift: T, broadcast against ``x`` in all dimensions but the last, such as ``(D,)``,
            ``(B, 1, D)`` or ``(B, S, D)``.
        weight: ``(D,)``, T, or None.

    Source: Peebles and Xie, 2022 (adaLN), https://arxiv.org/abs/2212.09748, with an RMS norm as in
    LTX-Video, https://arxiv.org/abs/2501.00103.
    """
    if type(eps) is not float:
        eps = as_number("rms_norm_modulate", "eps", eps)
    if is_differentiated(x, scale, shift, weight):
        check_row_operation("rms_norm_modulate", x, scale=scale, shift=shift, weight=weight)
        return expressions.rms_norm_modulate(x, scale, shift, weight, eps)
    return _rms_norm_modulate(x, scale, shift, weight, eps)


@torch.library.register_fake(add_op_namespace_prefix("rms_norm_modulate"))
def _rms_norm_modulate_fake(x, scale, shift, weight, eps):
    check_row_operation("rms_norm_modulate", x, scale=scale, shift=shift, weight=weight)
    return x.new_empty(x.shape)


@explains_types
def layer_norm_modulate(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-6,
) -> Tensor:
    """Adaptive layer norm: ``layer_norm(x, weight, bias, eps) * (1 + scale) + shift``.

    Args:
        x: ``(..., D)``, T.
        scale, shift: T, broadcast against ``x`` in all dimensions but the last.
        weight, bias: ``(D,)``, T, or None.

    Source: Peebles and Xie, 2022 (adaLN), https://arxiv.org/abs/2212.09748.
    """
    if type(eps) is not float:
        eps = as_number("layer_norm_modulate", "eps", eps)
    if is_differentiated(x, scale, shift, weight, bias):
        check_row_operation(
            "layer_norm_modulate", x, scale=scale, shift=shift, weight=weight, bias=bias
        )
        return expressions.layer_norm_modulate(x, scale, shift, weight, bias, eps)
    return _layer_norm_modulate(x, scale, shift, weight, bias, eps)


@torch.library.register_fake(add_op_namespace_prefix("layer_norm_modulate"))
def _layer_norm_modulate_fake(x, scale, shift, weight, bias, eps):
    check_row_operation(
        "layer_norm_modulate", x, scale=scale, shift=shift, weight=weight, bias=bias
    )
    return x.new_empty(x.shape)


@explains_types
def gated_residual(residual: Tensor, x: Tensor, gate: Optional[Tensor] = None) -> Tensor:
    """``residual + gate * x``, or ``residual + x`` without a gate.

    Args:
        residual, x: ``(..., D)``, T, of one shape.
        gate: T, broadcasts against ``x`` in all dimensions but the last, or None.
    """
    if is_differentiated(residual, x, gate):
        check_row_operation("gated_residual", x, residual=residual, gate=gate)
        return expressions.gated_residual(residual, x, gate)
    return _gated_residual(residual, x, gate)


@torch.library.register_fake(add_op_namespace_prefix("gated_residual"))
def _gated_residual_fake(residual, x, gate):
    check_row_operation("gated_residual", x, residual=residual, gate=gate)
    return x.new_empty(x.shape)


@explains_types
def gated_residual_rms_norm_modulate(
    residual: Tensor,
    x: Tensor,
    gate: Optional[Tensor],
    scale: Tensor,
    shift: Tensor,
    weight: Optional[Tensor] = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """The new residual ``h = residual + gate * x`` and ``rms_norm_modulate(h, scale, shift, weight)``.

    The norm is taken of the unrounded ``h``.

    Args:
        residual, x: ``(..., D)``, T, of one shape.
        gate: T, broadcasts against ``x`` in all dimensions but the last, or None for 1.
        scale, shift: T, broadcast likewise.
        weight: ``(D,)``, T, or None.

    Returns:
        ``(h, modulated)``, each ``(..., D)``, T.
    """
    if type(eps) is not float:
        eps = as_number("gated_residual_rms_norm_modulate", "eps", eps)
    if is_differentiated(residual, x, gate, scale, shift, weight):
        check_row_operation(
            "gated_residual_rms_norm_modulate",
            x,
            residual=residual,
            gate=gate,
            scale=scale,
            shift=shift,
            weight=weight,
        )
        return expressions.gated_residual_rms_norm_modulate(
            residual, x, gate, scale, shift, weight, eps
        )
    return _gated_residual_rms_norm_modulate(residual, x, gate, scale, shift, weight, eps)


@torch.library.register_fake(add_op_namespace_prefix("gated_residual_rms_norm_modulate"))
def _gated_residual_rms_norm_modulate_fake(residual, x, gate, scale, shift, weight, eps):
    check_row_operation(
        "gated_residual_rms_norm_modulate",
        x,
        residual=residual,
        gate=gate,
        scale=scale,
        shift=shift,
        weight=weight,
    )
    return x.new_empty(x.shape), x.new_empty(x.shape)


@explains_types
def gated_residual_layer_norm_modulate(
    residual: Tensor,
    x: Tensor,
    gate: Optional[Tensor],
    scale: Tensor,
    shift: Tensor,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """The new residual ``h = residual + gate * x`` and ``layer_norm_modulate(h, scale, shift, ...)``.

    The norm is taken of the unrounded ``h``.

    Args:
        residual, x: ``(..., D)``, T, of one shape.
        gate: T, broadcasts against ``x`` in all dimensions but the last, or None for 1.
        scale, shift: T, broadcast likewise.
        weight, bias: ``(D,)``, T, or None.

    Returns:
        ``(h, modulated)``, each ``(..., D)``, T.
    """
    if type(eps) is not float:
        eps = as_number("gated_residual_layer_norm_modulate", "eps", eps)
    if is_differentiated(residual, x, gate, scale, shift, weight, bias):
        check_row_operation(
            "gated_residual_layer_norm_modulate",
            x,
            residual=residual,
            gate=gate,
            scale=scale,
            shift=shift,
            weight=weight,
            bias=bias,
        )
        return expressions.gated_residual_layer_norm_modulate(
            residual, x, gate, scale, shift, weight, bias, eps
        )
    return _gated_residual_layer_norm_modulate(residual, x, gate, scale, shift, weight, bias, eps)


@torch.library.register_fake(add_op_namespace_prefix("gated_residual_layer_norm_modulate"))
def _gated_residual_layer_norm_modulate_fake(residual, x, gate, scale, shift, weight, bias, eps):
    check_row_operation(
        "gated_residual_layer_norm_modulate",
        x,
        residual=residual,
        gate=gate,
        scale=scale,
        shift=shift,
        weight=weight,
        bias=bias,
    )
    return x.new_empty(x.shape), x.new_empty(x.shape)


# --------------------------------------------------------------------------------------------------
# Query and key: norm and rotary embedding


class CoordinateRope(NamedTuple):
    """A rotary embedding given by each token's coordinates, with nothing of size S·D to read.

    Pair ``p`` of a token's ``heads * d / 2`` pairs (head-major) is left alone for ``p < pad`` with
    ``pad = heads * d / 2 - axes * F``; otherwise, with ``i = p - pad``, its angle is
    ``frequencies[i // axes] * coordinates[b, s, i % axes]``, rounded to float32.

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
        in the interleaved layout: every angle twice, the unrotated pairs in front.

        ``dim`` is an even integer, at least ``2 * axes * F``; else TypeError or ValueError.
        """
        check_tables_dim(dim, self.coordinates.shape[-1] * self.frequencies.shape[0])
        angles = (self.coordinates.unsqueeze(-2) * self.frequencies.unsqueeze(-1)).flatten(2)
        angles = torch.nn.functional.pad(angles, (dim // 2 - angles.shape[-1], 0))
        angles = angles.repeat_interleave(2, dim=-1)
        return angles.cos(), angles.sin()


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Optional[Tensor] = None,
    k_weight: Optional[Tensor] = None,
    rope: Optional[Union[tuple[Tensor, Tensor], CoordinateRope]] = None,
    *,
    heads: int,
    norm: str = "across_heads",
    layout: str = "interleaved",
    eps: float = 1e-6,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Query and key, normalized (RMS) and rotated.

    ``n = x / sqrt(mean(x²) + eps) * weight``, then each pair ``(a, b)`` of ``n`` becomes
    ``(a * cos_a - b * sin_a, b * cos_b + a * sin_b)``.

    Args:
        q: ``(B, S, heads * d)`` or ``(B, S, heads, d)``, T; strided in all but the last dimension.
        k: likewise, with the same B, S and d; its number of heads may differ.
        q_weight, k_weight: of the norm, T or None; ``(heads * d,)`` across heads, ``(d,)`` per head.
        rope: None, for no rotation; or ``(cos, sin)``, each ``(S, d)``, ``(S, heads * d)``,
            ``(1 or B, S, d)``, ``(1 or B, S, heads * d)`` or ``(1 or B, S, 1 or heads, d)``; or, with
            one value for both elements of a pair, each ``(S, d/2)``, ``(1 or B, S, d/2)`` or
            ``(1 or B, S, 1 or heads, d/2)``; float32 or T; or a :class:`CoordinateRope`.
        heads: number of heads of ``q``.
        norm: ``"across_heads"`` (the mean is taken over all heads of a token), ``"per_head"`` or
            ``"none"``.
        layout: which elements of a head form a pair: ``"interleaved"``, (2i, 2i+1), or ``"half"``,
            (i, i + d/2).
        inplace: store into ``q`` and ``k``; not possible where an input requires grad or
            carries a tangent.

    Returns:
        ``(q, k)`` in the given shapes.

    Source: Su et al., 2021, https://arxiv.org/abs/2104.09864; query-key norm: Henry et al., 2020,
    https://arxiv.org/abs/2010.04245, with an RMS norm.
    """
    try:
        if type(heads) is not int or not 0 < heads <= MAX_INTEGER:
            heads = as_heads("qk_norm_rope", heads)
        if type(eps) is not float:
            eps = as_number("qk_norm_rope", "eps", eps)
        if inplace is not False and inplace is not True:
            check_flag("qk_norm_rope", "inplace", inplace)
        if norm not in NORMS or layout not in LAYOUTS:
            check_choice("qk_norm_rope", "norm", norm, NORMS)
            check_choice("qk_norm_rope", "layout", layout, LAYOUTS)
        if isinstance(rope, CoordinateRope):
            run = _qk_norm_coordinate_rope_ if inplace else _qk_norm_coordinate_rope
            first, second = rope.coordinates, rope.frequencies
        else:
            run = _qk_norm_rope_ if inplace else _qk_norm_rope
            if rope is None:
                first = second = None
            elif isinstance(rope, (tuple, list)):
                first, second = rope
                if first is None or second is None:
                    raise TypeError("rope must be a pair of tensors")
            else:  # a tensor, too, can be unpacked
                raise TypeError("rope must be None, a pair (cos, sin) or a CoordinateRope")
        if is_differentiated(q, k, q_weight, k_weight, first, second):
            if inplace:
                raise ValueError(
                    "qk_norm_rope: inplace must be False where an input requires grad or carries "
                    "a tangent, got True"
                )
            return _differentiable_qk_norm_rope(
                q, k, q_weight, k_weight, rope, heads, norm, layout, eps
            )
        results = run(q, k, q_weight, k_weight, first, second, heads, norm, layout, eps)
        if not inplace:
            return results
        _written(q, k)
        return q, k
    except ARGUMENT_ERRORS:  # as explains_types does, without a second call with so many keywords
        options = {"heads": heads, "norm": norm, "layout": layout, "eps": eps, "inplace": inplace}
        args = (q, k, q_weight, k_weight, rope)
        proxy = find_proxy(args, options)
        if proxy is not None:
            return proxy.tracer.create_proxy("call_function", qk_norm_rope, args, options)
        check_types(qk_norm_rope, q, k, q_weight, k_weight, rope, **options)
        raise


torch.fx.has_side_effect(
    qk_norm_rope
)  # in place: a node whose result is not used stays in its graph


def _differentiable_qk_norm_rope(q, k, q_weight, k_weight, rope, heads, norm, layout, eps):
    head_dim, cos, sin = _check_qk_norm_rope(
        "qk_norm_rope", q, k, q_weight, k_weight, rope, heads, norm, layout
    )
    options = {"head_dim": head_dim, "norm": norm, "layout": layout, "eps": eps}
    return (
        expressions.norm_rope(q, q_weight, cos, sin, **options),
        expressions.norm_rope(k, k_weight, cos, sin, **options),
    )


def _written(*tensors: Tensor) -> None:
    """Lets autograd notice a backward that needs the values from before."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(tensors)


def _check_qk_norm_rope(operation, q, k, q_weight, k_weight, rope, heads, norm, layout):
    """Checks every argument; returns the head dimension and the tables, (1|B, S, 1|H, d|d/2) or None."""
    head_dim = check_qk(operation, q, k, q_weight, k_weight, heads, norm, layout)
    if rope is None:
        return head_dim, None, None
    k_heads = heads_of(k, head_dim)
    if isinstance(rope, CoordinateRope):
        check_coordinates(operation, rope.coordinates, rope.frequencies, q, k_heads, head_dim)
        cos, sin = rope.tables(heads * head_dim)
        if layout == "half":
            # The tables repeat an angle for neighbours; here the pair is half a head apart.
            cos, sin = (
                t[..., ::2].unflatten(2, (heads, -1)).repeat(1, 1, 1, 2) for t in (cos, sin)
            )
        else:
            cos, sin = (t.unflatten(2, (heads, -1)) for t in (cos, sin))
        return head_dim, cos, sin
    cos, sin = views = rope_table_views(operation, *rope, "q", q, heads, head_dim)
    require_heads_of_tables(operation, views, heads, k_heads)
    return head_dim, cos, sin


def _table_pair(operation, cos, sin):
    if (cos is None) != (sin is None):
        missing, given = ("cos", "sin") if cos is None else ("sin", "cos")
        raise ValueError(f"{operation}: {missing} must be given along with {given}, got None")
    return None if cos is None else (cos, sin)


@torch.library.register_fake(add_op_namespace_prefix("qk_norm_rope"))
def _qk_norm_rope_fake(q, k, q_weight, k_weight, cos, sin, heads, norm, layout, eps):
    rope = _table_pair("qk_norm_rope", cos, sin)
    _check_qk_norm_rope("qk_norm_rope", q, k, q_weight, k_weight, rope, heads, norm, layout)
    return q.new_empty(q.shape), k.new_empty(k.shape)


@torch.library.register_fake(add_op_namespace_prefix("qk_norm_rope_"))
def _qk_norm_rope_inplace_fake(q, k, q_weight, k_weight, cos, sin, heads, norm, layout, eps):
    rope = _table_pair("qk_norm_rope", cos, sin)
    _check_qk_norm_rope("qk_norm_rope", q, k, q_weight, k_weight, rope, heads, norm, layout)
    read_only = {"q_weight": q_weight, "k_weight": k_weight, "cos": cos, "sin": sin}
    check_in_place("qk_norm_rope", q, k, read_only)


@torch.library.register_fake(add_op_namespace_prefix("qk_norm_coordinate_rope"))
def _qk_norm_coordinate_rope_fake(
    q, k, q_weight, k_weight, coordinates, frequencies, heads, norm, layout, eps
):
    _check_qk_norm_coordinate_rope(
        q, k, q_weight, k_weight, coordinates, frequencies, heads, norm, layout
    )
    return q.new_empty(q.shape), k.new_empty(k.shape)


@torch.library.register_fake(add_op_namespace_prefix("qk_norm_coordinate_rope_"))
def _qk_norm_coordinate_rope_inplace_fake(
    q, k, q_weight, k_weight, coordinates, frequencies, heads, norm, layout, eps
):
    _check_qk_norm_coordinate_rope(
        q, k, q_weight, k_weight, coordinates, frequencies, heads, norm, layout
    )
    read_only = {
        "q_weight": q_weight,
        "k_weight": k_weight,
        "coordinates": coordinates,
        "frequencies": frequencies,
    }
    check_in_place("qk_norm_rope", q, k, read_only)


def _check_qk_norm_coordinate_rope(
    q, k, q_weight, k_weight, coordinates, frequencies, heads, norm, layout
):
    head_dim = check_qk("qk_norm_rope", q, k, q_weight, k_weight, heads, norm, layout)
    k_heads = heads_of(k, head_dim)
    check_coordinates("qk_norm_rope", coordinates, frequencies, q, k_heads, head_dim)


def _refuse_negative_views(operation, q, k, *arguments):
    """Called where a tensor has its sign in a bit beside its memory, in which no kernel could write."""
    for name, tensor in (("q", q), ("k", k)):
        if tensor.is_neg():
            raise ValueError(
                f"qk_norm_rope: {name} must not be a negative view to be written in place, "
                "got one with its negative bit set"
            )
    operation(q, k, *(a.resolve_neg() if isinstance(a, Tensor) else a for a in arguments))


_library = torch.library.Library(add_op_namespace_prefix("").rstrip(":"), "IMPL")
for _operation in (_qk_norm_rope_, _qk_norm_coordinate_rope_):
    _library.impl(_operation, functools.partial(_refuse_negative_views, _operation), "Negative")


# --------------------------------------------------------------------------------------------------
# Rotary embedding alone


@explains_types
def rope(x: Tensor, cos: Tensor, sin: Tensor, layout: str = "interleaved") -> Tensor:
    """Rotary embedding: each pair ``(a, b)`` of a head becomes
    ``(a * cos_a - b * sin_a, b * cos_b + a * sin_b)``.

    Args:
        x: ``(B, S, H, d)``, or ``(B, S, H * d)`` with the tables' last dimension as ``d``, T.
        cos, sin: each ``(S, d)``, ``(1 or B, S, d)`` or ``(1 or B, S, 1 or H, d)``, and for an x of
            four dimensions also ``(S, H * d)`` or ``(1 or B, S, H * d)``, or, both with one value for
            the two elements of a pair, ``(S, d/2)``, ``(1 or B, S, d/2)`` or
            ``(1 or B, S, 1 or H, d/2)``; float32 or T, both alike. With an x of three dimensions
            such tables would mean heads half as long: view it as ``(B, S, H, d)`` first.
        layout: which elements of a head form a pair: ``"interleaved"``, (2i, 2i+1), or ``"half"``,
            (i, i + d/2).

    Source: Su et al., 2021, https://arxiv.org/abs/2104.09864.
    """
    if layout not in LAYOUTS:
        check_choice("rope", "layout", layout, LAYOUTS)
    if is_differentiated(x, cos, sin):
        return expressions.rope(x, *check_rope("rope", x, cos, sin, layout), layout)
    return _rope(x, cos, sin, layout)


@torch.library.register_fake(add_op_namespace_prefix("rope"))
def _rope_fake(x, cos, sin, layout):
    check_rope("rope", x, cos, sin, layout)
    return x.new_empty(x.shape)


@explains_types
def rope_3d(
    x: Tensor,
    frame: tuple[Tensor, Tensor],
    height: tuple[Tensor, Tensor],
    width: tuple[Tensor, Tensor],
    layout: str = "interleaved",
) -> Tensor:
    """Rotary embedding of the tokens of a (frame, height, width) grid, from one table an axis.

    The pairs of a head are divided among the axes: the first turn by the frame's angles, the next by
    the height's, the last by the width's. A pair ``(a, b)`` becomes
    ``(a * cos - b * sin, b * cos + a * sin)``.

    Args:
        x: ``(B, S, H, d)``, T, with ``S = frames * heights * widths`` in row-major order.
        frame, height, width: each a pair ``(cos, sin)``, both ``(positions, pairs)`` with one value
            for a pair of elements; the pairs of the axes add up to ``d / 2``, and an axis may have
            none. Float32 or T, all alike.
        layout: which elements of a head form a pair: ``"interleaved"``, (2i, 2i+1), or ``"half"``,
            (i, i + d/2).

    Source: Su et al., 2021, https://arxiv.org/abs/2104.09864, on the three axes of a video as in
    Wan, 2025, https://arxiv.org/abs/2503.20314.
    """
    if layout not in LAYOUTS:
        check_choice("rope_3d", "layout", layout, LAYOUTS)
    if not (isinstance(frame, tuple) and isinstance(height, tuple) and isinstance(width, tuple)):
        check_types(rope_3d, x, frame, height, width, layout)  # a tensor, too, can be unpacked
    frame_cos, frame_sin = frame
    height_cos, height_sin = height
    width_cos, width_sin = width
    if is_differentiated(x, frame_cos, frame_sin, height_cos, height_sin, width_cos, width_sin):
        axes = {"frame": frame, "height": height, "width": width}
        check_rope_3d("rope_3d", x, axes, layout)
        return expressions.rope_3d(x, frame, height, width, layout)
    return _rope_3d(x, frame_cos, frame_sin, height_cos, height_sin, width_cos, width_sin, layout)


@torch.library.register_fake(add_op_namespace_prefix("rope_3d"))
def _rope_3d_fake(x, frame_cos, frame_sin, height_cos, height_sin, width_cos, width_sin, layout):
    axes = {
        "frame": (frame_cos, frame_sin),
        "height": (height_cos, height_sin),
        "width": (width_cos, width_sin),
    }
    check_rope_3d("rope_3d", x, axes, layout)
    return x.new_empty(x.shape)


# --------------------------------------------------------------------------------------------------
# Activations


@explains_types
def gelu(x: Tensor, approximate: str = "none", bias: Optional[Tensor] = None) -> Tensor:
    """Gaussian error linear unit of ``x + bias``, as ``torch.nn.functional.gelu``.

    Args:
        x: ``(..., D)``, T.
        approximate: ``"none"``, ``x * Φ(x)``, or ``"tanh"``,
            ``x / 2 * (1 + tanh(sqrt(2 / π) * (x + 0.044715 x³)))``.
        bias: ``(D,)``, T, or None.

    Source: Hendrycks and Gimpel, 2016, https://arxiv.org/abs/1606.08415.
    """
    if approximate not in APPROXIMATIONS:
        check_choice("gelu", "approximate", approximate, APPROXIMATIONS)
    if is_differentiated(x, bias):
        check_activation("gelu", x, approximate, is_gated=False, bias=bias)
        return expressions.gelu(x, approximate, bias)
    return _gelu(x, approximate, bias)


@torch.library.register_fake(add_op_namespace_prefix("gelu"))
def _gelu_fake(x, approximate, bias):
    check_activation("gelu", x, approximate, is_gated=False, bias=bias)
    return x.new_empty(x.shape)


@explains_types
def silu(x: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """Sigmoid linear unit, ``x * sigmoid(x)``, of ``x + bias``, as ``torch.nn.functional.silu``.

    Args:
        x: ``(..., D)``, T.
        bias: ``(D,)``, T, or None.

    Source: Elfwing et al., 2017, https://arxiv.org/abs/1702.03118.
    """
    if is_differentiated(x, bias):
        check_activation("silu", x, "none", is_gated=False, bias=bias)
        return expressions.silu(x, bias)
    return _silu(x, bias)


@torch.library.register_fake(add_op_namespace_prefix("silu"))
def _silu_fake(x, bias):
    check_activation("silu", x, "none", is_gated=False, bias=bias)
    return x.new_empty(x.shape)


@explains_types
def geglu(x: Tensor, approximate: str = "none", bias: Optional[Tensor] = None) -> Tensor:
    """GELU-gated linear unit of ``x + bias``: first half times ``gelu`` of the second half, as in
    diffusers.

    Args:
        x: ``(..., 2 * D)``, T.
        approximate: of the GELU, ``"none"`` or ``"tanh"``.
        bias: ``(2 * D,)``, T, or None.

    Returns:
        ``(..., D)``, T.

    Source: Shazeer, 2020, https://arxiv.org/abs/2002.05202.
    """
    if approximate not in APPROXIMATIONS:
        check_choice("geglu", "approximate", approximate, APPROXIMATIONS)
    if is_differentiated(x, bias):
        check_activation("geglu", x, approximate, is_gated=True, bias=bias)
        return expressions.geglu(x, approximate, bias)
    return _geglu(x, approximate, bias)


@torch.library.register_fake(add_op_namespace_prefix("geglu"))
def _geglu_fake(x, approximate, bias):
    check_activation("geglu", x, approximate, is_gated=True, bias=bias)
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@explains_types
def swiglu(x: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """SiLU-gated linear unit of ``x + bias``: first half times ``silu`` of the second half, as in
    diffusers.

    Args:
        x: ``(..., 2 * D)``, T.
        bias: ``(2 * D,)``, T, or None.

    Returns:
        ``(..., D)``, T.

    Source: Shazeer, 2020, https://arxiv.org/abs/2002.05202.
    """
    if is_differentiated(x, bias):
        check_activation("swiglu", x, "none", is_gated=True, bias=bias)
        return expressions.swiglu(x, bias)
    return _swiglu(x, bias)


@torch.library.register_fake(add_op_namespace_prefix("swiglu"))
def _swiglu_fake(x, bias):
    check_activation("swiglu", x, "none", is_gated=True, bias=bias)
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


# --------------------------------------------------------------------------------------------------
# Softmax


@explains_types
def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension, ``exp(x - max(x)) / sum(exp(x - max(x)))``.

    Args:
        x: ``(..., D)``, T.

    Source: Milakov and Gimelshein, 2018 (online softmax), https://arxiv.org/abs/1805.02867.
    """
    if is_differentiated(x):
        check_input("softmax", "x", x)
        return expressions.softmax(x)
    return _softmax(x)


@torch.library.register_fake(add_op_namespace_prefix("softmax"))
def _softmax_fake(x):
    check_input("softmax", "x", x)
    return x.new_empty(x.shape)


# --------------------------------------------------------------------------------------------------
# Attention


@explains_types
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: Optional[float] = None,
    key_bias: Optional[Tensor] = None,
    key_lengths: Optional[Tensor] = None,
) -> Tensor:
    """Attention, not causal: ``softmax(scale * q kᵀ + key_bias) v`` of each batch entry and head.

    Args:
        q: ``(B, Sq, H, d)``, bfloat16 or float16, d = 64 or 128; strided in all but the last
            dimension, such as a view of a packed projection.
        k, v: ``(B, Sk, Hk, d)``, likewise, of q's dtype. H is a multiple of Hk, and query head ``h``
            meets key head ``h // (H // Hk)`` (grouped-query attention).
        scale: positive and finite; None for ``1 / sqrt(d)``.
        key_bias: ``(B, Sk)``, float32 or of q's dtype, or None; added to the scores of every head and
            query. A bias of -inf leaves a key out; a query whose keys all have it gives zeros.
        key_lengths: ``(B,)``, int32, contiguous, or None; the keys at and after ``key_lengths[b]`` are
            skipped, and whatever is in them has no influence. Read on the device, and taken as 0
            where negative and as Sk where larger. A batch entry without keys gives zeros.

    Returns:
        ``(B, Sq, H, d)``, contiguous.

    On CUDA the weights are rounded to 16 bits for the tensor cores: to float16, with eight times the
    precision of bfloat16, also where the inputs are bfloat16, from 1024 queries and 257 keys on and
    without a bias. That takes temporary memory of v's size, for v in float16; queries for which
    float16 lacks the range are computed once more, in bfloat16.

    Source: Vaswani et al., 2017, https://arxiv.org/abs/1706.03762; in one pass over the keys as in
    Dao et al., 2022, https://arxiv.org/abs/2205.14135.
    """
    if scale is not None and not (type(scale) is float and MIN_SCALE <= scale <= MAX_SCALE):
        scale = as_scale("attention", scale)
    if is_differentiated(q, k, v, key_bias):
        check_attention("attention", q, k, v, scale, key_bias, key_lengths)
        return expressions.attention(q, k, v, scale, key_bias, key_lengths)
    return _attention(q, k, v, scale, key_bias, key_lengths)


@torch.library.register_fake(add_op_namespace_prefix("attention"))
def _attention_fake(q, k, v, scale, key_bias, key_lengths):
    check_attention("attention", q, k, v, scale, key_bias, key_lengths)
    return q.new_empty(q.shape)


# --------------------------------------------------------------------------------------------------
# Transforms: torch.vmap

_OF_ROWS = (
    _rms_norm,
    _layer_norm,
    _rms_norm_modulate,
    _layer_norm_modulate,
    _gated_residual,
    _gated_residual_rms_norm_modulate,
    _gated_residual_layer_norm_modulate,
    _gelu,
    _silu,
    _geglu,
    _swiglu,
    _softmax,
)
_OF_HEADS = (_qk_norm_rope, _qk_norm_coordinate_rope, _rope, _rope_3d, _attention)
_IN_PLACE = (_qk_norm_rope_, _qk_norm_coordinate_rope_)
for _operations, _rule in (
    (_OF_ROWS, batching.by_rows),
    (_OF_HEADS, batching.by_sample),
    (_IN_PLACE, batching.in_place),
):
    for _operation in _operations:
        torch.library.register_vmap(_operation, _rule(_operation), lib=_library)
