"""Attention of partially injected models: a processor's own code calls this package's attention.

A processor calls diffusers' ``dispatch_attention_fn`` or PyTorch's ``scaled_dot_product_attention`` by a
global name of its module. A copy of its ``__call__`` runs instead, with globals that bind this name to this
package's function. No class, processor or module of diffusers is changed, and no other thread sees the copy.

The forward of the attention module is replaced, not its processor, because diffusers creates, compares and
replaces processors by their class. The copy gets a proxy of the module. diffusers' ``Attention`` gets it from
the stand-in, other modules from their class's forward. Copies are made before torch.compile traces.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ...operations.conditions import (
    ATTENTION_HEAD_DIMS,
    DTYPES_16_BIT,
    attention_takes,
    dtype_name,
    is_differentiated,
    kernels_take,
    same_dtype_and_unit_stride,
    tracks_derivatives,
    why_not_taken,
)
from ...operations.key_blocks import is_block_mask
from ..core.checks import KnownFunction
from ..core.patch import Call, PatchSpec, Proxy, StandIn, ThreadValue, bare_stand_in
from ..core.report import OWN_ATTENTION
from ..parallel.exchange import config_of
from ..parts.linears import is_identity, plain_weights
from .backend import blocks_of, dispatched, run_own_in_parallel
from .decision import (
    BACKEND_NAME,
    DISPATCH,
    GRADIENT,
    MASK_DIFFERS,
    SDPA,
    USER_BACKEND,
    is_flex,
    is_native,
    kernel_attention,
    key_bias_of,
    why_not_arguments,
    why_not_head_dim,
    why_own_attention,
)
from .modules import attend, project_out, query_key_value

_DISPATCH_NAME, _SDPA_NAME = "dispatch_attention_fn", "scaled_dot_product_attention"
_ATTENTION = "diffusers.models.attention_processor:Attention"
_STANDARD = KnownFunction("diffusers.models.attention_processor:AttnProcessor2_0.__call__")
_ATTENTION_FORWARD = KnownFunction(f"{_ATTENTION}.forward")
_PREPARE = (
    KnownFunction(f"{_ATTENTION}.prepare_attention_mask"),
    KnownFunction("diffusers.models.attention:AttentionModuleMixin.prepare_attention_mask"),
)
# If there are other modules, the standard processor does more than projections and attention.
_PROJECTIONS = frozenset(("to_q", "to_k", "to_v", "to_out"))
_current = ThreadValue()  # the proxy of the attention that this thread runs


# --------------------------------------------------------------------------------------------------
# Replacements of the functions. ``is_int8``: whether the injection asks for attention in 8 bits.


def dispatch_attention_fn(
    is_int8: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
    attention_kwargs: Any = None,
    **more: Any,
) -> Any:
    """Replaces diffusers' function of this name: query, key and value are (B, S, H, d)."""
    options = (dropout_p, is_causal, scale, enable_gqa)
    parallel_config, backend = more.get("parallel_config"), more.get("backend")
    current = None if torch.compiler.is_dynamo_compiling() else _current.value
    of_flex, is_taken = is_flex(backend), not attention_kwargs
    if of_flex and not is_block_mask(attn_mask):
        is_taken = False
        if current is not None:
            current._call.leave_attention(USER_BACKEND)
    if is_taken and config_of(parallel_config) is not None:
        if current is not None:
            current._ran = attention_takes(query, key, value)
            if current.has_repeated(attn_mask):
                attn_mask = attn_mask[:, :1]
        call = is_int8 if current is None else current._call
        return dispatched(query, key, value, attn_mask, *options, False, parallel_config, call)
    others = (value for value in more.values() if not (of_flex and value is backend))
    if is_taken and not any(v for v in others if v != BACKEND_NAME):
        mask = attn_mask
        if isinstance(mask, Tensor) and mask.shape == (query.shape[0], key.shape[1]):
            mask = mask[:, None, None]  # one row of keys per sample
        result = _attention(is_int8, query, key, value, mask, *options)
        if result is not None:
            return result
    return DISPATCH.function(query, key, value, attn_mask, *options, attention_kwargs, **more)


def scaled_dot_product_attention(
    is_int8: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    *args: Any,
    **options: Any,
) -> Any:
    """Replaces PyTorch's function of this name: query, key and value are (B, H, S, d)."""
    if query.dim() == key.dim() == value.dim() == 4:
        tensors = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        result = _attention(is_int8, *tensors, attn_mask, *args, **options)
        if result is not None:
            return result.transpose(1, 2)
    own: Any = torch.nn.functional.scaled_dot_product_attention
    return own(query, key, value, attn_mask, *args, **options)


