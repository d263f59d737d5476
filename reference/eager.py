"""The eager PyTorch expressions that the operations replace, as in diffusers and in users' code.

Each function has the name and signature of its operation. It defines the accuracy that the operation
must reach, the propagation of NaN and infinity, and the time to beat on the CPU.
"""

import math

import torch
import torch.nn.functional as F

from references import attended_keys, of_query_and_key, split_heads


def _is_mixed(x, *others):
    """Whether 16-bit rows have float32 operands: models then compute in float32, as diffusers' Wan."""
    return any(tensor is not None and tensor.dtype != x.dtype for tensor in others)


def rms_norm(x, weight=None, eps=1e-6):
    if _is_mixed(x, weight):
        return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def layer_norm(x, weight=None, bias=None, eps=1e-5):
    """In float32 as diffusers.models.normalization.FP32LayerNorm.forward"""
    if _is_mixed(x, weight, bias):
        weight, bias = (t if t is None else t.float() for t in (weight, bias))
        return F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _diffusers_rms_norm(x, weight, eps):
    """diffusers.models.normalization.RMSNorm.forward"""
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    n = x * torch.rsqrt(variance + eps)
    return n.to(x.dtype) if weight is None else n.to(weight.dtype) * weight


def _modulated(n, scale, shift):
    n = n if scale is None else n * (1 + scale)
    return n if shift is None else n + shift


def _sum(modulator, index):
    """A pair stands for its sum, and with an index a table (N, D) for a row for each token."""
    row, embedding = modulator if isinstance(modulator, tuple) else (None, modulator)
    if index is not None and embedding is not None:
        embedding = embedding.index_select(0, index.flatten()).reshape(*index.shape, -1)
    return embedding if row is None else row + embedding


def rms_norm_modulate(x, scale, shift=None, weight=None, eps=1e-6, *, index=None):
    scale, shift = _sum(scale, index), _sum(shift, index)
    if _is_mixed(x, scale, shift, weight):
        return _modulated(_diffusers_rms_norm(x.float(), weight, eps), scale, shift).to(x.dtype)
    return _modulated(_diffusers_rms_norm(x, weight, eps), scale, shift)


def layer_norm_modulate(x, scale, shift=None, weight=None, bias=None, eps=1e-6, *, index=None):
    scale, shift = _sum(scale, index), _sum(shift, index)
    if _is_mixed(x, scale, shift, weight, bias):
        return _modulated(layer_norm(x.float(), weight, bias, eps), scale, shift).to(x.dtype)
    return _modulated(layer_norm(x, weight, bias, eps), scale, shift)


def layer_norm_modulate_pair(
    x, scale, shift, second_scale, second_shift, weight=None, bias=None, eps=1e-6
):
    """diffusers.models.normalization.SD35AdaLayerNormZeroX.forward: one norm for both"""
    is_mixed = _is_mixed(x, scale, shift, second_scale, second_shift, weight, bias)
    n = layer_norm(x.float() if is_mixed else x, weight, bias, eps)
    return (
        _modulated(n, scale, shift).to(x.dtype),
        _modulated(n, second_scale, second_shift).to(x.dtype),
    )


def gated_residual(
    residual,
    x,
    gate=None,
    *,
    addend=None,
    x_weight=None,
    x_eps=None,
    tanh_gate=False,
    index=None,
):
    gate = _sum(gate, index)
    x = x if addend is None else x + addend
    x = x if x_eps is None else rms_norm_modulate(x, None, None, x_weight, x_eps)
    gate = gate.tanh() if tanh_gate and gate is not None else gate
    if _is_mixed(x, gate):
        return (residual.float() + x * gate).to(residual.dtype)
    return residual + x if gate is None else residual + gate * x


def gated_residual_rms_norm_modulate(
    residual, x, gate=None, scale=None, shift=None, weight=None, eps=1e-6, *, index=None, **branch
):
    h = gated_residual(residual, x, gate, index=index, **branch)
    return h, rms_norm_modulate(h, scale, shift, weight, eps, index=index).to(x.dtype)


def gated_residual_layer_norm_modulate(
    residual,
    x,
    gate=None,
    scale=None,
    shift=None,
    weight=None,
    bias=None,
    eps=1e-6,
    *,
    index=None,
    **branch,
):
    h = gated_residual(residual, x, gate, index=index, **branch)
    return h, layer_norm_modulate(h, scale, shift, weight, bias, eps, index=index)


def gated_residual_layer_norm_modulate_pair(residual, x, gate, *modulations, **options):
    h = gated_residual(residual, x, gate)
    return h, *layer_norm_modulate_pair(h, *modulations, **options)


