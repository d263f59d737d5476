"""Wan 2.1 and 2.2, and models with copies of their block: how they map to the operations.

A block computes in float32 between its linear layers, with hidden states in the model's dtype,

    n = layer_norm(x) * (1 + scale) + shift;  x = x + gate * attn1(n)
    x = x + attn2(layer_norm(x, weight, bias), text)
    n = layer_norm(x) * (1 + scale_mlp) + shift_mlp;  x = x + gate_mlp * ffn(n)

with a modulation in float32, an RMS norm of query and key over all heads, and a rotary embedding of both in
attn1. If the context holds an image, attn2 attends to image and text separately and adds the results. The
blocks of VACE's control branch begin and end with a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ..attention import modules as attention
from ..core.forward_state import Family, model_spec
from ..core.patch import Call, PatchSpec
from ..core.quantized_rows import as_tensor
from ..parts import linears
from ..parts.blocks import add_feed_forwards
from ..parts.embeddings import TIMESTEPS
from ..parts.norms import Upcasts, apply_norm
from ..parts.rotary import rotated_across_heads
from ..parts.streams import BlockSpec, FirstNorms, Stream, end, start, table_norm
from ..quantized.precision import ATTENTION_LAYERS, FEED_FORWARD_LAYERS, Layers

_MODELS = "diffusers.models.transformers."
# Number of the text encoder's tokens. In a context, image tokens come first.
_TEXT_TOKENS = 512


def _by_token(temb: Tensor) -> Tensor:
    """(B, 6, D) or (B, S, 6, D) to (B, 1 or S, 6, D)."""
    return temb.unsqueeze(1) if temb.dim() == 3 else temb


def _by_token_last(temb: Tensor) -> Tensor:
    """(B, 6, D) or (B, 6, S, D) to (B, 1 or S, 6, D)."""
    return _by_token(temb if temb.dim() == 3 else temb.transpose(1, 2))


# Rows are shift, scale and gate of self-attention, then of the feed-forward.
_READERS = partial(linears.fp8_readers, "attn1", linears.QUERY_KEY_VALUE)
_first_norm = partial(table_norm, in_float32=True, readers=_READERS)
BY_TOKEN = (partial(_first_norm, by_row=_by_token),)
_BY_TOKEN_LAST = (partial(_first_norm, by_row=_by_token_last),)
QUERY_READER = partial(linears.fp8_readers, "attn2", linears.QUERY_KEY_VALUE[:1])
FEED_FORWARD = (("norm3", "ffn"),)


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    rotary_emb: Any,
    attention_mask: Any = None,
    *,
    first_norms: FirstNorms = BY_TOKEN,
) -> Tensor:
    # Some models transpose their convolution's result without a copy.
    x, c = hidden_states.contiguous(), encoder_hidden_states
    if not call.takes(x, c):
        return NotImplemented
    (s,) = start(call, self, first_norms, (x,), (temb,))
    _add_branches(self, s, c, attention_mask, rotary_emb)
    return end(s)


def _add_branches(block: Any, s: Stream, c: Tensor, mask: Any, rotary_emb: Any) -> None:
    modules = block._modules
    s.add(modules["attn1"](s.n, None, mask, rotary_emb), s.rows[2])
    s.add(modules["attn2"](s.norm("norm2", readers=QUERY_READER), c, None, None))
    add_feed_forwards(block, s, names=FEED_FORWARD)


def _vace_block_forward(
    self, call: Call, hidden_states, encoder_hidden_states, control_hidden_states, temb, rotary_emb
) -> tuple[Tensor | None, Tensor]:
    c, control = encoder_hidden_states, control_hidden_states
    if not call.takes(hidden_states.contiguous(), c, control):
        return NotImplemented
    if self.proj_in is not None:
        control = linears.linear(self.proj_in, control) + hidden_states
    s = Stream(call, self, control.contiguous())
    s.apply(BY_TOKEN[0](call, self, None, temb))
    _add_branches(self, s, c, None, rotary_emb)
    return None if self.proj_out is None else linears.linear(self.proj_out, s.x), s.x


def pair_tables(rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Tables (1, S, 1, d) per element to tables (1, S, 1, d / 2) per pair, which the model reads."""
    cos, sin = rope
    return cos[..., 0::2].contiguous(), sin[..., 1::2].contiguous()


