"""Mochi: how its transformer maps to the operations.

A block computes for image tokens x and text tokens c, each with its own modulation,

    n_x, n_c = rms_norm(x) * (1 + scale), rms_norm(c) * (1 + scale)
    a_x, a_c = attention over the concat of both, with an RMS norm of each head's query and key; x is rotated
    x = x + tanh(gate) * rms_norm(a_x)
    x = x + tanh(gate_mlp) * rms_norm(ff(rms_norm(x) * (1 + scale_mlp)));  c likewise

in float32 from each norm to the next rounding, with ff = out(x_1 * silu(x_2)). The last block computes no
text.

The processor attends to the image and the valid tokens of the text, one sample at a time, and leaves their
results in front of zeros. It waits for the GPU to learn their number. Here the valid tokens are put first
without it, and attention takes it as the sample's number of keys.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention.modules import AttentionSpec, run_joint_attention
from ..core.checks import KnownClass
from ..core.forward_state import Family, model_spec
from ..core.patch import Call
from ..parts import linears, streams
from ..parts.blocks import add_between_norms
from ..parts.embeddings import TIMESTEPS
from ..parts.norm_modules import OUTPUT_NORM
from ..parts.norms import Upcasts, norm_notes
from ..parts.streams import ADAPTIVE
from ..quantized.precision import ONE_LIST, PRECISIONS

_MODEL = "diffusers.models.transformers.transformer_mochi"
ADAPTIVE.add(KnownClass(f"{_MODEL}:MochiRMSNormZero"), 4, (0, None))
ADAPTIVE.add(KnownClass(f"{_MODEL}:MochiLayerNormContinuous"), 1, (0, None))
_NORMS = tuple(f"norm{i}{suffix}" for i in (2, 3, 4) for suffix in ("", "_context"))


def _modulation(call: Call, module: Any, previous_x: Tensor | None, temb: Tensor) -> Tensor | None:
    layer = module._modules.get("linear", module._modules.get("linear_1"))
    return streams.linear_of_silu(call, layer, temb, previous_x)


# Rows end with the gate of attention, and scale and gate of the feed-forward. The last block has none of the
# text. Attention puts the valid text first, which is simpler with a tensor.
_norm = partial(streams.adaptive_norm, takes_emb=False, modulation_of=_modulation)
_READERS = partial(linears.fp8_readers, "attn1", linears.QUERY_KEY_VALUE)
_FIRST_NORMS = partial(_norm, name="norm1", readers=_READERS), partial(_norm, name="norm1_context")


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    encoder_attention_mask: Tensor,
    image_rotary_emb: Any = None,
) -> tuple[Tensor, Tensor]:
    # The first block gets the transposed result of a convolution.
    x, c = hidden_states.contiguous(), encoder_hidden_states
    if not call.takes(x, c, temb):
        return NotImplemented
    image, text = both = streams.start(call, self, _FIRST_NORMS, (x, c), (temb,))
    options = {"image_rotary_emb": image_rotary_emb, "attention_mask": encoder_attention_mask}
    outs = self._modules["attn1"](hidden_states=image.n, encoder_hidden_states=text.n, **options)
    computed = both[:1] if self.context_pre_only else both
    for stream, suffix, out in zip(computed, ("", "_context"), outs):
        readers = partial(linears.feed_forward_reader, f"ff{suffix}")
        feed_forward = partial(linears.feed_forward, self._modules[f"ff{suffix}"])
        norms = tuple([f"norm{i}{suffix}" for i in (2, 3, 4)])
        add_between_norms(stream, out, norms, feed_forward, readers)
    results = streams.end(*computed)
    return (results, c) if self.context_pre_only else results


def _why_not_block(module: Any) -> str | None:
    """The model passes scale or gate to these norms, so its own code calls norms of another kind."""
    notes = norm_notes(module, _NORMS)
    return notes[0] if notes else None


class _Valid(NamedTuple):
    """The valid tokens of the text put first.

    Attributes:
        order: the tokens' indices, (B, T, 1).
        is_padding: whether a token is padding, in this order, (B, T, 1).
        mask: whether each key of image and text is valid, (B, 1, 1, S + T).
        key_lengths: the number of valid keys, int32 (B,).
    """

    order: Tensor
    is_padding: Tensor
    mask: Tensor
    key_lengths: Tensor


def _valid_first(mask: Tensor, length: int) -> _Valid:
    """From the text's mask (B, T), for ``length`` tokens of the image."""
    is_padding = mask == 0
    order = is_padding.to(torch.uint8).argsort(dim=1, stable=True)
    is_padding = is_padding.gather(1, order)
    of_keys = torch.nn.functional.pad(~is_padding, (length, 0), value=True)
    key_lengths = of_keys.sum(1, dtype=torch.int32)
    of_tokens = (order.unsqueeze(2), is_padding.unsqueeze(2))
    return _Valid(*of_tokens, of_keys[:, None, None], key_lengths)


def _attention_forward(
    self, call: Call, hidden_states, encoder_hidden_states=None, attention_mask=None, **kwargs
) -> Any:
    x, c, mask = hidden_states, encoder_hidden_states, attention_mask
    rope = kwargs.pop("image_rotary_emb", None)
    if kwargs or c is None or mask is None or mask.shape != c.shape[:2] or not call.takes(x, c):
        return NotImplemented
    length = x.shape[1]
    valid = call.shared(("valid text", length), mask, partial(_valid_first, length=length))
    c = c.gather(1, valid.order.expand_as(c))
    tables = None if rope is None else call.shared("tables", rope, _tables)
    options = {"key_lengths": valid.key_lengths, "dropout_p": 0.0, "is_causal": False}
    options["text_padding"] = valid.is_padding
    operands = (x, c, (tables, None), _rotated, valid.mask)
    return run_joint_attention(call, self, *operands, **options)


def _tables(rope: Any) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each head, (S, H, d / 2), as (1, S, H, d / 2)."""
    cos, sin = rope
    return cos.unsqueeze(0), sin.unsqueeze(0)


def _rotated(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """x (B, S, H, d) as the processor rotates it."""
    (cos, sin), (even, odd) = tables, x.float().unflatten(-1, (-1, 2)).unbind(-1)
    pairs = (even * cos - odd * sin, even * sin + odd * cos)
    return torch.stack(pairs, dim=-1).flatten(-2).to(x.dtype)


_SPECS = (
    model_spec(f"{_MODEL}:MochiTransformer3DModel", "transformer_blocks"),
    streams.BlockSpec(
        f"{_MODEL}:MochiTransformerBlock",
        _block_forward,
        condition=_why_not_block,
        upcasts=Upcasts.TO_NEXT_LINEAR,
    ),
    AttentionSpec(
        "diffusers.models.attention_processor:MochiAttention",
        _attention_forward,
        "qk_norm_rope",
        processor="diffusers.models.attention_processor:MochiAttnProcessor2_0",
        processor_parameters="hidden_states encoder_hidden_states attention_mask image_rotary_emb",
        rotate="",
        dispatches=False,
    ),
    *(replace(spec, left_to_compiler=False) for spec in linears.GATED_ACTIVATIONS[1:]),
    TIMESTEPS,
)
_ONCE = ("patch_embed", "time_embed", "rope", "proj_out")
FAMILIES = (Family("Mochi", _SPECS, _ONCE, ONE_LIST, OUTPUT_NORM, int8_tiers=PRECISIONS),)
