"""Attention of models in part: a processor's own code, with this package's attention in it.

A processor calls diffusers' ``dispatch_attention_fn``, or PyTorch's ``scaled_dot_product_attention``, by a
name of its module. What runs instead is a copy of its ``__call__`` that finds this package's function under
that name, and everything else where its module has it. No class, processor or module of diffusers is changed,
and no other thread sees the copy.

The forward of the attention module is replaced, and not its processor: diffusers makes, compares and replaces
processors by their class. The stand-in runs the forward of the module's class on a proxy of the module, of
which only the processor differs. Copies are made where nothing traces; torch.compile finds them ready.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional
from ..arguments import ATTENTION_HEAD_DIMS, dtype_name
from ..arguments import is_plain as is_plain_tensor
from ..conditions import ATTENTION_DTYPES, kernels_take, tracks_derivatives, why_not_taken
from ..differentiation import is_differentiated
from .attention import DISPATCH, SDPA, attend, is_native, project_out
from .checks import KnownFunction
from .linears import linear
from .norm_modules import left_to_class
from .patch import Call, Injection, PatchSpec

_DISPATCH_NAME, _SDPA_NAME = "dispatch_attention_fn", "scaled_dot_product_attention"
_ATTENTION = "diffusers.models.attention_processor:Attention"
_STANDARD = KnownFunction("diffusers.models.attention_processor:AttnProcessor2_0.__call__")
_PREPARE = (
    KnownFunction(f"{_ATTENTION}.prepare_attention_mask"),
    KnownFunction("diffusers.models.attention:AttentionModuleMixin.prepare_attention_mask"),
)
# What the standard processor would do besides projections and attention, or the module around it.
_NONE_OF = ("spatial_norm", "group_norm", "norm_q", "norm_k", "norm_cross", "residual_connection")
_MISSING = object()


# --------------------------------------------------------------------------------------------------
# What stands in for the functions


def dispatch_attention_fn(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
    attention_kwargs: Any = None,
    **more: Any,
) -> Any:
    """diffusers' function of that name: query, key and value are (B, S, H, d)."""
    options = (dropout_p, is_causal, scale, enable_gqa)
    if not attention_kwargs and all(option is None for option in more.values()):
        mask = attn_mask
        if isinstance(mask, Tensor) and mask.shape == (query.shape[0], key.shape[1]):
            mask = mask[:, None, None]  # of each sample's keys
        result = _attention(query, key, value, mask, *options)
        if result is not None:
            return result
    own: Any = DISPATCH.found.function
    return own(query, key, value, attn_mask, *options, attention_kwargs, **more)


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Any:
    """PyTorch's function of that name: query, key and value are (B, H, S, d)."""
    options = (dropout_p, is_causal, scale, enable_gqa)
    if all(isinstance(x, Tensor) and x.dim() > 2 for x in (query, key, value)):
        q, k, v = (x.transpose(-3, -2) for x in (query, key, value))
        result = _attention(q, k, v, attn_mask, *options)
        if result is not None:
            return result.transpose(1, 2)
    own = torch.nn.functional.scaled_dot_product_attention
    arguments = (query, key, value, attn_mask, dropout_p, is_causal)
    return own(*arguments, scale=scale, enable_gqa=enable_gqa)


class _Functional:
    """``torch.nn.functional`` with another attention."""

    scaled_dot_product_attention = staticmethod(scaled_dot_product_attention)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.nn.functional, name)


def _attention(query: Any, key: Any, value: Any, mask: Any, *options: Any) -> Tensor | None:
    """Attention of (B, S, H, d) on the kernel; None, counted, where the kernel does not compute it."""
    is_compiling = torch.compiler.is_compiling()
    current = None if is_compiling else _thread.current
    key_bias, reason = _key_bias(query, key, value, mask, current, *options)
    if current is not None:
        if reason is None:
            current._ran = True
        elif reason:
            current._call.fall_back(f"attention itself: {reason}")
    if reason is not None:
        return None
    return functional.attention(query, key, value, scale=options[2], key_bias=key_bias)


def _key_bias(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    current: _Attention | None,
    dropout_p: Any,
    is_causal: Any,
    scale: Any,
    enable_gqa: Any,
) -> tuple[Tensor | None, str | None]:
    """The mask as ``attention`` takes it, and why the kernel does not compute the call: None if it does, and
    "" where that is no fall-back."""
    if not all(isinstance(x, Tensor) and x.dim() == 4 for x in (query, key, value)):
        return None, "its tensors are not of four dimensions"
    if is_differentiated(query, key, value, mask if isinstance(mask, Tensor) else None):
        return None, ""
    batch, _, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    if query.dtype not in ATTENTION_DTYPES:
        return None, f"no kernel for {dtype_name(query.dtype)}"
    if head_dim not in ATTENTION_HEAD_DIMS:
        return None, f"its heads have {head_dim} elements"
    if not kernels_take(query, key, value):
        return None, why_not_taken(query, key, value)
    if (
        key.shape != value.shape
        or key.shape != (batch, key.shape[1], kv_heads, head_dim)
        or not (kv_heads == heads or (enable_gqa and kv_heads > 0 and heads % kv_heads == 0))
    ):
        return None, "its tensors have shapes that the kernel does not take"
    if is_causal:
        return None, "it is causal"
    if dropout_p != 0.0:
        return None, "it has a dropout"
    if scale is not None and not (isinstance(scale, float) and 0.0 < scale < math.inf):
        return None, f"its scale is {scale}"
    if mask is None:
        return None, None
    key_bias = _bias_of_mask(mask, key, current)
    return key_bias, None if key_bias is not None else "its mask differs between queries or heads"


