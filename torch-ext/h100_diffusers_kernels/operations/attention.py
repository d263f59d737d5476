"""Attention."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention  # here, because users may replace it

from .._ops import add_op_namespace_prefix
from .calls import (
    MAX_INTEGER,
    OUT_GIVEN,
    count,
    fail,
    is_differentiated,
    kernel_call,
    number,
    plain_call,
    promoted,
    refuse_type,
    required,
    shown,
)
from .key_blocks import KeyBlocks, block_arguments

_MIN_SCALE, _MAX_SCALE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def _masked(q, k, v, key_bias, key_lengths, heads, is_attended=None):
    """Query, key and value by head and in a common dtype, a mask (B or 1, H or 1, Sq or 1, Sk) to add to the
    scores, and for each query (B or 1, Sq or 1, H or 1) whether it has keys. Without keys the mask is 0,
    because some of PyTorch's kernels give NaN. ``is_attended``: (B or 1, H or 1, Sq, Sk) or None."""
    if heads is not None:
        head_dim = q.shape[2] // heads
        q, k, v = (tensor.unflatten(2, (-1, head_dim)) for tensor in (q, k, v))
    q, k, v, key_bias = promoted(q, k, v, key_bias)  # PyTorch's kernels take a mask of q's dtype
    if key_bias is None and key_lengths is None and is_attended is None:
        return q, k, v, None, None
    mask = (q.new_zeros(k.shape[:2]) if key_bias is None else key_bias)[:, None, None]
    if key_lengths is not None:
        is_padding = torch.arange(k.shape[1], device=k.device) >= key_lengths[:, None]
        mask = mask.masked_fill(is_padding[:, None, None], -torch.inf)
        k, v = (tensor.masked_fill(is_padding[:, :, None, None], 0) for tensor in (k, v))
    if is_attended is not None:
        mask = mask.masked_fill(~is_attended, -torch.inf)
        is_read = is_attended.any(2)  # The kernel does not read other keys, which may be NaN.
        if is_read.shape[1] != 1:
            groups = k.shape[2], q.shape[2] // max(k.shape[2], 1)
            is_read = is_read.unflatten(1, groups).any(2)
        is_unread = ~is_read.transpose(1, 2)[..., None]
        k, v = (tensor.masked_fill(is_unread, 0) for tensor in (k, v))
    has_keys = (mask != -torch.inf).any(3)
    return q, k, v, mask.masked_fill(~has_keys[..., None], 0), has_keys.transpose(1, 2)


def _formula(
    q, k, v, scale, key_bias, key_lengths, heads, gate=None, addend=None, is_attended=None
):
    shape, dtype = q.shape, q.dtype
    q, k, v, mask, has_keys = _masked(q, k, v, key_bias, key_lengths, heads, is_attended)
    # PyTorch's fused kernels support neither forward mode nor vmap. With a mask, on CUDA, they do not accept
    # every length if it requires grad, and give wrong gradients of the query if it does not.
    # A comparison of symbolic sizes is no bool.
    options = {"attn_mask": mask, "scale": scale, "enable_gqa": bool(q.shape[2] != k.shape[2])}
    differentiated = () if mask is None else (q, k, v, mask)
    with sdpa_kernel(SDPBackend.MATH) if is_differentiated(*differentiated) else nullcontext():
        out = scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), **options)
    out = out.transpose(1, 2)
    if has_keys is not None:
        out = out.masked_fill(~has_keys[..., None], 0)
    if gate is not None:
        out = out.float() * gate[..., None]
    out = out.reshape(shape)
    if addend is not None:
        out = out.float() + addend
    return out.to(dtype)


