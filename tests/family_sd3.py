"""Small Stable Diffusion 3.5 models for the tests of all families."""

import torch
from diffusers import SD3Transformer2DModel

from family import JOINT_LORA, JOINT_PARTS, TWO_STREAM_OPTIONS, Family, make_all_matter, seeded

CHANNELS = 4
TEXT_CHANNELS = 24
POOLED_CHANNELS = 12


def sd3_model(device, dtype=torch.float32, *, seed=0, blocks=3, heads=2, head_dim=16, **config):
    """The first block attends twice to the image, the last one drops the text.

    Norm weights differ from 1. Modulations are large and differ between token streams.
    """
    torch.manual_seed(seed)
    model = SD3Transformer2DModel(
        sample_size=16,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=blocks,
        attention_head_dim=head_dim,
        num_attention_heads=heads,
        joint_attention_dim=TEXT_CHANNELS,
        caption_projection_dim=heads * head_dim,
        pooled_projection_dim=POOLED_CHANNELS,
        pos_embed_max_size=24,
        dual_attention_layers=config.pop("dual_attention_layers", (0,)),
        qk_norm=config.pop("qk_norm", "rms_norm"),
        **config,
    )
    make_all_matter(
        model, ("norm1.linear", "norm1_context.linear", "norm_out.linear"), "time_text_embed"
    )
    return model.to(device, dtype).eval()


def sd3_inputs(
    device, dtype=torch.float32, *, seed=None, batch=2, tokens=1, text_length=5, **options
):
    normal = seeded(seed, device)
    height, width = 6 + 2 * tokens, 6
    return {
        "hidden_states": normal(batch, CHANNELS, height, width).to(dtype),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "pooled_projections": normal(batch, POOLED_CHANNELS).to(dtype),
        "timestep": 1000 * normal(batch).sigmoid(),
        **options,
    }


SD3 = Family(
    name="sd3",
    model=sd3_model,
    inputs=sd3_inputs,
    inexact=("hidden_states", "encoder_hidden_states", "pooled_projections"),
    options=TWO_STREAM_OPTIONS,
    parts={
        **JOINT_PARTS,
        "last_block": "transformer_blocks.2",
        "second_attention": "transformer_blocks.0.attn2",
        "norm": "transformer_blocks.1.norm1",
        "inner_norm": "transformer_blocks.1.norm1_context.norm",
        "dual_norm": "transformer_blocks.0.norm1",
        "last_norm": "transformer_blocks.2.norm1_context",
        "norm2": "transformer_blocks.0.norm2",
        "output": "transformer_blocks.0.attn2.to_out.0",
        "feed_forward": "transformer_blocks.0.ff",
        "feed_forward_of_text": "transformer_blocks.0.ff_context",
        "activation": "transformer_blocks.0.ff_context.net.0",
        "up": "transformer_blocks.0.ff.net.0.proj",
        "modulation": "transformer_blocks.0.norm1.linear",
    },
    lora_targets=[*JOINT_LORA, "ff.net.0.proj", "ff.net.2", "norm1.linear"],
    caches=(),
    module="diffusers.models.attention_processor",
    functions=(),
    has_backends=False,
    one_block={"blocks": 1, "dual_attention_layers": ()},
    processor="JointAttnProcessor2_0",
)
