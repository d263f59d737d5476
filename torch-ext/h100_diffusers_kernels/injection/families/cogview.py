"""CogView4 and GLM-Image: how their transformers map to the operations.

A block has two streams, image x and text c, with the same linear layers. One layer of the time embedding has
six rows for the modulation of each stream, in turns,

    n = layer_norm(x) * (1 + scale) + shift;  n_c = layer_norm(c) * (1 + scale_c) + shift_c
    x = x + gate * a_x;  c = c + gate_c * a_c,  with a_c, a_x = attention([n_c, n])
    x = x + gate_mlp * ff(layer_norm(x) * (1 + scale_mlp) + shift_mlp);  c likewise

Queries and keys pass a LayerNorm of each head, and those of the image are rotated. The processor adds 1
to the scores of valid queries and keys, and 0 to those of padding. GLM-Image can keep the keys and values of
a forward over an image, and attend to them in others.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..attention import modules as attention
from ..core.checks import KnownClass
from ..core.forward_state import Family, model_spec
from ..core.patch import Call
from ..parts import linears, streams
from ..parts.blocks import NormOfBoth, add_feed_forwards, attend_to_both
from ..parts.embeddings import TIMESTEPS, tables_of_sizes
from ..quantized.precision import ONE_LIST

_NORMS = ("norm", "norm_context")


def _modulation(call: Call, module: Any, previous_x: Tensor | None, temb: Tensor) -> Any:
    """Without an activation, which the model has applied."""
    layer = module._modules["linear"]
    may_run = previous_x is None or streams.may_run_ahead(layer, previous_x)
    return linears.linear(layer, temb) if may_run else None


_ROWS, _RESULTS = (slice(0, None, 2), slice(1, None, 2)), (slice(5), slice(5, None))
_READERS = partial(linears.fp8_readers, "attn1", linears.QUERY_KEY_VALUE)
_NORM1 = NormOfBoth("norm1", _ROWS, _RESULTS, (_READERS,) * 2, _NORMS, _modulation)
_FEED_FORWARDS = (("norm2", "ff"), ("norm2_context", "ff"))


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor | None = None,
    image_rotary_emb: Any = None,
    attention_mask: Any = None,
    attention_kwargs: dict[str, Any] | None = None,
    kv_cache: Any = None,
    *,
    has_cache: bool = False,
) -> tuple[Tensor, Tensor]:
    x, c = hidden_states, encoder_hidden_states
    if temb is None or not (has_cache or kv_cache is None) or not call.takes(x, c, temb):
        return NotImplemented
    more = {"image_rotary_emb": image_rotary_emb, "attention_mask": attention_mask}
    more.update({"kv_cache": kv_cache} if has_cache else {}, **(attention_kwargs or {}))
    both = attend_to_both(call, self, _NORM1, (x, c), temb, **more)
    add_feed_forwards(self, *both, names=_FEED_FORWARDS)
    return streams.end(*both)


def _attention_forward(
    self: Any,
    call: Call,
    hidden_states: Any,
    encoder_hidden_states: Any = None,
    attention_mask: Any = None,
    image_rotary_emb: Any = None,
    *,
    has_cache: bool = False,
    **kwargs: Any,
) -> Any:
    x, c, mask = hidden_states, encoder_hidden_states, attention_mask
    cache = kwargs.pop("kv_cache", None) if has_cache else None
    is_cached = cache is not None and cache.mode in ("write", "read")
    if kwargs or c is None or not call.takes(x, c):
        return NotImplemented
    if is_cached and (mask is not None or attention.context_parallel_of(call, self) is not None):
        return NotImplemented
    options: dict[str, Any] = {"layout": "half", "dropout_p": 0.0, "is_causal": False}
    if mask is not None:
        if mask.shape != c.shape[:2]:
            return NotImplemented
        if mask.dtype is not torch.bool:  # the product of negative values is positive, too
            return call.decline("its mask is not boolean")
        made = partial(_mask_and_equivalents, x=x)
        mask, equivalents = call.shared(("mask", x.shape[1]), mask, made)
        options.update(equivalents)
    if is_cached:
        options["extended"] = partial(_extended, cache, self.heads)
    rotate = partial(call.stand_in.functions[1].function, sequence_dim=1, use_real_unbind_dim=-2)
    operands = (call, self, x, c, image_rotary_emb, rotate, mask)
    return attention.run_attention_of_both(*operands, **options)


def _mask_and_equivalents(mask: Tensor, x: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The mask (B, 1, S, S) that the processor makes of the text's (B, T), and its equivalents."""
    mask = mask.to(x.device)
    are_valid = torch.nn.functional.pad(mask, (0, x.shape[1]), value=True)
    product = are_valid[:, None, :, None] & are_valid[:, None, None]
    return product.to(x.dtype), {"key_bias": are_valid.float(), "is_unbiased": ~mask[..., None]}


def _extended(cache: Any, heads: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value, stored in the cache or after those in it."""
    pair = [tensor.unflatten(2, (heads, -1)) for tensor in (key, value)]
    if cache.mode == "write":
        cache.store(*[tensor.clone() for tensor in pair])
        return key, value
    key, value = cache.get(*pair)
    return key.flatten(2), value.flatten(2)


_BLOCK = "self hidden_states encoder_hidden_states temb image_rotary_emb attention_mask"
_POSITIONS = ("dim", "patch_size", "theta")
_ONCE = ("time_condition_embed", "norm_out", "proj_out")
_GLM_ONCE = ("image_projector", "glyph_projector", "prior_token_embedding", "prior_projector")


def _family(name: str, classes: str, has_cache: bool, once: Any, positions: Any = ()) -> Family:
    """``classes``: how their paths begin. ``positions``: further attributes of the rotary embedding."""
    path, more = f"diffusers.models.transformers.transformer_{classes}", " kv_cache" * has_cache
    streams.ADAPTIVE.add(KnownClass(f"{path}AdaLayerNormZero"), 12, (2, 0, 3, 1), *_NORMS)
    attend = partial(_attention_forward, has_cache=has_cache)
    options = {**attention.ROTATED_ATTENTION, "processor": f"{path}AttnProcessor"}
    options["processor_parameters"] += more
    attention_class = "diffusers.models.attention_processor:Attention"
    specs = (
        model_spec(f"{path}Transformer2DModel", "transformer_blocks"),
        streams.BlockSpec(
            f"{path}TransformerBlock",
            partial(_block_forward, has_cache=has_cache),
            parameters=f"{_BLOCK} attention_kwargs{more}",
        ),
        attention.AttentionSpec(
            attention_class, attend, "qk_norm_rope", dispatches=has_cache, **options
        ),
        tables_of_sizes(f"{path}RotaryPosEmbed", *_POSITIONS, *positions),
        TIMESTEPS,
        linears.LINEAR_GELU,
    )
    return Family(name, specs, (*once, *_ONCE), ONE_LIST)


FAMILIES = (
    _family("CogView4", "cogview4:CogView4", False, ("patch_embed",), ("rope_axes_dim",)),
    _family("GLM-Image", "glm_image:GlmImage", True, _GLM_ONCE),
)
