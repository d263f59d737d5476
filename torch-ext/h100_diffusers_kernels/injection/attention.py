"""Attention modules: what their forward works with, query and key, and attention itself.

The module's forward is replaced and its processor left alone: diffusers copies, compares and replaces
processors, and sets backends and parallelism on them. Which one it is, is looked up at each call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from .. import functional
from ..arguments import ATTENTION_HEAD_DIMS, dtype_name
from ..conditions import ATTENTION_DTYPES, as_key_bias, attention_takes, of_one_form
from ..differentiation import is_differentiated
from . import recording
from .gates import ORIGINALS as GATE_ORIGINALS
from .gates import see_gate
from .injected import Injected, Injection, Parts
from .linears import ORIGINALS as LINEAR_ORIGINALS
from .linears import Chain, Layer, see_dropout, see_linear
from .norms import ORIGINALS as NORM_ORIGINALS
from .norms import RMS, Norm, see_norm
from .original import Original, class_name, find_class, find_original
from .part import Part
from .rotary import as_operand
from .snapshot import Look
from .trust import trusted_parts

_SDPA = "torch.nn.functional:scaled_dot_product_attention"
_NATIVE = "diffusers.models.attention_dispatch:_native_attention"


@dataclass(frozen=True)
class Attention(Part):
    """An attention module with a processor.

    Attributes:
        processor: the path of the processor's class.
        processor_parameters: of its ``__call__``, in order.
        norms: the names of the norms of queries and keys, of which it may lack some.
        projections: the names of linear layers before them that the forward calls by itself.
        project: the function of the processor's module that calls them, where it has one.
        rotate: the function of the processor's module that rotates, or "" where the processor itself does.
        gates: the names of gated activations that the forward calls by itself.
        dispatches: whether the processor leaves attention to diffusers' dispatch, or else calls PyTorch's.
    """

    processor: str = ""
    processor_parameters: str = ""
    norms: tuple[str, ...] = ("norm_q", "norm_k")
    projections: tuple[str, ...] = ()
    project: str = ""
    rotate: str = "apply_rotary_emb"
    gates: tuple[str, ...] = ()
    dispatches: bool = True

    @property
    def _call(self) -> str:
        return f"{self.processor}.__call__"

    @property
    def _library(self) -> str:
        """The module of the processor, which calls functions by names of it."""
        return self.processor.partition(":")[0]

    @property
    def _dispatch(self) -> str:
        return "dispatch_attention_fn" if self.dispatches else ""

    def _function(self, name: str) -> str:
        return f"{self._library}:{name}"

    def originals(self) -> dict[str, Original]:
        called = (self.rotate, self._dispatch, self.project)
        paths = (
            _SDPA,
            *NORM_ORIGINALS,
            *LINEAR_ORIGINALS,
            *GATE_ORIGINALS,
            *(self._function(name) for name in called if name),
        )
        if self.dispatches:
            paths = (_NATIVE, *paths)
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
        parts.head_dim = snapshot.see_attribute(module, "head_dim")
        if parts.head_dim is None:
            sized: Any = module
            parts.head_dim = sized.inner_dim // sized.heads
        for name in self.projections:
            setattr(parts, name, see_linear(module, name, injection, snapshot))
        for name in self.gates:
            setattr(parts, name, see_gate(module, name, injection, snapshot))
        for name in self.norms:
            norm = see_norm(module, name, injection, snapshot)
            setattr(parts, name, norm)
            if norm.module is not None:
                parts.note(norm.reason)
        library = vars(sys.modules[self._library])
        parts.rotate, parts.dispatch = library.get(self.rotate), library.get(self._dispatch)
        parts.rotates = not self.rotate or originals[self._function(self.rotate)].is_in_use()
        if not parts.rotates:
            parts.note(f"{self.rotate} was replaced")
        parts.project = library.get(self.project)
        parts.projects = not self.project or originals[self._function(self.project)].is_in_use()
        parts.dispatches = (
            not self.dispatches or originals[self._function(self._dispatch)].is_in_use()
        )
        parts.active_backend = parts.native = None
        if self.dispatches:
            registry = getattr(
                sys.modules["diffusers.models.attention_dispatch"],
                "_AttentionBackendRegistry",
                None,
            )
            parts.active_backend = getattr(registry, "get_active_backend", None)
            parts.native = originals[_NATIVE].function
        parts.project_out = _see_output(module, injection, snapshot)
        reason, is_choice = self._why_not(parts, module, injection, snapshot)
        parts.attends = reason is None
        if reason is not None:
            parts.note(f"attention itself is the model's own: {reason}", is_choice)

    def trust(self, parts: Parts, module: nn.Module, snapshot: Look) -> Parts | None:
        is_fused = snapshot.see_attribute(module, "fused_projections")
        norms = [getattr(parts, name) for name in self.norms]
        if (
            not (parts.rotates and parts.projects and parts.attends)
            or is_fused
            or any(norm.module is not None and norm.kind != RMS for norm in norms)
        ):
            return None
        names = (*self.projections, *self.gates, *self.norms, "project_out")
        return trusted_parts(parts, names, snapshot)

    def _why_not(
        self, parts: Parts, module: nn.Module, injection: Injection, snapshot: Look
    ) -> tuple[str | None, bool]:
        """Why attention itself stays the model's own, and whether that is the user's choice."""
        head_dim = parts.head_dim
        if not injection.attention:
            return "asked for by attention=False", True
        if head_dim not in ATTENTION_HEAD_DIMS:
            known = " and ".join(map(str, ATTENTION_HEAD_DIMS))
            return f"its heads have {head_dim} elements, and the kernel's {known}", False
        if self.dispatches and (parts.active_backend is None or parts.native is None):
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
    if parts.dispatch is None:
        return not has_function_mode()
    processor = parts.processor
    if processor._attention_backend is not None or processor._parallel_config is not None:
        return False
    return _is_native_active(parts) and not has_function_mode()


def _is_native_active(parts: Parts) -> bool:
    if parts.active_backend is None:
        return False
    backend, function = parts.active_backend()
    return backend == "native" and function is parts.native


def has_function_mode() -> bool:
    if torch._C._len_torch_function_stack() == 0 or recording.is_on():
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
    *,
    heads: int | None = None,
    key_bias: Tensor | None = None,
    out: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """(B, S, H, d), of query, key and value of that form; or (B, S, H * d), all of query's dtype, of such
    with a number of heads.

    ``mask`` is what the module was given. ``expand_mask``, if its processor makes of a mask (B, 1 or Sq, Sk)
    one that is broadcast over the heads, does so. ``key_bias`` (B, Sk) says the same as a mask that the
    dispatch takes as it is. ``out`` may be what is written and returned, of a call without ``heads``.
    ``options`` are what the processor passes to diffusers' dispatch besides.
    """
    if parts.is_trusted:
        forward = injected.injection.local.forward
        if mask is not None and key_bias is None and expand_mask is not None:
            form = (key.shape, key.dtype, key.device)
            key_bias = forward.shared(mask, form, lambda: as_key_bias(mask, key))
        if (
            (mask is None or key_bias is not None)
            and forward.is_native(parts, _is_native_active)
            and query.dtype in ATTENTION_DTYPES
            and query.shape[0] == key.shape[0]
        ):
            return functional.attention(query, key, value, key_bias=key_bias, heads=heads, out=out)
    is_free = is_native(parts)
    if parts.attends and is_free:
        if attention_takes(query, key, value, heads):
            if mask is not None and key_bias is None and expand_mask is not None:
                key_bias = as_key_bias(mask, key)
            if mask is None or key_bias is not None:
                return functional.attention(
                    query, key, value, key_bias=key_bias, heads=heads, out=out
                )
            injected.fall_back("attention itself: its mask differs between queries or heads")
        elif not is_differentiated(query, key, value):
            injected.fall_back(f"attention itself: no kernel for {dtype_name(query.dtype)}")
    if mask is not None and expand_mask is not None:
        # PyTorch's attention broadcasts over the heads by itself.
        is_broadcast = is_free and parts.dispatches and _is_of_all_heads(mask, key)
        mask = mask.unsqueeze(1) if is_broadcast else expand_mask(mask)
    dtype = query.dtype
    if heads is not None:
        query, key, value = (x.unflatten(2, (heads, -1)) for x in (query, key, value))
    if parts.dispatch is None:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        sdpa = torch.nn.functional.scaled_dot_product_attention
        result = sdpa(query, key, value, attn_mask=mask, **options).transpose(1, 2)
    else:
        processor = parts.processor
        shared = {
            "backend": processor._attention_backend,
            "parallel_config": processor._parallel_config,
        }
        result = parts.dispatch(query, key, value, attn_mask=mask, **{**shared, **options})
    return result if heads is None else as_dtype(result.flatten(2, 3), dtype)


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, without a call where it is of it already."""
    return x if x.dtype == dtype else x.to(dtype)


