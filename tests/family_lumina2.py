"""Small Lumina 2 models for the tests of all families."""

import diffusers
import torch

from family import TWO_STREAM_OPTIONS, Family, make_all_matter, seeded

CHANNELS, TEXT_CHANNELS = 4, 24


def lumina2_model(device, dtype=torch.float32, *, seed=0, blocks=2, heads=2, head_dim=16, **config):
    """Two query heads for each key head. Norm weights differ from 1. Modulations are large."""
    torch.manual_seed(seed)
    axis = head_dim // 3 // 2 * 2
    model = diffusers.Lumina2Transformer2DModel(
        sample_size=8,
        in_channels=CHANNELS,
        hidden_size=heads * head_dim,
        num_layers=blocks,
        num_refiner_layers=blocks,
        num_attention_heads=heads,
        num_kv_heads=heads // 2,
        multiple_of=16,
        axes_dim_rope=(head_dim - 2 * axis, axis, axis),
        axes_lens=(512, 512, 64),
        cap_feat_dim=TEXT_CHANNELS,
        **config,
    )
    embedding = "time_caption_embed.timestep_embedder"
    make_all_matter(model, ("norm1.linear", "norm_out.linear_1"), embedding, gain=1)
    return model.to(device, dtype).eval()


def lumina2_inputs(
    device, dtype=torch.float32, *, seed=None, batch=2, tokens=1, text_length=5, mask=None
):
    """With ``mask`` prompts have different lengths, the longest one ``text_length``."""
    normal = seeded(seed, device)
    lengths = torch.full((batch,), text_length)
    if mask is not None:
        lengths = text_length - torch.arange(batch) * 3 % text_length
    return {
        "hidden_states": normal(batch, CHANNELS, 6 + 2 * tokens, 6).to(dtype),
        "timestep": normal(batch).sigmoid(),
        "encoder_hidden_states": normal(batch, text_length, TEXT_CHANNELS).to(dtype),
        "encoder_attention_mask": (torch.arange(text_length) < lengths[:, None]).long().to(device),
    }


LUMINA2 = Family(
    name="lumina2",
    model=lumina2_model,
    inputs=lumina2_inputs,
    inexact=("hidden_states", "encoder_hidden_states"),
    options={**TWO_STREAM_OPTIONS, "padded text": {"mask": "padded"}},
    parts={
        "block": "layers.0",
        "next_block": "layers.1",
        "text_block": "context_refiner.0",
        "attention": "layers.0.attn",
        "norm": "layers.1.norm1",
        "inner_norm": "layers.1.norm1.norm",
        "norm2": "layers.0.ffn_norm1",
        "qk_norm": "layers.0.attn.norm_q",
        "linear": "layers.0.attn.to_k",
        "output": "layers.0.attn.to_out.0",
        "gated_feed_forward": "layers.0.feed_forward",
        "up": "layers.0.feed_forward.linear_1",
        "modulation": "layers.0.norm1.linear",
    },
    lora_targets=[
        *("to_q", "to_k", "to_v", "to_out.0"),
        *("feed_forward.linear_1", "feed_forward.linear_2", "feed_forward.linear_3"),
    ],
    caches=(),
    module="diffusers.models.transformers.transformer_lumina2",
    processor="Lumina2AttnProcessor2_0",
    block_lists=("context_refiner", "noise_refiner", "layers"),
    functions=("apply_rotary_emb",),
    has_backends=False,
)
