"""The decision on attention itself: this package's kernel, or the model's own code, and why.

It depends on the user's choices (an option, a backend, a replaced function), on the arguments, and on the
tensors.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ... import operations
from ...operations.conditions import (
    ATTENTION_HEAD_DIMS,
    dtype_name,
    is_differentiated,
    is_plain_tensor,
)
from ...operations.key_blocks import (
    KeyBlocks,
    bounds_of_mask,
    has_mask_mod,
    read_block_mask,
)
from ..core.cache import is_capturing
from ..core.checks import KnownFunction
from ..core.patch import Call
from ..core.report import OWN_ATTENTION
from ..parallel.exchange import config_of

DISPATCH_MODULE = "diffusers.models.attention_dispatch"
BACKEND_NAME = "h100"
SDPA = KnownFunction("torch.nn.functional:scaled_dot_product_attention")
DISPATCH = KnownFunction(f"{DISPATCH_MODULE}:dispatch_attention_fn")
NATIVE = KnownFunction(f"{DISPATCH_MODULE}:_native_attention")
FLEX = KnownFunction(f"{DISPATCH_MODULE}:_native_flex_attention")
USER_BACKEND = f"{OWN_ATTENTION}: a backend is chosen for it"
GRADIENT = f"{OWN_ATTENTION}: a derivative is requested"
NOT_WANTED = f"{OWN_ATTENTION}: requested by attention=False"
MASK_DIFFERS = "its mask differs between queries or heads"
INT8, SIXTEEN_BIT = "int8", "16-bit"
# Attention in 8 bits needs this many queries and keys, and larger heads than this. With fewer tokens
# quantization takes the time that it saves; with smaller heads the softmax takes most of the time.
INT8_MIN_TOKENS, INT8_ABOVE_HEAD_DIM = 4096, 64


def is_native(processor: Any, has_dispatch: bool) -> bool:
    """Whether PyTorch chooses the attention backend, as by default in diffusers, or the processor's class
    does, or the user chose this package's, for one module or for all of them."""
    if not has_dispatch:
        return True
    chosen = getattr(processor, "_attention_backend", None)
    if chosen is not None:
        is_of_class = "_attention_backend" not in vars(processor)
        return is_of_class or bool(chosen == BACKEND_NAME)
    registry = getattr(sys.modules[DISPATCH_MODULE], "_AttentionBackendRegistry", None)
    if registry is None:
        return False
    backend, function = registry.get_active_backend()
    return backend == BACKEND_NAME or (backend == "native" and function is NATIVE.function)


def is_flex(chosen: Any) -> bool:
    """Whether a dispatch with this chosen backend, or None, runs PyTorch's FlexAttention."""
    registry = getattr(sys.modules[DISPATCH_MODULE], "_AttentionBackendRegistry", None)
    if registry is None or FLEX.function is None:
        return False
    if chosen is None:
        backend, function = registry.get_active_backend()
        return backend == "flex" and function is FLEX.function
    return chosen == "flex" and registry._backends.get("flex") is FLEX.function


def dispatch_of(spec: Any) -> Any:
    """The dispatch that the processor calls, or None if it calls none: in an older diffusers it may not."""
    library = sys.modules[spec.library] if spec.dispatches else None
    return getattr(library, "dispatch_attention_fn", None)


def why_own_attention(module: Any, has_dispatch: bool) -> str | None:
    """Why a module runs its own attention, as far as its attributes, processor and layers tell."""
    if not is_native(module.processor, has_dispatch):
        return USER_BACKEND
    attributes = module.__dict__
    head_dim, heads, inner = (attributes.get(name) for name in ("head_dim", "heads", "inner_dim"))
    if not isinstance(head_dim, int):
        is_known = isinstance(inner, int) and isinstance(heads, int) and heads > 0
        head_dim = inner // heads if is_known else None
    reason = why_not_head_dim(head_dim)
    weights = (getattr(child, "weight", None) for child in module.children())
    dtype = next((w.dtype for w in weights if isinstance(w, Tensor) and w.dim() == 2), None)
    if reason is None and dtype in (torch.float32, torch.float64):  # others may be quantized
        reason = f"no kernel for {dtype_name(dtype)}"
    return None if reason is None else f"{OWN_ATTENTION}: {reason}"


def why_not_head_dim(head_dim: int | None) -> str | None:
    """Why the kernel does not take heads of this size, as a clause."""
    if head_dim is None or head_dim in ATTENTION_HEAD_DIMS:
        return None
    return f"its heads have {head_dim} elements; the kernel takes multiples of 8 up to 128"


