"""Embeddings of time steps and of positions, whose frequencies diffusers makes anew in every forward.

The results have the same bits: what is kept is what the model's own operations made, on the same device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import KERNEL_DEVICE_TYPE, is_plain
from ..conditions import tracks_derivatives
from .injected import Injected, Injection, Parts
from .kept import Kept
from .original import Original, find_original
from .part import Part
from .snapshot import Look


@dataclass(frozen=True)
class Embedding(Part):
    """A module that makes an embedding of a tensor.

    Attributes:
        function: the path of the function by which its class does so.
    """

    function: str = ""

    def originals(self) -> dict[str, Original]:
        return {self.function: find_original(self.function)}

    def fill(self, parts: Parts, module: nn.Module, injection: Injection, snapshot: Look) -> None:
        if not injection.originals[self.function].is_in_use():
            parts.reason = f"{self.function.partition(':')[2]} was replaced"


def _is_taken(x: Tensor) -> bool:
    return is_plain(x) and x.device.type == KERNEL_DEVICE_TYPE


def _timesteps_forward(self: Any, injected: Injected, timesteps: Tensor) -> Tensor:
    """Of (B,), float32 (B, channels): sines, then cosines, or the other way round."""
    if (
        tracks_derivatives()
        or injected.parts(self, timesteps, takes=_is_taken) is None
        or timesteps.dim() != 1
        or self.num_channels % 2 != 0
    ):
        return injected.class_forward(self, timesteps)
    key = (self.num_channels, self.downscale_freq_shift)
    (frequencies,) = Kept.of(
        injected, timesteps, key, lambda: _of_channels(*key, device=timesteps.device)
    )
    angles = timesteps[:, None].float() * frequencies
    if self.scale != 1:
        angles = self.scale * angles
    pair = (angles.cos(), angles.sin()) if self.flip_sin_to_cos else (angles.sin(), angles.cos())
    return torch.cat(pair, dim=-1)


def _of_channels(channels: int, shift: float, device: torch.device) -> tuple[Tensor]:
    count = channels // 2
    exponents = torch.arange(count, dtype=torch.float32, device=device)
    return (torch.exp(-math.log(10000) * exponents / (count - shift)),)


def _axes_forward(self: Any, injected: Injected, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Of the positions (S, axes) cosines and sines, each float32 (S, the axes' dimensions)."""
    if (
        tracks_derivatives()
        or injected.parts(self, ids, takes=_is_taken) is None
        or ids.dim() != 2
        or ids.shape[1] != len(self.axes_dim)
    ):
        return injected.class_forward(self, ids)
    key = (self.theta, tuple(self.axes_dim))
    axes, frequencies = Kept.of(injected, ids, key, lambda: _of_axes(*key, device=ids.device))
    # The product is in float64, as the frequencies are.
    angles = ids.float().index_select(1, axes) * frequencies
    return angles.cos().float(), angles.sin().float()


def _of_axes(theta: float, dims: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each element of the tables, the axis and the frequency."""
    axes, frequencies = [], []
    for axis, dim in enumerate(dims):
        exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim
        frequencies.append((theta**exponents).reciprocal().repeat_interleave(2, output_size=dim))
        axes.append(torch.full((dim,), axis, device=device))
    return torch.cat(axes), torch.cat(frequencies)


_KEPT = "frequencies are kept"
_EMBEDDINGS = "diffusers.models.embeddings"
TIMESTEPS = Embedding(
    f"{_EMBEDDINGS}:Timesteps",
    "self timesteps",
    _timesteps_forward,
    _KEPT,
    function=f"{_EMBEDDINGS}:get_timestep_embedding",
)


def axial_positions(path: str) -> Embedding:
    """The part of a class that makes tables of positions on several axes, as FLUX.1's does."""
    function = f"{path.partition(':')[0]}:get_1d_rotary_pos_embed"
    return Embedding(path, "self ids", _axes_forward, _KEPT, function=function)
