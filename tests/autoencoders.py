"""Small autoencoders of diffusers with random weights, and inputs of encoding and decoding."""

from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import nn

GROUPS = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
PICTURES = {
    **GROUPS,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "latent_channels": 4,
}
WAN = {
    "base_dim": 16,
    "z_dim": 4,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [True, False],
}
STATISTICS = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
LTX = {
    "latent_channels": 8,
    "block_out_channels": (16, 32, 32, 32),
    "decoder_block_out_channels": (16, 32, 32, 32),
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1, 1),
    "spatio_temporal_scaling": (True, True, False, False),
    "decoder_spatio_temporal_scaling": (True, True, False, False),
    "decoder_inject_noise": (False,) * 5,
    "patch_size": 1,
}
LTX2 = {
    "latent_channels": 8,
    "block_out_channels": (16, 32, 32, 64),
    "decoder_block_out_channels": (16, 32, 64),
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1),
    "spatio_temporal_scaling": (True, True, True, True),
    "patch_size": 1,
}
HUNYUAN15 = {
    "latent_channels": 8,
    "block_out_channels": (16, 32, 32),
    "layers_per_block": 1,
    "spatial_compression_ratio": 4,
    "temporal_compression_ratio": 2,
}


@dataclass(frozen=True)
class Autoencoder:
    """An autoencoder's class by its name, its configuration, and the sizes of its inputs.

    Attributes:
        latent, sample: the inputs of decoding and encoding, without the batch.
        batch: the number of samples.
    """

    cls: str
    config: dict[str, Any]
    latent: tuple[int, ...]
    sample: tuple[int, ...]
    batch: int = 2

    def model(self, device, dtype=torch.float32, **changes):
        """The model, in which every parameter matters."""
        torch.manual_seed(4)
        vae = getattr(diffusers, self.cls)(**{**self.config, **changes})
        for name, parameter in vae.named_parameters():
            if ("norm" in name and name.endswith("weight")) or name.endswith("gamma"):
                nn.init.uniform_(parameter, 0.5, 1.5)
            elif not parameter.any():
                nn.init.normal_(parameter, std=0.2)
        return vae.to(device, dtype).eval()

    def arguments(self, device, dtype=torch.float32, seed=1):
        """The inputs of ``run``."""
        torch.manual_seed(seed)
        z, x = (torch.randn(self.batch, *size) for size in (self.latent, self.sample))
        given = {"z": z.to(device, dtype), "x": x.to(device, dtype)}
        if self.config.get("timestep_conditioning"):
            given["temb"] = torch.linspace(0.02, 0.6, self.batch).to(device, dtype)
        return given


AUTOENCODERS = {
    "kl": Autoencoder("AutoencoderKL", PICTURES, (4, 8, 6), (3, 16, 12)),
    "flux2": Autoencoder("AutoencoderKLFlux2", PICTURES, (4, 8, 6), (3, 16, 12)),
    "wan": Autoencoder(
        "AutoencoderKLWan",
        {**WAN, **STATISTICS, "scale_factor_spatial": 4},
        *((4, 3, 6, 4), (3, 9, 16, 8)),
    ),
    "wan 2.2": Autoencoder(
        "AutoencoderKLWan",
        {
            **WAN,
            **STATISTICS,
            "is_residual": True,
            "patch_size": 2,
            "in_channels": 12,
            "out_channels": 12,
        },
        *((4, 3, 4, 6), (3, 9, 16, 16)),
    ),
    "qwenimage": Autoencoder(
        "AutoencoderKLQwenImage", {**WAN, **STATISTICS}, (4, 1, 6, 4), (3, 1, 16, 8)
    ),
    "qwenimage21": Autoencoder(
        "AutoencoderKLQwenImage21",
        {**WAN, **STATISTICS, "decoder_base_dim": 16},
        *((4, 1, 6, 4), (4, 1, 16, 8)),
    ),
    "ltx": Autoencoder("AutoencoderKLLTXVideo", LTX, (8, 2, 4, 6), (3, 9, 16, 8)),
    "ltx timed": Autoencoder(
        "AutoencoderKLLTXVideo",
        {
            **LTX,
            "timestep_conditioning": True,
            "decoder_block_out_channels": (32,) * 4,
            "decoder_inject_noise": (True,) * 5,
            "upsample_residual": (True,) * 4,
        },
        *((8, 2, 4, 6), (3, 9, 16, 8)),
    ),
    "ltx2": Autoencoder("AutoencoderKLLTX2Video", LTX2, (8, 2, 4, 6), (3, 9, 32, 32)),
    "ltx2 timed": Autoencoder(
        "AutoencoderKLLTX2Video",
        {**LTX2, "timestep_conditioning": True},
        *((8, 2, 4, 6), (3, 9, 32, 32)),
    ),
    "hunyuan": Autoencoder(
        "AutoencoderKLHunyuanVideo",
        {
            **GROUPS,
            "block_out_channels": (16, 32, 32, 32),
            "latent_channels": 4,
            "down_block_types": ("HunyuanVideoDownBlock3D",) * 4,
            "up_block_types": ("HunyuanVideoUpBlock3D",) * 4,
        },
        *((4, 2, 3, 4), (3, 5, 16, 16)),
    ),
    "hunyuan15": Autoencoder(
        "AutoencoderKLHunyuanVideo15", HUNYUAN15, (8, 3, 4, 4), (3, 5, 16, 16), 1
    ),
    "refiner": Autoencoder(
        "AutoencoderKLHunyuanImageRefiner", HUNYUAN15, (8, 3, 4, 4), (3, 5, 16, 16)
    ),
    "cogvideox": Autoencoder(
        "AutoencoderKLCogVideoX",
        {
            **GROUPS,
            "latent_channels": 4,
            "down_block_types": ("CogVideoXDownBlock3D",) * 2,
            "up_block_types": ("CogVideoXUpBlock3D",) * 2,
            "temporal_compression_ratio": 2,
        },
        *((4, 3, 6, 4), (3, 5, 16, 8)),
    ),
}

