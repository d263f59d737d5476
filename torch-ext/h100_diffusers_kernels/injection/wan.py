"""Wan 2.1 and 2.2, and the models that have copies of its block: how they map to the operations.

A block computes in float32 between its linear layers, with hidden states of the model's dtype in between,

    n = layer_norm(x) * (1 + scale) + shift;  x = x + gate * attn1(n)
    x = x + attn2(layer_norm(x, weight, bias), text)
    n = layer_norm(x) * (1 + scale_mlp) + shift_mlp;  x = x + gate_mlp * ffn(n)

with a modulation in float32, an RMS norm of query and key over all heads, and a rotary embedding of both in
attn1. With an image as context attn2 attends to image and text apart, and adds the results up. The blocks of
VACE's control branch begin and end with a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .activations import GELU
from .attention import Attention, Norms, attend, norm_and_rotate
from .blocks import Block, End, begin, finish, table_rows
from .embeddings import TIMESTEPS
from .injected import Injected, Parts
from .model_forward import Model
from .modulation import Opening, once
from .norms import gated_residual
from .part import Family, Part

_MODELS = "diffusers.models.transformers."
# Of the text encoder: what comes before them in a context is an image's.
_TEXT_TOKENS = 512


def _openings(
    injected: Injected,
    block: nn.Module,
    parts: Parts,
    temb: Tensor,
    by_token: Callable[[Tensor], Tensor],
) -> tuple:
    """Rows are shift, scale and gate of self-attention, then of the feed-forward, each (B, 1 or S, D)."""

    def rows() -> tuple:
        embedding = once(injected, "embedding", temb, by_token)
        return table_rows(injected, block, "scale_shift_table", embedding)

    return (Opening(parts.norm1, rows, tuple(block._parameters.values())),)


def _by_token(temb: Tensor) -> Tensor:
    """An embedding (B, 6, D), or (B, S, 6, D), as (B, 1 or S, 6 * D) in float32."""
    temb = temb.float()
    return temb.flatten(1).unsqueeze(1) if temb.dim() == 3 else temb.flatten(2)


def _by_token_last(temb: Tensor) -> Tensor:
    """The same of an embedding whose form for tokens is (B, 6, S, D)."""
    return _by_token(temb if temb.dim() == 3 else temb.transpose(1, 2))


_openings_by_token = partial(_openings, by_token=_by_token)
_openings_by_token_last = partial(_openings, by_token=_by_token_last)


def _block_forward(
    self: Any,
    injected: Injected,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    rotary_emb: Any,
    *attention_mask: Any,
    openings_of: Callable = _openings_by_token,
) -> Tensor:
    # Some models only transpose what their convolution gives.
    x, c = hidden_states.contiguous(), encoder_hidden_states
    parts = injected.parts(self, x, c)
    if parts is None:
        return injected.class_forward(self, hidden_states, c, temb, rotary_emb, *attention_mask)
    mask = attention_mask[0] if attention_mask else None
    (opened,) = begin(injected, self, parts, openings_of, (x,), (temb,))
    end = _inside(self, parts, x, opened, c, mask, rotary_emb)
    (x,) = finish(injected, self, openings_of, (end,), (temb,), widens=True)
    return x


def _masked_block_forward(
    self: Any,
    injected: Injected,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    rotary_emb: Any,
    attention_mask: Any,
) -> Tensor:
    """SkyReels-V2's, which also has another order of an embedding for each token."""
    arguments = (hidden_states, encoder_hidden_states, temb, rotary_emb, attention_mask)
    openings_of = _openings_by_token_last
    return _block_forward(self, injected, *arguments, openings_of=openings_of)


def _inside(
    self: Any, parts: Parts, x: Tensor, opened: Any, c: Tensor, mask: Any, rotary_emb: Any
) -> End:
    """From the first norm to the last residual."""
    (normalized,), (_, _, gate, shift_mlp, scale_mlp, gate_mlp) = opened
    attention_out = (parts.attn1 or self.attn1)(normalized, None, mask, rotary_emb)
    x, normalized = parts.norm2.residual_normed(x, attention_out, gate)
    attention_out = (parts.attn2 or self.attn2)(normalized, c, None, None)
    mlp = (scale_mlp, shift_mlp)
    x, normalized = parts.norm3.residual_modulated(x, attention_out, None, mlp)
    return End(x, parts.ffn(normalized), gate_mlp)


def _vace_block_forward(
    self: Any,
    injected: Injected,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    control_hidden_states: Tensor,
    temb: Tensor,
    rotary_emb: Any,
) -> tuple[Tensor | None, Tensor]:
    c, control = encoder_hidden_states, control_hidden_states
    parts = injected.parts(self, hidden_states.contiguous(), c, control)
    if parts is None:
        return injected.class_forward(self, hidden_states, c, control, temb, rotary_emb)
    if self.proj_in is not None:
        control = self.proj_in(control) + hidden_states
    control = control.contiguous()
    (opening,) = _openings_by_token(injected, self, parts, temb)
    end = _inside(self, parts, control, opening(control), c, None, rotary_emb)
    x = gated_residual(*end, widens=True)
    return None if self.proj_out is None else self.proj_out(x), x


