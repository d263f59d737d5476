"""The distance of a result from its reference, and its limits."""

import math

import torch

# The relative L2 error against float64, divided by that of the eager expression in the same dtype.
ACCURACY_CONTRACT = 1.05


def relative_distance(values: torch.Tensor, reference: torch.Tensor) -> float:
    """The norm of the difference over the reference's norm, or the difference's norm if that is 0."""
    reference = reference.detach().double()
    distance = (values.detach().double() - reference).norm()
    norm = reference.norm()
    return (distance / norm if norm else distance).item()


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
