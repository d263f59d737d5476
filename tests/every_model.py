"""A small model of every class of diffusers' transformers, UNets and ControlNets, and inputs of one forward.

The configurations of most classes are here. Those of families and of models that other tests use come from
their files.
"""

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.modeling_utils import ModelMixin

import small_models
from families import FAMILIES, KERNEL_HEADS
from family import in_dtype
from family_cogvideox import cogvideox_inputs, consisid_model
from family_hunyuan import (
    framepack_inputs,
    framepack_model,
    hunyuan_image_inputs,
    hunyuan_image_model,
)
from family_relatives import (
    COPIES_OF_WAN,
    controlnet_of,
    controlnet_of_cosmos,
    controlnet_xs,
    controlnet_xs_inputs,
    copy_of_wan,
    cosmos_control_inputs,
    inputs_of_copy,
    with_condition,
)
from family_z_image import control_inputs, controlnet_of_z_image
from small_models import SmallModel, fill_zero, mask, normal, to

PACKAGES = ("transformers", "unets", "controlnets")
# Classes without a forward: UNetMotionModel and UNetControlNetXSModel take their layers.
WITHOUT = ("MotionAdapter", "ControlNetXSAdapter")
HALF = torch.tensor([0.5, 0.25])
STEP = torch.tensor([500.0, 20.0])


def find_classes():
    """All models that diffusers defines there, by name."""
    found = {}
    for package in PACKAGES:
        package = importlib.import_module(f"diffusers.models.{package}")
        for info in pkgutil.iter_modules(package.__path__):
            module = importlib.import_module(f"{package.__name__}.{info.name}")
            for name, cls in vars(module).items():
                is_model = inspect.isclass(cls) and issubclass(cls, ModelMixin)
                if is_model and cls.__module__ == module.__name__:
                    found[name] = cls
    return found


CLASSES = find_classes()

_HEADS = {"num_attention_heads": 2, "attention_head_dim": 64}
_IN_OUT = {"in_channels": 4, "out_channels": 4}
_WIDTH = {"hidden_size": 128, "num_attention_heads": 2}
_TEXT = 24


def image(channels=4, size=4):
    return normal(2, channels, size, size)


def video(channels=4, frames=2, size=4):
    return normal(2, channels, frames, size, size)


def text(length=6, channels=_TEXT):
    return normal(2, length, channels)


def ids(count=36, length=5):
    """Positions of an image's tokens, three in a row, and of the text's."""
    image_ids = torch.zeros(count, 3)
    image_ids[:, 1], image_ids[:, 2] = torch.arange(count) // 3, torch.arange(count) % 3
    return {"img_ids": image_ids, "txt_ids": torch.zeros(length, 3)}


def denoising(x, **more):
    return {"hidden_states": x, "encoder_hidden_states": text(), "timestep": STEP, **more}


def joint(channels=8, **more):
    """Tokens of an image and their positions."""
    given = {"hidden_states": normal(2, 36, channels), "encoder_hidden_states": text(5)}
    return {**given, "timestep": HALF, **ids(), **more}


