"""The small LTX-Video: diffusers' and transformers' classes, a few million parameters."""

from __future__ import annotations

from pathlib import Path

import torch
from clips import words
from diffusers import (
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from transformers import T5Config, T5EncoderModel, T5TokenizerFast

TEXT_TOKENS = 128  # as LTXPipeline pads a prompt
TEXT_SIZE = 128


def make_tokenizer() -> T5TokenizerFast:
    """A tokenizer of the captions' words; others are <unk>."""
    pieces = ["<pad>", "</s>", "<unk>", *(word if word == "." else f"▁{word}" for word in words())]
    return T5TokenizerFast(
        vocab=[(piece, -1.0) for piece in pieces], extra_ids=0, model_max_length=TEXT_TOKENS
    )


def make_pipeline(seed: int = 0) -> LTXPipeline:
    """An untrained pipeline in float32 on the CPU."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    text_config = T5Config(
        vocab_size=len(tokenizer),
        d_model=TEXT_SIZE,
        d_kv=32,
        d_ff=512,
        num_layers=3,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
    )
    return LTXPipeline(
        tokenizer=tokenizer,
        text_encoder=T5EncoderModel(text_config),
        transformer=LTXVideoTransformer3DModel(
            num_layers=6,
            num_attention_heads=4,
            attention_head_dim=64,
            cross_attention_dim=256,
            caption_channels=TEXT_SIZE,
        ),
        # As in LTX-Video 0.9.5, down- and upsampling have a residual path: it trains much faster.
        vae=AutoencoderKLLTXVideo(
            block_out_channels=(32, 64, 64, 128),
            down_block_types=("LTXVideo095DownBlock3D",) * 3,
            downsample_type=("spatiotemporal",) * 3,
            layers_per_block=(1,) * 4,
            spatio_temporal_scaling=(True,) * 3,
            decoder_block_out_channels=(32, 32, 64, 128),
            decoder_layers_per_block=(1,) * 5,
            upsample_residual=(True,) * 4,
        ),
        # LTX-Video's schedule.
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.95,
            max_shift=2.05,
            base_image_seq_len=1024,
            max_image_seq_len=4096,
            shift_terminal=0.1,
        ),
    )


def save(pipe: LTXPipeline, folder: Path) -> None:
    """Convert the pipeline to bfloat16 in place and save it for `LTXPipeline.from_pretrained`."""
    pipe.to(torch.bfloat16).save_pretrained(folder)