def _is_of_all_heads(mask: Tensor, key: Tensor) -> bool:
    return mask.dim() == 3 and mask.shape[0] == key.shape[0] and mask.shape[2] == key.shape[1]


class Norms(NamedTuple):
    """Those of query and key, of the last dimension."""

    q: Norm
    k: Norm

    def of_one_launch(self, query: Tensor, key: Tensor, size: int | None = None) -> bool:
        """Whether ``qk_norm_rope`` computes both: RMS norms alike, or none; of ``size`` elements, by default
        of the last dimension."""
        q, k = self
        if q.module is None and k.module is None:
            return of_one_form(query, key)
        return (
            q.kind == k.kind == RMS
            and q.eps == k.eps
            and q.takes(query, size=size)
            and k.takes(key, size=size)
        )

    def options(self, form: str) -> dict[str, Any]:
        """Those of ``qk_norm_rope``, of which ``form`` is "per_head" or "across_heads"."""
        q, k = self
        if q.module is None:
            return {"norm": "none"}
        return {"q_weight": q.weight, "k_weight": k.weight, "norm": form, "eps": q.eps}


def operand_of(
    injected: Injected,
    parts: Parts,
    rope: Any,
    query: Tensor,
    key: Tensor,
    heads: int,
    are_alike: bool = False,
) -> Any:
    """What ``qk_norm_rope`` takes as a rotary embedding of query and key of one shape, or None.

    ``are_alike``, in calls that are trusted: each head of (B, S, H * d) has the same rotation, as heads of
    (B, S, H, d).
    """
    if parts.is_trusted:
        # One for all blocks.
        forward = injected.injection.local.forward
        form = (query.shape, query.dtype, query.device, heads, are_alike)

        def make() -> Any:
            by_head = query.unflatten(2, (heads, -1)) if are_alike else query
            return as_operand(rope, by_head, heads)

        return forward.shared(rope, form, make)
    if parts.rotates and of_one_form(query, key):
        return as_operand(rope, query, heads)
    return None


