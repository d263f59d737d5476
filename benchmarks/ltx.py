"""LTX-Video at its published sizes, with random weights or with such that its attention is peaked, and
the modes that benchmarks compare.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)

KERNEL_ID = "org/h100-diffusers-kernels"
CHECKOUT = Path(__file__).resolve().parents[1]
NO_ATTENTION = "injected-no-attention"  # the model's own attention between the kernels
MODES = ("eager", "compiled", "injected", NO_ATTENTION, "injected+compiled")
# Standard deviation of the self-attention's scores, in nats: random weights have one of 1.
WEIGHTS = {"random": 1.0, "peaked": 3.0}
TEXT_TOKENS = 128
FRAME_RATE = 25
SPATIAL_COMPRESSION, TEMPORAL_COMPRESSION = 32, 8

# diffusers' default sizes of both models are the published ones (LTX-Video 0.9.0, 2B).
TINY_TRANSFORMER = {
    "in_channels": 16,
    "out_channels": 16,
    "num_attention_heads": 2,
    "attention_head_dim": 64,
    "cross_attention_dim": 128,
    "caption_channels": 64,
    "num_layers": 2,
}
TINY_VAE = {
    "latent_channels": 16,
    "block_out_channels": (16, 16, 32, 32),
    "decoder_block_out_channels": (16, 16, 32, 32),
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1, 1),
}
# The scheduler that the published pipeline is configured with.
SCHEDULER = {
    "use_dynamic_shifting": True,
    "base_shift": 0.95,
    "max_shift": 2.05,
    "base_image_seq_len": 1024,
    "max_image_seq_len": 4096,
    "shift_terminal": 0.1,
}


@dataclass(frozen=True)
class VideoSize:
    """Size of a video in pixels, and of its latent."""

    frames: int
    height: int
    width: int

    @property
    def latent(self) -> tuple[int, int, int]:
        return (
            (self.frames - 1) // TEMPORAL_COMPRESSION + 1,
            self.height // SPATIAL_COMPRESSION,
            self.width // SPATIAL_COMPRESSION,
        )

    @property
    def tokens(self) -> int:
        return math.prod(self.latent)

    def __str__(self) -> str:
        return f"{self.frames}x{self.height}x{self.width}"


def load_kernel() -> tuple[ModuleType, float]:
    """The kernel package through get_kernel, and the seconds that loading took.

    This checkout's build unless LOCAL_KERNELS says otherwise.
    """
    from kernels import get_kernel

    if (CHECKOUT / "build").is_dir():
        os.environ.setdefault("LOCAL_KERNELS", f"{KERNEL_ID}={CHECKOUT}")
    begin = time.perf_counter()
    kernel = get_kernel(KERNEL_ID, version=1, trust_remote_code=True)
    return kernel, time.perf_counter() - begin


def _randomize(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Unit-gain weights: what passes a layer keeps its scale, so no branch vanishes or blows up."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith("weight") and weight.ndim > 1:
                weight.normal_(std=weight[0].numel() ** -0.5)
            elif ".norm_" in name:
                weight.normal_(mean=1.0, std=0.1)  # of query and key, where trained ones are not 1
            weight.data = weight.data.to(dtype)
    return module.eval()


def transformer(
    device: torch.device, dtype: torch.dtype, tiny: bool = False, seed: int = 0
) -> LTXVideoTransformer3DModel:
    """LTX-Video's transformer, its random weights made on the device."""
    torch.manual_seed(seed)
    with device:
        model = LTXVideoTransformer3DModel(**(TINY_TRANSFORMER if tiny else {}))
    return _randomize(model, dtype)


def vae(
    device: torch.device, dtype: torch.dtype, tiny: bool = False, seed: int = 0
) -> AutoencoderKLLTXVideo:
    """LTX-Video's autoencoder, its random weights made on the device."""
    torch.manual_seed(seed)
    with device:
        model = AutoencoderKLLTXVideo(**(TINY_VAE if tiny else {}))
    return _randomize(model, dtype)


