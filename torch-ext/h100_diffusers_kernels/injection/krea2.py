"""Krea 2: how its transformer and the blocks that fuse its text map to the operations.

A block is

    x = x + gate * attn(rms_norm(x) * (1 + scale) + shift)
    x = x + gate_mlp * ff(rms_norm(x) * (1 + scale_mlp) + shift_mlp)

with a modulation that is a table plus a time embedding, an RMS norm of each head's query and key, a rotary
embedding of both, several query heads for each key head, and ff(x) = down(silu(gate(x)) * up(x)). Attention's
result is multiplied by the sigmoid of a linear layer of its input. Norms are float32. Blocks of the text have
no modulation and no rotation.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..conditions import is_differentiated, kernels_take, may_write, same_dtype_and_unit_stride
from .attention import AttentionSpec, attend, key_bias_of, norm_and_rotate
from .blocks import BlockSpec, ResidualBranch, begin, finish, norm_prologue, table_rows
from .embeddings import axial_positions
from .forward_state import COMPUTED_ONCE, Family, model_spec
from .linears import linear, linears, plain_weight, swiglu_of_two
from .norm_modules import modulated
from .norms import residual_norm
from .patch import Call, PatchSpec

_KREA2 = "diffusers.models.transformers.transformer_krea2"


def _prologue(call: Call, block: Any, ahead: Tensor | None, temb: Tensor) -> Any:
    """Rows are shift, scale and gate of attention, then of the feed-forward."""
    table = block.scale_shift_table
    if ahead is not None and table.device != ahead.device:
        return None

    def rows_of() -> tuple:
        embedding = call.shared("embedding", temb, lambda t: t.unflatten(-1, (6, -1)))
        scale, shift, gate, scale_mlp, shift_mlp, gate_mlp = table_rows(table, embedding)
        return shift, scale, gate, shift_mlp, scale_mlp, gate_mlp

    return norm_prologue(call, block, "norm1", ahead, rows_of, upcasts=True)


def _plain_prologue(call: Call, block: Any, ahead: Tensor | None) -> Any:
    return norm_prologue(call, block, "norm1", ahead, tuple, upcasts=True)


_PROLOGUES, _TEXT_PROLOGUES = (_prologue,), (_plain_prologue,)


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any,
    attention_mask: Tensor | None = None,
) -> Tensor:
    x, modules = hidden_states, self._modules
    if not kernels_take(x, temb):
        return call.refuse(x, temb)
    (begun,) = begin(call, self, _PROLOGUES, (x,), (temb,))
    (normalized,), (_, _, gate, shift_mlp, scale_mlp, gate_mlp) = begun
    how = {"attention_mask": attention_mask, "image_rotary_emb": image_rotary_emb}
    out = modules["attn"](normalized, **how)
    mlp = (scale_mlp, shift_mlp)
    x, normalized = residual_norm(call, self, "norm2", x, out, gate, *mlp, upcasts=True)
    branch = ResidualBranch(x, modules["ff"](normalized), gate_mlp)
    (x,) = finish(call, self, _PROLOGUES, (branch,), (temb,), upcasts=True)
    return x


def _text_block_forward(
    self: Any, call: Call, hidden_states: Tensor, attention_mask: Tensor | None = None
) -> Tensor:
    x, modules = hidden_states, self._modules
    if not kernels_take(x):
        return call.refuse(x)
    (((normalized,), _),) = begin(call, self, _TEXT_PROLOGUES, (x,), ())
    out = modules["attn"](normalized, attention_mask=attention_mask)
    x, normalized = residual_norm(call, self, "norm2", x, out, None, upcasts=True)
    branch = ResidualBranch(x, modules["ff"](normalized))
    (x,) = finish(call, self, _TEXT_PROLOGUES, (branch,), (), upcasts=True)
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
    query, key, value = linears(x, modules["to_q"], modules["to_k"], modules["to_v"])
    rotate = partial(call.stand_in.functions[1].function, sequence_dim=1)
    how = (image_rotary_emb, rotate, "per_head", self.num_heads)
    norms = ("norm_q", "norm_k")
    query, key = norm_and_rotate(call, self, norms, query, key, *how, upcasts=True)
    options: dict[str, Any] = {"heads": self.num_heads}
    if mask is not None:
        name = f"key bias {key.shape} {key.dtype}"
        options["key_bias"] = call.shared(name, mask, partial(key_bias_of, key=key))
    both = _buffer(call, modules["to_gate"], x, query)
    if both is None:
        out = attend(call, self, query, key, value, mask, **options)
        return linear(modules["to_out"][0], out * torch.sigmoid(linear(modules["to_gate"], x)))
    size = query.shape[2]
    out = attend(call, self, query, key, value, mask, out=both[..., :size], **options)
    if out.data_ptr() != both.data_ptr():
        both[..., :size] = out
    weight = modules["to_gate"]._parameters["weight"]
    torch.mm(x.view(-1, x.shape[2]), weight.t(), out=both.view(-1, 2 * size)[:, size:])
    # First half * sigmoid(second half), in one pass. The processor leaves the dropout out.
    return linear(modules["to_out"][0], F.glu(both))


def _buffer(call: Call, layer: Any, x: Tensor, query: Tensor) -> Tensor | None:
    """Memory for attention's result and then the gate, (B, S, 2 * D), if the gate's layer can write."""
    plain = plain_weight(layer)
    if (
        plain is None
        or plain[1] is not None
        or plain[0].shape[0] != query.shape[2]
        or not x.is_contiguous()
        or not same_dtype_and_unit_stride(x, query, plain[0])
        or is_differentiated(x, query, plain[0])
        or not (call.state is not None or may_write())
    ):
        return None
    return x.new_empty(*x.shape[:2], 2 * query.shape[2])


def _feed_forward_forward(self: Any, call: Call, hidden_states: Tensor) -> Tensor:
    x, modules = hidden_states, self._modules
    if not kernels_take(x):
        return call.refuse(x)
    return linear(modules["down"], swiglu_of_two(call, x, modules["gate"], modules["up"]))


def _final_forward(self: Any, call: Call, hidden_states: Tensor, temb: Tensor) -> Tensor:
    x = hidden_states
    if not kernels_take(x, temb):
        return call.refuse(x, temb)
    scale, shift = (temb + self.scale_shift_table).chunk(2, dim=1)
    return linear(self._modules["linear"], modulated(call, self, "norm", x, scale, shift, True))


_OPERATIONS = "rms_norm_modulate, gated_residual_rms_norm_modulate, gated_residual"
_block = partial(
    BlockSpec, operations=_OPERATIONS, norms=("norm1", "norm2"), upcasts=True, inner=("attn", "ff")
)
_SPECS = (
    model_spec(
        f"{_KREA2}:Krea2Transformer2DModel",
        *("text_fusion.layerwise_blocks", "text_fusion.refiner_blocks", "transformer_blocks"),
    ),
    _block(f"{_KREA2}:Krea2TransformerBlock", _block_forward),
    _block(f"{_KREA2}:Krea2TextFusionBlock", _text_block_forward),
    AttentionSpec(
        f"{_KREA2}:Krea2Attention",
        _attention_forward,
        "qk_norm_rope",
        processor=f"{_KREA2}:Krea2AttnProcessor",
    ),
    PatchSpec(
        f"{_KREA2}:Krea2SwiGLU", _feed_forward_forward, "swiglu", ("torch.nn.functional:silu",)
    ),
    PatchSpec(f"{_KREA2}:Krea2FinalLayer", _final_forward, "rms_norm_modulate"),
    axial_positions(f"{_KREA2}:Krea2RotaryPosEmbed"),
)
_ONCE = ("img_in", "time_embed", "time_mod_proj", "txt_in")
FAMILIES = (Family("Krea 2", _SPECS, dict.fromkeys(_ONCE, COMPUTED_ONCE)),)
