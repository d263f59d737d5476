"""Small diffusers models without a family, with random weights, and inputs of one forward of each.

Their heads have 64 elements, which attention's kernel accepts, unless the name has another number.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import nn

from family import in_dtype

TIME = torch.tensor([500, 20])


@dataclass(frozen=True)
class SmallModel:
    """A model's class by its name, its configuration, and its inputs.

    Attributes:
        inputs: the arguments of a forward by name; floating-point tensors have the model's dtype, except
            those of ``exact``, which are always float32.
        empty: ends of the names of parameters that the class leaves uninitialized.
        attends: the number of attentions that a forward computes on the kernel in 16 bits, or None.
    """

    name: str
    cls: str
    config: dict[str, Any]
    inputs: Callable[[], dict[str, Any]]
    attends: int | None
    exact: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()

    def __str__(self):
        return self.name

    def model(self, device, dtype=torch.float32, seed=0, **changes):
        """The model with norm weights different from 1, and without zero parameters."""
        torch.manual_seed(seed)
        model = getattr(diffusers, self.cls)(**{**self.config, **changes})
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight") and parameter.dim() == 1:
                nn.init.uniform_(parameter, 0.5, 1.5)
            elif name.endswith(self.empty):
                nn.init.normal_(parameter, std=0.1)
            else:
                fill_zero(parameter)
        return in_dtype(model, device, dtype)

    def arguments(self, device, dtype=torch.float32, seed=1):
        torch.manual_seed(seed)
        return {
            name: value if name in self.exact else to(value, device, dtype)
            for name, value in self.inputs().items()
        }


def fill_zero(parameter):
    """Gives it values if it is zero, so that all parameters matter."""
    if not parameter.any():
        nn.init.normal_(parameter, std=0.1)


def to(value, device, dtype):
    """Tensors among arguments on the device, and those of floating point in the dtype."""
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype if value.is_floating_point() else None)
    if isinstance(value, dict):
        return {key: to(item, device, dtype) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to(item, device, dtype) for item in value)
    return value


def tensors(result):
    """All tensors of a model's result."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, dict):
        result = result.values()
    return [tensor for item in result for tensor in tensors(item)] if result is not None else []


@torch.no_grad()
def run(model, arguments):
    """All results of a forward as one row; arguments by name, or in order for a module."""
    if isinstance(arguments, dict):
        takes_it = "return_dict" in inspect.signature(model.forward).parameters
        result = model(**arguments, **({"return_dict": False} if takes_it else {}))
    else:
        result = model(*arguments)
    return torch.cat([tensor.flatten() for tensor in tensors(result)])


def normal(*shape):
    return torch.randn(shape)


