"""Linear layers and feed-forwards, computed without a module call if they are plain.

Adapters and quantization replace the layer or its weight, offloading adds hooks. Then the module is called,
except with plain LoRA (``adapters``) and the FP8 weights of ``fp8_linears``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import operations
from ...operations.conditions import (
    DTYPES_16_BIT,
    PLAIN_TYPES,
    is_differentiated,
    is_plain_tensor,
    kernels_take,
    may_write,
    same_dtype_and_unit_stride,
    why_not_taken,
)
from ..core.adapters import (
    are_operands,
    below_adapters,
    is_adapted,
    packed_downs,
    packed_up,
    read_active,
    read_adapters,
    why_by_peft,
    with_lora_bias,
    without_adapters_at_rest,
)
from ..core.checks import KnownClass, KnownClasses, is_stock, replaced_function, why_not_stock
from ..core.patch import Call, ExactSpec, PatchSpec, StandIn, bare_stand_in, current
from ..core.quantized_rows import FP8_BLOCK, QuantizedRows, as_tensor, quantized_rows
from ..quantized.fp8_linears import (
    LINEAR,
    Fp8Product,
    Fp8Weight,
    are_stock_linears,
    computed,
    fp8_fits,
    fp8_gelu_product,
    fp8_product,
    fp8_products,
    fp8_takes,
    fp8_weight,
    fp8_weights_for,
    has_plain_weight,
)
from .lora import lora_products, lora_results

DROPOUT = KnownClass("torch.nn:Dropout")
SILU = KnownClass("torch.nn:SiLU", "torch.nn.functional:silu")
GELU = KnownClass("torch.nn:GELU", "torch.nn.functional:gelu")
FEED_FORWARD = KnownClass("diffusers.models.attention:FeedForward")
# Classes like FLUX.2's ``Flux2FeedForward``: ``linear_out(act_fn(linear_in(x)))``, and the names of these
# three. Families add theirs.
FEED_FORWARDS = KnownClasses()
SWIGLU_NAMES = ("linear_in", "act_fn", "linear_out")

# The layers of an attention: of its only stream or the image, and of the text.
QUERY_KEY_VALUE = ("to_q", "to_k", "to_v")
TEXT_QUERY_KEY_VALUE = ("add_q_proj", "add_k_proj", "add_v_proj")
# In float32 the epilogue's tanh approximation would be visible.
_EPILOGUE_DTYPES = DTYPES_16_BIT
# With fewer rows, one product of all samples is faster than one product per sample, written in place.
_MIN_ROWS_PER_SAMPLE = 1024


def linear(layer: Any, x: Any) -> Tensor:
    """``layer(x)``, without a module call if it is a plain ``torch.nn.Linear``. x may be quantized."""
    if type(x) is QuantizedRows and layer in x.weights:
        return fp8_product(x, x.weights[layer])
    if type(layer) is not LINEAR.cls and "base_layer" in layer._modules:
        result = adapted_linear(layer, x)
        return run_layer(layer, as_tensor(x)) if result is None else result
    if is_stock(layer, LINEAR):
        parameters = layer._parameters
        if "weight" in parameters and "bias" in parameters:  # sharding moves them
            weight, bias = parameters["weight"], parameters["bias"]
            if type(weight) not in PLAIN_TYPES:
                found = fp8_weights_for(x, layer)
                if found is not None:
                    return fp8_product(quantized_rows(x), found[layer])
            x = as_tensor(x) if type(x) is QuantizedRows else x
            return torch.nn.functional.linear(x, weight, bias)
    return run_layer(layer, as_tensor(x))


def adapted_linear(layer: Any, x: Any) -> Tensor | None:
    """``layer(x)`` of a layer with adapters; None if peft has to compute it. x may be quantized."""
    is_plain = type(layer._modules["base_layer"]._parameters.get("weight")) in PLAIN_TYPES
    weights = None if is_plain else fp8_weights_for(x, layer)
    if weights is not None:
        return fp8_product(quantized_rows(x), weights[layer])
    found = read_adapters(layer)
    if found is not None and not found[0][1]:
        return linear(found[0][0], x)
    x = as_tensor(x) if type(x) is QuantizedRows else x
    products = lora_products(x, found)
    return None if products is None else lora_results(x, products)[0]


def run_layer(layer: Any, x: Tensor) -> Tensor:
    """``layer(x)`` by its library's code, counted if that is an adapter of peft."""
    if is_adapted(layer) and current.value is not None and not torch.compiler.is_dynamo_compiling():
        current.value.fall_back(why_by_peft(layer, x))
    return layer(x)


