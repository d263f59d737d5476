"""Linear layers with plain LoRA, computed without a call of peft.

The adapters of all layers that read the same input have one first product. ``linears_lora`` adds the second
ones where the layers' results are made. PyTorch's products compute both for few rows, for other dtypes and on
CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ... import operations
from ...operations.conditions import KERNEL_DEVICE_TYPE, PLAIN_TYPES
from ..core.adapters import (
    RANK_STEP,
    first_product,
    packed_downs,
    packed_up,
    with_lora_bias,
)

# With fewer rows PyTorch's products are faster. On CPUs they always are.
MIN_ROWS = {"cuda": 256, "cpu": 1 << 40}
_MAX_LAYERS = 3  # of linears_lora
_DTYPES = (torch.bfloat16, torch.float16)
_ALL_DTYPES = (*_DTYPES, torch.float32)

# A layer's product that is yet to be computed: weight, bias, low and up of its adapters, or None, and whether
# ``linears_lora`` computes it.
Product = tuple[Tensor, Any, Any, Any, bool]


class LaterProduct:
    """The product of one layer for x, which is yet to be computed."""

    __slots__ = ("product", "x")

    def __init__(self, x: Tensor, product: Product) -> None:
        self.x, self.product = x, product


def lora_products(x: Any, found: Sequence[tuple[Any, tuple]] | None) -> list[Product] | None:
    """The products of the layers that ``read_adapters`` found. None if it found none, or the layers' weights
    are not plain, so that peft has to compute them."""
    if (
        found is None
        or type(x) not in PLAIN_TYPES
        or x.dtype not in _ALL_DTYPES  # ``kernels_take`` and ``is_differentiated``, inlined
        or x.device.type != KERNEL_DEVICE_TYPE
        or torch.is_autocast_enabled(KERNEL_DEVICE_TYPE)
        or forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
    ):
        return None
    downs: list[Tensor] = []
    scales: list[Any] = []
    tensors: list[Any] = [x]
    has_biases = False  # of adapters
    for base, terms in found:
        parameters = base._parameters
        if parameters.get("weight") is None or "bias" not in parameters:  # sharding moves them
            return None
        tensors += parameters["weight"], parameters["bias"]
        for down, up, bias, scale in terms:
            downs.append(down)
            scales.append(scale)
            tensors += down, up, bias
            has_biases = has_biases or bias is not None
    dtype, tracks_grad, are_aligned = x.dtype, torch.is_grad_enabled(), True
    for tensor in tensors:
        if tensor is not None:
            if (
                type(tensor) not in PLAIN_TYPES
                or tensor.dtype is not dtype
                or (tracks_grad and tensor.requires_grad)
            ):
                return None
            # Files mapped into memory have any alignment.
            are_aligned = are_aligned and not tensor.data_ptr() % 16 and tensor.is_contiguous()
    may_launch = (
        are_aligned
        and dtype in _DTYPES
        and x.shape[-1] % 8 == 0
        and x.numel() >= MIN_ROWS[KERNEL_DEVICE_TYPE] * x.shape[-1]
    )
    low: Any = None
    if downs and may_launch:
        low = first_product(x, None, downs, scales)
    elif downs:
        low = _scaled_linear(x, *packed_downs(downs, scales))
    ups = []
    for _, terms in found:
        if terms:
            first = terms[0][1]
            is_ready = len(terms) == 1 and first.shape[1] % RANK_STEP == 0
            ups.append(first if is_ready else packed_up(terms))
    lows: Sequence[Any] = [low]
    if len(ups) > 1:
        lows = low.split_with_sizes([up.shape[1] for up in ups], -1)
    products: list[Product] = []
    pairs: Any = iter(zip(lows, ups))
    for base, terms in found:
        weight, bias = base._parameters["weight"], base._parameters["bias"]
        is_wide = weight.shape[0] >= x.shape[-1]  # otherwise adding to cuBLAS' product is faster
        low_and_up: Any = next(pairs) if terms else (None, None)
        bias = with_lora_bias(bias, terms) if has_biases else bias
        products.append((weight, bias, *low_and_up, may_launch and is_wide))
    return products


def _scaled_linear(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """``scale * linear(x, weight)``, rounded once."""
    if scale == 1:
        return torch.nn.functional.linear(x, weight)
    rows = x.reshape(-1, x.shape[-1])
    product = torch.addmm(rows.new_empty(1), rows, weight.t(), beta=0, alpha=scale)
    return product.view(*x.shape[:-1], weight.shape[0])


def lora_results(
    x: Tensor, products: Sequence[Product], approximate: str | None = None, out: Any = None
) -> Sequence[Tensor]:
    """The results of products of x, or their GELU with this approximation, written to ``out`` if that is
    given: for each a tensor (..., N) in which each sample is contiguous."""
    weights, biases, lows, ups, may_launch = zip(*products)
    if False not in may_launch and type(None) not in map(type, ups) and len(ups) <= _MAX_LAYERS:
        return operations.linears_lora(
            x, weights, lows, ups, biases, approximate=approximate, out=out
        )
    results = []
    for i, product in enumerate(products):
        place = None if out is None else out[i]
        result = _result(x, *product[:4], place)
        if approximate is not None:
            gelu = operations.gelu(result, approximate)
            result = gelu if place is None else place.copy_(gelu)
        results.append(result)
    return results


def _result(x: Tensor, weight: Tensor, bias: Any, low: Any, up: Any, out: Any) -> Tensor:
    linear: Any = torch.nn.functional.linear
    if out is None:
        out = linear(x, weight, bias)
    elif out.dim() > 2:
        for i, place in enumerate(out.unbind(0)):
            _result(x[i], weight, bias, None if low is None else low[i], up, place)
        return out
    else:
        linear(x, weight, bias, out=out)
    if low is not None:
        out.view(-1, out.shape[-1]).addmm_(low.reshape(-1, up.shape[1]), up.t())
    return out


def later_result(later: LaterProduct, out: Tensor | None = None) -> Tensor:
    """The product, written to ``out`` (B, S, N) if that is given."""
    return lora_results(later.x, [later.product], out=None if out is None else (out,))[0]
