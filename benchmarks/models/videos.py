"""Allegro, CogVideoX-5b, MiniMax-H3 and Mochi at their published sizes with fewer blocks."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AllegroTransformer3DModel,
    CogVideoXTransformer3DModel,
    MiniMaxH3Transformer3DModel,
    MochiTransformer3DModel,
)
from diffusers.models.embeddings import (
    get_3d_rotary_pos_embed,
    get_3d_rotary_pos_embed_allegro,
)
from diffusers.modular_pipelines.minimax_h3 import before_denoise, modular_pipeline
from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

from benchmarks import models
from benchmarks.models.published import Given, PublishedVideo, VideoSize


class Allegro(PublishedVideo):
    """For 40 frames at 360p."""

    key, name, tiny_name = "allegro", "Allegro, 4 blocks", "tiny Allegro"
    cls = AllegroTransformer3DModel
    config = {"num_layers": 4}
    tiny_config = {
        "num_layers": 2,
        "num_attention_heads": 2,
        "cross_attention_dim": 192,
        "caption_channels": 64,
    }
    published_blocks = {"transformer_blocks": 32}
    batch = 2
    text_tokens = 512
    prompt_tokens, negative_tokens = 100, 16  # the rest is padding
    sizes, tiny_sizes = (VideoSize(40, 368, 640),), (VideoSize(8, 64, 96),)

    def rotation(
        self, config: Any, given: Given
    ) -> tuple[tuple[object, ...], tuple[torch.Tensor, ...]]:
        """Tables of the three axes, and each token's position along them, (1, tokens), as in the pipeline."""
        device = given.device
        frames, *rows_and_columns = given.size.latent
        *tables, _, _, _ = get_3d_rotary_pos_embed_allegro(
            embed_dim=config.attention_head_dim,
            crops_coords=((0, 0), tuple(rows_and_columns)),
            grid_size=tuple(rows_and_columns),
            temporal_size=frames,
            interpolation_scale=(
                config.interpolation_scale_t,
                config.interpolation_scale_h,
                config.interpolation_scale_w,
            ),
            device=device,
        )
        positions = models.positions(device, *given.size.latent).T.reshape(3, 1, -1).contiguous()
        return tuple(tables), tuple(positions)

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As AllegroPipeline passes them with guidance, with a mask of the texts."""
        config = model.config
        lengths = (self.negative_tokens, self.prompt_tokens)
        mask = torch.stack([given.text_mask(count) for count in lengths])
        return {
            "hidden_states": given.guided_latents(config.in_channels, *given.size.unpacked),
            "encoder_hidden_states": given.normal(2, 1, given.text_tokens, config.caption_channels),
            "encoder_attention_mask": mask.long(),
            "timestep": given.timesteps(2),
            "image_rotary_emb": self.rotation(config, given),
        }


class CogVideoX(PublishedVideo):
    key, name, tiny_name = "cogvideox", "CogVideoX-5b, 5 blocks", "tiny CogVideoX"
    cls = CogVideoXTransformer3DModel
    config = {
        "num_attention_heads": 48,
        "num_layers": 5,
        "use_rotary_positional_embeddings": True,
    }
    published_blocks = {"transformer_blocks": 42}
    batch = 2
    text_tokens = 226  # padded without a mask
    sizes = (VideoSize(49, 480, 720),)
    timestep = 800

    def rotation(self, config: Any, given: Given) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the pipeline, (tokens, head dimension), float32."""
        frames, *grid = given.size.latent
        base = config.sample_width // config.patch_size, config.sample_height // config.patch_size
        return get_3d_rotary_pos_embed(
            embed_dim=config.attention_head_dim,
            crops_coords=get_resize_crop_region_for_grid(tuple(grid), *base),
            grid_size=tuple(grid),
            temporal_size=frames,
            device=given.device,
        )

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As CogVideoXPipeline passes them with guidance."""
        config = model.config
        frames, rows, columns = given.size.unpacked
        return {
            "hidden_states": given.guided_latents(frames, config.in_channels, rows, columns),
            "encoder_hidden_states": given.normal(2, given.text_tokens, config.text_embed_dim),
            "timestep": given.timesteps(2),
            "image_rotary_emb": self.rotation(config, given),
            "attention_kwargs": None,
        }


class MochiSize(VideoSize):
    """Its autoencoder maps 6 frames to one."""

    token_frames = 6


class Mochi(PublishedVideo):
    key, name, tiny_name = "mochi", "Mochi, 4 blocks", "tiny Mochi"
    cls = MochiTransformer3DModel
    config = {"num_layers": 4}
    published_blocks = {"transformer_blocks": 48}
    batch = 2
    text_tokens, prompt_tokens = 256, 96  # the rest is padding
    sizes, tiny_sizes = (MochiSize(85, 480, 848),), (MochiSize(7, 64, 96),)
    small = {"size": MochiSize(1, 128, 128), "text_tokens": 64}

    def transformer(
        self, device: torch.device, dtype: torch.dtype, tiny: bool = False, seed: int = 0
    ) -> MochiTransformer3DModel:
        """With the frequencies of the rotary embedding, which diffusers initializes to 0."""
        model = super().transformer(device, dtype, tiny, seed)
        torch.nn.init.normal_(model.pos_frequencies)
        return model

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As MochiPipeline passes them with guidance. The negative prompt is empty: it has no valid token."""
        config = model.config
        lengths = (0, self.prompt_tokens)
        return {
            "hidden_states": given.guided_latents(config.in_channels, *given.size.unpacked),
            "encoder_hidden_states": given.normal(2, given.text_tokens, config.text_embed_dim),
            "timestep": given.timesteps(2).to(given.dtype),
            "encoder_attention_mask": torch.stack([given.text_mask(count) for count in lengths]),
            "attention_kwargs": None,
        }


