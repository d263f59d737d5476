"""HunyuanVideo 1.0 and 1.5, FramePack and HunyuanImage: how their transformers map to the operations.

Their blocks are those of FLUX.1, with another attention (see ``hunyuan_attention``) and the image before the
text. Version 1.5 has no single blocks. Image-to-video has blocks of its own: see
``hunyuan_token_replace``.

A block of the text's refiner has the gates of a linear layer of the time embedding,

    x = x + gate * attn(layer_norm(x));  x = x + gate_mlp * ff(layer_norm(x))
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...conditions import kernels_take
from ..core.forward_state import COMPUTED_ONCE, Family, model_spec
from ..core.patch import Call, PatchSpec
from ..parts.embeddings import TIMESTEPS
from ..parts.linears import LINEAR_GELU, feed_forward
from ..parts.norm_modules import OUTPUT_NORM
from ..parts.norms import apply_norm, gated_residual, residual_norm
from ..parts.streams import DOUBLE_PROLOGUES, SINGLE_PROLOGUES, BlockSpec, double_spec, single_spec
from .hunyuan_attention import double_block, joint_attention, single_block
from .hunyuan_token_replace import REPLACING_BLOCKS

_MODELS = "diffusers.models.transformers.transformer_"


def _double_block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None = None,
    freqs_cis: Any = None,
    *args: Any,
    image_rotary_emb: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    # The first block gets the transposed result of a convolution.
    x, c = hidden_states.contiguous(), encoder_hidden_states
    rope = image_rotary_emb if freqs_cis is None else freqs_cis  # HunyuanImage's name
    return double_block(self, call, DOUBLE_PROLOGUES, x, c, (temb,), attention_mask, rope)


def _single_block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    x, c, mask, rope = hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
    return single_block(self, call, SINGLE_PROLOGUES, x, c, (temb,), mask, rope)


def _refiner_block_forward(
    self: Any, call: Call, hidden_states: Tensor, temb: Tensor, attention_mask: Any = None
) -> Tensor:
    x, modules = hidden_states, self._modules
    if not kernels_take(x, temb):
        return call.refuse(x, temb)
    attention_out = modules["attn"](
        hidden_states=apply_norm(call, self, "norm1", x),
        encoder_hidden_states=None,
        attention_mask=attention_mask,
    )
    gate, gate_mlp = modules["norm_out"](temb)
    x, normalized = residual_norm(call, self, "norm2", x, attention_out, gate)
    return gated_residual(x, feed_forward(modules["ff"], normalized), gate_mlp)


_BLOCK = "self hidden_states encoder_hidden_states temb attention_mask"
_ONCE = (
    *("x_embedder", "clean_x_embedder", "image_embedder", "image_projection", "context_embedder"),
    *("context_embedder_2", "time_text_embed", "time_embed", "time_guidance_embed"),
    *("cond_type_embed", "rope", "proj_out"),
)


def _family(
    name: str, library: str, prefix: str, processor: str, *specs: PatchSpec, **how: Any
) -> Family:
    """``prefix``: of the names of the blocks' classes. ``how``: see ``joint_attention``."""
    path = f"{_MODELS}{library}:{prefix}"
    rope = "image_rotary_emb" if prefix == "HunyuanImage" else "freqs_cis"
    return Family(
        name,
        (
            *specs,
            double_spec(
                f"{path}TransformerBlock",
                _double_block_forward,
                parameters=f"{_BLOCK} {rope} args kwargs",
            ),
            single_spec(f"{path}SingleTransformerBlock", _single_block_forward),
            BlockSpec(
                f"{path}IndividualTokenRefinerBlock",
                _refiner_block_forward,
                "layer_norm, gated_residual_layer_norm, gated_residual",
                norms=("norm1", "norm2"),
            ),
            joint_attention(f"{_MODELS}{library}:{processor}", **how),
            TIMESTEPS,
            LINEAR_GELU,
        ),
        dict.fromkeys(_ONCE, COMPUTED_ONCE),
        OUTPUT_NORM,
    )


_LISTS = ("transformer_blocks", "single_transformer_blocks")
_V15, _IMAGE = "hunyuan_video15", "hunyuanimage"
FAMILIES = (
    _family(
        "HunyuanVideo",
        "hunyuan_video",
        "HunyuanVideo",
        "HunyuanVideoAttnProcessor2_0",
        model_spec(f"{_MODELS}hunyuan_video:HunyuanVideoTransformer3DModel", *_LISTS),
        model_spec(
            f"{_MODELS}hunyuan_video_framepack:HunyuanVideoFramepackTransformer3DModel", *_LISTS
        ),
        *REPLACING_BLOCKS,
    ),
    _family(
        "HunyuanVideo 1.5",
        _V15,
        "HunyuanVideo15",
        "HunyuanVideo15AttnProcessor2_0",
        model_spec(f"{_MODELS}{_V15}:HunyuanVideo15Transformer3DModel", _LISTS[0]),
        masks_text=True,
    ),
    _family(
        "HunyuanImage",
        _IMAGE,
        "HunyuanImage",
        "HunyuanImageAttnProcessor",
        model_spec(f"{_MODELS}{_IMAGE}:HunyuanImageTransformer2DModel", *_LISTS),
        is_prefix=False,
    ),
)
