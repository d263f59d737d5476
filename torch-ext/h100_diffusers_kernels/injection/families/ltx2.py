"""LTX-2 and LTX-2.3: how their transformer maps to the operations.

A block has a video stream and an audio stream. Each is

    x = x + gate_msa * attn1(rms_norm(x) * (1 + scale_msa) + shift_msa)
    x = x + gate_text * attn2(rms_norm(x) * (1 + scale_text) + shift_text, text)
    n = rms_norm(x);  n_query, n_key = n * (1 + scale_i) + shift_i for two modulations
    x = x + gate_cross * cross_attn(n_query, n_key of the other stream)
    x = x + gate_mlp * ff(rms_norm(x) * (1 + scale_mlp) + shift_mlp)

with a GELU in ff. A modulation is a row of the block's table plus a time embedding. LTX-2.3 also modulates
the text; in LTX-2 the second line has neither modulation nor gate. An attention is

    q = rms_norm(to_q(x)), k = rms_norm(to_k(c)), both over all heads, then rotated;  v = to_v(c)
    result = to_out(attention(q, k, v) * 2 * sigmoid(to_gate_logits(x)))

with c = x in self-attention. Only LTX-2.3 has a gate, a value a head. The rotary embedding returns
coordinates instead of tables, as for LTX-Video.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...operations import CoordinateRope
from ...operations.conditions import kernels_run_on, tracks_derivatives, why_not_taken
from ..attention import modules as attention
from ..core.cache import cached
from ..core.forward_state import Family, model_spec
from ..core.patch import Call, PatchSpec, is_wrapped
from ..parallel.exchange import rank_and_size
from ..parts import linears
from ..parts.embeddings import TIMESTEPS
from ..parts.rotary import CoordinateTables, part_of_tables
from ..parts.streams import BlockSpec, end, plain_norm, start, table_rows
from ..quantized.precision import ONE_LIST, PRECISIONS

_LTX2 = "diffusers.models.transformers.transformer_ltx2"


def query_readers(name: str, block: Any, x: Tensor, others: tuple[str, ...] = ()) -> Any:
    """``streams.Readers`` of ``block.name``: its layers of the query, of the gate if there is one, and those
    with the names ``others``."""
    has_gate = block._modules[name]._modules.get("to_gate_logits") is not None
    layers = ("to_q", *others, *(("to_gate_logits",) if has_gate else ()))
    return linears.fp8_readers(name, layers, block, x)


def _cross_readers(query: str, key: str, block: Any, x: Tensor) -> Any:
    """``streams.Readers`` of ``block.query`` for its query, and of ``block.key`` for key and value."""
    of_query = query_readers(query, block, x)
    of_key = None if of_query is None else linears.fp8_readers(key, ("to_k", "to_v"), block, x)
    return {**of_query, **of_key} if of_query and of_key else None


def _rows(call: Call, name: str, table: Tensor, *tembs: Tensor) -> list[Any]:
    """The rows of a table (N, D) plus embeddings, as ``table_rows``. The blocks share the embeddings, each
    (B, 1 or S, D times some rows), under ``name``."""
    dim = table.shape[1]
    rows: list[Any] = []
    for i, temb in enumerate(tembs):
        embedding = call.shared(f"{name} {i}", temb, lambda t: t.unflatten(2, (-1, dim)))
        rows += table_rows(table[len(rows) : len(rows) + embedding.shape[2]], embedding)
    return rows


def _first_norm(
    call: Call, block: Any, previous_x: Tensor | None, *tembs: Tensor, stream: str, i: int
) -> Any:
    """Rows are shift, scale and gate of self-attention, of the feed-forward, and in LTX-2.3 of attention to
    the text."""
    table = getattr(block, f"{stream}scale_shift_table")
    if previous_x is not None and table.device != previous_x.device:
        return None
    rows_of = partial(_rows, call, f"{stream}rows", table, tembs[i])
    readers = partial(query_readers, f"{stream}attn1", others=("to_k", "to_v"))
    options: Any = {"name": f"{stream}norm1", "rows_of": rows_of, "readers": readers}
    return plain_norm(call, block, previous_x, **options)


# How the names of a stream's parts begin.
_VIDEO, _AUDIO = "", "audio_"
FIRST_NORMS = (partial(_first_norm, stream=_VIDEO, i=0), partial(_first_norm, stream=_AUDIO, i=1))


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
    if not call.takes(x, audio, *conditions):
        return NotImplemented
    if use_a2v_cross_attention != use_v2a_cross_attention:
        return call.decline("only one of its streams attends to the other")
    modules = self._modules
    video, sound = start(call, self, FIRST_NORMS, (x, audio), conditions)
    options: dict[str, Any] = {"encoder_hidden_states": None}
    if self.perturbed_attn:
        options.update(perturbation_mask=perturbation_mask, all_perturbed=all_perturbed)
    options.update(query_rotary_emb=video_rotary_emb, attention_mask=self_attention_mask)
    video.add(modules["attn1"](hidden_states=video.n, **options), video.rows[2])
    options.update(query_rotary_emb=audio_rotary_emb, attention_mask=audio_self_attention_mask)
    sound.add(modules["audio_attn1"](hidden_states=sound.n, **options), sound.rows[2])

    text = (encoder_hidden_states, temb_prompt, encoder_attention_mask)
    _attend_to_text(self, _VIDEO, self.video_cross_attn_adaln, video, *text)
    text = (audio_encoder_hidden_states, temb_prompt_audio, audio_encoder_attention_mask)
    _attend_to_text(self, _AUDIO, self.audio_cross_attn_adaln, sound, *text)

    if use_a2v_cross_attention:
        # Scale and shift of audio to video, scale and shift of video to audio, gate.
        table = self.video_a2v_cross_attn_scale_shift_table
        tembs = (temb_ca_scale_shift, temb_ca_gate)
        *rows, gate = _rows(call, "video cross", table, *tembs)
        table = self.audio_a2v_cross_attn_scale_shift_table
        tembs = (temb_ca_audio_scale_shift, temb_ca_audio_gate)
        *audio_rows, audio_gate = _rows(call, "audio cross", table, *tembs)
        a2v, v2a = "audio_to_video_attn", "video_to_audio_attn"
        readers = partial(_cross_readers, a2v, v2a)
        query, key = video.norm("audio_to_video_norm", *rows, readers=readers)
        readers = partial(_cross_readers, v2a, a2v)
        audio_key, audio_query = sound.norm("video_to_audio_norm", *audio_rows, readers=readers)
        ropes = {"query_rotary_emb": ca_video_rotary_emb, "key_rotary_emb": ca_audio_rotary_emb}
        options = {"encoder_hidden_states": audio_key, "attention_mask": a2v_cross_attention_mask}
        video.add(modules[a2v](query, **options, **ropes), gate)
        ropes = {"query_rotary_emb": ca_audio_rotary_emb, "key_rotary_emb": ca_video_rotary_emb}
        options = {"encoder_hidden_states": key, "attention_mask": v2a_cross_attention_mask}
        sound.add(modules[v2a](audio_query, **options, **ropes), audio_gate)

    for stream, name in ((video, _VIDEO), (sound, _AUDIO)):
        shift, scale, gate = stream.rows[3:6]
        readers = partial(linears.feed_forward_reader, f"{name}ff")
        n = stream.norm(f"{name}norm3", scale, shift, readers=readers)
        stream.add(linears.feed_forward_branch(modules[f"{name}ff"], n), gate)
    return end(video, sound)


def _attend_to_text(block, name, is_modulated, stream, c, temb_prompt, mask) -> None:
    """Adds attention to the text."""
    shift, scale, gate = stream.rows[6:9] if is_modulated else (None, None, None)
    modulation = (scale, shift) if is_modulated else ()
    n = stream.norm(f"{name}norm2", *modulation, readers=partial(query_readers, f"{name}attn2"))
    if block.cross_attn_adaln:
        table = getattr(block, f"{name}prompt_scale_shift_table").to(c.device)
        if temb_prompt is None:
            text_shift, text_scale = table.to(c.dtype)
        else:
            embedding = temb_prompt.unflatten(2, (2, -1))
            text_shift, text_scale = (table + embedding).unbind(2)
        c = torch.addcmul(text_shift, c, 1 + text_scale)
    options = {"query_rotary_emb": None, "attention_mask": mask}
    stream.add(block._modules[f"{name}attn2"](n, encoder_hidden_states=c, **options), gate)


def attention_forward(
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
    is_perturbed = perturbation_mask is not None or all_perturbed is not None
    if kwargs or (is_perturbed and not spec.is_other(self)):
        return NotImplemented
    if not call.takes(x, c):
        return NotImplemented
    if isinstance(all_perturbed, Tensor):
        # Its value on the GPU is not read: the mask selects the values then.
        all_perturbed = not all_perturbed.is_cuda and bool(all_perturbed)
    gate = None
    if modules.get("to_gate_logits") is not None:
        gate = 2.0 * torch.sigmoid(linears.linear(modules["to_gate_logits"], x))
    if all_perturbed:
        out = linears.linear(modules["to_v"], x if c is None else c)
    else:
        config = attention.context_parallel_of(call, self) if perturbation_mask is None else None
        is_split = self.rope_type == "split"
        rotate = call.stand_in.functions[2 if is_split else 1].function
        ropes = (query_rotary_emb, key_rotary_emb)
        if config is not None:
            of_key = x if c is None else c
            ropes = _of_rank(call, config, x, ropes[0]), _of_rank(call, config, of_key, ropes[1])
        operands = (call, self, x, c, ropes[0], rotate, "across_heads")
        layout = "half" if is_split else "interleaved"
        options: dict[str, Any] = {"layout": layout, "key_rope": ropes[1], "config": config}
        query, key, value = attention.project_and_rotate(*operands, **options)
        options = {"heads": self.heads, "dropout_p": 0.0, "is_causal": False}
        if perturbation_mask is None:
            options["gate"], gate = gate, None
        options["prepares_mask"] = True
        out = attention.attend(call, self, query, key, value, attention_mask, **options)
        if perturbation_mask is not None:
            out = torch.lerp(value, out, perturbation_mask)
    if gate is not None:
        out = (out.unflatten(2, (self.heads, -1)) * gate.unsqueeze(-1)).flatten(2)
    return attention.project_out(self, out)


def _of_rank(call: Call, config: Any, x: Tensor, rope: Any) -> Any:
    """The rotary embedding of this rank's tokens x. The plan of diffusers splits only the video's tables for
    self-attention, and only interleaved ones."""
    tensors = getattr(rope, "rope", None) or rope
    if rope is None or tensors[0].shape[-2] == x.shape[1]:
        return rope
    which, name = rank_and_size(config), ("rope of rank", x.shape[1], id(rope))
    return call.shared(name, rope, lambda rope: part_of_tables(rope, *which))


def rope_forward(self: Any, call: Call, coords: Tensor, device: Any = None) -> Any:
    """Coordinates instead of tables; see ``families.ltx``."""
    coords = coords if device is None else coords.to(device)
    if coords.dtype == torch.float64 or tracks_derivatives() or is_wrapped(self):
        return NotImplemented
    if not kernels_run_on(coords):
        return call.decline(why_not_taken(coords))
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


COORDINATES = "coordinates in place of tables"
_ROPE = f"{_LTX2}:LTX2AudioVideoRotaryPosEmbed"
_ATTENTION = attention.AttentionSpec(
    f"{_LTX2}:LTX2Attention",
    attention_forward,
    "qk_norm_rope",
    processor=f"{_LTX2}:LTX2AudioVideoAttnProcessor",
    rotate="apply_interleaved_rotary_emb apply_split_rotary_emb",
    other_processor=f"{_LTX2}:LTX2PerturbedAttnProcessor",
    other_parameters="hidden_states encoder_hidden_states attention_mask query_rotary_emb key_rotary_emb"
    " perturbation_mask all_perturbed",
)
_SPECS = (
    model_spec(f"{_LTX2}:LTX2VideoTransformer3DModel", "transformer_blocks"),
    PatchSpec(_ROPE, rope_forward, COORDINATES),
    BlockSpec(f"{_LTX2}:LTX2VideoTransformerBlock", _block_forward),
    _ATTENTION,
    TIMESTEPS,
    linears.LINEAR_GELU,
)
ONCE = (
    *("proj_in", "audio_proj_in", "time_embed", "audio_time_embed", "norm_out", "audio_norm_out"),
    *("prompt_adaln", "audio_prompt_adaln", "caption_projection", "audio_caption_projection"),
    *("av_cross_attn_video_scale_shift", "av_cross_attn_audio_scale_shift"),
    *("av_cross_attn_video_a2v_gate", "av_cross_attn_audio_v2a_gate", "proj_out", "audio_proj_out"),
)
LAYERS = ONE_LIST._replace(ends=2)  # as in Lightricks' checkpoint
FAMILIES = (Family("LTX-2", _SPECS, ONCE, LAYERS, int8_tiers=PRECISIONS),)
