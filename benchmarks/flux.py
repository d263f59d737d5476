"""FLUX.1 at its published sizes but for the number of blocks, with random weights.

5 of 19 double and 10 of 38 single blocks: the two kinds as in the whole model, one to two.
"""

from __future__ import annotations

from dataclasses import dataclass

import models
import torch
from diffusers import FluxTransformer2DModel

NAME, TINY_NAME = "FLUX.1, 5 + 10 blocks", "tiny FLUX.1"
RESULT = "flux"
BATCH = 1  # the published model is distilled: guidance is an input
TEXT_TOKENS = 512
GUIDANCE = 3.5
TOKEN_PIXELS = 16  # 8 of the autoencoder by 2 of a packed patch

# diffusers' default sizes are the published ones, but for guidance_embeds (of FLUX.1-dev).
TRANSFORMER = {"num_layers": 5, "num_single_layers": 10, "guidance_embeds": True}
TINY_TRANSFORMER = {
    "num_layers": 2,
    "num_single_layers": 2,
    "guidance_embeds": True,
    "in_channels": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
}


@dataclass(frozen=True)
class ImageSize:
    """Size of an image in pixels, and of its packed latent."""

    height: int
    width: int

    @property
    def latent(self) -> tuple[int, int]:
        return self.height // TOKEN_PIXELS, self.width // TOKEN_PIXELS

    @property
    def tokens(self) -> int:
        height, width = self.latent
        return height * width

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"


SIZES = (ImageSize(1024, 1024),)
TINY_SIZES = (ImageSize(64, 96),)


def parse_size(text: str) -> ImageSize:
    """From HEIGHTxWIDTH; ValueError where it is none, or none that the model takes."""
    try:
        size = ImageSize(*(int(number) for number in text.split("x")))
    except (TypeError, ValueError):
        raise ValueError(f"a size is HEIGHTxWIDTH, got {text!r}") from None
    if size.height % TOKEN_PIXELS or size.width % TOKEN_PIXELS:
        raise ValueError(f"height and width must be multiples of {TOKEN_PIXELS}, got {text}")
    return size


def transformer(
    device: torch.device, dtype: torch.dtype, tiny: bool = False, seed: int = 0
) -> FluxTransformer2DModel:
    """FLUX.1's transformer, its random weights made on the device."""
    torch.manual_seed(seed)
    with device:
        model = FluxTransformer2DModel(**(TINY_TRANSFORMER if tiny else TRANSFORMER))
    return models.randomize(model, dtype)


def prompt(
    model: FluxTransformer2DModel,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    text_tokens: int = TEXT_TOKENS,
) -> dict[str, torch.Tensor]:
    """A made-up prompt, as arguments of the pipeline: (1, text tokens, joint attention dim), and pooled."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, *shape, generator=generator, device=device).to(dtype)

    return {
        "prompt_embeds": normal(text_tokens, model.config.joint_attention_dim),
        "pooled_prompt_embeds": normal(model.config.pooled_projection_dim),
    }


def inputs(
    model: FluxTransformer2DModel,
    size: ImageSize,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    timestep: float = 800.0,
    text_tokens: int = TEXT_TOKENS,
) -> dict[str, object]:
    """Arguments of a forward as FluxPipeline passes them: batch 1, packed latents."""
    text = prompt(model, device, dtype, seed, text_tokens)
    generator = torch.Generator(device).manual_seed(seed + 1)
    latents = torch.randn(
        1, size.tokens, model.config.in_channels, generator=generator, device=device
    )
    rows, columns = (torch.arange(length, device=device) for length in size.latent)
    image_ids = torch.cartesian_prod(torch.zeros_like(rows[:1]), rows, columns)
    return {
        "hidden_states": latents.to(dtype),
        "encoder_hidden_states": text["prompt_embeds"],
        "pooled_projections": text["pooled_prompt_embeds"],
        "timestep": torch.tensor([timestep], device=device).to(dtype) / 1000,
        "guidance": torch.full([1], GUIDANCE, device=device),
        "img_ids": image_ids.to(dtype),
        "txt_ids": torch.zeros(text_tokens, 3, device=device, dtype=dtype),
        "joint_attention_kwargs": {},
        "return_dict": False,
    }
