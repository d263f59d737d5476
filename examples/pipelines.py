"""The models of the examples: pipelines with published, small trained or random weights; the kernels."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import string
import zlib
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

import diffusers
import tomllib
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError
from kernels import get_kernel

CHECKOUT = Path(__file__).resolve().parents[1]
GENERAL = tomllib.loads((CHECKOUT / "build.toml").read_text(encoding="utf-8"))["general"]
KERNEL_ID, KERNEL_VERSION = GENERAL["hub"]["repo-id"], GENERAL["version"]

# Warnings of libraries that import others, of what no pipeline here uses.
for logger, part in {
    "torchao": "Failed to load",
    "torch.utils._pytree": "is an Enum subclass",
    "diffusers.quantizers.torchao.torchao_quantizer": "Unable to import `torchao` Tensor objects",
    "transformers.utils.import_utils": "requires torchvision (not installed)",
}.items():
    logging.getLogger(logger).addFilter(lambda record, part=part: part not in record.getMessage())

# The Hub's errors. HTTPError is that of the HTTP client, which huggingface_hub has changed.
HUB_ERRORS = (OSError, HTTPError)

# Arguments of the pipelines; and their values for a small model.
SIZE = ("num_inference_steps", "height", "width", "num_frames")
SMALL_SIZE = (4, 128, 192, 9)


@dataclass(frozen=True)
class Trained:
    """A small trained model in this repository, for use without the published weights.

    Attributes:
        folder: the pipeline, as diffusers saves it.
        prompt: the default prompt, of words that the model knows.
        size, call: as in Model.
    """

    folder: Path
    prompt: str
    size: tuple[int, ...]
    call: dict[str, float | str]


@dataclass(frozen=True)
class Model:
    """A model on the Hub, and the parts of a pipeline like it with random weights.

    Attributes:
        hub_id: the repository; None if the weights are not on the Hub.
        size: steps, height, width and, for a video, frames, as on the model's card.
        call: the card's other arguments of the pipeline.
        parts: the class of each part, and its published configuration where diffusers has another
            default. The first is the denoising model, with fewer blocks, except LTX-Video's and UNets.
        text: shapes of one prompt's made-up embeddings by their argument. A name is an entry of a
            part's configuration.
        small: what a small model changes besides SMALL, or, by part, what only that part changes.
        options: other arguments of the pipeline's constructor.
        side_step, frames_step: sides are multiples of the one, frames of the other plus 1.
        min_side, max_side: the limits of sides.
        fps: frames per second; None for an image.
        trained: the small trained model; None if the small model has random weights.
    """

    hub_id: str | None
    pipeline: str
    size: tuple[int, ...]
    call: dict[str, float | str]
    parts: dict[str, tuple[str, dict]]
    text: dict[str, tuple[int | str, ...]]
    small: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    side_step: int = 16
    frames_step: int = 4
    min_side: int = 32
    max_side: int = 4096
    fps: int = 16
    trained: Trained | None = None

    @property
    def denoiser(self) -> str:
        """The name of the denoising model in the pipeline."""
        return next(iter(self.parts))

    @property
    def is_video(self) -> bool:
        return len(self.size) == len(SIZE)

    @property
    def guidance(self) -> str | None:
        """The name of the pipeline's argument, if it has one."""
        return next((name for name in self.call if name.endswith("scale")), None)


class SkipSafetyChecks:
    """In place of Cosmos' safety checker, a model of its own: noise needs none."""

    def to(self, device) -> None:
        pass

    def check_text_safety(self, prompt) -> bool:
        return True

    def check_video_safety(self, frames):
        return frames


FLOW = ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0})
IMAGE_VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
}
FLUX_VAE = (
    "AutoencoderKL",
    {**IMAGE_VAE, "latent_channels": 16, "scaling_factor": 0.3611, "shift_factor": 0.1159},
)
# Schedule of Stable Diffusion, of which the training is published.
NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
# That of CogVideoX and CogView3+.
COG_NOISE = {
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "timestep_spacing": "trailing",
}
COGVIEW_VAE = {
    **IMAGE_VAE,
    "block_out_channels": (128, 512, 1024, 1024),
    "layers_per_block": 3,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "mid_block_add_attention": False,
}
NEGATIVE_VIDEO = "worst quality, inconsistent motion, blurry, jittery, distorted"
# What a small model changes, where its class has it.
SMALL = {
    "num_layers": 2,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "num_attention_heads": 2,
    "caption_projection_dim": 2 * 64,
    "ffn_dim": 512,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
    "text_dim": 64,
    "text_embed_dim": 64,
    "block_out_channels": (32, 32, 32, 32),
    "layers_per_block": 1,
    "base_dim": 8,
    "num_res_blocks": 1,
}

