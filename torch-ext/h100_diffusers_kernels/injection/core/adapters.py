"""Adapters of peft on linear layers.

peft puts a wrapper around a layer, which calls the layer and adds to its result. A wrapper at rest (merged,
disabled, of scale 0 or without active adapters) computes what its layer computes. The kernels compute plain
LoRA,

    layer(x) + sum of scale * up(down(x))

with the ``lora_A`` and ``lora_B`` of each active adapter as down and up. peft computes everything else: DoRA
and other variants, dropout in training, weights of another dtype, layers that are not linear.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import operations
from ...operations.calls import MAX_UPS
from ...operations.conditions import (
    PLAIN_TYPES,
    an,
    is_differentiated,
    kernels_take,
    why_not_taken,
)
from ...operations.linear import MAX_DOWNS
from . import checks
from .checks import KnownClass, class_name, is_stock, runs_class_forward

LINEAR = KnownClass("torch.nn:Linear", "torch.nn.functional:linear")
_LORA = KnownClass("peft.tuners.lora.layer:Linear")
_MAX_COLUMNS = 1024  # of ``lora_down``
RANK_STEP = 8  # ranks of operands are multiples, because the kernels load 16 bytes at a time
_UNMERGES = "has merged weights that this call takes off again"


class Lora(NamedTuple):
    """The term of one adapter: ``scale * (x @ down.T @ up.T + bias)``. The scale is a number, or a tensor
    that a hot-swap writes to."""

    down: Tensor
    up: Tensor
    bias: Tensor | None
    scale: Any


def is_adapted(layer: Any) -> bool:
    return "base_layer" in layer._modules


def read_adapters(*layers: Any) -> list[tuple[Any, tuple[Lora, ...]]] | None:
    """The linear layer below the adapters of each layer, and their terms. None if a layer's call runs other
    code than PyTorch's linear layer and plain LoRA."""
    found: list[tuple[Any, tuple[Lora, ...]]] = []
    linears: list[Any] = []
    is_traced = torch.compiler.is_dynamo_compiling()
    for layer in layers:
        if type(layer) is LINEAR.cls:
            found.append((layer, ()))
            linears.append(layer)
            continue
        if layer is None or "base_layer" not in layer._modules:
            return None
        terms = _read(layer, linears, is_traced)
        if type(terms) is not tuple:
            return None
        base = layer._modules["base_layer"]
        found.append((base, terms))
        linears.append(base)
    return found if is_stock(linears[0], LINEAR, *linears[1:]) else None


def read_active(*layers: Any) -> tuple[Sequence[Any], Any]:
    """The layers, or those below their adapters if all adapters are at rest; and what ``read_adapters`` finds
    if one is not."""
    if not any(map(is_adapted, layers)):
        return layers, None
    found = read_adapters(*layers)
    bases = []
    for base, terms in () if found is None else found:
        if not terms:
            bases.append(base)
    return (bases, None) if len(bases) == len(layers) else (layers, found)


def without_adapters_at_rest(layer: Any) -> Any:
    """The layer, or the one below its adapters if these are at rest."""
    if type(layer) is LINEAR.cls or layer is None or "base_layer" not in layer._modules:
        return layer
    terms = _read(layer, [], torch.compiler.is_dynamo_compiling())
    return layer._modules["base_layer"] if terms == () else layer


def below_adapters(layer: Any) -> Any:
    """The layer below all adapters, whatever these compute."""
    while "base_layer" in layer._modules:
        layer = layer._modules["base_layer"]
    return layer