def _formula_with_lse(
    q, k, v, scale, key_bias, key_lengths, heads, gate=None, addend=None, is_attended=None
):
    out = _formula(q, k, v, scale, key_bias, key_lengths, heads, gate, addend, is_attended)
    q, k, _, mask, has_keys = _masked(q, k, v, key_bias, key_lengths, heads, is_attended)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    queries, keys = q.float().transpose(1, 2), k.float().permute(0, 2, 3, 1)
    if q.shape[2] != k.shape[2]:
        keys = keys.repeat_interleave(q.shape[2] // max(k.shape[2], 1), dim=1)
    scores = queries @ keys * scale
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(3).transpose(1, 2)
    if has_keys is not None:
        lse = lse.masked_fill(~has_keys, -torch.inf)
    return out, lse.contiguous()


def _formula_of_blocks(q, k, v, scale, key_bias, key_lengths, heads, gate, addend, *blocks):
    counts, indices, full_counts, full_indices, query_rows, key_rows, key_bounds = blocks
    block_size = query_rows, key_rows
    key_blocks = KeyBlocks(counts, indices, full_counts, full_indices, block_size, key_bounds)
    is_attended = key_blocks.is_attended(q.shape[1], k.shape[1]).to(q.device)
    return _formula_with_lse(
        q, k, v, scale, key_bias, key_lengths, heads, gate, addend, is_attended
    )


_attention = kernel_call("attention", _formula)
_attention_lse = kernel_call("attention", _formula_with_lse, "attention_lse")
_attention_out = plain_call("attention", "attention_out")
_attention_blocks = kernel_call("attention", _formula_of_blocks, "attention_blocks")


def _int8_formula(q, k, v, scale, *others):
    return _formula(q, k, v, scale, None, *others)


def _int8_formula_with_lse(q, k, v, scale, *others):
    return _formula_with_lse(q, k, v, scale, None, *others)


_attention_int8 = kernel_call("attention_int8", _int8_formula)
_attention_int8_lse = kernel_call("attention_int8", _int8_formula_with_lse, "attention_int8_lse")


def _scale_and_heads(operation, scale, heads):
    if scale is not None:
        scale = number(operation, "scale", scale, "a number or None")
        if not _MIN_SCALE <= scale <= _MAX_SCALE:
            fail(operation, f"scale must be positive and finite in float32, got {scale}")
    if heads is not None and (type(heads) is not int or not 0 < heads <= MAX_INTEGER):
        heads = count(operation, "heads", heads, "an integer or None")
    return scale, heads


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: Optional[float] = None,
    key_bias: Optional[Tensor] = None,
    key_lengths: Optional[Tensor] = None,
    heads: Optional[int] = None,
    gate: Optional[Tensor] = None,
    addend: Optional[Tensor] = None,
    out: Optional[Tensor] = None,
    return_lse: bool = False,
    blocks: Optional[KeyBlocks] = None,
) -> Any:
    """Attention: ``softmax(scale * q kᵀ + key_bias) v * gate + addend`` of each batch entry and head. Every
    query attends to every key, or to those of ``blocks``.

    Args:
        q: ``(B, Sq, H, d)``, bfloat16 or float16; d is a multiple of 8 up to 128; strided in any dimension
            except the last, such as a view of a packed projection.
        k, v: ``(B, Sk, Hk, d)``, likewise, of q's dtype. H is a multiple of Hk, and query head ``h``
            attends to key head ``h // (H // Hk)`` (grouped-query attention).
        scale: positive and finite; None for ``1 / sqrt(d)``.
        key_bias: ``(B, Sk)``, float32 or of q's dtype, or None; added to the scores of every head and
            query. -inf masks a key. A query whose keys are all masked gives zeros.
        key_lengths: ``(B,)``, int32, contiguous, or None. Keys from ``key_lengths[b]`` on are skipped;
            their contents, even NaN, have no effect. Lengths are read on the device and clamped to
            ``0 ... Sk``. A batch entry without keys gives zeros.
        heads: H, if q is ``(B, Sq, H * d)`` and k and v are ``(B, Sk, Hk * d)``, as linear layers return
            them; otherwise None.
        gate: ``(B, Sq, H)``, float32 or of q's dtype, or None; strided. A factor of each query and head.
        addend: of q's shape and dtype, or None; strided like q. Added before the result is rounded, such as
            the attention of the same queries to other keys.
        out: of q's shape and dtype, or None. On CUDA an ``out`` whose heads are not all aligned to 16 bytes
            needs temporary memory of its size.
        return_lse: also return ``lse``, the logarithm of the sum of the exponentials of each query's scores,
            ``log(sum(exp(scale * q kᵀ + key_bias)))``. A query without keys has -inf. ``gate`` and ``addend``
            have no effect on it. It needs ``out`` None.
        blocks: a `KeyBlocks`, the keys that each query attends to, or None for all. A query without keys
            gives zeros. Keys that no query of a block attends to are not read. It needs ``out`` None, and
            at most 2²³ keys.

    Returns:
        A tensor of q's shape, contiguous, or ``out``. With ``return_lse`` ``(out, lse)``, where ``lse`` is
        ``(B, Sq, H)``, float32, contiguous.

    With ``lse``, results for parts of the keys can be merged, for example those of several GPUs: the weight
    of a part is ``exp(lse - total)``, where ``total`` is the logsumexp of the ``lse`` of all parts. With
    ``return_lse`` the backward needs memory for all scores in float32.

    On CUDA the softmax probabilities are rounded to 16 bits for the tensor cores. bfloat16 inputs with at
    least 1024 queries, at least 257 keys and no bias use float16, which has eight times the precision of
    bfloat16. This needs temporary memory of v's size, for v in float16. Queries that exceed float16's range
    are recomputed in bfloat16.

    Source: Vaswani et al., 2017, https://arxiv.org/abs/1706.03762; in one pass over the keys as in
    Dao et al., 2022, https://arxiv.org/abs/2205.14135.
    """
    scale, heads = _scale_and_heads("attention", scale, heads)
    arguments = q, k, v, scale, key_bias, key_lengths, heads, gate, addend
    if return_lse is not False or blocks is not None:
        if type(return_lse) is not bool:
            refuse_type("attention", "return_lse", "True or False", return_lse)
        if out is not None:
            option = "return_lse" if return_lse else "blocks"
            fail("attention", f"out must be None with {option}, got {shown(out)}")
        if blocks is None:
            return _attention_lse(*arguments)
        result, lse = _attention_blocks(*arguments, *block_arguments("attention", blocks))
        return (result, lse) if return_lse else result
    if out is None:
        return _attention(*arguments)
    return _attention_out(*arguments, out, written=out, refused=OUT_GIVEN)