def _attention(
    is_int8: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Attention of (B, S, H, d) on the kernel. If it cannot run, counts the reason and returns None."""
    current = None if torch.compiler.is_dynamo_compiling() else _current.value
    if is_differentiated(query, key, value, mask if isinstance(mask, Tensor) else None):
        if current is not None:
            current._call.leave_attention(GRADIENT)
        return None
    batch, _, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    key_bias = blocks = reason = None
    if query.dtype not in DTYPES_16_BIT:
        reason = f"no kernel for {dtype_name(query.dtype)}"
    elif head_dim not in ATTENTION_HEAD_DIMS:
        reason = why_not_head_dim(head_dim)
    elif not kernels_take(query, key, value):
        reason = why_not_taken(query, key, value)
    elif (
        key.shape != value.shape
        or key.shape != (batch, key.shape[1], kv_heads, head_dim)
        or not (kv_heads == heads or (enable_gqa and kv_heads > 0 and heads % kv_heads == 0))
    ):
        reason = "the kernel does not support its shapes"
    else:
        reason = why_not_arguments(dropout_p, scale)
    is_block = is_block_mask(mask)
    if reason is None and mask is not None and not is_block:
        if current is not None and current.has_repeated(mask):
            mask = mask[:, :1]
        key_bias = key_bias_of(mask, key)
        reason = MASK_DIFFERS if key_bias is None else None
    if reason is None and (is_causal or is_block):
        found = blocks_of(query, key, mask, is_causal)
        blocks, reason = (None, found) if isinstance(found, str) else (found, None)
    if reason is not None:
        if current is not None:
            current._call.fall_back(f"{OWN_ATTENTION}: {reason}")
        return None
    if current is not None:
        current._ran = True
    call = is_int8 if current is None else current._call
    options = {"scale": scale, "key_bias": key_bias, "blocks": blocks}
    return kernel_attention(call, query, key, value, **options)


# --------------------------------------------------------------------------------------------------
# Proxies


class _Processor:
    """Proxy of a processor with its copied code, for the forward of the module's class."""

    def __init__(self, processor: Any, function: Callable) -> None:
        self._processor = processor
        self._function = function
        # Modules' forwards read its signature, which the function has cached.
        self.__call__ = function  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._processor, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)


