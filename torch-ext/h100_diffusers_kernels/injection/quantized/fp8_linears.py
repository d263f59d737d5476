"""FP8 linear layers, computed by ``quantize_fp8`` and ``linear_fp8``. There are two kinds:

- torchao's ``Float8DynamicActivationFloat8WeightConfig`` replaces the weight of a plain ``torch.nn.Linear``
  by a tensor of its own, with a scale per row or one for all;
- diffusers' ``BFLQuantizationConfig`` loads FLUX's FP8 checkpoints into linear layers of its own, with a
  scale per row.

Both quantize the layer's input in each call; here it always has a scale per row. torchao computes its other
formats: quantized weights alone, blocks of 128 elements, bounded scales.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import operations
from ...operations.conditions import (
    DTYPES_16_BIT,
    PLAIN_TYPES,
    dtype_name,
    is_differentiated,
    is_plain_tensor,
    kernels_take,
)
from ..core import checks
from ..core.adapters import (
    LINEAR,
    Lora,
    are_operands,
    below_adapters,
    low_rank_operands,
    read_adapters,
    with_lora_bias,
)
from ..core.checks import KnownClass
from ..core.patch import Call, ExactSpec, StandIn
from ..core.quantized_rows import QuantizedRows, quantized_rows

_BFL = "diffusers.quantizers.bfl.utils:BFLFP8RLinear"
_BFL_LINEAR = KnownClass(_BFL, "torch.nn.functional:linear")
_TORCHAO, _TENSOR = "torchao.quantization", "Float8Tensor"
FP8_TENSOR = f"{_TORCHAO}:{_TENSOR}"
_FP8 = torch.float8_e4m3fn
# Of a row's values, the largest with a normal scale. Without this bound torchao divides a row of zeros by the
# scale 0. The kernels give such a row zeros.
SMALLEST_MAXIMUM = 448 * torch.finfo(torch.float32).tiny
_MULTIPLE = 16  # of the number of input features, and of addresses


class Fp8Weight(NamedTuple):
    """A layer's values (N, K), their scale (N, 1) or (1, 1), its bias, and the terms of its adapters."""

    values: Tensor
    scale: Tensor
    bias: Tensor | None
    terms: tuple[Lora, ...] = ()


def fp8_weight(layer: Any, is_traced: bool | None = None) -> Fp8Weight | None:
    """A layer's weight and bias for ``linear_fp8``, or None if it is no FP8 layer. ``is_traced``: whether
    torch.compile traces, if the caller knows."""
    terms: tuple[Lora, ...] = ()
    if "base_layer" in layer._modules:
        adapted = read_adapters(layer)
        if adapted is None:
            return None
        ((layer, terms),) = adapted
    parameters = layer._parameters
    weight: Any = parameters.get("weight")
    cls: Any = type(weight)
    if "bias" not in parameters:  # sharding moves it
        return None
    bias = parameters["bias"]
    if cls in PLAIN_TYPES:
        if type(layer) is not _BFL_LINEAR.cls:
            return None
        values, scale = weight, layer._buffers.get("weight_scale")
    elif cls is getattr(sys.modules.get(_TORCHAO), _TENSOR, None):
        values, scale = weight.qdata, weight.scale
    else:
        return None
    # What was checked before is known by a reference to the values, which offloading and users replace. A
    # weak one to the weight would forbid `module.to`.
    if is_traced is None:
        is_traced = torch.compiler.is_dynamo_compiling()
    stand_in = None if is_traced else getattr(layer.__dict__.get("forward"), "__self__", None)
    checked = stand_in.cached if type(stand_in) is StandIn else None
    ids: Any = None if is_traced else (id(weight), id(scale), id(bias))
    if checked is None or checked[0]() is not values or checked[1:] != ids:
        if not _are_operands(weight, values, scale, bias, is_traced):
            return None
        if values is not weight and type(stand_in) is StandIn:
            stand_in.cached = (weakref.ref(values), *ids)
    # Without the call of the class's own ``__new__``.
    return tuple.__new__(
        Fp8Weight, (values, scale if scale.dim() == 2 else scale.unsqueeze(1), bias, terms)
    )


