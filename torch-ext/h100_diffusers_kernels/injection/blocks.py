"""Transformer blocks: how each stream of tokens begins, and what the end of a block computes for the next.

A stream begins with a norm and its modulation, which is a table plus a time embedding, or a linear layer of
the embedding: diffusers' adaptive layer norms are modules with both the layer and the norm. It ends with a
residual sum. The sum and the beginning of the same stream in the next block are one pass over memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor, nn

from .checks import KnownClass, class_name, has_hooks, has_own_forward, is_plain, why_not_plain
from .linears import SILU, feed_forward, plain_weight
from .norms import (
    Modulation,
    Norm,
    gated_residual,
    modulated_by,
    read_norm,
    residual_modulated,
    residual_modulated_by,
)
from .patch import Call, Injection, PatchSpec, is_bare

Rows = Sequence[Any]


# What a stream begins with: the norm, modulated in one way or in two, and the modulation's rows.
Begun = tuple[tuple[Tensor, ...], Rows]
# The end of one: ``residual + gate * x`` is the block's result.
End = tuple[Tensor, Tensor, Any]


class Prologue(NamedTuple):
    """The beginning of one stream, by the kernels.

    Attributes:
        norm: what its norm computes with.
        owner, name: the norm's module is ``owner.name``.
        modulations: scale and shift of each result of the norm.
        rows: all rows of the modulation, each (B, 1 or S, D).
        upcasts: whether the model's own code computes in float32; see ``norms.read_norm``.
    """

    norm: Norm
    owner: nn.Module
    name: str
    modulations: tuple[Modulation, ...]
    rows: Rows = ()
    upcasts: bool = False

    def begin(self, x: Tensor) -> Begun:
        norm, owner, name, modulations, rows, upcasts = self
        return modulated_by(norm, owner, name, x, modulations, upcasts), rows

    def after(self, end: End) -> tuple[Tensor, Begun]:
        """``h = residual + gate * x``, and what the stream begins with of that."""
        norm, owner, name, modulations, rows, upcasts = self
        h, *normalized = residual_modulated_by(norm, owner, name, *end, modulations, upcasts)
        return h, (tuple(normalized), rows)


class ModulePrologue(NamedTuple):
    """That of a norm that is called as the module it is, before the rows of its modulation are made."""

    module: Any
    rows_of: Callable[[], Rows]
    upcasts: bool

    def begin(self, x: Tensor) -> Begun:
        n = self.module(x.float() if self.upcasts else x)
        rows = self.rows_of()
        n = n * (1 + rows[1]) + rows[0] if rows else n
        return (n.to(x.dtype) if self.upcasts else n,), rows


class AdaptiveModulePrologue(NamedTuple):
    """That of an adaptive norm that is called as the module it is."""

    module: nn.Module
    temb: Tensor
    takes_emb: bool

    def begin(self, x: Tensor) -> Begun:
        """Its results stand where they do among the rows that they are made of."""
        if not self.takes_emb:
            return (self.module(x, self.temb),), ()
        normalized, *results = self.module(x, emb=self.temb)
        rows = [r.unsqueeze(1) if r.dim() == 2 else r for r in results]
        if len(rows) == 6:  # of SD35AdaLayerNormZeroX
            *rows, second, last = rows
            return (normalized, second), (None, None, *rows, None, None, last)
        return (normalized,), (None, None, *rows)


# How each stream of a block begins: ``prologue(call, block, ahead, *conditions)``. The block before asks with
# its hidden states as ``ahead``, else that is None. Then the answer is None where anything is not plain, or
# on another device. Each is asked for when the one before has begun.
Prologues = Sequence[Callable[..., Any]]


def norm_prologue(
    call: Call,
    block: Any,
    name: str,
    ahead: Tensor | None,
    rows_of: Callable[[], Rows],
    upcasts: bool = False,
) -> Any:
    """The beginning of a stream with the norm ``block.name`` and rows of which the first two are shift and
    scale, or no rows; ``ahead`` as in ``Prologues``."""
    norm = read_norm(block._modules.get(name), None, upcasts)
    if isinstance(norm, str):
        if ahead is not None:
            return None
        call.fall_back(f"{name} {norm}")
        return ModulePrologue(getattr(block, name), rows_of, upcasts)
    weight = norm[1][0]
    if ahead is not None and weight is not None and weight.device != ahead.device:
        return None
    rows = rows_of()
    modulation = (rows[1], rows[0]) if rows else (None, None)
    return Prologue(norm, block, name, (modulation,), rows, upcasts)


def begin(
    call: Call,
    block: nn.Module,
    prologues: Prologues,
    hidden_states: tuple[Tensor, ...],
    conditions: tuple[Any, ...],
) -> Sequence[Begun]:
    """What each stream of a block begins with; the block before may have computed it."""
    handed = take_over(call, block, (*hidden_states, *conditions))
    if handed is not None:
        return handed
    return [
        prologue(call, block, None, *conditions).begin(x)
        for prologue, x in zip(prologues, hidden_states)
    ]


def take_over(call: Call, block: nn.Module, arguments: tuple[Any, ...]) -> Any:
    """What the block before computed for a call with these very arguments, or None."""
    state = call.state
    if state is None:
        return None
    call.is_bare = is_bare(call.stand_in.spec, block)
    if not call.is_bare:
        state.shared.clear()  # hooks may have written to what it was made of
    return state.take_over(block, arguments)


def finish(
    call: Call,
    block: nn.Module,
    prologues: Prologues,
    ends: Sequence[End],
    conditions: tuple[Any, ...],
    *,
    upcasts: bool = False,
    hands_over: bool = True,
    as_given: Callable[[Sequence[Tensor]], tuple[Tensor, ...]] = tuple,
) -> tuple[Tensor, ...]:
    """A block's results, each in one pass with the beginning of its stream in the next block.

    That is left for the next block where nothing can come between the two and both are of one kind.
    ``as_given`` makes of the results what the block returns and the next one is given as hidden states.
    """
    state, successor = call.state, None
    if state is not None and not call.is_bare:
        state.shared.clear()  # hooks may write to what it was made of
    elif state is not None and hands_over:
        successor = state.successor(block, call.stand_in.spec)
    if successor is not None:
        made = [prologue(call, successor, ends[0][0], *conditions) for prologue in prologues]
        if None not in made:
            handed, begun = zip(*map(Prologue.after, made, ends))
            results = as_given(handed)
            state.hand_over(successor, (*results, *conditions), begun)
            return results
    sums = []
    for end in ends:  # a comprehension is a call of a function
        sums.append(gated_residual(*end, upcasts))
    return as_given(sums)


def feed_forward_end(
    call: Call, block: Any, norm: str, ff: str, x: Tensor, attention_out: Tensor, rows: Rows
) -> End:
    """From a stream's attention to its end: ``x + gate * attention_out``, whose modulated norm goes through
    the feed-forward.

    The rows are shift, scale and gate of attention, of which only the gate is left to use, and those of the
    feed-forward.
    """
    _, _, gate, shift, scale, gate_of_feed_forward = rows
    x, normalized = residual_modulated(call, block, norm, x, attention_out, gate, (scale, shift))
    return x, feed_forward(block._modules[ff], normalized), gate_of_feed_forward


# --------------------------------------------------------------------------------------------------
# Modulation


class _Adaptive(NamedTuple):
    """An adaptive layer norm.

    Attributes:
        rows: how many its linear layer makes.
        modulations: the places of scale and shift among them, for each result of the norm.
    """

    known: KnownClass
    rows: int
    modulations: tuple[tuple[int, int], ...]


_PATH = "diffusers.models.normalization:"
_ADAPTIVE = (
    _Adaptive(KnownClass(_PATH + "AdaLayerNormZero"), 6, ((1, 0),)),
    _Adaptive(KnownClass(_PATH + "AdaLayerNormZeroSingle"), 3, ((1, 0),)),
    _Adaptive(KnownClass(_PATH + "AdaLayerNormContinuous"), 2, ((0, 1),)),
    _Adaptive(KnownClass(_PATH + "SD35AdaLayerNormZeroX"), 9, ((1, 0), (7, 6))),
)
_SEQUENTIAL = KnownClass("torch.nn:Sequential")


def _read_adaptive(module: Any) -> tuple[_Adaptive, Norm] | str:
    """What is known of an adaptive norm, or why the kernels cannot stand in for the module, as a clause."""
    cls = type(module)
    for adaptive in _ADAPTIVE:
        if cls is adaptive.known.cls:
            break
    else:
        return f"is a {class_name(module)}"
    if not is_plain(module, adaptive.known):
        return why_not_plain(module, adaptive.known)
    modules = module._modules
    if module.__dict__.get("emb", modules.get("emb")) is not None:
        return "makes its time embedding by itself"
    if not is_plain(modules.get("silu"), SILU):
        return "has another activation than SiLU"
    norm = read_norm(modules.get("norm"))
    return f"has a norm that {norm}" if isinstance(norm, str) else (adaptive, norm)


def adaptive_prologue(
    call: Call,
    block: Any,
    ahead: Tensor | None,
    temb: Tensor,
    *,
    name: str,
    takes_emb: bool = True,
) -> Any:
    """The beginning of a stream with the adaptive norm ``block.name`` and an embedding (B, D).

    ``ahead`` as in ``Prologues``. ``takes_emb``: whether the model gives a module in its place the embedding
    as ``emb``.
    """
    module = block._modules[name]
    found = _read_adaptive(module)
    if isinstance(found, str):
        if ahead is not None:
            return None
        call.fall_back(f"{name} {found}")
        if call.state is not None:
            call.state.shared.clear()  # the module may write to what it was made of
        return AdaptiveModulePrologue(module, temb, takes_emb)
    (_, count, places), norm = found
    modulation = _modulation(call, module._modules["linear"], temb, ahead)
    if modulation is None:
        return None
    rows = modulation.unsqueeze(1).chunk(count, 2)
    (scale, shift), *second = places
    modulations: tuple[Modulation, ...] = ((rows[scale], rows[shift]),)
    if second:
        modulations = (*modulations, (rows[second[0][0]], rows[second[0][1]]))
    return Prologue(norm, module, "norm", modulations, rows)


def _modulation(
    call: Call, layer: Any, temb: Tensor, ahead: Tensor | None, name: str = "silu"
) -> Tensor | None:
    """``layer(silu(temb))``; ``ahead`` as in ``Prologues``. Blocks share the SiLU under ``name``."""
    plain = plain_weight(layer)
    if plain is None:
        if ahead is not None and not _may_be_ahead(layer, ahead):
            return None
        return layer(torch.nn.functional.silu(temb))  # it may write to what it is given
    if ahead is not None and plain[0].device != ahead.device:
        return None
    activated = call.shared(name, temb, torch.nn.functional.silu)
    return torch.nn.functional.linear(activated, *plain)


def _may_be_ahead(layer: Any, x: Tensor) -> bool:
    """Whether a layer may be called before its block: without hooks, as offloading has, and where x is."""
    return all(
        has_own_forward(module)
        and not has_hooks(module)
        and all(p is None or p.device == x.device for p in module._parameters.values())
        for module in layer.modules()
    )


def linear_modulation(
    call: Call, module: Any, temb: Tensor, ahead: Tensor | None, name: str = "silu"
) -> Tensor | None:
    """What a ``torch.nn.Sequential(SiLU, Linear)`` makes of a time embedding; ``ahead`` as in ``Prologues``.
    Blocks share the SiLU under ``name``."""
    if is_plain(module, _SEQUENTIAL) and len(module._modules) == 2:
        activation, layer = module._modules.values()
        if is_plain(activation, SILU):
            return _modulation(call, layer, temb, ahead, name)
    return None if ahead is not None else module(temb)


def table_prologue(
    call: Call,
    block: Any,
    ahead: Tensor | None,
    temb: Tensor,
    by_row: Callable[[Tensor], Tensor],
    upcasts: bool = False,
) -> Any:
    """The beginning of a stream with the norm ``norm1`` and a modulation that is the block's table
    ``scale_shift_table``, (N, D) or (1, N, D), plus a time embedding; ``ahead`` as in ``Prologues``.

    ``by_row`` makes (B, 1 or S, N, D) of the embedding, which the blocks share. Rows are shift and scale, and
    N - 2 more, each (B, 1 or S, D), of the dtype of the sum.
    """
    table = block.scale_shift_table
    if ahead is not None and table.device != ahead.device:
        return None

    def rows_of() -> Rows:
        embedding = call.shared("embedding", temb, by_row)
        return (table.to(embedding.device) + embedding).unbind(dim=2)

    return norm_prologue(call, block, "norm1", ahead, rows_of, upcasts)


# --------------------------------------------------------------------------------------------------
# What is reported


@dataclass(frozen=True, eq=False)
class BlockSpec(PatchSpec):
    """A transformer block.

    Attributes:
        norms: the names of its norms, of which it may lack some.
        adaptive_norms: the names of those that make their modulation themselves.
        upcasts: whether the model's own code computes norms and residuals in float32.
        inner: where modules are expected that have a stand-in of their own.
    """

    norms: tuple[str, ...] = ()
    adaptive_norms: tuple[str, ...] = ()
    upcasts: bool = False
    inner: tuple[str, ...] = ()

    def notes(self, module: nn.Module, injection: Injection) -> list[str]:
        found: list[tuple[str, Any]] = []
        for name in self.norms:
            norm = module._modules.get(name)
            if norm is not None:
                found.append((name, read_norm(norm, upcasts=self.upcasts)))
        found += [(name, _read_adaptive(module._modules.get(name))) for name in self.adaptive_norms]
        return [f"{name} {reason}" for name, reason in found if isinstance(reason, str)]