def _bias_of_mask(mask: Any, key: Tensor, current: _Attention | None) -> Tensor | None:
    """(B, Sk), of a mask that is broadcast over heads and queries: booleans, or what is added to the scores.

    Its shape and strides tell whether it is, or that the module repeated it; its values are not read.
    """
    if not isinstance(mask, Tensor) or not is_plain_tensor(mask) or mask.device != key.device:
        return None
    if mask.dtype not in (torch.bool, torch.float32, key.dtype) or not 0 < mask.dim() <= 4:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    batch, keys = key.shape[:2]
    if mask.shape[0] not in (1, batch) or mask.shape[3] != keys or 0 in mask.shape:
        return None
    if current is not None and current.has_repeated(mask):
        mask = mask[:, :1]
    if any(mask.shape[i] != 1 and mask.stride(i) != 0 for i in (1, 2)):
        return None
    mask = mask[:, 0, 0].expand(batch, keys)
    if mask.dtype == torch.bool:
        return mask.to(torch.float32).log_()  # 0 where it is set, otherwise -inf
    return mask if keys == 1 or mask.stride(1) == 1 else mask.contiguous()


# --------------------------------------------------------------------------------------------------
# Proxies


class _Processor:
    """A processor in its copied code, which is the ``__call__`` of a subclass."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self.__call__ = processor.__call__  # of which modules' forwards read the signature

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)


class _Attention:
    """An attention module in its class's forward and in its processor's code, with another processor."""

    def __init__(self, module: nn.Module, processor: _Processor, call: Call) -> None:
        self._module = module
        self.processor = processor
        self._call = call
        self._ran = False
        self._repeated: tuple[Tensor, int] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def prepare_attention_mask(self, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's, which repeats each sample's mask for its heads; the result is remembered."""
        module: Any = self._module
        made = module.prepare_attention_mask(attention_mask, *args, **kwargs)
        own = getattr(type(module), "prepare_attention_mask", None)
        self._repeated = None
        if (
            not torch.compiler.is_compiling()
            and not torch._C._are_functorch_transforms_active()  # it has no memory to be known by
            and any(own is known.found.function for known in _PREPARE)
            and isinstance(attention_mask, Tensor)
            and made.dim() == attention_mask.dim() == 3
            and made.shape[1] == 1
            and made.shape[0] == attention_mask.shape[0] * module.heads
        ):
            self._repeated = (made, _version(made))
        return made

    def has_repeated(self, mask: Tensor) -> bool:
        """Whether a mask (B, H, 1, Sk) is the one that the module repeated."""
        if self._repeated is None:
            return False
        made, version = self._repeated
        heads = made.shape[0] // mask.shape[0]
        return (
            mask.data_ptr() == made.data_ptr()
            and _version(made) == version
            and mask.shape == (mask.shape[0], heads, *made.shape[1:])
            and mask.is_contiguous()
            and made.is_contiguous()
        )


def _version(x: Tensor) -> int:
    """Changes with each write; tensors of inference mode have none."""
    return 0 if x.is_inference() else x._version


class _Thread(threading.local):
    """``current``: the attention whose processor's code this thread runs."""

    current: _Attention | None = None


_thread = _Thread()


# --------------------------------------------------------------------------------------------------
# Copies


class _Copy(NamedTuple):
    """The code of a class of processors, with this package's attention.

    Attributes:
        call: the ``__call__`` that was copied.
        library: the module whose names the code looks up.
        names: those names and their values at the time.
        proxy: a class: ``proxy(processor)`` is called as the processor is.
        dispatches: whether the code calls diffusers' dispatch, or PyTorch's attention.
    """

    call: Callable
    library: Any
    names: tuple[tuple[str, Any], ...]
    proxy: type[_Processor]
    dispatches: bool

    def is_current(self, cls: type) -> bool:
        """Whether what was copied is as it was."""
        if cls.__call__ is not self.call:
            return False
        library = self.library
        return all(getattr(library, name, _MISSING) is value for name, value in self.names)


_copies: dict[type, _Copy] = {}


def _copy_of(cls: type) -> _Copy | str:
    """The copy for a class of processors, or why there is none."""
    copy = _copies.get(cls)
    if copy is not None and copy.is_current(cls):
        return copy
    if torch.compiler.is_compiling():
        return "its processor has not been looked at yet, or was patched since"
    made = _make_copy(cls)
    if isinstance(made, _Copy):
        _copies[cls] = made
    return made


