"""What a block begins with, for each of its streams of tokens: a norm and what modulates it.

The modulation is a table plus a time embedding, or a linear layer of it: diffusers' adaptive layer norms
are modules that have both the layer and the norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .forward_slot import runs_own_forward
from .injected import Injected, Injection
from .linears import SILU_ORIGINALS, Layer, PlainLinear, is_plain_silu, see_linear
from .model_forward import forward_in_progress
from .norms import Norm, see_norm
from .original import class_name, find_class
from .snapshot import Look

Rows = tuple[Any, ...]


class _Kind(NamedTuple):
    """Of an adaptive layer norm.

    Attributes:
        rows: how many its linear layer makes.
        modulations: the places of scale and shift among them, for each result of the norm.
    """

    rows: int
    modulations: tuple[tuple[int, int], ...]


_PATH = "diffusers.models.normalization:"
_KINDS = {
    _PATH + "AdaLayerNormZero": _Kind(6, ((1, 0),)),
    _PATH + "AdaLayerNormZeroSingle": _Kind(3, ((1, 0),)),
    _PATH + "AdaLayerNormContinuous": _Kind(2, ((0, 1),)),
    _PATH + "SD35AdaLayerNormZeroX": _Kind(9, ((1, 0), (7, 6))),
}
_SEQUENTIAL = "torch.nn:Sequential.forward"
# What the kernels stand in for.
ORIGINALS = (*(f"{path}.forward" for path in _KINDS), *SILU_ORIGINALS, _SEQUENTIAL)


class Opened(NamedTuple):
    """What a stream's beginning gives: the norm, modulated in one way or in two, and the other rows."""

    normalized: tuple[Tensor, ...]
    rows: Rows


class Opening:
    """The beginning of one stream in a block.

    Attributes:
        norm: of the hidden states.
        rows: makes the rows of the modulation, each (B, 1 or S, D), or None where there is none.
        modulations: the places of scale and shift among them.
        source: what the rows are made of besides the time embedding: a linear layer or some parameters.
    """

    __slots__ = ("modulations", "norm", "rows", "source")

    def __init__(
        self,
        norm: Norm,
        rows: Callable[[], Rows],
        source: Layer | tuple[Tensor | None, ...] = (),
        modulations: tuple[tuple[int, int], ...] = ((1, 0),),
    ) -> None:
        self.norm = norm
        self.rows = rows
        self.source = source
        self.modulations = modulations

    def __call__(self, x: Tensor) -> Opened:
        if self.norm.kind is None and not self.norm.widens:
            # It may do anything: the model calls it before it looks at its modulation.
            n = self.norm.module(x)
            rows = self.rows()
            pairs = self._pairs(rows)
            return Opened(
                tuple(n if scale is None else n * (1 + scale) + shift for scale, shift in pairs),
                rows,
            )
        rows = self.rows()
        return Opened(self.norm.modulated(x, *self._pairs(rows)), rows)

    def after(self, residual: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Opened]:
        """``h = residual + gate * x``, and what the block begins with of that."""
        rows = self.rows()
        h, *normalized = self.norm.residual_modulated(residual, x, gate, *self._pairs(rows))
        return h, Opened(tuple(normalized), rows)

    def may_be_ahead_of(self, x: Tensor, is_quiet: bool) -> bool:
        """Whether it may be computed before the block is called, of hidden states that are where ``x`` is:
        offloaded parameters are not, until their module's turn.

        ``is_quiet``: whether nothing unknown runs in the block.
        """
        source = self.source
        parameters: Any = source
        if isinstance(source, PlainLinear):
            parameters = (source.weight, source.bias)
        elif isinstance(source, nn.Module):
            # One of a library's own, such as an adapter's.
            parameters = source.parameters() if is_quiet else None
        return (
            self.norm.kind is not None
            and parameters is not None
            and all(p is None or p.device == x.device for p in parameters)
        )

    def _pairs(self, rows: Rows) -> list[Any]:
        return [(rows[scale], rows[shift]) for scale, shift in self.modulations]


