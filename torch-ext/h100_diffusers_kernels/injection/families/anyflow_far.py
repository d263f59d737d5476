"""AnyFlow-FAR: how its transformer maps to the operations.

It denoises a video in chunks, with the blocks of AnyFlow (see ``families.anyflow``). Attention is causal from
one chunk to the next, by a ``BlockMask``, or of a chunk to the keys of a cache and its own. The cache has
keys before their rotation. The processor appends zeros to query, key and value. Without a mask queries attend
to them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...operations.key_blocks import is_block_mask
from ..attention import modules as attention
from ..core.forward_state import Family, model_spec
from ..core.patch import Call
from ..parts.rotary import rotated_across_heads
from . import anyflow, wan

_FAR = "diffusers.models.transformers.transformer_anyflow_far"
_BLOCK_SIZE = 128  # the processor appends zeros up to a multiple
_MIN_HEAD_DIM = 16  # it enlarges smaller heads


def _attention_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Any = None,
    rotary_emb: Any = None,
    kv_cache: Any = None,
    kv_cache_flag: Any = None,
    **kwargs,
) -> Tensor:
    x, c, mask, heads = hidden_states, encoder_hidden_states, attention_mask, self.heads
    spec: Any = call.stand_in.spec
    if kv_cache is None and spec.is_other(self):
        return anyflow.attention_forward(self, call, x, c, mask, rotary_emb, **kwargs)
    if (
        kwargs
        or spec.is_other(self)
        or self.processor._attention_backend not in self.processor._SUPPORTED_BACKENDS
        or self.inner_dim < heads * _MIN_HEAD_DIM
        or not (mask is None or is_block_mask(mask))
        or attention.context_parallel_of(call, self) is not None
    ):
        return NotImplemented
    if not call.takes(x, c):
        return NotImplemented
    query, key, value = attention.query_key_value(self, x, c)
    options: dict[str, Any] = {"keeps_dtype": True}
    rotation = rotated_across_heads, "across_heads", heads
    if kv_cache is not None:
        query, key = attention.norm_and_rotate(call, self, query, key, None, *rotation, **options)
        key, value = _with_cache(kv_cache, kv_cache_flag, key, value, heads)
        options["names"] = ("", "")  # they have been normalized
    rope, key_rope = anyflow.tables_of(call, rotary_emb, query.shape[1], key.shape[1])
    options.update(key_rope)
    query, key = attention.norm_and_rotate(call, self, query, key, rope, *rotation, **options)
    padding = -query.shape[1] % _BLOCK_SIZE
    if mask is not None:
        operands = call, self, query, key, value, mask
        return attention.project_out(self, attention.attend_by_mask(*operands, heads, padding))
    if padding:
        key, value = (torch.nn.functional.pad(each, (0, 0, 0, padding)) for each in (key, value))
    options = {"heads": heads, "dropout_p": 0.0, "is_causal": False}
    return attention.project_out(
        self, attention.attend(call, self, query, key, value, None, **options)
    )


def _with_cache(
    cache: Any, flag: Any, key: Tensor, value: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    """Stores key and value (B, S, H * d), or returns them after those of the cache, each (B, H, S, d)."""
    each = [x.unflatten(2, (heads, -1)) for x in (key, value)]
    compressed, full = cache["compressed_cache"], cache["full_cache"]
    if flag["is_cache_step"]:
        first, count = flag["num_compressed_tokens"], flag["num_full_tokens"]
        for i, x in enumerate(each):
            compressed[i, :, :, :first] = x[:, :first].transpose(1, 2)
            full[i, :, :, :count] = x[:, first:].transpose(1, 2)
        return key, value
    counts = flag["num_cached_compressed_tokens"], flag["num_cached_full_tokens"]
    parts = tuple(zip((compressed, full), counts))
    key, value = (
        torch.cat([*[part[i, :, :, :n].transpose(1, 2) for part, n in parts], x], dim=1).flatten(2)
        for i, x in enumerate(each)
    )
    return key, value


_SPECS = (
    model_spec(f"{_FAR}:AnyFlowFARTransformer3DModel", "blocks"),
    *anyflow.specs_of(
        _FAR,
        _attention_forward,
        "AnyFlowCausalAttnProcessor",
        "rotary_emb kv_cache kv_cache_flag",
    ),
)
_ONCE = (*anyflow.ONCE, "far_patch_embedding")
FAMILIES = (Family("AnyFlow-FAR", _SPECS, _ONCE, wan.LAYERS),)
