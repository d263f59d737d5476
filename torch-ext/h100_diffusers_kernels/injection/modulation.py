"""Adaptive layer norms: modules that make a block's modulation of a time embedding, and norm with it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .forward_slot import runs_own_forward
from .injected import Injection
from .norms import see_norm
from .original import class_name, find_class
from .snapshot import Look

# The rows of the modulation: shift and scale of the norm, then what the block uses.
_ROWS = {
    "diffusers.models.normalization:AdaLayerNormZero": 6,
    "diffusers.models.normalization:AdaLayerNormZeroSingle": 3,
}
# What the kernels stand in for.
ORIGINALS = tuple(f"{path}.forward" for path in _ROWS)


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
        self._rows = 0

    def __call__(self, x: Tensor, temb: Tensor) -> tuple[Tensor, ...]:
        """Of x (B, S, D) and temb (B, D): the modulated norm of x, and the other rows, each (B, 1, D)."""
        if self.reason is not None:
            normalized, *rows = self.module(x, emb=temb)
            return normalized, *(row.unsqueeze(1) for row in rows)
        modulation = self.module.linear(self.module.silu(temb)).unsqueeze(1)
        shift, scale, *rows = modulation.chunk(self._rows, dim=2)
        return self.norm.modulated(x, scale, shift), *rows


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
    path = next((path for path in _ROWS if type(module) is find_class(path)), None)
    if path is None:
        return f"is a {class_name(module)}"
    if not injection.originals[f"{path}.forward"].is_in_use():
        return f"is a {class_name(module)}, and its class's forward was replaced"
    if not runs_own_forward(module):
        return "has hooks or another forward than its class's"
    if snapshot.see_attribute(module, "emb") is not None:
        return "makes its time embedding by itself"
    result.norm = see_norm(module, "norm", injection, snapshot)
    if result.norm.reason is not None:
        return f"has a {result.norm.reason}"
    result._rows = _ROWS[path]
    return None
