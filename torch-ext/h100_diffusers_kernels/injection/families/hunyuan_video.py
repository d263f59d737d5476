"""HunyuanVideo 1.0 and 1.5, FramePack and HunyuanImage: how their transformers map to the operations.

Their blocks are those of FLUX.1 with the image before the text. Version 1.5 has no single blocks. Blocks for
image-to-video replace the first frame: its tokens take the modulation of a second embedding.

Attention is joint. Only the image is rotated, and the text is padded. All keys of the image are valid. The
video models put the valid text first, so their mask is a number of keys for each sample. HunyuanImage may
pass any mask of the text; it becomes a bias. Version 1.5 also masks the queries of the padding, with a mask
(B, 1, S, S) that each block makes anew. A query without keys gets zeros.

A block of the text's refiner has the gates of a linear layer of the time embedding,

    x = x + gate * attn(layer_norm(x));  x = x + gate_mlp * ff(layer_norm(x))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..attention import modules as attention
from ..core.checks import KnownClass
from ..core.forward_state import Family, model_spec
from ..core.patch import Call
from ..parallel.exchange import mask_of_rank
from ..parallel.plans import two_streams
from ..parts import blocks, streams
from ..parts.embeddings import TIMESTEPS
from ..parts.linears import LINEAR_GELU, feed_forward
from ..parts.norm_modules import OUTPUT_NORM
from ..parts.norms import RowsByToken
from ..parts.streams import ADAPTIVE, BlockSpec
from ..quantized.precision import ONE_LIST, PRECISIONS, TWO_LISTS

_MODELS = "diffusers.models.transformers.transformer_"


def attention_forward(
    self,
    call: Call,
    hidden_states,
    encoder_hidden_states=None,
    attention_mask=None,
    *args,
    **kwargs,
) -> Any:
    x, c, modules = hidden_states, encoder_hidden_states, self._modules
    spec: Any = call.stand_in.spec
    rope = kwargs.pop("image_rotary_emb", None)
    if args or kwargs or c is None or not (rope is None or is_pair_of_tables(rope)):
        return NotImplemented
    if not call.takes(x, c):
        return NotImplemented
    rotate = partial(call.stand_in.functions[1].function, sequence_dim=1)
    length, mask = x.shape[1], attention_mask
    options: dict[str, Any] = {}
    if mask is not None:
        if spec.masks_text:
            if mask.shape[0] != x.shape[0]:
                return NotImplemented  # the model's own code raises
            mask = call.shared(("mask", length), mask, partial(_mask_of_all, count=length))
        config = attention.context_parallel_of(call, self)
        if config is not None:
            mask = mask_of_rank(config, mask, length, c.shape[1])
        elif spec.is_prefix:
            shape = x.shape[0], length + c.shape[1]
            options = attention.key_lengths_of(call, attention_mask, mask, *shape)
    if modules.get("add_q_proj") is not None:
        if spec.masks_text and mask is not None:
            of_padding = call.shared("padding", mask, lambda m: ~m[:, 0, 0, length:, None])
            options["text_padding"] = of_padding
        operands = (x, c, (rope, None), rotate, mask)
        return attention.run_joint_attention(call, self, *operands, **options)
    if rope is not None:
        rope = call.shared(("tables", c.shape[1]), rope, partial(_extended, count=c.shape[1]))
    both = attention.project(call, self, streams.concat_streams(call, x, c), None, rope, None)
    out = attention.attend_to_all(call, self, both, rotate, mask, **options)
    return attention.project_out(self, out[:, :length]), out[:, length:]


def is_pair_of_tables(rope: Any) -> bool:
    is_pair = isinstance(rope, (tuple, list)) and len(rope) == 2
    return is_pair and all(isinstance(table, Tensor) and table.dim() == 2 for table in rope)


def _extended(rope: Any, count: int) -> tuple[Tensor, Tensor]:
    """Tables (S, d) of the image with rows for tokens of text, which they do not rotate."""
    cos, sin = rope
    shape = (count, cos.shape[1])
    return torch.cat([cos, cos.new_ones(shape)]), torch.cat([sin, sin.new_zeros(shape)])


def _mask_of_all(mask: Tensor, count: int) -> Tensor:
    """The mask (B, 1, 1, S) of ``count`` keys of the image, which are valid, and of the text."""
    return torch.nn.functional.pad(mask, (count, 0), value=True).bool()[:, None, None]


@dataclass(frozen=True, eq=False)
class JointAttention(attention.AttentionSpec):
    """Attention of the blocks. Those of the text's refiner, of the same class, attend to the text alone.

    Attributes:
        is_prefix: whether the model puts valid keys before the padding.
        masks_text: whether the mask is (B, T) of the text, not (B, 1, 1, S) of all keys.
    """

    is_prefix: bool = True
    masks_text: bool = False
    splits_masks: bool = False

    def matches(self, module: Any) -> bool:
        matches = super().matches(module)
        return matches and bool(module.pre_only or module.added_kv_proj_dim is not None)


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
    token_replace_emb: Any = None,
    num_tokens: Any = None,
    *args: Any,
    is_double: bool = True,
    replaces: bool = False,
    freqs_cis: Any = None,  # HunyuanVideo's name in double blocks
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """``replaces``: whether the first ``num_tokens`` take the modulation of the second embedding."""
    x, c, length = hidden_states, encoder_hidden_states, hidden_states.shape[1]
    conditions: tuple[Any, ...] = (temb,)
    first_norms: Any = blocks.DOUBLE_NORMS if is_double else blocks.SINGLE_NORMS
    if replaces:
        if token_replace_emb is None or num_tokens is None:
            return NotImplemented
        conditions = (temb, token_replace_emb, num_tokens)
        count = length if is_double else length + c.shape[1]
        first_norm = partial(_replacing_norm, first_norms[0], count)
        first_norms = (first_norm, _text_norm) if is_double else (first_norm,)
    if is_double:
        x = x.contiguous()  # the first block gets the transposed result of a convolution
    if not call.takes(x, c, *conditions[:2]):
        return NotImplemented
    if call.state is not None:
        call.state.block_mask = attention_mask
    rope = image_rotary_emb if freqs_cis is None else freqs_cis
    options = {"attention_mask": attention_mask, "image_rotary_emb": rope}
    arguments = (call, self, first_norms, (x, c), conditions)
    if is_double:
        return blocks.double_block(*arguments, clips=False, **options)

    def attend(n: Any) -> Tensor:
        both = {"hidden_states": n[:, :length], "encoder_hidden_states": n[:, length:]}
        return streams.concat_streams(call, *self._modules["attn"](**both, **options))

    return blocks.single_block(*arguments, attend, clips=False)


def _refiner_block_forward(
    self: Any, call: Call, hidden_states: Tensor, temb: Tensor, attention_mask: Any = None
) -> Tensor:
    x, modules = hidden_states, self._modules
    if not call.takes(x, temb):
        return NotImplemented
    s = streams.Stream(call, self, x)
    options = {"encoder_hidden_states": None, "attention_mask": attention_mask}
    out = modules["attn"](hidden_states=s.norm("norm1"), **options)
    gate, gate_mlp = modules["norm_out"](temb)
    s.add(out, gate)
    s.add(feed_forward(modules["ff"], s.norm("norm2")), gate_mlp)
    return s.x


# --------------------------------------------------------------------------------------------------
# Blocks that replace the first frame

_REPLACING = f"{_MODELS}hunyuan_video:HunyuanVideoTokenReplace"
ADAPTIVE.add(KnownClass(f"{_REPLACING}AdaLayerNormZero"), 6, (1, 0))
ADAPTIVE.add(KnownClass(f"{_REPLACING}AdaLayerNormZeroSingle"), 3, (1, 0))


def _modulation(
    call: Call, module: Any, previous_x: Tensor | None, temb: Tensor, replacing: Tensor, _: int
) -> Tensor | None:
    """Both embeddings' rows, (2 * B, N * D)."""
    layer = module._modules["linear"]
    rows = streams.linear_of_silu(call, layer, temb, previous_x)
    of_first = streams.linear_of_silu(call, layer, replacing, previous_x, "replacing silu")
    return None if rows is None or of_first is None else torch.cat([rows, of_first])


