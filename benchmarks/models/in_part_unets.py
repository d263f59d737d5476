"""UNets of images and videos, at published widths. Large ones have fewer layers."""

from __future__ import annotations

import math
from typing import Any

import torch
from diffusers.models import unets

from benchmarks.models.published import Given, ImageSize, PublishedImage, VideoSize


class UNet(PublishedImage):
    """With guidance, the negative prompt first."""

    text_tokens = 77
    timestep = 800

    def sample(self, config: Any, given: Given) -> torch.Tensor:
        return given.guided_latents(config.in_channels, *given.size.unpacked)

    def text(self, config: Any, given: Given) -> torch.Tensor:
        return given.normal(2, given.text_tokens, config.cross_attention_dim)

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        return {
            "sample": self.sample(model.config, given),
            "timestep": torch.tensor(given.timestep, device=given.device),
            "encoder_hidden_states": self.text(model.config, given),
        }


class StableDiffusion15(UNet):
    key, name = "sd15", "Stable Diffusion 1.5"
    cls = unets.UNet2DConditionModel
    config = {"cross_attention_dim": 768, "attention_head_dim": 8, "sample_size": 64}
    sizes = (ImageSize(512, 512),)


class ConsistencyModel(UNet):
    """Of ImageNet's classes, 64x64 pixels. Eight samples: it has no guidance."""

    key, name = "consistency", "Consistency model of ImageNet, 64x64"
    cls = unets.UNet2DModel
    config = {
        "sample_size": 64,
        "block_out_channels": (192, 384, 576, 768),
        "layers_per_block": 3,
        "attention_head_dim": 64,
        "num_class_embeds": 1000,
        "resnet_time_scale_shift": "scale_shift",
        "down_block_types": ("ResnetDownsampleBlock2D", *("AttnDownBlock2D",) * 3),
        "up_block_types": (*("AttnUpBlock2D",) * 3, "ResnetUpsampleBlock2D"),
        "downsample_type": "resnet",
        "upsample_type": "resnet",
    }
    sizes = (ImageSize(64, 64),)

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        config, size, device = model.config, given.size, given.device
        arguments = {
            "sample": given.normal(8, config.in_channels, size.height, size.width),
            "timestep": torch.tensor(given.timestep, device=device),
        }
        if config.num_class_embeds is not None:
            arguments["class_labels"] = torch.arange(8, device=device)
        return arguments


class DreamLite(UNet):
    """The condition's latents are beside those of the image."""

    key, name = "dreamlite", "DreamLite"
    cls = unets.unet_dreamlite.DreamLiteUNetModel
    config = {"attention_head_dim": (5, 10, 20), "use_linear_projection": True}
    text_tokens = 200

    def sample(self, config: Any, given: Given) -> torch.Tensor:
        return super().sample(config, given).repeat(1, 1, 1, 2)


class Kandinsky3(UNet):
    key, name = "kandinsky3", "Kandinsky 3"
    cls = unets.Kandinsky3UNet
    text_tokens = 128

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        masks = torch.stack([given.text_mask(length) for length in (8, 64)])
        return {**super().arguments(model, given), "encoder_attention_mask": masks}

    def text(self, config: Any, given: Given) -> torch.Tensor:
        return given.normal(2, given.text_tokens, config.encoder_hid_dim)


class StableCascade(UNet):
    """Its first stage, whose latents have a 42nd of the image's side."""

    key, name = "stable_cascade", "Stable Cascade, 2 + 6 layers"
    cls = unets.StableCascadeUNet
    config = {
        "down_num_layers_per_block": (2, 6),
        "up_num_layers_per_block": (6, 2),
        "clip_text_in_channels": 1280,
        "clip_image_in_channels": 768,
        "switch_level": (False,),
    }
    tiny_sizes = (ImageSize(160, 160),)
    pixels = 42.67

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        config, size = model.config, given.size
        sides = (math.ceil(side / self.pixels) for side in (size.height, size.width))
        return {
            "sample": given.normal(1, config.in_channels, *sides).repeat(2, 1, 1, 1),
            "timestep_ratio": given.timesteps(2).to(given.dtype) / 1000,
            "clip_text_pooled": given.normal(2, 1, config.clip_text_pooled_in_channels),
            "clip_text": given.normal(2, given.text_tokens, config.clip_text_in_channels),
            "clip_img": given.normal(2, 1, config.clip_image_in_channels),
        }


class VideoUNet(UNet):
    config = {"layers_per_block": 1}
    tiny_sizes = (VideoSize(2, 64, 96),)

    def sample(self, config: Any, given: Given) -> torch.Tensor:
        _, *sides = given.size.unpacked
        return given.guided_latents(config.in_channels, given.size.frames, *sides)


class ModelScope(VideoUNet):
    key, name = "modelscope", "ModelScope text to video, 1 layer a block"
    cls = unets.UNet3DConditionModel
    sizes = (VideoSize(16, 256, 256),)


class I2VGenXL(VideoUNet):
    """With fewer pixels than published."""

    key, name = "i2vgen_xl", "I2VGen-XL, 448×704, 1 layer a block"
    cls = unets.I2VGenXLUNet
    sizes = (VideoSize(16, 448, 704),)

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        config = model.config
        return {
            **super().arguments(model, given),
            "fps": torch.tensor([16, 16], device=given.device),
            "image_latents": self.sample(config, given),
            "image_embeddings": given.normal(2, config.cross_attention_dim),
        }


class AnimateDiff(VideoUNet):
    """Stable Diffusion 1.5 with a motion adapter."""

    key, name = "animatediff", "AnimateDiff, 1 layer a block"
    cls = unets.UNetMotionModel
    config = {**VideoUNet.config, "cross_attention_dim": 768}
    sizes = (VideoSize(16, 512, 512),)

    def text(self, config: Any, given: Given) -> torch.Tensor:
        return super().text(config, given).repeat_interleave(given.size.frames, 0)


class StableVideoDiffusion(VideoUNet):
    key, name = "svd", "Stable Video Diffusion, 1 layer a block"
    cls = unets.UNetSpatioTemporalConditionModel
    sizes = (VideoSize(14, 576, 1024),)
    text_tokens = 1  # the image's

    def sample(self, config: Any, given: Given) -> torch.Tensor:
        return super().sample(config, given).transpose(1, 2).contiguous()

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        ids = torch.tensor([[6, 127, 0.02]], device=given.device).to(given.dtype)
        return {**super().arguments(model, given), "added_time_ids": ids.repeat(2, 1)}


UNETS = (
    *(StableDiffusion15(), ConsistencyModel(), DreamLite(), Kandinsky3(), StableCascade()),
    *(ModelScope(), I2VGenXL(), AnimateDiff(), StableVideoDiffusion()),
)