def _make_copy(cls: type) -> _Copy | str:
    call: Any = getattr(cls, "__call__", None)  # noqa: B004 - it is copied
    unknown = f"its processor is a {cls.__module__}.{cls.__qualname__}, whose attention is its own"
    if type(call) is not FunctionType or not all(
        (value.__module__ or "").partition(".")[0] == "diffusers" for value in (call, cls)
    ):
        return unknown
    names = _names(call.__code__)
    seen = {name: call.__globals__[name] for name in sorted(names) if name in call.__globals__}
    others: dict[str, Any] = {}
    if _DISPATCH_NAME in names:
        if seen.get(_DISPATCH_NAME) is not DISPATCH.found.function:
            return f"{_DISPATCH_NAME} was replaced"
        others[_DISPATCH_NAME] = dispatch_attention_fn
    if _SDPA_NAME in names:
        if seen.get("F") is not torch.nn.functional or ("torch" in seen and "functional" in names):
            return unknown
        others["F"] = _Functional()
    library = sys.modules.get(call.__globals__.get("__name__", ""))
    if (
        not others
        or library is None
        or vars(library) is not call.__globals__
        or "__class__" in call.__code__.co_freevars
    ):
        return unknown
    # Without the module's name: torch.compile would look the others up in the module.
    kept = ("__builtins__", "__package__")
    namespace = {name: call.__globals__[name] for name in kept if name in call.__globals__}
    namespace.update({**seen, **others})
    defaults, closure = call.__defaults__, call.__closure__
    copied = FunctionType(call.__code__, namespace, call.__name__, defaults, closure)
    copied.__kwdefaults__ = call.__kwdefaults__
    proxy = type(cls.__name__, (_Processor,), {"__call__": copied})
    return _Copy(call, library, tuple(seen.items()), proxy, _DISPATCH_NAME in others)


def _names(code: CodeType) -> set[str]:
    """All names that a function, or a function in it, looks up."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))


# --------------------------------------------------------------------------------------------------
# Modules


@dataclass(frozen=True, eq=False)
class ProcessorSpec(PatchSpec):
    """A class of modules whose forward calls their processor.

    Attributes:
        dispatches: False, as ``attention.attend`` is to call PyTorch's attention.
    """

    dispatches: bool = False

    def why_not(self, module: Any, injection: Injection) -> str | None:
        copy = _copy_of(type(module.processor))
        return copy if isinstance(copy, str) else None


def _forward(self: Any, call: Call, *args: Any, **kwargs: Any) -> Any:
    """The forward of the module's class, with another attention in its processor's code."""
    processor = self.processor
    copy = _copy_of(type(processor))
    if isinstance(copy, str):
        return left_to_class(call, copy, self, *args, **kwargs)
    if not SDPA.is_in_use() or not is_native(processor, copy.dispatches):
        return left_to_class(call, None, self, *args, **kwargs)
    if copy.call is _STANDARD.found.function:
        out = _standard(self, call, *args, **kwargs)
        if out is not None:
            return out
    attention: Any = _Attention(self, copy.proxy(processor), call)
    if torch.compiler.is_compiling():
        return call.own_forward(attention, *args, **kwargs)
    outer, _thread.current = _thread.current, attention
    try:
        return call.own_forward(attention, *args, **kwargs)
    finally:
        _thread.current = outer
        call.is_counted = call.is_counted and attention._ran


def _standard(
    self: Any,
    call: Call,
    hidden_states: Any = None,
    encoder_hidden_states: Any = None,
    attention_mask: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """``Attention`` with its standard processor, as UNets have it: layers and the kernel, without the
    processor. None where the processor does more than projections and attention."""
    x, c = hidden_states, encoder_hidden_states
    c = x if c is None else c
    if (
        attention_mask is not None
        or kwargs
        or not (isinstance(x, Tensor) and isinstance(c, Tensor) and x.dim() == c.dim() == 3)
        or len(c) != len(x)
        or x.dtype not in ATTENTION_DTYPES
        or not kernels_take(x, c)
        or tracks_derivatives()
        or any(getattr(self, name, None) for name in _NONE_OF)
    ):
        return None
    state = self.__dict__
    factor, inner, heads = (state.get(n) for n in ("rescale_output_factor", "inner_dim", "heads"))
    if (
        type(factor) not in (float, int)
        or factor != 1
        or inner != state.get("inner_kv_dim")
        or inner % heads != 0
        or inner // heads not in ATTENTION_HEAD_DIMS
    ):
        return None
    query, key, value = linear(self.to_q, x), linear(self.to_k, c), linear(self.to_v, c)
    return project_out(self, attend(call, self, query, key, value, None, heads=heads))


_specs: dict[str, ProcessorSpec] = {}


def attention_spec(module: nn.Module) -> ProcessorSpec | None:
    """The spec of a module whose class's forward calls its processor, or None."""
    if getattr(module, "processor", None) is None:
        return None
    owner = next(base for base in type(module).__mro__ if "forward" in vars(base))
    code = getattr(vars(owner)["forward"], "__code__", None)
    if code is None or "processor" not in code.co_names or "__class__" in code.co_freevars:
        return None
    path = f"{owner.__module__}:{owner.__qualname__}"
    return _specs.setdefault(path, ProcessorSpec(path, None, _forward, "attention"))