def _replacing_norm(
    norm: Any, length: int, call: Call, block, previous_x, temb, replacing, first
) -> Any:
    """``norm`` of ``length`` tokens; the ``first`` ones take the second embedding's rows."""
    options: Any = {"takes_emb": False, "modulation_of": _modulation}
    made = norm(call, block, previous_x, temb, replacing, first, **options)
    if made is None:
        return None
    make = partial(_indices, first=first, length=length)
    index = call.shared(("indices", first, length), temb, make)

    def chosen(rows: Tensor) -> RowsByToken:
        return RowsByToken(rows.squeeze(1), index)

    if isinstance(made, streams.FirstNorm):
        modulation, rows = (tuple(map(chosen, each)) for each in (made.modulation, made.rows))
        return made._replace(modulation=modulation, rows=rows)

    def run_module(x: Tensor) -> tuple[Any, Any]:
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


def _text_norm(call: Call, block: Any, previous_x: Tensor | None, temb: Tensor, *_: Any) -> Any:
    return blocks.DOUBLE_NORMS[1](call, block, previous_x, temb)


# --------------------------------------------------------------------------------------------------
# Families


def _plan(model: Any, split: Callable, gather: Callable) -> dict[str, Any]:
    kind = getattr(model.config, "image_condition_type", None)
    if kind == "token_replace":
        raise ValueError(
            "context_parallel_plan: HunyuanVideo with image_condition_type 'token_replace' counts the "
            "tokens of the first frame, which ranks cannot split"
        )
    tables = {i: split(0, 2, split_output=True) for i in range(2)}
    return {"rope": tables, **two_streams(model, split, gather)}


