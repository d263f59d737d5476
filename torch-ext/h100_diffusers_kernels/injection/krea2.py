"""Krea 2: how its transformer maps to the operations.

A block of the image and text is, with n_1 and n_2 from an RMS norm whose factor is 1 + weight,

    x = x + gate * attention(n_1 * (1 + scale) + shift)
    x = x + gate_mlp * ff(n_2 * (1 + scale_mlp) + shift_mlp)

with a modulation that is the block's table plus a time embedding, and ff = down(silu(gate(n)) * up(n)). A
block of the text fusion has no modulation. Attention has grouped keys, an RMS norm of each head's query and
key, and an output gate of each element, out = to_out(attention * sigmoid(to_gate(n))). Norm weights are
float32 in a model of another dtype.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..conditions import kernels_take
from .attention import AttentionSpec, attend, key_bias_of, norm_and_rotate
from .blocks import (
    BlockSpec,
    Prologue,
    ResidualBranch,
    Rows,
    begin,
    finish,
    norm_prologue,
    table_rows,
)
from .embeddings import axial_positions
from .forward_state import COMPUTED_ONCE, Family, model_spec
from .linears import linear, linears, swiglu_of_two
from .norms import gated_residual
from .patch import Call, PatchSpec

_KREA2 = "diffusers.models.transformers.transformer_krea2"


def _by_row(temb: Tensor) -> Tensor:
    """(B, 1, 6 * D) to (B, 1, 6, D)"""
    return temb.unflatten(-1, (6, -1))


def _made(call: Call, block: Any, name: str, ahead: Tensor | None, rows_of: Any) -> Any:
    made = norm_prologue(call, block, name, ahead, rows_of)
    # The module itself returns its input's dtype, so only the kernel takes it as an upcast.
    return made._replace(upcasts=True) if isinstance(made, Prologue) else made


def _prologue(call: Call, block: Any, ahead: Tensor | None, temb: Tensor) -> Any:
    """Rows are shift, scale and gate of attention, then of the feed-forward."""
    table = block.scale_shift_table
    if ahead is not None and table.device != ahead.device:
        return None

    def rows_of() -> Rows:
        rows = table_rows(table, call.shared("embedding", temb, _by_row))
        return tuple(rows[i] for i in (1, 0, 2, 4, 3, 5))

    return _made(call, block, "norm1", ahead, rows_of)


def _text_prologue(call: Call, block: Any, ahead: Tensor | None) -> Any:
    return _made(call, block, "norm1", ahead, tuple)


_IMAGE, _TEXT = (_prologue,), (_text_prologue,)


def _after_attention(
    self: Any, call: Call, branch: ResidualBranch, rows: Rows, gate: Any
) -> ResidualBranch:
    """The attention's residual, the second norm and the feed-forward."""
    made = _made(call, self, "norm2", None, lambda: rows)
    if isinstance(made, Prologue):
        x, ((n,), _) = made.after(branch, call)
    else:
        x = gated_residual(*branch[:3])
        (n,), _ = made(x)
    return ResidualBranch(x, self._modules["ff"](n), gate)


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any,
    attention_mask: Tensor | None = None,
) -> Tensor:
    x = hidden_states
    if not kernels_take(x, temb):
        return call.refuse(x, temb)
    (((n,), (_, _, gate, *rows, gate_mlp)),) = begin(call, self, _IMAGE, (x,), (temb,))
    how = {"attention_mask": attention_mask, "image_rotary_emb": image_rotary_emb}
    out = self._modules["attn"](n, **how)
    branch = _after_attention(self, call, ResidualBranch(x, out, gate), rows, gate_mlp)
    (x,) = finish(call, self, _IMAGE, (branch,), (temb,))
    return x


def _text_block_forward(
    self: Any, call: Call, hidden_states: Tensor, attention_mask: Tensor | None = None
) -> Tensor:
    x = hidden_states
    if not kernels_take(x):
        return call.refuse(x)
    (((n,), _),) = begin(call, self, _TEXT, (x,), ())
    out = self._modules["attn"](n, attention_mask=attention_mask)
    branch = _after_attention(self, call, ResidualBranch(x, out), (), None)
    (x,) = finish(call, self, _TEXT, (branch,), ())
    return x


def _attention_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
    **kwargs: Any,
) -> Tensor:
    x, mask, modules = hidden_states, attention_mask, self._modules
    if kwargs:
        return NotImplemented
    if not kernels_take(x):
        return call.refuse(x)
    layers = (modules[name] for name in ("to_q", "to_k", "to_v", "to_gate"))
    query, key, value, gate = linears(x, *layers)
    rotate = partial(call.stand_in.functions[1].function, sequence_dim=1)
    how = (image_rotary_emb, rotate, "per_head", self.num_heads, "interleaved", True)
    query, key = norm_and_rotate(call, self, ("norm_q", "norm_k"), query, key, *how)
    options: dict[str, Any] = {"heads": self.num_heads}
    if mask is not None:
        name = f"key bias {key.shape} {key.dtype}"
        options["key_bias"] = call.shared(name, mask, partial(key_bias_of, key=key))
    out = attend(call, self, query, key, value, mask, **options)
    # The processor leaves the dropout out.
    return linear(modules["to_out"][0], out * torch.sigmoid(gate))


def _feed_forward_forward(self: Any, call: Call, hidden_states: Tensor) -> Tensor:
    x, modules = hidden_states, self._modules
    if not kernels_take(x):
        return call.refuse(x)
    return linear(modules["down"], swiglu_of_two(call, x, modules["gate"], modules["up"]))


def _block(name: str, forward: Any) -> BlockSpec:
    operations = "rms_norm_modulate, gated_residual_rms_norm_modulate, gated_residual"
    norms, inner = ("norm1", "norm2"), ("attn", "ff")
    return BlockSpec(f"{_KREA2}:{name}", forward, operations, norms=norms, inner=inner)


_LISTS = ("text_fusion.layerwise_blocks", "text_fusion.refiner_blocks", "transformer_blocks")
_SPECS = (
    model_spec(f"{_KREA2}:Krea2Transformer2DModel", *_LISTS),
    _block("Krea2TransformerBlock", _block_forward),
    _block("Krea2TextFusionBlock", _text_block_forward),
    AttentionSpec(
        f"{_KREA2}:Krea2Attention",
        _attention_forward,
        "qk_norm_rope",
        processor=f"{_KREA2}:Krea2AttnProcessor",
    ),
    PatchSpec(
        f"{_KREA2}:Krea2SwiGLU",
        _feed_forward_forward,
        "swiglu",
        functions=("torch.nn.functional:silu",),
    ),
    axial_positions(f"{_KREA2}:Krea2RotaryPosEmbed"),
)
_ONCE = ("img_in", "time_embed", "time_mod_proj", "txt_in", "projector", "final_layer")
FAMILIES = (Family("Krea 2", _SPECS, dict.fromkeys(_ONCE, COMPUTED_ONCE)),)