def _read(layer: Any, linears: list[Any], is_traced: bool = False) -> tuple[Lora, ...] | str:
    """The terms of a wrapper of peft, none of which is 0, or why peft has to compute its result, as a clause.
    Adds the terms' linear layers to ``linears``, to be checked."""
    cls, state = type(layer), layer.__dict__
    if (  # ``has_hooks`` and ``runs_class_forward``, inlined: blocks ask this of each of their layers
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or ("_compiled_call_impl" in state and state["_compiled_call_impl"] is not None)
        or ("forward" in state and not runs_class_forward(layer))
        or cls.__call__ is not nn.Module.__call__
    ):
        return "has hooks or another forward than its class's"
    is_plain = cls.forward is _LORA.own_forward
    if not is_plain:
        if not cls.forward.__module__.startswith("peft.") or "merged_adapters" not in state:
            return f"is {an(class_name(layer))}"
        if _LORA.cls is None:
            checks.look_up_libraries()  # peft may be loaded after the injection
            is_plain = cls.forward is _LORA.own_forward
    if state["_disable_adapters"]:
        return _UNMERGES if state["merged_adapters"] else ()
    if state["merged_adapters"]:
        return ()
    names = state["_active_adapter"]
    if type(names) is str:
        names = (names,)
    # Before peft 0.16 there are no variants, and DoRA is a flag.
    if not is_plain or "lora_variant" not in state:
        is_at_rest = not layer._get_available_adapters().intersection(names)
        return () if is_at_rest else f"is {an(class_name(layer))}"
    modules, terms = state["_modules"], []
    downs, ups = modules["lora_A"]._modules, modules["lora_B"]._modules
    for name in names:
        if name not in downs:
            continue
        if is_traced:  # torch.compile fuses peft's code, and would specialize on the scales
            return "is traced"
        scale = state["scaling"][name]
        if type(scale) is not float and not isinstance(scale, Tensor):
            scale = float(scale)
        if name in state["lora_variant"]:
            return f"has {an(class_name(state['lora_variant'][name]))}"
        dropout = modules["lora_dropout"]._modules[name]
        if type(dropout) is not nn.Identity and (
            type(dropout) is not nn.Dropout or dropout.training
        ):
            return "has dropout in training"
        down, up = downs[name], ups[name]
        of_down, of_up = down._parameters, up._parameters
        first, second = of_down.get("weight"), of_up.get("weight")
        if type(first) not in PLAIN_TYPES or type(second) not in PLAIN_TYPES:
            return "has sharded or quantized weights"
        if of_down.get("bias") is not None:
            return "has a bias in lora_A"
        # In training the gradients of an adapter of scale 0 are 0, and not missing.
        is_zero = type(scale) is float and scale == 0
        if is_zero and not (torch.is_grad_enabled() and first.requires_grad):
            continue
        linears.append(down)
        linears.append(up)
        # Without the call of the class's own ``__new__``.
        terms.append(tuple.__new__(Lora, (first, second, of_up.get("bias"), scale)))
    return tuple(terms)


def why_by_peft(layer: Any, x: Tensor) -> str | None:
    """Why peft computes a wrapper's result, as a clause; None if that is no fall-back."""
    tensors = [tensor for tensor in layer.parameters() if tensor is not None]
    terms = _read(layer, [])
    if is_differentiated(x, *tensors) or terms is _UNMERGES:
        return None
    if isinstance(terms, str):
        return f"peft computes a layer that {terms}"
    weights = [tensor for term in terms for tensor in term[:2]]
    if not kernels_take(x, *weights):
        return f"peft computes a layer: {why_not_taken(x, *weights)}"
    return "peft computes a layer that has other weights or hooks below the adapter"


def are_operands(terms: tuple[Lora, ...], x: Any) -> bool:
    """Whether the kernels add the terms to a layer's result for x, or for rows with its dtype."""
    dtype, tracks_grad = x.dtype, torch.is_grad_enabled()
    for down, up, bias, _ in terms:
        for tensor in (down, up) if bias is None else (down, up, bias):
            if (
                tensor.dtype is not dtype
                or tensor.data_ptr() % 16  # files mapped into memory have any alignment
                or not tensor.is_contiguous()
                or (tracks_grad and tensor.requires_grad)
            ):
                return False
    return True


