"""Norm over the last dimension, modulation, residual and gate."""

from __future__ import annotations

from typing import Any, Optional, Union

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._ops import add_op_namespace_prefix
from .calls import fail, kernel_call, number, plain_call, promoted, refuse_type, required, shown
from .fp8 import quantize_fp8_fake

# A scale, shift or gate: a tensor, or a table's row (D,) and an embedding, which stand for their sum.
Modulator = Union[Tensor, tuple[Tensor, Tensor]]


def normalized(h, is_layer_norm, weight, bias, eps):
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


def modulated(n: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    if scale is None:
        return n if shift is None else n + shift
    return n * (1 + scale) if shift is None else torch.addcmul(shift, n, 1 + scale)


def _modulator(embedding: Tensor | None, row: Tensor | None, index: Tensor | None) -> Any:
    """The sum of both. With an index, ``embedding`` is a table (N, D), of which each token takes a row."""
    if embedding is not None and index is not None:
        # In float32: a table's gradient is a sum over all tokens that chose the same row.
        table = embedding.to(torch.promote_types(embedding.dtype, torch.float32))
        embedding = table[index.clamp(0, table.shape[0] - 1)].to(embedding.dtype)
    return embedding if row is None else row if embedding is None else embedding + row


def _norm(
    x, is_layer_norm, weight, bias, scale, shift, eps, scale_row=None, shift_row=None, index=None
):
    dtype = x.dtype
    x, weight, bias, scale, shift, scale_row, shift_row = promoted(
        x, weight, bias, scale, shift, scale_row, shift_row
    )
    scale, shift = _modulator(scale, scale_row, index), _modulator(shift, shift_row, index)
    return modulated(normalized(x, is_layer_norm, weight, bias, eps), scale, shift).to(dtype)


def _norm_pair(x, *tensors_and_eps):
    dtype, (*tensors, eps) = x.dtype, tensors_and_eps
    x, scale, shift, second_scale, second_shift, weight, bias = promoted(x, *tensors)
    n = normalized(x, True, weight, bias, eps)
    return modulated(n, scale, shift).to(dtype), modulated(n, second_scale, second_shift).to(dtype)


def _residual(
    residual, x, gate, gate_row=None, addend=None, x_weight=None, x_eps=None, tanh=False, index=None
):
    dtype = residual.dtype
    residual, x, gate, gate_row, addend, x_weight = promoted(
        residual, x, gate, gate_row, addend, x_weight
    )
    x = x if addend is None else x + addend
    x = x if x_eps is None else normalized(x, False, x_weight, None, x_eps)
    gate = _modulator(gate, gate_row, index)
    gate = torch.tanh(gate) if tanh and gate is not None else gate
    return (residual + x if gate is None else torch.addcmul(residual, gate, x)).to(dtype)


def _residual_norm(residual, x, is_layer_norm, gate, scale, shift, weight, bias, eps, *options):
    scale_row, shift_row, *branch = options or (None,) * 8
    h = _residual(residual, x, gate, *branch)
    rows = scale_row, shift_row, branch[-1]
    return h, _norm(h, is_layer_norm, weight, bias, scale, shift, eps, *rows).to(x.dtype)


def _residual_norm_pair(residual, x, gate, *modulation):
    h = _residual(residual, x, gate)
    return h, *_norm_pair(h, *modulation)


def _split(operation: str, **modulators: Any) -> list:
    """The embeddings of some modulators, then their rows. Each may be None."""
    embeddings, rows = [], []
    for name, given in modulators.items():
        row, embedding = None, given
        if type(given) is tuple:
            row, embedding = given if len(given) == 2 else (None, None)
            if not isinstance(row, Tensor) or not isinstance(embedding, Tensor):
                refuse_type(operation, name, "a tensor or a pair of tensors", given)
        embeddings.append(embedding)
        rows.append(row)
    return embeddings + rows


def _branch(operation: str, addend: Any, x_weight: Any, x_eps: Any, tanh_gate: Any) -> tuple:
    """From ``addend`` to ``tanh_gate``."""
    if x_eps is not None:
        x_eps = number(operation, "x_eps", x_eps, "a number or None")
    elif x_weight is not None:
        fail(operation, f"x_weight must be None if x_eps is None, got a {shown(x_weight)}")
    if type(tanh_gate) is not bool:
        refuse_type(operation, "tanh_gate", "True or False", tanh_gate)
    return addend, x_weight, x_eps, tanh_gate


def _modulate(call, x, is_layer_norm, weight, bias, scale, shift, eps, index):
    if scale is None:
        refuse_type(call.__name__, "scale", "a tensor", scale)
    if type(eps) is not float:
        eps = number(call.__name__, "eps", eps)
    if index is None and type(scale) is not tuple and type(shift) is not tuple:
        return call(x, is_layer_norm, weight, bias, scale, shift, eps)
    scale, shift, *rows = _split(call.__name__, scale=scale, shift=shift)
    return call(x, is_layer_norm, weight, bias, scale, shift, eps, *rows, index)


def _gated(call, residual, x, is_layer_norm, gate, scale, shift, weight, bias, eps, branch):
    addend, x_weight, x_eps, tanh_gate, index = branch
    if type(eps) is not float:
        eps = number(call.__name__, "eps", eps)
    if (
        addend is x_weight is x_eps is index is None
        and tanh_gate is False
        and tuple not in (type(gate), type(scale), type(shift))
    ):
        return call(residual, x, is_layer_norm, gate, scale, shift, weight, bias, eps)
    branch = _branch(call.__name__, addend, x_weight, x_eps, tanh_gate)
    scale, shift, gate, *rows = _split(call.__name__, scale=scale, shift=shift, gate=gate)
    modulation = gate, scale, shift, weight, bias, eps
    return call(residual, x, is_layer_norm, *modulation, *rows, *branch, index)


# --------------------------------------------------------------------------------------------------
# Norm and modulation

_rms_norm, _layer_norm, _rms_norm_modulate, _layer_norm_modulate = (
    kernel_call(operation, _norm, "norm")
    for operation in ("rms_norm", "layer_norm", "rms_norm_modulate", "layer_norm_modulate")
)
_layer_norm_modulate_pair = kernel_call("layer_norm_modulate_pair", _norm_pair)


def rms_norm(x: Tensor, weight: Optional[Tensor] = None, eps: float = 1e-6) -> Tensor:
    """Root mean square norm over the last dimension: ``x / sqrt(mean(x²) + eps) * weight``.

    Args:
        x: ``(..., D)``, T.
        weight: ``(D,)``, T or float32, or None.
        eps: added to the mean square.

    Source: Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467.
    """
    return _rms_norm(x, False, weight, None, None, None, number("rms_norm", "eps", eps))


def layer_norm(
    x: Tensor, weight: Optional[Tensor] = None, bias: Optional[Tensor] = None, eps: float = 1e-5
) -> Tensor:
    """Layer norm over the last dimension, as ``torch.nn.functional.layer_norm``.

    Args:
        x: ``(..., D)``, T.
        weight, bias: ``(D,)``, T or float32, or None, independently of each other.
        eps: added to the (biased) variance.

    Source: Ba et al., 2016, https://arxiv.org/abs/1607.06450.
    """
    return _layer_norm(x, True, weight, bias, None, None, number("layer_norm", "eps", eps))


def rms_norm_modulate(
    x: Tensor,
    scale: Modulator,
    shift: Optional[Modulator] = None,
    weight: Optional[Tensor] = None,
    eps: float = 1e-6,
    *,
    index: Optional[Tensor] = None,
) -> Tensor:
    """Adaptive RMS norm: ``rms_norm(x, weight, eps) * (1 + scale) + shift``.

    Args:
        x, weight, eps: as in ``rms_norm``.
        scale: T or float32, broadcasts against ``x`` in all dimensions except the last, such as ``(D,)``,
            ``(B, 1, D)`` or ``(B, S, D)``. A pair ``(row, embedding)`` stands for ``row + embedding``, with a
            row ``(D,)`` of a table. Their sum is float32 and takes no memory.
        shift: likewise, or None for 0.
        index: int32, broadcasts against ``x`` without its last dimension, such as ``(S,)`` or ``(B, S)``, or
            None. If it is given, ``scale`` and ``shift`` (or their embeddings) are tables ``(N, D)``, and
            each token takes their row ``index[token]``, clamped to the table.

    Source: Peebles and Xie, 2022 (adaLN), https://arxiv.org/abs/2212.09748, with an RMS norm as in
    LTX-Video, https://arxiv.org/abs/2501.00103.
    """
    return _modulate(_rms_norm_modulate, x, False, weight, None, scale, shift, eps, index)


def layer_norm_modulate(
    x: Tensor,
    scale: Modulator,
    shift: Optional[Modulator] = None,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-6,
    *,
    index: Optional[Tensor] = None,
) -> Tensor:
    """Adaptive layer norm: ``layer_norm(x, weight, bias, eps) * (1 + scale) + shift``. Other arguments are as
    in ``rms_norm_modulate``.

    Source: Peebles and Xie, 2022 (adaLN), https://arxiv.org/abs/2212.09748.
    """
    return _modulate(_layer_norm_modulate, x, True, weight, bias, scale, shift, eps, index)


def layer_norm_modulate_pair(
    x: Tensor,
    scale: Optional[Tensor],
    shift: Optional[Tensor],
    second_scale: Optional[Tensor],
    second_shift: Optional[Tensor],
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Two modulations of one layer norm ``n = layer_norm(x, weight, bias, eps)``, with ``x`` read once:
    ``n * (1 + scale) + shift`` and ``n * (1 + second_scale) + second_shift``, each ``(..., D)``, T.

    Args:
        scale, shift, second_scale, second_shift: T or float32, broadcast against ``x`` in all dimensions
            except the last, or None for 0.

    Source: Peebles and Xie, 2022 (adaLN), https://arxiv.org/abs/2212.09748, with one norm for two
    attentions as in Stable Diffusion 3.5 (``SD35AdaLayerNormZeroX`` of diffusers).
    """
    eps = number("layer_norm_modulate_pair", "eps", eps)
    return _layer_norm_modulate_pair(x, scale, shift, second_scale, second_shift, weight, bias, eps)


@torch.library.register_fake(add_op_namespace_prefix("norm"))
def _norm_fake(x, *_):
    return x.new_empty(x.shape)


@torch.library.register_fake(add_op_namespace_prefix("layer_norm_modulate_pair"))
def _layer_norm_modulate_pair_fake(x, *_):
    return x.new_empty(x.shape), x.new_empty(x.shape)


# --------------------------------------------------------------------------------------------------
# Residual and gate

_gated_residual = kernel_call("gated_residual", _residual)
_gated_rms, _gated_ln = (
    kernel_call(operation, _residual_norm, "gated_residual_norm_modulate")
    for operation in ("gated_residual_rms_norm_modulate", "gated_residual_layer_norm_modulate")
)
_gated_norm_pair = kernel_call("gated_residual_layer_norm_modulate_pair", _residual_norm_pair)


def gated_residual(
    residual: Tensor,
    x: Tensor,
    gate: Optional[Modulator] = None,
    *,
    addend: Optional[Tensor] = None,
    x_weight: Optional[Tensor] = None,
    x_eps: Optional[float] = None,
    tanh_gate: bool = False,
    index: Optional[Tensor] = None,
) -> Tensor:
    """``residual + gate * x``, or ``residual + x`` without a gate, in the residual's dtype.

    Args:
        residual, x: ``(..., D)``, T, of the same shape. The residual may be float32 beside a 16-bit ``x``,
            without the arguments by keyword and pairs.
        gate: as ``scale`` in ``rms_norm_modulate``, or None.
        addend: of ``x``'s shape, T: ``x + addend`` takes ``x``'s place.
        x_eps: if it is a number, ``rms_norm(x, x_weight, x_eps)`` takes ``x``'s place.
        x_weight: ``(D,)``, T or float32, or None.
        tanh_gate: whether ``tanh(gate)`` takes the gate's place.
        index: as in ``rms_norm_modulate``, for the table of gates.
    """
    if (
        addend is x_weight is x_eps is index is None
        and tanh_gate is False
        and type(gate) is not tuple
    ):
        return _gated_residual(residual, x, gate)
    gate, gate_row = _split("gated_residual", gate=gate)
    branch = _branch("gated_residual", addend, x_weight, x_eps, tanh_gate)
    return _gated_residual(residual, x, gate, gate_row, *branch, index)


def gated_residual_rms_norm_modulate(
    residual: Tensor,
    x: Tensor,
    gate: Optional[Modulator] = None,
    scale: Optional[Modulator] = None,
    shift: Optional[Modulator] = None,
    weight: Optional[Tensor] = None,
    eps: float = 1e-6,
    *,
    addend: Optional[Tensor] = None,
    x_weight: Optional[Tensor] = None,
    x_eps: Optional[float] = None,
    tanh_gate: bool = False,
    index: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    """The new residual ``h = residual + gate * x`` and ``rms_norm_modulate(h, scale, shift, weight, eps)``.

    The norm reads the unrounded ``h``.

    Args:
        residual, x, gate, addend, x_weight, x_eps, tanh_gate: as in ``gated_residual``.
        scale, shift, weight, eps: as in ``rms_norm_modulate``. Without scale and shift, the second result is
            ``rms_norm(h, weight, eps)``.
        index: as in ``rms_norm_modulate``, for the tables of gate, scale and shift.

    Returns:
        ``(h, modulated)``, each ``(..., D)``, of the residual's dtype and of ``x``'s.
    """
    branch = addend, x_weight, x_eps, tanh_gate, index
    return _gated(_gated_rms, residual, x, False, gate, scale, shift, weight, None, eps, branch)


def gated_residual_layer_norm_modulate(
    residual: Tensor,
    x: Tensor,
    gate: Optional[Modulator] = None,
    scale: Optional[Modulator] = None,
    shift: Optional[Modulator] = None,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-6,
    *,
    addend: Optional[Tensor] = None,
    x_weight: Optional[Tensor] = None,
    x_eps: Optional[float] = None,
    tanh_gate: bool = False,
    index: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    """As ``gated_residual_rms_norm_modulate``, with a residual of ``x``'s dtype, and a layer norm and its
    ``bias``, ``(D,)``, T or float32, or None."""
    branch = addend, x_weight, x_eps, tanh_gate, index
    return _gated(_gated_ln, residual, x, True, gate, scale, shift, weight, bias, eps, branch)


def gated_residual_layer_norm_modulate_pair(
    residual: Tensor,
    x: Tensor,
    gate: Optional[Tensor],
    scale: Optional[Tensor],
    shift: Optional[Tensor],
    second_scale: Optional[Tensor],
    second_shift: Optional[Tensor],
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """The new residual ``h = residual + gate * x``, then ``layer_norm_modulate_pair(h, ...)``, of the
    unrounded ``h``, each ``(..., D)``, T.

    Args:
        residual, x: ``(..., D)``, T, of the same shape.
        gate: T or float32, broadcasts against ``x`` in all dimensions except the last, or None for 1.
    """
    eps = number("gated_residual_layer_norm_modulate_pair", "eps", eps)
    return _gated_norm_pair(
        residual, x, gate, scale, shift, second_scale, second_shift, weight, bias, eps
    )


@torch.library.register_fake(add_op_namespace_prefix("gated_residual"))
def _gated_residual_fake(residual, x, *_):
    required(x)
    return residual.new_empty(residual.shape)


@torch.library.register_fake(add_op_namespace_prefix("gated_residual_norm_modulate"))
def _gated_residual_norm_modulate_fake(residual, x, *_):
    return _gated_residual_fake(residual, x), x.new_empty(residual.shape)


@torch.library.register_fake(add_op_namespace_prefix("gated_residual_layer_norm_modulate_pair"))
def _gated_residual_layer_norm_modulate_pair_fake(residual, x, *_):
    return *_gated_residual_norm_modulate_fake(residual, x), residual.new_empty(residual.shape)


# --------------------------------------------------------------------------------------------------
# Quantized results

_rms_norm_fp8, _layer_norm_fp8, _rms_norm_modulate_fp8, _layer_norm_modulate_fp8 = (
    plain_call(f"{operation}_fp8", "norm_fp8")
    for operation in ("rms_norm", "layer_norm", "rms_norm_modulate", "layer_norm_modulate")
)
_gated_rms_fp8, _gated_ln_fp8 = (
    plain_call(f"gated_residual_{norm}_modulate_fp8", "gated_residual_norm_modulate_fp8")
    for norm in ("rms_norm", "layer_norm")
)


def rms_norm_fp8(
    x: Tensor, weight: Optional[Tensor] = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """As ``rms_norm``, with the result quantized as by ``quantize_fp8``, from the unrounded value.

    Returns:
        ``(values, scale)``: float8_e4m3fn ``(..., D)`` and float32 ``(..., 1)``.
    """
    return _rms_norm_fp8(x, False, weight, None, None, None, number("rms_norm_fp8", "eps", eps))


def layer_norm_fp8(
    x: Tensor, weight: Optional[Tensor] = None, bias: Optional[Tensor] = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """As ``layer_norm``, with a quantized result as from ``rms_norm_fp8``."""
    return _layer_norm_fp8(x, True, weight, bias, None, None, number("layer_norm_fp8", "eps", eps))


def rms_norm_modulate_fp8(
    x: Tensor,
    scale: Modulator,
    shift: Optional[Modulator] = None,
    weight: Optional[Tensor] = None,
    eps: float = 1e-6,
    *,
    index: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    """As ``rms_norm_modulate``, with a quantized result as from ``rms_norm_fp8``."""
    return _modulate(_rms_norm_modulate_fp8, x, False, weight, None, scale, shift, eps, index)


def layer_norm_modulate_fp8(
    x: Tensor,
    scale: Modulator,
    shift: Optional[Modulator] = None,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-6,
    *,
    index: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    """As ``layer_norm_modulate``, with a quantized result as from ``rms_norm_fp8``."""
    return _modulate(_layer_norm_modulate_fp8, x, True, weight, bias, scale, shift, eps, index)


def gated_residual_rms_norm_modulate_fp8(
    residual: Tensor,
    x: Tensor,
    gate: Optional[Modulator] = None,
    scale: Optional[Modulator] = None,
    shift: Optional[Modulator] = None,
    weight: Optional[Tensor] = None,
    eps: float = 1e-6,
    *,
    addend: Optional[Tensor] = None,
    x_weight: Optional[Tensor] = None,
    x_eps: Optional[float] = None,
    tanh_gate: bool = False,
    index: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``gated_residual_rms_norm_modulate``, with a residual of ``x``'s dtype, and the modulated norm
    quantized as by ``rms_norm_fp8``.

    Returns:
        ``(h, values, scale)``.
    """
    branch = addend, x_weight, x_eps, tanh_gate, index
    return _gated(_gated_rms_fp8, residual, x, False, gate, scale, shift, weight, None, eps, branch)


def gated_residual_layer_norm_modulate_fp8(
    residual: Tensor,
    x: Tensor,
    gate: Optional[Modulator] = None,
    scale: Optional[Modulator] = None,
    shift: Optional[Modulator] = None,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-6,
    *,
    addend: Optional[Tensor] = None,
    x_weight: Optional[Tensor] = None,
    x_eps: Optional[float] = None,
    tanh_gate: bool = False,
    index: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``gated_residual_layer_norm_modulate``, with results as from
    ``gated_residual_rms_norm_modulate_fp8``."""
    branch = addend, x_weight, x_eps, tanh_gate, index
    return _gated(_gated_ln_fp8, residual, x, True, gate, scale, shift, weight, bias, eps, branch)


@torch.library.register_fake(add_op_namespace_prefix("norm_fp8"))
def _norm_fp8_fake(x, *_):
    return quantize_fp8_fake(x, False)


@torch.library.register_fake(add_op_namespace_prefix("gated_residual_norm_modulate_fp8"))
def _gated_residual_norm_modulate_fp8_fake(residual, x, *_):
    return _gated_residual_fake(residual, x), *quantize_fp8_fake(residual, False)
