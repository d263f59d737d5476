"""Gated activations without a linear layer of their own: silu(first half) * second half."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional
from ..conditions import kernels_take, may_write, of_one_form
from ..differentiation import is_differentiated
from .forward_slot import runs_own_forward
from .injected import Injected, Injection, Parts
from .linears import SILU_ORIGINALS, is_plain_silu
from .original import Original, find_class, find_original
from .part import Part
from .snapshot import Look
from .trust import trusted_parts

_CLASS = "diffusers.models.transformers.transformer_flux2:Flux2SwiGLU"
_FORWARD = f"{_CLASS}.forward"
# What the kernel stands in for.
ORIGINALS = (_FORWARD, *SILU_ORIGINALS)


class Gate:
    """A gated activation, (..., 2 * D) to (..., D).

    Attributes:
        module: what computes it where the kernel does not.
        is_known: whether the kernel may.
    """

    def __init__(self, module: Any, is_known: bool) -> None:
        self.module = module
        self.is_known = is_known

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_known and of_one_form(x) and x.shape[-1] % 2 == 0:
            return functional.swiglu(x, activated="first")
        return self.module(x)

    def trusted(self, snapshot: Look) -> Gate | None:
        return self if self.is_known else None

    def beside(
        self, attention: Callable[[Tensor | None], Tensor], query: Tensor, x: Tensor
    ) -> Tensor:
        """``[attention, gate(x)]``, (B, S, H * d + D), of the query (B, S, H, d) and x (B, S, 2 * D).

        ``attention`` takes where to write to, or None, and returns (B, S, H, d).
        """
        size = query.shape[2:].numel()
        if (
            not may_write()
            or not (self.is_known and x.shape[-1] % 2 == 0 and kernels_take(x, query))
            or is_differentiated(x, query)
        ):
            return torch.cat([attention(None).flatten(2).to(query.dtype), self(x)], dim=-1)
        out = x.new_empty(*x.shape[:2], size + x.shape[-1] // 2)
        place = out[..., :size].view(query.shape)
        result = attention(place)
        if result is not place:
            place.copy_(result)
        functional.swiglu(x, activated="first", out=out[..., size:])
        return out


def _is_known(module: Any, injection: Injection, snapshot: Look) -> bool:
    return is_plain_silu(snapshot.see_attribute(module, "gate_fn"), injection)


def see_gate(owner: nn.Module, name: str, injection: Injection, snapshot: Look) -> Gate:
    """The gated activation that is now the attribute ``name`` of a module."""
    module: Any = snapshot.see_attribute(owner, name)
    is_of_class = type(module) is find_class(_CLASS)
    return Gate(
        module,
        is_of_class
        and runs_own_forward(module)
        and injection.originals[_FORWARD].is_in_use()
        and _is_known(module, injection, snapshot),
    )


class _Swiglu(Part):
    def originals(self) -> dict[str, Original]:
        return {path: find_original(path) for path in ORIGINALS}

    def fill(self, parts: Parts, module: nn.Module, injection: Injection, snapshot: Look) -> None:
        if not _is_known(module, injection, snapshot):
            parts.reason = "SiLU was replaced"
        parts.gate = Gate(module, True)

    def trust(self, parts: Parts, module: nn.Module, snapshot: Look) -> Parts | None:
        return trusted_parts(parts, ("gate",), snapshot)


def _forward(self: nn.Module, injected: Injected, x: Tensor) -> Tensor:
    parts = injected.parts(self, x)
    return injected.class_forward(self, x) if parts is None else parts.gate(x)


SWIGLU = _Swiglu(_CLASS, "self x", _forward, "swiglu")
