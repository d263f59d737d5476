"""Allegro for 40 frames at 360p, at its published sizes with 4 of 32 blocks, with random weights."""

from __future__ import annotations

import torch
from diffusers import AllegroTransformer3DModel
from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

from benchmarks import models
from benchmarks.models.sizes import VideoSize, parse_video_size

NAME, TINY_NAME = "Allegro, 4 blocks", "tiny Allegro"
BATCH = 2  # with guidance
TEXT_TOKENS = 512
SIZES, TINY_SIZES = (VideoSize(40, 368, 640),), (VideoSize(8, 64, 96),)
SMALL = {"size": VideoSize(1, 128, 128), "text_tokens": 64}

TRANSFORMER = {"num_layers": 4}
PUBLISHED_BLOCKS = {"transformer_blocks": 32}
TINY_TRANSFORMER = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "cross_attention_dim": 192,
    "caption_channels": 64,
}
parse_size = parse_video_size
transformer = models.builder(AllegroTransformer3DModel, TRANSFORMER, TINY_TRANSFORMER)


def rotation(
    model: AllegroTransformer3DModel, size: VideoSize, device: torch.device
) -> tuple[tuple[object, ...], tuple[torch.Tensor, ...]]:
    """Tables of the three axes, and each token's position along them, (1, tokens), as in the pipeline."""
    config = model.config
    frames, *rows_and_columns = size.latent
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
    axes = [torch.arange(length, device=device) for length in size.latent]
    positions = torch.cartesian_prod(*axes).T.reshape(3, 1, -1).contiguous()
    return tuple(tables), tuple(positions)


def inputs(
    model: AllegroTransformer3DModel,
    size: VideoSize,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    timestep: float = 800.0,
    text_tokens: int = TEXT_TOKENS,
) -> dict[str, object]:
    """Arguments of a forward as AllegroPipeline passes them with guidance: batch 2, negative first.

    The texts are padded: the mask (2, text tokens) has 16 and 100 tokens, or fewer if the text is shorter.
    """
    normal, config = models.normal(device, dtype, seed), model.config
    latents = normal(1, config.in_channels, *size.unpacked)
    lengths = torch.tensor([[16], [100]], device=device)
    return {
        "hidden_states": torch.cat([latents, latents]),
        "encoder_hidden_states": normal(2, 1, text_tokens, config.caption_channels),
        "encoder_attention_mask": (torch.arange(text_tokens, device=device) < lengths).long(),
        "timestep": torch.tensor(timestep, device=device).expand(2),
        "image_rotary_emb": rotation(model, size, device),
        "return_dict": False,
    }
