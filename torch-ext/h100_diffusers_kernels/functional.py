"""The operations: one documented function each, whose body is its formula.

``T`` is bfloat16, float16 or float32. Arithmetic is float32, rounded once, at the output; attention may
round its weights to 16 bits, too. Leading dimensions are rows; inputs may be strided in every dimension
but the last and are not copied; results are new contiguous tensors, or ``out``, where an operation has it: a
tensor of the result's shape and dtype, strided likewise, that is written and returned. It may share no memory
with what is read, but where that is said. Where an input requires grad or
carries a forward-mode tangent, the formula runs, which has no ``out``, and else the kernel of the same name
(``declaration.operation``). A wrong argument raises ValueError, or TypeError for its type, in one sentence,
before anything is launched or written; no memory for a result raises torch.OutOfMemoryError.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from . import batching, expressions
from ._ops import add_op_namespace_prefix, ops
from .arguments import (
    LAYOUTS,
    MAX_INTEGER,
    NORMS,
    as_heads,
    as_number,
    check_attention,
    check_choice,
    check_flag,
    check_group_norm,
    check_norm_rope,
    check_output,
    check_qk_norm_coordinate_rope,
    check_qk_norm_rope,
    check_qk_norm_two_ropes,
    check_rope,
    check_rope_3d,
    check_tables_dim,
    check_values,
    fail,
    has_dense_images,
    is_channels_last,
    shown,
)
from .declaration import (
    DECLARATIONS,
    ERRORS,
    LIBRARY,
    Activation,
    Approximation,
    Constant,
    Count,
    Declaration,
    GatedRows,
    Half,
    KeyRope,
    Layout,
    Modulation,
    NormScope,
    NormVector,
    Out,
    Output,
    Outputs,
    Rope,
    Rows,
    Scale,
    Tables,
    Vector,
    check_out,
    checked,
    operation,
)
from .differentiation import is_differentiated

# --------------------------------------------------------------------------------------------------
# Norm, modulation, residual and gate


@operation("norm")
def rms_norm(x: Rows, weight: Optional[NormVector] = None, eps: float = 1e-6) -> Tensor:
    """Root mean square norm over the last dimension: ``x / sqrt(mean(x²) + eps) * weight``.

    Args:
        x: ``(..., D)``, T.
        weight: ``(D,)``, T or float32, or None.
        eps: added to the mean square.

    Source: Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467.
    """
    return expressions.rms_normalized(x.float(), weight, eps).to(x.dtype)


@torch.library.register_fake(add_op_namespace_prefix("rms_norm"))
@checked("rms_norm")
def _rms_norm_fake(x, *_):
    return x.new_empty(x.shape)


@operation("norm")
def layer_norm(
    x: Rows,
    weight: Optional[NormVector] = None,
    bias: Optional[NormVector] = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer norm over the last dimension, as ``torch.nn.functional.layer_norm``.

    Args:
        x: ``(..., D)``, T.
        weight, bias: ``(D,)``, T or float32, or None, independently of each other.
        eps: added to the (biased) variance.

    Source: Ba et al., 2016, https://arxiv.org/abs/1607.06450.
    """
    return expressions.layer_normalized(x.float(), weight, bias, eps).to(x.dtype)


@torch.library.register_fake(add_op_namespace_prefix("layer_norm"))
@checked("layer_norm")
def _layer_norm_fake(x, *_):
    return x.new_empty(x.shape)


@operation("norm")
def rms_norm_modulate(
    x: Rows,
    scale: Modulation,
    shift: Optional[Modulation] = None,
    weight: Optional[NormVector] = None,
    eps: float = 1e-6,
) -> Tensor:
    """Adaptive RMS norm: ``rms_norm(x, weight, eps) * (1 + scale) + shift``.

    Args:
        x: ``(..., D)``, T.
        scale: T or float32, broadcasts against ``x`` in all dimensions but the last, such as ``(D,)``,
            ``(B, 1, D)`` or ``(B, S, D)``.
        shift: likewise, or None for 0.
        weight: ``(D,)``, T or float32, or None.

    Source: Peebles and Xie, 2022 (adaLN), https://arxiv.org/abs/2212.09748, with an RMS norm as in
    LTX-Video, https://arxiv.org/abs/2501.00103.
    """
    n = expressions.rms_normalized(x.float(), weight, eps)
    return expressions.modulated(n, scale, shift).to(x.dtype)


@torch.library.register_fake(add_op_namespace_prefix("rms_norm_modulate"))
@checked("rms_norm_modulate")
def _rms_norm_modulate_fake(x, *_):
    return x.new_empty(x.shape)


@operation("norm")
def layer_norm_modulate(
    x: Rows,
    scale: Modulation,
    shift: Optional[Modulation] = None,
    weight: Optional[NormVector] = None,
    bias: Optional[NormVector] = None,
    eps: float = 1e-6,
) -> Tensor:
    """Adaptive layer norm: ``layer_norm(x, weight, bias, eps) * (1 + scale) + shift``.

    Args:
        x: ``(..., D)``, T.
        scale: T or float32, broadcasts against ``x`` in all dimensions but the last.
        shift: likewise, or None for 0.
        weight, bias: ``(D,)``, T or float32, or None.

    Source: Peebles and Xie, 2022 (adaLN), https://arxiv.org/abs/2212.09748.
    """
    n = expressions.layer_normalized(x.float(), weight, bias, eps)
    return expressions.modulated(n, scale, shift).to(x.dtype)