def linears(x: Any, *layers: Any) -> Sequence[Tensor]:
    """``layer(x)`` of each layer: one product of all if they are FP8 layers. x may be quantized."""
    is_quantized = type(x) is QuantizedRows
    if is_quantized:
        weights: Any = x.weights
    else:
        weights = None if has_plain_weight(layers[0]) else fp8_weights_for(x, *layers)
    if weights is not None and weights.keys() >= {*layers}:
        rows = x if is_quantized else quantized_rows(x)
        return fp8_products(rows, [*map(weights.__getitem__, layers)])
    if is_quantized:
        return [linear(layer, x) for layer in layers]
    each, found = read_active(*layers)
    products = None if found is None else lora_products(x, found)
    if products is not None:
        return lora_results(x, products)
    are_plain = is_stock(each[0], LINEAR, *each[1:])
    results = []
    for layer in each:
        parameters = layer._parameters
        weight = parameters.get("weight")
        if are_plain and type(weight) in PLAIN_TYPES and "bias" in parameters:
            results.append(torch.nn.functional.linear(x, weight, parameters["bias"]))
        else:
            results.append(linear(layer, x))
    return results


def plain_weight(layer: Any) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of a plain ``torch.nn.Linear`` whose values are plain, or None."""
    if type(layer) is not LINEAR.cls:
        layer = without_adapters_at_rest(layer)
    if not is_stock(layer, LINEAR):
        return None
    parameters = layer._parameters
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if weight is None or "bias" not in parameters:
        return None
    if type(weight) not in PLAIN_TYPES and not is_plain_tensor(weight):
        return None
    is_plain_bias = bias is None or type(bias) in PLAIN_TYPES or is_plain_tensor(bias)
    return (weight, bias) if is_plain_bias else None


def plain_weights(dtype: torch.dtype, *layers: Any) -> list[tuple[Tensor, Tensor | None]] | None:
    """Weight and bias of each layer, if all are plain ``torch.nn.Linear`` with plain values and weights of
    this dtype. Then their results for plain inputs are plain and contiguous."""
    if not is_stock(layers[0], LINEAR, *layers[1:]):
        layers = tuple(map(without_adapters_at_rest, layers))
        if not is_stock(layers[0], LINEAR, *layers[1:]):
            return None
    found = []
    for layer in layers:
        parameters = layer._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if (
            type(weight) not in PLAIN_TYPES
            or weight.dtype is not dtype
            or (bias is not None and type(bias) not in PLAIN_TYPES)
        ):
            return None
        found.append((weight, bias))
    return found


def run_dropout(layer: Any, x: Tensor) -> Tensor:
    """``layer(x)``, which is x itself for a plain ``torch.nn.Dropout`` outside training."""
    return x if is_identity(layer) else layer(x)


def is_identity(dropout: Any) -> bool:
    return is_stock(dropout, DROPOUT) and not dropout.training


class Fp8Columns(NamedTuple):
    """The last columns of an FP8 layer's input, quantized in blocks, beside columns not written yet.

    Attributes:
        values, scale: of all columns.
        width: the number of columns not written yet.
        weight: the layer's.
        dtype: of the tensor that it stands for.
    """

    values: Tensor
    scale: Tensor
    width: int
    weight: Fp8Weight
    dtype: torch.dtype

    def first(self) -> tuple[Tensor, Tensor]:
        """Values and scale of the columns not written yet."""
        return self.values[..., : self.width], self.scale[..., : self.width // FP8_BLOCK]

    def last(self) -> tuple[Tensor, Tensor]:
        return self.values[..., self.width :], self.scale[..., self.width // FP8_BLOCK :]


def fp8_columns(layer: Any, x: Any, count: int) -> Fp8Columns | None:
    """Columns for an input of the layer with x's rows. The last ``count`` are to be written now. None
    if it is no plain FP8 layer or the others are no whole blocks."""
    weight = fp8_weight(layer)
    if weight is None or not may_write() or not are_stock_linears(layer):
        return None
    features = weight.values.shape[1]
    width = features - count
    if width <= 0 or width % FP8_BLOCK or not fp8_fits(layer, weight, x, features):
        return None
    values = weight.values.new_empty((*x.shape[:-1], features))
    scale = weight.scale.new_empty((*x.shape[:-1], -(-features // FP8_BLOCK)))
    return Fp8Columns(values, scale, width, weight, x.dtype)


def linear_of_concat(call: Call, layer: Any, first: Tensor, second: Any) -> Any:
    """``layer(torch.cat([first, second], dim=-1))``, without the concat if it is plain. ``second`` may be
    ``Fp8Columns`` of this layer; then the result may be an ``Fp8Product``."""
    if type(second) is Fp8Columns:
        values, scale = second.first()
        if (
            kernels_take(first)
            and first.shape == values.shape
            and first.dtype is second.dtype
            and not is_differentiated(first)
        ):
            operations.quantize_fp8(first, block_size=FP8_BLOCK, out=(values, scale))
            rows = QuantizedRows(second.values, second.scale, second.dtype, {})
            return Fp8Product(rows, second.weight)
        second = as_tensor(QuantizedRows(*second.last(), dtype=second.dtype, weights={}))
    base: Any = layer
    terms: Any = ()
    if is_adapted(layer) and has_plain_weight(layer):
        found = read_adapters(layer)
        if found is not None and are_operands(found[0][1], first):
            ((base, terms),) = found
    plain = None if is_adapted(base) else plain_weight(base)
    if (
        plain is not None
        and (call.state is not None or may_write())
        and same_dtype_and_unit_stride(first, second, *plain)
        and not is_differentiated(first, second, *plain)
        and first.shape[:-1] == second.shape[:-1]
        and second.is_contiguous()
    ):
        weight, bias = plain
        out = _linear_of_two(first, second, weight, with_lora_bias(bias, terms))
        if terms:
            downs, _, _, scales = zip(*terms)
            down, factor = packed_downs(downs, scales)
            low = _linear_of_two(first, second, down).view(-1, down.shape[0])
            out.view(-1, out.shape[-1]).addmm_(low, packed_up(terms).t(), alpha=factor)
        return out
    return linear(layer, torch.cat([first, second], dim=-1))


def _linear_of_two(first: Tensor, second: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
    sizes = (first.shape[-1], second.shape[-1])
    first_weight, second_weight = weight.split_with_sizes(sizes, 1)
    out = torch.nn.functional.linear(first, first_weight, bias)
    out.view(-1, out.shape[-1]).addmm_(second.view(-1, sizes[1]), second_weight.t())
    return out


def weights_of_products(call: Call, x: Tensor, *layers: Any) -> list[Tensor] | None:
    """The layers' weights, if all are plain and without bias and ``torch.mm`` may write x's products."""
    found = plain_weights(x.dtype, *layers)
    if found is None or not x.is_contiguous() or not (call.state is not None or may_write()):
        return None
    weights = [weight for weight, bias in found if bias is None]
    if len(weights) < len(layers) or is_differentiated(x, *weights):
        return None
    return weights


def swiglu_of_two(
    call: Call,
    x: Tensor,
    activated: Any,
    other: Any,
    activation: Any = torch.nn.functional.silu,
    operation: Any = operations.swiglu,
    is_last: bool = False,
) -> Tensor:
    """``activation(activated(x)) * other(x)`` of two linear layers. Plain ones without bias write to one
    buffer, for the operation that computes the same. ``is_last``: whether the model calls ``activated``
    last."""
    products = weights = None
    if has_plain_weight(activated):  # otherwise ``linears`` reads the adapters
        (activated, other), found = read_active(activated, other)
        if found is None:
            weights = weights_of_products(call, x, activated, other)
        elif x.is_contiguous():
            products = lora_products(x.view(-1, x.shape[-1]), found)
            weights = None if products is None else [product[0] for product in products]
    if weights is None or weights[0].shape != weights[1].shape or not may_write():
        layers = (other, activated) if is_last else (activated, other)
        gate, up = linears(x, *layers)[:: -1 if is_last else 1]
        return activation(gate) * up
    size = weights[0].shape[0]
    both = x.new_empty(*x.shape[:-1], 2 * size)
    rows, outs = x.view(-1, x.shape[-1]), both.view(-1, 2 * size).chunk(2, dim=1)
    if products is not None:
        lora_results(rows, products, out=outs)
    else:
        for weight, out in zip(weights, outs):
            torch.mm(rows, weight.t(), out=out)
    return operation(both, activated="first")


def gated_feed_forward(
    self: Any, call: Call, x: Tensor, *, gate: str, value: str, out: str, activation: Any = ()
) -> Tensor:
    """``out(silu(gate(x)) * value(x))``, by the layers with these names. ``activation``: another one, with
    its operation, as in ``swiglu_of_two``."""
    if not call.takes(x):
        return NotImplemented
    modules = self._modules
    gated = swiglu_of_two(call, x, modules[gate], modules[value], *activation)
    return linear(modules[out], gated)


def linear_per_sample(layer: Any, x: Tensor, is_branch: bool = False) -> Any:
    """``layer(x)``. If x (B, S, D) is a slice of each sample's tokens, a plain layer does not copy it.

    ``is_branch``: whether the result is for a residual sum and may be an ``Fp8Product``.
    """
    if (is_branch or not x.is_contiguous()) and not has_plain_weight(layer):
        weights = fp8_weights_for(x, layer)
        if weights is not None:
            product = Fp8Product(quantized_rows(x), weights[layer])
            return product if is_branch else product.result()
    if x.is_contiguous() or not can_write_linear(layer, x):
        return linear(layer, x.contiguous())
    out = x.new_empty(*x.shape[:2], features_of(layer))
    write_linear(layer, x, out)
    return out


def features_of(layer: Any) -> int:
    """The number of features of a plain layer's result, or of one that peft has wrapped."""
    return int(below_adapters(layer)._parameters["weight"].shape[0])


