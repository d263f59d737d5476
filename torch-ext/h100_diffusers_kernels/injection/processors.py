"""Attention of models without a family: their processors' own code, with another attention in it.

A processor calls diffusers' ``dispatch_attention_fn``, or PyTorch's ``scaled_dot_product_attention``, by a
name of its module. What runs in its place is a copy of its ``__call__`` that finds this package's attention
under that name, and under all others what its module has there: no class, no processor and no module of
diffusers is changed, and no other thread sees anything of it.

The module's ``forward`` is replaced, and not ``attn.processor`` or its class, as diffusers looks at both:
it makes processors by ``type(processor)()``, looks their class up in tables, compares it and replaces them
by others, which are then called as they are. The forward that stands in runs that of the module's class, with
a ``_Caller`` in the module's place, which differs in its ``processor`` alone. The processor's code is given
the module itself.

The copies are made where nothing traces; torch.compile finds them ready.
"""

from __future__ import annotations

import inspect
import math
import sys
import threading
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional
from ..arguments import ATTENTION_HEAD_DIMS, dtype_name
from ..conditions import is_plain, kernels_take, why_not_taken
from ..differentiation import is_differentiated
from .attention import has_function_mode
from .injected import Injected, Injection, Parts
from .linears import is_one
from .original import Original, find_original
from .part import Part
from .snapshot import Look

_LIBRARY = "diffusers"
_DISPATCH_MODULE = "diffusers.models.attention_dispatch"
_SDPA = "torch.nn.functional:scaled_dot_product_attention"
_NATIVE = f"{_DISPATCH_MODULE}:_native_attention"
_DISPATCH = f"{_DISPATCH_MODULE}:dispatch_attention_fn"
_DISPATCH_NAME, _SDPA_NAME = "dispatch_attention_fn", "scaled_dot_product_attention"
_PREPARE_NAME = "prepare_attention_mask"
_PREPARE = tuple(
    f"diffusers.models.{name}.{_PREPARE_NAME}"
    for name in ("attention_processor:Attention", "attention:AttentionModuleMixin")
)
_RESCALE_NAME = "rescale_output_factor"
# What the kernel computes in.
_DTYPES = (torch.bfloat16, torch.float16)
_NOT_HEADS = "attention itself: its tensors are not of four dimensions"
_MISSING = object()


# --------------------------------------------------------------------------------------------------
# What stands in for the functions


class _Calls(threading.local):
    """Whose call of a processor this thread is in.

    Attributes:
        repeated: the mask that was made in it for all heads, (B * H, 1, Sk), and its version; or None.
    """

    injected: Injected | None = None
    repeated: tuple[Tensor, int] | None = None


_calls = _Calls()


def _count(reason: str | None) -> None:
    if torch.compiler.is_compiling():
        return
    injected = _calls.injected
    if injected is None:
        return
    if reason is None:
        injected.count([])
    else:
        injected.leave(reason)


def _dispatch_attention_fn(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
    attention_kwargs: Any = None,
    *,
    backend: Any = None,
    parallel_config: Any = None,
    **more: Any,
) -> Any:
    """diffusers' function of that name, of query, key and value (B, S, H, d)."""
    if backend is None and parallel_config is None and not attention_kwargs and not more:
        reason: str | None = _NOT_HEADS
        if _are_heads(query, key, value):
            if _is_mask_of_keys(attn_mask, query, key):
                attn_mask = attn_mask[:, None, None]
            options = (attn_mask, dropout_p, is_causal, scale, enable_gqa)
            key_bias, reason = _key_bias(query, key, value, *options)
            if reason is None:
                _count(None)
                return functional.attention(query, key, value, scale=scale, key_bias=key_bias)
        if reason:
            _count(reason)
    own = sys.modules[_DISPATCH_MODULE].dispatch_attention_fn
    arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return own(
        *arguments, attention_kwargs, backend=backend, parallel_config=parallel_config, **more
    )


