"""FlashAttention-3 as diffusers' attention backend, from the wheel fa3-fwd.

diffusers finds FlashAttention-3 only as it is built from source, under other names.
"""

from __future__ import annotations

import torch
from diffusers.models import attention_dispatch

SELF_ATTENTION = ("attn", "attn1")  # names of modules; FlashAttention-3 takes no mask of text


def use(model: torch.nn.Module) -> None:
    """Have the self-attentions of a model run on FlashAttention-3.

    ValueError if none of them has an attention backend.
    """
    from fa3_fwd_interface import flash_attn_func

    attention_dispatch.flash_attn_3_func = flash_attn_func
    attention_dispatch._CAN_USE_FLASH_ATTN_3 = True
    processors = [
        processor
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in SELF_ATTENTION
        and hasattr(processor := getattr(module, "processor", None), "_attention_backend")
    ]
    if not processors:
        raise ValueError("its attention has no backend to choose")
    for processor in processors:
        processor._attention_backend = attention_dispatch.AttentionBackendName._FLASH_3