class AdaptiveNorm:
    """An adaptive layer norm.

    Attributes:
        module: what computes it where the kernels do not, for ``reason``.
        norm: the ``Norm`` in it, without the modulation, where the kernels compute it.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.norm: Any = None
        self.reason: str | None = None
        self._linear: Any = None
        self._kind = _Kind(0, ())

    def trusted(self, snapshot: Look) -> AdaptiveNorm | None:
        """The same for calls that are trusted; see ``trust.py``."""
        if self.reason is not None or not isinstance(self._linear, PlainLinear):
            return None
        result = AdaptiveNorm(self.module)
        vars(result).update(vars(self))
        result.norm = self.norm.trusted(snapshot)
        return result

    def opening(self, injected: Injected, temb: Tensor, by_name: bool = True) -> Any:
        """The beginning of hidden states (B, S, D) with an embedding (B, D).

        ``by_name``: whether the model gives a module in its place the embedding as ``emb``.
        """
        if self.reason is not None:
            return _ModuleOpening(self.module, temb, by_name)

        def rows() -> Rows:
            modulation = self._linear(activated(injected, temb)).unsqueeze(1)
            return modulation.chunk(self._kind.rows, dim=2)

        return Opening(self.norm, rows, self._linear, self._kind.modulations)


class _ModuleOpening:
    """That of an adaptive norm that is called as the module it is."""

    def __init__(self, module: nn.Module, temb: Tensor, by_name: bool) -> None:
        self._module = module
        self._temb = temb
        self._by_name = by_name

    def __call__(self, x: Tensor) -> Opened:
        """Its results stand where they do among the rows that they are made of."""
        if not self._by_name:
            return Opened((self._module(x, self._temb),), ())
        normalized, *results = self._module(x, emb=self._temb)
        rows = [r.unsqueeze(1) if r.dim() == 2 else r for r in results]
        if len(rows) == 6:  # of SD35AdaLayerNormZeroX
            *rows, second, last = rows
            return Opened((normalized, second), (None, None, *rows, None, None, last))
        return Opened((normalized,), (None, None, *rows))

    def may_be_ahead_of(self, x: Tensor, is_quiet: bool) -> bool:
        return False


def activated(injected: Injected, temb: Tensor) -> Tensor:
    """``silu(temb)``, made once for blocks that share the embedding; see ``ModelForward.once``."""
    return once(injected, "silu", temb, torch.nn.functional.silu)


def once(injected: Injected, name: str, x: Any, make: Callable[[Any], Any]) -> Any:
    """``make(x)``, kept under ``name`` in the forward of the model, if there is one in progress."""
    forward = forward_in_progress(injected)
    return make(x) if forward is None else forward.once(injected, name, x, make)


def see_adaptive_norm(
    owner: nn.Module, name: str, injection: Injection, snapshot: Look
) -> AdaptiveNorm:
    """The adaptive norm that is now the attribute ``name`` of a module."""
    module = snapshot.see_attribute(owner, name)
    result = AdaptiveNorm(module)
    reason = _fill(result, module, injection, snapshot)
    if reason is not None:
        result.reason = f"{name} {reason}"
    return result


def _fill(result: AdaptiveNorm, module: Any, injection: Injection, snapshot: Look) -> str | None:
    path = next((path for path in _KINDS if type(module) is find_class(path)), None)
    if path is None:
        return f"is a {class_name(module)}"
    if not injection.originals[f"{path}.forward"].is_in_use():
        return f"is a {class_name(module)}, and its class's forward was replaced"
    if not runs_own_forward(module):
        return "has hooks or another forward than its class's"
    if snapshot.see_attribute(module, "emb") is not None:
        return "makes its time embedding by itself"
    silu = snapshot.see_attribute(module, "silu")
    if not is_plain_silu(silu, injection):
        return "has another activation than SiLU"
    result.norm = see_norm(module, "norm", injection, snapshot)
    if result.norm.reason is not None:
        return f"has a {result.norm.reason}"
    result._linear = see_linear(module, "linear", injection, snapshot)
    result._kind = _KINDS[path]
    return None


class LinearModulation:
    """``torch.nn.Sequential(SiLU, Linear)``, which makes a block's modulation of a time embedding."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._linear: Layer | None = None

    @property
    def source(self) -> Layer:
        return self.module if self._linear is None else self._linear

    def __call__(self, injected: Injected, temb: Tensor) -> Tensor:
        if self._linear is None:
            return self.module(temb)
        return self._linear(activated(injected, temb))

    def trusted(self, snapshot: Look) -> LinearModulation | None:
        return self if isinstance(self._linear, PlainLinear) else None


def see_linear_modulation(
    owner: nn.Module, name: str, injection: Injection, snapshot: Look
) -> LinearModulation:
    module = snapshot.see_attribute(owner, name)
    result = LinearModulation(module)
    if (
        type(module) is nn.Sequential
        and len(module) == 2
        and runs_own_forward(module)
        and injection.originals[_SEQUENTIAL].is_in_use()
    ):
        silu = snapshot.see_attribute(module, "0")
        linear = see_linear(module, "1", injection, snapshot)
        if is_plain_silu(silu, injection):
            result._linear = linear
    return result
