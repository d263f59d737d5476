"""Motif-Video: how its transformer maps to the operations.

Its blocks and joint attention are those of HunyuanVideo, with any mask of the text. The video's result of
attention, a, also attends to the normalized text, with a rotary embedding of the queries only:

    x = x + gate * a;  x = x + cross_attn(a, n_c);  x = x + gate_mlp * ff(...)
    x = x + gate * proj_out([a + cross_attn(a, n_c), gelu(proj_mlp(n))])

in a double or a single block. A decoder, the last single blocks, has the others' tokens in place of the text.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ..attention.modules import AttentionSpec, context_parallel_of, run_attention
from ..core.forward_state import Family, model_spec
from ..core.patch import Call
from ..parallel import exchange, plans
from ..parts import blocks, linears, streams
from ..parts.embeddings import TIMESTEPS
from ..parts.norm_modules import OUTPUT_NORM
from ..quantized.fp8_linears import computed
from ..quantized.precision import TWO_LISTS
from .hunyuan_video import JointAttention, attention_forward, is_pair_of_tables

_MOTIF = "diffusers.models.transformers.transformer_motif_video:MotifVideo"


def _readers(readers: Any, block: Any, x: Tensor) -> Any:
    """``readers``, and the layers of ``cross_attn`` that read the same norm."""
    weights = readers(block, x)
    if weights is None or block._modules.get("cross_attn") is None:
        return weights
    others = linears.fp8_readers("cross_attn", ("to_k", "to_v"), block, x)
    return None if others is None else {**weights, **others}


_norm = streams.adaptive_norm
_TEXT_NORM = partial(_norm, name="norm1_context", readers=partial(_readers, blocks.TEXT_READERS))
_SINGLE_NORM = partial(_norm, name="norm", readers=partial(_readers, blocks.SINGLE_READERS))


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
    image_embed_seq_len: int = 0,
    *,
    is_double: bool,
) -> tuple[Tensor, Tensor]:
    x, c, length = hidden_states, encoder_hidden_states, hidden_states.shape[1]
    x = x if x.stride(-1) == 1 else x.contiguous()  # the transposed result of a convolution
    if not call.takes(x, c, temb):
        return NotImplemented
    attn, cross_attn = self._modules["attn"], self._modules.get("cross_attn")
    options = {"attention_mask": attention_mask, "image_rotary_emb": image_rotary_emb}
    more = {**options, "image_embed_seq_len": image_embed_seq_len}
    if is_double:
        first_norms = (blocks.DOUBLE_NORMS[0], _TEXT_NORM)
        video, text = streams.start(call, self, first_norms, (x, c), (temb,))
        out, c_out = attn(hidden_states=video.n, encoder_hidden_states=text.n, **options)
        out = out if cross_attn is None else computed(out)
        video.add(out, video.rows[2])
        text.add(c_out, text.rows[2])
        if cross_attn is not None:
            x = video.x  # now, because hooks of cross_attn may write to out
            video.add(cross_attn(hidden_states=out, encoder_hidden_states=text.n, **more))
        blocks.add_feed_forwards(self, video, text)
        return streams.end(video, text)

    def attend(n: Any) -> Tensor:
        both = {"hidden_states": n[:, :length], "encoder_hidden_states": n[:, length:]}
        out, c_out = attn(**both, **options)
        if cross_attn is not None:
            out = out + cross_attn(**{**both, "hidden_states": out}, **more)
        return streams.concat_streams(call, out, c_out)

    model: Any = call.stand_in.injection.model()
    count = 0 if call.state is None else model.num_decoder_layers
    is_before_decoder = count > 0 and self in [*model.single_transformer_blocks][:-count][-1:]
    operands = (call, self, (_SINGLE_NORM,), (x, c), (temb,), attend)
    return blocks.single_block(*operands, hands_over=not is_before_decoder, clips=False)


def _cross_attention_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
    image_embed_seq_len: int = 0,
) -> Tensor:
    x, c, first, rope = hidden_states, encoder_hidden_states, image_embed_seq_len, image_rotary_emb
    if not (is_pair_of_tables(rope) and call.takes(x, c)):
        return NotImplemented
    config, length, text_length = context_parallel_of(call, self), x.shape[1], c.shape[1]
    if config is not None and first > 0:
        raise ValueError("context parallelism: ranks cannot split Motif-Video's image_embeds")

    def of_text(mask: Tensor) -> Tensor:
        own = mask if config is None else exchange.mask_of_rank(config, mask, length, text_length)
        return own[..., first - text_length :]

    sizes, mask = (length, text_length, first), attention_mask
    mask = None if mask is None else call.shared(("text", *sizes), mask, of_text)

    def unrotated(rope: Any) -> tuple[Tensor, Tensor]:
        """Tables of tokens that are not rotated."""
        shape = (text_length - first, rope[0].shape[-1])
        return rope[0].new_ones(shape), rope[0].new_zeros(shape)

    options = {"key_rope": call.shared(("unrotated", *sizes), rope, unrotated)}
    rotate = partial(call.stand_in.functions[1].function, sequence_dim=1)
    return run_attention(
        call, self, x, c[:, first:].contiguous(), rope, rotate, mask, {}, **options
    )


def _plan(model: Any, split: Any, gather: Any) -> dict[str, Any]:
    plan: dict[str, Any] = {"rope": {i: split(0, 2, split_output=True) for i in range(2)}}
    plan.update(plans.two_streams(model, split, gather))
    decoders, singles = model.num_decoder_layers, len(model.single_transformer_blocks)
    if decoders:
        plan[f"single_transformer_blocks.{singles - decoders}"] = {"hidden_states": split(1, 3)}
    return plan


_JOINT: Any = {
    "parameters": "self hidden_states encoder_hidden_states attention_mask image_rotary_emb kwargs",
    "processor": f"{_MOTIF}AttnProcessor2_0",
}
_CROSS: Any = {"processor": f"{_MOTIF}CrossAttnProcessor2_0", "splits_masks": False}
_ROPE = "qk_norm_rope"
_SPECS = (
    model_spec(f"{_MOTIF}Transformer3DModel", *TWO_LISTS.blocks, plan=_plan),
    streams.BlockSpec(f"{_MOTIF}TransformerBlock", partial(_block_forward, is_double=True)),
    streams.BlockSpec(f"{_MOTIF}SingleTransformerBlock", partial(_block_forward, is_double=False)),
    JointAttention(f"{_MOTIF}Attention", attention_forward, _ROPE, **_JOINT, is_prefix=False),
    AttentionSpec(f"{_MOTIF}CrossAttention", _cross_attention_forward, _ROPE, **_CROSS),
    *(TIMESTEPS, linears.LINEAR_GELU),
)
_EMBEDDERS = ("x_embedder", "context_embedder", "image_embedder", "time_text_embed", "rope")
FAMILIES = (Family("Motif-Video", _SPECS, (*_EMBEDDERS, "proj_out"), TWO_LISTS, OUTPUT_NORM),)
