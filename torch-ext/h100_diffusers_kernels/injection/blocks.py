"""Transformer blocks: their norms and modulation, and what the end of one computes for the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, NamedTuple

from torch import Tensor, nn

from .activations import ORIGINALS as GELU_ORIGINALS
from .activations import see_linear_gelu
from .feed_forward import ORIGINALS as FEED_FORWARD_ORIGINALS
from .feed_forward import see_feed_forward
from .injected import Injected, Injection, Parts
from .linears import Layer, see_linear
from .model_forward import forward_in_progress
from .modulation import ORIGINALS as ADAPTIVE_ORIGINALS
from .modulation import Opened, Rows, see_adaptive_norm, see_linear_modulation
from .norms import ORIGINALS as NORM_ORIGINALS
from .norms import Norm, gated_residual, see_norm
from .original import Original, find_original
from .part import Part
from .snapshot import Look
from .trust import called_directly, trusted_parts


@dataclass(frozen=True)
class Block(Part):
    """A transformer block.

    Attributes:
        norms: the names of its norms, of which it may lack some.
        widens: whether the model's own code computes norms and residuals in float32.
        adaptive_norms: the names of those that make their modulation themselves.
        feed_forwards: the names of its feed-forwards.
        gelus: the names of linear layers that a GELU follows, and of that.
        linears: the names of linear layers that the forward calls by itself.
        modulations: the names of ``torch.nn.Sequential(SiLU, Linear)`` that make its modulation.
        methods: the names of other methods of its class that the forward stands in for.
        decide_more: ``decide_more(parts, module, snapshot)`` adds what else there is to know.
        inner: where parts are expected that have a forward of their own replaced.
    """

    norms: tuple[str, ...] = ()
    widens: bool = False
    adaptive_norms: tuple[str, ...] = ()
    feed_forwards: tuple[str, ...] = ()
    gelus: dict[str, str] = field(default_factory=dict)
    linears: tuple[str, ...] = ()
    modulations: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    decide_more: Callable[[Parts, nn.Module, Look], None] | None = None
    inner: tuple[str, ...] = ()

    def originals(self) -> dict[str, Original]:
        paths = (*NORM_ORIGINALS, *ADAPTIVE_ORIGINALS, *FEED_FORWARD_ORIGINALS, *GELU_ORIGINALS)
        paths = (*paths, *(f"{self.path}.{name}" for name in self.methods))
        return {path: find_original(path) for path in paths}

    def fill(self, parts: Parts, module: nn.Module, injection: Injection, snapshot: Look) -> None:
        for name in self.methods:
            if not self.has_own_method(module, name, injection, snapshot):
                parts.reason = f"{name} was replaced"
        for name in self.norms:
            norm = see_norm(module, name, injection, snapshot, self.widens)
            setattr(parts, name, norm)
            if norm.module is not None:
                parts.note(norm.reason)
        for name in self.adaptive_norms:
            adaptive_norm = see_adaptive_norm(module, name, injection, snapshot)
            setattr(parts, name, adaptive_norm)
            parts.note(adaptive_norm.reason)
        for name in self.feed_forwards:
            setattr(parts, name, see_feed_forward(module, name, injection, snapshot))
        for linear, activation in self.gelus.items():
            setattr(parts, linear, see_linear_gelu(module, linear, activation, injection, snapshot))
        for name in self.linears:
            setattr(parts, name, see_linear(module, name, injection, snapshot))
        for name in self.modulations:
            setattr(parts, name, see_linear_modulation(module, name, injection, snapshot))
        for name in self._called:
            setattr(parts, name, None)
        if self.decide_more is not None:
            self.decide_more(parts, module, snapshot)

    @property
    def _called(self) -> list[str]:
        """The names of modules with a stand-in that the forward calls by itself."""
        return [name for name in self.inner if "." not in name]

    def trust(self, parts: Parts, module: nn.Module, snapshot: Look) -> Parts | None:
        names = (
            *(*self.norms, *self.adaptive_norms, *self.feed_forwards, *self.gelus),
            *(*self.linears, *self.modulations),
        )
        result = trusted_parts(parts, names, snapshot)
        if result is not None:
            for name in self._called:
                part = snapshot.see_attribute(module, name)
                if part is not None:
                    setattr(result, name, called_directly(part, snapshot))
        return result


def table_rows(injected: Injected, block: nn.Module, name: str, temb: Tensor) -> Rows:
    """The rows of a block's table, (N, D) or (1, N, D), plus those of a time embedding (B, 1 or S, N * D).

    Returns:
        N rows, each (B, 1 or S, D), of the dtype of the sum.
    """
    forward = forward_in_progress(injected)
    rows = None if forward is None else forward.rows(block, name, temb)
    if rows is not None:
        return rows
    table = getattr(block, name)
    by_row = temb.reshape(temb.size(0), temb.size(1), table.shape[-2], -1)
    return (table.view(1, 1, *table.shape[-2:]).to(temb.device) + by_row).unbind(dim=2)


class End(NamedTuple):
    """Of one stream of tokens: ``residual + gate * x`` is the block's result."""

    residual: Tensor
    x: Tensor
    gate: Any


