"""How often a replaced module ran on the kernels, and how often, and why, on the model's own code."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

logger = logging.getLogger("h100_diffusers_kernels")

# An environment variable that, set to anything but 0, makes a fall-back an error.
STRICT = "H100_DIFFUSERS_KERNELS_STRICT"


class Tally:
    """The calls of one replaced module.

    Attributes:
        name: the module's qualified name in its model.
        module: the name of its class.
        on_kernels: how many calls ran on the kernels, in all that the injection's report promised.
        fell_back: how many calls the model's own code computed, as a whole or in part, by reason.
    """

    def __init__(self, name: str, module: str, reported: tuple[str | None, ...] = ()) -> None:
        self.name = name
        self.module = module
        self.on_kernels = 0
        self.fell_back: dict[str, int] = {}
        self._reported = reported  # reasons that the injection's report has given

    def fresh(self) -> Tally:
        """One of the same module in which nothing is counted yet."""
        return Tally(self.name, self.module, self._reported)

    def fall_back(self, reasons: Iterable[str]) -> bool:
        """Counts a call that the model's own code is about to compute, as a whole or in part.

        The first for each reason is logged. Where the injection reported it, it is no fall-back.

        Returns:
            Whether it is one.

        Raises:
            RuntimeError: if the environment says that there must be none.
        """
        reasons = [reason for reason in reasons if reason not in self._reported]
        for reason in reasons:
            sentence = (
                f"{self.name or 'the model'} ({self.module}) runs on the model's own code: {reason}"
            )
            if os.environ.get(STRICT, "0") not in ("", "0"):
                raise RuntimeError(f"{sentence} ({STRICT} makes this an error)")
            count = self.fell_back.get(reason, 0)
            self.fell_back[reason] = count + 1
            if count == 0:
                logger.warning("%s", sentence)
        return bool(reasons)
