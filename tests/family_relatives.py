"""Small models with blocks of a family's own model: ControlNets, and those whose blocks are copies of Wan's.

Each is known by the name of its class in diffusers. ControlNets are made of a family's model.
"""

import diffusers
import torch

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
