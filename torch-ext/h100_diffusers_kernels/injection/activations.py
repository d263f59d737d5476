"""diffusers' ``GEGLU`` and ``SwiGLU``, linear layers with an activation that open its feed-forwards. What
follows the linear layer is one operation.

``GELU`` is in ``linears.py``. ``ApproximateGELU`` is left alone: no operation computes it. So is
``LinearActivation``: PyTorch's activation is one launch already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .. import functional
from ..conditions import kernels_take, why_not_taken
from ..differentiation import is_differentiated
from .checks import is_plain, why_not_plain
from .linears import SILU, linear
from .norm_modules import ExactSpec, left_to_class
from .patch import Call, Injection


def why_not_silu(activation: Any) -> str | None:
    """Why the kernels cannot stand in for an activation, or None."""
    if not is_plain(activation, SILU):
        return f"its activation {why_not_plain(activation, SILU)}"
    return "its activation writes in place" if activation.inplace else None


@dataclass(frozen=True, eq=False)
class ActivationSpec(ExactSpec):
    """A class with a linear layer ``proj``.

    ``operations`` is the name of the function that stands in for the activation.
    """

    def why_not(self, module: nn.Module, injection: Injection) -> str | None:
        if self.operations == "swiglu":
            return why_not_silu(module._modules.get("activation"))
        return "gelu was replaced" if "gelu" in module.__dict__ else None


def _forward(self: Any, call: Call, *args: Any, **kwargs: Any) -> Tensor:
    spec = call.stand_in.spec
    reason = spec.why_not(self, call.injection)
    if len(args) != 1 or kwargs or reason is not None:
        return left_to_class(call, reason, self, *args, **kwargs)
    x = linear(self._modules["proj"], *args)
    if is_differentiated(x):
        call.is_counted = False
    elif kernels_take(x):
        return getattr(functional, spec.operations)(x)
    else:
        call.fall_back(why_not_taken(x))
    x, gate = x.chunk(2, dim=-1)
    return x * (self.gelu(gate) if spec.operations == "geglu" else self.activation(gate))


_ACTIVATIONS = "diffusers.models.activations"
_GELU = ("torch.nn.functional:gelu", f"{_ACTIVATIONS}:GEGLU.gelu")
GATED_ACTIVATIONS = (
    ActivationSpec(
        f"{_ACTIVATIONS}:GEGLU",
        "self hidden_states args kwargs",
        _forward,
        "geglu",
        functions=_GELU,
        left_to_compiler=True,
    ),
    ActivationSpec(
        f"{_ACTIVATIONS}:SwiGLU", "self hidden_states", _forward, "swiglu", left_to_compiler=True
    ),
)
