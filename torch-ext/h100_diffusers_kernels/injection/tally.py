"""How often a replaced module ran on the kernels, and how often, and why, on the model's own code."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("h100_diffusers_kernels")

# An environment variable that, set to anything but 0, makes a fall-back an error.
STRICT = "H100_DIFFUSERS_KERNELS_STRICT"


class Tally:
    """The calls of one replaced module.

    Attributes:
        name: the module's qualified name in its model.
        module: the name of its class.
        on_kernels: how many calls ran on the kernels, at least in part.
        fell_back: how many calls, or parts of them, the model's own code computed, by reason.
    """

    def __init__(self, name: str, module: str, reported: tuple[str, ...] = ()) -> None:
        self.name = name
        self.module = module
        self._reported = reported  # reasons that the injection's report has given
        self.on_kernels = 0
        self.fell_back: dict[str, int] = {}

    def fresh(self) -> Tally:
        """One of the same module in which nothing is counted yet."""
        return Tally(self.name, self.module, self._reported)

    def fall_back(self, reason: str) -> None:
        """Counts a call, or a part of one, that the model's own code is about to compute.

        The first for each reason is logged, unless the injection has reported it.

        Raises:
            RuntimeError: if the environment says that there must be none.
        """
        sentence = (
            f"{self.name or 'the model'} ({self.module}) runs on the model's own code: {reason}"
        )
        if os.environ.get(STRICT, "0") not in ("", "0"):
            raise RuntimeError(f"{sentence} ({STRICT} makes this an error)")
        count = self.fell_back.get(reason, 0)
        self.fell_back[reason] = count + 1
        if count == 0 and reason not in self._reported:
            logger.warning("%s", sentence)

    def __repr__(self) -> str:
        reasons = "".join(f", {count} not: {reason}" for reason, count in self.fell_back.items())
        return f"{self.name} ({self.module}): {self.on_kernels} calls on kernels{reasons}"
