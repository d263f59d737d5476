"""CogVideoX-5b at its published sizes except for 5 of 42 blocks, with random weights."""

from __future__ import annotations

import torch
from diffusers import CogVideoXTransformer3DModel
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

from benchmarks import models
from benchmarks.models.sizes import VideoSize, parse_video_size

NAME, TINY_NAME = "CogVideoX-5b, 5 blocks", "tiny CogVideoX"
BATCH = 2  # with guidance
TEXT_TOKENS = 226  # padded without a mask
SIZES, TINY_SIZES = (VideoSize(49, 480, 720),), (VideoSize(5, 64, 96),)
SMALL = {"size": VideoSize(1, 128, 128), "text_tokens": 64}

TRANSFORMER = {
    "num_attention_heads": 48,
    "num_layers": 5,
    "use_rotary_positional_embeddings": True,
}
PUBLISHED_BLOCKS = {"transformer_blocks": 42}
parse_size = parse_video_size
transformer = models.builder(CogVideoXTransformer3DModel, TRANSFORMER)


def rotation(
    model: CogVideoXTransformer3DModel, size: VideoSize, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the pipeline, (tokens, head dimension), float32."""
    config = model.config
    frames, *grid = size.latent
    base = config.sample_width // config.patch_size, config.sample_height // config.patch_size
    return get_3d_rotary_pos_embed(
        embed_dim=config.attention_head_dim,
        crops_coords=get_resize_crop_region_for_grid(tuple(grid), *base),
        grid_size=tuple(grid),
        temporal_size=frames,
        device=device,
    )


def inputs(
    model: CogVideoXTransformer3DModel,
    size: VideoSize,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    timestep: int = 800,
    text_tokens: int = TEXT_TOKENS,
) -> dict[str, object]:
    """Arguments of a forward as CogVideoXPipeline passes them with guidance: batch 2, negative first."""
    normal, config = models.normal(device, dtype, seed), model.config
    frames, rows, columns = size.unpacked
    latents = normal(1, frames, config.in_channels, rows, columns)
    return {
        "hidden_states": torch.cat([latents, latents]),
        "encoder_hidden_states": normal(2, text_tokens, config.text_embed_dim),
        "timestep": torch.tensor(timestep, device=device).expand(2),
        "image_rotary_emb": rotation(model, size, device),
        "attention_kwargs": None,
        "return_dict": False,
    }
