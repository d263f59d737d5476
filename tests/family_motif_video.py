"""Small Motif-Video models for the tests of all families."""

import family
from family_flux import FLUX, SINGLE_FEED_FORWARD_PARTS, SINGLE_PARTS
from family_hunyuan import MODULATIONS

CHANNELS, TEXT_CHANNELS, IMAGE_CHANNELS = 4, 24, 12


@family.model_of("MotifVideoTransformer3DModel", MODULATIONS, "time_text_embed")
def motif_video_model(blocks, heads, head_dim):
    return {
        **family.sizes(blocks, heads, head_dim),
        "num_single_layers": 2 * blocks,
        "num_decoder_layers": blocks,
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "mlp_ratio": 2.0,
        "text_embed_dim": TEXT_CHANNELS,
        "image_embed_dim": IMAGE_CHANNELS,
        "rope_axes_dim": family.three_axes(head_dim),
        "enable_text_cross_attention_dual": True,
        "enable_text_cross_attention_single": True,
    }


@family.inputs_of
def motif_video_inputs(
    normal, dtype, batch, tokens, text_length, image=False, holes=False, **options
):
    """``image``: whether there is an image to begin with."""
    arguments = {
        "hidden_states": normal(batch, CHANNELS, 2, 2 + 2 * tokens, 6).to(dtype),
        "timestep": family.powers_of_two(normal, batch, 64),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "encoder_attention_mask": family.text_mask(
            batch, text_length, (text_length + 1) // 2, holes
        ),
        **options,
    }
    embeds = normal(batch, 3, IMAGE_CHANNELS).to(dtype)
    return {**arguments, "image_embeds": embeds if image else None}


class _MotifVideo(family.Family):
    def in_float64(self, model):
        """The class gives linear layers the float32 embedding of the time step."""
        embedder = model.time_text_embed.timestep_embedder
        embedder.register_forward_pre_hook(lambda _, args: (args[0].double(),))
        return model.double()

    def cast(self, arguments, dtype):
        embeds = arguments["image_embeds"]
        embeds = embeds if embeds is None else embeds.to(dtype)
        return {**super().cast(arguments, dtype), "image_embeds": embeds}


MOTIF_VIDEO = _MotifVideo(
    name="motif_video",
    model=motif_video_model,
    inputs=motif_video_inputs,
    options={
        **family.TWO_STREAM_OPTIONS,
        "padding first": {"holes": True},
        "an image": {"image": True},
        "no mask": {"encoder_attention_mask": None},
    },
    parts={
        **family.JOINT_PARTS,
        **family.JOINT_FEED_FORWARD_PARTS,
        **SINGLE_PARTS,
        **SINGLE_FEED_FORWARD_PARTS,
        "cross_attention": "transformer_blocks.0.cross_attn",
        "inner_norm": "transformer_blocks.1.norm1.norm",
        "last_block": "single_transformer_blocks.3",
        "rope": "rope",
    },
    lora_targets=FLUX.lora_targets,
    caches=("pyramid", "taylorseer"),
    processor="MotifVideoAttnProcessor2_0",
    block_lists=("transformer_blocks", "single_transformer_blocks"),
    fp8_calls=[20, 10, 2, 4, 0, 4, 4, 10],
)
