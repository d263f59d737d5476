"""HunyuanVideo's blocks for image-to-video, which replace the first frame.

They are the model's other blocks with two embeddings. For the tokens of the first frame, the second one's
modulation replaces the first one's. Each operation runs for all tokens and again for those few, whose results
are copied over the first ones. Blocks pass nothing on to the next block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..conditions import kernels_take, may_write, tracks_derivatives
from .attention import concat_streams
from .blocks import BlockSpec, adaptive_prologue, feed_forwards, read_adaptive
from .hunyuan_attention import attend_and_feed, attend_to_both
from .linears import feed_forward, linear
from .norms import gated_residual, norm_modulate, residual_norm
from .patch import Call

_VIDEO = "diffusers.models.transformers.transformer_hunyuan_video"
OPERATIONS = "layer_norm_modulate, gated_residual_layer_norm_modulate, gated_residual"
_context_prologue = partial(adaptive_prologue, name="norm1_context")
_Rows = Sequence[Tensor]


def _in_two_parts(
    compute: Callable[..., tuple[Tensor, ...]],
    first: int,
    rows: tuple[_Rows, _Rows],
    *tensors: Tensor,
) -> list[Tensor]:
    """``compute(rows, *tensors)`` of tensors (B, S, D), by the second rows for the ``first`` tokens."""
    results = compute(rows[0], *tensors)
    of_first = compute(rows[1], *[tensor[:, :first] for tensor in tensors])
    if tracks_derivatives() or not may_write():
        pairs = zip(of_first, results)
        return [torch.cat([mine, result[:, first:]], dim=1) for mine, result in pairs]
    for mine, result in zip(of_first, results):
        result[:, :first] = mine
    return list(results)


def _modulated(
    call: Call, owner: Any, name: str, x: Tensor, temb: Tensor, replacing: Tensor, first: int
) -> tuple[Tensor, tuple[_Rows, _Rows]]:
    """The result of the norm ``owner.name``, and both embeddings' rows from the gate on, each (B, 1, D)."""
    module = owner._modules[name]
    found = read_adaptive(module)
    if isinstance(found, str):
        call.fall_back(f"{name} {found}")
        n, *results = module(x, temb, replacing, first)
        made = [row.unsqueeze(1) for row in results]
        half = len(made) // 2
        return n, (made[:half], made[half:])
    count, _, norm = found
    layer, silu = module._modules["linear"], torch.nn.functional.silu
    embedded = call.shared("silu", temb, silu), call.shared("replacing silu", replacing, silu)
    rows, of_first = [linear(layer, each).unsqueeze(1).chunk(count, 2) for each in embedded]

    def compute(rows: _Rows, x: Tensor) -> tuple[Tensor, ...]:
        return norm_modulate(norm, module, "norm", x, (rows[1], rows[0]), False)

    (n,) = _in_two_parts(compute, first, (rows, of_first), x)
    return n, (rows[2:], of_first[2:])


def _residual(x: Tensor, out: Tensor, rows: tuple[_Rows, _Rows], first: int) -> Tensor:
    """``x + gate * out``; the gate is the last row."""

    def compute(rows: _Rows, x: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        return (gated_residual(x, out, rows[-1]),)

    return _in_two_parts(compute, first, rows, x, out)[0]


def _replacing_double_block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None = None,
    freqs_cis: Any = None,
    token_replace_emb: Any = None,
    num_tokens: Any = None,
) -> tuple[Tensor, Tensor]:
    x, c, first = hidden_states.contiguous(), encoder_hidden_states, num_tokens
    if token_replace_emb is None or first is None:
        return NotImplemented
    if not kernels_take(x, c, temb, token_replace_emb):
        return call.refuse(x, c, temb, token_replace_emb)
    modules = self._modules
    n, rows = _modulated(call, self, "norm1", x, temb, token_replace_emb, first)
    (c_n,), c_rows = _context_prologue(call, self, None, temb)(c)
    out, c_out = attend_to_both(self, n, c_n, attention_mask, freqs_cis)

    def compute(rows: _Rows, x: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        gate, shift, scale, _ = rows
        return residual_norm(call, self, "norm2", x, out, gate, scale, shift)

    x, n = _in_two_parts(compute, first, rows, x, out)
    (branch,) = feed_forwards(
        call, self, (("norm2_context", "ff_context"),), (c,), (c_out,), (c_rows,)
    )
    return _residual(x, feed_forward(modules["ff"], n), rows, first), gated_residual(*branch[:3])


def _replacing_single_block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
    token_replace_emb: Any = None,
    num_tokens: Any = None,
) -> tuple[Tensor, Tensor]:
    x, c, first = hidden_states, encoder_hidden_states, num_tokens
    if token_replace_emb is None or first is None:
        return NotImplemented
    if not kernels_take(x, c, temb, token_replace_emb):
        return call.refuse(x, c, temb, token_replace_emb)
    length, x = x.shape[1], concat_streams(call, x, c)
    n, rows = _modulated(call, self, "norm", x, temb, token_replace_emb, first)
    out = attend_and_feed(self, call, n, length, attention_mask, image_rotary_emb)
    x = _residual(x, out, rows, first)
    return x[:, :length], x[:, length:]


REPLACING_BLOCKS = (
    BlockSpec(
        f"{_VIDEO}:HunyuanVideoTokenReplaceTransformerBlock",
        _replacing_double_block_forward,
        OPERATIONS,
        norms=("norm2", "norm2_context"),
        adaptive_norms=("norm1_context",),
        inner=("attn", "ff.net.0", "ff_context.net.0"),
    ),
    BlockSpec(
        f"{_VIDEO}:HunyuanVideoTokenReplaceSingleTransformerBlock",
        _replacing_single_block_forward,
        OPERATIONS,
        inner=("attn",),
    ),
)
