"""Small models with blocks of a family's own model: ControlNets, and those whose blocks are copies of Wan's.

Each is known by the name of its class in diffusers. ControlNets are made of a family's model.
"""

import types

import diffusers
import torch

from family import make_all_matter, seeded
from family_cosmos import CHANNELS, TEXT_CHANNELS
from small_models import BY_NAME, fill_zero

# Models with copies of Wan's block: what theirs take besides, and a forward's arguments of their own.
COPIES_OF_WAN = {
    "WanVACETransformer3DModel": (
        {"vace_layers": [0], "vace_in_channels": 8},
        {"control_hidden_states": (1, 8, 2, 4, 6), "control_hidden_states_scale": (1,)},
    ),
    "WanAnimateTransformer3DModel": (
        {
            "in_channels": 12,
            "latent_channels": 4,
            "image_dim": 4,
            "motion_encoder_channel_sizes": {"4": 16, "8": 16, "16": 16},
            "motion_encoder_size": 16,
            "motion_style_dim": 8,
            "motion_dim": 4,
            "motion_encoder_dim": 16,
            "face_encoder_hidden_dim": 16,
            "face_encoder_num_heads": 2,
            "inject_face_latents_blocks": 2,
        },
        {
            "hidden_states": (1, 12, 4, 8, 8),
            "encoder_hidden_states_image": (1, 6, 4),
            "pose_hidden_states": (1, 4, 3, 8, 8),
            "face_pixel_values": (1, 3, 9, 16, 16),
        },
    ),
    "ChronoEditTransformer3DModel": ({}, {}),
    "SkyReelsV2Transformer3DModel": ({}, {}),
}


def copy_of_wan(name, **config):
    """A small model whose blocks are copies of Wan's."""
    torch.manual_seed(0)
    channels = {"in_channels": 4, "out_channels": 4}
    sizes = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 96}
    options = {"text_dim": 24, "freq_dim": 16, "rope_max_seq_len": 32}
    config = {**COPIES_OF_WAN[name][0], **config}
    return getattr(diffusers, name)(**{**channels, **sizes, **options, **config}).eval()


def inputs_of_copy(name, device):
    shapes = {"hidden_states": (1, 4, 2, 4, 6), "encoder_hidden_states": (1, 5, 24)}
    shapes = {**shapes, **COPIES_OF_WAN[name][1]}
    arguments = {key: torch.randn(shape, device=device) for key, shape in shapes.items()}
    return {**arguments, "timestep": torch.tensor([500], device=device)}


# By the name of the family.
CONTROLNETS = {
    "flux": lambda model: diffusers.FluxControlNetModel.from_transformer(
        model, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2
    ),
    "qwenimage": lambda model: diffusers.QwenImageControlNetModel.from_transformer(
        model, num_layers=1, attention_head_dim=16, num_attention_heads=2
    ),
    "sd3": lambda model: diffusers.SD3ControlNetModel.from_config(
        {**model.config, "num_layers": 1, "extra_conditioning_channels": 0}
    ),
}


def controlnet_of(name, plain):
    """A ControlNet of a family's model."""
    model = CONTROLNETS[name](plain).eval()
    for parameter in model.parameters():
        fill_zero(parameter)  # all results are 0 otherwise
    return model


def with_condition(arguments):
    """Arguments of a ControlNet from those of the model."""
    return {**arguments, "controlnet_cond": torch.randn_like(arguments["hidden_states"])}


def controlnet_xs(device):
    """The UNet "unet" with a control branch beside it, which takes two layers per block."""
    unet = BY_NAME["unet"].model(device, layers_per_block=2)
    torch.manual_seed(2)
    branch = {"num_attention_heads": [1, 2], "conditioning_embedding_out_channels": (8, 16)}
    model = diffusers.UNetControlNetXSModel.from_unet(
        unet, size_ratio=0.5, ctrl_optional_kwargs=branch
    )
    for parameter in model.parameters():
        fill_zero(parameter)  # the branch has no effect otherwise
    return model.to(device).eval()


def controlnet_xs_inputs():
    return {**BY_NAME["unet"].inputs(), "controlnet_cond": torch.rand(2, 3, 16, 16)}


def _resize(x, size, interpolation):
    return torch.nn.functional.interpolate(x, size=tuple(size))


# diffusers imports it from torchvision, to resize a mask.
TRANSFORMS = types.SimpleNamespace(
    functional=types.SimpleNamespace(resize=_resize),
    InterpolationMode=types.SimpleNamespace(NEAREST="nearest"),
)


def controlnet_of_cosmos(device, **config):
    """A small ControlNet and the arguments of a forward. Its results are a list."""
    from diffusers.models.controlnets import controlnet_cosmos

    controlnet_cosmos.transforms = TRANSFORMS
    torch.manual_seed(0)
    model = diffusers.CosmosControlNetModel(
        n_controlnet_blocks=3,
        in_channels=2 * CHANNELS + 2,
        latent_channels=CHANNELS + 2,
        model_channels=32,
        num_attention_heads=2,
        attention_head_dim=16,
        mlp_ratio=2,
        text_embed_dim=TEXT_CHANNELS,
        adaln_lora_dim=8,
        max_size=(4, 24, 24),
        **config,
    )
    make_all_matter(model, ("linear_1", "linear_2"), "time_embed")
    return model.to(device).eval(), cosmos_control_inputs(device, seed=1)


def cosmos_control_inputs(device, seed=None):
    normal = seeded(seed, device)
    return {
        "controls_latents": normal(2, 2 * CHANNELS, 2, 4, 6),
        "latents": normal(2, CHANNELS, 2, 4, 6),
        "timestep": normal(2).sigmoid(),
        "encoder_hidden_states": normal(2, 5, TEXT_CHANNELS),
        "condition_mask": torch.ones(2, 1, 2, 4, 6, device=device),
        "padding_mask": torch.zeros(1, 1, 4, 6, device=device),
    }
