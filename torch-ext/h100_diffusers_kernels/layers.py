"""Layers for ``kernels.kernelize``, which binds their ``forward`` to instances of the classes they fit.

Layers have no state: weights, settings, state_dict and hooks stay those of the instance. The class's own
forward runs for inputs that the operation does not support (mixed dtypes, float64, autocast, a norm over
several dimensions, strided last dimensions, sharded or quantized parameters, another device), and for
subclasses with their own forward that were not registered. Results are at least as accurate as the class's,
which rounds more often. In training the kernels compute the forward.

    >>> repo = "org/h100-diffusers-kernels"
    >>> kernels.replace_kernel_forward_from_hub(diffusers.models.normalization.RMSNorm, "RMSNorm")
    >>> layer = kernels.LayerRepository(
    ...     repo, layer_name="RMSNorm", version=0, trust_remote_code=[repo]
    ... )
    >>> with kernels.use_kernel_mapping({"RMSNorm": {"cuda": layer}}):
    ...     model = kernels.kernelize(model, mode=kernels.Mode.INFERENCE)
"""

from __future__ import annotations

from typing import Callable, Optional

from torch import Tensor, nn

from . import operations
from .operations.conditions import kernels_take

__all__ = ["GEGLU", "GELU", "LayerNorm", "RMSNorm", "SwiGLU"]


def _is_designated(cls: type) -> bool:
    """Whether the layer was registered for the class that defines the instance's forward.

    ``kernelize`` also binds subclasses, whose own forward may compute something different.
    """
    if not hasattr(cls, "kernel_layer_name"):
        return True
    for base in cls.__mro__:
        if "kernel_layer_name" in vars(base):
            return True
        if "forward" in vars(base):
            return False
    return True


def _kernels_normalize(layer: nn.Module, x: Tensor, *parameters: Optional[Tensor]) -> bool:
    """Whether the kernels support the layer's norm, which must be over x's last dimension."""
    return (
        _is_designated(type(layer))
        # diffusers' RMSNorm has no normalized_shape: it always normalizes the last dimension.
        and tuple(getattr(layer, "normalized_shape", x.shape[-1:])) == tuple(x.shape[-1:])
        and kernels_take(x, *parameters)
        and all(p is None or p.shape == x.shape[-1:] for p in parameters)
    )


class RMSNorm(nn.Module):
    """Root mean square norm by the operation ``rms_norm``, plus the bias if the instance has one.

    Fits ``diffusers.models.normalization.RMSNorm``, with or without weight and bias, and
    ``torch.nn.RMSNorm``.
    """

    weight: Optional[Tensor]
    eps: Optional[float]

    can_torch_compile = has_backward = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        bias = None if weight is None else getattr(self, "bias", None)
        if self.eps is None or not _kernels_normalize(self, hidden_states, weight, bias):
            return type(self).forward(self, hidden_states)
        out = operations.rms_norm(hidden_states, weight, self.eps)
        return out if bias is None else out + bias


class LayerNorm(nn.Module):
    """Layer norm by the operation ``layer_norm``.

    Fits ``torch.nn.LayerNorm`` (``diffusers.models.normalization.LayerNorm`` is the same class) and
    ``diffusers.models.normalization.FP32LayerNorm``, which computes in float32 like the operation.
    """

    weight: Optional[Tensor]
    bias: Optional[Tensor]
    eps: float

    can_torch_compile = has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        if not _kernels_normalize(self, input, self.weight, self.bias):
            return type(self).forward(self, input)
        return operations.layer_norm(input, self.weight, self.bias, self.eps)


class GELU(nn.Module):
    """A linear layer, then the operation ``gelu``.

    Fits ``diffusers.models.activations.GELU``, which unlike ``torch.nn.GELU`` has a ``proj``.
    """

    proj: nn.Module
    approximate: str
    gelu: Callable[[Tensor], Tensor]

    can_torch_compile = has_backward = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not _is_designated(type(self)):
            return type(self).forward(self, hidden_states)
        hidden_states = self.proj(hidden_states)
        if not kernels_take(hidden_states):
            return self.gelu(hidden_states)
        return operations.gelu(hidden_states, self.approximate)


class GEGLU(nn.Module):
    """A linear layer, then the operation ``geglu``: the first half times GELU of the second.

    Fits ``diffusers.models.activations.GEGLU``.
    """

    proj: nn.Module
    gelu: Callable[[Tensor], Tensor]

    can_torch_compile = has_backward = True

    def forward(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
        if args or kwargs or not _is_designated(type(self)):
            # Further arguments are deprecated: diffusers' code warns.
            return type(self).forward(self, hidden_states, *args, **kwargs)
        hidden_states = self.proj(hidden_states)
        if not kernels_take(hidden_states):
            hidden_states, gate = hidden_states.chunk(2, dim=-1)
            return hidden_states * self.gelu(gate)
        return operations.geglu(hidden_states)


class SwiGLU(nn.Module):
    """A linear layer, then the operation ``swiglu``: the first half times SiLU of the second.

    Fits ``diffusers.models.activations.SwiGLU``.
    """

    proj: nn.Module
    activation: nn.Module

    can_torch_compile = has_backward = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not _is_designated(type(self)):
            return type(self).forward(self, hidden_states)
        hidden_states = self.proj(hidden_states)
        if not kernels_take(hidden_states):
            hidden_states, gate = hidden_states.chunk(2, dim=-1)
            return hidden_states * self.activation(gate)
        return operations.swiglu(hidden_states)
