"""The models of the examples: diffusers pipelines with published or random weights, and the kernels."""

from __future__ import annotations

import inspect
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import diffusers
import torch
from huggingface_hub import HfApi
from kernels import get_kernel

KERNEL_ID = "org/h100-diffusers-kernels"
KERNEL_VERSION = 1
CHECKOUT = Path(__file__).resolve().parents[1]

# Arguments of the pipelines; and their values for a small model.
SIZE = ("num_inference_steps", "height", "width", "num_frames")
SMALL_SIZE = (4, 128, 192, 9)


@dataclass(frozen=True)
class Model:
    """A model on the Hub, and the parts of a pipeline like it with random weights.

    Attributes:
        size: steps, height, width and, for a video, frames, as on the model's card.
        call: the card's other arguments of the pipeline.
        transformer, vae: the class, and its published configuration where diffusers has another
            default. The transformers have fewer blocks, except LTX-Video's.
        small: what a small model changes besides SMALL.
        text_tokens: the length of made-up prompt embeddings.
        side_step, frames_step: sides are multiples of the one, frames of the other plus 1.
        fps: frames per second.
    """

    hub_id: str
    pipeline: str
    size: tuple[int, ...]
    call: dict[str, float | str]
    transformer: tuple[str, dict]
    vae: tuple[str, dict]
    small: dict = field(default_factory=dict)
    scheduler: dict = field(default_factory=lambda: {"shift": 3.0})
    text_tokens: int = 512
    side_step: int = 16
    frames_step: int = 4
    fps: int = 16

    @property
    def is_video(self) -> bool:
        return len(self.size) == len(SIZE)

    @property
    def guidance(self) -> str:
        """The name of the pipeline's argument."""
        return next(name for name in self.call if name.endswith("scale"))


IMAGE_VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 16,
}
# What a small model changes, where its class has it.
SMALL = {
    "num_layers": 2,
    "num_single_layers": 2,
    "num_attention_heads": 2,
    "caption_projection_dim": 2 * 64,
    "ffn_dim": 512,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
    "text_dim": 64,
    "block_out_channels": (32, 32, 32, 32),
    "layers_per_block": 1,
    "base_dim": 16,
    "num_res_blocks": 1,
}

MODELS = {
    "ltx": Model(
        hub_id="Lightricks/LTX-Video",
        pipeline="LTXPipeline",
        size=(50, 512, 768, 161),
        call={
            "guidance_scale": 3.0,
            "negative_prompt": "worst quality, inconsistent motion, blurry, jittery, distorted",
        },
        transformer=("LTXVideoTransformer3DModel", {}),
        vae=("AutoencoderKLLTXVideo", {}),
        small={
            "cross_attention_dim": 2 * 64,
            "caption_channels": 64,
            "block_out_channels": (16, 32, 64, 64),
            "decoder_block_out_channels": (16, 32, 64, 64),
            "layers_per_block": (1,) * 5,
            "decoder_layers_per_block": (1,) * 5,
        },
        scheduler={
            "use_dynamic_shifting": True,
            "base_shift": 0.95,
            "max_shift": 2.05,
            "base_image_seq_len": 1024,
            "max_image_seq_len": 4096,
            "shift_terminal": 0.1,
        },
        text_tokens=128,
        side_step=32,
        frames_step=8,
        fps=25,
    ),
    "wan": Model(
        hub_id="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        pipeline="WanPipeline",
        size=(50, 480, 832, 81),
        call={"guidance_scale": 5.0, "negative_prompt": ""},
        transformer=(
            "WanTransformer3DModel",
            {"num_layers": 10, "num_attention_heads": 12, "ffn_dim": 8960},
        ),
        vae=("AutoencoderKLWan", {}),
    ),
    "flux": Model(
        hub_id="black-forest-labs/FLUX.1-dev",
        pipeline="FluxPipeline",
        size=(50, 1024, 1024),
        call={"guidance_scale": 3.5},
        transformer=(
            "FluxTransformer2DModel",
            {"num_layers": 5, "num_single_layers": 10, "guidance_embeds": True},
        ),
        vae=("AutoencoderKL", {**IMAGE_VAE, "scaling_factor": 0.3611, "shift_factor": 0.1159}),
    ),
    "flux2": Model(
        hub_id="black-forest-labs/FLUX.2-dev",
        pipeline="Flux2Pipeline",
        size=(50, 1024, 1024),
        call={"guidance_scale": 4.0},
        transformer=("Flux2Transformer2DModel", {"num_layers": 2, "num_single_layers": 6}),
        vae=("AutoencoderKLFlux2", {}),
    ),
    "sd3": Model(
        hub_id="stabilityai/stable-diffusion-3.5-large",
        pipeline="StableDiffusion3Pipeline",
        size=(28, 1024, 1024),
        call={"guidance_scale": 3.5, "negative_prompt": ""},
        transformer=(
            "SD3Transformer2DModel",
            {
                "num_layers": 8,
                "num_attention_heads": 38,
                "caption_projection_dim": 38 * 64,
                "pos_embed_max_size": 192,
                "qk_norm": "rms_norm",
            },
        ),
        vae=("AutoencoderKL", {**IMAGE_VAE, "scaling_factor": 1.5305, "shift_factor": 0.0609}),
        text_tokens=333,
    ),
    "qwenimage": Model(
        hub_id="Qwen/Qwen-Image",
        pipeline="QwenImagePipeline",
        size=(50, 1328, 1328),
        call={"true_cfg_scale": 4.0, "negative_prompt": " "},
        transformer=("QwenImageTransformer2DModel", {"num_layers": 6}),
        vae=("AutoencoderKLQwenImage", {}),
        text_tokens=128,
    ),
}


