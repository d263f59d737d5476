"""How often a module's calls were replayed from a CUDA graph; how often, and why, they ran as they are."""

from __future__ import annotations

import collections
import logging

logger = logging.getLogger("h100_diffusers_kernels")

FIRST_CALL = "the first call of its kind"


class GraphTally:
    """The calls of one module.

    Attributes:
        name: the module's qualified name in its model.
        module: the name of its class.
        captured: how many graphs were captured, each in a call.
        replayed: how many other calls were replays.
        uncaptured: how many calls ran as they are, by reason.
    """

    def __init__(self, name: str, module: str) -> None:
        self.name = name
        self.module = module
        self.captured = 0
        self.replayed = 0
        self.uncaptured: collections.Counter[str] = collections.Counter()

    def fresh(self) -> GraphTally:
        """One of the same module in which nothing is counted yet."""
        return GraphTally(self.name, self.module)

    def count_uncaptured(self, reason: str) -> None:
        """Counts a call. The first for each reason is logged, unless the next one will be captured."""
        self.uncaptured[reason] += 1
        if self.uncaptured[reason] == 1 and reason != FIRST_CALL:
            where = self.name or "the model"
            logger.warning("%s (%s) runs without a CUDA graph: %s", where, self.module, reason)