@torch.library.register_fake(add_op_namespace_prefix("layer_norm_modulate"))
@checked("layer_norm_modulate")
def _layer_norm_modulate_fake(x, *_):
    return x.new_empty(x.shape)


@operation("norm")
def layer_norm_modulate_pair(
    x: Rows,
    scale: Optional[Modulation],
    shift: Optional[Modulation],
    second_scale: Optional[Modulation],
    second_shift: Optional[Modulation],
    weight: Optional[NormVector] = None,
    bias: Optional[NormVector] = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Two modulations of one layer norm ``n = layer_norm(x, weight, bias, eps)``, with ``x`` read once:
    ``n * (1 + scale) + shift`` and ``n * (1 + second_scale) + second_shift``.

    Args:
        x: ``(..., D)``, T.
        scale, shift, second_scale, second_shift: T or float32, broadcast against ``x`` in all dimensions
            but the last, or None for 0.
        weight, bias: ``(D,)``, T or float32, or None.

    Returns:
        The two, each ``(..., D)``, T.

    Source: Peebles and Xie, 2022 (adaLN), https://arxiv.org/abs/2212.09748, with one norm for two
    attentions as in Stable Diffusion 3.5 (``SD35AdaLayerNormZeroX`` of diffusers).
    """
    n = expressions.layer_normalized(x.float(), weight, bias, eps)
    return (
        expressions.modulated(n, scale, shift).to(x.dtype),
        expressions.modulated(n, second_scale, second_shift).to(x.dtype),
    )


@torch.library.register_fake(add_op_namespace_prefix("layer_norm_modulate_pair"))
@checked("layer_norm_modulate_pair")
def _layer_norm_modulate_pair_fake(x, *_):
    return x.new_empty(x.shape), x.new_empty(x.shape)


@operation("norm")
def gated_residual(residual: Rows, x: Rows, gate: Optional[Modulation] = None) -> Tensor:
    """``residual + gate * x``, or ``residual + x`` without a gate.

    Args:
        residual, x: ``(..., D)``, T, of one shape.
        gate: T or float32, broadcasts against ``x`` in all dimensions but the last, or None.
    """
    return expressions.gated(residual, x, gate).to(x.dtype)


@torch.library.register_fake(add_op_namespace_prefix("gated_residual"))
@checked("gated_residual")
def _gated_residual_fake(residual, *_):
    return residual.new_empty(residual.shape)


@operation("norm")
def gated_residual_rms_norm_modulate(
    residual: Rows,
    x: Rows,
    gate: Optional[Modulation] = None,
    scale: Optional[Modulation] = None,
    shift: Optional[Modulation] = None,
    weight: Optional[NormVector] = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """The new residual ``h = residual + gate * x`` and ``rms_norm_modulate(h, scale, shift, weight)``.

    The norm is taken of the unrounded ``h``.

    Args:
        residual, x: ``(..., D)``, T, of one shape.
        gate: T or float32, broadcasts against ``x`` in all dimensions but the last, or None for 1.
        scale, shift: likewise, or None for 0; with neither it is ``rms_norm(h, weight)``.
        weight: ``(D,)``, T or float32, or None.

    Returns:
        ``(h, modulated)``, each ``(..., D)``, T.
    """
    h = expressions.gated(residual, x, gate)
    n = expressions.rms_normalized(h, weight, eps)
    return h.to(x.dtype), expressions.modulated(n, scale, shift).to(x.dtype)


@torch.library.register_fake(add_op_namespace_prefix("gated_residual_rms_norm_modulate"))
@checked("gated_residual_rms_norm_modulate")
def _gated_residual_rms_norm_modulate_fake(residual, *_):
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape)


@operation("norm")
def gated_residual_layer_norm_modulate(
    residual: Rows,
    x: Rows,
    gate: Optional[Modulation] = None,
    scale: Optional[Modulation] = None,
    shift: Optional[Modulation] = None,
    weight: Optional[NormVector] = None,
    bias: Optional[NormVector] = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """The new residual ``h = residual + gate * x`` and ``layer_norm_modulate(h, scale, shift, ...)``.

    The norm is taken of the unrounded ``h``.

    Args:
        residual, x: ``(..., D)``, T, of one shape.
        gate: T or float32, broadcasts against ``x`` in all dimensions but the last, or None for 1.
        scale, shift: likewise, or None for 0; with neither it is ``layer_norm(h, weight, bias)``.
        weight, bias: ``(D,)``, T or float32, or None.

    Returns:
        ``(h, modulated)``, each ``(..., D)``, T.
    """
    h = expressions.gated(residual, x, gate)
    n = expressions.layer_normalized(h, weight, bias, eps)
    return h.to(x.dtype), expressions.modulated(n, scale, shift).to(x.dtype)


@torch.library.register_fake(add_op_namespace_prefix("gated_residual_layer_norm_modulate"))
@checked("gated_residual_layer_norm_modulate")
def _gated_residual_layer_norm_modulate_fake(residual, *_):
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape)


@operation("norm")
def gated_residual_layer_norm_modulate_pair(
    residual: Rows,
    x: Rows,
    gate: Optional[Modulation],
    scale: Optional[Modulation],
    shift: Optional[Modulation],
    second_scale: Optional[Modulation],
    second_shift: Optional[Modulation],
    weight: Optional[NormVector] = None,
    bias: Optional[NormVector] = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """The new residual ``h = residual + gate * x`` and two modulations of its layer norm, as
    ``layer_norm_modulate_pair(h, ...)``.

    The norm is taken of the unrounded ``h``.

    Args:
        residual, x: ``(..., D)``, T, of one shape.
        gate: T or float32, broadcasts against ``x`` in all dimensions but the last, or None for 1.
        scale, shift, second_scale, second_shift: likewise, or None for 0.
        weight, bias: ``(D,)``, T or float32, or None.

    Returns:
        ``(h, modulated, second_modulated)``, each ``(..., D)``, T.
    """
    h = expressions.gated(residual, x, gate)
    n = expressions.layer_normalized(h, weight, bias, eps)
    return (
        h.to(x.dtype),
        expressions.modulated(n, scale, shift).to(x.dtype),
        expressions.modulated(n, second_scale, second_shift).to(x.dtype),
    )


@torch.library.register_fake(add_op_namespace_prefix("gated_residual_layer_norm_modulate_pair"))
@checked("gated_residual_layer_norm_modulate_pair")
def _gated_residual_layer_norm_modulate_pair_fake(residual, *_):
    shape = residual.shape
    return residual.new_empty(shape), residual.new_empty(shape), residual.new_empty(shape)


# --------------------------------------------------------------------------------------------------
# Group norm


@operation("group_norm", check=check_group_norm, is_readable=has_dense_images)
def group_norm(
    x: Tensor,
    num_groups: Count,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-5,
    channel_bias: Optional[Tensor] = None,
    activation: Activation = "none",
) -> Tensor:
    """Group norm of ``x + channel_bias``, as ``torch.nn.functional.group_norm``, and an activation of it.

    Args:
        x: ``(B, C, ...)``, T: any number of spatial dimensions, without gaps between them. Either pixels are
            dense and channels apart, as in a contiguous tensor, or channels are dense, as with
            ``torch.channels_last``; the result is likewise.
        num_groups: into how many groups the channels are divided, each with a mean and a (biased) variance.
        weight, bias: ``(C,)``, T or float32, or None, independently of each other.
        eps: added to the variance.
        channel_bias: ``(B, C)``, T or float32, or None: what is added to all pixels before the norm, such as
            a convolution's bias, a projected time embedding, or the sum of both.
        activation: ``"none"``, or ``"silu"``, ``n * sigmoid(n)``.

    Source: Wu and He, 2018, https://arxiv.org/abs/1803.08494.
    """
    n = expressions.group_normalized(x.float(), num_groups, weight, bias, eps, channel_bias)
    n = (F.silu(n) if activation == "silu" else n).to(x.dtype)
    if not torch._C._are_functorch_transforms_active() and is_channels_last("group_norm", x):
        return n.movedim(1, -1).contiguous().movedim(-1, 1)  # PyTorch's own are not, on a GPU
    return n


@torch.library.register_fake(add_op_namespace_prefix("group_norm"))
@checked("group_norm")
def _group_norm_fake(x, *_):
    if is_channels_last("group_norm", x):
        batch, channels, *spatial = x.shape
        return x.new_empty(batch, *spatial, channels).movedim(-1, 1)
    return x.new_empty(x.shape)


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
    rope: Rope = None,
    *,
    heads: int,
    norm: NormScope = "across_heads",
    layout: Layout = "interleaved",
    eps: float = 1e-6,
    inplace: bool = False,
    k_rope: KeyRope = None,
    v: Optional[Tensor] = None,
    out: Optional[Outputs] = None,
) -> tuple[Any, ...]:
    """Query and key, normalized (RMS) and rotated.

    ``n = x / sqrt(mean(x²) + eps) * weight``, then each pair ``(a, b)`` of ``n`` becomes
    ``(a * cos_a - b * sin_a, b * cos_b + a * sin_b)``.

    Args:
        q: ``(B, S, heads * d)`` or ``(B, S, heads, d)``, T; strided in all but the last dimension.
        k: likewise, with the same B and d; its number of heads may differ, and its S where ``rope`` is
            None or ``k_rope`` is given.
        q_weight, k_weight: of the norm, float32 or T, or None; ``(heads * d,)`` across heads, ``(d,)``
            per head.
        rope: None, for no rotation; or ``(cos, sin)``, each ``(S, d)``, ``(S, heads * d)``,
            ``(1 or B, S, d)``, ``(1 or B, S, heads * d)`` or ``(1 or B, S, 1 or heads, d)``; or, with
            one value for both elements of a pair, each ``(S, d/2)``, ``(1 or B, S, d/2)`` or
            ``(1 or B, S, 1 or heads, d/2)``; float32 or T; or one complex64 tensor of these last
            shapes, ``cos + i sin``; or a :class:`CoordinateRope`.
        heads: number of heads of ``q``.
        norm: ``"across_heads"`` (the mean is taken over all heads of a token), ``"per_head"`` or
            ``"none"``.
        layout: which elements of a head form a pair: ``"interleaved"``, (2i, 2i+1), or ``"half"``,
            (i, i + d/2).
        inplace: store into ``q`` and ``k``; not possible where an input requires grad or
            carries a tangent.
        k_rope: what the key is rotated by, of its own S and number of heads, in the forms of ``rope``;
            None, for ``rope``.
        v: values ``(B, S, any * d)`` or ``(B, S, any, d)``, T, of the key's S, to be copied to the last
            of ``out``.
        out: where to store, ``(q_out, k_out)`` or, with ``v``, ``(q_out, k_out, v_out)``: of the shapes of
            q, k and v, T, strided in all but the last dimension, such as slices of a joint buffer. They
            have no elements in common with each other or with what is read, but each may be its own
            input. Not possible where an input requires grad or carries a tangent.

    Returns:
        ``(q, k)`` in the given shapes, or ``out`` as a tuple.

    Source: Su et al., 2021, https://arxiv.org/abs/2104.09864; query-key norm: Henry et al., 2020,
    https://arxiv.org/abs/2010.04245, with an RMS norm.
    """
    # Four operators have one function: it is written out, and calls them as `operation` would.
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
                first, second = None, None
            elif isinstance(rope, (tuple, list)):
                first, second = rope
                if first is None or second is None:
                    raise TypeError
            else:
                first, second = _complex_table(rope, inplace), None
        if not (k_rope is v is out is None):
            return _qk_norm_rope_apart(
                q, k, q_weight, k_weight, rope, heads, norm, layout, eps, inplace, k_rope, v, out
            )
        if (
            torch.is_grad_enabled() or forward_ad._current_level >= 0 or _are_transforms_active()
        ) and is_differentiated(q, k, q_weight, k_weight, first, second):
            if inplace:
                raise ValueError(
                    "qk_norm_rope: inplace must be False where an input requires grad or carries "
                    "a tangent, got True"
                )
            return _qk_norm_rope_formula(q, k, q_weight, k_weight, rope, heads, norm, layout, eps)
        results = run(q, k, q_weight, k_weight, first, second, heads, norm, layout, eps)
        if not inplace:
            return results
        # Autograd notices a backward that needs the values from before.
        if not torch.compiler.is_dynamo_compiling():
            torch.autograd.graph.increment_version((q, k))
        return q, k
    except ERRORS as error:
        options = (heads, norm, layout, eps, inplace, k_rope, v, out)
        return _QK_NORM_ROPE.explain(error, (q, k, q_weight, k_weight, rope, *options))


def _qk_norm_rope_apart(
    q, k, q_weight, k_weight, rope, heads, norm, layout, eps, inplace, k_rope, v, out
):
    """With a rotation of the key's own, values or outputs."""
    writes = inplace or out is not None
    of_key = (None,) * 4 if k_rope is None else _lowered_rope(k_rope, writes)
    rotations = (*_lowered_rope(rope, writes), *of_key)
    if v is not None and out is None:
        fail("qk_norm_rope", "out must be given along with v, got None")
    outs = () if out is None else _outputs(inplace, v, out)
    if is_differentiated(q, k, v, q_weight, k_weight, *rotations, *outs):
        _refuse_derivatives("qk_norm_rope", inplace, out)
        return _qk_norm_rope_formula(
            q, k, q_weight, k_weight, rope, heads, norm, layout, eps, k_rope=k_rope
        )
    options = (heads, norm, layout, eps)
    if outs:
        _qk_norm_rope_out(q, k, v, q_weight, k_weight, *rotations, *outs, *options)
        written = tuple(out)
    elif inplace:
        _qk_norm_two_ropes_(q, k, q_weight, k_weight, *rotations, *options)
        written = (q, k)
    else:
        return _qk_norm_two_ropes(q, k, q_weight, k_weight, *rotations, *options)
    if not torch.compiler.is_dynamo_compiling():
        torch.autograd.graph.increment_version(written)
    return written


def _complex_table(rope, writes):
    if not isinstance(rope, Tensor) or not rope.is_complex():  # any tensor can be unpacked
        raise TypeError
    if writes and torch.compiler.is_compiling() and rope.dtype == torch.complex64:
        # Inductor leaves an operator that writes as it finds it where an argument is complex, and then
        # refuses it.
        return torch.view_as_real(rope.resolve_conj())
    return rope


def _lowered_rope(rope, writes=False):
    """A rotation as operators take it: cosine, sine, coordinates, frequencies."""
    if rope is None:
        return None, None, None, None
    if isinstance(rope, CoordinateRope):
        return None, None, *rope
    if not isinstance(rope, (tuple, list)):
        return _complex_table(rope, writes), None, None, None
    cos, sin = rope
    if cos is None or sin is None:
        raise TypeError
    return cos, sin, None, None


def _outputs(inplace, v, out):
    """``(q_out, k_out, v_out)``, the last one None without values."""
    if not isinstance(out, (tuple, list)):
        raise TypeError
    if inplace:
        fail("qk_norm_rope", "inplace must be False along with out, got True")
    count, given = (2, "without") if v is None else (3, "with")
    if len(out) != count:
        fail("qk_norm_rope", f"out must hold {count} tensors {given} v, got {len(out)}")
    for tensor in out:  # any() of a generator takes twice as long
        if tensor is None:
            raise TypeError
    return (*out, None) if v is None else tuple(out)


def _refuse_derivatives(operation, inplace, out):
    of_input = "where an input requires grad or carries a tangent"
    if inplace:
        fail(operation, f"inplace must be False {of_input}, got True")
    if out is not None:
        fail(operation, f"out must be None {of_input}, got {shown(out)}")


_are_transforms_active = torch._C._are_functorch_transforms_active
_QK_NORM_ROPE = Declaration("qk_norm_rope", qk_norm_rope)
_QK_NORM_ROPE.function = qk_norm_rope
DECLARATIONS["qk_norm_rope"] = _QK_NORM_ROPE
# In place a node whose result is not used stays in its graph.
torch.fx.has_side_effect(qk_norm_rope)

# Looked up once: each look-up through torch.ops runs Python code, at every call.
_qk_norm_rope = ops.qk_norm_rope.default
_qk_norm_rope_ = ops.qk_norm_rope_.default
_qk_norm_coordinate_rope = ops.qk_norm_coordinate_rope.default
_qk_norm_coordinate_rope_ = ops.qk_norm_coordinate_rope_.default
_qk_norm_two_ropes = ops.qk_norm_two_ropes.default
_qk_norm_two_ropes_ = ops.qk_norm_two_ropes_.default
_qk_norm_rope_out = ops.qk_norm_rope_out.default
_norm_rope = ops.norm_rope.default
_norm_rope_ = ops.norm_rope_.default
_norm_rope_out = ops.norm_rope_out.default


def _check_qk_norm_rope(
    q, k, q_weight, k_weight, rope, heads, norm, layout, eps, inplace=False, k_rope=None, v=None, *_
):
    rotations = (*_lowered_rope(rope), *_lowered_rope(k_rope))
    lowered: Any = (q, k, q_weight, k_weight, *rotations, heads, norm, layout)
    check_qk_norm_two_ropes(*lowered)
    if v is not None:
        check_values("qk_norm_rope", q, k, v, heads, norm)


_QK_NORM_ROPE.check_values = _check_qk_norm_rope


def _by_head(rope, x, heads, head_dim, layout):
    """Tables of a rotation of ``x``, each (1 or B, S, 1 or heads, d or d/2), or None."""
    if rope is None:
        return None, None
    if isinstance(rope, CoordinateRope):
        by_head = [table.unflatten(2, (heads, -1)) for table in rope.tables(x.shape[2:].numel())]
        if layout == "half":
            # The tables repeat an angle for neighbours; here the pair is half a head apart.
            by_head = [table[..., ::2].repeat(1, 1, 1, 2) for table in by_head]
        return tuple(by_head)
    tables = (rope.real, rope.imag) if isinstance(rope, Tensor) else rope
    return tuple(expressions.by_head(table, heads, head_dim) for table in tables)


def _qk_norm_rope_formula(q, k, q_weight, k_weight, rope, heads, norm, layout, eps, k_rope=None):
    _check_qk_norm_rope(q, k, q_weight, k_weight, rope, heads, norm, layout, eps, k_rope=k_rope)
    head_dim = q.shape[2:].numel() // heads
    tables = _by_head(rope, q, heads, head_dim, layout)
    k_tables = tables
    if k_rope is not None:
        k_heads = k.shape[2:].numel() // head_dim if head_dim else 0
        k_tables = _by_head(k_rope, k, k_heads, head_dim, layout)
    how = {"head_dim": head_dim, "norm": norm, "layout": layout, "eps": eps}
    return (
        expressions.norm_rope(q, q_weight, *tables, **how),
        expressions.norm_rope(k, k_weight, *k_tables, **how),
    )


def norm_rope(
    x: Tensor,
    weight: Optional[Tensor] = None,
    rope: Rope = None,
    *,
    heads: int,
    norm: NormScope = "across_heads",
    layout: Layout = "interleaved",
    eps: float = 1e-6,
    inplace: bool = False,
    out: Optional[Output] = None,
) -> Tensor:
    """One tensor of heads, normalized (RMS) and rotated, as :func:`qk_norm_rope` does two.

    Args:
        x: ``(B, S, heads * d)`` or ``(B, S, heads, d)``, T; strided in all but the last dimension.
        weight: of the norm, float32 or T, or None; ``(heads * d,)`` across heads, ``(d,)`` per head.
        rope: as of ``qk_norm_rope``.
        heads, norm, layout, eps: as of ``qk_norm_rope``.
        inplace: store into ``x``; not possible where an input requires grad or carries a tangent.
        out: where to store: of x's shape, T, strided in all but the last dimension, such as a slice of a
            joint buffer, without elements in common with what is read, or ``x`` itself; not possible
            where an input requires grad or carries a tangent.

    Returns:
        ``x`` in the given shape, or ``out``.

    Source: that of ``qk_norm_rope``.
    """
    try:
        if type(heads) is not int or not 0 < heads <= MAX_INTEGER:
            heads = as_heads("norm_rope", heads)
        if type(eps) is not float:
            eps = as_number("norm_rope", "eps", eps)
        if inplace is not False and inplace is not True:
            check_flag("norm_rope", "inplace", inplace)
        if norm not in NORMS or layout not in LAYOUTS:
            check_choice("norm_rope", "norm", norm, NORMS)
            check_choice("norm_rope", "layout", layout, LAYOUTS)
        rotation = _lowered_rope(rope, inplace or out is not None)
        if inplace and out is not None:
            fail("norm_rope", "inplace must be False along with out, got True")
        if is_differentiated(x, weight, *rotation, out):
            _refuse_derivatives("norm_rope", inplace, out)
            return _norm_rope_formula(x, weight, rope, heads, norm, layout, eps)
        options = (heads, norm, layout, eps)
        if out is not None:
            _norm_rope_out(x, weight, *rotation, out, *options)
            written = out
        elif inplace:
            _norm_rope_(x, weight, *rotation, *options)
            written = x
        else:
            return _norm_rope(x, weight, *rotation, *options)
        if not torch.compiler.is_dynamo_compiling():
            torch.autograd.graph.increment_version(written)
        return written
    except ERRORS as error:
        values = (x, weight, rope, heads, norm, layout, eps, inplace, out)
        return _NORM_ROPE.explain(error, values)


_NORM_ROPE = Declaration("qk_norm_rope", norm_rope)
_NORM_ROPE.function = norm_rope
DECLARATIONS["norm_rope"] = _NORM_ROPE
torch.fx.has_side_effect(norm_rope)


def _check_norm_rope(x, weight, rope, heads, norm, layout, *_):
    lowered: Any = (x, weight, *_lowered_rope(rope), heads, norm, layout)
    check_norm_rope(*lowered)


_NORM_ROPE.check_values = _check_norm_rope


def _norm_rope_formula(x, weight, rope, heads, norm, layout, eps):
    _check_norm_rope(x, weight, rope, heads, norm, layout)
    head_dim = x.shape[2:].numel() // heads
    tables = _by_head(rope, x, heads, head_dim, layout)
    how = {"head_dim": head_dim, "norm": norm, "layout": layout, "eps": eps}
    return expressions.norm_rope(x, weight, *tables, **how)


@torch.library.register_fake(add_op_namespace_prefix("qk_norm_rope"))
def _qk_norm_rope_fake(q, k, *arguments):
    check_qk_norm_rope(q, k, *arguments[:-1])
    return q.new_empty(q.shape), k.new_empty(k.shape)


@torch.library.register_fake(add_op_namespace_prefix("qk_norm_rope_"))
def _qk_norm_rope_inplace_fake(q, k, *arguments):
    check_qk_norm_rope(q, k, *arguments[:-1])
    _check_in_place(_qk_norm_rope_, q, k, *arguments)


@torch.library.register_fake(add_op_namespace_prefix("qk_norm_coordinate_rope"))
def _qk_norm_coordinate_rope_fake(q, k, *arguments):
    check_qk_norm_coordinate_rope(q, k, *arguments[:-1])
    return q.new_empty(q.shape), k.new_empty(k.shape)


@torch.library.register_fake(add_op_namespace_prefix("qk_norm_coordinate_rope_"))
def _qk_norm_coordinate_rope_inplace_fake(q, k, *arguments):
    check_qk_norm_coordinate_rope(q, k, *arguments[:-1])
    _check_in_place(_qk_norm_coordinate_rope_, q, k, *arguments)


@torch.library.register_fake(add_op_namespace_prefix("qk_norm_two_ropes"))
def _qk_norm_two_ropes_fake(q, k, *arguments):
    check_qk_norm_two_ropes(q, k, *arguments[:-1])
    return q.new_empty(q.shape), k.new_empty(k.shape)


@torch.library.register_fake(add_op_namespace_prefix("qk_norm_two_ropes_"))
def _qk_norm_two_ropes_inplace_fake(q, k, *arguments):
    check_qk_norm_two_ropes(q, k, *arguments[:-1])
    _check_in_place(_qk_norm_two_ropes_, q, k, *arguments)


@torch.library.register_fake(add_op_namespace_prefix("qk_norm_rope_out"))
def _qk_norm_rope_out_fake(q, k, v, *arguments):
    *read, q_out, k_out, v_out, heads, norm, layout, _ = arguments
    lowered: Any = (q, k, *read, heads, norm, layout)
    check_qk_norm_two_ropes(*lowered)
    if (v is None) != (v_out is None):
        missing, given = ("v", "v_out") if v is None else ("v_out", "v")
        fail("qk_norm_rope", f"{missing} must be given along with {given}, got None")
    if v is not None:
        check_values("qk_norm_rope", q, k, v, heads, norm)
    for name, out, tensor in (("q", q_out, q), ("k", k_out, k), ("v", v_out, v)):
        if out is not None:
            check_output("qk_norm_rope", f"{name}_out", out, name, tensor, "q", q)
    _check_in_place(_qk_norm_rope_out, q, k, v, *arguments)


@torch.library.register_fake(add_op_namespace_prefix("norm_rope"))
def _norm_rope_fake(x, *arguments):
    check_norm_rope(x, *arguments[:-1])
    return x.new_empty(x.shape)


@torch.library.register_fake(add_op_namespace_prefix("norm_rope_"))
def _norm_rope_inplace_fake(x, *arguments):
    check_norm_rope(x, *arguments[:-1])
    _check_in_place(_norm_rope_, x, *arguments)


@torch.library.register_fake(add_op_namespace_prefix("norm_rope_out"))
def _norm_rope_out_fake(x, *arguments):
    *read, out, heads, norm, layout, _ = arguments
    lowered: Any = (x, *read, heads, norm, layout)
    check_norm_rope(*lowered)
    check_output("norm_rope", "out", out, "x", x, "x", x)
    _check_in_place(_norm_rope_out, x, *arguments)


def _check_in_place(operator, *arguments):
    batching.Writing(operator).check(arguments)


def _refuse_negative_views(writing, *arguments):
    """Called where a tensor has its sign in a bit beside its memory, in which no kernel could write."""
    for name, tensor in writing.outputs(arguments).items():
        if tensor is not None and tensor.is_neg():
            fail(
                writing.operation,
                f"{name} must not be a negative view to be written{writing.where}, "
                "got one with its negative bit set",
            )
    writing.operator(*(a.resolve_neg() if isinstance(a, Tensor) else a for a in arguments))


for _operator in (
    _qk_norm_rope_,
    _qk_norm_coordinate_rope_,
    _qk_norm_two_ropes_,
    _qk_norm_rope_out,
    _norm_rope_,
    _norm_rope_out,
):
    _writing = batching.Writing(_operator)
    LIBRARY.impl(_operator, functools.partial(_refuse_negative_views, _writing), "Negative")
    torch.library.register_vmap(_operator, batching.in_place(_writing), lib=LIBRARY)
for _operator in (_qk_norm_rope, _qk_norm_coordinate_rope, _qk_norm_two_ropes, _norm_rope):
    torch.library.register_vmap(_operator, batching.by_sample(_operator), lib=LIBRARY)


# --------------------------------------------------------------------------------------------------
# Rotary embedding alone


@operation("rope", check=check_rope)
def rope(
    x: Tensor, cos: Tensor, sin: Optional[Tensor] = None, layout: Layout = "interleaved"
) -> Tensor:
    """Rotary embedding: each pair ``(a, b)`` of a head becomes
    ``(a * cos_a - b * sin_a, b * cos_b + a * sin_b)``.

    Args:
        x: ``(B, S, H, d)``, or ``(B, S, H * d)`` with the tables' last dimension as ``d``, T.
        cos, sin: each ``(S, d)``, ``(1 or B, S, d)`` or ``(1 or B, S, 1 or H, d)``, and for an x of
            four dimensions also ``(S, H * d)`` or ``(1 or B, S, H * d)``, or, both with one value for
            the two elements of a pair, ``(S, d/2)``, ``(1 or B, S, d/2)`` or
            ``(1 or B, S, 1 or H, d/2)``; float32 or T, both alike. With an x of three dimensions
            such tables would mean heads half as long: view it as ``(B, S, H, d)`` first. Or ``cos`` is
            one complex64 tensor of these last shapes, ``cos + i sin``, and ``sin`` None; its last
            dimension is the ``d/2`` of an x of three dimensions.
        layout: which elements of a head form a pair: ``"interleaved"``, (2i, 2i+1), or ``"half"``,
            (i, i + d/2).

    Source: Su et al., 2021, https://arxiv.org/abs/2104.09864.
    """
    tables = (cos.real, cos.imag) if sin is None else (cos, sin)
    head_dim = x.shape[3] if x.dim() == 4 else cos.shape[-1] * (2 if sin is None else 1)
    heads = x.shape[2:].numel() // head_dim if head_dim else 0
    cos, sin = (expressions.by_head(table, heads, head_dim) for table in tables)
    n = x.float().reshape(*x.shape[:2], heads, head_dim)
    return expressions.rotated(n, cos, sin, layout).reshape(x.shape).to(x.dtype)


@torch.library.register_fake(add_op_namespace_prefix("rope"))
@checked("rope")
def _rope_fake(x, *_):
    return x.new_empty(x.shape)


@operation("rope", check=check_rope_3d)
def rope_3d(
    x: Tensor, frame: Tables, height: Tables, width: Tables, layout: Layout = "interleaved"
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
    cos, sin = (expressions.of_tokens(*tables) for tables in zip(frame, height, width))
    return expressions.rotated(x.float(), cos, sin, layout).to(x.dtype)


@torch.library.register_fake(add_op_namespace_prefix("rope_3d"))
@checked("rope_3d")
def _rope_3d_fake(x, *_):
    return x.new_empty(x.shape)


# --------------------------------------------------------------------------------------------------
# Activations


@operation("activation")
def gelu(
    x: Rows,
    approximate: Approximation = "none",
    bias: Optional[Vector] = None,
    *,
    out: Optional[Out] = None,
) -> Tensor:
    """Gaussian error linear unit of ``x + bias``, as ``torch.nn.functional.gelu``.

    Args:
        x: ``(..., D)``, T.
        approximate: ``"none"``, ``x * Φ(x)``, or ``"tanh"``,
            ``x / 2 * (1 + tanh(sqrt(2 / π) * (x + 0.044715 x³)))``.
        bias: ``(D,)``, T, or None.
        out: ``(..., D)``, T, or None; may be ``x`` itself.

    Source: Hendrycks and Gimpel, 2016, https://arxiv.org/abs/1606.08415.
    """
    return F.gelu(expressions.biased(x, bias), approximate=approximate).to(x.dtype)


@torch.library.register_fake(add_op_namespace_prefix("gelu"))
@checked("gelu")
def _gelu_fake(x, *_):
    return x.new_empty(x.shape)


@torch.library.register_fake(add_op_namespace_prefix("gelu_out"))
def _gelu_out_fake(*values):
    check_out("gelu", _gelu_fake(*values[:-1]), *values)


@operation("activation")
def silu(x: Rows, bias: Optional[Vector] = None, *, out: Optional[Out] = None) -> Tensor:
    """Sigmoid linear unit, ``x * sigmoid(x)``, of ``x + bias``, as ``torch.nn.functional.silu``.

    Args:
        x: ``(..., D)``, T.
        bias: ``(D,)``, T, or None.
        out: ``(..., D)``, T, or None; may be ``x`` itself.

    Source: Elfwing et al., 2017, https://arxiv.org/abs/1702.03118.
    """
    return F.silu(expressions.biased(x, bias)).to(x.dtype)


@torch.library.register_fake(add_op_namespace_prefix("silu"))
@checked("silu")
def _silu_fake(x, *_):
    return x.new_empty(x.shape)


@torch.library.register_fake(add_op_namespace_prefix("silu_out"))
def _silu_out_fake(*values):
    check_out("silu", _silu_fake(*values[:-1]), *values)


@operation("activation")
def geglu(
    x: GatedRows,
    approximate: Approximation = "none",
    bias: Optional[Vector] = None,
    *,
    activated: Half = "second",
    out: Optional[Out] = None,
) -> Tensor:
    """GELU-gated linear unit of ``x + bias``: one half times ``gelu`` of the other.

    Args:
        x: ``(..., 2 * D)``, T.
        approximate: of the GELU, ``"none"`` or ``"tanh"``.
        bias: ``(2 * D,)``, T, or None.
        activated: the half that goes through the GELU, ``"second"`` as in diffusers' GEGLU, or ``"first"``.
        out: ``(..., D)``, T, or None.

    Returns:
        ``(..., D)``, T.

    Source: Shazeer, 2020, https://arxiv.org/abs/2002.05202.
    """
    value, gate = expressions.value_and_gate(x, bias, activated)
    return (value * F.gelu(gate, approximate=approximate)).to(x.dtype)


@torch.library.register_fake(add_op_namespace_prefix("geglu"))
@checked("geglu")
def _geglu_fake(x, *_):
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@torch.library.register_fake(add_op_namespace_prefix("geglu_out"))
def _geglu_out_fake(*values):
    check_out("geglu", _geglu_fake(*values[:-1]), *values)


@operation("activation")
def swiglu(
    x: GatedRows,
    bias: Optional[Vector] = None,
    *,
    activated: Half = "second",
    out: Optional[Out] = None,
) -> Tensor:
    """SiLU-gated linear unit of ``x + bias``: one half times ``silu`` of the other.

    Args:
        x: ``(..., 2 * D)``, T.
        bias: ``(2 * D,)``, T, or None.
        activated: the half that goes through the SiLU, ``"second"`` as in diffusers' SwiGLU, or ``"first"``
            as in FLUX.2.
        out: ``(..., D)``, T, or None.

    Returns:
        ``(..., D)``, T.

    Source: Shazeer, 2020, https://arxiv.org/abs/2002.05202.
    """
    value, gate = expressions.value_and_gate(x, bias, activated)
    return (value * F.silu(gate)).to(x.dtype)


@torch.library.register_fake(add_op_namespace_prefix("swiglu"))
@checked("swiglu")
def _swiglu_fake(x, *_):
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@torch.library.register_fake(add_op_namespace_prefix("swiglu_out"))
def _swiglu_out_fake(*values):
    check_out("swiglu", _swiglu_fake(*values[:-1]), *values)


# --------------------------------------------------------------------------------------------------
# Softmax


@operation("softmax")
def softmax(x: Rows) -> Tensor:
    """Softmax over the last dimension, ``exp(x - max(x)) / sum(exp(x - max(x)))``.

    Args:
        x: ``(..., D)``, T.

    Source: Milakov and Gimelshein, 2018 (online softmax), https://arxiv.org/abs/1805.02867.
    """
    return torch.softmax(x.float(), dim=-1).to(x.dtype)


@torch.library.register_fake(add_op_namespace_prefix("softmax"))
@checked("softmax")
def _softmax_fake(x):
    return x.new_empty(x.shape)


# --------------------------------------------------------------------------------------------------
# Attention


@operation("attention", check=check_attention)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: Optional[Scale] = None,
    key_bias: Optional[Tensor] = None,
    key_lengths: Optional[Constant] = None,
    heads: Optional[Count] = None,
    out: Optional[Out] = None,
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
        heads: H, where q is ``(B, Sq, H * d)`` and k and v are ``(B, Sk, Hk * d)``, as linear layers give
            them; or None.
        out: of q's shape and dtype, or None. On CUDA one that is not aligned to 16 bytes in all
            but the last dimension takes temporary memory of its size.

    Returns:
        A tensor of q's shape, contiguous, or ``out``.

    On CUDA the weights are rounded to 16 bits for the tensor cores: to float16, with eight times the
    precision of bfloat16, also where the inputs are bfloat16, from 1024 queries and 257 keys on and
    without a bias. That takes temporary memory of v's size, for v in float16; queries for which
    float16 lacks the range are computed once more, in bfloat16.

    Source: Vaswani et al., 2017, https://arxiv.org/abs/1706.03762; in one pass over the keys as in
    Dao et al., 2022, https://arxiv.org/abs/2205.14135.
    """
    if heads is None:
        return expressions.attended(q, k, v, scale, key_bias, key_lengths)
    head_dim = q.shape[2] // heads
    q, k, v = (x.unflatten(2, (-1, head_dim)) for x in (q, k, v))
    return expressions.attended(q, k, v, scale, key_bias, key_lengths).flatten(2)


@torch.library.register_fake(add_op_namespace_prefix("attention"))
@checked("attention")
def _attention_fake(q, *_):
    return q.new_empty(q.shape)


@torch.library.register_fake(add_op_namespace_prefix("attention_out"))
def _attention_out_fake(*values):
    check_out("attention", _attention_fake(*values[:-1]), *values)