def can_write_linear(layer: Any, x: Tensor) -> bool:
    """Whether ``write_linear`` takes the layer and x (B, S, D). It computes one product per sample."""
    plain = plain_weight(layer) if can_write_rows(x) else None
    return (
        plain is not None
        and same_dtype_and_unit_stride(x, *plain)
        and not is_differentiated(x, *plain)
    )


def can_write_rows(x: Tensor) -> bool:
    """Whether products of x (B, S, D) are computed one per sample, into slices of tokens."""
    return (
        may_write()  # first, so that torch.compile sees no size compared
        and (x.shape[0] == 1 or x.shape[1] >= _MIN_ROWS_PER_SAMPLE)
        and x.stride(1) == x.shape[2]
    )


def write_linear(layer: Any, x: Tensor, out: Tensor) -> None:
    """Writes ``layer(x)`` of x (B, S, D) to ``out`` (B, S, D'), in which each sample is contiguous, or to
    (1, S, C, H / C, d) with a product for each of the C chunks of heads."""
    product: Any = torch.nn.functional.linear
    weight, bias = plain_weight(layer)  # type: ignore[misc]
    if out.dim() == 3:
        for sample, place in zip(x.unbind(0), out.unbind(0)):
            product(sample, weight, bias, out=place)
        return
    count = out.shape[2]
    weights = weight.chunk(count)
    biases = [None] * count if bias is None else bias.chunk(count)
    for place, *parameters in zip(out[0].flatten(2).unbind(1), weights, biases):
        product(x[0], *parameters, out=place)


