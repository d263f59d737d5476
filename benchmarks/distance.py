"""How far one result is from another."""

from __future__ import annotations

import math

import torch


def relative_distance(output: torch.Tensor, reference: torch.Tensor) -> float:
    """L2 norm of the difference over that of the reference; raises where it is not finite."""
    reference = reference.double()
    distance = ((output.double() - reference).norm() / reference.norm()).item()
    if not math.isfinite(distance):
        raise RuntimeError("an output is not finite, or its reference is not or is zero")
    return distance


def psnr(output: torch.Tensor, reference: torch.Tensor) -> float:
    """Peak signal-to-noise ratio in dB of values in [0, 1]; infinite where they are equal."""
    error = (output.double() - reference.double()).square().mean().item()
    return math.inf if error == 0 else -10 * math.log10(error)