def attention_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    rotary_emb: Any = None,
    *,
    context_is_parallel: bool = False,
    tables_of: Callable[[Any], tuple[Tensor, Tensor]] = pair_tables,
    has_image: bool = True,
    **kwargs,
) -> Tensor:
    """``tables_of``: converts the rotary embedding to tables per pair. ``has_image``: whether a context may
    begin with an image."""
    x, c = hidden_states, encoder_hidden_states
    if kwargs:
        return NotImplemented
    if not call.takes(x, c):
        return NotImplemented
    image_tokens = None
    if has_image and self.add_k_proj is not None and c is not None:
        length = c.shape[1] - _TEXT_TOKENS
        image_tokens, c = c[:, :length], c[:, length:]
    tables = None if rotary_emb is None else call.shared("tables", rotary_emb, tables_of)
    rotation = tables, rotated_across_heads, "across_heads"
    config = attention.context_parallel_of(call, self)
    fused: Any = None
    if self.fused_projections:
        fused = call.stand_in.functions[-1].function(self, as_tensor(x), c)
    operands = (call, self, x, c, *rotation)
    query, key, value = attention.project_and_rotate(*operands, config=config, projected=fused)
    options: dict[str, Any] = {"heads": self.heads, "dropout_p": 0.0, "is_causal": False}
    options["config"] = config
    if encoder_hidden_states is not None and not (context_is_parallel or _splits_text(call)):
        options["parallel_config"] = None  # each rank has all of the text
    out = attention.attend(call, self, query, key, value, attention_mask, **options)
    if image_tokens is not None:
        out = attend_to_image(call, self, query, image_tokens, out, options)
    return attention.project_out(self, out, x)


def attend_to_image(
    call: Call, module: Any, query: Tensor, image: Tensor, out: Tensor, options: dict[str, Any]
) -> Tensor:
    """``out`` plus the attention of a query to an image. ``options``: see ``attention.attend``."""
    if module.fused_projections:
        key, value = module.to_added_kv(image).chunk(2, dim=-1)
    else:
        layers = module._modules["add_k_proj"], module._modules["add_v_proj"]
        key, value = (linears.linear(layer, image) for layer in layers)
    key = apply_norm(call, module, "norm_added_k", key)
    return attention.attend(call, module, query, key, value, None, addend=out, **options)


def _splits_text(call: Call) -> bool:
    """Whether diffusers' plan of context parallelism splits the text between ranks, as that of 0.36 does."""
    plan = getattr(call.stand_in.injection.model(), "_cp_plan", None) or {}
    return "encoder_hidden_states" in plan.get("blocks.*", ())


_PARAMETERS = "self hidden_states encoder_hidden_states temb rotary_emb"
_block = partial(BlockSpec, parameters=_PARAMETERS, upcasts=Upcasts.TO_NEXT_LINEAR)
_attention = partial(
    attention.AttentionSpec,
    forward=attention_forward,
    operations="qk_norm_rope",
    rotate="",
    project="_get_qkv_projections",
)
_ONCE = ("rope", "patch_embedding", "condition_embedder", "norm_out", "proj_out")
# With attention in FP8, too, videos were reported to collapse, with feed-forwards alone not.
LAYERS = Layers(
    ("blocks", "vace_blocks"), FEED_FORWARD_LAYERS, fast_only=ATTENTION_LAYERS, ends=3, fast_ends=3
)


def _family(name: str, *specs: PatchSpec) -> Family:
    specs = *specs, TIMESTEPS, linears.LINEAR_GELU
    return Family(name, specs, _ONCE, LAYERS)


def _copy(name: str, module: str, model: str) -> Family:
    """A model whose file has copies of Wan's block and attention."""
    block = _block(f"{module}:WanTransformerBlock", _block_forward)
    specs = model_spec(f"{module}:{model}", "blocks"), block, _attention(f"{module}:WanAttention")
    return _family(name, *specs)


_WAN, _VACE = f"{_MODELS}transformer_wan", f"{_MODELS}transformer_wan_vace"
_SKYREELS = f"{_MODELS}transformer_skyreels_v2"
FAMILIES = (
    _family(
        "Wan",
        model_spec(f"{_WAN}:WanTransformer3DModel", "blocks"),
        model_spec(f"{_VACE}:WanVACETransformer3DModel", "vace_blocks", "blocks"),
        _block(f"{_WAN}:WanTransformerBlock", _block_forward),
        _block(f"{_VACE}:WanVACETransformerBlock", _vace_block_forward, parameters=None),
        _attention(f"{_WAN}:WanAttention"),
    ),
    _copy("Wan-Animate", f"{_MODELS}transformer_wan_animate", "WanAnimateTransformer3DModel"),
    _copy("ChronoEdit", f"{_MODELS}transformer_chronoedit", "ChronoEditTransformer3DModel"),
    _family(
        "SkyReels-V2",
        model_spec(f"{_SKYREELS}:SkyReelsV2Transformer3DModel", "blocks"),
        _block(
            f"{_SKYREELS}:SkyReelsV2TransformerBlock",
            partial(_block_forward, first_norms=_BY_TOKEN_LAST),
            parameters=f"{_PARAMETERS} attention_mask",
            functions=(f"{_SKYREELS}:SkyReelsV2Attention.forward",),  # since diffusers 0.36
        ),
        _attention(
            f"{_SKYREELS}:SkyReelsV2Attention",
            forward=partial(attention_forward, context_is_parallel=True),
        ),
    ),
)
