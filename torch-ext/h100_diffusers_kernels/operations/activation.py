"""Activations, plain and gated."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

# Imported here, because users may replace the functions of torch.nn.functional.
from torch.nn.functional import gelu as torch_gelu
from torch.nn.functional import silu as torch_silu

from .._ops import add_op_namespace_prefix
from .calls import APPROXIMATIONS, OUT_GIVEN, choice, kernel_call, out_tensors, plain_call, required
from .fp8 import is_blocked, quantize_fp8_fake

_HALVES = {"second": False, "first": True}
_OPERATIONS = ("gelu", "silu", "geglu", "swiglu")


def _formula(x, bias, is_silu, is_gated, tanh_approximation, first_is_activated):
    def activated(h: Tensor) -> Tensor:
        return torch_silu(h) if is_silu else torch_gelu(h, approximate=approximate)

    approximate = "tanh" if tanh_approximation else "none"
    h = x if bias is None else x + bias
    if not is_gated:
        return activated(h)
    first, second = h.chunk(2, dim=-1)
    return activated(first) * second if first_is_activated else first * activated(second)


_gelu, _silu, _geglu, _swiglu = (kernel_call(o, _formula, "activation") for o in _OPERATIONS)
_gelu_out, _silu_out, _geglu_out, _swiglu_out = (
    plain_call(operation, "activation_out") for operation in _OPERATIONS
)
_gelu_fp8 = plain_call("gelu_fp8", "activation_fp8")
_geglu_fp8 = plain_call("geglu_fp8", "activation_fp8")
_swiglu_fp8 = plain_call("swiglu_fp8", "activation_fp8")
_swiglu_fp8_out = plain_call("swiglu_fp8", "activation_fp8_out")


def gelu(
    x: Tensor,
    approximate: str = "none",
    bias: Optional[Tensor] = None,
    *,
    out: Optional[Tensor] = None,
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
    tanh = choice("gelu", "approximate", approximate, APPROXIMATIONS)
    if out is None:
        return _gelu(x, bias, False, False, tanh, False)
    return _gelu_out(x, bias, False, False, tanh, False, out, written=out, refused=OUT_GIVEN)


def silu(x: Tensor, bias: Optional[Tensor] = None, *, out: Optional[Tensor] = None) -> Tensor:
    """Sigmoid linear unit, ``x * sigmoid(x)``, of ``x + bias``, as ``torch.nn.functional.silu``.

    Args:
        x, bias, out: as in ``gelu``.

    Source: Elfwing et al., 2017, https://arxiv.org/abs/1702.03118.
    """
    if out is None:
        return _silu(x, bias, True, False, False, False)
    return _silu_out(x, bias, True, False, False, False, out, written=out, refused=OUT_GIVEN)


def geglu(
    x: Tensor,
    approximate: str = "none",
    bias: Optional[Tensor] = None,
    *,
    activated: str = "second",
    out: Optional[Tensor] = None,
) -> Tensor:
    """GELU-gated linear unit of ``x + bias``: one half times ``gelu`` of the other, ``(..., D)``, T.

    Args:
        x: ``(..., 2 * D)``, T.
        approximate: as in ``gelu``.
        bias: ``(2 * D,)``, T, or None.
        activated: the half that goes through the GELU, ``"second"`` as in diffusers' GEGLU, or ``"first"``.
        out: ``(..., D)``, T, or None.

    Source: Shazeer, 2020, https://arxiv.org/abs/2002.05202.
    """
    tanh = choice("geglu", "approximate", approximate, APPROXIMATIONS)
    first = choice("geglu", "activated", activated, _HALVES)
    if out is None:
        return _geglu(x, bias, False, True, tanh, first)
    return _geglu_out(x, bias, False, True, tanh, first, out, written=out, refused=OUT_GIVEN)


def swiglu(
    x: Tensor,
    bias: Optional[Tensor] = None,
    *,
    activated: str = "second",
    out: Optional[Tensor] = None,
) -> Tensor:
    """SiLU-gated linear unit of ``x + bias``: one half times ``silu`` of the other, ``(..., D)``, T.

    Args:
        x, bias, out: as in ``geglu``.
        activated: the half that goes through the SiLU, ``"second"`` as in diffusers' SwiGLU, or ``"first"``
            as in FLUX.2.

    Source: Shazeer, 2020, https://arxiv.org/abs/2002.05202.
    """
    first = choice("swiglu", "activated", activated, _HALVES)
    if out is None:
        return _swiglu(x, bias, True, True, False, first)
    return _swiglu_out(x, bias, True, True, False, first, out, written=out, refused=OUT_GIVEN)


def gelu_fp8(
    x: Tensor, approximate: str = "none", bias: Optional[Tensor] = None
) -> tuple[Tensor, Tensor]:
    """As ``gelu``, with the result quantized as by ``quantize_fp8``, from the unrounded value.

    Returns:
        ``(values, scale)``: float8_e4m3fn ``(..., D)`` and float32 ``(..., 1)``.
    """
    tanh = choice("gelu_fp8", "approximate", approximate, APPROXIMATIONS)
    return _gelu_fp8(x, bias, False, False, tanh, False, False)


def geglu_fp8(
    x: Tensor,
    approximate: str = "none",
    bias: Optional[Tensor] = None,
    *,
    activated: str = "second",
) -> tuple[Tensor, Tensor]:
    """As ``geglu``, with a quantized result as from ``gelu_fp8``."""
    tanh = choice("geglu_fp8", "approximate", approximate, APPROXIMATIONS)
    first = choice("geglu_fp8", "activated", activated, _HALVES)
    return _geglu_fp8(x, bias, False, True, tanh, first, False)


def swiglu_fp8(
    x: Tensor,
    bias: Optional[Tensor] = None,
    *,
    activated: str = "second",
    block_size: Optional[int] = None,
    out: Optional[tuple[Tensor, Tensor]] = None,
) -> tuple[Tensor, Tensor]:
    """As ``swiglu``, with the result quantized as by ``quantize_fp8``, from the unrounded value.

    Args:
        x, bias, activated: as in ``swiglu``.
        block_size: as in ``quantize_fp8``.
        out: as in ``quantize_fp8``. Values whose rows are not all aligned to 8 bytes take longer.

    Returns:
        ``(values, scale)``: float8_e4m3fn ``(..., D)`` and float32 ``(..., 1)`` or ``(..., ceil(D / 128))``.
    """
    first = choice("swiglu_fp8", "activated", activated, _HALVES)
    arguments = x, bias, True, True, False, first, is_blocked("swiglu_fp8", block_size)
    if out is None:
        return _swiglu_fp8(*arguments)
    out = out_tensors("swiglu_fp8", out, "(values, scale)", 2)
    return _swiglu_fp8_out(*arguments, *out, written=out)


@torch.library.register_fake(add_op_namespace_prefix("activation"))
def _activation_fake(x, bias, is_silu, is_gated, *_):
    halves = [x.shape[-1] // 2] if is_gated and x.dim() else x.shape[-1:]
    return x.new_empty([*x.shape[:-1], *halves])


@torch.library.register_fake(add_op_namespace_prefix("activation_fp8"))
def _activation_fp8_fake(x, *options):
    return quantize_fp8_fake(_activation_fake(x, *options), options[-1])


@torch.library.register_fake(add_op_namespace_prefix("activation_out"))
@torch.library.register_fake(add_op_namespace_prefix("activation_fp8_out"))
def _activation_out_fake(x, *_):
    required(x)
