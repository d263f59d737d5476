"""Linear layers and what stands between them: called as the modules they are, but for those that do nothing
but what their classes say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..conditions import is_plain, kernels_take, may_write
from ..differentiation import is_differentiated
from .forward_slot import runs_own_forward
from .injected import Injection
from .snapshot import Look
from .trust import trusted_form

# What the use of a layer's weight stands in for, and that of no dropout.
_LINEAR = ("torch.nn.functional:linear", "torch.nn:Linear.forward")
_DROPOUT = "torch.nn:Dropout.forward"
ORIGINALS = (*_LINEAR, _DROPOUT)
# What the use of a convolution's weight stands in for.
CONV_ORIGINALS = (
    "torch.nn.functional:conv2d",
    *(f"torch.nn:Conv2d.{name}" for name in ("forward", "_conv_forward")),
)
# What a kernel with a SiLU in it stands in for.
SILU_ORIGINALS = ("torch.nn:SiLU.forward", "torch.nn.functional:silu")

Layer = Callable[[Tensor], Tensor]


def is_one(factor: Any) -> bool:
    """Whether a division by it changes nothing."""
    return type(factor) in (float, int) and factor == 1


class PlainLinear:
    """A ``torch.nn.Linear`` by its weight and bias, without the call of a module."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def trusted(self, snapshot: Look) -> PlainLinear:
        return self


