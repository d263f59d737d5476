"""CogVideoX and ConsisID: how their transformers map to the operations.

A block has two streams, video x and text c, with the same norms and linear layers. An adaptive norm has one
LayerNorm for both streams, and one linear layer of the time embedding for the six rows of their modulation,

    n = layer_norm(x) * (1 + scale) + shift;  n_c = layer_norm(c) * (1 + scale_c) + shift_c
    x = x + gate * a_x;  c = c + gate_c * a_c,  with a_c, a_x = attention([n_c, n])

and the feed-forward has the same form. Queries and keys pass a LayerNorm of each head. The rotary embedding
rotates only the video.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...conditions import kernels_take
from ..attention.modules import (
    ROTATED_ATTENTION,
    AttentionSpec,
    Stream,
    attend_to_all,
    attn1_weights,
    concat_streams,
    inputs_taken,
    project_out,
)
from ..core.checks import is_plain
from ..core.forward_state import COMPUTED_ONCE, Family, model_spec
from ..core.patch import Call
from ..parts.embeddings import TIMESTEPS
from ..parts.linears import (
    FEED_FORWARD,
    LINEAR_GELU,
    feed_forward,
    feed_forward_branch,
    feed_forward_weights,
    linears,
    plain_weights,
)
from ..parts.norms import apply_norm, gated_residual, norm_notes
from ..parts.streams import (
    BlockSpec,
    Prologue,
    ResidualBranch,
    finish,
    linear_of_silu,
    may_run_ahead,
    read_adaptive,
    take_over,
)
from ..quantized.fp8_linears import are_fp8

_MODELS = "diffusers.models.transformers."
_COGVIDEOX = f"{_MODELS}cogvideox_transformer_3d"
_CONSISID = f"{_MODELS}consisid_transformer_3d"
_ATTENTIONS = "diffusers.models.attention_processor"
_QK_NORMS = ("norm_q", "norm_k")


def _prologues(
    call: Call, block: Any, name: str, ahead: Tensor | None, temb: Tensor, weights_for: Any
) -> tuple[Any, Any]:
    """The prologues of video and text with the adaptive norm ``block.name``; a prologue's row is the gate.

    ``ahead`` as in ``PrologueMakers``, ``weights_for`` as in ``Prologue``. Both results are None if the
    module has to compute them.
    """
    module = block._modules[name]
    found = read_adaptive(module)
    if isinstance(found, str):
        if ahead is None:
            call.fall_back(f"{name} {found}")
            if call.state is not None:
                call.state.shared.clear()  # the module may write to what it was made from
        return None, None
    count, (scale, shift, c_scale, c_shift), norm = found
    weight = norm[1][0]
    if ahead is not None and weight is not None and weight.device != ahead.device:
        return None, None
    modulation = linear_of_silu(call, module._modules["linear"], temb, ahead)
    if modulation is None:
        return None, None
    rows = modulation.unsqueeze(1).chunk(count, 2)
    how: Any = {"weights_for": weights_for, "block": block}
    return (
        Prologue(norm, module, "norm", (rows[scale], rows[shift]), rows[2:3], **how),
        Prologue(norm, module, "norm", (rows[c_scale], rows[c_shift]), rows[5:], **how),
    )


def _feed_forward_weights(block: Any, x: Tensor) -> Any:
    module = block._modules["ff"]
    return feed_forward_weights(module, x) if _runs_twice(module, x) else None


def _makers() -> tuple:
    """The makers of both prologues; the first makes both."""
    made: list = []

    def video(call: Call, block: Any, ahead: Tensor | None, temb: Tensor) -> Any:
        made[:] = _prologues(call, block, "norm1", ahead, temb, attn1_weights)
        return made[0]

    return video, lambda *_: made[1]


def _own_norm(block: Any, name: str, x: Tensor, c: Tensor, temb: Tensor) -> tuple:
    """The adaptive norm by its module, in the form of two prologues' results."""
    n, c_n, gate, c_gate = block._modules[name](x, c, temb)
    return ((n,), (gate,)), ((c_n,), (c_gate,))


