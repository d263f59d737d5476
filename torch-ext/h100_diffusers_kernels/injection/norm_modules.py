"""Stub."""

from __future__ import annotations

OUTPUT_NORM: dict = {}
