"""diffusers' linear layers with an activation that open its feed-forwards: ``GEGLU``, ``SwiGLU`` and
``LinearActivation``. The linear layer is called as the module it is; what follows it is one operation.

``GELU`` is in ``activations.py``. ``ApproximateGELU`` is left alone, which no operation computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional
from ..conditions import kernels_take, why_not_taken
from ..differentiation import is_differentiated
from .forward_slot import runs_own_forward
from .injected import Injected, Injection, Parts
from .linears import ORIGINALS as LINEAR_ORIGINALS
from .linears import SILU_ORIGINALS, see_linear
from .original import Original, find_class, find_original
from .part import Part
from .snapshot import Look, has_global_hooks
from .trust import trusted_parts

_ACTIVATIONS = "diffusers.models.activations"
_GELU = "torch.nn.functional:gelu"
_GELU_METHOD = f"{_ACTIVATIONS}:GEGLU.gelu"


@dataclass(frozen=True)
class LinearActivation(Part):
    """A class, without its subclasses, with a linear layer ``proj``.

    Attributes:
        functions: the paths of what the operation stands in for.
        operation: its name.
        activation: the name of its ``torch.nn.SiLU``, or None.
    """

    functions: tuple[str, ...] = ()
    operation: str = ""
    activation: str | None = None

    def is_kind_of(self, module: nn.Module) -> bool:
        return type(module) is find_class(self.path)

    def originals(self) -> dict[str, Original]:
        return {path: find_original(path) for path in (*self.functions, *LINEAR_ORIGINALS)}

    def why_not(self, module: nn.Module, injection: Injection) -> str | None:
        """Why something else may follow the linear layer than what the class says."""
        if type(module) is not injection.originals[self.path].owner:
            return f"it is a {type(module).__name__} now"  # parametrized, say
        for path in self.functions:
            if not injection.originals[path].is_in_use():
                return f"{path.partition(':')[2]} was replaced"
        if self.activation is None:
            return "its GELU was replaced" if "gelu" in module.__dict__ else None
        activation: Any = module._modules.get(self.activation)
        if type(activation) is not nn.SiLU:
            return f"its activation is a {type(activation).__name__}"
        if activation.inplace or not runs_own_forward(activation):
            return "its activation has hooks, or another forward than its class's"
        if not torch.compiler.is_compiling() and has_global_hooks():
            return "hooks are registered for all modules"
        return None

    def fill(self, parts: Parts, module: nn.Module, injection: Injection, snapshot: Look) -> None:
        parts.reason = self.why_not(module, injection)
        parts.proj = see_linear(module, "proj", injection, snapshot)

    def trust(self, parts: Parts, module: nn.Module, snapshot: Look) -> Parts | None:
        return trusted_parts(parts, ("proj",), snapshot)


def _forward(self: Any, injected: Injected, *args: Any, **kwargs: Any) -> Tensor:
    part = injected.part
    if len(args) != 1 or kwargs:
        return injected.class_forward(self, *args, **kwargs)
    reason = part.why_not(self, injected.injection)
    if reason is not None:
        injected.leave(reason)
        return injected.class_forward(self, *args)
    x = (injected.parts_if_trusted() or self).proj(*args)
    if is_differentiated(x):
        return _as_in_class(self, part, x)
    if not kernels_take(x):
        injected.leave(why_not_taken(x))
        return _as_in_class(self, part, x)
    injected.count([])
    return getattr(functional, part.operation)(x)


def _as_in_class(self: Any, part: LinearActivation, x: Tensor) -> Tensor:
    if part.operation == "silu":
        return self.activation(x)
    x, gate = x.chunk(2, dim=-1)
    return x * (self.gelu(gate) if part.activation is None else self.activation(gate))


GATED_ACTIVATIONS = (
    LinearActivation(
        f"{_ACTIVATIONS}:GEGLU",
        "self hidden_states args kwargs",
        _forward,
        "geglu",
        functions=(_GELU, _GELU_METHOD),
        operation="geglu",
    ),
    LinearActivation(
        f"{_ACTIVATIONS}:SwiGLU",
        "self hidden_states",
        _forward,
        "swiglu",
        functions=SILU_ORIGINALS,
        operation="swiglu",
        activation="activation",
    ),
    LinearActivation(
        f"{_ACTIVATIONS}:LinearActivation",
        "self hidden_states",
        _forward,
        "silu",
        functions=SILU_ORIGINALS,
        operation="silu",
        activation="activation",
    ),
)
