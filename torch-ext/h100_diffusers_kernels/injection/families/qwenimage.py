"""Qwen-Image: how its transformer, and its ControlNet, map to the operations.

Its blocks are the double blocks of FLUX.1 with three differences: each stream has a linear layer for its
modulation; the rotary embedding is a complex table for each stream; and the text has a mask. In image editing
each image token may select one of two modulations.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..attention import modules as attention
from ..core.forward_state import Family, model_spec
from ..core.patch import Call
from ..parts.blocks import IMAGE_READERS, TEXT_READERS, double_block
from ..parts.embeddings import TIMESTEPS
from ..parts.linears import LINEAR_GELU
from ..parts.norm_modules import OUTPUT_NORM
from ..parts.norms import RowsByToken, clip_to_float16
from ..parts.streams import BlockSpec, linear_modulation, plain_norm
from ..quantized.precision import ATTENTION_LAYERS, ONE_LIST

_QWEN = "diffusers.models.transformers.transformer_qwenimage"
_CONTROLNET = "diffusers.models.controlnets.controlnet_qwenimage"
_BLOCK_CLASS = f"{_QWEN}:QwenImageTransformerBlock"


def _first_norm(call: Call, block, previous_x, temb, index, *, stream: str, readers: Any) -> Any:
    """Rows are shift, scale and gate of attention, then of the feed-forward."""
    silu = "silu"
    if stream == "txt" and block.zero_cond_t:  # the second half is only for image tokens
        silu, temb = "text silu", call.shared("first half", temb, lambda temb: temb.chunk(2)[0])
    modulation = linear_modulation(call, block._modules[f"{stream}_mod"], temb, previous_x, silu)
    if modulation is None:
        return None

    def row_of_each(index: Tensor) -> Tensor:
        """The row of each token (B, S), int32."""
        batch = len(modulation) // 2
        samples = torch.arange(batch, dtype=torch.int32, device=index.device)[:, None]
        return torch.where(index == 0, samples, samples + batch)

    def rows_of() -> tuple:
        if stream == "txt" or index is None:
            return modulation.unsqueeze(1).chunk(6, dim=-1)
        # Tables (2 * B, D): of samples for index 0, then for others.
        chosen = call.shared(f"rows of {len(modulation)}", index, row_of_each)
        return tuple([RowsByToken(table, chosen) for table in modulation.chunk(6, dim=-1)])

    options: Any = {"name": f"{stream}_norm1", "rows_of": rows_of, "readers": readers}
    return plain_norm(call, block, previous_x, **options)


_FIRST_NORMS = (
    partial(_first_norm, stream="img", readers=IMAGE_READERS),
    partial(_first_norm, stream="txt", readers=TEXT_READERS),
)
_FEED_FORWARDS = (("img_norm2", "img_mlp"), ("txt_norm2", "txt_mlp"))


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    encoder_hidden_states_mask: Tensor | None,
    temb: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
    modulate_index: Any = None,
) -> tuple[Tensor, Tensor]:
    x, c, mask = hidden_states, encoder_hidden_states, encoder_hidden_states_mask
    if not call.takes(x, c, temb):
        return NotImplemented
    more = {"image_rotary_emb": image_rotary_emb, **(joint_attention_kwargs or {})}
    arguments = (call, self, _FIRST_NORMS, (x, c), (temb, modulate_index), _FEED_FORWARDS)
    x, c = double_block(*arguments, encoder_hidden_states_mask=mask, **more)
    return c, clip_to_float16(x)


def _attention_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    encoder_hidden_states_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
    **kwargs,
) -> Any:
    x, c, mask = hidden_states, encoder_hidden_states, encoder_hidden_states_mask
    if kwargs or c is None or attention_mask is not None or not call.takes(x, c):
        return NotImplemented
    ropes = (None, None) if image_rotary_emb is None else image_rotary_emb
    image_length = x.shape[1]

    def mask_of_all(mask: Tensor) -> Tensor:
        """The mask of all keys (B, 1, 1, T + S) from the text's (B, T), which is False at padding."""
        return torch.nn.functional.pad(mask, (0, image_length), value=True)[:, None, None]

    joint_mask = None
    # Before diffusers 0.37 the mask had no effect.
    if mask is not None and hasattr(sys.modules[_QWEN], "compute_text_seq_len_from_mask"):
        joint_mask = call.shared(("mask", image_length), mask, mask_of_all)
    rotate = partial(call.stand_in.functions[1].function, use_real=False)
    options: dict[str, Any] = {"is_text_first": True, "dropout_p": 0.0, "is_causal": False}
    return attention.run_joint_attention(call, self, x, c, ropes, rotate, joint_mask, **options)


_PROCESSOR = "hidden_states encoder_hidden_states encoder_hidden_states_mask attention_mask"
_SPECS = (
    model_spec(f"{_QWEN}:QwenImageTransformer2DModel", "transformer_blocks"),
    model_spec(f"{_CONTROLNET}:QwenImageControlNetModel", "transformer_blocks"),
    BlockSpec(_BLOCK_CLASS, _block_forward, functions=(f"{_BLOCK_CLASS}._modulate",)),
    attention.AttentionSpec(
        "diffusers.models.attention_processor:Attention",
        _attention_forward,
        "qk_norm_rope",
        processor=f"{_QWEN}:QwenDoubleStreamAttnProcessor2_0",
        parameters="self hidden_states encoder_hidden_states attention_mask cross_attention_kwargs",
        processor_parameters=f"{_PROCESSOR} image_rotary_emb",
        rotate="apply_rotary_emb_qwen",
    ),
    TIMESTEPS,
    LINEAR_GELU,
)
_ONCE = ("pos_embed", "time_text_embed", "txt_norm", "img_in", "txt_in", "proj_out")
_LAYERS = ONE_LIST._replace(layers=(*ATTENTION_LAYERS, "*_mlp.net.0.proj", "*_mlp.net.2"), ends=2)
FAMILIES = (Family("Qwen-Image", _SPECS, _ONCE, _LAYERS, OUTPUT_NORM),)