class _Attention(Proxy):
    """Proxy of an attention module with another processor, for its class's forward and its processor.

    Attributes:
        _call: the module's call.
        _ran: whether the kernel has computed the attention.
        _repeated: the result of ``prepare_attention_mask``.
    """

    _call: Call
    _ran = False
    _repeated: Tensor | None = None

    def prepare_attention_mask(self, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's method, which repeats each sample's mask for its heads. Stores the result."""
        module: Any = self._module
        made = module.prepare_attention_mask(attention_mask, *args, **kwargs)
        own = getattr(type(module), "prepare_attention_mask", None)
        is_repeated = (
            not torch.compiler.is_dynamo_compiling()
            and not torch._C._are_functorch_transforms_active()  # no address to recognize it by
            and any(own is known.function for known in _PREPARE)
            and isinstance(attention_mask, Tensor)
            and made.dim() == attention_mask.dim() == 3
            and made.shape[:2] == (attention_mask.shape[0] * module.heads, 1)
        )
        self._repeated = made if is_repeated else None
        return made

    def has_repeated(self, mask: Any) -> bool:
        """Whether ``prepare_attention_mask`` made this mask (B, H, 1, Sk)."""
        made = self._repeated
        return (
            made is not None
            and isinstance(mask, Tensor)
            and mask.shape == (made.shape[0] // self.heads, self.heads, *made.shape[1:])
            and mask.data_ptr() == made.data_ptr()
            and mask.is_contiguous()
        )


# --------------------------------------------------------------------------------------------------
# Copies


class _Copy(NamedTuple):
    """The copied code of a processor class, with this package's attention.

    Attributes:
        call: the ``__call__`` that was copied.
        function: the copy.
        parameters: the names of its parameters.
        library: the module whose globals the code reads.
        names: these globals, by name, with their values when copied.
        dispatches: whether the code calls diffusers' dispatch; otherwise it calls PyTorch's attention.
    """

    call: Callable
    function: Callable
    parameters: frozenset[str]
    library: Any
    names: tuple[tuple[str, Any], ...]
    dispatches: bool


_copies: dict[type, _Copy] = {}
_int8_copies: dict[type, _Copy] = {}


def _copy_of(cls: type, is_int8: bool = False) -> _Copy | str:
    """The copy for a processor class, or why there is none."""
    copies = _int8_copies if is_int8 else _copies  # Dynamo of Torch 2.11 cannot index by a bool.
    copy = copies.get(cls)
    if copy is not None and cls.__call__ is copy.call:
        library = copy.library
        for name, value in copy.names:
            if getattr(library, name, None) is not value:
                break
        else:
            return copy
    if torch.compiler.is_compiling():
        return "its processor is new or was patched"
    made = _make_copy(cls, is_int8)
    if isinstance(made, _Copy):
        copies[cls] = made
    return made


def _make_copy(cls: type, is_int8: bool) -> _Copy | str:
    call: Any = getattr(cls, "__call__", None)  # noqa: B004 - it is copied
    unknown = f"its processor is a {cls.__module__}.{cls.__qualname__}, which has its own attention"
    if type(call) is not FunctionType or not all(
        (value.__module__ or "").partition(".")[0] == "diffusers" for value in (call, cls)
    ):
        return unknown
    found, names = call.__globals__, _names(call.__code__)
    seen = {name: found[name] for name in sorted(names) if name in found}
    others: dict[str, Any] = {}
    if _DISPATCH_NAME in names:
        if seen.get(_DISPATCH_NAME) is not DISPATCH.function:
            return f"{_DISPATCH_NAME} was replaced"
        others[_DISPATCH_NAME] = partial(dispatch_attention_fn, is_int8)
    if _SDPA_NAME in names:
        if seen.get("F") is not torch.nn.functional or ("torch" in seen and "functional" in names):
            return unknown
        others["F"] = Proxy(torch.nn.functional, copies=False)
        others["F"].scaled_dot_product_attention = partial(scaled_dot_product_attention, is_int8)
    library: Any = sys.modules.get(found.get("__name__", ""))
    is_its_module = getattr(library, "__dict__", None) is found
    if not others or not is_its_module or "__class__" in call.__code__.co_freevars:
        return unknown
    namespace = {**found, **others}
    del namespace["__name__"]  # torch.compile would look up the others in that module
    copied: Any = FunctionType(
        call.__code__, namespace, call.__name__, call.__defaults__, call.__closure__
    )
    copied.__kwdefaults__ = call.__kwdefaults__
    copied.__signature__ = inspect.signature(call)
    parameters = frozenset(copied.__signature__.parameters)
    return _Copy(call, copied, parameters, library, tuple(seen.items()), _DISPATCH_NAME in others)


@functools.cache
def _names(code: CodeType) -> frozenset[str]:
    """All global names that a function, or a function nested in it, reads."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*map(_names, inner))


# --------------------------------------------------------------------------------------------------
# Modules


@dataclass(frozen=True, eq=False)
class ProcessorSpec(PatchSpec):
    """A class of modules whose forward calls their processor. ``attend`` calls PyTorch's attention."""

    dispatches: ClassVar[bool] = False

    def run_own(self, stand_in: StandIn, own: Callable, module: Any, args: Any, kwargs: Any) -> Any:
        run = partial(super().run_own, stand_in, own, module, args, kwargs)
        processor = module.processor
        is_split = getattr(processor, "_parallel_config", None) is not None
        return run_own_in_parallel(run, stand_in) if is_split else run()

    def why_not(self, module: Any) -> str | None:
        # Both are made here, because compiled code cannot make one.
        copy, _ = (_copy_of(type(module.processor), is_int8) for is_int8 in (False, True))
        if isinstance(copy, str):
            return copy
        return why_own_attention(module, _yields_to_backend(module.processor, copy))


def _yields_to_backend(processor: Any, copy: _Copy) -> bool:
    """Whether a chosen backend runs in place of the copy. With FlexAttention the copy runs: the kernel takes
    its masks."""
    return copy.dispatches and not is_flex(getattr(processor, "_attention_backend", None))


def _forward(self: Any, call: Call, *args: Any, **kwargs: Any) -> Any:
    """The forward of the module's class, with the processor's copied code."""
    processor = self.processor
    copy = _copy_of(type(processor), call.stand_in.injection.options["is_int8"])
    if isinstance(copy, str):
        return call.decline(copy)
    if torch.nn.functional.scaled_dot_product_attention is not SDPA.function:
        return call.decline("scaled_dot_product_attention was replaced")
    if not is_native(processor, _yields_to_backend(processor, copy)):
        call.leave_attention(USER_BACKEND)
        return NotImplemented
    if copy.call is _STANDARD.function:
        out = _standard(self, call, *args, **kwargs)
        if out is not None:
            return out
    is_traced = torch.compiler.is_dynamo_compiling()
    attention: Any = _Attention(self, copies=not is_traced)
    attention._call = call
    # ``Attention`` does no more than this, unless it has arguments that its processor does not take.
    is_direct = (
        not is_traced
        and call.stand_in.own_forward is _ATTENTION_FORWARD.function
        and len(args) <= 1
        and kwargs.keys() <= copy.parameters
    )
    if not is_direct:
        attention.processor = _Processor(processor, copy.function)
    if is_traced:
        return call.stand_in.own_forward(attention, *args, **kwargs)
    outer, _current.value = _current.value, attention
    try:
        if is_direct:
            optional = {"encoder_hidden_states": None, "attention_mask": None, **kwargs}
            return copy.function(processor, attention, *args, **optional)
        return call.stand_in.own_forward(attention, *args, **kwargs)
    finally:
        _current.value = outer
        call.is_counted = call.is_counted and attention._ran


def _standard(
    self: Any,
    call: Call,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """``_run_standard`` for a call of the module."""
    x, c = hidden_states, encoder_hidden_states
    if (
        attention_mask is not None
        or kwargs
        or x.dim() != 3
        or (c is not None and c.dim() != 3)
        or not kernels_take(x, c)
        or tracks_derivatives()
    ):
        return None
    return _run_standard(self, call, x, c)


def run_bare_attention(module: Any, x: Tensor, c: Tensor | None) -> Tensor | None:
    """``module(x, c)`` without a module call, or None if a call could run code other than
    ``_run_standard``. x and c are (B, S, D) without derivatives, x a result of accepted tensors."""
    stand_in = bare_stand_in(STANDARD_ATTENTION, module)
    cls: Any = type(module.__dict__.get("processor"))
    if (
        stand_in is None
        or cls.__call__ is not _STANDARD.function
        or type(_copy_of(cls)) is str
        or torch.nn.functional.scaled_dot_product_attention is not SDPA.function
        or not (same_dtype_and_unit_stride(x) if c is None else kernels_take(x, c))
    ):
        return None
    call = Call()
    call.stand_in = stand_in
    out = _run_standard(module, call, x, c)
    if out is not None and call.is_counted:
        stand_in.count.on_kernels += 1
    return out


def _run_standard(module: Any, call: Call, x: Tensor, c: Tensor | None) -> Tensor | None:
    """``Attention`` with its standard processor, as in UNets: its layers and the kernel, without the
    processor. None if the processor does more than projections and attention."""
    state, modules = module.__dict__, module._modules
    factor, heads, dtype = state.get("rescale_output_factor"), state["heads"], x.dtype
    if (
        modules.keys() != _PROJECTIONS
        or state.get("residual_connection")
        or type(factor) not in (float, int)
        or factor != 1
        or state.get("inner_dim") != state.get("inner_kv_dim")
        or (c is not None and c.shape[0] != x.shape[0])
    ):
        return None
    # Weight and bias of the layers, if they and the output's dropout are plain and have this dtype.
    layers: Any = None
    outer = modules["to_out"]
    if type(outer) is nn.ModuleList and len(outer._modules) == 2:
        layer, dropout = outer._modules.values()
        if is_identity(dropout):
            each = (modules["to_q"], modules["to_k"], modules["to_v"], layer)
            layers = plain_weights(dtype, *each)
    if layers is None:
        query, key, value = query_key_value(module, x, c)
        is_taken = attention_takes(query, key, value, heads)
    else:
        source, linear = x if c is None else c, torch.nn.functional.linear
        to_q, to_k, to_v, to_out = layers
        query, key, value = linear(x, *to_q), linear(source, *to_k), linear(source, *to_v)
        width = query.shape[2]
        is_taken = (
            width / heads in ATTENTION_HEAD_DIMS
            and dtype in DTYPES_16_BIT
            and width == key.shape[2] == value.shape[2]
        )
    if is_taken:
        out = kernel_attention(call, query, key, value, heads=heads)
    else:
        out = attend(call, module, query, key, value, None, heads=heads)
        call.is_counted = False
    return project_out(module, out) if layers is None else linear(out, *to_out)


# diffusers' ``Attention``, as in UNets.
STANDARD_ATTENTION = ProcessorSpec(_ATTENTION, _forward, "attention")
_specs: dict[str, ProcessorSpec] = {_ATTENTION: STANDARD_ATTENTION}


def attention_spec(module: nn.Module) -> ProcessorSpec | None:
    """The spec of a module whose class's forward calls its processor, or None."""
    if getattr(module, "processor", None) is None:
        return None
    owner = next(base for base in type(module).__mro__ if "forward" in vars(base))
    code = getattr(vars(owner)["forward"], "__code__", None)
    if code is None or "processor" not in code.co_names or "__class__" in code.co_freevars:
        return None
    path = f"{owner.__module__}:{owner.__qualname__}"
    if path not in _specs:
        _specs[path] = ProcessorSpec(path, _forward, "attention")
    return _specs[path]