class PlainConv2d:
    """A ``torch.nn.Conv2d`` by its weight, bias, and what else the function takes, without the call of a
    module."""

    __slots__ = ("_options", "bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, options: tuple) -> None:
        self.weight = weight
        self.bias = bias
        self._options = options

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.conv2d(x, self.weight, self.bias, *self._options)

    def without_bias(self, x: Tensor) -> Tensor:
        return torch.nn.functional.conv2d(x, self.weight, None, *self._options)


class PlainDropout:
    """A ``torch.nn.Dropout``, without the call of a module but in training."""

    __slots__ = ("module",)

    def __init__(self, module: nn.Dropout) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> Tensor:
        return self.module(x) if self.module.training else x

    def trusted(self, snapshot: Look) -> PlainDropout:
        return self


class Chain:
    """Layers, one after the other."""

    __slots__ = ("layers",)

    def __init__(self, *layers: Layer) -> None:
        self.layers = layers

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def trusted(self, snapshot: Look) -> Chain | None:
        layers = [trusted_form(layer, snapshot) for layer in self.layers]
        return None if any(layer is None for layer in layers) else Chain(*layers)


def product_of_two(layer: Layer, first: Tensor, second: Tensor, is_trusted: bool = False) -> Tensor:
    """``layer`` of both, side by side in the last dimension.

    A plain layer takes them one after the other, the second's product added to the first's, so that
    nothing is copied to stand side by side.
    """
    if (is_trusted and _has_rows(layer)) or (
        isinstance(layer, PlainLinear)
        and may_write()
        and kernels_take(first, second, layer.weight, layer.bias)
        and not is_differentiated(first, second, layer.weight, layer.bias)
        and first.shape[:-1] == second.shape[:-1]
        and second.is_contiguous()
    ):
        known: Any = layer
        sizes = (first.shape[-1], second.shape[-1])
        of_first, of_second = known.weight.split_with_sizes(sizes, 1)
        out = torch.nn.functional.linear(first, of_first, known.bias)
        out.view(-1, out.shape[-1]).addmm_(second.view(-1, sizes[1]), of_second.t())
        return out
    return layer(torch.cat([first, second], dim=-1))


# A product of fewer rows has more to gain from others beside it than from being written in its place.
_ROWS_OF_ITS_OWN = 1024


class Projection:
    """What a linear layer makes of x (B, S, D), by heads: (B, S, H, d), or without a ``head_dim``
    (B, S, H * d); computed where it is asked for."""

    __slots__ = ("_head_dim", "_layer", "_x")

    def __init__(self, layer: Layer, x: Tensor, head_dim: int | None) -> None:
        self._layer = layer
        self._x = x
        self._head_dim = head_dim

    def __call__(self) -> Tensor:
        out = self._layer(self._x)
        return out if self._head_dim is None else out.view(*out.shape[:-1], -1, self._head_dim)

    def fits(self, query: Tensor, is_trusted: bool = False) -> bool:
        """Whether ``write`` can be asked for what stands beside this query."""
        layer: Any = self._layer
        if is_trusted:
            return (
                _are_rows_of_one(self._x)
                and _has_rows(layer)
                and layer.weight.shape[0] == query.shape[2:].numel()
            )
        return (
            _goes_by_sample(layer, self._x)
            and layer.weight.shape[0] == query.shape[2:].numel()
            and kernels_take(query, self._x)
        )

    def write(self, out: Tensor) -> None:
        """To (B, S, H, d) or (B, S, H * d), each sample's without gaps. Only where it ``fits``."""
        x, known = self._x, self._layer
        if x.shape[0] == 1:
            _write(known, x.squeeze(0), out.view(out.shape[1], -1))
        else:
            _write_samples(known, x, out.flatten(2))


def of_slices(layer: Layer, x: Tensor) -> Tensor:
    """``layer`` of x (B, S, D), a part of the tokens of each sample: a plain layer needs no copy of them."""
    if x.is_contiguous():
        return layer(x)
    if isinstance(layer, Chain):
        first, *others = layer.layers
        return Chain(*others)(of_slices(first, x))
    if not _goes_by_sample(layer, x):
        return layer(x.contiguous())
    known: Any = layer
    out = x.new_empty(*x.shape[:2], known.weight.shape[0])
    _write_samples(known, x, out)
    return out


def _goes_by_sample(layer: Layer, x: Tensor) -> bool:
    """Whether each sample of x (B, S, D) may have a matrix product of its own."""
    return (
        isinstance(layer, PlainLinear)
        and may_write()
        and _are_rows_of_one(x)
        and kernels_take(x, layer.weight, layer.bias)
        and not is_differentiated(x, layer.weight, layer.bias)
    )


def _has_rows(layer: Any) -> bool:
    """Whether a plain layer's weight has no gaps within its rows. Where somebody gave it such, the layer is
    called as it is, trusted or not."""
    return layer.weight.stride(-1) == 1


def _are_rows_of_one(x: Tensor) -> bool:
    """Whether each sample of x is a matrix without gaps, and has rows enough or is the only one."""
    return (x.shape[0] == 1 or x.shape[1] >= _ROWS_OF_ITS_OWN) and x.stride(1) == x.shape[2]


def _write_samples(layer: Any, x: Tensor, out: Tensor) -> None:
    for sample, place in zip(x.unbind(0), out.unbind(0)):
        _write(layer, sample, place)


def _write(layer: Any, x: Tensor, out: Tensor) -> None:
    """The layer of x (S, D), to where ``out`` is."""
    linear: Any = torch.nn.functional.linear
    linear(x, layer.weight, layer.bias, out=out)


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


def see_conv2d(owner: nn.Module, name: str, injection: Injection, snapshot: Look) -> Layer:
    """The convolution that is now the attribute ``name`` of a module: a ``PlainConv2d``, or what it is."""
    module = snapshot.see_attribute(owner, name)
    if (
        type(module) is not nn.Conv2d
        or not runs_own_forward(module)
        or not all(injection.originals[path].is_in_use() for path in CONV_ORIGINALS)
        or snapshot.see(module.__dict__, "_conv_forward") is not None
        or snapshot.see_attribute(module, "padding_mode") != "zeros"
    ):
        return module
    weight, bias = (snapshot.see_attribute(module, name) for name in ("weight", "bias"))
    if not (is_plain(weight) and is_plain(bias)):
        return module
    names = ("stride", "padding", "dilation", "groups")
    return PlainConv2d(weight, bias, tuple(snapshot.see_attribute(module, name) for name in names))


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


def is_plain_silu(module: Any, injection: Injection) -> bool:
    """Whether the module does nothing but what ``torch.nn.SiLU`` says."""
    return (
        type(module) is nn.SiLU
        and runs_own_forward(module)
        and all(injection.originals[path].is_in_use() for path in SILU_ORIGINALS)
    )
