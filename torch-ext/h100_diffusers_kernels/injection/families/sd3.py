"""Stable Diffusion 3 and 3.5: how their transformer, and its ControlNet, map to the operations.

A block is a double block of FLUX.1 without a rotary embedding, with the image before the text. Some blocks of
Stable Diffusion 3.5 attend twice to the image,

    n_x, n_2 = layer_norm(x) * (1 + scale) + shift, layer_norm(x) * (1 + scale_2) + shift_2
    x = x + gate * a_x;  x = x + gate_2 * attention(n_2)

and the last block drops the text after its attention.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..attention.modules import AttentionSpec, run_attention, run_joint_attention
from ..core.checks import KnownClass
from ..core.forward_state import Family, model_spec
from ..core.patch import Call
from ..parallel.plans import two_streams
from ..parts import linears, streams
from ..parts.blocks import DOUBLE_NORMS, IMAGE_READERS, TEXT_READERS, add_feed_forwards
from ..parts.embeddings import TIMESTEPS
from ..parts.norm_modules import OUTPUT_NORM
from ..parts.streams import ADAPTIVE
from ..quantized.precision import ONE_LIST

_SD3 = "diffusers.models.transformers.transformer_sd3"
_CONTROLNET = "diffusers.models.controlnets.controlnet_sd3"
_ATTENTIONS = "diffusers.models.attention_processor"
ADAPTIVE.add(KnownClass("diffusers.models.normalization:SD35AdaLayerNormZeroX"), 9, (1, 0, 7, 6))


def _image_readers(block: Any, x: Tensor) -> Any:
    """Both attentions, if there are two."""
    weights: Any = IMAGE_READERS(block, x)
    if not (weights and block.use_dual_attention):
        return weights
    others = linears.fp8_readers("attn2", linears.QUERY_KEY_VALUE, block, x)
    return others and {**weights, **others}


def _image_norm(call: Call, block: Any, previous_x: Tensor | None, temb: Tensor) -> Any:
    """Rows are shift, scale and gate of attention, of the feed-forward, and of the second attention."""
    if previous_x is not None and block._chunk_size is not None:
        return None
    options: Any = {"name": "norm1", "readers": _image_readers}
    return streams.adaptive_norm(call, block, previous_x, temb, **options)


def _text_norm(call: Call, block: Any, previous_x: Tensor | None, temb: Tensor) -> Any:
    """The same rows; only scale and shift in the last block."""
    options: Any = {"takes_emb": not block.context_pre_only, "readers": TEXT_READERS}
    return streams.adaptive_norm(call, block, previous_x, temb, name="norm1_context", **options)


def _block_forward(
    self: Any, call: Call, hidden_states, encoder_hidden_states, temb, joint_attention_kwargs=None
) -> tuple[Tensor | None, Tensor]:
    x, c = hidden_states, encoder_hidden_states
    if self._chunk_size is not None:
        return call.decline("its feed-forward is chunked")
    if not call.takes(x, c, temb):
        return NotImplemented
    modules, more = self._modules, joint_attention_kwargs or {}
    image, text = streams.start(call, self, (_image_norm, _text_norm), (x, c), (temb,))
    n, *others = image.n if self.use_dual_attention else (image.n,)
    out, c_out = modules["attn"](hidden_states=n, encoder_hidden_states=text.n, **more)
    image.add(out, image.rows[2])
    for n in others:
        image.add(modules["attn2"](hidden_states=n, **more), image.rows[8])
    if self.context_pre_only:
        add_feed_forwards(self, image)
        return None, image.x
    text.add(c_out, text.rows[2])
    add_feed_forwards(self, image, text)
    return streams.end(image, text)[::-1]


def _single_block_forward(self: Any, call: Call, hidden_states: Tensor, temb: Tensor) -> Tensor:
    x = hidden_states
    if not call.takes(x, temb):
        return NotImplemented
    (s,) = streams.start(call, self, DOUBLE_NORMS[:1], (x,), (temb,))
    s.add(self._modules["attn"](hidden_states=s.n, encoder_hidden_states=None), s.rows[2])
    add_feed_forwards(self, s)
    return streams.end(s)


def _attention_forward(
    self: Any, call: Call, hidden_states, encoder_hidden_states=None, attention_mask=None, **kwargs
) -> Any:
    x, c = hidden_states, encoder_hidden_states
    if kwargs:
        return NotImplemented
    options: dict[str, Any] = {"dropout_p": 0.0, "is_causal": False}
    # Its processor ignores the mask.
    if c is None:
        return run_attention(call, self, x, None, None, None, None, options)
    if not call.takes(x, c):
        return NotImplemented
    return run_joint_attention(call, self, x, c, (None, None), None, **options)


_SPECS = (
    model_spec(f"{_SD3}:SD3Transformer2DModel", "transformer_blocks", plan=two_streams),
    model_spec(f"{_CONTROLNET}:SD3ControlNetModel", "transformer_blocks"),
    streams.BlockSpec("diffusers.models.attention:JointTransformerBlock", _block_forward),
    streams.BlockSpec(f"{_SD3}:SD3SingleTransformerBlock", _single_block_forward),
    AttentionSpec(
        f"{_ATTENTIONS}:Attention",
        _attention_forward,
        "qk_norm_rope",
        processor=f"{_ATTENTIONS}:JointAttnProcessor2_0",
        parameters="self hidden_states encoder_hidden_states attention_mask cross_attention_kwargs",
        processor_parameters="hidden_states encoder_hidden_states attention_mask args kwargs",
        rotate="",
        dispatches=False,
    ),
    TIMESTEPS,
    linears.LINEAR_GELU,
)
_ONCE = ("pos_embed", "time_text_embed", "context_embedder", "proj_out")
FAMILIES = (Family("Stable Diffusion 3", _SPECS, _ONCE, ONE_LIST, OUTPUT_NORM),)