def rotation(count, size=64):
    angles = torch.rand(count, size // 2).repeat_interleave(2, 1)
    return angles.cos(), angles.sin()


NEW = {}


def add(cls, config, inputs, **more):
    NEW[cls] = SmallModel(cls, cls, config, inputs, attends=None, **more)


# fmt: off
_POSITIONS = ("img_ids", "txt_ids")
_FLUX = {
    **_HEADS, "in_channels": 8, "num_layers": 2, "num_single_layers": 2,
    "joint_attention_dim": _TEXT, "axes_dims_rope": (16, 24, 24),
}

add(
    "AceStepTransformer1DModel",
    {
        "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "in_channels": 12,
        "audio_acoustic_hidden_dim": 4, "encoder_hidden_size": _TEXT, "sliding_window": 3,
    },
    lambda: {
        "hidden_states": normal(2, 12, 4), "timestep": HALF, "timestep_r": HALF / 2,
        "encoder_hidden_states": text(), "context_latents": normal(2, 12, 8),
    },
)
add(
    "DiTTransformer2DModel",
    {**_HEADS, "num_layers": 2, "sample_size": 4, "num_embeds_ada_norm": 10},
    lambda: {
        "hidden_states": image(), "timestep": torch.tensor([500, 20]),
        "class_labels": torch.tensor([3, 7]),
    },
)
_HUNYUAN_DIT = {
    **_HEADS, "in_channels": 4, "patch_size": 2, "sample_size": 8, "hidden_size": 128,
    "cross_attention_dim": _TEXT, "cross_attention_dim_t5": 16, "pooled_projection_dim": 16,
    "text_len": 6, "text_len_t5": 5, "use_style_cond_and_image_meta_size": True,
}


def _hunyuan_dit_inputs(**more):
    return {
        "hidden_states": image(size=8), "timestep": STEP, "encoder_hidden_states": text(),
        "text_embedding_mask": mask(6), "encoder_hidden_states_t5": text(5, 16),
        "text_embedding_mask_t5": mask(5),
        "image_meta_size": torch.tensor([[8.0, 8, 8, 8, 0, 0]] * 2), "style": torch.tensor([0, 0]),
        "image_rotary_emb": rotation(16), **more,
    }


add(
    "HunyuanDiT2DModel", {**_HUNYUAN_DIT, "num_layers": 4}, _hunyuan_dit_inputs,
    exact=("image_rotary_emb",),
)
add(
    "HunyuanDiT2DControlNetModel", {**_HUNYUAN_DIT, "transformer_num_layers": 4},
    lambda: _hunyuan_dit_inputs(controlnet_cond=image(size=8)),
    exact=("image_rotary_emb",),
)
add(
    "Ideogram4Transformer2DModel",
    {
        **_HEADS, "in_channels": 8, "num_layers": 2, "intermediate_size": 96, "adaln_dim": 16,
        "llm_features_dim": _TEXT, "mrope_section": (12, 10, 10),
    },
    lambda: {
        "hidden_states": normal(2, 10, 8), "timestep": HALF, "encoder_hidden_states": text(10),
        "position_ids": torch.arange(10)[:, None].expand(2, 10, 3),
        "segment_ids": torch.ones(2, 10, dtype=torch.long),
        "indicator": torch.tensor([[3] * 4 + [2] * 6] * 2),
    },
)
add(
    "LuminaNextDiT2DModel",
    {
        **_WIDTH, "sample_size": 4, "num_layers": 2, "num_kv_heads": 1, "multiple_of": 16,
        "cross_attention_dim": _TEXT,
    },
    lambda: {
        "hidden_states": image(), "timestep": HALF, "encoder_hidden_states": text(),
        "encoder_mask": mask(),
        "image_rotary_emb": torch.polar(torch.ones(2, 2, 32), torch.rand(2, 2, 32)),
        "cross_attention_kwargs": {},
    },
    empty=("pad_token",),
)
add(
    "MiniMaxMusic3RVQDepthDecoder",
    {
        **_WIDTH, "num_layers": 2, "intermediate_size": 96, "audio_vocab_size": 16,
        "num_codebooks": 3,
    },
    lambda: {"inputs_embeds": normal(2, 5, 128)},
)
add(
    "PriorTransformer", {**_HEADS, "num_layers": 2, "embedding_dim": _TEXT, "num_embeddings": 6},
    lambda: {
        "hidden_states": normal(2, _TEXT), "timestep": STEP, "proj_embedding": normal(2, _TEXT),
        "encoder_hidden_states": text(), "attention_mask": mask().bool(),
    },
)
add(
    "T5FilmDecoder",
    {
        "input_dims": 8, "targets_length": 6, "d_model": 128, "num_layers": 2, "num_heads": 2,
        "d_ff": 96,
    },
    lambda: {
        "encodings_and_masks": [(normal(2, 5, 128), mask(5).float())],
        "decoder_input_tokens": normal(2, 6, 8), "decoder_noise_time": HALF,
    },
)
_WAN = {
    **_HEADS, **_IN_OUT, "num_layers": 2, "ffn_dim": 96, "text_dim": _TEXT, "freq_dim": 16,
    "rope_max_seq_len": 32,
}
add(
    "AnyFlowFARTransformer3DModel", {**_WAN, "chunk_partition": (1, 2), "full_chunk_limit": 2},
    lambda: denoising(
        normal(2, 3, 4, 4, 4), timestep=STEP[:, None].expand(2, 3),
        r_timestep=STEP[:, None].expand(2, 3) / 2, chunk_partition=(1, 2),
    ),
)
add(
    "HiDreamImageTransformer2DModel",
    {
        **_HEADS, **_IN_OUT, "patch_size": 2, "num_layers": 2, "num_single_layers": 2,
        "caption_channels": [_TEXT, 12], "text_emb_dim": 16, "num_activated_experts": 2,
        "axes_dims_rope": (32, 16, 16), "max_resolution": (8, 8), "llama_layers": [0, 1, 0, 1],
    },
    lambda: {
        "hidden_states": image(size=8), "timesteps": STEP, "encoder_hidden_states_t5": text(),
        "encoder_hidden_states_llama3": [text(5, 12) for _ in range(2)],
        "pooled_embeds": normal(2, 16),
    },
)
_KANDINSKY = {"in_text_dim": _TEXT, "in_text_dim2": 12, "time_dim": 16, "patch_size": (1, 2, 2)}
_KANDINSKY |= {"model_dim": 128, "ff_dim": 96, "num_visual_blocks": 2, "axes_dims": (16, 24, 24)}
add(
    "Kandinsky5Transformer3DModel", {**_KANDINSKY, "num_text_blocks": 1},
    lambda: denoising(
        normal(1, 2, 4, 4, 4), encoder_hidden_states=normal(1, 6, _TEXT), timestep=STEP[:1],
        pooled_projections=normal(1, 12), visual_rope_pos=[torch.arange(2) for _ in range(3)],
        text_rope_pos=torch.arange(6),
    ),
)
add(
    "Kandinsky6SRTransformer3DModel",
    {
        "in_visual_dim": 4, "out_visual_dim": 4, "time_dim": 16, "model_dim": 128, "ff_dim": 96,
        "num_visual_blocks": 2, "nabla_window": (3, 3, 3),
    },
    lambda: {"hidden_states": normal(1, 1, 8, 16, 9), "timestep": STEP[:1]},
)
add(
    "LongCatAudioDiTTransformer",
    {
        "dit_dim": 128, "dit_depth": 2, "dit_heads": 2, "dit_text_dim": _TEXT, "latent_dim": 6,
        "ff_mult": 2.0,
    },
    lambda: {
        "hidden_states": normal(2, 8, 6), "encoder_hidden_states": text(),
        "encoder_attention_mask": mask(), "timestep": HALF, "attention_mask": mask(8).bool(),
        "latent_cond": normal(2, 8, 6),
    },
)
add(
    "RFD4ProteinaTransformer",
    {
        "nlayers": 2, "token_dim": 128, "nheads": 2, "dim_cond": 32, "pair_repr_dim": 16,
        "latent_dim": 4, "token_type_emb_dim": 8, "cath_emb_dim": 8, "t_emb_dim": 16,
        "seq_sep_dim": 8, "xt_pair_dist_dim": 6, "tri_mult_c": 16, "num_sequence_classes": 5,
        "feats_seq": ("xt_bb_ca", "xt_local_latents", "token_type"),
        "feats_cond_seq": ("time_emb_bb_ca", "time_emb_local_latents", "recycle_remaining"),
        "feats_pair_repr": ("xt_bb_ca_pair_dists",),
    },
    lambda: {
        "bb_ca": normal(2, 6, 3), "local_latents": normal(2, 6, 4), "bb_ca_time": HALF,
        "local_latents_time": HALF, "padding_mask": mask().bool(),
        "token_type": torch.ones(2, 6, dtype=torch.long),
        "conditioning": {
            "is_in_context_conditioning": torch.zeros(2, 6, dtype=torch.bool),
            "supports_local_latent": torch.ones(2, 6, dtype=torch.bool),
        },
    },
)
_SANA = {
    **_IN_OUT, "num_attention_heads": 4, "attention_head_dim": 32, "num_layers": 2,
    "num_cross_attention_heads": 2, "cross_attention_head_dim": 64, "cross_attention_dim": 128,
    "caption_channels": _TEXT, "sample_size": 4,
}
add("SanaVideoTransformer3DModel", _SANA, lambda: denoising(video(), encoder_attention_mask=mask()))
add(
    "SanaControlNetModel", _SANA,
    lambda: denoising(image(), controlnet_cond=image(), encoder_attention_mask=mask()),
)


def _camera():
    """A camera that moves along its axis: of each frame, then of each token. The model computes the latter
    from the former, but not in bfloat16 on a CPU."""
    poses = torch.eye(4).repeat(2, 2, 1, 1)
    poses[:, 1, 2, 3] = 0.1
    lens = torch.tensor([8.0, 8, 2, 2]).expand(2, 2, 4)
    tokens = poses.repeat_interleave(16, 1)
    return {
        "camera_conditions": torch.cat([poses.flatten(2), lens], dim=-1),
        "cam_pos_embeds": {"absmap": video(3), "P": tokens, "P_inv": tokens.inverse()},
    }


add(
    "SanaWMTransformer3DModel",
    {
        **_WIDTH, "in_channels": 4, "num_layers": 2, "softmax_every_n": 2, "linear_head_dim": 64,
        "caption_channels": _TEXT, "chunk_plucker_channels": 6, "chunk_plucker_post_attn_blocks": 2,
    },
    lambda: denoising(
        video(), timestep=STEP[:, None, None].expand(2, 1, 2),
        encoder_hidden_states=normal(2, 1, 6, _TEXT), encoder_attention_mask=mask(),
        chunk_plucker=video(6), **_camera(),
    ),
)
add(
    "SanaWMLTX2RefinerTransformer3DModel",
    {
        **_HEADS, "in_channels": 8, "out_channels": 8, "cross_attention_dim": 128,
        "audio_in_channels": 4, "audio_out_channels": 4, "audio_num_attention_heads": 2,
        "audio_cross_attention_dim": 128, "num_layers": 2, "caption_channels": _TEXT,
    },
    lambda: denoising(
        normal(2, 8, 8), timestep=STEP[:, None].expand(2, 8), encoder_attention_mask=mask(),
        video_rotary_emb=(normal(2, 8, 128).cos(), normal(2, 8, 128).sin()),
    ),
)
add(
    "StableAudio3DiTModel",
    {
        "io_channels": 6, "embed_dim": 128, "depth": 2, "num_heads": 2, "cond_token_dim": _TEXT,
        "global_cond_dim": 12, "local_add_cond_dim": 7, "timestep_features_dim": 16, "ff_mult": 2.0,
        "num_memory_tokens": 4,
    },
    lambda: denoising(
        normal(2, 6, 7), timestep=HALF, global_hidden_states=normal(2, 12),
        encoder_attention_mask=mask(), local_add_cond=normal(2, 7, 7),
    ),
)
add(
    "TransformerTemporalModel",
    {**_HEADS, "in_channels": 8, "num_layers": 2, "norm_num_groups": 4, "cross_attention_dim": 128},
    lambda: {"hidden_states": normal(6, 8, 4, 4), "num_frames": 3},
)
add(
    "Transformer2DModel",
    {
        **_HEADS, "in_channels": 8, "num_layers": 2, "norm_num_groups": 4,
        "cross_attention_dim": _TEXT,
    },
    lambda: {"hidden_states": image(8), "encoder_hidden_states": text()},
)
add(
    "DreamLiteTransformer2DModel",
    {
        **_HEADS, "in_channels": 8, "num_layers": 2, "norm_num_groups": 4,
        "cross_attention_dim": _TEXT, "qk_norm": "rms_norm", "use_linear_projection": True,
    },
    lambda: {"hidden_states": image(8), "encoder_hidden_states": text()},
)


def _extraction(**more):
    """The first pass of Wan-Animate 2, over the reference, which fills the cache."""
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    return {
        "hidden_states": [normal(4, 2, 4, 4) for _ in range(2)], "timestep": STEP,
        "encoder_hidden_states": [normal(6, _TEXT), normal(3, _TEXT)],
        "condition_latents": [normal(8, 2, 4, 4) for _ in range(2)],
        "kv_cache": WanAnimate2KVCache(2), "kv_cache_mode": "extract", "seq_len": 8,
        "encoder_hidden_states_image": normal(2, 5, 1280),
        "offset_grid_sizes": torch.tensor([[2, 2, 2]] * 2),
    }


add(
    "WanAnimate2Transformer3DModel",
    {
        "text_len": 6, "in_dim": 12, "dim": 128, "ffn_dim": 96, "freq_dim": 16, "text_dim": _TEXT,
        "out_dim": 4, "num_heads": 2, "num_layers": 2,
    },
    _extraction,
)
_CHANNELS = {"block_out_channels": (64, 128), "layers_per_block": 1, "norm_num_groups": 8}
add(
    "UNet1DModel", {"sample_size": 32, "extra_in_channels": 64},
    # The model multiplies the timestep by large frequencies in its dtype.
    lambda: {"sample": normal(2, 2, 32), "timestep": STEP / 2**20},
)
add(
    "UNet2DModel",
    {
        **_IN_OUT, **_CHANNELS, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 64,
    },
    lambda: {"sample": image(size=8), "timestep": STEP},
)
_UNET3D = {
    **_IN_OUT, "block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8,
    "down_block_types": ("DownBlock3D", "CrossAttnDownBlock3D"),
    "up_block_types": ("CrossAttnUpBlock3D", "UpBlock3D"), "cross_attention_dim": _TEXT,
    "attention_head_dim": 64,
}


def _unet_inputs(sample, **more):
    return {"sample": sample, "timestep": STEP, "encoder_hidden_states": text(), **more}


add("UNet3DConditionModel", _UNET3D, lambda: _unet_inputs(video(size=8)))
add(
    "I2VGenXLUNet", {**_UNET3D, "sample_size": 4},
    lambda: _unet_inputs(
        video(size=4), fps=torch.tensor([16, 8]), image_latents=video(size=4),
        image_embeddings=normal(2, _TEXT),
    ),
)
add(
    "DreamLiteUNetModel",
    {
        **_IN_OUT, **_CHANNELS,
        "down_block_types": (
            "DreamLiteCrossAttnNoSelfAttnDownBlock2D", "DreamLiteCrossAttnDownBlock2D",
        ),
        "up_block_types": ("DreamLiteCrossAttnUpBlock2D", "DreamLiteUpBlock2D"),
        "cross_attention_dim": _TEXT, "attention_head_dim": (1, 2), "use_linear_projection": True,
        "ff_mult": 2,
    },
    lambda: _unet_inputs(image(size=8)),
)
add(
    "Kandinsky3UNet",
    {
        "time_embedding_dim": 64, "groups": 8, "attention_head_dim": 32, "layers_per_block": 3,
        "block_out_channels": (64, 128), "cross_attention_dim": 64, "encoder_hid_dim": _TEXT,
    },
    lambda: _unet_inputs(image(size=8), encoder_attention_mask=mask().float()),
)
_MOTION = {
    **_IN_OUT, "block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8,
    "down_block_types": ("DownBlockMotion", "CrossAttnDownBlockMotion"),
    "cross_attention_dim": _TEXT, "motion_num_attention_heads": 1, "motion_max_seq_length": 4,
}
add(
    "UNetMotionModel",
    {
        **_MOTION, "up_block_types": ("CrossAttnUpBlockMotion", "UpBlockMotion"),
        "num_attention_heads": 1,
    },
    lambda: _unet_inputs(video(size=4), encoder_hidden_states=normal(4, 6, _TEXT)),
)
_sparse = {key: value for key, value in _MOTION.items() if key != "out_channels"}
add(
    "SparseControlNetModel",
    {**_sparse, "attention_head_dim": 1, "conditioning_embedding_out_channels": (8, 16)},
    lambda: _unet_inputs(
        video(size=4), encoder_hidden_states=normal(4, 6, _TEXT), controlnet_cond=video(size=4),
        conditioning_mask=torch.ones(2, 1, 2, 4, 4),
    ),
)
add(
    "StableCascadeUNet",
    {
        **_IN_OUT, "timestep_ratio_embedding_dim": 8, "conditioning_dim": 64,
        "block_out_channels": (64, 128), "num_attention_heads": (1, 2),
        "down_num_layers_per_block": (1, 1), "up_num_layers_per_block": (1, 1),
        "clip_text_in_channels": _TEXT, "clip_text_pooled_in_channels": 12,
        "clip_image_in_channels": 10, "clip_seq": 2, "dropout": (0.0, 0.0),
        "switch_level": (False,),
    },
    lambda: {
        "sample": image(),
        "timestep_ratio": HALF / 1024,  # the model multiplies it by 10000 in its dtype
        "clip_text_pooled": normal(2, 1, 12), "clip_text": text(), "clip_img": normal(2, 1, 10),
    },
)
add(
    "UVit2DModel",
    {
        **_WIDTH, "cond_embed_dim": 16, "micro_cond_encode_dim": 8, "micro_cond_embed_dim": 40,
        "encoder_hidden_size": _TEXT, "vocab_size": 32, "codebook_size": 31, "in_channels": 128,
        "block_out_channels": 128, "num_res_blocks": 1, "block_num_heads": 2,
        "num_hidden_layers": 2, "intermediate_size": 96, "sample_size": 4,
    },
    lambda: {
        "input_ids": torch.arange(32).view(2, 4, 4), "encoder_hidden_states": text(),
        "pooled_text_emb": normal(2, 16), "micro_conds": torch.tensor([[8.0, 8, 0, 0, 6]] * 2),
    },
)
add(
    "ControlNetUnionModel",
    {
        **_CHANNELS, "in_channels": 4, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "cross_attention_dim": _TEXT, "attention_head_dim": 2, "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 48, "conditioning_embedding_out_channels": (8, 16),
        "num_trans_channel": 64, "num_trans_head": 1, "num_proj_channel": 64,
    },
    lambda: _unet_inputs(
        image(size=8), controlnet_cond=[image(3, 16)],
        control_type=torch.tensor([[0, 1, 0, 0, 0, 0]] * 2), control_type_idx=[1],
    ),
)
# fmt: on


# --------------------------------------------------------------------------------------------------
# Models that other files make


@dataclass(frozen=True)
class OtherModel:
    """A model of another file, which makes it and its arguments in float32.

    Attributes:
        inexact: the arguments with the model's dtype.
    """

    make: Callable[[], torch.nn.Module]
    inputs: Callable[[], dict[str, Any]]
    inexact: tuple[str, ...]

    def model(self, device, dtype=torch.float32):
        torch.manual_seed(0)
        model = self.make()
        for parameter in model.parameters():
            fill_zero(parameter)
        return in_dtype(model, device, dtype)

    def arguments(self, device, dtype=torch.float32, seed=1):
        torch.manual_seed(seed)
        return {
            name: to(value, device, dtype if name in self.inexact else torch.float32)
            for name, value in self.inputs().items()
        }


def of_family(name):
    family = FAMILIES[name]
    make = functools.partial(family.model, "cpu", **KERNEL_HEADS)
    return OtherModel(make, functools.partial(family.inputs, "cpu", tokens=4), family.inexact)


def _wans(name):
    config = {"attention_head_dim": 64}
    inexact = (*COPIES_OF_WAN[name][1], "hidden_states", "encoder_hidden_states")
    return OtherModel(
        lambda: copy_of_wan(name, **config), lambda: inputs_of_copy(name, "cpu"), inexact
    )


def _controlnet(name):
    family = FAMILIES[name]
    return OtherModel(
        lambda: controlnet_of(name, family.model("cpu")),
        lambda: with_condition(family.inputs("cpu")),
        (*family.inexact, "controlnet_cond"),
    )


def _several(cls, net, inexact=(), count=2, **each):
    """ControlNets of a class, ``net``, in one model of ControlNets, for two conditions.

    Args:
        inexact: those of the arguments with the model's dtype, if the net does not say.
        each: what else each ControlNet has of its own.
    """
    one = MODELS[net]

    def make():
        nets = [one.model("cpu") for _ in range(count)]
        for parameter in nets[0].parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        return CLASSES[cls](nets).eval()

    def inputs():
        arguments = one.inputs()
        condition = arguments["controlnet_cond"]
        return {
            **arguments,
            "controlnet_cond": [condition, to_other(condition)],
            "conditioning_scale": [0.7, 0.4],
            **{name: [value, value] for name, value in each.items()},
            "return_dict": False,  # otherwise they add the names of results
        }

    return OtherModel(make, inputs, inexact or one.inexact)


def to_other(condition):
    """Another condition of the same form."""
    if isinstance(condition, list):
        return [to_other(item) for item in condition]
    return torch.randn_like(condition)


# fmt: off
TEXTS = ("hidden_states", "encoder_hidden_states")
_HUNYUAN_TEXTS = (*TEXTS, "timestep", "pooled_projections", "guidance")
FAMILY_OF = {family.model.cls: family.name for family in FAMILIES.values()}
OTHERS = {
    **{cls: of_family(name) for cls, name in FAMILY_OF.items()},
    **{cls: _wans(cls) for cls in COPIES_OF_WAN}, "FluxControlNetModel": _controlnet("flux"),
    "QwenImageControlNetModel": _controlnet("qwenimage"), "SD3ControlNetModel": _controlnet("sd3"),
    "CosmosControlNetModel": OtherModel(
        lambda: controlnet_of_cosmos("cpu")[0],
        lambda: cosmos_control_inputs("cpu"),
        ("controls_latents", "latents", "encoder_hidden_states", "condition_mask", "padding_mask"),
    ),
    "ZImageControlNetModel": OtherModel(
        lambda: controlnet_of_z_image("cpu", head_dim=64, refiner="control_noise_refiner"),
        lambda: control_inputs("cpu"),
        ("x", "cap_feats", "control_context"),
    ),
    "ConsisIDTransformer3DModel": OtherModel(
        lambda: consisid_model("cpu"), lambda: cogvideox_inputs("cpu"), TEXTS
    ),
    "HunyuanImageTransformer2DModel": OtherModel(
        lambda: hunyuan_image_model("cpu", torch.float32, head_dim=64),
        lambda: hunyuan_image_inputs("cpu"),
        _HUNYUAN_TEXTS,
    ),
    "HunyuanVideoFramepackTransformer3DModel": OtherModel(
        lambda: framepack_model("cpu"),
        lambda: framepack_inputs("cpu"),
        (
            *_HUNYUAN_TEXTS, "image_embeds",
            *(f"latents_{x}" for x in ("clean", "history_2x", "history_4x")),
        ),
    ),
    "UNetControlNetXSModel": OtherModel(
        lambda: controlnet_xs("cpu"),
        controlnet_xs_inputs, ("sample", "encoder_hidden_states", "controlnet_cond"),
    ),
}
# A class with several configurations there is tried with the first.
SHARED = {small.cls: small for small in reversed(small_models.MODELS)}
MODELS = {**SHARED, **NEW, **OTHERS}
_UNET_INPUTS = ("sample", "encoder_hidden_states", "controlnet_cond")
MODELS |= {
    "FluxMultiControlNetModel": _several(
        "FluxMultiControlNetModel", "FluxControlNetModel", controlnet_mode=torch.tensor([0, 0])
    ),
    "QwenImageMultiControlNetModel": _several(
        "QwenImageMultiControlNetModel", "QwenImageControlNetModel", count=1
    ),
    "SD3MultiControlNetModel": _several("SD3MultiControlNetModel", "SD3ControlNetModel"),
    "HunyuanDiT2DMultiControlNetModel": _several(
        "HunyuanDiT2DMultiControlNetModel", "HunyuanDiT2DControlNetModel",
        (*TEXTS, "timestep", "encoder_hidden_states_t5", "image_meta_size", "controlnet_cond"),
    ),
    "MultiControlNetModel": _several("MultiControlNetModel", "ControlNetModel", _UNET_INPUTS),
    "MultiControlNetUnionModel": _several(
        "MultiControlNetUnionModel", "ControlNetUnionModel", (*_UNET_INPUTS, "control_type"),
        control_type=torch.tensor([[0, 1, 0, 0, 0, 0]] * 2), control_type_idx=[1],
    ),
}
# fmt: on


def config_of(cls, head_dim):
    """The configuration of a class's small model, of families with this head size."""
    if cls in FAMILY_OF:
        return FAMILIES[FAMILY_OF[cls]].model.config(2, 2, head_dim)
    return MODELS[cls].config