def feed_forward(module: Any, x: Any) -> Tensor:
    """A feed-forward of diffusers or FLUX, without module calls of its layers if it is plain. x may be
    quantized.

    Before an FP8 layer the activation is quantized in the pass that computes it.
    """
    return computed(feed_forward_branch(module, x))


def feed_forward_branch(module: Any, x: Any) -> Any:
    """``feed_forward`` for a residual sum, which may be an ``Fp8Product``."""
    if is_stock(module, FEED_FORWARD):
        net = module._modules.get("net")
        if type(net) is nn.ModuleList and 3 <= len(net._modules) <= 4:
            activation, dropout, out, *last = net._modules.values()
            y: Any = None
            has_dropout = not is_identity(dropout)
            if not (has_dropout or has_plain_weight(out)):
                y = _fp8_feed_forward(activation, activation._modules.get("proj"), out, x)
            if y is None:
                y = _run_activation(activation, x)
                y = linear(out, dropout(y) if has_dropout else y)
            if last and not is_identity(last[0]):
                return last[0](computed(y))
            return y
    else:
        layers = _layers_of(module)
        if layers is not None:
            linear_in, activation, out = layers
            y = None
            if not has_plain_weight(out):
                y = _fp8_feed_forward(activation, linear_in, out, x)
            return linear(out, linear_and_gelu(linear_in, activation, x, out)) if y is None else y
    return module(as_tensor(x))


