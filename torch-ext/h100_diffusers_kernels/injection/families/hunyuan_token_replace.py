"""HunyuanVideo's blocks for image-to-video, which replace the first frame.

They are the model's other blocks with two embeddings: the tokens of the first frame take the second one's
modulation.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..attention.modules import image_weights, single_block_weights
from ..core.patch import Call
from ..parts.norms import ChosenRows
from ..parts.streams import (
    DOUBLE_PROLOGUES,
    FLUX_OPERATIONS,
    Prologue,
    PrologueResult,
    adaptive_prologue,
    double_spec,
    linear_of_silu,
    single_spec,
)
from .hunyuan_attention import double_block, single_block

_VIDEO = "diffusers.models.transformers.transformer_hunyuan_video"
_PATH = f"{_VIDEO}:HunyuanVideoTokenReplace"


def _modulation(
    call: Call, module: Any, ahead: Tensor | None, temb: Tensor, replacing: Tensor, _: int
) -> Tensor | None:
    """Both embeddings' rows, (2 * B, N * D)."""
    layer = module._modules["linear"]
    rows = linear_of_silu(call, layer, temb, ahead)
    of_first = linear_of_silu(call, layer, replacing, ahead, "replacing silu")
    return None if rows is None or of_first is None else torch.cat([rows, of_first])


def _prologue(
    call: Call,
    block: Any,
    ahead: Tensor | None,
    temb: Tensor,
    replacing: Tensor,
    first: int,
    *,
    length: int,
    **how: Any,
) -> Any:
    """``adaptive_prologue`` for ``length`` tokens; the ``first`` ones take the second embedding's rows."""
    how.update(takes_emb=False, modulation_of=_modulation)
    made = adaptive_prologue(call, block, ahead, temb, replacing, first, **how)
    if made is None:
        return None
    make = partial(_indices, first=first, length=length)
    index = call.shared(("indices", first, length), temb, make)

    def chosen(rows: Tensor) -> ChosenRows:
        return ChosenRows(rows.squeeze(1), index)

    if isinstance(made, Prologue):
        modulation, rows = (tuple(map(chosen, each)) for each in (made.modulation, made.rows))
        return made._replace(modulation=modulation, rows=rows)

    def run_module(x: Tensor) -> PrologueResult:
        normalized, (_, _, *rows) = made(x)
        half = len(rows) // 2
        pairs = zip(rows[:half], rows[half:])
        return normalized, (None, None, *[chosen(torch.cat(pair)) for pair in pairs])

    return run_module


def _indices(temb: Tensor, first: int, length: int) -> Tensor:
    """The row of each token, int32 (B, S)."""
    batch = temb.shape[0]
    samples = torch.arange(batch, dtype=torch.int32, device=temb.device)[:, None]
    is_first = torch.arange(length, device=temb.device) < first
    return torch.where(is_first, samples + batch, samples)


def _context_prologue(call: Call, block: Any, ahead: Tensor | None, temb: Tensor, *_: Any) -> Any:
    return DOUBLE_PROLOGUES[1](call, block, ahead, temb)


def _double_block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None = None,
    freqs_cis: Any = None,
    token_replace_emb: Any = None,
    num_tokens: Any = None,
) -> Any:
    x, c, first = hidden_states.contiguous(), encoder_hidden_states, num_tokens
    if token_replace_emb is None or first is None:
        return NotImplemented
    how: Any = {"name": "norm1", "length": x.shape[1], "weights_for": image_weights}
    makers = (partial(_prologue, **how), _context_prologue)
    conditions = (temb, token_replace_emb, first)
    return double_block(self, call, makers, x, c, conditions, attention_mask, freqs_cis)


def _single_block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
    token_replace_emb: Any = None,
    num_tokens: Any = None,
) -> Any:
    x, c, first = hidden_states, encoder_hidden_states, num_tokens
    if token_replace_emb is None or first is None:
        return NotImplemented
    length = x.shape[1] + c.shape[1]
    how: Any = {"name": "norm", "length": length, "weights_for": single_block_weights}
    makers, conditions = (partial(_prologue, **how),), (temb, token_replace_emb, first)
    return single_block(self, call, makers, x, c, conditions, attention_mask, image_rotary_emb)


REPLACING_BLOCKS = (
    double_spec(f"{_PATH}TransformerBlock", _double_block_forward),
    single_spec(
        f"{_PATH}SingleTransformerBlock", _single_block_forward, operations=FLUX_OPERATIONS
    ),
)