def context_parallel_of(call: Call, module: Any) -> Any:
    """The ``ContextParallelConfig`` of an attention; None without, and if the user chose another backend or
    replaced diffusers' dispatch.

    diffusers sets it on processors that have the attribute, and skips the others. These follow the model's,
    or a rank would attend to its own tokens only.
    """
    found = getattr(module.processor, "_parallel_config", call)
    if found is call:
        found = getattr(call.stand_in.injection.model(), "_parallel_config", None)
    config = None if found is None else config_of(found)
    if config is None:
        return None
    dispatch = dispatch_of(call.stand_in.spec)
    is_ours = is_native(module.processor, dispatch is not None)
    return config if is_ours and dispatch in (None, DISPATCH.function) else None


def may_attend(call: Call, module: Any, head_dim: int, of_flex: bool = False) -> bool:
    """Whether attention itself may run on the kernel, by the user's choices and the libraries' functions.
    Counts the reason if not. ``of_flex``: whether it may run in FlexAttention's place."""
    dispatch, reason = dispatch_of(call.stand_in.spec), None
    is_own = is_native(module.processor, dispatch is not None)
    if not (is_own or (of_flex and is_flex(getattr(module.processor, "_attention_backend", None)))):
        call.leave_attention(USER_BACKEND)
        return False
    if not call.stand_in.injection.options["attention"]:
        return False
    if head_dim not in ATTENTION_HEAD_DIMS:
        reason = why_not_head_dim(head_dim)
    elif torch.nn.functional.scaled_dot_product_attention is not SDPA.function:
        reason = "scaled_dot_product_attention was replaced"
    elif dispatch is not None:
        if NATIVE.function is None:
            reason = "this diffusers version does not expose its backend"
        elif dispatch is not DISPATCH.function:
            reason = "dispatch_attention_fn was replaced"
    if reason is not None:
        call.fall_back(f"{OWN_ATTENTION}: {reason}")
    return reason is None


def why_not_arguments(dropout_p: float, scale: Any) -> str | None:
    """Why the kernel does not take these arguments of an attention, as a clause."""
    if dropout_p != 0.0:
        return "it has dropout"
    if scale is not None and not (isinstance(scale, float) and 0.0 < scale < math.inf):
        return f"its scale is {scale}"
    return None


def kernel_attention(
    call: Call | bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    heads: Any = None,
    **options: Any,
) -> Any:
    """``operations.attention``, or ``attention_int8`` if the call's injection asks for it and it saves time.
    ``call``: only whether it asks, in compiled code that does not know the call."""
    is_int8 = call if isinstance(call, bool) else call.stand_in.injection.options["is_int8"]
    if not (
        is_int8
        and options.get("key_bias") is options.get("blocks") is None
        and query.shape[1] >= INT8_MIN_TOKENS
        and key.shape[1] >= INT8_MIN_TOKENS
        and query.shape[-1] / (heads or 1) > INT8_ABOVE_HEAD_DIM
    ):
        out = None if options.get("blocks") is None else options.pop("out", None)
        result = operations.attention(query, key, value, heads=heads, **options)
        return result if out is None else out.copy_(result)
    if not (isinstance(call, bool) or torch.compiler.is_dynamo_compiling()):
        call.stand_in.count.in_int8 += 1
    out, *_ = (options.pop(name, None) for name in ("out", "key_bias", "blocks"))
    result = operations.attention_int8(query, key, value, heads=heads, **options)
    return result if out is None else out.copy_(result)


