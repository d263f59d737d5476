"""Plans of context parallelism for models for which diffusers has none: which tensors ranks split."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from ..core.patch import INJECTION

logger = logging.getLogger("h100_diffusers_kernels")


def warn_before_injection(model: Any) -> None:
    if INJECTION not in vars(model):
        text = (
            "context_parallel_plan: the own code of %s would be wrong: inject_kernels must follow"
        )
        logger.warning(text, type(model).__name__)


def two_streams(
    model: Any,
    split: Callable,
    gather: Callable,
    names: Sequence[str] = ("hidden_states", "encoder_hidden_states"),
) -> dict[str, Any]:
    """A ``ModelSpec.plan``: image and text, or what else ``names`` says, enter the first block; the last
    linear layer gathers the image."""
    warn_before_injection(model)
    return {
        "transformer_blocks.0": {name: split(1, 3) for name in names},
        "proj_out": gather(gather_dim=1, expected_dims=3),
    }
