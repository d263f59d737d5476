"""The distance of a result from its reference, and its limits."""

import torch

# The relative L2 error against float64, divided by that of the eager expression in the same dtype.
ACCURACY_CONTRACT = 1.05


def relative_distance(values: torch.Tensor, reference: torch.Tensor) -> float:
    """The norm of the difference over the reference's norm, or the difference's norm if that is 0."""
    reference = reference.detach().double()
    distance = (values.detach().double() - reference).norm()
    norm = reference.norm()
    return (distance / norm if norm else distance).item()
