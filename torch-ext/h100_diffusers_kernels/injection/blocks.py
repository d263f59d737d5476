"""Transformer blocks: their norms and modulation, and what the end of one computes for the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable

from torch import Tensor, nn

from .activations import ORIGINALS as GELU_ORIGINALS
from .activations import see_linear_gelu
from .feed_forward import ORIGINALS as FEED_FORWARD_ORIGINALS
from .feed_forward import see_feed_forward
from .injected import Injected, Injection, Parts
from .model_forward import forward_in_progress
from .modulation import ORIGINALS as ADAPTIVE_ORIGINALS
from .modulation import see_adaptive_norm
from .norms import Norm, gated_residual, see_norm
from .original import Original, find_original
from .part import Part
from .snapshot import Look

Rows = tuple[Tensor, ...]


@dataclass(frozen=True)
class Block(Part):
    """A transformer block.

    Attributes:
        norms: the names of its norms.
        adaptive_norms: the names of those that make their modulation themselves.
        feed_forwards: the names of its feed-forwards.
        gelus: the names of linear layers that a GELU follows, and of that.
        inner: where parts are expected that have a forward of their own replaced.
    """

    norms: tuple[str, ...] = ()
    adaptive_norms: tuple[str, ...] = ()
    feed_forwards: tuple[str, ...] = ()
    gelus: dict[str, str] = field(default_factory=dict)
    inner: tuple[str, ...] = ()

    def originals(self) -> dict[str, Original]:
        paths = (*ADAPTIVE_ORIGINALS, *FEED_FORWARD_ORIGINALS, *GELU_ORIGINALS)
        return {path: find_original(path) for path in paths}

    def fill(self, parts: Parts, module: nn.Module, injection: Injection, snapshot: Look) -> None:
        for name in self.norms:
            norm = see_norm(module, name, injection, snapshot)
            setattr(parts, name, norm)
            parts.note(norm.reason)
        for name in self.adaptive_norms:
            adaptive_norm = see_adaptive_norm(module, name, injection, snapshot)
            setattr(parts, name, adaptive_norm)
            parts.note(adaptive_norm.reason)
        for name in self.feed_forwards:
            setattr(parts, name, see_feed_forward(module, name, injection, snapshot))
        for linear, activation in self.gelus.items():
            setattr(parts, linear, see_linear_gelu(module, linear, activation, injection, snapshot))


def table_rows(injected: Injected, block: nn.Module, name: str, temb: Tensor) -> Rows:
    """The rows of a block's table (N, D) plus those of a time embedding (B, 1 or S, N * D).

    Returns:
        N rows, each (B, 1 or S, D).
    """
    forward = forward_in_progress(injected)
    rows = None if forward is None else forward.rows(block, name, temb)
    if rows is not None:
        return rows
    table = getattr(block, name)
    by_row = temb.reshape(temb.size(0), temb.size(1), table.shape[0], -1)
    return (table[None, None].to(temb.device) + by_row).unbind(dim=2)


def begin(
    injected: Injected,
    block: nn.Module,
    norm: Norm,
    hidden_states: Tensor,
    temb: Tensor,
    rows_of: Callable[[Injected, nn.Module, Tensor], Rows],
) -> tuple[Rows, Tensor]:
    """A block's modulation, which begins with shift and scale, and its first norm, modulated by these.

    The block before may have left both.
    """
    forward = forward_in_progress(injected)
    handed = None if forward is None else forward.take_over(block, (hidden_states, temb))
    if handed is not None:
        return handed
    if norm.kind is None:
        # It may do anything: the model calls it before it looks at its modulation.
        normalized = norm.module(hidden_states)
        rows = rows_of(injected, block, temb)
        return rows, normalized * (1 + rows[1]) + rows[0]
    rows = rows_of(injected, block, temb)
    return rows, norm.modulated(hidden_states, scale=rows[1], shift=rows[0])


def finish(
    injected: Injected,
    block: nn.Module,
    norm: str,
    residual: Tensor,
    x: Tensor,
    gate: Tensor,
    temb: Tensor,
    rows_of: Callable[[Injected, nn.Module, Tensor], Rows],
) -> Tensor:
    """A block's result, ``residual + gate * x``, in one pass with the first norm of the next block.

    That is left for it where nothing can come between the two. ``norm`` is the norm's name.
    """
    forward = forward_in_progress(injected)
    following = None if forward is None else forward.following(block)
    if forward is not None and following is not None:
        successor, its_injected, its_parts = following
        next_norm = getattr(its_parts, norm)
        if next_norm.kind is not None and _are_on(residual, successor._parameters.values()):
            rows = rows_of(its_injected, successor, temb)
            hidden_states, normalized = next_norm.residual_modulated(
                residual, x, gate, scale=rows[1], shift=rows[0]
            )
            forward.hand_over(successor, (hidden_states, temb), (rows, normalized))
            return hidden_states
    return gated_residual(residual, x, gate)


def _are_on(x: Tensor, parameters: Any) -> bool:
    """Whether parameters are where ``x`` is: offloaded ones are not, until their module's turn."""
    return all(parameter is None or parameter.device == x.device for parameter in parameters)
