"""This package's attention as an attention backend of diffusers.

diffusers' registry of backends is closed. A member of its Enum and the entries of the registry are added when
a user asks for them. They stay for the process, because models may have chosen the backend by then.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import operations
from ...operations.conditions import attention_takes, kernels_run_on
from ...operations.key_blocks import KeyBlocks, causal_bounds, is_block_mask
from ..core.checks import class_name, look_up_libraries
from ..parallel.exchange import attend_in_parallel, config_of, config_of_model
from .decision import (
    BACKEND_NAME,
    DISPATCH_MODULE,
    FLEX,
    MASK_DIFFERS,
    blocks_of_block_mask,
    blocks_of_mask,
    is_native,
    kernel_attention,
    key_bias_of,
    why_not_arguments,
)

logger = logging.getLogger("h100_diffusers_kernels")
_logged: set[str] = set()
_TENSORS = "its tensors need PyTorch's attention"


def sdpa_of_tokens(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> Tensor:
    """PyTorch's attention of (B, S, H, d)."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return sdpa(query, key, value, attn_mask=mask, **options).transpose(1, 2)


def sdpa_with_bias(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """PyTorch's attention of (B, S, H, d) with a bias (B, Sk) of the keys."""
    mask = None if bias is None else bias[:, None, None].to(query.dtype)
    shares_keys = query.shape[2] != key.shape[2]
    result = sdpa_of_tokens(query, key, value, mask, scale=scale, enable_gqa=shares_keys)
    return result if out is None else out.copy_(result)


def register_attention_backend() -> str:
    """Registers this package's attention as an attention backend of diffusers.

    ``model.set_attention_backend("h100")`` and diffusers' ``attention_backend("h100")`` choose it then, also
    with ``torch.compile`` and under context parallelism with Ulysses, ring or both. It lasts for the process;
    a second call changes nothing. It takes a ``BlockMask``, as the backend "flex". What the kernel does not
    take runs PyTorch's attention, which is logged once for each reason: float32, a derivative, dropout, heads
    of more than 128 elements, and masks that differ between queries, unless each query attends to an interval
    of keys. With a ``BlockMask`` FlexAttention runs then.

    Returns:
        The backend's name, "h100".

    Raises:
        RuntimeError: if diffusers is not imported, or its backends have another form than the known one.

    Example::

        pipe.transformer.set_attention_backend(kernel.register_attention_backend())
    """
    dispatch = sys.modules.get(DISPATCH_MODULE)
    if dispatch is None:
        raise RuntimeError("register_attention_backend: diffusers must be imported first")
    names = getattr(dispatch, "AttentionBackendName", None)
    registry: Any = getattr(dispatch, "_AttentionBackendRegistry", None)
    if names is None or not hasattr(registry, "register"):
        raise RuntimeError(
            "register_attention_backend: this diffusers has no known registry of attention backends"
        )
    look_up_libraries()  # diffusers may be loaded after this package
    if BACKEND_NAME not in names._value2member_map_:
        member = str.__new__(names, BACKEND_NAME)
        member._name_, member._value_ = BACKEND_NAME.upper(), BACKEND_NAME
        type.__setattr__(names, member._name_, member)
        names._member_names_.append(member._name_)
        names._member_map_[member._name_] = names._value2member_map_[BACKEND_NAME] = member
        registry.register(member, constraints=[], supports_context_parallel=True)(dispatched)
    return BACKEND_NAME


def why_not_own_in_parallel(stand_in: Any) -> str | None:
    """Why an attention's own code cannot run under its model's context parallelism: it would attend to other
    tokens than this package's."""
    processor = getattr(stand_in.module(), "processor", None)
    config = config_of_model(stand_in.injection.model())
    splits_masks = getattr(stand_in.spec, "splits_masks", True)
    is_known = splits_masks and hasattr(processor, "_parallel_config")
    if processor is None or config is None or is_known:
        return None
    reason = "attends to this rank's tokens only" if splits_masks else "does not split the mask"
    return f"{class_name(processor)}: its own code {reason}, so it cannot run under context parallelism"


def run_own_in_parallel(run: Callable, stand_in: Any) -> Any:
    """``run()``, the own code of an attention. Under context parallelism it runs on this package's attention,
    as on ranks that run the kernels.

    Raises:
        RuntimeError: if it would attend to other tokens than these ranks do.
    """
    reason = why_not_own_in_parallel(stand_in)
    if reason is not None:
        raise RuntimeError(reason)
    config = config_of_model(stand_in.injection.model())
    processor: Any = getattr(stand_in.module(), "processor", None)
    if config is None or processor._attention_backend is not None or not is_native(processor, True):
        return run()
    names = sys.modules[DISPATCH_MODULE].AttentionBackendName
    processor._attention_backend = names(register_attention_backend())
    try:
        return run()
    finally:
        processor._attention_backend = None


def dispatched(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
    call: Any = False,
) -> Any:
    """The backend: query, key and value are (B, S, H, d). ``call``: see ``kernel_attention``."""
    mask = attn_mask
    if isinstance(mask, Tensor) and mask.shape == (query.shape[0], key.shape[1]):
        mask = mask[:, None, None]  # a row of keys for each sample, as for the native backend
    config = config_of(_parallel_config)
    reason = why_not_arguments(dropout_p, scale)
    is_block = is_block_mask(mask)
    blocks: Any = None
    bias = None if mask is None or is_block or reason else key_bias_of(mask, key)
    if reason is None and (is_causal or (mask is not None and bias is None)):
        if config is not None:
            reason = (
                "it is causal" if is_causal else f"{MASK_DIFFERS}, or has another number of keys"
            )
        elif return_lse or (kernels_run_on(query) and attention_takes(query, key, value)):
            blocks = blocks_of(query, key, mask, is_causal)
            reason = blocks if isinstance(blocks, str) else None
        else:
            reason = _TENSORS
    if config is not None and (reason is not None or return_lse):
        reason = reason or "return_lse is True"
        raise ValueError(f"attention of {BACKEND_NAME!r} cannot be split between ranks: {reason}")

    def attention(q: Tensor, k: Tensor, v: Tensor, bias: Any, out: Tensor | None) -> Tensor:
        if kernels_run_on(q) and attention_takes(q, k, v):
            options = {"scale": scale, "key_bias": bias, "out": out, "blocks": blocks}
            return kernel_attention(call, q, k, v, **options)
        _log(_TENSORS)
        return sdpa_with_bias(q, k, v, bias, out, scale)

    if config is not None:
        return attend_in_parallel(config, query, key, value, bias, attention)
    if return_lse:
        if reason is not None:
            raise ValueError(f"attention of {BACKEND_NAME!r} has no return_lse: {reason}")
        options = {"scale": scale, "key_bias": bias, "blocks": blocks}
        return operations.attention(query, key, value, return_lse=True, **options)
    if reason is None:
        return attention(query, key, value, bias, None)
    _log(reason)
    if is_block:
        return FLEX.function(query, key, value, mask, scale=scale, enable_gqa=enable_gqa)
    if mask is not None and mask.shape[-1] == 1:  # PyTorch's kernels on GPUs read all keys
        mask = mask.expand(*mask.shape[:-1], key.shape[1]).contiguous()
    chosen = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    return sdpa_of_tokens(query, key, value, mask, enable_gqa=enable_gqa, **chosen)


def blocks_of(query: Tensor, key: Tensor, mask: Any, is_causal: bool) -> KeyBlocks | str:
    """A mask that differs between queries, or causal attention, for query and key (B, S, H, d); or why the
    kernel does not take it, as a clause."""
    if is_block_mask(mask):  # FlexAttention ignores ``is_causal`` beside it
        return blocks_of_block_mask(mask, query, key)
    if is_causal:
        if mask is not None:
            return "it is causal and has a mask"
        return KeyBlocks(key_bounds=causal_bounds(query.shape[1], query.device))
    return blocks_of_mask(mask, query, key) or MASK_DIFFERS


def _log(reason: str) -> None:
    if not torch.compiler.is_dynamo_compiling() and reason not in _logged:
        _logged.add(reason)
        logger.warning("attention backend %r runs PyTorch's attention: %s", BACKEND_NAME, reason)