def load_kernel(kernel: str | None = None):
    """The kernel package: `kernel` is a Hub id or a local path, None this checkout's build."""
    repo_id = KERNEL_ID
    if kernel is not None and os.path.isdir(kernel):
        os.environ["LOCAL_KERNELS"] = f"{KERNEL_ID}={Path(kernel).resolve()}"
    elif kernel is not None:
        repo_id = kernel
    elif "LOCAL_KERNELS" not in os.environ and (CHECKOUT / "build").is_dir():
        os.environ["LOCAL_KERNELS"] = f"{KERNEL_ID}={CHECKOUT}"
    return get_kernel(repo_id, version=KERNEL_VERSION, trust_remote_code=True)


def published_pipeline(model: Model, dtype: torch.dtype):
    """The pipeline from the Hub, or from the cache; LookupError if neither can be used."""
    offline = None
    try:
        HfApi().model_info(model.hub_id, timeout=5)
    except Exception as error:  # no common base: huggingface_hub has changed its HTTP client
        offline = f"the Hugging Face Hub does not answer ({type(error).__name__})"
    try:
        return diffusers.DiffusionPipeline.from_pretrained(
            model.hub_id, dtype=dtype, local_files_only=offline is not None
        )
    except OSError as error:
        if offline is None:
            raise
        raise LookupError(f"{offline} and {model.hub_id} is not in the cache") from error


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
        if kept.isdisjoint(name.split(".")):
            weight.data = weight.data.to(dtype)
    return model.eval()


def random_pipeline(model: Model, small: bool, device: str, dtype: torch.dtype, seed: int):
    """A pipeline with random weights and no text encoders: the published widths, or small."""
    cls = getattr(diffusers, model.pipeline)
    # Parameters without a default: text encoders, tokenizers, and the parts made here.
    parts = {name: None for name, p in parameters(cls).items() if p.default is p.empty}
    parts["scheduler"] = diffusers.FlowMatchEulerDiscreteScheduler(**model.scheduler)
    torch.manual_seed(seed)
    for part in ("transformer", "vae"):
        name, config = getattr(model, part)
        module = getattr(diffusers, name)
        if small:
            changes = SMALL | model.small
            config = config | {key: changes[key] for key in changes.keys() & parameters(module)}
        with torch.device(device):
            parts[part] = randomize(module(**config), dtype)
    return cls(**parts)


def load_pipeline(
    model: Model, device: str, dtype: torch.dtype, random_weights: bool = False, seed: int = 0
) -> tuple:
    """A pipeline on the host or the device, and the reason if its model is small, otherwise None.

    The model is small where there is no GPU, or no access to the published weights.
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
    return random_pipeline(model, True, device, dtype, seed), reason


def made_up(text: str, *shape: int) -> torch.Tensor:
    """Normal random numbers determined by the text, in place of its embeddings."""
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(text.encode()))
    return torch.randn(shape, generator=generator)


def call_arguments(model: Model, pipe, small: bool, prompt: str, **changes) -> dict:
    """Arguments of the pipeline's call: the card's, or a small size, with these changes.

    A pipeline without text encoder gets made-up prompt embeddings.
    """
    size = dict(zip(SIZE, SMALL_SIZE if small else model.size, strict=False))
    size = {name: size[name] for name in SIZE[: len(model.size)]}
    arguments = {"prompt": prompt, **model.call, **size, **changes}
    if getattr(pipe.vae.config, "timestep_conditioning", False):
        # LTX-Video 0.9.1 and later decode slightly noised latents.
        arguments |= {"decode_timestep": 0.05, "decode_noise_scale": 0.025}
    if pipe.text_encoder is not None:
        return arguments
    config, dtype = pipe.transformer.config, pipe.transformer.dtype
    width = next(
        config[name]
        for name in ("text_dim", "caption_channels", "joint_attention_dim")
        if name in config
    )
    embeddings = {}
    for name in [name for name in arguments if name.endswith("prompt")]:
        text, prefix = arguments.pop(name), name.removesuffix("prompt")
        mask = torch.ones(1, model.text_tokens, dtype=torch.bool)
        embeddings |= {
            f"{name}_embeds": made_up(text, 1, model.text_tokens, width).to(dtype),
            f"{name}_embeds_mask": mask,
            f"{name}_attention_mask": mask,
            f"{prefix}pooled_prompt_embeds": made_up(
                text, 1, config.get("pooled_projection_dim", 0)
            ).to(dtype),
        }
    taken = embeddings.keys() & parameters(pipe.__call__)
    return arguments | {name: embeddings[name].to(pipe.transformer.device) for name in taken}