def _layers_of(module: Any) -> Sequence[Any] | None:
    """The parts of a feed-forward of ``FEED_FORWARDS``; None of another module."""
    entry = FEED_FORWARDS.by_class.get(type(module))
    if entry is None or not is_stock(module, entry[0]):
        return None
    return [module._modules[name] for name in entry[1]]


def _run_activation(activation: Any, x: Any) -> Tensor:
    """``activation(x)``, without a module call if it would run this package's GELU. x may be quantized."""
    if type(activation) is LINEAR_GELU.known.cls and not torch.compiler.is_dynamo_compiling():
        stand_in = bare_stand_in(LINEAR_GELU, activation)
        if (
            stand_in is not None
            and same_dtype_and_unit_stride(x)
            and "gelu" not in activation.__dict__
            and replaced_function(stand_in.functions) is None
        ):
            stand_in.count.on_kernels += 1
            proj, approximate = activation._modules["proj"], activation.approximate
            return linear_gelu(proj, activation.gelu, approximate, x)
    return activation(as_tensor(x) if type(x) is QuantizedRows else x)


def feed_forward_reader(name: str, block: Any, x: Tensor) -> dict[Any, Fp8Weight] | None:
    """``streams.Readers`` of the feed-forward ``block.name``: its first layer, if the module is plain."""
    module = block._modules[name]
    net = module._modules.get("net")
    if net is None:
        layer, *_ = _layers_of(module) or (None,)
    else:
        layer = next(iter(net._modules.values()), net)._modules.get("proj")
        if not (is_stock(module, FEED_FORWARD) and type(net) is nn.ModuleList):
            return None
    if layer is None or has_plain_weight(layer):
        return None
    return fp8_weights_for(x, layer)


def fp8_readers(
    part: str, layers: Sequence[str], block: Any, x: Tensor, others: Sequence[str] = ()
) -> dict[Any, Fp8Weight] | None:
    """``streams.Readers`` of ``block.part``: its layers with the names ``layers``, and the block's with the
    names ``others``, if a call of the part runs its stand-in without hooks."""
    module = block._modules.get(part)
    first = None if module is None else module._modules.get(layers[0])
    # torch.compile cannot trace a read of the instance's forward.
    if first is None or has_plain_weight(first) or torch.compiler.is_dynamo_compiling():
        return None
    each = (*map(module._modules.get, layers), *map(block._modules.get, others))
    weights = fp8_weights_for(x, *each)
    if weights is None or getattr(module, "fused_projections", False):
        return None
    stand_in: Any = getattr(module.__dict__.get("forward"), "__self__", None)
    return weights if type(stand_in) is StandIn and bare_stand_in(stand_in.spec, module) else None


