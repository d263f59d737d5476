"""diffusers' ``BasicTransformerBlock`` with plain layer norms, as UNets have it.

    x = x + attn1(layer_norm(x))
    x = x + attn2(layer_norm(x), text)
    x = x + ff(layer_norm(x))

Each sum is one pass with the norm that follows it, also that of the next block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..conditions import tracks_derivatives
from .blocks import Block, End, begin, finish
from .injected import Injected, Parts
from .modulation import Opening
from .original import find_class
from .snapshot import Look

_PLAIN = "layer_norm"


@dataclass(frozen=True)
class BasicBlock(Block):
    """The class, without its subclasses, with that kind of norms."""

    def is_kind_of(self, module: nn.Module) -> bool:
        return type(module) is find_class(self.path) and getattr(module, "norm_type", "") == _PLAIN

    def trust(self, parts: Parts, module: nn.Module, snapshot: Look) -> Parts | None:
        # What adds positions may give another dtype.
        return super().trust(parts, module, snapshot) if parts.pos_embed is None else None


def _decide_more(parts: Parts, module: nn.Module, snapshot: Look) -> None:
    parts.pos_embed = snapshot.see_attribute(module, "pos_embed")
    parts.crosses = snapshot.see_attribute(module, "attn2") is not None
    if snapshot.see_attribute(module, "norm_type") != _PLAIN:
        parts.reason = "its norms are of another kind now"
    if snapshot.see_attribute(module, "_chunk_size") is not None:
        parts.reason = "its feed-forward is chunked"


def _openings(injected: Injected, block: nn.Module, parts: Parts) -> tuple:
    norm = parts.norm1
    return (Opening(norm, _no_rows, (norm.weight, norm.bias), ((0, 0),)),)


def _no_rows() -> tuple:
    return (None,)


def _forward(
    self: Any,
    injected: Injected,
    hidden_states: Any,
    attention_mask: Any = None,
    encoder_hidden_states: Any = None,
    encoder_attention_mask: Any = None,
    timestep: Any = None,
    cross_attention_kwargs: dict[str, Any] | None = None,
    class_labels: Any = None,
    added_cond_kwargs: Any = None,
) -> Any:
    x = hidden_states
    more = cross_attention_kwargs or {}
    parts = None
    if not tracks_derivatives():
        reason = _why_not(x, more)
        if reason is None:
            x = x.contiguous()  # where a convolution made it, its channels lie apart
            parts = injected.parts(self, x)
        else:
            injected.leave(reason)
    if parts is None:
        masks_and_text = (attention_mask, encoder_hidden_states, encoder_attention_mask)
        others = (timestep, cross_attention_kwargs, class_labels, added_cond_kwargs)
        return injected.class_forward(self, hidden_states, *masks_and_text, *others)
    # Positions are added to a norm: then it is not left to the block before, which leaves norms alone.
    hands_over = parts.pos_embed is None
    if hands_over:
        (opened,) = begin(injected, self, parts, _openings, (x,), ())
        (normalized,) = opened.normalized
    else:
        normalized = parts.pos_embed(parts.norm1(x))
    attention_out = (parts.attn1 or self.attn1)(
        normalized,
        encoder_hidden_states=encoder_hidden_states if self.only_cross_attention else None,
        attention_mask=attention_mask,
        **more,
    )
    if parts.crosses:
        x, normalized = parts.norm2.residual_normed(x, attention_out, None)
        if parts.pos_embed is not None:
            normalized = parts.pos_embed(normalized)
        attention_out = (parts.attn2 or self.attn2)(
            normalized,
            encoder_hidden_states=encoder_hidden_states,
            attention_mask=encoder_attention_mask,
            **more,
        )
    x, normalized = parts.norm3.residual_normed(x, attention_out, None)
    end = End(x, parts.ff(normalized), None)
    (x,) = finish(injected, self, _openings, (end,), (), hands_over=hands_over)
    return x


def _why_not(x: Any, more: dict[str, Any]) -> str | None:
    """Why the model's own code computes a call."""
    if not isinstance(x, Tensor) or x.dim() != 3:
        return "its hidden states are not of three dimensions"
    if more.get("gligen") is not None:
        return "it is guided by GLIGEN"
    if more.get("scale") is not None:
        return "it was given a scale"  # of which the class warns
    return None


BASIC_BLOCK = BasicBlock(
    "diffusers.models.attention:BasicTransformerBlock",
    "self hidden_states attention_mask encoder_hidden_states encoder_attention_mask timestep"
    " cross_attention_kwargs class_labels added_cond_kwargs",
    _forward,
    "layer_norm, gated_residual_layer_norm_modulate, gated_residual",
    norms=("norm1", "norm2", "norm3"),
    feed_forwards=("ff",),
    decide_more=_decide_more,
    inner=("attn1", "attn2", "ff.net.0"),
)
