"""LTX-2 19B with 4 of 48 blocks as its distilled weights are used: one sample a forward, without guidance."""

from __future__ import annotations

import functools

from benchmarks.models import ltx2
from benchmarks.models.ltx2 import (  # noqa: F401
    PUBLISHED_BLOCKS,
    SIZES,
    SMALL,
    TEXT_TOKENS,
    TINY_SIZES,
    TRANSFORMER,
    parse_size,
    transformer,
)

NAME, TINY_NAME = "LTX-2 distilled, 4 blocks", "tiny LTX-2 distilled"
BATCH = 1
inputs = functools.partial(ltx2.inputs, batch=BATCH)