MODELS = {
    "ltx": Model(
        hub_id="Lightricks/LTX-Video",
        pipeline="LTXPipeline",
        size=(50, 512, 768, 161),
        call={"guidance_scale": 3.0, "negative_prompt": NEGATIVE_VIDEO},
        parts={
            "transformer": ("LTXVideoTransformer3DModel", {}),
            "vae": ("AutoencoderKLLTXVideo", {}),
            "scheduler": (
                FLOW[0],
                {
                    "use_dynamic_shifting": True,
                    "base_shift": 0.95,
                    "max_shift": 2.05,
                    "base_image_seq_len": 1024,
                    "max_image_seq_len": 4096,
                    "shift_terminal": 0.1,
                },
            ),
        },
        text={"prompt_embeds": (128, "caption_channels"), "prompt_attention_mask": (128,)},
        small={
            "cross_attention_dim": 2 * 64,
            "caption_channels": 64,
            "block_out_channels": (16, 32, 64, 64),
            "decoder_block_out_channels": (16, 32, 64, 64),
            "layers_per_block": (1,) * 5,
            "decoder_layers_per_block": (1,) * 5,
        },
        side_step=32,
        frames_step=8,
        fps=25,
        trained=Trained(
            folder=CHECKOUT / "examples" / "small_ltx",
            prompt="A red ball bounces to the right over green grass.",
            size=(30, 256, 256, 49),
            call={"guidance_scale": 3.0, "negative_prompt": ""},
        ),
    ),
    "ltx2": Model(
        hub_id="Lightricks/LTX-2",
        pipeline="LTX2Pipeline",
        size=(30, 512, 768, 121),
        call={"guidance_scale": 3.0, "negative_prompt": NEGATIVE_VIDEO, "frame_rate": 24.0},
        parts={
            "transformer": ("LTX2VideoTransformer3DModel", {"num_layers": 4, "rope_type": "split"}),
            "vae": (
                "AutoencoderKLLTX2Video",
                {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8},
            ),
            "audio_vae": ("AutoencoderKLLTX2Audio", {}),
            "vocoder": ("pipelines.ltx2.LTX2Vocoder", {}),
            "connectors": ("pipelines.ltx2.LTX2TextConnectors", {"rope_type": "split"}),
            "scheduler": FLOW,
        },
        text={
            "prompt_embeds": (1024, "caption_channels", "text_proj_in_factor"),
            "prompt_attention_mask": (1024,),
        },
        small={
            "caption_channels": 2 * 128,
            "text_proj_in_factor": 3,
            "audio_num_attention_heads": 2,
            "cross_attention_dim": 2 * 128,
            "audio_cross_attention_dim": 2 * 64,
            "video_connector_num_attention_heads": 2,
            "audio_connector_num_attention_heads": 2,
            "decoder_block_out_channels": (16, 32, 64),
            "layers_per_block": (1,) * 5,
            "decoder_layers_per_block": (1,) * 4,
            "block_out_channels": (16, 32, 64, 64),
            "hidden_channels": 64,
        },
        side_step=32,
        frames_step=8,
        min_side=64,  # its decoder reflects latents at the borders
        fps=24,
    ),
    "wan": Model(
        hub_id="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        pipeline="WanPipeline",
        size=(50, 480, 832, 81),
        call={"guidance_scale": 5.0, "negative_prompt": ""},
        parts={
            "transformer": (
                "WanTransformer3DModel",
                {"num_layers": 10, "num_attention_heads": 12, "ffn_dim": 8960},
            ),
            "vae": ("AutoencoderKLWan", {}),
            "scheduler": FLOW,
        },
        text={"prompt_embeds": (512, "text_dim")},
    ),
    "anyflow": Model(
        hub_id="nvidia/AnyFlow-Wan2.1-T2V-14B-Diffusers",
        pipeline="AnyFlowPipeline",
        size=(4, 480, 832, 33),
        call={"guidance_scale": 1.0, "negative_prompt": ""},
        parts={
            "transformer": ("AnyFlowTransformer3DModel", {"num_layers": 3}),
            "vae": ("AutoencoderKLWan", {}),
            "scheduler": ("FlowMapEulerDiscreteScheduler", {"shift": 5.0}),
        },
        text={"prompt_embeds": (512, "text_dim")},
    ),
    "hunyuan-video": Model(
        hub_id="hunyuanvideo-community/HunyuanVideo",
        pipeline="HunyuanVideoPipeline",
        size=(30, 544, 960, 61),
        call={"guidance_scale": 6.0},
        parts={
            "transformer": (
                "HunyuanVideoTransformer3DModel",
                {"num_layers": 2, "num_single_layers": 4, "guidance_embeds": True},
            ),
            "vae": ("AutoencoderKLHunyuanVideo", {}),
            "scheduler": (FLOW[0], {"shift": 7.0}),
        },
        text={
            "prompt_embeds": (256, "text_embed_dim"),
            "prompt_attention_mask": (256,),
            "pooled_prompt_embeds": ("pooled_projection_dim",),
        },
        fps=15,
    ),
    "hunyuan-video15": Model(
        hub_id="hunyuanvideo-community/HunyuanVideo-1.5-480p_t2v",
        pipeline="HunyuanVideo15Pipeline",
        size=(50, 480, 848, 61),
        call={"negative_prompt": ""},
        parts={
            "transformer": ("HunyuanVideo15Transformer3DModel", {"num_layers": 4}),
            "vae": ("AutoencoderKLHunyuanVideo15", {}),
            "guider": ("guiders.ClassifierFreeGuidance", {"guidance_scale": 6.0}),
            "scheduler": (FLOW[0], {"shift": 5.0}),
        },
        text={
            "prompt_embeds": (1000, "text_embed_dim"),
            "prompt_embeds_mask": (1000,),
            "prompt_embeds_2": (256, "text_embed_2_dim"),
            "prompt_embeds_mask_2": (256,),
        },
        small={"text_embed_2_dim": 32, "image_embed_dim": 32, "block_out_channels": (32,) * 5},
        fps=15,
    ),
    "cogvideox": Model(
        hub_id="THUDM/CogVideoX-5b",
        pipeline="CogVideoXPipeline",
        size=(50, 480, 720, 49),
        call={"guidance_scale": 6.0, "negative_prompt": ""},
        parts={
            "transformer": (
                "CogVideoXTransformer3DModel",
                {
                    "num_layers": 5,
                    "num_attention_heads": 48,
                    "use_rotary_positional_embeddings": True,
                },
            ),
            "vae": ("AutoencoderKLCogVideoX", {"scaling_factor": 0.7}),
            "scheduler": ("CogVideoXDDIMScheduler", COG_NOISE),
        },
        text={"prompt_embeds": (226, "text_embed_dim")},
        fps=8,
    ),
    "easyanimate": Model(
        hub_id="alibaba-pai/EasyAnimateV5.1-7b-zh-diffusers",
        pipeline="EasyAnimatePipeline",
        size=(50, 512, 512, 49),
        call={"guidance_scale": 6.0, "negative_prompt": "bad detailed"},
        parts={
            "transformer": (
                "EasyAnimateTransformer3DModel",
                {
                    "num_layers": 4,
                    "mmdit_layers": 2,
                    "in_channels": 16,
                    "out_channels": 16,
                    "patch_size": 2,
                    "add_norm_text_encoder": True,
                },
            ),
            "vae": ("AutoencoderKLMagvit", {}),
            "scheduler": FLOW,
        },
        text={"prompt_embeds": (256, "text_embed_dim"), "prompt_attention_mask": (256,)},
        small={
            "mmdit_layers": 1,
            "block_out_channels": (16, 16, 16, 16),
            "norm_num_groups": 16,
        },
        fps=8,
    ),
    "motif-video": Model(
        hub_id="Motif-Technologies/Motif-Video-2B",
        pipeline="MotifVideoPipeline",
        size=(50, 736, 1280, 121),
        call={"negative_prompt": NEGATIVE_VIDEO},
        parts={
            "transformer": (
                "MotifVideoTransformer3DModel",
                {
                    "num_attention_heads": 12,
                    "num_layers": 2,
                    "num_single_layers": 4,
                    "num_decoder_layers": 1,
                    "text_embed_dim": 2560,
                    "enable_text_cross_attention_dual": True,
                    "enable_text_cross_attention_single": True,
                },
            ),
            "vae": ("AutoencoderKLWan", {}),
            "guider": ("guiders.ClassifierFreeGuidance", {}),
            "scheduler": FLOW,
        },
        text={"prompt_embeds": (512, "text_embed_dim"), "prompt_attention_mask": (512,)},
        fps=24,
    ),
    "mochi": Model(
        hub_id="genmo/mochi-1-preview",
        pipeline="MochiPipeline",
        size=(28, 480, 848, 19),
        call={"guidance_scale": 3.5, "negative_prompt": ""},
        parts={
            "transformer": ("MochiTransformer3DModel", {"num_layers": 4}),
            "vae": ("AutoencoderKLMochi", {}),
            "scheduler": (FLOW[0], {"invert_sigmas": True}),
        },
        text={"prompt_embeds": (256, "text_embed_dim"), "prompt_attention_mask": (256,)},
        small={
            "encoder_block_out_channels": (32, 32, 32, 32),
            "decoder_block_out_channels": (32, 32, 32, 32),
            "layers_per_block": (1,) * 5,
        },
        frames_step=6,
        fps=30,
    ),
    "flux": Model(
        hub_id="black-forest-labs/FLUX.1-dev",
        pipeline="FluxPipeline",
        size=(50, 1024, 1024),
        call={"guidance_scale": 3.5},
        parts={
            "transformer": (
                "FluxTransformer2DModel",
                {"num_layers": 5, "num_single_layers": 10, "guidance_embeds": True},
            ),
            "vae": FLUX_VAE,
            "scheduler": FLOW,
        },
        text={
            "prompt_embeds": (512, "joint_attention_dim"),
            "pooled_prompt_embeds": ("pooled_projection_dim",),
        },
    ),
    "flux2": Model(
        hub_id="black-forest-labs/FLUX.2-dev",
        pipeline="Flux2Pipeline",
        size=(50, 1024, 1024),
        call={"guidance_scale": 4.0},
        parts={
            "transformer": ("Flux2Transformer2DModel", {"num_layers": 2, "num_single_layers": 6}),
            "vae": ("AutoencoderKLFlux2", {}),
            "scheduler": FLOW,
        },
        text={"prompt_embeds": (512, "joint_attention_dim")},
    ),
    "chroma": Model(
        hub_id="lodestones/Chroma1-HD",
        pipeline="ChromaPipeline",
        size=(40, 1024, 1024),
        call={"guidance_scale": 3.0, "negative_prompt": ""},
        parts={
            "transformer": ("ChromaTransformer2DModel", {"num_layers": 5, "num_single_layers": 10}),
            "vae": FLUX_VAE,
            "scheduler": FLOW,
        },
        text={"prompt_embeds": (512, "joint_attention_dim"), "prompt_attention_mask": (512,)},
        small={"approximator_hidden_dim": 64, "approximator_layers": 1},
    ),
    "ovis-image": Model(
        hub_id="AIDC-AI/Ovis-Image-7B",
        pipeline="OvisImagePipeline",
        size=(50, 1024, 1024),
        call={"guidance_scale": 5.0, "negative_prompt": ""},
        parts={
            "transformer": (
                "OvisImageTransformer2DModel",
                {"num_layers": 2, "num_single_layers": 9},
            ),
            "vae": FLUX_VAE,
            "scheduler": FLOW,
        },
        text={"prompt_embeds": (256, "joint_attention_dim")},
    ),
    "prx": Model(
        hub_id="Photoroom/prx-512-t2i-sft",
        pipeline="PRXPipeline",
        size=(28, 512, 512),
        call={"guidance_scale": 5.0, "negative_prompt": ""},
        parts={
            "transformer": ("PRXTransformer2DModel", {"depth": 4}),
            "vae": FLUX_VAE,
            "scheduler": FLOW,
        },
        text={"prompt_embeds": (256, "context_in_dim"), "prompt_attention_mask": (256,)},
        small={"hidden_size": 2 * 64, "num_heads": 2, "context_in_dim": 64},
    ),
    "bria": Model(
        hub_id="briaai/BRIA-3.2",
        pipeline="BriaPipeline",
        size=(30, 1024, 1024),
        call={"guidance_scale": 5.0, "negative_prompt": ""},
        parts={
            "transformer": (
                "BriaTransformer2DModel",
                {
                    "num_layers": 3,
                    "num_single_layers": 10,
                    "in_channels": 16,
                    "attention_head_dim": 96,
                    "axes_dims_rope": (0, 48, 48),
                },
            ),
            "vae": ("AutoencoderKL", IMAGE_VAE),
            "scheduler": FLOW,
        },
        text={"prompt_embeds": (128, "joint_attention_dim")},
        small={"pooled_projection_dim": None},
    ),
    "lumina2": Model(
        hub_id="Alpha-VLLM/Lumina-Image-2.0",
        pipeline="Lumina2Pipeline",
        size=(30, 1024, 1024),
        call={"guidance_scale": 4.0, "negative_prompt": ""},
        parts={
            "transformer": ("Lumina2Transformer2DModel", {"num_layers": 8, "cap_feat_dim": 2304}),
            "vae": FLUX_VAE,
            "scheduler": (FLOW[0], {"shift": 6.0}),
        },
        text={"prompt_embeds": (256, "cap_feat_dim"), "prompt_attention_mask": (256,)},
        small={"hidden_size": 2 * 96, "num_kv_heads": 1, "cap_feat_dim": 64},
    ),
    "z-image": Model(
        hub_id="Tongyi-MAI/Z-Image-Turbo",
        pipeline="ZImagePipeline",
        size=(9, 1024, 1024),
        call={"guidance_scale": 0.0, "negative_prompt": ""},
        parts={
            "transformer": ("ZImageTransformer2DModel", {"n_layers": 8}),
            "vae": FLUX_VAE,
            "scheduler": FLOW,
        },
        text={"prompt_embeds": (96, "cap_feat_dim")},
        small={
            "n_layers": 2,
            "n_refiner_layers": 1,
            "dim": 2 * 128,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": 64,
        },
    ),
    "ernie-image": Model(
        hub_id="baidu/ERNIE-Image",
        pipeline="ErnieImagePipeline",
        size=(50, 1024, 1024),
        call={"guidance_scale": 4.0, "negative_prompt": ""},
        parts={
            "transformer": (
                "ErnieImageTransformer2DModel",
                {
                    "num_layers": 4,
                    "hidden_size": 4096,
                    "num_attention_heads": 32,
                    "ffn_hidden_size": 12288,
                    "text_in_dim": 3072,
                },
            ),
            "vae": ("AutoencoderKLFlux2", {}),
            "scheduler": FLOW,
        },
        text={"prompt_embeds": (128, "text_in_dim")},
        small={"hidden_size": 2 * 128, "ffn_hidden_size": 512, "text_in_dim": 64},
    ),
    "krea2": Model(
        hub_id=None,
        pipeline="Krea2Pipeline",
        size=(28, 1024, 1024),
        call={"guidance_scale": 4.5, "negative_prompt": ""},
        parts={
            "transformer": ("Krea2Transformer2DModel", {"num_layers": 4}),
            "vae": ("AutoencoderKLQwenImage", {}),
            "scheduler": (
                FLOW[0],
                {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15},
            ),
        },
        text={
            "prompt_embeds": (512, "num_text_layers", "text_hidden_dim"),
            "prompt_embeds_mask": (512,),
        },
        small={
            "num_key_value_heads": 1,
            "intermediate_size": 512,
            "text_hidden_dim": 64,
            "num_text_layers": 3,
            "text_num_attention_heads": 2,
            "text_num_key_value_heads": 2,
            "text_intermediate_size": 128,
            "num_layerwise_text_blocks": 1,
            "num_refiner_text_blocks": 1,
        },
    ),
    "qwenimage": Model(
        hub_id="Qwen/Qwen-Image",
        pipeline="QwenImagePipeline",
        size=(50, 1328, 1328),
        call={"true_cfg_scale": 4.0, "negative_prompt": " "},
        parts={
            "transformer": ("QwenImageTransformer2DModel", {"num_layers": 6}),
            "vae": ("AutoencoderKLQwenImage", {}),
            "scheduler": FLOW,
        },
        text={"prompt_embeds": (128, "joint_attention_dim"), "prompt_embeds_mask": (128,)},
    ),
    "hunyuan-image": Model(
        hub_id="hunyuanvideo-community/HunyuanImage-2.1-Diffusers",
        pipeline="HunyuanImagePipeline",
        size=(50, 2048, 2048),
        call={"negative_prompt": ""},
        parts={
            "transformer": (
                "HunyuanImageTransformer2DModel",
                {"num_layers": 2, "num_single_layers": 4},
            ),
            "vae": (
                "AutoencoderKLHunyuanImage",
                {
                    "in_channels": 3,
                    "out_channels": 3,
                    "latent_channels": 64,
                    "block_out_channels": (128, 256, 512, 512, 1024, 1024),
                    "layers_per_block": 2,
                    "spatial_compression_ratio": 32,
                    "sample_size": 384,
                    "scaling_factor": 0.75289,
                },
            ),
            "guider": ("guiders.AdaptiveProjectedMixGuidance", {"guidance_scale": 3.5}),
            "scheduler": (FLOW[0], {"shift": 5.0}),
        },
        text={
            "prompt_embeds": (1000, "text_embed_dim"),
            "prompt_embeds_mask": (1000,),
            "prompt_embeds_2": (128, "text_embed_2_dim"),
            "prompt_embeds_mask_2": (128,),
        },
        small={"text_embed_2_dim": 32, "block_out_channels": (32, 32, 32, 32, 128, 128)},
        side_step=32,
    ),
    "cogview3-plus": Model(
        hub_id="THUDM/CogView3-Plus-3B",
        pipeline="CogView3PlusPipeline",
        size=(50, 1024, 1024),
        call={"guidance_scale": 5.0, "negative_prompt": ""},
        parts={
            "transformer": ("CogView3PlusTransformer2DModel", {"num_layers": 8}),
            "vae": ("AutoencoderKL", COGVIEW_VAE),
            "scheduler": ("CogVideoXDDIMScheduler", {**COG_NOISE, "snr_shift_scale": 4.0}),
        },
        text={"prompt_embeds": (224, "text_embed_dim")},
        max_side=2048,  # of its position embeddings
    ),
    "cogview4": Model(
        hub_id="THUDM/CogView4-6B",
        pipeline="CogView4Pipeline",
        size=(50, 1024, 1024),
        call={"guidance_scale": 5.0, "negative_prompt": ""},
        parts={
            "transformer": (
                "CogView4Transformer2DModel",
                {"num_layers": 4, "attention_head_dim": 128, "num_attention_heads": 32},
            ),
            "vae": ("AutoencoderKL", {**COGVIEW_VAE, "scaling_factor": 1.0}),
            "scheduler": FLOW,
        },
        text={"prompt_embeds": (224, "text_embed_dim")},
    ),
    "pixart-sigma": Model(
        hub_id="PixArt-alpha/PixArt-Sigma-XL-2-1024-MS",
        pipeline="PixArtSigmaPipeline",
        size=(20, 1024, 1024),
        # Binning would resize other images than those of its list of sizes.
        call={"guidance_scale": 4.5, "negative_prompt": "", "use_resolution_binning": False},
        parts={
            "transformer": (
                "PixArtTransformer2DModel",
                {
                    "num_layers": 8,
                    "caption_channels": 4096,
                    "interpolation_scale": 2,
                    "use_additional_conditions": False,
                },
            ),
            "vae": ("AutoencoderKL", {**IMAGE_VAE, "scaling_factor": 0.13025}),
            "scheduler": ("DPMSolverMultistepScheduler", {}),
        },
        text={"prompt_embeds": (300, "caption_channels"), "prompt_attention_mask": (300,)},
        small={"cross_attention_dim": 2 * 72, "caption_channels": 64},
    ),
    "cosmos": Model(
        hub_id="nvidia/Cosmos-Predict2-2B-Text2Image",
        pipeline="Cosmos2TextToImagePipeline",
        size=(35, 768, 1360),
        call={"guidance_scale": 7.0, "negative_prompt": ""},
        parts={
            "transformer": (
                "CosmosTransformer3DModel",
                {
                    "num_attention_heads": 16,
                    "rope_scale": (1.0, 4.0, 4.0),
                    "extra_pos_embed_type": None,
                    "concat_padding_mask": False,  # it needs torchvision
                },
            ),
            "vae": ("AutoencoderKLWan", {}),
            "safety_checker": ("SkipSafetyChecks", {}),
            "scheduler": (FLOW[0], {"use_karras_sigmas": True}),
        },
        text={"prompt_embeds": (512, "text_embed_dim")},
        small={"adaln_lora_dim": 32},
        max_side=2048,  # of its rotary tables
    ),
    "sd3": Model(
        hub_id="stabilityai/stable-diffusion-3.5-large",
        pipeline="StableDiffusion3Pipeline",
        size=(28, 1024, 1024),
        call={"guidance_scale": 3.5, "negative_prompt": ""},
        parts={
            "transformer": (
                "SD3Transformer2DModel",
                {
                    "num_layers": 8,
                    "num_attention_heads": 38,
                    "caption_projection_dim": 38 * 64,
                    "pos_embed_max_size": 192,
                    "qk_norm": "rms_norm",
                },
            ),
            "vae": (
                "AutoencoderKL",
                {
                    **IMAGE_VAE,
                    "latent_channels": 16,
                    "scaling_factor": 1.5305,
                    "shift_factor": 0.0609,
                },
            ),
            "scheduler": FLOW,
        },
        text={
            "prompt_embeds": (333, "joint_attention_dim"),
            "pooled_prompt_embeds": ("pooled_projection_dim",),
        },
        max_side=3072,  # of its position embeddings
    ),
    "sdxl": Model(
        hub_id="stabilityai/stable-diffusion-xl-base-1.0",
        pipeline="StableDiffusionXLPipeline",
        size=(50, 1024, 1024),
        call={"guidance_scale": 5.0, "negative_prompt": ""},
        parts={
            "unet": (
                "UNet2DConditionModel",
                {
                    "sample_size": 128,
                    "down_block_types": (
                        "DownBlock2D",
                        "CrossAttnDownBlock2D",
                        "CrossAttnDownBlock2D",
                    ),
                    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
                    "block_out_channels": (320, 640, 1280),
                    "transformer_layers_per_block": (1, 2, 10),
                    "attention_head_dim": (5, 10, 20),  # numbers of heads, despite the name
                    "cross_attention_dim": 2048,
                    "use_linear_projection": True,
                    "addition_embed_type": "text_time",
                    "addition_time_embed_dim": 256,
                    "projection_class_embeddings_input_dim": 2816,
                },
            ),
            "vae": ("AutoencoderKL", {**IMAGE_VAE, "scaling_factor": 0.13025}),
            "scheduler": ("EulerDiscreteScheduler", {**NOISE, "steps_offset": 1}),
        },
        text={"prompt_embeds": (77, "cross_attention_dim"), "pooled_prompt_embeds": (1280,)},
        small={
            "unet": {
                "num_attention_heads": None,
                "block_out_channels": (64, 64, 128),
                "transformer_layers_per_block": (1, 1, 2),
                "attention_head_dim": (1, 1, 2),
                "cross_attention_dim": 64,
            },
        },
    ),
    "sd15": Model(
        hub_id="stable-diffusion-v1-5/stable-diffusion-v1-5",
        pipeline="StableDiffusionPipeline",
        size=(50, 512, 512),
        call={"guidance_scale": 7.5, "negative_prompt": ""},
        parts={
            "unet": ("UNet2DConditionModel", {"sample_size": 64, "cross_attention_dim": 768}),
            "vae": ("AutoencoderKL", IMAGE_VAE),
            "scheduler": ("PNDMScheduler", {**NOISE, "skip_prk_steps": True, "steps_offset": 1}),
        },
        text={"prompt_embeds": (77, "cross_attention_dim")},
        small={
            "unet": {
                "num_attention_heads": None,
                "block_out_channels": (64, 64, 128, 128),
                "cross_attention_dim": 64,
            },
        },
        options={"requires_safety_checker": False},
    ),
}


