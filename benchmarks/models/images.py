"""Models of images at their published sizes.

Cosmos-Predict2 has all of its blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AuraFlowTransformer2DModel,
    CosmosTransformer3DModel,
    HiDreamImageTransformer2DModel,
    LongCatImageTransformer2DModel,
    Lumina2Transformer2DModel,
    OvisImageTransformer2DModel,
    PRXTransformer2DModel,
    ZImageTransformer2DModel,
)

from benchmarks import models
from benchmarks.models.published import Given, ImageSize, PublishedImage


class AuraFlow(PublishedImage):
    """With blocks in the ratio of the whole model."""

    key, name, tiny_name = "auraflow", "AuraFlow, 1 + 8 blocks", "tiny AuraFlow"
    cls = AuraFlowTransformer2DModel
    config = {"num_mmdit_layers": 1, "num_single_dit_layers": 8, "pos_embed_max_size": 9216}
    tiny_changes = {"pos_embed_max_size": 256}
    published_blocks = {"joint_transformer_blocks": 4, "single_transformer_blocks": 32}
    batch = 2
    text_tokens = 256
    timestep = 0.8

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As AuraFlowPipeline passes them with guidance."""
        config = model.config
        return {
            "hidden_states": given.guided_latents(config.in_channels, *given.size.unpacked),
            "encoder_hidden_states": given.normal(2, given.text_tokens, config.joint_attention_dim),
            "timestep": given.timesteps().to(given.dtype).expand(2),
            "attention_kwargs": None,
        }


class Cosmos(PublishedImage):
    """Cosmos-Predict2 2B Text2Image. Guidance takes a separate forward.

    It has no padding mask channel, which needs torchvision in diffusers.
    """

    key, name, tiny_name = "cosmos", "Cosmos-Predict2 2B", "tiny Cosmos-Predict2"
    cls = CosmosTransformer3DModel
    config = {
        "num_attention_heads": 16,
        "rope_scale": (1.0, 4.0, 4.0),
        "extra_pos_embed_type": None,
        "concat_padding_mask": False,
    }
    tiny_changes = {"adaln_lora_dim": 32}
    text_tokens = 512
    sizes = (ImageSize(768, 1360),)
    timestep = 0.8

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As Cosmos2TextToImagePipeline passes them: one frame."""
        config, size, device, dtype = model.config, given.size, given.device, given.dtype
        return {
            "hidden_states": given.normal(1, config.in_channels, 1, *size.unpacked),
            "encoder_hidden_states": given.normal(1, given.text_tokens, config.text_embed_dim),
            "timestep": given.timesteps().to(dtype),
            "padding_mask": torch.zeros(1, 1, size.height, size.width, device=device, dtype=dtype),
        }


class Lumina2(PublishedImage):
    """Guidance is a forward of its own. There are two refiners each of the image and of the text."""

    key, name, tiny_name = "lumina2", "Lumina 2, 8 blocks", "tiny Lumina 2"
    cls = Lumina2Transformer2DModel
    config = {"num_layers": 8, "cap_feat_dim": 2304}
    published_blocks = {"layers": 26}
    text_tokens, prompt_tokens = 256, 128  # with the system prompt; the rest is padding

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As Lumina2Pipeline passes them, with a mask of the text."""
        config = model.config
        return {
            "hidden_states": given.normal(1, config.in_channels, *given.size.unpacked),
            "timestep": 1 - torch.tensor([given.timestep], device=given.device) / 1000,
            "encoder_hidden_states": given.normal(1, given.text_tokens, config.cap_feat_dim),
            "encoder_attention_mask": given.text_mask(self.prompt_tokens).long().unsqueeze(0),
            "attention_kwargs": None,
        }


