"""LTX-2 and LTX-2.3: attention within a stream, between the streams and to the text, and the positions.

    q = rms_norm(to_q(x)), k = rms_norm(to_k(c)), both over all heads, then rotated;  v = to_v(c)
    result = to_out(attention(q, k, v) * 2 * sigmoid(to_gate_logits(x)))

with c = x in self-attention. Only LTX-2.3 has a gate, a value a head. The rotary embedding returns
coordinates instead of tables, as for LTX-Video.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...conditions import kernels_run_on, tracks_derivatives
from ...functional import CoordinateRope
from ..attention.modules import (
    AttentionSpec,
    attend,
    attention_weights,
    context_parallel_of,
    inputs_taken,
    norm_and_rotate,
    project_out,
    query_key_value,
)
from ..core.cache import cached
from ..core.patch import Call, PatchSpec, is_wrapped
from ..parallel.exchange import rank_and_size
from ..parts.linears import linear
from ..parts.rotary import CoordinateTables, part_of_tables

_LTX2 = "diffusers.models.transformers.transformer_ltx2"


def query_weights(block: Any, x: Tensor, name: str, *others: str) -> Any:
    """``attention_weights`` of the layers of ``block.name`` that compute the query, the gate if there is one,
    and those with the names ``others``."""
    has_gate = block._modules[name]._modules.get("to_gate_logits") is not None
    layers = ("to_q", *others, *(("to_gate_logits",) if has_gate else ()))
    return attention_weights(name, layers, block, x)


def cross_weights(block: Any, x: Tensor, query: str, key: str) -> Any:
    """``attention_weights`` of the attention ``block.query`` for its query, and of ``block.key`` for key and
    value."""
    of_query = query_weights(block, x, query)
    of_key = attention_weights(key, ("to_k", "to_v"), block, x)
    return {**of_query, **of_key} if of_query and of_key else None


def _attention_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    query_rotary_emb: Any = None,
    key_rotary_emb: Any = None,
    *,
    perturbation_mask: Tensor | None = None,
    all_perturbed: Any = None,
    **kwargs,
) -> Tensor:
    x, c, modules = hidden_states, encoder_hidden_states, self._modules
    spec: Any = call.stand_in.spec
    is_plain = perturbation_mask is all_perturbed is None
    if kwargs or not (is_plain or spec.is_other(self)):
        return NotImplemented
    if not inputs_taken(x, c):
        return call.refuse(x, c)
    if isinstance(all_perturbed, Tensor):
        # Its value on the GPU is not read: the mask selects the values then.
        all_perturbed = not all_perturbed.is_cuda and bool(all_perturbed)
    gate = None
    if modules.get("to_gate_logits") is not None:
        gate = 2.0 * torch.sigmoid(linear(modules["to_gate_logits"], x))
    if all_perturbed:
        out = linear(modules["to_v"], x if c is None else c)
    else:
        config = context_parallel_of(call, self) if perturbation_mask is None else None
        query, key, value = query_key_value(self, x, c, config=config)
        is_split = self.rope_type == "split"
        rotate = call.stand_in.functions[2 if is_split else 1].function
        ropes = (query_rotary_emb, key_rotary_emb)
        if config is not None:
            of_key = x if c is None else c
            ropes = _of_rank(call, config, x, ropes[0]), _of_rank(call, config, of_key, ropes[1])
        query, key = norm_and_rotate(
            *(call, self, query, key, ropes[0]),
            *(rotate, "across_heads", self.heads),
            layout="half" if is_split else "interleaved",
            key_rope=ropes[1],
            config=config,
        )

        def expand_mask(mask: Tensor) -> Tensor:
            mask = self.prepare_attention_mask(mask, key.shape[1], key.shape[0])
            return mask.view(key.shape[0], self.heads, -1, mask.shape[-1])

        options: dict[str, Any] = {"heads": self.heads, "dropout_p": 0.0, "is_causal": False}
        if perturbation_mask is None:
            options["gate"], gate = gate, None
        out = attend(call, self, query, key, value, attention_mask, expand_mask, **options)
        if perturbation_mask is not None:
            out = torch.lerp(value, out, perturbation_mask)
    if gate is not None:
        out = (out.unflatten(2, (self.heads, -1)) * gate.unsqueeze(-1)).flatten(2)
    return project_out(self, out)


def _of_rank(call: Call, config: Any, x: Tensor, rope: Any) -> Any:
    """The rotary embedding of this rank's tokens x. The plan of diffusers splits only the video's tables for
    self-attention, and only interleaved ones."""
    tensors = getattr(rope, "rope", None) or rope
    if rope is None or tensors[0].shape[-2] == x.shape[1]:
        return rope
    which, name = rank_and_size(config), ("rope of rank", x.shape[1], id(rope))
    return call.shared(name, rope, lambda rope: part_of_tables(rope, *which))


def _rope_forward(self: Any, call: Call, coords: Tensor, device: Any = None) -> Any:
    """Coordinates instead of tables; see ``ltx._rope_forward``."""
    coords = coords if device is None else coords.to(device)
    if coords.dtype == torch.float64 or tracks_derivatives() or is_wrapped(self):
        return NotImplemented
    if not kernels_run_on(coords):
        return call.refuse(coords)
    # The model's own operations in its own order, so that each angle has the same bits.
    axes = coords.shape[1]
    if coords.dim() == 4:
        start, end = coords.unbind(3)
        coords = (start + end) / 2.0
    bases = (self.base_num_frames, self.base_height, self.base_width)[:axes]
    points = torch.stack([coords[:, i] / base for i, base in enumerate(bases)], dim=-1)
    key = (self.theta, self.dim // (2 * axes), self.double_precision)
    (frequencies,) = cached(call, coords, key, lambda: _frequencies(*key, coords.device))
    rope = CoordinateRope((points * 2 - 1).float(), frequencies)
    heads = self.num_attention_heads if self.rope_type == "split" else None
    return CoordinateTables(rope, coords.shape[0], self.dim, heads)


def _frequencies(theta: float, count: int, is_double: bool, device: torch.device) -> tuple[Tensor]:
    dtype = torch.float64 if is_double else torch.float32
    exponents = torch.linspace(0.0, 1.0, count, dtype=dtype, device=device)
    return ((torch.pow(theta, exponents) * torch.pi / 2.0).to(torch.float32),)


ROPE = PatchSpec(
    f"{_LTX2}:LTX2AudioVideoRotaryPosEmbed", _rope_forward, "coordinates in place of tables"
)
ATTENTION = AttentionSpec(
    f"{_LTX2}:LTX2Attention",
    _attention_forward,
    "qk_norm_rope",
    processor=f"{_LTX2}:LTX2AudioVideoAttnProcessor",
    rotate="apply_interleaved_rotary_emb apply_split_rotary_emb",
    other_processor=f"{_LTX2}:LTX2PerturbedAttnProcessor",
    other_parameters="perturbation_mask all_perturbed",
)
