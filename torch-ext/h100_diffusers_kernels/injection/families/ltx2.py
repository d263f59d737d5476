"""LTX-2 and LTX-2.3: how their transformer maps to the operations.

A block has a video stream and an audio stream. Each is

    x = x + gate_msa * attn1(rms_norm(x) * (1 + scale_msa) + shift_msa)
    x = x + gate_text * attn2(rms_norm(x) * (1 + scale_text) + shift_text, text)
    n = rms_norm(x);  n_query, n_key = n * (1 + scale_i) + shift_i for two modulations
    x = x + gate_cross * cross_attn(n_query, n_key of the other stream)
    x = x + gate_mlp * ff(rms_norm(x) * (1 + scale_mlp) + shift_mlp)

with a GELU in ff. A modulation is a row of the block's table plus a time embedding. LTX-2.3 also modulates
the text; in LTX-2 the second line has neither modulation nor gate.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...conditions import kernels_take
from ..core.forward_state import COMPUTED_ONCE, Family, model_spec
from ..core.patch import Call
from ..parts.embeddings import TIMESTEPS
from ..parts.linears import LINEAR_GELU, feed_forward_branch, feed_forward_weights
from ..parts.norms import residual_norm
from ..parts.streams import BlockSpec, ResidualBranch, begin, finish, norm_prologue, table_rows
from .ltx2_attention import ATTENTION, ROPE, cross_weights, query_weights

_LTX2 = "diffusers.models.transformers.transformer_ltx2"


def _rows(call: Call, name: str, table: Tensor, *tembs: Tensor) -> list[Any]:
    """The rows of a table (N, D) plus embeddings, as ``table_rows``. The blocks share the embeddings, each
    (B, 1 or S, D times some rows), under ``name``."""
    dim = table.shape[1]
    rows: list[Any] = []
    for i, temb in enumerate(tembs):
        embedding = call.shared(f"{name} {i}", temb, lambda t: t.unflatten(2, (-1, dim)))
        rows += table_rows(table[len(rows) : len(rows) + embedding.shape[2]], embedding)
    return rows


def _prologue(
    call: Call, block: Any, ahead: Tensor | None, *tembs: Tensor, stream: str, i: int
) -> Any:
    """Rows are shift, scale and gate of self-attention, of the feed-forward, and in LTX-2.3 of attention to
    the text."""
    table = getattr(block, f"{stream}scale_shift_table")
    if ahead is not None and table.device != ahead.device:
        return None
    rows_of = partial(_rows, call, f"{stream}rows", table, tembs[i])

    def weights_for(block: Any, x: Tensor) -> Any:
        return query_weights(block, x, f"{stream}attn1", "to_k", "to_v")

    return norm_prologue(call, block, f"{stream}norm1", ahead, rows_of, weights_for=weights_for)


_VIDEO, _AUDIO = "", "audio_"
_PROLOGUES = (partial(_prologue, stream=_VIDEO, i=0), partial(_prologue, stream=_AUDIO, i=1))


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    audio_hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    audio_encoder_hidden_states: Tensor,
    temb: Tensor,
    temb_audio: Tensor,
    temb_ca_scale_shift: Tensor,
    temb_ca_audio_scale_shift: Tensor,
    temb_ca_gate: Tensor,
    temb_ca_audio_gate: Tensor,
    temb_prompt: Tensor | None = None,
    temb_prompt_audio: Tensor | None = None,
    video_rotary_emb: Any = None,
    audio_rotary_emb: Any = None,
    ca_video_rotary_emb: Any = None,
    ca_audio_rotary_emb: Any = None,
    encoder_attention_mask: Tensor | None = None,
    audio_encoder_attention_mask: Tensor | None = None,
    self_attention_mask: Tensor | None = None,
    audio_self_attention_mask: Tensor | None = None,
    a2v_cross_attention_mask: Tensor | None = None,
    v2a_cross_attention_mask: Tensor | None = None,
    use_a2v_cross_attention: bool = True,
    use_v2a_cross_attention: bool = True,
    perturbation_mask: Tensor | None = None,
    all_perturbed: Any = None,
) -> tuple[Tensor, Tensor]:
    x, audio, conditions = hidden_states, audio_hidden_states, (temb, temb_audio)
    if not kernels_take(x, audio, *conditions):
        return call.refuse(x, audio, *conditions)
    if use_a2v_cross_attention != use_v2a_cross_attention:
        return call.decline("only one of its streams attends to the other")
    modules = self._modules
    begun = begin(call, self, _PROLOGUES, (x, audio), conditions)
    ((n,), rows), ((audio_n,), audio_rows) = begun
    options: dict[str, Any] = {"encoder_hidden_states": None}
    if self.perturbed_attn:
        options.update(perturbation_mask=perturbation_mask, all_perturbed=all_perturbed)
    options.update(query_rotary_emb=video_rotary_emb, attention_mask=self_attention_mask)
    out = modules["attn1"](hidden_states=n, **options)
    options.update(query_rotary_emb=audio_rotary_emb, attention_mask=audio_self_attention_mask)
    audio_out = modules["audio_attn1"](hidden_states=audio_n, **options)

    x, out, gate = _attend_to_text(
        *(self, call, _VIDEO, self.video_cross_attn_adaln, x, out, rows),
        *(encoder_hidden_states, temb_prompt, encoder_attention_mask),
    )
    audio, audio_out, audio_gate = _attend_to_text(
        *(self, call, _AUDIO, self.audio_cross_attn_adaln, audio, audio_out, audio_rows),
        *(audio_encoder_hidden_states, temb_prompt_audio, audio_encoder_attention_mask),
    )

    if use_a2v_cross_attention:
        # Scale and shift of audio to video, scale and shift of video to audio, gate.
        table = self.video_a2v_cross_attn_scale_shift_table
        tembs = (temb_ca_scale_shift, temb_ca_gate)
        *modulation, next_gate = _rows(call, "video cross", table, *tembs)
        table = self.audio_a2v_cross_attn_scale_shift_table
        tembs = (temb_ca_audio_scale_shift, temb_ca_audio_gate)
        *audio_modulation, audio_next_gate = _rows(call, "audio cross", table, *tembs)
        names = ("audio_to_video_attn", "video_to_audio_attn")
        weights = cross_weights(self, x, *names)
        branch = (x, out, gate, *modulation)
        x, query, key = residual_norm(call, self, "audio_to_video_norm", *branch, weights=weights)
        weights = cross_weights(self, audio, *names[::-1])
        branch = (audio, audio_out, audio_gate, *audio_modulation)
        audio, audio_key, audio_query = residual_norm(
            call, self, "video_to_audio_norm", *branch, weights=weights
        )
        gate, audio_gate = next_gate, audio_next_gate
        out = modules["audio_to_video_attn"](
            query,
            encoder_hidden_states=audio_key,
            query_rotary_emb=ca_video_rotary_emb,
            key_rotary_emb=ca_audio_rotary_emb,
            attention_mask=a2v_cross_attention_mask,
        )
        audio_out = modules["video_to_audio_attn"](
            audio_query,
            encoder_hidden_states=key,
            query_rotary_emb=ca_audio_rotary_emb,
            key_rotary_emb=ca_video_rotary_emb,
            attention_mask=v2a_cross_attention_mask,
        )

    branches = (
        _feed_forward(self, call, _VIDEO, x, out, gate, rows),
        _feed_forward(self, call, _AUDIO, audio, audio_out, audio_gate, audio_rows),
    )
    x, audio = finish(call, self, _PROLOGUES, branches, conditions)
    return x, audio


def _feed_forward(
    block: Any, call: Call, stream: str, x: Tensor, out: Tensor, gate: Any, rows: Any
) -> ResidualBranch:
    """From the last attention's result ``out`` to the end of the stream."""
    module = block._modules[f"{stream}ff"]
    how: dict[str, Any] = {"weights": feed_forward_weights(module, x)}
    x, n = residual_norm(call, block, f"{stream}norm3", x, out, gate, rows[4], rows[3], **how)
    return ResidualBranch(x, feed_forward_branch(module, n), rows[5])


