"""Embeddings of time steps and positions. diffusers computes their frequencies in every forward; here they
are cached. diffusers' own operations compute them on the same device, so results are bitwise equal.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...operations.conditions import KERNEL_DEVICE_TYPE, is_plain_tensor, tracks_derivatives
from ..core.cache import cached
from ..core.patch import Call, PatchSpec


def _is_taken(x: Tensor) -> bool:
    return (
        not tracks_derivatives()
        and is_plain_tensor(x)
        and x.device.type == KERNEL_DEVICE_TYPE
        and not torch.is_autocast_enabled(KERNEL_DEVICE_TYPE)
    )


def _timesteps_forward(self: Any, call: Call, timesteps: Tensor) -> Tensor:
    """(B,) to float32 (B, channels): sines, then cosines, or the reverse."""
    if not _is_taken(timesteps) or timesteps.dim() != 1 or self.num_channels % 2 != 0:
        return NotImplemented
    key = (self.num_channels, self.downscale_freq_shift)
    (frequencies,) = cached(call, timesteps, key, lambda: _channels(*key, timesteps.device))
    angles = timesteps[:, None].float() * frequencies
    if self.scale != 1:
        angles = self.scale * angles
    pair = (angles.cos(), angles.sin()) if self.flip_sin_to_cos else (angles.sin(), angles.cos())
    return torch.cat(pair, dim=-1)


def _channels(channels: int, shift: float, device: torch.device) -> tuple[Tensor]:
    count = channels // 2
    exponents = torch.arange(count, dtype=torch.float32, device=device)
    return (torch.exp(-math.log(10000) * exponents / (count - shift)),)


def _axes_forward(self: Any, call: Call, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Positions (S, axes) to cosines and sines, each float32 (S, sum of the axes' dimensions)."""
    if not _is_taken(ids) or ids.dim() != 2 or ids.shape[1] != len(self.axes_dim):
        return NotImplemented
    key = (self.theta, tuple(self.axes_dim))
    axes, frequencies = cached(call, ids, key, lambda: _axes(*key, ids.device))
    # The product is in float64, as the frequencies are.
    angles = ids.float().index_select(1, axes) * frequencies
    return angles.cos().float(), angles.sin().float()


def _axes(theta: float, dims: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The axis and the frequency of each element of the tables."""
    axes, frequencies = [], []
    for axis, dim in enumerate(dims):
        exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim
        frequencies.append((theta**exponents).reciprocal().repeat_interleave(2, output_size=dim))
        axes.append(torch.full((dim,), axis, device=device))
    return torch.cat(axes), torch.cat(frequencies)


def _grid_forward(self: Any, call: Call, hidden_states: Tensor, fps: Any = None) -> Any:
    """(B, C, F, H, W) to cosines and sines of its patches, each float32 (S, d). All pairs of an axis have
    the same values in a head's first and second half."""
    if not _is_taken(hidden_states):
        return NotImplemented
    sizes = [size // patch for size, patch in zip(hidden_states.shape[2:], self.patch_size)]
    dims = (self.dim_t, self.dim_h, self.dim_w)
    factors = (self.t_ntk_factor, self.h_ntk_factor, self.w_ntk_factor)
    key = (sizes, dims, factors, max(self.max_size), self.base_fps, fps)
    device = hidden_states.device
    tables = cached(call, hidden_states, key, lambda: _grid_axes(*key, device))
    results = []
    for frames, rows, columns in (tables[:3], tables[3:]):
        axes = (frames[:, None, None], rows[:, None], columns)
        halves = 2 * [axis.expand(*sizes, -1) for axis in axes]
        results.append(torch.cat(halves, dim=-1).flatten(0, 2))
    return tuple(results)


def _grid_axes(
    sizes: Any, dims: Any, factors: Any, most: int, base_fps: Any, fps: Any, device: torch.device
) -> tuple[Tensor, ...]:
    """Cosines of each axis, then sines, each (positions, pairs), in the class's own order of operations."""
    angles: list[Tensor] = []
    for size, dim, factor in zip(sizes, dims, factors):
        positions = torch.arange(most, dtype=torch.float32, device=device)[:size]
        if not angles and fps is not None:
            positions = positions / fps * base_fps
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
        angles.append(torch.outer(positions, 1.0 / (10000.0 * factor) ** exponents))
    return (*[each.cos() for each in angles], *[each.sin() for each in angles])


def _tables_forward(
    self: Any, call: Call, hidden_states: Tensor, *, attributes: tuple[str, ...]
) -> Any:
    def make() -> tuple[Tensor, ...]:
        tables = call.stand_in.own_forward(self, hidden_states)
        return tuple(table.to(hidden_states.device) for table in tables)

    if not _is_taken(hidden_states):
        return make()
    key = ([*hidden_states.shape[2:]], *[getattr(self, name) for name in attributes])
    return tuple(table.clone() for table in cached(call, hidden_states, key, make))


_CACHED = "caches its frequencies"
_EMBEDDINGS = "diffusers.models.embeddings"
COSMOS_POSITIONS = PatchSpec(
    "diffusers.models.transformers.transformer_cosmos:CosmosRotaryPosEmbed", _grid_forward, _CACHED
)
TIMESTEPS = PatchSpec(
    f"{_EMBEDDINGS}:Timesteps",
    _timesteps_forward,
    _CACHED,
    functions=(f"{_EMBEDDINGS}:get_timestep_embedding",),
)


def axial_positions(path: str) -> PatchSpec:
    """A class that computes tables of positions on several axes, like FLUX.1's."""
    function = f"{path.partition(':')[0]}:get_1d_rotary_pos_embed"
    return PatchSpec(path, _axes_forward, _CACHED, functions=(function,))


def tables_of_sizes(path: str, *attributes: str, functions: tuple[str, ...] = ()) -> PatchSpec:
    """A class that computes tables of positions on the CPU, from these attributes and the latents' sizes.
    Here they are on the latents' device, to which the model's own code copies them in each block."""
    forward = partial(_tables_forward, attributes=attributes)
    return PatchSpec(path, forward, "caches its tables", functions=functions)