def norm_and_rotate(
    injected: Injected,
    parts: Parts,
    norms: Norms,
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
    is_of_one_shape = query.shape == key.shape
    is_bare = rope is None and norms.q.module is not None and is_of_one_shape
    operand = None
    if rope is not None and is_of_one_shape:
        operand = operand_of(injected, parts, rope, query, key, heads)
    if (operand is not None or is_bare) and norms.of_one_launch(query, key):
        options = norms.options(form)
        q, k = functional.qk_norm_rope(query, key, rope=operand, heads=heads, **options)
        return q, k
    query, key = norms.q(query), norms.k(key)
    if rope is None:
        return query, key
    if operand is not None and of_one_form(query, key):
        q, k = functional.qk_norm_rope(query, key, norm="none", rope=operand, heads=heads)
        return q, k
    return rotate(query, rope), rotate(key, rope)


def _see_output(module: nn.Module, injection: Injection, snapshot: Look) -> Layer | None:
    """The output projection of an attention, and its dropout where it has one."""
    to_out = snapshot.see_attribute(module, "to_out")
    if type(to_out) is not nn.ModuleList:
        return None if to_out is None else see_linear(module, "to_out", injection, snapshot)
    linear = see_linear(to_out, "0", injection, snapshot)
    return Chain(linear, see_dropout(to_out, "1", injection, snapshot))
