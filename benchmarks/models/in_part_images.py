"""Images and videos of Sana and its relatives, Lumina-Next, DiT and aMUSEd, at published widths."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models import transformers, unets
from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

from benchmarks.models.published import Given, ImageSize, PublishedImage, PublishedVideo, VideoSize


class DeepImageSize(ImageSize):
    """Of an autoencoder that maps 32x32 pixels to a latent."""

    token_pixels = 32


class DeepVideoSize(VideoSize):
    token_pixels, token_frames = 32, 8


def text_masks(given: Given, *lengths: int) -> torch.Tensor:
    """Of the negative prompt and of the prompt."""
    return torch.stack([given.text_mask(length) for length in lengths]).long()


class Sana(PublishedImage):
    key, name = "sana", "Sana 1.6B, 6 blocks"
    cls = transformers.SanaTransformer2DModel
    config = {"num_layers": 6}
    text_tokens = 300
    sizes, tiny_sizes = (DeepImageSize(1024, 1024),), (DeepImageSize(64, 96),)

    def latents(self, config: Any, given: Given) -> torch.Tensor:
        return given.guided_latents(config.in_channels, *given.size.latent)

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        config = model.config
        return {
            "hidden_states": self.latents(config, given),
            "encoder_hidden_states": given.normal(2, given.text_tokens, config.caption_channels),
            "encoder_attention_mask": text_masks(given, 8, 200),
            "timestep": given.timesteps(2),
        }


class SanaVideo(Sana):
    key, name = "sana_video", "Sana-Video 2B, 4 blocks"
    cls = transformers.SanaVideoTransformer3DModel
    config = {"num_layers": 4}
    sizes, tiny_sizes = (VideoSize(81, 480, 832),), PublishedVideo.tiny_sizes

    def latents(self, config: Any, given: Given) -> torch.Tensor:
        return given.guided_latents(config.in_channels, *given.size.unpacked)


class SanaWM(Sana):
    """Three blocks of linear attention and one of softmax, with half the published frames.

    The camera moves along its axis. Its matrices of each token are given: the model does not compute them in
    bfloat16 on a CPU.
    """

    key, name = "sana_wm", "Sana-WM, 81 frames, 4 blocks"
    cls = transformers.SanaWMTransformer3DModel
    config = {"num_layers": 4}
    sizes, tiny_sizes = (DeepVideoSize(81, 704, 1280),), (DeepVideoSize(9, 64, 96),)

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        config, device, (frames, rows, columns) = model.config, given.device, given.size.latent
        arguments = super().arguments(model, given)
        poses = torch.eye(4, device=device).repeat(2, frames, 1, 1)
        poses[..., 2, 3] = 0.1 * torch.arange(frames, device=device)
        lens = torch.tensor([8.0, 8, 2, 2], device=device).expand(2, frames, 4)
        tokens = poses.repeat_interleave(rows * columns, 1)
        size = (frames, rows, columns)
        return {
            **arguments,
            "encoder_hidden_states": arguments["encoder_hidden_states"][:, None],
            "timestep": given.timesteps(2)[:, None, None].expand(2, 1, frames),
            "chunk_plucker": given.normal(2, config.chunk_plucker_channels, *size),
            "camera_conditions": torch.cat([poses.flatten(2), lens], dim=-1).to(given.dtype),
            "cam_pos_embeds": {
                "absmap": given.normal(2, 3, *size),
                "P": tokens.to(given.dtype),
                "P_inv": tokens.inverse().to(given.dtype),
            },
        }


class LuminaNext(PublishedImage):
    key, name = "lumina_next", "Lumina-Next, 6 blocks"
    cls = transformers.LuminaNextDiT2DModel
    config = {"num_layers": 6, "num_kv_heads": 8}
    text_tokens = 256
    timestep = 0.2

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        config = model.config
        rotation = get_2d_rotary_pos_embed_lumina(model.head_dim, 384, 384)
        return {
            "hidden_states": given.guided_latents(config.in_channels, *given.size.unpacked),
            "timestep": given.timesteps(2).to(given.dtype),
            "encoder_hidden_states": given.normal(2, given.text_tokens, config.cross_attention_dim),
            "encoder_mask": text_masks(given, 8, 100),
            "image_rotary_emb": rotation.to(given.device),
            "cross_attention_kwargs": {},
        }


class DiT(PublishedImage):
    key, name = "dit", "DiT-XL/2, 14 blocks"
    cls = transformers.DiTTransformer2DModel
    config = {"num_layers": 14, "sample_size": 64}
    text_tokens = 0
    sizes = (ImageSize(512, 512),)
    timestep = 800

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        config, device = model.config, given.device
        return {
            "hidden_states": given.guided_latents(config.in_channels, *given.size.unpacked),
            "timestep": given.timesteps(2),
            "class_labels": torch.tensor([3, config.num_embeds_ada_norm], device=device),
        }


class Amused(PublishedImage):
    """aMUSEd, whose tokens are indices of a codebook."""

    key, name = "amused", "aMUSEd 512, 8 blocks"
    cls = unets.uvit_2d.UVit2DModel
    config = {"num_hidden_layers": 8, "downsample": True, "upsample": True}
    takes_return_dict = False
    text_tokens = 77
    sizes, tiny_sizes = (ImageSize(512, 512),), (ImageSize(64, 64),)

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        config, size, device = model.config, given.size, given.device
        ids = torch.arange(size.tokens, device=device) % config.codebook_size
        conditions = torch.tensor([[size.width, size.height, 0, 0, 6]], device=device)
        return {
            "input_ids": ids.view(1, *size.latent).repeat(2, 1, 1),
            "encoder_hidden_states": given.normal(2, given.text_tokens, config.encoder_hidden_size),
            "pooled_text_emb": given.normal(2, config.cond_embed_dim),
            "micro_conds": conditions.to(given.dtype).repeat(2, 1),
        }


IMAGES = (Sana(), SanaVideo(), SanaWM(), LuminaNext(), DiT(), Amused())