def _block_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    x, c = hidden_states, encoder_hidden_states
    if not kernels_take(x, c, temb):
        return call.refuse(x, c, temb)
    begun = take_over(call, self, (x, c, temb))
    if begun is None:
        first, second = _prologues(call, self, "norm1", None, temb, attn1_weights)
        begun = (first(x), second(c)) if first else _own_norm(self, "norm1", x, c, temb)
    ((n,), (gate,)), ((c_n,), (c_gate,)) = begun
    more = {"image_rotary_emb": image_rotary_emb, **(attention_kwargs or {})}
    out, c_out = self._modules["attn1"](hidden_states=n, encoder_hidden_states=c_n, **more)
    first, second = _prologues(call, self, "norm2", None, temb, _feed_forward_weights)
    if first is None:
        x, c = gated_residual(x, out, gate), gated_residual(c, c_out, c_gate)
        begun = _own_norm(self, "norm2", x, c, temb)
    else:
        x, *begun = first.after(ResidualBranch(x, out, gate), call)
        c, *c_begun = second.after(ResidualBranch(c, c_out, c_gate), call)
        begun = (*begun, *c_begun)
    ((n,), (gate,)), ((c_n,), (c_gate,)) = begun
    out, c_out = _feed_forwards(self._modules["ff"], n, c_n)
    branches = ResidualBranch(x, out, gate), ResidualBranch(c, c_out, c_gate)
    x, c = finish(call, self, _makers(), branches, (temb,))
    return x, c


def _runs_twice(module: Any, x: Any) -> bool:
    """Whether the feed-forward runs for each stream, or once for the concat if it has hooks."""
    return is_plain(module, FEED_FORWARD) and may_run_ahead(module, x)


def _feed_forwards(module: Any, n: Any, c_n: Any) -> tuple[Any, Any]:
    """The feed-forward of video and text."""
    if _runs_twice(module, n):
        return feed_forward_branch(module, n), feed_forward_branch(module, c_n)
    both = feed_forward(module, torch.cat([c_n, n], dim=1))
    return both[:, c_n.shape[1] :], both[:, : c_n.shape[1]]


def _attention_forward(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
    **kwargs,
) -> Any:
    x, c, rope = hidden_states, encoder_hidden_states, image_rotary_emb
    if kwargs or c is None or attention_mask is not None:
        return NotImplemented
    if not inputs_taken(x, c):
        return call.refuse(x, c)
    norms = ("", "") if norm_notes(self, _QK_NORMS) else _QK_NORMS  # no names: applied here
    length, modules = c.shape[1], self._modules
    to_q, to_k, to_v = layers = modules["to_q"], modules["to_k"], modules["to_v"]
    if norms is _QK_NORMS and plain_weights(x.dtype, *layers):
        each: list[Any] = [(*linears(n, to_q, to_k), (to_v, n)) for n in (c, x)]
    elif norms is _QK_NORMS and are_fp8(*layers):
        each = [tuple(linears(n, *layers)) for n in (c, x)]
    else:  # hooks and adapters get the concat, as in the model
        joint = linears(concat_streams(call, c, x), *layers)
        if norms is not _QK_NORMS:
            by_head = [y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in joint[:2]]
            pair = [apply_norm(call, self, name, y) for name, y in zip(_QK_NORMS, by_head)]
            joint = [*(y.transpose(1, 2).flatten(2) for y in pair), joint[2]]
        each = [tuple(y[:, :length] for y in joint), tuple(y[:, length:] for y in joint)]
    rotate = partial(call.stand_in.functions[1].function, sequence_dim=1)
    streams = [Stream(q, k, v, norms, r) for (q, k, v), r in zip(each, (None, rope))]
    out = attend_to_all(call, self, streams, rotate, dropout_p=0.0, is_causal=False)
    out = project_out(self, out)
    return out[:, length:], out[:, :length]


_BLOCK = partial(
    BlockSpec,
    forward=_block_forward,
    operations="layer_norm_modulate, gated_residual_layer_norm_modulate, gated_residual",
    adaptive_norms=("norm1", "norm2"),
    inner=("attn1", "ff.net.0"),
)
_SPECS = (
    model_spec(f"{_COGVIDEOX}:CogVideoXTransformer3DModel", "transformer_blocks"),
    model_spec(f"{_CONSISID}:ConsisIDTransformer3DModel", "transformer_blocks"),
    _BLOCK(f"{_COGVIDEOX}:CogVideoXBlock"),
    _BLOCK(
        f"{_CONSISID}:ConsisIDBlock",
        parameters="self hidden_states encoder_hidden_states temb image_rotary_emb",
    ),
    AttentionSpec(
        f"{_ATTENTIONS}:Attention",
        _attention_forward,
        "qk_norm_rope",
        processor=f"{_ATTENTIONS}:CogVideoXAttnProcessor2_0",
        **ROTATED_ATTENTION,
        dispatches=False,
    ),
    TIMESTEPS,
    LINEAR_GELU,
)
_ONCE = ("patch_embed", "time_embedding", "ofs_embedding", "norm_final", "norm_out", "proj_out")
FAMILIES = (Family("CogVideoX", _SPECS, dict.fromkeys(_ONCE, COMPUTED_ONCE)),)