def feed_forward_end(
    norm: Norm, feed_forward: Layer, x: Tensor, attention_out: Tensor, rows: Rows
) -> End:
    """From a stream's attention to its end: ``x + gate * attention_out``, whose modulated norm goes through
    the feed-forward.

    The rows are shift, scale and gate of attention, of which only the gate is left to use, and those of the
    feed-forward.
    """
    _, _, gate, shift, scale, gate_of_feed_forward = rows
    x, normalized = norm.residual_modulated(x, attention_out, gate, (scale, shift))
    return End(x, feed_forward(normalized), gate_of_feed_forward)


# The openings of a block's streams, of ``(injected, block, parts, *conditions)``.
OpeningsOf = Callable[..., Sequence[Any]]


def begin(
    injected: Injected,
    block: nn.Module,
    parts: Parts,
    openings_of: OpeningsOf,
    hidden_states: tuple[Tensor, ...],
    conditions: tuple[Tensor, ...],
) -> Sequence[Opened]:
    """What each stream of a block begins with, of hidden states and of what modulates them.

    The block before may have left it.
    """
    forward = forward_in_progress(injected)
    if forward is not None:
        handed = forward.take_over(block, (*hidden_states, *conditions))
        if handed is not None:
            return handed
    openings = openings_of(injected, block, parts, *conditions)
    return [opening(x) for opening, x in zip(openings, hidden_states)]


def finish(
    injected: Injected,
    block: nn.Module,
    openings_of: OpeningsOf,
    ends: Sequence[End],
    conditions: tuple[Tensor, ...],
    *,
    widens: bool = False,
    hands_over: bool = True,
    as_given: Callable[[Sequence[Tensor]], tuple[Tensor, ...]] = tuple,
) -> tuple[Tensor, ...]:
    """A block's results, each in one pass with the beginning of its stream in the next block.

    That is left for the next block where nothing can come between the two and both are of one kind.
    ``as_given`` makes of the results what the block returns, and the next one's hidden states are given as.
    """
    forward = forward_in_progress(injected) if hands_over else None
    following = None if forward is None else forward.following(block)
    if forward is not None and following is not None and following[1].part is injected.part:
        successor, its_injected, its_parts = following
        openings = openings_of(its_injected, successor, its_parts, *conditions)
        if its_parts.is_trusted or all(
            o.may_be_ahead_of(end.residual, forward.was_seen(successor))
            for o, end in zip(openings, ends)
        ):
            pairs = [o.after(*end) for o, end in zip(openings, ends)]
            results = as_given([h for h, _ in pairs])
            forward.hand_over(successor, (*results, *conditions), [opened for _, opened in pairs])
            return results
    return as_given([gated_residual(*end, widens) for end in ends])
