"""Stable Diffusion 3 and 3.5: how their transformer, and its ControlNet, map to the operations.

A block is a double block of FLUX.1 without a rotary embedding, and with the image before the text. Some
blocks of Stable Diffusion 3.5 attend twice to the image,

    n_x, n_2 = layer_norm(x) * (1 + scale) + shift, layer_norm(x) * (1 + scale_2) + shift_2
    x = x + gate * a_x;  x = x + gate_2 * attention(n_2)

and the last block leaves out the text after its attention.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .activations import GELU
from .attention import Attention
from .blocks import Block, begin, feed_forward_end, finish
from .embeddings import TIMESTEPS
from .injected import Injected, Parts
from .joint import PROJECTIONS, attend_jointly, attend_to_all, project
from .linears import of_slices
from .model_forward import Model
from .norm_modules import OUTPUT_NORM
from .norms import gated_residual
from .part import Family
from .snapshot import Look

_SD3 = "diffusers.models.transformers.transformer_sd3"
_CONTROLNET = "diffusers.models.controlnets.controlnet_sd3"
_BLOCKS = "diffusers.models.attention"
_ATTENTIONS = "diffusers.models.attention_processor"


def _openings(injected: Injected, block: nn.Module, parts: Parts, temb: Tensor) -> tuple:
    """Of image and text; rows are shift, scale and gate of attention, of the feed-forward, and of the second
    attention; of the last text scale and shift."""
    by_name = not block.context_pre_only
    return (
        parts.norm1.opening(injected, temb),
        parts.norm1_context.opening(injected, temb, by_name),
    )


def _decide_more(parts: Parts, module: nn.Module, snapshot: Look) -> None:
    if snapshot.see_attribute(module, "_chunk_size") is not None:
        parts.reason = "its feed-forward is chunked"


def _block_forward(
    self: Any,
    injected: Injected,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor | None, Tensor]:
    x, c = hidden_states, encoder_hidden_states
    parts = injected.parts(self, x, c, temb)
    if parts is None:
        return injected.class_forward(self, x, c, temb, joint_attention_kwargs)
    more = joint_attention_kwargs or {}
    opened, c_opened = begin(injected, self, parts, _openings, (x, c), (temb,))
    rows = opened.rows[:6]
    attention_out, c_attention_out = (parts.attn or self.attn)(
        hidden_states=opened.normalized[0], encoder_hidden_states=c_opened.normalized[0], **more
    )
    if self.use_dual_attention:
        x = gated_residual(x, attention_out, rows[2])
        attention_out = (parts.attn2 or self.attn2)(hidden_states=opened.normalized[1], **more)
        rows = (*rows[:2], opened.rows[8], *rows[3:])
    end = feed_forward_end(parts.norm2, parts.ff, x, attention_out, rows)
    if self.context_pre_only:
        return None, gated_residual(*end)
    text = (parts.norm2_context, parts.ff_context)
    ends = (end, feed_forward_end(*text, c, c_attention_out, c_opened.rows))
    x, c = finish(injected, self, _openings, ends, (temb,))
    return c, x


def _single_openings(injected: Injected, block: nn.Module, parts: Parts, temb: Tensor) -> tuple:
    return (parts.norm1.opening(injected, temb),)


def _single_block_forward(
    self: Any, injected: Injected, hidden_states: Tensor, temb: Tensor
) -> Tensor:
    x = hidden_states
    parts = injected.parts(self, x, temb)
    if parts is None:
        return injected.class_forward(self, x, temb)
    (opened,) = begin(injected, self, parts, _single_openings, (x,), (temb,))
    attention_out = (parts.attn or self.attn)(
        hidden_states=opened.normalized[0], encoder_hidden_states=None
    )
    end = feed_forward_end(parts.norm2, parts.ff, x, attention_out, opened.rows)
    (x,) = finish(injected, self, _single_openings, (end,), (temb,))
    return x


def _attention_forward(
    self: Any,
    injected: Injected,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **kwargs,
) -> Any:
    x, c = hidden_states, encoder_hidden_states
    parts = None if kwargs else injected.parts(self, x, c)
    if parts is None:
        return injected.class_forward(self, x, c, attention_mask, **kwargs)
    # Its processor does not look at a mask.
    streams = project(self, parts, x, c)
    options: dict[str, Any] = {"dropout_p": 0.0, "is_causal": False}
    if c is None:
        return parts.project_out(attend_to_all(injected, parts, streams, _no_rotation, **options))
    out, c_out = attend_jointly(injected, parts, streams, _no_rotation, **options)
    if not self.context_pre_only:
        c_out = of_slices(parts.to_add_out, c_out)
    return of_slices(parts.project_out, out), c_out


def _no_rotation(x: Tensor, rope: Any) -> Tensor:
    raise AssertionError("there is no rotary embedding")


_PARTS = (
    Model(f"{_SD3}:SD3Transformer2DModel", blocks=("transformer_blocks",)),
    Model(f"{_CONTROLNET}:SD3ControlNetModel", blocks=("transformer_blocks",)),
    Block(
        f"{_BLOCKS}:JointTransformerBlock",
        "self hidden_states encoder_hidden_states temb joint_attention_kwargs",
        _block_forward,
        "layer_norm_modulate, gated_residual_layer_norm_modulate, gated_residual",
        norms=("norm2", "norm2_context"),
        adaptive_norms=("norm1", "norm1_context"),
        feed_forwards=("ff", "ff_context"),
        decide_more=_decide_more,
        inner=("attn", "attn2", "ff.net.0", "ff_context.net.0"),
    ),
    Block(
        f"{_SD3}:SD3SingleTransformerBlock",
        "self hidden_states temb",
        _single_block_forward,
        "layer_norm_modulate, gated_residual_layer_norm_modulate, gated_residual",
        norms=("norm2",),
        adaptive_norms=("norm1",),
        feed_forwards=("ff",),
        inner=("attn", "ff.net.0"),
    ),
    Attention(
        f"{_ATTENTIONS}:Attention",
        "self hidden_states encoder_hidden_states attention_mask cross_attention_kwargs",
        _attention_forward,
        "qk_norm_rope",
        processor=f"{_ATTENTIONS}:JointAttnProcessor2_0",
        processor_parameters="self attn hidden_states encoder_hidden_states attention_mask args kwargs",
        norms=("norm_q", "norm_k", "norm_added_q", "norm_added_k"),
        projections=PROJECTIONS,
        rotate="",
        dispatches=False,
    ),
    TIMESTEPS,
    GELU,
)
_ONCE = ("pos_embed", "time_text_embed", "context_embedder", "proj_out")
_LEFT_ALONE = dict.fromkeys(_ONCE, "computed once a forward, by the model's own code")
FAMILIES = (Family("Stable Diffusion 3", _PARTS, _LEFT_ALONE, OUTPUT_NORM),)
