"""Linear layers with plain LoRA, computed without a call of peft.

The adapters of all layers that read the same input have one first product. ``linears_lora`` adds the second
ones where the layers' results are made. PyTorch's products compute both for few rows, for other dtypes and on
CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ... import operations
from ...operations.conditions import DTYPES_16_BIT, KERNEL_DEVICE_TYPE, PLAIN_TYPES
from ..core.adapters import low_rank_operands, with_lora_bias

# With fewer rows PyTorch's products are faster. On CPUs they always are.
MIN_ROWS = {"cuda": 64, "cpu": 1 << 40}
_ALL_DTYPES = (*DTYPES_16_BIT, torch.float32)

# A layer's product that is yet to be computed: weight, bias, low and up of its adapters, or None, and whether
# ``linears_lora`` computes it.
Product = tuple[Tensor, Any, Any, Any, bool]


class LaterProduct(NamedTuple):
    """The product of one layer for x, which is yet to be computed."""

    x: Tensor
    product: Product


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
    tensors: list[Any] = [x]
    groups = []
    has_biases = False  # of adapters
    for base, terms in found:
        parameters = base._parameters
        if parameters.get("weight") is None or "bias" not in parameters:  # sharding moves them
            return None
        tensors += parameters["weight"], parameters["bias"]
        if terms:
            groups.append(terms)
        for down, up, bias, _ in terms:
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
    is_operand = are_aligned and dtype in DTYPES_16_BIT and x.shape[-1] % 8 == 0
    may_launch = is_operand and x.numel() >= MIN_ROWS[KERNEL_DEVICE_TYPE] * x.shape[-1]
    pairs: Any = ()
    if groups:
        way = "kernels" if may_launch else "lora_down" if is_operand and x.is_cuda else "PyTorch"
        pairs = zip(*low_rank_operands(x, None, groups, way))
    products: list[Product] = []
    for base, terms in found:
        weight, bias = base._parameters["weight"], base._parameters["bias"]
        low_and_up: Any = next(pairs) if terms else (None, None)
        bias = with_lora_bias(bias, terms) if has_biases else bias
        products.append((weight, bias, *low_and_up, may_launch))
    return products


def lora_results(
    x: Tensor, products: Sequence[Product], approximate: str | None = None, out: Any = None
) -> Sequence[Tensor]:
    """The results of products of x, or their GELU with this approximation, written to ``out`` if that is
    given: for each a tensor (..., N) in which each sample is contiguous."""
    weights, biases, lows, ups, may_launch = zip(*products)
    if may_launch[0]:
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
        rows = out if out.dim() == 2 else out.view(-1, out.shape[-1])
        rows.addmm_(low if low.dim() == 2 else low.reshape(-1, low.shape[-1]), up.t())
    return out
