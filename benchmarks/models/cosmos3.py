"""Cosmos 3 at its published widths with fewer blocks, and fewer frames."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import Cosmos3OmniTransformer
from diffusers.pipelines.cosmos import pipeline_cosmos3_omni as pipeline

from benchmarks.models.published import Given, PublishedVideo, VideoSize


class Cosmos3Size(VideoSize):
    token_pixels = 32  # 16 of the autoencoder times 2 of a patch


class Cosmos3(PublishedVideo):
    """From text alone, without sound. Guidance takes a separate forward."""

    key, name, tiny_name = "cosmos3", "Cosmos 3, 4 blocks", "tiny Cosmos 3"
    cls = Cosmos3OmniTransformer
    config = {"num_hidden_layers": 4}
    tiny_changes = {"num_key_value_heads": 2}
    published_blocks = {"layers": 36}
    text_tokens = 256  # of the prompt, without padding
    fps = 24.0
    sizes, tiny_sizes = (Cosmos3Size(121, 704, 1280),), (Cosmos3Size(5, 64, 96),)
    small = {"size": Cosmos3Size(1, 256, 256), "text_tokens": 64}

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As Cosmos3OmniPipeline passes them: one sequence, the text before the video."""
        config, size, device, text_tokens = (
            model.config,
            given.size,
            given.device,
            given.text_tokens,
        )
        frames, *patches = size.latent
        length = text_tokens + size.tokens
        of_text, offset = pipeline.get_3d_mrope_ids_text_tokens(text_tokens, 0, True)
        of_video, _ = pipeline.get_3d_mrope_ids_vae_tokens(
            *size.latent,
            offset + config.unified_3d_mrope_temporal_modality_margin,
            fps=self.fps,
            base_fps=float(config.base_fps),
        )
        of_tokens = torch.arange(length, device=device)
        latents = given.normal(1, config.latent_channel, *size.unpacked)
        return {
            "input_ids": of_tokens[:text_tokens] % config.vocab_size,
            "text_indexes": of_tokens[:text_tokens],
            "position_ids": torch.cat([of_text, of_video], dim=1).to(device),
            "und_len": text_tokens,
            "sequence_length": length,
            "vision_tokens": [latents],
            "vision_token_shapes": [(frames, *patches)],
            "vision_sequence_indexes": of_tokens[text_tokens:],
            "vision_mse_loss_indexes": of_tokens[text_tokens:],
            "vision_timesteps": given.timesteps(size.tokens),
            "vision_noisy_frame_indexes": [torch.arange(frames, device=device)],
        }


COSMOS3 = Cosmos3()
