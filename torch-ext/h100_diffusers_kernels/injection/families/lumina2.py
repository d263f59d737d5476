"""Lumina 2: how its transformer maps to the operations.

A block normalizes the input and the output of attention and feed-forward,

    x = x + tanh(gate) * rms_norm(attention(rms_norm(x) * (1 + scale)))
    x = x + tanh(gate_mlp) * rms_norm(ff(rms_norm(x) * (1 + scale_mlp)))

with an RMS norm of each head's query and key, a rotary embedding of both, several query heads for each key
head, and ff = linear_2(silu(linear_1(x)) * linear_3(x)). Blocks of the text have no modulation.

The text's mask may be any. The mask of all tokens, which the model makes itself for prompts of different
lengths, has the valid tokens first.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ..attention import modules as attention
from ..core.checks import KnownClass, is_stock, why_not_stock
from ..core.forward_state import Family, model_spec
from ..core.patch import Call, PatchSpec
from ..parts import streams
from ..parts.blocks import IMAGE_READERS, add_between_norms
from ..parts.embeddings import TIMESTEPS
from ..parts.linears import fp8_readers, gated_feed_forward
from ..parts.streams import ADAPTIVE
from ..quantized.precision import ATTENTION_LAYERS, Layers

_MODEL = "diffusers.models.transformers.transformer_lumina2"
_SILU = KnownClass("diffusers.models.activations:FP32SiLU", "torch.nn.functional:silu")
ADAPTIVE.add(KnownClass("diffusers.models.normalization:LuminaRMSNormZero"), 4, (0, None))
_NORMS = ("norm2", "ffn_norm1", "ffn_norm2")
_FF_READERS = partial(fp8_readers, "feed_forward", ("linear_1", "linear_3"))


def _first_norm(call: Call, block: Any, previous_x: Tensor | None, temb: Any) -> Any:
    """The last rows are the gate of attention, and scale and gate of the feed-forward; or no rows."""
    options: Any = {"name": "norm1", "readers": IMAGE_READERS}
    if not block.modulation:
        return streams.plain_norm(call, block, previous_x, **options)
    return streams.adaptive_norm(call, block, previous_x, temb, takes_emb=False, **options)


def _block_forward(
    self: Any, call: Call, hidden_states, attention_mask, image_rotary_emb, temb=None
) -> Tensor:
    x, modules = hidden_states, self._modules
    if not call.takes(x, temb):
        return NotImplemented
    (s,) = streams.start(call, self, (_first_norm,), (x,), (temb,))
    if s.rows and call.state is not None:  # blocks of the text have the user's mask
        call.state.block_mask = attention_mask
    both = {"hidden_states": s.n, "encoder_hidden_states": s.n}
    options = {"attention_mask": attention_mask, "image_rotary_emb": image_rotary_emb}
    out = modules["attn"](**both, **options)
    add_between_norms(s, out, _NORMS, modules["feed_forward"], _FF_READERS)
    return streams.end(s)


def _attention_forward(
    self, call: Call, hidden_states, encoder_hidden_states=None, attention_mask=None, **kwargs
) -> Tensor:
    x, context, mask = hidden_states, encoder_hidden_states, attention_mask
    freqs = kwargs.pop("image_rotary_emb", None)
    if kwargs or context is None or self.scale != (self.inner_dim // self.heads) ** -0.5:
        return NotImplemented
    batch = x.shape[0]
    if context.shape[0] != batch or (freqs is not None and freqs.shape[0] not in (1, batch)):
        return NotImplemented  # the model's own code raises
    rotate = call.stand_in.functions[1].function
    tables = None if freqs is None else call.shared("tables", freqs, _tables)
    options: dict[str, Any] = {"scale": self.scale}
    if mask is not None:
        mask = call.shared("mask", mask, lambda m: m.bool().view(batch, 1, 1, -1))
        options.update(attention.key_lengths_of(call, attention_mask, mask, *context.shape[:2]))
    rotation = (tables, lambda x, _: rotate(x, freqs, use_real=False))
    operands = (x, None if context is x else context, *rotation, mask, options)
    return attention.run_attention(call, self, *operands, keeps_dtype=True)


def _tables(freqs: Tensor) -> tuple[Tensor, Tensor]:
    """Complex tables (B, S, d / 2) as cosines and sines, each float32 (B, S, 1, d / 2)."""
    cos, sin = (part.float().unsqueeze(2).contiguous() for part in (freqs.real, freqs.imag))
    return cos, sin


def _why_not_feed_forward(module: Any) -> str | None:
    silu = module._modules.get("silu")
    return None if is_stock(silu, _SILU) else f"its activation {why_not_stock(silu, _SILU)}"


_LISTS = ("context_refiner", "noise_refiner", "layers")
_SPECS = (
    model_spec(f"{_MODEL}:Lumina2Transformer2DModel", *_LISTS),
    streams.BlockSpec(f"{_MODEL}:Lumina2TransformerBlock", _block_forward),
    attention.AttentionSpec(
        "diffusers.models.attention_processor:Attention",
        _attention_forward,
        "qk_norm_rope",
        processor=f"{_MODEL}:Lumina2AttnProcessor2_0",
        parameters="self hidden_states encoder_hidden_states attention_mask cross_attention_kwargs",
        processor_parameters="hidden_states encoder_hidden_states attention_mask image_rotary_emb"
        " base_sequence_length",
        dispatches=False,
    ),
    PatchSpec(
        "diffusers.models.attention:LuminaFeedForward",
        partial(gated_feed_forward, gate="linear_1", value="linear_3", out="linear_2"),
        "swiglu",
        condition=_why_not_feed_forward,
    ),
    TIMESTEPS,
)
_ONCE = ("x_embedder", "time_caption_embed", "rope_embedder", "norm_out")
_LAYERS = Layers(
    ("layers",), (*ATTENTION_LAYERS, "feed_forward.linear_*"), fast_blocks=("noise_refiner",)
)
FAMILIES = (Family("Lumina 2", _SPECS, _ONCE, _LAYERS),)