class MiniMaxH3Size(VideoSize):
    """Its autoencoder encodes frames in chunks, and one shorter chunk at the end."""

    token_pixels = 32  # 16 of the autoencoder times 2 of a patch
    chunk_frames, chunk_latents, last_frames, last_latents = 17, 5, 5, 2

    @property
    def latent(self) -> tuple[int, ...]:
        _, rows, columns = super().latent
        chunks = (self.frames - self.last_frames) // self.chunk_frames
        return self.chunk_latents * chunks + self.last_latents, rows, columns

    def check(self) -> None:
        if self.frames % self.chunk_frames != self.last_frames:
            raise ValueError(f"frames must be a multiple of 17 plus 5, got {self}")
        super().check()


class MiniMaxH3(PublishedVideo):
    """With video and audio, and two blocks of the text. Guidance takes a separate forward."""

    key, name, tiny_name = "minimax_h3", "MiniMax-H3, 3 blocks", "tiny MiniMax-H3"
    cls = MiniMaxH3Transformer3DModel
    config = {"num_layers": 3}
    published_blocks = {"transformer_blocks": 50}
    text_tokens = 256  # of the prompt, without padding
    # The pipeline's default number of frames, on a canvas that gives fewer tokens than the default one.
    sizes, tiny_sizes = (MiniMaxH3Size(124, 480, 832),), (MiniMaxH3Size(22, 64, 96),)
    small = {"size": MiniMaxH3Size(5, 256, 256), "text_tokens": 64}

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As the modular pipeline passes them for text to video and audio: the text before the audio before
        the video."""
        config, size, device, normal = model.config, given.size, given.device, given.normal
        frames, rows, columns = size.latent
        _, patch_height, patch_width = config.patch_size
        audio_latents = modular_pipeline.audio_latent_num_frames(size.frames)
        layout = before_denoise.MiniMaxH3PrepareLayoutStep.build_packed_sequence(
            torch.full((given.text_tokens,), modular_pipeline.MINIMAX_H3_TEXT_TAG),
            *(frames, rows * patch_height, columns * patch_width, audio_latents, config.patch_size),
            modular_pipeline.MINIMAX_H3_AUDIO_CHANNELS,
            modular_pipeline.MINIMAX_H3_AUDIO_TAG,
            modular_pipeline.MINIMAX_H3_VIDEO_TAG,
        )
        positions, tags, video, audio, text = (tensor.to(device) for tensor in layout[:5])
        return {
            "hidden_states": normal(1, len(video), config.in_channels * patch_height * patch_width),
            "audio_hidden_states": normal(1, len(audio), config.audio_in_channels),
            "encoder_hidden_states": normal(1, given.text_tokens, config.text_dim),
            "timestep": torch.tensor([given.timestep / 1000], device=device),
            "timestep_indices": torch.zeros_like(tags),
            "token_tags": tags,
            "position_ids": positions,
            "video_indices": video,
            "audio_indices": audio,
            "text_indices": text,
            "attention_kwargs": None,
        }


ALLEGRO, COGVIDEOX, MINIMAX_H3, MOCHI = Allegro(), CogVideoX(), MiniMaxH3(), Mochi()