def _fp8_feed_forward(activation: Any, proj: Any, out: Any, x: Any) -> Fp8Product | None:
    """``out(activation(proj(x)))``, if ``out`` is an FP8 layer and the others are plain, or None."""
    found, entry = fp8_weight(out), _FP8_ACTIVATIONS.by_class.get(type(activation))
    if found is None or entry is None:
        return None
    known, why_not, halves, operation = entry
    inner = below_adapters(proj)._parameters
    is_quantized = type(x) is QuantizedRows
    known_proj = x.weights.get(proj) if is_quantized else None
    if known_proj is not None:
        features = known_proj.values.shape[0]
    elif "weight" in inner and "bias" in inner:
        features = inner["weight"].shape[0]
    else:
        return None
    # Whoever reads an adapted layer's weight, or quantizes a layer's input, finds that its call is stock.
    unread = [] if is_adapted(out) else [out]
    if known_proj is None:
        unread.append(proj)
    if (
        not (is_quantized or fp8_takes(x))
        or not fp8_fits(out, found, x, features // halves)
        or is_differentiated(*inner.values())
        or not is_stock(activation, known)
        or why_not(activation)
        or not are_stock_linears(*unread)
    ):
        return None
    if known in (LINEAR_GELU.known, GELU):
        weights = x.weights if is_quantized else fp8_weights_for(x, proj)
        if weights and proj in weights:
            rows = x if is_quantized else quantized_rows(x)
            values, scale = fp8_gelu_product(rows, weights[proj], activation.approximate)
            return Fp8Product(QuantizedRows(values, scale, x.dtype, {}), found)
    values, scale = operation(activation, linear(proj, x))
    return Fp8Product(QuantizedRows(values, scale, x.dtype, {}), found)


# --------------------------------------------------------------------------------------------------
# diffusers' ``GELU``, the linear layer with an activation that begins its feed-forward


def linear_gelu(layer: Any, activation: Any, approximate: str, x: Any) -> Tensor:
    """``activation(layer(x))`` for a GELU with this approximation. x may be quantized."""
    if type(layer) is not LINEAR.cls and "base_layer" in layer._modules:
        found = read_adapters(layer)
        if found is not None and not found[0][1]:
            layer = found[0][0]
        else:
            products = lora_products(x, found)
            if products is not None:
                return lora_results(x, products, approximate)[0]
    if (
        isinstance(x, Tensor)
        and approximate == "tanh"
        and x.is_cuda
        and x.dtype in _EPILOGUE_DTYPES
    ):
        plain = plain_weight(layer)
        if (
            plain is not None
            and plain[1] is not None
            and same_dtype_and_unit_stride(x, *plain)
            and x.numel() > 0
            and not is_differentiated(x, *plain)
            and not torch._C._are_functorch_transforms_active()  # it has no rule for torch.vmap
        ):
            # On CUDA the epilogue computes the tanh approximation. (On CPU the function's GELU is exact.)
            weight, bias = plain[0], plain[1]
            rows = x.reshape(-1, x.shape[-1])
            out = torch._addmm_activation(bias, rows, weight.t(), use_gelu=True)
            return out.view(*x.shape[:-1], out.shape[-1])
    x = linear(layer, x)
    return operations.gelu(x, approximate) if same_dtype_and_unit_stride(x) else activation(x)


def linear_and_gelu(layer: Any, activation: Any, x: Any, into: Any) -> Any:
    """``activation(layer(x))``, in one step for a plain ``torch.nn.GELU``. x may be quantized.

    The result may be ``Fp8Columns`` of the layer ``into``, of whose ``linear_of_concat`` it is the second
    part.
    """
    if not is_stock(activation, GELU):
        return activation(linear(layer, x))
    approximate = activation.approximate
    weights = x.weights if type(x) is QuantizedRows else fp8_weights_for(x, layer)
    if weights and layer in weights:
        columns = fp8_columns(into, x, weights[layer].values.shape[0])
        if columns is not None:
            fp8_gelu_product(quantized_rows(x), weights[layer], approximate, columns.last())
            return columns
    return linear_gelu(layer, activation, approximate, x)


def linear_and_swiglu(layer: Any, activation: Any, x: Any, into: Any) -> Any:
    """``first * activation(second)`` of the halves of ``layer(x)``, in one operation for a plain
    ``torch.nn.SiLU``. Parameters and result as those of ``linear_and_gelu``."""
    both = linear(layer, x)
    if not (
        why_not_silu(activation) is None
        and both.shape[-1] % 2 == 0
        and kernels_take(both)
        and not is_differentiated(both)
    ):
        first, second = both.chunk(2, dim=-1)
        return activation(second) * first
    columns = fp8_columns(into, both, both.shape[-1] // 2)
    if columns is None:
        return operations.swiglu(both)
    operations.swiglu_fp8(both, block_size=FP8_BLOCK, out=columns.last())
    return columns


def _gelu_forward(self: Any, call: Call, hidden_states: Tensor) -> Tensor:
    if "gelu" in self.__dict__:
        return call.decline("gelu was replaced")
    if not call.takes(hidden_states):
        return NotImplemented
    return linear_gelu(self._modules["proj"], self.gelu, self.approximate, hidden_states)


_GELU_CLASS = "diffusers.models.activations:GELU"
LINEAR_GELU = PatchSpec(
    _GELU_CLASS,
    _gelu_forward,
    "GELU in the matrix product's epilogue, or gelu",
    functions=(f"{_GELU_CLASS}.gelu", "torch.nn.functional:gelu"),
)
# In modules that are left to torch.compile.
UNFUSED_GELU = replace(LINEAR_GELU, left_to_compiler=True)


# --------------------------------------------------------------------------------------------------
# diffusers' ``GEGLU`` and ``SwiGLU``: one operation after the linear layer
#
# ``ApproximateGELU`` stays because no operation computes it, ``LinearActivation`` because its activation is
# already one launch.


def why_not_silu(activation: Any) -> str | None:
    """Why the kernels cannot replace an activation, or None."""
    if not is_stock(activation, SILU):
        return f"its activation {why_not_stock(activation, SILU)}"
    return "its activation writes in place" if activation.inplace else None


def _why_not_gelu(module: Any) -> str | None:
    return "gelu was replaced" if "gelu" in module.__dict__ else None


def _why_not_swiglu(module: Any) -> str | None:
    return why_not_silu(module._modules.get("activation"))


def _gated_forward(self: Any, call: Call, *args: Any, **kwargs: Any) -> Tensor:
    if len(args) != 1 or kwargs:
        return NotImplemented
    spec = call.stand_in.spec
    x = linear(self._modules["proj"], *args)
    if is_differentiated(x):
        call.is_counted = False
    elif kernels_take(x):
        return getattr(operations, spec.operations)(x)
    else:
        call.fall_back(why_not_taken(x))
    x, gate = x.chunk(2, dim=-1)
    return x * (self.gelu(gate) if spec.operations == "geglu" else self.activation(gate))


def swiglu_spec(path: str) -> PatchSpec:
    """A class like FLUX.2's ``Flux2SwiGLU``: ``silu(first half) * second half``."""
    spec = PatchSpec(path, _swiglu_forward, "swiglu", condition=_why_not_plain_gate)
    operation = lambda _, h: operations.swiglu_fp8(h, activated="first")  # noqa: E731
    _FP8_ACTIVATIONS.add(spec.known, _why_not_plain_gate, 2, operation)
    return spec


def _why_not_plain_gate(module: Any) -> str | None:
    return None if is_stock(module._modules.get("gate_fn"), SILU) else "SiLU was replaced"


def _swiglu_forward(self: Any, call: Call, x: Tensor) -> Tensor:
    if not call.takes(x):
        return NotImplemented
    return NotImplemented if x.shape[-1] % 2 else operations.swiglu(x, activated="first")


_ACTIVATIONS = "diffusers.models.activations"
GEGLU = ExactSpec(
    f"{_ACTIVATIONS}:GEGLU",
    _gated_forward,
    "geglu",
    functions=("torch.nn.functional:gelu", f"{_ACTIVATIONS}:GEGLU.gelu"),
    left_to_compiler=True,
    parameters="self hidden_states args kwargs",
    condition=_why_not_gelu,
)
GATED_ACTIVATIONS = (
    GEGLU,
    ExactSpec(
        f"{_ACTIVATIONS}:SwiGLU",
        _gated_forward,
        "swiglu",
        left_to_compiler=True,
        parameters="self hidden_states",
        condition=_why_not_swiglu,
    ),
)

# The activations of feed-forwards: why the kernels cannot replace one, the features of its input for each of
# its result's, and the operation with a quantized result. ``swiglu_spec`` adds the families'.
_FP8_ACTIVATIONS = KnownClasses(
    (LINEAR_GELU.known, _why_not_gelu, 1, lambda m, h: operations.gelu_fp8(h, m.approximate)),
    (GELU, lambda _: None, 1, lambda m, h: operations.gelu_fp8(h, m.approximate)),
    (GEGLU.known, _why_not_gelu, 2, lambda _, h: operations.geglu_fp8(h)),
    (GATED_ACTIVATIONS[1].known, _why_not_swiglu, 2, lambda _, h: operations.swiglu_fp8(h)),
)