def group_norm(
    x, num_groups, weight=None, bias=None, eps=1e-5, channel_bias=None, activation="none"
):
    """diffusers.models.resnet.ResnetBlock2D's norms, with the time embedding added and SiLU after it."""
    if _is_mixed(x, weight, bias, channel_bias):
        weight, bias, added = (t if t is None else t.float() for t in (weight, bias, channel_bias))
        out = group_norm(x.float(), num_groups, weight, bias, eps, added, activation)
        return out.to(x.dtype)
    if channel_bias is not None:
        x = x + channel_bias.reshape(*channel_bias.shape, *[1] * (x.dim() - 2))
    n = F.group_norm(x, num_groups, weight, bias, eps)
    return F.silu(n) if activation == "silu" else n


def channel_rms_norm(
    x, weight=None, bias=None, eps=1e-6, scale=None, shift=None, activation="none"
):
    """diffusers' LTXVideoResnetBlock3d: norm over channels, modulation by the time step, SiLU. Weight and
    bias come after the norm, as in WanRMS_norm."""
    if _is_mixed(x, weight, bias, scale, shift):
        operands = (t if t is None else t.float() for t in (weight, bias, scale, shift))
        weight, bias, scale, shift = operands
        out = channel_rms_norm(x.float(), weight, bias, eps, scale, shift, activation)
        return out.to(x.dtype)
    places = [1] * (x.dim() - 2)
    n = _diffusers_rms_norm(x.movedim(1, -1), weight, eps)
    n = (n if bias is None else n + bias).movedim(-1, 1)
    scale, shift = (t if t is None else t.reshape(*t.shape, *places) for t in (scale, shift))
    n = _modulated(n, scale, shift)
    return F.silu(n) if activation == "silu" else n


def coordinate_tables(coordinates, frequencies, dim):
    """The float32 tables (1|B, S, dim) of diffusers' LTXVideoRotaryPosEmbed."""
    angles = (frequencies * coordinates.unsqueeze(-1)).transpose(-1, -2).flatten(2)
    cos = angles.cos().repeat_interleave(2, dim=-1)
    sin = angles.sin().repeat_interleave(2, dim=-1)
    padding = dim - cos.shape[-1]
    return F.pad(cos, (padding, 0), value=1.0), F.pad(sin, (padding, 0))


def apply_rotary_emb(x, cos, sin, layout):
    """diffusers.models.embeddings.apply_rotary_emb with real tables"""
    if layout == "interleaved":
        real, imag = x.unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.stack([-imag, real], dim=-1).flatten(-2)
    else:
        real, imag = x.unflatten(-1, (2, -1)).unbind(-2)
        rotated = torch.cat([-imag, real], dim=-1)
    return (x.float() * cos + rotated.float() * sin).to(x.dtype)


def _tables(rope, heads, head_dim, layout):
    """Cosine and sine as (1|B, S, 1|heads, head_dim)"""
    if hasattr(rope, "frequencies"):
        cos, sin = coordinate_tables(*rope, heads * head_dim)
        cos, sin = (table.unflatten(-1, (heads, head_dim)) for table in (cos, sin))
        if layout == "half":
            cos, sin = (torch.cat([table[..., ::2]] * 2, dim=-1) for table in (cos, sin))
        return cos, sin
    tables = (rope.real, rope.imag) if isinstance(rope, torch.Tensor) else rope
    return tuple(_by_element(table, head_dim, layout) for table in tables)


def _by_element(table, head_dim, layout):
    """One table; values per pair are repeated as in flash_attn.layers.rotary.apply_rotary_emb_torch."""
    if table.shape[-1] == head_dim // 2:
        if layout == "interleaved":
            table = table.repeat_interleave(2, dim=-1)
        else:
            table = torch.cat([table, table], dim=-1)
    table = table[None] if table.dim() == 2 else table
    return table.unflatten(-1, (-1, head_dim)) if table.dim() == 3 else table


def _norm_rope(x, weight, bias, rope, *, heads, norm, layout, eps):
    of_one_dtype = weight is None or weight.dtype == x.dtype
    normalized = rms_norm if of_one_dtype else _diffusers_rms_norm
    head_dim = x[0, 0].numel() // heads
    n = x.flatten(2)
    if norm == "across_heads":
        n = normalized(n, weight, eps)
    n = n.unflatten(-1, (-1, head_dim))
    if norm == "per_head":
        n = normalized(n, weight, eps)
    if norm == "layer_per_head":
        n = layer_norm(n, weight, bias, eps)
    if rope is not None:
        n = apply_rotary_emb(n, *_tables(rope, n.shape[2], head_dim, layout), layout)
    return n.reshape(x.shape).to(x.dtype)


qk_norm_rope = of_query_and_key(_norm_rope)


def qk_norm_rope_joined(*arguments, v, out, **options):
    """qk_norm_rope, whose results and v are copied to slices of joint buffers, as torch.cat does."""
    results = qk_norm_rope(*arguments, v=v, **options)
    return tuple(target.copy_(result) for target, result in zip(out, results, strict=True))


def rope(x, cos, sin=None, layout="interleaved"):
    head_dim = x.shape[3] if x.dim() == 4 else cos.shape[-1] * (2 if sin is None else 1)
    n = x.reshape(*x.shape[:2], -1, head_dim)
    tables = _tables(cos if sin is None else (cos, sin), n.shape[2], head_dim, layout)
    return apply_rotary_emb(n, *tables, layout).reshape(x.shape)