_ONCE = (
    *("x_embedder", "clean_x_embedder", "image_embedder", "image_projection", "context_embedder"),
    *("context_embedder_2", "time_text_embed", "time_embed", "time_guidance_embed"),
    *("cond_type_embed", "rope", "proj_out"),
)


def _blocks(path: str, rope: str, others="args kwargs", **kind) -> tuple[BlockSpec, ...]:
    """The double and the single block. ``rope``: its argument's name in the double block. ``others``: names
    of arguments after it. ``kind``: see ``_block_forward``."""
    names = "self hidden_states encoder_hidden_states temb attention_mask"
    double = partial(_block_forward, **kind)
    single = partial(_block_forward, is_double=False, **kind)
    of_double, of_single = f"{names} {rope} {others}", f"{names} image_rotary_emb {others}"
    return (
        BlockSpec(f"{path}TransformerBlock", double, parameters=of_double),
        BlockSpec(f"{path}SingleTransformerBlock", single, parameters=of_single),
    )


def _family(
    name: str, path: str, *specs, processor: str = "AttnProcessor2_0", layers=TWO_LISTS, **masks
) -> Family:
    """``path``: how those of the classes begin. ``masks``: see ``JointAttention``."""
    joint_attention = JointAttention(
        "diffusers.models.attention_processor:Attention",
        attention_forward,
        "qk_norm_rope",
        processor=f"{path}{processor}",
        **attention.ROTATED_ATTENTION,
        **masks,
    )
    refiner = BlockSpec(f"{path}IndividualTokenRefinerBlock", _refiner_block_forward)
    blocks = _blocks(path, "image_rotary_emb" if path == _IMAGE else "freqs_cis")
    specs = (*specs, *blocks, refiner, joint_attention, TIMESTEPS, LINEAR_GELU)
    return Family(name, specs, _ONCE, layers, OUTPUT_NORM)


_VIDEO, _V15 = f"{_MODELS}hunyuan_video:HunyuanVideo", f"{_MODELS}hunyuan_video15:HunyuanVideo15"
_FRAMEPACK = f"{_MODELS}hunyuan_video_framepack:HunyuanVideoFramepackTransformer3DModel"
_IMAGE = f"{_MODELS}hunyuanimage:HunyuanImage"
FAMILIES = (
    _family(
        "HunyuanVideo",
        _VIDEO,
        model_spec(f"{_VIDEO}Transformer3DModel", *TWO_LISTS.blocks, plan=_plan),
        model_spec(_FRAMEPACK, *TWO_LISTS.blocks),
        *_blocks(_REPLACING, "freqs_cis", "token_replace_emb num_tokens", replaces=True),
    )._replace(int8_tiers=PRECISIONS),
    _family(
        "HunyuanVideo 1.5",
        _V15,
        model_spec(f"{_V15}Transformer3DModel", *ONE_LIST.blocks),
        layers=ONE_LIST,
        masks_text=True,
    )._replace(int8_tiers=PRECISIONS),
    _family(
        "HunyuanImage",
        _IMAGE,
        model_spec(f"{_IMAGE}Transformer2DModel", *TWO_LISTS.blocks),
        processor="AttnProcessor",
        is_prefix=False,
    ),
)