def describe_adapters(model: nn.Module) -> list[str]:
    """How the active adapters of a model run now: a line for each way."""
    layers: collections.Counter[tuple[str, str]] = collections.Counter()
    for module in model.modules():
        active = module.__dict__.get("_active_adapter")
        if (
            active is not None
            and is_adapted(module)
            and isinstance(below_adapters(module), nn.Linear)
        ):
            terms = _read(module, [])
            way = f"by peft: each {terms}" if isinstance(terms, str) else "on the kernels"
            way = way if terms else "at rest"
            layers[active if isinstance(active, str) else ", ".join(active), way] += 1
    return [f"adapters {names}: {n} layers {way}" for (names, way), n in layers.items()]


def packed_downs(downs: Sequence[Tensor], scales: Sequence[Any]) -> tuple[Tensor, float]:
    """The downs of terms as one matrix, and the scale of its product. The rows of each are filled up to a
    multiple of 8 with zeros. Made anew in each call, because weights may change unnoticed, as in a
    hot-swap."""
    scale = scales[0]
    is_shared = type(scale) is float and all(type(s) is float and s == scale for s in scales)
    parts = []
    for down, own in zip(downs, scales):
        parts.append(down if is_shared else down * own)
        missing = -down.shape[0] % RANK_STEP
        if missing:
            parts.append(down.new_zeros(missing, down.shape[1]))
    return torch.cat(parts) if len(parts) > 1 else parts[0], scale if is_shared else 1.0


def low_rank_operands(
    x: Tensor, x_scale: Tensor | None, groups: Sequence[tuple[Lora, ...]], way: str = "kernels"
) -> tuple[Sequence[Tensor], list[Any]]:
    """The first product of the terms of each layer, and its ups: a matrix (N, R), or a list of them. Ranks
    are filled up as in ``packed_downs``. ``way``: "kernels" if they compute both products, "lora_down" if it
    computes the first ones, or "PyTorch"."""
    downs: list[Tensor] = []
    scales: list[Any] = []
    ranks: list[int] = []
    ups: list[Any] = []
    for terms in groups:
        rank, is_ready = 0, len(terms) == 1 or (way == "kernels" and len(terms) <= MAX_UPS)
        for down, up, _, scale in terms:
            downs.append(down)
            scales.append(scale)
            own = up.shape[1]
            missing = -own % RANK_STEP
            rank += own + missing
            is_ready = is_ready and not missing
        ranks.append(rank)
        if not is_ready:
            ups.append(packed_up(terms))
        else:
            ups.append(terms[0][1] if len(terms) == 1 else [term[1] for term in terms])
    if way == "PyTorch":
        low = _scaled_linear(x, *packed_downs(downs, scales))
    elif len(downs) <= MAX_DOWNS and sum(ranks) <= _MAX_COLUMNS and {*map(type, scales)} == {float}:
        low = operations.lora_down(x, downs, scales, x_scale)
    else:
        down, scale = packed_downs(downs, scales)
        parts = down.split(_MAX_COLUMNS)
        lows = [operations.lora_down(x, [part], [scale], x_scale) for part in parts]
        low = lows[0] if len(lows) == 1 else torch.cat(lows, -1)
    return (low,) if len(ranks) == 1 else low.split_with_sizes(ranks, -1), ups


def _scaled_linear(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """``scale * linear(x, weight)``, rounded once."""
    if scale == 1:
        return torch.nn.functional.linear(x, weight)
    rows = x.reshape(-1, x.shape[-1])
    product = torch.addmm(rows.new_empty(1), rows, weight.t(), beta=0, alpha=scale)
    return product.view(*x.shape[:-1], weight.shape[0])


def packed_up(terms: tuple[Lora, ...]) -> Tensor:
    """The ups of a layer's terms as one matrix (N, R), each filled up as in ``packed_downs``."""
    ups = []
    for _, up, _, _ in terms:
        missing = -up.shape[1] % RANK_STEP
        ups.append(torch.nn.functional.pad(up, (0, missing)) if missing else up)
    return ups[0] if len(ups) == 1 else torch.cat(ups, 1)


def with_lora_bias(bias: Tensor | None, terms: tuple[Lora, ...]) -> Tensor | None:
    """A layer's bias plus those of its terms."""
    for _, _, own, scale in terms:
        if own is not None:
            of_term = own * scale
            bias = of_term if bias is None else bias + of_term
    return bias