def count_own(call: Call, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Counts an attention of tensors that the kernel does not take."""
    if is_differentiated(query, key, value):
        call.leave_attention(GRADIENT)
    elif query.shape[0] != key.shape[0]:
        call.fall_back(f"{OWN_ATTENTION}: its queries and keys have different batch sizes")
    else:
        call.fall_back(f"{OWN_ATTENTION}: no kernel for {dtype_name(query.dtype)}")


def key_bias_of(mask: Any, key: Tensor) -> Tensor | None:
    """The bias (B, Sk) equivalent to a mask that broadcasts to (B, H, Sq, Sk), of booleans or of values added
    to the scores; None if it differs between heads or queries. Only its shape and strides are read."""
    if not isinstance(mask, Tensor) or not is_plain_tensor(mask) or mask.device != key.device:
        return None
    if mask.dtype not in (torch.bool, torch.float32, key.dtype) or not 0 < mask.dim() <= 4:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    batch, keys = key.shape[:2]
    if mask.shape[0] not in (1, batch) or mask.shape[3] not in (1, keys) or 0 in mask.shape:
        return None
    if any(mask.shape[i] != 1 and mask.stride(i) != 0 for i in (1, 2)) or is_differentiated(mask):
        return None
    mask = mask[:, 0, 0].expand(batch, keys)
    if mask.dtype == torch.bool:
        mask = mask.to(torch.float32).log_()  # 0 for True, -inf for False
    return mask if keys == 1 or mask.stride(1) == 1 else mask.contiguous()


def shared_key_bias(call: Call, mask: Tensor, key: Tensor, is_repeated: bool) -> Tensor | None:
    """``key_bias_of`` of the mask, once for all blocks. ``is_repeated``: whether the processor repeats a mask
    (B, 1 or Sq, Sk) for the heads."""
    is_whole = mask.dim() == 3 and mask.shape[2] == key.shape[1]  # a shorter one would be padded
    if is_repeated and (not is_whole or mask.dtype == torch.bool):
        return None

    def make(mask: Tensor) -> Tensor | None:
        return key_bias_of(mask.unsqueeze(1) if is_repeated else mask, key)

    return call.shared(("key bias", key.shape, key.dtype), mask, make)


# --------------------------------------------------------------------------------------------------
# Masks that differ between queries or heads, as KeyBlocks

# What was read from each BlockMask with a mask_mod: its lists were made by the mask_mod, so neither changes.
_read: Any = WeakIdKeyDictionary()


def blocks_of_block_mask(
    mask: Any, query: Tensor, key: Tensor, is_padded: bool = False
) -> KeyBlocks | str:
    """A BlockMask for query and key (B, S, H, d), or why it cannot be read, as a clause. That of a mask_mod
    is read once, which waits for the device. ``is_padded``: whether it is for whole blocks of both."""
    lengths = query.shape[1], key.shape[1]
    if is_padded:
        lengths = tuple(-(-length // size) * size for length, size in zip(lengths, mask.BLOCK_SIZE))
    if tuple(mask.seq_lengths) != lengths:
        return "its BlockMask is for other lengths"
    (batch, heads), samples = mask.kv_num_blocks.shape[:2], query.shape[0]
    if batch not in (1, samples) or heads not in (1, query.shape[2]):
        return "its BlockMask is for other samples or heads"
    if mask.kv_num_blocks.device != query.device:
        return "its BlockMask is on another device"
    if not has_mask_mod(mask) or torch.compiler.is_compiling():
        return read_block_mask(mask)
    found = _read.get(mask)
    if found is None or found[0] is not mask.mask_mod:
        _refuse_to_capture()
        found = mask.mask_mod, read_block_mask(mask)
        if not _is_captured(key):
            _read[mask] = found
    blocks = found[1]
    if isinstance(blocks, str) or blocks.key_bounds.shape[2] == query.shape[1]:
        return blocks
    bounds = blocks.key_bounds[:, :, : query.shape[1]].contiguous()
    return blocks._replace(key_bounds=bounds)


def blocks_of_mask(mask: Any, query: Tensor, key: Tensor) -> KeyBlocks | None:
    """A mask (B or 1, H or 1, Sq or 1, Sk) for query and key (B, S, H, d), if the keys that each query
    attends to are an interval. Waits for the device, so not in compiled code and while a graph is captured.
    """
    sizes = query.shape[0], query.shape[2], query.shape[1]
    if (
        torch.compiler.is_compiling()
        or type(mask) is not Tensor  # a tracer's has no values
        or mask.device != key.device
        or mask.dtype not in (torch.bool, torch.float32, key.dtype)
        or mask.dim() != 4
        or mask.shape[3] != key.shape[1]
        or any(given not in (1, size) for given, size in zip(mask.shape, sizes))
        or mask.numel() == 0
        or is_differentiated(mask)
        or _is_captured(key)
    ):
        return None
    _refuse_to_capture()
    for dim in (0, 1):
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    bounds = bounds_of_mask(mask)
    if bounds is None:
        return None
    shape = *bounds.shape[:2], query.shape[1], 2
    return KeyBlocks(key_bounds=bounds.expand(shape).contiguous())


def shared_blocks(
    call: Call, mask: Tensor, query: Tensor, key: Tensor, heads: int, is_repeated: bool
) -> KeyBlocks | None:
    """``blocks_of_mask`` for query and key (B, S, H * d), once for all blocks. None outside of a forward in
    which they share it. ``is_repeated``: see ``shared_key_bias``."""
    if call.state is None or (is_repeated and (mask.dim() != 3 or mask.dtype == torch.bool)):
        return None
    query, key = (x.unflatten(2, (-1, query.shape[2] // heads)) for x in (query, key))

    def make(mask: Tensor) -> KeyBlocks | None:
        return blocks_of_mask(mask.unsqueeze(1) if is_repeated else mask, query, key)

    return call.shared(("blocks", query.shape, key.shape, key.dtype), mask, make)


def _is_captured(x: Tensor) -> bool:
    """Whether a user captures a CUDA graph."""
    return x.is_cuda and not is_capturing() and torch.cuda.is_current_stream_capturing()


def _refuse_to_capture() -> None:
    """Ends a capture by this package, so that the call runs without a graph: what a mask allows is decided
    by its values, and may be another at a replay."""
    if is_capturing():
        raise RuntimeError("attention reads the values of a mask that differs between queries")
