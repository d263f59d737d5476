"""diffusers' ``GELU``, the linear layer with an activation that opens its feed-forward."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from .. import functional
from .conditions import class_name, has_known_method, is_plain, kernels_take
from .forward_slot import runs_class_forward
from .replacement import Plan

# In float32 the epilogue's approximation of tanh would show.
_EPILOGUE_DTYPES = (torch.bfloat16, torch.float16)


def plan_activation(plan: Plan, name: str, activation: nn.Module) -> None:
    known = sys.modules["diffusers.models.activations"].GELU
    if has_known_method(type(activation), known, "forward", "self hidden_states"):
        plan.replace_forward(
            name, activation, gelu_forward, "GELU as its matrix product's epilogue, else gelu"
        )
    else:
        plan.leave(name, activation, f"a {class_name(activation)}, not diffusers' GELU")


def gelu_forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
    """``GELU.forward``: a linear layer, then GELU."""
    proj = self.proj
    if self.approximate == "tanh" and _is_fusable(proj, hidden_states):
        # On CUDA the epilogue is the tanh approximation. (On CPU the function's GELU is exact.)
        out = torch._addmm_activation(
            proj.bias,
            hidden_states.reshape(-1, hidden_states.shape[-1]),
            proj.weight.t(),
            use_gelu=True,
        )
        return out.view(*hidden_states.shape[:-1], out.shape[-1])
    hidden_states = proj(hidden_states)
    if kernels_take(hidden_states):
        return functional.gelu(hidden_states, self.approximate)
    return self.gelu(hidden_states)


def _is_fusable(linear: nn.Module, x: Tensor) -> bool:
    """Whether a layer is nothing but its weight and bias on CUDA, and no gradient is asked for.

    LoRA and quantization put another layer or another kind of weight there, offloading a hook.
    """
    if not (
        x.device.type == "cuda"
        and x.dtype in _EPILOGUE_DTYPES
        and type(linear) is nn.Linear
        and runs_class_forward(linear)
        and linear.bias is not None
        and is_plain(linear.weight)
        and is_plain(linear.bias)
        and kernels_take(x, linear.weight, linear.bias)
        and x.numel() > 0
    ):
        return False
    tensors = (x, linear.weight, linear.bias)
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