class LongCatImage(PublishedImage):
    """LongCat-Image 6B. Guidance is a forward of its own."""

    key, name, tiny_name = "longcat_image", "LongCat-Image, 3 + 6 blocks", "tiny LongCat-Image"
    cls = LongCatImageTransformer2DModel
    config = {"num_layers": 3, "num_single_layers": 6}
    published_blocks = {"transformer_blocks": 10, "single_transformer_blocks": 20}
    text_tokens = 512
    thousandfold = ("timestep",)

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As LongCatImagePipeline passes them: positions of text and image on the diagonal."""
        config, size, device = model.config, given.size, given.device
        of_text = torch.arange(given.text_tokens, device=device)
        img_ids = models.positions(device, 1, *size.latent).float() + given.text_tokens
        img_ids[:, 0] = 1
        return {
            "hidden_states": given.normal(1, size.tokens, config.in_channels),
            "timestep": given.timesteps().to(given.dtype) / 1000,
            "guidance": None,
            "encoder_hidden_states": given.normal(1, given.text_tokens, config.joint_attention_dim),
            "txt_ids": torch.stack([torch.zeros_like(of_text), of_text, of_text], dim=1).float(),
            "img_ids": img_ids,
        }


class OvisImage(PublishedImage):
    """Ovis-Image 7B. Guidance is a forward of its own."""

    key, name, tiny_name = "ovis_image", "Ovis-Image, 2 + 9 blocks", "tiny Ovis-Image"
    cls = OvisImageTransformer2DModel
    config = {"num_layers": 2, "num_single_layers": 9}
    published_blocks = {"transformer_blocks": 6, "single_transformer_blocks": 27}
    text_tokens = 256  # padded without a mask
    thousandfold = ("timestep",)

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As OvisImagePipeline passes them: packed latents, positions of the text on its diagonal."""
        config, size, device, dtype = model.config, given.size, given.device, given.dtype
        txt_ids = torch.arange(given.text_tokens, device=device).unsqueeze(1).repeat(1, 3)
        txt_ids[:, 0] = 0
        return {
            "hidden_states": given.normal(1, size.tokens, config.in_channels),
            "encoder_hidden_states": given.normal(1, given.text_tokens, config.joint_attention_dim),
            "timestep": given.timesteps().to(dtype) / 1000,
            "img_ids": models.positions(device, 1, *size.latent).to(dtype),
            "txt_ids": txt_ids.to(dtype),
            "joint_attention_kwargs": None,
        }


class PRXImage(PublishedImage):
    """PRX 1.2B."""

    key, name, tiny_name = "prx", "PRX, 8 blocks", "tiny PRX"
    cls = PRXTransformer2DModel
    config = {"depth": 8}
    published_blocks = {"blocks": 16}
    batch = 2
    text_tokens, prompt_tokens = 256, 64
    timestep = 0.8

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As PRXPipeline passes them with guidance and an empty negative prompt."""
        config = model.config
        masks = [given.text_mask(count) for count in (1, self.prompt_tokens)]
        return {
            "hidden_states": given.guided_latents(config.in_channels, *given.size.unpacked),
            "timestep": given.timesteps(2).to(given.dtype),
            "encoder_hidden_states": given.normal(2, given.text_tokens, config.context_in_dim),
            "attention_mask": torch.stack(masks),
        }


class HiDream(PublishedImage):
    """HiDream-I1 17B, the full one, which takes guidance. Each block has text of its own, from a layer of the
    text encoder."""

    key, name, tiny_name = "hidream", "HiDream-I1, 2 + 4 blocks", "tiny HiDream-I1"
    cls = HiDreamImageTransformer2DModel
    config = {
        "num_layers": 2,
        "num_single_layers": 4,
        "llama_layers": [*range(6)],
        "patch_size": 2,
        "in_channels": 16,
        "caption_channels": [4096, 4096],
        "axes_dims_rope": (64, 32, 32),
    }
    batch = 2
    text_tokens = 128
    tiny_sizes = (ImageSize(64, 64),)

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As HiDreamImagePipeline passes them with guidance."""
        config = model.config
        latents = given.guided_latents(config.in_channels, *given.size.unpacked)
        text_width, width_of_layers = config.caption_channels
        layers = 1 + max(config.llama_layers)
        texts = given.normal(layers, 2, given.text_tokens, width_of_layers)
        return {
            "hidden_states": latents,
            "timesteps": given.timesteps(2),
            "encoder_hidden_states_t5": given.normal(2, given.text_tokens, text_width),
            "encoder_hidden_states_llama3": texts,
            "pooled_embeds": given.normal(2, config.text_emb_dim),
            "attention_kwargs": None,
        }


class ZImage(PublishedImage):
    """Z-Image-Turbo 6B. It is distilled. There are two refiners each of the image and of the text."""

    key, name, tiny_name = "z_image", "Z-Image, 8 blocks", "tiny Z-Image"
    cls = ZImageTransformer2DModel
    config = {"n_layers": 8}
    published_blocks = {"layers": 30}
    text_tokens = 96  # of the prompt: the pipeline passes no padding
    tiny_sizes = (ImageSize(64, 128),)

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        """As ZImagePipeline passes them: lists of one image and one prompt."""
        config = model.config
        return {
            "x": [given.normal(config.in_channels, 1, *given.size.unpacked)],
            "t": (1000 - torch.tensor([given.timestep], device=given.device)) / 1000,
            "cap_feats": [given.normal(given.text_tokens, config.cap_feat_dim)],
            "joint_attention_kwargs": None,
        }


AURAFLOW, COSMOS, HIDREAM, LUMINA2 = AuraFlow(), Cosmos(), HiDream(), Lumina2()
LONGCAT_IMAGE, OVIS_IMAGE, PRX, Z_IMAGE = LongCatImage(), OvisImage(), PRXImage(), ZImage()