def _has_known_format(weight: Any) -> bool:
    """Whether torchao's tensor quantizes its layer's input as the kernels do."""
    cls, of_input = type(weight), weight.act_quant_kwargs
    return (
        cls.tensor_data_names == ["qdata", "scale"]
        # Such as a later torchao's scale of the input.
        and all(getattr(weight, n) is None for n in getattr(cls, "optional_tensor_data_names", ()))
        and of_input is not None
        and of_input.float8_dtype is _FP8
        and (of_input.hp_value_lb in (None, SMALLEST_MAXIMUM) and of_input.hp_value_ub is None)
        and type(of_input.granularity).__name__ in ("PerTensor", "PerRow")
        and getattr(of_input.granularity, "dim", -1) == -1
    )


def _are_operands(weight: Any, values: Any, scale: Any, bias: Any, is_traced: bool) -> bool:
    if values is not weight and not _has_known_format(weight):
        return False
    shape = values.shape
    return (
        values.dtype is _FP8
        and scale is not None
        and scale.dtype is torch.float32
        and (is_plain_tensor(values) and is_plain_tensor(scale) and is_plain_tensor(bias))
        and len(shape) == 2
        and shape[1] % _MULTIPLE == 0
        # diffusers' layer with other sizes computes in 16 bits.
        and (values is not weight or shape[0] % _MULTIPLE == 0)
        and scale.shape in ((shape[0], 1), (1, 1), (shape[0],))
        and values.is_contiguous()
        and scale.is_contiguous()
        and (bias is None or (bias.is_contiguous() and bias.shape == shape[:1]))
        and (bias is None or bias.device == values.device == scale.device)
        # Files mapped into memory have any alignment. Tensors of a tracer have no address.
        and (is_traced or type(values) not in PLAIN_TYPES or values.data_ptr() % _MULTIPLE == 0)
    )


def are_stock_linears(*layers: Any) -> bool:
    """Whether a call of each layer runs only its library's code, and all have one class."""
    if not layers:
        return True
    for layer in layers:
        if "base_layer" in layer._modules:
            return read_adapters(*layers) is not None
    first = layers[0]
    known = _BFL_LINEAR if type(first) is _BFL_LINEAR.cls else LINEAR
    return checks.is_stock(first, known, *layers[1:])


def fp8_takes(x: Any) -> bool:
    """Whether FP8 layers may have the input x, a tensor or quantized."""
    return type(x) is QuantizedRows or (
        isinstance(x, Tensor)
        and x.dtype in DTYPES_16_BIT
        and kernels_take(x)
        and not is_differentiated(x)
    )


def fp8_fits(layer: Any, found: Fp8Weight, x: Any, features: int) -> bool:
    """Whether the kernels compute the result of a layer with this weight for an input with x's dtype and
    device and this number of features."""
    values, _, bias, terms = found
    dtype = x.dtype
    if "base_layer" in layer._modules:
        layer = below_adapters(layer)
    return (
        values.shape[1] == features
        and values.device == x.device
        and (bias is None or bias.dtype is dtype or bias.dtype is torch.float32)
        # diffusers' layer has a result of this dtype.
        and layer.__dict__.get("compute_dtype", dtype) is dtype
        and not (
            torch.is_grad_enabled()
            and any(p is not None and p.requires_grad for p in layer._parameters.values())
        )
        and (not terms or are_operands(terms, x))
    )


def fp8_weights_for(x: Any, *layers: Any) -> dict[Any, Fp8Weight] | None:
    """Each layer's weight if all are plain FP8 layers that take x, which may be quantized then. Or None."""
    weights: dict[Any, Fp8Weight] = {}
    unadapted = []
    is_traced = None if len(layers) == 1 else torch.compiler.is_dynamo_compiling()
    for layer in layers:
        found = None if layer is None else fp8_weight(layer, is_traced)
        if found is None:
            return None
        weights[layer] = found
        if "base_layer" not in layer._modules:
            unadapted.append(layer)
    if type(x) is not QuantizedRows and not fp8_takes(x):
        return None
    for layer, found in weights.items():
        if not fp8_fits(layer, found, x, x.shape[-1]):
            return None
    return weights if are_stock_linears(*unadapted) else None


def has_plain_weight(layer: Any) -> bool:
    """Whether a layer is PyTorch's with a plain weight, so that it is no FP8 layer, below adapters if any."""
    while "base_layer" in layer._modules:  # ``below_adapters``, inlined
        layer = layer._modules["base_layer"]
    return type(layer) is nn.Linear and type(layer._parameters.get("weight")) in PLAIN_TYPES


