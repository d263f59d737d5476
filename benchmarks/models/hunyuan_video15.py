"""HunyuanVideo 1.5 at 480p, at its published sizes except for 4 of 54 blocks, with random weights."""

from __future__ import annotations

import torch
from diffusers import HunyuanVideo15Transformer3DModel

from benchmarks import models
from benchmarks.models.sizes import VideoSize, parse_video_size

NAME, TINY_NAME = "HunyuanVideo 1.5, 4 blocks", "tiny HunyuanVideo 1.5"
BATCH = 1  # guidance is a forward of its own
TEXT_TOKENS, PROMPT_TOKENS = 1000, 96  # the rest is padding
GLYPH_TOKENS, IMAGE_TOKENS = 256, 729  # padding: the prompt quotes no text, and there is no image
SIZES, TINY_SIZES = (VideoSize(61, 480, 848),), (VideoSize(5, 64, 96),)
SMALL = {"size": VideoSize(1, 128, 128), "text_tokens": 64}

# diffusers' default sizes are the published ones.
TRANSFORMER = {"num_layers": 4, "task_type": "t2v"}
PUBLISHED_BLOCKS = {"transformer_blocks": 54}
parse_size = parse_video_size
transformer = models.builder(
    HunyuanVideo15Transformer3DModel,
    TRANSFORMER,
    task_type="t2v",
    in_channels=9,  # the latent's, those of the first frame and its mask
)


def inputs(
    model: HunyuanVideo15Transformer3DModel,
    size: VideoSize,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    timestep: float = 800.0,
    text_tokens: int = TEXT_TOKENS,
) -> dict[str, object]:
    """Arguments of a forward as HunyuanVideo15Pipeline passes them: batch 1, with masks of the texts.

    The latents are followed by those of no first frame and by a channel of their mask, which are 0.
    """
    normal, config = models.normal(device, dtype, seed), model.config
    latents = normal(1, config.out_channels, *size.latent)
    conditions = latents.new_zeros(1, config.in_channels - config.out_channels, *size.latent)
    mask = (torch.arange(text_tokens, device=device) < PROMPT_TOKENS).to(dtype)

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=device, dtype=dtype)

    return {
        "hidden_states": torch.cat([latents, conditions], dim=1),
        "image_embeds": zeros(1, IMAGE_TOKENS, config.image_embed_dim),
        "timestep": torch.tensor([timestep], device=device).to(dtype),
        "encoder_hidden_states": normal(1, text_tokens, config.text_embed_dim),
        "encoder_attention_mask": mask.unsqueeze(0),
        "encoder_hidden_states_2": zeros(1, GLYPH_TOKENS, config.text_embed_2_dim),
        "encoder_attention_mask_2": zeros(1, GLYPH_TOKENS),
        "attention_kwargs": None,
        "return_dict": False,
    }
