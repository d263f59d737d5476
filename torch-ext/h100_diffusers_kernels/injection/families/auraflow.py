"""AuraFlow: how its transformer maps to the operations.

A joint block computes for image tokens x and text tokens c, each with its own modulation,

    n_x, n_c = layer_norm(x) * (1 + scale) + shift;  n_c likewise
    a_x, a_c = attention over the concat of both, with a layer norm of each head's query and key
    h = x + gate * a_x
    x = x + gate_mlp * ff(layer_norm(h) * (1 + scale_mlp) + shift_mlp);  c likewise

with norms in float32 and ff = out(silu(linear_1(n)) * linear_2(n)). So attention reaches x only through ff. A
single block computes the same for the tokens of both. The kernel of attention takes heads of up to 128
elements; those of the published models have 256.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ..attention import modules as attention
from ..core.forward_state import Family, model_spec
from ..core.patch import Call, PatchSpec
from ..parts import linears, streams
from ..parts.blocks import DOUBLE_NORMS, FEED_FORWARDS
from ..parts.embeddings import TIMESTEPS
from ..quantized.precision import ATTENTION_LAYERS, Layers

_AURAFLOW = "diffusers.models.transformers.auraflow_transformer_2d"
_PROCESSORS = "diffusers.models.attention_processor"


def _add_feed_forwards(call: Call, block: Any, each: list[streams.Stream], outs: Any) -> None:
    """Adds to each stream the feed-forward of the norm of its sum with an attention's result."""
    for stream, out, (norm, ff) in zip(each, outs, FEED_FORWARDS):
        _, _, gate, shift, scale, gate_mlp = stream.rows
        branch = streams.Stream(call, block, stream.x)
        branch.add(out, gate)
        readers = partial(linears.fp8_readers, ff, ("linear_1", "linear_2"))
        n = branch.norm(norm, scale, shift, readers=readers)
        stream.add(block._modules[ff](n), gate_mlp)


def _joint_block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    x, c, more = hidden_states, encoder_hidden_states, attention_kwargs or {}
    if not call.takes(x, c, temb):
        return NotImplemented
    image, text = streams.start(call, self, DOUBLE_NORMS, (x, c), (temb,))
    n, c_n = image.n, text.n
    outs = self._modules["attn"](hidden_states=n, encoder_hidden_states=c_n, **more)
    _add_feed_forwards(call, self, [image, text], outs)
    return streams.end(image, text)[::-1]


def _single_block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    temb: Tensor,
    attention_kwargs: dict[str, Any] | None = None,
) -> Tensor:
    x, more = hidden_states, attention_kwargs or {}
    if not call.takes(x, temb):
        return NotImplemented
    (s,) = streams.start(call, self, DOUBLE_NORMS[:1], (x,), (temb,))
    outs = (self._modules["attn"](hidden_states=s.n, **more),)
    _add_feed_forwards(call, self, [s], outs)
    return streams.end(s)


def _attention_forward(
    self, call: Call, hidden_states, encoder_hidden_states=None, attention_mask=None, **kwargs
) -> Any:
    x, c = hidden_states, encoder_hidden_states
    if kwargs or self.scale != (self.inner_dim // self.heads) ** -0.5 or not call.takes(x, c):
        return NotImplemented
    # Its processor ignores the mask.
    options: dict[str, Any] = {"scale": self.scale, "dropout_p": 0.0, "is_causal": False}
    if c is None:
        return attention.run_attention(call, self, x, None, None, None, None, options)
    options["is_text_first"] = True
    return attention.run_joint_attention(call, self, x, c, (None, None), None, **options)


_ARGUMENTS = "hidden_states encoder_hidden_states"
_FEED_FORWARD = partial(
    linears.gated_feed_forward, gate="linear_1", value="linear_2", out="out_projection"
)
_SPECS = (
    model_spec(
        f"{_AURAFLOW}:AuraFlowTransformer2DModel",
        *("joint_transformer_blocks", "single_transformer_blocks"),
    ),
    streams.BlockSpec(f"{_AURAFLOW}:AuraFlowJointTransformerBlock", _joint_block_forward),
    streams.BlockSpec(f"{_AURAFLOW}:AuraFlowSingleTransformerBlock", _single_block_forward),
    attention.AttentionSpec(
        f"{_PROCESSORS}:Attention",
        _attention_forward,
        "qk_norm_rope",
        processor=f"{_PROCESSORS}:AuraFlowAttnProcessor2_0",
        processor_parameters=f"{_ARGUMENTS} args kwargs",
        parameters=f"self {_ARGUMENTS} attention_mask cross_attention_kwargs",
        rotate="",
        dispatches=False,
    ),
    PatchSpec(
        f"{_AURAFLOW}:AuraFlowFeedForward",
        _FEED_FORWARD,
        "swiglu",
        functions=("torch.nn.functional:silu",),
    ),
    TIMESTEPS,
)
_ONCE = ("pos_embed", "time_step_proj", "context_embedder", "norm_out", "proj_out")
_LAYERS = Layers(
    ("joint_transformer_blocks", "single_transformer_blocks"),
    (*ATTENTION_LAYERS, "ff*.linear_[12]", "ff*.out_projection"),
)
FAMILIES = (Family("AuraFlow", _SPECS, _ONCE, _LAYERS),)
