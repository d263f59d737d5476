"""Linear layers that torchao has quantized to FP8, computed by ``quantize_fp8`` and ``linear_fp8``.

torchao's ``Float8DynamicActivationFloat8WeightConfig`` replaces the weight of a plain ``torch.nn.Linear`` by
a tensor of its own, with a scale per row or one for all, and quantizes the layer's input in each call. Here
the input has a scale per row in both cases. torchao computes its other formats: quantized weights alone,
blocks of 128 elements, bounded scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional
from ..conditions import PLAIN_TYPES, dtype_name, is_differentiated, is_plain, kernels_take
from .checks import find_class
from .patch import Call, ExactSpec
from .quantized_rows import QuantizedRows, quantized_rows

FP8_TENSOR = "torchao.quantization:Float8Tensor"
_FP8 = torch.float8_e4m3fn
_DTYPES = (torch.bfloat16, torch.float16)
_MULTIPLE = 16  # of the number of input features, and of addresses


class Fp8Weight(NamedTuple):
    """A layer's values (N, K), their scale (N, 1) or (1, 1), and its bias."""

    values: Tensor
    scale: Tensor
    bias: Tensor | None


def fp8_weight(weight: Any, bias: Any) -> Fp8Weight | None:
    """A layer's weight and bias for ``linear_fp8``, or None if they have another format."""
    cls: Any = find_class(FP8_TENSOR)
    if type(weight) is not cls or cls.tensor_data_names != ["qdata", "scale"]:
        return None
    for name in getattr(cls, "optional_tensor_data_names", ()):
        if getattr(weight, name) is not None:  # such as a later torchao's scale of the input
            return None
    values, scale, how = weight.qdata, weight.scale, weight.act_quant_kwargs
    if (
        how is None
        or how.float8_dtype is not _FP8
        or how.hp_value_lb is not None
        or how.hp_value_ub is not None
        or not _has_known_granularity(how.granularity)
        or values.dtype is not _FP8
        or scale.dtype is not torch.float32
        or not (is_plain(values) and is_plain(scale) and is_plain(bias))
    ):
        return None
    shape = values.shape
    if (
        len(shape) != 2
        or shape[1] % _MULTIPLE
        or scale.shape not in ((shape[0], 1), (1, 1))
        or not (values.is_contiguous() and scale.is_contiguous())
        or (bias is not None and not bias.is_contiguous())
    ):
        return None
    # Files mapped into memory have any alignment. Tensors of a tracer have no address.
    if (
        type(values) in PLAIN_TYPES
        and not torch.compiler.is_compiling()
        and values.data_ptr() % _MULTIPLE
    ):
        return None
    return Fp8Weight(values, scale, bias)


def _has_known_granularity(granularity: Any) -> bool:
    name = type(granularity).__name__
    return name == "PerTensor" or (name == "PerRow" and getattr(granularity, "dim", -1) == -1)


def fp8_takes(x: Any, weight: Any, found: Fp8Weight, features: int | None = None) -> bool:
    """Whether the kernels compute the layer's result for x, given ``fp8_weight`` of its weight and bias.

    ``features``: of a tensor that takes x's place and is computed from it.
    """
    values, scale, bias = found
    is_quantized = type(x) is QuantizedRows
    return (
        (is_quantized or isinstance(x, Tensor))
        and x.dtype in _DTYPES
        and (is_quantized or kernels_take(x))
        and (x.shape[-1:] if features is None else (features,)) == values.shape[1:]
        and x.device == values.device == scale.device
        and (
            bias is None
            or (
                (bias.dtype is x.dtype or bias.dtype is torch.float32)
                and bias.device == x.device
                and bias.shape == values.shape[:1]
            )
        )
        and not is_differentiated(None if is_quantized else x, bias)
        and not (torch.is_grad_enabled() and weight.requires_grad)
    )


def fp8_weight_for(x: Any, weight: Any, bias: Any) -> Fp8Weight | None:
    """``fp8_weight``, if the kernels compute the layer's result for x."""
    found = fp8_weight(weight, bias)
    return found if found is not None and fp8_takes(x, weight, found) else None


def fp8_product(x: QuantizedRows, found: Fp8Weight) -> Tensor:
    """The layer's result."""
    weight, scale, bias = found
    return functional.linear_fp8(x.values, x.scale, weight, scale, bias, dtype=x.dtype)


class Fp8Product(NamedTuple):
    """An FP8 layer's result that is yet to be computed: with the residual sum, if that is its next use."""

    x: QuantizedRows
    weight: Fp8Weight

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.x.shape[:-1], self.weight.values.shape[0])

    def result(self) -> Tensor:
        return fp8_product(self.x, self.weight)

    def added_to(self, residual: Tensor, gate: Tensor | None) -> Tensor:
        """``residual + gate * result``, of a 16-bit residual."""
        x, weight = self
        return functional.linear_gated_residual_fp8(residual, x.values, x.scale, *weight, gate=gate)


def fp8_products(x: QuantizedRows, found: Sequence[Fp8Weight]) -> Sequence[Tensor]:
    """The layers' results, of two or three layers in one launch."""
    if len(found) not in (2, 3):
        return [fp8_product(x, weight) for weight in found]
    return functional.linears_fp8(x.values, x.scale, *zip(*found), dtype=x.dtype)


def fp8_gelu_product(
    x: QuantizedRows,
    found: Fp8Weight,
    approximate: str,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """GELU of the layer's result, quantized in blocks."""
    how: Any = {"approximate": approximate, "out": out}
    return functional.linear_gelu_fp8(x.values, x.scale, *found, **how)


def _forward(self: Any, call: Call, input: Tensor) -> Any:
    parameters = self._parameters
    weight, bias = parameters.get("weight"), parameters.get("bias")
    found = None if "bias" not in parameters else fp8_weight(weight, bias)
    if found is None:
        return NotImplemented  # quantized in another way since
    if fp8_takes(input, weight, found):
        return fp8_product(quantized_rows(input), found)
    if not isinstance(input, Tensor) or is_differentiated(input, weight, bias):
        return NotImplemented
    if not kernels_take(input):
        return call.refuse(input)
    if input.dtype not in _DTYPES:
        return call.decline(f"linear_fp8 has no result in {dtype_name(input.dtype)}")
    return call.decline("its weight and bias do not fit its input")


@dataclass(frozen=True, eq=False)
class _Fp8LinearSpec(ExactSpec):
    """``torch.nn.Linear`` with such a weight, for code that calls the module, such as adapters."""

    def matches(self, module: nn.Module) -> bool:
        if not super().matches(module):
            return False
        parameters = module._parameters
        return fp8_weight(parameters.get("weight"), parameters.get("bias")) is not None


FP8_LINEAR = _Fp8LinearSpec(
    "torch.nn:Linear",
    _forward,
    "quantize_fp8, linear_fp8",
    functions=("torch.nn.functional:linear",),
)
# In models in part torch.compile fuses torchao's quantization with what comes before it.
FP8_LINEAR_IN_PART = replace(FP8_LINEAR, left_to_compiler=True)
