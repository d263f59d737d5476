"""JoyImage-Edit and JoyImage-Edit-Plus: how their transformers map to the operations.

Their blocks are the double blocks of FLUX.1 with three differences: a stream's modulation is its own table
plus the time embedding, one linear layer makes its query, key and value, and parts have other names.
Attention is joint, the image first. The models make rotary tables on the CPU, which are copied once, not by
each block. JoyImage-Edit may rotate the text, too. JoyImage-Edit-Plus has tables for each sample, and a mask
(B, 1, 1, S) with padding after the image and after the text.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ..attention import modules as attention
from ..core.checks import KnownClass, is_stock
from ..core.forward_state import Family, model_spec
from ..core.patch import Call
from ..core.quantized_rows import QuantizedRows
from ..parts.blocks import double_block
from ..parts.embeddings import TIMESTEPS
from ..parts.linears import LINEAR_GELU, fp8_readers, linear, linear_per_sample
from ..parts.rotary import rotated_in_float32
from ..parts.streams import BlockSpec, Rows, plain_norm, table_rows
from ..quantized.precision import Layers

_MODELS = "diffusers.models.transformers.transformer_joyimage"
_EDIT, _PLUS = f"{_MODELS}:JoyImage", f"{_MODELS}_edit_plus:JoyImageEditPlus"
_MODULATIONS = [KnownClass(f"{path}Modulate") for path in (_EDIT, _PLUS)]
_STREAMS = ("img", "txt")


def _first_norm(call: Call, block: Any, previous_x: Any, temb: Tensor, *, stream: str) -> Any:
    """Rows are shift, scale and gate of attention, then of the feed-forward."""
    module = block._modules[f"{stream}_mod"]
    table = module.modulate_table if any(is_stock(module, m) for m in _MODULATIONS) else None
    if previous_x is not None and (table is None or table.device != previous_x.device):
        return None

    def rows_of() -> Rows:
        if table is None:
            return [row.unsqueeze(1) for row in module(temb)]
        return table_rows(table, temb.unsqueeze(1))

    readers = partial(fp8_readers, "attn", (f"{stream}_attn_qkv",))
    options: Any = {"name": f"{stream}_norm1", "rows_of": rows_of, "readers": readers}
    return plain_norm(call, block, previous_x, **options)


_FIRST_NORMS = tuple(partial(_first_norm, stream=stream) for stream in _STREAMS)
_FEED_FORWARDS = tuple((f"{stream}_norm2", f"{stream}_mlp") for stream in _STREAMS)


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    attention_mask: Tensor | None = None,
    *,
    is_plus: bool = False,
) -> tuple[Tensor, Tensor]:
    x, c = hidden_states.contiguous(), encoder_hidden_states  # x may be a transposed convolution's
    if temb.dim() != 3 or not call.takes(x, c, temb):
        return NotImplemented
    more: Any = {"attention_mask": attention_mask} if is_plus else {}
    more.update(clips=False, image_rotary_emb=image_rotary_emb)
    return double_block(call, self, _FIRST_NORMS, (x, c), (temb,), _FEED_FORWARDS, **more)


def _attention_forward(
    self: Any,
    call: Call,
    hidden_states: Any,
    encoder_hidden_states: Any = None,
    image_rotary_emb: Any = None,
    attention_mask: Tensor | None = None,
    *,
    is_plus: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    x, c, modules = hidden_states, encoder_hidden_states, self._modules
    if c is None or kwargs or not (is_plus or attention_mask is None) or not call.takes(x, c):
        return NotImplemented
    of_image, of_text = (image_rotary_emb, None) if is_plus else image_rotary_emb or (None, None)
    streams = []
    for name, tokens, rope in zip(_STREAMS, (x, c), (of_image, of_text)):
        if rope is not None:
            rope = call.shared(("tables", name), rope, partial(_tables, device=tokens.device))
        norms = (f"{name}_attn_q_norm", f"{name}_attn_k_norm")
        q, k, v = linear(modules[f"{name}_attn_qkv"], tokens).chunk(3, dim=-1)
        streams.append(attention.Projections(q, k, v, norms, rope))
    options: Any = {"dropout_p": 0.0, "is_causal": False}
    out = attention.attend_to_all(
        call, self, streams, rotated_in_float32, attention_mask, **options
    )
    length = x.shape[1]
    return (
        linear_per_sample(modules["img_attn_proj"], out[:, :length], type(x) is QuantizedRows),
        linear_per_sample(modules["txt_attn_proj"], out[:, length:], type(c) is QuantizedRows),
    )


def _tables(rope: Any, device: Any) -> list[Tensor]:
    """Tables (cos, sin), each (S, d) or (B, S, d), as (1 or B, S, 1, d) on the device."""
    return [t.to(device).view(-1, *t.shape[-2:]).unsqueeze(2) for t in rope]


_TOKENS = "hidden_states encoder_hidden_states"
_SPECS = (
    model_spec(f"{_EDIT}EditTransformer3DModel", "double_blocks"),
    model_spec(f"{_PLUS}Transformer3DModel", "double_blocks"),
    BlockSpec(
        f"{_EDIT}TransformerBlock",
        _block_forward,
        parameters=f"self {_TOKENS} temb image_rotary_emb",
    ),
    BlockSpec(f"{_PLUS}TransformerBlock", partial(_block_forward, is_plus=True)),
    attention.AttentionSpec(
        f"{_EDIT}Attention",
        _attention_forward,
        "qk_norm_rope",
        parameters=f"self {_TOKENS} image_rotary_emb kwargs",
        processor_parameters=f"{_TOKENS} image_rotary_emb kwargs",
        rotate="_apply_rotary_emb",
    ),
    attention.AttentionSpec(
        f"{_PLUS}Attention",
        partial(_attention_forward, is_plus=True),
        "qk_norm_rope",
        parameters=f"self {_TOKENS} image_rotary_emb attention_mask",
        rotate="_apply_rotary_emb_batched",
    ),
    TIMESTEPS,
    LINEAR_GELU,
)
_ONCE = ("img_in", "condition_embedder", "norm_out", "proj_out")
_LAYERS = Layers(
    ("double_blocks",), ("attn.*_attn_qkv", "attn.*_attn_proj", "*_mlp.net.0.proj", "*_mlp.net.2")
)
FAMILIES = (Family("JoyImage-Edit", _SPECS, _ONCE, _LAYERS),)