def rope_3d(x, frame, height, width, layout="interleaved"):
    """The grid's tables expanded to (S, 1, d), as in diffusers' Wan and CogVideoX transformers."""
    grid = [axis[0].shape[0] for axis in (frame, height, width)]

    def table(field):
        axes = (
            frame[field][:, None, None],
            height[field][None, :, None],
            width[field][None, None, :],
        )
        pairs = torch.cat([axis.expand(*grid, -1) for axis in axes], dim=-1).flatten(0, 2)
        if layout == "interleaved":
            return pairs.repeat_interleave(2, dim=-1)[:, None]
        return torch.cat([pairs, pairs], dim=-1)[:, None]

    return apply_rotary_emb(x, table(0), table(1), layout)


def softmax(x):
    return F.softmax(x, dim=-1)


def attention(
    q,
    k,
    v,
    *,
    scale=None,
    key_bias=None,
    key_lengths=None,
    heads=None,
    gate=None,
    addend=None,
    return_lse=False,
    blocks=None,
):
    """Blocks are a mask."""
    options = {"scale": scale, "key_bias": key_bias, "key_lengths": key_lengths, "gate": gate}
    options["blocks"] = blocks
    if return_lse:
        by_head = (q, k) if heads is None else split_heads(heads, q, k)
        out = attention(q, k, v, **options, heads=heads, addend=addend)
        return out, _log_sum_exp(*by_head, scale, key_bias, key_lengths, blocks)
    if heads is not None:
        q, k, v = split_heads(heads, q, k, v)
        out = attention(q, k, v, **options).flatten(2)
        return out if addend is None else out + addend
    mask = (
        None
        if key_bias is None
        else key_bias.to(q.dtype, copy=True, memory_format=torch.contiguous_format)[:, None, None]
    )
    if key_lengths is not None:
        padding = torch.arange(k.shape[1], device=k.device) >= key_lengths[:, None]
        k, v = (t.masked_fill(padding[:, :, None, None], 0) for t in (k, v))
        mask = q.new_zeros(padding.shape)[:, None, None] if mask is None else mask
        mask = mask.masked_fill(padding[:, None, None], -math.inf)
    if blocks is not None:
        mask = q.new_zeros(1, 1, 1, 1) if mask is None else mask
        mask = mask.masked_fill(
            ~attended_keys(blocks, q.shape[1], k.shape[1]).to(q.device), -math.inf
        )
    # Aligned, because PyTorch's own kernels have returned NaN for misaligned tensors.
    q, k, v = (t.clone(memory_format=torch.contiguous_format).transpose(1, 2) for t in (q, k, v))
    is_grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=is_grouped)
    if mask is not None:  # some PyTorch versions do not return 0 for a query without keys
        out = out.masked_fill((mask == -math.inf).all(-1, keepdim=True), 0)
    out = out.transpose(1, 2)
    if gate is not None:
        out = out * gate.to(q.dtype)[..., None]
    return out if addend is None else out + addend


def attention_int8(q, k, v, **options):
    return attention(q, k, v, **options)


def _log_sum_exp(q, k, scale, key_bias, key_lengths, blocks=None):
    keys = k.repeat_interleave(q.shape[2] // max(k.shape[2], 1), dim=2).permute(0, 2, 3, 1)
    scores = (q.transpose(1, 2) @ keys) * (q.shape[3] ** -0.5 if scale is None else scale)
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if key_bias is not None:
        scores = scores + key_bias[:, None, None]
    if key_lengths is not None:
        is_padding = torch.arange(k.shape[1], device=k.device) >= key_lengths[:, None]
        scores = scores.masked_fill(is_padding[:, None, None], -math.inf)
    if blocks is not None:
        scores = scores.masked_fill(
            ~attended_keys(blocks, q.shape[1], k.shape[1]).to(q.device), -math.inf
        )
    return scores.logsumexp(-1).transpose(1, 2)


def _biased(x, bias):
    return x if bias is None else x + bias


def _written(result, out):
    """Copies each result to its slice, as a concat does."""
    return result if out is None else out.copy_(result)


def gelu(x, approximate="none", bias=None, *, out=None):
    return _written(F.gelu(_biased(x, bias), approximate=approximate), out)


def silu(x, bias=None):
    return F.silu(_biased(x, bias))


def geglu(x, approximate="none", bias=None, *, activated="second"):
    hidden, gate = _biased(x, bias).chunk(2, dim=-1)
    if activated == "first":
        hidden, gate = gate, hidden
    return hidden * F.gelu(gate, approximate=approximate)


def swiglu(x, bias=None, *, activated="second", out=None):
    hidden, gate = _biased(x, bias).chunk(2, dim=-1)
    if activated == "first":  # as in diffusers' FLUX.2
        hidden, gate = gate, hidden
    return _written(hidden * F.silu(gate), out)