def are_fp8(*layers: Any) -> bool:
    """Whether all are plain FP8 layers."""
    return None not in map(fp8_weight, layers) and are_stock_linears(*layers)


def _bias_low_up(
    x: QuantizedRows, weight: Fp8Weight, others: Sequence[Fp8Weight] = ()
) -> tuple[Tensor | None, Tensor | None, Any]:
    """The operations' operands of a weight's bias and terms. The terms of all weights that take these rows
    share their first product. ``others``: these, if the rows do not know them."""
    terms = weight.terms
    if not terms:
        return weight.bias, None, None
    lows = x.lows
    if lows is None or id(terms) not in lows:
        groups = [terms]
        for other in x.weights.values() or others:
            if other.terms and other is not weight:
                groups.append(other.terms)
        x.lows = lows = {}
        for own, low, up in zip(groups, *low_rank_operands(x.values, x.scale, groups)):
            lows[id(own)] = own, low, up  # with the terms, so that the id stays theirs
    _, low, up = lows[id(terms)]
    return with_lora_bias(weight.bias, terms), low, up


def fp8_product(x: QuantizedRows, found: Fp8Weight) -> Tensor:
    """The layer's result."""
    bias, low, up = _bias_low_up(x, found)
    return operations.linear_fp8(
        x.values, x.scale, found[0], found[1], bias, low=low, up=up, dtype=x.dtype
    )


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
        bias, low, up = _bias_low_up(x, weight)
        operands = (residual, x.values, x.scale, *weight[:2])
        return operations.linear_gated_residual_fp8(*operands, bias=bias, low=low, up=up, gate=gate)


def computed(y: Any) -> Any:
    """y itself, or the result of an ``Fp8Product``."""
    return y.result() if type(y) is Fp8Product else y


def fp8_products(x: QuantizedRows, found: Sequence[Fp8Weight]) -> Sequence[Tensor]:
    """The layers' results, of two or three layers in one launch."""
    if len(found) not in (2, 3):
        return [fp8_product(x, weight) for weight in found]
    biases, lows, ups = zip(*[_bias_low_up(x, weight, found) for weight in found])
    weights, scales = [w.values for w in found], [w.scale for w in found]
    return operations.linears_fp8(
        x.values, x.scale, weights, scales, biases, lows=lows, ups=ups, dtype=x.dtype
    )


def fp8_gelu_product(
    x: QuantizedRows, found: Fp8Weight, approximate: str, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """GELU of the layer's result, quantized in blocks."""
    bias, low, up = _bias_low_up(x, found)
    return operations.linear_gelu_fp8(
        x.values, x.scale, *found[:2], bias, low=low, up=up, approximate=approximate, out=out
    )


def _forward(self: Any, call: Call, input: Tensor) -> Any:
    found = fp8_weight(self)
    if found is None:
        return NotImplemented  # quantized in another way since
    if fp8_takes(input) and fp8_fits(self, found, input, input.shape[-1]):
        return fp8_product(quantized_rows(input), found)
    if not isinstance(input, Tensor) or is_differentiated(input, *self._parameters.values()):
        return NotImplemented
    if not call.takes(input):
        return NotImplemented
    if input.dtype not in DTYPES_16_BIT:
        return call.decline(f"linear_fp8 has no result in {dtype_name(input.dtype)}")
    return call.decline("its weight and bias do not fit its input")


def _bfl_forward(self: Any, call: Call, inputs: Tensor) -> Any:
    return _forward(self, call, inputs)


@dataclass(frozen=True, eq=False)
class _Fp8LinearSpec(ExactSpec):
    """A kind of FP8 layer, for code that calls the module, such as adapters."""

    def matches(self, module: nn.Module) -> bool:
        return super().matches(module) and fp8_weight(module) is not None


_OPERATIONS, _FUNCTIONS = "quantize_fp8, linear_fp8", ("torch.nn.functional:linear",)
FP8_LINEAR = _Fp8LinearSpec("torch.nn:Linear", _forward, _OPERATIONS, _FUNCTIONS)
FP8_LINEARS = (FP8_LINEAR, _Fp8LinearSpec(_BFL, _bfl_forward, _OPERATIONS, _FUNCTIONS))
# In models in part torch.compile fuses the quantization with what comes before it.
FP8_LINEARS_IN_PART = tuple(replace(spec, left_to_compiler=True) for spec in FP8_LINEARS)
