"""Cosmos 3: how its transformer maps to the operations.

Two streams, of text to understand (u) and of tokens to generate (g), have layers and norms of their own, and
no dimension of samples. A block computes for both

    x = x + attention(rms_norm(x));  x = x + mlp(rms_norm(x))

with an RMS norm of each head's query and key, a rotary embedding of both, several query heads for each key
head, and mlp(x) = down_proj(silu(gate_proj(x)) * up_proj(x)). Attention of u is causal; g attends to all keys
of u and g. With squared ReLU, mlp is the model's own code.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...operations.key_blocks import KeyBlocks, causal_bounds
from ..attention import modules as attention
from ..core.checks import KnownClass
from ..core.forward_state import Family, model_spec
from ..core.patch import Call, PatchSpec
from ..parts import linears, streams
from ..parts.embeddings import TIMESTEPS
from ..parts.norm_modules import RMS_NORM
from ..parts.norms import NORM_KINDS, RMS
from ..quantized.precision import ATTENTION_LAYERS, Layers

_COSMOS3 = "diffusers.models.transformers.transformer_cosmos3"
NORM_KINDS.add(KnownClass(f"{_COSMOS3}:Cosmos3NemotronRMSNorm"), RMS)
_UND, _GEN = "", "_moe_gen"  # how names of norms and mlp end


def _first_norm(ending: str, layers: tuple[str, ...]) -> Any:
    readers = partial(linears.fp8_readers, "self_attn", layers)
    return partial(streams.plain_norm, name=f"input_layernorm{ending}", readers=readers)


_FIRST_NORMS = (
    _first_norm(_UND, linears.QUERY_KEY_VALUE),
    _first_norm(_GEN, linears.TEXT_QUERY_KEY_VALUE),
)


def _block_forward(
    self: Any, call: Call, und_seq: Tensor, gen_seq: Tensor, rotary_emb: Any
) -> tuple[Tensor, Tensor]:
    if not call.takes(und_seq, gen_seq):
        return NotImplemented
    modules = self._modules
    both = streams.start(call, self, _FIRST_NORMS, (und_seq, gen_seq), ())
    for s, out in zip(both, modules["self_attn"](*[s.n for s in both], rotary_emb)):
        s.add(out)
    for s, ending in zip(both, (_UND, _GEN)):
        readers = partial(linears.fp8_readers, f"mlp{ending}", ("gate_proj", "up_proj"))
        n = s.norm(f"post_attention_layernorm{ending}", readers=readers)
        s.add(modules[f"mlp{ending}"](n))
    return streams.end(*both)


def _attention_forward(
    self: Any, call: Call, und_seq: Tensor, gen_seq: Tensor, rotary_emb: Any
) -> tuple[Tensor, Tensor]:
    if self.k_norm_und_for_gen is not None:
        return call.decline("it has another norm of the text's keys")
    if not call.takes(und_seq, gen_seq):
        return NotImplemented
    rotate_half = call.stand_in.functions[1].function

    def rotate(x: Tensor, tables: Any) -> Tensor:
        cos, sin = (table.unsqueeze(1) for table in tables)
        return x * cos + rotate_half(x) * sin

    cos, sin, *of_gen = rotary_emb
    options: dict[str, Any] = {"head_dim": self.head_dim, "layout": "half"}
    operands = (call, self, und_seq[None], None, (cos, sin), rotate)
    query, key, value = attention.project_and_rotate(*operands, **options)
    und = _attend_causally(call, self, query, key, value, cos)
    options.update(layers=linears.TEXT_QUERY_KEY_VALUE, names=("norm_added_q", "norm_added_k"))
    operands = (call, self, gen_seq[None], None, tuple(of_gen), rotate)
    query, *others = attention.project_and_rotate(*operands, **options)
    key, value = (torch.cat(pair, dim=1) for pair in zip((key, value), others))
    of_all: Any = {"heads": self.num_attention_heads, "is_causal": False, "enable_gqa": True}
    gen = attention.attend(call, self, query, key, value, None, **of_all)
    und_out = attention.project_out(self, und[0], und_seq)
    return und_out, attention.project_text_out(self, gen[0], gen_seq)


def _attend_causally(
    call: Call, module: Any, query: Tensor, key: Tensor, value: Tensor, cos: Tensor
) -> Tensor:
    def blocks_of() -> KeyBlocks:
        make = partial(causal_bounds, query.shape[1])
        return KeyBlocks(key_bounds=call.shared("causal", cos, lambda cos: make(cos.device)))

    operands = (query, key, value)
    heads = module.num_attention_heads
    out = attention.attend_by_blocks(call, module, *operands, blocks_of, heads=heads)
    if out is not None:
        return out
    processor: Any = module.processor
    out = sys.modules[_COSMOS3].dispatch_attention_fn(
        *[x.unflatten(2, (-1, module.head_dim)) for x in operands],
        is_causal=True,
        enable_gqa=True,
        backend=processor._attention_backend,
        parallel_config=processor._parallel_config,
    )
    return out.flatten(2)


def _why_not_silu(module: Any) -> str | None:
    return linears.why_not_silu(module._modules.get("act_fn"))


_SILU = ("torch.nn.functional:silu",)
_mlp_forward = partial(
    linears.gated_feed_forward, gate="gate_proj", value="up_proj", out="down_proj"
)
_SPECS = (
    model_spec(f"{_COSMOS3}:Cosmos3OmniTransformer", "layers"),
    streams.BlockSpec(f"{_COSMOS3}:Cosmos3VLTextMoTDecoderLayer", _block_forward),
    attention.AttentionSpec(
        f"{_COSMOS3}:Cosmos3PackedMoTAttention",
        _attention_forward,
        "qk_norm_rope",
        processor=f"{_COSMOS3}:Cosmos3AttnProcessor",
        rotate="_rotate_half",
    ),
    PatchSpec(
        f"{_COSMOS3}:Cosmos3VLTextMLP", _mlp_forward, "swiglu", _SILU, condition=_why_not_silu
    ),
    TIMESTEPS,
)
_ONCE = (
    *("embed_tokens", "rotary_emb", "time_embedder", "lm_head", "proj_in", "proj_out"),
    *("audio_proj_in", "audio_proj_out", "action_proj_in", "action_proj_out"),
)
_LAYERS = Layers(("layers",), (*ATTENTION_LAYERS, "self_attn.to_out", "mlp*.*_proj"))
_OUTPUT_NORMS = dict.fromkeys(("norm", "norm_moe_gen"), RMS_NORM)
FAMILIES = (Family("Cosmos 3", _SPECS, _ONCE, _LAYERS, _OUTPUT_NORMS),)
