"""Wan 2.1, the 14B and the 1.3B model, at their published sizes with fewer blocks."""

from __future__ import annotations

from typing import Any

from diffusers import WanTransformer3DModel

from benchmarks.models.published import Given, PublishedVideo, VideoSize


class Wan(PublishedVideo):
    """The 14B model. Guidance takes a separate forward."""

    key, name, tiny_name = "wan", "Wan 2.1 14B, 3 blocks", "tiny Wan 2.1"
    cls = WanTransformer3DModel
    config = {"num_layers": 3}
    tiny_changes = {"text_dim": 64}  # a multiple of 16, which FP8 layers need
    published_blocks = {"blocks": 40}
    text_tokens = 512
    sizes = (VideoSize(81, 480, 832),)
    timestep = 800

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As WanPipeline passes them: no mask of the text."""
        config = model.config
        return {
            "hidden_states": given.normal(1, config.in_channels, *given.size.unpacked),
            "encoder_hidden_states": given.normal(1, given.text_tokens, config.text_dim),
            "timestep": given.timesteps(),
            "attention_kwargs": None,
        }


class WanSmall(Wan):
    """The 1.3B model."""

    key, name, tiny_name = "wan_small", "Wan 2.1 1.3B, 6 blocks", "tiny Wan 2.1 1.3B"
    config = {"num_layers": 6, "num_attention_heads": 12, "ffn_dim": 8960}
    tiny_changes = {}
    published_blocks = {"blocks": 30}


WAN, WAN_SMALL = Wan(), WanSmall()