def _attention_forward(
    self: Any,
    injected: Injected,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    rotary_emb: Any = None,
    *,
    context_is_parallel: bool = False,
    **kwargs,
) -> Tensor:
    x, c = hidden_states, encoder_hidden_states
    parts = None if kwargs else injected.parts(self, x, c)
    if parts is None:
        arguments = (x, c, attention_mask, rotary_emb)
        return injected.class_forward(self, *arguments, **kwargs)
    heads = self.heads
    of_image = None
    if self.add_k_proj is not None and c is not None:
        length = c.shape[1] - _TEXT_TOKENS
        of_image, c = c[:, :length], c[:, length:]
    query, key, value = _project(self, parts, x, c)
    tables = None if rotary_emb is None else once(injected, "tables", rotary_emb, _pair_tables)
    norms = Norms(parts.norm_q, parts.norm_k)
    query, key = norm_and_rotate(
        injected, parts, norms, query, key, tables, _rotated, "across_heads", heads
    )
    options: dict[str, Any] = {"heads": heads, "dropout_p": 0.0, "is_causal": False}
    if encoder_hidden_states is not None and not context_is_parallel:
        options["parallel_config"] = None  # each rank has all of the text
    out = attend(injected, parts, query, key, value, attention_mask, **options)
    if of_image is not None:
        key, value = _project_image(self, parts, of_image)
        key = parts.norm_added_k(key)
        image_out = attend(injected, parts, query, key, value, None, **options)
        out = gated_residual(out, image_out, None)
    return parts.project_out(out)


def _project(self: Any, parts: Parts, x: Tensor, c: Tensor | None) -> tuple[Tensor, ...]:
    if parts.project is not None and (self.fused_projections or not parts.projects):
        return parts.project(self, x, c)
    context = x if c is None else c
    return parts.to_q(x), parts.to_k(context), parts.to_v(context)


def _project_image(self: Any, parts: Parts, of_image: Tensor) -> tuple[Tensor, ...]:
    if self.fused_projections:
        return self.to_added_kv(of_image).chunk(2, dim=-1)
    return parts.add_k_proj(of_image), parts.add_v_proj(of_image)


def _pair_tables(rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Of tables (1, S, 1, d) with a value for each element those that the model reads, one for each pair."""
    cos, sin = rope
    return cos[..., 0::2].contiguous(), sin[..., 1::2].contiguous()


def _rotated(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """As the model's processor rotates x (B, S, H * d) by a value for each pair."""
    cos, sin = tables
    pairs = x.unflatten(2, (-1, cos.shape[-1], 2))
    first, second = pairs.unbind(-1)
    turned = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return turned.to(x.dtype).flatten(2)


_BLOCK = "self hidden_states encoder_hidden_states"
_ATTENTION = "hidden_states encoder_hidden_states attention_mask rotary_emb"
_OPERATIONS = "layer_norm_modulate, gated_residual_layer_norm_modulate, gated_residual"


def _block(path: str, parameters: str, forward: Callable) -> Block:
    return Block(
        path,
        f"{_BLOCK} {parameters}",
        forward,
        _OPERATIONS,
        norms=("norm1", "norm2", "norm3"),
        widens=True,
        feed_forwards=("ffn",),
        inner=("attn1", "attn2", "ffn.net.0"),
    )


def _attention(
    module: str, prefix: str = "Wan", forward: Callable = _attention_forward
) -> Attention:
    return Attention(
        f"{module}:{prefix}Attention",
        f"self {_ATTENTION} kwargs",
        forward,
        "qk_norm_rope",
        processor=f"{module}:{prefix}AttnProcessor",
        processor_parameters=f"self attn {_ATTENTION}",
        norms=("norm_q", "norm_k", "norm_added_k"),
        projections=("to_q", "to_k", "to_v", "add_k_proj", "add_v_proj"),
        project="_get_qkv_projections",
        rotate="",
    )


_ONCE = ("rope", "patch_embedding", "condition_embedder", "norm_out", "proj_out")
_LEFT_ALONE = dict.fromkeys(_ONCE, "computed once a forward, by the model's own code")


def _family(name: str, *parts: Part) -> Family:
    return Family(name, (*parts, TIMESTEPS, GELU), _LEFT_ALONE)


_WAN, _ANIMATE, _VACE = (f"{_MODELS}transformer_wan{name}" for name in ("", "_animate", "_vace"))
_CHRONOEDIT, _SKYREELS = _MODELS + "transformer_chronoedit", _MODELS + "transformer_skyreels_v2"
_TRANSFORMER_BLOCK = "temb rotary_emb"
FAMILIES = (
    _family(
        "Wan",
        Model(f"{_WAN}:WanTransformer3DModel", blocks=("blocks",)),
        Model(f"{_VACE}:WanVACETransformer3DModel", blocks=("vace_blocks", "blocks")),
        _block(f"{_WAN}:WanTransformerBlock", _TRANSFORMER_BLOCK, _block_forward),
        _block(
            f"{_VACE}:WanVACETransformerBlock",
            f"control_hidden_states {_TRANSFORMER_BLOCK}",
            _vace_block_forward,
        ),
        _attention(_WAN),
    ),
    _family(
        "Wan-Animate",
        Model(f"{_ANIMATE}:WanAnimateTransformer3DModel", blocks=("blocks",)),
        _block(f"{_ANIMATE}:WanTransformerBlock", _TRANSFORMER_BLOCK, _block_forward),
        _attention(_ANIMATE),
    ),
    _family(
        "ChronoEdit",
        Model(f"{_CHRONOEDIT}:ChronoEditTransformer3DModel", blocks=("blocks",)),
        _block(f"{_CHRONOEDIT}:WanTransformerBlock", _TRANSFORMER_BLOCK, _block_forward),
        _attention(_CHRONOEDIT),
    ),
    _family(
        "SkyReels-V2",
        Model(f"{_SKYREELS}:SkyReelsV2Transformer3DModel", blocks=("blocks",)),
        _block(
            f"{_SKYREELS}:SkyReelsV2TransformerBlock",
            f"{_TRANSFORMER_BLOCK} attention_mask",
            _masked_block_forward,
        ),
        _attention(_SKYREELS, "SkyReelsV2", partial(_attention_forward, context_is_parallel=True)),
    ),
)
