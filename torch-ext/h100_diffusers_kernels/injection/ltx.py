"""LTX-Video: how its transformer maps to the operations.

A block is

    x = x + gate_msa * attn1(rms_norm(x) * (1 + scale_msa) + shift_msa)
    x = x + attn2(x, text)
    x = x + gate_mlp * ff(rms_norm(x) * (1 + scale_mlp) + shift_mlp)

with an RMS norm of query and key over all heads, a rotary embedding of both in attn1, and a GELU in
ff. The last line of a block and the first norm of the next are one pass over memory. Four things are
replaced, each of them on its own: the block's forward, the processors of its attentions (attention
itself only where no backend is chosen in diffusers), the forward of ``ff.net[0]``, and the rotary
embedding, which hands the blocks each token's coordinates in place of cosine and sine tables of the
size of the hidden states. Linear layers are called as the modules they are.
"""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional
from ..arguments import ATTENTION_HEAD_DIMS
from ..functional import CoordinateRope
from .conditions import (
    as_key_bias,
    attention_takes,
    class_name,
    has_known_method,
    is_plain,
    kernels_run_on,
    kernels_take,
)
from .feed_forward import plan_activation
from .forward_slot import find_forward_slot, is_wrapped, runs_class_forward
from .replacement import AddedAttribute, Plan

_UNKNOWN_FORWARD = "its forward is not the one known from diffusers"


def plan(model: nn.Module, attention: bool) -> Plan:
    """What to replace in an ``LTXVideoTransformer3DModel``, what not, and why not.

    ``attention``: whether attention itself is to be replaced, with what is around it.
    """
    result = Plan()
    if getattr(model, "_parallel_config", None) is not None:
        result.leave("", model, "parallelism is on: each rank holds a part of the tokens only")
        return result
    ltx = sys.modules["diffusers.models.transformers.transformer_ltx"]
    takes_coordinates = True
    blocks = {}
    for name, module in model.named_modules():
        if isinstance(module, ltx.LTXVideoTransformerBlock):
            takes_coordinates &= _plan_block(result, name, module, ltx, attention)
            blocks[name] = module
    replaced = {entry.name for entry in result.report.replaced}
    for (name, block), (next_name, next_block) in zip(blocks.items(), list(blocks.items())[1:]):
        if name in replaced and next_name in replaced:
            # In a tuple, so that the block does not take its successor for a submodule of its own.
            result.replacements.append(AddedAttribute(block, _NEXT_BLOCK, (next_block,)))
    _plan_rope(result, model, ltx, takes_coordinates)
    for name in ("proj_in", "time_embed", "caption_projection", "proj_out"):
        if hasattr(model, name):
            result.leave(name, getattr(model, name), "matrix products, called as they are")
    if hasattr(model, "norm_out"):
        result.leave("norm_out", model.norm_out, "its modulation is part of the model's forward")
    return result


# --------------------------------------------------------------------------------------------------
# The block


def _plan_block(plan: Plan, name: str, block: nn.Module, ltx: Any, attention: bool) -> bool:
    """Whether the block as a whole takes a rotary embedding given by coordinates."""
    parameters = (
        "self hidden_states encoder_hidden_states temb image_rotary_emb encoder_attention_mask"
    )
    known = ltx.LTXVideoTransformerBlock
    if not has_known_method(type(block), known, "forward", parameters):
        return plan.leave(name, block, _UNKNOWN_FORWARD)
    takes_coordinates = _plan_attention(plan, f"{name}.attn1", block.attn1, ltx, attention)
    _plan_attention(plan, f"{name}.attn2", block.attn2, ltx, attention)
    plan_activation(plan, f"{name}.ff.net.0", block.ff.net[0])
    for norm_name in ("norm1", "norm2"):
        norm = getattr(block, norm_name)
        if type(norm) is not ltx.RMSNorm:
            reason = f"{norm_name} is a {class_name(norm)}, not diffusers' RMSNorm"
        elif norm.bias is not None:
            reason = f"{norm_name} has a bias"
        elif not runs_class_forward(norm):
            reason = f"{norm_name} has hooks or another forward than its class's"
        else:
            continue
        return plan.leave(name, block, reason)
    operations = "rms_norm_modulate, gated_residual, gated_residual_rms_norm_modulate"
    return plan.replace_forward(name, block, block_forward, operations) and takes_coordinates