def mask(length=6, batch=2):
    """Samples with different numbers of tokens, padded to ``length``."""
    return (torch.arange(length) < torch.tensor([[length], [length // 2]][:batch])).long()


def image(channels=4, size=8):
    return normal(2, channels, size, size)


def video(channels=4, frames=2, size=8):
    return normal(2, channels, frames, size, size)


# fmt: off
_UNET = {
    "block_out_channels": (64, 128), "layers_per_block": 1, "norm_num_groups": 8, "in_channels": 4,
    "cross_attention_dim": 24,
}
_CROSS = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "out_channels": 4, "sample_size": 8,
}
_SDXL = {
    "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 64, "transformer_layers_per_block": (1, 2),
    "use_linear_projection": True,
}
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 64}
_IN_OUT = {"in_channels": 4, "out_channels": 4}
_SIZES = {
    "original_size": torch.tensor([[20, 20], [20, 30]]),
    "target_size": torch.tensor([[20, 20], [20, 20]]),
    "crop_coords": torch.tensor([[0, 0], [1, 1]]),
}
_CAPTIONED = {**_HEADS, "num_layers": 2, "cross_attention_dim": 128, "caption_channels": 24}


def _denoising(x, **more):
    """The arguments of most models; ``more`` adds or overrides arguments."""
    text = {"encoder_hidden_states": normal(2, 6, 24), "timestep": TIME}
    return {"hidden_states": x, **text, **more}


def _unet_inputs(**more):
    return {"sample": image(), "timestep": TIME, "encoder_hidden_states": normal(2, 6, 24), **more}


MODELS = [
    SmallModel(
        "auraflow", "AuraFlowTransformer2DModel",
        {
            **_HEADS, "sample_size": 8, "num_mmdit_layers": 1, "num_single_dit_layers": 1,
            "joint_attention_dim": 24, "caption_projection_dim": 128, "pos_embed_max_size": 64,
        },
        lambda: _denoising(image(), timestep=torch.tensor([0.5, 0.2])),
        attends=2,
    ),
    SmallModel(
        "sana", "SanaTransformer2DModel",
        {
            **_CAPTIONED, **_IN_OUT, "num_attention_heads": 4, "attention_head_dim": 32,
            "num_cross_attention_heads": 2, "cross_attention_head_dim": 64, "sample_size": 8,
        },
        lambda: _denoising(image()),
        attends=2,
    ),
    SmallModel(
        "unet", "UNet2DConditionModel", {**_UNET, **_CROSS, "attention_head_dim": 2}, _unet_inputs,
        attends=8,
    ),
    SmallModel(
        "unet_of_sdxl", "UNet2DConditionModel",
        {**_UNET, **_CROSS, **_SDXL, "attention_head_dim": (1, 2)},
        lambda: _unet_inputs(
            added_cond_kwargs={"text_embeds": normal(2, 16), "time_ids": normal(2, 6)}
        ),
        attends=16,
    ),
    SmallModel(
        "unet_44", "UNet2DConditionModel",
        {
            **_UNET, **_CROSS, "block_out_channels": (44, 88), "norm_num_groups": 4,
            "attention_head_dim": 2,
        },
        _unet_inputs, attends=0,
    ),
    SmallModel(
        "controlnet", "ControlNetModel",
        {
            **_UNET, "down_block_types": _CROSS["down_block_types"], "attention_head_dim": 2,
            "conditioning_embedding_out_channels": (8, 16),
        },
        lambda: _unet_inputs(controlnet_cond=normal(2, 3, 16, 16)),
        attends=4,
    ),
    SmallModel(
        "stable_audio", "StableAudioDiTModel",
        {
            "attention_head_dim": 64, "num_attention_heads": 2, "num_key_value_attention_heads": 1,
            "sample_size": 4, "in_channels": 4, "out_channels": 4, "num_layers": 2,
            "cross_attention_dim": 64, "time_proj_dim": 16, "global_states_input_dim": 12,
            "cross_attention_input_dim": 24,
        },
        lambda: _denoising(
            normal(2, 4, 7), global_hidden_states=normal(2, 1, 12),
            rotary_embedding=(torch.rand(8, 32), torch.rand(8, 32)),
        ),
        attends=4, exact=("rotary_embedding",),
    ),
    SmallModel(
        "minimax_music3", "MiniMaxMusic3Transformer1DModel",
        {
            "in_channels": 4, "condition_dim": 24, "num_layers": 2, "num_attention_heads": 2,
            "ff_inner_dim": 96, "rotary_dim": 32, "fourier_embedding_dim": 8,
        },
        lambda: {
            "hidden_states": normal(2, 4, 9), "timestep": torch.tensor([0.5, 0.2]),
            "encoder_hidden_states": normal(2, 9, 24),
        },
        attends=2,
    ),
    SmallModel(
        "svd", "UNetSpatioTemporalConditionModel",
        {
            "sample_size": 8, "in_channels": 4, "out_channels": 4,
            "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            "block_out_channels": (64, 128), "num_attention_heads": (1, 2),
            "cross_attention_dim": 24, "layers_per_block": 1, "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 24,
        },
        lambda: {
            "sample": normal(1, 2, 4, 8, 8), "timestep": torch.tensor([10.0]),
            "encoder_hidden_states": normal(1, 1, 24), "added_time_ids": normal(1, 3),
        },
        attends=16,
    ),
]
# Runs in full. diffusers knows its processor and its blocks by name.
_COGVIEW4 = SmallModel(
    "cogview4", "CogView4Transformer2DModel",
    {
        **_HEADS, **_IN_OUT, "num_layers": 2, "text_embed_dim": 24, "time_embed_dim": 16,
        "condition_dim": 4, "rope_axes_dim": (32, 32),
    },
    lambda: _denoising(image(), **_SIZES),
    attends=2,
)
# fmt: on


BY_NAME = {small.name: small for small in (*MODELS, _COGVIEW4)}
