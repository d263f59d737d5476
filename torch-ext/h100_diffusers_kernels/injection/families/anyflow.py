"""AnyFlow: how its transformer maps to the operations.

A block is Wan's (see ``families.wan``) with a modulation for each token, and a complex rotary embedding of
the query and one of the key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..attention import modules as attention
from ..core.forward_state import Family, model_spec
from ..core.patch import Call
from ..parallel.exchange import rank_and_size
from ..parts import linears
from ..parts.blocks import add_feed_forwards
from ..parts.embeddings import TIMESTEPS
from ..parts.norms import Upcasts
from ..parts.rotary import rotated_across_heads
from ..parts.streams import BlockSpec, end, start
from . import wan

_ANYFLOW = "diffusers.models.transformers.transformer_anyflow"


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    rotary_emb: Any,
    attention_mask: Any,
    kv_cache: Any = None,
    kv_cache_flag: Any = None,
) -> Tensor:
    x, c = hidden_states.contiguous(), encoder_hidden_states
    if not call.takes(x, c) or temb.dim() != 4:
        return NotImplemented
    modules = self._modules
    (s,) = start(call, self, wan.BY_TOKEN, (x,), (temb,))
    options = {"rotary_emb": rotary_emb, "attention_mask": attention_mask}
    if kv_cache is not None:
        options.update(kv_cache=kv_cache, kv_cache_flag=kv_cache_flag)
    s.add(modules["attn1"](hidden_states=s.n, **options), s.rows[2])
    n = s.norm("norm2", readers=wan.QUERY_READER)
    s.add(modules["attn2"](hidden_states=n, encoder_hidden_states=c))
    add_feed_forwards(self, s, names=wan.FEED_FORWARD)
    return end(s)


def attention_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Any = None,
    rotary_emb: Any = None,
    **kwargs,
) -> Tensor:
    x, c = hidden_states, encoder_hidden_states
    spec: Any = call.stand_in.spec
    if kwargs or (spec.is_other(self) and (c is None or rotary_emb is not None)):
        return NotImplemented
    if not call.takes(x, c):
        return NotImplemented
    config = attention.context_parallel_of(call, self)
    length, keys = x.shape[1], (x if c is None else c).shape[1]
    rope, options = tables_of(call, rotary_emb, length, keys, config)
    operands = (call, self, x, c, rope, rotated_across_heads, "across_heads")
    query, key, value = attention.project_and_rotate(*operands, config=config, **options)
    options = {"heads": self.heads, "dropout_p": 0.0, "is_causal": False, "config": config}
    if c is not None:
        options["parallel_config"] = None  # each rank has all of the text
    out = attention.attend(call, self, query, key, value, attention_mask, **options)
    return attention.project_out(self, out, x)


def tables_of(
    call: Call, rotary_emb: Any, length: int, keys: int, config: Any = None
) -> tuple[Any, dict[str, Any]]:
    """The query's tables (1, S, 1, d / 2) of cosines and sines, and arguments of ``norm_and_rotate`` with
    those of the key, from complex frequencies (1, 1, S, d / 2)."""
    if rotary_emb is None:
        return None, {}

    def tables(name: str, length: int) -> Any:
        def make(frequencies: Tensor) -> tuple[Tensor, Tensor]:
            if config is not None and frequencies.shape[2] != length:
                rank, count = rank_and_size(config)
                frequencies = frequencies.tensor_split(count, dim=2)[rank]
            by_token = torch.view_as_real(frequencies).transpose(1, 2).float()
            return by_token[..., 0].contiguous(), by_token[..., 1].contiguous()

        return call.shared((name, length), rotary_emb[name], make)

    rope = tables("query", length)
    is_one = rotary_emb["key"] is rotary_emb["query"]
    return rope, {} if is_one else {"key_rope": tables("key", keys)}


def specs_of(module: str, forward: Callable, processor: str, parameters: str) -> tuple[Any, ...]:
    """The specs of the blocks of a file. ``processor``: that of self-attention, whose parameters after those
    of cross-attention's are ``parameters``."""
    of_cross = "hidden_states encoder_hidden_states attention_mask"
    return (
        BlockSpec(
            f"{module}:AnyFlowTransformerBlock", _block_forward, upcasts=Upcasts.TO_NEXT_LINEAR
        ),
        attention.AttentionSpec(
            f"{module}:AnyFlowAttention",
            forward,
            "qk_norm_rope",
            parameters="self hidden_states kwargs",
            processor=f"{module}:{processor}",
            processor_parameters=f"{of_cross} {parameters}",
            other_processor=f"{module}:AnyFlowCrossAttnProcessor",
            other_parameters=of_cross,
        ),
        TIMESTEPS,
        linears.LINEAR_GELU,
    )


def _plan(model: Any, split: Callable, gather: Callable) -> dict[str, Any]:
    """A rank's attention takes its part of the rotary embedding."""
    return {
        "blocks.*": {"temb": split(1, 4)},
        "blocks.0": {"hidden_states": split(1, 3)},
        "norm_out": gather(gather_dim=1, expected_dims=3),
    }


_SPECS = (
    model_spec(f"{_ANYFLOW}:AnyFlowTransformer3DModel", "blocks", plan=_plan),
    *specs_of(_ANYFLOW, attention_forward, "AnyFlowAttnProcessor", "rotary_emb"),
)
ONCE = ("rope", "patch_embedding", "condition_embedder", "norm_out", "proj_out")
FAMILIES = (Family("AnyFlow", _SPECS, ONCE, wan.LAYERS),)
