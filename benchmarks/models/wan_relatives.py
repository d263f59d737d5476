"""Relatives of Wan, 14B, at their published sizes with fewer blocks: Helios, AnyFlow and Wan-Animate 2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from diffusers import (
    AnyFlowFARTransformer3DModel,
    AnyFlowTransformer3DModel,
    HeliosTransformer3DModel,
    WanAnimate2Transformer3DModel,
)
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

from benchmarks.models.published import Given, PublishedVideo, VideoSize


class Helios(PublishedVideo):
    """A chunk of a video after others. Guidance takes a separate forward."""

    key, name, tiny_name = "helios", "Helios 14B, 3 blocks", "tiny Helios"
    cls = HeliosTransformer3DModel
    config = {"num_layers": 3}
    tiny_changes = {"text_dim": 64}  # a multiple of 16, which FP8 layers need
    published_blocks = {"blocks": 40}
    text_tokens = 512
    sizes = (VideoSize(33, 384, 640),)
    timestep = 800
    # Frames of the history. The first of the short ones is the first of the video.
    long, mid, short = 16, 2, 2

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As HeliosPipeline passes them."""
        config, device = model.config, given.device
        frames, rows, columns = given.size.unpacked
        sizes = (1, self.long, self.mid, self.short - 1, frames)
        first, long, mid, last, chunk = torch.arange(sum(sizes), device=device)[None].split(
            sizes, 1
        )
        indices = {"long": long, "mid": mid, "short": torch.cat([first, last], dim=1)}
        counts = {"long": self.long, "mid": self.mid, "short": self.short}
        return {
            "hidden_states": given.normal(1, config.in_channels, frames, rows, columns),
            "encoder_hidden_states": given.normal(1, given.text_tokens, config.text_dim),
            "timestep": given.timesteps(),
            "indices_hidden_states": chunk,
            **{f"indices_latents_history_{name}": index for name, index in indices.items()},
            **{
                f"latents_history_{name}": given.normal(1, config.in_channels, count, rows, columns)
                for name, count in counts.items()
            },
            "attention_kwargs": None,
        }


class AnyFlow(PublishedVideo):
    """Distilled: without guidance."""

    key, name, tiny_name = "anyflow", "AnyFlow 14B, 3 blocks", "tiny AnyFlow"
    cls = AnyFlowTransformer3DModel
    config = {"num_layers": 3}
    tiny_changes = {"text_dim": 64}  # a multiple of 16, which FP8 layers need
    published_blocks = {"blocks": 40}
    text_tokens = 512
    sizes = (VideoSize(81, 480, 832),)
    timestep, target = 800.0, 600.0

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As AnyFlowPipeline passes them: each frame has its time steps."""
        config = model.config
        frames, rows, columns = given.size.unpacked
        timesteps = given.timesteps(frames)[None]
        return {
            "hidden_states": given.normal(1, frames, config.in_channels, rows, columns),
            "timestep": timesteps,
            "r_timestep": torch.full_like(timesteps, self.target),
            "encoder_hidden_states": given.normal(1, given.text_tokens, config.text_dim),
            "attention_kwargs": None,
        }


class AnyFlowFAR(AnyFlow):
    """The last chunk of a video, with the keys and values of those before it. The published video has a
    shorter chunk after it."""

    key, name, tiny_name = "anyflow_far", "AnyFlow-FAR 14B, 3 blocks", "tiny AnyFlow-FAR"
    cls = AnyFlowFARTransformer3DModel
    sizes = (VideoSize(73, 480, 832),)
    tiny_sizes = (VideoSize(9, 64, 96),)

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As AnyFlowFARPipeline passes them."""
        config = model.config
        frames, rows, columns = given.size.unpacked
        chunks = list(_chunks(config.chunk_partition, frames))
        is_whole = max(0, len(chunks) - config.full_chunk_limit)
        _, *patch = config.patch_size
        _, *compressed = config.compressed_patch_size
        counts = {
            "full_cache": sum(chunks[is_whole:-1]) * (rows // patch[0]) * (columns // patch[1]),
            "compressed_cache": sum(chunks[:is_whole])
            * (rows // compressed[0])
            * (columns // compressed[1]),
        }
        heads = (config.num_attention_heads, config.attention_head_dim)
        shapes = {name: (2, 1, heads[0], count, heads[1]) for name, count in counts.items()}
        timesteps = given.timesteps(chunks[-1])[None]
        return {
            "hidden_states": given.normal(1, chunks[-1], config.in_channels, rows, columns),
            "chunk_partition": chunks,
            "timestep": timesteps,
            "r_timestep": torch.full_like(timesteps, self.target),
            "encoder_hidden_states": given.normal(1, given.text_tokens, config.text_dim),
            "kv_cache": [
                {name: given.normal(*shape) for name, shape in shapes.items()} for _ in model.blocks
            ],
            "kv_cache_flag": {"num_cached_chunks": len(chunks) - 1, "is_cache_step": False},
            "attention_kwargs": None,
        }


def _chunks(partition: tuple[int, ...], frames: int) -> Iterator[int]:
    """The frames of each chunk of a video."""
    for count in partition:
        if frames > 0:
            yield min(count, frames)
        frames -= count


class WanAnimate2(PublishedVideo):
    """The pass over the driving video, which stores keys and values. Those that denoise need FlexAttention,
    which PyTorch runs only compiled at this size. The blocks cannot be compiled as full graphs."""

    key, name, tiny_name = "wan_animate2", "Wan-Animate 2 14B, 3 blocks", "tiny Wan-Animate 2"
    cls = WanAnimate2Transformer3DModel
    config = {"num_layers": 3}
    published_blocks = {"blocks": 40}
    text_tokens = 512
    image_tokens, image_features = 257, 1280
    sizes = (VideoSize(77, 480, 832),)
    timestep = 800

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As its modular pipeline passes them."""
        config, latent = model.config, given.size.unpacked
        given_channels = config.in_dim - config.out_dim
        return {
            "hidden_states": [given.normal(config.out_dim, *latent)],
            "timestep": given.timesteps(),
            "encoder_hidden_states": [
                given.normal(min(given.text_tokens, config.text_len), config.text_dim)
            ],
            "encoder_hidden_states_image": given.normal(1, self.image_tokens, self.image_features),
            "condition_latents": [given.normal(given_channels, *latent)],
            "kv_cache": WanAnimate2KVCache(len(model.blocks)),
            "kv_cache_mode": "extract",
            "seq_len": given.size.tokens,
            "offset_grid_sizes": torch.tensor([given.size.latent]),
        }


HELIOS, ANYFLOW, ANYFLOW_FAR, WAN_ANIMATE2 = Helios(), AnyFlow(), AnyFlowFAR(), WanAnimate2()