def load_kernel(kernel: str | None = None):
    """The kernel package: `kernel` is a Hub id or a local path, None this checkout's build.

    Raises LookupError if the checkout has no build for this machine.
    """
    repo_id = KERNEL_ID
    is_checkouts = kernel is None and "LOCAL_KERNELS" not in os.environ
    if is_checkouts:
        os.environ["LOCAL_KERNELS"] = f"{KERNEL_ID}={CHECKOUT}"
    elif kernel is not None and os.path.isdir(kernel):
        os.environ["LOCAL_KERNELS"] = f"{KERNEL_ID}={Path(kernel).resolve()}"
    elif kernel is not None:
        repo_id = kernel
    try:
        return get_kernel(repo_id, version=KERNEL_VERSION, trust_remote_code=True)
    except FileNotFoundError as error:
        if is_checkouts:
            raise LookupError("There is no build for this machine here") from error
        raise


def why_not_on_hub(repo_id: str) -> str | None:
    """Why the Hub does not give a model's repository, None if it does."""
    try:
        HfApi().model_info(repo_id, timeout=5)
    except (*HUB_ERRORS, ValueError) as error:  # ValueError: not the form of an id
        return f"the Hugging Face Hub does not give {repo_id} ({type(error).__name__})"
    return None


def published_pipeline(model: Model, dtype: torch.dtype):
    """The pipeline from the Hub, or from the cache; LookupError if neither can be used."""
    if model.hub_id is None:
        raise LookupError("its weights are not on the Hub")
    offline = why_not_on_hub(model.hub_id)
    try:
        return diffusers.DiffusionPipeline.from_pretrained(
            model.hub_id, dtype=dtype, local_files_only=offline is not None
        )
    except OSError as error:
        if offline is None:
            raise
        raise LookupError(f"{offline}, and it is not in the cache") from error


