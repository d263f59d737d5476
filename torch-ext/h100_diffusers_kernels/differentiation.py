"""Whether a call is differentiated, so that its differentiable PyTorch expression has to run.

The registered operators have no derivatives: called with a tensor that carries one, they would drop it
without a word.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor
from torch.autograd import forward_ad

_are_transforms_active = torch._C._are_functorch_transforms_active


def is_differentiated(*tensors: Optional[Tensor]) -> bool:
    """Whether a derivative of any of the tensors is being taken: in grad mode one requires grad, or one
    carries a forward-mode tangent, also where a transform of ``torch.func`` hides either."""
    # Every call asks this: tensors are looked into only within a dual level or a transform.
    if forward_ad._current_level >= 0 or _are_transforms_active():
        return _is_differentiated_in_transform(tensors)
    if torch.is_grad_enabled():
        for tensor in tensors:  # any() of a generator takes twice as long
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def is_in_dual_level() -> bool:
    """Whether forward-mode derivatives may be among a call's inputs."""
    return forward_ad._current_level >= 0


def _is_differentiated_in_transform(tensors: tuple[Optional[Tensor], ...]) -> bool:
    if torch.compiler.is_compiling():
        # What a transform wraps cannot be looked into while it is traced; the expression is right anyway.
        return True
    return any(tensor is not None and _carries_derivative(tensor) for tensor in tensors)


def _carries_derivative(tensor: Tensor) -> bool:
    functorch = torch._C._functorch
    is_grad_enabled = torch.is_grad_enabled()
    is_forward_enabled = is_in_dual_level() and forward_ad._is_fwd_grad_enabled()
    if not functorch.is_functorch_wrapped_tensor(tensor):
        return (is_grad_enabled and tensor.requires_grad) or (
            is_forward_enabled and forward_ad.unpack_dual(tensor).tangent is not None
        )
    if is_forward_enabled:
        return True  # nor can a wrapped tensor be asked for the tangents of all levels
    while not (is_grad_enabled and tensor.requires_grad):
        if not functorch.is_functorch_wrapped_tensor(tensor):
            return False
        # no_grad stops a derivative of its own level alone.
        is_grad_enabled = is_grad_enabled or functorch.is_gradtrackingtensor(tensor)
        tensor = functorch.get_unwrapped(tensor)
    return True
