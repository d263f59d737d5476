"""Attention modules: what their forward works with, query and key, and attention itself.

The module's forward is replaced and its processor left alone: diffusers copies, compares and replaces
processors, and sets backends and parallelism on them. Which one it is, is looked up at each call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from .. import functional
from ..arguments import ATTENTION_HEAD_DIMS, dtype_name
from ..conditions import as_key_bias, attention_takes, of_one_form
from ..differentiation import is_differentiated
from .injected import Injected, Injection, Parts
from .linears import ORIGINALS as LINEAR_ORIGINALS
from .linears import Chain, see_dropout, see_linear
from .norms import RMS, Norm, see_norm
from .original import Original, class_name, find_class, find_original
from .part import Part
from .rotary import as_operand
from .snapshot import Look

_SDPA = "torch.nn.functional:scaled_dot_product_attention"
_NATIVE = "diffusers.models.attention_dispatch:_native_attention"


@dataclass(frozen=True)
class Attention(Part):
    """An attention module with a processor.

    Attributes:
        processor: the path of the processor's class.
        processor_parameters: of its ``__call__``, in order.
        norms: the names of the norms of queries and keys.
        projections: the names of linear layers before them that the forward calls by itself.
    """

    processor: str = ""
    processor_parameters: str = ""
    norms: tuple[str, ...] = ("norm_q", "norm_k")
    projections: tuple[str, ...] = ()

    @property
    def _call(self) -> str:
        return f"{self.processor}.__call__"

    @property
    def _library(self) -> str:
        """The module of the processor, which calls functions by names of it."""
        return self.processor.partition(":")[0]

    @property
    def _rotate(self) -> str:
        return f"{self._library}:apply_rotary_emb"

    @property
    def _dispatch(self) -> str:
        return f"{self._library}:dispatch_attention_fn"

    def originals(self) -> dict[str, Original]:
        paths = (_SDPA, _NATIVE, *LINEAR_ORIGINALS, self._rotate, self._dispatch)
        return {
            self._call: find_original(self._call, self.processor_parameters),
            **{path: find_original(path) for path in paths},
        }

    def fill(self, parts: Parts, module: nn.Module, injection: Injection, snapshot: Look) -> None:
        originals = injection.originals
        processor = parts.processor = snapshot.see_attribute(module, "processor")
        call = originals[self._call].function
        known = find_class(self.processor)
        if (
            call is None
            or known is None
            or not isinstance(processor, known)
            or snapshot.see_method(type(processor), "__call__") is not call
        ):
            parts.reason = f"its processor is a {class_name(processor)}, not the one known"
            return
        for name in self.projections:
            setattr(parts, name, see_linear(module, name, injection, snapshot))
        for name in self.norms:
            norm = see_norm(module, name, injection, snapshot)
            if norm.module is not None:
                setattr(parts, name, norm)
                parts.note(norm.reason)
        library = sys.modules[self._library]
        parts.rotate, parts.dispatch = library.apply_rotary_emb, library.dispatch_attention_fn
        parts.rotates = originals[self._rotate].is_in_use()
        if not parts.rotates:
            parts.note("apply_rotary_emb was replaced")
        registry = getattr(
            sys.modules["diffusers.models.attention_dispatch"], "_AttentionBackendRegistry", None
        )
        parts.active_backend = getattr(registry, "get_active_backend", None)
        parts.native = originals[_NATIVE].function
        parts.dispatches = originals[self._dispatch].is_in_use()
        parts.project_out = _see_output(module, injection, snapshot)
        reason, is_choice = self._why_not(parts, module, injection, snapshot)
        parts.attends = reason is None
        if reason is not None:
            parts.note(f"attention itself is the model's own: {reason}", is_choice)

    def _why_not(
        self, parts: Parts, module: nn.Module, injection: Injection, snapshot: Look
    ) -> tuple[str | None, bool]:
        """Why attention itself stays the model's own, and whether that is the user's choice."""
        head_dim = snapshot.see_attribute(module, "head_dim")
        if not injection.attention:
            return "asked for by attention=False", True
        if head_dim not in ATTENTION_HEAD_DIMS:
            known = " and ".join(map(str, ATTENTION_HEAD_DIMS))
            return f"its heads have {head_dim} elements, and the kernel's {known}", False
        if parts.active_backend is None or parts.native is None:
            return "this diffusers does not tell which attention backend is chosen", False
        if not parts.dispatches:
            return "dispatch_attention_fn was replaced", False
        if not injection.originals[_SDPA].is_in_use():
            return "scaled_dot_product_attention was replaced", False
        return None, False

    def describe(self, parts: Parts) -> str:
        return f"{self.operations}, attention" if parts.attends else self.operations


def is_native(parts: Parts) -> bool:
    """Whether attention is left to PyTorch's own choice, as diffusers does it by default.

    A backend may be chosen for the module, for all of them, or by parallelism; a function mode may
    wait for scaled_dot_product_attention.
    """
    processor = parts.processor
    if processor._attention_backend is not None or processor._parallel_config is not None:
        return False
    return _is_native_active(parts) and not _has_function_mode()


def _is_native_active(parts: Parts) -> bool:
    if parts.active_backend is None:
        return False
    backend, function = parts.active_backend()
    return backend == "native" and function is parts.native


def _has_function_mode() -> bool:
    if torch._C._len_torch_function_stack() == 0:
        return False
    # torch.set_default_device is one too.
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


def attend(
    injected: Injected,
    parts: Parts,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    expand_mask: Callable[[Tensor], Tensor] | None = None,
    **options: Any,
) -> Tensor:
    """(B, S, H, d), of query, key and value of that form.

    ``mask`` is what the module was given. ``expand_mask``, if its processor makes of a mask (B, 1 or Sq, Sk)
    one that is broadcast over the heads, does so. ``options`` are what the processor passes to diffusers'
    dispatch besides.
    """
    is_free = is_native(parts)
    if parts.attends and is_free:
        if attention_takes(query, key, value):
            key_bias = None if mask is None or expand_mask is None else as_key_bias(mask, key)
            if mask is None or key_bias is not None:
                return functional.attention(query, key, value, key_bias=key_bias)
            injected.fall_back("attention itself: its mask differs between queries or heads")
        elif not is_differentiated(query, key, value):
            injected.fall_back(f"attention itself: no kernel for {dtype_name(query.dtype)}")
    if mask is not None and expand_mask is not None:
        # PyTorch's attention broadcasts over the heads by itself.
        is_broadcast = is_free and parts.dispatches and _is_of_all_heads(mask, key)
        mask = mask.unsqueeze(1) if is_broadcast else expand_mask(mask)
    processor = parts.processor
    return parts.dispatch(
        query,
        key,
        value,
        attn_mask=mask,
        backend=processor._attention_backend,
        parallel_config=processor._parallel_config,
        **options,
    )


def _is_of_all_heads(mask: Tensor, key: Tensor) -> bool:
    return mask.dim() == 3 and mask.shape[0] == key.shape[0] and mask.shape[2] == key.shape[1]


def norm_and_rotate(
    parts: Parts,
    norms: tuple[Norm, Norm],
    query: Tensor,
    key: Tensor,
    rope: Any,
    rotate: Callable[[Tensor, Any], Tensor],
    form: str,
    heads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Query and key, normalized, and rotated by ``rope`` if there is one.

    They are (B, S, H, d), or (B, S, H * d) with the number of heads; the norms are of the last dimension,
    in the words of ``qk_norm_rope`` of the ``form`` "per_head" or "across_heads". ``rotate`` is the model's
    own rotation.
    """
    heads = query.shape[2] if heads is None else heads
    norm_q, norm_k = norms
    operand = None
    if rope is not None and parts.rotates and query.shape == key.shape and of_one_form(query, key):
        operand = as_operand(rope, query)
    options: dict[str, Any] = {"rope": operand, "heads": heads, "layout": "interleaved"}
    if (
        operand is not None
        and norm_q.kind == norm_k.kind == RMS
        and norm_q.eps == norm_k.eps
        and norm_q.takes(query)
        and norm_k.takes(key)
    ):
        return functional.qk_norm_rope(
            query, key, norm_q.weight, norm_k.weight, norm=form, eps=norm_q.eps, **options
        )
    query, key = norm_q(query), norm_k(key)
    if rope is None:
        return query, key
    if operand is not None and of_one_form(query, key):
        return functional.qk_norm_rope(query, key, norm="none", **options)
    return rotate(query, rope), rotate(key, rope)


def _see_output(module: nn.Module, injection: Injection, snapshot: Look) -> Chain | None:
    """The output projection of an attention and its dropout."""
    to_out = snapshot.see_attribute(module, "to_out")
    if to_out is None:
        return None
    linear = see_linear(to_out, "0", injection, snapshot)
    return Chain(linear, see_dropout(to_out, "1", injection, snapshot))
