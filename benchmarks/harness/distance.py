"""Distances between results."""

from __future__ import annotations

import math

import torch

from accuracy import relative_distance


def finite_distance(output: torch.Tensor, reference: torch.Tensor) -> float:
    """The relative L2 distance. Raises if it is not finite, or if the reference is zero."""
    distance = relative_distance(output, reference)
    if not math.isfinite(distance) or not reference.any():
        raise RuntimeError("an output or its reference is not finite, or the reference is zero")
    return distance


def psnr(output: torch.Tensor, reference: torch.Tensor) -> float:
    """Peak signal-to-noise ratio in dB of values in [0, 1]; infinite if they are equal."""
    error = (output.double() - reference.double()).square().mean().item()
    return math.inf if error == 0 else -10 * math.log10(error)