def _scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Any:
    """PyTorch's function of that name, of query, key and value (B, H, S, d)."""
    reason: str | None = _NOT_HEADS
    options = (attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if _are_heads(query, key, value):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        key_bias, reason = _key_bias(q, k, v, *options)
        if reason is None:
            _count(None)
            return functional.attention(q, k, v, scale=scale, key_bias=key_bias).transpose(1, 2)
    if reason:
        _count(reason)
    own = torch.nn.functional.scaled_dot_product_attention
    return own(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _are_heads(query: Any, key: Any, value: Any) -> bool:
    return (
        isinstance(query, Tensor)
        and isinstance(key, Tensor)
        and isinstance(value, Tensor)
        and query.dim() == key.dim() == value.dim() == 4
    )


def _is_mask_of_keys(mask: Any, query: Tensor, key: Tensor) -> bool:
    """Whether diffusers' dispatch takes a mask of two dimensions as one of each sample's keys."""
    return isinstance(mask, Tensor) and mask.shape == (query.shape[0], key.shape[1])


def _key_bias(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    dropout_p: Any,
    is_causal: Any,
    scale: Any,
    enable_gqa: Any,
) -> tuple[Tensor | None, str | None]:
    """The mask as ``attention`` takes it, and why the call is not one for it: None if it is, and "" where
    that is no fall-back. Tensors are (B, S, H, d)."""
    if is_differentiated(query, key, value, mask if isinstance(mask, Tensor) else None):
        return None, ""
    batch, _, heads, head_dim = query.shape
    if query.dtype not in _DTYPES:
        return None, f"attention itself: no kernel for {dtype_name(query.dtype)}"
    if head_dim not in ATTENTION_HEAD_DIMS:
        return None, f"attention itself: its heads have {head_dim} elements"
    if not kernels_take(query, key, value):
        return None, f"attention itself: {why_not_taken(query, key, value)}"
    kv_heads = key.shape[2]
    if (
        key.shape != value.shape
        or key.shape != (batch, key.shape[1], kv_heads, head_dim)
        or not (kv_heads == heads or (enable_gqa and kv_heads > 0 and heads % kv_heads == 0))
    ):
        return None, "attention itself: its tensors have shapes that the kernel does not take"
    if is_causal:
        return None, "attention itself: it is causal"
    if dropout_p != 0.0:
        return None, "attention itself: it has a dropout"
    if scale is not None and not (isinstance(scale, float) and 0.0 < scale < math.inf):
        return None, f"attention itself: its scale is {scale}"
    if mask is None:
        return None, None
    key_bias = _as_key_bias(mask, key)
    if key_bias is None:
        return None, "attention itself: its mask differs between queries or heads"
    return key_bias, None


def _as_key_bias(mask: Any, key: Tensor) -> Tensor | None:
    """(B, Sk), of a mask that is broadcast over heads and queries: booleans, or what is added to the scores.

    Whether it differs between them is told by its shape and strides, or by who made it; not by its values.
    """
    if not isinstance(mask, Tensor) or not is_plain(mask) or mask.device != key.device:
        return None
    if mask.dtype not in (torch.bool, torch.float32, key.dtype) or not 0 < mask.dim() <= 4:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    batch, keys = key.shape[:2]
    if mask.shape[0] not in (1, batch) or mask.shape[3] != keys or 0 in mask.shape:
        return None
    if _is_repeated(mask):
        mask = mask[:, :1]
    if any(mask.shape[i] != 1 and mask.stride(i) != 0 for i in (1, 2)):
        return None
    mask = mask[:, 0, 0].expand(batch, keys)
    if mask.dtype == torch.bool:
        return mask.to(torch.float32).log_()  # 0 where it is set, else -inf
    return mask if keys == 1 or mask.stride(1) == 1 else mask.contiguous()


def _is_repeated(mask: Tensor) -> bool:
    """Whether a mask (B, H, 1, Sk) is the one that was made for all heads in this call."""
    if torch.compiler.is_compiling() or _calls.repeated is None:
        return False
    made, version = _calls.repeated
    return (
        mask.data_ptr() == made.data_ptr()
        and _version(made) == version
        and mask.shape == (mask.shape[0], made.shape[0] // mask.shape[0], *made.shape[1:])
        and mask.is_contiguous()
        and made.is_contiguous()
    )


def _version(x: Tensor) -> int:
    """Which tells of writes; those made in inference mode have none."""
    return 0 if x.is_inference() else x._version


class _Functional:
    """``torch.nn.functional`` with another attention."""

    scaled_dot_product_attention = staticmethod(_scaled_dot_product_attention)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.nn.functional, name)


# --------------------------------------------------------------------------------------------------
# Processors


class Rebound(NamedTuple):
    """A class of processors whose code finds another attention.

    Attributes:
        call: its ``__call__``.
        library: the module whose names the code looks up.
        names: those that it was copied with, and what they were.
        caller: a class: ``caller(processor, module)`` is called as the processor is.
        traced_caller: the same for torch.compile.
        dispatches: whether it calls diffusers' dispatch, or PyTorch's attention.
        prepares: whether it has the module prepare its mask.
        rescales: whether it divides by a factor of the module's.
    """

    call: Callable
    library: Any
    names: tuple[tuple[str, Any], ...]
    caller: type
    traced_caller: type
    dispatches: bool
    prepares: bool
    rescales: bool

    def holds(self, cls: type) -> bool:
        """Whether what was copied is as it was."""
        if cls.__call__ is not self.call:
            return False
        for name, value in self.names:  # noqa: SIM110 - all() of a generator takes twice as long
            if getattr(self.library, name, _MISSING) is not value:
                return False
        return True


# By class: classes stay, and to make one of them twice does no harm.
_rebound: dict[type, Rebound] = {}


def rebound(cls: type) -> Rebound | str:
    """A class of processors with this package's attention, or why there is none."""
    made = _rebound.get(cls)
    if made is not None and made.holds(cls):
        return made
    if torch.compiler.is_compiling():
        return "its processor has not been looked at yet, or was patched since"
    result = _make_rebound(cls)
    if isinstance(result, Rebound):
        _rebound[cls] = result
    return result


def _make_rebound(cls: type) -> Rebound | str:
    owner = next((base for base in cls.__mro__ if "__call__" in vars(base)), None)
    call: Any = None if owner is None else vars(owner)["__call__"]
    unknown = f"its processor is a {cls.__module__}.{cls.__qualname__}, whose attention is its own"
    if type(call) is not FunctionType or not _is_of_library(call) or not _is_of_library(cls):
        return unknown
    names = _names(call.__code__)
    seen = {name: call.__globals__[name] for name in sorted(names) if name in call.__globals__}
    known: dict[str, Any] = {}
    if _DISPATCH_NAME in names:
        if seen.get(_DISPATCH_NAME) is not find_original(_DISPATCH).function:
            return "dispatch_attention_fn was replaced"
        known[_DISPATCH_NAME] = _dispatch_attention_fn
    if _SDPA_NAME in names:
        if seen.get("F") is not torch.nn.functional or "torch" in seen and "functional" in names:
            return unknown
        known["F"] = _Functional()
    library = sys.modules.get(call.__globals__.get("__name__", ""))
    if not known or library is None or vars(library) is not call.__globals__:
        return unknown
    # Without the module's name: torch.compile would look the others up in it.
    kept = ("__builtins__", "__package__")
    namespace = {name: call.__globals__[name] for name in kept if name in call.__globals__}
    namespace.update(seen)
    namespace.update(known)
    copied = FunctionType(
        call.__code__, namespace, call.__name__, call.__defaults__, call.__closure__
    )
    copied.__kwdefaults__ = call.__kwdefaults__
    caller = _caller_class(cls, copied)
    traced_caller = _caller_class(cls, copied)
    if caller is None or traced_caller is None:
        return unknown
    # It is not to be made again in each call. torch.compile would not see through it.
    called: Any = caller.__call__
    called.__signature__ = inspect.signature(called)
    does = (_DISPATCH_NAME in known, _PREPARE_NAME in names, _RESCALE_NAME in names)
    return Rebound(call, library, tuple(seen.items()), caller, traced_caller, *does)


def _is_of_library(value: Any) -> bool:
    return (value.__module__ or "").partition(".")[0] == _LIBRARY


def _names(code: CodeType) -> set[str]:
    """All names that a function looks up, and those in it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


class _ProcessorCaller:
    """What a module's forward has in its processor's place. It shows the processor's attributes."""

    def __init__(self, processor: Any, module: nn.Module) -> None:
        self._processor = processor
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)


def _caller_class(cls: type, copied: FunctionType) -> type | None:
    """Of a processor's name, and with the signature of its ``__call__``, which the modules' forwards read.

    It is written as text, as what torch.compile traces can have another's signature in no other way.
    """
    parameters = list(inspect.signature(copied).parameters.values())
    if len(parameters) < 2 or parameters[1].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return None
    taken: list[str] = []
    given: list[str] = []
    for parameter in parameters[2:]:
        name = parameter.name
        if parameter.kind is parameter.KEYWORD_ONLY:
            if not any(x.startswith("*") for x in taken):
                taken.append("*")
            taken.append(name)
            given.append(f"{name}={name}")
        else:
            stars = "*" * (
                (parameter.kind is parameter.VAR_POSITIONAL)
                + 2 * (parameter.kind is parameter.VAR_KEYWORD)
            )
            taken.append(stars + name)
            given.append(stars + name)
    text = (
        f"def __call__({', '.join(['_self', parameters[1].name, *taken])}):\n"
        f"    return _copied({', '.join(['_self._processor', '_self._module', *given])})\n"
    )
    # Without builtins, which it does not need: torch.compile would look into all of them.
    namespace: dict[str, Any] = {"_copied": copied, "__builtins__": {}}
    exec(compile(text, f"<{cls.__qualname__} with another attention>", "exec"), namespace)
    call: Any = namespace["__call__"]
    call.__defaults__, call.__kwdefaults__ = copied.__defaults__, copied.__kwdefaults__
    return type(cls.__name__, (_ProcessorCaller,), {"__call__": call})


class _Caller:
    """An attention module in its class's forward, but for its processor."""

    def __init__(self, module: nn.Module, processor: _ProcessorCaller) -> None:
        self._module = module
        self.processor = processor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _One(float):
    """1.0, by which a tensor is divided without an operation: the quotient is the tensor."""

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        is_by_one = func in _DIVISIONS and len(args) == 2 and not kwargs and type(args[1]) is cls
        if is_by_one and args[0].is_floating_point():
            return args[0]
        args = tuple(float(x) if type(x) is cls else x for x in args)
        kwargs = {name: float(x) if type(x) is cls else x for name, x in (kwargs or {}).items()}
        return func(*args, **kwargs)


_ONE = _One(1.0)
_DIVISIONS = (torch.Tensor.div, torch.Tensor.__truediv__)


class _InProcessor:
    """An attention module in its processor's code, which divides by no factor of 1."""

    __slots__ = ("_module",)
    # So that isinstance tells what it stands for.
    __class__: Any = property(lambda self: type(self._module))

    def __init__(self, module: nn.Module) -> None:
        object.__setattr__(self, "_module", module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    @property
    def rescale_output_factor(self) -> Any:
        factor = self._module.rescale_output_factor
        return _ONE if is_one(factor) else factor


class _Preparing(_InProcessor):
    """It notes the mask that it makes for all heads, too."""

    __slots__ = ()

    def prepare_attention_mask(self, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        made = self._module.prepare_attention_mask(attention_mask, *args, **kwargs)
        # It repeats each row for the heads of its sample, one after the other.
        is_repeated = (
            isinstance(made, Tensor)
            and isinstance(attention_mask, Tensor)
            and made.dim() == attention_mask.dim() == 3
            and made.shape[1] == 1
            and made.shape[0] == attention_mask.shape[0] * self._module.heads
        )
        _calls.repeated = (made, _version(made)) if is_repeated else None
        return made


# --------------------------------------------------------------------------------------------------
# Modules


def processed_originals() -> dict[str, Original]:
    """What ``processed_forward`` stands in for, besides a class's forward."""
    return {path: find_original(path) for path in (_SDPA, _NATIVE, *_PREPARE)}


@dataclass(frozen=True)
class ProcessedAttention(Part):
    """A class of modules whose forward calls their processor."""

    def originals(self) -> dict[str, Original]:
        return processed_originals()

    def fill(self, parts: Parts, module: nn.Module, injection: Injection, snapshot: Look) -> None:
        found = rebound(type(getattr(module, "processor", None)))
        parts.reason = found if isinstance(found, str) else None


def processed_forward(self: nn.Module, injected: Injected, *args: Any, **kwargs: Any) -> Any:
    """The forward of the module's class, with another attention in its processor's code."""
    processor = self.processor
    found = rebound(type(processor))
    if isinstance(found, str):
        injected.leave(found)
        return injected.class_forward(self, *args, **kwargs)
    if not _is_free(processor, found, injected.injection):
        return injected.class_forward(self, *args, **kwargs)
    if torch.compiler.is_compiling():
        caller: Any = _Caller(self, found.traced_caller(processor, self))
        return injected.class_forward(caller, *args, **kwargs)
    module: Any = _InProcessor(self) if found.rescales else self
    # What a transform of torch.func wraps has no memory to be known by.
    is_plain_call = not torch._C._are_functorch_transforms_active()
    if found.prepares and is_plain_call and kwargs.get("attention_mask") is not None:
        own = [injected.injection.originals[path].function for path in _PREPARE]
        if getattr(type(self), _PREPARE_NAME, None) in own:
            module = _Preparing(self)
    caller = _Caller(self, found.caller(processor, module))
    outer = _calls.injected, _calls.repeated
    _calls.injected, _calls.repeated = injected, None
    try:
        return injected.class_forward(caller, *args, **kwargs)
    finally:
        _calls.injected, _calls.repeated = outer


def _is_free(processor: Any, found: Rebound, injection: Injection) -> bool:
    """Whether attention is left to PyTorch's own choice. A backend may be chosen for the module, for all of
    them, or by parallelism; a function mode may wait for scaled_dot_product_attention, or stand for it."""
    if not injection.originals[_SDPA].is_in_use() or has_function_mode():
        return False
    if not found.dispatches:
        return True
    if (
        getattr(processor, "_attention_backend", None) is not None
        or getattr(processor, "_parallel_config", None) is not None
    ):
        return False
    registry = getattr(sys.modules[_DISPATCH_MODULE], "_AttentionBackendRegistry", None)
    if registry is None:
        return False
    backend, function = registry.get_active_backend()
    return backend == "native" and function is injection.originals[_NATIVE].function


def attention_part(module: nn.Module) -> ProcessedAttention | None:
    """What a module is to this file; None if its forward is none that calls a processor."""
    if getattr(module, "processor", None) is None:
        return None
    owner = next(base for base in type(module).__mro__ if "forward" in vars(base))
    forward = vars(owner)["forward"]
    code = getattr(forward, "__code__", None)
    if code is None or "processor" not in code.co_names or "__class__" in code.co_freevars:
        return None
    path = f"{owner.__module__}:{owner.__qualname__}"
    return ProcessedAttention(path, None, processed_forward, "attention")


def head_dim_of(module: Any) -> int | None:
    """The number of elements of a head, where the module says it."""
    attributes = vars(module)
    head_dim, heads, inner = (attributes.get(name) for name in ("head_dim", "heads", "inner_dim"))
    if isinstance(head_dim, int):
        return head_dim
    if isinstance(inner, int) and isinstance(heads, int) and heads > 0:
        return inner // heads
    return None