def attention_int8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: Optional[float] = None,
    key_lengths: Optional[Tensor] = None,
    heads: Optional[int] = None,
    gate: Optional[Tensor] = None,
    addend: Optional[Tensor] = None,
    return_lse: bool = False,
) -> Any:
    """Attention in 8 bits, not causal: ``softmax(scale * q kᵀ) v * gate + addend`` of each batch entry and
    head, with INT8 query and key, and E4M3 value and probabilities.

    Args:
        q, k, v, scale, key_lengths, heads, gate, addend, return_lse: as in `attention`.

    Returns:
        As `attention`, and of q's dtype.

    Inputs are 16-bit; the operation quantizes them, in temporary memory. Each group of values that shares a
    scale is divided by it and rounded to nearest even, and the largest magnitude of the group becomes 127 in
    INT8 and 448 in E4M3. Of a batch entry and head:

    - the query has a scale for each token;
    - the key has a scale for the tokens of each tile of 128 with equal ``token % 8 // 2``. The mean over the
      tokens, on CUDA over a sample of at least 512, is rounded to the dtype and subtracted first. It adds the
      same to all scores of a query, so the softmax does not change. ``lse`` is corrected for it;
    - query and key are multiplied by a Hadamard matrix of 128 columns before they are rounded. This leaves
      their product, and spreads channels that are larger than others over all;
    - the value has a scale for each channel;
    - the exponentials of a query are rounded relative to a number of the kernel's choice, and summed after
      the rounding, in float32. On CUDA half of them are interpolated between powers of 2, and sums over 128
      keys have the 14 bits of FP8 tensor cores.

    Keys from ``key_lengths[b]`` on have no effect on means and scales. A NaN or an infinity in a query makes
    the query's result NaN. One in a key makes all results of its batch entry and head NaN, and one in a value
    those of its channel.

    For scores with a standard deviation of up to 6 nats, the relative L2 error against float64 is 0.03 to
    0.045, about 25 times that of `attention` with bfloat16. If one key takes half of a row it is 0.045 at
    32,760 keys and 0.056 at 75,600. Scores of a range that no model has leave too few of the 8 bits: 0.13 if
    they jump by 100 nats once, up to 1.3 if they rise by 20 nats every 128 keys. Attention of tensors that
    FP8 linear layers have computed has an error of 0.05 to 0.16, of which 8 bits add 4 to 20%.

    Backward, forward-mode derivatives and transforms of ``torch.func`` use the formula of `attention`,
    without rounding.

    Source: SageAttention 2, Zhang et al., 2024, https://arxiv.org/abs/2411.10958: INT8 with a scale for the
    tokens of each thread's fragment, smoothed keys, FP8 values with a scale for each channel. QuaRot,
    Ashkboos et al., 2024, https://arxiv.org/abs/2404.00456: the rotation.
    """
    scale, heads = _scale_and_heads("attention_int8", scale, heads)
    arguments = q, k, v, scale, key_lengths, heads, gate, addend
    if return_lse is False:
        return _attention_int8(*arguments)
    if return_lse is not True:
        refuse_type("attention_int8", "return_lse", "True or False", return_lse)
    return _attention_int8_lse(*arguments)


@torch.library.register_fake(add_op_namespace_prefix("attention"))
def _attention_fake(q, k, v, *_):
    required(k, v)
    return q.new_empty(q.shape)


def _fake_lse(q, heads):
    """Of a q with any number of dimensions, which the kernel checks."""
    count = (*q.shape[2:], 1)[0] if heads is None else heads
    return q.new_empty((*q.shape[:2], count), dtype=torch.float32)


@torch.library.register_fake(add_op_namespace_prefix("attention_blocks"))
@torch.library.register_fake(add_op_namespace_prefix("attention_lse"))
def _attention_lse_fake(q, k, v, _scale, _bias, _lengths, heads, *_):
    required(k, v)
    return q.new_empty(q.shape), _fake_lse(q, heads)


@torch.library.register_fake(add_op_namespace_prefix("attention_int8"))
def _attention_int8_fake(q, k, v, *_):
    required(k, v)
    return q.new_empty(q.shape)


@torch.library.register_fake(add_op_namespace_prefix("attention_int8_lse"))
def _attention_int8_lse_fake(q, k, v, _scale, _lengths, heads, *_):
    required(k, v)
    return q.new_empty(q.shape), _fake_lse(q, heads)


@torch.library.register_fake(add_op_namespace_prefix("attention_out"))
def _attention_out_fake(q, k, v, *_):
    required(q, k, v)
