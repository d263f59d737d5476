"""CogView3+: how its transformer maps to the operations.

A block is one of CogView4 (``cogview.py``), without a rotary embedding. Its feed-forward reads the concat of
text and image, as CogVideoX's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.checks import KnownClass
from ..core.forward_state import Family, model_spec
from ..core.patch import Call
from ..parts import linears, streams
from ..parts.blocks import NormOfBoth, attend_to_both
from ..parts.embeddings import TIMESTEPS
from ..parts.norm_modules import OUTPUT_NORM
from ..parts.norms import clip_to_float16
from ..quantized.precision import ONE_LIST
from .cogvideox import ATTENTION, feed_forwards, second_readers

_COGVIEW3 = "diffusers.models.transformers.transformer_cogview3plus"
_NORM = KnownClass("diffusers.models.normalization:CogView3PlusAdaLayerNormZeroTextImage")
_NORMS = ("norm_x", "norm_c")
streams.ADAPTIVE.add(_NORM, 12, (1, 0, 7, 6), *_NORMS)
_ROWS, _RESULTS = (slice(6), slice(6, None)), (slice(5), slice(5, None))
_READERS = partial(linears.fp8_readers, "attn1", linears.QUERY_KEY_VALUE)
_NORM1 = NormOfBoth("norm1", _ROWS, _RESULTS, (_READERS,) * 2, _NORMS)


def _block_forward(
    self: Any, call: Call, hidden_states: Tensor, encoder_hidden_states: Tensor, emb: Tensor
) -> tuple[Tensor, Tensor]:
    x, c = hidden_states, encoder_hidden_states
    if not call.takes(x, c, emb):
        return NotImplemented
    both = attend_to_both(call, self, _NORM1, (x, c), emb)
    normed = []
    for stream, name in zip(both, ("norm2", "norm2_context")):
        shift, scale, _ = stream.rows[3:6]
        normed.append(stream.norm(name, scale, shift, readers=second_readers))
    for stream, out in zip(both, feed_forwards(self._modules["ff"], *normed)):
        stream.add(out, stream.rows[5])
    x, c = streams.end(*both, hands_over=x.dtype != torch.float16)
    return clip_to_float16(x), clip_to_float16(c)


_SPECS = (
    model_spec(f"{_COGVIEW3}:CogView3PlusTransformer2DModel", "transformer_blocks"),
    streams.BlockSpec(f"{_COGVIEW3}:CogView3PlusTransformerBlock", _block_forward),
    ATTENTION,
    TIMESTEPS,
    linears.LINEAR_GELU,
)
_ONCE = ("patch_embed", "time_condition_embed", "proj_out")
FAMILIES = (Family("CogView3+", _SPECS, _ONCE, ONE_LIST, OUTPUT_NORM),)