def block_forward(
    self: nn.Module,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    encoder_attention_mask: Tensor | None = None,
) -> Tensor:
    """``LTXVideoTransformerBlock.forward``."""
    if not isinstance(self.attn1.processor, LTXVideoKernelAttnProcessor):
        image_rotary_emb = _as_tables(image_rotary_emb, hidden_states)
    if not _is_fusable(self, hidden_states, temb):
        return type(self).forward(
            self,
            hidden_states,
            encoder_hidden_states,
            temb,
            image_rotary_emb,
            encoder_attention_mask,
        )

    modulation, normalized = _take_beginning(self, hidden_states, temb) or (None, None)
    if normalized is None:
        modulation = _modulation(self, temb)
        shift, scale = modulation[:2]
        normalized = functional.rms_norm_modulate(
            hidden_states, scale, shift, self.norm1.weight, self.norm1.eps
        )
    _, _, gate_msa, shift_mlp, scale_mlp, gate_mlp = modulation

    attention_out = self.attn1(
        hidden_states=normalized, encoder_hidden_states=None, image_rotary_emb=image_rotary_emb
    )
    hidden_states = _gated_residual(hidden_states, attention_out, gate_msa)

    attention_out = self.attn2(
        hidden_states,
        encoder_hidden_states=encoder_hidden_states,
        image_rotary_emb=None,
        attention_mask=encoder_attention_mask,
    )
    norm2 = self.norm2
    if _is_residual(hidden_states, attention_out, scale_mlp):
        hidden_states, normalized = functional.gated_residual_rms_norm_modulate(
            hidden_states, attention_out, None, scale_mlp, shift_mlp, norm2.weight, norm2.eps
        )
    else:
        hidden_states = hidden_states + attention_out
        normalized = norm2(hidden_states) * (1 + scale_mlp) + shift_mlp
    return _end(self, hidden_states, self.ff(normalized), gate_mlp, temb)


def _is_fusable(block: nn.Module, hidden_states: Tensor, temb: Tensor) -> bool:
    """Whether the kernels can stand in for the norms and the modulation of a block."""
    norm1, norm2, table = block.norm1, block.norm2, block.scale_shift_table
    return (
        runs_class_forward(norm1)
        and runs_class_forward(norm2)
        and is_plain(norm1.weight)
        and is_plain(norm2.weight)
        and is_plain(table)
        and table.dtype == temb.dtype
        and kernels_take(hidden_states, temb, norm1.weight, norm2.weight)
    )


def _modulation(block: nn.Module, temb: Tensor) -> tuple[Tensor, ...]:
    """Shift, scale and gate of self-attention, then of the feed-forward, each (B, 1 or S, D)."""
    table = block.scale_shift_table
    modulation = table[None, None].to(temb.device) + temb.reshape(
        temb.size(0), temb.size(1), table.shape[0], -1
    )
    return modulation.unbind(dim=2)