def parameters(function) -> dict[str, inspect.Parameter]:
    """The parameters of a function or of a class's constructor, by name."""
    return dict(inspect.signature(function).parameters)


@torch.no_grad()
def randomize(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Fill a model with random weights of this dtype, or float32 where diffusers keeps that.

    Each layer has unit gain, so that the result has contrast.
    """
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, weight in model.named_parameters():
        if name.endswith(".weight") and weight.ndim > 1:
            weight.normal_(std=weight[0].numel() ** -0.5)
        is_kept = not kept.isdisjoint(name.split("."))
        weight.data = weight.data.to(torch.float32 if is_kept else dtype)
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and not kept.isdisjoint(name.split(".")):
            buffer.data = buffer.data.float()
    return model.eval()


def random_module(make, device: str, dtype: torch.dtype) -> torch.nn.Module:
    """The module that `make` makes, with random weights, made on the device."""
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # as from_pretrained does: no copy in float32
    try:
        with torch.device(device):
            return randomize(make(), dtype)
    finally:
        torch.set_default_dtype(default_dtype)


def random_parts(model: Model, small: bool, device: str, dtype: torch.dtype, seed: int) -> dict:
    """The parts of a pipeline with random weights: the published widths, or small."""
    parts = {}
    torch.manual_seed(seed)
    for part, (path, config) in model.parts.items():
        make = globals().get(path) or attrgetter(path)(diffusers)
        if small:
            changes = SMALL | model.small | model.small.get(part, {})
            config = config | {key: changes[key] for key in changes.keys() & parameters(make)}
        make_part = functools.partial(make, **config)
        is_module = issubclass(make, torch.nn.Module)
        parts[part] = random_module(make_part, device, dtype) if is_module else make_part()
    return parts


def random_pipeline(model: Model, small: bool, device: str, dtype: torch.dtype, seed: int):
    """A pipeline with random weights and no text encoders: the published widths, or small."""
    cls = getattr(diffusers, model.pipeline)
    # Parameters without a default: text encoders, tokenizers, and the parts made here.
    empty = {name: None for name, p in parameters(cls).items() if p.default is p.empty}
    return cls(**(empty | random_parts(model, small, device, dtype, seed)), **model.options)


def trained_pipeline(trained: Trained, device: str, dtype: torch.dtype):
    """The small trained pipeline. On the CPU, its autoencoder is in float32.

    PyTorch's bfloat16 convolutions are more than 100 times slower on CPUs.
    """
    vae_dtype = torch.float32 if device == "cpu" else dtype
    return diffusers.DiffusionPipeline.from_pretrained(
        trained.folder, dtype={"default": dtype, "vae": vae_dtype}, local_files_only=True
    )


def load_pipeline(
    model: Model, device: str, dtype: torch.dtype, random_weights: bool = False, seed: int = 0
) -> tuple:
    """A pipeline on the host or the device, and the reason if its model is small, otherwise None.

    The model is small where there is no GPU, or no access to the published weights. It is the trained
    one if there is one, unless random weights are asked for.
    """
    if device == "cpu":
        reason = "there is no CUDA GPU"
    elif random_weights:
        return random_pipeline(model, False, device, dtype, seed), None
    else:
        try:
            return published_pipeline(model, dtype), None
        except LookupError as error:
            reason = str(error)
    if model.trained is not None and not random_weights:
        return trained_pipeline(model.trained, device, dtype), reason
    return random_pipeline(model, True, device, dtype, seed), reason


def unknown_words(pipe, prompt: str) -> list[str]:
    """The prompt's words, without punctuation, that the pipeline's tokenizer does not know."""
    tokenizer = pipe.tokenizer
    words = dict.fromkeys(word.strip(string.punctuation) for word in prompt.split())
    return [word for word in words if tokenizer.unk_token_id in tokenizer(word).input_ids]


def made_up(text: str, *shape: int) -> torch.Tensor:
    """Normal random numbers determined by the text, in place of its embeddings."""
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(text.encode()))
    return torch.randn(shape, generator=generator)


def call_arguments(model: Model, pipe, small: bool, prompt: str, **changes) -> dict:
    """Arguments of the pipeline's call: the card's or the small model's, with these changes.

    A pipeline without text encoder gets made-up prompt embeddings.
    """
    values, call = SMALL_SIZE if small else model.size, model.call
    if small and model.trained is not None and pipe.text_encoder is not None:
        values, call = model.trained.size, model.trained.call
    size = dict(zip(SIZE[: len(model.size)], values, strict=False))
    if model.is_video:  # the small size's frames are not those of every model
        size["num_frames"] -= (size["num_frames"] - 1) % model.frames_step
    arguments = {"prompt": prompt, **call, **size, **changes}
    if getattr(pipe.vae.config, "timestep_conditioning", False):
        # LTX-Video 0.9.1 and later decode slightly noised latents.
        arguments |= {"decode_timestep": 0.05, "decode_noise_scale": 0.025}
    if pipe.text_encoder is not None:
        return arguments
    denoiser = getattr(pipe, model.denoiser)
    config: dict = {}
    for part in (*model.parts, model.denoiser):
        config |= getattr(getattr(pipe, part), "config", {})
    prompts = [name for name in arguments if name.endswith("prompt")]
    texts = {name.removesuffix("prompt"): arguments[name] for name in prompts}
    arguments |= dict.fromkeys(prompts)  # their defaults are not always None
    for prefix, text in texts.items():
        for name, shape in model.text.items():
            sizes = [config[size] if isinstance(size, str) else size for size in shape]
            if "mask" in name:
                value = torch.ones(1, *sizes, dtype=torch.bool)
            else:
                value = made_up(text, 1, *sizes).to(denoiser.dtype)
            value = value.to(denoiser.device)
            # Z-Image concatenates lists of prompts.
            arguments[prefix + name] = list(value) if model.pipeline == "ZImagePipeline" else value
    return arguments