def pipeline(transformer: LTXVideoTransformer3DModel, vae: AutoencoderKLLTXVideo) -> LTXPipeline:
    """The pipeline without text encoder: it takes prompt embeddings."""
    pipe = LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=vae,
        text_encoder=None,
        tokenizer=None,
        transformer=transformer,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def twin(model: torch.nn.Module) -> torch.nn.Module:
    """Modules of its own over the same parameters and buffers, which are not copied."""
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


@contextlib.contextmanager
def weights(model: torch.nn.Module, name: str) -> Iterator[None]:
    """Have the model's random weights, and its twins', be those of WEIGHTS for a while, in place.

    What sets the scores is the weights of query's and key's norms, of self- and cross-attention.
    """
    norms = [
        weight
        for key, weight in model.named_parameters()
        if key.endswith(("norm_q.weight", "norm_k.weight"))
    ]
    random = [weight.detach().clone() for weight in norms]
    factor = WEIGHTS[name] ** 0.5  # of the query's weights and of the key's
    try:
        with torch.no_grad():
            for weight in norms:
                weight.mul_(factor)
        yield
    finally:
        with torch.no_grad():
            for weight, before in zip(norms, random, strict=True):
                weight.copy_(before)


def inject(kernel: ModuleType, pipe_or_model: object, mode: str) -> None:
    """As a mode that begins with "injected" asks for."""
    kernel.inject_kernels(pipe_or_model, attention=mode != NO_ATTENTION)


def compile_whole(model: torch.nn.Module) -> None:
    """torch.compile in place: one graph, static shapes, default mode."""
    model.compile(fullgraph=True, dynamic=False)


def prompt(
    model: LTXVideoTransformer3DModel, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Made-up prompt and negative prompt, as arguments of the pipeline.

    Embeddings (1, 128, caption channels) and boolean masks (1, 128) with padding: 90 and 20 tokens.
    """
    generator = torch.Generator(device).manual_seed(seed)
    arguments = {}
    for name, tokens in (("prompt", 90), ("negative_prompt", 20)):
        arguments[f"{name}_embeds"] = torch.randn(
            1,
            TEXT_TOKENS,
            model.config.caption_channels,
            generator=generator,
            device=device,
        ).to(dtype)
        arguments[f"{name}_attention_mask"] = (
            torch.arange(TEXT_TOKENS, device=device)[None] < tokens
        )
    return arguments


def inputs(
    model: LTXVideoTransformer3DModel,
    size: VideoSize,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    timestep: float = 800.0,
) -> dict[str, object]:
    """Arguments of a forward as LTXPipeline passes them with guidance: batch 2, negative first."""
    text = prompt(model, device, dtype, seed)
    generator = torch.Generator(device).manual_seed(seed + 1)
    latents = torch.randn(
        1, size.tokens, model.config.in_channels, generator=generator, device=device
    )
    frames, height, width = size.latent
    return {
        "hidden_states": torch.cat([latents, latents]).to(dtype),
        "encoder_hidden_states": torch.cat([text["negative_prompt_embeds"], text["prompt_embeds"]]),
        "timestep": torch.tensor(timestep, device=device).expand(2),
        "encoder_attention_mask": torch.cat(
            [text["negative_prompt_attention_mask"], text["prompt_attention_mask"]]
        ),
        "num_frames": frames,
        "height": height,
        "width": width,
        "rope_interpolation_scale": (
            TEMPORAL_COMPRESSION / FRAME_RATE,
            SPATIAL_COMPRESSION,
            SPATIAL_COMPRESSION,
        ),
        "return_dict": False,
    }


def check_modes(modes: Sequence[str]) -> list[str]:
    """The modes in their order; ValueError names one that there is not."""
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    return [mode for mode in MODES if mode in modes]
