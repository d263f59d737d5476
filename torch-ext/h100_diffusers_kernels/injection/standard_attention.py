"""diffusers' ``Attention`` with its standard processor, as UNets have it: its layers and the kernel, without
the calls of modules, of the processor, and of what reads its signature.

Any other call is left to ``processors.py``: with a mask, a derivative, a norm of query and key, or another
processor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..conditions import ATTENTION_DTYPES, kernels_take, tracks_derivatives
from .attention import Attention, attend, has_function_mode
from .injected import Injected, Injection, Parts
from .linears import is_one
from .original import Original
from .processors import Rebound, processed_forward, processed_originals, rebound
from .snapshot import Look

_ATTENTIONS = "diffusers.models.attention_processor"
_PROCESSOR = f"{_ATTENTIONS}:AttnProcessor2_0"
_CALL = f"{_PROCESSOR}.__call__"
_PROJECTIONS = ("to_q", "to_k", "to_v")
# What the processor would do besides, or the module around it.
_NONE_OF = ("spatial_norm", "group_norm", "norm_q", "norm_k", "norm_cross", "residual_connection")


@dataclass(frozen=True)
class StandardAttention(Attention):
    """The class, and its subclasses without a forward of their own, with whatever processor.

    Its parts have ``direct``: what a call without the processor works with, or None.
    """

    def originals(self) -> dict[str, Original]:
        return {**super().originals(), **processed_originals()}

    def fill(self, parts: Parts, module: nn.Module, injection: Injection, snapshot: Look) -> None:
        processor = snapshot.see_attribute(module, "processor")
        found = rebound(type(processor))
        parts.reason = found if isinstance(found, str) else None
        parts.direct = None
        if isinstance(found, str):
            return
        direct = Parts()
        super().fill(direct, module, injection, snapshot)
        if direct.reason is None and _is_standard(direct, module, found, snapshot):
            parts.direct = direct

    def trust(self, parts: Parts, module: nn.Module, snapshot: Look) -> Parts | None:
        direct = parts.direct and super().trust(parts.direct, module, snapshot)
        if direct is None:
            return None
        result = Parts()
        result.is_trusted = True
        result.direct = direct
        return result

    def describe(self, parts: Parts) -> str:
        return self.operations


def _is_standard(direct: Parts, module: nn.Module, found: Rebound, snapshot: Look) -> bool:
    """Whether the processor does nothing but projections and attention, as its class says."""
    for name, _ in found.names:  # by which its code is found to be as it was
        snapshot.see(vars(found.library), name)
    layers = (*(getattr(direct, name) for name in _PROJECTIONS), direct.project_out)
    factor = snapshot.see_attribute(module, "rescale_output_factor")
    sizes = [snapshot.see_attribute(module, name) for name in ("inner_dim", "inner_kv_dim")]
    direct.heads = snapshot.see_attribute(module, "heads")
    return (
        direct.attends
        and not any(snapshot.see_attribute(module, name) for name in _NONE_OF)
        and all(layer is not None for layer in layers)
        and is_one(factor)
        and sizes[0] == sizes[1] == direct.head_dim * direct.heads
    )


def _forward(
    self: Any,
    injected: Injected,
    hidden_states: Any,
    encoder_hidden_states: Any = None,
    attention_mask: Any = None,
    **kwargs: Any,
) -> Any:
    x, c = hidden_states, encoder_hidden_states
    direct = None
    call = injected.injection.originals[_CALL].function
    if attention_mask is None and not kwargs and type(self.processor).__call__ is call:
        parts = injected.decide(self)
        direct = parts.direct if parts.reason is None else None
    if direct is None or not _takes(direct, x, c):
        given = {"encoder_hidden_states": c, "attention_mask": attention_mask}
        return processed_forward(self, injected, x, **given, **kwargs)
    injected.count([])
    context = x if c is None else c
    query, key, value = direct.to_q(x), direct.to_k(context), direct.to_v(context)
    options: dict[str, Any] = {"heads": direct.heads, "dropout_p": 0.0, "is_causal": False}
    return direct.project_out(attend(injected, direct, query, key, value, None, **options))


def _takes(direct: Parts, x: Any, c: Any) -> bool:
    """Whether the call is one for the kernel, of tokens (B, S, D) and of none or others of that form."""
    return (
        isinstance(x, Tensor)
        and x.dim() == 3
        and (c is None or (isinstance(c, Tensor) and c.dim() == 3 and len(c) == len(x)))
        and x.dtype in ATTENTION_DTYPES
        and kernels_take(x, c)
        and (direct.is_trusted or not (tracks_derivatives() or has_function_mode()))
    )


STANDARD_ATTENTION = StandardAttention(
    f"{_ATTENTIONS}:Attention",
    None,
    _forward,
    "attention",
    processor=_PROCESSOR,
    processor_parameters="self attn hidden_states encoder_hidden_states attention_mask temb args kwargs",
    norms=(),
    projections=_PROJECTIONS,
    rotate="",
    dispatches=False,
)