# Its decoder is a transformer, whose tokens are float32 in every dtype.
MINIMAX_H3 = Autoencoder(
    "AutoencoderKLMiniMaxH3",
    {
        "block_out_channels": (8,) * 6,
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "latent_channels": 4,
        "decoder_num_layers": 2,
        "decoder_num_attention_heads": 2,
        "latents_mean": [0.0] * 4,
        "latents_std": [1.0] * 4,
    },
    *((4, 7, 2, 3), (3, 17, 32, 48)),
)
# Of pixels' diffusion, whose blocks attend to neighbors.
LTX2_DIFFUSION = Autoencoder(
    "LTX2VideoDiffusionDecoderModel",
    {
        "latent_channels": 4,
        "decoder_head_dim": 32,
        "decoder_stage_channels": (64, 32, 32, 32, 32),
        "decoder_stage_depths": (2, 1, 1, 1, 2),
        "decoder_stage_kernels": ((1, 3, 3),) * 4,
        "decoder_upsample_strides": ((1, 1, 1), (2, 1, 1), (1, 2, 2), (1, 1, 1)),
        "decoder_upsample_channel_reductions": (2, 1, 1, 1),
        "decoder_stage5_kernel": (3, 3, 3),
        "decoder_t_emb_dim": 16,
        "temporal_compression_ratio": 2,
    },
    *((4, 2, 3, 4), (3, 1, 1, 1)),
)

# Of which only convolutions and norms run on the kernels.
IN_SINGLE_PARTS = {
    "mochi": Autoencoder(
        "AutoencoderKLMochi",
        {
            "latent_channels": 8,
            "encoder_block_out_channels": (32, 32, 32, 32),
            "decoder_block_out_channels": (32, 32, 32, 32),
            "layers_per_block": (1, 1, 1, 1, 1),
            "latents_mean": [0.0] * 8,
            "latents_std": [1.0] * 8,
        },
        *((8, 2, 3, 2), (3, 7, 16, 16)),
    ),
    "cosmos": Autoencoder(
        "AutoencoderKLCosmos",
        {
            "encoder_block_out_channels": (16, 32, 32, 32),
            "decode_block_out_channels": (16, 32, 32, 32),
            "attention_resolutions": (8,),
            "resolution": 16,
            "num_layers": 1,
            "patch_size": 2,
            "latent_channels": 8,
            "latents_mean": [0.0] * 8,
            "latents_std": [1.0] * 8,
        },
        *((8, 2, 4, 3), (3, 9, 32, 32)),
    ),
}


def run(vae, arguments):
    """The latents' distribution of ``x``, and ``z`` decoded, as one row."""
    return torch.cat([encode(vae, arguments), decode(vae, arguments)])


@torch.no_grad()
def encode(vae, arguments):
    return vae.encode(arguments["x"]).latent_dist.parameters.flatten()


@torch.no_grad()
def decode(vae, arguments):
    time = (arguments["temb"],) if "temb" in arguments else ()
    torch.manual_seed(7)  # some decoders add noise
    return vae.decode(arguments["z"], *time).sample.flatten()
