"""Softmax over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix
from .calls import kernel_call

_softmax = kernel_call("softmax", lambda x: torch.softmax(x, dim=-1))


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension, ``exp(x - max(x)) / sum(exp(x - max(x)))``.

    Args:
        x: ``(..., D)``, T.

    Source: Milakov and Gimelshein, 2018 (online softmax), https://arxiv.org/abs/1805.02867.
    """
    return _softmax(x)


@torch.library.register_fake(add_op_namespace_prefix("softmax"))
def _softmax_fake(x):
    return x.new_empty(x.shape)
