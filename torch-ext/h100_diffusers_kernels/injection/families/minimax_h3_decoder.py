"""The decoder of MiniMax-H3's autoencoder: how this transformer maps to the operations.

    x = x + attention(rms_norm(x)) * scale1
    x = x + ff(rms_norm(x)) * scale2

with an RMS norm of each head's query and key, a rotary embedding of the first elements of each head, and a
feed-forward with SwiGLU. diffusers loads norms and scales in float32 beside 16-bit linear layers. Then the
sums are float32, and the norms' results are rounded for the linear layers. Each sum and its rounded norm are
one pass. The autoencoder decodes its tiles in pairs, which halves the work of the host.
"""

from __future__ import annotations

import sys
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from ..core.checks import KnownFunction, has_hooks, is_stock
from ..core.forward_state import Family, model_spec
from ..core.patch import Call, MethodSpec, Proxy, stand_in_of
from ..core.quantized_rows import QuantizedRows
from ..parts import linears, streams
from ..parts.norms import Upcasts
from ..quantized.fp8_linears import LINEAR
from ..quantized.precision import ONE_LIST
from .minimax_h3 import PLAIN_FIRST_NORMS, attention_forward, attention_spec

_AUTOENCODER = "diffusers.models.autoencoders.autoencoder_kl_minimax_h3"


def _block_forward(self: Any, call: Call, hidden_states, rotary_emb=None) -> Tensor:
    modules = self._modules
    if not call.takes(hidden_states):
        return NotImplemented
    dtype = _rounds_to(self)
    of_sums = reduce(
        torch.promote_types, (dtype, self.scale1.dtype, self.scale2.dtype), hidden_states.dtype
    )
    if of_sums != dtype and torch.compiler.is_compiling():
        return NotImplemented  # Inductor fuses conversions with the norms
    (s,) = streams.start(call, self, PLAIN_FIRST_NORMS, (hidden_states.to(of_sums),), ())
    s.add(modules["attn"](_rounded(s.n, dtype), rotary_emb), self.scale1)
    n = s.norm("norm2", readers=partial(linears.feed_forward_reader, "ff"))
    s.add(linears.feed_forward_branch(modules["ff"], _rounded(n, dtype)), self.scale2)
    return streams.end(s)


def _rounds_to(block: Any) -> torch.dtype:
    """As diffusers' ``get_parameter_dtype``."""
    layer = block._modules["attn"].to_q
    weight = layer._parameters.get("weight")
    if weight is not None and is_stock(layer, LINEAR):
        return weight.dtype
    return sys.modules[_AUTOENCODER].get_parameter_dtype(layer)


def _rounded(n: Any, dtype: torch.dtype) -> Any:
    return n if type(n) is QuantizedRows else n.to(dtype)


def _attention_forward(self: Any, call: Call, hidden_states, rotary_emb=None) -> Tensor:
    return attention_forward(self, call, hidden_states, rotary_emb, norms_in_float32=True)


_AUTOENCODER_CLASS = f"{_AUTOENCODER}:AutoencoderKLMiniMaxH3"
_DECODE_CLIP = KnownFunction(f"{_AUTOENCODER_CLASS}._decode_clip", "self z")
_STITCH_TILES = KnownFunction(
    f"{_AUTOENCODER_CLASS}._stitch_tiles", "self tiles height_overlaps width_overlaps"
)
_TILES = 2  # a call of the decoder: enough that the GPU is the limit, not the host


def _decode_clip(self: Any, z: Tensor) -> Tensor:
    """The class's own, with pairs of tiles."""
    known, decoder = (_DECODE_CLIP, _STITCH_TILES), self._modules["decoder"]
    if (
        not self.use_tiling
        or any(getattr(type(self), each.name) is not each.function for each in known)
        or torch.compiler.is_compiling()
        or stand_in_of(decoder.__dict__.get("forward")) is None
        or has_hooks(decoder)
    ):
        return type(self)._decode_clip(self, z)

    def stitch(rows: Any, *overlaps: Any) -> Tensor:
        tiles = [tile for row in rows for tile in row]
        pairs = (tiles[i : i + _TILES] for i in range(0, len(tiles), _TILES))
        decoded = iter([x for pair in pairs for x in decoder(torch.cat(pair)).split(z.shape[0])])
        return self._stitch_tiles([[next(decoded) for _ in row] for row in rows], *overlaps)

    proxy: Any = Proxy(self)
    proxy.decoder, proxy._stitch_tiles = (lambda tile: tile), stitch
    return _DECODE_CLIP.function(proxy, z)


_SPECS = (
    model_spec(f"{_AUTOENCODER}:MiniMaxH3VideoViTDecoder3d", "transformer_blocks"),
    streams.BlockSpec(
        f"{_AUTOENCODER}:MiniMaxH3VideoTransformerBlock",
        _block_forward,
        functions=(f"{_AUTOENCODER}:get_parameter_dtype",),
        upcasts=Upcasts.TO_NEXT_LINEAR,
        rounds_to=_rounds_to,
    ),
    # Its processor rotates inline, in the same way as the transformer's function.
    attention_spec(f"{_AUTOENCODER}:MiniMaxH3VideoAttention", _attention_forward),
    linears.GATED_ACTIVATIONS[1],
)
_ONCE = ("rope", "proj_in", "norm_out", "proj_out")
# No error of an FP8 decoder is published, so "fp8" leaves it.
_LAYERS = ONE_LIST._replace(blocks=(), fast_blocks=ONE_LIST.blocks, leaves_float32=True)
_METHODS = (MethodSpec(_DECODE_CLIP, _decode_clip),)
FAMILIES = (Family("MiniMax-H3's decoder", _SPECS, _ONCE, _LAYERS, methods=_METHODS),)