def _gated_residual(residual: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    if _is_residual(residual, x, gate):
        return functional.gated_residual(residual, x, gate)
    return residual + x * gate


def _is_residual(residual: Tensor, x: Tensor, modulation: Tensor) -> bool:
    """False where a layer gives another dtype or shape than the one it was given."""
    return x.shape == residual.shape and kernels_take(residual, x, modulation)


# --------------------------------------------------------------------------------------------------
# From one block to the next
#
# A block ends with a residual and the next one begins with a norm of it. The block that ends computes
# both in one pass and leaves the beginning of the next as an attribute of the tensor that it returns:
# whatever happens to that tensor in between (a hook replaces or changes it, a cache skips the next
# block), the next block takes the beginning only if it was made for it and from the very values that
# it is given, and else computes it by itself.

_NEXT_BLOCK = "_h100_diffusers_kernels_next_block"
_BEGINNING = "_h100_diffusers_kernels_beginning"


class _Beginning(NamedTuple):
    """What a block begins with, and what it was made from."""

    block: nn.Module
    versions: tuple[int, int]  # of the hidden states and of temb: they count changes in place
    temb: Tensor
    modulation: tuple[Tensor, ...]
    normalized: Tensor


def _end(block: nn.Module, residual: Tensor, x: Tensor, gate: Tensor, temb: Tensor) -> Tensor:
    """The block's result, ``residual + gate * x``, with the beginning of the next block."""
    if torch.compiler.is_compiling():  # where all blocks are to share one graph
        return _gated_residual(residual, x, gate)
    (next_block,) = vars(block).get(_NEXT_BLOCK, (None,))
    if (
        next_block is None
        or torch.is_grad_enabled()
        # Tensors made in inference mode have no version to tell a change by.
        or torch.is_inference_mode_enabled()
        or temb.is_inference()
        or next_block.scale_shift_table.device != temb.device  # offloaded until its turn
        or not _is_residual(residual, x, gate)
        or not _is_fusable(next_block, residual, temb)
    ):
        return _gated_residual(residual, x, gate)
    modulation = _modulation(next_block, temb)
    shift, scale = modulation[:2]
    norm = next_block.norm1
    hidden_states, normalized = functional.gated_residual_rms_norm_modulate(
        residual, x, gate, scale, shift, norm.weight, norm.eps
    )
    versions = (hidden_states._version, temb._version)
    beginning = _Beginning(next_block, versions, temb, modulation, normalized)
    setattr(hidden_states, _BEGINNING, beginning)
    return hidden_states


def _take_beginning(block: nn.Module, hidden_states: Tensor, temb: Tensor) -> Any:
    """(modulation, normalized), if the block before has left them for this call; else None."""
    if torch.compiler.is_compiling():
        return None
    beginning = vars(hidden_states).pop(_BEGINNING, None)
    if (
        beginning is None
        or beginning.block is not block
        or beginning.temb is not temb
        or beginning.versions != (hidden_states._version, temb._version)
    ):
        return None
    return beginning.modulation, beginning.normalized


# --------------------------------------------------------------------------------------------------
# Attention


def _plan_attention(
    plan: Plan, name: str, attention: nn.Module, ltx: Any, replaces_attention: bool
) -> bool:
    parameters = "hidden_states encoder_hidden_states attention_mask image_rotary_emb"
    known = getattr(ltx, "LTXAttention", None)
    if known is None or not has_known_method(
        type(attention), known, "forward", f"self {parameters} kwargs"
    ):
        return plan.leave(name, attention, _UNKNOWN_FORWARD)
    processor = attention.processor
    if not has_known_method(
        type(processor), ltx.LTXVideoAttnProcessor, "__call__", f"self attn {parameters}"
    ):
        return plan.leave(
            name, attention, f"its processor is a {class_name(processor)}, not LTX-Video's own"
        )
    for norm_name in ("norm_q", "norm_k"):
        norm = getattr(attention, norm_name)
        if type(norm) is not nn.RMSNorm:
            reason = f"{norm_name} is a {class_name(norm)}, not torch.nn.RMSNorm"
            return plan.leave(name, attention, reason)
    dispatch = sys.modules["diffusers.models.attention_dispatch"]
    registry = getattr(dispatch, "_AttentionBackendRegistry", None)
    get_active_backend = getattr(registry, "get_active_backend", None)
    operations = "qk_norm_rope" if name.endswith("attn1") else "rms_norm"
    reason = None
    if not replaces_attention:
        reason = "asked for by attention=False"
    elif attention.head_dim not in ATTENTION_HEAD_DIMS:
        known = " and ".join(map(str, ATTENTION_HEAD_DIMS))
        reason = f"its heads have {attention.head_dim} elements, and the kernel's {known}"
    elif get_active_backend is None:
        reason = "this diffusers does not tell which attention backend is chosen"
    if reason is None:
        operations += ", attention"
    else:
        plan.leave(name, attention, f"attention itself is the model's own: {reason}")
    return plan.replace_processor(
        name,
        attention,
        LTXVideoKernelAttnProcessor(
            processor,
            dispatch.dispatch_attention_fn,
            get_active_backend,
            ltx.apply_rotary_emb,
            reason is None,
        ),
        f"processor with {operations}",
    )


class LTXVideoKernelAttnProcessor:
    """``LTXVideoAttnProcessor`` with norm and rotary embedding in one pass over query and key, and
    with the package's attention where no other is chosen.

    Args:
        original: the processor that it stands for, which keeps the attention backend and the
            parallel configuration.
        dispatch_attention: diffusers' ``dispatch_attention_fn``.
        get_active_backend: what tells the backend where the processor names none; None if unknown.
        apply_rotary_emb: the model's own rotary embedding, for what the kernels do not take.
        has_attention: whether the package's attention may be used.
    """

    def __init__(
        self,
        original: Any,
        dispatch_attention: Any,
        get_active_backend: Any,
        apply_rotary_emb: Any,
        has_attention: bool,
    ) -> None:
        self.original = original
        self._dispatch_attention = dispatch_attention
        self._get_active_backend = get_active_backend
        self._apply_rotary_emb = apply_rotary_emb
        self._has_attention = has_attention

    @property
    def _attention_backend(self) -> Any:
        return self.original._attention_backend

    @_attention_backend.setter
    def _attention_backend(self, backend: Any) -> None:
        self.original._attention_backend = backend

    @property
    def _parallel_config(self) -> Any:
        return self.original._parallel_config

    @_parallel_config.setter
    def _parallel_config(self, config: Any) -> None:
        self.original._parallel_config = config

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Tensor:
        if encoder_hidden_states is None:
            encoder_hidden_states = hidden_states
        query = attn.to_q(hidden_states)
        key = attn.to_k(encoder_hidden_states)
        value = attn.to_v(encoder_hidden_states)
        query, key = self._norm_and_rope(attn, query, key, image_rotary_emb)

        query = query.unflatten(2, (attn.heads, -1))
        key = key.unflatten(2, (attn.heads, -1))
        value = value.unflatten(2, (attn.heads, -1))
        hidden_states = self._attention(attn, query, key, value, attention_mask)
        hidden_states = hidden_states.flatten(2, 3).to(query.dtype)
        return attn.to_out[1](attn.to_out[0](hidden_states))

    def _attention(
        self, attn: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        """(B, S, H, d), of query, key and value of that form and the mask given to the processor."""
        if self._is_replaceable() and attention_takes(query, key, value):
            key_bias = None if mask is None else as_key_bias(mask, key)
            if mask is None or key_bias is not None:
                return functional.attention(query, key, value, key_bias=key_bias)
        return self._dispatch_attention(
            query,
            key,
            value,
            attn_mask=None if mask is None else self._attention_bias(attn, mask, key),
            dropout_p=0.0,
            is_causal=False,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )

    def _is_replaceable(self) -> bool:
        """Whether no backend was chosen for this module, and none but PyTorch's own for all."""
        return (
            self._has_attention
            and self._attention_backend is None
            and self._parallel_config is None
            and self._is_native()
        )

    def _attention_bias(self, attn: nn.Module, mask: Tensor, key: Tensor) -> Tensor:
        """The bias (B, 1 or Q, K) as (B, 1 or heads, 1 or Q, K)."""
        batch, length = key.shape[:2]
        if (
            mask.dim() == 3
            and mask.shape[0] == batch
            and mask.shape[2] == length
            and self._parallel_config is None
            and self._is_native()
        ):
            return mask.unsqueeze(1)
        mask = attn.prepare_attention_mask(mask, length, batch)
        return mask.view(batch, attn.heads, -1, mask.shape[-1])

    def _is_native(self) -> bool:
        """Whether diffusers' backend is PyTorch's own, which broadcasts a bias over the heads itself."""
        backend = self._attention_backend
        if backend is None and self._get_active_backend is not None:
            backend, _ = self._get_active_backend()
        return backend is not None and backend == "native"

    def _norm_and_rope(
        self, attn: nn.Module, query: Tensor, key: Tensor, rope: Any
    ) -> tuple[Tensor, Tensor]:
        norm_q, norm_k = attn.norm_q, attn.norm_k
        if (
            rope is not None
            and _has_kernel(norm_q, query)
            and _has_kernel(norm_k, key)
            and norm_q.eps == norm_k.eps
            and _can_rotate(query, key, rope, attn.heads)
        ):
            return functional.qk_norm_rope(
                query,
                key,
                norm_q.weight,
                norm_k.weight,
                rope,
                heads=attn.heads,
                norm="across_heads",
                layout="interleaved",
                eps=norm_q.eps,
            )
        query, key = _norm(norm_q, query), _norm(norm_k, key)
        if rope is None:
            return query, key
        if _can_rotate(query, key, rope, attn.heads):
            return functional.qk_norm_rope(query, key, rope=rope, heads=attn.heads, norm="none")
        rope = _as_tables(rope, query)
        return self._apply_rotary_emb(query, rope), self._apply_rotary_emb(key, rope)


def _norm(norm: nn.Module, x: Tensor) -> Tensor:
    return functional.rms_norm(x, norm.weight, norm.eps) if _has_kernel(norm, x) else norm(x)


def _has_kernel(norm: nn.Module, x: Tensor) -> bool:
    """Offloading puts hooks on a norm, an adapter something in its place: it is called then."""
    return (
        type(norm) is nn.RMSNorm
        and norm.eps is not None
        and runs_class_forward(norm)
        and is_plain(norm.weight)
        and kernels_take(x, norm.weight)
    )


def _can_rotate(query: Tensor, key: Tensor, rope: Any, heads: int) -> bool:
    if query.shape != key.shape or query.shape[2] % (2 * heads) or not kernels_take(query, key):
        return False
    if isinstance(rope, CoordinateRope):
        return rope.coordinates.device == query.device
    cos, sin = rope
    return (
        cos.dtype in (torch.float32, query.dtype)
        and cos.device == query.device
        and kernels_take(cos, sin)
        and cos.shape == sin.shape
        and cos.dim() == 3
        and cos.shape[0] in (1, query.shape[0])
        and cos.shape[1:] == query.shape[1:]
    )


# --------------------------------------------------------------------------------------------------
# Rotary embedding


def _plan_rope(plan: Plan, model: nn.Module, ltx: Any, takes_coordinates: bool) -> None:
    parameters = "self hidden_states num_frames height width rope_interpolation_scale video_coords"
    if not has_known_method(type(model), ltx.LTXVideoTransformer3DModel, "forward") or (
        find_forward_slot(model, type(model).forward) is None
    ):
        plan.leave("rope", model.rope, "the model's forward is not the one known from diffusers")
    elif not has_known_method(type(model.rope), ltx.LTXVideoRotaryPosEmbed, "forward", parameters):
        plan.leave("rope", model.rope, _UNKNOWN_FORWARD)
    elif not takes_coordinates:
        plan.leave("rope", model.rope, "its tables are read by a block that was left alone")
    else:
        plan.replace_forward("rope", model.rope, rope_forward, "coordinates in place of tables")
        plan.replacements.append(AddedAttribute(model.rope, _LAST_GRID, None))


def rope_forward(
    self: nn.Module,
    hidden_states: Tensor,
    num_frames: int | None = None,
    height: int | None = None,
    width: int | None = None,
    rope_interpolation_scale: Any = None,
    video_coords: Tensor | None = None,
) -> Any:
    """``LTXVideoRotaryPosEmbed.forward`` up to the point where it needs the memory of a table.

    It goes on to the tables where the kernels will not run, and where others than the blocks work
    with them: hooks on the module (context parallelism shards the tables by one), and autograd, for
    which each block would have to keep tables of its own.
    """
    if (
        torch.is_grad_enabled()
        or not kernels_run_on(hidden_states)
        or is_wrapped(self, rope_forward)
        or (video_coords is not None and video_coords.dtype == torch.float64)
    ):
        return type(self).forward(
            self,
            hidden_states,
            num_frames,
            height,
            width,
            rope_interpolation_scale,
            video_coords,
        )
    shape = (num_frames, height, width, rope_interpolation_scale)
    if (
        video_coords is not None
        or torch.compiler.is_compiling()
        or _holds_tensor(rope_interpolation_scale)
        # What is made while a CUDA graph is captured has no values until the graph is replayed.
        or (hidden_states.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        return _coordinate_rope(self, hidden_states, shape, video_coords)
    # A denoising loop asks for the same grid at each step.
    key = _grid_key(self, hidden_states, shape)
    last = vars(self).get(_LAST_GRID)
    if last is None or last.key != key:
        last = _Grid(key, _coordinate_rope(self, hidden_states, shape, None))
        setattr(self, _LAST_GRID, last)
    return last.rope


_LAST_GRID = "_h100_diffusers_kernels_last_grid"


def _holds_tensor(scales: Any) -> bool:
    if scales is None or isinstance(scales, Tensor):
        return scales is not None
    return any(isinstance(scale, Tensor) for scale in scales)


class _Grid(NamedTuple):
    key: tuple
    rope: CoordinateRope


def _grid_key(rope: nn.Module, hidden_states: Tensor, shape: tuple) -> tuple:
    """All that the coordinates of a grid depend on, and the stream that they are made on."""
    device = hidden_states.device
    stream = torch.cuda.current_stream(device).cuda_stream if hidden_states.is_cuda else None
    bases = (rope.base_num_frames, rope.base_height, rope.base_width, rope.patch_size)
    *grid, scales = shape
    scales = None if scales is None else tuple(scales)
    return (device, stream, *grid, scales, *bases, rope.patch_size_t, rope.theta, rope.dim)


def _coordinate_rope(
    self: nn.Module, hidden_states: Tensor, shape: tuple, video_coords: Tensor | None
) -> CoordinateRope:
    """The model's own operations in its own order, so that each angle has the same bits."""
    num_frames, height, width, rope_interpolation_scale = shape
    if video_coords is None:
        grid = self._prepare_video_coords(
            hidden_states.size(0) if _differs_by_sample(rope_interpolation_scale) else 1,
            num_frames,
            height,
            width,
            rope_interpolation_scale=rope_interpolation_scale,
            device=hidden_states.device,
        )
    else:
        bases = (self.base_num_frames, self.base_height, self.base_width)
        grid = torch.stack([video_coords[:, i] / base for i, base in enumerate(bases)], dim=-1)
    frequencies = self.theta ** torch.linspace(
        math.log(1.0, self.theta),
        math.log(self.theta, self.theta),
        self.dim // 6,
        device=hidden_states.device,
        dtype=torch.float32,
    )
    frequencies = frequencies * math.pi / 2.0
    return CoordinateRope((grid * 2 - 1).float().contiguous(), frequencies)


def _differs_by_sample(rope_interpolation_scale: Any) -> bool:
    """Otherwise one grid serves the whole batch."""
    return rope_interpolation_scale is not None and any(
        isinstance(scale, Tensor) and scale.numel() != 1 for scale in rope_interpolation_scale
    )


def _as_tables(rope: Any, x: Tensor) -> Any:
    """A rotary embedding given by coordinates as the model's own: (cos, sin), each of x's shape."""
    if not isinstance(rope, CoordinateRope):
        return rope
    if rope.coordinates.dtype != torch.float32:
        raise RuntimeError(
            "LTX-Video: the rotary embedding's coordinates must stay float32 on their way to the "
            f"blocks, got {str(rope.coordinates.dtype).replace('torch.', '')}"
        )
    return tuple(table.expand(x.shape[0], -1, -1) for table in rope.tables(x.shape[-1]))