def _attend_to_text(
    block: Any,
    call: Call,
    stream: str,
    is_modulated: bool,
    x: Tensor,
    out: Tensor,
    rows: Any,
    c: Tensor,
    temb_prompt: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Any]:
    """From the self-attention's result ``out`` to that of attention to the text: the stream, the result and
    its gate."""
    shift, scale, gate = rows[6:9] if is_modulated else (None, None, None)
    modulation = (scale, shift) if is_modulated else ()
    how: dict[str, Any] = {"weights": query_weights(block, x, f"{stream}attn2")}
    x, n = residual_norm(call, block, f"{stream}norm2", x, out, rows[2], *modulation, **how)
    if block.cross_attn_adaln:
        table = getattr(block, f"{stream}prompt_scale_shift_table").to(c.device)
        if temb_prompt is None:
            text_shift, text_scale = table.to(c.dtype)
        else:
            embedding = temb_prompt.unflatten(2, (2, -1))
            text_shift, text_scale = (table + embedding).unbind(2)
        c = torch.addcmul(text_shift, c, 1 + text_scale)
    options = {"query_rotary_emb": None, "attention_mask": mask}
    out = block._modules[f"{stream}attn2"](n, encoder_hidden_states=c, **options)
    return x, out, gate


_SPECS = (
    model_spec(f"{_LTX2}:LTX2VideoTransformer3DModel", "transformer_blocks"),
    ROPE,
    BlockSpec(
        f"{_LTX2}:LTX2VideoTransformerBlock",
        _block_forward,
        "rms_norm_modulate, gated_residual_rms_norm_modulate, gated_residual",
        norms=tuple(f"{stream}norm{i}" for stream in (_VIDEO, _AUDIO) for i in (1, 2, 3))
        + ("audio_to_video_norm", "video_to_audio_norm"),
        inner=tuple(
            f"{stream}{part}"
            for stream in (_VIDEO, _AUDIO)
            for part in ("attn1", "attn2", "ff.net.0")
        )
        + ("audio_to_video_attn", "video_to_audio_attn"),
    ),
    ATTENTION,
    TIMESTEPS,
    LINEAR_GELU,
)
_ONCE = (
    *("proj_in", "audio_proj_in", "time_embed", "audio_time_embed", "norm_out", "audio_norm_out"),
    *("prompt_adaln", "audio_prompt_adaln", "caption_projection", "audio_caption_projection"),
    *("av_cross_attn_video_scale_shift", "av_cross_attn_audio_scale_shift"),
    *("av_cross_attn_video_a2v_gate", "av_cross_attn_audio_v2a_gate", "proj_out", "audio_proj_out"),
)
FAMILIES = (Family("LTX-2", _SPECS, dict.fromkeys(_ONCE, COMPUTED_ONCE)),)
