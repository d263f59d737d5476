"""Checks of forwards that are replayed from CUDA graphs: counts, and bitwise equality."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

FIRST_CALLS = 3  # the second one captures if the first one changed none of PyTorch's settings


def counts(report: Any) -> dict[str, Any]:
    """Numbers of captured and replayed calls of the injected models, and of other calls by reason."""
    uncaptured: Counter[str] = Counter()
    for entry in report.cuda_graphs:
        uncaptured.update(entry.uncaptured)
    return {
        "captured": sum(entry.captured for entry in report.cuda_graphs),
        "replayed": sum(entry.replayed for entry in report.cuda_graphs),
        "uncaptured": dict(uncaptured),
    }


def why_not_captured(report: Any, forward: Callable[[], object]) -> str | None:
    """The reasons why none of the first calls was captured; None if one was."""
    for _ in range(FIRST_CALLS):
        forward()
    now = counts(report)
    return None if now["captured"] else "; ".join(now["uncaptured"])


def check_replayed(report: Any, calls: int, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """The counts; RuntimeError if fewer than `calls` were replayed since `before`.

    The time of a call without replay would be another mode's.
    """
    now = counts(report)
    replayed = now["replayed"] - (before["replayed"] if before else 0)
    if replayed < calls:
        raise RuntimeError(
            f"{replayed} of {calls} forwards were replayed from CUDA graphs: {now['uncaptured']}"
        )
    return now


def check_bits(captured: torch.Tensor, plain: torch.Tensor) -> None:
    """Raises RuntimeError if the outputs of a captured and a plain forward differ in a bit."""
    if (captured.shape, captured.dtype) != (plain.shape, plain.dtype):
        raise RuntimeError(
            f"a captured forward gave {tuple(captured.shape)} {captured.dtype}, "
            f"a plain one {tuple(plain.shape)} {plain.dtype}"
        )
    one, other = (t.contiguous().view(torch.uint8) for t in (captured, plain))
    if not torch.equal(one, other):
        count = int((captured != plain).sum())
        raise RuntimeError(
            f"{count} of {plain.numel()} values of a captured forward differ from a plain one's"
        )
