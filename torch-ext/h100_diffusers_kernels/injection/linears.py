"""Linear layers and what stands between them: called as the modules they are, but for those that do nothing
but what their classes say."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..conditions import is_plain, kernels_take
from ..differentiation import is_differentiated
from .forward_slot import runs_own_forward
from .injected import Injection
from .snapshot import Look

# What the use of a layer's weight stands in for, and that of no dropout.
_LINEAR = ("torch.nn.functional:linear", "torch.nn:Linear.forward")
_DROPOUT = "torch.nn:Dropout.forward"
ORIGINALS = (*_LINEAR, _DROPOUT)

Layer = Callable[[Tensor], Tensor]


class PlainLinear:
    """A ``torch.nn.Linear`` by its weight and bias, without the call of a module."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


class PlainDropout:
    """A ``torch.nn.Dropout``, without the call of a module but in training."""

    __slots__ = ("module",)

    def __init__(self, module: nn.Dropout) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> Tensor:
        return self.module(x) if self.module.training else x


class Chain:
    """Layers, one after the other."""

    __slots__ = ("layers",)

    def __init__(self, *layers: Layer) -> None:
        self.layers = layers

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def product_of_two(layer: Layer, first: Tensor, second: Tensor) -> Tensor:
    """``layer`` of both, side by side in the last dimension.

    A plain layer takes them one after the other, the second's product added to the first's, so that
    nothing is copied to stand side by side.
    """
    if (
        isinstance(layer, PlainLinear)
        and not torch.compiler.is_compiling()
        and kernels_take(first, second, layer.weight, layer.bias)
        and not is_differentiated(first, second, layer.weight, layer.bias)
        and first.shape[:-1] == second.shape[:-1]
        and second.is_contiguous()
    ):
        size = first.shape[-1]
        weight = layer.weight
        out = torch.nn.functional.linear(first, weight[:, :size], layer.bias)
        rows = out.view(-1, out.shape[-1])
        rows.addmm_(second.view(-1, second.shape[-1]), weight[:, size:].t())
        return out
    return layer(torch.cat([first, second], dim=-1))


def see_linear(owner: nn.Module, name: str, injection: Injection, snapshot: Look) -> Layer:
    """The linear layer that is now the attribute ``name`` of a module: a ``PlainLinear``, or the layer.

    LoRA and quantization put another layer or another kind of weight there, offloading a hook.
    """
    module = snapshot.see_attribute(owner, name)
    if type(module) is not nn.Linear or not runs_own_forward(module):
        return module
    weight = snapshot.see_attribute(module, "weight")
    bias = snapshot.see_attribute(module, "bias")
    is_known = all(injection.originals[path].is_in_use() for path in _LINEAR)
    if not (is_known and is_plain(weight) and is_plain(bias)):
        return module
    return PlainLinear(weight, bias)


def see_dropout(owner: nn.Module, name: str, injection: Injection, snapshot: Look) -> Layer:
    """The dropout that is now the attribute ``name`` of a module: a ``PlainDropout``, or what it is."""
    module = snapshot.see_attribute(owner, name)
    if (
        type(module) is not nn.Dropout
        or not runs_own_forward(module)
        or not injection.originals[_DROPOUT].is_in_use()
    ):
        return module
    return PlainDropout(module)
